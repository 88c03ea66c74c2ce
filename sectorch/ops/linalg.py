"""Factorisations of small secret matrices, and linear systems.

Elimination takes the largest pivot of a column, and no party learns which: rows are exchanged by a product with a
secret one-hot row. At 20 fraction bits a pivot below 2^-10 of the largest entry, or of 1, counts as zero: the matrix is
taken for singular, and the result is withheld, with `RangeExceededError` at Q.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..tensor import SharedTensor
from ..tensor.table import Context, implements, stepwise
from .common import is_secret, refuse, require

T = torch.Tensor
LARGEST = 32
"""Rows of a matrix at most; each takes some rounds."""
SMALLEST = 2.0**-10
DOMAIN = "n <= 32; pivots from 2^-10 max(1, |A|) on, else a range error"
ERROR = "error 4e-6 n k max(1, |x|), k = max(1, |A|) |A^-1|"


def _square(a: Any) -> Any:
    if not a.shape[-1]:
        refuse("a factorisation of a matrix without rows", "leave it out")
    if a.shape[-1] > LARGEST:
        refuse(f"a factorisation of a matrix of {a.shape[-1]} rows", f"it is for at most {LARGEST}; cut it into blocks")
    return a


def _least(a: Any) -> Any:
    """The least magnitude of a pivot."""
    return a.abs().amax((-2, -1)).clamp(min=1.0) * SMALLEST


def _check_pivot(context: Context, pivot: Any, least: Any) -> Any:
    if isinstance(pivot, SharedTensor):
        require(context, pivot.abs() - least, low=0.0)
    return pivot


def _eliminate(context: Context, a: Any, b: Any = None) -> tuple[list[Any], list[Any]]:
    """Gaussian elimination with partial pivoting.

    Returns:
        The rows of the upper triangle, each from its pivot on and with its right side; and for each row but the last
        one a bit, 1 if it was exchanged.
    """
    least, rest = _least(_square(a)), a if b is None else torch.cat((a, b), -1)
    rows, moved = [], []
    for size in range(a.shape[-1], 0, -1):
        row = rest[..., 0, :]
        if size > 1:
            chosen = F.one_hot(rest[..., 0].abs().argmax(-1), size)
            first = torch.tensor([1] + [0] * (size - 1))
            moved.append(1 - chosen[..., 0])
            pivot_row = torch.matmul(chosen.to(rest.dtype).unsqueeze(-2), rest).squeeze(-2)
            rest = rest + (chosen - first).to(rest.dtype).unsqueeze(-1) * (row - pivot_row).unsqueeze(-2)
            row = pivot_row
        pivot = _check_pivot(context, row[..., :1], least.unsqueeze(-1))
        rows.append(row)
        if size > 1:
            below = rest[..., 1:, :]
            rest = below[..., 1:] - below[..., :1] / pivot.unsqueeze(-1) * row[..., 1:].unsqueeze(-2)
    return rows, moved


def _substitute(rows: list[Any], n: int) -> Any:
    """The solution of an upper triangle. Each row begins with its pivot and ends with its right side."""
    found: list[Any] = []
    for k in range(n - 1, -1, -1):
        row, width = rows[k], n - k
        right = row[..., width:]
        if found:
            right = right - torch.matmul(row[..., 1:width].unsqueeze(-2), torch.stack(found, -2)).squeeze(-2)
        found.insert(0, right / row[..., :1])
    return torch.stack(found, -2)


def _broadcast(a: Any, b: Any) -> tuple[Any, Any]:
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.expand((*shape, *a.shape[-2:])), b.expand((*shape, *b.shape[-2:]))


def _solve(context: Context, a: Any, b: Any) -> Any:
    if not is_secret(a):
        return torch.matmul(torch.linalg.inv(a.to(torch.float64)).to(b.dtype), b)
    if not isinstance(a, SharedTensor):
        return torch.matmul(torch.linalg.inv(a), b)
    a, b = _broadcast(a, b)
    return _substitute(_eliminate(context, a, b)[0], a.shape[-1])


@implements("solve", torch.linalg.solve, note=f"{DOMAIN}; {ERROR}", exact=False)
@stepwise
def solve(context: Context, A: Any, B: Any, *, left: bool = True) -> Any:
    vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    if vector:
        return _solve(context, A, B.unsqueeze(-1)).squeeze(-1)
    if left:
        return _solve(context, A, B)
    return _solve(context, A.mT, B.mT).mT


@implements("inv", torch.linalg.inv, torch.inverse, T.inverse, note=f"as solve of the identity; {DOMAIN}", exact=False)
@stepwise
def inv(context: Context, A: Any) -> Any:
    return _solve(context, A, torch.eye(A.shape[-1], dtype=A.dtype))


@implements("det", torch.linalg.det, torch.det, T.det,
            note=f"products of pivots < 2^16, with error 4e-6 n of the largest; {DOMAIN}", exact=False)  # fmt: skip
@stepwise
def det(context: Context, A: Any) -> Any:
    sign, pivots = _signed_pivots(context, A)
    return sign * torch.prod(pivots, -1)


@implements("slogdet", torch.linalg.slogdet, torch.slogdet, T.slogdet,
            note=f"{DOMAIN}; error 1e-5 n k, with the k of solve", exact=False)  # fmt: skip
@stepwise
def slogdet(context: Context, A: Any) -> tuple[Any, Any]:
    sign, pivots = _signed_pivots(context, A)
    return sign * torch.prod(torch.sign(pivots), -1), torch.log(pivots.abs()).sum(-1)


@implements("logdet", torch.logdet, T.logdet, note="determinant > 0, else a range error; as slogdet", exact=False)
@stepwise
def logdet(context: Context, A: Any) -> Any:
    sign, size = slogdet(context, A)
    require(context, sign, low=0.0)
    return size


def _signed_pivots(context: Context, a: Any) -> tuple[Any, Any]:
    """The sign of the row exchanges, and the pivots."""
    rows, moved = _eliminate(context, a)
    pivots = torch.stack([row[..., 0] for row in rows], -1)
    if not moved:
        return 1, pivots
    return torch.prod((1 - 2 * torch.stack(moved, -1)).to(a.dtype), -1), pivots


@implements("cholesky", torch.linalg.cholesky,
            note=f"positive definite; {DOMAIN}; error 8e-6 n max(1, |A|) sqrt(k), with the k of solve",
            exact=False)  # fmt: skip
@stepwise
def cholesky(context: Context, A: Any, upper: bool = False) -> Any:
    n, least = _square(A).shape[-1], _least(torch.tril(A))
    rest, columns = A.mT if upper else A, []
    for k in range(n):
        pivot = rest[..., 0, 0]
        require(context, pivot - least, low=0.0)
        column = rest[..., :, 0] * torch.rsqrt(pivot).unsqueeze(-1)
        columns.append(F.pad(column, (k, 0)))
        if k + 1 < n:
            tail = column[..., 1:]
            rest = rest[..., 1:, 1:] - tail.unsqueeze(-1) * tail.unsqueeze(-2)
    return torch.stack(columns, -2 if upper else -1)


@implements("solve_triangular", torch.linalg.solve_triangular, note=f"{DOMAIN}; {ERROR}", exact=False)
@stepwise
def solve_triangular(
    context: Context, A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if not (A.is_floating_point() and B.is_floating_point()):
        refuse("solve_triangular of whole numbers", "A.float() and B.float()")
    if not left:
        return solve_triangular(context, A.mT, B.mT, upper=not upper, unitriangular=unitriangular).mT
    n = _square(A).shape[-1]
    if unitriangular:
        A = A.triu(1) + torch.eye(n, dtype=A.dtype) if upper else A.tril(-1) + torch.eye(n, dtype=A.dtype)
    if not isinstance(A, SharedTensor):
        return _solve(context, A.triu() if upper else A.tril(), B)
    A, B = _broadcast(A, B)
    if not upper:  # the lower triangle from its end is an upper one
        A, B = A.flip(-1, -2), B.flip(-2)
    _check_pivot(context, torch.diagonal(A, dim1=-2, dim2=-1), _least(A.triu()).unsqueeze(-1))
    found = _substitute([torch.cat((A[..., k, k:], B[..., k, :]), -1) for k in range(n)], n)
    return found if upper else found.flip(-2)


@implements("cholesky_solve", torch.cholesky_solve, T.cholesky_solve, note="as solve_triangular, twice", exact=False)
@stepwise
def cholesky_solve(context: Context, B: Any, L: Any, upper: bool = False) -> Any:
    L = L.mT if upper else L
    half = torch.linalg.solve_triangular(L, B, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True)
