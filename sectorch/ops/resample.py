"""Transposed convolutions and interpolation: linear maps with a public shape."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ShapeError
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .bilinear import bilinear
from .common import local, refuse, settled, summand, typed
from .linear import _all, _pair, _with_bias, not_negative

T = torch.Tensor


def _taps(w: torch.Tensor) -> torch.Tensor:
    """Of a transposed convolution's weight: at most, since zeros stand between the elements."""
    return w.sum((0, 2, 3))


def _transposed(stride: tuple, padding: tuple, output_padding: tuple, dilation: tuple, groups: int):
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
    product = _transposed(_pair(stride), _pair(padding), _pair(output_padding), _pair(dilation), groups)
    return _with_bias(
        context,
        x,
        bilinear(context, product, x, weight, weight.shape[0] * math.prod(weight.shape[2:]), (_all, _taps)),
        None if bias is None else bias.view(-1, 1, 1),
    )


@implements("conv_transpose1d", torch.conv_transpose1d, F.conv_transpose1d, note="as conv_transpose2d")
def conv_transpose1d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> torch.Tensor:  # fmt: skip
    given = stride, padding, output_padding, dilation
    if any(isinstance(v, (tuple, list)) and len(v) != 1 for v in given):
        raise ShapeError(f"stride, padding, output_padding and dilation are one number each, got {given}")
    one = [_pair(v)[0] for v in given]
    y = torch.conv_transpose2d(
        x.unsqueeze(-2), weight.unsqueeze(-2), bias, (1, one[0]), (0, one[1]), (0, one[2]), groups, (1, one[3])
    )
    return y.squeeze(-2)


@implements("interpolate", F.interpolate, F.upsample, F.upsample_nearest, F.upsample_bilinear, note="local")
def interpolate(
    context: Context, x: SharedTensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: Any = None, antialias: bool = False,
) -> SharedTensor:  # fmt: skip
    """Every mode acts on one dimension after the other; each is a public matrix, read off torch itself."""
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
            moved = typed(settled(context, x), torch.float32).movedim(d, -1)
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
        two = antialias or one in ("bicubic", "lanczos")  # which torch has of pictures only
        if two:
            eye = eye.unsqueeze(2)
            wanted = dict(size=(1, sizes[d])) if sizes is not None else dict(scale_factor=(1.0, factors[d]))
        wanted.update(recompute_scale_factor=recompute, align_corners=corners, antialias=antialias)
        found.append(F.interpolate(eye, mode=mode if two else one, **wanted).reshape(n, -1))
    return found


@implements("unfold_patches", F.unfold, note="local")
def unfold(
    context: Context, x: SharedTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> SharedTensor:
    not_negative(padding)
    return local(context, _patches, x, _pair(kernel_size), _pair(stride), _pair(padding), _pair(dilation))


@implements("fold", F.fold, note="local; sums of at most kernel size entries")
def fold(
    context: Context, x: SharedTensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0,
    stride: Any = 1,
) -> torch.Tensor:  # fmt: skip
    """Each entry of a patch is added where it stands in the image (Chellapilla et al. 2006, the other way)."""
    not_negative(padding)
    kernel, (up, left), size = _pair(kernel_size), _pair(padding), _pair(output_size)
    whole = size[0] + 2 * up, size[1] + 2 * left
    numbers = torch.arange(whole[0] * whole[1], dtype=torch.float64).reshape(1, 1, *whole)
    places = F.unfold(numbers, kernel, _pair(dilation), 0, _pair(stride)).long()[0]
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
