"""Fixed point and ring elements, against exact fractions and Python integers mod 2^64."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import pytest
import torch
from helpers import HIGHEST, LOWEST, ring_values
from hypothesis import example, given
from hypothesis import strategies as st

from sectorch.errors import DtypeError, FixedPointRangeError, NonFiniteError, SectorchError
from sectorch.ring import (
    FRAC_BITS,
    HEADROOM_BITS,
    as_signed,
    bitplanes,
    check_encodable,
    decode,
    encode,
    logical_shift,
    range_limit,
    sign_mask,
    wide,
)

MODULUS = 1 << 64
INT64 = st.integers(LOWEST, HIGHEST) | st.sampled_from([0, 1, -1, LOWEST, HIGHEST])


@given(st.integers(-(1 << 130), 1 << 130))
@example(1 << 63)
@example((1 << 63) - 1)
def test_signed_is_the_representative_that_torch_uses(value: int):
    assert as_signed(value) % MODULUS == value % MODULUS
    assert LOWEST <= as_signed(value) <= HIGHEST


def test_constants():
    assert as_signed(1 << 63) == LOWEST
    assert 2.0 ** (HEADROOM_BITS - 2 * FRAC_BITS) == range_limit(FRAC_BITS) == 2.0**22


@given(INT64, INT64)
def test_int64_arithmetic_is_arithmetic_mod_two_to_the_64(a: int, b: int):
    x, y = torch.tensor(a), torch.tensor(b)
    assert (x + y).item() == as_signed(a + b)
    assert (x - y).item() == as_signed(a - b)
    assert (x * y).item() == as_signed(a * b)
    assert (-x).item() == as_signed(-a)
    assert torch.addcmul(x, x, y).item() == as_signed(a + a * b)


@given(INT64, st.integers(1, 63))
def test_logical_shift_is_unsigned_division(a: int, bits: int):
    x = torch.tensor([a])
    assert logical_shift(x, bits).item() == as_signed((a % MODULUS) >> bits)
    assert x.item() == a, "the argument is left alone"


@given(INT64)
def test_sign_mask(a: int):
    assert sign_mask(torch.tensor(a)).item() == (-1 if a < 0 else 0)


@given(st.integers(0, 26).flatmap(lambda s: st.tuples(st.just(s), st.floats(-(2.0 ** (62 - s)), 2.0 ** (62 - s)))))
def test_encoding_is_off_by_at_most_half_a_unit(case):
    bits, value = case
    encoded = encode(torch.tensor(value, dtype=torch.float64), bits)
    assert encoded.dtype == torch.int64
    assert abs(Fraction(encoded.item()) - Fraction(value) * (1 << bits)) <= Fraction(1, 2)
    # |v| 2^s >= 2^53 is an integer already, and below that the quotient by 2^s is exact in float64, so decoding adds
    # nothing: 2^-(s+1) is the whole error of the round trip.
    back = decode(encoded, bits, torch.float64).item()
    assert abs(Fraction(back) - Fraction(value)) <= Fraction(1, 1 << (bits + 1))


@given(st.floats(-1e5, 1e5, width=32))
def test_round_trip_of_float32_at_the_default_scale(value: float):
    back = decode(encode(torch.tensor(value), FRAC_BITS), FRAC_BITS)
    assert back.dtype == torch.float32
    # Half a unit of the encoding, and half a unit in the last of 24 bits for the result's own rounding.
    bound = Fraction(1, 1 << (FRAC_BITS + 1)) * (1 + Fraction(1, 1 << 24)) + abs(Fraction(value)) / (1 << 24)
    assert abs(Fraction(back.item()) - Fraction(value)) <= bound


def test_ties_go_to_even():
    assert encode(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]), 0).tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_dtype_is_encoded_from_its_exact_value(dtype):
    values = torch.tensor([0.1, -3.7, 100.0], dtype=dtype)
    assert encode(values, 20).tolist() == [round(Fraction(v.item()) * (1 << 20)) for v in values]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_are_encoded_exactly(dtype):
    values = torch.tensor([0, 1, 77], dtype=dtype)
    assert encode(values, 20).tolist() == [0, 1 << 20, 77 << 20]


def test_bools():
    assert encode(torch.tensor([True, False]), 3).tolist() == [8, 0]
    assert decode(torch.tensor([8, 0, -1]), 3, torch.bool).tolist() == [True, False, True]


@given(INT64, st.integers(0, 26))
def test_decoding_to_integers_is_floor(a: int, bits: int):
    assert decode(torch.tensor(a), bits, torch.int64).item() == a // (1 << bits)


def test_a_tensor_that_needs_grad_can_be_encoded():
    assert not encode(torch.ones(2, requires_grad=True), 4).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_values_below_the_limit_pass_and_the_limit_does_not(dtype):
    limit = range_limit(24)  # 2^14, which all five dtypes hold
    top = torch.tensor([limit], dtype=dtype)
    beside = torch.nextafter(top, torch.zeros(1, dtype=dtype)) if dtype.is_floating_point else top - 1
    rounded = dtype == torch.float64  # what is next to the limit is the limit as a ring element
    below = top - 2.0**-24 if rounded else beside
    check_encodable(below, 24, "x")
    check_encodable(-below, 24, "x")
    for bad in (top, -top, *((beside, top - 2.0**-25) if rounded else ())):
        with pytest.raises(FixedPointRangeError, match=r"my input reaches magnitude 16384, .* 24 fraction bits"):
            check_encodable(bad, 24, "my input")


def test_the_lowest_integer_is_out_of_range():
    with pytest.raises(FixedPointRangeError):
        check_encodable(torch.tensor([LOWEST]), 20, "x")


def test_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    with pytest.raises(NonFiniteError, match=r"the input holds 1 NaN and 2 infinite entries of 4"):
        check_encodable(values, 20, "the input")
    with pytest.raises(ValueError):
        check_encodable(values[2:], 20, "the input")


# torch itself warns that its quantised dtypes will go.
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make", [lambda v: v.to(torch.complex64), lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.quint8)]
)
def test_dtypes_without_an_encoding(make):
    with pytest.raises(DtypeError, match="real floating-point or integer"):
        check_encodable(make(torch.ones(2)), 20, "x")
    assert issubclass(DtypeError, (SectorchError, TypeError))


def test_nothing_to_check():
    check_encodable(torch.empty(0), 20, "x")
    check_encodable(torch.empty(3, device="meta"), 20, "x")


words = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([-(1 << 63), (1 << 63) - 1, -1, 0])


@pytest.mark.parametrize("compiled", [True, False])
@given(rows=st.lists(st.lists(st.tuples(words, words), min_size=3, max_size=3), min_size=1, max_size=4))
def test_sums_of_products_in_two_words(compiled: bool, rows: list):
    """Against Python's integers, mod 2^128; sums of compiled loops and of torch's functions."""
    x, y = torch.tensor(rows).unbind(-1)
    with mock.patch.object(bitplanes, "COMPILED", compiled):
        found = wide.sum_of_products(x, y, (-1,)), wide.square_sum(x, (-1,), True), wide.sum_of(x, (-1,))
        product, difference = wide.times(found[0], found[1]), wide.minus(found[0], found[1])
    left, right = [[v for v, _ in row] for row in rows], [[v for _, v in row] for row in rows]
    products = [sum(v * w for v, w in zip(*both, strict=True)) for both in zip(left, right, strict=True)]
    sums = [3 * sum(v * v for v in row) - sum(row) ** 2 for row in left]
    for value, wanted in zip(found, (products, sums, [sum(row) for row in left]), strict=True):
        assert _numbers(value) == [w % (1 << 128) for w in wanted]
    assert _numbers(product) == [p * s % (1 << 128) for p, s in zip(products, sums, strict=True)]
    assert _numbers(difference) == [(p - s) % (1 << 128) for p, s in zip(products, sums, strict=True)]
    for bits in (0, 1, 22, 63, 64):
        above = wide.low_word_above(found[0], bits).flatten().tolist()
        assert above == [as_signed((p % (1 << 128)) >> bits) for p in products]


def _numbers(value: torch.Tensor) -> list[int]:
    return [h % (1 << 64) << 64 | low % (1 << 64) for low, h in zip(*value.flatten(1).tolist(), strict=True)]


def test_shapes_are_kept():
    for shape in [(), (0,), (2, 0, 3), (4, 5)]:
        x = ring_values(shape)
        assert encode(decode(x >> 20, 20, torch.float64), 20).shape == torch.Size(shape)
        assert logical_shift(x, 7).shape == torch.Size(shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(700, 300), (1, 200_001), (3, 300, 1, 301)])
def test_pieces_of_a_large_tensor_are_encoded_as_the_whole(shape: tuple[int, ...], dtype: torch.dtype):
    """With the strides that arithmetic gives, also where the tensor lies in memory otherwise."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for values in (x, x.transpose(0, -1), x[..., ::2], x[:, :1].expand(shape)):
        whole = torch.round(values.to(torch.float64) * 2.0**20).to(torch.int64)
        found = encode(values, 20)
        strides = [[n for n, size in zip(y.stride(), y.shape, strict=True) if size > 1] for y in (found, whole)]
        assert torch.equal(found, whole) and strides[0] == strides[1]
