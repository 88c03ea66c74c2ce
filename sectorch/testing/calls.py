"""A call of a function on secret tensors, compared with the same call in plain."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..choreography.ledger import Profile
from ..deprecation import renamed_attribute
from ..errors import SectorchError
from ..ring import FRAC_BITS, range_limit
from ..session import Session
from ..tensor import ComplexShared, PrivateTensor, SecretTensor, SharedTensor, share_tensor
from ..tensor.table import row_of, spell

RIGHT, REFUSED, WRONG, FOREIGN, OUT_OF_RANGE, INVALID = (
    "right", "refused", "wrong", "foreign error", "out of range", "invalid",
)  # fmt: skip
Which = Callable[[int], bool]
"""Whether the i-th tensor of a call is shared."""

Allowed = Callable[[torch.Tensor], torch.Tensor | float]
"""The allowed error of each element, from the true result."""


class Call:
    """The arguments of a call: `Call(x, 2, dim=1)`. Tensors may stand in lists and tuples too."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, kwargs

    @classmethod
    def of(cls, sample: Any) -> Call:
        """Make a call from a call, a tensor, a tuple of arguments, or a sample of torch's `OpInfo`."""
        if isinstance(sample, Call):
            return sample
        if hasattr(sample, "input") and hasattr(sample, "args"):
            return cls(sample.input, *sample.args, **sample.kwargs)
        return cls(*sample) if isinstance(sample, tuple) else cls(sample)

    mapped = renamed_attribute("mapped", "map")

    def map(self, f: Callable[[Any], Any]) -> Call:
        """The call with f applied to every leaf of its arguments."""
        args, kwargs = pytree.tree_map(f, (self.args, self.kwargs))
        return Call(*args, **kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def on(self, f: Callable) -> Any:
        """Call f; an iterator is returned as a tuple."""
        return as_tuple(f(*self.args, **self.kwargs))

    def text(self, f: Callable) -> str:
        """The call as a user writes it."""
        written = lambda v: repr(v.tolist()) if isinstance(v, torch.Tensor) and v.dim() == 0 else repr(v)
        one = lambda v: " ".join(written(v).split())
        named = [f"{name}={one(value)}" for name, value in self.kwargs.items()]
        return f"{call_name(f)}({', '.join([*map(one, self.args), *named])})"

    def __repr__(self) -> str:
        return self.text(Call)


def call_name(f: Callable) -> str:
    """The name of a function as a user writes it: torch's with its module, others alone."""
    of_torch = row_of(f) is not None or (getattr(f, "__module__", None) or "torch").startswith("torch")
    return spell(f) if of_torch else getattr(f, "__name__", type(f).__name__)


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call: its kind, a text, the largest error, and the revealed results (`found`)."""

    kind: str
    text: str = ""
    error: float = 0.0
    found: tuple = ()


def as_tuple(result: Any) -> Any:
    """An iterator (`Tensor.__iter__`) as a tuple."""
    return tuple(result) if hasattr(result, "__next__") else result


def reveal_leaf(x: Any) -> Any:
    """The plain value of a result's leaf. A private tensor is added to a shared zero, since it has no `reveal`."""
    if isinstance(x, (SharedTensor, ComplexShared)):
        return x.reveal()
    if isinstance(x, PrivateTensor):
        zero = share_tensor(torch.zeros(x.shape, dtype=x.dtype), session=x.session)
        return (zero + x).reveal()
    return x


def lines(profile: Profile) -> list[tuple]:
    """The messages of a ledger without the session's own numbers: calls are numbered from 0."""
    calls: dict[int, int] = {}
    return [
        (calls.setdefault(m.call, len(calls)), m.path, m.label, m.src.name, m.dst.name, m.phase, m.round,
         tuple(m.shape), m.dtype, m.mask, m.shows)
        for m in profile.ledger
    ]  # fmt: skip


def share_call(call: Call, session: Session, which: Which = lambda i: True, dtype: torch.dtype | None = None) -> Call:
    """The call with its tensors shared, only those of `dtype` if it is given; the others are copied."""
    count = itertools.count()

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if dtype in (None, leaf.dtype) and which(next(count)):
            plain = leaf.detach()
            has_values = session.present(session.answering[0])  # a dry run shares shapes
            return _share(plain if has_values else torch.empty_like(plain, device="meta"), session)
        return leaf.detach().clone()

    return call.map(place)


def _share(plain: torch.Tensor, session: Session) -> Any:
    if plain.is_complex():
        parts = plain.real.contiguous(), plain.imag.contiguous()
        return torch.complex(*(share_tensor(part.detach(), session=session) for part in parts))
    return share_tensor(plain.detach(), session=session)


def copy_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def widen_leaf(leaf: Any) -> Any:
    """A copy in float64, or complex128."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    moved = leaf.is_floating_point() or leaf.is_complex()
    return leaf.detach().to(torch.promote_types(leaf.dtype, torch.float64)) if moved else leaf.detach().clone()


def in_parts(leaf: Any) -> Any:
    """A complex tensor as its real and imaginary parts; anything else unchanged."""
    complex_too = isinstance(leaf, torch.Tensor) and leaf.is_complex()
    return torch.view_as_real(leaf.resolve_conj()) if complex_too else leaf


def out_of_range(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return False
    return not bool(leaf.detach().abs().amax() < range_limit(FRAC_BITS))


def judge_call(
    function: Callable,
    call: Call,
    session: Session,
    allowed: Allowed,
    *,
    which: Which = lambda i: True,
    dtype: torch.dtype | None = None,
    reference: Callable | None = None,
    between: tuple[float, float] | None = None,
    wide: bool = True,
) -> CallOutcome:
    """Compare a call on secret tensors with the plain one: values in float64, shapes and dtypes of the plain call.

    Args:
        allowed: the allowed error, to which rounding to the result's dtype may add.
        which, dtype: the tensors to share; see `share_call`.
        reference: the exact function; by default the function itself.
        between: results outside are beyond the function's range, and not compared.
        wide: compare with the plain call in float64; else in the call's own dtypes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            typed = call.map(copy_leaf).on(function)
        except Exception as error:
            if reference is None:
                return CallOutcome(INVALID, f"torch itself: {error}")
            typed = call.map(copy_leaf).on(reference)
        torch.manual_seed(0)
        try:
            exact = call.map(widen_leaf).on(reference or function) if wide or reference else typed
        except Exception:  # the function does not take float64
            exact = typed
        try:
            result = share_call(call, session, which, dtype).on(function)
            found = tuple(in_parts(reveal_leaf(leaf)) for leaf in pytree.tree_leaves(result))
        except SectorchError as error:
            return CallOutcome(REFUSED, f"{type(error).__name__}: {error}")
        except Exception as error:
            return CallOutcome(FOREIGN, f"{type(error).__name__}: {error}")
    if result is NotImplemented:
        return CallOutcome(REFUSED, "NotImplemented, which Python makes a TypeError")
    like, true = ([in_parts(leaf) for leaf in pytree.tree_leaves(tree)] for tree in (typed, exact))
    if any(out_of_range(leaf) for leaf in (*like, *call.tensors)):
        return CallOutcome(OUT_OF_RANGE, "torch's result, or an operand, is not a number of the fixed-point range")
    tensors = [leaf for leaf in like if isinstance(leaf, torch.Tensor)]
    if between and any(bool(((leaf < between[0]) | (leaf > between[1])).any()) for leaf in tensors):
        return CallOutcome(OUT_OF_RANGE, "the result leaves the range")
    outcome = compare_leaves(found, like, true, allowed)
    if outcome.kind == RIGHT and not any(isinstance(y, SecretTensor) for y in pytree.tree_leaves(result)):
        return CallOutcome(RIGHT, "a plain result", outcome.error, found)
    return outcome


def compare_leaves(found: tuple, like: list[Any], true: list[Any], allowed: Allowed) -> CallOutcome:
    """Compare leaves with those of the plain call: shapes and dtypes with `like`, values with `true`."""
    if len(found) != len(like):
        return CallOutcome(WRONG, f"{len(found)} results instead of {len(like)}", found=found)
    worst = 0.0
    for output, value, exact in zip(found, like, true, strict=True):
        if not isinstance(value, torch.Tensor):
            if output != value:
                return CallOutcome(WRONG, f"{output!r} instead of {value!r}", found=found)
            continue
        if not isinstance(output, torch.Tensor) or output.shape != value.shape or output.dtype != value.dtype:
            return CallOutcome(WRONG, f"{describe_value(output)} instead of {describe_value(value)}", found=found)
        if not output.numel():
            continue
        exact = exact.to(torch.float64)
        error = (output.to(torch.float64) - exact).abs()
        places = exact.abs() * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        most = torch.as_tensor(allowed(exact), dtype=torch.float64).expand(error.shape) + places
        worst = max(worst, float(error.max()))
        wrong = ~(error <= most)  # NaN is wrong
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            place = f" at {list(at)}" if output.numel() > 1 else ""
            return CallOutcome(
                WRONG,
                f"the result{place} is {float(output[at]):.9g} instead of {float(exact[at]):.9g}: off by "
                f"{float(error[at]):.3g}, and {float(most[at]):.3g} is stated",
                worst, found,
            )  # fmt: skip
    return CallOutcome(RIGHT, "", worst, found)


def describe_value(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
