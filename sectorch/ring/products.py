"""Exact matrix products and convolutions mod 2^64 on int64 tensors.

torch's own int64 kernels are exact (they wrap), but read and write each word of the result again for each of its
products. So one operand is brought into tiles of 64 columns, [tiles, K, 64], and a compiled loop multiplies the other
one by them: `vectorloops.py` where the processor multiplies vectors of 64-bit words, and `wordloops.py` elsewhere.
Convolutions with larger images take fewer products (`karatsuba.py`).
`benchmarks/products.py` prints the comparison. Where there is a matrix unit for bytes, products of some size go there
(`amx.py`), and those with a single row to a compiled loop. On CUDA, where torch has no int64 products, they are made of
limbs (`limbs.py`).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import UnsupportedDeviceError
from . import karatsuba, limbs
from .tiles import TILE, times_tiles, times_unfolded, to_tiles, wide_products

_LIMB_ELEMENTS = 1 << 24  # unfolded columns at a time on a device: 128 MiB, and as much again in digits
_SMALL = 1 << 15  # products below this many multiplications gain nothing from tiling
_LARGE = 1 << 24  # a weight of so many elements, a vocabulary, is kept in tiles for few rows only (24 bytes each)
_GROUP = 1 << 18  # groups of a convolution below this many gain nothing from being taken apart
_UNIT = 1 << 18  # nor those below this many from the matrix unit


def _device(*tensors: torch.Tensor) -> str:
    """Where to compute: "cpu", "cuda", or "meta" for a dry run on shapes."""
    kinds = {t.device.type for t in tensors}
    if "meta" in kinds:
        return "meta"
    if kinds <= {"cpu"} or kinds <= {"cuda"}:
        return kinds.pop()
    raise UnsupportedDeviceError(
        f"ring products run on the CPU or on CUDA, got tensors on {', '.join(sorted(kinds))}; "
        f"move the model and the input to one of the two"
    )


@functools.cache
def unit() -> ModuleType | None:
    """`amx`, where this processor has the unit and the operating system lends it."""
    ask = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_init_amx"))
    if not all(f is not None and f() for f in ask):
        return None
    from . import amx

    return amx


def _unit_for(n: int, k: int, m: int) -> ModuleType | None:
    """`unit`, if it is faster for a product of this size than torch's loops."""
    return unit() if k >= 16 and min(n, m) > 8 and n * k * m >= _UNIT else None


@functools.lru_cache(maxsize=512)
def _steps(count: int, step: int = 1) -> np.ndarray:
    """0, step, 2 step, ..."""
    return np.arange(count) * step


def _limb_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`limbs.matmul` with the shapes of `torch.matmul`."""
    left = x.unsqueeze(0) if x.dim() == 1 else x
    right = y.unsqueeze(1) if y.dim() == 1 else y
    out = limbs.matmul(left, right, limbs.kind_for(left, right))
    if y.dim() == 1:
        out = out.squeeze(-1)
    return out.squeeze(-1 if y.dim() == 1 else -2) if x.dim() == 1 else out


def _beside(left: torch.Tensor, tiles: torch.Tensor, n: int) -> torch.Tensor:
    """[r, K] times [tiles, K, 64] -> [r, n], for the first n columns."""
    if n % TILE == 0 and not tiles.is_meta:
        return times_tiles(left, tiles, torch.empty(1, len(left), n, dtype=torch.int64))[0]
    return times_tiles(left, tiles).permute(1, 0, 2).reshape(len(left), -1)[:, :n]


def _prepared(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, K] as `_times_prepared` takes it."""
    amx = unit()
    return amx.packed(weight) if amx and _device(weight) == "cpu" else to_tiles(weight.t())


def _times_prepared(x: torch.Tensor, tiles: torch.Tensor, n: int) -> torch.Tensor:
    """[r, K] times a prepared weight [n, K] -> [r, n]."""
    amx = unit()
    if amx is None or tiles.dtype == torch.int64:
        return _beside(x, tiles, n)
    (r, k), x = x.shape, x.contiguous()
    out = torch.empty(r, n, dtype=torch.int64)
    left = out, _steps(n, k), _steps(k)  # of the weight only its tiles are read
    return amx.product(*left, x, _steps(r, k), _steps(k), out, _steps(n), _steps(r, n), tiles)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.matmul` mod 2^64, with its shapes: vectors, matrices, broadcast batches."""
    device = _device(x, y)
    if device != "cpu":
        return torch.matmul(x, y) if device == "meta" else _limb_matmul(x, y)
    if x.dim() > 2 and y.dim() == 2:
        return _matmul2d(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), y).view(*x.shape[:-1], y.shape[-1])
    if x.dim() == 2 and y.dim() == 2:
        return _matmul2d(x, y)
    return torch.matmul(x, y)


def _matmul2d(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (n, k), m = x.shape, y.shape[1]
    if n == 1 and m * k >= _SMALL and y.t().is_contiguous():
        from .loops import over, times_vector

        out = torch.empty(1, m, dtype=torch.int64)
        over(-(-m // TILE), times_vector, y.t().numpy(), x.contiguous().view(-1).numpy(), out.view(-1).numpy(), TILE)
        return out
    if amx := _unit_for(n, k, m):
        x, turned = x.contiguous(), y.t().is_contiguous()
        left = x, _steps(n, k), _steps(k)
        right = (y.t(), _steps(m, k), _steps(k)) if turned else (y.contiguous(), _steps(m), _steps(k, m))
        out = torch.empty(n, m, dtype=torch.int64)
        if n >= m:
            return amx.product(*left, *right, out, _steps(n, m), _steps(m))
        return amx.product(*right, *left, out, _steps(m), _steps(n, m))
    if n * k * m < _SMALL or min(n, m) < 8 or max(n, m) < TILE:
        return x @ y
    # Either way's products, those that only fill up a tile among them, and the words that are copied, both over k.
    in_y, in_x = n * -(-m // TILE) * TILE, m * -(-n // TILE) * TILE
    copied_y = m + (0 if x.is_contiguous() else n)
    copied_x = n + n * m / k + (0 if y.t().is_contiguous() else m)
    in_the_time_of_a_copy = 48 if wide_products() else 1
    if in_y / in_the_time_of_a_copy + copied_y <= in_x / in_the_time_of_a_copy + copied_x:
        return _beside(x, to_tiles(y), m)
    return _beside(y.t(), to_tiles(x.t()), n).t()


class Tiled(ABC):
    """A bilinear map of an input and a weight that may bring the weight into another form once, ahead of many
    products: into tiles, or for fewer products.

    All parties choose the form, by shapes alone. What it is made of depends on the processor.
    """

    form: str
    """In which a prepared weight is taken."""

    @abstractmethod
    def prepared(self, x: torch.Size, weight: torch.Size) -> Tiled | None:
        """The same map in the form that is worth it with such inputs; None where the weight is best as it is."""

    @abstractmethod
    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in this form."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        """The map; `made` is the prepared weight."""

    def by_form(self, weight: torch.Size) -> Callable | None:
        """The map of an input and a prepared weight alone, of a weight of this shape; None where it takes both."""
        return None


@dataclass(frozen=True)
class ByForm:
    """`Linear` of an input and a prepared weight [n, K]: what it was made of need not be kept."""

    n: int
    fresh = True

    def __call__(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        device = _device(x, made)
        if device == "meta":
            return x.new_empty(*x.shape[:-1], self.n)
        if device != "cpu":
            return matmul(x, made.t())  # which `prepare` left as it was
        return _times_prepared(x.reshape(-1, x.shape[-1]), made, self.n).reshape(*x.shape[:-1], self.n)


@dataclass(frozen=True)
class Linear(Tiled):
    """The bilinear map x [..., in], weight [out, in] -> [..., out] of `F.linear`."""

    fresh = True
    """A result has memory of its own."""
    form = "tiles"

    def prepared(self, x: torch.Size, weight: torch.Size) -> Linear | None:
        rows, most = math.prod(x[:-1]), 2 * TILE if math.prod(weight) < _LARGE else TILE // 4
        return self if 2 <= rows < most and weight[0] >= 2 * TILE else None

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if _device(weight) == "cuda" else _prepared(weight)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(x, weight.t()) if made is None else ByForm(len(weight))(x, made)

    def by_form(self, weight: torch.Size) -> ByForm:
        return ByForm(weight[0])

    def restorable(self, made: torch.Tensor) -> bool:
        """Whether the weight can be made of its prepared form again."""
        return made.dim() == 3 and made.dtype == torch.int64

    def restored(self, made: torch.Tensor, weight: torch.Size) -> torch.Tensor:
        """The weight of this shape out of its prepared form."""
        return made.permute(1, 0, 2).reshape(made.shape[1], -1)[:, : weight[0]].t().contiguous()


@dataclass(frozen=True)
class Conv2d(Tiled):
    """The bilinear map of `F.conv2d`: x [b, c_in, h, w], weight [c_out, c_in/groups, kh, kw].

    Memory: columns are unfolded 64 at a time.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    form: str = "tiles"
    """Or "sums", of the taps of a kernel of 3 x 3: see `karatsuba.py`."""
    fresh = True

    def _positions(self, x: torch.Size, kernel: torch.Size) -> tuple[int, int]:
        high, wide = (
            (x[2 + i] + 2 * self.padding[i] - self.dilation[i] * (kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in (0, 1)
        )
        return high, wide

    def prepared(self, x: torch.Size, weight: torch.Size) -> Conv2d | None:
        if self.groups > 1:
            return None
        positions = self._positions(x, weight[2:])
        if x[0] * math.prod(positions) < TILE <= weight[0] // 2:
            return replace(self, form="tiles")
        one_by_one = self.stride == self.dilation == (1, 1)
        return replace(self, form="sums") if one_by_one and karatsuba.faster(x[0], positions, weight) else None

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        if self.form == "tiles":
            return _prepared(weight.flatten(1))
        return karatsuba.prepared(weight) if _device(weight) == "cpu" and unit() is None else weight

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        device = _device(x, weight)
        if self.groups > 1 and weight.shape[1] == 1 and device != "meta":
            return self._depthwise(x, weight)
        if device == "cuda":
            return self.by_limbs(x, weight)
        if self.groups > 1 or device == "meta":
            return self._grouped(x, weight)
        if made is not None and self.form == "sums" and unit() is None:
            return karatsuba.convolved(x, made, self.padding)
        if made is None and weight.shape[0] <= 8 and self.stride == (1, 1):
            from .convloops import convolved

            return convolved(x, weight, self.padding, self.dilation)
        windows = windows_of(x, weight.shape[2:], self.stride, self.padding, self.dilation)
        batch, oh, ow = windows.shape[0], windows.shape[4], windows.shape[5]
        out_channels, k = weight.shape[0], weight[0].numel()
        if made is not None and self.form == "tiles":
            columns = windows.permute(0, 4, 5, 1, 2, 3).reshape(batch * oh * ow, k)
            product = _times_prepared(columns, made, out_channels)
            return product.view(batch, oh, ow, out_channels).permute(0, 3, 1, 2).contiguous()
        out = torch.empty(batch, out_channels, oh, ow, dtype=torch.int64)
        if amx := _unit_for(out_channels, k, batch * oh * ow):
            return _by_unit(amx, windows, weight.contiguous(), out)
        times_unfolded(weight.flatten(1), *_gathered(windows), out.flatten(2))
        return out

    def by_limbs(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The convolution as a product of limbs, on any device: unfolded images, a few MiB of columns at a time."""
        windows = windows_of(x, weight.shape[2:], self.stride, self.padding, self.dilation)
        batch, channels, kh, kw, oh, ow = windows.shape
        k, groups = channels // self.groups * kh * kw, self.groups
        rows = weight.reshape(groups, -1, k)
        span = max(1, _LIMB_ELEMENTS // (groups * k * oh * ow))
        columns = (piece.reshape(piece.shape[0], groups, k, oh * ow) for piece in windows.split(span))
        parts = [limbs.matmul(rows, piece, limbs.kind_for(rows, piece)) for piece in columns]
        return torch.cat(parts).view(batch, weight.shape[0], oh, ow)

    def _grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Large groups one after the other: torch's int64 kernel takes many times as long for them."""
        products = weight.numel() // self.groups * x.shape[0] * math.prod(self._positions(x.shape, weight.shape[2:]))
        if products < _GROUP or x.is_meta:
            return F.conv2d(x, weight, None, self.stride, self.padding, self.dilation, self.groups)
        one, parts = replace(self, groups=1), zip(x.chunk(self.groups, 1), weight.chunk(self.groups), strict=True)
        return torch.cat([one(*part) for part in parts], 1)

    def _depthwise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A sum of shifted element-wise products (torch's int64 kernel is up to ten times slower there)."""
        windows = windows_of(x, weight.shape[2:], self.stride, self.padding, self.dilation)
        if weight.shape[0] != self.groups:
            windows = windows.repeat_interleave(weight.shape[0] // self.groups, dim=1)
        out = x.new_zeros(windows.shape[0], weight.shape[0], *windows.shape[4:])
        for i in range(weight.shape[2]):
            for j in range(weight.shape[3]):
                out.addcmul_(windows[:, :, i, j], weight[:, 0, i, j].view(1, -1, 1, 1))
        return out


def windows_of(x: torch.Tensor, kernel: Sequence[int], stride, padding, dilation) -> torch.Tensor:
    """[b, c, h, w] -> a strided view [b, c, kh, kw, oh, ow] of the (padded) input."""
    if padding != (0, 0):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    x = x.contiguous()
    batch, channels, height, width = x.shape
    kh, kw = kernel
    oh = (height - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (width - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    b, c, h, w = x.stride()
    return x.as_strided(
        (batch, channels, kh, kw, oh, ow), (b, c, h * dilation[0], w * dilation[1], h * stride[0], w * stride[1])
    )


def _by_unit(amx: ModuleType, windows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """windows [b, c, kh, kw, oh, ow], weight [c_out, c, kh, kw] -> out [b, c_out, oh, ow], without unfolding."""
    batch, oh, ow = windows.shape[0], *windows.shape[4:]
    images, positions, depth = _gathered(windows)
    k, n = len(depth), len(weight)
    into = _places((batch, oh * ow), (n * oh * ow, 1))
    x, y = (images, positions, depth), (weight, _steps(n, k), _steps(k))
    if len(positions) >= n:
        return amx.product(*x, *y, out, into, _steps(n, oh * ow))
    return amx.product(*y, *x, out, _steps(n, oh * ow), into)


def _gathered(windows: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """The words under windows [b, c, kh, kw, oh, ow], where each begins, and where its words stand from there."""
    strides = windows.stride()
    positions = _places((windows.shape[0], *windows.shape[4:]), (strides[0], strides[4], strides[5]))
    words = windows.as_strided((windows.untyped_storage().nbytes() // 8 - windows.storage_offset(),), (1,))
    return words, positions, _places(tuple(windows.shape[1:4]), strides[1:4])


@functools.lru_cache(maxsize=64)
def _places(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Where the elements of a strided view stand, row by row."""
    found = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(size) * stride).reshape(-1)
    return found
