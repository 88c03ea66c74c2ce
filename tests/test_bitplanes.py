"""Packed bits: the transpose, the common layout, and the claims about dealt values that are made of them."""

from __future__ import annotations

import pytest
import torch
from helpers import HIGHEST, LOWEST, SHAPES, ring_values
from hypothesis import given
from hypothesis import strategies as st

from sectorch.ring import bitplanes, logical_shift
from sectorch.ring.bitplanes import (
    RowSums,
    from_rows,
    masks_of,
    planes,
    signs_of,
    spread,
    to_rows,
    words_for,
)


def bit(word: int, position: int) -> int:
    return (word % (1 << 64)) >> position & 1


@given(st.lists(st.integers(LOWEST, HIGHEST), min_size=0, max_size=130))
def test_planes_hold_the_bits_in_the_documented_place(elements: list[int]):
    matrix = to_rows(torch.tensor(elements, dtype=torch.int64))
    width = words_for(len(elements))
    assert matrix.shape == (64, width)
    out = planes(matrix).tolist()
    padded = elements + [0] * (64 * width - len(elements))
    for w in range(width):
        for j in (0, 1, 2, 31, 32, 62, 63):
            # Bit t of word w of plane j is bit j of element t W + w.
            assert [bit(out[j][w], t) for t in range(64)] == [bit(padded[t * width + w], j) for t in range(64)]


@given(st.sampled_from([(64, 0), (64, 1), (64, 5), (3, 64, 2), (2, 2, 64, 3)]), st.integers(0, 1 << 30))
def test_the_transpose_is_its_own_inverse_and_leaves_its_argument_alone(shape, seed: int):
    matrix = ring_values(shape, 63, seed)
    before = matrix.clone()
    assert torch.equal(planes(planes(matrix)), matrix)
    assert torch.equal(matrix, before)


def test_leading_dimensions_are_transposed_one_by_one():
    matrix = ring_values((3, 64, 4))
    assert torch.equal(planes(matrix), torch.stack([planes(m) for m in matrix]))


def test_a_matrix_wider_than_one_chunk():
    matrix = ring_values((64, bitplanes._CHUNK + 3))
    out = planes(matrix)
    for w in (0, bitplanes._CHUNK - 1, bitplanes._CHUNK, bitplanes._CHUNK + 2):
        assert torch.equal(out[:, w : w + 1], planes(matrix[:, w : w + 1]))


def test_a_matrix_that_is_not_contiguous():
    matrix = ring_values((5, 64)).t()
    assert torch.equal(planes(matrix), planes(matrix.contiguous()))


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_back(shape):
    x = ring_values(shape)
    matrix = to_rows(x)
    assert matrix.shape == (64, words_for(x.numel()))
    assert torch.equal(from_rows(matrix, x.shape), x)
    assert matrix.reshape(-1)[x.numel() :].count_nonzero() == 0


def test_rows_is_a_view_where_nothing_has_to_be_padded():
    x = ring_values((2, 64))
    assert to_rows(x).data_ptr() == x.data_ptr()


def test_words_for():
    assert [words_for(n) for n in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]


@given(st.sampled_from(SHAPES), st.integers(0, 63), st.integers(0, 1 << 30))
def test_spread_turns_one_plane_into_a_mask_per_element(shape, j: int, seed: int):
    x = ring_values(shape, 63, seed)
    mask = from_rows(spread(planes(to_rows(x))[j]), x.shape)
    assert torch.equal(mask, -((x >> j) & 1))


def test_spread_of_several_words_at_once():
    words = ring_values((3, 2, 5))
    assert spread(words).shape == (3, 2, 64, 5)
    assert torch.equal(spread(words)[1, 0], spread(words[1, 0]))


def test_shapes_without_content():
    meta = torch.empty(5, 13, dtype=torch.int64, device="meta")
    assert planes(to_rows(meta)).shape == (64, 2)
    assert spread(planes(to_rows(meta))[3]).shape == (64, 2)
    assert spread(planes(to_rows(meta))[3]).is_meta
    assert from_rows(to_rows(meta), meta.shape).shape == meta.shape


# Claims about dealt values, element by element: the compiled form equals torch's functions and means what it says.
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
