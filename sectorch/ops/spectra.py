"""Short-time Fourier transforms: every frame under its window, in one product with a public matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..tensor import ComplexShared
from ..tensor.table import Context, implements, of_complex
from .common import is_secret
from .complex_numbers import split
from .fourier import back, length, product, transform, transformed

T = torch.Tensor


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
    n, half = length(n_fft, n_fft), onesided is not False and not input.is_complex()
    columns = n // 2 + 1 if half else n
    window = _window(window, n_fft, win_length, torch.float64)
    matrix, parts = transform(n, -1, input.is_complex(), columns), []
    for part in (v for v in split(input) if v is not None):
        v = part.unsqueeze(0) if part.dim() == 1 else part
        if center:
            v = F.pad(v.unsqueeze(1), (n_fft // 2, n_fft // 2), pad_mode).squeeze(1)
        frames = v.unfold(-1, n_fft, hop)
        parts.append(frames * window if is_secret(window) else frames)
    if not is_secret(window):
        matrix = matrix * window.to(torch.float64).repeat(len(parts)).unsqueeze(1)
    y = product(context, parts[0] if len(parts) == 1 else torch.cat(parts, -1), matrix, n, -0.5 if normalized else 0.0)
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
        frames = transformed(context, x, None, -1, norm, inverse=True)
    else:  # as torch, which looks at no more than half of what both sides have
        frames = back(context, x if half else x[..., : n_fft // 2 + 1], n_fft, -1, norm)
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
