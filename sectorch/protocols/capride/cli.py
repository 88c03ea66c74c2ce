"""`sectorch capride`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ...data.datasets import IMAGES, Dataset
from ...data.partition import partition
from ...data.seeds import derive, generator
from ...federated.command import Command, Options, option
from ...federated.errors import FederationError
from ...federated.participants import Samples, dataset_of
from ...nn.fhe import fhe_friendly
from ...nn.models import BasicBlock, resnet18
from .experiment import CaPriDe
from .settings import METHODS, Party, Settings

# Parties for experiments: one data set divided among them, and the networks that each of them has.


SPLITS = ("homogeneous", "heterogeneous", "no-overlap")


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


def resnet4(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The smallest ResNet: a strided stem of 8 channels, one block of 16, a linear layer: 9 levels with the polynomial
    GELU.
    """
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        BasicBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes),
    )  # fmt: skip


def resnet8(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small ResNet (16, 32, 64 channels), for the large model where images are small."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


SMALL: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "cnn32": cnn32, "resnet4": resnet4}
"""FHE-friendly after `fhe_friendly`."""
LARGE: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": lambda shape, classes: resnet18(classes, shape[0]),
}
"""For the two-model arrangement: any network, never evaluated under encryption."""
USUAL = {"digits": "mlp", "cifar10": "cnn32", "cifar100": "cnn32", "ham10000": "cnn32"}


def build(name: str, shape: tuple[int, ...], classes: int, seed: int, activation: str = "gelu") -> nn.Module:
    """A network with random weights, which depend on the seed only; the small ones with polynomials for ReLUs.

    Raises:
        FederationError: an unknown name.
    """
    if name not in SMALL and name not in LARGE:
        raise FederationError(f"there is no network {name!r}; there are {', '.join((*SMALL, *LARGE))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (SMALL.get(name) or LARGE[name])(shape, classes)
    return fhe_friendly(model, activation) if name in SMALL else model


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
        FederationError, PartitionError: an unknown split, or one that leaves a party without samples.
    """
    if samples is not None and samples < 1:
        raise FederationError(f"samples of each party must be at least 1, got {samples}")
    if split not in SPLITS:
        raise FederationError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    if split != "no-overlap":
        kind = "iid" if split == "homogeneous" else "dirichlet"
        return partition(labels, parties, samples, kind=kind, alpha=alpha, seed=seed)
    if int(labels.max()) + 1 < parties:
        raise FederationError(f"{parties} parties cannot have classes of their own: there are {int(labels.max()) + 1}")
    out = []
    for k in range(parties):
        own = torch.nonzero(labels % parties == k).flatten()
        if samples is not None:
            if samples > len(own):
                raise FederationError(f"party {k} has {len(own)} samples of its own classes, {samples} were asked for")
            own = own[torch.randperm(len(own), generator=generator(seed, "no-overlap", k))[:samples]].sort().values
        out.append(own)
    return out


@dataclass(frozen=True)
class Parties(Options):
    """Parties made of one data set (sections 4.1 and 4.2)."""

    data: str = option("digits", "data set", among=IMAGES)
    parties: int = option(2, "how many", least=2, several=True)
    split: str = option("homogeneous", "who has which classes", among=SPLITS, several=True)
    alpha: float = option(0.5, "of the heterogeneous split's Dirichlet law", above=0)
    samples: int | None = option(None, "of each party (default: all, divided)", least=1)
    network: str | None = option(None, "the FHE-friendly one (default: the data set's)", among=tuple(SMALL))
    activation: str = option("gelu", "in place of ReLU under encryption", among=("gelu", "square"))
    large: str | None = option(
        None, "a second, large model of each party, distilled with the small one", among=tuple(LARGE)
    )
    test_samples: int | None = option(None, "the first so many test images (default: all)", least=1)
    seed: int = option(0, "of everything but keys and noise", least=0, several=True)


def federation(
    data: str | Dataset = "digits", parties: int = 2, split: str = "homogeneous", *, root: str | Path | None = None,
    **known,
) -> tuple[list[Party], Samples, int]:  # fmt: skip
    """Parties, test set and number of classes: what `CaPriDe` takes.

    Args:
        data: a name, or a data set.
        root: where data sets lie.
        known: other fields of `Parties`.

    Raises:
        FederationError: fewer than two parties, or a network that does not exist.
        DatasetMissingError, PartitionError: as `sectorch.data` raises them.
    """
    return divided(dataset_of(data, root), Parties(parties=parties, split=split, **known))


def divided(dataset: Dataset, how: Parties, own: int | None = None) -> tuple[list[Party], Samples, int]:
    """The same, by `Parties`.

    Args:
        own: seed of the first weights; that of `how` unless given.
    """
    drawn = how.seed if own is None else own
    shape, name, made = dataset.shape, how.network or USUAL.get(dataset.name, "mlp"), []
    hands = divide(
        dataset.train.labels, how.parties, how.split, samples=how.samples, alpha=how.alpha, seed=how.seed
    )  # fmt: skip
    for k, part in enumerate(hands):
        who = f"P{k + 1}"
        small = build(name, shape, dataset.classes, derive(drawn, who, "weights"), how.activation)
        big = build(how.large, shape, dataset.classes, derive(drawn, who, "large weights")) if how.large else None
        made.append(Party(who, small, *dataset.train.take(part), architecture=name, large=big))
    return made, dataset.test.take(slice(how.test_samples)), dataset.classes


COMMAND = Command(
    "capride",
    "Decentralised learning on encrypted data (CaPriDe): all parties in this process, or one of a federation, whose\n"
    "roles are P1, P2, .... A run that was stopped goes on when started again.",
    (
        "sectorch capride --data digits --parties 3 --split no-overlap --rounds 20 --update head",
        "sectorch capride --simulate --controls local fedavg fedavg-dp dml l2       in the clear, with baselines",
        "sectorch capride --large resnet8 --update forward                          two models a party",
        "sectorch capride --parties 2 --federation federation.toml --as north",
    ),
    Parties(),
    Settings(),
    lambda how, settings: [f"P{i}" for i in range(1, how.parties + 1)],
    CaPriDe.prepared(divided),
    lambda how: Settings(),
    {method: {"method": method} for method in METHODS if method != "capride"},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
