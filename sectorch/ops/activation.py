"""ReLU and other piecewise linear activations, each from a single masked opening."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import NonFiniteError
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import (
    add_values,
    bound,
    check_fits,
    dropped_bits_bound,
    encoded_public,
    excess_bits,
    fit_beside_bounds,
    limit_at,
    limit_bits,
    limit_of_difference,
    raise_scale,
    refuse,
    round_scale,
    small_public_number,
    standing_for,
    with_fine_scale,
    write_if_inplace,
)
from .linear import times_number

T = torch.Tensor
LEAST_FACTOR_BITS = 8
"""Bits of the random factor of the paper's ReLU, at least. x is rounded, so that their product does not wrap."""


def within_leaky_range(context: Context, x: SharedTensor, bits: int) -> SharedTensor:
    """Hold x below the limit, and round it so that a number of so many bits leaves the paper's factor room."""
    x = round_scale(context, x, max(context.frac_bits, 63 - LEAST_FACTOR_BITS - bits))
    return check_fits(context, x, limit_at(context, x.scale_bits))


@implements("relu", F.relu, torch.relu, T.relu, in_place=(torch.relu_, T.relu_, F.relu_),
            note="exact; drops the extra fraction bits of a linear layer for free", excess=0.0)  # fmt: skip
def relu(context: Context, x: SharedTensor, inplace: bool = False) -> SharedTensor:
    leaky = context.scheme.relu != "exact"
    if leaky:
        x = within_leaky_range(context, x, context.scheme.activation_bits)
    shift = excess_bits(context, x.scale_bits)
    if not leaky:
        scale = x.scale_bits - shift
        limit = limit_bits(context, x, scale)
        (shares,) = context.backend.ramps(x.shares, (0,), shift, bound(context, x.scale_bits), limit)
        result = x.like(shares, scale, dropped_bits_bound(context, x, shift))
    else:
        bits = context.scheme.activation_bits + x.scale_bits
        result = x.like(context.backend.leaky_relu(x.shares, shift, bits), x.scale_bits - shift, x.bound)
    return write_if_inplace(x, result, inplace)


def _relu_and_value(context: Context, x: SharedTensor) -> tuple[SharedTensor, SharedTensor]:
    """ReLU(x) and x, both at f fraction bits or fewer, from one opening."""
    shift = excess_bits(context, x.scale_bits)
    scale = x.scale_bits - shift
    limit, smaller = limit_bits(context, x, scale), dropped_bits_bound(context, x, shift)
    if not shift and limit is not None:
        x = check_fits(context, x, limit_at(context, scale))
    positive, whole = context.backend.relu_and_rest(x.shares, shift, bound(context, x.scale_bits), limit)
    return x.like(positive, scale, smaller), x.like(whole, scale, smaller)


@implements("leaky_relu", F.leaky_relu, in_place=(F.leaky_relu_,), note="exact", excess=0.0)
def leaky_relu(context: Context, x: SharedTensor, negative_slope: float = 0.01, inplace: bool = False) -> SharedTensor:
    positive, whole = _relu_and_value(context, x)
    result = add_values(
        context, times_number(context, whole, negative_slope), times_number(context, positive, 1 - negative_slope)
    )
    return write_if_inplace(x, result, inplace)


@implements("rrelu", F.rrelu, torch.rrelu, in_place=(F.rrelu_, torch.rrelu_), note="evaluation mode; as leaky_relu")
def rrelu(
    context: Context, x: SharedTensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> SharedTensor:  # fmt: skip
    """Xu et al. 2015; the slope is drawn in training only, and is the middle of its range here."""
    if training:
        refuse("rrelu in training mode", "call model.eval() first")
    return leaky_relu(context, x, (lower + upper) / 2, inplace)


@implements("prelu", F.prelu, torch.prelu, T.prelu, note="with A's secret slope")
def prelu(context: Context, x: SharedTensor, weight: Any) -> SharedTensor:
    positive = torch.relu(x)
    if weight.numel() > 1 and x.dim() > 1:
        weight = weight.view(1, -1, *([1] * (x.dim() - 2)))
    return positive + (x - positive) * weight


@implements("abs", torch.abs, torch.absolute, T.abs, T.absolute, T.__abs__, in_place=(T.abs_, T.absolute_),
            note="exact", excess=0.0)  # fmt: skip
def absolute(context: Context, x: SharedTensor) -> SharedTensor:
    positive, whole = _relu_and_value(context, x)
    return positive.like(positive.shares * 2 - whole.shares, positive.scale_bits, positive.bound)


def _clamp(context: Context, x: SharedTensor, low: float | None, high: float | None) -> SharedTensor:
    """low + ReLU(x - low) - ReLU(x - high), both comparisons from one opening."""
    low, high = (None if b is not None and b == inf else b for b, inf in ((low, -math.inf), (high, math.inf)))
    if any(isinstance(b, float) and math.isnan(b) for b in (low, high)):
        raise NonFiniteError("clamp has a bound of NaN")
    if low is None and high is None:
        return x
    bounds = [bound for bound in (low, high) if bound is not None]
    fine = any(small_public_number(context, b) is not None and b * 2.0**context.frac_bits % 1 for b in bounds)
    if fine:  # a guard against zero, as in log(x.clamp(min=1e-8)), would be lost among f fraction bits
        if high is not None and abs(high) >= 2.0 ** (HEADROOM_BITS - 2 - 2 * context.frac_bits):
            return _clamp(context, _clamp(context, x, None, high), low, None)
        x = with_fine_scale(context, x)
    elif any(bound % 1 for bound in bounds):  # of whole numbers, which carry no fraction bits
        x = raise_scale(context, x, max(x.scale_bits, context.frac_bits))
    if low is not None and high is not None and low >= high:
        constant = context.backend.each(torch.zeros_like, x.shares)
        ends = None if x.bound is None else abs(high) * 2.0**x.scale_bits + 1
        return _add_constant(context, x.like(constant, x.scale_bits), high, ends)
    x = fit_beside_bounds(context, x, *bounds)
    backend, shift = context.backend, 0 if fine else excess_bits(context, x.scale_bits)
    scale = x.scale_bits - shift
    thresholds = tuple(int(encoded_public(context, float(b), scale, fine)) for b in bounds)
    smaller = dropped_bits_bound(context, x, shift)
    # The difference of two ramps is bounded for any x; a single ramp is as large as x.
    limit = None if low is not None and high is not None else limit_bits(context, x, scale)
    if high is None and limit is not None:
        limit = limit_of_difference(limit, thresholds[0])
        smaller = 2.0**limit
    if low is None and not shift and limit is not None:  # no truncation checks it
        x = check_fits(context, x, limit_at(context, scale))
    ends = max(abs(b) for b in bounds) * 2.0**scale + 1
    bound = ends if limit is None and len(bounds) == 2 else None if smaller is None else max(smaller, ends) + ends
    parts = backend.ramps(x.shares, thresholds, shift, limit_bits=limit if high is None else None)
    if high is None and low is not None:
        return _add_constant(context, x.like(parts[0], scale), low, bound, fine)
    if low is None:
        whole = backend.truncate(x.shares, shift, limit) if shift else x.shares
        return x.like(whole - parts[0], scale, bound)
    return _add_constant(context, x.like(parts[0] - parts[1], scale), low, bound, fine)


def _add_constant(
    context: Context, x: SharedTensor, constant: float, bound: float | None, fine: bool = False
) -> SharedTensor:
    offset = int(encoded_public(context, float(constant), x.scale_bits, fine))
    made = x.like(x.shares + offset, x.scale_bits, bound)
    if fine:
        standing_for(made, constant)
    return made


@implements("clamp", torch.clamp, torch.clip, T.clamp, T.clip, in_place=(T.clamp_, T.clip_, torch.clamp_),
            note="exact; between tensors the maximum, then the minimum")  # fmt: skip
def clamp(context: Context, x: Any, min: Any = None, max: Any = None) -> Any:
    if not any(isinstance(bound, torch.Tensor) for bound in (min, max)):
        return _clamp(context, x, min, max)
    x = x if min is None else torch.maximum(x, min)
    return x if max is None else torch.minimum(x, max)


@implements("clamp_min", torch.clamp_min, T.clamp_min, in_place=(T.clamp_min_, torch.clamp_min_), note="exact")
def clamp_min(context: Context, x: Any, min: Any) -> SharedTensor:
    return clamp(context, x, min=min)


@implements("clamp_max", torch.clamp_max, T.clamp_max, in_place=(T.clamp_max_, torch.clamp_max_), note="exact")
def clamp_max(context: Context, x: Any, max: Any) -> SharedTensor:
    return clamp(context, x, max=max)


@implements("relu6", F.relu6, note="exact")
def relu6(context: Context, x: SharedTensor, inplace: bool = False) -> SharedTensor:
    return write_if_inplace(x, _clamp(context, x, 0.0, 6.0), inplace)


@implements("hardtanh", F.hardtanh, in_place=(F.hardtanh_,), note="exact")
def hardtanh(
    context: Context, x: SharedTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> SharedTensor:
    return write_if_inplace(x, _clamp(context, x, min_val, max_val), inplace)
