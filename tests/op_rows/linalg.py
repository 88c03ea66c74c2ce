"""Rows of factorisations of small matrices; `test_linalg.py` holds them to their error over condition numbers."""

from __future__ import annotations

from sectorch.errors import SectorchError, UnsupportedOpError

from .base import call, definite, number, op, refused

A, B, V = definite(2, 3, 3), number(2, 3, 2), number(2, 3)
WHY = "4 n |x| and the condition number: eigenvalues are from 1 to 15, so that it is below 15 sqrt 3; |x| is below 7"
ULPS = 4 * 3 * 7 * 26
LARGE = number(33, 33)

ROWS = (
    op(
        "solve",
        call(A, B),
        call(A, V),
        call(A, number(3, 3), left=False),
        call(A.public, B),
        call(A.private, B),
        call(definite(3, 3), number(3)),
        ulps=ULPS,
        why=WHY,
        whole=False,
        errors=(
            refused(UnsupportedOpError, "at most 32", LARGE, number(33, 1)),
            refused(SectorchError, "(?i)shape|size|dimension|matri", A, number(2, 4, 2)),
        ),
    ),
    op("inv", call(A), call(definite(1, 1)), ulps=ULPS, why=WHY, whole=False),
    op("det", call(A), call(definite(1, 1)), ulps=4 * 3 * 15**3, why="4 n of a product of 3 pivots of 15", whole=False),
    op("slogdet", call(A), call(definite(1, 1)), ulps=60, why="3 logs of 1 or more, and pivots' errors", whole=False),
    op("logdet", call(A), call(definite(1, 1)), ulps=60, why="as slogdet, of a positive determinant", whole=False),
    op(
        "cholesky",
        call(A),
        call(definite(2, 2), upper=True),
        call(definite(1, 1)),
        ulps=8 * 3 * 15 * 5,
        why="8 n |A| times the root of the condition number",
        whole=False,
    ),
    op(
        "solve_triangular",
        call(A, B, upper=True),
        call(A, B, upper=False),
        call(A, number(2, 2, 3), upper=True, left=False),
        call(A, B, upper=False, unitriangular=True),
        call(A.public, B, upper=True),
        ulps=40 * ULPS,
        why="as solve; a triangle of these has a condition number of up to 40 times as much",
        whole=False,
    ),
    op(
        "cholesky_solve",
        call(B, A),
        call(B, A, upper=True),
        ulps=1600 * ULPS,
        why="solve_triangular twice",
        whole=False,
    ),
)
