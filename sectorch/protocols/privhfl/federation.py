"""A federation for experiments: one data set divided among clients with architectures in turn (section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...data.datasets import Dataset, load
from ...data.partition import partition
from ...data.seeds import derive
from .architectures import FAMILIES, build
from .errors import PrivHFLError
from .settings import Client
from .training import PRESETS


def federation(
    data: str | Dataset,
    clients: int = 10,
    *,
    samples: int | None = None,
    architectures: Sequence[str] | None = None,
    kind: str = "iid",
    alpha: float = 0.5,
    classes_each: int = 2,
    test_samples: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
) -> tuple[list[Client], tuple[torch.Tensor, torch.Tensor], int]:
    """Clients, test set and number of classes: what `PrivHFL` takes.

    Args:
        data: a name for `sectorch.data.load`, or a data set.
        samples: of each client; that of Table 7 (digits: 30) unless named.
        architectures: names; client i has number i modulo their count, so three are used by n/3 each.
        kind, alpha, classes_each: see `sectorch.data.partition`.
        test_samples: the first so many test images; all unless named.
        root: where data sets lie.

    Raises:
        PrivHFLError: fewer than two clients.
        ArchitectureError: a name that does not exist, or one that does not take such images.
        DataError, DatasetMissingError, PartitionError: as `sectorch.data` raises them.
    """
    if clients < 2:
        raise PrivHFLError(f"a client learns from others: at least two clients are needed, got {clients}")
    dataset = load(data, root) if isinstance(data, str) else data
    names = list(architectures or FAMILIES.get(dataset.name, FAMILIES["digits"]))
    if samples is None:
        samples = PRESETS.get(dataset.name, PRESETS["digits"]).samples
    parts = partition(
        dataset.train.labels, clients, samples, kind=kind, alpha=alpha, classes_each=classes_each, seed=seed
    )
    made = []
    for i, part in enumerate(parts):
        name, architecture = f"c{i + 1}", names[i % len(names)]
        model = build(architecture, dataset.shape, dataset.classes, derive(seed, name, "weights"))
        made.append(Client(name, architecture, model, *dataset.train.take(part)))
    return made, dataset.test.take(slice(test_samples)), dataset.classes
