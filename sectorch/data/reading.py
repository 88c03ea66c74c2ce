"""What a data set is, where it lies, and what is said when it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..extras import needed
from .errors import DatasetMissingError

ROOT_VARIABLE = "SECTORCH_DATA"
ROOT_HELP = f"where data sets lie; else ${ROOT_VARIABLE}, else ~/.cache/sectorch"


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


def root_of(root: str | Path | None) -> Path:
    """The folder that `load` looks in."""
    chosen = root or os.environ.get(ROOT_VARIABLE) or Path.home() / ".cache" / "sectorch"
    return Path(chosen).expanduser().resolve()


def from_torchvision(name: str, folder: Path, call: str, read: Callable[[], Any]) -> Any:
    """`read()`, which takes a data set from disk with torchvision.

    Args:
        name: of the data set.
        folder: where torchvision looks for it.
        call: Python that downloads it, where d is torchvision.datasets.

    Raises:
        DatasetMissingError: not on disk, or torchvision is not installed.
    """
    with needed(name, "torchvision", DatasetMissingError):
        try:
            return read()
        except (RuntimeError, OSError) as error:
            raise DatasetMissingError(
                f"{name} is not on disk: looked in {folder} ({type(error).__name__}: {str(error).splitlines()[0]}); "
                f'get it with python -c "import torchvision.datasets as d; {call}", or name another folder (root=, '
                f"--data-root, or ${ROOT_VARIABLE})"
            ) from error
