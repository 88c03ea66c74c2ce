"""Linear layers with plain weights over batch-packed ciphertexts, as exact matrix products over residues.

A constant weight w at scale s is the integer round(w s), the same in every slot, so that the ciphertexts of a layer's
outputs are integer combinations of those of its inputs: residue by residue, the matrix product of the integer weights
with the residues mod q. It is done 64 slots at a time, where `products.py` is fastest, and reduced once. TenSEAL does
the same with one SEAL product for each pair of an input and an output (`ckks_tensor.mm`, the reference in tests).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .cipher import Cipher, _need_level, empty, settle, weight_scale
from .errors import ScaleError
from .modular import dot, row_sum

_TILE = 64
_CHUNK = 1 << 18  # gathered words at a time: 2 MiB, the second-level cache


def encode_weights(weights: torch.Tensor, c: Cipher) -> torch.Tensor:
    """round(weights * scale) as int64, at the scale that lands on the next level. Error: 1/2 of 1/scale a weight.

    Raises:
        ScaleError: a weight that does not fit 2^61.
    """
    scale = weight_scale(c) * c.factor
    largest = float(weights.abs().max()) if weights.numel() else 0.0
    if not math.isfinite(largest) or largest * abs(scale) >= 2.0**61:
        raise ScaleError(
            f"a weight of magnitude {largest:.3g} does not fit scale 2^{math.log2(abs(scale)):.0f}; scale the layer "
            f"down"
        )
    return (weights.double() * scale).round_().to(torch.int64)


def weighted(
    c: Cipher, weights: torch.Tensor, gather: torch.Tensor | None = None, what: str = "a linear layer"
) -> Cipher:
    """Output (o, p) = sum_k weights[o, k] * ciphertext gather[p, k]; one level, its rescale left pending.

    Args:
        weights: floating point [out, K].
        gather: int64 [P, K], -1 for a zero (padding); [[0 .. K-1]] unless given.

    Returns:
        out * P ciphertexts, o first.

    Error: sum_k |w_k| e_k, and |x_k| / (2 weight scale) for each rounded weight.

    Raises:
        LevelError, ScaleError, MemoryBudgetError: before anything is computed.
    """
    _need_level(c, what)
    if c.pending and weights.shape[0] * (1 if gather is None else gather.shape[0]) > c.count:
        c = settle(c)  # the smaller side of the layer is the one to rescale
    n, size, primes, degree = c.data.shape
    positions = 1 if gather is None else gather.shape[0]
    rows = weights.shape[0]
    out = empty(rows * positions, size, primes, degree, c.data.is_meta, what)
    result = replace(c, data=out, pending=c.pending + 1, factor=1.0)
    if c.data.is_meta:
        return result
    integers = encode_weights(weights, c)
    whole = gather is None or (positions == 1 and torch.equal(gather[0], torch.arange(n)))
    _products(c.data, integers, None if whole else gather, c.primes, out.view(rows, positions, size, primes, degree))
    return result


def _products(
    data: torch.Tensor, integers: torch.Tensor, gather: torch.Tensor | None, primes, out: torch.Tensor
) -> None:
    n, size, _, degree = data.shape
    rows, width = integers.shape
    positions = out.shape[1]
    kernel, total = integers.unsqueeze(-1).contiguous(), row_sum(integers)
    padded = gather is not None and bool((gather < 0).any())
    index = None if gather is None else torch.where(gather < 0, n, gather).reshape(-1)
    span = max(1, _CHUNK // (_TILE * positions * width))
    for k in range(size):
        for j, q in enumerate(primes):
            source = data[:, k, j].unflatten(1, (degree // _TILE, _TILE)).transpose(0, 1)
            target = out[:, :, k, j].unflatten(2, (degree // _TILE, _TILE)).permute(2, 1, 0, 3)
            for start in range(0, degree // _TILE, span):
                tiles = source[start : start + span]
                if padded:
                    tiles = torch.nn.functional.pad(tiles, (0, 0, 0, 1))
                tiles = tiles.contiguous() if index is None else tiles.index_select(1, index).view(-1, width, _TILE)
                product = dot(kernel, tiles, q, lambda w, v: torch.nn.functional.conv1d(v, w), total)
                target[start : start + span] = product.view(-1, positions, rows, _TILE)


def summed(c: Cipher, gather: torch.Tensor) -> Cipher:
    """Output p = sum_k ciphertext gather[p, k], -1 for a zero. No level; the errors add up."""
    _, size, primes, degree = c.data.shape
    out = empty(gather.shape[0], size, primes, degree, c.data.is_meta, "a sum")
    if not c.data.is_meta:
        moduli = torch.tensor(c.primes).view(-1, 1)
        for p, members in enumerate(gather.tolist()):
            total = c.data[[m for m in members if m >= 0]].sum(dim=0)  # below 2^50 * count, far from 2^63
            out[p] = total.remainder_(moduli)
    return replace(c, data=out)
