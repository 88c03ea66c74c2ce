"""Convolutions and poolings of three dimensions, made of those of two; and samples at public places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ShapeError
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import is_secret, refuse
from .linear import _one_dimensional

_HIDDEN = vars(F)
"""Of functions that torch's stubs do not have."""


def _three(value: Any) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, value, value
    value = tuple(value)
    return value * 3 if len(value) == 1 else value  # pyright: ignore[reportReturnType]


@implements("conv3d", torch.conv3d, F.conv3d, note="as conv2d, with the depth of the kernel among the channels")
def conv3d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> torch.Tensor:  # fmt: skip
    _one_dimensional(bias)
    if x.dim() == 4:
        return torch.conv3d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    stride, dilation, kernel = _three(stride), _three(dilation), weight.shape[2:]
    if min(*stride, *dilation) < 1:
        raise ShapeError(f"stride and dilation are 1 or more, got {stride} and {dilation}")
    if isinstance(padding, str):
        both = [0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        widths = [side for b in reversed(both) for side in (b // 2, b - b // 2)]
    else:
        padding = _three(padding)
        if min(padding) < 0:
            raise ShapeError(f"negative padding is not supported, got {padding}")
        widths = [p for p in reversed(padding) for _ in (0, 1)]
    x = F.pad(x, widths)
    deep = (x.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    starts = torch.arange(deep).unsqueeze(-1) * stride[0] + torch.arange(kernel[0]) * dilation[0]
    cut = x[:, :, starts].permute(0, 2, 1, 3, 4, 5)  # [b, deep, channels, kernel, h, w]
    planes = cut.reshape(x.shape[0] * deep, x.shape[1] * kernel[0], *x.shape[3:])
    flat = weight.reshape(weight.shape[0], weight.shape[1] * kernel[0], *kernel[1:])
    y = torch.conv2d(planes, flat, bias, stride[1:], 0, dilation[1:], groups)
    return y.reshape(x.shape[0], deep, *y.shape[1:]).movedim(1, 2)


def _apart(x: Any, stride: tuple[int, int, int]) -> Any:
    """Zeros between the elements of the last three dimensions."""
    for d, step in enumerate(stride, x.dim() - 3):
        if step > 1:
            x = F.pad(x.movedim(d, -1).unsqueeze(-1), (0, step - 1)).flatten(-2)
            x = x.narrow(-1, 0, x.shape[-1] - step + 1).movedim(-1, d)
    return x


@implements("conv_transpose3d", torch.conv_transpose3d, F.conv_transpose3d, note="as conv3d, between zeros")
def conv_transpose3d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> torch.Tensor:  # fmt: skip
    """An ordinary convolution of the input with zeros between its elements and the flipped, transposed kernel."""
    if x.dim() == 4:
        given = bias, stride, padding, output_padding, groups, dilation
        return torch.conv_transpose3d(x.unsqueeze(0), weight, *given).squeeze(0)
    stride, padding, more, dilation = (_three(v) for v in (stride, padding, output_padding, dilation))
    if min(*padding, *more) < 0 or min(*stride, *dilation) < 1:
        raise ShapeError(f"negative padding, or a stride of 0: {padding}, {more}, {stride}, {dilation}")
    if x.shape[1] != weight.shape[0]:
        raise ShapeError(f"expected {weight.shape[0]} channels for weights of {list(weight.shape)}, got {x.shape[1]}")
    kernel = tuple(weight.shape[2:])
    sides = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    widths = [side for s, m in zip(reversed(sides), reversed(more), strict=True) for side in (s, s + m)]
    flipped = weight.flip(2, 3, 4).reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel)
    flipped = flipped.transpose(1, 2).reshape(-1, weight.shape[0] // groups, *kernel)
    return torch.conv3d(F.pad(_apart(x, stride), widths), flipped, bias, 1, 0, dilation, groups)


def _pooled(x: torch.Tensor, planes: Callable, depth: Callable) -> torch.Tensor:
    """x [..., d, h, w], pooled over planes, and what that gives over the depth."""
    y = x.reshape(1, -1, *x.shape[-2:])
    y = planes(y)
    y = y.reshape(1, -1, x.shape[-3], math.prod(y.shape[-2:])), y.shape[-2:]
    z = depth(y[0])
    return z.reshape(*x.shape[:-3], z.shape[-2], *y[1])


@implements("max_pool3d", F.max_pool3d, torch.max_pool3d, _HIDDEN["_max_pool3d"], note="as max_pool2d, twice")
def max_pool3d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> torch.Tensor:  # fmt: skip
    if return_indices:
        refuse("max_pool3d with indices", "call it without return_indices")
    k, p, d = _three(kernel_size), _three(padding), _three(dilation)
    s = k if stride is None or stride == [] else _three(stride)
    return _pooled(
        x,
        lambda v: F.max_pool2d(v, k[1:], s[1:], p[1:], d[1:], ceil_mode),
        lambda v: F.max_pool2d(v, (k[0], 1), (s[0], 1), (p[0], 0), (d[0], 1), ceil_mode),
    )


@implements("avg_pool3d", F.avg_pool3d, note="as avg_pool2d, twice")
def avg_pool3d(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> torch.Tensor:  # fmt: skip
    k, p = _three(kernel_size), _three(padding)
    s = k if stride is None or stride == [] else _three(stride)
    one = 1 if divisor_override else None
    return _pooled(
        x,
        lambda v: F.avg_pool2d(v, k[1:], s[1:], p[1:], ceil_mode, count_include_pad, one),
        lambda v: F.avg_pool2d(v, (k[0], 1), (s[0], 1), (p[0], 0), ceil_mode, count_include_pad, divisor_override),
    )


def _sizes(x: torch.Tensor, output_size: Any) -> list[int]:
    given = [output_size] * 3 if output_size is None or isinstance(output_size, int) else list(output_size)
    return [x.shape[d - 3] if n is None else n for d, n in enumerate(given)]


@implements("adaptive_avg_pool3d", F.adaptive_avg_pool3d, note="as adaptive_avg_pool2d, twice")
def adaptive_avg_pool3d(context: Context, x: SharedTensor, output_size: Any) -> torch.Tensor:
    d, h, w = _sizes(x, output_size)
    planes = lambda v: F.adaptive_avg_pool2d(v, (h, w))
    return _pooled(x, planes, lambda v: F.adaptive_avg_pool2d(v, (d, v.shape[-1])))


def _without_indices(name: str, return_indices: bool) -> None:
    if return_indices:
        refuse(f"{name} with indices", "call it without return_indices")


@implements("adaptive_max_pool3d", F.adaptive_max_pool3d, _HIDDEN["_adaptive_max_pool3d"],
            note="as adaptive_max_pool2d, twice")  # fmt: skip
def adaptive_max_pool3d(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    _without_indices("adaptive_max_pool3d", return_indices)
    d, h, w = _sizes(x, output_size)
    planes = lambda v: F.adaptive_max_pool2d(v, (h, w))
    return _pooled(x, planes, lambda v: F.adaptive_max_pool2d(v, (d, v.shape[-1])))


@implements("adaptive_max_pool1d", F.adaptive_max_pool1d, _HIDDEN["_adaptive_max_pool1d"],
            note="as adaptive_max_pool2d with height one")  # fmt: skip
def adaptive_max_pool1d(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    _without_indices("adaptive_max_pool1d", return_indices)
    size = output_size if isinstance(output_size, int) else x.shape[-1] if output_size is None else output_size[0]
    return F.adaptive_max_pool2d(x.unsqueeze(-2), (1, int(size))).squeeze(-2)


@implements("embedding_bag", F.embedding_bag, note="as embedding; public offsets")
def embedding_bag(
    context: Context, index: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: Any = None,
) -> torch.Tensor:  # fmt: skip
    if padding_idx is not None or max_norm is not None:
        refuse("embedding_bag with padding_idx or max_norm", "zero the row, or normalise the table first")
    if is_secret(offsets):
        refuse("embedding_bag with secret offsets", "the sizes of bags are public")
    rows = F.embedding(index, weight)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1)
    if index.dim() == 2:
        if not index.shape[1]:
            refuse("empty bags", "leave them out")
        return _bag(rows, mode)
    starts = offsets.tolist() if include_last_offset else [*offsets.tolist(), index.shape[0]]
    if any(a >= b for a, b in itertools.pairwise(starts)) or starts[-1] != index.shape[0]:
        refuse("empty bags, or indices in no bag", "leave them out")
    return torch.stack([_bag(rows[a:b], mode) for a, b in itertools.pairwise(starts)])


def _bag(rows: torch.Tensor, mode: str) -> torch.Tensor:
    return rows.sum(-2) if mode == "sum" else rows.mean(-2) if mode == "mean" else rows.amax(-2)


def _sampled(x: torch.Tensor, grid: Any, sample: Callable) -> torch.Tensor:
    """x [b, c, ...] at the places of a public grid: each result is a public sum of entries, read off torch itself."""
    if is_secret(grid):
        refuse("grid_sample at secret places", "give a public grid")
    if not x.is_floating_point():
        refuse("grid_sample of whole numbers", "sample x.float()")
    count = math.prod(x.shape[2:])
    one = torch.eye(count, dtype=torch.float64).reshape(1, count, *x.shape[2:])
    matrix = sample(one.expand(x.shape[0], *one.shape[1:]), grid.to(torch.float64))
    flat = matrix.reshape(x.shape[0], count, -1).to(x.dtype)
    return torch.matmul(x.reshape(*x.shape[:2], count), flat).reshape(*x.shape[:2], *matrix.shape[2:])


@implements("grid_sample", F.grid_sample, note="public grid; bilinear and nearest; local")
def grid_sample(
    context: Context, x: SharedTensor, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    return _sampled(x, grid, lambda v, g: F.grid_sample(v, g, mode, padding_mode, align_corners))


@implements("grid_sample", torch.grid_sampler, torch.grid_sampler_2d)
def grid_sampler(
    context: Context, x: SharedTensor, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    return _sampled(x, grid, lambda v, g: torch.grid_sampler(v, g, interpolation_mode, padding_mode, align_corners))
