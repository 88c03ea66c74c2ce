"""A valuation of federated learning: rounds of local models in, a value for each client out (SecSV, section 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ...federated import folder
from ...federated.folder import RunFolder, digest
from ...federated.watch import Watch
from . import hesv, secsv, settings
from .algorithm import Utilities
from .report import Result, Round
from .settings import Settings, check
from .testers import PlainTester, SecretSVTester, Spent, Tester
from .values import coalition, coalitions, members, shapley

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
        return max((secsv.bits_for(self.program.run(m, self._given[1][name][0])[1]) for m in own), default=0)

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
