"""Fourier transforms, also of short frames: products with public matrices of cosines and sines. No message.

A transform of n numbers is one product with a matrix of 20 fraction bits, whose rounding gives an error of at most
2^-21 sum |x|, beside the inputs' own. The factor 1/n or 1/sqrt(n) is an exact power of two times a number that the
matrix includes.
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
from .common import as_floating, is_secret, refuse
from .complex_numbers import join_parts, split
from .linear import bilinear, columns_of, rows_of

T = torch.Tensor
LONGEST = 4096
"""Numbers of one transform: a matrix of twice their square is 256 MiB."""
EXPONENTS = {"backward": (0.0, -1.0), "ortho": (-0.5, -0.5), "forward": (-1.0, 0.0)}
"""For each norm the powers of n by which a forward and a backward transform are multiplied."""


def cosines_and_sines(n: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of 2 pi j k / n; the angle is reduced in whole numbers."""
    return _cosines_on(torch.get_default_device(), n, rows, columns)


@functools.lru_cache(maxsize=8)
def _cosines_on(device: torch.device, n: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.outer(torch.arange(rows, device=device), torch.arange(columns, device=device)) % n
    angles = steps.to(torch.float64) * (2 * math.pi / n)
    return torch.cos(angles), torch.sin(angles)


def transform_matrix(n: int, sign: int, complex_in: bool, columns: int) -> torch.Tensor:
    """The matrix from the real (and imaginary) parts of n numbers to both parts of `columns` of their transform."""
    c, s = cosines_and_sines(n, n, columns)
    matrix = torch.cat((c, sign * s), 1)
    return torch.cat((matrix, torch.cat((-sign * s, c), 1))) if complex_in else matrix


def inverse_matrix(n: int) -> torch.Tensor:
    """The matrix from both parts of the n // 2 + 1 numbers of a real transform to n times the n real numbers."""
    half = n // 2 + 1
    c, s = cosines_and_sines(n, half, n)
    times = torch.full((half, 1), 2.0, dtype=torch.float64)
    times[0] = 1
    if n % 2 == 0:
        times[-1] = 1
    return torch.cat((c * times, -s * times))


def times_matrix(context: Context, x: Any, matrix: torch.Tensor, n: int, exponent: float) -> SharedTensor:
    """x times the matrix and n^exponent.

    The matrix includes the part of the factor that is no power of two, and more if n is so large that the sum would
    leave little range.
    """
    whole = round(exponent * math.log2(n))
    spared = max(0, math.ceil(math.log2(n)) - 10)
    matrix = matrix * (float(n) ** exponent * 2.0 ** -(whole + spared))
    y = bilinear(context, products.matmul, as_floating(x), matrix, matrix.shape[0], (rows_of, columns_of))
    return y * 2.0 ** (whole + spared) if whole + spared else y


def checked_length(n: Any, known: int) -> int:
    n = known if n is None or n == -1 else n
    if n > LONGEST:
        refuse(f"a Fourier transform of {n} numbers", f"at most {LONGEST} at once: cut the signal, as torch.stft does")
    return n


def _fit(x: Any, n: int) -> Any:
    """x with n entries along its last dimension: cut, or padded with zeros."""
    size = x.shape[-1]
    return x if n == size else x[..., :n] if n < size else F.pad(x, (0, n - size))


def _exponent(norm: Any, inverse: bool) -> float:
    if norm not in (None, *EXPONENTS):
        raise ArgumentError(f'a norm is "backward", "ortho" or "forward", got {norm!r}')
    return EXPONENTS[norm or "backward"][inverse]


def transform_dimension(
    context: Context, x: Any, n: Any, dim: int, norm: Any, inverse: bool, half: bool = False
) -> Any:
    """The complex transform along one dimension, or the first half of it."""
    x = x.movedim(dim, -1)
    n = checked_length(n, x.shape[-1])
    x = _fit(x, n)
    re, im = split(x)
    columns = n // 2 + 1 if half else n
    matrix = transform_matrix(n, 1 if inverse else -1, im is not None, columns)
    both = re if im is None else torch.cat((re, im), -1)
    y = times_matrix(context, both, matrix, n, _exponent(norm, inverse))
    return ComplexShared(*(y[..., at : at + columns].movedim(-1, dim) for at in (0, columns)))


def inverse_to_real(context: Context, x: Any, n: Any, dim: int, norm: Any, inverse: bool = True) -> torch.Tensor:
    """The real numbers whose transform has x as its first half."""
    x = x.movedim(dim, -1)
    n = checked_length(n, 2 * (x.shape[-1] - 1))
    re, im = split(_fit(x, n // 2 + 1))
    im = im if im is not None else torch.zeros(re.shape, dtype=re.dtype)
    y = times_matrix(context, torch.cat((re, im), -1), inverse_matrix(n), n, _exponent(norm, inverse))
    return y.movedim(-1, dim)


def _dimensions(x: Any, s: Any, dim: Any, dims: Sequence[int] | None = None) -> list[tuple[int, Any]]:
    """The dimensions of a transform along several, and their lengths."""
    dim = dims if dim is None else [dim] if isinstance(dim, int) else dim
    if dim is None:
        dim = list(range(x.dim())) if s is None else list(range(x.dim() - len(s), x.dim()))
    return list(zip([d % x.dim() for d in dim], [None] * len(dim) if s is None else s, strict=True))


def _transform_all(context: Context, x: Any, sides: list, norm: Any, inverse: bool) -> Any:
    for dim, n in sides:
        x = transform_dimension(context, x, n, dim, norm, inverse)
    return x if sides else join_parts(context, *split(x))


NOTE = "local but for truncations; error of a part 2^-21 (sum |x| + n); n <= 4096"


def _register(name: str, handler: Any) -> None:
    function = getattr(torch.fft, name)
    handler.__name__ = name
    implements(name, function, note=NOTE)(of_complex(function)(handler))


def _register_single(name: str, inverse: bool, half: bool = False) -> None:
    def handler(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
        return transform_dimension(context, input, n, dim, norm, inverse, half)

    _register(name, handler)


def _register_many(name: str, inverse: bool, dims: tuple[int, ...] | None, kind: str) -> None:
    def handler(context: Context, input: Any, s: Any = None, dim: Any = None, norm: Any = None) -> Any:
        sides = _dimensions(input, s, dim, dims)
        if kind == "complex":
            return _transform_all(context, input, sides, norm, inverse)
        *rest, (last, n) = sides
        if kind == "half":
            first = transform_dimension(context, input, n, last, norm, inverse, half=True)
            return _transform_all(context, first, rest, norm, inverse)
        x = _transform_all(context, input, rest, norm, inverse) if rest else input
        return inverse_to_real(context, x, n, last, norm, inverse)

    _register(name, handler)


_register_single("fft", False)
_register_single("ifft", True)
_register_single("rfft", False, half=True)
for _suffix, _dims in (("2", (-2, -1)), ("n", None)):
    _register_many(f"fft{_suffix}", False, _dims, "complex")
    _register_many(f"ifft{_suffix}", True, _dims, "complex")
    _register_many(f"rfft{_suffix}", False, _dims, "half")
    _register_many(f"irfft{_suffix}", True, _dims, "real")


def _irfft(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> torch.Tensor:
    return inverse_to_real(context, input, n, dim, norm)


def _hfft(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> torch.Tensor:
    return inverse_to_real(context, torch.conj(input), n, dim, norm, inverse=False)


def _ihfft(context: Context, input: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
    return transform_dimension(context, input, n, dim, norm, inverse=True, half=True)


_register("irfft", _irfft)
_register("hfft", _hfft)
_register("ihfft", _ihfft)


# Short-time Fourier transforms: all frames, under their windows, in one product with a public matrix.


def _window(window: Any, n_fft: int, size: int | None, dtype: torch.dtype) -> Any:
    """The window in the middle of n_fft entries; ones where none is given."""
    size = n_fft if size is None else size
    window = torch.ones(size, dtype=dtype) if window is None else window
    before = (n_fft - size) // 2
    return F.pad(window, (before, n_fft - size - before)) if size != n_fft else window


@implements("stft", torch.stft, T.stft, note="as fft of each frame; a window of the model's takes a product more")
@of_complex(torch.stft, T.stft)
def stft(
    context: Context, input: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Any = None, center: bool = True, pad_mode: str = "reflect", normalized: bool = False,
    onesided: bool | None = None, return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    if align_to_window is not None:
        raise ArgumentError("stft takes align_to_window only where torch does: leave it out, and name center")
    if window is not None and window.is_complex():
        raise ArgumentError("a window of complex numbers is not supported; use a real one")
    hop = n_fft // 4 if hop_length is None else hop_length
    n, half = checked_length(n_fft, n_fft), onesided is not False and not input.is_complex()
    columns = n // 2 + 1 if half else n
    window = _window(window, n_fft, win_length, torch.float64)
    matrix, parts = transform_matrix(n, -1, input.is_complex(), columns), []
    for part in (v for v in split(input) if v is not None):
        v = part.unsqueeze(0) if part.dim() == 1 else part
        if center:
            v = F.pad(v.unsqueeze(1), (n_fft // 2, n_fft // 2), pad_mode).squeeze(1)
        frames = v.unfold(-1, n_fft, hop)
        parts.append(frames * window if is_secret(window) else frames)
    # A public window is a factor of the public matrix, so it costs nothing.
    if not is_secret(window):
        matrix = matrix * window.to(torch.float64).repeat(len(parts)).unsqueeze(1)
    frames = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    y = times_matrix(context, frames, matrix, n, -0.5 if normalized else 0.0)
    y = y.transpose(-1, -2)
    y = y.squeeze(0) if input.dim() == 1 else y
    found = ComplexShared(y.narrow(-2, 0, columns), y.narrow(-2, columns, columns))
    return found if return_complex else torch.view_as_real(found)


@implements("istft", torch.istft, T.istft, note="as ifft of each frame, over the windows' sum; public windows")
@of_complex(torch.istft, T.istft)
def istft(
    context: Context, input: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Any = None, center: bool = True, normalized: bool = False, onesided: bool | None = None,
    length: int | None = None, return_complex: bool = False,
) -> Any:  # fmt: skip
    if is_secret(window):
        raise ArgumentError(
            "istft divides by a sum of its window: make that a plain tensor of the forward's, no buffer"
        )
    hop = n_fft // 4 if hop_length is None else hop_length
    half = input.shape[-2] == n_fft // 2 + 1 if onesided is None else onesided
    window = _window(window, n_fft, win_length, torch.float64).to(torch.float64)
    x = input.transpose(-1, -2)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        frames = transform_dimension(context, x, None, -1, norm, inverse=True)
    else:  # as torch, which looks at no more than half of what both sides have
        frames = inverse_to_real(context, x if half else x[..., : n_fft // 2 + 1], n_fft, -1, norm)
    count = frames.shape[-2]
    size = n_fft + hop * (count - 1)
    places = (torch.arange(count).unsqueeze(1) * hop + torch.arange(n_fft)).flatten()
    sums = torch.zeros(size, dtype=torch.float64).index_add(0, places, (window * window).repeat(count))
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else size - n_fft // 2 if center else size
    factors = (window.repeat(count) / sums[places]).to(frames.dtype.to_real() if frames.is_complex() else frames.dtype)

    def added(v: Any) -> Any:
        flat = (v.flatten(-2) * factors.nan_to_num(0.0)).movedim(-1, 0)
        whole = torch.zeros((size, *flat.shape[1:]), dtype=flat.dtype).index_add(0, places, flat).movedim(0, -1)
        return F.pad(whole[..., start:end], (0, max(0, end - size)))

    re, im = split(frames)
    if not return_complex:
        return added(re)
    return ComplexShared(added(re), added(im))
