"""Queries of a client: a pool out of its own data (expansion), and which of a pool it asks about (selection).

Selection is of PrivHFL, appendix C.3. All strategies look at the client's own model only: logits and features of the
pool under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import DataError, DatasetMissingError, SelectionError
from ..optional_deps import required_imports

MOST_CLUSTERS = 10


def select(
    kind: str, budget: int, *, size: int | None = None, logits: torch.Tensor | None = None,
    features: torch.Tensor | None = None, known: torch.Tensor | None = None, seed: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Choose the images of a pool to ask about.

    Args:
        kind: "random"; "margin" (CaPC, equation 7: the two likeliest classes are close); "entropy" (equation 3);
            "kcenter" (equation 4, greedy: the image furthest from all that are chosen or known); "icd", the smallest
            margins within each cluster, clusters keeping the proportions that they have in the pool.
        budget: the number of images.
        size: images in the pool, if neither logits nor features are given.
        logits: [N, classes] of the client's own model; for margin, entropy and icd.
        features: [N, F]; for kcenter and icd.
        known: [M, F], features of the training set, which kcenter need not cover again.
        seed: for random, for the first centre and for the clustering.

    Returns:
        `budget` different indices, int64, sorted.

    Raises:
        SelectionError: a budget beyond the pool, an unknown kind, a missing argument, values that are not finite.
    """
    if kind not in SELECTIONS:
        raise SelectionError(f"there is no selection {kind!r}; there are {', '.join(SELECTIONS)}")
    needed, rows = NEEDS[kind], []
    given = {"logits": logits, "features": features}
    for name in needed:
        value = given[name]
        if value is None:
            raise SelectionError(f"{kind} selection needs {name} of the pool under the client's own model")
        if value.dim() != 2 or not value.is_floating_point() or not bool(value.isfinite().all()):
            raise SelectionError(f"{name} must be finite numbers [N, K], got {value.dtype} {tuple(value.shape)}")
        rows.append(len(value))
    sizes = set(rows) or {size}
    found = next(iter(sizes)) if len(sizes) == 1 else None
    if found is None:
        raise SelectionError(f"the size of the pool is not clear: {size=}, rows {sorted(map(str, sizes))}")
    if not 1 <= budget <= found:
        raise SelectionError(f"{budget} queries of a pool of {found}: ask for at least one and at most {found}")
    return SELECTIONS[kind](budget, found, logits, features, known, seed).sort().values


def margin_of(logits: torch.Tensor) -> torch.Tensor:
    """[N]: probability of the likeliest class less that of the second; small is uncertain (CaPC, equation 7)."""
    if logits.shape[1] < 2:
        return logits.new_zeros(len(logits))
    top = logits.double().softmax(1).topk(2, dim=1).values
    return top[:, 0] - top[:, 1]


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """[N]: Shannon entropy of the predicted distribution, in nats; large is uncertain (equation 3)."""
    logarithms = logits.double().log_softmax(1)
    return -(logarithms.exp() * logarithms).nan_to_num(0.0).sum(1)


def _random(budget, size, logits, features, known, seed) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:budget]


def _margin(budget, size, logits, features, known, seed) -> torch.Tensor:
    return margin_of(logits).argsort(stable=True)[:budget]


def _entropy(budget, size, logits, features, known, seed) -> torch.Tensor:
    return entropy_of(logits).argsort(descending=True, stable=True)[:budget]


def _kcenter(budget, size, logits, features, known, seed) -> torch.Tensor:
    """Farthest-first traversal (Sener and Savarese, 2018): at most twice the best radius. O(budget N F)."""
    features = features.double()
    if known is not None and len(known):
        distance = torch.cdist(features, known.double()).min(1).values
        chosen = [int(distance.argmax())]
    else:
        distance = torch.full((size,), torch.inf, dtype=torch.float64)
        chosen = [int(torch.randint(size, (1,), generator=torch.Generator().manual_seed(seed)))]
    is_chosen = torch.zeros(size, dtype=torch.bool)
    is_chosen[chosen] = True
    while len(chosen) < budget:
        distance = torch.minimum(distance, (features - features[chosen[-1]]).norm(dim=1))
        # A pool may hold equal images, of which each is chosen at most once.
        chosen.append(int(distance.masked_fill(is_chosen, -1).argmax()))
        is_chosen[chosen[-1]] = True
    return torch.tensor(chosen)


def _icd(budget, size, logits, features, known, seed) -> torch.Tensor:
    clusters = _clusters(features, seed)
    margins = margin_of(logits)
    counts = clusters.bincount()
    chosen = []
    for cluster, quota in enumerate(proportional(counts, budget).tolist()):
        members = torch.nonzero(clusters == cluster).flatten()
        chosen.append(members[margins[members].argsort(stable=True)[:quota]])
    return torch.cat(chosen)


def _clusters(features: torch.Tensor, seed: int) -> torch.Tensor:
    """[N] cluster numbers by k-means (scikit-learn), with k about sqrt(N / 2) and at most `MOST_CLUSTERS`."""
    with required_imports("choosing queries by clusters", "scikit-learn", DatasetMissingError):
        from sklearn.cluster import KMeans

    different = len(features.unique(dim=0))
    k = max(1, min(MOST_CLUSTERS, different, round((len(features) / 2) ** 0.5)))
    means = KMeans(k, n_init=1, random_state=seed % 2**32)  # pyright: ignore[reportArgumentType]  "auto" is no type
    found = means.fit_predict(features.double().numpy())
    return torch.from_numpy(found).long()


def proportional(counts: torch.Tensor, budget: int) -> torch.Tensor:
    """`budget` divided in proportion to counts, largest remainders first; never more than a count, each within one of
    its exact quota."""
    quota = counts.double() * budget / counts.sum()
    whole = quota.floor().long()
    rest = (quota - whole).masked_fill(whole >= counts, -1)
    whole[rest.argsort(descending=True, stable=True)[: budget - int(whole.sum())]] += 1
    return whole


SELECTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "random": _random,
    "margin": _margin,
    "entropy": _entropy,
    "kcenter": _kcenter,
    "icd": _icd,
}
NEEDS: dict[str, tuple[str, ...]] = {
    "random": (),
    "margin": ("logits",),
    "entropy": ("logits",),
    "kcenter": ("features",),
    "icd": ("logits", "features"),
}


# Data set expansion: a large pool of unlabelled queries out of a small private data set (PrivHFL, section 3.2).
#
# Everything happens at the client that owns the data. An expanded image shows the originals (appendix G), so it is
# secret-shared like them.


LAMBDAS = tuple(k / 10 for k in range(1, 10))
"""Mixup's coefficients, "[0.1, 0.9] with an interval of 0.1" (section 3.2)."""

NOISE = 0.3
"""Standard deviation of the Gaussian noise, of pixels in [0, 1]; the paper names none."""


def expand(
    images: torch.Tensor, size: int, kind: str = "mixup", *, lambdas: Sequence[float] = LAMBDAS, noise: float = NOISE,
    generator: torch.Generator | None = None,
) -> torch.Tensor:  # fmt: skip
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
