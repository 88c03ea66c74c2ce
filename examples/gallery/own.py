"""Protocols of sectorch itself, as `check_protocol` takes them: what each computes, and over which inputs.

The tests hold each of them to its word (`tests/testing/test_own_protocols.py`), and run each in every way there is
(`CASES` of `tests/helpers.py`).

    python examples/gallery/mutation.py

plants faults in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sectorch.backend import SERIES_BITS, RaisedFlags, Series
from sectorch.choreography import Located, Net, Phase
from sectorch.choreography.located import compute
from sectorch.garbled.argmax import UNANSWERED, argmax_confident_shares, argmax_noisy_shares, argmax_onehot_shares
from sectorch.mpc.harmonics import DIGIT
from sectorch.mpc.series import draw_error, finish_series, normalise, round_digits, trigonometric
from sectorch.mpc.star.bins import BinChoices, BinSums, indicators, mask_bins, multiply_bins
from sectorch.mpc.star.compare import drelu, is_zero
from sectorch.mpc.star.dealing_proofs import DealingProofs, prove_pending
from sectorch.mpc.star.fss import choose_by_keys
from sectorch.mpc.star.guard import guard, join_flags, remove_pad
from sectorch.mpc.star.linear import linear, mask_streamed_weight, mask_weight
from sectorch.mpc.star.masking import open_masked
from sectorch.mpc.star.maximum import max_by_fours, max_tree, ramp_of_largest
from sectorch.mpc.star.multiply import multiply, square
from sectorch.mpc.star.relu import maximum, ramps, relu
from sectorch.mpc.star.select import bit_to_ring, choose, select, select_square
from sectorch.mpc.star.shares import Shares, aggregate, aggregate_noisy, each, reveal, reveal_to_A, reveal_to_S, share
from sectorch.mpc.star.shuffle import shuffle
from sectorch.mpc.star.square_sum import square_sum
from sectorch.mpc.star.thresholds import at_least, raise_outside
from sectorch.mpc.star.truncate import truncate, truncate_and_multiply
from sectorch.ops.series import GELU, GELU_SLOPE, SIGMOID
from sectorch.ring import as_signed
from sectorch.ring.products import Conv2d, Linear, matmul
from sectorch.testing import Given


@dataclass(frozen=True)
class Own:
    """A protocol of sectorch with what `check_protocol` needs to know.

    Args:
        deep: its keys, or the codes of its blocks, have too many bits for a joint view of all of them.
    """

    name: str
    protocol: Callable
    given: Sequence[Given]
    reference: Callable
    options: dict[str, Any] = field(default_factory=dict)
    deep: bool = False


ANY = Given(low=-(1 << 63), high=(1 << 63) - 1)
WEIGHT = Given("A", low=-(1 << 63), high=(1 << 63) - 1, phase=Phase.SETUP)
HALF_RING = Given(low=-(1 << 62) + 1, high=(1 << 62) - 1)
THRESHOLDS = (0, 1, -1, 1 << 40, -(1 << 61))
RAMPS = (0, 1 << 30, -5)
LOW, HIGH = 3, 9
LIMIT_BITS = 30


def rounded(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x / 2^shift rounded half up, for |x| < 2^62."""
    return (x + ((1 << shift) >> 1)) >> shift


def _linear(product: Callable) -> Callable:
    return lambda net, x, w: linear(net, net.setup, product, x, mask_weight(net.setup, w))


CODES = Given("A", (6, 2), 0, 3)
"""Bin numbers of six rows and two features, of four bins: six columns."""


def _by_columns(rows: int) -> Given:
    return replace(ANY, shape=lambda n: (rows, max(1, n // rows)))


def _small(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8)


def _bins(owner: str, net: Net, x: Shares, codes: Located) -> tuple[Shares, Shares]:
    """Sums over rows, and the matrix times the same values as a table."""
    matrix = mask_bins(net, getattr(net, owner), compute(_small, codes), 4)
    return multiply_bins(net, BinSums(4), x, matrix), multiply_bins(net, BinChoices(4), each(torch.t, x), matrix)


def _by_bins(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    matrix = indicators(_small(codes), 4)
    return x.T @ matrix, matrix @ x


def _streamed(net: Net, x: Shares, w: Located) -> Shares:
    return linear(net, net.setup, Linear(), x, mask_streamed_weight(net.setup, w, _tripled))


def _tripled(w: torch.Tensor) -> torch.Tensor:
    return w * 3


def _bits(protocol: Callable) -> Callable:
    """A protocol on a masked opening that gives packed bits, as one that gives ring elements."""
    return lambda net, x: bit_to_ring(net, protocol(net, open_masked(net, x)), x.shape)


def _thresholds(net: Net, x: Shares) -> tuple[Shares, ...]:
    words = drelu(net, open_masked(net, x), thresholds=THRESHOLDS)
    rows = each(torch.Tensor.view, words, len(THRESHOLDS), -1)
    return tuple(bit_to_ring(net, rows[i], x.shape) for i in range(len(THRESHOLDS)))


def _signs(net: Net, x: Shares) -> tuple[Shares, ...]:
    bits = at_least(net, open_masked(net, x), THRESHOLDS, fss=True)
    return tuple(bits[i] for i in range(len(THRESHOLDS)))


def _select(net: Net, x: Shares, product: Callable = select) -> Shares:
    masked = open_masked(net, x)
    return product(net, drelu(net, masked), masked)


def _truncate_and_multiply(net: Net, x: Shares, y: Shares, shift: int) -> Shares:
    return truncate_and_multiply(net, x, shift, y)


SHIFTS, OFFSET = (1, 40, 64), 3 << 70


def _square_sum(centred: bool, net: Net, x: Shares) -> tuple[Shares, ...]:
    return tuple(square_sum(net, open_masked(net, x), (-1,), centred, OFFSET, SHIFTS))


def _square_sum_of(centred: bool, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By Python's integers."""
    totals = [
        len(row) * sum(v * v for v in row) - sum(row) ** 2 if centred else sum(v * v for v in row) for row in x.tolist()
    ]
    return tuple(torch.tensor([[as_signed(total + OFFSET >> k)] for total in totals]) for k in SHIFTS)


def _choose(net: Net, x: Shares, fss: bool = False) -> tuple[Shares, ...]:
    masked, count = open_masked(net, x), len(THRESHOLDS)
    if fss:
        found = choose_by_keys(net, masked, THRESHOLDS)
    else:
        found = choose(net, drelu(net, masked, thresholds=THRESHOLDS), masked, count)
    return tuple(part[i] for part in found for i in range(count))


def _chosen(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    bits = [(x >= t).long() for t in THRESHOLDS]
    return (*bits, *(bit * x for bit in bits))


def _normalise(net: Net, x: Shares, fss: bool = False, selected: bool = False) -> tuple[Shares, Shares]:
    normal = normalise(net, x, LOW, HIGH, fss, selected=selected)
    return normal.mantissa, each(torch.sum, normal.bits[1:-1], 0) + (LOW + 1)


def _normal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = sum((x >= 1 << k).long() for k in range(LOW + 1, HIGH)) + (LOW + 1)
    inside = torch.where(x < 1 << LOW, torch.tensor(1 << (HIGH - 1)), x << (HIGH - exponent))
    return torch.where(x < 1 << HIGH, inside, torch.tensor((1 << HIGH) - 1)), exponent


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(x.double() * 2.0**-20) * 2.0**SERIES_BITS).round().to(torch.int64)


def gelu_and_slope(net: Net, x: Shares) -> tuple[Shares, Shares]:
    """Two series of one opening."""
    y, parts = trigonometric(net, x, 20, GELU, GELU_SLOPE)
    return y, finish_series(net, *parts, GELU_SLOPE)


def gelu_and_slope_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.double() * 2.0**-20
    tail = 0.5 * torch.erfc(-x * 0.5**0.5)
    slope = tail + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    return tuple((value * 2.0**SERIES_BITS).round().to(torch.int64) for value in (x * tail, slope))


def _wide_bits(net: Net, x: Shares, thresholds: tuple[int, ...]) -> tuple[Shares, ...]:
    bits = bit_to_ring(net, drelu(net, open_masked(net, x), 63, thresholds, wide=True), x.shape, len(thresholds))
    return tuple(bits[i] for i in range(len(thresholds)))


DIGITS = Given(low=-(1 << 28), high=1 << 28)


def _round_digits(net: Net, x: Shares, y: Shares, **how: Any) -> Shares:
    """A lower digit without bits that it drops, whose carry D's mask would decide."""
    return round_digits(net, x, y << DIGIT, Series(0, 1, 0, 0.0, 0.0, (), ()), 32, **how)


def _at_least(net: Net, x: Shares) -> tuple[Shares, ...]:
    bits = at_least(net, open_masked(net, x), THRESHOLDS)
    return tuple(bits[i] for i in range(len(THRESHOLDS)))


def _aggregate(nets: list[Net], *shared: Shares) -> Located:
    return aggregate(nets[0], list(zip(nets, shared, strict=True)))


def _noisy(nets: list[Net], *values: Any) -> Located:
    return aggregate_noisy(nets[0], list(zip(nets, values[:-1], strict=True)), values[-1])


def _limited(net: Net, x: Shares, everywhere: bool = False) -> Shares:
    """x, with a flag where it is not within the limit."""
    masked = open_masked(net, x)
    raise_outside(net, masked, LIMIT_BITS, everywhere=everywhere)
    return x


def _verified(protocol: Callable) -> Callable:
    """A protocol in which the dealer proves what it deals."""

    def program(net: Net, *values: Any) -> Any:
        net.state(DealingProofs).required = True
        found = protocol(net, *values)
        prove_pending(net)
        return found

    return program


def _stacked(*rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows)


def _sum(*rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows).sum(0)


def _ramp(**options: Any) -> Callable:
    """`ramp_of_largest` of values that stand side by side, over 2^20."""
    return lambda net, *rows: ramp_of_largest(net, each(_stacked, *rows), 20, **options)


def _ramp_of(*rows: torch.Tensor) -> torch.Tensor:
    return rounded(_maximum(*rows), 20).clamp(min=0)


def _maximum(*rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows).amax(0)


def _largest(**options: Any) -> Callable:
    """The largest of several inputs: so each element stands for itself."""
    return lambda net, *rows: max_tree(net, each(_stacked, *rows), **options)


CLASSES = 3


def _classes(*parties: str) -> list[Given]:
    """For each party few classes of numbers that a comparison in 16 bits takes, their sums as well, one by one."""
    return [Given(party, low=-(1 << 14), high=(1 << 14) - 1) for party in parties for _ in range(CLASSES)]


def _by_class(f: Callable) -> Callable:
    """A protocol on values [n, classes] of several parties, or its reference, as one on each class of each of these."""

    def program(*args: Any) -> Any:
        net, rows = ((), args) if isinstance(args[0], torch.Tensor) else (args[:1], args[1:])
        groups = [rows[at : at + CLASSES] for at in range(0, len(rows), CLASSES)]
        return f(*net, *(compute(_beside, *group) if net else _beside(*group) for group in groups))

    return program


def _beside(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack(columns, -1)


def _one_hot(at_A: torch.Tensor, at_Q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.nn.functional.one_hot(_first_largest(at_A + at_Q), CLASSES).unbind(-1)


def _first_largest(x: torch.Tensor) -> torch.Tensor:
    return (x == x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def _opened_one_hot(net: Net, at_A: Located, at_Q: Located) -> tuple[Shares, ...]:
    """Its halves are at Q and at A: the test reads a half at S."""
    at_Q, at_A = argmax_onehot_shares(net, at_A, at_Q, drop=0, bits=16)
    hot = share(net, at_Q) + at_A
    return tuple(hot[:, i] for i in range(CLASSES))


def _confident(check: torch.Tensor, at_S: torch.Tensor, at_Q: torch.Tensor) -> torch.Tensor:
    sure = (check + at_Q >= 0).any(-1)
    return torch.where(sure, _first_largest(at_S + at_Q), UNANSWERED)


def _guarded(protocol: Callable) -> Callable:
    """A protocol with a limit, revealed under guard: the result, or zeros, and whether there is one."""

    def program(net: Net, *xs: Shares) -> tuple:
        padded, key = guard(net, protocol(net, *xs), tuple(net.state(RaisedFlags)))
        found = remove_pad(reveal(net, padded), xs[0].shape, key)
        return found[0], found[1].to(torch.int64)

    return program


def _inside(result: Callable) -> Callable:
    def reference(*xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = result(*xs)
        inside = ((wanted >= -(1 << LIMIT_BITS)) & (wanted < 1 << LIMIT_BITS)).all()
        return wanted * inside, inside.long().view(1)

    return reference


def _joined(net: Net, x: Shares) -> tuple:
    """A truncation under guard, with the flags as one word: two sets of them, one after the other."""
    y = truncate(net, x, 20, limit_bits=LIMIT_BITS)
    flag = join_flags(net, (join_flags(net, tuple(net.state(RaisedFlags))), *net.state(RaisedFlags)))
    padded, key = guard(net, y, (flag,))
    found = remove_pad(reveal(net, padded), x.shape, key)
    return found[0], found[1].to(torch.int64)


CONV = Conv2d((2, 1), (1, 0), (1, 2))
WIDE = Conv2d((1, 1), (1, 1))
DEPTHWISE = Conv2d((1, 1), (1, 1), groups=2)


def within_series(*series: Series) -> dict[str, int]:
    """How far results are from these functions, and from each other."""
    return {
        "error": max(int((s.error + draw_error(s) / 2) * 2.0**SERIES_BITS) + 2 for s in series),
        "varies": max(int(draw_error(s) * 2.0**SERIES_BITS) + 1 for s in series),
    }


SERIES = within_series(SIGMOID)
WHOLE = {"elementwise": False, "elements": 12}
HASHED = {"elementwise": False, "elements": 4, "exhaustive": 0}


def cut(shift: int) -> Given:
    """What a truncation takes: the half unit that it adds must stay within 2^62 too."""
    most = (1 << 62) - (1 << shift - 1) - 1
    return Given(low=-most, high=most)


def _shaped(given: Given, *shape: int) -> Given:
    return replace(given, shape=shape)


def _by_rows(*shape: int) -> Given:
    """So many rows that there are about n elements; 12 for one row, or two or three of few."""
    return replace(ANY, shape=lambda n: (-(-n // math.prod(shape)), *shape))


def _any_of(*parties: str) -> list[Given]:
    """Anything that each of these has."""
    return [replace(ANY, party=party) for party in parties]


OWN = [
    Own("share", share, _any_of("Q"), lambda x: x),
    Own("reveal", reveal, [ANY], lambda x: x),
    Own("reveal_to_A", reveal_to_A, [ANY], lambda x: x),
    Own("reveal_to_S", reveal_to_S, [ANY], lambda x: x),
    Own("aggregate", _aggregate, [ANY] * 3, _sum, {"answering": 3}),
    Own("aggregate_noisy", _noisy, [ANY] * 3 + _any_of("S"), _sum, {"answering": 3}),
    Own("linear_mul", _linear(lambda x, w, _: x * w), [ANY, WEIGHT], torch.mul),
    Own("linear_matmul", _linear(lambda x, w, _: matmul(x, w)), [_by_rows(4), _shaped(WEIGHT, 4, 2)],
        torch.matmul, WHOLE),
    Own("linear_tiled", _linear(Linear()), [_by_rows(5), _shaped(WEIGHT, 130, 5)],
        lambda x, w: x @ w.T, WHOLE),
    Own("linear_streamed", _streamed, [_by_rows(5), _shaped(WEIGHT, 130, 5)], lambda x, w: x @ w.T * 3, WHOLE),
    Own("conv2d", _linear(CONV), [_by_rows(2, 4, 3), _shaped(WEIGHT, 3, 2, 3, 2)],
        lambda x, w: torch.conv2d(x, w, None, (2, 1), (1, 0), (1, 2)), WHOLE),
    Own("conv2d_tiled", _linear(WIDE), [_by_rows(2, 4, 3), _shaped(WEIGHT, 128, 2, 2, 3)],
        lambda x, w: torch.conv2d(x, w, padding=1), WHOLE),
    Own("verified_linear", _verified(_linear(Linear())), [_shaped(ANY, 64, 2), _shaped(WEIGHT, 1, 2)],
        lambda x, w: x @ w.T, WHOLE),
    Own("verified_conv2d", _verified(_linear(CONV)), [_shaped(ANY, 1, 2, 4, 3), _shaped(WEIGHT, 64, 2, 3, 2)],
        lambda x, w: torch.conv2d(x, w, None, (2, 1), (1, 0), (1, 2)), WHOLE),
    Own("verified_depthwise", _verified(_linear(DEPTHWISE)), [_shaped(ANY, 1, 2, 8, 8), _shaped(WEIGHT, 2, 1, 3, 3)],
        lambda x, w: torch.conv2d(x, w, padding=1, groups=2), WHOLE),
    Own("bins_of_A", partial(_bins, "A"), [_by_columns(6), CODES], _by_bins, WHOLE),
    Own("bins_of_S", partial(_bins, "S"), [_by_columns(6), replace(CODES, party="S")], _by_bins, WHOLE),
    Own("multiply", lambda net, x, y: multiply(net, torch.mul, x, y), [ANY, ANY], torch.mul),
    Own("multiply_matmul", lambda net, x, y: multiply(net, matmul, x, y), [_by_rows(6), _shaped(ANY, 6, 2)],
        torch.matmul, WHOLE),
    Own("square", square, [ANY], torch.square),
    Own("shuffle", lambda net, x: each(partial(torch.sum, dim=0), shuffle(net, x)), [_by_rows(2)],
        lambda x: x.sum(0), WHOLE | {"sorts": ("rho", "pi", "sigma")}),
    Own("truncate_20", partial(truncate, shift=20), [cut(20)], partial(rounded, shift=20)),
    Own("truncate_1", partial(truncate, shift=1), [cut(1)], partial(rounded, shift=1)),
    Own("truncate_fss", partial(truncate, shift=20, fss=True), [cut(20)], partial(rounded, shift=20)),
    Own("truncate_and_multiply", partial(_truncate_and_multiply, shift=20), [cut(20), ANY],
        lambda x, y: rounded(x, 20) * y),
    Own("truncate_wide", partial(truncate, shift=20, wide=True), [cut(20)], partial(rounded, shift=20)),
    Own("drelu", _bits(drelu), [ANY], lambda x: (x >= 0).long()),
    Own("drelu_high", _bits(partial(drelu, high=40)), [Given(low=-(1 << 40), high=(1 << 40) - 1)],
        lambda x: (x >= 0).long()),
    Own("drelu_thresholds", _thresholds, [HALF_RING], lambda x: tuple((x >= t).long() for t in THRESHOLDS)),
    Own("is_zero", _bits(is_zero), [ANY], lambda x: (x == 0).long()),
    Own("select", _select, [ANY], lambda x: x.clamp(min=0)),
    Own("select_square", partial(_select, product=select_square), [ANY], lambda x: x.clamp(min=0).square()),
    Own("square_sum", partial(_square_sum, True), [replace(HALF_RING, shape=lambda n: (2, max(2, n // 2)))],
        partial(_square_sum_of, True), WHOLE),
    Own("square_sum_uncentred", partial(_square_sum, False), [replace(HALF_RING, shape=lambda n: (2, max(2, n // 2)))],
        partial(_square_sum_of, False), WHOLE),
    Own("choose", _choose, [HALF_RING], _chosen),
    Own("choose_by_keys", partial(_choose, fss=True), [HALF_RING], _chosen, deep=True),
    Own("relu", relu, [ANY], lambda x: x.clamp(min=0)),
    Own("relu_20", partial(relu, shift=20), [cut(20)], lambda x: rounded(x, 20).clamp(min=0)),
    Own("relu_high", partial(relu, shift=20, high=41), [Given(low=-(1 << 40), high=(1 << 40) - 1)],
        lambda x: rounded(x, 20).clamp(min=0)),
    Own("ramps", lambda net, x: tuple(ramps(net, x, RAMPS)), [HALF_RING],
        lambda x: tuple((x - t).clamp(min=0) for t in RAMPS)),
    Own("ramps_20", lambda net, x: tuple(ramps(net, x, RAMPS, 20)), [Given(low=-(1 << 61), high=(1 << 61) - 1)],
        lambda x: tuple((rounded(x, 20) - t).clamp(min=0) for t in RAMPS)),
    Own("relu_fss", partial(relu, fss=True), [ANY], lambda x: x.clamp(min=0), deep=True),
    Own("relu_fss_20", partial(relu, shift=20, fss=True), [cut(20)],
        lambda x: rounded(x, 20).clamp(min=0), deep=True),
    Own("gate_high", partial(relu, shift=28, high=41, fss=True), [Given(low=-(1 << 40), high=(1 << 40) - 1)],
        lambda x: rounded(x, 28).clamp(min=0)),
    Own("ramps_fss", lambda net, x: tuple(ramps(net, x, RAMPS, fss=True)), [HALF_RING],
        lambda x: tuple((x - t).clamp(min=0) for t in RAMPS), deep=True),
    Own("ramps_fss_20", lambda net, x: tuple(ramps(net, x, RAMPS, 20, fss=True)),
        [Given(low=-(1 << 61), high=(1 << 61) - 1)],
        lambda x: tuple((rounded(x, 20) - t).clamp(min=0) for t in RAMPS), deep=True),
    Own("at_least", _at_least, [HALF_RING], lambda x: tuple((x >= t).long() for t in THRESHOLDS)),
    Own("signs", _signs, [HALF_RING], lambda x: tuple((x >= t).long() for t in THRESHOLDS), deep=True),
    Own("maximum", maximum, [Given(low=-(1 << 62), high=(1 << 62) - 1)] * 2, torch.maximum),
    Own("maximum_fss", partial(maximum, fss=True), [Given(low=-(1 << 62), high=(1 << 62) - 1)] * 2, torch.maximum,
        deep=True),
    Own("max_tree", _largest(), [HALF_RING] * 3, _maximum),
    Own("max_by_fours_wide", lambda net, *rows: max_by_fours(net, each(_stacked, *rows), 63, (5,), 1 << 40),
        [HALF_RING] * 5, _maximum),
    Own("drelu_wide", partial(_wide_bits, thresholds=THRESHOLDS), [HALF_RING],
        lambda x: tuple((x >= t).long() for t in THRESHOLDS)),
    Own("max_by_fours", lambda net, *rows: max_by_fours(net, each(_stacked, *rows)), [HALF_RING] * 5, _maximum),
    Own("ramp_of_largest", _ramp(levels=1), [cut(20)], _ramp_of, deep=True),
    Own("ramp_of_largest_of_two", _ramp(levels=1), [cut(20)] * 2, _ramp_of, deep=True),
    Own("ramp_of_largest_of_four", _ramp(levels=3), [cut(20)] * 4, _ramp_of),
    Own("ramp_of_largest_high", _ramp(levels=1, between=41, high=40),
        [Given(low=-(1 << 40), high=(1 << 40) - (1 << 20) - 1)], _ramp_of, deep=True),
    Own("max_tree_fss", _largest(fss=True), [HALF_RING] * 3, _maximum, deep=True),
    Own("normalise", _normalise, [Given(low=1, high=(1 << 61) - 1)], _normal),
    Own("normalise_fss", partial(_normalise, fss=True), [Given(low=1, high=(1 << 61) - 1)], _normal, deep=True),
    Own("normalise_selected", partial(_normalise, selected=True), [Given(low=1, high=(1 << 61) - 1)], _normal),
    Own("normalise_fss_selected", partial(_normalise, fss=True, selected=True), [Given(low=1, high=(1 << 61) - 1)],
        _normal, deep=True),
    Own("trigonometric", lambda net, x: trigonometric(net, x, 20, SIGMOID), [Given(low=-(1 << 23), high=1 << 23)],
        _sigmoid, SERIES),
    Own("trigonometric_wide", lambda net, x: trigonometric(net, x << 20, 40, SIGMOID),
        [Given(low=-(1 << 23), high=1 << 23)], _sigmoid, SERIES),
    Own("trigonometric_later", gelu_and_slope, [Given(low=-(5 << 20), high=5 << 20)], gelu_and_slope_of,
        within_series(GELU, GELU_SLOPE)),
    *(Own(f"round_digits{name}", partial(_round_digits, how=how), [Given(low=-(1 << 60), high=1 << 60), DIGITS],
          lambda x, y: rounded(x + y, 32), deep=bool(name))
      for name, how in (("", ()), ("_fss", (True,)))),
    *(Own(f"truncate_number_{shift}", partial(truncate, shift=shift, number=True), [cut(shift)],
          partial(rounded, shift=shift)) for shift in (3, 20, 32)),
    Own("round_digits_times", lambda net, x, y, z: _round_digits(net, x, y, factor=z),
        [Given(low=-(1 << 60), high=1 << 60), DIGITS, ANY], lambda x, y, z: rounded(x + y, 32) * z, deep=True),
    Own("trigonometric_of_opening", lambda net, x: trigonometric(net, open_masked(net, x << 20), 40, SIGMOID),
        [Given(low=-(1 << 23), high=1 << 23)], _sigmoid, SERIES),
    Own("guarded_truncate", _guarded(partial(truncate, shift=20, limit_bits=LIMIT_BITS)),
        [cut(20)], _inside(partial(rounded, shift=20)), HASHED),
    Own("guarded_truncate_inside", _guarded(partial(truncate, shift=20, limit_bits=LIMIT_BITS)),
        [Given(low=-(1 << 49), high=1 << 49)], _inside(partial(rounded, shift=20)), HASHED),
    Own("guarded_truncate_fss", _guarded(partial(truncate, shift=20, fss=True, limit_bits=LIMIT_BITS)),
        [cut(20)], _inside(partial(rounded, shift=20)), HASHED, deep=True),
    Own("guarded_truncate_number", _guarded(partial(truncate, shift=20, number=True, limit_bits=LIMIT_BITS)),
        [cut(20)], _inside(partial(rounded, shift=20)), HASHED),
    Own("guarded_joined", _joined, [cut(20)], _inside(partial(rounded, shift=20)), HASHED),
    Own("guarded_relu", _guarded(partial(relu, shift=20, limit_bits=LIMIT_BITS)),
        [cut(20)], _inside(lambda x: rounded(x, 20).clamp(min=0)), HASHED),
    Own("guarded_relu_inside", _guarded(partial(relu, shift=20, limit_bits=LIMIT_BITS)),
        [Given(low=-(1 << 49), high=1 << 49)], _inside(lambda x: rounded(x, 20).clamp(min=0)), HASHED),
    Own("guarded_ramp_of_largest", _guarded(_ramp(levels=1, limit_bits=LIMIT_BITS)),
        [cut(20)] * 2, _inside(_ramp_of), HASHED),
    Own("guarded_ramp_of_largest_by_levels", _guarded(_ramp(levels=3, limit_bits=LIMIT_BITS)),
        [cut(20)], _inside(_ramp_of), HASHED),
    Own("guarded_relu_0", _guarded(partial(relu, limit_bits=LIMIT_BITS)),
        [HALF_RING], _inside(lambda x: x.clamp(min=0)), HASHED),
    Own("guarded_relu_fss", _guarded(partial(relu, shift=20, fss=True, limit_bits=LIMIT_BITS)),
        [cut(20)], _inside(lambda x: rounded(x, 20).clamp(min=0)), HASHED, deep=True),
    Own("guarded_ramps", _guarded(lambda net, x: ramps(net, x, (0, 7), 20, limit_bits=LIMIT_BITS)[0]),
        [Given(low=-(1 << 61), high=(1 << 61) - 1)], _inside(lambda x: rounded(x, 20).clamp(min=0)), HASHED),
    Own("guarded_limit", _guarded(_limited), [HALF_RING], _inside(lambda x: x), HASHED),
    Own("guarded_limit_everywhere", _guarded(partial(_limited, everywhere=True)), [ANY], _inside(lambda x: x), HASHED),
    Own("verified_relu_20", _verified(partial(relu, shift=20)), [cut(20)], lambda x: rounded(x, 20).clamp(min=0),
        HASHED),
    Own("verified_truncate", _verified(partial(truncate, shift=20)), [cut(20)], partial(rounded, shift=20), HASHED),
    Own("verified_select", _verified(_select), [ANY], lambda x: x.clamp(min=0), HASHED),
    Own("argmax_onehot_shares", _by_class(_opened_one_hot), _classes("A", "Q"), _by_class(_one_hot)),
    Own("argmax_noisy_shares", _by_class(partial(argmax_noisy_shares, bits=16)), _classes("S", "Q"),
        _by_class(lambda at_S, at_Q: _first_largest(at_S + at_Q))),
    Own("argmax_confident_shares", _by_class(partial(argmax_confident_shares, bits=16)), _classes("S", "S", "Q"),
        _by_class(_confident)),
]  # fmt: skip
