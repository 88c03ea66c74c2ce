"""What a function promises beside its values: every spelling, in place, `out=`, errors, cost, range, gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..choreography.ledger import Profile
from ..errors import RangeExceededError, SectorchError
from ..session import Session
from ..tensor import Scheme, SharedTensor
from ..tensor.table import IN_PLACE, row_of
from .calls import (
    FOREIGN,
    OUT_OF_RANGE,
    RIGHT,
    WRONG,
    Allowed,
    Call,
    compared,
    copied,
    in_parts,
    judged,
    lines,
    listed,
    revealed,
    secret,
    widened,
)

STRETCHED = (2.0**-6, 1 - 2.0**-12)
"""The largest operand is made this part of the activation limit, to see what a function does with large ones."""

SATURATED = 0.02
"""A part of the largest true value by which a result may be off there; what has wrapped around is off by all of it."""


def spellings(f: Callable) -> list[Callable]:
    """The function, and others that the table computes as it: its method, its aliases, its in-place forms."""
    row = row_of(f)
    return list(dict.fromkeys([f, *([] if row is None else [*row.keys, *row.in_place])]))


def problems_of_spellings(f: Callable, call: Call, session: Session, allowed: Allowed) -> Iterator[str]:
    """Each spelling that takes these arguments in plain is right, or refused; what is in place is written."""
    for other in spellings(f):
        outcome = judged(other, call, session, allowed)
        if outcome.kind in (WRONG, FOREIGN):
            yield f"{call.text(other)}: {outcome.kind}: {outcome.text}"
        if outcome.kind == RIGHT and other in IN_PLACE and call.args:
            yield from _in_place(other, call, session)


def _in_place(f: Callable, call: Call, session: Session) -> Iterator[str]:
    given = secret(call, session)
    if not isinstance(given.args[0], SharedTensor):
        return
    result = given.on(f)
    if f is not torch.Tensor.__setitem__ and result is not given.args[0]:
        yield f"{call.text(f)}: in place, it gives another tensor than its first argument"
    elif not torch.equal(given.args[0].reveal(), revealed(given.args[0] if result is None else result)):
        yield f"{call.text(f)}: in place, its first argument does not hold the result"


def problems_of_out(f: Callable, call: Call, session: Session) -> Iterator[str]:
    """`out=` is refused before anything is sent: what is secret is not written into memory that is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            leaves = pytree.tree_leaves(call.mapped(copied).on(f))
            given = [torch.zeros_like(leaf) for leaf in leaves]
            out = given[0] if len(given) == 1 else tuple(given)
            plain = call.mapped(copied)
            if f(*plain.args, **plain.kwargs, out=out) is NotImplemented:
                return
        except Exception:
            return  # it has no such argument
    for leaf in given:
        leaf.zero_()
    at = secret(call, session)
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
    """What the plain function refuses is refused by a typed error with a text, and nothing is sent."""
    for bad in _bad(call):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                bad.mapped(copied).on(f)
                continue
            except Exception:
                pass
            yield from refused(f, bad, session)


def refused(f: Callable, call: Call, session: Session, kind: type[Exception] = SectorchError) -> Iterator[str]:
    """A call that must be refused."""
    try:
        given = secret(call, session)
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
    """The call with tensors of shapes that do not fit, and without its last argument."""
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
    """A run on shapes alone has the messages of the real one."""
    ledgers = []
    for at in (session, dry):
        with Profile() as profile:
            try:
                result = secret(call, at).on(f)
                for leaf in pytree.tree_leaves(result):
                    revealed(leaf)
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
    """Where operands are large a result is right or withheld, and never a number that has wrapped around."""
    sizes = [float(v.abs().max()) for v in call.tensors if v.is_floating_point() and v.numel()]
    if not sizes or not max(sizes) > 0:
        return
    for part in STRETCHED:
        factor = part * Scheme().activation_limit / max(sizes)
        large = call.mapped(lambda v, k=factor: v * k if isinstance(v, torch.Tensor) and v.is_floating_point() else v)
        near = lambda exact: SATURATED * exact.abs().max().clamp(min=1.0)
        outcome = judged(f, large, session, near, reference=reference)
        if outcome.kind == OUT_OF_RANGE:  # torch's result cannot be held: ours has to be withheld
            try:
                found = [in_parts(revealed(leaf)) for leaf in pytree.tree_leaves(secret(large, session).on(f))]
            except SectorchError:
                continue
            like = [in_parts(leaf) for leaf in pytree.tree_leaves(large.mapped(widened).on(reference or f))]
            wide = lambda v: v.to(torch.float64) if isinstance(v, torch.Tensor) else v
            outcome = compared(tuple(map(wide, found)), [*map(wide, like)], [*map(wide, like)], near)
        if outcome.kind in (WRONG, FOREIGN):
            yield f"{large.text(f)}: beyond the range it is neither right nor withheld: {outcome.text}"


def problems_of_gradient(f: Callable, call: Call, reference: Callable | None) -> Iterator[str]:
    """The plain function's gradient, where it has one, is the reference's, and that of differences."""
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
            return listed(g(*args, **call.kwargs))

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
            before, here, after = (float(_summed(through(f)(*m))) for m in moved)
            sides, along = ((here - before) / step, (after - here) / step), float((slope * direction).sum())
            off = max(min(sides) - along, along - max(sides))  # at a kink it may be anything between
            if off > 1e-3 * max(1.0, float(slope.abs().sum())):
                yield f"{call.text(f)}: its gradient for argument {at[i]} is off by {off:.3g} from that of differences"
                return


def _summed(result: Any) -> torch.Tensor:
    return torch.stack([y.double().sum() for y in pytree.tree_leaves(result) if y.is_floating_point()]).sum()


def _gradients(f: Callable, points: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Of the sum of all results; None where there is no gradient."""
    try:
        total = _summed(f(*points))
        found = torch.autograd.grad(total, points, allow_unused=True)
    except Exception:
        return None
    return [torch.zeros_like(x) if g is None else g for x, g in zip(points, found, strict=True)]
