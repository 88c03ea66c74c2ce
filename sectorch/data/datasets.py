"""The data sets of the papers' evaluations, and two of scikit-learn's, which need no download.

| name | samples | classes | from |
| --- | --- | ---: | --- |
| digits | 1 x 8 x 8, 1347 and 450 | 10 | bundled with scikit-learn |
| mnist, fashion-mnist | 1 x 28 x 28, 60000 and 10000 | 10 | torchvision, when on disk |
| svhn | 3 x 32 x 32, 73257 and 26032 | 10 | torchvision, when on disk |
| svhn-extra | the same with 531131 more to train on | 10 | torchvision, when on disk |
| cifar10, cifar100 | 3 x 32 x 32, 50000 and 10000 | 10, 100 | torchvision, when on disk |
| tiny-imagenet | 3 x 64 x 64, 100000 and 10000 | 200 | a folder, when on disk |
| ham10000, ldc | 3 x 64 x 64 (resized), 85 % and 15 % | 7 | a folder with HAM10000_metadata.csv and .jpg files |
| aptos | 3 x 64 x 64 (the middle, resized), 85 % and 15 % | 5 | a folder with train.csv and train_images/*.png |
| breast-cancer | 30 numbers, padded to 48, 427 and 142 | 2 | bundled with scikit-learn |
| ubmd | one number a column or category, 80 % and 10 % | 2 | bank-additional-full.csv, in a folder |
| bank, agnews, mirna | 48, 300, 640 numbers | 2, 4, 2 | train.npz and test.npz with x and y, in a folder so named |

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
import torch.nn.functional as F

from ..errors import DataError, DatasetMissingError
from ..optional_deps import required_imports
from .seeds import generator

ROOT_VARIABLE = "SECTORCH_DATA"
ROOT_HELP = f"where data sets lie; else ${ROOT_VARIABLE}, else ~/.cache/sectorch"


@dataclass(frozen=True)
class Split:
    """Images [N, C, H, W] uint8, or rows [N, F] float32 of a table, and labels [N] int64.

    Attributes:
        white: what `take` divides samples by: the largest value of a pixel, and 1 for a table.
    """

    samples: torch.Tensor
    labels: torch.Tensor
    white: int = 255

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: torch.Tensor | slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples as float32, images in [0, 1], and their labels."""
        return self.samples[indices].float() / self.white, self.labels[indices]


@dataclass(frozen=True)
class Dataset:
    """A training and a test split with the number of classes."""

    name: str
    train: Split
    test: Split
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample: [C, H, W] of an image, [F] of a table's row."""
        return tuple(self.train.samples.shape[1:])


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
SIDE = 64
"""Pixels a side that HAM10000's pictures (450 x 600) and APTOS's are resized to."""
Loader = Callable[[Path, float | None], Dataset]
"""The folder of data sets and `load`'s test_fraction -> a data set."""


def tiny_imagenet(root: Path, test_fraction: float | None = None) -> Dataset:
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


def _pictures(files: list[tuple[Path, int]], shape: Callable[[Any], Any] = lambda image: image) -> Split:
    """Picture files, each of SIDE x SIDE pixels after `shape`, as one tensor; a grey one gets three equal channels."""
    import numpy as np

    with required_imports("a folder of pictures", "pillow", DatasetMissingError):
        from PIL import Image

    pixels = torch.empty((len(files), 3, SIDE, SIDE), dtype=torch.uint8)
    for i, (path, _) in enumerate(files):
        with Image.open(path) as image:
            pixels[i] = torch.from_numpy(np.array(shape(image.convert("RGB")))).permute(2, 0, 1)
    return Split(pixels, torch.tensor([label for _, label in files], dtype=torch.int64))


def _resized(image: Any) -> Any:
    return image.resize((SIDE, SIDE))


def _middle(image: Any) -> Any:
    """The largest square in the middle, resized."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return _resized(image.crop((left, top, left + side, top + side)))


def _folder_with(name: str, file: str, root: Path, inside: tuple[str, ...], source: str) -> Path:
    """The folder that holds a file: the root, or one of those in it."""
    found = next((f for f in (root, *(root / folder for folder in inside)) if (f / file).is_file()), None)
    if found is None:
        raise DatasetMissingError(
            f"{name} is not on disk: looked for {file} in {root} and {root / inside[0]}; get it from {source}, or name "
            f"another folder (--data-root)"
        )
    return found


def _table_of_pictures(
    name: str, folder: Path, table: str, image: str, label: str, suffix: str, shape: Callable[[Any], Any]
) -> tuple[Split, list[str]]:
    """Pictures whose names and labels stand in a CSV file, and the sorted names of the classes."""
    with (folder / table).open(newline="") as file:
        rows = [(row[image], row[label]) for row in csv.DictReader(file)]
    files = {path.stem: path for path in folder.rglob(f"*{suffix}")}
    missing = [one for one, _ in rows if one not in files]
    if missing:
        raise DatasetMissingError(
            f"{name}: {len(missing)} pictures of the table are missing in {folder}, as {missing[0]}{suffix}"
        )
    names = sorted({kind for _, kind in rows})
    return _pictures([(files[one], names.index(kind)) for one, kind in rows], shape), names


def _divided(name: str, whole: Split, classes: int, test_fraction: float, order: torch.Tensor) -> Dataset:
    return _cut(name, whole, classes, round(len(whole) * (1 - test_fraction)), order)


def _cut(name: str, whole: Split, classes: int, cut: int, order: torch.Tensor) -> Dataset:
    part = lambda places: Split(whole.samples[places], whole.labels[places], whole.white)
    return Dataset(name, part(order[:cut]), part(order[cut:]), classes)


def ham10000(root: Path, test_fraction: float | None = None) -> Dataset:
    """The lesions of HAM10000 (LDC); a random split of 85 % and 15 % from a fixed seed (CaPriDe, section 4.1)."""
    folder = _folder_with(
        "ham10000", "HAM10000_metadata.csv", root, ("ham10000", "HAM10000"), "https://doi.org/10.7910/DVN/DBW86T"
    )
    found = _table_of_pictures("ham10000", folder, "HAM10000_metadata.csv", "image_id", "dx", ".jpg", _resized)
    order = torch.randperm(len(found[0]), generator=generator(0, "ham10000"))
    return _divided("ham10000", found[0], len(found[1]), 0.15, order)


def aptos(root: Path, test_fraction: float | None = None) -> Dataset:
    """Retinas by the severity of retinopathy, 0 to 4 (APTOS 2019; perturbed models, section IV).

    The labels of the competition's own test pictures are not public: 15 % of train.csv are the test split, from a fixed
    seed.
    """
    source = "https://www.kaggle.com/c/aptos2019-blindness-detection"
    folder = _folder_with("aptos", "train.csv", root, ("aptos", "aptos2019-blindness-detection"), source)
    found, names = _table_of_pictures("aptos", folder, "train.csv", "id_code", "diagnosis", ".png", _middle)
    if not set(names) <= set("01234"):
        raise DataError(f"aptos: a diagnosis is 0 to 4, got {', '.join(names)} in {folder / 'train.csv'}")
    found = Split(found.samples, torch.tensor([int(name) for name in names])[found.labels])
    return _divided("aptos", found, 5, 0.15, torch.randperm(len(found), generator=generator(0, "aptos")))


def ubmd(root: Path, test_fraction: float | None = None) -> Dataset:
    """UCI's bank marketing, whether a client subscribes a deposit (perturbed models, section IV; 8:1:1).

    Numbers are standardised by the training rows, and each category of a column of words has a column of its own. The
    tenth for validation is in neither split.
    """
    file, source = "bank-additional-full.csv", "https://archive.ics.uci.edu/dataset/222/bank+marketing"
    path = _folder_with("ubmd", file, root, ("ubmd", "bank-additional"), source) / file
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter=";"))
    if len(rows) < 10 or not {"age", "job", "y"} <= rows[0].keys() or not {row["y"] for row in rows} <= {"yes", "no"}:
        raise DataError(f"{path}: lines of age;job;...;y with y yes or no, and at least ten of them")
    order = torch.randperm(len(rows), generator=generator(0, "ubmd"))
    train, test = order[: 8 * len(rows) // 10], order[9 * len(rows) // 10 :]
    columns = []
    for name in (name for name in rows[0] if name != "y"):
        words = [row[name] for row in rows]
        try:
            values = torch.tensor([float(word) for word in words])
            columns.append((values - values[train].mean()) / values[train].std().clamp_min(1e-6))
        except ValueError:
            columns += [torch.tensor([float(word == kind) for word in words]) for kind in sorted(set(words))]
    samples, labels = torch.stack(columns, 1), torch.tensor([int(row["y"] == "yes") for row in rows])
    part = lambda places: Split(samples[places], labels[places], 1)
    return Dataset("ubmd", part(train), part(test), 2)


def load(name: str, root: str | Path | None = None, test_fraction: float | None = None) -> Dataset:
    """A data set by name.

    Args:
        name: one of `DATASETS`.
        root: where to look; else $SECTORCH_DATA, else ~/.cache/sectorch. `digits` and `breast-cancer` need none.
        test_fraction: how much of those two is for tests, cut by a fixed permutation; by default a quarter. The others
            come divided.

    Raises:
        DataError: an unknown name, or a fraction that is not between 0 and 1.
        DatasetMissingError: not on disk; says where it looked and how to get it.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise DataError(f"between 0 and 1 of the samples are for tests, got {test_fraction}")
    return DATASETS[name](root_of(root), test_fraction)


def _digits(_root: Path, test_fraction: float | None = None) -> Dataset:
    """Images 1 x 8 x 8; by default a quarter of each digit is for tests."""
    with required_imports("digits", "scikit-learn", DatasetMissingError):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    images, target = load_digits(return_X_y=True)
    whole = Split(torch.tensor(images, dtype=torch.uint8).view(-1, 1, 8, 8), torch.tensor(target), 16)
    if test_fraction is not None:
        return _divided("digits", whole, 10, test_fraction, _shuffled(len(whole)))
    train, test = train_test_split(range(len(target)), test_size=0.25, random_state=0, stratify=target)
    return _cut("digits", whole, 10, len(train), torch.tensor([*train, *test]))


def _breast_cancer(_root: Path, test_fraction: float | None = None) -> Dataset:
    """A quarter of a standard deviation is the unit, which keeps features and outputs within a few units."""
    with required_imports("breast-cancer", "scikit-learn", DatasetMissingError):
        from sklearn.datasets import load_breast_cancer
    x, y = load_breast_cancer(return_X_y=True)
    whole, order = Split(torch.tensor(x, dtype=torch.float32), torch.tensor(y), 1), _shuffled(len(y))
    found = _divided("breast-cancer", whole, 2, 0.25 if test_fraction is None else test_fraction, order)
    mean, spread = found.train.samples.mean(0), found.train.samples.std(0)
    padded = lambda part: Split(F.pad((part.samples - mean) / (4 * spread), (0, 18)), part.labels, 1)
    return Dataset("breast-cancer", padded(found.train), padded(found.test), 2)


def _shuffled(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def _table(name: str, features: int, classes: int) -> Loader:
    """Rows in two NumPy archives."""

    def read(root: Path, test_fraction: float | None = None) -> Dataset:
        import numpy as np

        pairs = []
        for part in ("train", "test"):
            path = root / name / f"{part}.npz"
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
            pairs.append(Split(x, y, 1))
        train, test = pairs
        return Dataset(name, train, test, classes)

    return read


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

    def __call__(self, root: Path, test_fraction: float | None = None) -> Dataset:
        def read() -> list[Split]:
            import torchvision.datasets as sets

            parts = [getattr(sets, self.kind)(str(root), **arguments) for arguments in self.arguments]
            return [Split(self._pixels(p.data), _labels(p)) for p in parts]

        calls = "; ".join(
            f"d.{self.kind}('{root}', {', '.join(f'{k}={v!r}' for k, v in a.items())}, download=True)"
            for a in self.arguments
        )
        *parts, test = from_torchvision(self.name, root / self.folder, calls, read)
        train = Split(torch.cat([p.samples for p in parts]), torch.cat([p.labels for p in parts]))
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

_IMAGES: dict[str, Loader] = {
    "digits": _digits,
    **{one.name: one for one in _SETS},
    "tiny-imagenet": tiny_imagenet,
    "ham10000": ham10000,
    "ldc": ham10000,
    "aptos": aptos,
}
IMAGES = tuple(_IMAGES)
"""Names of those whose samples are images."""

DATASETS: dict[str, Loader] = {
    **_IMAGES,
    "breast-cancer": _breast_cancer,
    "ubmd": ubmd,
    "bank": _table("bank", 48, 2),
    "agnews": _table("agnews", 300, 4),
    "mirna": _table("mirna", 640, 2),
}
