"""Products, convolutions and activations, forward and backward."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..ops.bilinear import bilinear
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context
from .elementwise import content, kept_bits, scaled
from .functions import F, aten, torch
from .scale import as_gradient, no_larger, operand, times, total
from .tensor import GRADIENTS, Cell, Made

row = GRADIENTS.implements


def summed(context: Context, product: Any, x: Any, y: Any, terms: int) -> SharedTensor:
    """product(x, y), of which each output sums up so many products."""
    left, right = operand(context, x, terms), operand(context, y, terms)
    bound = lambda w: w.sum().expand(1)
    return bilinear(context, product, left, right, terms, (bound, bound))


@row("mm", aten.mm.default, aten.bmm.default, note="1 round for two secrets")
def mm(context: Context, x: Any, y: Any) -> SharedTensor:
    terms = content(x).shape[-1]
    return torch.matmul(operand(context, x, terms), operand(context, y, terms))


@row("addmm", aten.addmm.default, note="1 round for two secrets")
def addmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = mm(context, x, y)
    return total(context, scaled(context, product, alpha), scaled(context, bias, beta))


@row("convolution", aten.convolution.default, note="in one or two dimensions, without groups; 1 round for two secrets")
def convolution(
    context: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> SharedTensor:  # fmt: skip
    _plain_convolution(transposed, groups)
    terms = math.prod(content(weight).shape[1:])
    run = torch.conv2d if content(weight).dim() == 4 else torch.conv1d
    left, right = operand(context, x, terms), operand(context, weight, terms)
    return run(left, right, content(bias), stride, padding, dilation, groups)


def _plain_convolution(transposed: bool, groups: int) -> None:
    if transposed or groups != 1:
        raise ArgumentError("training through a transposed or grouped convolution is not supported on shares")


def _in_two(given: Any, flat: bool, outside: int) -> tuple:
    """The sizes of a convolution in two dimensions; one of one dimension has a height of one."""
    if flat:
        return outside, given[0]
    return tuple(given) if len(given) > 1 else (given[0], given[0])


def _input_gradient(shape: Any, how: tuple, g: Tensor, w: Tensor, *_: Any) -> Tensor:
    """Of a convolution: the columns that each output's gradient adds to, and their sum."""
    kernel, stride, padding, dilation = how
    columns = products.matmul(w.flatten(1).t().contiguous(), g.flatten(2))
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(shape[2:], *how, strict=True)]
    full = [n + 2 * p for n, p in zip(shape[2:], padding, strict=True)]
    image = g.new_zeros((shape[0], shape[1], *full))
    columns = columns.view(shape[0], shape[1], *kernel, *out)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            image[
                :, :, top : top + (out[0] - 1) * stride[0] + 1 : stride[0],
                left : left + (out[1] - 1) * stride[1] + 1 : stride[1],
            ] += columns[:, :, i, j]  # fmt: skip
    return image[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]


def _weight_gradient(shape: Any, how: tuple, g: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Of a convolution: each output's gradient with the window that it came from."""
    kernel, stride, padding, dilation = how
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    out = g.shape[2:]
    parts = [
        x[
            :, :, i * dilation[0] : i * dilation[0] + (out[0] - 1) * stride[0] + 1 : stride[0],
            j * dilation[1] : j * dilation[1] + (out[1] - 1) * stride[1] + 1 : stride[1],
        ]
        for i in range(kernel[0]) for j in range(kernel[1])
    ]  # fmt: skip
    windows = torch.stack(parts, 2).flatten(3)  # [N, C, kh kw, positions]
    rows = windows.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # [C kh kw, N positions]
    gradients = g.flatten(2).transpose(0, 1).flatten(1)  # [out, N positions]
    return products.matmul(gradients, rows.t().contiguous()).view(shape)


@row("convolution", aten.convolution_backward.default)
def convolution_backward(
    context: Context, g: Cell, x: Cell, weight: Cell, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Any,
) -> tuple:  # fmt: skip
    _plain_convolution(transposed, groups)
    shapes = content(x).shape, content(weight).shape
    flat = len(shapes[1]) == 3
    kernel = tuple(shapes[1][2:])
    how = tuple(_in_two(v, flat, outside) for v, outside in ((kernel, 1), (stride, 1), (padding, 0), (dilation, 1)))
    lift = (lambda s: (*s[:2], 1, s[2])) if flat else tuple
    two = lambda f, s: lambda a, b, *_: f(lift(s), how, *(v.unsqueeze(2) if flat else v for v in (a, b))).reshape(s)
    outs: list[Any] = [None, None, None]
    positions = math.prod(content(g).shape[2:]) * content(g).shape[0]
    if mask[0]:
        terms = math.prod(kernel) * content(g).shape[1]
        outs[0] = summed(context, two(_input_gradient, shapes[0]), g, weight, terms)
    if mask[1]:
        outs[1] = summed(context, two(_weight_gradient, shapes[1]), g, x, positions)
    if mask[2]:
        value = as_gradient(context, content(g))
        outs[2] = torch.sum(value, [d for d in range(value.dim()) if d != 1])
    return tuple(outs)


@row("relu", aten.relu.default, note="exact; its sign is kept for the backward pass")
def relu(context: Context, x: Cell) -> Made:
    value = operand(context, x)
    positive = torch.gt(value, 0)
    result = torch.mul(value, positive)
    return Made(no_larger(result, value), positive=positive)


@row("relu", aten.threshold_backward.default)
def threshold_backward(context: Context, g: Cell, result: Cell, threshold: float) -> SharedTensor:
    if threshold != 0:
        raise ArgumentError("the gradient of threshold is supported at 0, as of a ReLU")
    positive = result.kept.get("positive")
    positive = torch.gt(result.content, 0) if positive is None else positive
    value = as_gradient(context, g.content)
    return no_larger(torch.mul(value, positive), value)


@row("sigmoid", aten.sigmoid.default)
def sigmoid(context: Context, x: Cell) -> SharedTensor:
    return torch.sigmoid(x.content)


@row("sigmoid", aten.sigmoid_backward.default)
def sigmoid_backward(context: Context, g: Cell, y: Cell) -> SharedTensor:
    slope = torch.mul(y.content, 1 - y.content)
    return torch.mul(as_gradient(context, g.content), slope)


@row("tanh", aten.tanh.default)
def tanh(context: Context, x: Cell) -> SharedTensor:
    return torch.tanh(x.content)


@row("tanh", aten.tanh_backward.default)
def tanh_backward(context: Context, g: Cell, y: Cell) -> SharedTensor:
    return torch.mul(as_gradient(context, g.content), 1 - torch.mul(y.content, y.content))


@row("max_pool2d", aten.max_pool2d_with_indices.default, note="which entry is the largest stays secret")
def max_pool2d(
    context: Context, x: Cell, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple:  # fmt: skip
    """The largest, and in the place of its index a secret code: of equal ones the first, as torch has it."""
    kernel, stride = _windows_of(kernel, stride, padding, dilation, ceil_mode)
    windows = _windows(operand(context, x), kernel, stride)
    best, code = _first_largest(context, windows)
    places = torch.arange(windows.shape[0]).view(-1, *(1,) * best.dim())
    index = torch.sum(code * places, 0)
    return best, Made(index, code=code)


def _windows_of(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> tuple:
    pair = lambda v: (v, v) if isinstance(v, int) else (v[0], v[-1])
    kernel = pair(kernel)
    stride = kernel if not stride else pair(stride)
    if pair(padding) != (0, 0) or pair(dilation) != (1, 1) or ceil_mode:
        raise ArgumentError("training through a pooling with padding, dilation or ceil_mode is not supported on shares")
    return kernel, stride


def _cut(kernel: Any, stride: Any, v: Tensor) -> Tensor:
    """[..., h, w] -> [kh kw, ..., oh, ow]."""
    out = [(v.shape[i - 2] - kernel[i]) // stride[i] + 1 for i in (0, 1)]
    return torch.stack([
        v[..., i : i + (out[0] - 1) * stride[0] + 1 : stride[0], j : j + (out[1] - 1) * stride[1] + 1 : stride[1]]
        for i in range(kernel[0]) for j in range(kernel[1])
    ])  # fmt: skip


def _windows(x: SharedTensor, kernel: Any, stride: Any) -> SharedTensor:
    return x.like(x.backend.each(partial(_cut, kernel, stride), x.shares), bound=x.bound)


def _placed(kernel: Any, stride: Any, shape: Any, v: Tensor) -> Tensor:
    """The transpose of `_cut`."""
    image = v.new_zeros(shape)
    out = v.shape[-2:]
    for k in range(v.shape[0]):
        i, j = divmod(k, kernel[1])
        image[
            ..., i : i + (out[0] - 1) * stride[0] + 1 : stride[0], j : j + (out[1] - 1) * stride[1] + 1 : stride[1]
        ] += v[k]  # fmt: skip
    return image


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
            win = win.unsqueeze(1)
            codes = torch.cat((torch.mul(left, win), torch.mul(right, 1 - win)), 1).bounded(1.0)
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
    kernel, stride = _windows_of(kernel, stride, padding, dilation, ceil_mode)
    value = as_gradient(context, g.content)
    parts = no_larger(torch.mul(indices.kept["code"], value.unsqueeze(0)), value)
    meets = math.ceil(kernel[0] / stride[0]) * math.ceil(kernel[1] / stride[1])
    placed = parts.backend.each(partial(_placed, kernel, stride, tuple(x.content.shape)), parts.shares)
    return parts.like(placed, bound=None if parts.bound is None else parts.bound * meets)


@row("avg_pool2d", aten.avg_pool2d.default, note="local")
def avg_pool2d(
    context: Context, x: Cell, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> SharedTensor:  # fmt: skip
    kernel, stride = _windows_of(kernel, stride, padding, 1, ceil_mode)
    return F.avg_pool2d(x.content, kernel, stride, divisor_override=divisor)


@row("avg_pool2d", aten.avg_pool2d_backward.default, note="local")
def avg_pool2d_backward(
    context: Context, g: Cell, x: Cell, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> SharedTensor:  # fmt: skip
    kernel, stride = _windows_of(kernel, stride, padding, 1, ceil_mode)
    value = as_gradient(context, g.content)
    value = times(context, value, 1 / (divisor or kernel[0] * kernel[1]), kept_bits(context, value))
    count = kernel[0] * kernel[1]
    parts = value.unsqueeze(0).expand((count, *value.shape))
    placed = value.backend.each(partial(_placed, kernel, stride, tuple(x.content.shape)), parts.shares)
    return value.like(placed, bound=None if value.bound is None else value.bound * count)
