"""Batch normalisation on batch statistics, forward and backward, and dropout."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..ops.common import SLACK_BITS, settled, shortened
from ..ops.ranges import CAPACITY, fitted
from ..tensor import SharedTensor
from ..tensor.table import Context
from .elementwise import content
from .functions import F, aten, torch
from .scale import as_gradient, at, factor, gradient_bits, operand, state_bits, times, wide
from .tensor import FUNCTIONS, GRADIENTS, Cell, Made, Pool

row = GRADIENTS.implements


def _others(x: SharedTensor) -> list[int]:
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
    n, dims = value.numel() // value.shape[1], _others(value)
    if n < 2:
        raise ArgumentError("batch_norm in training needs more than one value a channel")
    centre = torch.mean(value, dims, keepdim=True)
    centre = shortened(context, centre, max(context.frac_bits, value.scale_bits))
    deviation = settled(context, value - centre, 0)
    variance = torch.mean(torch.square(deviation), dims, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    inverse = inverse.bounded(None if inverse.bound is None else eps**-0.5 * 2.0**inverse.scale_bits + 2.0)
    normal = _normal(context, deviation, inverse, n)
    if isinstance(mean, Cell):
        _towards(context, mean, centre.flatten(), momentum)
        _towards(context, var, times(context, variance.flatten(), n / (n - 1), state_bits(context)), momentum)
    y = normal
    if weight is not None:
        y = torch.mul(normal, _of_channels(factor(context, weight), value))
    if bias is not None:
        y = y + _of_channels(content(bias), value)
    return y, centre.flatten(), Made(inverse.flatten(), normal=normal)


def _normal(context: Context, deviation: SharedTensor, inverse: SharedTensor, n: int) -> SharedTensor:
    """deviation / root of the mean of their squares, which is sqrt(n) at most, whatever the bounds of both."""
    shares = context.backend.multiply(torch.mul, deviation.shares, inverse.shares)
    bits = deviation.scale_bits + inverse.scale_bits
    made = deviation.like(shares, bits, None if deviation.bound is None else 1.01 * math.sqrt(n) * 2.0**bits)
    return shortened(context, made, context.frac_bits)


def _towards(context: Context, running: Cell, now: SharedTensor, momentum: float) -> None:
    """One step of an exponential mean; what the batch raised, it depends on."""
    start, end = wide(context, running.content), wide(context, now)
    made = start + times(context, end - start, momentum, state_bits(context))
    bound = None if start.bound is None or end.bound is None else max(start.bound, end.bound) + 2
    pool = Pool.of([Pool((*running.pool.flags, *context.net.raised))])
    running.write(made.bounded(bound), pool)


def _sums(g: Tensor, x: Tensor) -> Tensor:
    """sum of g x over all but the channels."""
    return (g * x).sum([d for d in range(g.dim()) if d != 1])


@row("batch_norm", aten.native_batch_norm_backward.default)
def batch_norm_backward(
    context: Context, g: Cell, x: Cell, weight: Any, mean: Any, var: Any, save_mean: Any, save_inverse: Any,
    training: bool, eps: float, mask: Any,
) -> tuple:  # fmt: skip
    shape = x.content
    n, dims = shape.numel() // shape.shape[1], _others(shape)
    value = operand(context, g, n)
    if training:
        inverse, normal = save_inverse.content, save_inverse.kept["normal"]
    else:
        inverse = torch.rsqrt(content(var) + eps)
        normal = torch.mul(shape - _of_channels(content(mean), shape), _of_channels(inverse, shape))
        normal = settled(context, normal, 0)
    total = torch.sum(value, dims)
    along = _along(context, value, normal, n) if training else torch.mul(value, normal).sum(dims)
    step = inverse if weight is None else torch.mul(inverse, factor(context, weight))
    step = settled(context, step, 0)
    inner = as_gradient(context, g.content)
    if training:
        bits = context.frac_bits + SLACK_BITS
        first, second = (at(context, times(context, v, 1 / n, bits), bits) for v in (total, along))
        most = 2.0 ** (gradient_bits(context) + bits)
        first, second = (v.bounded(None if v.bound is None else min(v.bound, most + 2)) for v in (first, second))
        inner = inner - _of_channels(first, shape) - torch.mul(normal, _of_channels(second, shape))
        inner = as_gradient(context, inner)
    return torch.mul(inner, _of_channels(step, shape)), along, total


def _along(context: Context, g: SharedTensor, normal: SharedTensor, n: int) -> SharedTensor:
    """sum of g times the normalised input: by Cauchy and Schwarz below n times the limit of gradients."""
    shares = context.backend.multiply(_sums, g.shares, normal.shares)
    bits = g.scale_bits + normal.scale_bits
    made = g.like(shares, bits, None if g.bound is None else 1.01 * n * g.bound * 2.0**normal.scale_bits)
    return fitted(context, made, CAPACITY)


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """By torch's generator, so that everybody knows which entries are left out, and nobody what they were."""
    if not training or p == 0:
        return x
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout probability has to be between 0 and 1, but got {p}")
    if inplace:
        raise ArgumentError("dropout in place is not supported on shares; use inplace=False")
    left = (torch.rand(tuple(x.shape)) >= p).to(torch.int64)
    return x * left * (1 / (1 - p) if p < 1 else 0.0)


FUNCTIONS[F.dropout] = FUNCTIONS[torch.dropout] = dropout
