"""The plain fixed-point reference: every method of a `Backend` as the public function that its protocol computes.

Values are int64 tensors. It protects nothing: the process that runs it holds model and input in the clear. A secure run
gives the same result bit for bit, except for the last bits of a series (`series.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backend import Backend, Noise, Normal, RaisedFlags, Series
from ..choreography import Located, Net
from ..choreography.streams import key_stream, random_secret
from ..config import Scheme
from ..ring import rounded_shift, wide
from ..ring.fixed_point import weighted_bit_sum
from ..ring.products import PreparedProduct
from .series import factor_steps, mantissa, powers, turns_of, value_at
from .star.backend import in_table, one_hot
from .star.shuffle import in_order

T = torch.Tensor


class OwnNumbers(torch.Tensor):
    """Whole numbers of Q that were shared and only moved since. Any other operation returns a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  meant for this


class PlainOperand:
    """The answering party's numbers, and the forms of them that products take."""

    def __init__(self, value: T):
        self.value = value
        self.forms: dict[tuple[type, str], T] = {}


class Plain(Backend):
    """Arithmetic on plain tensors, in one process that holds all of them. No message, no randomness."""

    def __init__(self, net: Net, scheme: Scheme):
        self.net = net

    def share(self, x: Located, whole: bool) -> T:
        value = self.net.read(x, self.net.Q)
        return value.as_subclass(OwnNumbers) if whole else value

    def owner_summand(self, x: Located) -> T:
        return self.net.read(x, self.net.A)

    def owned(self, x: Located, party: Any) -> T:
        return self.net.read(x, party)

    def embedded(self, x: T) -> T:
        return x

    def reveal(self, x: T, flags: Sequence[T], to: Any = None) -> tuple[Located, Located | None]:
        return self._at(to or self.net.Q, x, [flags])

    def reveal_to(self, x: T, party: Any) -> Located:
        return self.net.own(party, x)

    def own_code(self, x: T, count: int, ignored: int | None = None) -> T | None:
        return one_hot(x.as_subclass(T), count, ignored) if isinstance(x, OwnNumbers) else None

    def export_shares(self, x: T) -> tuple[torch.Tensor, ...]:
        return (x,)

    def import_shares(self, name: str, halves: Sequence[torch.Tensor]) -> T:
        return halves[0]

    def named_shares(self, name: str, x: T) -> dict[str, torch.Tensor]:
        return {name: x}

    def aggregate(
        self, terms: Sequence[tuple[Plain, T, Sequence[T]]], guarded: bool, noise: Noise | None = None
    ) -> tuple[Located, Located | None]:
        total = functools.reduce(torch.add, (x for _, x, _ in terms))
        total = total if noise is None else total + noise(total.shape)
        return self._at(self.net.Q, total, [flags for *_, flags in terms] if guarded else [])

    def collect(self, x: T, to: Plain) -> T:
        return x.as_subclass(T)

    def halves(self, x: T) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.zeros_like(x)

    def from_halves(self, first: Located, at_S: Located) -> T:
        return self.net.read(first, self.net.A) + self.net.read(at_S, self.net.S)

    def check_flags(self, flags: Sequence[T], calls: Sequence[tuple[Plain, Sequence[T]]]) -> Located | None:
        return calls[0][0]._at(calls[0][0].net.Q, torch.empty(0), [flags, *(own for _, own in calls)])[1]

    def _at(self, party: Any, x: T, flags: Sequence[Sequence[T]]) -> tuple[Located, Located | None]:
        bits = [f.any() for some in flags for f in some]
        if not bits:
            return self.net.own(party, x), None
        right = ~torch.stack(bits).any().view(1)
        return self.net.own(party, x * right[0]), self.net.own(party, right)

    def each(self, f: Callable, *values: Any, **public: Any) -> T:
        return f(*values, **public)

    def moved(self, f: Callable, x: T, *public: Any) -> Any:
        found = f(x, *public)
        own = (lambda v: v.as_subclass(OwnNumbers)) if isinstance(x, OwnNumbers) else (lambda v: v)
        return [own(v) for v in found] if isinstance(found, tuple) else own(found)

    def affine(self, f: Callable, x: T, number: int, *public: Any) -> T:
        return f(x, number, *public)

    def shuffled(self, x: T) -> T:
        keys = key_stream(torch.frombuffer(bytearray(random_secret()), dtype=torch.int64)[:2], len(x))
        return in_order(x, keys)

    def weight(self, x: Located) -> PlainOperand:
        return PlainOperand(self.owner_summand(x))

    def streamed(self, x: Located, encoded: Callable) -> PlainOperand:
        return PlainOperand(encoded(self.owner_summand(x)))

    def viewed(self, weight: PlainOperand, view: Callable) -> PlainOperand:
        return PlainOperand(view(weight.value))

    def linear(self, product: Callable, x: T, weight: PlainOperand) -> T:
        form = product.prepared(x.shape, weight.value.shape) if isinstance(product, PreparedProduct) else None
        if form is None:
            return product(x, weight.value, None)
        kind = type(form), form.form
        if kind not in weight.forms:
            weight.forms[kind] = form.prepare(weight.value)
        return form(x, weight.value, weight.forms[kind])

    def bin_matrix(self, codes: Located, owner: Any, bins: int) -> T:
        return self.net.read(codes, owner)

    def by_bins(self, product: Callable, x: T, matrix: T) -> T:
        return product(x, matrix)

    def multiply(self, product: Callable, x: T, y: T) -> T:
        return product(x, y)

    def square(self, x: T) -> T:
        return x * x

    def square_sum(self, x: T, dims: tuple[int, ...], centred: bool, offset: int, shifts: Sequence[int]) -> list[T]:
        total = wide.square_sum(x, dims, centred)
        total = wide.plus(total, wide.constant(offset, total))
        return [wide.low_word_above(total, shift) for shift in shifts]

    def truncate(self, x: T, shift: int, limit_bits: int | None = None) -> T:
        y = rounded_shift(x, shift)
        if limit_bits is not None:
            self.flag_outside(y, limit_bits)
        return y

    def truncate_and_multiply(self, x: T, shift: int, y: T) -> T:
        return self.truncate(x, shift) * y

    def at_least(self, x: T, thresholds: tuple[int, ...] = (0,), high: int = 63) -> T:
        return torch.stack([x - t >= 0 for t in thresholds]).to(torch.int64)

    def is_zero(self, x: T) -> T:
        return (x == 0).to(torch.int64)

    def where_positive(self, x: T, values: Sequence[T]) -> list[T]:
        return [torch.where(x >= 0, value, 0) for value in values]

    def where_between(
        self, x: T, low: int, high: int | None, value: T, planes: int = 63, squared: bool = False
    ) -> tuple[T, T | None]:
        value = value * value if squared else value
        above = None if high is None else x >= high
        inside = x >= low if above is None else (x >= low) & ~above
        return torch.where(inside, value, 0), None if above is None else above.to(torch.int64)

    def ramps(
        self, x: T, thresholds: tuple[int, ...], shift: int = 0, high: int = 63, limit_bits: int | None = None
    ) -> list[T]:
        floor = rounded_shift(x, shift) if shift else x
        found = [(floor - t).clamp_(min=0) for t in thresholds]
        if limit_bits is not None:
            self.flag(found[0] >= 1 << limit_bits)
        return found

    def relu_and_rest(self, x: T, shift: int, high: int, limit_bits: int | None = None) -> tuple[T, T]:
        rest = self.truncate(x, shift, limit_bits) if shift else x
        return rest.clamp(min=0), rest

    def leaky_relu(self, x: T, shift: int, bits: int) -> T:
        return self.ramps(x, (0,), shift)[0]

    def leaky_largest(self, x: T, bits: int) -> T:
        return self.largest(x)

    def maximum(self, x: T, y: T, high: int = 63) -> T:
        return torch.maximum(x, y)

    def largest(self, x: T, high: int = 63) -> T:
        return functools.reduce(torch.maximum, x)  # several times as fast as amax along the first dimension

    def ramp_of_largest(self, x: T, shift: int, between: int = 63, high: int = 63, limit_bits: int | None = None) -> T:
        return self.ramps(self.largest(x), (0,), shift, limit_bits=limit_bits)[0]

    def series(self, x: T, scale_bits: int, which: Series) -> T:
        return value_at(turns_of(x, which.period_bits + scale_bits), which)

    def rounded_series(
        self, x: T, scale_bits: int, which: Series, shift: int, factor: T | None = None, opened: bool = False
    ) -> T:
        y = rounded_shift(self.series(x, scale_bits, which), shift)
        return y if factor is None else y * factor

    def series_and_later(self, x: T, scale_bits: int, which: Series, later: Series) -> tuple[T, tuple[T, ...]]:
        return self.series(x, scale_bits, which), (self.series(x, scale_bits, later),)

    def finish_series(self, parts: Sequence[T], which: Series) -> T:
        return parts[0]

    def normalise(self, x: T, low: int, high: int, step: int = 1, planes: int = 63) -> Normal:
        bits = self.at_least(x, powers(low, high, step))
        product = x * weighted_bit_sum(bits, factor_steps(low, high, step))
        return Normal(mantissa(product, bits, high), bits, low, high, step)

    def flag(self, bad: T) -> None:
        self.net.state(RaisedFlags).append(bad)

    def join_flags(self, flags: Sequence[T]) -> T:
        return torch.stack([f.any() for f in flags]).any()

    def flag_outside(self, x: T, bits: int, everywhere: bool = False) -> None:
        self.flag((x < -1 << bits) | (x >= 1 << bits))

    def check_index(self, x: T, count: int, ignored: int | None = None) -> bool:
        if isinstance(x, OwnNumbers):
            in_table(x, count, ignored)
        return isinstance(x, OwnNumbers)
