"""Data set expansion: a large pool of unlabelled queries out of a small private data set (PrivHFL, section 3.2).

Everything happens at the client that owns the data. An expanded image shows the originals (appendix G), so it is
secret-shared like them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .errors import DataError

LAMBDAS = tuple(k / 10 for k in range(1, 10))
"""Mixup's coefficients, "[0.1, 0.9] with an interval of 0.1" (section 3.2)."""

NOISE = 0.3
"""Standard deviation of the Gaussian noise, of pixels in [0, 1]; the paper names none."""


def expand(
    images: torch.Tensor,
    size: int,
    kind: str = "mixup",
    *,
    lambdas: Sequence[float] = LAMBDAS,
    noise: float = NOISE,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A pool of `size` images made from a client's own.

    Args:
        images: [N, C, H, W], floating point. Read only.
        size: images in the pool. With "private" it may be at most N, and N images come in the order they have.
        kind: "mixup" (equation 1), "cutmix" and "cutout" (appendix B.1), "flip", "noise", or "private".
        lambdas: coefficients that mixup draws from.
        noise: standard deviation for "noise".
        generator: draws are reproducible with one.

    Returns:
        [size, C, H, W] of the same dtype. Mixup and cutmix pair two different images.

    Raises:
        DataError: no images, too few to pair, an unknown kind, or an option out of range.
    """
    if kind not in EXPANSIONS:
        raise DataError(f"there is no expansion {kind!r}; there are {', '.join(EXPANSIONS)}")
    if images.dim() != 4 or not images.is_floating_point() or not len(images):
        raise DataError(f"expansion takes images [N, C, H, W], got {images.dtype} of shape {tuple(images.shape)}")
    if size < 1:
        raise DataError(f"a pool needs at least one image, got {size}")
    if kind in PAIRED and len(images) < 2:
        raise DataError(f"{kind} pairs images and needs at least two, got {len(images)}")
    if kind == "private" and size > len(images):
        raise DataError(f"'private' has the {len(images)} private images and no more, {size} were asked for")
    if kind == "mixup" and (not lambdas or not all(0 <= v <= 1 for v in lambdas)):
        raise DataError(f"mixup coefficients must lie in [0, 1], got {list(lambdas)}")
    if kind == "noise" and not 0 < noise < float("inf"):
        raise DataError(f"the noise needs a finite standard deviation above 0, got {noise}")
    return EXPANSIONS[kind](images, size, generator, tuple(lambdas), noise)


def mixup(first: torch.Tensor, second: torch.Tensor, lam: torch.Tensor | float) -> torch.Tensor:
    """lam * first + (1 - lam) * second (PrivHFL, equation 1; Zhang et al., 2018)."""
    return lam * first + (1 - lam) * second


def _any(images: torch.Tensor, size: int, draw: torch.Generator | None) -> torch.Tensor:
    """Indices that go through all images before one comes again."""
    rounds = [torch.randperm(len(images), generator=draw) for _ in range(-(-size // len(images)))]
    return torch.cat(rounds)[:size]


def _pairs(images: torch.Tensor, size: int, draw: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Two different images for each place."""
    i = _any(images, size, draw)
    step = torch.randint(1, len(images), (size,), generator=draw)
    return images[i], images[(i + step) % len(images)]


def _boxes(images: torch.Tensor, size: int, draw: torch.Generator | None, low: float, high: float) -> torch.Tensor:
    """Masks [size, 1, H, W], True in a box of low to high of the area, somewhere inside the image."""
    height, width = images.shape[-2:]
    side = (low + (high - low) * torch.rand(size, generator=draw)).sqrt()
    h = (side * height).round().clamp(1, height)
    w = (side * width).round().clamp(1, width)
    top = (torch.rand(size, generator=draw) * (height - h + 1)).floor()
    left = (torch.rand(size, generator=draw) * (width - w + 1)).floor()
    rows, columns = torch.arange(height), torch.arange(width)
    inside_rows = (rows >= top[:, None]) & (rows < (top + h)[:, None])
    inside_columns = (columns >= left[:, None]) & (columns < (left + w)[:, None])
    return (inside_rows[:, :, None] & inside_columns[:, None, :]).unsqueeze(1)


def _mixup(images, size, draw, lambdas, noise) -> torch.Tensor:
    first, second = _pairs(images, size, draw)
    chosen = torch.randint(len(lambdas), (size,), generator=draw)
    lam = torch.tensor(lambdas, dtype=images.dtype)[chosen].view(-1, 1, 1, 1)
    return mixup(first, second, lam)


def _cutmix(images, size, draw, lambdas, noise) -> torch.Tensor:
    """M x_i + (1 - M) x_j, with M a box (Yun et al., 2019)."""
    first, second = _pairs(images, size, draw)
    return torch.where(_boxes(images, size, draw, 0.1, 0.9), first, second)


def _cutout(images, size, draw, lambdas, noise) -> torch.Tensor:
    """A box of up to a quarter of the area is black (DeVries and Taylor, 2017)."""
    return images[_any(images, size, draw)].masked_fill(_boxes(images, size, draw, 0.05, 0.25), 0)


def _flip(images, size, draw, lambdas, noise) -> torch.Tensor:
    """Every image mirrored left to right, or upside down, or both, or as it is."""
    chosen = images[_any(images, size, draw)]
    for dim in (-1, -2):
        coin = torch.rand(size, generator=draw) < 0.5
        chosen = torch.where(coin.view(-1, 1, 1, 1), chosen.flip(dim), chosen)
    return chosen


def _noise(images, size, draw, lambdas, noise) -> torch.Tensor:
    chosen = images[_any(images, size, draw)]
    return chosen + noise * torch.randn(chosen.shape, generator=draw, dtype=images.dtype)


def _private(images, size, draw, lambdas, noise) -> torch.Tensor:
    return images[:size].clone()


EXPANSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mixup": _mixup,
    "cutmix": _cutmix,
    "cutout": _cutout,
    "flip": _flip,
    "noise": _noise,
    "private": _private,
}
PAIRED = ("mixup", "cutmix")
