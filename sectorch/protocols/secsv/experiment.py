"""Valuations: of rounds that are given (`ShapleyEvaluation`), and of a training that is part of it (`Valuation`).

A valuation of given rounds has all parties in this process. One that trains is a choreography of stages
(`federated/run.py`): all parties in this process, or one of them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn

from ... import ckks
from ...choreography import Located, Message, Net, Party, Roles, protocol
from ...choreography.located import run_in
from ...ckks.scheme.keys import SecretKey
from ...data.datasets import DATASETS
from ...data.partition import DividedData, federation
from ...data.seeds import derive
from ...errors import FederationError, FrameError
from ...federated import folder, run
from ...federated.command import Command, Options, Place, option
from ...federated.folder import RunFolder, digest
from ...federated.outcome import Outcome, merged
from ...federated.parties import Parties as Federation
from ...federated.parties import Simulation
from ...federated.run import EVERYBODY, Experiment, Held, Run
from ...federated.training import LocalTraining, State, Training, average_model, local_model, weighted_model
from ...federated.watch import Estimate, Tick, Watch, silent
from . import hesv, secsv
from .algorithm import Utilities, value_rounds
from .program import MODELS, RATES, STEPS, Program, build
from .report import Result, Round, told_by
from .secsv import joint_keys, joint_parameters
from .settings import Settings, check, feasible
from .testers import TWO_SERVERS, Parties, PlainTester, SecretSVTester, Spent, Tester, TestSet, share
from .values import coalition, coalitions, members, shapley

Pair = tuple[torch.Tensor, torch.Tensor]
SERVERS = ("P", "X")


class RoundsEvaluation(ABC):
    """Tests the coalitions of all rounds, each of which is in a folder before the next one is tested.

    Args:
        attending: the players of each round, as numbers.
        samples: how many test samples there are.
    """

    def __init__(self, attending: Sequence[Sequence[int]], how: Settings, records: RunFolder):
        self.settings, self.folder, self._attending = how, records, attending
        self._of: dict[int, Utilities] = {}

    samples: int

    @abstractmethod
    def _begin(self, t: int, utilities: Utilities) -> Tester:
        """A tester with the models of a round."""

    @abstractmethod
    def _first_hits(self) -> int:
        """How many test samples the first global model classifies correctly."""

    def _ended(self, t: int, utilities: Utilities) -> None:  # noqa: B027 - where all are here, nobody waits for it
        """All of a round that was asked for is tested."""

    def players(self, t: int) -> list[int]:
        """Numbers of the clients that attended a round."""
        return list(self._attending[t])

    def records(self, watch: Watch) -> list[dict[str, Any]]:
        """Of each round its players, their values, what was tested, and the utility that it began with."""
        found = []
        every = [self.utilities(t, watch) for t in range(len(self._attending))]
        for t, (values, v) in enumerate(zip(value_rounds(every, self.settings), every, strict=True)):
            found.append({"players": v.players, "values": values, "records": v.records, "begun": v.begun})
            self._ended(t, v)
            found[-1]["nobody"] = v.nobody
        return found

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
        begin = lambda: self._begin(t, found)
        found = Utilities(self.players(t), self.samples, begin, self.settings, done, keep, nobody)
        return found

    def _nobody(self, t: int) -> float:
        """The utility of the global model that a round began with."""
        if self.settings.nobody == "zero":
            return 0.0
        if t == 0:
            return self._first_hits() / self.samples
        return self.utilities(t - 1)(coalition(self.players(t - 1)))

    def _kept(self, t: int) -> list[dict]:
        return self.folder.lines(round_name(t))


UNTOLD = ("processes", "parallel", "compare")
"""Settings that change no value: a run may be taken up with others."""


def told(how: Settings) -> dict[str, Any]:
    """The settings that a run is known by."""
    return {k: v for k, v in how.as_dict().items() if k not in UNTOLD}


class ShapleyEvaluation(RoundsEvaluation):
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
        self, model: nn.Module, rounds: Sequence[Mapping[str, State]], tests: Mapping[str, Pair],
        weights: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None, settings: Settings | None = None, *,
        out: str | Path | None = None,
    ):  # fmt: skip
        how = settings or Settings()
        self.names, self.rounds = list(tests), list(rounds)
        attending = [[i for i, name in enumerate(self.names) if name in models] for models in self.rounds]
        super().__init__(attending, how, RunFolder(out))
        self.weights = _weights(weights, self.rounds)
        self.program, self.tests, self.level = check(model, self.rounds, tests, self.weights, how)
        self.samples = len(self.tests)
        if how.parallel == "ray":
            folder.ray()
        self._given = model, tests
        self._first = {name: v.detach() for name, v in model.state_dict().items()}
        self._tester: Tester | None = None
        self._begun = -1
        self._elsewhere: dict[int, list[dict]] = {}
        self.form = secsv.named_format(how) if how.protocol == "secsv" else None
        people = {n: digest(*tests[n]) for n in self.names}
        models = [digest_of(r) for r in self.rounds]
        self.folder.claim({
            **told(how), "clients": people, "first": digest_of({"": self._first}), "rounds": models,
            "weights": self.weights,
        })  # fmt: skip

    def run(self, watch: Watch | None = None) -> Result:
        """All rounds, or the part of them that is not in the folder yet.

        Raises:
            CorruptedCiphertextError: at the point; what was finished before stays in the folder.
            FixedPointRangeError: a model or its outputs leave the number format.
        """
        start = time.perf_counter()
        return self.result(self.records(watch or Watch()), start)

    def result(self, records: Sequence[dict], start: float) -> Result:
        """The outcome, compared with the clear where that is wanted."""
        plain, how = None, self.settings
        if how.compare:
            clear = Settings(protocol="plain", compare=False, nobody=how.nobody)
            plain = ShapleyEvaluation(*self._given[:1], self.rounds, self._given[1], self.weights, clear)
        rounds = [_compared(t, one, plain) for t, one in enumerate(records)]
        return Result(self.names, how, self.level, rounds, self.samples, time.perf_counter() - start)

    def records(self, watch: Watch) -> list[dict[str, Any]]:
        watch.begins(sum(min(self.settings.budget or 1 << 62, 2 ** len(r) - 1) for r in self.rounds))
        if self.settings.parallel != "subsets":
            self._rounds_elsewhere(watch)
            watch = Watch()  # all was reported as it came
        return super().records(watch)

    def _begin(self, t: int, utilities: Utilities) -> Tester:
        if self._tester is None or self._begun != t:
            with Spent() as spent:
                self._tester = self._tester or self._make()
                self._tester.begin(*self._models(t))
            self._begun = t
            utilities.began(spent)
        return self._tester

    def _first_hits(self) -> int:
        return self._begin(0, self.utilities(0)).known(self._first)

    def _models(self, t: int) -> tuple[dict[int, State], dict[int, float]]:
        there = {i: self.names[i] for i in self.players(t)}
        weights = {i: float(self.weights[t][name]) for i, name in there.items()}
        return {i: dict(self.rounds[t][name]) for i, name in there.items()}, weights

    def _make(self) -> Tester:
        how, common = self.settings, (self.program, self.tests)
        if how.protocol == "plain":
            return PlainTester(*common)
        if how.protocol == "secretsv":
            return SecretSVTester(*common)
        if how.protocol == "hesv":
            return hesv.HESVTester(*common, hesv.joint_keys(self.program), self.level)
        tester = secsv.SecSVTester(*common, joint_keys(), self.form, self.level)
        if self.form is None:
            of = lambda name: [models[name] for models in self.rounds if name in models]
            tester.agree([needed_bits(self.program, of(n), self._given[1][n][0]) for n in self.names], how.frac_bits)
        return tester

    # Whole rounds in other processes, or on other machines; the folder is written here.

    def _rounds_elsewhere(self, watch: Watch) -> None:
        wanted = [t for t in range(len(self.rounds)) if not self._complete(t)]

        def receive(record: dict) -> None:
            t = record.pop("round")
            self.folder.append(round_name(t), record)
            self._elsewhere.setdefault(t, []).append(record)
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
        v = self._utilities(t, done, made.append, lambda: 0.0)  # only what is tested counts here
        next(value_rounds([v], self.settings.but(seed=self.settings.seed + t)))
        return [{**record, "round": t} for record in made]

    def _kept(self, t: int) -> list[dict]:
        """The records of a round: in the folder or, where there is none, what other processes brought."""
        return super()._kept(t) if self.folder.path else self._elsewhere.get(t, [])

    def _complete(self, t: int) -> bool:
        tested = {record["coalition"] for record in self._kept(t)}
        return self.settings.estimator == "exact" and set(coalitions(self.players(t))) <= tested


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


def needed_bits(program: Program, models: Sequence[Mapping[str, torch.Tensor]], x: torch.Tensor) -> int:
    """log2 of what a client's models reach on its own samples."""
    own = (program.matrices(model) for model in models)
    return max((secsv.bits_for(program.run(m, x)[1]) for m in own), default=0)


def _compared(t: int, found: Mapping[str, Any], plain: ShapleyEvaluation | None) -> Round:
    exact, wrong = None, None
    if plain is not None:
        clear = plain.utilities(t)
        clear.ask(coalitions(found["players"]))
        exact = shapley(found["players"], clear)
        right = {c: int(record["samples"], 16) for c, record in clear.records.items()}
        wrong = [(int(r["skipped"], 16) & ~right[c]).bit_count() for c, r in found["records"].items()]
    return Round(**found, exact=exact, wrong=wrong)


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


class Valuation(Experiment):
    """Federated averaging, and the valuation of its rounds: all parties in this process, or one of a federation.

    Args:
        model: the architecture, with the weights of the first global model, which everybody knows.
        shape: of a sample.
        clients: all names, in their order; the servers are P and X.
        data: training and test samples of the clients that are here, by name; nothing at a server.
        settings: see `Settings`; in a federation nothing is compared with the clear, which nobody has.
        parties: who is here; everybody unless given.
        rounds: of federated averaging. training: of a round. attending: rounds (from 0) that a client attends.
        out: a folder for finished stages, and at P for each coalition that was tested: what was stopped goes on there.
        own: seed of a client's batches; apart, its own secret.

    `run` gives the `Result`; in a federation P has it, and everybody else a `Part`. Local models are on the
    client's disk before they are shared, and are shared as they were where a round is repeated.

    Raises:
        FederationError: another protocol than SecSV, or several processes, in a federation. RoutingError.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self, model: nn.Module, shape: Sequence[int], clients: Sequence[str], data: Mapping[str, tuple[Pair, Pair]],
        settings: Settings | None = None, parties: Federation | None = None, *, rounds: int,
        training: Training | None = None, attending: Mapping[str, range] | None = None,
        out: str | Path | None = None, own: int = 0,
    ):  # fmt: skip
        how, parties = settings or Settings(), parties or Simulation()
        self.model, self.shape, self.clients, self._own = model, tuple(shape), list(clients), own
        self.data = {n: data[n] for n in self.clients if parties.present(n) and n in data}
        self.training = training or LocalTraining()
        self.first = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.level = feasible(len(self.clients), Program(model, self.shape), how)
        self.attending = [
            [n for n in self.clients if attending is None or t in attending.get(n, range(rounds))]
            for t in range(rounds)
        ]
        if not all(self.attending):
            raise FederationError(f"nobody attends round {[bool(a) for a in self.attending].index(False) + 1}")
        spans = {n: [span.start, span.stop] for n, span in (attending or {}).items()}
        self.stages = Run(
            {"run": "shapley", **told(how), "rounds": rounds, "clients": self.clients, "attending": spans,
             "training": self.training.as_dict(), "model": str(model), "shape": self.shape,
             "first": digest_of({"": self.first})},
            own={"data": {n: digest(*train, *test) for n, (train, test) in self.data.items()}},
            members=[*SERVERS, *self.clients], parties=parties, out=out,
        )  # fmt: skip
        if self.stages.apart and (how.protocol != "secsv" or how.processes > 1 or how.parallel != "subsets"):
            raise FederationError(
                "a federation values by the protocol secsv, each party in one process: leave the others out"
            )
        if how.protocol == "secsv":
            secsv.named_format(how)
        self.settings = how.but(compare=False) if self.stages.apart else how
        self._start = 0.0

    def algorithm(self, run: Run) -> tuple[list[dict[str, Held]], Held]:
        """SecSV, Figure 1: rounds of FedAvg, and then the valuation of all of them."""
        self._start = time.perf_counter()
        cast, model, how = {"C": self.clients, "P": "P", "X": "X"}, run.public(self.model), run.public(self.training)
        own = {n: run.bring(n, self._own) for n in self.clients}
        train, test = ({n: run.bring(n, self.data[n][k] if n in self.data else None) for n in own} for k in (0, 1))
        current, local = run.public(self.first), []
        for t, there in enumerate(self.attending):
            stage, mine = f"round-{t + 1}", [train[n] for n in there]
            models = [
                run.at(n, train_locally, model, current, train[n], how, own[n], n, t, stage=f"{stage}/{n}/local")
                for n in there
            ]
            current = run.among(
                next_model, cast, self.clients, there, models, mine, self.first, t, at=self.clients,
                stage=f"{stage}/global", roles=None,
            )  # fmt: skip
            local.append(dict(zip(there, models, strict=True)))
        # Settings that change no value are no part of what the stage is known by.
        settings = Held(EVERYBODY, run_key(self.settings), self.settings)
        values = run.among(
            value, cast, self.model, self.shape, self.attending, local, train, test, settings, at="P", stage="values",
            roles=None,
        )  # fmt: skip
        return local, values

    def outcome(self, found: tuple[list[dict[str, Held]], Held]) -> Outcome:
        local, values = found
        if not values.present:
            return Part(self.clients, len(local), time.perf_counter() - self._start, self.stages.received)
        records, samples = values.value["rounds"], values.value["samples"]
        if self.stages.apart:
            rounds = [_compared(t, one, None) for t, one in enumerate(records)]
            seconds = time.perf_counter() - self._start
            return Result(self.clients, self.settings, self.level, rounds, samples, seconds, self._trained_by())
        models = [{n: held.value for n, held in one.items()} for one in local]
        tests, weights = {n: test for n, (_, test) in self.data.items()}, self._weights()
        evaluation = ShapleyEvaluation(self.model, models, tests, weights, self.settings)
        return replace(evaluation.result(records, self._start), training=self._trained_by())

    def _trained_by(self) -> list[dict]:
        """The ledger's rows of the training."""
        return merged(r.get("received", []) for r in self.stages.records if r["stage"] != "values")

    def _weights(self) -> dict[str, float]:
        return {n: float(len(train[1])) for n, (train, _) in self.data.items()}

    def estimate(self) -> Estimate | None:
        """What is left: the rounds' encryption and all coalitions, from one round of untrained models and one
        coalition of it. None in a federation."""
        return self.stages.estimate(self.algorithm, {value: self._valuing})

    def _valuing(self, *_: Any) -> Estimate:
        everybody = 2 ** len(self.clients) - 1
        count = len(self.attending) * min(self.settings.budget or everybody, everybody)
        quick = self.settings.but(compare=False, processes=1, parallel="subsets")
        tests = {n: test for n, (_, test) in self.data.items()}
        v = ShapleyEvaluation(self.model, [dict.fromkeys(self.clients, self.first)], tests, None, quick).utilities(0)
        v.ask([1])
        begun, tested = (_spent(records) for records in (v.begun, v.records.values()))
        return begun * len(self.attending) + tested * count


def run_key(how: Settings) -> str:
    return run.digest_of(told(how))


def _spent(records) -> Estimate:
    seconds, size = (sum(sum(r.get(key, {}).values()) for r in records) for key in ("seconds", "bytes"))
    return Estimate(seconds, size)


# The stages. Of a party that is elsewhere an argument is None.


def train_locally(
    model: nn.Module, current: State, samples: Pair, how: Training, own: int, name: str, t: int
) -> State:  # fmt: skip
    """A client's local model of a round."""
    return local_model(model, current, *samples, how, derive(own, name, t), run.progress(how.epochs))


def next_model(
    parties: Federation, clients: Sequence[str], there: Sequence[str], models: Sequence[State | None],
    samples: Sequence[Pair | None], first: State, t: int,
) -> State | None:  # fmt: skip
    """The local models of those who attend are added up in shares of P and X, and every client gets the sum."""
    size = sum(value.numel() for value in first.values())
    with parties.runtime(TWO_SERVERS, _everybody(clients), label=f"shapley round {t + 1}") as runtime:
        here = Parties(len(clients), TWO_SERVERS, runtime)
        own = dict(zip(there, samples, strict=True))
        weights = here.numbers([len(pair[1]) if (pair := own.get(n)) is not None else 0 for n in clients])
        at_P, at_X = [], []
        for name, model in zip(there, models, strict=True):
            i = clients.index(name)
            flat = torch.empty(size, dtype=torch.int64, device="meta")
            if model is not None:
                flat = weighted_model(model, int(weights[i]))
            net = here.nets[i]
            for parts, part in zip((at_P, at_X), share(net, net.own(net.C, flat, name="model")), strict=True):
                parts.append(part)
        with run_in(here.nets[0]):
            sums = [sum(parts[1:], parts[0]) for parts in (at_P, at_X)]
        found = None
        for net in here.nets:
            total = net.read(open_sum(net, *sums), net.C)
            if not total.is_meta:
                found = average_model(total, int(sum(weights)), first)
        return found


def value(
    parties: Federation, model: nn.Module, shape: tuple[int, ...], attending: Sequence[Sequence[str]],
    local: Sequence[Mapping[str, State | None]], train: Mapping[str, Pair | None], test: Mapping[str, Pair | None],
    how: Settings,
) -> dict[str, Any] | None:  # fmt: skip
    """The valuation of all rounds, at P; each coalition is on its disk before the next one is tested."""
    names, records = list(test), run.parts()
    if all(parties.present(name) for name in (*names, *SERVERS)):
        weights = {n: float(len(pair[1])) for n, pair in train.items() if pair is not None}
        here = {n: pair for n, pair in test.items() if pair is not None}
        models = [{n: state for n, state in one.items() if state is not None} for one in local]
        found = ShapleyEvaluation(model, models, here, weights, how.but(compare=False), out=records.path)
        return {"rounds": found.records(_Bar()), "samples": found.samples}
    with parties.runtime(TWO_SERVERS, _everybody(names), label="shapley") as runtime:
        # In it, so that all hear of a party that is lost before it has its keys: the others would wait for it.
        keys = exchange_keys(names, parties)
        program, samples = Program(model, shape), [test[n] or (None, None) for n in names]
        tests = TestSet(tuple(x for x, _ in samples), tuple(labels for _, labels in samples))
        level, form = feasible(len(names), program, how), secsv.named_format(how)
        tester = secsv.SecSVTester(program, tests, keys, form, level, runtime)
        sizes = tester.parties.numbers([0 if labels is None else len(labels) for labels in tests.labels])
        tester.tests = tests.of_sizes([int(size) for size in sizes], shape)
        mine = [{names.index(n): state for n, state in one.items() if state is not None} for one in local]
        if form is None:
            own = [[one[i] for one in mine if i in one] for i in range(len(names))]
            needed = (0 if x is None else needed_bits(program, o, x) for o, (x, _) in zip(own, samples, strict=True))
            tester.agree(list(needed), how.frac_bits)
        weights = {i: float(len(pair[1])) for i, n in enumerate(names) if (pair := train[n]) is not None}
        numbers = [[names.index(n) for n in there] for there in attending]
        party = JointEvaluation(tester, model, mine, weights, numbers, how, records)
        return party.lead() if parties.present("P") else party.follow()


class JointEvaluation(RoundsEvaluation):
    """One party's part in the valuation of rounds whose parties are elsewhere: P asks, and the others answer.

    Args:
        mine: of each round the local models that are here.
        weights: the aggregation weights that are here.
    """

    def __init__(
        self, tester: secsv.SecSVTester, model: nn.Module, mine: Sequence[Mapping[int, State]],
        weights: Mapping[int, float], attending: Sequence[Sequence[int]], how: Settings, records: RunFolder,
    ):  # fmt: skip
        super().__init__(attending, how, records)
        self._tester, self._mine, self._weights, self.samples = tester, mine, weights, len(tester.tests)
        self._first = {name: v.detach() for name, v in model.state_dict().items()}
        self._begun, kept = -1, records.record("nobody")
        self._hits: int | None = None if kept is None else int(kept["right"])

    def lead(self) -> dict[str, Any]:
        """P's side."""
        found = self.records(_Bar(sum(min(self.settings.budget or 1 << 62, 2 ** len(a) - 1) for a in self._attending)))
        self._say(0, False)
        return {"rounds": found, "samples": self.samples}

    def follow(self) -> None:
        """Everybody else's side."""
        while (said := self._say(0, False))[0]:
            self._models(said[0] - 1)
            if said[1]:
                self._tester.known(self._first)
            self._tester.follow()

    def _say(self, round_: int, counted: bool) -> tuple[int, bool]:
        """P says which round, from 1, is valued next, as everybody hears it; 0: none."""
        number, counts = self._tester.parties.publish([round_, int(counted)], "round")
        if not 0 <= number <= len(self._attending):
            raise FrameError(f"P values round {number} of {len(self._attending)}")
        return number, bool(counts)

    def _models(self, t: int) -> None:
        """A round begins at everybody: the models go to the servers, encrypted."""
        self._tester.begin(self._mine[t], {i: self._weights[i] for i in self._mine[t]})

    def _begin(self, t: int, utilities: Utilities) -> Tester:
        if self._begun != t:
            counted = t == 0 and self.settings.nobody == "previous" and self._hits is None
            self._say(t + 1, counted)
            self._begun = t
            with Spent() as spent:
                self._models(t)
            utilities.began(spent)
            if counted:
                self._hits = self._tester.known(self._first)
                self.folder.keep("nobody", record={"right": self._hits})
        return self._tester

    def _first_hits(self) -> int:
        if self._hits is None:
            self._begin(0, self.utilities(0))
        return self._hits or 0

    def _ended(self, t: int, utilities: Utilities) -> None:
        utilities.ask([0, coalition(self.players(t))])  # what the next round begins with
        if self._begun == t:
            self._tester.end()


class _Bar(Watch):
    """The bar of a stage, one part for each coalition."""

    def __init__(self, parts: int | None = None):
        self._tick: Tick = silent
        if parts is not None:
            self.begins(parts)

    def begins(self, units: int) -> None:
        self._tick = run.progress(units)

    def finished(self, name: str, record: Any) -> None:
        self._tick()


def _everybody(clients: Sequence[str]) -> dict[Party, str]:
    parties = {Party(f"C{i + 1}", "C"): name for i, name in enumerate(clients)}
    return parties | {Party(name, name): name for name in SERVERS}


# What the parties of a valuation say to each other when they are apart, beside SecSV itself: keys, sums, rounds.
#
# The clients' joint key goes from the first client to the others, each over a channel of the two alone. Local models
# are averaged in shares: P and X add up what they cannot read, and the clients learn the sum, which is the next global
# model.


PAIR = Roles("K L", edges="K-L")


@protocol("shapley_keys", "SecSV, section 3", [
    Message("public", "K", "L", "nothing", "the clients' public key"),
    Message("secret", "K", "L", "the secured channel", "the secret key, which all clients have in common"),
], roles=PAIR)  # fmt: skip
def send_keys(net: Net, public: Located, secret: Located | None) -> list[Located]:
    """The clients' keys from the first of them, uint8, at L: another client, or a server, which gets the public one.

    Rounds 1, bytes about 16 N (primes + 1)^2, and 8 N (primes + 1) for the secret key.
    """
    found = [public.send(net.K, net.L, "public").at(net.L)]
    return found if secret is None else [*found, secret.send(net.K, net.L, "secret").at(net.L)]


def exchange_keys(clients: Sequence[str], together: Federation) -> ckks.Keys | ckks.PublicKeys:
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
        session = together.session(PAIR, {"K": clients[0], "L": other}, label=f"shapley keys {other}")
        with session as pair, pair.call() as net:
            own = net.own(net.K, secret) if other in clients else None
            arrived = [net.read(key, net.L) for key in send_keys(net, net.own(net.K, public), own)]
        if here:
            found = ckks.PublicKeys.from_message(parameters, arrived[0])
            if own is not None:
                found = ckks.Keys(found, SecretKey.from_message(found, arrived[1]))
    if found is None:
        raise ckks.MissingKeyError("a party of a valuation is one of its clients, or P or X")
    return found


@protocol("shapley_open_sum", "FedAvg; SecSV, Figure 1", [
    Message("sum_P", "P", "C", "X's half"),
    Message("sum_X", "X", "C", "P's half", "the weighted sum of the local models, which is the next global model"),
], roles=TWO_SERVERS)  # fmt: skip
def open_sum(net: Net, at_P: Located, at_X: Located) -> Located:
    """The sum at C. Rounds 1; 8 bytes a parameter from each."""
    return at_P.send(net.P, net.C, "sum_P").at(net.C) + at_X.send(net.X, net.C, "sum_X").at(net.C)


@dataclass
class Part(Outcome):
    """What a client, or X, has of a valuation: that it took part. The values are P's to tell."""

    clients: Sequence[str]
    rounds: int
    seconds: float
    received: list[dict]

    def headline(self) -> dict[str, float]:
        return {}

    def as_dict(self) -> dict:
        return dict(clients=list(self.clients), rounds=self.rounds, wall_seconds=self.seconds)

    def tables(self) -> list[Table]:
        return []

    def sentences(self) -> list[str]:
        return [
            f"Took part in the valuation of {len(self.clients)} clients, {self.rounds} rounds, {self.seconds:.1f} s.",
            "P has the values.",
            *told_by(self.received),
        ]


def for_model(found: DividedData, model: str) -> DividedData:
    """The samples as a model takes them: padded with zeros to steps of 64 for the GRU, 28 x 28 for the CNN."""
    if model == "cnn" and len(found.shape) == 3 and found.shape[1:] != (28, 28):
        change = lambda x: F.interpolate(x, (28, 28), mode="bilinear", align_corners=False)
    elif model == "rnn":
        size = torch.Size(found.shape).numel()
        change = lambda x: F.pad(x.flatten(1), (0, max(0, 64 * STEPS - size) if size < 64 * STEPS else -size % STEPS))
    else:
        return found
    train, test = ({n: (change(x), y) for n, (x, y) in part.items()} for part in (found.train, found.test))
    return DividedData(found.name, train, test, found.classes)


@dataclass(frozen=True)
class Trained(Options):
    """Clients, and the rounds of federated averaging that are valued."""

    data: str = option("digits", "data set", among=tuple(DATASETS))
    clients: int = option(5, "how many", least=2, several=True)
    rounds: int = option(10, "of federated averaging", least=1)
    model: str = option("logistic", "what is trained", among=MODELS)
    hidden: int = option(3, "hidden layers of the DNN", least=0, most=7, several=True)
    alpha: float = option(0.5, "of the Dirichlet partition", above=0)
    samples: int | None = option(None, "training samples in all (default: the data set's)", least=1)
    tests: int | None = option(None, "test samples in all (default: the data set's)", least=1, several=True)
    epochs: int = option(1, "local epochs of a round", least=1)
    leave: tuple[str, ...] = option((), "NAME:FIRST-LAST, rounds that a client attends")
    seed: int = option(0, "of training and sampling", least=0, several=True)


def _attendance(text: str, rounds: int, names: list[str]) -> tuple[str, range]:
    try:
        name, span = text.split(":")
        first, last = (int(part) for part in span.split("-"))
    except ValueError:
        raise FederationError(f"--leave takes NAME:FIRST-LAST, as in c2:1-5, got {text!r}") from None
    if name not in names or not 1 <= first <= last <= rounds:
        raise FederationError(f"--leave {text}: clients are {', '.join(names)} and rounds 1-{rounds}")
    return name, range(first - 1, last)


def _prepare(how: Trained, settings: Settings, place: Place) -> Valuation:
    """The valuation; one party of a federation takes its own part of the data set, and a server none."""
    workers = place.workers
    settings = settings.but(processes=workers.count, parallel="ray" if workers.kind == "ray" else settings.parallel)
    found = federation(
        how.data, how.clients, alpha=how.alpha, samples=how.samples, tests=how.tests, seed=how.seed, root=place.root
    )
    found = for_model(found, how.model)
    names = list(found.train)
    return Valuation(
        build(how.model, found.shape, found.classes, hidden=how.hidden, seed=how.seed), found.shape, names,
        {n: (found.train[n], found.test[n]) for n in names}, settings, place.parties, rounds=how.rounds,
        training=LocalTraining(epochs=how.epochs, lr=RATES[how.model]),
        attending=dict(_attendance(text, how.rounds, names) for text in how.leave), out=place.out,
        own=place.own(how.seed),
    )  # fmt: skip


def _cast(how: Trained, settings: Settings) -> list[str]:
    return [*(f"c{i}" for i in range(1, how.clients + 1)), "P", "X"]


COMMAND = Command(
    "shapley",
    "Shapley values of the clients of a federated run, without showing models or test data (SecSV): all parties on\n"
    "this machine, a simulation, which protects nothing, or one of a federation, whose roles are c1, c2, ..., P and\n"
    "X. A run that was stopped goes on when started again, at the coalition where it stopped.",
    (
        "sectorch shapley --data digits --clients 5 --rounds 10 --model logistic",
        "sectorch shapley --model cnn --protocol hesv --rounds 1 --tests 100",
        "sectorch shapley --data bank --data-root ~/data --estimator kernel --budget 20",
        "sectorch shapley --clients 4 --rounds 2 --federation federation.toml --as north",
    ),
    Trained(),
    Settings(),
    _cast,
    _prepare,
    lambda how: Settings(),
    {"in the clear": {"protocol": "plain"}},
)
