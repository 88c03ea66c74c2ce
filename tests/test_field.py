"""GF(2^64): against whole numbers in Python, compiled against torch's functions, and the laws of a field."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from example_counts import fewer
from helpers import ring_values
from hypothesis import given
from hypothesis import strategies as st

from sectorch.ring import bitplanes, field, fieldloops, jit

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
MODULUS = (1 << 64) | 0b11011
SEEDS = st.integers(0, 1 << 30)


def product(x: int, y: int) -> int:
    """By long multiplication and division of polynomials."""
    total = 0
    for bit in range(64):
        if y >> bit & 1:
            total ^= x << bit
    for bit in range(total.bit_length() - 1, 63, -1):
        if total >> bit & 1:
            total ^= MODULUS << (bit - 64)
    return total


@pytest.mark.sectorch_long
def test_without_the_instruction_the_loops_give_the_same(tmp_path):
    """In a process that takes the processor for one without it, and compiles anew."""
    program = """
from llvmlite import binding
features = binding.get_host_cpu_features
binding.get_host_cpu_features = lambda: (f := features(), f.pop("pclmul", None))[0]
import pytest, sys
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "tests/test_field.py",
    "tests/test_bitloops.py::test_planes_of_any_number_of_elements"]) or (
    __import__("sectorch.ring.fieldloops", fromlist=["_"]).carryless.__name__ != "carryless_by_shifts"))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_no_vectors_where_loops_are_compiled_for_another_processor(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not jit.has_bit_vectors()


def values(seed: int, *shape: int) -> torch.Tensor:
    return ring_values(shape, 63, seed)


def both(f, *args):
    """What compiled loops give, which those without vectors and torch's functions give as well."""
    found = f(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "_compiled", lambda: fieldloops.PORTABLE)
        assert torch.equal(found, f(*args))
        patch.setattr(bitplanes, "COMPILED", False)
        assert torch.equal(found, f(*args))
    return found


def unsigned(x: torch.Tensor) -> list[int]:
    return [v % (1 << 64) for v in x.reshape(-1).tolist()]


@given(SEEDS)
def test_products_are_those_of_polynomials(seed):
    x, y = values(seed, 5), values(seed + 1, 5)
    found = both(field.times, x, y)
    assert unsigned(found) == [product(a, b) for a, b in zip(unsigned(x), unsigned(y), strict=True)]


def test_products_known_from_elsewhere():
    """x^63 x = x^64 = x^4 + x^3 + x + 1; all ones times x; 3 5 = 15 as of polynomials."""
    x = torch.tensor([-(1 << 63), -1, 3])
    y = torch.tensor([2, 2, 5])
    assert unsigned(both(field.times, x, y)) == [0b11011, (1 << 64) - 2 ^ 0b11011, 15]


@given(SEEDS)
def test_every_number_but_zero_has_an_inverse(seed):
    x = values(seed, 4) | 1
    power = torch.ones_like(x)  # x^(2^64 - 2)
    for _ in range(63):
        power = field.times(field.times(power, power), x)
    assert torch.equal(field.times(field.times(power, power), x), torch.ones_like(x))


@given(st.integers(0, 20), SEEDS)
def test_sums_over_words(width, seed):
    x, y, w = values(seed, 64, width), values(seed + 1, 64, width), values(seed + 2, width)
    k, eight = values(seed + 3, 64), values(seed + 4, 8)
    for variables in range(1, 7):
        part = x[: 1 << variables].contiguous(), y[: 1 << variables].contiguous()
        assert both(field.points, *part, variables).shape == (3**variables,)
    both(field.inner_product, x, w)
    both(field.weighted_rows_sum, x, k)
    both(field.weighted_rows_sum, x[:0], k[:0])
    both(field.fold_rows, x.view(2, 32, width), k[:32].contiguous(), width + 3)
    both(field.times, k.view(64, 1), w)
    both(field.points_of_chosen, x.view(8, 8, width), w, eight, y[0].contiguous())
    both(field.combined_words, w, eight)


@fewer(8, long=1000)
@given(st.integers(0, 4), SEEDS)
def test_bits_are_numbers_of_the_field(count, seed):
    """Packed bits as numbers 0 and 1, bit by bit, give what their own loops give."""
    tiles, width = (values(seed + i, count, *field.TILE) for i in range(2)), 8 * count
    x, y = tiles
    weights, second, scales = values(seed + 3, 64), values(seed + 4, 16), values(seed + 2, width)

    def numbers(bits: torch.Tensor) -> torch.Tensor:
        """[row, bit, word]"""
        return (bits.transpose(0, 1).reshape(64, 1, -1) >> torch.arange(64).view(1, 64, 1)).bitwise_and(1)

    def rows(bits: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        found = field.weighted_rows_sum(numbers(bits).reshape(64, 64 * width), weights).view(64, width)
        return field.times(found, by).view(4, 16, width).transpose(0, 1).reshape(16, 4 * width)

    by = field.times(field.powers_of_x(64, CPU).view(64, 1), scales)
    left, right = rows(x, by), rows(y, torch.ones_like(by))
    found = both(field.points_of_folded_bits, x, y, weights, scales)
    assert torch.equal(found, field.points(left, right, 4))
    assert torch.equal(both(field.twice_folded_bits, x, weights, second, scales), field.weighted_rows_sum(left, second))
    assert torch.equal(both(field.twice_folded_bits, y, weights, second), field.weighted_rows_sum(right, second))
    weighed, others = (numbers(v).reshape(64, -1) for v in (x, y))
    expected = field.points(field.times(weighed, by.reshape(-1)), others, 6)
    assert torch.equal(both(field.points_of_bits, x, y, scales), expected)
    words = x.transpose(0, 1).reshape(64, -1)
    expected = field.inner_product(field.inner_product(words, scales)[:, 0], weights)
    assert torch.equal(both(field.inner_product_of_tiles, x, weights, scales), expected)


@given(st.integers(1, 6), SEEDS)
def test_points_are_of_the_multilinear_functions(variables, seed):
    """What stands at {0, 1, infinity}^v gives the product of both functions at any point."""
    x, y, point = values(seed, 1 << variables, 1), values(seed + 1, 1 << variables, 1), values(seed + 2, variables)
    weights = both(field.weights_at, point)
    at_x, at_y = (field.weighted_rows_sum(v, weights) for v in (x, y))
    sent = field.points(x, y, variables)
    assert torch.equal(field.inner_product(sent, both(field.weights_at, point, True)), field.times(at_x, at_y))


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """The same words, of which none stands beside the next."""
    found = torch.full((*x.shape, 2), 3)
    found[..., 1] = x
    return found[..., 1]


@pytest.mark.parametrize("width", [1, 8, 13])
def test_words_need_not_stand_beside_each_other(width):
    x, y, few, tiles = values(0, 16, width), values(1, 8, 8, width), values(2, 5, 16, width), values(3, 2, *field.TILE)
    w, eight, k, columns = values(4, width), values(5, 8), values(6, 64), values(7, 16)
    calls = {
        field.times: [(w, w + 1), (x, x + 1), (x, w)], field.inner_product: [(x, w)],
        field.weighted_rows_sum: [(x, columns)],
        field.points: [(x, x + 1, 4)], field.points_of_chosen: [(y, w, eight, w + 1)], field.weights_at: [(eight[:5],)],
        field.combined_words: [(w, eight)], field.fold_rows: [(few, columns, width + 1)],
        field.inner_product_of_tiles: [(tiles, k, columns)], field.points_of_bits: [(tiles, tiles + 1, columns)],
        field.points_of_folded_bits: [(tiles, tiles + 1, k, columns)],
        field.twice_folded_bits: [(tiles, k, columns), (tiles, k, columns, columns + 1)],
    }  # fmt: skip
    for f, several in calls.items():
        for args in several:
            apart = [laid_out(v) if isinstance(v, torch.Tensor) else v for v in args]
            assert torch.equal(both(f, *apart), f(*args)), f.__name__
    assert torch.equal(field.times(w[:1].expand(17), values(8, 17)), field.times(w[:1], values(8, 17)))


BESIDE = """
import ctypes, mmap
import numpy as np
from sectorch.ring import field, fieldloops

libc, page = ctypes.CDLL(None), mmap.PAGESIZE
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def placed(*shape):
    size, count = page * (1 + 8 * int(np.prod(shape)) // page), int(np.prod(shape))
    memory = mmap.mmap(-1, size + page)
    words = np.frombuffer(memory, np.int64)
    assert libc.mprotect(words.ctypes.data + size, page, 0) == 0
    found = words[size // 8 - count : size // 8]
    found[:] = np.random.default_rng(count).integers(-(1 << 63), 1 << 63, count)
    return found.reshape(shape)

for loops in (field._compiled(), fieldloops.PORTABLE):
    for n in range(1, 18):
        loops.times(placed(n), placed(n), placed(n))
        loops.inner_products(placed(3, n), placed(n), placed(3))
        loops.combine_rows(placed(5, n), placed(5), placed(n))
        loops.combined_words(placed(n), placed(8), placed(8, n))
        loops.points(placed(16, n), placed(16, n), placed(81))
        loops.chosen_points(placed(8, 8, n), placed(n), placed(8), placed(n), placed(27))
    for n in (1, 2):
        x, w, k = placed(n, 64, 8), placed(8 * n), placed(64)
        loops.tiles_weighed(x, k, w, placed(1))
        loops.bit_points(x, x, w, placed(729))
        loops.folded_points(x, x, k, w, placed(81))
        loops.twice_folded(x, k, placed(16), w, placed(32 * n))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forbids memory as Linux does")
def test_nothing_is_read_or_written_beyond_the_end():
    """Each array ends where memory does that nobody may touch; in a process of its own, which would end there."""
    done = subprocess.run([sys.executable, "-c", BESIDE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] or f"signal {-done.returncode}"
