"""Numbers that stand for infinity: what is known of a shared tensor that may hold some.

Fixed point has no infinity, and no number from 2^(62 - 2 f) on. A public one that a program chooses (`masked_fill`,
`where`, a mask that is added) is a number of `size` in shares, beyond every activation, and the tensor carries an
`Infinite`: which signs may occur, and what they stand for. It is public, as a shape is. `ops/infinity.py` says what
each operation makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import Scheme
from ..errors import FixedPointRangeError
from ..ring import HEADROOM_BITS, range_limit
from .secret import SecretTensor

UNKNOWN = math.nan
"""What stand-ins stand for that do not all stand for one number, or for one that nobody worked out."""


@dataclass(frozen=True)
class Infinite:
    """What a shared tensor may hold beside numbers.

    Attributes:
        low, high: what the negative and the positive stand-ins stand for: an infinity, a public number beyond the
            range, or `UNKNOWN`; None where there are none.
        size: what each is in magnitude: exactly, or where not `exact` at least.
        threshold: what every stand-in is at least in magnitude, and what every number is below.
        exact: whether none has been added to, or scaled.
        at: public positions, boolean and of the tensor's shape, outside of which there are none; None where they may
            be anywhere.
        certain: whether there is one at each of these positions.
        unchecked: shared summands of these stand-ins that nobody has held to the activation limit yet.
    """

    low: float | None = None
    high: float | None = None
    size: float = 0.0
    threshold: float = 0.0
    exact: bool = True
    at: torch.Tensor | None = None
    certain: bool = False
    unchecked: tuple[Any, ...] = ()

    def but(self, **changed: Any) -> Infinite | None:
        """The same with other attributes; None where no sign is left."""
        made = replace(self, **changed)
        return None if made.low is None and made.high is None else made

    @property
    def known(self) -> tuple[str, str, float, bool]:
        """All that a program depends on."""
        return repr(self.low), repr(self.high), self.size, self.exact


def size_of(scheme: Scheme, dtype: torch.dtype) -> float:
    """What stands for infinity in a tensor of this type: four times the activation limit, or what every scale holds;
    among whole numbers the largest that there is."""
    if not dtype.is_floating_point:
        return range_limit(scheme.frac_bits) - 1
    return min(4 * scheme.activation_limit, 2.0 ** (HEADROOM_BITS - 8 - 2 * scheme.frac_bits))


def mask_beyond_range(scheme: Scheme, value: Any) -> torch.Tensor | None:
    """Where a public number or tensor is beyond the range of fixed point; None where it nowhere is."""
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


def one_of(values: torch.Tensor) -> float | None:
    """What all of these are; `UNKNOWN` where they differ, None of none."""
    if not values.numel():
        return None
    first = float(values.flatten()[0])
    return first if bool((values == values.flatten()[0]).all()) else UNKNOWN


def either_standin(x: float | None, y: float | None) -> float | None:
    """What the stand-ins of two tensors stand for together."""
    return y if x is None else x if y is None or x == y else UNKNOWN


def join_infinite(*parts: Infinite | None, at: torch.Tensor | None = None, certain: bool = False) -> Infinite | None:
    """What a tensor may hold that consists of elements of several."""
    made: Infinite | None = None
    for part in parts:
        if part is None:
            continue
        if made is None:
            made = replace(part, at=None)
            continue
        made = replace(
            made,
            low=either_standin(made.low, part.low),
            high=either_standin(made.high, part.high),
            size=min(made.size, part.size),
            threshold=min(made.threshold, part.threshold),
            exact=made.exact and part.exact and made.size == part.size,
            unchecked=made.unchecked + part.unchecked,
        )
    return None if made is None else replace(made, at=at, certain=certain)


def infinite_of(x: Any) -> Infinite | None:
    """What is known of a tensor; None of a number, and of a tensor without stand-ins."""
    return getattr(x, "infinite", None) if isinstance(x, SecretTensor) else None


def refuse_infinite(x: Any, what: str) -> None:
    """For what takes shares as numbers.

    Raises:
        FixedPointRangeError: some may stand for infinity.
    """
    if infinite_of(x) is not None:
        raise FixedPointRangeError(
            f"{what} takes no tensor that may hold infinities or numbers beyond the range; bound it first: "
            f"x.clamp(-1000, 1000)"
        )


def round_to_dtype(value: float, dtype: torch.dtype) -> float:
    """A number as a tensor of this type has it: an infinity where it is too large."""
    return float(torch.tensor(value, dtype=dtype)) if dtype.is_floating_point else value


def standing_for(scheme: Scheme, dtype: torch.dtype, low: float | None, high: float | None) -> Infinite | None:
    """Exact stand-ins in a tensor of this type; None without a sign."""
    size = size_of(scheme, dtype)
    return Infinite(low, high, size, size / 2 if dtype.is_floating_point else size).but()


def of_public(scheme: Scheme, value: Any, dtype: torch.dtype) -> tuple[Infinite | None, Any]:
    """What a public number or tensor becomes in a shared tensor: what it may hold, and with the stand-ins in place."""
    found = mask_beyond_range(scheme, value)
    if found is None:
        return None, value
    size = size_of(scheme, dtype)
    if not isinstance(value, torch.Tensor):
        number = (size if dtype.is_floating_point else int(size)) * (1 if value > 0 else -1)
        stands = round_to_dtype(float(value), dtype)
        low, high = (stands, None) if value < 0 else (None, stands)
        return standing_for(scheme, dtype, low, high), number
    with torch._C.DisableTorchFunction():
        value = value.detach()
        low, high = (one_of(value[found & side]) for side in (value < 0, value > 0))
        low, high = (None if v is None else round_to_dtype(v, dtype) for v in (low, high))
        put = torch.where(found, value.sign() * size, value).to(value.dtype)
    made = standing_for(scheme, dtype, low, high)
    return (None if made is None else replace(made, at=found, certain=True)), put


_RULES: dict[str, Callable[..., Any]] = {}


def set_rules(called: Callable[..., Any], exactly: Callable[..., Any]) -> None:
    """The rules plug themselves in here when they are imported (`ops/infinity.py`)."""
    _RULES.update(called=called, exactly=exactly)


def call_with_infinities(context: Any, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """A call of a user's, where it meets stand-ins or numbers beyond the range; NotImplemented where it does not."""
    return _RULES["called"](context, func, name, args, kwargs)


def with_exact_infinities(x: Any) -> Any:
    """x with exact stand-ins, if any: as it may be revealed."""
    return x if x.infinite is None or x.infinite.exact else _RULES["exactly"](x)
