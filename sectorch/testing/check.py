"""`check_op`: tests an operation against its reference and its stated properties, and what it reveals."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..choreography import Phase
from ..choreography.ledger import Profile
from ..choreography.net import Origins, Sent
from ..choreography.roles import STAR
from ..choreography.run.local import LocalRuntime
from ..config import Scheme
from ..errors import ArgumentError, RangeExceededError, SectorchError
from ..nn.module import reference as reference_of
from ..nn.module import secure
from ..ops.registry import REGISTERED, RegisteredOp
from ..session import Q, Session, members_of
from ..tensor import SharedTensor, share_tensor
from ..tensor.table import IN_PLACE, SHARES, row_of
from .calls import (
    FOREIGN,
    INVALID,
    OUT_OF_RANGE,
    REFUSED,
    RIGHT,
    WRONG,
    Allowed,
    Call,
    CallOutcome,
    as_tuple,
    call_name,
    compare_leaves,
    copy_leaf,
    in_parts,
    judge_call,
    lines,
    reveal_leaf,
    share_call,
    widen_leaf,
)
from .protocols import Finding, ProtocolFault, ProtocolReport

# `check_program`: checks that tensor code reveals the declared values and no others.


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_SKIPPED = (_PACKAGE, str(Path(torch.__file__).parent) + os.sep, "<")
_HOLDERS = f"{_PACKAGE}tensor{os.sep}holders.py"
_NO_VALUES = {("guard", "key"), ("garbled_pair", "point"), ("garbled_pair", "points")}
"""Whether a result was withheld; and random points of base oblivious transfers."""
_SHARED = f"{_PACKAGE}tensor{os.sep}shared.py"


@dataclass(frozen=True)
class RevealedValue:
    """A value that a function reveals: its receiver, shape, message and protocol, and the line of code."""

    to: str
    shape: tuple[int, ...]
    message: str
    inputs: tuple[str, ...]
    same: bool
    line: str

    def __str__(self) -> str:
        of = f"computed from {', '.join(self.inputs)}" if self.inputs else "that was computed"
        of = f"that is {', '.join(self.inputs)} itself" if self.same and self.inputs else of
        return f"{self.to} learns a value of shape {self.shape} {of} ({self.message}), at {self.line}"


class _RecordingRuntime(LocalRuntime):
    """All parties in this process; records each message by which a party learns a value."""

    def __init__(self, owners: Sequence[str]):
        super().__init__(members_of(1, Q.name, owners, STAR, None, False).parties)
        self.origins: Origins | None = None
        self.revealed: list[RevealedValue] = []

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if line.learner == line.dst and not (line.from_package and (line.protocol, line.label) in _NO_VALUES):
            self._note(line)
        return super().transfer(line, value)

    def _note(self, line: Sent) -> None:
        shape, where, frame = tuple(line.shape), "", sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _SHARED and code.co_name == "check_range":
                return  # this opens only whether a value left its range
            if code.co_filename == _SHARED and code.co_name in ("reveal", "open"):
                with torch._C.DisableTorchFunctionSubclass():
                    shape = tuple(frame.f_locals["self"].shape)  # the shape without the flags of the range check
            if code.co_filename == _HOLDERS and code.co_name == "aggregate":
                shape = tuple(frame.f_locals["first"].shares.shape)
            if code.co_filename == _HOLDERS and code.co_name == "reveal_argmax":
                shape = tuple(frame.f_locals["x"].shares.shape[:-1])
            if not where and not code.co_filename.startswith(_SKIPPED):
                where = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        inputs, same, _ = (self.origins and self.origins.current) or (frozenset(), False, b"")
        names = tuple(sorted(name for _, name in inputs))
        self.revealed.append(RevealedValue(str(line.dst), shape, f"{line.label} of {line.path}", names, same, where))


def revealed_by(
    f: Callable, call: Call, owners: Sequence[str] = (), scheme: Scheme | None = None
) -> list[RevealedValue]:
    """The values that f reveals on a call's tensors, each shared by its owner, by default Q."""
    further = [name for name in dict.fromkeys(owners) if name not in ("Q", "A", "S")]
    noting = _RecordingRuntime(further)
    session = Session(owners=further, runtime=noting)
    session.origins = noting.origins = Origins()
    noting.revealed.clear()
    owned = iter([*owners, *[Q.name] * (len(call.tensors) - len(owners))])
    count = iter(range(len(call.tensors)))

    def share(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name, owner, plain = f"input {next(count)}", next(owned), leaf.detach()
        if plain.is_complex():
            parts = (part.contiguous() for part in (plain.real, plain.imag))
            return torch.complex(
                *(share_tensor(p, session=session, owner=owner, scheme=scheme, name=name) for p in parts)
            )
        return share_tensor(plain, session=session, owner=owner, scheme=scheme, name=name)

    call.map(share).on(f)
    return noting.revealed


def check_program(
    f: Callable,
    inputs: Any,
    *,
    reveals: Iterable[tuple[str, Sequence[int]]] = (),
    owners: Sequence[str] = (),
    scheme: Scheme | None = None,
) -> ProtocolReport:
    """Check that tensor code reveals the declared values and no others.

    The function runs once among three parties in this process, on these inputs, which are shared. A result in shares
    is not revealed. Each `reveal`, aggregate, opened result or message by which a party learns a value in it counts,
    whatever the function does with the value.

    Args:
        f: a function of tensors that may be `SharedTensor`s.
        inputs: a `Call`, a tensor or a tuple of arguments; all tensors are shared.
        reveals: exactly the values that f may reveal, each as its receiver ("Q", "A", "S", an owner) and its shape.
        owners: the owners of the tensors, in order; by default Q.
        scheme: the number representation.

    Returns:
        A report, if f reveals the declared values and nothing else.

    Raises:
        ProtocolFault: a value is revealed and not declared (the text has its receiver, shape, inputs and line), or
            declared and not revealed. An AssertionError.
        ArgumentError: more owners than tensors, or a wrong declaration.
        SectorchError: f itself is refused.

    Code that depends on a revealed value is checked for these inputs only, so give inputs of each kind. A session that
    f makes itself is not checked. All halves are in this process; f must not read them.
    """
    start, call = time.monotonic(), Call.of(inputs)
    if len(owners) > len(call.tensors):
        raise ArgumentError(f"{len(owners)} owners are named, of {len(call.tensors)} tensors")
    wanted = Counter(_parse_declaration(said) for said in reveals)
    found = revealed_by(f, call, owners, scheme)
    report = ProtocolReport(looked={"reveals": f"{len(found)} in {call_name(f)}, {wanted.total()} declared"})
    left = wanted.copy()
    for value in found:
        if left[value.to, value.shape]:
            left[value.to, value.shape] -= 1
        else:
            report.findings.append(Finding("reveals", f"{value}, which is not declared"))
    for to, shape in left.elements():
        report.findings.append(Finding("reveals", f"{to} is to learn a value of shape {shape}, which is not revealed"))
    report.seconds = time.monotonic() - start
    if report.findings:
        raise ProtocolFault(report)
    return report


def _parse_declaration(said: Any) -> tuple[str, tuple[int, ...]]:
    try:
        to, shape = said
        return str(to), tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        raise ArgumentError(
            f'a reveal is declared as who learns it and its shape, ("Q", (3,)); got {said!r:.80}'
        ) from None


# Properties besides the values: spellings, in-place forms, `out=`, errors, cost, range, gradients.

STRETCHED = (2.0**-6, 1 - 2.0**-12)
"""Parts of the activation limit to which the largest operand is scaled."""

SATURATED = 0.02
"""The allowed error with such operands, as a part of the largest true value; a wrapped result is off by all of it."""


def spellings(f: Callable) -> list[Callable]:
    """The function and its other forms in the table: method, aliases, in-place forms."""
    row = row_of(f)
    return list(dict.fromkeys([f, *([] if row is None else [*row.keys, *row.in_place])]))


def problems_of_spellings(f: Callable, call: Call, session: Session, allowed: Allowed) -> Iterator[str]:
    """Each form that takes these arguments in plain is right or refused, and an in-place form writes its argument."""
    for other in spellings(f):
        outcome = judge_call(other, call, session, allowed)
        if outcome.kind in (WRONG, FOREIGN):
            yield f"{call.text(other)}: {outcome.kind}: {outcome.text}"
        if outcome.kind == RIGHT and other in IN_PLACE and call.args:
            yield from _in_place(other, call, session)


def _in_place(f: Callable, call: Call, session: Session) -> Iterator[str]:
    given = share_call(call, session)
    if not isinstance(given.args[0], SharedTensor):
        return
    result = given.on(f)
    if f is not torch.Tensor.__setitem__ and result is not given.args[0]:
        yield f"{call.text(f)}: in place, it gives another tensor than its first argument"
    elif not torch.equal(given.args[0].reveal(), reveal_leaf(given.args[0] if result is None else result)):
        yield f"{call.text(f)}: in place, its first argument does not hold the result"


def problems_of_out(f: Callable, call: Call, session: Session) -> Iterator[str]:
    """`out=` is refused before anything is sent, since a secret must not go into plain memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            leaves = pytree.tree_leaves(call.map(copy_leaf).on(f))
            given = [torch.zeros_like(leaf) for leaf in leaves]
            out = given[0] if len(given) == 1 else tuple(given)
            plain = call.map(copy_leaf)
            if f(*plain.args, **plain.kwargs, out=out) is NotImplemented:
                return
        except Exception:
            return  # it has no such argument
    for leaf in given:
        leaf.zero_()
    at = share_call(call, session)
    with Profile() as profile:
        try:
            f(*at.args, **at.kwargs, out=out)
        except SectorchError:
            if profile.ledger:
                yield f"{call.text(f)} with out=: messages were sent before it was refused"
        except Exception as error:
            yield f"{call.text(f)} with out=: {type(error).__name__}: {error}, which is no SectorchError"
        else:
            yield f"{call.text(f)} with out=: it is not refused, and a secret cannot stay secret in plain memory"
    if any(bool((leaf != 0).any()) for leaf in given):
        yield f"{call.text(f)} with out=: a secret was written into plain memory"


def problems_of_errors(f: Callable, call: Call, session: Session) -> Iterator[str]:
    """A call that the plain function refuses is refused by a typed error with a text, and nothing is sent."""
    for bad in _bad(call):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                bad.map(copy_leaf).on(f)
                continue
            except Exception:
                pass
            yield from check_refusal(f, bad, session)


def check_refusal(f: Callable, call: Call, session: Session, kind: type[Exception] = SectorchError) -> Iterator[str]:
    """Check that a call is refused, before anything is sent."""
    try:
        given = share_call(call, session)
    except SectorchError:
        return
    with Profile() as profile:
        try:
            result = given.on(f)
            if result is not NotImplemented:
                yield f"{call.text(f)}: it is not refused with {kind.__name__}"
        except kind as error:
            if not str(error).strip():
                yield f"{call.text(f)}: {type(error).__name__} without a text"
        except TypeError as error:
            if isinstance(error, SectorchError) or kind is not SectorchError:
                yield f"{call.text(f)}: {type(error).__name__} instead of {kind.__name__}: {error}"
        except Exception as error:
            yield f"{call.text(f)}: {type(error).__name__} instead of {kind.__name__}: {error}"
    if profile.ledger:
        yield f"{call.text(f)}: messages were sent before it was refused"


def _bad(call: Call) -> Iterator[Call]:
    """The call with tensors of wrong shapes, and without its last argument."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            others = (torch.cat([leaf, leaf]) if leaf.dim() else leaf.reshape(1).expand(2), leaf.unsqueeze(0))
            for other in others:
                args, kwargs = pytree.tree_unflatten([other if j == i else v for j, v in enumerate(leaves)], spec)
                yield Call(*args, **kwargs)
    if len(call.args) > 1:
        yield Call(*call.args[:-1], **call.kwargs)


def problems_of_cost(f: Callable, call: Call, session: Session, dry: Session) -> Iterator[str]:
    """A dry run has the messages of the real one."""
    ledgers = []
    for at in (session, dry):
        with Profile() as profile:
            try:
                result = share_call(call, at).on(f)
                for leaf in pytree.tree_leaves(result):
                    reveal_leaf(leaf)
            except RangeExceededError:
                return
        ledgers.append(lines(profile))
    if ledgers[0] != ledgers[1]:
        measured, said = (len(ledger) for ledger in ledgers)
        other = next(
            (i for i, pair in enumerate(zip(*ledgers, strict=False)) if pair[0] != pair[1]), min(measured, said)
        )
        where = ledgers[0][other][1:3] if other < measured else ledgers[1][other][1:3]
        yield f"{call.text(f)}: its cost dry is not the measured one: {said} messages for {measured}, from {where} on"


def problems_of_range(f: Callable, call: Call, session: Session, reference: Callable | None) -> Iterator[str]:
    """With large operands a result is right or withheld, and never a wrapped number."""
    sizes = [float(v.abs().max()) for v in call.tensors if v.is_floating_point() and v.numel()]
    if not sizes or not max(sizes) > 0:
        return
    for part in STRETCHED:
        factor = part * Scheme().activation_limit / max(sizes)
        large = call.map(lambda v, k=factor: v * k if isinstance(v, torch.Tensor) and v.is_floating_point() else v)
        near = lambda exact: SATURATED * exact.abs().max().clamp(min=1.0)
        outcome = judge_call(f, large, session, near, reference=reference)
        if outcome.kind == OUT_OF_RANGE:  # torch's result does not fit the number format, so ours must be withheld
            try:
                found = [in_parts(reveal_leaf(leaf)) for leaf in pytree.tree_leaves(share_call(large, session).on(f))]
            except SectorchError:
                continue
            like = [in_parts(leaf) for leaf in pytree.tree_leaves(large.map(widen_leaf).on(reference or f))]
            wide = lambda v: v.to(torch.float64) if isinstance(v, torch.Tensor) else v
            outcome = compare_leaves(tuple(map(wide, found)), [*map(wide, like)], [*map(wide, like)], near)
        if outcome.kind in (WRONG, FOREIGN):
            yield f"{large.text(f)}: beyond the range it is neither right nor withheld: {outcome.text}"


def problems_of_gradient(f: Callable, call: Call, reference: Callable | None) -> Iterator[str]:
    """The plain function's gradient, if it has one, equals the reference's and that by differences."""
    if reference is None and getattr(f, "__module__", "").startswith(("torch", "builtins")):
        return
    at = [i for i, leaf in enumerate(call.args) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not at or any(isinstance(leaf, torch.Tensor) for leaf in call.kwargs.values()):
        return
    points = [call.args[i].detach().double().requires_grad_() for i in at]

    def through(g: Callable) -> Callable:
        def run(*moved: torch.Tensor) -> Any:
            args = list(call.args)
            for i, x in zip(at, moved, strict=True):
                args[i] = x
            return as_tuple(g(*args, **call.kwargs))

        return run

    found = _gradients(through(f), points)
    if found is None:
        return
    wanted = _gradients(through(reference), points) if reference is not None and reference is not f else found
    for i, (one, other) in enumerate(zip(found, wanted or [], strict=False)):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            off = float((one - other).abs().max())
            yield f"{call.text(f)}: its gradient for argument {at[i]} is off by {off:.3g} from the reference's"
            return
    with torch.no_grad():
        for i, (x, slope) in enumerate(zip(points, found, strict=True)):
            direction, step = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape), 1e-6
            moved = [[y + (s * step * direction if j == i else 0) for j, y in enumerate(points)] for s in (-1, 0, 1)]
            before, here, after = (float(_sum_of(through(f)(*m))) for m in moved)
            sides, along = ((here - before) / step, (after - here) / step), float((slope * direction).sum())
            off = max(min(sides) - along, along - max(sides))  # at a kink any slope between is right
            if off > 1e-3 * max(1.0, float(slope.abs().sum())):
                yield f"{call.text(f)}: its gradient for argument {at[i]} is off by {off:.3g} from that of differences"
                return


def _sum_of(result: Any) -> torch.Tensor:
    return torch.stack([y.double().sum() for y in pytree.tree_leaves(result) if y.is_floating_point()]).sum()


def _gradients(f: Callable, points: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The gradients of the sum of all results; None if there are none."""
    try:
        total = _sum_of(f(*points))
        found = torch.autograd.grad(total, points, allow_unused=True)
    except Exception:
        return None
    return [torch.zeros_like(x) if g is None else g for x, g in zip(points, found, strict=True)]


# Shrinking a failing call: tensors are cut to one element a dimension, and numbers made simpler.

TRIES = 200
"""The most calls that are tried."""


def smallest(call: Call, fails: Callable[[Call], bool]) -> Call:
    """Shrink a failing call as long as `fails` holds for a simpler one."""
    tries = 0
    simpler = True
    while simpler:
        simpler = False
        for other in _simpler(call):
            tries += 1
            if tries > TRIES:
                return call
            if fails(other):
                call, simpler = other, True
                break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    """Simpler calls, the simplest first."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def having(changed: dict[int, Any]) -> Call:
        args, kwargs = pytree.tree_unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return Call(*args, **kwargs)

    shapes = {tuple(leaves[i].shape) for i in at}
    for shape in shapes:  # tensors of one shape together, as an element-wise function takes them
        for dim, size in enumerate(shape):
            for start, length in ((0, 1), (size - 1, 1), (0, size // 2), (size // 2, size - size // 2)):
                if 0 < length < size:
                    same = [i for i in at if tuple(leaves[i].shape) == shape]
                    yield having({i: leaves[i].narrow(dim, start, length).clone() for i in same})
    for i in at:
        x = leaves[i]
        for dim, size in enumerate(x.shape):
            if size > 1:
                yield having({i: x.narrow(dim, 0, 1).clone()})
                yield having({i: x.narrow(dim, size - 1, 1).clone()})
        for changed in _plainer(x):
            yield having({i: changed})


def _plainer(x: torch.Tensor) -> Iterator[torch.Tensor]:
    if not x.is_floating_point() or not x.numel():
        return
    for other in (torch.zeros_like(x), torch.ones_like(x), x.round(), (x * 8).round() / 8, x.abs()):
        if not torch.equal(other, x) and _weight(other) < _weight(x):
            yield other


def _weight(x: torch.Tensor) -> float:
    """Fewer digits are simpler, and then fewer signs and smaller numbers."""
    digits = float(sum((x * 2.0**k != (x * 2.0**k).round()).sum() for k in range(0, 21, 4)))
    return digits * 1e6 + float((x < 0).sum()) + float((x != 0).sum()) + 1e-3 * float(x.abs().clamp(max=1e5).sum())


@dataclass(frozen=True)
class CheckedFunction:
    """A function with its reference. `error_of` and `refuses` raise AssertionError with a small failing call."""

    func: Callable
    allowed: Allowed
    reference: Callable | None
    domain: tuple[float, float]
    refusals: bool

    @cached_property
    def real(self) -> Session:
        return Session()

    @cached_property
    def ideal(self) -> Session:
        return Session(reference=True)

    @cached_property
    def dry(self) -> Session:
        return Session(dry=True)

    def error_of(self, call: Call) -> float:
        """Check all properties of a call, and return its largest error."""
        outcome = self._judge(call)
        if outcome.kind == INVALID:
            raise ArgumentError(
                f"there is no reference for {call.text(self.func)}: it does not run on plain tensors ({outcome.text}); "
                f"give reference=, or a sample that it takes"
            )
        bad = (WRONG, FOREIGN) if self.refusals else (WRONG, FOREIGN, REFUSED)
        if outcome.kind in bad:
            self._raise_smallest(call, outcome.kind)
        if outcome.kind != RIGHT:
            return 0.0
        for kind in (WRONG, FOREIGN):
            for which in self._patterns(call):
                if self._judge(call, which).kind == kind:
                    self._raise_smallest(call, kind, which)
        if row_of(self.func) is None or self.func in REGISTERED:
            self._reveals_nothing(call)
        for problems in self._problems():
            if next(problems(call), None) is not None:
                small = smallest(call, lambda c, p=problems: next(p(c), None) is not None)
                raise AssertionError(next(problems(small)))
        return outcome.error

    def _reveals_nothing(self, call: Call) -> None:
        """Check that an operation reveals nothing."""
        for value in revealed_by(self.func, call):
            raise AssertionError(
                f"{call.text(self.func)}: {value}: an operation reveals nothing; give its result back in shares, or "
                f"hold it to what it reveals with check_program(f, inputs, reveals=)"
            )

    def refuses(self, pair: Any) -> float:
        """Check that a call is refused; a pair also names the kind of the error."""
        pair = tuple(pair) if isinstance(pair, (tuple, list)) else (pair,)
        kind = pair[-1] if len(pair) > 1 and isinstance(pair[-1], type) else SectorchError
        call = Call.of(pair[0])
        if (said := next(check_refusal(self.func, call, self.real, kind), None)) is not None:
            raise AssertionError(said)
        return 0.0

    def _judge(self, call: Call, which: Callable = lambda i: True, at: Session | None = None) -> CallOutcome:
        return judge_call(self.func, call, at or self.real, self.allowed, which=which, reference=self.reference)

    def _raise_smallest(self, call: Call, kind: str, which: Callable = lambda i: True) -> None:
        small = smallest(call, lambda c: self._judge(c, which).kind == kind)
        outcome = self._judge(small, which)
        raise AssertionError(f"{small.text(self.func)}: {outcome.kind}: {outcome.text}")

    def _patterns(self, call: Call) -> list[Callable]:
        """Choices of the tensors that are shared, besides all of them."""
        return [lambda i: i == 0, lambda i: i > 0] if len(call.tensors) > 1 else []

    def _problems(self) -> Iterator[Callable[[Call], Iterator[str]]]:
        yield self._as_reference
        if len(spellings(self.func)) > 1:
            yield lambda c: problems_of_spellings(self.func, c, self.ideal, self.allowed)
        yield lambda c: problems_of_out(self.func, c, self.real)
        yield lambda c: problems_of_errors(self.func, c, self.real)
        yield lambda c: problems_of_cost(self.func, c, self.real, self.dry)
        if self.domain == (-float("inf"), float("inf")):
            yield lambda c: problems_of_range(self.func, c, self.ideal, self.reference)
        yield lambda c: problems_of_gradient(self.func, c, self.reference)

    def _as_reference(self, call: Call) -> Iterator[str]:
        """`sectorch.reference` has the bits of three parties; for a series, up to a unit in one value of many."""
        found, ideal = self._judge(call).found, self._judge(call, at=self.ideal).found
        row = row_of(self.func)
        unit = 0.0 if row is not None and row.exact else 2.0 ** -Scheme().frac_bits
        for one, other in zip(found, ideal, strict=False):
            if isinstance(one, torch.Tensor) and one.numel():
                off = (one.double() - other.double()).abs()
                if bool((off > unit).any()) or int((off > 0).sum()) > 1:
                    yield (
                        f"{call.text(self.func)}: three parties differ from the reference by {float(off.max()):.3g}; "
                        f"a result is a function of its operands, and of no draw"
                    )
                    return


SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 1, 65))


def check_op(
    func: Callable,
    samples: Iterable[Any] | None = None,
    *,
    error: float | Allowed | None = None,
    reference: Callable | None = None,
    errors: Iterable[Any] = (),
    refusals: bool = False,
    operands: int = 1,
    examples: int = 30,
    seed: int = 0,
    arguments: dict[str, Any] | None = None,
    elements: int = 1 << 16,
) -> float:
    """Check an operation against its reference and its stated properties, and return the largest error.

    An operation of `register_op` is checked over its whole domain. Examples have no, one, few or many elements, which
    are spread over the domain and dense at its ends and near zero. For each example the result of three parties has
    torch's shape and type, is within the stated error of the reference in float64, equals `sectorch.reference` bit for
    bit if it is exact, is the same from prepared material (up to a unit in the last place if it is not exact), and
    takes the stated rounds and bytes.

    Any function of secret tensors (the library's, a registered one, or one of yours) is checked on `samples`:

    - values, shapes and types are those of the plain call, with all tensors shared and with one alone;
    - a reference session gives the same bits;
    - every other form of the function is right, and an in-place form writes its argument;
    - `out=` is refused, and nothing is written;
    - a call that plain torch refuses is refused by a typed error before anything is sent;
    - a dry run has the messages of the real one;
    - nothing is revealed inside;
    - large operands give a right result or none;
    - a plain function of yours has the gradient of its reference.

    A failure is shown by a call that was made as small as possible.

    Args:
        func: a function of tensors.
        samples: `Call(x, dim=1)`, tensors, tuples of arguments, or samples of torch's `OpInfo`. Without them a
            registered function gets those of its domain.
        error: the allowed error, as a number or a function of the true result. The default is the registered one.
            Rounding to the result's type may add to it.
        reference: the function on plain tensors. The default is the registered reference, or the function itself.
        errors: calls that must be refused by a `SectorchError`, or pairs of a call and the error.
        refusals: whether a sample may be refused by a typed error.
        operands: the number of tensors that a registered function takes, all secret and of one shape.
        examples, seed: the number and the seed of the domain's examples.
        arguments: further arguments of a registered function, by name.
        elements: the most elements of a sample, of all its tensors together; it is computed about twenty times.

    Raises:
        ArgumentError: the function is not registered and has no samples or no error; it does not run on plain tensors
            and has no reference; a sample has too many elements.
        AssertionError: a property does not hold; the text names it and the call.
    """
    stated, given = REGISTERED.get(func), arguments or {}
    name, largest = getattr(func, "__name__", func), 0.0
    if samples is None:
        if stated is None:
            raise ArgumentError(
                f"{name} was not registered with sectorch.register_op; register it with its domain and error, or give "
                f"check_op samples=[Call(x, ...), ...] and error="
            )
        generator = torch.Generator().manual_seed(seed)
        largest = _over_domain(func, stated, generator, operands, examples, given)
        samples = [
            Call(*(_spread(shape, stated.domain, generator) for _ in range(operands)), **given)
            for shape in ((2, 3), ())
        ]
    allowed = stated.error if error is None and stated is not None else error
    if allowed is None:
        raise ArgumentError(
            f"check_op of {name} takes error=, how far a result may be off: a number, or a function of it"
        )
    calls = [Call.of(sample) for sample in samples]
    for call in calls:
        if (count := sum(x.numel() for x in call.tensors)) > elements:
            raise ArgumentError(
                f"a sample of {name} has {count} elements, above elements={elements}: too large for a check that "
                f"computes it some twenty times; give a smaller sample, or more elements="
            )
    true = reference or (None if stated is None else stated.reference)
    domain = (-math.inf, math.inf) if stated is None else stated.domain
    checked = CheckedFunction(func, allowed if callable(allowed) else lambda exact: allowed, true, domain, refusals)
    return max([largest, *map(checked.error_of, calls), *[checked.refuses(pair) for pair in errors]])


def _over_domain(
    func: Callable,
    stated: RegisteredOp,
    generator: torch.Generator,
    operands: int,
    examples: int,
    given: dict[str, Any],
) -> float:
    """Check a registered function of three parties on examples over its domain."""
    model = _OperationModel(func, given).eval()
    secured, largest = secure(model, session=Session()), 0.0
    for example in range(examples):
        shape = SHAPES[example % len(SHAPES)]
        x = torch.stack([_spread(shape, stated.domain, generator) for _ in range(operands)])
        with Profile() as profile:
            found = secured(x)
        largest = max(largest, _check_result(model, stated, x, found))
        _check_cost(stated, profile, found)
        secured.preprocess(operands, shape)
        again = secured(x)
        unit = 0.0 if SHARES.row_of[func].exact else 2.0 ** -Scheme().frac_bits
        near = bool(((again.double() - found.double()).abs() <= unit).all())
        _require(near, f"prepared and unprepared results differ for operands {x.tolist()}")
    return largest


class _OperationModel(nn.Module):
    """The operation as a model that takes its operands as the rows of its input."""

    def __init__(self, func: Callable, arguments: dict[str, Any]):
        super().__init__()
        self._func, self._arguments = func, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._func(*x.unbind(), **self._arguments)


def _check_result(model: _OperationModel, stated: RegisteredOp, x: torch.Tensor, found: torch.Tensor) -> float:
    like, exact = model(x), stated.reference(*x.double().unbind(), **model._arguments)
    _require(
        (found.shape, found.dtype) == (like.shape, like.dtype),
        f"the result is {tuple(found.shape)} of {found.dtype}, torch's {tuple(like.shape)} of {like.dtype}",
    )
    error = (found.double() - exact).abs()
    allowed = torch.as_tensor(stated.error(exact) if callable(stated.error) else stated.error).expand(error.shape)
    size = like.double().abs().nan_to_num(0, 0, 0)
    places = size * torch.finfo(like.dtype).eps if like.is_floating_point() else 0.0
    wrong = ~(error <= allowed + places)  # the result is rounded to torch's type; NaN is wrong
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
        raise AssertionError(
            f"for operands {x[(slice(None), *at)].tolist()} the result is {float(found[at])}, the reference "
            f"{float(exact[at])}: an error of {float(error[at]):.3g}, and {float(allowed[at]):.3g} is stated"
        )
    ideal = reference_of(model)(x).double()
    if SHARES.row_of[model._func].exact:
        _require(
            torch.equal(ideal, found.double()),
            f"it is said to be exact, and differs from the reference for {x.tolist()}",
        )
    inside = bool(((ideal - exact).abs() <= allowed + places).all())
    _require(inside, "sectorch.reference is not within the stated error")
    return float(error.max()) if error.numel() else 0.0


def _require(right: bool, said: str) -> None:
    if not right:
        raise AssertionError(said)


def _check_cost(stated: RegisteredOp, profile: Profile, found: torch.Tensor) -> None:
    """Check rounds and bytes, without sharing the operands, revealing the result and checking the range."""
    around = {"share", "reveal", "guard"}
    own = [m for m in profile.ledger if m.phase == Phase.ONLINE and m.protocol not in around]
    if stated.rounds is not None and own:
        waited = 1 + max(m.round for m in own) - min(m.round for m in own)
        _require(waited <= stated.rounds, f"{waited} rounds online, and {stated.rounds} are stated")
    if stated.bytes is not None and found.numel() >= 64:
        sent = sum(m.bytes for m in own) / found.numel()
        _require(sent <= stated.bytes, f"{sent:.2f} bytes online per element, and {stated.bytes} are stated")


def _spread(shape: tuple[int, ...], domain: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    """Multiples of a unit in the last place: all over the domain, at its ends, and near zero on a logarithmic scale."""
    scheme = Scheme()
    unit, limit = 2.0**-scheme.frac_bits, scheme.activation_limit - 1
    low, high = max(domain[0], -limit), min(domain[1], limit)
    count = torch.Size(shape).numel()
    anywhere = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    powers = 2.0 ** (-20 + 32 * torch.rand(count, generator=generator, dtype=torch.float64))
    signs = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0).double()
    ends = torch.where(torch.rand(count, generator=generator) < 0.5, low, high)
    kinds = torch.randint(4, (count,), generator=generator)
    x = torch.stack((anywhere, powers * signs, ends, low + powers), 1)[torch.arange(count), kinds]
    x = (x.clamp(low, high) / unit).round() * unit
    return x.clamp(_up(low, unit), -_up(-high, unit)).view(shape)


def _up(value: float, unit: float) -> float:
    """The next multiple of a unit."""
    return float(-(-value // unit) * unit)
