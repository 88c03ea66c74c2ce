"""Products by limbs against torch's wrapping int64 product: random, worst-case digits, long sums, and the bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.errors import ArgumentError
from sectorch.ring.products import FLOAT64, INT8, KINDS, digits, limb_matmul, short_matmul

EDGES = (0, 1, -1, (1 << 63) - 1, -(1 << 63), 0x7F7F7F7F7F7F7F7F, -0x7F7F7F7F7F7F7F80, (1 << 21) - 1, -(1 << 21))


def ring(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, dtype=torch.int64, generator=generator)


def worst(limbs) -> int:
    """The element all of whose digits are the lowest, -2^(w-1): every digit product is as large as can be."""
    value = sum(-(1 << (limbs.bits - 1)) << (limbs.bits * i) for i in range(limbs.count)) % (1 << 64)
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(st.sampled_from(EDGES) | st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=8))
def test_digits_are_small_and_give_the_element_back(kind: str, values: list[int]):
    x, limbs = torch.tensor(values), KINDS[kind]
    cut = digits(x, limbs)
    assert (cut >= -(1 << (limbs.bits - 1))).all()
    assert (cut < 1 << (limbs.bits - 1)).all()
    assert torch.equal(sum(d << (limbs.bits * i) for i, d in enumerate(cut)), x)


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(0, 20), k=st.integers(0, 40), m=st.integers(0, 20), seed=st.integers(0, 1 << 30))
def test_products_of_any_shape(kind: str, n: int, k: int, m: int, seed: int):
    x, y = ring(n, k, seed=seed), ring(k, m, seed=seed + 1)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_broadcast(kind: str):
    x, y = ring(3, 1, 4, 5), ring(2, 5, 6, seed=1)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)


@pytest.mark.parametrize(
    ("kind", "fan_in"), [("float64", 2048), ("float64", 512 * 9), ("int8", 512 * 9), ("int8", 131071)]
)
@pytest.mark.parametrize("value", ["worst", "largest", "random"])
def test_long_sums_with_the_worst_digits(kind: str, fan_in: int, value: str):
    if value == "random":
        x, y = ring(2, fan_in), ring(fan_in, 3, seed=1)
    else:
        element = worst(KINDS[kind]) if value == "worst" else (1 << 63) - 1
        x, y = torch.full((2, fan_in), element), torch.full((fan_in, 3), element)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)
    if fan_in <= KINDS[kind].longest:
        assert torch.equal(short_matmul(x, y, kind), x @ y)


def test_the_bounds_are_those_of_the_accumulators():
    assert FLOAT64.longest << (2 * FLOAT64.bits - 2) == 1 << 53
    assert INT8.longest << (2 * INT8.bits - 2) < 1 << 31 <= (INT8.longest + 1) << (2 * INT8.bits - 2)
    # One more product of lowest digits and the int32 sum wraps: the bound cannot be larger.
    column = torch.full((INT8.longest + 1, 8), -128, dtype=torch.int8)
    assert (torch._int_mm(column.t().contiguous()[:1].expand(17, -1).contiguous(), column) < 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_longer_sums_are_refused_or_cut(kind: str):
    fan_in = KINDS[kind].longest + 1
    x, y = ring(1, fan_in), ring(fan_in, 1, seed=1)
    with pytest.raises(ArgumentError, match=f"exact up to a fan-in of {fan_in - 1}, got {fan_in}"):
        short_matmul(x, y, kind)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)


def test_an_unknown_kind():
    with pytest.raises(ArgumentError, match="float64 or int8, got 'fp8'"):
        limb_matmul(ring(1, 1), ring(1, 1), "fp8")
