"""Compiled loops against torch's functions: every message of every protocol that has such loops, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import some
from helpers import CASES, ring_values, run, stands
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.compiler_lock import global_compiler_lock

from sectorch.choreography.ledger import Transcript
from sectorch.choreography.run.local import LocalRuntime
from sectorch.mpc import harmonicloops, harmonics
from sectorch.mpc.star import and_layers, compare, maximum, relu, select, thresholds, truncate
from sectorch.mpc.star.and_layers import AndLayer
from sectorch.ops.series import ATAN, EXP, GELU, SIGMOID
from sectorch.ring import bitloops, bitplanes, jit
from sectorch.ring.bitplanes import planes, planes_below, signs_of, words_for
from sectorch.ring.field import inner_product
from sectorch.session import Session

SHAPES = [(), (0,), (1,), (63,), (64,), (65,), (3, 0, 2), (5, 13), (513,), (8, 65)]


def streams(self, pair, label, call, draw, count):
    """Draws that are the same in each session: by parties, label and place."""
    said = f"{sorted(p.name for p in pair)} {label} {call} {draw} {count}"
    seed = int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "big")
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=torch.Generator().manual_seed(seed))


def seen(case, inputs, compiled: bool) -> tuple[list, list[torch.Tensor]]:
    """Messages but those that agree on keys, and results, in a session of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRuntime, "draw", streams)
        patch.setattr(bitplanes, "COMPILED", compiled)
        session = Session(case.answering)
        with Transcript() as transcript:
            results = run(case.program, *inputs, session=session)
    lines = [(line.path, line.label, line.round, value) for line, value in transcript.lines if line.path != "seed"]
    return lines, results if isinstance(results, list) else [results]


BY_TREES = [case for case in CASES if not case.fss]
"""Function secret sharing has no compiled loops."""


@pytest.mark.parametrize("case", some(BY_TREES, stands), ids=str)
def test_every_message_is_the_same(case):
    for shape in SHAPES if case.elementwise else SHAPES[:1]:
        inputs = case.values([shape] * len(case.given), 5) if case.elementwise else case.inputs(3, 5)
        (lines, results), (again, others) = (seen(case, inputs, compiled) for compiled in (True, False))
        assert [line[:3] for line in lines] == [line[:3] for line in again]
        for one, other in zip([v for *_, v in lines] + results, [v for *_, v in again] + others, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(one, other)


def both_ways(threads: int, made: Callable[[], Sequence[torch.Tensor]]) -> None:
    """What is made by compiled loops, on so many threads, is what torch's functions make."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = made()
    finally:
        torch.set_num_threads(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitplanes, "COMPILED", False)
        assert all(torch.equal(a, b) for a, b in zip(found, made(), strict=True))


COUNTS = st.one_of(st.integers(0, 1_000), st.integers(0, 140_000))
"""Of elements. Above 131,072 their words are spread over threads."""
THRESHOLDS = st.just(0) | st.integers(-(2**63), 2**63 - 1)


def words(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50)
@given(COUNTS, st.lists(THRESHOLDS, min_size=1, max_size=3), st.integers(0, 1 << 30), st.sampled_from((1, 2)))
def test_planes_of_any_number_of_elements(count: int, thresholds: list[int], seed: int, threads: int):
    values = words(seed, count)
    both_ways(threads, lambda: [planes_below(values, tuple(thresholds)), signs_of(values)])


@settings(max_examples=25)
@given(COUNTS, st.integers(0, 1 << 30), st.sampled_from((1, 2)))
def test_codes_of_any_number_of_elements(count: int, seed: int, threads: int):
    r, spans, blocks, tops = words(seed, count), ((1, 5), (22, 43)), (compare.Blocks(3, (4, 1, 3)),), (63, 0)
    masks = [words(seed, rows, -(-count // 64)) for rows in (compare.CODES * 9 + 2, blocks[0].codes + 2)]
    both_ways(
        threads,
        lambda: [compare.masked_codes(r, spans, tops, masks[0]), compare._masked_codes(r, blocks, tops, masks[1])],
    )


@settings(max_examples=50)
@given(st.integers(0, 32), st.integers(1, 4), THRESHOLDS, st.integers(0, 1 << 30))
def test_planes_in_vectors_and_by_shifts(first: int, lines: int, threshold: int, seed: int):
    width, count = first + 8 * lines, 8 * lines
    v, room, out = words(seed, 64 * width).numpy(), np.empty((256, 8), np.uint64), np.zeros((64, width), np.int64)
    expected = planes(torch.from_numpy(v).view(64, width) - threshold)[:, first:]
    for made in {bitloops._lines_by_shifts, bitloops._whole_lines}:
        made(v, width, first, count, room, out[:, first:], threshold)
        assert torch.equal(torch.from_numpy(out)[:, first:], expected)


LAYERS = (
    AndLayer((5, 0, 3, 1, 2, 4), ((0, 1), (1, 2, 3), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)), (0, 1, 1, 2), (4,), (0, 5)),
    AndLayer((4, 1, 0), ((0, 2), (0, 1)), (0, 0), ()),
)
"""Of six rows; with ANDs of two to six operands."""


@settings(max_examples=25)
@given(st.one_of(st.integers(1, 100), st.integers(1, 2500)), st.integers(0, 1 << 30), st.sampled_from((1, 2)))
def test_layers_of_any_number_of_words(width: int, seed: int, threads: int):
    """From 2048 words on they are spread over threads."""
    opened, made = (
        sum(counts) for counts in zip(*((len(v.opened_rows), len(v.products)) for v in LAYERS), strict=True)
    )
    state, alpha, other, dealt = words(seed, 6 + 2 * opened + made, width).split((6, opened, opened, made))

    def run() -> list[torch.Tensor]:
        found = [and_layers.mask_products(alpha, other, LAYERS, dealt), and_layers._masked(state, alpha, LAYERS[0])]
        for first in (True, False):
            place = *LAYERS, 0, 0, first
            found += and_layers.next_state(other[:6], alpha[:6], state, alpha, dealt, *place)
        last = LAYERS[1], None, 6, len(LAYERS[0].products), True
        return [*found, and_layers.next_state(other[:3], alpha[:3], state, alpha, dealt, *last)[0]]

    both_ways(threads, run)


@given(st.integers(1, 40) | st.sampled_from((511, 513, 1100)), st.integers(0, 61), st.data())
def test_planes_of_what_is_moved_by_a_power_of_two(width: int, k: int, data: st.DataObject):
    high, down = data.draw(st.integers(k + 1, 63)), data.draw(st.booleans())
    bits = ring_values((64, width), 63, data.draw(st.integers(0, 1 << 30)))
    bits[k:, ::3] = data.draw(st.sampled_from((0, -1)))  # the carry goes all the way
    found = thresholds.planes_above(bits, k, high, down)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitplanes, "COMPILED", False)
        assert torch.equal(found, thresholds.planes_above(bits, k, high, down))


@given(st.integers(0, 200), st.integers(0, 1 << 30))
def test_inner_products_of_polynomials(count: int, seed: int):
    x, y = ring_values((count,), 63, seed), ring_values((count,), 63, seed + 1)
    found = inner_product(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitplanes, "COMPILED", False)
        assert torch.equal(found, inner_product(x, y))


@settings(max_examples=30)
@given(st.integers(1, 1100), st.sampled_from((ATAN, EXP, GELU, SIGMOID)), st.booleans(), st.integers(0, 1 << 30))
def test_harmonics_of_any_turns(count: int, series, wide: bool, seed: int):
    """To the last bit: A and S multiply shares by these numbers, on whatever machines they run."""
    terms, (low, high) = len(series.cos), (-(2**63), 2**63 - 1) if wide else (-(2**31), 2**31 - 1)
    draw = torch.Generator().manual_seed(seed)
    turns = torch.randint(low, high, (count,), generator=draw).to(torch.int64 if wide else torch.int32)
    turns[0] = low
    held = torch.randint(-(2**63), 2**63 - 1, (2, 2 * terms, count), generator=draw)
    assert torch.equal(harmonicloops.less_basis(turns, terms, held), harmonics.less_basis(turns, terms, held))
    found, wanted = (module.combine_harmonics(turns, held, series) for module in (harmonicloops, harmonics))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_numba_loads_what_it_knows_in_one_thread_at_a_time(monkeypatch):
    """Two sessions that begin at once in one process would else meet in numba's generator, which raises ValueError."""
    held = []
    context = SimpleNamespace(refresh=lambda: held.append(global_compiler_lock.is_locked()))
    monkeypatch.setattr(jit, "cpu_target", SimpleNamespace(typing_context=context, target_context=context))
    for _ in range(2):
        jit.warm.__wrapped__()
    assert held == [True] * 4


# Compiled loops from packed bits to ring elements against torch's functions, to the last bit, of any values.
ELEMENT_COUNTS = st.integers(0, 300) | st.sampled_from((32_767, 32_769, 33_000, 70_000, 131_071, 131_073, 140_100))
"""Of elements: above 131,072 they are more words than a thread takes at a time, and several threads share them."""
SEEDS, COPIES, SHIFTS = st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 32)


class Drawn:
    """Ring elements, of which some are the ends of the range."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, bits: int = 64) -> torch.Tensor:
        least = -(1 << (bits - 1))
        values = torch.randint(least, -least - 1, shape, generator=self.generator)
        flat = values.view(-1)
        flat[::7], flat[3::11], flat[5::13] = least, -least - 1, 0
        return values if bits == 64 else values.to(torch.int32)


def check_both(made: Callable[[], list[torch.Tensor]]) -> None:
    before, loops = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            loops.append(made())
    finally:
        torch.set_num_threads(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitplanes, "COMPILED", False)
        for *found, other in zip(*loops, made(), strict=True):
            for one in found:
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert torch.equal(one, other)


@settings(max_examples=50)
@given(ELEMENT_COUNTS, COPIES, SHIFTS | st.just(0), SEEDS)
def test_bits_as_elements(count: int, copies: int, shift: int, seed: int):
    draw, shape = Drawn(seed), torch.Size((count,))
    first, second, v = draw(copies * words_for(count)), draw(copies * words_for(count)), draw(count)
    wide, narrow = draw(copies, count), draw(copies, count, bits=32)

    def made() -> list[torch.Tensor]:
        masks = select.per_element(first, second, shape, copies)
        dealt = [select.bits_less(first, second, shape, copies, 0, v_A) for v_A in (wide, narrow)]
        dealt += [select.bits_less(first, second, shape, 1, at, wide[at : at + 1]) for at in range(copies)]
        chosen = select._chosen_less(first, second, shape, copies, 0, v, shift, wide)
        opened = (select._opened_bit(first, second, shape, copies, wide, one) for one in (0, 1))
        return [masks, *dealt, chosen, *opened]

    check_both(made)


@settings(max_examples=50)
@given(ELEMENT_COUNTS, COPIES, SHIFTS, SEEDS)
def test_products_with_bits(count: int, copies: int, shift: int, seed: int):
    draw, width = Drawn(seed), words_for(count)
    first, second, c, r = draw(3 * copies * width), draw(3 * copies * width), draw(count), draw(count)
    operands, wraps, threshold = draw(1 + 3 * copies, count), draw(copies, count, bits=32), int(draw(1))

    def made() -> list[torch.Tensor]:
        some = torch.Size((count,)), 2 * copies, copies, r, copies, shift
        found = [truncate.operands_less(first, second, *some, operands)]
        for one in (0, 1):
            found += [
                relu._product(first, second, c, operands, wraps, i, copies, threshold, shift, one)
                for i in range(copies)
            ]
            found.append(select._product(first[:width], second[:width], c, operands[1], r, operands[3], one))
        return found

    check_both(made)


@given(st.integers(1, 40) | st.just(700), st.integers(1, maximum.MOST), SHIFTS, SEEDS)
def test_products_with_the_bits_of_windows(width: int, m: int, shift: int, seed: int):
    draw = Drawn(seed)
    first, second = draw((m + 1) * width), draw((m + 1) * width)
    c, R, chosen = (draw(64, m, width) for _ in range(3))
    bits, w, wraps = draw(64, m + 1, width), draw(64, m, width, bits=32), draw(64, m, width, bits=32)
    check_both(lambda: [maximum._sum_chosen(first, second, c, R, bits, chosen, w, wraps, one, shift) for one in (0, 1)])


@settings(max_examples=50)
@given(ELEMENT_COUNTS, SHIFTS, SEEDS)
def test_halves_of_a_truncation(count: int, shift: int, seed: int):
    draw = Drawn(seed)
    c, r, u, wrap = draw(count), draw(count), draw(count), draw(count, bits=32)
    e = draw(words_for(count)), draw(words_for(count))
    c[:1] = 2**62  # plus 2^62 it is the least of all

    def made() -> list[torch.Tensor]:
        halves = [truncate._floor(c, r, wrap, u, shift, first) for first in (0, 1)]
        halves += [truncate._floor_by_bit(*e, c, torch.stack((r, u)), wrap, shift, first) for first in (0, 1)]
        return [*halves, truncate.shifted_less(c, shift, r), truncate.negative_less(c, wrap)]

    check_both(made)
