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

import csv
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..optional_deps import required_imports
from .errors import DataError, DatasetMissingError
from .seeds import generator

ROOT_VARIABLE = "SECTORCH_DATA"
ROOT_HELP = f"where data sets lie; else ${ROOT_VARIABLE}, else ~/.cache/sectorch"


@dataclass(frozen=True)
class ImageSplit:
    """Images [N, C, H, W] uint8 and labels [N] int64; `take` gives images as float32."""

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
    train: ImageSplit
    test: ImageSplit
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image, [C, H, W]."""
        return tuple(self.train.pixels.shape[1:])


def root_of(root: str | Path | None) -> Path:
    """The folder that `load` looks in."""
    chosen = root or os.environ.get(ROOT_VARIABLE) or Path.home() / ".cache" / "sectorch"
    return Path(chosen).expanduser().resolve()


def from_torchvision(name: str, folder: Path, call: str, read: Callable[[], Any]) -> Any:
    """Call `read`, which reads a data set from disk with torchvision.

    Args:
        name: of the data set.
        folder: where torchvision looks for it.
        call: the Python call that downloads it, where d is torchvision.datasets; for the error text.

    Raises:
        DatasetMissingError: not on disk, or torchvision is not installed.
    """
    with required_imports(name, "torchvision", DatasetMissingError):
        try:
            return read()
        except (RuntimeError, OSError) as error:
            raise DatasetMissingError(
                f"{name} is not on disk: looked in {folder} ({type(error).__name__}: {str(error).splitlines()[0]}); "
                f'get it with python -c "import torchvision.datasets as d; {call}", or name another folder (root=, '
                f"--data-root, or ${ROOT_VARIABLE})"
            ) from error


TINY_FOLDER = "tiny-imagenet-200"
HAM_SIDE = 64
"""Pixels a side that HAM10000's pictures (450 x 600) are resized to."""


def tiny_imagenet(root: Path) -> Dataset:
    """3 x 64 x 64, 200 classes, from the unpacked archive."""
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


def _pictures(files: list[tuple[Path, int]]) -> ImageSplit:
    """Picture files as one tensor; a grey picture gets three equal channels."""
    import numpy as np

    with required_imports("a folder of pictures", "pillow", DatasetMissingError):
        from PIL import Image

    pixels = torch.empty((len(files), 3, 64, 64), dtype=torch.uint8)
    for i, (path, _) in enumerate(files):
        with Image.open(path) as image:
            pixels[i] = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return ImageSplit(pixels, torch.tensor([label for _, label in files], dtype=torch.int64))


def ham10000(root: Path) -> Dataset:
    """A random split of 85 % and 15 % (section 4.1), from a fixed seed."""
    folder = next(
        (f for f in (root, root / "ham10000", root / "HAM10000") if (f / "HAM10000_metadata.csv").is_file()), None
    )
    if folder is None:
        raise DatasetMissingError(
            f"ham10000 is not on disk: looked for HAM10000_metadata.csv in {root} and {root / 'ham10000'}; get it from "
            f"https://doi.org/10.7910/DVN/DBW86T, or name another folder (--data-root)"
        )
    import numpy as np

    with required_imports("ham10000", "pillow", DatasetMissingError):
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
    train, test = (ImageSplit(pixels[part], labels[part]) for part in (order[:cut], order[cut:]))
    return Dataset("ham10000", train, test, len(names))


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
    with required_imports("digits", "scikit-learn", DatasetMissingError):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    images, target = load_digits(return_X_y=True)
    train, test = train_test_split(range(len(target)), test_size=0.25, random_state=0, stratify=target)
    pixels = torch.tensor(images, dtype=torch.uint8).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    return Dataset(
        "digits", ImageSplit(pixels[train], labels[train], 16), ImageSplit(pixels[test], labels[test], 16), 10
    )


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
        def read() -> list[ImageSplit]:
            import torchvision.datasets as sets

            parts = [getattr(sets, self.kind)(str(root), **arguments) for arguments in self.arguments]
            return [ImageSplit(self._pixels(p.data), _labels(p)) for p in parts]

        calls = "; ".join(
            f"d.{self.kind}('{root}', {', '.join(f'{k}={v!r}' for k, v in a.items())}, download=True)"
            for a in self.arguments
        )
        *parts, test = from_torchvision(self.name, root / self.folder, calls, read)
        train = ImageSplit(torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts]))
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
