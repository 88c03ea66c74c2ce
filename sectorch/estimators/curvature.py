"""Inverses of secret symmetric matrices by the iteration of Newton and Schulz: products alone, and no division.

Z <- Z (2 I - H Z) doubles the bits of Z = H^-1 in each step. Begun with Z = c I, c <= 1 / |H|, an eigenvalue l of H
becomes (1 - (1 - c l)^(2^k)) / l after k steps: never more than 1 / l, so a step of descent by Z is never too long, and
never more than 2^k c, so Z stays in the range of the ring whatever H is. What is smaller than 2^-k of |H| is not
inverted but damped: descent is slow there and not wrong. Source: Schulz, "Iterative Berechnung der reziproken Matrix",
1933; Ben-Israel and Cohen, "On iterative computation of generalized inverses", 1966.
"""

from __future__ import annotations

import torch

from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import matmul, minus, product

H_BITS, Z_BITS = 26, 20
RESOLVED = 13
"""Eigenvalues down to 2^-13 of the largest possible are inverted: Z is below 2^13."""


def steps_for(size: int) -> int:
    """Steps from Z = I / size that invert eigenvalues from 2^-13 on of a matrix of trace `size`."""
    return RESOLVED + (size - 1).bit_length()


def begun(context: Context, h: SharedTensor) -> SharedTensor:
    """c I for a matrix of trace at most its size. No message."""
    size = h.shares.shape[-1]
    eye = torch.eye(size, dtype=torch.int64, device=context.session.device) << (Z_BITS - (size - 1).bit_length())
    return h.like(context.backend.embedded(eye), Z_BITS)


def inverted(context: Context, h: SharedTensor, z: SharedTensor, steps: int) -> SharedTensor:
    """Z after so many steps. Each: rounds 12, two products of size^3 and two roundings of size^2 elements.

    Args:
        h: [p, p] at 26 fraction bits, of entries below 1 in magnitude.
        z: [p, p] at 20.
    """
    twice = h.like(context.backend.embedded(torch.eye(h.shares.shape[-1], dtype=torch.int64) << (H_BITS + 1)), H_BITS)
    for _ in range(steps):
        z = product(context, matmul, z, minus(context, twice, product(context, matmul, h, z, H_BITS)), Z_BITS)
    return z
