"""Poolings and interpolation, forward and backward."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from ..ops.common import settled
from ..ops.pooling import _windows as cut
from ..ops.ranges import CAPACITY, fitted, limit_at
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context
from .cells import Cell, Made
from .elementwise import kept_bits
from .functions import F, aten, torch
from .operations import GRADIENTS
from .scale import as_gradient, no_larger, operand, times

row = GRADIENTS.implements


def _pair(v: Any) -> tuple[int, int]:
    return (v, v) if isinstance(v, int) else (v[0], v[-1])


def _windows_of(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> tuple:
    kernel = _pair(kernel)
    return kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation), ceil_mode


@row("max_pool2d", aten.max_pool2d_with_indices.default, note="which entry is the largest stays secret")
def max_pool2d(
    context: Context, x: Cell, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple:  # fmt: skip
    """The largest, and in the place of its index a secret code: of equal ones the first, as torch has it."""
    how, value = _windows_of(kernel, stride, padding, dilation, ceil_mode), operand(context, x)
    padded = any(how[2]) or ceil_mode
    lowest = 1 + math.ceil(limit_at(context, value.scale_bits) if value.bound is None else value.bound)
    shares = value.backend.affine(cut, value.shares, -lowest if padded else 0, *how)
    windows = value.like(shares, bound=None if value.bound is None else float(lowest))
    best, code = _first_largest(context, windows)
    best = best.bounded(value.bound)
    places = torch.arange(windows.shape[0]).view(-1, *(1,) * best.dim())
    index = torch.sum(code * places, 0)
    return best, Made(index, code=code)


def _placed(kernel: Any, stride: Any, padding: Any, dilation: Any, shape: Any, v: Tensor) -> Tensor:
    """The transpose of cutting windows out."""
    out = v.shape[-2:]
    span = [(out[i] - 1) * stride[i] + 1 for i in (0, 1)]
    full = [max(shape[i - 2] + 2 * padding[i], span[i] + (kernel[i] - 1) * dilation[i]) for i in (0, 1)]
    image = v.new_zeros((*shape[:-2], *full))
    for k in range(v.shape[0]):
        top, left = (n * d for n, d in zip(divmod(k, kernel[1]), dilation, strict=True))
        image[..., top : top + span[0] : stride[0], left : left + span[1] : stride[1]] += v[k]
    return image[..., padding[0] : padding[0] + shape[-2], padding[1] : padding[1] + shape[-1]]


def _first_largest(context: Context, windows: SharedTensor) -> tuple[SharedTensor, SharedTensor]:
    """The maximum along the first dimension, and the one-hot code of the first place that holds it: a tournament."""
    values, code = windows, None
    count = windows.shape[0]
    while count > 1:
        pairs = count // 2
        first, second = values[: 2 * pairs : 2], values[1 : 2 * pairs : 2]
        wins = torch.ge(first, second)
        best = no_larger(second + torch.mul(first - second, wins), values)
        win = wins.long()
        if code is None:
            codes = torch.stack((win, 1 - win), 1)  # [pairs, 2, ...]
        else:
            left, right = code[: 2 * pairs : 2], code[1 : 2 * pairs : 2]
            win, left, right = win.unsqueeze(1), left[:, :-1], right[:, :-1]  # the last is what is missing of the sum
            one, other = torch.mul(left, win), right - torch.mul(right, win)
            last = win - one.sum(1, keepdim=True), 1 - win - other.sum(1, keepdim=True)
            codes = torch.cat((one, last[0], other, last[1]), 1).bounded(1.0)
        if count % 2:
            best = torch.cat((best, values[-1:]))
            width = codes.shape[1]
            last = codes[:1, :1] * 0 + 1 if code is None else code[-1:]
            if last.shape[1] < width:
                last = torch.cat((last, codes[:1, : width - last.shape[1]] * 0), 1)
            codes = torch.cat((codes, last))
        values, code, count = best, codes, values.shape[0] // 2 + count % 2
    code = torch.ge(windows[:1], windows[:1]).long().unsqueeze(0) if code is None else code
    return values[0], code[0, : windows.shape[0]]


@row("max_pool2d", aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    context: Context, g: Cell, x: Cell, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Cell,
) -> SharedTensor:  # fmt: skip
    how = _windows_of(kernel, stride, padding, dilation, ceil_mode)[:4]
    value = as_gradient(context, g.content)
    parts = no_larger(torch.mul(indices.kept["code"], value.unsqueeze(0)), value)
    meets = math.prod(math.ceil(((k - 1) * d + 1) / s) for k, s, d in zip(how[0], how[1], how[3], strict=True))
    placed = parts.backend.each(partial(_placed, *how, tuple(x.content.shape)), parts.shares)
    return parts.like(placed, bound=None if parts.bound is None else parts.bound * meets)


@row("avg_pool2d", aten.avg_pool2d.default, note="local")
def avg_pool2d(
    context: Context, x: Cell, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> SharedTensor:  # fmt: skip
    kernel, stride, padding = _windows_of(kernel, stride, padding, 1, ceil_mode)[:3]
    return F.avg_pool2d(x.content, kernel, stride, padding, ceil_mode, count_include_pad, divisor)


def _along(context: Context, x: SharedTensor, dim: int, matrix: Tensor) -> SharedTensor:
    """x times a public matrix [n, m] along a dimension of n entries. Local."""
    bits = 0 if bool((matrix == matrix.round()).all()) else context.frac_bits
    whole = (matrix * 2.0**bits).round().to(torch.int64)
    most = max(1.0, float(whole.abs().sum(0).max()) if whole.numel() else 1.0)
    x = fitted(context, x, CAPACITY / most)
    run = lambda v: products.matmul(v.movedim(dim, -1).contiguous(), whole.to(v.device)).movedim(-1, dim)
    shares = context.backend.each(run, x.shares)
    return x.like(shares, x.scale_bits + bits, None if x.bound is None else x.bound * most)


def _back(context: Context, g: Cell, shape: Any, matrices: list[Tensor]) -> SharedTensor:
    """The gradient of what is a matrix [n, m] along each of the last dimensions, of an input of this shape."""
    value = as_gradient(context, g.content)
    if not value.numel():
        return value.like(context.backend.each(lambda v: v.new_zeros(tuple(shape)), value.shares), bound=0.0)
    for d, matrix in enumerate(matrices):
        value = as_gradient(context, _along(context, value, d - len(matrices), matrix.t()))
    return value


@row("avg_pool2d", aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, note="local")
def avg_pool_backward(
    context: Context, g: Cell, x: Cell, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> SharedTensor:  # fmt: skip
    """Along each dimension the sum of a window, or its mean, is a public matrix."""
    shape, dims = x.content.shape, len(kernel)

    def matrix(d: int) -> Tensor:
        n = shape[d - dims]
        lines = torch.eye(n, dtype=torch.float64).view(1, n, n, 1)
        given = [list(v) * dims if len(v) == 1 else v for v in (kernel, stride or kernel, padding)]
        sizes = [(v[d], rest) for v, rest in zip(given, (1, 1, 0), strict=True)]
        return F.avg_pool2d(lines, *sizes, ceil_mode, count_include_pad, 1 if divisor else None)[0, :, :, 0]

    found = _back(context, g, shape, [matrix(d) for d in range(dims)])
    return found if divisor is None else times(context, found, 1 / divisor, kept_bits(context, found))


def _adaptive_backward(dims: int, context: Context, g: Cell, x: Cell) -> SharedTensor:
    sizes = zip(x.content.shape[-dims:], g.content.shape[-dims:], strict=True)
    lines = [F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64).unsqueeze(0), m)[0] for n, m in sizes]
    return _back(context, g, x.content.shape, lines)


for _dims in (2, 3):
    _overload = getattr(aten, f"_adaptive_avg_pool{_dims}d_backward").default
    row("adaptive_avg_pool", _overload, note="local")(partial(_adaptive_backward, _dims))


def _interpolation(mode: str, dims: int) -> None:
    """Rows of an interpolation, which is a public matrix along each dimension: torch's own of unit vectors."""
    exact, smooth = mode.startswith("_upsample_nearest"), mode.endswith("_aa")
    name = mode if smooth else f"{mode}{dims}d" if exact else f"upsample_{mode}{dims}d"
    cornered = not exact and mode != "nearest"
    flat = mode != "bicubic" and not smooth
    one = f"{mode}1d" if exact else {"nearest": "upsample_nearest1d"}.get(mode, "upsample_linear1d")
    run = getattr(aten, one if flat else name).default

    def matrices(sizes: Any, out: Any, given: tuple) -> list[Tensor]:
        corners, scales = given[:cornered], (*given[cornered:], None, None, None)
        made = []
        for n, m, scale in zip(sizes, out, scales, strict=False):
            lines = torch.eye(n, dtype=torch.float64).unsqueeze(1)
            made.append(
                run(lines, [m], *corners, scale)[:, 0] if flat
                else run(lines.unsqueeze(2), [1, m], *corners, None, scale)[:, 0, 0]
            )  # fmt: skip
        return made

    def forward(context: Context, x: Cell, out: Any, *given: Any) -> SharedTensor:
        value = x.content
        for d, matrix in enumerate(matrices(value.shape[2:], out, given)):
            value = _along(context, settled(context, value, 0), d - dims, matrix)
        return value

    def backward(context: Context, g: Cell, out: Any, size: Any, *given: Any) -> SharedTensor:
        return _back(context, g, size, matrices(size[2:], out, given))

    row("interpolate", getattr(aten, name).default, note="local")(forward)
    row("interpolate", getattr(aten, f"{name}_backward").default, note="local")(backward)


for _mode, _dims in (
    ("nearest", 1), ("nearest", 2), ("nearest", 3), ("_upsample_nearest_exact", 1), ("_upsample_nearest_exact", 2),
    ("_upsample_nearest_exact", 3), ("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2),
    ("_upsample_bilinear2d_aa", 2), ("_upsample_bicubic2d_aa", 2),
):  # fmt: skip
    _interpolation(_mode, _dims)
if hasattr(aten, "_upsample_lanczos2d_aa"):  # from torch 2.14 on
    _interpolation("_upsample_lanczos2d_aa", 2)
