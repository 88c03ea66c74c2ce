"""Compiled loops from packed bits to ring elements against torch's functions, to the last bit, of any values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch.mpc.star import maximum, relu, select, truncate
from sectorch.ring import bitplanes
from sectorch.ring.bitplanes import words_for

COUNTS = st.integers(0, 300) | st.sampled_from((32_767, 32_769, 33_000, 70_000, 131_071, 131_073, 140_100))
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
@given(COUNTS, COPIES, SHIFTS | st.just(0), SEEDS)
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
@given(COUNTS, COPIES, SHIFTS, SEEDS)
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
    check_both(lambda: [maximum._chosen(first, second, c, R, bits, chosen, w, wraps, one, shift) for one in (0, 1)])


@settings(max_examples=50)
@given(COUNTS, SHIFTS, SEEDS)
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
