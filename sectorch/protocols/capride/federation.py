"""Parties for experiments: one data set divided among them, and the networks that each of them has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ...data.datasets import Dataset
from ...data.seeds import derive
from ...nn.fhe import fhe_friendly
from ...nn.models.resnet import BasicBlock, resnet18
from .data import divide, load
from .errors import CaPriDeError
from .settings import Party


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two linear layers with 24 hidden units: 4 levels with the polynomial GELU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 24), nn.ReLU(), nn.Linear(24, classes))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A strided convolution of four channels and two linear layers: 7 levels with the polynomial GELU."""
    side = (shape[1] + 1) // 2 * ((shape[2] + 1) // 2)
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * side, 16), nn.ReLU(), nn.Linear(16, classes),
    )  # fmt: skip


def cnn32(shape: tuple[int, ...], classes: int) -> nn.Module:
    """For 32 x 32 images: two strided convolutions and two linear layers, 10 levels with the polynomial GELU."""
    side = -(-shape[1] // 8) * -(-shape[2] // 8)
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 5, stride=4, padding=2), nn.ReLU(),
        nn.Conv2d(4, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * side, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


def resnet8(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small ResNet (16, 32, 64 channels), for the large model where images are small."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


def _resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    return resnet18(classes, shape[0])


SMALL: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "cnn32": cnn32}
"""FHE-friendly after `fhe_friendly`."""
LARGE: dict[str, Callable[..., nn.Module]] = {"resnet8": resnet8, "resnet18": _resnet18}
"""For the two-model arrangement: any network, never evaluated under encryption."""
USUAL = {"digits": "mlp", "cifar10": "cnn32", "cifar100": "cnn32", "ham10000": "cnn32"}


def build(name: str, shape: tuple[int, ...], classes: int, seed: int, activation: str = "gelu") -> nn.Module:
    """A network with random weights, which depend on the seed only; the small ones with polynomials for ReLUs.

    Raises:
        CaPriDeError: an unknown name.
    """
    if name not in SMALL and name not in LARGE:
        raise CaPriDeError(f"there is no network {name!r}; there are {', '.join((*SMALL, *LARGE))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (SMALL.get(name) or LARGE[name])(shape, classes)
    return fhe_friendly(model, activation) if name in SMALL else model


def federation(
    data: str | Dataset = "digits",
    parties: int = 2,
    split: str = "homogeneous",
    *,
    samples: int | None = None,
    network: str | None = None,
    large: str | None = None,
    activation: str = "gelu",
    alpha: float = 0.5,
    test_samples: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
) -> tuple[list[Party], tuple[torch.Tensor, torch.Tensor], int]:
    """Parties, test set and number of classes: what `CaPriDe` takes.

    Args:
        data: a name, or a data set.
        split, samples, alpha: see `data.divide`.
        network: the FHE-friendly one, of all parties.
        large: a second network of each party, for the two-model arrangement.
        root: where data sets lie.

    Raises:
        CaPriDeError: fewer than two parties, or a network that does not exist.
        DatasetMissingError, PartitionError: as `sectorch.data` raises them.
    """
    if parties < 2:
        raise CaPriDeError(f"a party learns from others: at least two are needed, got {parties}")
    dataset = load(data, root) if isinstance(data, str) else data
    shape, name = dataset.shape, network or USUAL.get(dataset.name, "mlp")
    made = []
    for k, part in enumerate(divide(dataset.train.labels, parties, split, samples=samples, alpha=alpha, seed=seed)):
        who = f"P{k + 1}"
        small = build(name, shape, dataset.classes, derive(seed, who, "weights"), activation)
        big = build(large, shape, dataset.classes, derive(seed, who, "large weights")) if large else None
        made.append(Party(who, small, *dataset.train.take(part), large=big, architecture=name))
    return made, dataset.test.take(slice(test_samples)), dataset.classes
