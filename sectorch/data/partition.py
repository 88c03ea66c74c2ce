"""Partitions: disjoint shares of a data set for the clients of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import DataError, PartitionError
from .datasets import load
from .seeds import generator


def partition(
    labels: torch.Tensor, clients: int, samples: int | None = None, *, kind: str = "iid", alpha: float = 0.5,
    classes_each: int = 2, seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """Disjoint indices for each client, sorted.

    Args:
        labels: [N] int64.
        clients: the number of clients.
        samples: for each client; all samples divided as evenly as they can be unless named.
        kind: "iid", each client alike with classes as even as they can be; "dirichlet", class proportions of each
            client from Dir(alpha); "dirichlet-classes", clients' proportions of each class from Dir(alpha), so that
            clients differ in size as well; "skew", `classes_each` classes only.
        alpha: 100 is close to "iid", 0.5 very uneven.
        classes_each: for "skew".
        seed: the same seed gives the same partition.

    Returns:
        `clients` index tensors of `samples` each, or, for "dirichlet-classes", of `samples` in the mean and half of
        that at least. Where a class runs out, other classes of the client's own (or, for "dirichlet", any class that
        is left) fill up.

    Raises:
        PartitionError: too few samples, unknown kind, or an option out of range.
    """
    if kind not in PARTITIONS:
        raise PartitionError(f"there is no partition {kind!r}; there are {', '.join(PARTITIONS)}")
    if labels.dim() != 1 or labels.is_floating_point():
        raise PartitionError(f"labels must be a vector of integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    if clients < 1:
        raise PartitionError(f"a partition needs at least one client, got {clients}")
    each = len(labels) // clients if samples is None else samples
    if each < 1 or each * clients > len(labels):
        raise PartitionError(
            f"{clients} clients with {each} samples each need {each * clients}, but there are {len(labels)}; "
            f"take fewer clients or fewer samples each"
        )
    names = labels.unique()
    if not 0 < alpha < float("inf"):
        raise PartitionError(f"alpha must be above 0 and finite (100 is nearly even, 0.5 very uneven), got {alpha}")
    if not classes_each >= 1 or (kind == "skew" and classes_each > len(names)):
        raise PartitionError(
            f"classes_each must be between 1 and the {len(names)} classes there are, got {classes_each}"
        )
    draw = generator(seed, "partition", kind)
    if kind == _BY_CLASS:
        return _by_class(labels, names, clients, clients * each, alpha, draw)
    proportions = PARTITIONS[kind](clients, len(names), draw, alpha, classes_each)
    return _deal(labels, names, proportions, each, draw, closed=kind == "skew")


def _deal(
    labels: torch.Tensor, names: torch.Tensor, proportions: torch.Tensor, each: int, draw: torch.Generator,
    closed: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Hand out shuffled samples of each class by the clients' proportions, [clients, classes]."""
    left = [torch.nonzero(labels == name).flatten() for name in names]
    left = [pool[torch.randperm(len(pool), generator=draw)].tolist() for pool in left]
    hands: list[list[int]] = [[] for _ in proportions]
    have = torch.zeros_like(proportions)
    room = torch.tensor([bool(pool) for pool in left])
    # Clients take turns, one sample at a time, of the class in which they lack most, so no client empties a class.
    for turn in range(each):
        for i, wanted in enumerate(proportions):
            allowed = room & (wanted > 0)
            if not bool(allowed.any()):
                if closed:
                    raise PartitionError(
                        f"client {i} ran out of its classes {names[wanted > 0].tolist()} after {turn} of {each} "
                        f"samples; take fewer samples, fewer clients or a larger classes_each"
                    )
                allowed = room
            behind = wanted * (turn + 1) - have[i]
            chosen = int(behind.masked_fill(~allowed, -torch.inf).argmax())
            hands[i].append(left[chosen].pop())
            have[i, chosen] += 1
            room[chosen] = bool(left[chosen])
    return [torch.tensor(sorted(hand)) for hand in hands]


def _by_class(
    labels: torch.Tensor, names: torch.Tensor, clients: int, total: int, alpha: float, draw: torch.Generator
) -> list[torch.Tensor]:
    """Cut each class in turn by the clients' shares of it from Dir(alpha), as in FedDF (Lin et al., 2020).

    A client that has an even part of all samples gets nothing of the classes that follow. The draw is repeated until
    every client has half an even part. FedDF does this for ten clients at a time, this function for all.
    """
    chosen = torch.randperm(len(labels), generator=draw)[:total]
    pools = [chosen[labels[chosen] == name] for name in names]
    for _ in range(_TRIES):
        hands: list[list[torch.Tensor]] = [[] for _ in range(clients)]
        sizes = torch.zeros(clients, dtype=torch.int64)
        for shares, pool in zip(_dirichlet(len(names), clients, draw, alpha, 0).double(), pools, strict=True):
            shares = (shares + 1e-30) * (sizes < total / clients)  # the remaining clients may all have drawn zero
            ends = (shares.cumsum(0) / shares.sum() * len(pool)).long()
            parts = pool.tensor_split(ends[:-1].tolist())
            sizes += torch.tensor([len(part) for part in parts])
            for hand, part in zip(hands, parts, strict=True):
                hand.append(part)
        if int(sizes.min()) >= max(1, total // (2 * clients)):
            return [torch.cat(hand).sort().values for hand in hands]
    raise PartitionError(
        f"with alpha {alpha:g}, {_TRIES} draws left some client with less than half of {total // clients} samples; "
        f"take a larger alpha, fewer clients or more samples each"
    )


def _iid(clients: int, classes: int, draw: torch.Generator, alpha: float, classes_each: int) -> torch.Tensor:
    return torch.full((clients, classes), 1 / classes) + 1e-6 * torch.rand(clients, classes, generator=draw)


def _dirichlet_rows(rows: int, columns: int, alpha: float, draw: torch.Generator) -> torch.Tensor:
    """[rows, columns] float64, each row from Dir(alpha); for a small alpha all of its gamma variables may underflow."""
    shape = torch.full((rows, columns), float(alpha), dtype=torch.float64)
    gamma = torch._standard_gamma(shape, generator=draw)  # pyright: ignore[reportPrivateImportUsage]  not in torch's stubs
    gamma = gamma.clamp_min(1e-300)
    return gamma / gamma.sum(1, keepdim=True)


def _dirichlet(clients: int, classes: int, draw: torch.Generator, alpha: float, classes_each: int) -> torch.Tensor:
    return _dirichlet_rows(clients, classes, alpha, draw).float()


def _skew(clients: int, classes: int, draw: torch.Generator, alpha: float, classes_each: int) -> torch.Tensor:
    # Round robin over a shuffled list, so that every class has an owner where clients * classes_each allows it.
    order = torch.randperm(classes, generator=draw)
    proportions = torch.zeros(clients, classes)
    for i in range(clients):
        for k in range(classes_each):
            proportions[i, order[(i * classes_each + k) % classes]] = 1 / classes_each
    return proportions


_BY_CLASS, _TRIES = "dirichlet-classes", 1000
PARTITIONS: dict[str, Callable[..., torch.Tensor]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    _BY_CLASS: _dirichlet,
    "skew": _skew,
}
"""Class proportions of the clients, by the kind's name; `dirichlet-classes` cuts classes (`_by_class`)."""


# Training and test samples divided among clients in the same proportions: for each label by Dir(alpha) (Yurochkin et
# al., 2019; SecSV, section 7.1).


Pair = tuple[torch.Tensor, torch.Tensor]
"""Samples [N, ...] float32 and labels [N] int64."""


@dataclass(frozen=True)
class DividedData:
    """Each client's training and test samples, by name."""

    name: str
    train: dict[str, Pair]
    test: dict[str, Pair]
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(next(iter(self.test.values()))[0].shape[1:])


def federation(
    name: str, clients: int, *, alpha: float = 0.5, test_fraction: float = 0.5, samples: int | None = None,
    tests: int | None = None, seed: int = 0, root: str | Path | None = None,
) -> DividedData:  # fmt: skip
    """A data set divided among clients c1, c2, ... by Dir(alpha), label by label.

    Args:
        name: one of `DATASETS`.
        test_fraction: of the bundled sets that goes to testing; the others come divided.
        samples, tests: keep this many training and test samples in all.

    Raises:
        DataError: a name or a number that cannot be.
        DatasetMissingError: the data set is not on disk.
        PartitionError: fewer samples than clients need.
    """
    for what, count in (("samples", samples), ("tests", tests)):
        if count is not None and count < 1:
            raise DataError(f"{what} must be at least 1, got {count}")
    if clients < 2:
        raise DataError(f"a federation has at least two clients, got {clients}")
    found = load(name, root, test_fraction)
    train, test = _some(found.train.take(), samples, seed, "train"), _some(found.test.take(), tests, seed, "test")
    proportions = dirichlet(found.classes, clients, alpha, seed)
    names = [f"c{i + 1}" for i in range(clients)]
    parts = [divide(pair[1], proportions, 2 if pair is train else 1, seed) for pair in (train, test)]
    of_train, of_test = (
        {n: (pair[0][part], pair[1][part]) for n, part in zip(names, each, strict=True)}
        for pair, each in zip((train, test), parts, strict=True)
    )
    return DividedData(name, of_train, of_test, found.classes)


def dirichlet(classes: int, clients: int, alpha: float, seed: int) -> torch.Tensor:
    """[classes, clients]: for each label the clients' shares of it, from Dir_clients(alpha)."""
    if not 0 < alpha < float("inf"):
        raise PartitionError(f"alpha must be above 0 and finite, got {alpha}")
    return _dirichlet_rows(classes, clients, alpha, generator(seed, "dirichlet"))


def divide(labels: torch.Tensor, proportions: torch.Tensor, least: int, seed: int) -> list[torch.Tensor]:
    """Disjoint sorted indices for each client; a client with fewer than `least` takes from the one who has most.

    Raises:
        PartitionError: fewer samples than clients need.
    """
    clients = proportions.shape[1]
    if len(labels) < clients * least:
        raise PartitionError(f"{clients} clients with at least {least} samples each, but there are {len(labels)}")
    draw = generator(seed, "divide", len(labels))
    hands: list[list[int]] = [[] for _ in range(clients)]
    for label, row in enumerate(proportions):
        own = torch.nonzero(labels == label).flatten()
        own = own[torch.randperm(len(own), generator=draw)].tolist()
        ends = [0, *(row.cumsum(0) * len(own)).round().long().tolist()]
        ends[-1] = len(own)
        for hand, start, end in zip(hands, ends, ends[1:], strict=False):
            hand += own[start:end]
    for hand in hands:
        while len(hand) < least:
            hand.append(max(hands, key=len).pop())
    return [torch.tensor(sorted(hand)) for hand in hands]


def _some(pair: Pair, count: int | None, seed: int, what: str) -> Pair:
    if count is None or count >= len(pair[1]):
        return pair
    chosen = torch.randperm(len(pair[1]), generator=generator(seed, "some", what))[:count]
    return pair[0][chosen], pair[1][chosen]
