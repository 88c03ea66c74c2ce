"""What SecSV and HESV have in common: clients who say what everybody has to know, and tests that P asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import ckks
from ...choreography import Located, Message, Net, Party, Phase, Roles, protocol
from ...choreography.located import compute, run_in
from ...choreography.net import Runtime
from ...choreography.roles import Cast
from ...choreography.run.local import LocalRuntime
from .program import Program
from .public import quantised
from .testing import Tester, TestSet

# Who takes part: clients C1 to Cn and the principal server P, in SecSV the auxiliary server X as well.
#
# A protocol names one client, C, as the paper's figures do; which one plays it differs from call to call. So there is a
# net for each client, and values pass from one to the next at the servers, who are the same in all.


ONE_SERVER = Roles("C P", edges="C-P")
TWO_SERVERS = Roles("C P X", edges="C-P C-X P-X")


class Parties:
    """The parties of a valuation, all in this process unless a runtime says otherwise.

    Attributes:
        nets: for each client one in which it plays C.
        everyone: all parties.
    """

    def __init__(self, clients: int, roles: Roles, runtime: Runtime | None = None):
        named = [Party(f"C{i + 1}", "C") for i in range(clients)]
        servers = {role: Party(role, role) for role in roles.names if role != "C"}
        self.everyone = frozenset((*named, *servers.values()))
        runtime = runtime or LocalRuntime(self.everyone)
        casts = [Cast(roles, {"C": client, **servers}) for client in named]
        self.nets = [Net(runtime, number, cast, Phase.ONLINE) for number, cast in enumerate(casts)]

    def numbers(self, own: Sequence[float]) -> list[float]:
        """A number of each client, told to all: how many test samples it has, say. float64, exact."""
        told = [
            tell(net, net.own(net.C, torch.tensor([x], dtype=torch.float64)))
            for net, x in zip(self.nets, own, strict=True)
        ]
        with run_in(self.nets[0]):
            together = compute(torch.cat, told)
        return self._known(together, "numbers").view(torch.float64).tolist()

    def total(self, own: Sequence[int | None]) -> int:
        """The sum of a number of each client, at P, who hears each; 0 elsewhere. None of a client who is elsewhere."""
        empty = torch.empty(1, dtype=torch.int64, device="meta")
        counts = [empty if count is None else torch.tensor([count]) for count in own]
        told = [tell(net, net.own(net.C, count)) for net, count in zip(self.nets, counts, strict=True)]
        net = self.nets[0]
        with run_in(net):
            together = compute(torch.cat, told).sum()
        found = net.read(together, net.P)
        return 0 if found.is_meta else int(found)

    def task(self, coalition: int, samples: Sequence[int]) -> list[int]:
        """P says which coalition is tested, and on how many samples of each batch: [coalition, *samples], to all."""
        net = self.nets[0]
        return self._known(net.own(net.P, torch.tensor([coalition, *samples])), "task").tolist()

    def _known(self, value: Located, label: str) -> torch.Tensor:
        """A value of P's, published to everyone."""
        for net in self.nets:
            value = publish(net, value, label)
        if "X" in self.nets[0].cast.parties:
            value = publish_X(self.nets[0], value, label)
        return self.nets[0].agreed(value, self.everyone)


@protocol("shapley_tell", "docs/secsv.md", [
    Message("number", "C", "P", "", "C's number of test samples, how many of them the first global model gets right, "
                                    "C's weight, and the size of its largest outputs"),
], roles=ONE_SERVER)  # fmt: skip
def tell(net: Net, number: Located) -> Located:
    """A number of C's, int64, or float64 as the same 64 bits, at P. Rounds 1, bytes 8."""
    return number.view(torch.int64).send(net.C, net.P, "number").at(net.P)


_PUBLIC = {
    "numbers": "these numbers of all clients",
    "task": "which coalition is tested, and on how many samples of each batch",
}


@protocol("shapley_publish", "docs/secsv.md", [
    Message(label, "P", "C", "", shows) for label, shows in _PUBLIC.items()
], roles=ONE_SERVER)  # fmt: skip
def publish(net: Net, value: Located, label: str) -> Located:
    """What everybody is to know, int64 [n], from P at C as well. Rounds 1, bytes 8 n."""
    return value.send(net.P, net.C, label)


@protocol("shapley_publish_X", "docs/secsv.md", [
    Message(label, "P", "X", "", shows) for label, shows in _PUBLIC.items()
], roles=TWO_SERVERS)  # fmt: skip
def publish_X(net: Net, value: Located, label: str) -> Located:
    """The same, from P at X. Rounds 1, bytes 8 n."""
    return value.send(net.P, net.X, label)


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
