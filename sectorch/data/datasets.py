"""The image data sets of the papers' evaluations, and scikit-learn's digits, which need no download.

| name | images | classes | from |
| --- | --- | ---: | --- |
| digits | 1 x 8 x 8, 1347 and 450 | 10 | bundled with scikit-learn |
| mnist, fashion-mnist | 1 x 28 x 28, 60000 and 10000 | 10 | torchvision, when on disk |
| svhn | 3 x 32 x 32, 73257 and 26032 | 10 | torchvision, when on disk |
| svhn-extra | the same with 531131 more to train on | 10 | torchvision, when on disk |
| cifar10, cifar100 | 3 x 32 x 32, 50000 and 10000 | 10, 100 | torchvision, when on disk |
| tiny-imagenet | 3 x 64 x 64, 100000 and 10000 | 200 | a folder, when on disk |
| ham10000 | 3 x 64 x 64 (resized), 85 % and 15 % | 7 | a folder with HAM10000_metadata.csv and .jpg files |

Nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..extras import needed
from .errors import DataError, DatasetMissingError
from .pictures import ham10000, tiny_imagenet
from .reading import ROOT_HELP as ROOT_HELP
from .reading import Dataset as Dataset
from .reading import Split as Split
from .reading import from_torchvision as from_torchvision
from .reading import root_of as root_of


def load(name: str, root: str | Path | None = None) -> Dataset:
    """A data set by name.

    Args:
        name: one of `DATASETS`.
        root: where to look; else $SECTORCH_DATA, else ~/.cache/sectorch. `digits` needs none.

    Raises:
        DataError: an unknown name.
        DatasetMissingError: not on disk; says where it looked and how to get it.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}")
    return DATASETS[name](root_of(root))


def _digits(_root: Path) -> Dataset:
    with needed("digits", "scikit-learn", DatasetMissingError):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    images, target = load_digits(return_X_y=True)
    train, test = train_test_split(range(len(target)), test_size=0.25, random_state=0, stratify=target)
    pixels = torch.tensor(images, dtype=torch.uint8).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    return Dataset("digits", Split(pixels[train], labels[train], 16), Split(pixels[test], labels[test], 16), 10)


@dataclass(frozen=True)
class _Torchvision:
    """A data set that torchvision reads from disk.

    Args:
        kind: the class in torchvision.datasets.
        folder: where torchvision looks for it, below the root.
        arguments: that choose the parts of the training split, and last the test split.
        axes: of the stored pixels, in the order [N, C, H, W]; None adds a channel.
    """

    name: str
    kind: str
    folder: str
    classes: int
    arguments: tuple[dict[str, Any], ...] = ({"train": True}, {"train": False})
    axes: tuple[int, ...] | None = (0, 3, 1, 2)

    def __call__(self, root: Path) -> Dataset:
        def read() -> list[Split]:
            import torchvision.datasets as sets

            parts = [getattr(sets, self.kind)(str(root), **arguments) for arguments in self.arguments]
            return [Split(self._pixels(p.data), _labels(p)) for p in parts]

        calls = "; ".join(
            f"d.{self.kind}('{root}', {', '.join(f'{k}={v!r}' for k, v in a.items())}, download=True)"
            for a in self.arguments
        )
        *parts, test = from_torchvision(self.name, root / self.folder, calls, read)
        train = Split(torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts]))
        return Dataset(self.name, train, test, self.classes)

    def _pixels(self, data: Any) -> torch.Tensor:
        pixels = torch.as_tensor(data)
        return pixels.unsqueeze(1) if self.axes is None else pixels.permute(self.axes)


def _labels(part: Any) -> torch.Tensor:
    return torch.as_tensor(part.labels if hasattr(part, "labels") else part.targets, dtype=torch.int64)


_SETS = (
    _Torchvision("mnist", "MNIST", "MNIST", 10, axes=None),
    _Torchvision("fashion-mnist", "FashionMNIST", "FashionMNIST", 10, axes=None),
    _Torchvision("svhn", "SVHN", "", 10, ({"split": "train"}, {"split": "test"}), (0, 1, 2, 3)),
    _Torchvision(
        "svhn-extra", "SVHN", "", 10, ({"split": "train"}, {"split": "extra"}, {"split": "test"}), (0, 1, 2, 3)
    ),
    _Torchvision("cifar10", "CIFAR10", "cifar-10-batches-py", 10),
    _Torchvision("cifar100", "CIFAR100", "cifar-100-python", 100),
)

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": _digits,
    **{one.name: one for one in _SETS},
    "tiny-imagenet": tiny_imagenet,
    "ham10000": ham10000,
}
