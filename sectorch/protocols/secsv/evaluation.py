"""A valuation of federated learning: rounds of local models in, a value for each client out (SecSV, section 3)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...choreography import Located, Message, Net, Phase, protocol
from ...choreography.streams import PairKey, random_secret
from ...federated import folder
from ...federated.folder import RunFolder, digest, forked
from ...federated.watch import Watch
from ...mpc.star.shares import Shares
from ...ring import encode
from ...session import Session
from ...tensor import Scheme, SharedTensor
from . import hesv, secsv, settings
from .hesv import HESVTester
from .program import Program, gates
from .public import bits_for, quantised
from .report import Result, Round
from .secure import TWO_SERVERS, Parties
from .settings import Settings, check
from .testing import PlainTester, Spent, Tester, TestSet, during, work
from .values import FederationError, bits, coalition, coalitions, members, shapley, skippable

# SecretSV: models and test data in shares of the two servers, on sectorch's own protocols (SecSV, appendix A).
#
# Nothing is encrypted and no client decrypts: products, activations and the comparison with the label run on shares mod
# 2^64 (docs/protocols.md), with exact truncation in place of the paper's, whose error adds up over the steps of a GRU.
# Clients C share with the servers P and X, as in SecSV. In the session that tests a coalition P is A, X is S, and Q a
# client that deals correlated randomness and learns which samples of a batch are classified correctly, as the servers
# do.


Halves = tuple[torch.Tensor, torch.Tensor]


def encoded(x: torch.Tensor, frac_bits: int) -> torch.Tensor:
    return encode(x, frac_bits) if x.is_floating_point() else x


@work("sharing", shapes=lambda x, frac_bits: (encoded(x, frac_bits),) * 2)
def split(x: torch.Tensor, frac_bits: int) -> Halves:
    """Shares mod 2^64 of an owner's tensor: the first uniform."""
    value = encoded(x, frac_bits)
    mask = PairKey(random_secret(), random_secret()).words("secretsv", 0, 0, value.numel()).view(value.shape)
    return mask, value - mask


@protocol("secretsv_share", "SecSV, Algorithm 9", [
    Message("half_P", "C", "P", "a share mod 2^64"), Message("half_X", "C", "X", "a share mod 2^64"),
], roles=TWO_SERVERS)  # fmt: skip
def share(net: Net, x: Located, frac_bits: int) -> tuple[Located, Located]:
    """A tensor of C's in halves at P and X. Rounds 1; 8 bytes an element to each server. Nobody learns anything."""
    at_P, at_X = net.fresh(net.C, split, x, frac_bits)
    return at_P.send(net.C, net.P, "half_P"), at_X.send(net.C, net.X, "half_X")


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

    def _shared(self, client: int, x: torch.Tensor) -> Halves:
        """What P and X get of a tensor of a client's."""
        net = self._parties.nets[client]
        at_P, at_X = share(net, net.own(net.C, x), self.scheme.frac_bits)
        return net.read(at_P, net.P), net.read(at_X, net.X)

    def correct(self, coalition, samples):
        owners = members(coalition)
        numbers = {i: self.tests.of(i, samples) for i in range(len(self.tests.x))}
        chosen = [i for i, part in numbers.items() if part]
        if not chosen:
            return 0
        with during("arithmetic"):
            session = Session()
            model = {
                name: [
                    self._held(session, _added([self._models[i][name][k] for i in owners]), self.scheme.frac_bits)
                    for k in (0, 1)
                ]
                for name in self._models[owners[0]]
            }
            x = self._held(session, _joined([_taken(self._x[i], numbers[i]) for i in chosen]), self.scheme.frac_bits)
            labels = self._held(session, _joined([_taken(self._labels[i], numbers[i]) for i in chosen]), 0)
            scores = self._scores(model, x, 1 / sum(self._weights[i] for i in owners))
            hits = _revealed(scores.argmax(1) == labels)
        return bits(self.tests.places(chosen, numbers)[np.array(hits, bool)])

    @torch.no_grad()
    def _scores(self, model: dict, values: torch.Tensor, share: float) -> torch.Tensor:
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

    def _held(self, session: Session, halves: Halves, frac_bits: int) -> SharedTensor:
        party = session.answering[0]
        with session.operation(party) as net:
            shares = Shares(net.own(net.A, halves[0], Phase.ONLINE), net.own(net.S, halves[1], Phase.ONLINE))
        dtype = torch.float32 if frac_bits else torch.int64
        return SharedTensor(shares, frac_bits, session, party, self.scheme, dtype)


def _revealed(x: torch.Tensor) -> list:
    """The numbers of what the model made of shares."""
    if not isinstance(x, SharedTensor):
        raise FederationError(f"a model's scores are shared, got a {type(x).__name__}")
    return x.reveal().tolist()


def _added(parts: list[Halves]) -> Halves:
    first, second = (functools.reduce(torch.add, (p[k] for p in parts)) for k in (0, 1))
    return first, second


def _joined(parts: list[Halves]) -> Halves:
    first, second = (torch.cat([p[k] for p in parts], dim=-1) for k in (0, 1))
    return first, second


def _taken(halves: Halves, numbers: list[int]) -> Halves:
    first, second = (half[..., numbers] for half in halves)
    return first, second


# The utilities of a round's coalitions: tested once, cached, in SampleSkip's order (SecSV, Algorithm 6).


class Utilities:
    """v of one round.

    Args:
        players: numbers of the clients that attended.
        tester: gives a tester that has begun this round; called only if something is left to test.
        records: what was tested before.
        keep: called with each new record, before it counts.
        nobody: gives v of nobody: the utility of the model that the round began with.
    """

    def __init__(
        self,
        players: Sequence[int],
        samples: int,
        tester: Callable[[], Tester],
        how: Settings,
        records: Sequence[dict] = (),
        keep: Callable[[dict], None] = lambda record: None,
        nobody: Callable[[], float] = lambda: 0.0,
    ):
        self.players, self._samples, self._tester, self._how, self._keep = list(players), samples, tester, how, keep
        self._nobody = nobody
        self.records: dict[int, dict] = {}
        self._correct: dict[int, int] = {}
        self.begun: list[dict] = []
        for record in records:
            self._take(record)

    def ask(self, coalitions: Sequence[int]) -> dict[int, float]:
        """Utilities of some coalitions, of all smaller ones first; those of one size may go to several processes."""
        processes = self._how.processes if self._how.parallel == "subsets" else 1
        missing = sorted({c for c in coalitions if c and c not in self.records}, key=lambda c: (c.bit_count(), c))
        if len(missing) > 1 and processes > 1:
            tester = self._tester()
            with Spent() as spent:
                tester.prepare()
            if spent.products:
                self.began(spent)
        for _, wave in groupby(missing, key=int.bit_count):
            tester = self._tester()
            forked(list(wave), lambda c: self._test(tester, c), processes, self._finished)
        return {c: self.value(c) for c in coalitions}

    def value(self, coalition: int) -> float:
        """v of a coalition that was tested, or of nobody."""
        return self.records[coalition]["right"] / self._samples if coalition else self.nobody

    @cached_property
    def nobody(self) -> float:
        """The utility of the model that the round began with."""
        return self._nobody()

    def __call__(self, coalition: int) -> float:
        return self.ask([coalition])[coalition]

    def began(self, spent: Spent) -> None:
        """The round's models were encrypted: what that cost."""
        record = {"coalition": 0, **spent.record()}
        self._keep(record)
        self.begun.append(record)

    def _finished(self, record: dict) -> None:
        self._keep(record)
        self._take(record)

    def _take(self, record: dict) -> None:
        if record["coalition"] == 0:
            self.begun.append(record)
            return
        self.records[record["coalition"]] = record
        if record["samples"] is not None:
            self._correct[record["coalition"]] = int(record["samples"], 16)

    def _test(self, tester: Tester, coalition: int) -> Iterator[dict]:
        everything = (1 << self._samples) - 1
        with Spent() as spent:
            if isinstance(tester, HESVTester):
                right, known, skipped, rest, samples = tester.hits(coalition), 0, 0, everything, None
            else:
                skipping = self._how.skipping
                known = skippable(coalition, self._correct) if skipping != "never" else 0
                skipped, rest = known, everything & ~known
                saved = lambda: tester.cost(coalition, everything) - tester.cost(coalition, rest)
                if skipping == "saving" and known and rest and tester.cost(coalition, everything) and saved() <= 0:
                    skipped, rest = 0, everything
                samples = skipped | (tester.correct(coalition, rest) if rest else 0)
                right = samples.bit_count()
        found = dict(
            right=right, samples=None if samples is None else hex(samples), tested=rest.bit_count(),
            skippable=known.bit_count(), skipped=hex(skipped),
        )  # fmt: skip
        yield {"coalition": coalition, **found, **spent.record()}


State = Mapping[str, torch.Tensor]
UNTOLD = ("processes", "parallel", "compare")
"""Settings that change no value: a run may be taken up with others."""


class ShapleyEvaluation:
    """Federated Shapley values of the clients of any FL run.

    Args:
        model: the architecture: an `nn.Sequential` of linear layers and activations, or a `GRUClassifier`. Its
            weights are those of the global model before the first round, which everybody knows.
        rounds: for each round the local models, state_dicts by client name. A client that joined later or left has none
            in the rounds that it missed, and gets no value for them.
        tests: each client's private test samples, floats [m, ...] and int64 labels [m], by name.
        weights: aggregation weights (training samples) by name, one mapping for all rounds or one each; equal unless
            given.
        settings: see `Settings`.
        out: a folder; a run that was killed goes on there at the coalition where it stopped. None keeps nothing.

    A round begins with the global model that FedAvg made of everybody's local models in the last one. Its utility is
    that of the empty coalition, so that a client who returns it unchanged is not paid for it.

    All parties are in this process and its children: a simulation.

    Raises, before anything is encrypted:
        FederationError, RoutingError, EstimatorMissingError, CheckpointError, UnsupportedOpError; ckks.LevelError, on
        the run where the clients agree on the number format (no `value_bits`).
    """

    def __init__(
        self,
        model: nn.Module,
        rounds: Sequence[Mapping[str, State]],
        tests: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        weights: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
        settings: Settings | None = None,
        *,
        out: str | Path | None = None,
    ):
        self.settings = how = settings or Settings()
        self.names, self.rounds = list(tests), list(rounds)
        self.weights = _weights(weights, self.rounds)
        self.program, self.tests, self.level = check(model, self.rounds, tests, self.weights, how)
        if how.parallel == "ray":
            folder.ray()
        self._given = model, tests
        self._first = {name: v.detach() for name, v in model.state_dict().items()}
        self._of: dict[int, Utilities] = {}
        self._plain: ShapleyEvaluation | None = None
        if how.compare:
            clear = Settings(protocol="plain", compare=False, nobody=how.nobody)
            self._plain = ShapleyEvaluation(model, rounds, tests, weights, clear)
        self._tester: Tester | None = None
        self._begun = -1
        self._apart: dict[int, list[dict]] = {}
        self.form = secsv.named_format(how.value_bits, how.frac_bits) if how.protocol == "secsv" else None
        self.folder = RunFolder(out)
        kept = {k: v for k, v in how.as_dict().items() if k not in UNTOLD}
        people = {n: digest(*tests[n]) for n in self.names}
        self.folder.claim(
            {
                **kept,
                "clients": people,
                "first": digest_of({"": self._first}),
                "rounds": [digest_of(r) for r in self.rounds],
                "weights": self.weights,
            }
        )

    def run(self, watch: Watch | None = None) -> Result:
        """All rounds, or the part of them that is not in the folder yet.

        Raises:
            CorruptedCiphertextError: at the point; what was finished before stays in the folder.
            FixedPointRangeError: a model or its outputs leave the number format.
        """
        watch, how = watch or Watch(), self.settings
        start = time.perf_counter()
        expected = sum(min(how.budget or 1 << 62, 2 ** len(r) - 1) for r in self.rounds)
        watch.begins(expected)
        if how.parallel != "subsets":
            self._rounds_apart(watch)
            watch = Watch()  # all was reported as it came
        rounds = []
        for t in range(len(self.rounds)):
            utilities = self.utilities(t, watch)
            values = self._estimate(utilities, t)
            rounds.append(self._finished(t, utilities, values))
        return Result(self.names, how, self.level, rounds, len(self.tests), time.perf_counter() - start)

    def utilities(self, t: int, watch: Watch | None = None) -> Utilities:
        """v of a round, tested as it is asked for: what the measures of `secsv/values.py` take."""
        if t in self._of:
            return self._of[t]
        watch = watch or Watch()

        def keep(record: dict) -> None:
            self.folder.append(round_name(t), record)
            tell(watch, t, record)

        done = self._kept(t)
        for record in done:
            tell(watch, t, record)
        self._of[t] = self._utilities(t, done, keep, lambda: self._nobody(t))
        return self._of[t]

    def _utilities(self, t: int, done: Sequence[dict], keep, nobody: Callable[[], float]) -> Utilities:
        how, samples = self.settings, len(self.tests)
        found = Utilities(self.players(t), samples, lambda: self._begin(t, found), how, done, keep, nobody)
        return found

    def _nobody(self, t: int) -> float:
        """The utility of the global model that a round began with."""
        if self.settings.nobody == "zero":
            return 0.0
        if t == 0:
            return self._begin(0, self.utilities(0)).known(self._first) / len(self.tests)
        return self.utilities(t - 1)(coalition(self.players(t - 1)))

    def players(self, t: int) -> list[int]:
        """Numbers of the clients that attended a round."""
        return [i for i, name in enumerate(self.names) if name in self.rounds[t]]

    def _estimate(self, utilities: Utilities, t: int) -> dict[int, float]:
        how = self.settings
        return settings.estimate(how.estimator, utilities.players, utilities.ask, budget=how.budget, seed=how.seed + t)

    def _begin(self, t: int, utilities: Utilities) -> Tester:
        """The tester, with the models of a round."""
        if self._tester is None or self._begun != t:
            with Spent() as spent:
                self._tester = self._tester or self._make()
                self._tester.begin(*self._models(t))
            self._begun = t
            utilities.began(spent)
        return self._tester

    def _models(self, t: int) -> tuple[dict[int, State], dict[int, float]]:
        there = {i: self.names[i] for i in self.players(t)}
        weights = {i: float(self.weights[t][name]) for i, name in there.items()}
        return {i: self.rounds[t][name] for i, name in there.items()}, weights

    def _make(self) -> Tester:
        how, common = self.settings, (self.program, self.tests)
        if how.protocol == "plain":
            return PlainTester(*common)
        if how.protocol == "secretsv":
            return SecretSVTester(*common)
        if how.protocol == "hesv":
            return hesv.HESVTester(*common, hesv.joint_keys(self.program), self.level)
        tester = secsv.SecSVTester(*common, secsv.joint_keys(), self.form, self.level)
        if self.form is None:
            tester.agree([self._bits(name) for name in self.names], how.frac_bits)
        return tester

    def _bits(self, name: str) -> int:
        """log2 of what a client's models reach on its own samples."""
        own = (self.program.matrices(models[name]) for models in self.rounds if name in models)
        return max((bits_for(self.program.run(m, self._given[1][name][0])[1]) for m in own), default=0)

    def _rounds_apart(self, watch: Watch) -> None:
        """Whole rounds in other processes, or on other machines; the folder is written here."""
        wanted = [t for t in range(len(self.rounds)) if not self._complete(t)]

        def receive(record: dict) -> None:
            t = record.pop("round")
            self.folder.append(round_name(t), record)
            self._apart.setdefault(t, []).append(record)
            tell(watch, t, record)

        for t in range(len(self.rounds)):
            for record in self._kept(t):
                tell(watch, t, record)
        done = {t: self._kept(t) for t in wanted}
        if self.settings.parallel == "ray":
            _through_ray(self, wanted, done, receive)
        else:
            folder.forked(wanted, lambda t: self.round_records(t, done[t]), self.settings.processes, receive)

    def round_records(self, t: int, done: Sequence[dict]) -> list[dict]:
        """Everything that a round still needs, as records; in a process of its own."""
        made: list[dict] = []
        self._estimate(self._utilities(t, done, made.append, lambda: 0.0), t)  # only what is tested counts here
        return [{**record, "round": t} for record in made]

    def _kept(self, t: int) -> list[dict]:
        """The records of a round: in the folder or, where there is none, what other processes brought."""
        return self.folder.lines(round_name(t)) if self.folder.path else self._apart.get(t, [])

    def _complete(self, t: int) -> bool:
        tested = {record["coalition"] for record in self._kept(t)}
        return self.settings.estimator == "exact" and set(coalitions(self.players(t))) <= tested

    def _finished(self, t: int, utilities: Utilities, values: dict[int, float]) -> Round:
        exact, wrong = None, None
        if self._plain is not None:
            plain = self._plain.utilities(t)
            plain.ask(coalitions(utilities.players))
            exact = shapley(utilities.players, plain)
            right = {c: int(record["samples"], 16) for c, record in plain.records.items()}
            wrong = [(int(r["skipped"], 16) & ~right[c]).bit_count() for c, r in utilities.records.items()]
        return Round(utilities.players, values, exact, utilities.records, utilities.begun, wrong, utilities.nobody)


def digest_of(models: Mapping[str, State]) -> str:
    """A name for a round's local models."""
    return digest(*(v for name in sorted(models) for _, v in sorted(models[name].items())))


def round_name(t: int) -> str:
    """Of a round's lines: every tested coalition is on disk before the next is begun, so a kill loses one at most."""
    return f"round-{t + 1:03}"


def tell(watch: Watch, t: int, record: dict) -> None:
    """A coalition's utility is known; what a round's encryption cost is none."""
    if mask := record["coalition"]:
        watch.finished(f"round {t + 1}, clients {', '.join(str(i + 1) for i in members(mask))}", (t, mask))


def _weights(given, rounds: Sequence[Mapping[str, State]]) -> list[dict[str, float]]:
    if given is None:
        return [dict.fromkeys(r, 1.0) for r in rounds]
    if isinstance(given, Mapping):
        return [{n: float(given.get(n, 0)) for n in r} for r in rounds]
    return [{n: float(w.get(n, 0)) for n in r} for r, w in zip(rounds, given, strict=True)]


def _through_ray(run: ShapleyEvaluation, rounds: Sequence[int], done: dict[int, list], receive) -> None:
    """Each round as a Ray task with its own keys; models and test samples travel as Ray sends tensors."""
    ray = folder.ray()
    model, tests = run._given
    settings = run.settings.but(parallel="subsets", processes=1, compare=False)

    @ray.remote
    def one(t: int, models: dict, weights: dict, records: list) -> list[dict]:
        alone = ShapleyEvaluation(model, [models], tests, [weights], settings)
        return [{**record, "round": t} for record in alone.round_records(0, records)]

    waiting = [one.remote(t, dict(run.rounds[t]), run.weights[t], done[t]) for t in rounds]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for record in ray.get(ready[0]):
            receive(record)
