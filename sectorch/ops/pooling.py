"""Pooling: averages are local, maxima a tree of comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..backend import Value
from ..tensor import SharedTensor
from ..tensor.table import COMPOSED, SHARES, Context, implements, stepwise
from .bilinear import bilinear, scaled
from .common import bound, excess, is_secret, local, refuse, require
from .order import top_of
from .ranges import dropped, limit_bits, planes

T = torch.Tensor
_HIDDEN = vars(F)
"""Of functions that torch's stubs do not have."""
_LOWEST = -(1 << 62)
"""What stands for minus infinity in the padding of a maximum: no protocol takes a value below it."""


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _out(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Output length of a pooling, as torch has it: a window must start inside the input or its left padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


def _windows(v: torch.Tensor, fill: int, kernel, stride, padding, dilation, ceil_mode: bool) -> torch.Tensor:
    """[..., h, w] -> [kh * kw, ..., oh, ow]."""
    out = [_out(v.shape[i - 2], kernel[i], stride[i], padding[i], dilation[i], ceil_mode) for i in (0, 1)]
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


@implements("max_pool2d", F.max_pool2d, torch.max_pool2d, _HIDDEN["_max_pool2d"], note="PrivHFL, 3.3 (iii)")
def max_pool2d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> SharedTensor:  # fmt: skip
    windows, high = _compared(context, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return x.like(context.backend.largest(windows, high), x.scale_bits)


def _compared(context: Context, x: SharedTensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
              ceil_mode: bool, return_indices: bool) -> tuple[Any, int]:  # fmt: skip
    """[window, ..., oh, ow], and the planes in which two values of a window differ."""
    if return_indices:
        refuse("max_pool2d with indices", "call it without return_indices")
    kernel, padding, dilation = _pair(kernel_size), _pair(padding), _pair(dilation)
    stride = kernel if stride is None or stride == [] else _pair(stride)
    high = 63 if any(padding) or ceil_mode else bound(context, x.scale_bits, 1)
    known = planes(x, 2)
    high, lowest = min(high, known), _LOWEST if x.bound is None or known == 63 else -math.ceil(x.bound)
    return context.backend.affine(_windows, x.shares, lowest, kernel, stride, padding, dilation, ceil_mode), high


def _places_of_windows(v: torch.Tensor, step: int, at: torch.Tensor) -> torch.Tensor:
    """[window, oh, ow], times the step, beside each window of v."""
    return (at.to(v.device) * step).view(len(at), *[1] * (v.dim() - 3), *at.shape[1:]).expand(v.shape)


def _largest_at(context: Context, x: SharedTensor, windows: Value, at: torch.Tensor) -> tuple[SharedTensor, ...]:
    """The maxima of windows and where they stand, as secret whole numbers; among equals the first."""
    value, place = top_of(context.backend, windows, context.backend.affine(_places_of_windows, windows, 1, at))
    return x.like(value, x.scale_bits, x.bound), x.like(place, 0, float(max(1, int(at.max()))), dtype=torch.int64)


@implements("max_pool2d_with_indices", F.max_pool2d_with_indices, note="as max_pool2d; positions stay secret")
def max_pool2d_with_indices(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> tuple[SharedTensor, ...]:  # fmt: skip
    windows, _ = _compared(context, x, kernel_size, stride, padding, dilation, ceil_mode, False)
    kernel, padding, dilation = _pair(kernel_size), _pair(padding), _pair(dilation)
    stride = kernel if stride is None or stride == [] else _pair(stride)
    at = torch.arange(x.shape[-2] * x.shape[-1]).reshape(x.shape[-2:])
    return _largest_at(context, x, windows, _windows(at, 0, kernel, stride, padding, dilation, ceil_mode))


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


@implements(
    "max_unpool2d", F.max_unpool2d, note="by the indices of max_pool2d; a comparison with each place of a window"
)
@stepwise
def max_unpool2d(context: Context, x: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0,
                 output_size: Any = None) -> torch.Tensor:  # fmt: skip
    """An index that is not in its window, as one of another pooling, ends in a range error."""
    kernel, padding = _pair(kernel_size), _pair(padding)
    stride = kernel if stride is None or stride == [] else _pair(stride)
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


def joins(x: Any = None, *_: Any, **__: Any) -> bool:
    """Whether a max-pooling of x waits for its ReLU: where rounds are dear, and that truncates and shows nothing."""
    if type(x) is not SharedTensor or not x.scheme.few_rounds:
        return False
    return x.scheme.relu == "exact" and x.scale_bits > x.scheme.frac_bits


def relu_of_max_pool2d(
    input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: Any = False,
) -> torch.Tensor:  # fmt: skip
    """relu(max_pool2d(input, ...)): what a program computes in one step where rounds are dear (`nn/trace.py`)."""
    given = kernel_size, stride, padding, dilation, ceil_mode, return_indices
    if has_torch_function_unary(input):
        return handle_torch_function(relu_of_max_pool2d, (input,), input, *given)
    return F.relu(F.max_pool2d(input, *given))


@SHARES.joined("relu", relu_of_max_pool2d)
def _relu_of_max_pool2d(context: Context, x: SharedTensor, *given: Any) -> SharedTensor:
    windows, high = _compared(context, x, *given)
    shift = excess(context, x.scale_bits)
    scale = x.scale_bits - shift
    limit = limit_bits(context, x, scale)
    shares = context.backend.ramp_of_largest(windows, shift, high, bound(context, x.scale_bits), limit)
    return x.like(shares, scale, dropped(context, x, shift))


@implements("max_pool1d", F.max_pool1d, torch.max_pool1d, _HIDDEN["_max_pool1d"], note="as max_pool2d with height one")
def max_pool1d(context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
               dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> torch.Tensor:  # fmt: skip
    kernel, padding, dilation = (v if isinstance(v, int) else v[0] for v in (kernel_size, padding, dilation))
    stride = kernel if stride is None else stride if isinstance(stride, int) else stride[0]
    y = max_pool2d(
        context, x.unsqueeze(-2), (1, kernel), (1, stride), (0, padding), (1, dilation), ceil_mode, return_indices
    )
    return y.squeeze(-2)


def _average(context: Context, x: SharedTensor, sums: Callable, counts: torch.Tensor | int, terms: int) -> SharedTensor:
    """Sums of at most so many elements in windows, over public counts."""
    total = local(context, sums, x, terms=terms)
    if isinstance(counts, torch.Tensor) and bool((counts == counts.flatten()[0]).all()):
        counts = int(counts.flatten()[0])
    if isinstance(counts, int):
        return scaled(context, total, 1.0 / counts)
    return bilinear(context, torch.mul, total, 1.0 / counts.to(torch.float64))


@implements("avg_pool2d", F.avg_pool2d, note="local; a divisor that is a power of two costs nothing")
def avg_pool2d(
    context: Context, x: SharedTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> SharedTensor:  # fmt: skip
    kernel, padding = _pair(kernel_size), _pair(padding)
    stride = kernel if stride is None or stride == [] else _pair(stride)

    sums = partial(_sums_of_windows, kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode)
    if divisor_override:
        counts = divisor_override
    elif not (any(padding) or ceil_mode):
        counts = kernel[0] * kernel[1]
    else:
        inside = torch.ones(x.shape[-2:], dtype=torch.int64)
        if count_include_pad:
            inside = F.pad(inside, (padding[1], padding[1], padding[0], padding[0]), value=1)
            counts = _windows(inside, 0, kernel, stride, (0, 0), (1, 1), ceil_mode)
            out = sums(torch.ones(x.shape[-2:], dtype=torch.int64)).shape
            counts = counts.sum(0)[: out[0], : out[1]]
        else:
            counts = sums(inside)
    return _average(context, x, sums, counts, kernel[0] * kernel[1])


def _sums_of_windows(v: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, ceil_mode: bool) -> torch.Tensor:
    return _windows(v, 0, kernel, stride, padding, (1, 1), ceil_mode).sum(0)


@implements("avg_pool1d", F.avg_pool1d, torch.avg_pool1d, note="local")
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


@implements("adaptive_avg_pool2d", F.adaptive_avg_pool2d, note="local")
def adaptive_avg_pool2d(context: Context, x: SharedTensor, output_size: Any) -> SharedTensor:
    out = _adaptive_size(x, output_size)
    rows, columns = _cells(x.shape[-2], out[0]), _cells(x.shape[-1], out[1])
    counts = torch.tensor([[(b - a) * (d - c) for c, d in columns] for a, b in rows])
    return _average(context, x, partial(_sums_of_cells, rows=rows, columns=columns), counts, int(counts.max()))


def _sums_of_cells(v: torch.Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> torch.Tensor:
    tall = torch.stack([v[..., a:b, :].sum(-2) for a, b in rows], dim=-2)
    return torch.stack([tall[..., a:b].sum(-1) for a, b in columns], dim=-1)


@implements("adaptive_avg_pool1d", F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d, note="local")
def adaptive_avg_pool1d(context: Context, x: SharedTensor, output_size: Any) -> torch.Tensor:
    size = output_size if isinstance(output_size, int) else output_size[0]
    return F.adaptive_avg_pool2d(x.unsqueeze(-2), (1, size)).squeeze(-2)


@implements("adaptive_max_pool2d", F.adaptive_max_pool2d, _HIDDEN["_adaptive_max_pool2d"], note="PrivHFL, 3.3 (iii)")
def adaptive_max_pool2d(
    context: Context, x: SharedTensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    if return_indices:
        refuse("adaptive_max_pool2d with indices", "call it without return_indices")
    out = _adaptive_size(x, output_size)
    cells = [_cells(x.shape[i - 2], out[i]) for i in (0, 1)]
    if all(len({b - a for a, b in cell}) == 1 and cell[-1][1] % len(cell) == 0 for cell in cells):
        return F.max_pool2d(x, tuple(cell[0][1] for cell in cells))
    top = lambda v: F.max_pool2d(v, tuple(v.shape[-2:]))[..., 0, 0]
    rows = [torch.stack([top(x[..., a:b, c:d]) for c, d in cells[1]], dim=-1) for a, b in cells[0]]
    return torch.stack(rows, dim=-2)
