"""Fourier transforms: products with public matrices of cosines and sines, which take no message.

A transform of n numbers is one product with a matrix of 2^-20 fractions, so that its error is that of their rounding:
at most 2^-21 sum |x| and the inputs' own. Its factor (1/n, 1/sqrt(n)) is a power of two, which is exact, times what the
matrix takes in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..ring import products
from ..tensor import ComplexShared, SharedTensor
from ..tensor.table import Context, implements, of_complex
from .bilinear import bilinear
from .common import real, refuse
from .complex_numbers import joined, split
from .linear import columns_of, rows_of

T = torch.Tensor
LONGEST = 4096
"""Numbers of one transform: a matrix of twice their square is 256 MiB."""
EXPONENTS = {"backward": (0.0, -1.0), "ortho": (-0.5, -0.5), "forward": (-1.0, 0.0)}
"""By norm the power of n that a transform forward and one backward is multiplied by."""


def circle(n: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of 2 pi j k / n; the angle is reduced in whole numbers."""
    return _circle_on(torch.get_default_device(), n, rows, columns)


@functools.lru_cache(maxsize=8)
def _circle_on(device: torch.device, n: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.outer(torch.arange(rows, device=device), torch.arange(columns, device=device)) % n
    angles = steps.to(torch.float64) * (2 * math.pi / n)
    return torch.cos(angles), torch.sin(angles)


def transform(n: int, sign: int, complex_in: bool, columns: int) -> torch.Tensor:
    """The matrix from the real (and imaginary) parts of n numbers to both parts of so many of their transform's."""
    c, s = circle(n, n, columns)
    matrix = torch.cat((c, sign * s), 1)
    return torch.cat((matrix, torch.cat((-sign * s, c), 1))) if complex_in else matrix


def to_real(n: int) -> torch.Tensor:
    """The matrix from both parts of n // 2 + 1 numbers to the n real ones of which they are the transform, times n."""
    half = n // 2 + 1
    c, s = circle(n, half, n)
    times = torch.full((half, 1), 2.0, dtype=torch.float64)
    times[0] = 1
    if n % 2 == 0:
        times[-1] = 1
    return torch.cat((c * times, -s * times))


def product(context: Context, x: Any, matrix: torch.Tensor, n: int, exponent: float) -> SharedTensor:
    """x times the matrix and n^exponent: of the factor the matrix takes what is no power of two, and more where n is so
    large that the sum would leave little range."""
    whole = round(exponent * math.log2(n))
    spared = max(0, math.ceil(math.log2(n)) - 10)
    matrix = matrix * (float(n) ** exponent * 2.0 ** -(whole + spared))
    y = bilinear(context, products.matmul, real(x), matrix, matrix.shape[0], (rows_of, columns_of))
    return y * 2.0 ** (whole + spared) if whole + spared else y


def length(n: Any, known: int) -> int:
    n = known if n is None or n == -1 else n
    if n > LONGEST:
        refuse(f"a Fourier transform of {n} numbers", f"at most {LONGEST} at once: cut the signal, as torch.stft does")
    return n


def _sized(x: Any, n: int) -> Any:
    """x with n entries along its last dimension: cut, or zeros at the end."""
    size = x.shape[-1]
    return x if n == size else x[..., :n] if n < size else F.pad(x, (0, n - size))


def _exponent(norm: Any, inverse: bool) -> float:
    if norm not in (None, *EXPONENTS):
        raise ArgumentError(f'a norm is "backward", "ortho" or "forward", got {norm!r}')
    return EXPONENTS[norm or "backward"][inverse]


def transformed(context: Context, x: Any, n: Any, dim: int, norm: Any, inverse: bool, half: bool = False) -> Any:
    """The complex transform along one dimension, or the first half of it."""
    x = x.movedim(dim, -1)
    n = length(n, x.shape[-1])
    x = _sized(x, n)
    re, im = split(x)
    columns = n // 2 + 1 if half else n
    matrix = transform(n, 1 if inverse else -1, im is not None, columns)
    both = re if im is None else torch.cat((re, im), -1)
    y = product(context, both, matrix, n, _exponent(norm, inverse))
    return ComplexShared(*(y[..., at : at + columns].movedim(-1, dim) for at in (0, columns)))


def back(context: Context, x: Any, n: Any, dim: int, norm: Any, inverse: bool = True) -> torch.Tensor:
    """The real numbers of which x is the first half of the transform."""
    x = x.movedim(dim, -1)
    n = length(n, 2 * (x.shape[-1] - 1))
    re, im = split(_sized(x, n // 2 + 1))
    im = im if im is not None else torch.zeros(re.shape, dtype=re.dtype)
    y = product(context, torch.cat((re, im), -1), to_real(n), n, _exponent(norm, inverse))
    return y.movedim(-1, dim)


def _sides(x: Any, s: Any, dim: Any, dims: Sequence[int] | None = None) -> list[tuple[int, Any]]:
    """The dimensions of a transform along several, and their lengths."""
    dim = dims if dim is None else [dim] if isinstance(dim, int) else dim
    if dim is None:
        dim = list(range(x.dim())) if s is None else list(range(x.dim() - len(s), x.dim()))
    return list(zip([d % x.dim() for d in dim], [None] * len(dim) if s is None else s, strict=True))


def _every(context: Context, x: Any, sides: list, norm: Any, inverse: bool) -> Any:
    for dim, n in sides:
        x = transformed(context, x, n, dim, norm, inverse)
    return x if sides else joined(context, *split(x))


NOTE = "local but for truncations; error of a part 2^-21 (sum |x| + n); n <= 4096"


def _register(name: str, handler: Any) -> None:
    function = getattr(torch.fft, name)
    handler.__name__ = name
    implements(name, function, note=NOTE)(of_complex(function)(handler))


def _one(name: str, inverse: bool, half: bool = False) -> None:
    def handler(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
        return transformed(context, input, n, dim, norm, inverse, half)

    _register(name, handler)


def _several(name: str, inverse: bool, dims: tuple[int, ...] | None, kind: str) -> None:
    def handler(context: Context, input: Any, s: Any = None, dim: Any = None, norm: Any = None) -> Any:
        sides = _sides(input, s, dim, dims)
        if kind == "complex":
            return _every(context, input, sides, norm, inverse)
        *rest, (last, n) = sides
        if kind == "half":
            first = transformed(context, input, n, last, norm, inverse, half=True)
            return _every(context, first, rest, norm, inverse)
        x = _every(context, input, rest, norm, inverse) if rest else input
        return back(context, x, n, last, norm, inverse)

    _register(name, handler)


_one("fft", False)
_one("ifft", True)
_one("rfft", False, half=True)
for _suffix, _dims in (("2", (-2, -1)), ("n", None)):
    _several(f"fft{_suffix}", False, _dims, "complex")
    _several(f"ifft{_suffix}", True, _dims, "complex")
    _several(f"rfft{_suffix}", False, _dims, "half")
    _several(f"irfft{_suffix}", True, _dims, "real")


def _irfft(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> torch.Tensor:
    return back(context, input, n, dim, norm)


def _hfft(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> torch.Tensor:
    return back(context, torch.conj(input), n, dim, norm, inverse=False)


def _ihfft(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
    return transformed(context, input, n, dim, norm, inverse=True, half=True)


_register("irfft", _irfft)
_register("hfft", _hfft)
_register("ihfft", _ihfft)
