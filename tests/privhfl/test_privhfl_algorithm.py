"""Algorithm 1 end to end on digits: what it learns, what it leaves alone, how it is taken up after a stop."""

from __future__ import annotations

import copy
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import by_turns, long
from commands import run_command
from torch import nn

from sectorch.dp import BudgetExhaustedError, BudgetFile
from sectorch.errors import FixedPointRangeError
from sectorch.federated import CheckpointError, FederationError, Participant, Training, Watch, Workers
from sectorch.federated import folder as parallel_module
from sectorch.federated.run import Held
from sectorch.federated.training import train
from sectorch.protocols.privhfl import PrivHFL, Settings, federation, plain_query
from sectorch.protocols.privhfl import algorithm as algorithm_module
from sectorch.protocols.privhfl.settings import CONTROLS, epsilon

QUICK = Settings(
    queries=24, local=Training("sgd", 0.1, 10, 3), retraining=Training("adam", 2e-3, 16, 2, (1,)), chunk=10
)


def digits(clients: int = 3, **options):
    return federation("digits", clients, **{"samples": 20, "test_samples": 100, **options})


def small(clients: int = 3, **options):
    """The same data with perceptrons of different widths, for what does not depend on the architecture."""
    made, test, classes = digits(clients, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Flatten(), nn.Linear(64, 8 + i), nn.ReLU(), nn.Linear(8 + i, 10)) for i in range(clients)
        ]
    made = [replace(c, architecture=f"mlp{8 + i}", model=m) for i, (c, m) in enumerate(zip(made, models, strict=True))]
    return made, test, classes


def outcome(result) -> dict:
    """What a run gives, without its seconds."""
    found = result.as_dict()
    return {name: found[name] for name in ("clients", "mean", "by_architecture", "statement", "received", "bytes")}


def test_a_run_and_its_shape():
    clients, test, classes = small(4)
    before = [[p.clone() for p in c.model.state_dict().values()] for c in clients]
    calls = []

    class Log(Watch):
        def finished(self, name, record):
            calls.append(name)

    how = replace(QUICK, iterations=2, fraction=0.5)
    result = PrivHFL(clients, test, classes, how).run(Log())
    names = ["c1", "c2", "c3", "c4"]
    accuracies = [name for name in calls if name.endswith("/accuracy")]
    assert accuracies == [f"round-{t}/{name}/accuracy" for t in range(3) for name in names]
    assert calls[:2] == ["local/c1", "round-0/c1/accuracy"] and len(calls) == 4 * 2 + 2 * 4 * (2 + 3)
    assert result.architectures == ["mlp8", "mlp9", "mlp10", "mlp11"]
    for name in names:
        rounds = result.records[name][1:]
        assert all(len(r["answering"]) == 2 and name not in r["answering"] and r["queries"] == 24 for r in rounds)
    for client, tensors in zip(clients, before, strict=True):  # the user's own models are as they were
        assert all(torch.equal(a, b) for a, b in zip(client.model.state_dict().values(), tensors, strict=True))
    accuracies = [r["accuracy"] for records in result.records.values() for r in records]
    assert all(0 <= a <= 1 for a in accuracies) and result.mean(-1) == pytest.approx(sum(accuracies[2::3]) / 4)


@pytest.mark.parametrize("made", [small, *long(digits)])
def test_secure_and_plain_give_the_same(made):
    """Six-bit labels hide the last bit of the shares, so training sees the same numbers."""
    clients, test, classes = made()
    results = [PrivHFL(clients, test, classes, replace(QUICK, secure=flag)).run() for flag in (True, False)]
    assert results[0].accuracies(-1) == results[1].accuracies(-1)
    states = [[p for m in r.models.values() for p in m.state_dict().values()] for r in results]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert results[0].received and not results[1].received


def test_labels_that_stay_in_shares_train_the_models_that_plain_labels_train(tmp_path: Path):
    """A sum of two parties' logits is within 2^-17 of the plain one, a soft label therefore within 2^-16, and two steps
    of rate 0.3 of gradients below 1 leave 2^-12. On disk is what Q has of the labels, and what S has."""
    clients, test, classes = small()
    how = replace(QUICK, retraining=Training("sgd", 0.3, 64, 2), label_bits=0)
    plain = PrivHFL(clients, test, classes, replace(how, secure=False)).run()
    unseen = PrivHFL(clients, test, classes, replace(how, labels="shares"), out=tmp_path).run()
    for name, model in unseen.models.items():
        for key, value in model.state_dict().items():
            assert float((value - plain.models[name].state_dict()[key]).abs().max()) < 2.0**-12
        [kept] = tmp_path.glob(f"round-1/{name}/labels-*.pt")
        halves = torch.load(kept, weights_only=True)[0]
        assert set(halves) == {name, "S"}
        opened = (halves[name] + halves["S"]).double() / 2.0**20
        assert float((opened.sum(1) - 1).abs().max()) < 2.0**-14 and opened.amin() > -(2.0**-14)
        assert float((halves["S"].abs() > 2**40).double().mean()) > 0.99
    said = " ".join(unseen.statement)
    assert "Q learned its retrained model" in said and "Q learned the sum" not in said
    shown = [row for row in unseen.received if row["protocol"] != "seed" and row["shows"]]
    assert {(row["role"], row["protocol"]) for row in shown} == {
        ("Q", name) for name in ("aggregate", "guard", "reveal")
    }
    sums = [(row["messages"], row["bytes"]) for row in shown if row["protocol"] == "aggregate"]
    assert sums == [(3, 24)], "an empty sum of each client's, for the bit whether a value left its range"


def test_a_model_too_large_to_be_trained_on_shares_is_refused_before_anybody_is_asked():
    clients, test, classes = small()
    with torch.no_grad():
        clients[0].model[1].weight[0, 0] = 40.0
    asked: list[str] = []

    class Log(Watch):
        def finished(self, name, record):
            asked.extend([name] if name.endswith("/labels") else [])

    with pytest.raises(FixedPointRangeError, match=r"1\.weight of c1's model reaches .* choose fewer fraction"):
        PrivHFL(clients, test, classes, replace(QUICK, labels="shares", queries=2)).run(Log())
    assert not asked


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secure": False}, "in secure runs with relu='exact' only"),
        ({"control": "longer"}, "in secure runs with relu='exact' only"),
        ({"relu": "privhfl"}, "in secure runs with relu='exact' only"),
        ({"normalise": True, "sigma": 1.0}, "is on sums that Q learns"),
    ],
)
def test_labels_stay_in_shares_only_where_that_hides_them(change, words):
    with pytest.raises(FederationError, match=words):
        replace(QUICK, labels="shares", **change)


def test_the_control_trains_as_long_and_asks_nobody(monkeypatch):
    """As many rows in retraining as with queries, all of them the client's own images with their own labels."""
    clients, test, classes = small()
    seen = {False: [], True: []}
    for control, rows in seen.items():
        kind = "longer" if control else None

        def spy(model, images, targets, how, *rest, rows=rows):
            if how is QUICK.retraining:
                rows.append((images, targets))
            train(model, images, targets, how, *rest)

        monkeypatch.setattr(algorithm_module, "train", spy)
        result = PrivHFL(clients, test, classes, replace(QUICK, control=kind, secure=control)).run()
        assert bool(result.received) is False and result.records["c1"][1]["queries"] == (0 if control else 24)
    assert [len(images) for images, _ in seen[True]] == [len(images) for images, _ in seen[False]] == [44] * 3
    for client, (images, targets) in zip(clients, seen[True], strict=True):
        assert torch.equal(images, torch.cat([client.images, client.images, client.images[:4]]))
        assert torch.equal(targets.argmax(1), torch.cat([client.labels, client.labels, client.labels[:4]]))
        assert torch.equal(targets.sum(1), torch.ones(44).double()) and set(targets.unique().tolist()) == {0.0, 1.0}
    assert result.records["c1"][1]["answering"] == [] and "Nobody was asked" in result.statement[0]


def test_every_control_takes_as_many_optimiser_steps_as_the_queries(monkeypatch):
    """Also of clients that differ in size, and in a second round."""
    clients, test, classes = small(partition="dirichlet-classes", alpha=1.0)
    steps: dict[str | None, int] = {}
    plain = torch.optim.Adam.step
    for control in (None, *CONTROLS):

        def step(self, *rest, control=control, **known):
            steps[control] = steps.get(control, 0) + 1
            return plain(self, *rest, **known)

        monkeypatch.setattr(torch.optim.Adam, "step", step)
        PrivHFL(clients, test, classes, replace(QUICK, secure=False, iterations=2, control=control)).run()
    expected = 2 * sum(
        QUICK.retraining.epochs * -(-(len(c.images) + 24) // QUICK.retraining.batch_size) for c in clients
    )
    assert steps == dict.fromkeys((None, *CONTROLS), expected)


@pytest.mark.parametrize("kind", [dict(), dict(normalise=True), dict(average=True), dict(temperature=2.0)])
def test_own_labels_are_the_answers_of_clients_that_know_the_same(monkeypatch, kind):
    """Where all models are the client's own, asking them and labelling its queries itself are one thing."""
    clients, test, classes = small()
    clients = [replace(c, model=clients[0].model) for c in clients]
    how, seen = replace(QUICK, local=Training("sgd", 0.1, 10, 0), secure=False, **kind), []

    def spy(model, images, targets, *rest):
        if len(images) > 20:
            seen.append(targets)

    monkeypatch.setattr(algorithm_module, "train", spy)
    for control in (None, "own-labels"):
        PrivHFL(clients, test, classes, replace(how, control=control)).run()
    assert len(seen) == 6 and all(torch.allclose(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


def test_the_other_controls_take_as_many_rows(monkeypatch):
    """Own labels come from the client's own model, mixed labels from the mixed pair, pooled ones from others."""
    clients, test, classes = small()
    rows: dict[str, list] = {}
    for control in ("own-labels", "own-mixup", "pooled"):

        def spy(model, images, targets, how, *rest, control=control):
            if how is QUICK.retraining:
                rows.setdefault(control, []).append((images[20:], targets[20:]))
            train(model, images, targets, how, *rest)

        monkeypatch.setattr(algorithm_module, "train", spy)
        result = PrivHFL(clients, test, classes, replace(QUICK, control=control)).run()
        assert not result.received and control in result.statement[0]
        assert [len(images) for images, _ in rows[control]] == [24] * 3
    for (own, _), (mixed, labels) in zip(rows["own-labels"], rows["own-mixup"], strict=True):
        assert torch.equal(own, mixed)
        assert torch.allclose(labels.sum(1), torch.ones(24).double()) and labels.unique().numel() > 2
    first = clients[0]
    for image, label in zip(*rows["own-mixup"][0], strict=True):  # the pair and its coefficient give image and label
        one_hot = nn.functional.one_hot(first.labels, classes).double()
        pairs = [
            (torch.lerp(first.images[j], first.images[i], lam), lam * one_hot[i] + (1 - lam) * one_hot[j])
            for i in range(20) for j in range(20) if i != j for lam in QUICK.lambdas
        ]  # fmt: skip
        assert any(torch.allclose(image, x, atol=1e-6) and torch.allclose(label, y, atol=1e-6) for x, y in pairs)
    others = torch.cat([c.images for c in clients[1:]])
    assert all(any(torch.equal(image, other) for other in others) for image in rows["pooled"][0][0])


class Ray:
    """Ray's interface, as far as it is used, in this process: tasks arrive as copies."""

    def remote(self, work):
        return type("Remote", (), {"remote": staticmethod(lambda task: work(copy.deepcopy(task)))})

    def wait(self, waiting):
        return waiting[-1:], waiting[:-1]

    def get(self, made):
        return made


@pytest.mark.sectorch_long  # `test_capc_run.py` has workers of the same kind
@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_side_by_side_is_the_same(kind, tmp_path: Path, monkeypatch):
    """Two processes that work ahead leave what one would have made, on one thread."""
    monkeypatch.setattr(parallel_module, "ray", Ray)
    clients, test, classes = small(4)
    rounds = 1 if kind == "processes" else 2  # each stage starts processes anew
    how, threads = replace(QUICK, iterations=rounds, queries=12), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = PrivHFL(clients, test, classes, how).run()
        beside = PrivHFL(clients, test, classes, how, out=tmp_path, workers=Workers(2, kind)).run()
    finally:
        torch.set_num_threads(threads)
    assert outcome(alone) == outcome(beside)
    with pytest.raises(FederationError, match="hand over their results in the run folder"):
        PrivHFL(clients, test, classes, how, workers=Workers(2)).run()


def test_mean_labels_are_the_sum_at_that_temperature():
    clients, test, classes = small()
    how = replace(QUICK, secure=False)
    weights = []
    for changes in (dict(average=True), dict(temperature=2.0), {}):  # two parties answer each
        models = PrivHFL(clients, test, classes, replace(how, **changes)).run().models
        weights.append(torch.cat([p.flatten() for m in models.values() for p in m.state_dict().values()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_order_matters_only_when_sequential(monkeypatch):
    clients, test, classes = small(samples=20)
    how = replace(QUICK, secure=False)
    there = PrivHFL(clients, test, classes, how).run()
    back = PrivHFL(clients[::-1], test, classes, how).run()
    assert {n: r[-1]["accuracy"] for n, r in there.records.items()} == {
        n: r[-1]["accuracy"] for n, r in back.records.items()
    }
    asked = []

    def spy(queries, models, *rest):
        asked.append([sum(float(p.detach().double().sum()) for p in m.parameters()) for m in models])
        return plain_query(queries, models, *rest)

    monkeypatch.setattr(algorithm_module, "plain_query", spy)
    PrivHFL(clients, test, classes, how).run()
    first, second, third = asked  # c2 and c3 for c1, c1 and c3 for c2, c1 and c2 for c3
    assert first[1] == second[1] and first[0] == third[1] and second[0] == third[0]
    asked.clear()
    PrivHFL(clients, test, classes, replace(how, sequential=True)).run()
    assert asked[0] == first and asked[1][0] != second[0] and asked[1][1] == second[1] and third != asked[2]


@by_turns(expansion=["mixup", "cutmix", "cutout", "flip", "noise", "private"], selection=["random", "icd"])
def test_every_expansion_runs(expansion, selection):
    clients, test, classes = small()
    queries = None if expansion == "private" else 20
    how = replace(QUICK, queries=queries, expansion=expansion, selection=selection, secure=False)
    assert len(PrivHFL(clients, test, classes, how).run().records["c1"]) == 2


@pytest.mark.parametrize("selection", ["margin", "entropy", "kcenter"])
def test_every_selection_runs(selection):
    clients, test, classes = small()
    run = PrivHFL(clients, test, classes, replace(QUICK, selection=selection, secure=False))
    assert run.settings.budget(20) == (24, 96)
    assert run.run().records["c3"][1]["queries"] == 24


def test_your_own_clients():
    def client(name: str, width: int) -> Participant:
        model = nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))
        draw = torch.Generator().manual_seed(width)
        images = torch.rand(12, 1, 2, 3, generator=draw)
        return Participant(name, model, images, (images.mean((1, 2, 3)) > 0.5).long(), f"mlp{width}")

    clients = [client("left", 4), client("right", 7)]
    how = replace(QUICK, normalise=True, frac_bits=20)
    result = PrivHFL(clients, (clients[0].images, clients[0].labels), 2, how).run()
    assert "IS that party's normalised predictions" in " ".join(result.statement)


def test_a_model_out_of_range_is_refused_by_its_owner():
    """Weights fit, and an activation does not: some 120 * 240 is above 2^12."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
            for layer in (self.first, self.second):
                nn.init.constant_(layer.weight, 60.0)

        def forward(self, x):
            return self.second(self.first(x.flatten(1)))

    images, labels = torch.rand(12, 1, 2, 2), torch.arange(12) % 2
    clients = [Participant(n, Large(), images, labels, "large") for n in ("a", "b")]
    how = replace(QUICK, local=Training("sgd", 1e-9, 10, 1))
    with pytest.raises(FixedPointRangeError, match=r"b's model reaches .* choose fewer fraction bits"):
        PrivHFL(clients, (images, labels), 2, how).run()


def test_taken_up_without_doing_anything_again(tmp_path: Path):
    clients, test, classes = small()
    first = PrivHFL(clients, test, classes, QUICK, out=tmp_path).run()
    steps = []

    class Steps(Watch):
        def step(self, what, parts):
            steps.append(what)
            return lambda count=1: None

    again = PrivHFL(clients, test, classes, QUICK, out=tmp_path).run(Steps())
    assert steps == [] and outcome(again) == outcome(first)
    next(tmp_path.glob("round-1/c2/model-*.json")).unlink()  # killed before it was written: labels are still there
    assert outcome(PrivHFL(clients, test, classes, QUICK, out=tmp_path).run(Steps())) == outcome(first)
    assert steps == ["c2: round-1/c2/model"]


def test_local_training_is_shared(tmp_path: Path):
    clients, test, classes = small()
    steps = []

    class Steps(Watch):
        def step(self, what, parts):
            steps.append(what)
            return lambda count=1: None

    for queries in (5, 9):
        how = replace(QUICK, queries=queries, secure=False)
        out = tmp_path / str(queries)
        PrivHFL(clients, test, classes, how, out=out, local=tmp_path / "local").run(Steps())
    assert sum("local/" in step for step in steps) == 3


def test_an_answering_party_is_charged_before_the_first_message(tmp_path: Path, monkeypatch):
    """All of them or none, once for each batch; what is taken up from the folder is not charged again."""
    clients, test, classes = small()
    limits = dict(budgets=str(tmp_path / "budgets"), budget_epsilon=3.0)
    how = replace(QUICK, normalise=True, sigma=16.0, **limits)
    for _ in range(2):
        PrivHFL(clients, test, classes, how, out=tmp_path / "run").run()
        for name in ("c1", "c2", "c3"):
            with BudgetFile(tmp_path / "budgets" / f"{name}.json") as file:
                assert file.budget.spent == pytest.approx(epsilon(how, classes, 48))
    asked = []
    monkeypatch.setattr(algorithm_module, "secure_query", lambda *_, **__: asked.append(1))
    with pytest.raises(BudgetExhaustedError, match="stage 'round-1/c1/labels' at c1: "):
        PrivHFL(clients, test, classes, replace(how, queries=400, seed=1)).run()
    assert not asked, "nobody was sent anything"
    for wrong in (dict(sigma=0.0), dict(secure=False), dict(control="longer")):
        with pytest.raises(FederationError, match="budgets are of secure runs with noise"):
            replace(how, **wrong)


def test_another_run_in_the_folder_is_refused(tmp_path: Path):
    clients, test, classes = small()
    PrivHFL(clients, test, classes, QUICK, out=tmp_path)
    with pytest.raises(CheckpointError, match=r"another run, which differs in queries \(24 there, 25 now\)"):
        PrivHFL(clients, test, classes, replace(QUICK, queries=25), out=tmp_path)
    with pytest.raises(CheckpointError, match=r"differs in clients \(3 there, 2 now\)"):
        PrivHFL(clients[:2], test, classes, QUICK, out=tmp_path)


def test_a_broken_file_is_named(tmp_path: Path):
    clients, test, classes = small()
    PrivHFL(clients, test, classes, QUICK, out=tmp_path).run()
    next(tmp_path.glob("round-1/c1/model-*.pt")).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"model-\w+.pt cannot be read .*remove it"):
        PrivHFL(clients, test, classes, QUICK, out=tmp_path).run()


OPTIONS = "--clients 3 --samples 20 --queries 2 --local-epochs 1 --retraining-epochs 1 --no-plots --architectures mlp"

KILLED = """
import os, signal, sys
from sectorch.federated import RunFolder
from sectorch.protocols.privhfl import experiment
whole = RunFolder.keep
def keep(self, name, *what):
    whole(self, name, *what)
    if name.startswith("round-1/c1/labels-"):
        os.kill(os.getpid(), signal.SIGKILL)
RunFolder.keep = keep
experiment.COMMAND.main(sys.argv[1:])
"""


@pytest.mark.sectorch_long  # `test_capc_budgets.py` kills at every write
def test_kill_in_the_middle_and_start_again(tmp_path: Path):
    """SIGKILL once the first client has asked; the same command then gives the table of a run that nobody killed."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = {out: [*OPTIONS.split(), "--out", str(out)] for out in (killed, whole)}
    died = run_command([sys.executable, "-c", KILLED, *options[killed]], timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert list(killed.glob("round-1/c1/labels-*.json")) and not (killed / "results.json").exists()
    for out in (killed, whole):
        run_command([sys.executable, "-m", "sectorch", "privhfl", *options[out]], check=True, timeout=300)
    found = [json.loads((out / "results.json").read_text()) for out in (killed, whole)]
    same = ("clients", "mean", "by_architecture", "statement", "received")
    assert [found[0][name] for name in same] == [found[1][name] for name in same]
    assert (killed / "accuracy.csv").read_text() == (whole / "accuracy.csv").read_text()


@pytest.mark.parametrize(("change", "count"), [({}, 5), ({"fraction": 0.5}, 3), ({"control": "longer"}, 1),
                                               ({"control": "pooled"}, 5)])  # fmt: skip
def test_a_worker_is_sent_what_its_part_takes(change, count):
    """Data and models of the client and of those that answer it: all others' would be n times as much for each of n."""
    names = [f"c{i}" for i in range(5)]
    held = {name: Held((name,), name) for name in names}
    given = algorithm_module.Inputs(names, held, held, held["c0"], 10, Settings(**change))
    t, model, part = given.of_round("c2", 1, held)
    assert t == 1 and set(model) == set(part.data) and len(model) == count and "c2" in model
    if given.how.asks:
        assert set(model) - {"c2"} == set(algorithm_module.answering(names, "c2", 1, given.how))
