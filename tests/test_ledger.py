"""What is written down: every message declared, every cost in a docstring true, every figure of a profile right."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from io import StringIO
from math import ceil, log2

import pytest
import torch
from helpers import CASES, SHIPPED, World, case_session, ring_values, run, session, weight_like, world_of
from own import gelu_and_slope
from rich.console import Console

from sectorch.backend import RaisedFlags
from sectorch.choreography import Phase, ledger
from sectorch.choreography.ledger import Cost, Profile, Transcript, sole_observer
from sectorch.config import Scheme
from sectorch.mpc.leaky import leaky_drelu, leaky_relu_privhfl
from sectorch.mpc.series import normalise, round_digits, trigonometric
from sectorch.mpc.star.and_layers import and_layers
from sectorch.mpc.star.backend import WAN_ROUND, Star
from sectorch.mpc.star.compare import (
    MUCH,
    RoundBudget,
    block_count,
    blocks_between,
    drelu,
    forest,
    group_blocks,
    is_zero,
)
from sectorch.mpc.star.fss import choose_by_keys
from sectorch.mpc.star.guard import finish_flags
from sectorch.mpc.star.linear import linear, mask_weight
from sectorch.mpc.star.masking import deal, deal_bits, open_masked
from sectorch.mpc.star.maximum import max_by_fours, max_of_four, max_tree, ramp_of_largest
from sectorch.mpc.star.multiply import multiply, square
from sectorch.mpc.star.relu import maximum, ramps, relu
from sectorch.mpc.star.select import bit_to_ring, choose, select, select_square
from sectorch.mpc.star.shares import Shares, aggregate, aggregate_noisy, each, reveal, share
from sectorch.mpc.star.shuffle import shuffle
from sectorch.mpc.star.thresholds import at_least
from sectorch.mpc.star.truncate import truncate, truncate_and_multiply, wide_excess
from sectorch.ops.series import ERF, GELU_SLOPE, SIGMOID
from sectorch.ring.products import Linear
from sectorch.session import Session

# Declarations.


def sent_by(case) -> Transcript:
    with Transcript() as transcript:
        run(case.program, *case.inputs(70), session=Session(case.answering))
    return transcript


def test_every_message_is_declared_and_every_declaration_used():
    used = set()
    for case in CASES:
        for line, value in sent_by(case).lines:
            spec = SHIPPED[line.protocol]
            (message,) = [m for m in spec.messages if m.label == line.label]
            played = {"D": "Q"}  # Q deals
            assert [played.get(role, role) for role in (message.src, message.dst)] == [line.src.role, line.dst.role]
            assert (message.mask, message.shows) == (line.mask, line.shows)
            assert all(name in SHIPPED for name in line.path.split("/"))
            assert (value.shape, value.dtype) == (line.shape, line.dtype)
            assert line.bytes == value.numel() * value.element_size()
            used.add((line.protocol, line.label))
    assert used == {(spec.name, m.label) for spec in SHIPPED.values() for m in spec.messages}


@pytest.mark.parametrize("name", SHIPPED)
def test_declarations_are_complete(name: str):
    spec = SHIPPED[name]
    assert spec.name == name
    assert spec.summary.endswith((".", ":"))
    assert spec.source
    labels = [m.label for m in spec.messages]
    assert len(labels) == len(set(labels))
    for message in spec.messages:
        assert {message.src, message.dst} in ({"Q", "S"}, {"A", "S"}, {"D", "S"}), (
            "clients have no channel to each other"
        )
        assert message.mask
    assert spec.leaks == any(m.shows for m in spec.messages)


# Costs. Both halves of the inputs are at hand and depend on the query, so that "online" is what a protocol opens and
# "offline" what it deals, whatever came before.

N = 6400


def cost(program, shape=(N,), round_bytes: int = 1 << 40) -> tuple[int, float, float]:
    """Online rounds, bytes opened and bytes dealt per element; where a round is worth more than bytes, unless said."""
    held = session()
    with held.call(held.answering[0]) as net:
        world, net.state(RoundBudget).round_bytes = world_of(held, net, {}), round_bytes
        with Profile() as profile:
            program(world, world.halves(ring_values(shape, 40)))
    n = torch.Size(shape).numel()
    return profile.rounds, profile.online_bytes / n, (profile.offline_bytes - profile.setup_bytes) / n


def words(world: World, *leading: int) -> Shares:
    net, shape = world.net, (*leading, N // 64)
    return Shares(net.own(net.A, ring_values(shape)), net.own(net.S, ring_values(shape, seed=1)))


def tree(low: int, high: int, whole: bool = False, levels: int | None = None) -> tuple[int, float, float]:
    """Rounds, and bytes opened and dealt per element and threshold, of a comparison.

    With `whole` the lowest block's equality is kept. `levels`: those of a larger tree beside it, so that its own may be
    narrower.
    """
    blocks = block_count(low, high)
    levels = (ceil(log2(blocks) / 2) if blocks > 1 else 0) if levels is None else levels
    opened = dealt = 0
    for sizes in group_blocks(blocks, levels)[1]:
        for i, size in enumerate(sizes):
            if size == 1:
                continue
            kept = whole or i > 0
            # lt takes one eq less than there are blocks and as many lt; eq takes all of them. What is dealt of lt are
            # the products of some of the eq above a block with its lt, and those of two and more eq.
            opened += 2 * size - 2 + kept
            dealt += sum(2**above - 1 for above in range(1, size)) + 2 ** (size - 1) - size
            dealt += 2 ** (size - 1) - 1 if kept else 0
    return levels, 2 * opened / 8, dealt / 8


def codes(low: int, high: int, tops: int = 1) -> float:
    return (7 * block_count(low, high) + tops) / 8


def masked_drelu(**options):
    return lambda w, x: drelu(w.net, open_masked(w.net, x), **options)


def relu_cost(shift: int, high: int = 63, thresholds: int = 1) -> tuple[int, float, float]:
    """Two trees and a layer of six bits opened and six dealt; three bits to the ring, one of them mod 2^32; R."""
    if not shift:
        rounds, opened, dealt = compared(high, thresholds)
        return rounds + 1, opened + thresholds * 0.25, dealt + thresholds * 16
    levels = max(tree(0, shift)[0], tree(shift, high)[0])
    low, top = tree(0, shift, levels=levels), tree(shift, high, True, levels)
    opened, dealt = low[1] + top[1] + 6 / 8 + 6 / 8, low[2] + top[2] + 6 / 8 + 8 + 8 + 8 + 4
    coded = codes(0, shift, 0) + codes(shift, high, 1 if high == 63 else 2)
    return 1 + levels + 1 + 1, 16 + thresholds * opened, coded + thresholds * dealt + 8


def truncate_cost(shift: int) -> tuple[int, float, float]:
    rounds, opened, dealt = tree(0, shift)
    return 1 + rounds + 1, 16 + opened + 0.25, codes(0, shift, 0) + dealt + 8 + 8 + 4


def compared(high: int, thresholds: int = 1) -> tuple[int, float, float]:
    rounds, opened, dealt = tree(0, high)
    return 1 + rounds, 16 + thresholds * opened, codes(0, high) + thresholds * dealt


def by_keys(high: int, words: int) -> float:
    """Bytes of a key for each element, to S and on to A: a block a level, one or two words a level and at the end."""
    return 2 * (16 * high + 8 * words * (high + 1))


def wide_tree(blocks: int, whole: bool = False) -> tuple[float, float]:
    """Bytes opened and dealt per element of all blocks in one layer."""
    opened = 2 * blocks - 2 + whole
    dealt = sum(2**above - 1 for above in range(1, blocks)) + 2 ** (blocks - 1) - blocks
    return 2 * opened / 8, (dealt + whole * (2 ** (blocks - 1) - 1)) / 8


def wide_truncation(blocks: int) -> tuple[float, float]:
    """Five blocks of four planes; the borrow's bit to the ring; R and the wrap-around bit."""
    opened, dealt = wide_tree(blocks)
    return 16 + opened + 0.25, (blocks * 15) / 8 + dealt + 8 + 8 + 4


def test_the_figures_of_the_widest():
    """Of a window of one: its borrow's blocks, and those above; `far` ones of the limit; q, u, and three of a flag."""
    below, above = wide_tree(5), wide_tree(7)
    far, limit = 3, 2  # rows opened for the planes above the limit, and for the node below it
    opened = 8 * (below[0] + above[0]) + 2 * (far + limit + 5 + 2)
    codes_below, codes_above = 5 * 15, 3 * 63 + 2 * 127 + 31 + 63
    # Products: of both trees; of the node below the limit with its lowest lt, and with its lowest eq; of far blocks.
    products = 8 * (below[1] + above[1]) + (2**4 - 1) + (2**4 - 1) + 1 + 1 + 6
    numbers = 8 + 4 + 2 * 8 + 8 + 4  # R, the wrap-around bit, two bits, the first times R and times the bit
    assert (16 + opened / 8, (codes_below + codes_above + 1 + products) / 8 + numbers) == (24, 148.125)


def test_a_sign_in_one_round_and_by_a_tree():
    """What docs/protocols.md says of 43 planes, cut at a limit of 32 bits."""
    low, top = blocks_between(20, 52, 5), blocks_between(52, 63, 2)
    assert (round((low.codes + top.codes) / 8), round(wide_tree(7)[1])) == (67, 22)
    assert (round(codes(20, 63, 0)), round(tree(20, 63)[2])) == (13, 10)


def largest_of(world: World, x: Shares, m: int, levels: int) -> Shares:
    """Of m values in turn, of which N / m windows stand in x."""
    return ramp_of_largest(world.net, each(torch.Tensor.view, x, m, -1), 20, limit_bits=32, levels=levels)


COSTS = {
    "open_masked": (lambda w, x: open_masked(w.net, x), (1, 16, 0)),
    "opened_once": (lambda w, x: (truncate(w.net, x, 20), relu(w.net, x, 20)), (5, 29.25 + 3.75, 69.875 + 27.875)),
    "deal": (lambda w, x: deal(w.net, w.net.common(w.net.Q, w.net.S, x.shape, "v")), (0, 0, 8)),
    "deal_int32": (
        lambda w, x: deal(w.net, w.net.common(w.net.Q, w.net.S, x.shape, "v", torch.int32), torch.int32),
        (0, 0, 4),
    ),
    "deal_bits": (lambda w, x: deal_bits(w.net, w.net.common(w.net.Q, w.net.S, (N // 64,), "v")), (0, 0, 1 / 8)),
    "truncate": (lambda w, x: truncate(w.net, x, 20), (4, 19.75, 27.875)),
    "truncate_1": (lambda w, x: truncate(w.net, x, 1), truncate_cost(1)),
    "truncate_32": (lambda w, x: truncate(w.net, x, 32), truncate_cost(32)),
    "truncate_fss": (lambda w, x: truncate(w.net, x, 20, fss=True), (1, 16, 12 + by_keys(20, 1))),
    "truncate_wide": (lambda w, x: truncate(w.net, x, 20, wide=True), (3, *wide_truncation(5))),
    "ramp_of_largest": (lambda w, x: largest_of(w, x, 1, 1), (4, 24, 148.125)),
    "ramp_of_largest_by_levels": (lambda w, x: largest_of(w, x, 1, 3), (6, 32.25, 73.25)),
    "ramp_of_largest_of_four": (lambda w, x: largest_of(w, x, 4, 1), (4, 131.25 / 4, 1310.75 / 4)),
    "multiply": (lambda w, x: multiply(w.net, torch.mul, x, w.halves(ring_values((N,)))), (1, 32, 0)),
    "multiply_by_one": (lambda w, x: multiply(w.net, torch.mul, x, w.halves(ring_values((1,)))), (1, 16 + 16 / N, 0)),
    "square": (lambda w, x: square(w.net, x), (1, 16, 0)),
    "square_in_halves": (lambda w, x: square(w.net, x).complete, (1, 16, 8)),
    "square_truncated": (lambda w, x: truncate(w.net, square(w.net, x), 20), (1 + 4, 16 + 19.75, 27.875)),
    "drelu": (masked_drelu(), compared(63)),
    "drelu_high": (masked_drelu(high=31), compared(31)),
    "drelu_one_block": (masked_drelu(high=3), (1, 16, 1)),
    "drelu_thresholds": (masked_drelu(thresholds=(0, 1, 2, 3, 4)), compared(63, 5)),
    "is_zero": (lambda w, x: is_zero(w.net, open_masked(w.net, x)), (1 + 3, 16 + 74 / 8, (154 + 35) / 8)),
    "tree": (lambda w, x: and_layers(w.net, words(w, 30), forest((15,), (False,))[0]), tree(20, 63)),
    "whole_tree": (lambda w, x: and_layers(w.net, words(w, 30), forest((15,), (True,))[0]), tree(20, 63, True)),
    "bit_to_ring": (lambda w, x: bit_to_ring(w.net, words(w), x.shape), (1, 0.25, 8)),
    "select_square": (lambda w, x: select_square(w.net, words(w), open_masked(w.net, x)), (1, 16.25, 32)),
    "select": (lambda w, x: select(w.net, words(w), open_masked(w.net, x)), (1, 16.25, 16)),
    "relu": (lambda w, x: relu(w.net, x), relu_cost(0)),
    "relu_20": (lambda w, x: relu(w.net, x, 20), (5, 29.25, 69.875)),
    "relu_32": (lambda w, x: relu(w.net, x, 32), relu_cost(32)),
    "relu_bounded": (lambda w, x: relu(w.net, x, 20, 41), relu_cost(20, 41)),
    "maximum": (lambda w, x: maximum(w.net, x, w.halves(ring_values((N,)))), relu_cost(0)),
    "ramps": (
        lambda w, x: ramps(w.net, x, (0, 1, 2)),
        (5, 16 + 3 * (tree(0, 63)[1] + 0.25), codes(0, 63) + 3 * (tree(0, 63)[2] + 16)),
    ),
    "ramps_20": (lambda w, x: ramps(w.net, x, (0, 1, 2), 20), relu_cost(20, thresholds=3)),
    "relu_fss": (lambda w, x: relu(w.net, x, fss=True), (1, 16, by_keys(63, 2))),
    "relu_fss_20": (lambda w, x: relu(w.net, x, 20, fss=True), (2, 32, 12 + by_keys(20, 1) + by_keys(43, 2))),
    "signs": (lambda w, x: at_least(w.net, open_masked(w.net, x), fss=True), (1, 16, by_keys(63, 1))),
    "leaky_drelu": (lambda w, x: leaky_drelu(w.net, x), (3, 24, 0)),
    # A's half of the sign comes from a stream, so that its 8 bytes of the product's opening go ahead.
    "leaky_relu": (lambda w, x: leaky_relu_privhfl(w.net, x, 20), (3 + 1 + 4, 24 + 16 + 8 + 19.75, 8 + 27.875)),
    "trigonometric_of_opening": (
        lambda w, x: trigonometric(w.net, open_masked(w.net, x), 40, SIGMOID), (2, 32, 32 * len(SIGMOID.cos) + 12),
    ),
    "truncate_number": (
        lambda w, x: truncate(w.net, x, 20, number=True),
        (2, 16 + 2 * 5 / 8, 8 + 4 + (127 + 127 + 63) / 8 + 10 * 8),
    ),
    "round_digits": (
        lambda w, x: round_digits(w.net, x, w.halves(ring_values((N,))), SIGMOID, 32),
        (truncate_cost(32)[0], truncate_cost(32)[1] + 16, truncate_cost(32)[2] + 8),
    ),
    "round_digits_times": (
        lambda w, x: round_digits(w.net, x, x, SIGMOID, 32, factor=w.halves(ring_values((N,)))),
        (1, 32, by_keys(32, 2) + 8 + 4 + 8 + 4 + 16),
    ),
    "truncate_and_multiply": (
        lambda w, x: truncate_and_multiply(w.net, x, 20, w.halves(ring_values((N,)))),
        (1, 32, by_keys(20, 2) + 8 + 4 + 8 + 4),
    ),
    "choose": (
        lambda w, x: choose(w.net, words(w, 3).moved(torch.flatten), open_masked(w.net, x), 3),
        (1, 16 + 3 * 0.25, 3 * 16),
    ),
    "choose_by_keys": (lambda w, x: choose_by_keys(w.net, open_masked(w.net, x), (0, 5)), (1, 16, by_keys(63, 2))),
    "trigonometric": (lambda w, x: trigonometric(w.net, x, 20, SIGMOID), (2, 8 + 16, 32 * len(SIGMOID.cos) + 12)),
    "trigonometric_wide": (lambda w, x: trigonometric(w.net, x, 40, SIGMOID), (2, 32, 32 * len(SIGMOID.cos) + 12)),
    "trigonometric_later": (lambda w, x: gelu_and_slope(w.net, x), (2, 8 + 2 * 16, 32 * len(GELU_SLOPE.cos) + 2 * 12)),
    "reveal": (lambda w, x: reveal(w.net, x), (2, 16, 0)),
}  # fmt: skip


def test_the_figures_of_the_design():
    assert relu_cost(20) == (5, 29.25, 69.875)
    assert truncate_cost(20) == (4, 19.75, 27.875)


def test_a_level_more_where_its_bytes_are_worth_a_round():
    """A ReLU by 20 bits has 59 bits less dealt with three levels than with two, and opens six more both ways."""
    saved, wider = 59 - 2 * 6, (6, 29.25 + 12 / 8, 69.875 - 59 / 8)
    relu_of = partial(cost, lambda w, x: relu(w.net, x, 20))
    for count in (N, 10 * N):
        at = saved * count // 8
        assert relu_of((count,), round_bytes=at + 8) == (5, 29.25, 69.875)
        assert relu_of((count,), round_bytes=at - 8) == wider
    assert relu_of((64,), round_bytes=1 << 16) == (5, 29.25, 69.875)  # of a net, unless its scheme says more
    assert relu_of((1 << 14,), round_bytes=1 << 16) == wider
    assert relu_of((1 << 14,), round_bytes=WAN_ROUND) == (5, 29.25, 69.875)


def test_a_call_that_is_dealt_much_saves_bytes_though_rounds_are_dear():
    """Of two large values in one call the second one's rounds wait for its bytes: it is as where rounds are cheap."""

    def dealt(w: World, network: str) -> int:
        star, x = (
            Star(w.net, Scheme(network=network), w.net.runtime.device),
            w.halves(torch.empty(N, dtype=torch.int64)),
        )
        before = w.net.offline_bytes
        star.ramps(x, (0,), 20)
        return w.net.offline_bytes - before

    held, found = session(), {}
    for network in ("lan", "wan"):
        with held.call(held.answering[0]) as net:
            world = world_of(held, net, {})
            found[network] = [dealt(world, network)]
            net.offline_bytes = MUCH
            found[network].append(dealt(world, network))
    assert found["wan"][0] > found["lan"][0] == found["lan"][1] == found["wan"][1]


@pytest.mark.parametrize(("count", "shift", "fast", "slow"), [
    (128, 20, 1, 1), (265, 20, 1, 1), (272, 20, 2, 1), (635, 20, 2, 1), (645, 20, 2, 2), (2_700, 20, 2, 2),
    (2_720, 20, 3, 2), (6_450, 20, 3, 2), (6_480, 20, 3, 3), (56_600, 20, 3, 3), (56_800, 20, 4, 3), (9_765, 32, 4, 3),
    (135_000, 20, 4, 3), (135_200, 20, 4, 4), (100, 12, 1, 1), (9_000, 12, 3, 2),
])  # fmt: skip
def test_a_truncation_of_few_elements_saves_rounds_however_much_was_dealt(
    count: int, shift: int, fast: int, slow: int
):  # fmt: skip
    """By keys where a round is worth them, with the borrow as a number, or by wide blocks."""
    found = {}
    for network in ("lan", "wan"):
        held = session()
        with held.call(held.answering[0]) as net:
            world = world_of(held, net, {})
            net.offline_bytes = MUCH + 1
            star = Star(world.net, Scheme(network=network), world.net.runtime.device)
            with Profile() as profile:
                star.truncate(world.halves(torch.empty(count, dtype=torch.int64)), shift)
        found[network] = profile
    lan, wan = found["lan"], found["wan"]
    assert (lan.rounds, wan.rounds) == (fast, slow)
    if fast == 1:
        assert wan.bytes == lan.bytes == (16 + 12 + by_keys(shift, 1)) * count
    if (fast, slow) == (4, 3):
        excess, saved = wide_excess(shift)
        assert saved == 1 and wan.bytes - lan.bytes == pytest.approx(excess * count, rel=0.01)


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_as_declared(name: str):
    program, expected = COSTS[name]
    assert cost(program) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("thresholds", [2, 7, 20])
def test_costs_of_normalising(thresholds: int):
    once_opened, once_dealt = 16 + 16, codes(0, 63)
    _, opened, dealt = tree(0, 63)
    assert cost(lambda w, x: normalise(w.net, x, 5, 5 + thresholds - 1)) == pytest.approx(
        (1 + 3 + 1 + 1, once_opened + thresholds * (opened + 0.25), once_dealt + thresholds * (dealt + 8))
    )
    selected = cost(lambda w, x: normalise(w.net, x, 5, 5 + thresholds - 1, selected=True))
    assert selected == pytest.approx(
        (1 + 3 + 1, 16 + thresholds * (opened + 0.25), once_dealt + thresholds * (dealt + 16))
    )
    assert cost(lambda w, x: normalise(w.net, x, 5, 5 + thresholds - 1, True, selected=True)) == pytest.approx(
        (1, 16, by_keys(63, 2))
    )
    # "Per element and threshold 13.25 bytes online and 14.875 dealt", beside the openings of x and of the factor.
    assert (opened + 0.25, dealt + 8) == (13.25, 14.875)


@pytest.mark.parametrize("count", range(1, 10))
def test_a_maximum_of_many_takes_one_comparison_less(count: int):
    rounds, opened, dealt = cost(lambda w, x: max_tree(w.net, x), (count, N))
    each = relu_cost(0)
    assert rounds == ceil(log2(count)) * each[0]
    assert (opened * count, dealt * count) == pytest.approx(((count - 1) * each[1], (count - 1) * each[2]))


def test_a_maximum_by_fours():
    """Six comparisons of differences that one opening serves, an AND of three of them, and three products with bits."""
    rounds, opened, dealt = cost(lambda w, x: max_by_fours(w.net, x, 41), (4, N))
    levels, node, made = tree(0, 41)
    assert rounds == 1 + levels + 1 + 1
    assert opened * 4 == pytest.approx(4 * 16 + 6 * node + 12 / 8 + 3 * 0.25)
    assert dealt * 4 == pytest.approx(6 * (codes(0, 41) + made) + 12 / 8 + 3 * 16)
    assert cost(lambda w, x: max_by_fours(w.net, x, 41), (128, 64))[0] == 3 * rounds + rounds - 1
    assert cost(lambda w, x: max_tree(w.net, x, 41), (128, 64))[0] == 7 * (rounds - 1)


def test_costs_of_sharing_and_linear_layers():
    held = session()
    x, weight = ring_values((5, 12)), weight_like((7, 12))
    setup = held.setup(held.answering[0])
    with held.call(held.answering[0]) as net:
        with Profile() as sharing:
            shares = share(net, net.own(net.Q, x))
        assert (sharing.rounds, sharing.online_bytes, sharing.bytes) == (1, 8 * 60, 8 * 60)
        with Profile() as masking:
            masked = mask_weight(setup, setup.own(net.A, weight, Phase.SETUP))
        assert (masking.rounds_of(Phase.SETUP), masking.setup_bytes, masking.bytes) == (1, 8 * 84, 8 * 84)
        with Profile() as product:
            y = linear(net, setup, Linear(), shares, masked)
        assert product.online_bytes == product.bytes_between("S", "A") == 8 * 60
        assert product.offline_bytes == product.bytes_between("Q", "S") == 0
        assert (y.half_A.phase, y.half_S.phase) == (Phase.ONLINE, Phase.OFFLINE)
        with Profile() as halves:
            assert y.complete.shape == (5, 7)
        assert halves.bytes == halves.offline_bytes == halves.bytes_between("Q", "S") == 8 * 35
        assert (y.A.phase, y.S.phase) == (Phase.ONLINE, Phase.OFFLINE), "S's half is ready before the query"
        with Profile() as opening:
            open_masked(net, y)
        assert {(m.label, m.phase.name, m.bytes) for m in opening.ledger} == {
            ("c_A", "ONLINE", 8 * 35), ("c_S", "OFFLINE", 8 * 35)
        }  # fmt: skip


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("parties", [1, 2, 5])
def test_costs_of_aggregation(parties: int, noisy: bool):
    """Noise at S costs no message and no byte."""
    held = session(parties)
    nets = [held.net(party) for party in held.answering]
    terms = [(net, share(net, net.own(net.Q, ring_values((9,))))) for net in nets]
    drawn = nets[0].own(held.S, torch.arange(9))
    with Profile() as profile:
        total = aggregate_noisy(nets[0], terms, drawn) if noisy else aggregate(nets[0], terms)
    expected = parties * ring_values((9,)) + (torch.arange(9) if noisy else 0)
    assert torch.equal(nets[0].read(total, held.Q), expected)
    assert profile.bytes == 8 * 9 * parties + 8 * 9
    # The halves from the streams are ahead of the query; x_S came in one round.
    assert total.rounds[held.Q] == 2


# Profiles.


def small_program(held: Session, x: torch.Tensor):
    with held.call(held.answering[0]) as net:
        setup = held.setup(net.A)
        weight = mask_weight(setup, setup.own(net.A, ring_values((3, 4), 20, seed=1), Phase.SETUP))
        y = relu(net, linear(net, setup, Linear(), share(net, net.own(net.Q, x)), weight), 20)
        return net.read(reveal(net, y), net.Q)


def dry_cost(program, operands: int = 1, count: int = 6400) -> tuple[int, float, float]:
    """Online rounds, online bytes and bytes ahead, per element, with nobody present."""
    values, dry = torch.empty(count, dtype=torch.int64, device="meta"), Session(dry=True)
    with dry.call(dry.answering[0]) as net:
        inputs = [Shares(net.own(net.A, values), net.own(net.S, values)) for _ in range(operands)]
        with Profile() as profile:
            program(net, *inputs)
    return profile.rounds, profile.online_bytes / count, profile.offline_bytes / count


def test_costs_at_a_glance():
    """The figures of docs/protocols.md, "Costs at a glance"; of values with a limit with the ANDs of their flags."""

    def flagged(protocol):
        return lambda net, x: (protocol(net, x, 20, limit_bits=33), finish_flags(net, tuple(net.state(RaisedFlags))))

    assert dry_cost(open_masked) == (1, 16, 0)
    assert dry_cost(shuffle) == (2, 16, 8)
    assert dry_cost(lambda net, x, y: multiply(net, torch.mul, x, y), operands=2) == (1, 32, 0)
    assert dry_cost(lambda net, x, y: multiply(net, torch.mul, x, y).A, operands=2) == (1, 32, 8)
    assert dry_cost(lambda net, x: truncate(net, x, 20)) == (4, 19.75, 27.875)
    assert dry_cost(lambda net, x: truncate(net, x, 20, fss=True)) == (1, 16, 2 * (20 * 24 + 8) + 12)
    assert dry_cost(lambda net, x: truncate(net, x, 20, wide=True)) == (3, 18.25, 34)
    for levels, found in ((1, (4, 131.25 / 4, 1310.75 / 4)), (3, (6, 207.75 / 4, 433.75 / 4))):
        four = lambda net, x, n=levels: ramp_of_largest(
            net, each(torch.Tensor.view, x, 4, -1), 20, limit_bits=32, levels=n
        )
        assert dry_cost(four) == found
    assert dry_cost(lambda net, x: drelu(net, open_masked(net, x))) == (1 + 3, 16 + 13, 25.375)
    assert dry_cost(relu) == (5, 29.25, 41.375)
    assert dry_cost(lambda net, x: relu(net, x, shift=20)) == (5, 29.25, 69.875)
    assert dry_cost(lambda net, x: relu(net, x, shift=20), count=44_800) == (6, 30.75, 62.5)
    assert dry_cost(lambda net, x: max_of_four(net, each(torch.Tensor.view, x, 4, -1))) == (6, 144.25 / 4, 201.75 / 4)
    assert dry_cost(flagged(relu)) == (5, 32, 75.25)
    assert dry_cost(flagged(truncate)) == (5, 32.5, 47.625)
    assert dry_cost(lambda net, x: relu(net, x, fss=True)) == (1, 16, 2 * (63 * 32 + 16))
    assert dry_cost(lambda net, x: relu(net, x, shift=20, fss=True)) == (
        2,
        32,
        2 * (20 * 24 + 8) + 12 + 2 * (43 * 32 + 16),
    )
    assert dry_cost(lambda net, x: trigonometric(net, x, 20, ERF)) == (2, 24, 32 * len(ERF.cos) + 12)


def test_a_profile_of_a_small_program_counted_by_hand():
    held, x = Session(), ring_values((2, 4), 40)
    with Profile() as profile:
        small_program(held, x)
    # x: 2 x 4, weight: 3 x 4, y: 2 x 3 = 6 elements in one word of bits; 7 blocks of planes below the fraction and
    # 15 above.
    setup = 12 * 8
    # codes, ANDs of the trees and of the last layer; r >> f, two bits, the first times r >> f, a bit mod 2^32
    to_S_ahead = (155 + 14 + 96 + 6) * 8 + 6 * (8 + 8 + 8 + 8 + 4)
    to_A_ahead = 6 * 8  # c_S of the opening: S's half of y does not wait for the query
    tree_each_way = (14 + 33 + 3) * 8
    online_QS = 2 * 4 * 8 + 6 * 8  # x_S, result
    online_SA = 2 * 4 * 8 + 6 * 8 + 2 * tree_each_way + 2 * 3 * 8 + 6 * 8  # m; c_A; trees; e; masked result
    assert profile.setup_bytes == setup
    assert profile.offline_bytes == setup + to_S_ahead + to_A_ahead
    assert profile.online_bytes == online_QS + online_SA
    assert profile.bytes == profile.offline_bytes + profile.online_bytes
    assert profile.bytes_between("Q", "S") == profile.bytes_between("S", "Q") == to_S_ahead + online_QS
    assert profile.bytes_between("S", "A") == setup + to_A_ahead + online_SA
    assert profile.bytes_between("Q", "A") == 0
    assert profile.bytes_between("A", "S", Phase.SETUP) == setup
    assert profile.bytes_between("A", "S", Phase.ONLINE) == online_SA
    # share, m, c_A, two levels and the last layer, masked result, result: A sends its half as soon as it has e.
    assert profile.rounds == 1 + 1 + 1 + 2 + 1 + 1 + 1
    assert [profile.rounds_of(phase) for phase in Phase] == [1, 1, 8]
    rows = profile.by_protocol()
    assert sum(row["messages"] for row in rows.values()) == len(profile.ledger) == 20
    assert sum(row["online_bytes"] for row in rows.values()) == profile.online_bytes
    assert sum(row["offline_bytes"] for row in rows.values()) == profile.offline_bytes
    assert rows["linear"]["online_bytes"] == 64
    figures = profile.as_dict()
    assert (figures["bytes"], figures["rounds"], figures["offline_rounds"]) == (profile.bytes, 8, 1)
    # Local work is a part of the whole, and is split between ahead and online.
    assert 0 < profile.online_seconds + profile.offline_seconds <= profile.seconds


def test_rounds_and_bytes_of_calls_add_up():
    held, x = Session(), ring_values((2, 4), 40)
    with Profile() as once:
        small_program(held, x)
    with Profile() as thrice:
        for _ in range(3):
            small_program(held, x)
    assert (thrice.rounds, thrice.bytes) == (3 * once.rounds, 3 * once.bytes)


def test_observers_see_what_happens_inside_their_block_only():
    held, x = Session(), ring_values((2, 4), 40)
    with Profile() as outer:
        with Transcript() as inner:
            small_program(held, x)
        with sole_observer(Profile()):
            small_program(held, x)
    small_program(held, x)
    assert [line for line, _ in inner.lines] == outer.ledger
    assert len(outer.ledger) == 20
    received = [inner.received(role) for role in "QAS"]
    assert sum(map(len, received)) == 20
    assert [line.label for line, _ in received[0]] == ["result"]


def test_the_table_shows_no_content():
    held, x = Session(), ring_values((2, 4), 62, seed=4)
    with Profile() as profile, Transcript() as transcript:
        small_program(held, x)
    text = profile.table()
    for phrase in ("Q-S", "A-S", "8 online rounds", "nothing: uniform bits", "reveal: result"):
        assert phrase in text
    assert "the result, which is Q's to learn" in " ".join(text.split())
    everything = Console(file=StringIO(), width=200)
    everything.print(profile.learned())
    text += everything.file.getvalue()
    for phrase in ("nothing (uniform bits)", "and_layers", "r_A of k_DA"):
        assert phrase in text
    outermost = {path.partition("/")[0] for path in profile.by_protocol()}
    assert profile.protocols().row_count == len(outermost) < len(profile.by_protocol())
    secrets = [x, *(value for _, value in transcript.lines)]
    shown = [str(v) for t in secrets for v in t.reshape(-1).tolist() if abs(v) > 1_000_000]
    assert len(shown) > 100
    assert not any(v in text or v in repr(profile) for v in shown)


def test_parties_are_found_by_name_and_by_role():
    case = next(c for c in CASES if c.name == "aggregate")
    held = case_session(case)
    with Profile() as profile:
        run(case.program, *case.inputs(10), session=held)
    assert profile.bytes_between("A", "S") == sum(profile.bytes_between(f"A{i}", "S") for i in (1, 2, 3)) == 3 * 80


def test_a_cost_counts_as_a_profile_does_in_memory_that_does_not_grow(monkeypatch):
    held, x = Session(), ring_values((2, 4), 40)
    with Profile() as profile, Cost() as cost:
        for _ in range(3):
            small_program(held, x)
    same = [name for name in profile.as_dict() if "seconds" not in name]
    assert {name: cost.as_dict()[name] for name in same} == {name: profile.as_dict()[name] for name in same}
    assert cost.bytes == sum(line.bytes for line in profile.ledger)
    monkeypatch.setattr(ledger, "CALLS", 4)
    with Cost() as cost:
        sizes = []
        for _ in range(50):
            for line in profile.ledger[: len(profile.ledger) // 3]:
                cost.message(replace(line, call=len(sizes)), torch.empty(0))
            sizes.append(len(pickle.dumps((cost._latest, cost._received, cost._sent, cost._rounds))))
    assert cost.rounds == 50 * (profile.rounds // 3)
    assert sizes[-1] < sizes[4] + 100 and len(cost._latest) == 4
