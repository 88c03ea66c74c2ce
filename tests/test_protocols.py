"""Every protocol against plain integers: random shapes, the whole range that its docstring promises, and its edges."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from helpers import (
    CASES,
    HIGHEST,
    LOWEST,
    SHAPES,
    case_session,
    check_relu,
    open_bits,
    part,
    ring_values,
    run,
    session,
    squares,
    weight_like,
)
from hypothesis import given
from hypothesis import strategies as st

from sectorch.bitplanes import planes, rows, spread
from sectorch.choreography import Phase
from sectorch.errors import ArgumentError
from sectorch.mpc.compare import (
    CODES,
    block_count,
    blocks_of,
    drelu,
    less_than_tree,
    one_hot,
    pick_equal,
    pick_less,
    thermometer,
    tree_levels,
    xor_all,
)
from sectorch.mpc.linear import linear
from sectorch.mpc.mask import open_masked
from sectorch.mpc.multiply import multiply, square
from sectorch.mpc.pool import max_tree
from sectorch.mpc.relu import maximum, ramps, relu
from sectorch.mpc.select import select
from sectorch.mpc.share import reveal, share
from sectorch.mpc.shares import Shares, add, add_at_A, sub
from sectorch.mpc.truncate import truncate
from sectorch.products import Conv2d, Linear, matmul

SHAPE = st.sampled_from(SHAPES)
SEED = st.integers(0, 1 << 30)
SHIFT = st.integers(1, 32)


@pytest.mark.parametrize("case", CASES, ids=str)
@given(n=st.sampled_from([1, 63, 64, 65, 100, 200]), seed=SEED)
def test_every_case(case, n: int, seed: int):
    inputs = case.inputs(n, seed)
    outputs = run(case.program, *inputs, session=case_session(case))
    case.check(inputs, outputs if isinstance(outputs, list) else [outputs])


ELEMENTWISE = [case for case in CASES if case.elementwise and case.answering == 1 and case.name != "max_tree"]


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(case, shape):
    inputs = [ring_values(shape, case.bits, i) for i in range(len(case.shapes(1)))]
    outputs = run(case.program, *inputs)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    case.check(inputs, outputs)
    assert all(o.shape == torch.Size(shape) for o in outputs)


def test_shares_are_halves_of_the_value():
    with session().call(session().answering[0]) as net:
        x = ring_values((7,))
        shares = share(net, net.own(net.Q, x))
        halves = net.read(shares.A, net.A), net.read(shares.S, net.S)
        assert torch.equal(halves[0] + halves[1], x)
        y = ring_values((7,), seed=1)
        other = share(net, net.own(net.Q, y))
        for result, expected in (
            (add(net, shares, other), x + y),
            (sub(net, shares, other), x - y),
            (add_at_A(net, shares, y), x + y),
            (add_at_A(net, shares, net.own(net.A, y[:1], Phase.SETUP)), x + y[:1]),
            (add_at_A(net, shares, y.view(7, 1)), x + y.view(7, 1)),
        ):
            assert torch.equal(net.read(reveal(net, result), net.Q), expected)


# Products.


@given(n=st.integers(0, 9), k=st.integers(1, 9), m=st.integers(1, 9), seed=SEED)
def test_linear_by_a_secret_matrix(n: int, k: int, m: int, seed: int):
    def program(world, x):
        return linear(world.net, world.setup, lambda x, w, *_: matmul(x, w), x, world.weight(weight_like((k, m))))

    x = ring_values((n, k), 63, seed)
    assert torch.equal(run(program, x), x @ weight_like((k, m)))


@given(rows=st.sampled_from([1, 2, 5, 127, 128]), out=st.sampled_from([1, 127, 128, 200]), seed=SEED)
def test_linear_layers_with_and_without_prepared_weights(rows: int, out: int, seed: int):
    def program(world, x):
        return linear(world.net, world.setup, Linear(), x, world.weight(weight_like((out, 6))))

    x = ring_values((rows, 6), 63, seed)
    assert torch.equal(run(program, x), x @ weight_like((out, 6)).T)


@given(stride=st.integers(1, 2), padding=st.integers(0, 2), groups=st.sampled_from([1, 2, 4]), seed=SEED,
       out=st.sampled_from([4, 128]))  # fmt: skip
def test_linear_by_a_secret_kernel(stride: int, padding: int, groups: int, seed: int, out: int):
    conv = Conv2d((stride, 1), (padding, 1), (1, 2), groups)
    weight = weight_like((out, 4 // groups, 3, 2))

    def program(world, x):
        return linear(world.net, world.setup, conv, x, world.weight(weight))

    x = ring_values((2, 4, 5, 6), 63, seed)
    expected = torch.conv2d(x, weight, None, (stride, 1), (padding, 1), (1, 2), groups)
    assert torch.equal(run(program, x), expected)


def test_one_weight_serves_many_calls():
    kept: dict = {}
    weight = weight_like((3, 4))

    def program(world, x):
        world.kept = kept
        return linear(world.net, world.setup, lambda x, w, *_: x @ w, x, world.weight(weight))

    for seed in range(5):
        x = ring_values((2, 3), 63, seed)
        assert torch.equal(run(program, x), x @ weight)
    assert len(kept) == 1


@given(shapes=st.sampled_from([((5,), (5,)), ((3, 1), (1, 4)), ((), (6,)), ((2, 3), (3,)), ((0,), (0,))]), seed=SEED)
def test_products_of_two_secrets_broadcast(shapes, seed: int):
    x, y = (ring_values(s, 63, seed + i) for i, s in enumerate(shapes))
    assert torch.equal(run(lambda w, x, y: multiply(w.net, torch.mul, x, y), x, y), x * y)


@given(n=st.integers(1, 7), k=st.integers(1, 9), m=st.integers(1, 7), seed=SEED)
def test_matrix_products_of_two_secrets(n: int, k: int, m: int, seed: int):
    x, y = ring_values((n, k), 63, seed), ring_values((k, m), 63, seed + 1)
    assert torch.equal(run(lambda w, x, y: multiply(w.net, matmul, x, y), x, y), x @ y)
    outer = functools.partial(torch.einsum, "ik,kj->kij")
    assert torch.equal(run(lambda w, x, y: multiply(w.net, outer, x, y), x, y), torch.einsum("ik,kj->kij", x, y))


@given(shape=SHAPE, shift=st.integers(0, 32), seed=SEED)
def test_squares(shape, shift: int, seed: int):
    x = ring_values(shape, 62, seed)
    squares(shift)([x], [run(lambda w, x: square(w.net, x, shift), x)])


# Truncation.


@given(shape=SHAPE, shift=SHIFT, seed=SEED)
def test_truncation_is_the_floor_or_one_more(shape, shift: int, seed: int):
    x = ring_values(shape, 62, seed)
    y = run(lambda w, x: truncate(w.net, x, shift), x)
    assert ((y == x >> shift) | (y == (x >> shift) + 1)).all()
    whole = x & -(1 << shift)
    assert torch.equal(run(lambda w, x: truncate(w.net, x, shift), whole), whole >> shift), "multiples are exact"


@pytest.mark.parametrize("protocol", [truncate, relu, square])
@pytest.mark.parametrize("shift", [-1, 33, 64])
def test_shifts_that_cannot_be_done(protocol, shift: int):
    with pytest.raises(ArgumentError, match=r"shifts by .* 32 bits, got"):
        run(lambda w, x: protocol(w.net, x, shift), ring_values((3,)))


def test_a_truncation_by_nothing_is_refused_or_does_nothing():
    x = ring_values((3,), 62)
    with contextlib.suppress(ArgumentError):
        assert torch.equal(run(lambda w, x: truncate(w.net, x, 0), x), x)


# Comparison. Blocks of three bits have 8 x 8 pairs: one word of 64 elements holds them all.

C8, R8 = torch.arange(64) // 8, torch.arange(64) % 8


def three_bits(values: torch.Tensor) -> torch.Tensor:
    """[64 W] small values -> [blocks, 3, W] planes of their low six bits (two blocks)."""
    return blocks_of(planes(rows(values)), 0, 6)


def bits_of(words: torch.Tensor) -> torch.Tensor:
    return spread(words).reshape(*words.shape[:-1], -1) != 0


def test_codes_of_a_block():
    low = three_bits(R8)[:1]
    assert [bits_of(u[0]).tolist() for u in thermometer(low)] == [(j < R8).tolist() for j in range(7)]
    assert [bits_of(h[0]).tolist() for h in one_hot(low)] == [(j == R8).tolist() for j in range(8)]


def test_picking_by_a_public_block_over_all_pairs():
    hot, codes = one_hot(three_bits(C8)[:1]), thermometer(three_bits(R8)[:1])
    assert torch.equal(bits_of(pick_less(hot, codes))[0], C8 < R8)
    # The term of c = 0 does not depend on r's code alone; A adds it.
    assert torch.equal(bits_of(pick_equal(hot, codes) ^ hot[0])[0], C8 == R8)
    mask = ring_values(codes.shape)
    for pick in (pick_less, pick_equal):
        assert torch.equal(pick(hot, mask) ^ pick(hot, codes ^ mask), pick(hot, codes)), "linear in the code"


@pytest.mark.parametrize("count", range(1, 10))
def test_xor_all(count: int):
    values = ring_values((count, 3))
    expected = functools.reduce(torch.bitwise_xor, values.clone())
    assert torch.equal(xor_all(values), expected)


@given(low=st.integers(0, 62), seed=SEED)
def test_blocks_cover_the_planes(low: int, seed: int):
    for high in {low + 1, 63, 64}:
        bit_planes = ring_values((64, 2), 63, seed)
        blocks = blocks_of(bit_planes, low, high)
        assert blocks.shape == (block_count(low, high), 3, 2)
        flat, start = blocks.flatten(0, 1), high - 3 * len(blocks)
        assert torch.equal(flat[max(0, -start) :], bit_planes[max(0, start) : high])
        assert flat[: max(0, -start)].count_nonzero() == 0


def test_levels_of_the_tree():
    for blocks in range(1, 40):
        levels = tree_levels(blocks)
        assert sum(levels) == blocks - 1
        assert len(levels) == (blocks - 1).bit_length()


def xor_shared(net, words: torch.Tensor) -> Shares:
    mask = ring_values(words.shape, seed=5)
    return Shares(net.own(net.A, words ^ mask), net.own(net.S, mask))


@pytest.mark.parametrize("blocks", [2, 3, 5, 8])
def test_the_tree_of_blocks(blocks: int):
    if blocks == 2:
        c, r = torch.arange(4096) // 64, torch.arange(4096) % 64  # all pairs
    else:
        c, r = (torch.randint(0, 8**blocks, (4096,), generator=torch.Generator().manual_seed(i)) for i in (1, 2))
        r = torch.where(torch.arange(4096) % 4 == 0, c, r)
    hot, codes = (f(blocks_of(planes(rows(v)), 0, 3 * blocks)) for f, v in ((one_hot, c), (thermometer, r)))
    less, equal = pick_less(hot, codes), pick_equal(hot, codes) ^ hot[0]
    assert len(codes) == CODES
    with session().call(session().answering[0]) as net:
        out = less_than_tree(net, xor_shared(net, less), xor_shared(net, equal[1:]))
        assert torch.equal(open_bits(net, out, c.shape), c < r)


def signs(x: torch.Tensor, **options) -> torch.Tensor:
    """DReLU with its bits put together locally: [thresholds, *x.shape]."""
    with session().call(session().answering[0]) as net:
        words = drelu(net, open_masked(net, share(net, net.own(net.Q, x))), **options)
        count = len(options.get("thresholds", (0,)))
        return torch.stack([open_bits(net, part(net, words, i, count), x.shape) for i in range(count)])


@given(shape=SHAPE, seed=SEED)
def test_signs_are_exact(shape, seed: int):
    x = ring_values(shape, 63, seed)
    assert torch.equal(signs(x)[0], x >= 0)


@given(shape=SHAPE, seed=SEED, low=st.integers(1, 40))
def test_dropped_planes_matter_just_below_zero_only(shape, seed: int, low: int):
    x = ring_values(shape, 62, seed)
    wrong = signs(x, low=low)[0] != (x >= 0)
    assert ((x < 0) & (x > -(1 << low)))[wrong].all()


@given(shape=SHAPE, seed=SEED, high=st.integers(1, 63))
def test_a_known_bound_saves_planes(shape, seed: int, high: int):
    x = torch.cat([ring_values(shape, high, seed).view(-1), torch.tensor([-(1 << high), (1 << high) - 1])])
    assert torch.equal(signs(x, high=high)[0], x >= 0)


@given(seed=SEED, low=st.integers(1, 30), span=st.integers(3, 30))
def test_a_bound_with_dropped_planes(seed: int, low: int, span: int):
    high = low + span
    x = ring_values((65,), high, seed).clamp(max=(1 << high) - (1 << low))
    wrong = signs(x, low=low, high=high)[0] != (x >= 0)
    assert ((x < 0) & (x > -(1 << low)))[wrong].all()


@given(thresholds=st.lists(st.integers(-(1 << 61), 1 << 61), min_size=1, max_size=5), shape=SHAPE, seed=SEED)
def test_several_thresholds_at_once(thresholds, shape, seed: int):
    x = ring_values(shape, 62, seed)
    found = signs(x, thresholds=tuple(thresholds))
    for t, bits in zip(thresholds, found, strict=True):
        assert torch.equal(bits, x >= t)


# ReLU, ramps, maxima.


@given(shape=SHAPE, shift=SHIFT, seed=SEED)
def test_relu_with_truncation(shape, shift: int, seed: int):
    x = ring_values(shape, 62, seed)
    check_relu(shift)([x], [run(lambda w, x: relu(w.net, x, shift), x)])


@given(bits=st.lists(st.booleans(), max_size=130), shift=st.integers(0, 32), seed=SEED)
def test_selection_by_any_bits(bits, shift: int, seed: int):
    s, x = torch.tensor(bits, dtype=torch.bool), ring_values((len(bits),), 62, seed)
    words = planes(rows(s.long()))[0]

    def program(world, x):
        return select(world.net, xor_shared(world.net, words), open_masked(world.net, x), shift)

    floor = torch.where(s, x >> shift, 0)
    y = run(program, x)
    assert ((y == floor) | ((y == floor + 1) & s & (shift > 0))).all()
    assert torch.equal(run(lambda w, x: w.bits(xor_shared(w.net, words), x.shape), x), s.long())


@given(thresholds=st.lists(st.integers(-(1 << 61), 1 << 61), min_size=1, max_size=4), shift=st.integers(0, 32),
       shape=SHAPE, seed=SEED)  # fmt: skip
def test_ramps(thresholds, shift: int, shape, seed: int):
    # |x - t| has to stay below 2^62 where the shift needs it.
    x = ring_values(shape, 61, seed)
    thresholds = tuple(t // 2 for t in thresholds)
    parts = run(lambda w, x: tuple(ramps(w.net, open_masked(w.net, x), thresholds, shift)), x)
    parts = parts if isinstance(parts, list) else [parts]
    check_relu(shift)([x - t for t in thresholds], parts)


def test_maxima_up_to_the_largest_difference():
    x = torch.tensor([HIGHEST, 0, -1, LOWEST, HIGHEST, 5, LOWEST, LOWEST, 1 << 62, -(1 << 62)])
    y = torch.tensor([0, HIGHEST, LOWEST, -1, HIGHEST, 5, LOWEST, LOWEST + 1, 1 - (1 << 62), (1 << 62) - 1])
    assert torch.equal(run(lambda w, x, y: maximum(w.net, x, y), x, y), torch.maximum(x, y))


@given(low=st.integers(1, 30), seed=SEED)
def test_maxima_of_values_that_are_close(low: int, seed: int):
    x, y = ring_values((65,), 61, seed), ring_values((65,), 61, seed + 1)
    z = run(lambda w, x, y: maximum(w.net, x, y, low), x, y)
    larger = torch.maximum(x, y)
    assert ((z == larger) | (((x - y).abs() < 1 << low) & (z == torch.minimum(x, y)))).all()


@given(count=st.integers(1, 9), shape=st.sampled_from([(), (0,), (1,), (65,), (3, 4)]), seed=SEED)
def test_the_maximum_of_any_number_of_values(count: int, shape, seed: int):
    x = ring_values((count, *shape), 62, seed)
    assert torch.equal(run(lambda w, x: max_tree(w.net, x), x), x.amax(0))


@pytest.mark.long
def test_ten_million_truncations_and_comparisons():
    # Truncating shares locally, as most systems do, would be wrong with probability |x| / 2^64: an eighth at 2^61.
    count = wrong = off = 0
    while count < 10_000_000:
        shift = 1 + (count >> 18) % 32
        x = ring_values((1 << 18,), 62, seed=count)
        y = run(lambda w, x, shift=shift: truncate(w.net, x, shift), x)
        off += int(((y != x >> shift) & (y != (x >> shift) + 1)).sum())
        wrong += int((signs(x)[0] != (x >= 0)).sum())
        check_relu(shift)([x], [run(lambda w, x, shift=shift: relu(w.net, x, shift), x)])
        count += x.numel()
    print(f"{count} truncations, {off} off by more than one unit; {count} comparisons, {wrong} wrong")
    assert off == wrong == 0
