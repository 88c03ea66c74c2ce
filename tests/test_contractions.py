"""Einsums as products of matrices, as they are made on a device without int64 products, against torch's own."""

from __future__ import annotations

import pytest
import torch
from helpers import ring_values

from sectorch.ring.products import by_matmul

EQUATIONS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)),
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "i,i->": ((5,), (5,)),
    "i,j->ji": ((5,), (3,)),
    "ij,ij->ij": ((2, 3), (2, 3)),
    "ijk,jil->kl": ((2, 3, 4), (3, 2, 5)),
    "ijk,l->il": ((2, 3, 4), (5,)),
    "ii,ij->j": ((3, 3), (3, 4)),
    "aab,b->a": ((3, 3, 2), (2,)),
    "ba,cb": ((2, 3), (4, 2)),
    "...i,...i": ((2, 3, 4), (3, 4)),
    "...ij,...jk->...ik": ((5, 1, 2, 3), (4, 3, 2)),
    "i...,i...->...": ((2, 3), (2, 3)),
    "bij,bjk->ikb": ((1, 3, 4), (2, 4, 5)),
    "ij,jk->": ((2, 0), (0, 3)),
}


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS.items())
def test_by_matmul_is_torchs_einsum(equation: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    x, y = (ring_values(shape, 63, seed) for seed, shape in enumerate(shapes))
    assert torch.equal(by_matmul(equation, x, y), torch.einsum(equation, x, y))
