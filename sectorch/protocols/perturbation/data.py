"""Data sets for the commands: scikit-learn's bundled ones, and CIFAR-100 or an image folder where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...data.errors import DatasetMissingError
from ...extras import needed
from .errors import BatchMismatchError

NAMES = ("digits", "breast-cancer", "diabetes", "cifar100", "images")


@dataclass(frozen=True)
class Data:
    """Inputs and targets, split; targets are class numbers, or [N, 1] numbers for a regression."""

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    outputs: int
    regression: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.train[0].shape[1:])

    def targets(self, which: torch.Tensor, loss: str, dtype: torch.dtype) -> torch.Tensor:
        """Targets as the loss takes them: one-hot for a classification under mse."""
        if self.regression:
            return which.to(dtype)
        return torch.nn.functional.one_hot(which, self.outputs).to(dtype) if loss == "mse" else which


def load(name: str, root: str | None = None, dtype: torch.dtype = torch.float64) -> Data:
    """One data set, 4:1 training and test, the same split every time; columns of tables are standardised.

    Raises:
        BatchMismatchError: an unknown name, or files that are not there (nothing is downloaded).
        DatasetMissingError: scikit-learn or torchvision is not installed.
    """
    if name not in NAMES:
        raise BatchMismatchError(f"data {name!r} is not known; there are {', '.join(NAMES)}")
    if name in ("cifar100", "images"):
        return _images(name, root, dtype)
    with needed(name, "scikit-learn", DatasetMissingError):
        from sklearn import datasets
        from sklearn.model_selection import train_test_split

    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=dtype).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    elif name == "breast-cancer":
        x, y = datasets.load_breast_cancer(return_X_y=True)
        x, y = torch.tensor(x, dtype=dtype), torch.tensor(y)
    else:
        x, y = datasets.load_diabetes(return_X_y=True)
        x, y = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)[:, None]
        y = (y - y.mean()) / y.std()
    if x.dim() == 2:
        x = (x - x.mean(0)) / x.std(0)
    regression = y.is_floating_point()
    train, test = train_test_split(range(len(x)), test_size=0.2, random_state=0, stratify=None if regression else y)
    outputs = 1 if regression else int(y.max()) + 1
    return Data(name, (x[train], y[train]), (x[test], y[test]), outputs, regression)


def _images(name: str, root: str | None, dtype: torch.dtype) -> Data:
    if root is None or not Path(root).is_dir():
        none = "" if root is None else f"; {root} is none"
        raise BatchMismatchError(
            f"data {name!r} is read from a folder that is there already: name it with --data-root{none}"
        )
    with needed(name, "torchvision", DatasetMissingError):
        from torchvision import datasets, transforms
    shrink = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    try:
        if name == "cifar100":
            sets = [datasets.CIFAR100(root, train=train, transform=transforms.ToTensor()) for train in (True, False)]
        else:
            sets = [datasets.ImageFolder(Path(root) / part, transform=shrink) for part in ("train", "test")]
    except (RuntimeError, OSError) as error:
        wanted = "cifar-100-python" if name == "cifar100" else "train/ and test/ with a folder of images for each class"
        raise BatchMismatchError(f"data {name!r} is not in {root}, which should hold {wanted}") from error
    loaded = []
    for part in sets:
        pairs = [part[i] for i in range(len(part))]
        loaded.append((torch.stack([x for x, _ in pairs]).to(dtype), torch.tensor([y for _, y in pairs])))
    return Data(name, loaded[0], loaded[1], int(loaded[0][1].max()) + 1, False)
