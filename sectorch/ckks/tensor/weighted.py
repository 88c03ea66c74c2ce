"""Linear layers with plain weights over batch-packed ciphertexts, as exact matrix products over residues.

A constant weight w at scale s is the integer round(w s), the same in every slot, so that the ciphertexts of a layer's
outputs are integer combinations of those of its inputs: residue by residue, the matrix product of the integer weights
with the residues mod q, reduced once (`sums.summed`). TenSEAL does the same with one SEAL product for each pair of
an input and an output (`ckks_tensor.mm`, the reference in tests).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ...ring.loops import over
from ..errors import ScaleError
from ..scheme import sums
from ..scheme.arithmetic import integer_constants
from ..scheme.bounds import held
from ..scheme.cipher import Cipher, empty_like, words
from ..scheme.levels import need_level, settle, weight_scale
from ..scheme.modular import MAX_PRIME_BITS, row_sum

_STEP = 4  # outputs and terms that a compiled loop takes at a time
_CACHE = 1 << 17  # words of input that a loop holds: a MiB, about the second-level cache


def encode_weights(weights: torch.Tensor, c: Cipher) -> torch.Tensor:
    """round(weights * scale) as int64, at the scale that lands on the next level. Error: 1/2 of 1/scale a weight.

    Raises:
        ScaleError: a weight that does not fit 2^61.
    """
    scale = weight_scale(c) * c.multiplier
    largest = float(weights.abs().max()) if weights.numel() else 0.0
    if not math.isfinite(largest) or largest * abs(scale) >= 2.0**61:
        raise ScaleError(
            f"a weight of magnitude {largest:.3g} does not fit scale 2^{math.log2(abs(scale)):.0f}; scale the layer "
            f"down"
        )
    return (weights.double() * scale).round_().to(torch.int64)


def weighted(
    c: Cipher,
    weights: torch.Tensor,
    gather: torch.Tensor | None = None,
    what: str = "a linear layer",
    bias: Sequence[float] | None = None,
) -> Cipher:
    """Output (o, p) = sum_k weights[o, k] * ciphertext gather[p, k] + bias[o]; one level, its rescale left pending.

    Args:
        weights: floating point [out, K].
        gather: int64 [P, K], -1 for a zero (padding); [[0 .. K-1]] unless given.

    Returns:
        out * P ciphertexts, o first.

    Error: sum_k |w_k| e_k, and |x_k| / (2 weight scale) for each rounded weight.

    Raises:
        LevelError, ScaleError, MemoryBudgetError: before anything is computed.
    """
    need_level(c, what)
    positions = 1 if gather is None else gather.shape[0]
    if c.pending and weights.shape[0] * positions > c.count:
        c = settle(c)  # the smaller side of the layer is the one to rescale
    rows, terms = (1.0, 1) if weights.is_meta else (_row_sum(weights), weights.shape[1])
    error = rows * abs(c.multiplier) * c.error + terms * (c.largest + c.error) / (2 * weight_scale(c))
    offset = max(map(abs, bias), default=0.0) if bias is not None else 0.0
    result = replace(
        c, data=c.data[:0], pending=c.pending + 1, factor=1.0, withheld=None,
        largest=rows * abs(c.multiplier) * c.largest + offset, error=error, declared=False,
    )  # fmt: skip
    result = held(replace(result, error=error + 0.5 / result.scale), what)
    integers = None if c.data.is_meta else encode_weights(weights, c)
    out = empty_like(c.data, what, weights.shape[0] * positions)
    result = replace(result, data=out)
    if integers is not None:
        constants = None if bias is None else integer_constants(result, bias)
        _sum_into(out, c, torch.arange(c.count).view(1, -1) if gather is None else gather, integers, constants)
    return result


def _row_sum(weights: torch.Tensor) -> float:
    return float(weights.abs().sum(1).max()) if weights.numel() else 0.0


def summed(c: Cipher, gather: torch.Tensor) -> Cipher:
    """Output p = sum_k ciphertext gather[p, k], -1 for a zero. No level; the errors add up."""
    terms = int((gather >= 0).sum(1).max()) if gather.numel() else 0
    c = held(replace(c, largest=terms * c.largest, error=terms * c.error, declared=False), "a sum")
    out = empty_like(c.data, "a sum", gather.shape[0])
    if not c.data.is_meta:
        _sum_into(out, c, gather, torch.ones(1, gather.shape[1], dtype=torch.int64), None)
    return replace(c, data=out)


def _sum_into(
    out: torch.Tensor, c: Cipher, gather: torch.Tensor, integers: torch.Tensor, constants: list[int] | None
) -> None:
    n, size, _, degree = c.data.shape
    span = max(64, min(512, 1 << (_CACHE // (n + 1)).bit_length() - 1))
    source, target, rows = words(c.data), out.numpy(), integers.shape[0]
    # What the loops take four at a time is filled up with zeros, which lie at place n.
    index = np.pad(np.where(gather < 0, n, gather), ((0, 0), (0, -gather.shape[1] % _STEP)), constant_values=n)
    offsets = np.zeros((size, rows), np.int64)
    for j, q in enumerate(c.primes):
        digits, carry = _digits(integers, q)
        for k in range(size):
            if k == 0 and constants is not None:
                offsets[0] = [v % q for v in constants]
            arguments = (source, k, j, index, digits, float(carry), float(q), offsets[k], target, span)
            over(degree // span, sums.summed, *arguments)


def _digits(integers: torch.Tensor, q: int) -> tuple[np.ndarray, int]:
    """Integers [rows, K] as digits [D, rows, K], the highest first, and their base mod q.

    As few as keep every sum of digits times residues mod q, with what is carried into it and added to it, below 2^62:
    one for 28-bit primes and rows that sum to less than 2^34.
    """
    bits = int(integers.abs().max()).bit_length() + 1 if integers.numel() else 1
    for count in range(1, bits + 1):
        width, parts, rest = -(-bits // count), [], integers
        for _ in range(count - 1):
            low = ((rest + (1 << (width - 1))) & ((1 << width) - 1)) - (1 << (width - 1))  # nearest to zero
            parts.append(low)
            rest = (rest - low) >> width
        parts.append(rest)
        if max(row_sum(p) for p in parts) * q + 2.0 ** (MAX_PRIME_BITS + 1) <= 2.0**62:
            break
    else:
        raise ScaleError("a layer has too many terms for exact sums; cut it")
    digits = np.stack([p.numpy() for p in reversed(parts)])
    fill = [(0, 0), *((0, -length % _STEP) for length in digits.shape[1:])]
    return np.pad(digits, fill), pow(2, width, q)
