"""Convolutions in one and two dimensions, transposed and in groups too, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context
from .cells import Cell
from .elementwise import content
from .functions import F, aten, torch
from .layers import summed
from .operations import GRADIENTS
from .scale import as_gradient, operand

row = GRADIENTS.implements


@row("convolution", aten.convolution.default, note="in one or two dimensions; 1 round for two secrets")
def convolution(
    context: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> SharedTensor:  # fmt: skip
    kernel = content(weight).shape[2:]
    if len(kernel) > 2:
        raise ArgumentError("a convolution in more than two dimensions is computed by F.conv3d and F.conv_transpose3d")
    terms = math.prod(kernel) * (content(weight).shape[0 if transposed else 1])
    left, right = operand(context, x, terms), operand(context, weight, terms)
    if transposed:
        run = torch.conv_transpose2d if len(kernel) == 2 else torch.conv_transpose1d
        return run(left, right, content(bias), stride, padding, output_padding, groups, dilation)
    run = torch.conv2d if len(kernel) == 2 else torch.conv1d
    return run(left, right, content(bias), stride, padding, dilation, groups)


def _in_two(given: Any, flat: bool, outside: int) -> tuple:
    """The sizes of a convolution in two dimensions; one of one dimension has a height of one."""
    if flat:
        return outside, given[0]
    return tuple(given) if len(given) > 1 else (given[0], given[0])


def _looped(stride: tuple, g: Tensor, other: Tensor) -> Any:
    """The compiled loops, where they are faster than a matrix product of what has to be unfolded."""
    if not g.device.type == other.device.type == "cpu" or tuple(stride) != (1, 1):
        return None
    from ..ring import convloops  # brings numba, which an import of the package does without

    return convloops if g.shape[1] <= convloops.MOST_CHANNELS else None


def _input_gradient(shape: Any, how: tuple, g: Tensor, w: Tensor) -> Tensor:
    """Of a convolution: the columns that each output's gradient adds to, and their sum."""
    kernel, stride, padding, dilation = how
    if loops := _looped(stride, g, w):
        return loops.input_gradient(g, w, (shape[2], shape[3]), padding, dilation)
    columns = products.matmul(w.flatten(1).t().contiguous(), g.flatten(2))
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(shape[2:], *how, strict=True)]
    full = [n + 2 * p for n, p in zip(shape[2:], padding, strict=True)]
    image = g.new_zeros((g.shape[0], w.shape[1], *full))
    columns = columns.view(g.shape[0], w.shape[1], *kernel, *out)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            image[
                :, :, top : top + (out[0] - 1) * stride[0] + 1 : stride[0],
                left : left + (out[1] - 1) * stride[1] + 1 : stride[1],
            ] += columns[:, :, i, j]  # fmt: skip
    return image[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]


def _weight_gradient(shape: Any, how: tuple, g: Tensor, x: Tensor) -> Tensor:
    """Of a convolution: each output's gradient with the window that it came from."""
    kernel, stride, padding, dilation = how
    if loops := _looped(stride, g, x):
        return loops.weight_gradient(g, x, kernel, padding, dilation)
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
    return products.matmul(gradients, rows.t().contiguous()).view(g.shape[1], *shape[1:])


def _in_groups(product: Callable, groups: int, shape: Any, how: tuple, flat: bool, dims: tuple) -> Callable:
    """product(shape, how, a, b) of each group's channels: a's are in dims[0], b's in dims[1], the result's in dims[2].

    Of one dimension, the height is one.
    """
    lifted = (*shape[:2], 1, shape[2]) if flat else tuple(shape)

    def run(a: Tensor, b: Tensor, *_: Any) -> Tensor:
        a, b = (v.unsqueeze(2) if flat else v for v in (a, b))
        parts = zip(a.chunk(groups, dims[0]), b.chunk(groups, dims[1]), strict=True)
        made = [product(lifted, how, left, right) for left, right in parts]
        return torch.cat(made, dims[2]).reshape(shape)

    return run


@row("convolution", aten.convolution_backward.default)
def convolution_backward(
    context: Context, g: Cell, x: Cell, weight: Cell, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Any,
) -> tuple:  # fmt: skip
    """A transposed convolution is the input gradient of an ordinary one: gradients and inputs have changed places."""
    shapes = content(x).shape, content(weight).shape
    flat = len(shapes[1]) == 3
    kernel = tuple(shapes[1][2:])
    how = tuple(_in_two(v, flat, outside) for v, outside in ((kernel, 1), (stride, 1), (padding, 0), (dilation, 1)))
    outs: list[Any] = [None, None, None]
    if mask[0] and transposed:
        terms = math.prod(kernel) * shapes[1][1]
        left, right = operand(context, g, terms), operand(context, weight, terms)
        run = torch.conv1d if flat else torch.conv2d
        outs[0] = run(left, right, None, stride, padding, dilation, groups)
    elif mask[0]:
        terms = math.prod(kernel) * shapes[1][0] // groups
        outs[0] = summed(
            context, _in_groups(_input_gradient, groups, shapes[0], how, flat, (1, 0, 1)), g, weight, terms
        )
    if mask[1]:
        above, below = (x, g) if transposed else (g, x)
        positions = math.prod(content(above).shape[2:]) * content(above).shape[0]
        outs[1] = summed(
            context, _in_groups(_weight_gradient, groups, shapes[1], how, flat, (1, 1, 0)), above, below, positions
        )
    if mask[2]:
        value = as_gradient(context, content(g))
        outs[2] = torch.sum(value, [d for d in range(value.dim()) if d != 1])
    return tuple(outs)
