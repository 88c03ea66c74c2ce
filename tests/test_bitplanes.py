"""Packed bits: the transpose against the definition of a bit, and the layout that all of it shares."""

from __future__ import annotations

import pytest
import torch
from helpers import HIGHEST, LOWEST, SHAPES, ring_values
from hypothesis import given
from hypothesis import strategies as st

from sectorch.ring import bitplanes
from sectorch.ring.bitplanes import bits_shape, from_rows, planes, spread, to_rows, words_for


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
    assert bits_shape(x.numel()) == (words_for(x.numel()),)


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
