"""What the protocols have in common: from a coalition and test samples to those that its model gets right."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from ...choreography import leaf
from ...choreography.ledger import Observer, observers
from ...choreography.net import Sent
from .program import Program
from .values import FederationError, bits, members, numbers

# What a run took: seconds by kind of work, as Table 2 of SecSV divides them; what was sent; products and rotations.


KINDS = ("arithmetic", "encryption", "decryption", "sharing")


class Spent(Observer):
    """Adds up what happens inside its block: of all parties, who in a simulation work one after another.

    Attributes:
        seconds: by kind of work.
        bytes, messages: of what crossed the edges, by "sender's role>receiver's role>protocol/label".
        products, rotations: homomorphic operations.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: Counter = Counter()
        self.messages: Counter = Counter()
        self.products = self.rotations = 0

    def message(self, line: Sent, value: torch.Tensor) -> None:
        key = f"{line.src.role}>{line.dst.role}>{line.protocol}/{line.label}"
        self.bytes[key] += line.bytes
        self.messages[key] += 1

    def record(self) -> dict:
        """For a line of the run folder."""
        return dict(
            seconds=dict(self.seconds), bytes=dict(self.bytes), messages=dict(self.messages),
            products=self.products, rotations=self.rotations,
        )  # fmt: skip


def _running() -> Iterator[Spent]:
    return (observer for observer in observers() if isinstance(observer, Spent))


@contextmanager
def during(kind: str) -> Iterator[None]:
    """Count the block's seconds as work of a kind."""
    start = time.perf_counter()
    try:
        yield
    finally:
        for spent in _running():
            spent.seconds[kind] += time.perf_counter() - start


def tally(products: int, rotations: int = 0) -> None:
    """Count homomorphic operations."""
    for spent in _running():
        spent.products += products
        spent.rotations += rotations


def work(kind: str, shapes: Callable | None = None) -> Callable[[Callable], Callable[..., Any]]:
    """Decorate what one party computes alone: a step of the choreography, whose seconds are work of a kind.

    Args:
        shapes: the result's shapes from those of the operands, as meta tensors; f itself unless given.
    """

    def decorate(f: Callable) -> Callable[..., Any]:
        @functools.wraps(f)
        def timed(*args, **kwargs):
            with during(kind):
                return f(*args, **kwargs)

        return leaf(timed, shapes=shapes or f)

    return decorate


def communication(size: int, gigabits: float = 1.0) -> float:
    """Seconds that so many bytes take on a link of so many Gbit/s."""
    return 8 * size / (gigabits * 1e9)


@dataclass(frozen=True)
class TestSet:
    """The clients' test samples, numbered through: client i's are first[i] .. first[i] + len - 1.

    Those of clients who are not in this process are None, or have a shape only.
    """

    x: tuple[torch.Tensor | None, ...]
    labels: tuple[torch.Tensor | None, ...]

    def of_sizes(self, sizes: Sequence[int], shape: tuple[int, ...]) -> TestSet:
        """The same, with a shape for what is not in this process."""
        x = [torch.empty(n, *shape, device="meta") if x is None else x for x, n in zip(self.x, sizes, strict=True)]
        labels = [torch.empty(len(v), dtype=torch.int64, device="meta") if y is None else y
                  for y, v in zip(self.labels, x, strict=True)]  # fmt: skip
        return TestSet(tuple(x), tuple(labels))

    @cached_property
    def everywhere(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each client's samples and labels.

        Raises:
            FederationError: some are not in this process, and have no shape either.
        """
        found = [(x, y) for x, y in zip(self.x, self.labels, strict=True) if x is not None and y is not None]
        if len(found) < len(self.labels):
            raise FederationError(
                "the test samples of some clients are not in this process; `of_sizes` gives them a shape"
            )
        return found

    @cached_property
    def sizes(self) -> list[int]:
        return [len(labels) for _, labels in self.everywhere]

    @cached_property
    def first(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.labels))]

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def all(self) -> int:
        """The set of all samples."""
        return (1 << len(self)) - 1

    def of(self, owner: int, samples: int) -> list[int]:
        """Numbers, within an owner's samples, of those in a set."""
        return numbers(samples >> self.first[owner] & ((1 << self.sizes[owner]) - 1))

    def count(self, owners: Sequence[int], samples: int) -> int:
        """How many samples of a set are of these owners."""
        return sum(len(self.of(i, samples)) for i in owners)

    def bitmap(self, samples: int) -> torch.Tensor:
        """A set as bits, the first sample's lowest: uint8 [samples / 8]."""
        size = -(-len(self) // 8)
        return torch.frombuffer(bytearray(samples.to_bytes(size, "little")), dtype=torch.uint8)

    def places(self, owners: Sequence[int], chosen: Mapping[int, list[int]]) -> np.ndarray:
        """Numbers, within all samples, of those that were chosen of each owner."""
        return np.concatenate([self.first[i] + np.array(chosen[i], np.int64) for i in owners])


class Tester(ABC):
    """Tests aggregated models of one round at a time."""

    skips = True
    """Whether single samples can be left out of a test."""

    def __init__(self, program: Program, tests: TestSet):
        self.program, self.tests = program, tests

    @abstractmethod
    def begin(self, models: Mapping[int, Mapping[str, torch.Tensor]], weights: Mapping[int, float]) -> None:
        """A round: the local models (state_dicts) of its clients, and their aggregation weights."""

    @abstractmethod
    def correct(self, coalition: int, samples: int) -> int:
        """Which of a set of samples the coalition's model classifies correctly. Both are sets as integers."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing in common
        """Do what tests of different coalitions have in common, before they go to different processes."""

    def known(self, weights: Mapping[str, torch.Tensor]) -> int:
        """How many test samples are classified correctly by a model that all know: each client counts its own."""
        found = []
        with during("arithmetic"):
            for x, labels in zip(self.tests.x, self.tests.labels, strict=True):
                count = None
                if x is not None and labels is not None and not x.is_meta:
                    scores, _ = self.program.run(self.program.matrices(weights), x.double())
                    count = int((scores.argmax(1) == labels).sum())
                found.append(count)
        return self._counted(found)

    def _counted(self, counts: Sequence[int | None]) -> int:
        """The clients' counts together, as P has them; None of a client who is not in this process."""
        return sum(count for count in counts if count is not None)

    def cost(self, coalition: int, samples: int) -> float:
        """Ciphertexts that testing a set of samples takes, or as much other work; zero where nothing is encrypted."""
        return 0.0


class PlainTester(Tester):
    """NSSV (Algorithm 8): everything in the clear at one place. The reference, and no protection."""

    def begin(self, models, weights):
        self._weights = dict(weights)
        self._models = {i: {k: v.detach().double() for k, v in m.items()} for i, m in models.items()}
        x, labels = zip(*self.tests.everywhere, strict=True)
        self._x, self._labels = torch.cat(x).double(), torch.cat(labels)

    def correct(self, coalition, samples):
        with during("arithmetic"):
            model = averaged([self._models[i] for i in members(coalition)],
                             [self._weights[i] for i in members(coalition)])  # fmt: skip
            scores, _ = self.program.run(self.program.matrices(model), self._x)
            hits = (scores.argmax(1) == self._labels).tolist()
        return bits(np.flatnonzero(hits)) & samples


def averaged(models: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """theta_S = sum over S of omega_i|S theta_i, with omega in proportion to the weights (FedAvg)."""
    whole = sum(weights)
    parts = lambda name: (w / whole * m[name] for w, m in zip(weights, models, strict=True))
    return {name: functools.reduce(torch.add, parts(name)) for name in models[0]}


def check_model(model: nn.Module, weights: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raises:
    FederationError: a state_dict of another shape than the model, or one with NaN or infinity.
    """
    expected = {name: tuple(v.shape) for name, v in model.state_dict().items()}
    came = {name: tuple(v.shape) for name, v in weights.items()}
    if came != expected:
        name = next(k for k in [*expected, *came] if came.get(k) != expected.get(k))
        raise FederationError(
            f"{whose} has a model of another shape: {name} is {came.get(name, 'missing')}, expected "
            f"{expected.get(name, 'nothing')}; all local models of a run have one architecture"
        )
    bad = [name for name, v in weights.items() if not bool(torch.isfinite(v).all())]
    if bad:
        raise FederationError(
            f"{whose} has a model with NaN or infinity in {bad[0]}; leave that client out of the round"
        )
