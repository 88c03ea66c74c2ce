"""The key-value store: a key finds its row, another key a uniform one, and the matrix is uniform."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from cases import long
from hypothesis import given
from hypothesis import strategies as st

from sectorch.errors import ArgumentError
from sectorch.mpc import okvs
from sectorch.testing.outcomes import distinguishable, not_uniform


def named(count: int, first: int = 0) -> list[bytes]:
    return [b"key %d" % i for i in range(first, first + count)]


def stored(secret: bytes, keys: list[bytes], rows: np.ndarray, count: int) -> np.ndarray:
    hashes, pads = okvs.hashes_and_pads(secret, keys, rows.shape[1])
    return okvs.encode(hashes, rows + pads, count)


def looked_up(secret: bytes, keys: list[bytes], matrix: np.ndarray, count: int) -> np.ndarray:
    hashes, pads = okvs.hashes_and_pads(secret, keys, matrix.shape[1])
    return okvs.decode(hashes, matrix, count) - pads


@given(st.integers(0, 120), st.integers(0, 5), st.integers(0, 40), st.integers(0, 2**32))
def test_every_key_finds_its_row(count: int, width: int, spare: int, seed: int):
    rng = np.random.default_rng(seed)
    secret, rows = rng.bytes(32), rng.integers(-(2**63), 2**63 - 1, (count, width))
    matrix = stored(secret, named(count), rows, count + spare)
    assert matrix.shape == (okvs.length(count + spare), width)
    order = rng.permutation(count)
    found = looked_up(secret, [named(count)[i] for i in order], matrix, count + spare)
    np.testing.assert_array_equal(found, rows[order])


@pytest.mark.parametrize("count", [5000, *long(200_000)])
def test_a_large_table_is_peeled(count: int):
    rows = np.arange(2 * count, dtype=np.int64).reshape(count, 2)
    matrix = stored(bytes(32), named(count), rows, count)
    np.testing.assert_array_equal(looked_up(bytes(32), named(count), matrix, count), rows)
    assert len(matrix) < 1.4 * count + 300


def test_another_key_or_another_secret_finds_uniform_words():
    rows = np.zeros((4000, 3), dtype=np.int64)
    matrix = stored(bytes(32), named(4000), rows, 4000)
    for secret, keys in ((bytes(32), named(4000, first=4000)), (bytes([1]) * 32, named(4000))):
        found = looked_up(secret, keys, matrix, 4000)
        assert not (found == 0).any()
        assert not_uniform(found.reshape(1, -1)) == ""


def test_a_matrix_and_its_hashes_are_uniform_without_the_secret_and_tell_no_tables_apart():
    """As S sees them: over many secrets, of two tables with other keys, another number of them, and other rows."""
    views = []
    for count, first, value in ((40, 0, 0), (7, 900, 1)):
        seen = []
        for _ in range(1500):
            secret, keys = os.urandom(32), named(count, first)
            matrix = stored(secret, keys, np.full((count, 1), value), 40)
            asked = okvs.hashes_and_pads(secret, named(4, first), 0)[0]
            found = okvs.decode(asked, matrix, 40)
            seen.append(np.concatenate((matrix.reshape(-1), asked.reshape(-1).view(np.int64), found.reshape(-1))))
        views.append(np.array(seen))
    assert [not_uniform(view) for view in views] == ["", ""]
    assert distinguishable(*(view.reshape(-1) for view in views)) == ""


def test_rows_without_their_pads_are_found_by_that():
    """The control: XORs of rows of the matrix are the stored values, here zeros, to whoever has the hashes."""
    seen = []
    for _ in range(400):
        hashes, _ = okvs.hashes_and_pads(os.urandom(32), named(8), 1)
        matrix = okvs.encode(hashes, np.zeros((8, 1), dtype=np.int64), 8)
        seen.append(okvs.decode(hashes, matrix, 8).reshape(-1))
    assert not_uniform(np.array(seen)) != ""


def deficiency(hashes: np.ndarray, rows: int) -> int:
    """How many equations of the keys depend on the others, without the dense places."""
    places = okvs._places(hashes, rows)
    _, left = okvs._peeled(places, 3 * okvs.segment(rows))
    pivots: dict[int, int] = {}
    lost = 0
    for key in left.tolist():
        equation = sum(1 << place for place in places[key].tolist())
        while equation and equation.bit_length() in pivots:
            equation ^= pivots[equation.bit_length()]
        if equation:
            pivots[equation.bit_length()] = equation
        else:
            lost += 1
    return lost


@pytest.mark.parametrize("tables", [600, *long(100_000)])
def test_the_dense_places_are_enough(tables: int):
    """A table fails if a sum of dependent equations has no dense place: with probability 2^(d - 64) or less, where d
    equations depend on others. Its mean over tables has to stay below 2^-40."""
    rng = np.random.default_rng(7)
    chance, largest = 0.0, 0
    for _ in range(tables):
        count = int(rng.integers(1, 400))
        hashes = rng.integers(-(2**31), 2**31, (count, okvs.HASH_WORDS), dtype=np.int32)
        lost = deficiency(hashes, count)
        chance, largest = chance + 2.0 ** (lost - okvs.DENSE) / tables, max(largest, lost)
    assert chance < 2.0**-40 and largest < 20


def test_dense_places_solve_what_is_not_peeled():
    """Keys that have the same three places, and differ in their subset of the dense places alone."""
    rng = np.random.default_rng(1)
    hashes = rng.integers(-(2**31), 2**31, (40, okvs.HASH_WORDS), dtype=np.int32)
    hashes[:, :3] = hashes[0, :3]
    values = rng.integers(-(2**62), 2**62, (40, 2))
    np.testing.assert_array_equal(okvs.decode(hashes, okvs.encode(hashes, values, 40), 40), values)


def test_one_key_twice_has_no_encoding():
    hashes, pads = okvs.hashes_and_pads(bytes(32), [b"a", b"b", b"a"], 1)
    with pytest.raises(ArgumentError, match=re.escape("equal to the hash")):
        okvs.encode(hashes, pads, 3)


def test_rows_of_too_many_words_are_refused():
    assert okvs.hashes_and_pads(bytes(32), [b"a"], 508)[1].shape == (1, 508)
    with pytest.raises(ArgumentError, match="at most 508 words"):
        okvs.hashes_and_pads(bytes(32), [b"a"], 509)
