"""What the handlers of torch functions ask for: arithmetic on shared values, whoever computes it and how.

A handler (`ops/`) knows tensors, fraction bits and bounds. What it does with a shared value, it asks a `Backend` for:
`mpc/star/backend.py` answers with the protocols of Q, A and S, and `mpc/plain.py` with the functions that those
compute, on plain whole numbers. Values are elements of Z_2^64; a method is exact for values below 2^62 in magnitude
unless it says otherwise, and its result is a function of the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .choreography import Located

MAX_SHIFT = 32
"""Bits that one truncation drops at most."""

SERIES_BITS = 52
"""Fraction bits of a series' value."""


Noise = Callable[[torch.Size], torch.Tensor]
"""What S alone calls for noise of a shape: int64, in units of the last fraction bit."""


@dataclass(frozen=True)
class Series:
    """constant + sum_j cos[j] cos(j w x) + sin[j] sin(j w x), w = 2 pi / 2^period_bits, on [low, high].

    `error` is the largest distance from the function on that interval, before any rounding.
    """

    low: float
    high: float
    period_bits: int
    error: float
    constant: float
    cos: tuple[float, ...]
    sin: tuple[float, ...]

    @property
    def weight(self) -> float:
        """Sum of the magnitudes of the coefficients: what multiplies a rounding error of the terms."""
        return sum(abs(c) for c in (*self.cos, *self.sin))


class Value(Protocol):
    """A shared tensor of ring elements: what is linear with public factors needs no message, and is exact mod 2^64.

    A summand is another value, a public number or tensor, or what `Backend.held` gave.
    """

    @property
    def shape(self) -> torch.Size: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __mul__(self, public: Any, /) -> Any: ...
    def __lshift__(self, bits: int, /) -> Any: ...
    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class Normal:
    """`mantissa`: m in [1/2, 1) at `high` fraction bits. `bits`: [T, ...], [x >= 2^k] for k = low .. high."""

    mantissa: Any
    bits: Any
    low: int
    high: int


class Backend(Protocol):
    """Arithmetic on shared values, for one call and one number representation. Shapes are those of torch.

    `limit_bits` of a method: where the result is not within -2^limit_bits .. 2^limit_bits - 1, a flag is raised, and
    nobody gets to know a result that depends on it (`reveal`).
    """

    # The way in and out.

    def share(self, x: Located, whole: bool) -> Any:
        """Q's ring elements as a value. `whole`: they are whole numbers, which Q can be asked about (`check_index`)."""

    def held(self, x: Located) -> Any:
        """The answering party's ring elements as a summand."""

    def owned(self, x: Located, party: Any) -> Any:
        """Ring elements that one party holds alone, as a value: no message, but from an owner that holds no shares."""

    def embedded(self, x: Any) -> Any:
        """A summand, or a public tensor, as a value. No message."""

    def reveal(self, x: Any, flags: Sequence[Any], to: Any = None) -> tuple[Located, Located | None]:
        """Q, or another party without shares, learns x, and whether no flag is set [1]; x is zeros where one is. None
        where there are no flags."""
        ...

    def reveal_to(self, x: Any, party: Any) -> Located:
        """A or S learns x, whatever flags there are."""
        ...

    def kept(self, x: Any) -> tuple[torch.Tensor, ...]:
        """What the parties hold of a value, each its own, read by whoever holds it: for `again` in a later call."""
        ...

    def again(self, name: str, halves: Sequence[torch.Tensor]) -> Any:
        """A value of an earlier call, by what the parties hold of it; each brings its own, by this name."""

    def brought(self, name: str, x: Any) -> dict[str, torch.Tensor]:
        """The same halves by the names that `again` gives them in a program."""
        ...

    def aggregate(
        self, terms: Sequence[tuple[Any, Any, Sequence[Any]]], guarded: bool, noise: Noise | None = None
    ) -> tuple[Any, Any]:
        """Q learns the sum of values of several calls, as `reveal`: terms of a backend, its value and its flags; with
        noise, what S draws is added to the sum first."""
        ...

    def own_code(self, x: Any, count: int) -> Any:
        """One-hot codes [..., count] of Q's own whole numbers, which Q works out and shares; None of other values."""

    # What takes no message.

    def each(self, f: Callable, *values: Any, **public: Any) -> Any:
        """f of values and public arguments, for an additive f: it commutes with sharing."""

    def moved(self, f: Callable, x: Any, *public: Any) -> Any:
        """The same for one value; a result is Q's own where x is (`check_index`). A tuple becomes a list of values."""

    def affine(self, f: Callable, x: Any, number: int, *public: Any) -> Any:
        """f(x, number, *public) for an f that is additive in x and a public number together: padding, say."""

    def shuffled(self, x: Any) -> Any:
        """The rows of x in a uniform order that nobody knows; drawn anew each time, in a reference too."""

    # Products, mod 2^64.

    def weight(self, x: Located) -> Any:
        """The answering party's ring elements as an operand of `linear`, made once a session."""

    def streamed(self, x: Located, encoded: Callable) -> Any:
        """encoded(x) as such an operand, of which no form is kept that can be made again."""

    def viewed(self, weight: Any, view: Callable) -> Any:
        """A view (a transpose, a slice) of such an operand."""

    def linear(self, product: Callable, x: Any, weight: Any) -> Any:
        """product(x, weight, made) for a map that is linear in both; `made` as in `ring/products.py`."""

    def multiply(self, product: Callable, x: Any, y: Any) -> Any:
        """product(x, y) for a map that is linear in both."""

    def square(self, x: Any) -> Any:
        """x^2."""

    # Rounding and comparisons.

    def truncate(self, x: Any, shift: int, limit_bits: int | None = None) -> Any:
        """floor(x / 2^shift + 1/2), for 1 <= shift <= 32."""

    def at_least(self, x: Any, thresholds: tuple[int, ...] = (0,), high: int = 63) -> Any:
        """[x - t >= 0] for each public threshold t, as 0 or 1: [T, *shape]. x - t is known to lie in
        [-2^high, 2^high)."""

    def is_zero(self, x: Any) -> Any:
        """[x = 0], as 0 or 1, for all of the ring."""

    def where_positive(self, x: Any, values: Sequence[Any]) -> list[Any]:
        """Each of the values where x >= 0, and 0 elsewhere; all of one shape."""
        ...

    def ramps(
        self, x: Any, thresholds: tuple[int, ...], shift: int = 0, high: int = 63, limit_bits: int | None = None
    ) -> list[Any]:
        """max(x / 2^shift - t, 0) for each threshold t, x / 2^shift rounded half up; the limit is for the first.

        Args:
            high: what the caller knows: x - t 2^shift is in [-2^high, 2^high - 2^shift).
        """
        ...

    def relu_and_rest(self, x: Any, shift: int, high: int, limit_bits: int | None = None) -> tuple[Any, Any]:
        """max(y, 0) and y for y = x / 2^shift, rounded half up; the limit is checked where shift > 0."""
        ...

    def leaky_relu(self, x: Any, shift: int, bits: int) -> Any:
        """max(x, 0) / 2^shift for |x| < 2^bits, in the paper's way: shows Q sign and size of x (`mpc/leaky.py`)."""

    def maximum(self, x: Any, y: Any, high: int = 63) -> Any:
        """The larger of both, which have one shape; their difference is known to lie in [-2^high, 2^high)."""

    def largest(self, x: Any, high: int = 63) -> Any:
        """The maximum along the first dimension; differences are known to lie in [-2^high, 2^high)."""

    def ramp_of_largest(
        self, x: Any, shift: int, between: int = 63, high: int = 63, limit_bits: int | None = None
    ) -> Any:
        """The largest along the first dimension, at least 0, and over 2^shift, rounded half up: `ramps` of `largest`.

        Args:
            shift: 1 to 32. between: as `high` of `largest`. high: as of `ramps`.
        """

    # Functions that are not piecewise linear.

    def series(self, x: Any, scale_bits: int, which: Series) -> Any:
        """which(x) at `SERIES_BITS`, x at `scale_bits` fraction bits. Its last bits are not exact: round it first."""

    def normalise(self, x: Any, low: int, high: int) -> Normal:
        """Mantissa and exponent of 2^low <= x < 2^high, 0 <= low < high <= 62. Below, the mantissa is 1/2 and the
        exponent low + 1; above, the mantissa is 1 - 2^-high and the exponent high."""
        ...

    # Ranges.

    def flag(self, bad: Any) -> None:
        """Raise a flag where this is 1; it is 0 or 1."""

    def joined(self, flags: Sequence[Any]) -> Any:
        """One flag that is set where any of these is."""

    def flag_outside(self, x: Any, bits: int, everywhere: bool = False) -> None:
        """Raise a flag where x is not within -2^bits .. 2^bits - 1; `everywhere`: also up to the ring's ends."""

    def check_index(self, x: Any, count: int) -> bool:
        """Where x is Q's own, moved at most, Q looks whether 0 <= x < count everywhere; False where it is not.

        Raises:
            DimensionError: at Q, before anything that follows is sent.
        """
        ...
