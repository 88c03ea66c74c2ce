"""Rows of Fourier transforms and of what makes complex numbers and takes them apart."""

from __future__ import annotations

import torch

from sectorch.errors import ArgumentError, SectorchError, ShapeError, UnsupportedOpError

from .base import BOUND, Data, OpRow, call, complex_number, number, op, refused, whole
from .smooth import ERF

T = torch.Tensor
X, Z = number(2, 3, 6), complex_number(2, 3, 6)


def error(n: int, size: float = BOUND, own: float = 0.5) -> float:
    """Of n products of entries up to `size`, which err by `own`, and entries of the matrix, which err by 1/2 of 1."""
    return n * (size / 2 + own) + 1


ONE = error(2 * 7)
TWO = error(2 * 6, 3 * BOUND * 2, ONE + 1)
"""Along 3 entries, whose results are up to 3 (4 + 4), and then along 6."""
WHY = "a product with n cosines and sines (of both parts: 2 n), along one dimension after the other"


def one(name: str, *samples: Data, ulps: float = ONE) -> OpRow:
    long = (refused(UnsupportedOpError, "at most 4096", samples[0], 5000),)
    calls = [call(s) for s in samples] + [call(samples[0], 7, 1), call(samples[0], 4), call(samples[-1], norm="ortho")]
    return op(name, *calls, call(samples[0], norm="forward"), ulps=ulps, why=WHY, errors=long)


def several(name: str, *samples: Data) -> OpRow:
    calls = [call(s) for s in samples] + [call(samples[0], (2, 5), (0, 2)), call(samples[-1], norm="ortho")]
    wrong = (refused(SectorchError, "norm|Invalid", samples[0], norm="none"),)
    return op(name, *calls, call(samples[0], norm="forward"), ulps=2 * TWO, why=WHY, errors=wrong)


def along_all(name: str, *samples: Data) -> OpRow:
    small = [Data((2, 6), s.kind, s.low, s.high) for s in samples]
    return several(name, *samples, *small)


HANN = torch.hann_window(8, dtype=torch.float64).float()
SOUND, FRAMES = number(2, 24), complex_number(2, 5, 7)

ROWS = (
    one("fft", X, Z, whole(2, 3, 6)),
    one("ifft", Z, X),
    one("rfft", X),
    one("irfft", Z, X, ulps=2 * ONE),
    one("hfft", Z, X, ulps=2 * ONE),
    one("ihfft", X),
    several("fft2", X, Z),
    several("ifft2", Z, X),
    several("rfft2", X),
    several("irfft2", Z, X),
    op("fftn", call(number(3, 6)), call(Z, (3, 6)), call(X, dim=(0, 2)), ulps=2 * TWO, why=WHY),
    op("ifftn", call(complex_number(3, 6)), call(Z, (3, 6)), call(X, dim=(0, 2)), ulps=2 * TWO, why=WHY),
    op("rfftn", call(number(3, 6)), call(X, (3, 6)), call(X, dim=(0, 2)), ulps=2 * TWO, why=WHY),
    op("irfftn", call(complex_number(3, 6)), call(Z, (3, 6)), call(Z, dim=(0, 2)), ulps=2 * TWO, why=WHY),
    op(
        "stft",
        call(SOUND, 8, window=HANN, return_complex=True),
        call(SOUND, 8, 3, 6, HANN[:6], normalized=True, return_complex=True),
        call(number(24), 8, 5, center=False, window=HANN, onesided=False, return_complex=True),
        call(SOUND, 8, window=number(8, low=0, high=1).private, pad_mode="constant", return_complex=True),
        call(complex_number(2, 24), 8, window=HANN, return_complex=True),
        ulps=error(16, BOUND, 4),
        why="a frame times a window of A's errs by 1/2 (4 + 1) and a truncation; 2 8 products with the matrix",
        errors=(
            refused(
                UnsupportedOpError, "at most 4096", number(9000), 8192, window=torch.ones(8192), return_complex=True
            ),
            refused(ShapeError, "return_complex", SOUND, 8, window=HANN),
        ),
    ),
    op(
        "istft",
        call(FRAMES, 8, window=HANN),
        call(FRAMES, 8, 2, window=torch.ones(8), length=10, normalized=True),
        call(complex_number(2, 8, 7), 8, window=HANN, onesided=False, return_complex=True),
        ulps=4 * (error(20) + 20),
        why="4 frames of irfft, of up to 40, times windows over sums of squares: at most 1, with errors of 1/2",
        errors=(
            refused(ArgumentError, "plain tensor", FRAMES, 8, window=number(8, low=0.5, high=1).private),
            refused(ShapeError, "window overlap", FRAMES, 8, 8, window=torch.zeros(8)),
        ),
    ),
    op(
        "complex",
        call(number(2, 3), number(2, 3)),
        call(number(2, 3), number(1, 3).public),
        call(number(2, 3).private, number(2, 3)),
        ulps=0.5,
        why="parts keep their encoding",
    ),
    op("view_as_complex", call(number(3, 2)), ulps=0.5, why="parts keep their encoding"),
    op(
        "view_as_real",
        call(Z),
        ulps=0.5,
        why="parts keep their encoding",
        errors=(refused(SectorchError, "complex", X),),
    ),
    op("imag", call(Z), ulps=0.5, why="a part keeps its encoding", errors=(refused(SectorchError, "complex", X),)),
    op("polar", call(number(2, 3, low=0, high=4), number(2, 3)), ulps=4 * (ERF + 1) + 2, why="cos times 4, and 4 / 2"),
    op(
        "angle",
        call(number(2, 3)),
        call(complex_number(2, 3, low=0.5)),
        ulps=16,
        why="pi encoded; atan2: 1e-5 + 1e-6 / |(x, y)| of entries of 1/2 or more",
    ),
)
