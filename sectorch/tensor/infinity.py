"""Numbers that stand for infinity (stand-ins), and the public mark of a shared tensor that may hold some.

Fixed point has no infinity, and no number from 2^(62 - 2 f) on. A public one that a program chooses (`masked_fill`,
`where`, a mask that is added) becomes a number of magnitude `size_of` in shares, beyond every activation. The tensor is
marked by an `Infinite`: the signs that may occur, and what they stand for. The mark is public, like a shape.
`ops/infinity.py` has the rules of the operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..config import Scheme
from ..errors import FixedPointRangeError
from ..ring import HEADROOM_BITS, range_limit
from .secret import SecretTensor

UNKNOWN = math.nan
"""The meaning of stand-ins that stand for several numbers, or for one that was not computed."""


@dataclass(frozen=True)
class Infinite:
    """The mark of a shared tensor that may hold stand-ins.

    Attributes:
        low, high: the meaning of the negative and of the positive stand-ins: an infinity, a public number beyond the
            range, or `UNKNOWN`; None if there are none.
        size: the magnitude of a stand-in if `exact`; otherwise a lower bound.
        threshold: between numbers and stand-ins: a lower bound of these, and above the magnitude of every number.
        exact: whether no stand-in was scaled or added to.
        at: public positions, boolean and of the tensor's shape, outside of which there are none; None if they may be
            anywhere.
        certain: whether each of these positions holds one.
        unchecked: shared summands of these stand-ins that have not been checked against the activation limit yet.
    """

    low: float | None = None
    high: float | None = None
    size: float = 0.0
    threshold: float = 0.0
    exact: bool = True
    at: torch.Tensor | None = None
    certain: bool = False
    unchecked: tuple[Any, ...] = ()

    def with_changes(self, **changes: Any) -> Infinite | None:
        """A copy with other attributes; None if no sign is left."""
        changed = replace(self, **changes)
        return None if changed.low is None and changed.high is None else changed

    @property
    def known(self) -> tuple[str, str, float, bool]:
        """The attributes that a program depends on."""
        return repr(self.low), repr(self.high), self.size, self.exact


def size_of(scheme: Scheme, dtype: torch.dtype) -> float:
    """The magnitude of stand-ins in a tensor of this dtype.

    Four times the activation limit, or less where a scale does not hold that; among whole numbers the largest one.
    """
    if not dtype.is_floating_point:
        return range_limit(scheme.frac_bits) - 1
    return min(4 * scheme.activation_limit, 2.0 ** (HEADROOM_BITS - 8 - 2 * scheme.frac_bits))


def mask_beyond_range(scheme: Scheme, value: Any) -> torch.Tensor | None:
    """A mask of the entries of a public operand that are beyond the range of fixed point; None if there are none."""
    limit = range_limit(scheme.frac_bits)
    if isinstance(value, (bool, complex, SecretTensor)):
        return None
    if isinstance(value, (int, float)):
        return torch.tensor(True) if abs(value) >= limit - 0.5 * 2.0**-scheme.frac_bits else None
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or value.is_complex() or value.is_quantized:
        return None
    if value.is_meta or value.layout != torch.strided or not value.numel():
        return None
    with torch._C.DisableTorchFunction():
        value = value.detach()
        found = (value >= limit) | (value <= -limit)
        return found if bool(found.any()) else None


def common_value(values: torch.Tensor) -> float | None:
    """The value that all entries have; `UNKNOWN` if they differ, None if there are none."""
    if not values.numel():
        return None
    first = float(values.flatten()[0])
    return first if bool((values == values.flatten()[0]).all()) else UNKNOWN


def _either(x: float | None, y: float | None) -> float | None:
    """The meaning of the stand-ins of two tensors together."""
    return y if x is None else x if y is None or x == y else UNKNOWN


def join_infinite(*parts: Infinite | None, at: torch.Tensor | None = None, certain: bool = False) -> Infinite | None:
    """The mark of a tensor that consists of elements of several tensors."""
    made: Infinite | None = None
    for part in parts:
        if part is None:
            continue
        if made is None:
            made = replace(part, at=None)
            continue
        made = replace(
            made,
            low=_either(made.low, part.low),
            high=_either(made.high, part.high),
            size=min(made.size, part.size),
            threshold=min(made.threshold, part.threshold),
            exact=made.exact and part.exact and made.size == part.size,
            unchecked=made.unchecked + part.unchecked,
        )
    return None if made is None else replace(made, at=at, certain=certain)


def infinite_of(x: Any) -> Infinite | None:
    """The mark of a tensor; None for a number, and for a tensor without stand-ins."""
    return getattr(x, "infinite", None) if isinstance(x, SecretTensor) else None


def refuse_infinite(x: Any, what: str) -> None:
    """Refuse a tensor that may hold stand-ins, for operations without a rule.

    Raises:
        FixedPointRangeError: x is marked.
    """
    if infinite_of(x) is not None:
        raise FixedPointRangeError(
            f"{what} takes no tensor that may hold infinities or numbers beyond the range; bound it first: "
            f"x.clamp(-1000, 1000)"
        )


def round_to_dtype(value: float, dtype: torch.dtype) -> float:
    """A number as a tensor of this dtype holds it: an infinity if it is too large."""
    return float(torch.tensor(value, dtype=dtype)) if dtype.is_floating_point else value


def exact_infinite(scheme: Scheme, dtype: torch.dtype, low: float | None, high: float | None) -> Infinite | None:
    """The mark of exact stand-ins in a tensor of this dtype; None without a sign."""
    size = size_of(scheme, dtype)
    return Infinite(low, high, size, size / 2 if dtype.is_floating_point else size).with_changes()


def of_public(scheme: Scheme, value: Any, dtype: torch.dtype) -> tuple[Infinite | None, Any]:
    """The mark of a public operand, and the operand with stand-ins for what is beyond the range."""
    found = mask_beyond_range(scheme, value)
    if found is None:
        return None, value
    size = size_of(scheme, dtype)
    if not isinstance(value, torch.Tensor):
        number = (size if dtype.is_floating_point else int(size)) * (1 if value > 0 else -1)
        stands = round_to_dtype(float(value), dtype)
        low, high = (stands, None) if value < 0 else (None, stands)
        return exact_infinite(scheme, dtype, low, high), number
    with torch._C.DisableTorchFunction():
        value = value.detach()
        low, high = (common_value(value[found & side]) for side in (value < 0, value > 0))
        low, high = (None if v is None else round_to_dtype(v, dtype) for v in (low, high))
        put = torch.where(found, value.sign() * size, value).to(value.dtype)
    made = exact_infinite(scheme, dtype, low, high)
    return (None if made is None else replace(made, at=found, certain=True)), put


_rules: tuple[Callable[..., Any], Callable[..., Any], frozenset[str]]
"""What `ops/infinity.py` brings: the rules, the conversion to exact stand-ins, and the operations with a rule for
public numbers beyond the range."""


def set_rules(apply: Callable[..., Any], with_exact: Callable[..., Any], takes_public: frozenset[str]) -> None:
    """Called by `ops/infinity.py` when it is imported; `tensor` may not import `ops`."""
    global _rules
    _rules = apply, with_exact, takes_public


def apply_rule(context: Any, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """The result of a user's call that meets stand-ins or numbers beyond the range; NotImplemented for any other.

    Args:
        name: of the function's row in the table.
    """
    apply, _, takes_public = _rules
    leaves = pytree.tree_leaves((args, kwargs))
    marks = [mark for leaf in leaves if (mark := infinite_of(leaf)) is not None]
    if not marks and (
        name not in takes_public or all(mask_beyond_range(context.scheme, leaf) is None for leaf in leaves)
    ):
        return NotImplemented
    return apply(context, func, name, args, kwargs, marks)


def with_exact_infinities(x: Any) -> Any:
    """x with exact stand-ins, if any, so that it can be revealed."""
    return x if x.infinite is None or x.infinite.exact else _rules[1](x)
