"""Clients, P and X apart: each trains or adds up its part of every round, and takes part in the valuation of all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from ... import ckks
from ...choreography import Located, Message, Net, Party, Roles, protocol, with_shapes
from ...choreography.located import run_in
from ...choreography.net import Runtime
from ...ckks.convert import random_words
from ...ckks.scheme.keys import SecretKey
from ...data.seeds import derive
from ...errors import FrameError
from ...federated.errors import FederationError
from ...federated.folder import RunFolder
from ...federated.outcome import Outcome
from ...federated.parties import Parties
from ...federated.training import LocalTraining, State, Training, average_model, local_model, weighted_model
from ...federated.watch import Watch
from . import secsv, settings
from .algorithm import Utilities
from .experiment import digest_of, round_name, tell
from .program import Program
from .report import Result, Round
from .secsv import bits_for, joint_keys, joint_parameters
from .settings import Settings, feasible
from .testers import TWO_SERVERS, Spent, TestSet
from .values import coalition

# What the parties of a valuation say to each other when they are apart, beside SecSV itself: keys, sums, rounds.
#
# The clients' joint key goes from the first client to the others, each over a channel of the two alone. Local models
# are averaged in shares: P and X add up what they cannot read, and the clients learn the sum, which is the next global
# model.


PAIR = Roles("K L", edges="K-L")


@protocol("shapley_public_key", "SecSV, section 3", [
    Message("public", "K", "L", "nothing", "the clients' public key"),
], roles=PAIR)  # fmt: skip
def send_public(net: Net, key: Located) -> Located:
    """The clients' public key from the first of them, uint8, at L. Rounds 1, bytes about 16 N (primes + 1)^2."""
    return key.send(net.K, net.L, "public").at(net.L)


@protocol("shapley_secret_key", "SecSV, section 3", [
    Message("secret", "K", "L", "the secured channel", "the secret key, which all clients have in common"),
], roles=PAIR)  # fmt: skip
def send_secret(net: Net, key: Located) -> Located:
    """The clients' secret key from the first of them, uint8, at L, another client. Rounds 1, bytes 8 N (primes + 1)."""
    return key.send(net.K, net.L, "secret").at(net.L)


def exchange_keys(clients: Sequence[str], together: Parties, agreed: str) -> ckks.Keys | ckks.PublicKeys:
    """The joint keys of the clients; their public half at a server.

    Args:
        clients: names; the first makes the keys, afresh in every run.
    """
    parameters = joint_parameters()
    found: ckks.Keys | ckks.PublicKeys | None = joint_keys() if together.present(clients[0]) else None
    blank = lambda size: torch.empty(size, dtype=torch.uint8, device="meta")
    for other in (*clients[1:], "P", "X"):
        here = together.present(other)
        if not (here or together.present(clients[0])):
            continue
        keys = found if isinstance(found, ckks.Keys) else None
        public = blank(ckks.PublicKeys.message_bytes(parameters)) if keys is None else keys.public.message()
        secret = blank(SecretKey.message_bytes(parameters)) if keys is None else keys.secret.message()
        session = together.session(PAIR, {"K": clients[0], "L": other}, label=f"shapley keys {other}", agreed=agreed)
        with session as pair, pair.call() as net:
            arrived = net.read(send_public(net, net.own(net.K, public)), net.L)
            if here:
                found = ckks.PublicKeys.from_message(parameters, arrived)
            if other in clients:
                arrived = net.read(send_secret(net, net.own(net.K, secret)), net.L)
                if here and isinstance(found, ckks.PublicKeys):
                    found = ckks.Keys(found, SecretKey.from_message(found, arrived))
    if found is None:
        raise ckks.MissingKeyError("a party of a valuation is one of its clients, or P or X")
    return found


@protocol("shapley_share_model", "FedAvg; SecSV, Figure 1", [
    Message("local_P", "C", "P", "a share mod 2^64"), Message("local_X", "C", "X", "a share mod 2^64"),
], roles=TWO_SERVERS)  # fmt: skip
def share_model(net: Net, model: Located) -> tuple[Located, Located]:
    """C's local model times its weight, int64 [parameters], shared. Rounds 1; 8 bytes a parameter to each server."""
    at_P, at_X = net.fresh(net.C, _split, model)
    return at_P.send(net.C, net.P, "local_P").at(net.P), at_X.send(net.C, net.X, "local_X").at(net.X)


@with_shapes(lambda model: (model, model))
def _split(model: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = random_words(model.numel()).view(model.shape)
    return model - mask, mask


@protocol("shapley_open_sum", "FedAvg; SecSV, Figure 1", [
    Message("sum_P", "P", "C", "X's half"),
    Message("sum_X", "X", "C", "P's half", "the weighted sum of the local models, which is the next global model"),
], roles=TWO_SERVERS)  # fmt: skip
def open_sum(net: Net, at_P: Located, at_X: Located) -> Located:
    """The sum at C. Rounds 1; 8 bytes a parameter from each."""
    return at_P.send(net.P, net.C, "sum_P").at(net.C) + at_X.send(net.X, net.C, "sum_X").at(net.C)


@protocol("shapley_round", "docs/secsv.md", [
    Message("round", "P", "C", "nothing", "which round is valued next, and whether the first model's hits are counted"),
], roles=TWO_SERVERS)  # fmt: skip
def say_round(net: Net, value: Located) -> Located:
    """What comes next, int64 [2], from P at C. Rounds 1, bytes 16."""
    return value.send(net.P, net.C, "round")


@protocol("shapley_round_X", "docs/secsv.md", [
    Message("round", "P", "X", "nothing", "which round is valued next, and whether the first model's hits are counted"),
], roles=TWO_SERVERS)  # fmt: skip
def say_round_X(net: Net, value: Located) -> Located:
    """The same at X. Rounds 1, bytes 16."""
    return value.send(net.P, net.X, "round")


Pair = tuple[torch.Tensor, torch.Tensor]
SERVERS = ("P", "X")


@dataclass
class Part(Outcome):
    """What a client, or X, has of a valuation: that it took part. The values are P's to tell."""

    clients: Sequence[str]
    rounds: int
    seconds: float

    def headline(self) -> dict[str, float]:
        return {}

    def as_dict(self) -> dict:
        return dict(clients=list(self.clients), rounds=self.rounds, wall_seconds=self.seconds)

    def tables(self) -> list[Table]:
        return []

    def sentences(self) -> list[str]:
        return [
            f"Took part in the valuation of {len(self.clients)} clients, {self.rounds} rounds, {self.seconds:.1f} s.",
            "P learned which test samples each coalition's model classifies correctly, and has the values.",
        ]


class JointValuation:
    """Federated averaging among clients apart, and the valuation of its rounds by SecSV: this process is one party.

    Args:
        model: the architecture, with the weights of the first global model, which everybody knows.
        shape: of a sample.
        clients: all names, in their order; the servers are P and X.
        data: training and test samples of the client that is here, by name; nothing at a server.
        rounds: of federated averaging. training: of a round. attending: rounds (from 0) that a client attends.
        settings: see `Settings`; nothing is compared with the clear, which nobody has.
        out: a folder: a client keeps its local models, P what it has found. All start again, and go on: at the first
            round that a client has not, and at the first coalition that P has not.
        together: who is here.
        own: seed of a client's batches, its own secret.

    `run` gives P the `Result`, and everybody else a `Part`. Local models are on the client's disk before they are
    shared, and are shared as they were where a round is repeated.

    Raises:
        FederationError: another protocol than SecSV, several processes; samples that are not here. RoutingError.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self, model: nn.Module, shape: Sequence[int], clients: Sequence[str], data: Mapping[str, tuple[Pair, Pair]],
        settings: Settings, together: Parties, *, rounds: int, training: Training | None = None,
        attending: Mapping[str, range] | None = None, out: str | Path | None = None, own: int = 0,
    ):  # fmt: skip
        if settings.protocol != "secsv" or settings.processes > 1 or settings.parallel != "subsets":
            raise FederationError(
                "parties apart value by the protocol secsv, each in one process: leave the others out"
            )
        self.model, self.clients, self.together, self.own = model, list(clients), together, own
        self.settings = settings.but(compare=False)
        self.program = Program(model, tuple(shape))
        self.level = feasible(len(self.clients), self.program, settings)
        self.rounds, self.training = rounds, training or LocalTraining()
        self.attending = [
            [i for i, n in enumerate(self.clients) if attending is None or t in attending.get(n, range(rounds))]
            for t in range(rounds)
        ]
        if not all(self.attending):
            raise FederationError(f"nobody attends round {[bool(a) for a in self.attending].index(False) + 1}")
        self.data = {i: data[n] for i, n in enumerate(self.clients) if together.present(n)}
        self.first = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.folder = RunFolder(out)
        self.folder.claim(json.loads(self._agreed()))
        self._local: dict[int, State] = {}
        self._begun, kept = -1, self.folder.record("nobody")
        self._hits: int | None = None if kept is None else int(kept["right"])

    def _agreed(self) -> str:
        """What all parties have to agree on."""
        how = {k: v for k, v in self.settings.as_dict().items() if k not in ("processes", "parallel", "compare")}
        said = dict(clients=self.clients, attending=self.attending, training=self.training.as_dict(), **how)
        return json.dumps({**said, "model": str(self.model), "shape": self.program.shape,
                           "first": digest_of({"": self.first})})  # fmt: skip

    def so_far(self) -> str:
        return ""

    def estimate(self) -> None:
        return None

    def run(self, watch: Watch | None = None) -> Outcome:
        """This party's part, from where it was stopped.

        Raises:
            NetworkError: a party was lost; all start again.
            FixedPointRangeError: a model leaves the number format, at its owner.
        """
        watch, begun, agreed = watch or Watch(), time.perf_counter(), self._agreed()
        parties = {Party(f"C{i + 1}", "C"): name for i, name in enumerate(self.clients)}
        parties |= {Party(name, name): name for name in SERVERS}
        with self.together.runtime(TWO_SERVERS, parties, label="shapley", agreed=agreed) as runtime:
            # In it, so that all hear of a party that is lost before it has its keys: the others would wait for it.
            keys = exchange_keys(self.clients, self.together, agreed)
            tester = self._tester(keys, runtime)
            self._train(tester, watch)
            self._agree(tester)
            found = list[Round]()
            if self.together.present("P"):
                found = self._value(tester, watch)
                self._say(tester, 0, False)
            else:
                self._follow(tester)
        seconds = time.perf_counter() - begun
        if not self.together.present("P"):
            return Part(self.clients, self.rounds, seconds)
        return Result(self.clients, self.settings, self.level, found, len(tester.tests), seconds)

    def _tester(self, keys: ckks.Keys | ckks.PublicKeys, runtime: Runtime) -> secsv.SecSVTester:
        form = secsv.named_format(self.settings.value_bits, self.settings.frac_bits)
        own = [self.data[i][1] if i in self.data else (None, None) for i in range(len(self.clients))]
        tests = TestSet(tuple(x for x, _ in own), tuple(labels for _, labels in own))
        tester = secsv.SecSVTester(self.program, tests, keys, form, self.level, runtime)
        sizes = tester.parties.numbers([0 if labels is None else len(labels) for labels in tests.labels])
        tester.tests = tests.of_sizes([int(size) for size in sizes], self.program.shape)
        return tester

    # Federated averaging.

    def _train(self, tester: secsv.SecSVTester, watch: Watch) -> None:
        """What is left of the rounds; afterwards `_local` has this client's model of each."""
        weights = tester.parties.numbers([self._samples(i) for i in range(len(self.clients))])
        kept = [self.folder.tensors(f"training/{round_name(t)}") for t in range(self.rounds)]
        done = next((t for t, found in enumerate(kept) if found is None), self.rounds)
        told = tester.parties.numbers([done if i in self.data else 0 for i in range(len(self.clients))])
        start = int(min(told))
        current = kept[start - 1] if start and self.data else self.first
        tick = watch.step("training", self.rounds - start)
        for t in range(self.rounds):
            if t < start:
                for i in self.data.keys() & set(self.attending[t]):
                    self._trained(t, i, current)
            else:
                current = self._round(t, tester, current, [int(weight) for weight in weights])
                tick()

    def _samples(self, i: int) -> int:
        return len(self.data[i][0][1]) if i in self.data else 0

    def _round(self, t: int, tester: secsv.SecSVTester, current: State, weights: Sequence[int]) -> State:
        """One round: the local models of those who attend are added up in shares, and every client gets the sum."""
        there, size = self.attending[t], sum(value.numel() for value in self.first.values())
        at_P, at_X = [], []
        for i in there:
            net = tester.nets[i]
            flat = torch.empty(size, dtype=torch.int64, device="meta")
            if i in self.data:
                flat = weighted_model(self._trained(t, i, current), weights[i])
            P, X = share_model(net, net.own(net.C, flat, name="model"))
            at_P.append(P)
            at_X.append(X)
        with run_in(tester.nets[0]):
            sums = [sum(parts[1:], parts[0]) for parts in (at_P, at_X)]
        whole, found = sum(weights[i] for i in there), current
        for net in tester.nets:
            total = net.read(open_sum(net, *sums), net.C)
            if not total.is_meta:
                found = average_model(total, whole, self.first)
        if self.data:
            self.folder.keep(f"training/{round_name(t)}", found)
        return found

    def _trained(self, t: int, i: int, current: State) -> State:
        """A client's local model, on disk before anybody gets a share of it."""
        name = f"training/local-{t + 1:03}"
        local = self.folder.tensors(name)
        if local is None:
            (x, labels), _ = self.data[i]
            seed = derive(self.own, self.clients[i], t)
            local = local_model(self.model, current, x, labels, self.training, seed)
            self.folder.keep(name, local)
        self._local[t] = local
        return local

    # The valuation.

    def _agree(self, tester: secsv.SecSVTester) -> None:
        """The number format, from what the clients' own models reach on their own samples."""
        if self.settings.value_bits is not None:
            return
        reached = [0] * len(self.clients)
        for i, (_, (x, _)) in self.data.items():
            models = (self.program.matrices(local) for local in self._local.values())
            reached[i] = max((bits_for(self.program.run(m, x)[1]) for m in models), default=0)
        tester.agree(reached, self.settings.frac_bits)

    def _say(self, tester: secsv.SecSVTester, round_: int, counted: bool) -> tuple[int, bool]:
        """P says which round, from 1, is valued next, as everybody hears it; 0: none."""
        net = tester.nets[0]
        value = net.own(net.P, torch.tensor([round_, int(counted)]))
        for each in tester.nets:
            value = say_round(each, value)
        number, counts = net.agreed(say_round_X(net, value), tester.parties.everyone).tolist()
        if not 0 <= number <= self.rounds:
            raise FrameError(f"P values round {number} of {self.rounds}")
        return number, bool(counts)

    def _begin(self, tester: secsv.SecSVTester, t: int) -> None:
        """A round begins at everybody: the models go to the servers, encrypted."""
        mine = {i: self._local[t] for i in self.data if i in self.attending[t]}
        tester.begin(mine, {i: float(self._samples(i)) for i in mine})

    def _follow(self, tester: secsv.SecSVTester) -> None:
        while (said := self._say(tester, 0, False))[0]:
            self._begin(tester, said[0] - 1)
            if said[1]:
                tester.known(self.first)
            tester.follow()

    def _value(self, tester: secsv.SecSVTester, watch: Watch) -> list[Round]:
        """P's side: what is not in its folder is tested, each coalition on disk before the next."""
        how, rounds, before = self.settings, list[Round](), None
        watch.begins(sum(min(how.budget or 1 << 62, 2 ** len(there) - 1) for there in self.attending))
        for t, players in enumerate(self.attending):
            found = self._utilities(t, tester, before, watch)
            values = settings.estimate(how.estimator, players, found.ask, budget=how.budget, seed=how.seed + t)
            found.ask([0, coalition(players)])  # what the next round begins with
            if self._begun == t:
                tester.end()
            rounds.append(Round(players, values, None, found.records, found.begun, None, found.nobody))
            before = found
        return rounds

    def _utilities(self, t: int, tester: secsv.SecSVTester, before: Utilities | None, watch: Watch) -> Utilities:
        """v of a round, at P; the others hear of the round when something of it is left to test."""

        def keep(record: dict) -> None:
            self.folder.append(round_name(t), record)
            tell(watch, t, record)

        def begin() -> secsv.SecSVTester:
            if self._begun != t:
                counted = t == 0 and self.settings.nobody == "previous" and self._hits is None
                self._say(tester, t + 1, counted)
                self._begun = t
                with Spent() as spent:
                    self._begin(tester, t)
                found.began(spent)
                if counted:
                    self._hits = tester.known(self.first)
                    self.folder.keep("nobody", record={"right": self._hits})
            return tester

        def nobody() -> float:
            if self.settings.nobody == "zero":
                return 0.0
            if before is not None:
                return before(coalition(self.attending[t - 1]))
            if self._hits is None:
                begin()
            return (self._hits or 0) / len(tester.tests)

        done = self.folder.lines(round_name(t))
        for record in done:
            tell(watch, t, record)
        found = Utilities(self.attending[t], len(tester.tests), begin, self.settings, done, keep, nobody)
        return found
