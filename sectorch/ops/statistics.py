"""Statistics of several variables, and derivatives along a dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..tensor import SharedTensor
from ..tensor.table import BEFORE, COMPOSED, ON_META, Context, implements, stepwise
from .common import is_secret, refuse

T = torch.Tensor


def _counts(input: Any, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    """torch.bincount. The length that the largest secret number would give stays secret: one from `minlength` on ends
    in an error, as an index out of range."""
    if not is_secret(input):
        size = max(minlength, int(input.max()) + 1 if input.numel() else 0)
        return torch.zeros(size, dtype=weights.dtype).index_add(0, input.long(), weights)
    if minlength < 1:
        refuse("bincount without minlength", "its length would reveal the largest number: name minlength")
    codes = F.one_hot(input.long(), minlength)
    return codes.sum(0) if weights is None else torch.matmul(weights, codes.to(weights.dtype))


def _histogram(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """torch.histc."""
    if min == max:
        refuse("histc without min and max", "its bins would be found from the smallest and largest number: name both")
    edges, line = torch.linspace(min, max, bins + 1), input.reshape(-1)
    from_on = torch.cat(((line.unsqueeze(-1) >= edges[:-1]).sum(0), (line > edges[-1]).sum(0, True)))
    return (from_on[:-1] - from_on[1:]).to(input.dtype)


COMPOSED[torch.bincount] = COMPOSED[T.bincount] = _counts
COMPOSED[torch.histc] = COMPOSED[T.histc] = _histogram


def _variables(x: Any) -> Any:
    """A row for each variable, a column for each observation."""
    return x.reshape(1, -1) if x.dim() < 2 else x


def _square_on_meta(input: torch.Tensor, **how: Any) -> torch.Tensor:
    """torch looks at weights, and at whether the result is its own transpose."""
    x = input
    if x.dim() > 2:
        raise RuntimeError(f"expected input to have two or fewer dimensions but got an input with {x.dim()} dimensions")
    n, weights = 1 if x.dim() < 2 else x.shape[0], how.get("aweights")
    dtype = x.dtype if x.is_floating_point() else torch.float32
    dtype = dtype if weights is None else torch.promote_types(dtype, weights.dtype)
    return x.new_empty(() if n == 1 else (n, n), dtype=dtype)


for _function in (torch.cov, T.cov, torch.corrcoef, T.corrcoef):
    ON_META[_function] = _square_on_meta


@implements("cov", torch.cov, T.cov, note="public weights; n max|x - mean|^2 < 2^20; error n max|x - mean| 2e-6")
@stepwise
def cov(context: Context, x: SharedTensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    if is_secret(fweights) or is_secret(aweights):
        refuse("cov with secret weights", "weights are public")
    rows = _variables(x)
    weights = torch.ones(rows.shape[1], dtype=torch.float64)
    for given in (fweights, aweights):
        weights = weights if given is None else weights * given.double()
    total = float(weights.sum())
    inner = weights if aweights is None else weights * aweights.double()
    norm = total - correction * float(inner.sum()) / total if total and aweights is not None else total - correction
    if total == 0 or norm <= 0:
        refuse("the covariance of too few observations", "it is not a number")
    if fweights is None and aweights is None:
        centred = rows - rows.mean(1, keepdim=True)
        product = torch.matmul(centred, centred.mT) / norm
    else:
        centred = rows - (rows * (weights / total).to(x.dtype)).sum(1, keepdim=True)
        product = torch.matmul(centred * (weights / norm).to(x.dtype), centred.mT)
    return product if x.dim() == 2 and x.shape[0] != 1 else product.reshape(())


@implements("corrcoef", torch.corrcoef, T.corrcoef, note="error 1e-5 for deviations from 2^-6 on; 0 for a constant")
@stepwise
def corrcoef(context: Context, x: SharedTensor) -> Any:
    rows = _variables(x)
    if rows.shape[1] < 2:
        refuse("the correlation of fewer than two observations", "it is not a number")
    units = F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
    product = torch.matmul(units, units.mT).clamp(-1.0, 1.0)
    return product if x.dim() == 2 and x.shape[0] != 1 else product.reshape(())


def _public_places(input: Any, *, spacing: Any = None, **_how: Any) -> None:
    if any(is_secret(leaf) for leaf in (spacing if isinstance(spacing, (list, tuple)) else (spacing,))):
        refuse("gradient at secret places", "spacing is public")


BEFORE[torch.gradient] = _public_places


@implements("gradient", torch.gradient, note="local; public places; error 2e-6 of the largest over a step")
@stepwise
def gradient(context: Context, x: SharedTensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    """Differences between neighbours over their distance are sums with public factors, which are read off torch."""
    if not x.is_floating_point():
        refuse("gradient of whole numbers", "take that of x.float()")
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    several = isinstance(spacing, (list, tuple))
    if several and len(spacing) != len(dims):
        raise ArgumentError(f"gradient takes a spacing for each of {len(dims)} dimensions, got {len(spacing)}")
    found = []
    for i, d in enumerate(dims):
        step: Any = spacing[i] if several else 1 if spacing is None else spacing
        step = [step] if isinstance(step, torch.Tensor) else step
        eye = torch.eye(x.shape[d], dtype=torch.float64)
        (matrix,) = torch.gradient(eye, spacing=step, dim=1, edge_order=edge_order)
        found.append(torch.matmul(x.movedim(d, -1), matrix.to(x.dtype)).movedim(-1, d))
    return tuple(found)
