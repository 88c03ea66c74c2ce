"""Linear layers and convolutions as products of matrices: rows of inputs times the rows of a weight, in groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from .products import Conv2d, Linear, matmul, windows_of

_ELEMENTS = 1 << 21
"""Unfolded inputs at a time: 16 MiB."""


def known(product: Callable) -> bool:
    """Whether a product is one of these, and not of a class that is made of one."""
    return type(product) in (Linear, Conv2d)


def matrix(product: Callable, weight: torch.Tensor) -> torch.Tensor:
    """The rows of a weight, one for each output channel: [groups, N, K]."""
    groups = product.groups if isinstance(product, Conv2d) else 1
    return weight.reshape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:]))


def outputs(product: Callable, y: torch.Tensor) -> torch.Tensor:
    """Outputs by the places where they stand: [groups, R, N]."""
    if not isinstance(product, Conv2d):
        return y.reshape(1, math.prod(y.shape[:-1]), y.shape[-1])
    batch, channels, high, wide = y.shape
    rows = y.permute(0, 2, 3, 1).reshape(batch * high * wide, product.groups, channels // product.groups)
    return rows.transpose(0, 1)


def inputs(product: Callable, x: torch.Tensor, kernel: torch.Size) -> Iterator[torch.Tensor]:
    """The rows of inputs for the places of `outputs`, in their order: [groups, R, K] in pieces of R.

    Args:
        kernel: the weight's shape.
    """
    if not isinstance(product, Conv2d):
        yield x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
        return
    windows = windows_of(x, kernel[2:], product.stride, product.padding, product.dilation)
    taken, high = math.prod(windows.shape[1:]), windows.shape[4]
    images, lines = max(1, _ELEMENTS // max(1, taken)), max(1, _ELEMENTS * high // max(1, taken))
    for some in windows.split(images):
        for piece in some.split(lines, 4):  # several images only where each is whole
            rows = piece.permute(0, 4, 5, 1, 2, 3).reshape(-1, product.groups, math.prod(kernel[1:]))
            yield rows.transpose(0, 1)


def times_each(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[groups, n, k] times [groups, k, m], mod 2^64."""
    found = [matmul(a, b) for a, b in zip(x, y, strict=True)]
    return torch.stack(found) if len(found) > 1 else found[0][None]
