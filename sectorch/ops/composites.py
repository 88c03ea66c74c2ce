"""Operations made of other operations: products of several tensors, distances, counts, covariances, gradients.

Their bounds and refusals are those of their parts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..tensor import SharedTensor
from ..tensor.table import BEFORE, COMPOSED, ON_META, Context, implements, stepwise
from .common import is_secret, local_map, refuse

T = torch.Tensor


@implements("kron", torch.kron, T.kron, note="1 round for two secrets")
def kron(context: Context, x: Any, y: Any) -> torch.Tensor:
    n = max(x.dim(), y.dim())
    a, b = ([1] * (n - v.dim()) + list(v.shape) for v in (x, y))
    left = x.reshape([s for size in a for s in (size, 1)])
    right = y.reshape([s for size in b for s in (1, size)])
    return (left * right).reshape([p * q for p, q in zip(a, b, strict=True)])


@implements("inner", torch.inner, T.inner, note="1 round for two secrets")
def inner(context: Context, x: Any, y: Any) -> torch.Tensor:
    if not x.dim() or not y.dim():
        return x * y
    rows, columns = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return torch.matmul(rows, columns.transpose(0, 1)).reshape((*x.shape[:-1], *y.shape[:-1]))


@implements("tensordot", torch.tensordot, note="1 round for two secrets")
def tensordot(context: Context, x: Any, y: Any, dims: Any = 2, out: Any = None) -> torch.Tensor:
    if is_secret(dims):
        refuse("tensordot along secret dimensions", "they are public numbers")
    dims = dims.tolist() if isinstance(dims, torch.Tensor) else dims
    left, right = (list(range(-dims, 0)), list(range(dims))) if isinstance(dims, int) else dims
    left, right = ([d % v.dim() for d in listed] for v, listed in ((x, _listed(left)), (y, _listed(right))))
    rest = [[d for d in range(v.dim()) if d not in gone] for v, gone in ((x, left), (y, right))]
    terms = math.prod(x.shape[d] for d in left)
    shape = [x.shape[d] for d in rest[0]] + [y.shape[d] for d in rest[1]]
    rows = x.permute(rest[0] + left).reshape(math.prod(x.shape[d] for d in rest[0]), terms)
    columns = y.permute(right + rest[1]).reshape(terms, math.prod(y.shape[d] for d in rest[1]))
    return torch.matmul(rows, columns).reshape(shape)


def _listed(dims: Any) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


@implements("cross", torch.linalg.cross, note="1 round for two secrets")
def cross(context: Context, x: Any, y: Any, *, dim: int = -1) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    x, y = x.expand(shape), y.expand(shape)
    after = lambda v, k: torch.roll(v, -k, dim)
    return after(x, 1) * after(y, 2) - after(x, 2) * after(y, 1)


@implements("cross", torch.cross, T.cross)
def cross_of_three(context: Context, x: Any, y: Any, dim: int | None = None) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return cross(context, x, y, dim=list(shape).index(3) if dim is None else dim)


@implements("vecdot", torch.linalg.vecdot, note="1 round for two secrets")
def vecdot(context: Context, x: Any, y: Any, *, dim: int = -1) -> torch.Tensor:
    return (x * y).sum(dim)


@implements("multi_dot", torch.linalg.multi_dot, note="a round for each product of two secrets")
def multi_dot(context: Context, tensors: Any) -> torch.Tensor:
    product = tensors[0]
    for factor in tensors[1:]:
        product = torch.matmul(product, factor)
    return product


@implements("matrix_power", torch.linalg.matrix_power, torch.matrix_power, T.matrix_power,
            note="2 log2 n rounds; negative exponents as inv", exact=False)  # fmt: skip
def matrix_power(context: Context, x: SharedTensor, n: int) -> torch.Tensor:
    if n < 0:
        return torch.linalg.matrix_power(torch.linalg.inv(x), -n)
    if n == 0:
        return torch.eye(x.shape[-1]).expand(x.shape) + x * 0
    half = x if n < 2 else matrix_power(context, x, n // 2)
    whole = half if n < 2 else torch.matmul(half, half)
    return torch.matmul(whole, x) if n > 1 and n % 2 else whole


CHEBYSHEV_DEGREES = 64
CHEBYSHEV = f"public whole n <= {CHEBYSHEV_DEGREES}; n - 1 products, one after the other, each rounded to f bits"


def _chebyshev(x: Any, n: Any, first: float) -> torch.Tensor:
    """The n-th polynomial of P_0 = 1, P_1 = first x, P_{k + 1} = 2 x P_k - P_{k - 1}.

    The recurrence rounds each P_k once. Sums of powers of x would have coefficients near 2^n, which enlarge the
    roundings of the powers.
    """
    if is_secret(n) or (isinstance(n, torch.Tensor) and n.dim()):
        refuse("a Chebyshev polynomial whose degree is secret or a tensor of several", "call it for each public degree")
    if not float(n).is_integer() or n > CHEBYSHEV_DEGREES:
        refuse(f"a Chebyshev polynomial of degree {float(n):g}", f"give a whole number up to {CHEBYSHEV_DEGREES}")
    before, now = torch.ones(x.shape) + x * 0, x * first
    if n < 1:
        return before if n == 0 else x * 0
    for _ in range(int(n) - 1):
        before, now = now, x * 2 * now - before
    return now


@implements("chebyshev_polynomial_t", torch.special.chebyshev_polynomial_t, note=CHEBYSHEV)
def chebyshev_polynomial_t(context: Context, x: Any, n: Any) -> torch.Tensor:
    return _chebyshev(x, n, 1)


@implements("chebyshev_polynomial_u", torch.special.chebyshev_polynomial_u, note=CHEBYSHEV)
def chebyshev_polynomial_u(context: Context, x: Any, n: Any) -> torch.Tensor:
    return _chebyshev(x, n, 2)


@implements("trace", torch.trace, T.trace, note="as sum")
def trace(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.diagonal(x).sum()


@implements("addr", torch.addr, T.addr, in_place=(T.addr_,), note="1 round for two secrets")
def addr(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.outer(x, y)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


@implements("addcdiv", torch.addcdiv, T.addcdiv, in_place=(T.addcdiv_,), note="as div", exact=False)
def addcdiv(context: Context, x: Any, a: Any, b: Any, *, value: float = 1) -> torch.Tensor:
    return x + (a / b if value == 1 else (a / b) * value)


@implements("diff", torch.diff, T.diff, note="local")
def diff(context: Context, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> torch.Tensor:
    parts = [v for v in (prepend, x, append) if v is not None]
    x = torch.cat([v.expand([1 if d == dim % x.dim() else s for d, s in enumerate(x.shape)]) if not v.dim() else v
                   for v in parts], dim) if len(parts) > 1 else x  # fmt: skip
    for _ in range(min(n, x.shape[dim])):
        size = x.shape[dim]
        later, before = x.narrow(dim, 1, size - 1), x.narrow(dim, 0, size - 1)
        x = torch.logical_xor(later, before) if x.dtype == torch.bool else later - before
    return x


def _trapezoids(y: torch.Tensor, x: Any, dx: Any, dim: int) -> torch.Tensor:
    """The areas of the trapezoids between neighbours, at public points x or at the distance dx."""
    size = y.shape[dim]
    sums = y.narrow(dim, 1, size - 1) + y.narrow(dim, 0, size - 1)
    if x is None:
        return sums * (dx / 2)
    steps = torch.diff(x, dim=dim if x.dim() > 1 else -1)
    if x.dim() == 1:
        steps = steps.reshape([-1 if d == dim % y.dim() else 1 for d in range(y.dim())])
    return sums * (steps / 2)


@implements("trapezoid", torch.trapezoid, torch.trapz, note="local by public places; as sum")
def trapezoid(context: Context, y: Any, x: Any = None, *, dx: Any = None, dim: int = -1) -> torch.Tensor:
    if not y.shape[dim]:
        refuse("the trapezoid rule for no points", "it is zero")
    return _trapezoids(y, x, 1 if dx is None else dx, dim).sum(dim)


@implements("cumulative_trapezoid", torch.cumulative_trapezoid, note="local by public places; as cumsum")
def cumulative_trapezoid(context: Context, y: Any, x: Any = None, *, dx: Any = None, dim: int = -1) -> torch.Tensor:
    return _trapezoids(y, x, 1 if dx is None else dx, dim).cumsum(dim)


@implements("var_mean", torch.var_mean, note="as var, and mean")
def var_mean(context: Context, x: SharedTensor, *args: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.var(x, *args, **how), _mean_beside(x, *args, **how)


@implements("std_mean", torch.std_mean, note="as std, and mean", exact=False)
def std_mean(context: Context, x: SharedTensor, *args: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.std(x, *args, **how), _mean_beside(x, *args, **how)


def _mean_beside(x: SharedTensor, *args: Any, **how: Any) -> torch.Tensor:
    first = args[0] if args and not isinstance(args[0], bool) else None
    dim, keepdim = how.get("dim", first), how.get("keepdim", args[2] if len(args) > 2 else False)
    if dim is None or dim in ((), []):
        dim = tuple(range(x.dim()))
    return x.mean(dim, keepdim)


@implements("dist", torch.dist, T.dist, note="as norm", exact=False)
def dist(context: Context, x: Any, y: Any, p: float = 2) -> torch.Tensor:
    return torch.linalg.vector_norm(x - y, p)


@implements("pairwise_distance", F.pairwise_distance, torch.pairwise_distance, note="as norm", exact=False)
def pairwise_distance(
    context: Context, x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> torch.Tensor:
    return torch.linalg.vector_norm(x - y + eps, p, -1, keepdim)


@implements("cdist", torch.cdist, note="as norm", exact=False)
def cdist(context: Context, x: Any, y: Any, p: float = 2.0, compute_mode: Any = None) -> torch.Tensor:
    if not x.shape[-1]:
        refuse("cdist of points without coordinates", "the distances are zero")
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


@implements("pdist", F.pdist, torch.pdist, note="as norm", exact=False)
def pdist(context: Context, x: SharedTensor, p: float = 2.0) -> torch.Tensor:
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


@implements("bilinear", F.bilinear, torch.bilinear, note="2 rounds for secrets")
def bilinear_form(context: Context, x: Any, y: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    sizes = weight.shape
    rows = torch.matmul(x, weight.permute(1, 0, 2).reshape(sizes[1], sizes[0] * sizes[2]))
    made = (rows.reshape((*x.shape[:-1], sizes[0], sizes[2])) * y.unsqueeze(-2)).sum(-1)
    return made if bias is None else made + bias


@implements("deg2rad", torch.deg2rad, T.deg2rad, in_place=(T.deg2rad_,), note="local")
def deg2rad(context: Context, x: SharedTensor) -> torch.Tensor:
    return x * (math.pi / 180)


@implements("rad2deg", torch.rad2deg, T.rad2deg, in_place=(T.rad2deg_,), note="local")
def rad2deg(context: Context, x: SharedTensor) -> torch.Tensor:
    return x * (180 / math.pi)


@implements("linalg_diagonal", torch.linalg.diagonal, view=True, note="local")
def linalg_diagonal(context: Context, A: SharedTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1):
    return local_map(context, torch.diagonal, A, offset, dim1, dim2)


@implements("sum_to_size", T.sum_to_size, note="as sum")
def sum_to_size(context: Context, x: SharedTensor, *given: Any, size: Any = None) -> torch.Tensor:
    size = given if size is None else (size,)
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    extra = x.dim() - len(size)
    dims = [*range(extra), *(d + extra for d, n in enumerate(size) if n == 1 and x.shape[d + extra] != 1)]
    return (x.sum(dims, True) if dims else x).reshape(size)


@implements("prod", torch.prod, T.prod, note="a tree of products, log2 n deep; result < 2^16")
def prod(
    context: Context, x: SharedTensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    line = x.reshape(-1) if dim is None else x.movedim(dim, 0) if x.dim() else x.reshape(1)
    line = line.to(dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    if not line.shape[0]:
        ones = torch.ones(line.shape[1:], dtype=line.dtype) + line.sum(0)
        return ones.unsqueeze(dim) if keepdim and dim is not None else ones
    while (count := line.shape[0]) > 1:
        half = count // 2
        pairs = line[:half] * line[half : 2 * half]
        line = torch.cat((pairs, line[2 * half :])) if count % 2 else pairs
    return line[0].unsqueeze(dim) if keepdim and x.dim() and dim is not None else line[0]


@implements("cumprod", torch.cumprod, T.cumprod, in_place=(T.cumprod_,),
            note="log2 n rounds of products; result < 2^16")  # fmt: skip
def cumprod(context: Context, x: Any, dim: int, *, dtype: Any = None) -> torch.Tensor:
    x = x.to(dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    if not x.dim():
        return x
    line, step = x.movedim(dim, 0), 1
    while step < line.shape[0]:
        line = torch.cat((line[:step], line[step:] * line[:-step]))
        step *= 2
    return line.movedim(0, dim)


# Counts, covariances, and derivatives along a dimension.


def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    """torch.bincount with a public length. A number from `minlength` on ends in an error, as an index out of range."""
    if not is_secret(input):
        size = max(minlength, int(input.max()) + 1 if input.numel() else 0)
        return torch.zeros(size, dtype=weights.dtype).index_add(0, input.long(), weights)
    if minlength < 1:
        refuse("bincount without minlength", "its length would reveal the largest number: name minlength")
    codes = F.one_hot(input.long(), minlength)
    return codes.sum(0) if weights is None else torch.matmul(weights, codes.to(weights.dtype))


def _histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """torch.histc."""
    if min == max:
        refuse("histc without min and max", "its bins would be found from the smallest and largest number: name both")
    edges, line = torch.linspace(min, max, bins + 1), input.reshape(-1)
    from_on = torch.cat(((line.unsqueeze(-1) >= edges[:-1]).sum(0), (line > edges[-1]).sum(0, True)))
    return (from_on[:-1] - from_on[1:]).to(input.dtype)


COMPOSED[torch.bincount] = COMPOSED[T.bincount] = _bincount
COMPOSED[torch.histc] = COMPOSED[T.histc] = _histc


# The logarithm of the gamma function and its derivatives, by the series at x + GAMMA_SHIFT.


GAMMA_SHIFT, GAMMA_LEAST = 16, 7.0
BERNOULLI = ((2, 1 / 6), (4, -1 / 30), (6, 1 / 42))


def _gamma_parts(x: Any) -> tuple[Any, Any, Any]:
    """x + k for k below the shift [..., k], z = x + shift, and 1 / z; x of -9 or less withholds the result."""
    near, z = x.unsqueeze(-1) + torch.arange(GAMMA_SHIFT, dtype=x.dtype), x + GAMMA_SHIFT
    z = z * (z.detach() >= GAMMA_LEAST).to(x.dtype)
    return near, z, z.reciprocal()


def _lgamma(x: Any) -> Any:
    """log |gamma(x)| for x > -9, from Stirling's series and the logarithms of |x + k|."""
    near, z, inverse = _gamma_parts(x)
    series = sum(b / (j * (j - 1)) * inverse ** (j - 1) for j, b in BERNOULLI)
    return (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi) + series - near.abs().log().sum(-1)


def _polygamma(n: int, x: Any) -> Any:
    """The derivatives of log gamma: digamma for n = 0; for x > -9.

    For n > 0 an x so near to a pole that the slope is above 2^13 withholds the result: a gradient's last place times
    the slope would be seen.
    """
    if n < 0:
        raise ArgumentError(f"polygamma(n, x) does not support negative n, got {n}")
    if n > 4:
        refuse(f"polygamma of order {n}", "its values leave the range near every whole number below 1: take at most 4")
    near, z, inverse = _gamma_parts(x)
    if n:
        least = (math.factorial(n + 1) / 2.0**13) ** (1 / (n + 2))
        near = near * (near.detach().abs() >= least).to(x.dtype)
    sign, before = (-1.0) ** (n + 1), math.factorial(max(n - 1, 0))
    series = sum(b * math.factorial(j + n - 1) / math.factorial(j) * inverse ** (j + n) for j, b in BERNOULLI)
    first = before * inverse**n if n else -z.log()
    largest = math.factorial(n) * (near.reciprocal() ** (n + 1)).sum(-1)
    return sign * (largest + first + 0.5 * math.factorial(n) * inverse ** (n + 1) + series)


def _mvlgamma(x: Any, p: int) -> Any:
    """torch.mvlgamma."""
    halves = x.unsqueeze(-1) - 0.5 * torch.arange(p, dtype=x.dtype)
    return _lgamma(halves).sum(-1) + p * (p - 1) / 4 * math.log(math.pi)


for _gamma in (torch.lgamma, T.lgamma, torch.special.gammaln):
    COMPOSED[_gamma] = _lgamma
for _gamma in (torch.digamma, T.digamma, torch.special.digamma, torch.special.psi):
    COMPOSED[_gamma] = lambda x: _polygamma(0, x)
for _gamma in (torch.polygamma, torch.special.polygamma):
    COMPOSED[_gamma] = _polygamma
COMPOSED[T.polygamma] = lambda x, n: _polygamma(n, x)
for _gamma in (torch.mvlgamma, T.mvlgamma, torch.special.multigammaln):
    COMPOSED[_gamma] = _mvlgamma


def _as_rows(x: Any) -> Any:
    """A row for each variable, a column for each observation."""
    return x.reshape(1, -1) if x.dim() < 2 else x


def _square_on_meta(input: torch.Tensor, **how: Any) -> torch.Tensor:
    """The shape of a covariance; torch itself reads the weights, and compares contents."""
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
    rows = _as_rows(x)
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


@implements("corrcoef", torch.corrcoef, T.corrcoef,
            note="error 1e-5 for deviations from 2^-6 on; 0 for a constant", exact=False)  # fmt: skip
@stepwise
def corrcoef(context: Context, x: SharedTensor) -> Any:
    rows = _as_rows(x)
    if rows.shape[1] < 2:
        refuse("the correlation of fewer than two observations", "it is not a number")
    units = F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
    product = torch.matmul(units, units.mT).clamp(-1.0, 1.0)
    return product if x.dim() == 2 and x.shape[0] != 1 else product.reshape(())


def _require_public_points(input: Any, *, spacing: Any = None, **_how: Any) -> None:
    if any(is_secret(leaf) for leaf in (spacing if isinstance(spacing, (list, tuple)) else (spacing,))):
        refuse("gradient at secret places", "spacing is public")


BEFORE[torch.gradient] = _require_public_points


@implements("gradient", torch.gradient, note="local; public places; error 2e-6 of the largest over a step")
@stepwise
def gradient(context: Context, x: SharedTensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    """Difference quotients are sums with public factors, which torch itself gives."""
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
