"""One data set divided among participants with architectures in turn: what an experiment starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..data.datasets import DATASETS, Dataset, load
from ..data.partition import PARTITIONS, partition
from ..data.seeds import derive
from .options import Options, option
from .participants import Participant, Samples

Build = Callable[[str, Sequence[int], int, int], nn.Module]
"""Name, shape of an image, classes, seed -> a network."""


@dataclass(frozen=True)
class Federation(Options):
    """Participants made of one data set."""

    data: str = option("digits", "data set", among=tuple(DATASETS))
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
    dataset: Dataset,
    how: Federation,
    samples: int | None,
    names: Sequence[str],
    build: Build,
    prefix: str = "c",
    own: int | None = None,
) -> tuple[list[Participant], Samples, int]:
    """Participants c1, c2, ..., the test set and the number of classes.

    Args:
        samples: of each; the training split divided evenly unless named.
        names: of architectures; participant i has number i modulo their count, so three are used by n/3 each.
        build: makes a network; its seed depends on the federation's seed and the participant.
        own: seed of the first weights, in place of the federation's.

    Raises:
        ArchitectureError, DataError, PartitionError: as they are raised by those who make the parts.
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
    """Everybody's samples together: what pooled training would have."""
    return torch.cat([p.images for p in people]), torch.cat([p.labels for p in people])
