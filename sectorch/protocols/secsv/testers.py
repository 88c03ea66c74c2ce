"""What the protocols have in common: parties, test samples, and from a coalition to the samples that it gets right.

`PlainTester` (NSSV) and `SecretSVTester` are the paper's baselines (appendix A).
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ... import ckks
from ...choreography import Located, Message, Net, Party, Phase, Roles, leaf, protocol
from ...choreography.ledger import Observer, observers
from ...choreography.located import compute, run_in
from ...choreography.net import Runtime, Sent
from ...choreography.roles import Cast
from ...choreography.run.local import LocalRuntime
from ...choreography.streams import PairKey, random_secret
from ...ckks.exchange import LocatedCKKSTensor, LocatedKeys
from ...mpc.star.shares import Shares
from ...ring import encode
from ...session import Session
from ...tensor import Scheme, SharedTensor
from .program import Program, gates
from .settings import Route, plan
from .values import TestSet as TestSet
from .values import bits, members

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

    def saves(self, coalition: int, samples: int, rest: int) -> bool:
        """Whether testing the rest takes less than testing all samples; always, where nothing is encrypted."""
        whole = self.cost(coalition, samples)
        return not whole or self.cost(coalition, rest) < whole

    def test(self, coalition: int, samples: int) -> tuple[int | None, int]:
        """`correct` of a set that may be empty, and how many these are; None where only the count is known."""
        found = self.correct(coalition, samples) if samples else 0
        return found, found.bit_count()


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


TOTAL_WEIGHT = 1 << 10
"""Aggregation weights are integers that add up to at most this over all clients."""


def quantised(weights: Mapping[int, float]) -> dict[int, int]:
    """Aggregation weights as integers of at most TOTAL_WEIGHT together: exact where they are integers and fit.

    Error otherwise: 2^-11 of the largest possible sum, for each weight.
    """
    everyone = sum(weights.values())
    if everyone <= TOTAL_WEIGHT and all(float(w).is_integer() for w in weights.values()):
        return {i: int(w) for i, w in weights.items()}
    return {i: max(1, round(w * (TOTAL_WEIGHT - len(weights)) / everyone)) for i, w in weights.items()}


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

    def publish(self, numbers: Sequence[int], label: str) -> list[int]:
        """Whole numbers of P's, told to all, under one of the labels of `_PUBLIC`."""
        net = self.nets[0]
        return self._known(net.own(net.P, torch.tensor(numbers)), label).tolist()

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
    "round": "which round is valued next, and whether the first model's hits are counted",
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
    first_once = True
    """The first layer is multiplied once for each client's model, and not for each coalition's."""

    def __init__(
        self, program: Program, tests: TestSet, keys: ckks.Keys | ckks.PublicKeys, level: str,
        runtime: Runtime | None = None,
    ):  # fmt: skip
        super().__init__(program, tests)
        self.level = level
        self.parties = Parties(len(tests.x), self.roles, runtime)
        self.nets = self.parties.nets
        first, public = self.nets[0], keys.public if isinstance(keys, ckks.Keys) else keys
        servers = {party: public for party in first.cast.parties.values() if party is not first.C}
        self.keys = LocatedKeys(first, first.C, public.parameters, keys, servers)
        for net in self.nets[1:]:
            self.keys.add_owner(net, net.C, keys)
        self._weights: dict[int, int] = {}
        self._samples: list[Any] = []
        self._models: dict[int, dict[str, Any]] = {}
        self._first_outputs: dict[tuple[int, int], LocatedCKKSTensor] = {}

    def begin(self, models, weights):
        if not self._samples:
            sizes = self.parties.numbers([0 if labels is None else len(labels) for labels in self.tests.labels])
            self.tests = self.tests.of_sizes([int(size) for size in sizes], self.program.shape)
            self._samples = [self._sample(i, *self._own_samples(i)) for i in range(len(self.nets))]
        told = self.parties.numbers([weights.get(i, 0) for i in range(len(self.nets))])
        self._weights = quantised({i: w for i, w in enumerate(told) if w > 0})
        self._first_outputs = {}
        self._begun()
        self._models = {i: self._model(i, self._own_model(i, models.get(i))) for i in self._weights}

    def routes(self, coalition: int) -> list[Route]:
        """Batches and their clients for a coalition's model; one for each owner where samples cannot be joined."""
        everyone, some = range(len(self.nets)), members(coalition)
        layers, together = len(self.program.layers), self.skips
        return plan(everyone, everyone, layers, self.level, members=some, together=together, turn=coalition)

    def prepare(self):
        for i in self._models if self.first_once else ():
            for owner in range(len(self.nets)):
                self._first(i, owner)

    def _first(self, i: int, owner: int) -> LocatedCKKSTensor:
        """The first layer's outputs of client i's model on an owner's samples, at P: made when first asked for."""
        if (i, owner) not in self._first_outputs:
            self._first_outputs[i, owner] = self._first_product(i, owner)
        return self._first_outputs[i, owner]

    @abstractmethod
    def _first_product(self, i: int, owner: int) -> LocatedCKKSTensor:
        """See `_first`."""

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
        return self.parties.publish([coalition, *samples, *[0] * (len(self.nets) - len(samples))], "task")

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


# SecretSV: models and test data in shares of the two servers, on sectorch's own protocols (SecSV, appendix A).
#
# Nothing is encrypted and no client decrypts: products, activations and the comparison with the label run on shares mod
# 2^64 (docs/protocols.md), with exact truncation in place of the paper's, whose error adds up over the steps of a GRU.
# Clients C share with the servers P and X, as in SecSV. In the session that tests a coalition P is A, X is S, and Q a
# client that deals correlated randomness and learns which samples of a batch are classified correctly, as the servers
# do.


def encoded(x: torch.Tensor, frac_bits: int) -> torch.Tensor:
    return encode(x, frac_bits) if x.is_floating_point() else x


@work("sharing", shapes=lambda x, frac_bits: (encoded(x, frac_bits),) * 2)
def split(x: torch.Tensor, frac_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares mod 2^64 of an owner's tensor: the first uniform."""
    value = encoded(x, frac_bits)
    mask = PairKey(random_secret(), random_secret()).words("shapley share", 0, 0, value.numel()).view(value.shape)
    return mask, value - mask


@protocol("shapley_share", "SecSV, Algorithm 9; FedAvg", [
    Message("half_P", "C", "P", "a share mod 2^64"), Message("half_X", "C", "X", "a share mod 2^64"),
], roles=TWO_SERVERS)  # fmt: skip
def share(net: Net, x: Located, frac_bits: int = 0) -> tuple[Located, Located]:
    """A tensor of C's in halves at P and X. Rounds 1; 8 bytes an element to each server. Nobody learns anything."""
    at_P, at_X = net.fresh(net.C, split, x, frac_bits)
    return at_P.send(net.C, net.P, "half_P").at(net.P), at_X.send(net.C, net.X, "half_X").at(net.X)


class SecretSVTester(Tester):
    """Both servers' halves of everything, and a session that works on them."""

    def __init__(self, program: Program, tests: TestSet):
        super().__init__(program, tests)
        self.scheme = Scheme()
        self._parties = Parties(len(tests.x), TWO_SERVERS)
        self._x = [self._shared(i, x.reshape(len(x), -1).t().contiguous()) for i, (x, _) in enumerate(tests.everywhere)]
        self._labels = [self._shared(i, labels) for i, (_, labels) in enumerate(tests.everywhere)]

    def begin(self, models, weights):
        told = self._parties.numbers([weights.get(i, 0) for i in range(len(self._x))])
        self._weights = quantised({i: w for i, w in enumerate(told) if w > 0})
        self._models = {
            i: {
                name: [self._shared(i, part * self._weights[i]) for part in pair]
                for name, pair in self.program.matrices(model).items()
            }
            for i, model in models.items()
        }

    def _counted(self, counts):
        return self._parties.total(counts)

    def _shared(self, client: int, x: torch.Tensor) -> torch.Tensor:
        """What P and X get of a tensor of a client's: both halves, [2, ...]."""
        net = self._parties.nets[client]
        at_P, at_X = share(net, net.own(net.C, x), self.scheme.frac_bits)
        return torch.stack((net.read(at_P, net.P), net.read(at_X, net.X)))

    def correct(self, coalition, samples):
        owners = members(coalition)
        numbers = {i: self.tests.of(i, samples) for i in range(len(self.tests.x))}
        chosen = [i for i, part in numbers.items() if part]
        if not chosen:
            return 0
        with during("arithmetic"):
            session = Session()
            added = lambda name, k: torch.stack([self._models[i][name][k] for i in owners]).sum(0)
            taken = lambda of: torch.cat([of[i][..., numbers[i]] for i in chosen], -1)
            model = {name: [self._held(session, added(name, k)) for k in (0, 1)] for name in self._models[owners[0]]}
            x, labels = self._held(session, taken(self._x)), self._held(session, taken(self._labels), 0)
            scores = self._scores(model, x, 1 / sum(self._weights[i] for i in owners))
            hits = (scores.argmax(1) == labels).reveal().tolist()
        return bits(self.tests.places(chosen, numbers)[np.array(hits, bool)])

    @torch.no_grad()
    def _scores(self, model: dict, values: Any, share: float) -> Any:
        samples = values.shape[1]
        out, state = values, values[: self.program.state] * 0 if self.program.state else None
        for layer in self.program.layers:
            columns = layer.features(values if state is None else torch.cat([values, state]))
            matrix, bias = model[layer.weight]
            out = layer.outputs((matrix @ columns + bias.unsqueeze(1)) * share, samples)
            if layer.gate and state is not None:
                z, u = gates(out)
                state = u + z * state
            else:
                out = layer.after(out)
                values = out.reshape(samples, -1).t()
        return out

    def _held(self, session: Session, halves: torch.Tensor, frac_bits: int | None = None) -> SharedTensor:
        party, frac_bits = session.answering[0], self.scheme.frac_bits if frac_bits is None else frac_bits
        with session.operation(party) as net:
            shares = Shares(net.own(net.A, halves[0], Phase.ONLINE), net.own(net.S, halves[1], Phase.ONLINE))
        dtype = torch.float32 if frac_bits else torch.int64
        return SharedTensor(shares, frac_bits, session, party, self.scheme, dtype)
