"""Factorisations of small secret matrices: their error over the condition number, and what has no result."""

from __future__ import annotations

import pytest
import torch
from op_stage import reference_stage, stage

from sectorch.errors import RangeExceededError

EYE = torch.eye(4)
SWAPS = EYE[[2, 0, 3, 1]]
SECRET = reference_stage().share


def grid(x: torch.Tensor) -> torch.Tensor:
    return (x * 2**20).round() / 2**20


def pivots(a: torch.Tensor) -> list[float]:
    """Those of Gauss with partial pivoting."""
    return torch.linalg.lu_factor(a.double())[0].diagonal().abs().tolist()


def matrices(n: int, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return grid(torch.randn(6, n, n, generator=generator) * size)


def condition(a: torch.Tensor) -> torch.Tensor:
    """max(1, |A|) |A^-1|: entries have an absolute error, so that a matrix of small ones is known less well."""
    size, of_inverse = (torch.linalg.matrix_norm(x, float("inf")) for x in (a.double(), torch.linalg.inv(a.double())))
    return size.clamp(min=1) * of_inverse


@pytest.mark.parametrize(("n", "size"), [(1, 1.0), (1, 300.0), (2, 30.0), (4, 1.0), (6, 0.02), (9, 5.0), (16, 1.0)])
def test_a_solution_errs_by_its_condition_number(n: int, size: float):
    """4e-6 n k max(1, |x|), and 1e-5 n k of the logarithm, of matrices of any order of rows."""
    a = matrices(n, size)
    a = a[[min(pivots(x)) > 2**-10 * max(1, float(x.abs().max())) for x in a]]
    well = torch.linalg.cond(a.double(), float("inf")) < 500
    a, b = a[well], matrices(n, 1.0)[: int(well.sum()), :, :1]
    wanted = torch.linalg.solve(a.double(), b.double())
    found = torch.linalg.solve(SECRET(a), SECRET(b)).reveal()
    room = 4e-6 * n * condition(a) * wanted.abs().amax((1, 2)).clamp(min=1)
    assert bool(((found - wanted).abs().amax((1, 2)) <= room).all())
    sign, size_of = torch.linalg.slogdet(SECRET(a))
    exact = torch.linalg.slogdet(a.double())
    assert torch.equal(sign.reveal().double(), exact.sign)
    assert bool(((size_of.reveal() - exact.logabsdet).abs() <= 1e-5 * n * condition(a)).all())


@pytest.mark.parametrize(("n", "size"), [(1, 12.0), (4, 1.0), (5, 0.2), (8, 8.0)])
def test_a_root_errs_by_that_of_the_condition_number(n: int, size: float):
    a = matrices(n, size)
    a = grid(a @ a.mT + torch.eye(n) * size**2)
    a = (a + a.mT) / 2
    wanted = torch.linalg.cholesky(a.double())
    room = 8e-6 * n * torch.linalg.matrix_norm(a, float("inf")).clamp(min=1) * condition(a).sqrt()
    assert bool(((torch.linalg.cholesky(SECRET(a)).reveal() - wanted).abs().amax((1, 2)) <= room).all())


def test_no_matrices_and_matrices_without_rows():
    assert torch.linalg.inv(SECRET(torch.ones(0, 3, 3))).shape == (0, 3, 3)
    assert torch.amax(SECRET(torch.ones(2, 0, 3, 3)), (-2, -1)).shape == (2, 0)
    none = torch.ones(2, 0, 0)
    for of in (torch.linalg.inv, torch.linalg.det, torch.linalg.cholesky):
        assert torch.equal(of(SECRET(none)).reveal(), of(none))
    for found, wanted in zip(torch.linalg.slogdet(SECRET(none)), torch.linalg.slogdet(none), strict=True):
        assert torch.equal(found.reveal(), wanted)


def test_rows_change_places_in_secret():
    for at in (stage(), reference_stage()):
        found = torch.linalg.inv(at.share(SWAPS)).reveal()
        assert float((found - SWAPS.T).abs().max()) < 1e-5
    assert torch.linalg.det(SECRET(SWAPS)).reveal() == torch.linalg.det(SWAPS)
    assert torch.linalg.det(SECRET(EYE[[1, 0, 2, 3]])).reveal() == -1


SINGULAR = {
    "zeros": torch.zeros(2, 2),
    "rows alike": torch.ones(3, 3),
    "thirds": torch.tensor([[1 / 3, 1.0], [1 / 7, 3 / 7]]),
    "large": torch.tensor([[3000.0, 1000.0], [1500.0, 500.0]]),
    "a small pivot": torch.tensor([[1000.0, 0.0], [0.0, 0.5]]),
    "Hilbert's": 1 / (torch.arange(8.0).unsqueeze(1) + torch.arange(8.0) + 1),
    "of rank 15": matrices(16, 1.0)[0, :, :15] @ matrices(16, 1.0)[1, :15],
}


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("f", [torch.linalg.inv, torch.linalg.det, lambda a: torch.linalg.slogdet(a)[1]])
def test_what_is_as_good_as_singular_has_no_result(name: str, f):
    with pytest.raises(RangeExceededError):
        f(SECRET(SINGULAR[name])).reveal()


@pytest.mark.parametrize(
    "a", [[[1.0, 2.0], [2.0, 1.0]], [[-1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]]
)
def test_a_matrix_that_is_not_positive_definite_has_no_cholesky_factor(a):
    with pytest.raises(RangeExceededError):
        torch.linalg.cholesky(SECRET(torch.tensor(a))).reveal()
    with pytest.raises(RangeExceededError):
        torch.linalg.solve_triangular(SECRET(EYE[:2, :2].flip(0)), SECRET(EYE[:2, :1]), upper=True).reveal()


def test_a_determinant_out_of_range_has_no_result():
    with pytest.raises(RangeExceededError):
        torch.linalg.det(SECRET(EYE * 300 + 1)).reveal()
