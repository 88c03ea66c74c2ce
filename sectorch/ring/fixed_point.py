"""Z_2^64 as torch int64: fixed-point encoding, shifts and signs.

Signed 64-bit overflow wraps in two's complement in every torch kernel used here, so int64 arithmetic *is* arithmetic
mod 2^64. A real number v is encoded with `scale_bits` s as round(v * 2^s), half to even; decoding divides by 2^s. The
encoding error is at most 2^-(s+1).
"""

from __future__ import annotations

import torch

from ..errors import DtypeError, FixedPointRangeError, NonFiniteError

FRAC_BITS = 20
"""Default number of fraction bits f."""

HEADROOM_BITS = 62
"""Every protocol is exact for ring values below 2^62 in magnitude."""


def as_signed(value: int) -> int:
    """`value` mod 2^64 as a signed 64-bit integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def range_limit(frac_bits: int) -> float:
    """The limit of the magnitude of an encoded input or weight: 2^(62 - 2f).

    Its product with a value of magnitude one is below 2^62 at 2f fraction bits.
    """
    return 2.0 ** (HEADROOM_BITS - 2 * frac_bits)


def check_encodable(values: torch.Tensor, frac_bits: int, what: str) -> None:
    """Raise unless every entry of `values` is a finite number inside the fixed-point range.

    Raises:
        DtypeError: complex or quantised values.
        NonFiniteError: NaN or infinity; the text has the number of each.
        FixedPointRangeError: the text has the range and the largest magnitude.
    """
    if values.is_complex() or values.is_quantized:
        raise DtypeError(f"{what} has dtype {values.dtype}; sectorch takes real floating-point or integer tensors")
    if values.is_nested:
        raise DtypeError(
            f"{what} is a nested tensor; sectorch takes dense tensors: use .to_padded_tensor(0.0) and a mask"
        )
    if values.is_floating_point() and values.dtype.itemsize == 1:
        raise DtypeError(f"{what} has dtype {values.dtype}, of which torch computes little; use .float()")
    if values.layout != torch.strided:
        raise DtypeError(f"{what} has layout {values.layout}; sectorch takes dense tensors: use .to_dense()")
    if values.is_meta or values.numel() == 0:
        return
    if values.is_floating_point():
        # aminmax needs no tensor of magnitudes, whose memory would hardly be reused.
        low, high = (float(x) for x in torch.aminmax(values.detach()))
        largest = high if high != high else max(-low, high)
        if largest != largest or largest == float("inf"):
            nan = int(values.isnan().sum())
            inf = int(values.isinf().sum())
            raise NonFiniteError(f"{what} holds {nan} NaN and {inf} infinite entries of {values.numel()}")
    else:
        largest = float(values.to(torch.float64).abs().amax())
    if reaches(largest, range_limit(frac_bits), frac_bits if values.is_floating_point() else 0):
        raise FixedPointRangeError(
            f"{what} reaches magnitude {largest:.6g}, but with {frac_bits} fraction bits the fixed-point range is "
            f"below {range_limit(frac_bits):g}; scale the values down, or use fewer fraction bits "
            f"(Scheme(frac_bits=...))"
        )


def reaches(largest: float, limit: float, scale_bits: int) -> bool:
    """Whether an encoded magnitude is at a limit or above: one just below the limit may be rounded to it."""
    return largest * 2.0**scale_bits >= limit * 2.0**scale_bits - 0.5


_RUN = 1 << 17
"""Numbers that are encoded at a time, so that temporary tensors are small."""


def encode(values: torch.Tensor, scale_bits: int) -> torch.Tensor:
    """Real numbers to the ring: round(v * 2^scale_bits), any shape. The caller checks that they are finite and in
    range."""
    if not values.is_floating_point():
        return values.to(torch.int64) << scale_bits
    values, factor = values.detach(), 2.0**scale_bits
    if values.numel() <= _RUN or values.device.type != "cpu":
        return torch.round(values.to(torch.float64) * factor).to(torch.int64)
    elements = torch.empty_like(values, dtype=torch.int64)
    rows = max(1, _RUN * len(values) // values.numel())
    for part, numbers in zip(elements.split(rows), values.split(rows), strict=True):
        part.copy_((numbers.to(torch.float64) * factor).round_())
    return elements


def decode(elements: torch.Tensor, scale_bits: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ring elements, read as signed integers, to real numbers: e / 2^scale_bits, rounded to `dtype`."""
    if dtype == torch.bool:
        return elements != 0
    if not dtype.is_floating_point:
        return (elements >> scale_bits).to(dtype)
    return (elements.to(torch.float64) * 2.0**-scale_bits).to(dtype)


def logical_shift(elements: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned right shift by 1..63 bits."""
    return (elements >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def rounded_shift(elements: torch.Tensor, bits: int) -> torch.Tensor:
    """floor(x / 2^bits + 1/2) of signed elements, for 1..62 bits: rounding half up."""
    return (elements + (1 << (bits - 1))) >> bits


def sign_mask(elements: torch.Tensor) -> torch.Tensor:
    """All ones where the top bit is set, zero elsewhere."""
    return elements >> 63


def weighted_bit_sum(bits: torch.Tensor, weights: list[int]) -> torch.Tensor:
    """sum_k weights[k] bits[k] along the first dimension; for bits [x >= 2^k] it is a public step function of x."""
    out = torch.zeros_like(bits[0])
    for bit, weight in zip(bits, weights, strict=True):
        out.add_(bit * weight)
    return out
