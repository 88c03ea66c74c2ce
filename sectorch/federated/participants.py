"""Participants with their models and data, their checks, and federations made of one data set."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from ..data.datasets import IMAGES, Dataset, load
from ..data.partition import PARTITIONS, partition
from ..data.seeds import derive
from ..errors import ArchitectureError, FederationError
from ..nn.models import BasicBlock, Square, lenet, resnet8, resnet10, resnet14, resnet16, resnet18, vgg5, vgg7
from .command import Options, Place, option, owned
from .folder import Workers, digest
from .parties import Parties, Simulation
from .run import Experiment, Held, R, Run

NAME = re.compile(r"[\w-]{1,64}")
Samples = tuple[torch.Tensor, torch.Tensor]
"""Images [N, C, H, W] float32 and labels [N] int64."""

P = TypeVar("P", bound="Participant")
How = TypeVar("How", bound=Any)
"""The settings of an experiment."""


@dataclass
class Participant:
    """A private data set and a local model.

    `images` [N, C, H, W] float32, `labels` [N] int64; on the meta device those of a participant elsewhere, of whom
    shapes and the model's architecture are known. The model is copied and never changed. `architecture` is a name for
    tables.
    """

    name: str
    model: nn.Module = field(repr=False)
    images: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)
    architecture: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image, without its batch."""
        return tuple(self.images.shape[1:])

    def elsewhere(self: P) -> P:
        """What others know of it: its name, how many samples it has, and the architecture of its model."""
        return replace(self, images=self.images.to("meta"), labels=self.labels.to("meta"))

    @property
    def facts(self) -> list:
        """What all parties of a run have to know alike of it, for JSON."""
        return [self.name, len(self.images), self.shape, str(self.model)]

    def fingerprint(self) -> str:
        """What a run folder recognises it by: its data and its model's first weights, where they are here."""
        if self.images.is_meta:
            return digest(self.images, self.labels)
        return digest(self.images, self.labels, *self.model.state_dict().values())


def check_names(names: Sequence[str], who: str) -> None:
    """At least two, each a name of its own that can be a file's.

    Raises:
        FederationError: otherwise.
    """
    if len(names) < 2:
        raise FederationError(f"{who} learn from each other: at least two are needed, got {len(names)}")
    if len(set(names)) < len(names) or not all(NAME.fullmatch(name) for name in names):
        raise FederationError(f"{who} need different names of letters, digits, '-' and '_', got {list(names)}")


def check_samples(whose: str, samples: Samples, classes: int) -> None:
    """Images [N, C, H, W] float32, all finite, and labels of the classes there are.

    Raises:
        FederationError: otherwise, saying what came.
    """
    images, labels = samples
    if images.dim() != 4 or images.dtype != torch.float32 or not len(images):
        raise FederationError(
            f"{whose}: images must be float32 [N, C, H, W], got {images.dtype} of shape {tuple(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
        raise FederationError(
            f"{whose}: labels must be int64 [{len(images)}], got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if images.is_meta:  # of a participant elsewhere its shapes are known
        return
    if not bool(images.isfinite().all()):
        raise FederationError(f"{whose}: images hold NaN or infinity")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise FederationError(f"{whose}: labels go from {low} to {high}, but there are {classes} classes")


def check_federation(people: Iterable[tuple[str, Samples]], test: Samples, classes: int, who: str) -> None:
    """Names, everybody's samples, the test set's, and that all have images of one shape.

    Raises:
        FederationError: naming whose data it is, and the way out.
    """
    people = list(people)
    check_names([name for name, _ in people], who)
    if classes < 2:
        raise FederationError(f"at least two classes are needed, got {classes}")
    check_samples("the test set", test, classes)
    for name, samples in people:
        check_samples(name, samples, classes)
        if samples[0].shape[1:] != test[0].shape[1:]:
            raise FederationError(
                f"{name} has images {tuple(samples[0].shape[1:])}, the test set {tuple(test[0].shape[1:])}; resize one "
                f"of them"
            )


def check_fits(model: nn.Module, name: str, shape: Sequence[int], classes: int, way_out: str = "") -> None:
    """The model takes two such images and gives two rows of logits.

    Args:
        way_out: what could be done about one that does not.

    Raises:
        ArchitectureError: naming what came out, or torch's own message.
    """
    training = model.training
    try:
        with torch.no_grad():
            out = model.eval()(torch.zeros((2, *shape)))
    except RuntimeError as error:
        raise ArchitectureError(
            f"{name} does not take images {tuple(shape)}: {str(error).splitlines()[0]}{way_out and f'; {way_out}'}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(out, torch.Tensor) or out.shape != (2, classes):
        what = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ArchitectureError(f"{name} gives {what} for two images, but logits (2, {classes}) were expected")


class FederatedExperiment(Experiment[R], Generic[R, P, How]):
    """An algorithm of participants with private data sets: all in this process, or one of a federation.

    With all parties in this process it is a simulation. Apart, a run in which one is lost ends for all, and goes on
    where each was when all start again.

    Args:
        parties: each with its private data and its models.
        test: images and labels that accuracies are measured on.
        classes: how many; the same for all.
        settings: of the paper.
        out: a folder for finished stages; a run that was stopped goes on from there. None keeps nothing.
        local: a folder for the local training alone, which several runs may share; inside `out` unless named.
        workers: that train and ask for several parties at once, through `out`.
        together: who is here, of the participants by their names and the servers; all of them unless given. Of a
            participant elsewhere the name, the number and shape of samples and the architecture are used, nothing else.
        own: seed of what a participant draws and nobody else needs to know, batches and choices; `settings.seed` unless
            given. Apart, it is each party's own secret.

    Attributes:
        label: of its runs. servers: parties beside the participants. whose: what a run folder calls these.

    Raises, before any training starts:
        FederationError, ArchitectureError: naming the party, what came, and the way out; also what protects nothing,
            in a federation.
        CheckpointError: `out` holds another run, or one of an older version.
    """

    label: ClassVar[str]
    servers: ClassVar[tuple[str, ...]] = ()
    whose: ClassVar[str] = "parties"

    def __init__(
        self, parties: Sequence[P], test: Samples, classes: int, settings: How | None = None, *,
        out: str | Path | None = None, local: str | Path | None = None, workers: Workers | None = None,
        together: Parties | None = None, own: int | None = None,
    ):  # fmt: skip
        place, names = together or Simulation(), [*(p.name for p in parties), *self.servers]
        self.parties = [p if place.present(p.name) else p.elsewhere() for p in parties]
        self.mine = [p for p in self.parties if place.present(p.name)]
        self.test, self.classes = test, classes
        self.settings = how = self._checked(settings, all(map(place.present, names)))
        self._own = how.seed if own is None else own
        self._agreed = {
            "run": self.label, **how.agreed, "people": [p.facts for p in self.parties], "classes": classes,
        } | self._facts()  # fmt: skip
        kind: Any = type(how)
        own_facts = {self.whose: {p.name: p.fingerprint() for p in self.parties}, "test": digest(*test)}
        self.stages = Run(
            self._agreed, own=own_facts | {name: getattr(how, name) for name in owned(kind)}, members=names,
            parties=place, out=out, shared=local, workers=workers,
        )  # fmt: skip

    @abstractmethod
    def _checked(self, settings: How | None, complete: bool) -> How:
        """The settings, with what follows from the parties, after everything that can be known before any work.

        Args:
            complete: whether all parties are in this process.
        """

    def _facts(self) -> dict[str, Any]:
        """What else all parties have to have alike."""
        return {}

    def _brought(self, run: Run) -> tuple[dict[str, Held], dict[str, Held]]:
        """Each participant's data and seed, at the participant."""
        data = {p.name: run.bring(p.name, p, public=p.elsewhere()) for p in self.parties}
        return data, {name: run.bring(name, self._own) for name in data}

    @classmethod
    def prepared(cls, divided: Callable[..., tuple[list[P], Samples, int]]) -> Callable[[Any, How, Place], Experiment]:
        """What the command of a paper prepares: `divided(data set, how, own seed)` gives parties, test and classes."""

        def prepare(how: Any, settings: How, place: Place) -> Experiment:
            found = divided(dataset_of(how.data, place.root), how, place.own(how.seed))
            return cls(
                *found, settings, out=place.out, local=place.shared, workers=place.workers, together=place.parties,
                own=place.own(settings.seed),
            )  # fmt: skip

        return prepare


# One data set divided among participants, whose architectures take turns.

Build = Callable[[str, Sequence[int], int, int], nn.Module]
"""Name, shape of an image, classes, seed -> a network."""


@dataclass(frozen=True)
class FederatedData(Options):
    """Participants made of one data set."""

    data: str = option("digits", "data set", among=IMAGES)
    clients: int = option(10, "how many", least=2, several=True)
    samples: int | None = option(
        None, "private samples of each client or, of dirichlet-classes, in the mean (default: the data set's)", least=1
    )
    architectures: tuple[str, ...] = option((), "names, in turn (default: the data set's)")
    partition: str = option("iid", "who has which classes", among=tuple(PARTITIONS))
    alpha: float = option(0.5, "of the Dirichlet partitions; small is uneven", above=0, several=True)
    classes_each: int = option(2, "classes of each client, of the skewed partition", least=1)
    test_samples: int | None = option(None, "the first so many test images (default: all)", least=1)
    seed: int = option(0, "of everything but shares, keys and noise", least=0, several=True)


def dataset_of(data: str | Dataset, root: str | Path | None = None) -> Dataset:
    """A data set by name, or the one that is given."""
    return load(data, root) if isinstance(data, str) else data


def participants(
    dataset: Dataset, how: FederatedData, samples: int | None, names: Sequence[str], build: Build, prefix: str = "c",
    own: int | None = None,
) -> tuple[list[Participant], Samples, int]:  # fmt: skip
    """Participants c1, c2, ..., the test set and the number of classes.

    Args:
        samples: of each participant; by default the training split is divided evenly.
        names: of architectures; participant i has number i modulo their count, so three are used by n/3 each.
        build: makes a network; its seed depends on the federation's seed and the participant.
        own: seed of the first weights, in place of the federation's.

    Raises:
        ArchitectureError, DataError, PartitionError: as of `build`, `load` and `partition`.
    """
    parts = partition(
        dataset.train.labels, how.clients, samples, kind=how.partition, alpha=how.alpha,
        classes_each=how.classes_each, seed=how.seed,
    )  # fmt: skip
    made = []
    for i, part in enumerate(parts):
        name, architecture = f"{prefix}{i + 1}", names[i % len(names)]
        model = build(
            architecture, dataset.shape, dataset.classes, derive(how.seed if own is None else own, name, "weights")
        )
        made.append(Participant(name, model, *dataset.train.take(part), architecture=architecture))
    return made, dataset.test.take(slice(how.test_samples)), dataset.classes


def images_and_labels(people: Sequence[Participant]) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all participants together, for pooled training."""
    return torch.cat([p.images for p in people]), torch.cat([p.labels for p in people])


# Architectures by name: those of the papers, and small ones for small images.
#
# | name | image | source |
# | --- | --- | --- |
# | vgg5 | 3 x 32 x 32 | CaPC, 4.2 (CIFAR10) |
# | vgg7, resnet8, resnet10 | 3 x 32 x 32 | PrivHFL, appendix F (SVHN, CIFAR10); `sectorch/nn/models.py` |
# | resnet14, resnet16, resnet18 | 3 x 64 x 64 | PrivHFL, appendix F (Tiny ImageNet) |
# | vgg7-small, resnet8-small, resnet10-small | any from 8 x 8 | ours: the same layers, channels divided by four |
# | lenet | 1 x 28 x 28 | CaPC, F.2 |
# | mlp, cnn | any | ours: a hidden layer of 64; a convolution, pooling and a linear layer, without batch statistics |
# | square | any | ours, for CKKS: a hidden layer of 32 whose activation is a square (CryptoNets) |

Constructor = Callable[[int, Sequence[int]], nn.Module]
"""Number of classes, shape of one image [C, H, W] -> a network in training mode."""


def _conv(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()]


def vgg7_small(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """VGG-7 (`sectorch.nn.models.vgg7`) with a quarter of its channels. Input [N, C, H, W] with H, W of at least 8."""
    return nn.Sequential(
        *_conv(in_channels, 16), nn.MaxPool2d(2),
        *_conv(16, 32), nn.MaxPool2d(2),
        *_conv(32, 64), *_conv(64, 64), nn.MaxPool2d(2),
        *_conv(64, 128), *_conv(128, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes),
    )  # fmt: skip


def _resnet_small(widths: Sequence[int], num_classes: int, in_channels: int) -> nn.Sequential:
    blocks = [
        BasicBlock(before, width, 1 if i == 0 else 2)
        for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
    ]
    return nn.Sequential(
        *_conv(in_channels, widths[0]), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(widths[-1], num_classes),
    )  # fmt: skip


def resnet8_small(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-8 with a quarter of its channels (16, 32, 64). Input [N, C, H, W], any H and W from 4."""
    return _resnet_small((16, 32, 64), num_classes, in_channels)


def resnet10_small(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-10 with a quarter of its channels (16, 32, 64, 128). Input [N, C, H, W], any H and W from 8."""
    return _resnet_small((16, 32, 64, 128), num_classes, in_channels)


def mlp(num_classes: int, shape: Sequence[int]) -> nn.Module:
    """Any image, through one hidden layer of 64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, num_classes))


def cnn(num_classes: int, shape: Sequence[int]) -> nn.Module:
    """A convolution, pooling and a linear layer; no batch normalisation, which few samples do not feed."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * (shape[1] // 2) * (shape[2] // 2), num_classes),
    )  # fmt: skip


def square(num_classes: int, shape: Sequence[int]) -> nn.Module:
    """For CKKS: a hidden layer whose activation is a square (CryptoNets)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32), Square(), nn.Linear(32, num_classes))


def _of_channels(make: Callable[[int, int], nn.Module]) -> Constructor:
    return lambda classes, shape: make(classes, shape[0])


ARCHITECTURES: dict[str, Constructor] = {
    make.__name__.replace("_", "-"): _of_channels(make)
    for make in (vgg7, resnet8, resnet10, resnet14, resnet16, resnet18, vgg5, vgg7_small, resnet8_small, resnet10_small)
} | {
    "lenet": lambda classes, shape: lenet(classes),
    "mlp": mlp,
    "cnn": cnn,
    "square": square,
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "digits": ("vgg7-small", "resnet8-small", "resnet10-small"),
    "svhn": ("vgg7", "resnet8", "resnet10"),
    "cifar10": ("vgg7", "resnet8", "resnet10"),
    "tiny-imagenet": ("resnet14", "resnet16", "resnet18"),
}
"""PrivHFL's three architectures of a data set; each is used by n/3 of the clients (its section 4.1)."""


def build(
    name: str, shape: Sequence[int], classes: int, seed: int, among: Mapping[str, Constructor] = ARCHITECTURES
) -> nn.Module:
    """A network with random weights, which depend on the seed only.

    Args:
        name: one of `among`.
        shape: of one image, [C, H, W].

    Raises:
        ArchitectureError: an unknown name, or a network that does not take such images.
    """
    if name not in among:
        raise ArchitectureError(f"there is no architecture {name!r}; there are {', '.join(among)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = among[name](classes, shape)
    way_out = f"choose an architecture for that size, such as {', '.join(FAMILIES['digits'])}"
    check_fits(model, name, shape, classes, way_out)
    return model
