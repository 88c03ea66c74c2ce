"""Exact matrix products and convolutions mod 2^64 on int64 tensors.

torch's own int64 kernels are exact (they wrap), but read and write each word of the result again for each of its
products. So one operand is cut into tiles of 64 columns, [tiles, K, 64], and a compiled loop (`productloops.py`)
multiplies the other one by them. Convolutions with larger images take fewer products by Karatsuba's method. Where the
processor has a matrix unit for bytes, products above some size use it. On CUDA, where torch has no int64 products, they
are sums of products of limbs. `benchmarks/products.py` compares these ways.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import ArgumentError, UnsupportedDeviceError
from . import bitplanes

# A matrix times tiles of 64 columns.


TILE = 64
"""Columns of a tile."""


@functools.cache
def wide_products() -> bool:
    """Whether the processor multiplies vectors of 64-bit words."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """[K, n] -> [ceil(n/64), K, 64], zero padded."""
    rows, n = matrix.shape
    if n % TILE:
        matrix = F.pad(matrix, (0, -n % TILE))
    return matrix.view(rows, -1, TILE).permute(1, 0, 2).contiguous()


def times_tiles(left: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[r, K] times [tiles, K, 64] -> [tiles, r, 64].

    Args:
        out: [n, r, P] where the result goes instead, each of whose n parts has P / 64 tiles side by side.
    """
    if left.is_meta or tiles.is_meta:
        return F.conv1d(tiles, left.unsqueeze(-1))
    from . import productloops as loops  # numba takes half a second to load

    out = torch.empty(len(tiles), len(left), TILE, dtype=torch.int64) if out is None else out
    arrays = (loops.array(v).view(np.uint64) for v in (left, tiles))
    pieces = len(tiles) * -(-len(left) // loops.ROWS)
    loops.run_in_threads(pieces, loops.products, *arrays, wide_products(), out.numpy().view(np.uint64))
    return out


def times_unfolded(
    left: torch.Tensor, images: torch.Tensor, places: np.ndarray, depth: np.ndarray, out: torch.Tensor
) -> None:
    """[r, K] times the unfolded columns of a convolution, [K, n P], into out [n, r, P].

    Args:
        images: words [.]. places: where each column begins there [n P]. depth: where its K words stand from there.
    """
    from . import productloops as loops

    count = -(-len(places) // TILE)
    places = np.pad(places, (0, count * TILE - len(places)), "edge").view(np.uint64)
    arrays = images.numpy().view(np.uint64), places, depth.view(np.uint64), loops.array(left).view(np.uint64)
    loops.run_in_threads(count, loops.convolve_tiles, *arrays, wide_products(), out.numpy().view(np.uint64))


# Convolutions with kernels of 3 x 3 in 36 products for nine outputs; one by one they take 81.
#
# Two polynomials of three coefficients are multiplied in six products (Karatsuba). The transposed algorithm, which
# takes as many, is a filter of three taps g on five inputs d, with three outputs y:
#
#     m_0 = g_0 (d_0 - d_1 - d_2)        m_3 = (g_0 + g_1) d_1        y_0 = m_0 + m_3 + m_4
#     m_1 = g_1 (d_2 - d_1 - d_3)        m_4 = (g_0 + g_2) d_2        y_1 = m_1 + m_3 + m_5
#     m_2 = g_2 (d_4 - d_2 - d_3)        m_5 = (g_1 + g_2) d_3        y_2 = m_2 + m_4 + m_5
#
# In two dimensions this is applied to the columns and to the rows. There is no division, so the result is exact in
# every ring; Winograd's filters save as much, but halve their taps, and 2 has no inverse mod 2^64.
#
# The sums of taps are computed once for a weight, and the sums of a window of 5 x 5 inputs once for all outputs. What
# remains are 36 products of matrices, [outputs, channels] times [channels, windows].
#
# Source: Karatsuba and Ofman, "Multiplication of multidigit numbers on automata", 1963; Winograd, "Arithmetic
# complexity of computations", 1980, for the transposition.


SIDE = 3
"""Outputs of a window in each dimension."""
_SUMS = 600
"""Products that take as long as a window's sums for a channel, or an output's from them."""
_READ = 48
"""Windows that take as long to multiply as a tap's sums to read."""
_WORTH = 1.1
"""The direct way must take so many times as long."""


def windows_of_images(positions: Sequence[int]) -> tuple[int, int]:
    """Windows that cover so many output rows and columns."""
    return -(-positions[0] // SIDE), -(-positions[1] // SIDE)


def karatsuba_is_faster(images: int, positions: Sequence[int], weight: torch.Size) -> bool:
    """Whether Karatsuba's method is faster for a convolution with a stride of one: by its shapes, so that all parties
    choose alike."""
    outputs, channels, *kernel = weight
    if kernel != [SIDE, SIDE]:
        return False
    count = images * math.prod(windows_of_images(positions))
    read = max(count, _READ * -(-count // TILE))
    products = 36 * outputs * channels * read + _SUMS * (outputs + channels) * count
    return _WORTH * products < 9 * outputs * channels * images * math.prod(positions)


def prepare_taps(weight: torch.Tensor) -> torch.Tensor:
    """Weight [o, c, 3, 3] -> the sums of its taps, [6, 6, o, c]."""
    return _taps(_taps(weight.permute(2, 3, 0, 1), 1), 0)


def _taps(g: torch.Tensor, dim: int) -> torch.Tensor:
    g0, g1, g2 = g.unbind(dim)
    return torch.stack([g0, g1, g2, g0 + g1, g0 + g2, g1 + g2], dim)


def convolve_karatsuba(x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """x [n, c, h, w] and a prepared weight [6, 6, o, c] -> [n, o, h + 2 p - 2, w + 2 q - 2]."""
    from . import productloops as loops

    images, outputs = len(x), weight.shape[2]
    positions = x.shape[2] + 2 * padding[0] - 2, x.shape[3] + 2 * padding[1] - 2
    out = torch.empty(images, outputs, *positions, dtype=torch.int64)
    high, wide = (SIDE * count for count in windows_of_images(positions))
    below, right = high + 2 - padding[0] - x.shape[2], wide + 3 - padding[1] - x.shape[3]
    x = F.pad(x, (padding[1], right, padding[0], below)).contiguous()  # a row has a word more, which is read and unused
    places = _karatsuba_places(images, tuple(x.shape[1:]), outputs, positions)
    count = len(places[0]) // TILE
    parts = max(1, min(torch.get_num_threads() // max(1, count), -(-outputs // loops.KARATSUBA_ROWS)))
    words, weight_words, results = (v.numpy().view(np.uint64) for v in (x.view(-1), weight, out))
    arrays = words, *places, x.shape[3], x.shape[2] * x.shape[3], weight_words
    loops.run_in_threads(count * parts, loops.convolve_windows, *arrays, wide_products(), parts, results)
    return out


@functools.lru_cache(maxsize=64)
def _karatsuba_places(
    images: int, padded: tuple[int, int, int], outputs: int, positions: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each window its beginning, the beginning of its outputs in channel 0, and their numbers of rows and columns
    [., 2]; filled up to whole tiles with windows that have no outputs."""
    channels, height, width = padded
    image, row, column = (index.reshape(-1) for index in np.indices((images, *windows_of_images(positions)), np.int64))
    row, column = SIDE * row, SIDE * column
    source = (image * channels * height + row) * width + column
    target = (image * outputs * positions[0] + row) * positions[1] + column
    sizes = np.minimum(SIDE, np.stack([positions[0] - row, positions[1] - column], 1))
    more = -len(source) % TILE
    return np.pad(source, (0, more), "edge"), np.pad(target, (0, more)), np.pad(sizes, ((0, more), (0, 0)))


# Sums of products of limbs, for devices without int64 products.
#
# An int64 is cut into signed digits, x = sum_i x_i 2^(w i) mod 2^64 with -2^(w-1) <= x_i < 2^(w-1), and
#
#     x y = sum_{i + j < n} 2^(w (i + j)) x_i y_j   mod 2^64,
#
# every digit product by a floating-point or int8 matrix product that is exact as long as no partial sum leaves its
# accumulator. With fan-in K (for a convolution c_in kh kw), |sum| <= K 2^(2w - 2):
#
# | kind    | w  | digits | products | accumulator    | exact for K up to   |
# |---------|----|--------|----------|----------------|---------------------|
# | float64 | 22 | 3      | 6        | 53-bit integer | 2^(53 - 42) = 2048  |
# | int8    | 8  | 8      | 36       | int32          | (2^31 - 1) / 2^14 = 131071 |
#
# Longer sums are cut into pieces of that length and added in int64, where wrapping is meant.


@dataclass(frozen=True)
class Limbs:
    """A way to cut: `bits` per digit, `count` digits, and the longest sum of digit products that stays exact."""

    bits: int
    count: int
    longest: int


FLOAT64 = Limbs(22, 3, 1 << 11)
INT8 = Limbs(8, 8, ((1 << 31) - 1) >> 14)
KINDS = {"float64": FLOAT64, "int8": INT8}
_FILLED = 64  # rows, columns and fan-in from which on int8 products fill the tensor cores
_FULL_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities with float64 units at half the rate of float32; the others have a 32nd or a 64th of it. On an
H100 (9.0) float64 limbs are 1.5 to 3.1 times as fast as int8 (`benchmarks/products.py --limbs --device cuda`); no
other device was timed."""
_ROWS, _MULTIPLE = 17, 8  # least rows and the granularity that torch._int_mm asks for on CUDA


def kind_for(x: torch.Tensor, y: torch.Tensor) -> str:
    """The faster limbs for `x @ y` where x is."""
    if min(x.shape[-2], x.shape[-1], y.shape[-1]) < _FILLED:
        return "float64"
    full = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) in _FULL_FLOAT64
    return "float64" if full else "int8"


def digits(x: torch.Tensor, limbs: Limbs) -> torch.Tensor:
    """Signed digits of int64 [...]: int64 [count, ...], the least significant first."""
    out = x.new_empty(limbs.count, *x.shape)
    half = 1 << (limbs.bits - 1)
    rest = x
    for i in range(limbs.count):
        out[i] = ((rest + half) & (2 * half - 1)) - half
        rest = (rest - out[i]) >> limbs.bits
    return out


def limb_matmul(x: torch.Tensor, y: torch.Tensor, kind: str = "float64") -> torch.Tensor:
    """`x @ y` mod 2^64 for int64 [..., n, K] and [..., K, m], exact for any K.

    Raises:
        ArgumentError: an unknown kind.
    """
    if kind not in KINDS:
        raise ArgumentError(f"limbs are of kind {' or '.join(KINDS)}, got {kind!r}")
    limbs, fan_in = KINDS[kind], x.shape[-1]
    total = short_matmul(x[..., : limbs.longest], y[..., : limbs.longest, :], kind)
    for start in range(limbs.longest, fan_in, limbs.longest):
        piece = slice(start, start + limbs.longest)
        total.add_(short_matmul(x[..., piece], y[..., piece, :], kind))
    return total


def short_matmul(x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    """`matmul` for a fan-in that the accumulator holds.

    Raises:
        ArgumentError: the fan-in is longer, and digit sums could leave the accumulator.
    """
    limbs, fan_in = KINDS[kind], x.shape[-1]
    if fan_in > limbs.longest:
        raise ArgumentError(f"{kind} limbs are exact up to a fan-in of {limbs.longest}, got {fan_in}; cut the sum")
    product = _float_products if kind == "float64" else _int_products
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    left, right = digits(x, limbs), digits(y, limbs)

    def parts() -> Iterator[torch.Tensor]:
        for i in range(limbs.count):
            # all digits of y that still count for this digit of x, in one wide product
            for j, value in enumerate(product(left[i], right[: limbs.count - i])):
                yield value.to(torch.int64).bitwise_left_shift_(limbs.bits * (i + j))

    return functools.reduce(torch.Tensor.add_, parts())


def _float_products(x: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """[..., n, K] with each of [d, ..., K, m]."""
    return torch.matmul(x.to(torch.float64), ys.to(torch.float64))


def _int_products(x: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """The same by int8 products with int32 sums; torch has them for two matrices at a time."""
    batch, (n, k), (count, m) = x.shape[:-2], x.shape[-2:], (ys.shape[0], ys.shape[-1])
    pairs = math.prod(batch)
    lefts = x.to(torch.int8).reshape(pairs, n, k)
    rights = ys.to(torch.int8).movedim(0, -2).reshape(pairs, k, count * m)
    out = x.new_zeros(pairs, n, count * m, dtype=torch.int32)
    for i in range(pairs):
        out[i] = _int_mm(lefts[i], rights[i])
    return out.view(*batch, n, count, m).movedim(-2, 0)


def _int_mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """int8 [n, K] @ [K, m] -> int32, padded to the shapes that the kernel takes."""
    (n, k), m = x.shape, y.shape[1]
    rows, inner, columns = max(0, _ROWS - n), -k % _MULTIPLE, -m % _MULTIPLE
    if n == 0 or k == 0 or m == 0:
        return x.new_zeros(n, m, dtype=torch.int32)
    if rows or inner or columns:
        x, y = F.pad(x, (0, inner, 0, rows)), F.pad(y, (0, columns, 0, inner))
    product = torch._int_mm(x.contiguous(), y.contiguous())  # pyright: ignore[reportPrivateImportUsage]  not in torch's stubs
    return product[:n, :m]


_LIMB_ELEMENTS = 1 << 24  # unfolded columns at a time on a device: 128 MiB, and as much again in digits
_SMALL = 1 << 15  # products below this many multiplications gain nothing from tiling
_LARGE = 1 << 24  # a weight of so many elements, a vocabulary, is kept in tiles for few rows only (24 bytes each)
_GROUP = 1 << 18  # with fewer multiplications, a convolution gains nothing from computing its groups one by one
_UNIT = 1 << 18  # with fewer multiplications, a product gains nothing from the matrix unit
_KEPT = (1 << 22) - (1 << 13)  # words of the largest block that is kept (`choreography/pages.py`); more is made anew


def _device(*tensors: torch.Tensor) -> str:
    """The device to compute on: "cpu", "cuda", or "meta" for a dry run on shapes."""
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
def unit() -> bool:
    """Whether this processor has a matrix unit for bytes, and the operating system lends it."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_init_amx"))
    return all(f is not None and f() for f in checks)


def _unit_for(n: int, k: int, m: int) -> bool:
    """Whether there is a unit, and it is faster for a product of this size than the other loops."""
    return k >= 16 and min(n, m) > 8 and n * k * m >= _UNIT and unit()


Rows = tuple[torch.Tensor, np.ndarray, np.ndarray]
"""A contiguous tensor, where its rows begin, and where the elements of a row stand from there."""


def _multiply_on_unit(x: Rows, y: Rows, out: torch.Tensor, x_places: np.ndarray, y_places: np.ndarray) -> torch.Tensor:
    """The products of the rows of x with those of y, written to out[x_places[i] + y_places[j]]."""
    from . import productloops

    if len(x[1]) >= len(y[1]):
        return productloops.multiply_on_unit(*x, *y, out, x_places, y_places)
    return productloops.multiply_on_unit(*y, *x, out, y_places, x_places)


@functools.lru_cache(maxsize=512)
def _steps(count: int, step: int = 1) -> np.ndarray:
    """0, step, 2 step, ..."""
    return np.arange(count) * step


def _limb_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`limb_matmul` with the shapes of `torch.matmul`."""
    left = x.unsqueeze(0) if x.dim() == 1 else x
    right = y.unsqueeze(1) if y.dim() == 1 else y
    out = limb_matmul(left, right, kind_for(left, right))
    if y.dim() == 1:
        out = out.squeeze(-1)
    return out.squeeze(-1 if y.dim() == 1 else -2) if x.dim() == 1 else out


def _times_columns(left: torch.Tensor, tiles: torch.Tensor, n: int) -> torch.Tensor:
    """[r, K] times [tiles, K, 64] -> [r, n], for the first n columns."""
    if n % TILE == 0 and not tiles.is_meta:
        return times_tiles(left, tiles, torch.empty(1, len(left), n, dtype=torch.int64))[0]
    return times_tiles(left, tiles).permute(1, 0, 2).reshape(len(left), -1)[:, :n]


def _prepared(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, K] as `_times_prepared` takes it."""
    if not unit() or _device(weight) != "cpu":
        return to_tiles(weight.t())
    from . import productloops

    return productloops.pack_tiles(weight)


def _times_prepared(x: torch.Tensor, tiles: torch.Tensor, n: int) -> torch.Tensor:
    """[r, K] times a prepared weight [n, K] -> [r, n]."""
    if not unit() or tiles.dtype == torch.int64:
        return _times_columns(x, tiles, n)
    from . import productloops

    (r, k), x = x.shape, x.contiguous()
    out = torch.empty(r, n, dtype=torch.int64)
    left = out, _steps(n, k), _steps(k)  # of the weight only its tiles are read
    return productloops.multiply_on_unit(*left, x, _steps(r, k), _steps(k), out, _steps(n), _steps(r, n), tiles)


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
        from . import productloops as loops

        out = torch.empty(1, m, dtype=torch.int64)
        arrays = y.t().numpy(), x.contiguous().view(-1).numpy(), out.view(-1).numpy()
        loops.run_in_threads(-(-m // TILE), loops.times_vector, *arrays, TILE)
        return out
    if _unit_for(n, k, m):
        transposed, left = y.t().is_contiguous(), (x.contiguous(), _steps(n, k), _steps(k))
        right = (y.t(), _steps(m, k), _steps(k)) if transposed else (y.contiguous(), _steps(m), _steps(k, m))
        return _multiply_on_unit(left, right, torch.empty(n, m, dtype=torch.int64), _steps(n, m), _steps(m))
    if n * k * m < _SMALL or min(n, m) < 8 or max(n, m) < TILE:
        return x @ y
    # The costs of putting y or x into tiles: products (with those that only fill up a tile) and copied words, over k.
    in_y, in_x = n * -(-m // TILE) * TILE, m * -(-n // TILE) * TILE
    copied_y = m + (0 if x.is_contiguous() else n)
    copied_x = n + n * m / k + (0 if y.t().is_contiguous() else m)
    in_the_time_of_a_copy = 48 if wide_products() else 1
    if in_y / in_the_time_of_a_copy + copied_y <= in_x / in_the_time_of_a_copy + copied_x:
        return _times_matrix(x, y)
    return _times_matrix(y.t(), x.t()).t()


def _times_matrix(left: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[r, K] times [K, n] -> [r, n]; no more than `_KEPT` words are in tiles at a time."""
    n = matrix.shape[1]
    step = max(TILE, _KEPT // len(matrix) // TILE * TILE)
    if n <= step:
        return _times_columns(left, to_tiles(matrix), n)
    left, out = left.contiguous(), torch.empty(len(left), n, dtype=torch.int64)
    for start in range(0, n, step):
        part = matrix[:, start : start + step]
        out[:, start : start + step] = _times_columns(left, to_tiles(part), part.shape[1])
    return out


class PreparedProduct(ABC):
    """A bilinear map of an input and a weight, which may be brought into another form once, for many inputs.

    The forms are tiles, and sums of taps for Karatsuba's method. All parties choose the same form, by shapes alone; its
    content depends on the processor.
    """

    form: str
    """The form of a prepared weight."""

    @abstractmethod
    def prepared(self, x: torch.Size, weight: torch.Size) -> PreparedProduct | None:
        """The same map in the faster form for such inputs; None where the weight is best as it is."""

    @abstractmethod
    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in this form."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        """The map; `made` is the prepared weight, if there is one."""

    def by_form(self, weight: torch.Size) -> Callable | None:
        """The map of an input and a prepared weight alone, of a weight of this shape; None where it takes both."""
        return None


@dataclass(frozen=True)
class ProductWithPrepared:
    """`Linear` of an input and a prepared weight [n, K], without the weight itself."""

    n: int
    fresh = True

    def __call__(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        device = _device(x, made)
        if device == "meta":
            return x.new_empty(*x.shape[:-1], self.n)
        if device != "cpu":
            return matmul(x, made.t())  # `prepare` leaves the weight of a device as it is
        return _times_prepared(x.reshape(-1, x.shape[-1]), made, self.n).reshape(*x.shape[:-1], self.n)


@dataclass(frozen=True)
class Linear(PreparedProduct):
    """The bilinear map x [..., in], weight [out, in] -> [..., out] of `F.linear`."""

    fresh = True
    """Whether a result has memory of its own."""
    form = "tiles"

    def prepared(self, x: torch.Size, weight: torch.Size) -> Linear | None:
        rows, most = math.prod(x[:-1]), 2 * TILE if math.prod(weight) < _LARGE else TILE // 4
        return self if 2 <= rows < most and weight[0] >= 2 * TILE else None

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if _device(weight) == "cuda" else _prepared(weight)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(x, weight.t()) if made is None else ProductWithPrepared(len(weight))(x, made)

    def by_form(self, weight: torch.Size) -> ProductWithPrepared:
        return ProductWithPrepared(weight[0])

    def restorable(self, made: torch.Tensor) -> bool:
        """Whether the weight can be made of its prepared form again."""
        return made.dim() == 3 and made.dtype == torch.int64

    def restored(self, made: torch.Tensor, weight: torch.Size) -> torch.Tensor:
        """The weight of this shape out of its prepared form."""
        return made.permute(1, 0, 2).reshape(made.shape[1], -1)[:, : weight[0]].t().contiguous()


@dataclass(frozen=True)
class Conv2d(PreparedProduct):
    """The bilinear map of `F.conv2d`: x [b, c_in, h, w], weight [c_out, c_in/groups, kh, kw].

    Memory: columns are unfolded 64 at a time.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    form: str = "tiles"
    """Or "sums", of the taps of a kernel of 3 x 3: see the section on Karatsuba."""
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
        return replace(self, form="sums") if one_by_one and karatsuba_is_faster(x[0], positions, weight) else None

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        if self.form == "tiles":
            return _prepared(weight.flatten(1))
        return prepare_taps(weight) if _device(weight) == "cpu" and not unit() else weight

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        device = _device(x, weight)
        if self.groups > 1 and weight.shape[1] == 1 and device != "meta":
            return self._depthwise(x, weight)
        if device == "cuda":
            return self.by_limbs(x, weight)
        if self.groups > 1 or device == "meta":
            return self._grouped(x, weight)
        if made is not None and self.form == "sums" and not unit():
            return convolve_karatsuba(x, made, self.padding)
        # All ways give the same bits, so each process may choose by its processor.
        if made is None and weight.shape[0] <= 8 and self.stride == (1, 1):
            from .productloops import convolve_images

            return convolve_images(x, weight, self.padding, self.dilation)
        windows = windows_of(x, weight.shape[2:], self.stride, self.padding, self.dilation)
        batch, oh, ow = windows.shape[0], windows.shape[4], windows.shape[5]
        out_channels, k = weight.shape[0], weight[0].numel()
        if made is not None and self.form == "tiles":
            columns = windows.permute(0, 4, 5, 1, 2, 3).reshape(batch * oh * ow, k)
            product = _times_prepared(columns, made, out_channels)
            return product.view(batch, oh, ow, out_channels).permute(0, 3, 1, 2).contiguous()
        out = torch.empty(batch, out_channels, oh, ow, dtype=torch.int64)
        if _unit_for(out_channels, k, batch * oh * ow):
            images, positions, depth = _gathered(windows)
            rows = weight.contiguous(), _steps(out_channels, k), _steps(k)
            places = _places((batch, oh * ow), (out_channels * oh * ow, 1))
            return _multiply_on_unit((images, positions, depth), rows, out, places, _steps(out_channels, oh * ow))
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
        parts = [limb_matmul(rows, piece, kind_for(rows, piece)) for piece in columns]
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


def _gathered(windows: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """The words under windows [b, c, kh, kw, oh, ow], where each begins, and where its words stand from there."""
    strides = windows.stride()
    positions = _places((windows.shape[0], *windows.shape[4:]), (strides[0], strides[4], strides[5]))
    words = windows.as_strided((windows.untyped_storage().nbytes() // 8 - windows.storage_offset(),), (1,))
    return words, positions, _places(tuple(windows.shape[1:4]), strides[1:4])


@functools.lru_cache(maxsize=64)
def _places(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The positions of the elements of a strided view, row by row."""
    found = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(size) * stride).reshape(-1)
    return found


# Einsums of two tensors, as products of matrices on a device without int64 kernels.


def letters_of(equation: str, operands: tuple) -> list[str]:
    """The letter of every dimension of every operand; an ellipsis stands for letters of its own."""
    letters = []
    for part, operand in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=True):
        missing = operand.dim() - len(part.replace("...", ""))
        letters += _spelled(part, missing)
    return letters


def _spelled(part: str, missing: int) -> list[str]:
    if "..." not in part:
        return list(part)
    before, after = part.split("...")
    return [*before, *(f".{i}" for i in range(missing, 0, -1)), *after]


def kept_letters(equation: str, letters: list[str]) -> set[str]:
    """The letters of an einsum's result."""
    out = equation.replace(" ", "").split("->")[1] if "->" in equation else None
    kept = {x for x in letters if (letters.count(x) == 1 if out is None else x in out)}
    return kept | {x for x in letters if x.startswith(".") and (out is None or "..." in out)}


def result_letters(equation: str, letters: list[str]) -> list[str]:
    """The letters of the result's dimensions; without an arrow the ellipsis and then the alphabet."""
    kept = kept_letters(equation, letters)
    around = sorted((x for x in kept if x.startswith(".")), key=lambda x: -int(x[1:]))
    if "->" not in equation:
        return around + sorted(x for x in kept if not x.startswith("."))
    return _spelled(equation.replace(" ", "").split("->")[1], len(around))


def einsum(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.einsum` of two int64 tensors, exact mod 2^64."""
    return by_matmul(equation, x, y) if x.device.type == "cuda" else torch.einsum(equation, x, y)


def by_matmul(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same by one product of matrices for each place of the letters that both operands keep."""
    letters = letters_of(equation, (x, y))
    of_x, of_y, out = letters[: x.dim()], letters[x.dim() :], result_letters(equation, letters)
    sizes: dict[str, int] = {}
    for letter, n in zip(letters, (*x.shape, *y.shape), strict=True):
        sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]  # one dimension may stand for a longer one
    both = [a for a in out if a in of_x and a in of_y]
    inner = [a for a in dict.fromkeys(of_x) if a in of_y and a not in out]
    left, right = ([a for a in out if a in mine and a not in both] for mine in (of_x, of_y))
    number = {letter: i for i, letter in enumerate(sizes)}

    def arranged(v: torch.Tensor, mine: list[str], *parts: list[str]) -> torch.Tensor:
        order = [a for part in parts for a in part]
        v = torch.einsum(v, [number[a] for a in mine], [number[a] for a in order])  # diagonals, sums, permutations
        v = v.expand([sizes[a] for a in order])
        return v.reshape([sizes[a] for a in both] + [math.prod(sizes[a] for a in part) for part in parts[1:]])

    product = matmul(arranged(x, of_x, both, left, inner), arranged(y, of_y, both, inner, right))
    made = [*both, *left, *right]
    return product.view([sizes[a] for a in made]).permute([made.index(a) for a in out])


# Sums of subsets of rows: products with matrices of 0 and 1 that are packed bits.
#
# For four rows at a time all sixteen sums are computed, and each subset takes one of them: the compiled loop adds 14
# numbers for an element of 40 subsets, where a product of matrices multiplies and adds 40.


def subset_sums(words: torch.Tensor, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The sum of those rows [R, n] whose bit is set, for each line of packed bits [k, W]: [k, n].

    Args:
        start: the first row's number; the bit of row 64 w + t is bit t of word w.
    """
    count, columns = rows.shape
    if not bitplanes.COMPILED or not words.is_cpu or not rows.is_cpu:
        bits = bitplanes.spread(words).transpose(1, 2).flatten(1)[:, start : start + count]
        return matmul(bits.bitwise_and(1), rows)
    from . import productloops as loops

    out = torch.zeros(words.shape[0], columns, dtype=torch.int64)
    keys = np.empty((-(-count // 8) * 2, words.shape[0]), np.uint8)
    loops.keys_of(loops.array(words), start, count, keys)
    arrays = keys, loops.array(rows), out.numpy(), loops.BLOCK
    loops.run_in_threads(-(-columns // loops.BLOCK), loops.sums_of, *arrays)
    return out


# Linear layers and convolutions as products of matrices, for proofs: rows of inputs times rows of a weight, in groups.


_ELEMENTS = 1 << 21
"""Unfolded inputs at a time: 16 MiB."""


def is_known_product(product: Callable) -> bool:
    """Whether a product is exactly a `Linear` or a `Conv2d`, and no subclass."""
    return type(product) in (Linear, Conv2d)


def matrix(product: Callable, weight: torch.Tensor) -> torch.Tensor:
    """The rows of a weight, one for each output channel: [groups, N, K]."""
    groups = product.groups if isinstance(product, Conv2d) else 1
    return weight.reshape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:]))


def outputs(product: Callable, y: torch.Tensor) -> torch.Tensor:
    """Outputs by position: [groups, R, N]."""
    if not isinstance(product, Conv2d):
        return y.reshape(1, math.prod(y.shape[:-1]), y.shape[-1])
    batch, channels, high, wide = y.shape
    rows = y.permute(0, 2, 3, 1).reshape(batch * high * wide, product.groups, channels // product.groups)
    return rows.transpose(0, 1)


def inputs(product: Callable, x: torch.Tensor, kernel: torch.Size) -> Iterator[torch.Tensor]:
    """The rows of inputs for the positions of `outputs`, in their order: [groups, R, K] in pieces of R.

    Args:
        kernel: the weight's shape.
    """
    if not isinstance(product, Conv2d):
        yield x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
        return
    windows = windows_of(x, kernel[2:], product.stride, product.padding, product.dilation)
    size, high = max(1, math.prod(windows.shape[1:])), windows.shape[4]
    images, lines = max(1, _ELEMENTS // size), max(1, _ELEMENTS * high // size)
    for batch in windows.split(images):
        for piece in batch.split(lines, 4):  # a piece has several images, or some lines of one
            rows = piece.permute(0, 4, 5, 1, 2, 3).reshape(-1, product.groups, math.prod(kernel[1:]))
            yield rows.transpose(0, 1)


def times_each(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[groups, n, k] times [groups, k, m], mod 2^64."""
    found = [matmul(a, b) for a, b in zip(x, y, strict=True)]
    return torch.stack(found) if len(found) > 1 else found[0][None]
