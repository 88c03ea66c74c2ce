"""Data for experiments: what is bundled with scikit-learn, what torchvision has, and tables from a folder.

| name | samples | classes | from |
| --- | --- | ---: | --- |
| digits | 1 x 8 x 8, 1797 (28 x 28 for the CNN) | 10 | scikit-learn |
| breast-cancer | 30 numbers padded to 48, 569 | 2 | scikit-learn, in place of BANK |
| mnist | 1 x 28 x 28, 70000 | 10 | torchvision, when on disk |
| bank, agnews, mirna | 48, 300, 640 numbers | 2, 4, 2 | train.npz and test.npz with x and y, in a folder of that name |

Labels are divided among clients by Dir(0.5), label by label, test samples in the same proportions (SecSV, 7.1;
Yurochkin et al., 2019). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ...data.datasets import Split, from_torchvision, root_of
from ...data.errors import DataError, DatasetMissingError, PartitionError
from ...data.seeds import generator
from ...extras import needed
from .models import STEPS

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Federation:
    """Each client's training and test samples, by name."""

    name: str
    train: dict[str, Pair]
    test: dict[str, Pair]
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(next(iter(self.test.values()))[0].shape[1:])


def federation(
    name: str,
    clients: int,
    *,
    alpha: float = 0.5,
    test_fraction: float = 0.5,
    samples: int | None = None,
    tests: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
) -> Federation:
    """A data set divided among clients by Dir(alpha).

    Args:
        name: one of `DATA`.
        test_fraction: of the bundled sets that goes to testing; the others come divided.
        samples, tests: keep this many training and test samples in all.

    Raises:
        DataError: a name or a number that cannot be.
        DatasetMissingError, PartitionError: as `sectorch.data` raises them.
    """
    for what, count in (("samples", samples), ("tests", tests)):
        if count is not None and count < 1:
            raise DataError(f"{what} must be at least 1, got {count}")
    if name not in DATA:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATA)}")
    if not 0 < test_fraction < 1 or clients < 2:
        raise DataError(f"between 0 and 1 of the samples are for tests, and at least two clients; got {test_fraction} "
                        f"and {clients}")  # fmt: skip
    train, test, classes = DATA[name](root_of(root), test_fraction)
    train, test = _some(train, samples, seed, "train"), _some(test, tests, seed, "test")
    proportions = dirichlet(classes, clients, alpha, seed)
    names = [f"c{i + 1}" for i in range(clients)]
    parts = [divide(pair[1], proportions, 2 if pair is train else 1, seed) for pair in (train, test)]
    of_train, of_test = (
        {n: (pair[0][part], pair[1][part]) for n, part in zip(names, each, strict=True)}
        for pair, each in zip((train, test), parts, strict=True)
    )
    return Federation(name, of_train, of_test, classes)


def for_model(found: Federation, model: str) -> Federation:
    """The samples as a model takes them: padded with zeros to steps of 64 for the GRU, 28 x 28 for the CNN."""
    if model == "cnn" and len(found.shape) == 3 and found.shape[1:] != (28, 28):
        change = lambda x: F.interpolate(x, (28, 28), mode="bilinear", align_corners=False)
    elif model == "rnn":
        size = torch.Size(found.shape).numel()
        change = lambda x: F.pad(x.flatten(1), (0, max(0, 64 * STEPS - size) if size < 64 * STEPS else -size % STEPS))
    else:
        return found
    train, test = ({n: (change(x), y) for n, (x, y) in part.items()} for part in (found.train, found.test))
    return Federation(found.name, train, test, found.classes)


def dirichlet(classes: int, clients: int, alpha: float, seed: int) -> torch.Tensor:
    """[classes, clients]: for each label the clients' shares of it, from Dir_clients(alpha)."""
    if not 0 < alpha < float("inf"):
        raise PartitionError(f"alpha must be above 0 and finite, got {alpha}")
    gamma = torch._standard_gamma(  # pyright: ignore[reportPrivateImportUsage]  not in torch's stubs
        torch.full((classes, clients), float(alpha), dtype=torch.float64), generator=generator(seed, "dirichlet")
    ).clamp_min(1e-300)
    return gamma / gamma.sum(1, keepdim=True)


def divide(labels: torch.Tensor, proportions: torch.Tensor, least: int, seed: int) -> list[torch.Tensor]:
    """Disjoint sorted indices for each client; a client with fewer than `least` takes from the one who has most.

    Raises:
        PartitionError: fewer samples than clients need.
    """
    clients = proportions.shape[1]
    if len(labels) < clients * least:
        raise PartitionError(f"{clients} clients with at least {least} samples each, but there are {len(labels)}")
    draw = generator(seed, "divide", len(labels))
    hands: list[list[int]] = [[] for _ in range(clients)]
    for label, row in enumerate(proportions):
        own = torch.nonzero(labels == label).flatten()
        own = own[torch.randperm(len(own), generator=draw)].tolist()
        ends = [0, *(row.cumsum(0) * len(own)).round().long().tolist()]
        ends[-1] = len(own)
        for hand, start, end in zip(hands, ends, ends[1:], strict=False):
            hand += own[start:end]
    for hand in hands:
        while len(hand) < least:
            hand.append(max(hands, key=len).pop())
    return [torch.tensor(sorted(hand)) for hand in hands]


def _some(pair: Pair, count: int | None, seed: int, what: str) -> Pair:
    if count is None or count >= len(pair[1]):
        return pair
    chosen = torch.randperm(len(pair[1]), generator=generator(seed, "some", what))[:count]
    return pair[0][chosen], pair[1][chosen]


def _bundled(name: str) -> tuple[np.ndarray, np.ndarray]:
    with needed(name, "scikit-learn", DatasetMissingError):
        from sklearn import datasets
    data = getattr(datasets, f"load_{name.replace('-', '_')}")()
    return data.data, data.target


def _cut(x: torch.Tensor, y: torch.Tensor, fraction: float) -> tuple[Pair, Pair]:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    cut = round(len(y) * (1 - fraction))
    return (x[order[:cut]], y[order[:cut]]), (x[order[cut:]], y[order[cut:]])


def _digits(_root: Path, fraction: float):
    x, y = _bundled("digits")
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return *_cut(images, torch.tensor(y, dtype=torch.int64), fraction), 10


def _breast_cancer(_root: Path, fraction: float):
    x, y = _bundled("breast-cancer")
    train, test = _cut(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64), fraction)
    mean, spread = train[0].mean(0), train[0].std(0)
    # A quarter of a standard deviation is the unit, which keeps features and outputs within a few units.
    return *((F.pad((v - mean) / (4 * spread), (0, 18)), t) for v, t in (train, test)), 2


def _mnist(root: Path, _fraction: float):
    def read() -> list[Split]:
        from torchvision.datasets import MNIST

        parts = [MNIST(str(root), train=train) for train in (True, False)]
        return [Split(p.data.unsqueeze(1), p.targets) for p in parts]

    train, test = from_torchvision("mnist", root / "MNIST", f"d.MNIST('{root}', download=True)", read)
    return train.take(), test.take(), 10


def _table(name: str, features: int, classes: int) -> Callable:
    def read(root: Path, _fraction: float):
        folder, pairs = root / name, []
        for part in ("train", "test"):
            path = folder / f"{part}.npz"
            try:
                with np.load(path, allow_pickle=False) as found:
                    x, y = torch.tensor(found["x"], dtype=torch.float32), torch.tensor(found["y"], dtype=torch.int64)
            except (OSError, KeyError, ValueError) as error:
                raise DatasetMissingError(
                    f"{name} is not on disk: looked for {path} with arrays x [n, {features}] and y [n] "
                    f"({type(error).__name__}); make them from the data set, or name another root (--data-root)"
                ) from error
            if x.shape[1:] != (features,) or y.shape != x.shape[:1]:
                raise DataError(f"{path}: x must be [n, {features}] and y [n], got {list(x.shape)} and {list(y.shape)}")
            pairs.append((x, y))
        return *pairs, classes

    return read


DATA: dict[str, Callable] = {
    "digits": _digits,
    "breast-cancer": _breast_cancer,
    "mnist": _mnist,
    "bank": _table("bank", 48, 2),
    "agnews": _table("agnews", 300, 4),
    "mirna": _table("mirna", 640, 2),
}
