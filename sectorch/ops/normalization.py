"""Softmax, and layers that normalise by statistics of the input."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from . import series as series_of
from .codes import exponent_map
from .common import encoded_public, excess, refuse, shortened, summand
from .moments import mean_of_squares, root_mean_square, standardised
from .powers import logarithm_bound, positive_reciprocal, quotient, quotient_bits
from .ranges import fitted
from .smooth import lifted, series

T = torch.Tensor


def _sum_is_below(shape: torch.Size, dim: int) -> int:
    return math.ceil(math.log2(shape[dim] + 1)) + 1


def _shifted_exp(context: Context, x: SharedTensor, dim: int) -> tuple[SharedTensor, SharedTensor]:
    """x - max x, and e to that with about 2 f fraction bits, so that a sum of many small ones is right.

    The square of a series for half of it: e^(-28) is where it ends, and an error of e^(x/2) is scaled with it.
    """
    backend = context.backend
    difference = x - x.amax(dim, keepdim=True)
    half, floor = difference.like(difference.shares, difference.scale_bits + 1), series_of.EXP.low
    shift = excess(context, half.scale_bits)
    threshold = int(encoded_public(context, floor, half.scale_bits - shift))
    (above,) = backend.ramps(half.shares, (threshold,), shift)
    root = series(context, lifted(context, x.like(above, half.scale_bits - shift), floor), series_of.EXP)
    e = root.like(backend.square(root.shares), 2 * root.scale_bits)
    spare = HEADROOM_BITS - _sum_is_below(x.shares.shape, dim)
    return difference, shortened(context, e, spare)


@implements(
    "softmax",
    torch.softmax,
    T.softmax,
    F.softmax,
    torch.special.softmax,
    note="error 1e-5 + 2e-6 sqrt(n) |result| of n entries",
)
def softmax(
    context: Context, x: SharedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> SharedTensor:
    dim = _default_dim(x, dim)
    _, e = _shifted_exp(context, x, dim)
    total = e.like(context.backend.each(torch.sum, e.shares, dim, keepdim=True), e.scale_bits)
    inverse = positive_reciprocal(context, total, -1, _sum_is_below(x.shares.shape, dim))
    return e * inverse


@implements("log_softmax", torch.log_softmax, T.log_softmax, F.log_softmax, torch.special.log_softmax,
            note="error 1e-5 + 2e-6 sqrt(n) of n entries, however small a result")  # fmt: skip
def log_softmax(
    context: Context, x: SharedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> SharedTensor:
    dim = _default_dim(x, dim)
    y, e = _shifted_exp(context, x, dim)
    return y - _log_of_sum(context, e, x.shares.shape, dim, True)


def _default_dim(x: SharedTensor, dim: int | None) -> int:
    if dim is None:
        return 0 if x.dim() in (0, 1, 3) else 1
    return dim


@implements("softmin", F.softmin, note="softmax of -x")
def softmin(
    context: Context, x: SharedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> torch.Tensor:
    return F.softmax(-x, _default_dim(x, dim))


def _log_of_sum(context: Context, e: SharedTensor, shape: torch.Size, dim: int, keepdim: bool) -> SharedTensor:
    """log of the sum of e along dim, which is at least about 1."""
    backend = context.backend
    total = backend.each(torch.sum, e.shares, dim, keepdim=keepdim)
    s = e.scale_bits
    normal = backend.normalise(total, s - 1, s + _sum_is_below(shape, dim))
    m = series(context, e.like(normal.mantissa, normal.high), series_of.LOG)
    whole = exponent_map(context, normal, lambda k: round((k - s) * math.log(2) * 2**m.scale_bits))
    return m.like(m.shares + whole, m.scale_bits, logarithm_bound(m.scale_bits))


@implements(
    "logsumexp", torch.logsumexp, T.logsumexp, torch.special.logsumexp, note="error 1e-5 + 2e-6 sqrt(n) of n entries"
)
def logsumexp(context: Context, x: Any, dim: Any, keepdim: bool = False) -> torch.Tensor:
    x = x if x.is_floating_point() else x.to(torch.float32)
    if not isinstance(dim, int):
        dims = _dims(x, tuple(dim))
        if len(dims) != 1:
            kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
            flat = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
            found = torch.logsumexp(flat, -1)
            return found.reshape(kept) if keepdim else found
        dim = dims[0]
    largest = x.amax(dim, keepdim=keepdim)
    _, e = _shifted_exp(context, x, dim)
    return largest + _log_of_sum(context, e, x.shares.shape, dim, keepdim)


def _normal(context: Context, x: SharedTensor, dims: tuple[int, ...], eps: float, centred: bool) -> SharedTensor:
    return standardised(context, x, dims, eps, centred)


def _affine(x: SharedTensor, weight: Any, bias: Any) -> SharedTensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


@implements("layer_norm", F.layer_norm, torch.layer_norm,
            note="everywhere; error 4e-6 + 1e-5 |result|; 1e-3 if sigma < 2^-13 and eps < 1e-8")  # fmt: skip
def layer_norm(context: Context, x: SharedTensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
               eps: float = 1e-5, cudnn_enabled: bool = True) -> SharedTensor:  # fmt: skip
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    return _affine(_normal(context, x, dims, eps, True), weight, bias)


@implements("rms_norm", F.rms_norm, torch.rms_norm, note="everywhere; error 4e-6 + 1e-5 |result|")
def rms_norm(
    context: Context, x: SharedTensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> SharedTensor:
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(_normal(context, x, dims, eps, False), weight, None)


def _per_channel(parameter: Any, dims: int) -> Any:
    return None if parameter is None else parameter.view(1, -1, *([1] * (dims - 2)))


@implements("group_norm", F.group_norm, torch.group_norm, note="everywhere; error 4e-6 + 1e-5 |result|")
def group_norm(context: Context, x: SharedTensor, num_groups: int, weight: Any = None, bias: Any = None,
               eps: float = 1e-5, cudnn_enabled: bool = True) -> SharedTensor:  # fmt: skip
    shape = x.shape
    y = _normal(context, x.reshape(shape[0], num_groups, -1), (-1,), eps, True).reshape(shape)
    return _affine(y, _per_channel(weight, len(shape)), _per_channel(bias, len(shape)))


@implements("instance_norm", F.instance_norm, note="everywhere; error 4e-6 + 1e-5 |result|")
def instance_norm(
    context: Context, x: SharedTensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    y = _normal(context, x, tuple(range(2, x.dim())), eps, True)
    return _affine(y, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()))


@implements("instance_norm", torch.instance_norm)
def native_instance_norm(
    context: Context, x: SharedTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """torch.instance_norm has the weights before the statistics."""
    return instance_norm(context, x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@implements(
    "local_response_norm",
    F.local_response_norm,
    note="as log of its sum of squares; error 4e-6 + 1e-4 |result|; with k = 0 of its root too, and no zeros",
)
def local_response_norm(context: Context, x: SharedTensor, size: int, alpha: float = 1e-4, beta: float = 0.75,
                        k: float = 1.0) -> SharedTensor:  # fmt: skip
    outside = 1.0  # a factor that stands before the quotient, so that its divisor has its digits
    if k == 0:
        outside = (size / alpha) ** beta
    elif k**beta * 2.0 ** quotient_bits(context) < context.scheme.activation_limit:
        least = 2.0 ** ((context.scheme.activation_bits - quotient_bits(context)) / beta)
        outside, alpha, k = (least / k) ** beta, alpha * least / k, least
    scaled = x * math.sqrt(alpha / size) if k else x
    squares = scaled.square().unsqueeze(1).flatten(3)
    padded = F.pad(squares, (0, 0, size // 2, (size - 1) // 2))
    sums = F.avg_pool2d(padded, (size, 1), stride=1, divisor_override=1).squeeze(1).reshape(x.shape)
    if not k:
        return quotient(context, x, summand(context, sums**beta)) * outside
    most = min(1.0, k**beta) * 2.0 ** (quotient_bits(context) + x.scale_bits)  # then no quotient is beyond the domain
    y = quotient(context, fitted(context, x, most), summand(context, (sums + k) ** beta), positive=True)
    return y if outside == 1.0 else y * outside


@implements("normalize", F.normalize, note="p = 2, 1; everywhere; error 4e-6")
def normalize(
    context: Context, x: SharedTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> SharedTensor:
    if p not in (1, 2):
        refuse(f"normalize with p={p}", "use p=2 or p=1")
    dims = _dims(x, dim)
    least = 2.0**-context.frac_bits
    if p == 2 and eps <= least:  # of a vector that is not zero, the norm is above
        return standardised(context, x, dims, 0.0, False, unit=True)
    size = x.abs().sum(dims, keepdim=True) if p == 1 else norm(context, x, 2, dims, True)
    return quotient(context, x, summand(context, size.clamp_min(max(eps, least))), positive=True)


@implements("var", torch.var, T.var, note="result < 2^16; error 2e-6 + 1e-6 |result|")
def var(context: Context, x: SharedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
        correction: Any = None) -> SharedTensor:  # fmt: skip
    return _statistic(context, mean_of_squares, x, dim, unbiased, keepdim, correction)


def _statistic(context: Context, which: Any, x: SharedTensor, dim: Any, unbiased: Any, keepdim: bool,
               correction: Any) -> SharedTensor:  # fmt: skip
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = _dims(x, dim)
    n = math.prod(x.shares.shape[d] for d in dims)
    if n <= correction:
        refuse("the variance of too few elements", "it is not a number")
    return _kept(context, which(context, x, dims, n - correction, True), dims, keepdim)


def _dims(x: SharedTensor, dim: Any) -> tuple[int, ...]:
    count = len(x.shares.shape)
    chosen = range(count) if dim is None or dim in ((), []) else (dim,) if isinstance(dim, int) else dim
    return tuple(d % max(1, count) for d in chosen)


def _kept(context: Context, x: SharedTensor, dims: tuple[int, ...], keepdim: bool) -> SharedTensor:
    if keepdim:
        return x
    shape = [size for d, size in enumerate(x.shares.shape) if d not in dims]
    return x.like(context.backend.each(torch.reshape, x.shares, shape), x.scale_bits)


@implements("std", torch.std, T.std, note="everywhere; error 2e-6 + 1e-6 |result|")
def std(context: Context, x: SharedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
        correction: Any = None) -> SharedTensor:  # fmt: skip
    return _statistic(context, root_mean_square, x, dim, unbiased, keepdim, correction)


@implements("norm", torch.linalg.norm, note="p = 1, 2, inf; error 2e-6 + 1e-6 |result|")
def linalg_norm(context: Context, x: SharedTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *,
                dtype: Any = None) -> torch.Tensor:  # fmt: skip
    """Of a matrix only the Frobenius norm; other orders are norms of operators."""
    matrix = len(dim) == 2 if isinstance(dim, (list, tuple)) else dim is None and x.dim() == 2
    rows, columns = dim if isinstance(dim, (list, tuple)) and matrix else (-2, -1)
    if matrix and ord in (1, -1, math.inf, -math.inf):
        sums = x.abs().sum(rows if abs(ord) == 1 else columns, keepdim=True)
        return (sums.amax if ord > 0 else sums.amin)((rows, columns), keepdim=keepdim)
    if matrix and ord not in (None, "fro"):
        refuse(f"the matrix norm of order {ord}", "use the Frobenius norm, 1 or inf, or vector_norm")
    return norm(context, x, 2 if ord is None else ord, dim, keepdim)


@implements("norm", torch.linalg.matrix_norm)
def matrix_norm(context: Context, x: SharedTensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *,
                dtype: Any = None) -> torch.Tensor:  # fmt: skip
    return linalg_norm(context, x, ord, tuple(dim), keepdim)


@implements("norm", torch.norm, T.norm, torch.linalg.vector_norm)
def norm(context: Context, x: SharedTensor, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None,
         dtype: Any = None, ord: Any = None) -> torch.Tensor:  # fmt: skip
    p = ord if ord is not None else (2 if p in (None, "fro") else p)
    dims = _dims(x, dim)
    if p == 2:
        return _kept(context, root_mean_square(context, x, dims, 1, False), dims, keepdim)
    if p == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if p == math.inf:
        return x.abs().amax(dims, keepdim=keepdim)
    return refuse(f"a norm of order {p}", "use 1, 2 or inf")
