"""The secure `Backend`: every method by the three-party protocols of this package.

Values are additive shares of A and S; Q, or the party that plays the dealer D, deals correlated randomness. This file
chooses the form of each protocol: on slow links (`Scheme(network=Link(...))`) comparisons of few elements take fewer
rounds and more bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...backend import PIECE, Backend, Noise, Normal, Series
from ...choreography import Located, Net, leaf
from ...choreography.located import compute, run_in
from ...choreography.roles import STAR
from ...config import LINKS, Scheme
from ...errors import DimensionError
from ..leaky import leaky_maxpool_privhfl, leaky_relu_privhfl
from ..series import finish_series, normalise, round_digits, trigonometric
from .bins import BinMatrix, indicators, mask_bins, multiply_bins
from .compare import LAN_ROUND, MUCH, RoundBudget, block_count, drelu, is_zero, levels_of, two_level_excess
from .dealing_proofs import DealingProofs, prove_pending
from .fss import key_bytes, signs
from .guard import beside_tag, finish_flags, flags_of_bits, guard, join_flags, raise_flags, remove_pad
from .linear import MaskedWeight, StreamedWeight, linear, mask_streamed_weight, mask_weight
from .masking import open_masked
from .maximum import FOUR, LONG, MOST, group_sizes, levels_worth, max_by_fours, max_tree, ramp_of_largest
from .multiply import multiply, square
from .relu import maximum, ramps, relu
from .select import bit_to_ring, select, select_square
from .shares import (
    Shares,
    aggregate,
    aggregate_noisy,
    at_server,
    collect,
    concatenate,
    each,
    return_flags,
    reveal,
    reveal_to_A,
    reveal_to_S,
    share,
)
from .shuffle import shuffle
from .square_sum import square_sum
from .thresholds import at_least, raise_outside
from .truncate import number_span, truncate, truncate_and_multiply, wide_excess

WAN_ROUND = LINKS["wan"].round_bytes
"""Bytes that a round is worth on the link "wan"; the constants below are for it, and `RoundBudget.scale` for others."""
KEYED = 1 << 10
"""Most elements of which everything is compared by function keys, on any link: some 4 kB each are sent ahead."""


@dataclass(frozen=True)
class Borrow:
    """How a truncation computes its borrow; the first that is set, and by a tree where none is."""

    keys: bool = False
    wide: bool = False
    number: bool = False

    def in_place(self, limit_bits: int | None = None) -> tuple[bool, int | None, bool, bool]:
        """The arguments of `truncate` after the shift."""
        return self.keys, limit_bits, self.wide, self.number and not self.keys


class Star(Backend):
    """The arithmetic of secure inference. Rounds, bytes and what parties learn: see the protocol of each method."""

    def __init__(self, net: Net, scheme: Scheme, device: torch.device):
        self.net, self._few_rounds, self.device = net, scheme.few_rounds, device
        net.state(DealingProofs).required |= scheme.verified
        self._budget = net.state(RoundBudget)
        if scheme.network != "lan":
            fast = LAN_ROUND / LINKS["lan"].round_bytes  # a round's work at the parties counts as on "lan"
            self._budget.round_bytes = round(scheme.link.round_bytes * (1 if scheme.few_rounds else fast))
        if scheme.few_rounds:
            self._budget.scale = scheme.link.round_bytes / WAN_ROUND

    def _few(self, x: Shares) -> bool:
        """Whether rounds matter more than bytes for x.

        They do not once the call has been dealt so much that it waits for that alone; some 64 bytes an element of x
        would be dealt.
        """
        return self._few_rounds and self.net.offline_bytes + 64 * x.shape.numel() <= MUCH * self._budget.scale

    def _keyed(self, x: Shares) -> bool:
        """Whether x is compared by function keys: one message less than by trees, for a hundred times the bytes."""
        return self._few(x) and x.shape.numel() <= KEYED * min(1.0, self._budget.scale)

    def _key_worth(self, x: Shares, planes: int, rounds: int) -> bool:
        """Whether the rounds that keys of so many planes save are worth their bytes, on either network.

        The keys of a few hundred row statistics are, however much a call has been dealt: compiled loops and one call of
        AES a level make them (`fss.py`). A dealer that proves what it deals has no keys.
        """
        if self._keyed(x):
            return True
        proves = self.net.state(DealingProofs).required
        return not proves and key_bytes(planes) * x.shape.numel() <= rounds * self._round_worth

    @property
    def _round_worth(self) -> int:
        """The bytes that a round is worth."""
        return LAN_ROUND if self._budget.round_bytes is None else self._budget.round_bytes

    def share(self, x: Located, whole: bool) -> Shares:
        shares = share(self.net, x)
        return replace(shares, Q=x) if whole else shares

    def owner_summand(self, x: Located) -> Located:
        return x

    def owned(self, x: Located, party: Any) -> Shares:
        if party not in (self.net.A, self.net.S):
            with self._querying(party):
                return share(self.net, x)
        return Shares(x, self._zeros(self.net.S, x)) if party == self.net.A else Shares(self._zeros(self.net.A, x), x)

    def _querying(self, party: Any) -> AbstractContextManager[None]:
        """Return a context in which an owner that holds no shares plays Q."""
        return self.net.playing(STAR, Q=party, A=self.net.A, S=self.net.S, D=self.net.D)

    def embedded(self, x: Any) -> Shares:
        at_A = x if type(x) is Located else self.net.public(self.net.A, x)
        return Shares(at_A, self._zeros(self.net.S, at_A))

    def _zeros(self, party: Any, x: Any) -> Located:
        """The half of a party that holds nothing of a value: zeros of x's shape."""
        return self.net.public(party, torch.zeros((), dtype=torch.int64, device=self.device)).expand(x.shape)

    def reveal(self, x: Shares, flags: Sequence[Shares], to: Any = None) -> tuple[Located, Located | None]:
        if to not in (None, self.net.Q):
            with self._querying(to):
                return self.reveal(x, flags)
        if not flags:
            prove_pending(self.net)
            return reveal(self.net, x), None
        padded, key = guard(self.net, x, tuple(flags))
        return remove_pad(reveal(self.net, padded), x.shape, key)

    def reveal_to(self, x: Shares, party: Any) -> Located:
        prove_pending(self.net)
        return reveal_to_A(self.net, x) if party == self.net.A else reveal_to_S(self.net, x)

    def export_shares(self, x: Shares) -> tuple[torch.Tensor, ...]:
        return self.net.read(x.A, self.net.A), self.net.read(x.S, self.net.S)

    def import_shares(self, name: str, halves: Sequence[torch.Tensor]) -> Shares:
        parties = (self.net.A, self.net.S, self.net.Q)[: len(halves)]
        return Shares(
            *(self.net.own(p, half, name=f"{name}.{p.role}") for p, half in zip(parties, halves, strict=True))
        )

    def named_shares(self, name: str, x: Shares) -> dict[str, torch.Tensor]:
        held = {"A": x.A, "S": x.S} if x.Q is None else {"A": x.A, "S": x.S, "Q": x.Q}
        return {f"{name}.{role}": part._value for role, part in held.items()}

    def aggregate(
        self, terms: Sequence[tuple[Star, Shares, Sequence[Shares]]], guarded: bool, noise: Noise | None = None
    ) -> tuple[Located, Located | None]:
        shape = terms[0][1].shape
        for term, _, _ in terms if not guarded else ():
            prove_pending(term.net)
        drawn = None if noise is None else self.net.fresh(self.net.S, at_server(noise, shape))
        if not guarded:
            return self._sum([(term.net, x) for term, x, _ in terms], drawn), None
        padded = [guard(term.net, x, tuple(flags)) for term, x, flags in terms]
        with run_in(self.net):
            if drawn is not None:
                drawn = compute(beside_tag, drawn)
            total = self._sum([(term.net, x) for (term, _, _), (x, _) in zip(terms, padded, strict=True)], drawn)
            return remove_pad(total, shape, *(key for _, key in padded))

    def collect(self, x: Shares, to: Star) -> Shares:
        prove_pending(self.net)
        return to.from_halves(*collect(self.net, x))

    def halves(self, x: Shares) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net.read(x.A, self.net.A), self.net.read(x.S, self.net.S)

    def from_halves(self, first: Located, at_S: Located) -> Shares:
        with run_in(self.net):
            return Shares(first, at_S)

    def check_flags(self, flags: Sequence[Shares], calls: Sequence[tuple[Star, Sequence[Shares]]]) -> Located | None:
        first, raised = calls[0][0], []
        for words in finish_flags(self.net, tuple(flags)) if flags else ():
            raised.append(first.from_halves(*return_flags(self.net, words)))
        terms = []
        for call, own in calls:
            with run_in(call.net):
                nothing = call.embedded(torch.empty(0, dtype=torch.int64, device=self.device))
            terms.append((call, nothing, (*own, *(raised if call is first else ()))))
        return first.aggregate(terms, True)[1]

    def _sum(self, terms: list[tuple[Net, Shares]], noise: Located | None) -> Located:
        return aggregate(self.net, terms) if noise is None else aggregate_noisy(self.net, terms, noise)

    def each(self, f: Callable, *values: Any, **public: Any) -> Shares:
        return each(f, *values, **public)

    def moved(self, f: Callable, x: Shares, *public: Any) -> Any:
        return x.moved(f, *public)

    def affine(self, f: Callable, x: Shares, number: int, *public: Any) -> Shares:
        return Shares(compute(f, x.A, number, *public), compute(f, x.S, 0, *public))

    def shuffled(self, x: Shares) -> Shares:
        return shuffle(self.net, x)

    def weight(self, x: Located) -> MaskedWeight:
        return mask_weight(self.net.setup, x)

    def streamed(self, x: Located, encoded: Callable) -> StreamedWeight:
        return mask_streamed_weight(self.net.setup, x, encoded)

    def viewed(self, weight: MaskedWeight | StreamedWeight, view: Callable) -> MaskedWeight | StreamedWeight:
        return weight.viewed(self.net.setup, view)

    def linear(self, product: Callable, x: Shares, weight: MaskedWeight | StreamedWeight) -> Shares:
        return linear(self.net, self.net.setup, product, x, weight)

    def bin_matrix(self, codes: Located, owner: Any, bins: int) -> BinMatrix | Shares:
        if owner in (self.net.A, self.net.S):
            return mask_bins(self.net, owner, codes, bins)
        return self.owned(compute(indicators, codes, bins), owner)

    def by_bins(self, product: Callable, x: Shares, matrix: BinMatrix | Shares) -> Shares:
        if isinstance(matrix, BinMatrix):
            return multiply_bins(self.net, product, x, matrix)
        return multiply(self.net, product, x, matrix)

    def multiply(self, product: Callable, x: Shares, y: Shares) -> Shares:
        return multiply(self.net, product, x, y)

    def square(self, x: Shares) -> Shares:
        return square(self.net, x)

    def square_sum(
        self, x: Shares, dims: tuple[int, ...], centred: bool, offset: int, shifts: Sequence[int]
    ) -> list[Shares]:
        return square_sum(self.net, open_masked(self.net, x), dims, centred, offset, shifts)

    def truncate(self, x: Shares, shift: int, limit_bits: int | None = None) -> Shares:
        return truncate(self.net, x, shift, *self._borrow(x, shift, limit_bits).in_place(limit_bits))

    def _borrow(self, x: Shares, shift: int, limit_bits: int | None = None) -> Borrow:
        """How a truncation of x computes its borrow; a dealer that proves what it deals has trees alone."""
        if self.net.state(DealingProofs).required:
            return Borrow()
        count, worth = x.shape.numel(), self._round_worth
        levels, (excess, saved) = levels_of(block_count(0, shift)), wide_excess(shift)
        wide = saved > 0 and (self._few(x) or excess * count <= saved * worth)
        rounds, spent = levels + 1 - (saved if wide else 0), excess if wide else 0
        number = rounds > 1 and (number_span(shift)[1] - spent) * count <= (rounds - 1) * worth
        keys = self._key_worth(x, shift + (0 if limit_bits is None else 63), 1 if number else rounds)
        return Borrow(keys, wide, number)

    def truncate_and_multiply(self, x: Shares, shift: int, y: Shares) -> Shares:
        if self._product_by_keys(x, shift):
            return truncate_and_multiply(self.net, x, shift, y)
        return self.multiply(torch.mul, self.truncate(x, shift), y)

    def _product_by_keys(self, x: Shares, shift: int) -> bool:
        """Whether x is truncated and multiplied in one round."""
        proves = self.net.state(DealingProofs).required
        return not proves and key_bytes(shift, 2) * x.shape.numel() <= 3 * self._round_worth

    def at_least(self, x: Shares, thresholds: tuple[int, ...] = (0,), high: int = 63) -> Shares:
        return at_least(self.net, open_masked(self.net, x), thresholds, self._key_worth(x, high, 4), high)

    def is_zero(self, x: Shares) -> Shares:
        return bit_to_ring(self.net, is_zero(self.net, open_masked(self.net, x)), x.shape)

    def where_positive(self, x: Shares, values: Sequence[Shares]) -> list[Shares]:
        bits = drelu(self.net, open_masked(self.net, x))
        return [select(self.net, bits, open_masked(self.net, value)) for value in values]

    def where_between(
        self, x: Shares, low: int, high: int | None, value: Shares, planes: int = 63, squared: bool = False
    ) -> tuple[Shares, Shares | None]:
        masked, thresholds = open_masked(self.net, x), (low,) if high is None else (low, high)
        if self._key_worth(x, planes, 4):
            bits = signs(self.net, masked, thresholds, planes)
            inside = bits[0] if high is None else bits[0] - bits[1]
            chosen = multiply(self.net, torch.mul, inside, value)
            return square(self.net, chosen) if squared else chosen, None if high is None else bits[1]
        proves, count = self.net.state(DealingProofs).required, len(thresholds)
        wide = not proves and two_level_excess(planes, count) * x.shape.numel() <= self._round_worth
        bits = each(torch.Tensor.view, drelu(self.net, masked, planes, thresholds, wide), count, -1)
        inside = bits[0] if high is None else bits[0] ^ bits[1]
        chosen = (select_square if squared else select)(self.net, inside, open_masked(self.net, value))
        return chosen, None if high is None else bit_to_ring(self.net, bits[1], x.shape)

    def ramps(
        self, x: Shares, thresholds: tuple[int, ...], shift: int = 0, high: int = 63, limit_bits: int | None = None
    ) -> list[Shares]:
        few = self._few(x) and shift and thresholds == (0,) and not self._keyed(x)
        if few and levels_worth(self.net, 1, x.shape.numel(), shift, 63, high, limit_bits) == 1:
            return [ramp_of_largest(self.net, each(torch.unsqueeze, x, 0), shift, 63, high, limit_bits, levels=1)]
        return ramps(self.net, x, thresholds, shift, high, self._keyed(x), limit_bits)

    def relu_and_rest(self, x: Shares, shift: int, high: int, limit_bits: int | None = None) -> tuple[Shares, Shares]:
        rest = self.truncate(x, shift, limit_bits) if shift else x
        if self._keyed(x):  # what is truncated already needs one opening more, and fewer keys
            return relu(self.net, rest, 0, high - shift, True), rest
        return relu(self.net, x, shift, high), rest

    def leaky_relu(self, x: Shares, shift: int, bits: int) -> Shares:
        return leaky_relu_privhfl(self.net, x, shift, bits)

    def leaky_largest(self, x: Shares, bits: int) -> Shares:
        return leaky_maxpool_privhfl(self.net, x, bits)

    def maximum(self, x: Shares, y: Shares, high: int = 63) -> Shares:
        return maximum(self.net, x, y, high, self._keyed(x))

    def largest(self, x: Shares, high: int = 63) -> Shares:
        if self._keyed(x):
            return max_tree(self.net, x, high, fss=True)
        values = x.shape[0]
        if values < (FOUR if self._few(x) else LONG):
            return max_tree(self.net, x, high)
        sizes = group_sizes(values, x.shape[1:].numel(), high, self._round_worth)
        proves = self.net.state(DealingProofs).required
        return max_by_fours(self.net, x, high, sizes, 0 if proves else self._round_worth)

    def ramp_of_largest(
        self, x: Shares, shift: int, between: int = 63, high: int = 63, limit_bits: int | None = None
    ) -> Shares:
        m, count = x.shape[0], x.shape[1:].numel()
        if not self._few(x) or m > MOST or self._keyed(x):
            return self.ramps(self.largest(x, between), (0,), shift, high, limit_bits)[0]
        levels = levels_worth(self.net, m, count, shift, between, high, limit_bits)
        return ramp_of_largest(self.net, x, shift, between, high, limit_bits, levels)

    def series(self, x: Shares, scale_bits: int, which: Series) -> Shares:
        return trigonometric(self.net, x, scale_bits, which)

    def rounded_series(
        self, x: Shares, scale_bits: int, which: Series, shift: int, factor: Shares | None = None, opened: bool = False
    ) -> Shares:
        count, starts = x.shape.numel(), range(0, max(1, x.shape.numel()), PIECE)
        digits = functools.partial(trigonometric, self.net, digits=True)
        if opened:
            masked = open_masked(self.net, x)
            found = [digits(masked, scale_bits, which, part=slice(k, k + PIECE)) for k in starts]
        elif count <= PIECE:
            found = [digits(x, scale_bits, which)]
        else:
            flat = each(torch.flatten, x)
            found = [digits(flat[k : k + PIECE], scale_bits, which) for k in starts]
        whole = (each(torch.reshape, each(concatenate, *parts), x.shape) for parts in zip(*found, strict=True))
        first, second = whole if opened or count > PIECE else found[0]
        if factor is not None and self._product_by_keys(x, shift):
            return round_digits(self.net, first, second, which, shift, factor=factor)
        y = round_digits(self.net, first, second, which, shift, self._borrow(x, shift).in_place())
        return y if factor is None else self.multiply(torch.mul, y, factor)

    def series_and_later(self, x: Shares, scale_bits: int, which: Series, later: Series) -> tuple[Shares, tuple]:
        return trigonometric(self.net, x, scale_bits, which, later)

    def finish_series(self, parts: Sequence[Shares], which: Series) -> Shares:
        first, second = parts
        return finish_series(self.net, first, second, which)

    def normalise(self, x: Shares, low: int, high: int, step: int = 1, planes: int = 63) -> Normal:
        fss, count = self._key_worth(x, planes, levels_of(block_count(0, planes)) + 1), x.shape.numel()
        more = key_bytes(planes, 2) - key_bytes(planes) if fss else 8 * ((high - low) // step + 1)
        return normalise(self.net, x, low, high, fss, step, more * count <= self._round_worth, planes)

    def flag(self, bad: Shares) -> None:
        raise_flags(self.net, flags_of_bits(self.net, bad))

    def join_flags(self, flags: Sequence[Shares]) -> Shares:
        return join_flags(self.net, tuple(flags))

    def flag_outside(self, x: Shares, bits: int, everywhere: bool = False) -> None:
        masked = open_masked(self.net, x)
        raise_outside(self.net, masked, bits, fss=self._keyed(x) and not everywhere, everywhere=everywhere)

    def own_code(self, x: Shares, count: int, ignored: int | None = None) -> Shares | None:
        return None if x.Q is None else share(self.net, compute(one_hot, x.Q, count, ignored))

    def check_index(self, x: Shares, count: int, ignored: int | None = None) -> bool:
        if x.Q is not None:
            self.net.check(self.net.Q, in_table, x.Q, count, ignored)
        return x.Q is not None


@leaf(shapes=lambda v, count, _ignored=None: v.new_empty((*v.shape, count)))
def one_hot(v: torch.Tensor, count: int, ignored: int | None = None) -> torch.Tensor:
    """One-hot codes [v = 0, ..., v = count - 1] along a new last dimension; zeros for `ignored`, which is outside."""
    if ignored is None:
        return torch.nn.functional.one_hot(v, count)
    return torch.nn.functional.one_hot(torch.where(v == ignored, count, v), count + 1)[..., :count].contiguous()


@leaf(shapes=lambda v, _count, _ignored=None: v)
def in_table(v: torch.Tensor, count: int, ignored: int | None = None) -> torch.Tensor:
    """Return v; raise `DimensionError` unless all of its elements are in 0 .. count - 1, or `ignored`."""
    wrong = (v < 0) | (v >= count)
    outside = int((wrong if ignored is None else wrong & (v != ignored)).sum())
    if outside:
        raise DimensionError(
            f"index out of range: {outside} of {v.numel()} indices are not among 0 to {count - 1}, which there are"
            + ("; secret labels that count nothing are -1, with ignore_index=-1" if bool((v == -100).any()) else "")
        )
    return v
