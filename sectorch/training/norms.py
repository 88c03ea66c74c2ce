"""Normalisation by the statistics of the input, forward and backward; dropout, weight norm and circular padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..backend import RaisedFlags
from ..errors import ArgumentError
from ..ops.common import CAPACITY, SLACK_BITS, as_factor, check_fits, round_scale
from ..tensor import SharedTensor
from ..tensor.table import Context
from .autograd_values import Cell, Pool, ReusableResult
from .elementwise import content, towards
from .fixed_point import as_gradient, at_scale_bits, at_state_bits, factor, gradient_bits, operand, state_bits, times
from .operations import GRADIENTS, WRITES, F, aten, torch
from .tensor import FUNCTIONS

row = GRADIENTS.implements


WRITES[aten.native_batch_norm.default] = (3, 4)


def _all_but_channels(x: SharedTensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _of_channels(x: SharedTensor, like: SharedTensor) -> SharedTensor:
    return x.reshape([1, -1] + [1] * (like.dim() - 2))


@row("batch_norm", aten.native_batch_norm.default, note="on the batch's statistics, or on running ones")
def batch_norm(
    context: Context, x: Cell, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """The running statistics are changed in place, as torch's are."""
    if not training:
        statistics = [content(v) for v in (mean, var, weight, bias)]
        y = F.batch_norm(x.content, *statistics, False, momentum, eps)
        return y, statistics[0], statistics[1]
    value = operand(context, x)
    n, dims = value.numel() // value.shape[1], _all_but_channels(value)
    if n < 2:
        raise ArgumentError("batch_norm in training needs more than one value a channel")
    if isinstance(mean, Tensor):
        raise ArgumentError(
            "running statistics in plain would be known to all; make the module shared: sectorch.shared(m)"
        )
    normal, centre, variance, inverse = _normalised(context, value, dims, eps)
    if isinstance(mean, Cell):
        _towards(context, mean, centre.flatten(), momentum)
        _towards(context, var, times(context, variance.flatten(), n / (n - 1), state_bits(context)), momentum)
    y = normal
    if weight is not None:
        y = torch.mul(normal, _of_channels(_secret(context, value, weight), value))
    if bias is not None:
        y = y + _of_channels(content(bias), value)
    return y, centre.flatten(), ReusableResult(inverse.flatten(), normal=normal)


def _normalised(context: Context, value: SharedTensor, dims: list[int], eps: float) -> tuple[SharedTensor, ...]:
    """The normalised input, the mean, the variance, and the inverse of its root."""
    if eps < 0:
        raise ArgumentError(f"eps is not negative on shares, got {eps}")
    n = math.prod(value.shape[d] for d in dims)
    centre = torch.mean(value, dims, keepdim=True)
    centre = round_scale(context, centre, max(context.frac_bits, value.scale_bits))
    deviation = as_factor(context, value - centre, 0)
    variance = torch.mean(torch.square(deviation), dims, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    inverse = inverse.bounded(None if inverse.bound is None else eps**-0.5 * 2.0**inverse.scale_bits + 2.0)
    return _normal(context, deviation, inverse, n), centre, variance, inverse


def _normal(context: Context, deviation: SharedTensor, inverse: SharedTensor, n: int) -> SharedTensor:
    """deviation * inverse. A deviation over the root mean square of n deviations is sqrt(n) at most, which is a smaller
    bound than the product of both bounds."""
    shares = context.backend.multiply(torch.mul, deviation.shares, inverse.shares)
    bits = deviation.scale_bits + inverse.scale_bits
    made = deviation.like(shares, bits, None if deviation.bound is None else 1.01 * math.sqrt(n) * 2.0**bits)
    return round_scale(context, made, context.frac_bits)


def _towards(context: Context, running: Cell, now: SharedTensor, momentum: float) -> None:
    """One step of an exponential mean, which then depends on the range checks of the batch."""
    start, end = at_state_bits(context, running.content), at_state_bits(context, now)
    made = start + times(context, end - start, momentum, state_bits(context))
    bound = towards(start.bound, end.bound, momentum)
    pool = Pool.of([Pool((*running.pool.flags, *context.net.state(RaisedFlags)))])
    running.write(made.bounded(bound), pool)


def _sums(dims: list[int], keepdim: bool, g: Tensor, x: Tensor) -> Tensor:
    """The sum of g x over these dimensions."""
    return (g * x).sum(dims, keepdim) if dims else g * x


@row("batch_norm", aten.native_batch_norm_backward.default)
def batch_norm_backward(
    context: Context, g: Cell, x: Cell, weight: Any, mean: Any, var: Any, save_mean: Any, save_inverse: Any,
    training: bool, eps: float, mask: Any,
) -> tuple:  # fmt: skip
    shape = x.content
    n, dims = shape.numel() // shape.shape[1], _all_but_channels(shape)
    value = operand(context, g, n)
    scale = None if weight is None else _secret(context, shape, weight)
    if training:
        inverse, normal = save_inverse.content, save_inverse.reusable["normal"]
    else:
        inverse = torch.rsqrt(_secret(context, shape, var) + eps)
        centred = shape - _of_channels(_secret(context, shape, mean), shape)
        normal = as_factor(context, torch.mul(centred, _of_channels(inverse, shape)), 0)
    total = torch.sum(value, dims)
    along = _along(context, value, normal, dims) if training else torch.mul(value, normal).sum(dims)
    step = as_factor(context, inverse if scale is None else torch.mul(inverse, scale), 0)
    inner = as_gradient(context, g.content)
    if training:
        inner = _inner(context, inner, normal, _of_channels(total, shape), _of_channels(along, shape), n)
    return torch.mul(inner, _of_channels(step, shape)), along if mask[1] else None, total if mask[2] else None


def _secret(context: Context, like: SharedTensor, value: Any) -> SharedTensor:
    """A cell as a factor of f fraction bits, or a public tensor as shares."""
    return factor(context, value) if isinstance(value, Cell) else like.reshape(-1)[:0].sum() + value


def _inner(
    context: Context, g: SharedTensor, normal: SharedTensor, total: SharedTensor, along: SharedTensor, n: int
) -> SharedTensor:
    """g less its mean, and less its part along the normalised input; both means are below the limit of gradients."""
    bits = context.frac_bits + SLACK_BITS
    first, second = (at_scale_bits(context, times(context, v, 1 / n, bits), bits) for v in (total, along))
    most = 2.0 ** (gradient_bits(context) + bits)
    first, second = (v.bounded(None if v.bound is None else min(v.bound, most + 2)) for v in (first, second))
    return as_gradient(context, g - first - torch.mul(normal, second))


def _along(
    context: Context, g: SharedTensor, normal: SharedTensor, dims: list[int], keepdim: bool = False
) -> SharedTensor:
    """The sum of g times the normalised input: below n times the limit of gradients (Cauchy and Schwarz)."""
    n = math.prod(g.shape[d] for d in dims)
    shares = context.backend.multiply(partial(_sums, dims, keepdim), g.shares, normal.shares)
    bits = g.scale_bits + normal.scale_bits
    made = g.like(shares, bits, None if g.bound is None else 1.01 * n * g.bound * 2.0**normal.scale_bits)
    return check_fits(context, made, CAPACITY)


def _normalise(
    context: Context, x: SharedTensor, dims: list[int], eps: float
) -> tuple[SharedTensor, SharedTensor, ReusableResult]:
    """x normalised along some dimensions, its mean, and its inverse deviation, which keeps the normalised x."""
    normal, centre, _, inverse = _normalised(context, x, dims, eps)
    return normal, centre, ReusableResult(inverse, normal=normal)


def _normalise_backward(context: Context, g: Any, inverse: Cell, dims: list[int]) -> SharedTensor:
    """The gradient of the input of `_normalise`, for the gradient g of its result."""
    normal = inverse.reusable["normal"]
    n = math.prod(normal.shape[d] for d in dims)
    value = as_gradient(context, g)
    part = operand(context, Cell(value, gradient=True), n)
    total, along = torch.sum(part, dims, keepdim=True), _along(context, part, normal, dims, keepdim=True)
    inner = _inner(context, value, normal, total, along, n)
    return torch.mul(inner, as_factor(context, inverse.content.reshape(along.shape), 0))


def _affine(context: Context, normal: SharedTensor, weight: Any, bias: Any) -> SharedTensor:
    y = normal if weight is None else torch.mul(normal, weight)
    return y if bias is None else y + bias


def _affine_backward(
    context: Context, g: Cell, normal: SharedTensor, weight: Any, dims: list[int], mask: Any
) -> tuple[SharedTensor, Any, Any]:
    """The gradients of the normalised input, of the weight and of the bias, which are summed over `dims`."""
    n = math.prod(normal.shape[d] for d in dims)
    value = operand(context, g, n)
    along = _along(context, value, normal, dims) if mask[1] else None
    total = torch.sum(value, dims) if mask[2] and dims else value
    return value if weight is None else torch.mul(value, weight), along, total if mask[2] else None


@row("layer_norm", aten.native_layer_norm.default)
def layer_norm(context: Context, x: Cell, shape: Any, weight: Any, bias: Any, eps: float) -> tuple:
    value = operand(context, x)
    normal, centre, inverse = _normalise(context, value, list(range(value.dim() - len(shape), value.dim())), eps)
    weight = None if weight is None else _secret(context, normal, weight)
    return _affine(context, normal, weight, content(bias)), centre, inverse


@row("layer_norm", aten.native_layer_norm_backward.default)
def layer_norm_backward(
    context: Context, g: Cell, x: Cell, shape: Any, mean: Any, inverse: Cell, weight: Any, bias: Any, mask: Any
) -> tuple:
    normal = inverse.reusable["normal"]
    first = normal.dim() - len(shape)
    weight = None if weight is None else _secret(context, normal, weight)
    inner, along, total = _affine_backward(context, g, normal, weight, list(range(first)), mask)
    own = _normalise_backward(context, inner, inverse, list(range(first, normal.dim()))) if mask[0] else None
    return own, along, total


@row("group_norm", aten.native_group_norm.default, note="instance_norm too")
def group_norm(
    context: Context, x: Cell, weight: Any, bias: Any, n: int, c: int, places: int, groups: int, eps: float
) -> tuple:
    value = operand(context, x)
    normal, centre, inverse = _normalise(context, value.reshape((n, groups, -1)), [2], eps)
    weight = None if weight is None else _of_channels(_secret(context, value, weight), value)
    bias = None if bias is None else _of_channels(content(bias), value)
    y = _affine(context, normal.reshape(value.shape), weight, bias)
    inverse.content = inverse.content.reshape((n, groups))
    return y, centre.reshape((n, groups)), inverse


@row("group_norm", aten.native_group_norm_backward.default)
def group_norm_backward(
    context: Context, g: Cell, x: Cell, mean: Any, inverse: Cell, weight: Any, n: int, c: int, places: int,
    groups: int, mask: Any,
) -> tuple:  # fmt: skip
    shape = x.content.shape
    normal = inverse.reusable["normal"].reshape(shape)
    weight = None if weight is None else _of_channels(_secret(context, normal, weight), normal)
    inner, along, total = _affine_backward(context, g, normal, weight, _all_but_channels(normal), mask)
    own = _normalise_backward(context, inner.reshape((n, groups, -1)), inverse, [2]).reshape(shape) if mask[0] else None
    return own, along, total


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout by torch's generator: everybody knows which entries are dropped, and nobody their values."""
    if not training or p == 0:
        return x
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout probability has to be between 0 and 1, but got {p}")
    if inplace:
        raise ArgumentError("dropout in place is not supported on shares; use inplace=False")
    return _drop(x, p, tuple(x.shape))


def _drop(x: Any, p: float, shape: tuple) -> Any:
    kept = (torch.rand(shape) >= p).to(torch.int64)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0)


def _channels_dropped(dims: int) -> Callable:
    def run(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Dropout of channels, each of which has `dims` dimensions."""
        if not training or p == 0 or not 0 <= p <= 1 or inplace:
            return dropout(x, p, training, inplace)
        return _drop(x, p, (*x.shape[: x.dim() - dims], *(1,) * dims))

    return run


FUNCTIONS[F.dropout] = dropout
FUNCTIONS[torch.dropout] = lambda input, p, train: dropout(input, p, train)
for _function, _dims in ((F.dropout1d, 1), (F.dropout2d, 2), (F.dropout3d, 3)):
    FUNCTIONS[_function] = _channels_dropped(_dims)


def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """v g / |v|, the norms over all dimensions but one."""
    dims = [d for d in range(v.dim()) if d != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / torch.linalg.vector_norm(v, 2, dims, keepdim=True))


FUNCTIONS[torch._weight_norm] = weight_norm
FUNCTIONS[torch.norm_except_dim] = lambda v, pow=2, dim=0: torch.linalg.vector_norm(
    v, pow, [d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True
)


def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Circular padding by concatenation; torch's own writes into slices."""
    if mode != "circular" or min(pad) < 0:
        with torch._C.DisableTorchFunctionSubclass():
            return F.pad(input, pad, mode, value)
    made = input
    for k in range(len(pad) // 2):
        dim, (before, after) = input.dim() - 1 - k, pad[2 * k : 2 * k + 2]
        size = input.shape[dim]
        if max(before, after) > size:
            raise ArgumentError(f"circular padding is at most the size {size}, got {before} and {after}")
        parts = made.narrow(dim, size - before, before), made, made.narrow(dim, 0, after)
        made = torch.cat([part for part in parts if part.shape[dim]], dim)
    return made


FUNCTIONS[F.pad] = pad
