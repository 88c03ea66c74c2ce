"""The data sets of PrivHFL's evaluation, and scikit-learn's digits, which need no download.

| name | images | classes | from |
| --- | --- | ---: | --- |
| digits | 1 x 8 x 8, 1347 and 450 | 10 | bundled with scikit-learn |
| svhn | 3 x 32 x 32, 73257 and 26032 | 10 | torchvision, when on disk |
| cifar10 | 3 x 32 x 32, 50000 and 10000 | 10 | torchvision, when on disk |
| tiny-imagenet | 3 x 64 x 64, 100000 and 10000 | 200 | a folder, when on disk |

Source: PrivHFL, appendix F. Nothing is downloaded here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import DataError, DatasetMissingError

ROOT_VARIABLE = "SECTORCH_DATA"
TINY_FOLDER = "tiny-imagenet-200"


@dataclass(frozen=True)
class Split:
    """Images and labels that stay integers until some are taken: [N, C, H, W] uint8, and [N] int64."""

    pixels: torch.Tensor
    labels: torch.Tensor
    white: int = 255

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: torch.Tensor | slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Images in [0, 1] as float32, and their labels."""
        return self.pixels[indices].float() / self.white, self.labels[indices]


@dataclass(frozen=True)
class Dataset:
    """A training and a test split with the number of classes."""

    name: str
    train: Split
    test: Split
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image, [C, H, W]."""
        return tuple(self.train.pixels.shape[1:])


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


def root_of(root: str | Path | None) -> Path:
    """The folder that `load` looks in."""
    chosen = root or os.environ.get(ROOT_VARIABLE) or Path.home() / ".cache" / "sectorch"
    return Path(chosen).expanduser().resolve()


@contextmanager
def installed(what: str, package: str) -> Iterator[None]:
    """Imports of a package that only some data sets need.

    Args:
        what: what needs it, for people.
        package: its name as pip knows it.

    Raises:
        DatasetMissingError: it is not installed; says how to install it.
    """
    try:
        yield
    except ImportError as error:
        raise DatasetMissingError(f"{what} needs {package}, which is not installed: pip install {package}") from error


def from_torchvision(name: str, folder: Path, call: str, read: Callable[[], Any]) -> Any:
    """`read()`, which takes a data set from disk with torchvision.

    Args:
        name: of the data set.
        folder: where torchvision looks for it.
        call: Python that downloads it, where d is torchvision.datasets.

    Raises:
        DatasetMissingError: not on disk, or torchvision is not installed.
    """
    with installed(name, "torchvision"):
        try:
            return read()
        except (RuntimeError, OSError) as error:
            raise DatasetMissingError(
                f"{name} is not on disk: looked in {folder} ({type(error).__name__}: {str(error).splitlines()[0]}); "
                f'get it with python -c "import torchvision.datasets as d; {call}", or name another folder (root=, '
                f"--data-root, or ${ROOT_VARIABLE})"
            ) from error


def _digits(_root: Path) -> Dataset:
    with installed("digits", "scikit-learn"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    images, target = load_digits(return_X_y=True)
    train, test = train_test_split(range(len(target)), test_size=0.25, random_state=0, stratify=target)
    pixels = torch.tensor(images, dtype=torch.uint8).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    return Dataset("digits", Split(pixels[train], labels[train], 16), Split(pixels[test], labels[test], 16), 10)


def _cifar10(root: Path) -> Dataset:
    def read() -> list[Split]:
        from torchvision.datasets import CIFAR10

        parts = [CIFAR10(str(root), train=train) for train in (True, False)]
        return [Split(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets)) for p in parts]

    call = f"d.CIFAR10('{root}', download=True)"
    train, test = from_torchvision("cifar10", root / "cifar-10-batches-py", call, read)
    return Dataset("cifar10", train, test, 10)


def _svhn(root: Path) -> Dataset:
    def read() -> list[Split]:
        from torchvision.datasets import SVHN

        parts = [SVHN(str(root), split=split) for split in ("train", "test")]
        return [Split(torch.from_numpy(p.data), torch.as_tensor(p.labels, dtype=torch.int64)) for p in parts]

    call = f"[d.SVHN('{root}', split=s, download=True) for s in ('train', 'test')]"
    train, test = from_torchvision("svhn", root, call, read)
    return Dataset("svhn", train, test, 10)


def _tiny_imagenet(root: Path) -> Dataset:
    folder = root if (root / "wnids.txt").is_file() else root / TINY_FOLDER
    annotations = folder / "val" / "val_annotations.txt"
    missing = [p for p in (folder / "wnids.txt", folder / "train", annotations) if not p.exists()]
    if missing:
        raise DatasetMissingError(
            f"tiny-imagenet is not on disk: looked for {', '.join(map(str, missing))}; unpack "
            f"http://cs231n.stanford.edu/tiny-imagenet-200.zip in {root}, or name another folder (root=, --data-root, "
            f"or ${ROOT_VARIABLE})"
        )
    names = (folder / "wnids.txt").read_text().split()
    number = {name: i for i, name in enumerate(names)}
    train = [(p, number[name]) for name in names for p in sorted((folder / "train" / name / "images").iterdir())]
    rows = [line.split("\t") for line in annotations.read_text().splitlines() if line]
    test = [(folder / "val" / "images" / row[0], number[row[1]]) for row in rows]
    return Dataset("tiny-imagenet", _pictures(train), _pictures(test), len(names))


def _pictures(files: list[tuple[Path, int]]) -> Split:
    """Picture files as one tensor, grey ones as three equal channels."""
    import numpy as np

    with installed("a folder of pictures", "pillow"):
        from PIL import Image

    pixels = torch.empty((len(files), 3, 64, 64), dtype=torch.uint8)
    for i, (path, _) in enumerate(files):
        with Image.open(path) as image:
            pixels[i] = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return Split(pixels, torch.tensor([label for _, label in files], dtype=torch.int64))


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": _digits,
    "svhn": _svhn,
    "cifar10": _cifar10,
    "tiny-imagenet": _tiny_imagenet,
}
