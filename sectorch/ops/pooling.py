"""Poolings and other maps with windows: averages are local, maxima are a tree of comparisons.

Beside poolings of one to three dimensions: transposed and three-dimensional convolutions, interpolation, patches
(`unfold`, `fold`), embedding bags, and samples at the points of a public grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..backend import Value
from ..errors import ShapeError
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import COMPOSED, SHARES, Context, implements, stepwise
from .activation import within_leaky_range
from .common import (
    as_factor,
    bound,
    dropped_bits_bound,
    excess_bits,
    is_secret,
    limit_bits,
    local_map,
    planes,
    refuse,
    require,
    summand,
    with_dtype,
)
from .linear import add_bias, as_pair, bilinear, not_negative, require_one_dimension, sum_of_all, times_number
from .order import top_of

T = torch.Tensor
_HIDDEN = vars(F)
"""Functions that torch's stubs do not declare."""
_LOWEST = -(1 << 62)
"""Minus infinity in the padding of a maximum. No protocol takes a value below it."""


def _window_pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _output_length(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Output length of a pooling, as torch has it: a window must start inside the input or its left padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


def pooling_windows(v: torch.Tensor, fill: int, kernel, stride, padding, dilation, ceil_mode: bool) -> torch.Tensor:
    """[..., h, w] -> [kh * kw, ..., oh, ow]."""
    out = [_output_length(v.shape[i - 2], kernel[i], stride[i], padding[i], dilation[i], ceil_mode) for i in (0, 1)]
    beyond = [
        max(0, (out[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - v.shape[i - 2] - padding[i])
        for i in (0, 1)
    ]
    if any(padding) or any(beyond):
        v = F.pad(v, (padding[1], beyond[1], padding[0], beyond[0]), value=fill)
    parts = [
        v[..., i * dilation[0] : i * dilation[0] + (out[0] - 1) * stride[0] + 1 : stride[0],
          j * dilation[1] : j * dilation[1] + (out[1] - 1) * stride[1] + 1 : stride[1]]
        for i in range(kernel[0]) for j in range(kernel[1])
    ]  # fmt: skip
    return torch.stack(parts)


@implements("max_pool2d", F.max_pool2d, torch.max_pool2d, _HIDDEN["_max_pool2d"], note="PrivHFL, 3.3 (iii)", excess=0.0)
def max_pool2d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> SharedTensor:  # fmt: skip
    given = kernel_size, stride, padding, dilation, ceil_mode, return_indices
    if context.scheme.relu != "exact":
        bits = context.scheme.activation_bits + 1  # of a difference
        x = within_leaky_range(context, x, bits)
        windows, _ = _windows_to_compare(context, x, *given, lowest=-(1 << (bits + x.scale_bits - 1)))
        return x.like(context.backend.leaky_largest(windows, bits + x.scale_bits), x.scale_bits, x.bound)
    windows, high = _windows_to_compare(context, x, *given)
    return x.like(context.backend.largest(windows, high), x.scale_bits)


def _windows_to_compare(context: Context, x: SharedTensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
              ceil_mode: bool, return_indices: bool, lowest: int | None = None) -> tuple[Any, int]:  # fmt: skip
    """The windows, [window, ..., oh, ow], and how many bit planes a comparison of two of their values looks at.

    Args:
        lowest: what stands in the padding; by default what no value is below.
    """
    _refuse_indices("max_pool2d", return_indices)
    kernel, padding, dilation = _window_pair(kernel_size), _window_pair(padding), _window_pair(dilation)
    stride = kernel if stride is None or stride == [] else _window_pair(stride)
    high = 63 if any(padding) or ceil_mode else bound(context, x.scale_bits, 1)
    known = planes(x, 2)
    high = min(high, known)
    if lowest is None:
        lowest = _LOWEST if x.bound is None or known == 63 else -math.ceil(x.bound)
    return context.backend.affine(pooling_windows, x.shares, lowest, kernel, stride, padding, dilation, ceil_mode), high


def _window_positions(v: torch.Tensor, step: int, at: torch.Tensor) -> torch.Tensor:
    """Positions [window, oh, ow], times the step, in the shape of the windows v."""
    return (at.to(v.device) * step).view(len(at), *[1] * (v.dim() - 3), *at.shape[1:]).expand(v.shape)


def _largest_at(context: Context, x: SharedTensor, windows: Value, at: torch.Tensor) -> tuple[SharedTensor, ...]:
    """The maxima of windows and their positions, as secret whole numbers; the first among equals."""
    value, place = top_of(context.backend, windows, context.backend.affine(_window_positions, windows, 1, at))
    return x.like(value, x.scale_bits, x.bound), x.like(place, 0, float(max(1, int(at.max()))), dtype=torch.int64)


@implements("max_pool2d_with_indices", F.max_pool2d_with_indices, note="as max_pool2d; positions stay secret")
def max_pool2d_with_indices(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> tuple[SharedTensor, ...]:  # fmt: skip
    windows, _ = _windows_to_compare(context, x, kernel_size, stride, padding, dilation, ceil_mode, False)
    kernel, padding, dilation = _window_pair(kernel_size), _window_pair(padding), _window_pair(dilation)
    stride = kernel if stride is None or stride == [] else _window_pair(stride)
    at = torch.arange(x.shape[-2] * x.shape[-1]).reshape(x.shape[-2:])
    return _largest_at(context, x, windows, pooling_windows(at, 0, kernel, stride, padding, dilation, ceil_mode))


@implements("max_pool1d_with_indices", F.max_pool1d_with_indices, note="as max_pool2d_with_indices")
def max_pool1d_with_indices(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    kernel, padding, dilation = (v if isinstance(v, int) else v[0] for v in (kernel_size, padding, dilation))
    stride = kernel if stride is None or stride == [] else stride if isinstance(stride, int) else stride[0]
    found = max_pool2d_with_indices(
        context, x.unsqueeze(-2), (1, kernel), (1, stride), (0, padding), (1, dilation), ceil_mode
    )
    return tuple(v.squeeze(-2) for v in found)


@implements("adaptive_max_pool2d_with_indices", F.adaptive_max_pool2d_with_indices,
            note="as max_pool2d_with_indices")  # fmt: skip
def adaptive_max_pool2d_with_indices(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> tuple[SharedTensor, ...]:
    out = _adaptive_size(x, output_size)
    rows, columns = (_cells(x.shape[i - 2], out[i]) for i in (0, 1))
    at = torch.arange(x.shape[-2] * x.shape[-1]).reshape(x.shape[-2:])
    cells = [at[a:b, c:d].flatten() for a, b in rows for c, d in columns]
    size = max(map(len, cells))
    at = torch.stack([torch.cat((cell, cell[:1].expand(size - len(cell)))) for cell in cells], -1)
    at = at.reshape(size, len(rows), len(columns))
    windows: Any = x.flatten(-2)[..., at].movedim(-3, 0)
    return _largest_at(context, x, windows.shares, at)


@implements("adaptive_max_pool1d_with_indices", F.adaptive_max_pool1d_with_indices, note="as max_pool2d_with_indices")
def adaptive_max_pool1d_with_indices(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> tuple[torch.Tensor, ...]:
    size = output_size if isinstance(output_size, int) else output_size[0]
    found = adaptive_max_pool2d_with_indices(context, x.unsqueeze(-2), (1, size))
    return tuple(v.squeeze(-2) for v in found)


@implements("max_unpool2d", F.max_unpool2d,
            note="by the indices of max_pool2d; a comparison with each place of a window")  # fmt: skip
@stepwise
def max_unpool2d(context: Context, x: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0,
                 output_size: Any = None) -> torch.Tensor:  # fmt: skip
    """An index outside its window, as of another pooling, ends in a range error."""
    kernel, padding = _window_pair(kernel_size), _window_pair(padding)
    stride = kernel if stride is None or stride == [] else _window_pair(stride)
    high, wide = _HIDDEN["_unpool_output_size"](
        torch.empty(x.shape, device="meta"), kernel, stride, padding, output_size
    )
    if not is_secret(indices):
        empty = torch.zeros((*x.shape[:-2], high * wide), dtype=x.dtype)
        return torch.scatter(empty, -1, indices.flatten(-2), x.flatten(-2)).unflatten(-1, (high, wide))
    if any(s < k for s, k in zip(stride, kernel, strict=True)):
        refuse("max_unpool2d of windows that overlap", "it takes a stride of at least the kernel's size")
    tall = torch.arange(x.shape[-2]) * stride[0] - padding[0] + torch.arange(kernel[0]).unsqueeze(-1)
    broad = torch.arange(x.shape[-1]) * stride[1] - padding[1] + torch.arange(kernel[1]).unsqueeze(-1)
    inside = ((tall >= 0) & (tall < high))[:, None, :, None] & ((broad >= 0) & (broad < wide))[None, :, None, :]
    at = torch.where(inside, tall[:, None, :, None] * wide + broad[None, :, None, :], -1).flatten(0, 1)
    chosen = indices.unsqueeze(-3) == at
    require(context, chosen.sum(-3), low=1)
    spread = (chosen * x.unsqueeze(-3)).flatten(-3)
    # For each place of the result the value that goes there, or the zero behind all values. Entry -1 takes what is
    # outside.
    sources = torch.full((high * wide + 1,), spread.shape[-1])
    sources[at.flatten()] = torch.arange(at.numel())
    return F.pad(spread, (0, 1))[..., sources[:-1]].unflatten(-1, (high, wide))


def _lp_pool(pool: Callable, dims: int) -> Callable:
    def composed(x: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> torch.Tensor:
        kernel = (kernel_size,) * dims if isinstance(kernel_size, int) else tuple(kernel_size)
        means = pool(x**norm_type, kernel_size, stride, 0, ceil_mode)
        return (means * math.prod(kernel)) ** (1 / norm_type)

    return composed


for _dims, _lp, _average_pool in (
    (1, F.lp_pool1d, F.avg_pool1d), (2, F.lp_pool2d, F.avg_pool2d), (3, F.lp_pool3d, F.avg_pool3d),
):  # fmt: skip
    COMPOSED[_lp] = _lp_pool(_average_pool, _dims)


def waits_for_relu(x: Any = None, *_: Any, **__: Any) -> bool:
    """Whether a max-pooling of x is left to the ReLU after it: in networks of high latency, if the ReLU truncates."""
    if type(x) is not SharedTensor or not x.scheme.few_rounds:
        return False
    return x.scheme.relu == "exact" and x.scale_bits > x.scheme.frac_bits


def relu_of_max_pool2d(
    input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: Any = False,
) -> torch.Tensor:  # fmt: skip
    """relu(max_pool2d(input, ...)) in one step, for networks of high latency (`nn/graph.py`)."""
    given = kernel_size, stride, padding, dilation, ceil_mode, return_indices
    if has_torch_function_unary(input):
        return handle_torch_function(relu_of_max_pool2d, (input,), input, *given)
    return F.relu(F.max_pool2d(input, *given))


@SHARES.implements_unlisted("relu", relu_of_max_pool2d)
def _relu_of_max_pool2d(context: Context, x: SharedTensor, *given: Any) -> SharedTensor:
    windows, high = _windows_to_compare(context, x, *given)
    shift = excess_bits(context, x.scale_bits)
    scale = x.scale_bits - shift
    limit = limit_bits(context, x, scale)
    shares = context.backend.ramp_of_largest(windows, shift, high, bound(context, x.scale_bits), limit)
    return x.like(shares, scale, dropped_bits_bound(context, x, shift))


@implements("max_pool1d", F.max_pool1d, torch.max_pool1d, _HIDDEN["_max_pool1d"],
            note="as max_pool2d with height one", excess=0.0)  # fmt: skip
def max_pool1d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> torch.Tensor:  # fmt: skip
    kernel, padding, dilation = (v if isinstance(v, int) else v[0] for v in (kernel_size, padding, dilation))
    stride = kernel if stride is None else stride if isinstance(stride, int) else stride[0]
    y = max_pool2d(
        context, x.unsqueeze(-2), (1, kernel), (1, stride), (0, padding), (1, dilation), ceil_mode, return_indices
    )
    return y.squeeze(-2)


def _average(context: Context, x: SharedTensor, sums: Callable, counts: torch.Tensor | int, terms: int) -> SharedTensor:
    """Sums of windows of at most `terms` elements, divided by public counts."""
    total = local_map(context, sums, x, terms=terms)
    if isinstance(counts, torch.Tensor) and bool((counts == counts.flatten()[0]).all()):
        counts = int(counts.flatten()[0])
    if isinstance(counts, int):
        return times_number(context, total, 1.0 / counts)
    return bilinear(context, torch.mul, total, 1.0 / counts.to(torch.float64))


@implements("avg_pool2d", F.avg_pool2d, note="local; a divisor that is a power of two costs nothing", excess=0.0)
def avg_pool2d(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> SharedTensor:  # fmt: skip
    kernel, padding = _window_pair(kernel_size), _window_pair(padding)
    stride = kernel if stride is None or stride == [] else _window_pair(stride)

    sums = partial(_sums_of_windows, kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode)
    if divisor_override:
        counts = divisor_override
    elif not (any(padding) or ceil_mode):
        counts = kernel[0] * kernel[1]
    else:
        inside = torch.ones(x.shape[-2:], dtype=torch.int64)
        if count_include_pad:
            inside = F.pad(inside, (padding[1], padding[1], padding[0], padding[0]), value=1)
            counts = pooling_windows(inside, 0, kernel, stride, (0, 0), (1, 1), ceil_mode)
            out = sums(torch.ones(x.shape[-2:], dtype=torch.int64)).shape
            counts = counts.sum(0)[: out[0], : out[1]]
        else:
            counts = sums(inside)
    return _average(context, x, sums, counts, kernel[0] * kernel[1])


def _sums_of_windows(v: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, ceil_mode: bool) -> torch.Tensor:
    return pooling_windows(v, 0, kernel, stride, padding, (1, 1), ceil_mode).sum(0)


@implements("avg_pool1d", F.avg_pool1d, torch.avg_pool1d, note="local", excess=0.0)
def avg_pool1d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               ceil_mode: bool = False, count_include_pad: bool = True) -> torch.Tensor:  # fmt: skip
    kernel, padding = (v if isinstance(v, int) else v[0] for v in (kernel_size, padding))
    stride = kernel if stride is None else stride if isinstance(stride, int) else stride[0]
    y = F.avg_pool2d(x.unsqueeze(-2), (1, kernel), (1, stride), (0, padding), ceil_mode, count_include_pad)
    return y.squeeze(-2)


def _cells(size: int, out: int) -> list[tuple[int, int]]:
    """The input range of each output cell of an adaptive pooling."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _adaptive_size(x: SharedTensor, output_size: Any) -> tuple[int, int]:
    if output_size is None or isinstance(output_size, int):
        output_size = (output_size, output_size)
    high, wide = output_size
    if 0 in (high, wide):
        refuse("adaptive pooling with 0 in output_size", "leave it out: the result is empty")
    return x.shape[-2] if high is None else high, x.shape[-1] if wide is None else wide


@implements("adaptive_avg_pool2d", F.adaptive_avg_pool2d, note="local", excess=0.0)
def adaptive_avg_pool2d(context: Context, x: SharedTensor, output_size: Any) -> SharedTensor:
    out = _adaptive_size(x, output_size)
    rows, columns = _cells(x.shape[-2], out[0]), _cells(x.shape[-1], out[1])
    counts = torch.tensor([[(b - a) * (d - c) for c, d in columns] for a, b in rows])
    return _average(context, x, partial(_sums_of_cells, rows=rows, columns=columns), counts, int(counts.max()))


def _sums_of_cells(v: torch.Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> torch.Tensor:
    tall = torch.stack([v[..., a:b, :].sum(-2) for a, b in rows], dim=-2)
    return torch.stack([tall[..., a:b].sum(-1) for a, b in columns], dim=-1)


@implements("adaptive_avg_pool1d", F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d, note="local", excess=0.0)
def adaptive_avg_pool1d(context: Context, x: SharedTensor, output_size: Any) -> torch.Tensor:
    size = output_size if isinstance(output_size, int) else output_size[0]
    return F.adaptive_avg_pool2d(x.unsqueeze(-2), (1, size)).squeeze(-2)


@implements("adaptive_max_pool2d", F.adaptive_max_pool2d, _HIDDEN["_adaptive_max_pool2d"],
            note="PrivHFL, 3.3 (iii)", excess=0.0)  # fmt: skip
def adaptive_max_pool2d(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    _refuse_indices("adaptive_max_pool2d", return_indices)
    out = _adaptive_size(x, output_size)
    cells = [_cells(x.shape[i - 2], out[i]) for i in (0, 1)]
    if all(len({b - a for a, b in cell}) == 1 and cell[-1][1] % len(cell) == 0 for cell in cells):
        return F.max_pool2d(x, tuple(cell[0][1] for cell in cells))
    top = lambda v: F.max_pool2d(v, tuple(v.shape[-2:]))[..., 0, 0]
    rows = [torch.stack([top(x[..., a:b, c:d]) for c, d in cells[1]], dim=-1) for a, b in cells[0]]
    return torch.stack(rows, dim=-2)


# Transposed convolutions and interpolation: linear maps with a public shape.


def _sum_per_channel(w: torch.Tensor) -> torch.Tensor:
    """`Sums` of a transposed convolution's weight; an upper bound, since zeros stand between the elements."""
    return w.sum((0, 2, 3))


def _transposed_product(stride: tuple, padding: tuple, output_padding: tuple, dilation: tuple, groups: int):
    """x [b, c_in, h, w], weight [c_in, c_out/groups, kh, kw] -> the transposed convolution, mod 2^64.

    It is an ordinary convolution of the input with zeros put between its elements and the flipped, transposed kernel.
    """

    def product(x: torch.Tensor, w: torch.Tensor, *_: Any) -> torch.Tensor:
        b, c, h, width = x.shape
        kh, kw = w.shape[2:]
        apart = x.new_zeros(b, c, (h - 1) * stride[0] + 1, (width - 1) * stride[1] + 1)
        apart[:, :, :: stride[0], :: stride[1]] = x
        sides = [(dilation[i] * (k - 1) - padding[i]) for i, k in enumerate((kh, kw))]
        apart = F.pad(apart, (sides[1], sides[1] + output_padding[1], sides[0], sides[0] + output_padding[0]))
        kernel = w.flip(2, 3).view(groups, c // groups, -1, kh, kw).transpose(1, 2).reshape(-1, c // groups, kh, kw)
        return products.Conv2d((1, 1), (0, 0), dilation, groups)(apart, kernel.contiguous())

    return product


@implements("conv_transpose2d", torch.conv_transpose2d, F.conv_transpose2d, note="PrivHFL, Figure 3")
def conv_transpose2d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> torch.Tensor:  # fmt: skip
    not_negative(padding, output_padding)
    if x.dim() == 3:
        y = torch.conv_transpose2d(x.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation)
        return y.squeeze(0)
    if x.shape[1] != weight.shape[0]:
        raise ShapeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input{list(x.shape)} to have "
            f"{weight.shape[0]} channels, but got {x.shape[1]} channels instead"
        )
    product = _transposed_product(as_pair(stride), as_pair(padding), as_pair(output_padding), as_pair(dilation), groups)
    return add_bias(
        context,
        x,
        bilinear(
            context, product, x, weight, weight.shape[0] * math.prod(weight.shape[2:]), (sum_of_all, _sum_per_channel)
        ),
        None if bias is None else bias.view(-1, 1, 1),
    )


@implements("conv_transpose1d", torch.conv_transpose1d, F.conv_transpose1d, note="as conv_transpose2d")
def conv_transpose1d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> torch.Tensor:  # fmt: skip
    given = stride, padding, output_padding, dilation
    if any(isinstance(v, (tuple, list)) and len(v) != 1 for v in given):
        raise ShapeError(f"stride, padding, output_padding and dilation are one number each, got {given}")
    one = [as_pair(v)[0] for v in given]
    y = torch.conv_transpose2d(
        x.unsqueeze(-2), weight.unsqueeze(-2), bias, (1, one[0]), (0, one[1]), (0, one[2]), groups, (1, one[3])
    )
    return y.squeeze(-2)


@implements("interpolate", F.interpolate, F.upsample, F.upsample_nearest, F.upsample_bilinear, note="local")
def interpolate(
    context: Context, x: SharedTensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: Any = None, antialias: bool = False,
) -> SharedTensor:  # fmt: skip
    """Every mode acts on one dimension after the other, by a public matrix that torch itself gives."""
    if isinstance(scale_factor, torch.Tensor):
        refuse("interpolate by a tensor", "give scale_factor as a number")
    if mode == "area":
        refuse("interpolate with mode=area", "use adaptive_avg_pool")
    maps = interpolations(x.shape[2:], size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    for d, matrix in enumerate(maps, 2):
        if bool(((matrix == 0) | (matrix == 1)).all()):
            index = matrix.argmax(0)
            index = index.to(context.session.device)
            shares = context.backend.each(torch.index_select, x.shares, d, index)
            x = x.like(shares, bound=x.bound)
        else:
            moved = with_dtype(as_factor(context, x), torch.float32).movedim(d, -1)
            x = summand(context, torch.matmul(moved, matrix.to(moved.dtype)).movedim(-1, d))
    return x


def interpolations(
    shape: Any, size: Any, scale_factor: Any, mode: str, align_corners: bool | None, recompute: Any, antialias: bool
) -> list[torch.Tensor]:
    """For each dimension the matrix [n, m] that F.interpolate multiplies by, in float64."""
    count = len(shape)
    sizes = [size] * count if isinstance(size, int) else size
    factors = [scale_factor] * count if isinstance(scale_factor, (int, float)) else scale_factor
    one = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    corners = align_corners if "linear" in one or "cubic" in one else None
    found = []
    for d, n in enumerate(shape):
        eye = torch.eye(n, dtype=torch.float64).unsqueeze(0)
        wanted: dict[str, Any] = dict(size=sizes[d]) if sizes is not None else dict(scale_factor=factors[d])
        two = antialias or one in ("bicubic", "lanczos")  # torch has these for images only
        if two:
            eye = eye.unsqueeze(2)
            wanted = dict(size=(1, sizes[d])) if sizes is not None else dict(scale_factor=(1.0, factors[d]))
        wanted.update(recompute_scale_factor=recompute, align_corners=corners, antialias=antialias)
        found.append(F.interpolate(eye, mode=mode if two else one, **wanted).reshape(n, -1))
    return found


@implements("unfold_patches", F.unfold, note="local", excess=0.0)
def unfold(
    context: Context, x: SharedTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> SharedTensor:
    not_negative(padding)
    return local_map(context, _patches, x, as_pair(kernel_size), as_pair(stride), as_pair(padding), as_pair(dilation))


@implements("fold", F.fold, note="local; sums of at most kernel size entries")
def fold(
    context: Context, x: SharedTensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0,
    stride: Any = 1,
) -> torch.Tensor:  # fmt: skip
    """Each entry of a patch is added at its position in the image (Chellapilla et al. 2006, reversed)."""
    not_negative(padding)
    kernel, (up, left), size = as_pair(kernel_size), as_pair(padding), as_pair(output_size)
    whole = size[0] + 2 * up, size[1] + 2 * left
    numbers = torch.arange(whole[0] * whole[1], dtype=torch.float64).reshape(1, 1, *whole)
    places = F.unfold(numbers, kernel, as_pair(dilation), 0, as_pair(stride)).long()[0]
    batch = x if x.dim() == 3 else x.unsqueeze(0)
    channels, over = divmod(batch.shape[1], kernel[0] * kernel[1])
    if over or batch.shape[2] != places.shape[1]:
        raise ShapeError(
            f"fold of {kernel} into {size} takes a multiple of {kernel[0] * kernel[1]} channels and {places.shape[1]} "
            f"patches, got {list(batch.shape[1:])}"
        )
    entries = batch.reshape(len(batch), channels, -1)
    start = torch.zeros(len(batch), channels, whole[0] * whole[1], dtype=x.dtype)
    image = torch.index_add(start, 2, places.flatten(), entries).reshape(len(batch), channels, *whole)
    image = image[:, :, up : up + size[0], left : left + size[1]]
    return image if x.dim() == 3 else image.squeeze(0)


def _patches(v: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, dilation: tuple) -> torch.Tensor:
    batch = v if v.dim() == 4 else v.unsqueeze(0)
    windows = products.windows_of(batch, kernel, stride, padding, dilation)
    out = windows.reshape(windows.shape[0], -1, windows.shape[4] * windows.shape[5])
    return out if v.dim() == 4 else out.squeeze(0)


# Convolutions and poolings of three dimensions, by those of two; embedding bags; samples at public points.


def _as_triple(value: Any) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, value, value
    value = tuple(value)
    return value * 3 if len(value) == 1 else value  # pyright: ignore[reportReturnType]


@implements("conv3d", torch.conv3d, F.conv3d, note="as conv2d, with the depth of the kernel among the channels")
def conv3d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> torch.Tensor:  # fmt: skip
    require_one_dimension(bias)
    if x.dim() == 4:
        return torch.conv3d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    stride, dilation, kernel = _as_triple(stride), _as_triple(dilation), weight.shape[2:]
    if min(*stride, *dilation) < 1:
        raise ShapeError(f"stride and dilation are 1 or more, got {stride} and {dilation}")
    if isinstance(padding, str):
        both = [0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        widths = [side for b in reversed(both) for side in (b // 2, b - b // 2)]
    else:
        padding = _as_triple(padding)
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


def _with_zeros_between(x: Any, stride: tuple[int, int, int]) -> Any:
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
    stride, padding, more, dilation = (_as_triple(v) for v in (stride, padding, output_padding, dilation))
    if min(*padding, *more) < 0 or min(*stride, *dilation) < 1:
        raise ShapeError(f"negative padding, or a stride of 0: {padding}, {more}, {stride}, {dilation}")
    if x.shape[1] != weight.shape[0]:
        raise ShapeError(f"expected {weight.shape[0]} channels for weights of {list(weight.shape)}, got {x.shape[1]}")
    kernel = tuple(weight.shape[2:])
    sides = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    widths = [side for s, m in zip(reversed(sides), reversed(more), strict=True) for side in (s, s + m)]
    flipped = weight.flip(2, 3, 4).reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel)
    flipped = flipped.transpose(1, 2).reshape(-1, weight.shape[0] // groups, *kernel)
    return torch.conv3d(F.pad(_with_zeros_between(x, stride), widths), flipped, bias, 1, 0, dilation, groups)


def _pool_planes_then_depth(x: torch.Tensor, planes: Callable, depth: Callable) -> torch.Tensor:
    """x [..., d, h, w], pooled over its planes, and the result over the depth."""
    y = x.reshape(1, -1, *x.shape[-2:])
    y = planes(y)
    y = y.reshape(1, -1, x.shape[-3], math.prod(y.shape[-2:])), y.shape[-2:]
    z = depth(y[0])
    return z.reshape(*x.shape[:-3], z.shape[-2], *y[1])


@implements("max_pool3d", F.max_pool3d, torch.max_pool3d, _HIDDEN["_max_pool3d"], note="as max_pool2d, twice")
def max_pool3d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> torch.Tensor:  # fmt: skip
    _refuse_indices("max_pool3d", return_indices)
    k, p, d = _as_triple(kernel_size), _as_triple(padding), _as_triple(dilation)
    s = k if stride is None or stride == [] else _as_triple(stride)
    return _pool_planes_then_depth(
        x,
        lambda v: F.max_pool2d(v, k[1:], s[1:], p[1:], d[1:], ceil_mode),
        lambda v: F.max_pool2d(v, (k[0], 1), (s[0], 1), (p[0], 0), (d[0], 1), ceil_mode),
    )


@implements("avg_pool3d", F.avg_pool3d, note="as avg_pool2d, twice")
def avg_pool3d(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> torch.Tensor:  # fmt: skip
    k, p = _as_triple(kernel_size), _as_triple(padding)
    s = k if stride is None or stride == [] else _as_triple(stride)
    one = 1 if divisor_override else None
    return _pool_planes_then_depth(
        x,
        lambda v: F.avg_pool2d(v, k[1:], s[1:], p[1:], ceil_mode, count_include_pad, one),
        lambda v: F.avg_pool2d(v, (k[0], 1), (s[0], 1), (p[0], 0), ceil_mode, count_include_pad, divisor_override),
    )


def _output_sizes(x: torch.Tensor, output_size: Any) -> list[int]:
    given = [output_size] * 3 if output_size is None or isinstance(output_size, int) else list(output_size)
    return [x.shape[d - 3] if n is None else n for d, n in enumerate(given)]


@implements("adaptive_avg_pool3d", F.adaptive_avg_pool3d, note="as adaptive_avg_pool2d, twice")
def adaptive_avg_pool3d(context: Context, x: SharedTensor, output_size: Any) -> torch.Tensor:
    d, h, w = _output_sizes(x, output_size)
    planes = lambda v: F.adaptive_avg_pool2d(v, (h, w))
    return _pool_planes_then_depth(x, planes, lambda v: F.adaptive_avg_pool2d(v, (d, v.shape[-1])))


def _refuse_indices(name: str, return_indices: bool) -> None:
    if return_indices:
        refuse(f"{name} with indices", "call it without return_indices")


@implements("adaptive_max_pool3d", F.adaptive_max_pool3d, _HIDDEN["_adaptive_max_pool3d"],
            note="as adaptive_max_pool2d, twice")  # fmt: skip
def adaptive_max_pool3d(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    _refuse_indices("adaptive_max_pool3d", return_indices)
    d, h, w = _output_sizes(x, output_size)
    planes = lambda v: F.adaptive_max_pool2d(v, (h, w))
    return _pool_planes_then_depth(x, planes, lambda v: F.adaptive_max_pool2d(v, (d, v.shape[-1])))


@implements("adaptive_max_pool1d", F.adaptive_max_pool1d, _HIDDEN["_adaptive_max_pool1d"],
            note="as adaptive_max_pool2d with height one")  # fmt: skip
def adaptive_max_pool1d(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    _refuse_indices("adaptive_max_pool1d", return_indices)
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
        return _reduce_bag(rows, mode)
    starts = offsets.tolist() if include_last_offset else [*offsets.tolist(), index.shape[0]]
    if any(a >= b for a, b in itertools.pairwise(starts)) or starts[-1] != index.shape[0]:
        refuse("empty bags, or indices in no bag", "leave them out")
    return torch.stack([_reduce_bag(rows[a:b], mode) for a, b in itertools.pairwise(starts)])


def _reduce_bag(rows: torch.Tensor, mode: str) -> torch.Tensor:
    return rows.sum(-2) if mode == "sum" else rows.mean(-2) if mode == "mean" else rows.amax(-2)


def _sample(x: torch.Tensor, grid: Any, sample: Callable) -> torch.Tensor:
    """x [b, c, ...] at the points of a public grid. Each result is a weighted sum; torch itself gives the weights."""
    if is_secret(grid):
        refuse("grid_sample at secret points", "give a public grid")
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
    return _sample(x, grid, lambda v, g: F.grid_sample(v, g, mode, padding_mode, align_corners))


@implements("grid_sample", torch.grid_sampler, torch.grid_sampler_2d)
def grid_sampler(
    context: Context, x: SharedTensor, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    return _sample(x, grid, lambda v, g: torch.grid_sampler(v, g, interpolation_mode, padding_mode, align_corners))
