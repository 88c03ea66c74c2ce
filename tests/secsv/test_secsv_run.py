"""Whole valuations: error, SampleSkip, resumption after kill -9, several processes, joins and leaves, bad input."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from commands import run_command

from sectorch import ckks
from sectorch.choreography.run.local import LocalRuntime
from sectorch.errors import FixedPointRangeError, UnsupportedOpError
from sectorch.federated import CheckpointError, FederationError, Watch, WorkerError
from sectorch.protocols.secsv import (
    CorruptedCiphertextError,
    RoutingError,
    Settings,
    ShapleyEvaluation,
    Training,
    build,
    contribution_index,
    fedavg,
    federation,
    hesv,
)
from sectorch.protocols.secsv.testers import averaged
from sectorch.protocols.secsv.values import coalitions, gtg, truncated


def digits(clients: int = 4, rounds: int = 2, tests: int = 60):
    found = federation("digits", clients, samples=200, tests=tests)
    net = build("logistic", found.shape, found.classes)
    return net, *fedavg(net, found.train, rounds, Training(epochs=3)), found.test


@pytest.fixture(scope="module")
def trained():
    net, models, weights, tests = digits()
    return net, models, tests, weights


def ran(given, out=None, watch=None, **settings):
    return ShapleyEvaluation(*given, settings=Settings(**settings), out=out).run(watch)


def test_secsv_with_sampleskip_gives_the_plain_values(trained):
    result = ran(trained, skip="saving")
    assert result.error <= 1e-2 and result.wrong == 0
    assert result.counted("rotations") == 0 < result.counted("products")
    gained = result.rounds[-1].records[0b1111]["right"] / result.samples - result.rounds[0].nobody
    assert sum(result.values.values()) == pytest.approx(gained)


def test_hesv_gives_the_plain_values(small):
    net, models, tests = small
    result = ran((net, [models], tests), protocol="hesv", routing="single-layer")
    assert result.error <= 1e-2
    assert result.counted("rotations") > 0


def test_secretsv_gives_the_plain_values(small):
    net, models, tests = small
    assert ran((net, [models], tests), protocol="secretsv").error <= 1e-2


def test_sampleskip_is_on_and_always_skips_what_algorithm_7_finds(trained):
    """60 samples fit one ciphertext a batch: leaving some out would still take it, unless Algorithm 6 is asked for."""
    plain = ran(trained, protocol="plain", skip="always")
    assert plain.skipped > 0 and plain.wrong == 0, "in the clear nothing fills a ciphertext"
    secure = ran(trained, compare=False)
    assert {r["tested"] for one in secure.rounds for r in one.records.values()} <= {0, secure.samples}
    assert secure.skippable == plain.skipped > secure.skipped
    assert any("Algorithm 7 found" in line and "--skip always" in line for line in secure.sentences())
    forced = ran(trained, skip="always", compare=False)
    assert forced.skipped == plain.skipped and forced.values == plain.values
    assert not any("Algorithm 7 found" in line for line in forced.sentences())
    assert any("SampleSkip was off" in line for line in ran(trained, skip="never", compare=False).sentences())
    assert any("in the clear" in line for line in plain.statement())
    assert Settings().skipping == "saving" and Settings(protocol="plain").skipping == "never"


@pytest.mark.parametrize("parallel", ["subsets", "rounds"])
def test_several_processes_find_the_same(trained, parallel, tmp_path):
    one = ran(trained, protocol="plain", skip="always")
    two = ran(trained, tmp_path, protocol="plain", skip="always", processes=2, parallel=parallel)
    assert one.values == two.values
    assert ran(trained, protocol="plain", skip="always", processes=2, parallel=parallel).values == one.values
    lines = [json.loads(x) for x in (tmp_path / "round-001.jsonl").read_text().splitlines()]
    assert sorted(x["coalition"] for x in lines if x["coalition"]) == list(range(1, 16))


def test_secsv_in_several_processes(small, tmp_path):
    net, models, tests = small
    alone = ran((net, [models], tests))
    assert ran((net, [models], tests), tmp_path, processes=2).values == alone.values


def test_a_childs_error_arrives_by_its_type(trained, monkeypatch):
    from sectorch.protocols.secsv.testers import PlainTester

    def fail(self, coalition, samples):
        raise CorruptedCiphertextError("as if")

    monkeypatch.setattr(PlainTester, "correct", fail)
    with pytest.raises(CorruptedCiphertextError, match="as if"):
        ran(trained, protocol="plain", processes=2, compare=False)


KILLED = """
import os, signal, sys
sys.path.insert(0, {here!r})
from test_secsv_run import digits, Settings, ShapleyEvaluation
from sectorch.protocols.secsv.secsv import SecSVTester
whole, count = SecSVTester.correct, [0]
def correct(self, coalition, samples):
    found = whole(self, coalition, samples)
    count[0] += 1
    if count[0] == 20:  # of 2 x 15: in the middle of the second round's sixth, tested and not yet written
        os.kill(os.getpid(), signal.SIGKILL)
    return found
SecSVTester.correct = correct
net, models, weights, tests = digits()
ShapleyEvaluation(net, models, tests, weights, Settings(), out={out!r}).run()
"""


@pytest.mark.sectorch_long  # `test_capc_budgets.py` kills at every write
def test_kill_9_in_the_middle(trained, tmp_path, monkeypatch):
    """The same values after resuming; every coalition is in the folder once, and only what was missing is tested."""
    from sectorch.protocols.secsv.secsv import SecSVTester

    script = KILLED.format(here=str(Path(__file__).parent), out=str(tmp_path))
    done = run_command([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == -signal.SIGKILL
    path = tmp_path / "round-002.jsonl"
    before = [json.loads(x)["coalition"] for x in path.read_text().splitlines()]
    assert len([c for c in before if c]) == 4
    with open(path, "ab") as file:
        file.write(b'{"coalition": 9, "rig')  # and a line that the kill cut short
    tested = []
    whole = SecSVTester.correct
    monkeypatch.setattr(SecSVTester, "correct", lambda self, c, s: tested.append(c) or whole(self, c, s))
    result = ran(trained, tmp_path)
    assert len(tested) == 11 and not set(tested) & set(before)
    for t in (1, 2):
        lines = [json.loads(x) for x in (tmp_path / f"round-00{t}.jsonl").read_text().splitlines()]
        assert sorted(x["coalition"] for x in lines if x["coalition"]) == list(range(1, 16))
    assert result.values == ran(trained, protocol="secsv").values
    tested.clear()
    assert ran(trained, tmp_path).values == result.values and tested == []


def test_another_run_in_the_folder_is_refused(trained, tmp_path):
    ran(trained, tmp_path, protocol="plain")
    with pytest.raises(CheckpointError, match="differs in protocol"):
        ran(trained, tmp_path, protocol="secretsv")
    (tmp_path / "round-001.jsonl").write_text("no json\n")
    with pytest.raises(CheckpointError, match="remove it"):
        ran(trained, tmp_path, protocol="plain")


def test_clients_that_join_and_leave_have_values_for_their_rounds():
    found = federation("digits", 4, samples=200, tests=40)
    net = build("logistic", found.shape, found.classes)
    there = {"c2": range(1, 3), "c4": range(0, 1)}
    models, weights = fedavg(net, found.train, 3, attending=there)
    result = ran((net, models, found.test, weights), protocol="plain")
    assert [sorted(r.values) for r in result.rounds] == [[0, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert result.values["c4"] == result.rounds[0].values[3]


@pytest.mark.parametrize("estimator", ["permutation", "group-testing", "kernel"])
def test_estimators_with_sampleskip_test_a_coalition_once(trained, estimator):
    class Seen(Watch):
        def __init__(self):
            self.tested_ones = []

        def finished(self, name, record):
            self.tested_ones.append(record)

    watch = Seen()
    result = ran(trained, watch=watch, protocol="plain", estimator=estimator, skip="always", budget=12)
    assert len(watch.tested_ones) == len(set(watch.tested_ones)) <= 2 * 15
    assert set(result.values) == set(trained[2])


def test_other_measures_take_the_same_utilities(trained):
    run = ShapleyEvaluation(*trained, Settings(protocol="plain"))
    v = run.utilities(0)
    index = contribution_index(run.players(0), v)
    assert sum(map(abs, index.values())) == pytest.approx(1)
    assert sorted(v.records) == list(range(1, 16))


def rounds_with(rider: bool, seed: int):
    """Four rounds of five clients, of whom the last returns the global model as it came, or attends the last only."""
    found = federation("digits", 5, samples=400, tests=150, seed=seed)
    net, how = build("logistic", found.shape, found.classes, seed=seed), Training(epochs=3)
    if not rider:
        models, weights = fedavg(net, found.train, 4, how, attending={"c5": range(3, 4)}, seed=seed)
        return net, models, found.test, weights
    honest = {name: part for name, part in found.train.items() if name != "c5"}
    models, weights, start = [], [], copy.deepcopy(net)
    for t in range(4):
        one, told = (dict(part[0]) for part in fedavg(start, honest, 1, how, seed=10 * seed + t))
        one["c5"] = copy.deepcopy(start.state_dict())
        told["c5"] = sum(told.values()) / 4
        models.append(one)
        weights.append(told)
        start.load_state_dict(averaged(list(one.values()), list(told.values())))
    return net, models, found.test, weights


@pytest.mark.parametrize("seed", range(5))
def test_a_free_rider_is_paid_for_what_it_adds_and_not_for_what_there_was(seed):
    """With v(nobody) = 0 it gets about as much as the others; counted from the round's first model, next to nothing."""
    given = rounds_with(True, seed)
    values = {how: ran(given, protocol="plain", nobody=how).values for how in ("previous", "zero")}
    gained = sum(values["previous"].values())
    assert values["previous"]["c5"] < 0.15 * gained and values["zero"]["c5"] > 0.2
    assert values["zero"]["c5"] > sorted(values["zero"].values())[0]


@pytest.mark.parametrize("seed", range(5))
def test_one_who_joins_late_shares_the_last_rounds_gain_only(seed):
    given = rounds_with(False, seed)
    result = ran(given, protocol="plain")
    last = result.rounds[-1]
    assert sum(last.values.values()) == pytest.approx(last.records[0b11111]["right"] / result.samples - last.nobody)
    assert last.nobody == result.rounds[-2].records[0b1111]["right"] / result.samples > 0.3
    assert ran(given, protocol="plain", nobody="zero").values["c5"] > result.values["c5"] + 0.5 * last.nobody / 5


def test_nobody_moves_where_everybody_stands_still(small):
    """All local models are the global one, and so every value is zero, with each protocol and estimator."""
    net, _, tests = small
    still = [{name: net.state_dict() for name in tests}] * 2
    for settings in (
        *(dict(protocol=name) for name in ("plain", "secretsv", "secsv")),
        *(dict(protocol="plain", estimator=name, budget=9) for name in ("permutation", "kernel", "group-testing")),
    ):
        result = ran((net, still, tests), **settings)
        assert result.rounds[0].nobody > 0 and result.values == pytest.approx(dict.fromkeys(tests, 0.0), abs=1e-9)
    run = ShapleyEvaluation(net, still, tests, settings=Settings(protocol="plain"))
    rounds = [(run.players(t), run.utilities(t)) for t in range(2)]
    assert set(truncated(*rounds[0]).values()) == set(gtg(rounds).values()) == {0.0}


@pytest.fixture
def network(monkeypatch):
    """A faulty one: what it is given changes each message's words in place, once it is on its way."""

    def broken(change):
        whole = LocalRuntime.transfer

        def transfer(self, line, value):
            value = whole(self, line, value)
            change(line.label, value)
            return value

        monkeypatch.setattr(LocalRuntime, "transfer", transfer)
        return monkeypatch

    return broken


@pytest.mark.parametrize("where", ["layer_output", "partial_output", "model_P", "features_P"])
def test_a_corrupted_message_is_found_and_results_are_kept(small, where, tmp_path, network):
    """One word of a ciphertext (or, in the range of the ring, of everything that is encrypted from it)."""
    net, models, tests = small
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    net, models = make(), {n: make().state_dict() for n in models}
    run = ShapleyEvaluation(net, [models], tests, settings=Settings(compare=False), out=tmp_path)
    count = [0]

    def tamper(label, value):
        if label == where:
            count[0] += 1
            if where == "model_P" or count[0] > 25:
                words = value.view(-1)
                words[7] = (words[7] + 1234567) % 4169729

    repaired = network(tamper).undo
    with pytest.raises(CorruptedCiphertextError, match="run again from the folder"):
        run.run()
    repaired()
    kept = [json.loads(x) for x in (tmp_path / "round-001.jsonl").read_text().splitlines()]
    assert where == "model_P" or len(kept) > 3
    again = ShapleyEvaluation(net, [models], tests, settings=Settings(), out=tmp_path).run()
    assert sorted(again.rounds[0].records) == list(range(1, 16))
    before = {x["coalition"]: x["right"] for x in kept if x["coalition"]}
    assert all(again.rounds[0].records[c]["right"] == right for c, right in before.items())


def test_a_word_beyond_its_prime_is_found(small, network):
    net, models, tests = small
    run = ShapleyEvaluation(net, [models], tests, settings=Settings(compare=False))
    network(lambda label, v: v.add_(1 << 31) if label == "layer_output" else None)
    with pytest.raises(CorruptedCiphertextError, match="'s ciphertexts arrived damaged"):
        run.run()


def test_hesv_finds_a_corrupted_ciphertext(small, network):
    net, models, tests = small
    run = ShapleyEvaluation(net, [models], tests, settings=Settings(protocol="hesv", compare=False))
    prime = hesv.joint_keys(run.program).parameters.primes[0]

    def tamper(label, value):
        if label == "layer_output":
            value[0, 0, 0, 7] = (value[0, 0, 0, 7] + 123456789) % prime

    network(tamper)
    with pytest.raises(CorruptedCiphertextError, match="run again from the folder"):
        run.run()


def _without(tests, name):
    x, y = tests[name]
    return {**tests, name: (x[:0], y[:0])}


@pytest.mark.parametrize(
    ("change", "settings", "error", "message"),
    [
        (lambda n, m, t: (n, m, _without(t, "c1")), {}, FederationError, "c1 brings 0 test samples"),
        (lambda n, m, t: (n, m, {**t, "c1": (t["c1"][0][:, :5], t["c1"][1])}), {}, FederationError, "different shapes"),
        (lambda n, m, t: (n, m, {**t, "c1": (t["c1"][0], t["c1"][1] + 3)}), {}, FederationError, "outside 0..2"),
        (lambda n, m, t: (n, {k: m[k] for k in ("c0", "c1")}, {k: t[k] for k in ("c0", "c1")}), {}, RoutingError,
         "need 3 clients"),
        (lambda n, m, t: (n, {**m, "c2": build("logistic", (6,), 4).state_dict()}, t), {}, FederationError,
         r"c2 in round 1 has a model of another shape: 1.weight is \(4, 6\)"),
        (lambda n, m, t: (n, {**m, "c2": {k: v * torch.nan for k, v in m["c2"].items()}}, t), {}, FederationError,
         "NaN"),
        (lambda n, m, t: (n, {**m, "x": m["c2"]}, t), {}, FederationError, "x, who brings no test samples"),
        (lambda n, m, t: (n, {}, t), {}, FederationError, "nobody attended"),
        (lambda n, m, t: (n, m, t), {"value_bits": 14}, ckks.LevelError, "keygen more"),
        (lambda n, m, t: (n, {**m, "c2": {k: v * 99 for k, v in m["c2"].items()}}, t), {}, FixedPointRangeError,
         "weights stay below"),
        (lambda n, m, t: (torch.nn.Sequential(torch.nn.PReLU(), n), m, t), {}, UnsupportedOpError, "PReLU"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(small, change, settings, error, message, tmp_path):
    net, models, tests = change(*small)
    with pytest.raises(error, match=message):
        ShapleyEvaluation(net, [models], tests, settings=Settings(**settings)).run()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "x"}, "no protocol 'x'"),
        ({"estimator": "x"}, "no estimator 'x'"),
        ({"routing": "x"}, "no routing 'x'"),
        ({"protocol": "hesv", "skip": "saving"}, "SampleSkip needs"),
        ({"processes": 0}, "at least 1"),
        ({"frac_bits": 40}, "frac_bits"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(FederationError, match=message):
        Settings(**settings)


def test_the_strong_level_is_refused_with_the_weak_one_offered(small):
    net = build("dnn", (6,), 3, hidden=2)
    models = {n: net.state_dict() for n in small[1]}
    with pytest.raises(RoutingError, match=r"3 layers at the multi-layer level need 5 clients.*'single-layer'"):
        ShapleyEvaluation(net, [models], small[2], settings=Settings(routing="multi-layer"))


def test_ray_runs_rounds_elsewhere_or_says_that_it_is_missing(trained, monkeypatch, tmp_path):
    """With Ray's four calls standing in for Ray, which is not among the test dependencies."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkerError, match=r"pip install 'sectorch\[ray\]'"):
        ran(trained, protocol="plain", parallel="ray")
    started = []

    def remote(function):
        return types.SimpleNamespace(remote=lambda *given: (function, given))

    found = types.SimpleNamespace(
        is_initialized=lambda: bool(started), init=lambda: started.append(1), remote=remote,
        wait=lambda waiting, num_returns: (waiting[:1], waiting[1:]), get=lambda task: task[0](*task[1]),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", found)
    result = ran(trained, tmp_path, protocol="plain", parallel="ray")
    assert started and result.values == ran(trained, protocol="plain").values
    assert {r["coalition"] for r in map(json.loads, (tmp_path / "round-002.jsonl").read_text().splitlines())} == {
        0, *coalitions(range(4)),
    }  # fmt: skip
