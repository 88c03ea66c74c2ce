"""The data sets of CaPriDe's evaluation (section 4.1), and its three partitions (section 4.2).

| name | images | classes | from |
| --- | --- | ---: | --- |
| digits | 1 x 8 x 8 | 10 | bundled with scikit-learn |
| cifar10, cifar100 | 3 x 32 x 32 | 10, 100 | torchvision, when on disk |
| ham10000 | 3 x 64 x 64 (resized) | 7 | a folder with HAM10000_metadata.csv and the .jpg files below it |

Nothing is downloaded here.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from ...data.datasets import Dataset, Split, from_torchvision, installed, root_of
from ...data.datasets import load as load_known
from ...data.errors import DatasetMissingError
from ...data.partition import partition
from ...data.seeds import generator
from .errors import CaPriDeError

DATASETS = ("digits", "cifar10", "cifar100", "ham10000")
SPLITS = ("homogeneous", "heterogeneous", "no-overlap")
HAM_SIDE = 64
"""Pixels a side that HAM10000's pictures (450 x 600) are resized to."""


def load(name: str, root: str | Path | None = None) -> Dataset:
    """A data set by name, from a folder (else $SECTORCH_DATA, else ~/.cache/sectorch).

    Raises:
        CaPriDeError: an unknown name.
        DatasetMissingError: not on disk; says where it was looked for and how to get it.
    """
    if name not in DATASETS:
        raise CaPriDeError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}")
    if name == "cifar100":
        return _cifar100(root_of(root))
    return _ham10000(root_of(root)) if name == "ham10000" else load_known(name, root)


def _cifar100(root: Path) -> Dataset:
    def read() -> list[Split]:
        from torchvision.datasets import CIFAR100

        parts = [CIFAR100(str(root), train=train) for train in (True, False)]
        return [Split(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets)) for p in parts]

    call = f"d.CIFAR100('{root}', download=True)"
    train, test = from_torchvision("cifar100", root / "cifar-100-python", call, read)
    return Dataset("cifar100", train, test, 100)


def _ham10000(root: Path) -> Dataset:
    """A random 85 % to 15 % split (section 4.1), the same each time."""
    folder = next(
        (f for f in (root, root / "ham10000", root / "HAM10000") if (f / "HAM10000_metadata.csv").is_file()), None
    )
    if folder is None:
        raise DatasetMissingError(
            f"ham10000 is not on disk: looked for HAM10000_metadata.csv in {root} and {root / 'ham10000'}; get it from "
            f"https://doi.org/10.7910/DVN/DBW86T, or name another folder (--data-root)"
        )
    import numpy as np

    with installed("ham10000", "pillow"):
        from PIL import Image

    with (folder / "HAM10000_metadata.csv").open(newline="") as file:
        rows = [(row["image_id"], row["dx"]) for row in csv.DictReader(file)]
    files = {path.stem: path for path in folder.rglob("*.jpg")}
    missing = [image for image, _ in rows if image not in files]
    if missing:
        raise DatasetMissingError(
            f"ham10000: {len(missing)} pictures of the table are missing in {folder}, as {missing[0]}.jpg"
        )
    names = sorted({kind for _, kind in rows})
    pixels = torch.empty((len(rows), 3, HAM_SIDE, HAM_SIDE), dtype=torch.uint8)
    for i, (image, _) in enumerate(rows):
        with Image.open(files[image]) as picture:
            small = picture.convert("RGB").resize((HAM_SIDE, HAM_SIDE))
            pixels[i] = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    labels = torch.tensor([names.index(kind) for _, kind in rows])
    order = torch.randperm(len(rows), generator=generator(0, "ham10000"))
    cut = round(0.85 * len(rows))
    train, test = (Split(pixels[part], labels[part]) for part in (order[:cut], order[cut:]))
    return Dataset("ham10000", train, test, len(names))


def divide(
    labels: torch.Tensor, parties: int, split: str, *, samples: int | None = None, alpha: float = 0.5, seed: int = 0
) -> list[torch.Tensor]:
    """Disjoint indices for each party.

    Args:
        split: "homogeneous" (classes alike for all), "heterogeneous" (class proportions of each party from Dir(alpha);
            the paper draws them at random without naming a law), "no-overlap" (class c belongs to party c mod K, so
            that two parties get the even and the odd classes).
        samples: of each party; all, as evenly as they can be divided, unless named.

    Raises:
        CaPriDeError, PartitionError: an unknown split, or one that leaves a party without samples.
    """
    if samples is not None and samples < 1:
        raise CaPriDeError(f"samples of each party must be at least 1, got {samples}")
    if split not in SPLITS:
        raise CaPriDeError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    if split != "no-overlap":
        kind = "iid" if split == "homogeneous" else "dirichlet"
        return partition(labels, parties, samples, kind=kind, alpha=alpha, seed=seed)
    if int(labels.max()) + 1 < parties:
        raise CaPriDeError(f"{parties} parties cannot have classes of their own: there are {int(labels.max()) + 1}")
    out = []
    for k in range(parties):
        own = torch.nonzero(labels % parties == k).flatten()
        if samples is not None:
            if samples > len(own):
                raise CaPriDeError(f"party {k} has {len(own)} samples of its own classes, {samples} were asked for")
            own = own[torch.randperm(len(own), generator=generator(seed, "no-overlap", k))[:samples]].sort().values
        out.append(own)
    return out
