"""Query selection: the part of the pool that a client asks about (PrivHFL, appendix C.3).

All strategies look at the client's own model only: logits and features of the pool under it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..optional_deps import required_imports
from .errors import DatasetMissingError, SelectionError

MOST_CLUSTERS = 10


def select(
    kind: str,
    budget: int,
    *,
    size: int | None = None,
    logits: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    known: torch.Tensor | None = None,
    seed: int = 0,
) -> torch.Tensor:
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
