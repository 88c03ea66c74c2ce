"""What is claimed of dealt values, element by element: compiled against torch's functions, and what it stands for."""

from __future__ import annotations

import pytest
import torch
from helpers import ring_values
from hypothesis import given
from hypothesis import strategies as st

from sectorch.ring import bitplanes, logical_shift
from sectorch.ring.bitplanes import RowSums, masks_of, signs_of, words_for

SEEDS = st.integers(0, 1 << 30)
COUNTS = st.sampled_from((1, 5, 63, 64, 65, 130, 700, 33_000))
"""The last of more words than are taken at a time."""
COPIES = st.sampled_from((None, 1, 3))


def both(f, *args):
    """What compiled loops give, which torch's functions give as well."""
    found = f(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitplanes, "COMPILED", False)
        other = f(*args)
    pairs = [(found, other)] if isinstance(found, torch.Tensor) else zip(found, other, strict=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return found


def drawn(seed: int, count: int, copies: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two tensors of elements and a word vector, and a shape for them."""
    shape = (count,) if copies is None else (copies, count)
    return *(ring_values(shape, 63, seed + i) for i in range(2)), ring_values(
        ((copies or 1) * words_for(count),), 63, seed + 2
    )


@given(SEEDS, COUNTS, COPIES)
def test_masks_and_signs(seed, count, copies):
    x, _, words = drawn(seed, count, copies)
    masks = both(masks_of, words, torch.Size((count,)), copies)
    assert masks.shape == x.shape and set(masks.unique().tolist()) <= {0, -1}
    both(signs_of, x)


@given(SEEDS, COUNTS, COPIES, st.sampled_from((torch.int64, torch.int32)))
def test_the_other_half_of_a_bit(seed, count, copies, dtype):
    """Whatever the other half of the packed bit is, base + factor is the bit less one's half as a number."""
    v, _, words = drawn(seed, count, copies)
    other, v = ring_values(words.shape, 63, seed + 3), v.to(dtype)
    base, factor = both(bitplanes.complements, words, v, copies)
    bit = masks_of(words ^ other, torch.Size((count,)), copies).bitwise_and(1)
    found = base ^ (factor & masks_of(other, torch.Size((count,)), copies))
    assert torch.equal(found, (bit.to(dtype) - v).to(torch.int64))


@given(SEEDS, COUNTS, COPIES)
def test_one_word_of_two(seed, count, copies):
    zero, one, words = drawn(seed, count, copies)
    base, difference = both(bitplanes.choice_words, zero, one, words, copies)
    assert torch.equal(difference, zero ^ one)
    assert torch.equal(base, torch.where(masks_of(words, torch.Size((count,)), copies) == 0, zero, one))


@given(SEEDS, COUNTS)
def test_bits_and_the_last_carry_of_a_sum(seed, count):
    x, y = ring_values((count,), 63, seed), ring_values((count,), 63, seed + 1)
    mask = ring_values((65, words_for(count)), 63, seed + 2)
    found = both(bitplanes.sum_bits, x, y, mask) ^ mask
    assert torch.equal(found[:64], bitplanes.planes_below(x + y))
    sums = [sum(v % (1 << 64) for v in pair) >> 64 for pair in zip(x.tolist(), y.tolist(), strict=True)]
    assert masks_of(found[64], x.shape, None).tolist() == [-carry for carry in sums]


@given(SEEDS, COUNTS, st.integers(1, 62))
def test_quotients_by_both_carries(seed, count, shift):
    v, r, low = drawn(seed, count, None)
    last, *others = (ring_values(low.shape, 63, seed + 3 + i) for i in range(3))
    coefficients = both(bitplanes.quotients, v, r, low, last, shift)
    first, second = (masks_of(words, v.shape, None) for words in others)
    found = torch.zeros_like(v)
    for coefficient, bits in zip(coefficients, (torch.full_like(v, -1), first, second, first & second), strict=True):
        found ^= coefficient & bits
    c, high = (masks_of(a ^ b, v.shape, None).bitwise_and(1) for a, b in zip((low, last), others, strict=True))
    assert torch.equal(found, logical_shift(r, shift) - v + c - (high << (64 - shift)))


def _placed(sums: RowSums, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What it writes among zeros."""
    out = torch.zeros(3 + len(sums.sets) * x.shape[1], dtype=torch.int64)
    sums.into(x, y, out)
    return out


@given(SEEDS, st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=9), st.sampled_from((1, 7, 1100)))
def test_sums_of_rows(seed, sets, width):
    x, y = ring_values((4, width), 63, seed), ring_values((5, width), 63, seed + 1)
    starts = [3 + i * width for i in reversed(range(len(sets)))]
    rows, found = torch.cat((x, y)), both(_placed, RowSums(sets, starts), x, y)
    assert not found[:3].any()
    for start, expected in zip(starts, sets, strict=True):
        taken = found[start : start + width]
        total = torch.zeros(width, dtype=torch.int64)
        for row in expected:
            total ^= rows[row]
        assert torch.equal(taken, total)


@given(SEEDS, st.lists(st.tuples(COUNTS, st.integers(1, 3)), max_size=4))
def test_elements_stand_where_packed_bits_do(seed, parts):
    tensors = [ring_values((copies, count), 63, seed + i) for i, (count, copies) in enumerate(parts)]
    found = both(bitplanes.columns_of, tensors, [copies for _, copies in parts], torch.zeros(0, dtype=torch.int64))
    assert found.shape == (64, sum(copies * words_for(count) for count, copies in parts))
    wanted = [bitplanes.to_rows(one) for tensor in tensors for one in tensor]
    assert torch.equal(found, torch.cat([found[:, :0], *wanted], 1))
