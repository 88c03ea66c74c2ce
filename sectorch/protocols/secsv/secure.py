"""What SecSV and HESV have in common: clients who say what everybody has to know, and tests that P asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import ckks
from ...choreography import Located, Roles
from ...choreography.steps import Runtime
from .parties import Parties
from .program import Program
from .public import quantised
from .testing import Tester, TestSet


class SecureTester(Tester):
    """Encrypted models, in a choreography of all parties.

    Args:
        program: the architecture.
        tests: the clients' test samples; None for those of clients who are not in this process.
        keys: the clients' joint keys; their public half in a process that is no client.
        level: of `routing.LEVELS`.
        runtime: where it runs; all parties are in this process unless it is a `PartyRuntime`. A process that is not P
            begins each round as P does, with what it has itself, and then calls `follow`.
    """

    roles: Roles

    def __init__(
        self, program: Program, tests: TestSet, keys: ckks.Keys | ckks.PublicKeys, level: str,
        runtime: Runtime | None = None,
    ):  # fmt: skip
        super().__init__(program, tests)
        self.level = level
        self.parties = Parties(len(tests.x), self.roles, runtime)
        self.nets = self.parties.nets
        self.public_keys = keys.public if isinstance(keys, ckks.Keys) else keys
        self._keys = [net.own(net.C, keys, name="keys") for net in self.nets]
        self._weights: dict[int, int] = {}
        self._samples: list[Any] = []
        self._models: dict[int, dict[str, Any]] = {}

    def begin(self, models, weights):
        if not self._samples:
            sizes = self.parties.numbers([0 if labels is None else len(labels) for labels in self.tests.labels])
            self.tests = self.tests.of_sizes([int(size) for size in sizes], self.program.shape)
            self._samples = [self._sample(i, *self._own_samples(i)) for i in range(len(self.nets))]
        told = self.parties.numbers([weights.get(i, 0) for i in range(len(self.nets))])
        self._weights = quantised({i: w for i, w in enumerate(told) if w > 0})
        self._begun()
        self._models = {i: self._model(i, self._own_model(i, models.get(i))) for i in self._weights}

    def _own_samples(self, i: int) -> tuple[Located, Located]:
        net = self.nets[i]
        return net.own(net.C, self.tests.x[i], name="samples"), net.own(net.C, self.tests.labels[i], name="labels")

    def _own_model(self, i: int, weights: Mapping[str, torch.Tensor] | None) -> list[Located]:
        """Each matrix with its bias as the last column, float64."""
        net = self.nets[i]
        if weights is None:
            layers = self.program.weights.values()
            own = [torch.empty(x.rows, x.inner + 1, dtype=torch.float64, device="meta") for x in layers]
        else:
            own = [torch.cat([m, bias[:, None]], dim=1) for m, bias in self.program.matrices(weights).values()]
        return [net.own(net.C, m, name="model") for m in own]

    def _counted(self, counts):
        return self.parties.total(counts)

    def follow(self) -> None:
        """Take part in the tests of a round, as P asks for them; not P's to call."""
        while self._tested(self._task(0, ()), 0) is not None:
            pass

    def end(self) -> None:
        """P tells the others that the round is over: `follow` returns there. Not needed where all are here."""
        self._task(0, ())

    def _task(self, coalition: int, samples: Sequence[int]) -> list[int]:
        """What P says is tested, as everybody hears it."""
        return self.parties.task(coalition, [*samples, *[0] * (len(self.nets) - len(samples))])

    def _begun(self) -> None:
        """A round begins; nothing is left of the last."""

    @abstractmethod
    def _sample(self, i: int, x: Located, labels: Located) -> Any:
        """What the servers get of a client's test samples."""

    @abstractmethod
    def _model(self, i: int, matrices: list[Located]) -> dict[str, Any]:
        """What the servers get of a client's model."""

    @abstractmethod
    def _tested(self, task: Sequence[int], samples: int) -> Any:
        """Do what everybody heard is to be tested; None if that is nothing. `samples` is P's to know."""
