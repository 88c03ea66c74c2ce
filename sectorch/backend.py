"""The interface between the handlers of torch functions and the arithmetic on shared values.

A handler (`ops/`) knows tensors, fraction bits and bounds, and calls a `Backend` for everything that it does with a
shared value. There are two: `mpc/star/backend.py` runs the protocols of Q, A and S, and `mpc/plain.py` computes the
functions of these protocols on plain whole numbers. Values are elements of Z_2^64. A method is exact for values below
2^62 in magnitude unless it says otherwise, and its result is a function of the values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .choreography import Located

MAX_SHIFT = 32
"""Most bits that one truncation drops."""

SERIES_BITS = 52
"""Fraction bits of a series' value."""

PIECE = 1 << 14
"""Elements of a series that are computed together: their terms fit the last-level cache."""


Noise = Callable[[torch.Size], torch.Tensor]
"""A function that S alone calls: returns noise of a shape, int64, in units of the last fraction bit."""


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

    def __call__(self, x: float) -> float:
        """The value at x, in floating point."""
        angles = [2 * math.pi * (j + 1) * x / 2**self.period_bits for j in range(len(self.cos))]
        terms = zip(self.cos, self.sin, angles, strict=True)
        return self.constant + sum(a * math.cos(w) + b * math.sin(w) for a, b, w in terms)

    @property
    def weight(self) -> float:
        """The sum of the coefficients' magnitudes, which is the factor of a rounding error of the terms."""
        return sum(abs(c) for c in (*self.cos, *self.sin))


class Value(Protocol):
    """A shared tensor of ring elements. Operations that are linear with public factors need no message, and are exact.

    A summand is another value, a public number or tensor, or a result of `Backend.owner_summand`.
    """

    @property
    def shape(self) -> torch.Size: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __mul__(self, public: Any, /) -> Any: ...
    def __lshift__(self, bits: int, /) -> Any: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class RaisedFlags(list[Any]):
    """The flags that the operations of a call raised, as values of its backend: `net.state(RaisedFlags)`."""


@dataclass(frozen=True)
class Normal:
    """Mantissa and exponent of a value x.

    Attributes:
        mantissa: m in [2^-step, 1) at `high` fraction bits. bits: [T, ...], [x >= 2^k] for k = low, low + step .. high.
    """

    mantissa: Any
    bits: Any
    low: int
    high: int
    step: int = 1


class Backend(Protocol):
    """Arithmetic on shared values, for one call and one number representation. Shapes are those of torch.

    Where a method has `limit_bits`, a flag is raised if the result is not within -2^limit_bits .. 2^limit_bits - 1, and
    `reveal` shows no result that depends on it.
    """

    # Inputs and outputs.

    def share(self, x: Located, whole: bool) -> Any:
        """Share Q's ring elements. `whole`: they are whole numbers, which Q can check later (`check_index`)."""

    def owner_summand(self, x: Located) -> Any:
        """Return the answering party's ring elements as a summand. No message."""

    def owned(self, x: Located, party: Any) -> Any:
        """Return ring elements that one party holds as a value. Only an owner that holds no shares sends a message."""

    def embedded(self, x: Any) -> Any:
        """Return a summand or a public tensor as a value. No message."""

    def reveal(self, x: Any, flags: Sequence[Any], to: Any = None) -> tuple[Located, Located | None]:
        """Show x to Q, or to another party without shares, if no flag is set.

        Returns:
            x, or zeros where a flag is set; and whether none is set [1], or None where there are no flags.
        """
        ...

    def reveal_to(self, x: Any, party: Any) -> Located:
        """Show x to A or S, without regard to flags."""
        ...

    def export_shares(self, x: Any) -> tuple[torch.Tensor, ...]:
        """Return what the parties of this process hold of a value, for `import_shares` in a later call."""
        ...

    def import_shares(self, name: str, halves: Sequence[torch.Tensor]) -> Any:
        """Return a value of an earlier call from what the parties hold of it; each inputs its own under this name.

        A third entry is what Q holds of its own whole numbers (`check_index`).
        """

    def named_shares(self, name: str, x: Any) -> dict[str, torch.Tensor]:
        """Return what the parties hold of a value by the names of the inputs that `import_shares` declares."""
        ...

    def aggregate(
        self, terms: Sequence[tuple[Any, Any, Sequence[Any]]], guarded: bool, noise: Noise | None = None
    ) -> tuple[Any, Any]:
        """Show Q the sum of values of several calls, as `reveal` does.

        Args:
            terms: of each call its backend, value and flags.
            guarded: whether flags are looked at.
            noise: drawn by S and added to the sum.
        """
        ...

    def collect(self, x: Any, to: Any) -> Any:
        """Return x, a value of this backend's call, as one of the call of `to`, whose tensors Q and S hold."""

    def halves(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two halves of x, each with content at its holder alone; of a value that is whole, it and zeros."""
        ...

    def from_halves(self, first: Located, at_S: Located) -> Any:
        """Return the value whose halves the first holder of this backend's call and S have."""

    def check_flags(self, flags: Sequence[Any], calls: Sequence[tuple[Any, Sequence[Any]]]) -> Located | None:
        """Show the querying party whether no flag is set on which a tensor of Q and S depends: one bit, or None.

        Args:
            flags: those that calls on tensors of Q and S raised, of which this is one.
            calls: a backend of a call with each answering party, the first one's first, and the flags raised there.
        """
        ...

    def own_code(self, x: Any, count: int, ignored: int | None = None) -> Any:
        """Let Q compute and share one-hot codes [..., count] of its own whole numbers; None for other values.

        Args:
            ignored: a number outside of 0 .. count - 1 whose code is zero.
        """

    # Local operations, without a message.

    def each(self, f: Callable, *values: Any, **public: Any) -> Any:
        """Apply an additive f, which commutes with sharing, to values and public arguments."""

    def moved(self, f: Callable, x: Any, *public: Any) -> Any:
        """Apply an additive f that moves elements to one value. The result is Q's own where x is (`check_index`).

        A tuple becomes a list of values.
        """

    def affine(self, f: Callable, x: Any, number: int, *public: Any) -> Any:
        """Compute f(x, number, *public) for an f that is additive in x and a public number together, like padding."""

    def shuffled(self, x: Any) -> Any:
        """Return the rows of x in a uniform order that no party knows. A reference draws one as well."""

    # Products, mod 2^64.

    def weight(self, x: Located) -> Any:
        """Return the answering party's ring elements as an operand of `linear`, once a session."""

    def streamed(self, x: Located, encoded: Callable) -> Any:
        """Return encoded(x) as an operand of `linear` that keeps no form which can be computed again."""

    def viewed(self, weight: Any, view: Callable) -> Any:
        """Return a view (a transpose, a slice) of an operand of `linear`."""

    def linear(self, product: Callable, x: Any, weight: Any) -> Any:
        """Compute product(x, weight, form) for a map that is linear in both; `form` as in `ring/products.py`."""

    def bin_matrix(self, codes: Located, owner: Any, bins: int) -> Any:
        """Return one party's bin numbers (uint8, [rows, features]) as an operand of `by_bins`, for the whole call."""

    def by_bins(self, product: Callable, x: Any, matrix: Any) -> Any:
        """Compute `BinSums` or `BinChoices` (`mpc/star/bins.py`) of a value and a matrix of bins.

        Args:
            matrix: of `bin_matrix`, or a value [rows, features x (bins - 1)].
        """

    def multiply(self, product: Callable, x: Any, y: Any) -> Any:
        """Compute product(x, y) for a map that is linear in both."""

    def square(self, x: Any) -> Any:
        """Compute x^2."""

    def square_sum(self, x: Any, dims: tuple[int, ...], centred: bool, offset: int, shifts: Sequence[int]) -> list[Any]:
        """Compute floor((T + offset) / 2^k) mod 2^64 for each k of `shifts`, which are 1 to 64.

        T is the exact sum of x^2 over `dims` (n elements, which are kept as one), or n times that less the square of
        the sum of x if `centred`; T + offset is below 2^128.
        """
        ...

    # Rounding and comparisons.

    def truncate(self, x: Any, shift: int, limit_bits: int | None = None) -> Any:
        """Compute floor(x / 2^shift + 1/2), for 1 <= shift <= 32."""

    def truncate_and_multiply(self, x: Any, shift: int, y: Any) -> Any:
        """Compute `truncate` of x times y, element by element, mod 2^64, for y of the shape of x."""

    def at_least(self, x: Any, thresholds: tuple[int, ...] = (0,), high: int = 63) -> Any:
        """Compute [x - t >= 0] for each public threshold t, as 0 or 1: [T, *shape]. x - t is in [-2^high, 2^high)."""

    def is_zero(self, x: Any) -> Any:
        """Compute [x = 0], as 0 or 1, for all of the ring."""

    def where_positive(self, x: Any, values: Sequence[Any]) -> list[Any]:
        """Return each of the values where x >= 0, and 0 elsewhere; all have one shape."""
        ...

    def where_between(
        self, x: Any, low: int, high: int | None, value: Any, planes: int = 63, squared: bool = False
    ) -> tuple[Any, Any | None]:
        """Return the value where low <= x < high and 0 elsewhere, and [x >= high] as 0 or 1.

        Args:
            high: None for no bound, and no second result.
            value: of x's shape. The comparison does not wait for it.
            planes: x - low and x - high are known to lie in [-2^planes, 2^planes).
            squared: return the square of the value in its place.
        """
        ...

    def ramps(
        self, x: Any, thresholds: tuple[int, ...], shift: int = 0, high: int = 63, limit_bits: int | None = None
    ) -> list[Any]:
        """Compute max(x / 2^shift - t, 0) for each threshold t, x / 2^shift rounded half up.

        Args:
            high: x - t 2^shift is known to lie in [-2^high, 2^high - 2^shift).
            limit_bits: of the first result.
        """
        ...

    def relu_and_rest(self, x: Any, shift: int, high: int, limit_bits: int | None = None) -> tuple[Any, Any]:
        """Compute max(y, 0) and y for y = x / 2^shift, rounded half up; the limit is checked where shift > 0."""
        ...

    def leaky_relu(self, x: Any, shift: int, bits: int) -> Any:
        """Compute max(x, 0) / 2^shift for |x| < 2^bits in the paper's way. LEAKS sign and size of x to Q."""

    def leaky_largest(self, x: Any, bits: int) -> Any:
        """Compute the maximum along the first dimension in the paper's way. LEAKS to Q.

        Args:
            bits: differences are below 2^bits.
        """

    def maximum(self, x: Any, y: Any, high: int = 63) -> Any:
        """Compute the maximum of two values of one shape, whose difference is known to lie in [-2^high, 2^high)."""

    def largest(self, x: Any, high: int = 63) -> Any:
        """Compute the maximum along the first dimension; differences are known to lie in [-2^high, 2^high)."""

    def ramp_of_largest(
        self, x: Any, shift: int, between: int = 63, high: int = 63, limit_bits: int | None = None
    ) -> Any:
        """Compute `ramps` of `largest` with the threshold 0: the largest along the first dimension, over 2^shift.

        Args:
            shift: 1 to 32. between: as `high` of `largest`. high: as of `ramps`.
        """

    # Functions that are not piecewise linear.

    def series(self, x: Any, scale_bits: int, which: Series) -> Any:
        """Compute which(x) at `SERIES_BITS`, x at `scale_bits` fraction bits. The last bits are not exact: round it."""

    def rounded_series(
        self, x: Any, scale_bits: int, which: Series, shift: int, factor: Any = None, opened: bool = False
    ) -> Any:
        """Compute `truncate` of `series` by so many bits, in a round less.

        Args:
            factor: of x's shape; multiplies the result, mod 2^64.
            opened: whether x is compared as well, so that one opening serves both; x may be outside of the interval
                then, where the series is periodic.
        """

    def series_and_later(self, x: Any, scale_bits: int, which: Series, later: Series) -> tuple[Any, tuple]:
        """Compute `series`, and the parts of which `finish_series` makes later(x), a series of the same period."""
        ...

    def finish_series(self, parts: Sequence[Any], which: Series) -> Any:
        """Compute the later series of `series_and_later`; each part has the shape of x."""

    def normalise(self, x: Any, low: int, high: int, step: int = 1, planes: int = 63) -> Normal:
        """Compute mantissa and exponent of 2^low <= x < 2^high, for 0 <= low < high <= 62.

        Below the range the mantissa is 1/2 and the exponent low + step; above, 1 - 2^-high and high.

        Args:
            step: exponents differ from high by multiples of it; it divides high - low.
            planes: x is known to lie in 0 .. 2^planes - 1.
        """
        ...

    # Ranges.

    def flag(self, bad: Any) -> None:
        """Raise a flag where `bad`, which is 0 or 1, is 1."""

    def join_flags(self, flags: Sequence[Any]) -> Any:
        """Return one flag that is set if any of these is."""

    def flag_outside(self, x: Any, bits: int, everywhere: bool = False) -> None:
        """Raise a flag where x is not within -2^bits .. 2^bits - 1; `everywhere`: for all x of the ring."""

    def check_index(self, x: Any, count: int, ignored: int | None = None) -> bool:
        """Let Q check that 0 <= x < count, where x consists of Q's own numbers; return False where it does not.

        Args:
            ignored: a number outside that is allowed, too.

        Raises:
            DimensionError: at Q, for an index outside, before Q sends anything that follows.
        """
        ...
