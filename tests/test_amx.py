"""Products on the processor's matrix unit against torch's integers, which wrap: equal for any shape and any bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import HIGHEST, LOWEST, ring_values
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch.ring import products
from sectorch.ring.products import Conv2d, Linear, matmul, unit

here = pytest.mark.skipif(not unit(), reason="this processor has no matrix unit for bytes (Intel AMX)")
SIDES = st.integers(1, 70)
SEED = st.integers(0, 1 << 30)


@pytest.fixture(autouse=True, scope="module")
def always():
    """The unit takes products of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_unit_for", lambda n, k, m: unit())
        yield


@here
@settings(max_examples=60)
@given(SIDES, st.integers(1, 1300), SIDES, SEED, st.sampled_from((1, 2)), st.booleans())
def test_matrices(n: int, k: int, m: int, seed: int, threads: int, turned: bool):
    """More than 1,024 summands are cut, and more than one block of rows is spread over threads."""
    x, y = ring_values((n, k), 63, seed), ring_values((k, m), 63, seed + 1)
    y = y.t().contiguous().t() if turned else y
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(matmul(x, y), x @ y)
    finally:
        torch.set_num_threads(before)


@here
@pytest.mark.parametrize("value", [-1, LOWEST, HIGHEST, 255, 0x00FF00FF00FF00FF])
@pytest.mark.parametrize("k", [16, 1024, 1025, 5000])
def test_the_largest_sums_of_bytes(value: int, k: int):
    """All bytes 255: 8 K 255^2 is below 2^31 for the 1,024 summands of a piece."""
    x, y = torch.full((33, k), value), torch.full((k, 17), -1)
    assert torch.equal(matmul(x, y), x @ y)


@here
@settings(max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2),
    SEED,
)  # fmt: skip
def test_convolutions(batch: int, channels: int, out: int, kernel: int, stride: int, padding: int, seed: int):
    x, weight = ring_values((batch, channels, 7, 9), 63, seed), ring_values((out, channels, kernel, 2), 63, seed + 1)
    product = Conv2d((stride, 1), (padding, 1))
    expected = F.conv2d(x, weight, None, (stride, 1), (padding, 1))
    assert torch.equal(product(x, weight), expected)
    assert torch.equal(product(x, weight, product.prepare(weight)), expected)


@here
@given(st.integers(1, 20), st.integers(1, 600), st.integers(1, 150), SEED)
def test_a_weight_that_is_prepared(rows: int, k: int, out: int, seed: int):
    x, weight = ring_values((rows, k), 63, seed), ring_values((out, k), 63, seed + 1)
    product = Linear()
    assert torch.equal(product(x, weight, product.prepare(weight)), x @ weight.t())


@settings(max_examples=30)
@given(st.integers(200, 400), st.integers(100, 300), SEED)
def test_a_single_row(out: int, k: int, seed: int):
    x, weight = ring_values((1, k), 63, seed), ring_values((out, k), 63, seed + 1)
    assert torch.equal(matmul(x, weight.t()), (x * weight).sum(1, keepdim=True).t())
