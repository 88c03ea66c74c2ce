"""Whole runs in the clear: baselines, resumption, the two models, reports, plots and the command."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import check_refused_number

from sectorch.cli.command import require
from sectorch.data import DataError, DatasetMissingError, load
from sectorch.federated import CheckpointError, FederationError, PlotError, Study, Watch
from sectorch.protocols.capride import CaPriDe, Settings, algorithm, divide, experiment, federation, training
from sectorch.protocols.capride.experiment import epsilon

CLEAR = Settings(rounds=2, warmup=2, encrypted=False, head_rank=3, directions=4, leakage=None)
QUICK = ["--simulate", "--samples", "48", "--warmup", "1", "--rounds", "1", "--head-rank", "3"]


@pytest.mark.parametrize(
    "change",
    [
        *({"method": m} for m in ("local", "fedavg", "fedavg-dp", "dml", "l2")),
        *({"update": u} for u in ("scalar", "head", "forward")),
    ],
    ids=str,
)
def test_every_method_runs_and_repeats(made, change):
    how = replace(CLEAR, **change)
    one, other = (CaPriDe(*made, how).run() for _ in range(2))
    assert one.accuracy(-1) == other.accuracy(-1)
    for name, (model,) in one.models.items():
        for a, b in zip(model.parameters(), other.models[name][0].parameters(), strict=True):
            assert torch.equal(a, b)
    rounds = one.records["P1"]
    assert len(rounds) == 3 and rounds[-1].get("released", 0) == {"scalar": 1, "head": 28, "forward": 32}.get(
        how.update if how.asks else "", 0
    )
    if how.method == "fedavg":
        p, q = (one.models[name][0].state_dict() for name in ("P1", "P2"))
        assert all(torch.equal(p[k], q[k]) for k in p)


def test_the_scalar_carries_no_gradient(made):
    """The paper's letter: whatever the peers are, the models come out the same."""
    parties, test, classes = made
    other = federation("digits", 2, samples=48, test_samples=60, network="mlp", seed=9)[0][1]
    runs = [
        CaPriDe([parties[0], peer], test, classes, replace(CLEAR, update="scalar")).run()
        for peer in (parties[1], replace(other, name="P2"))
    ]
    mine, theirs = (run.models["P1"][0].state_dict() for run in runs)
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert runs[0].records["P1"][-1]["distillation_loss"] != runs[1].records["P1"][-1]["distillation_loss"]
    assert any("no gradient" in line for line in replace_encrypted(runs[0]).statement)


def replace_encrypted(result):
    result.settings = replace(result.settings, encrypted=True)
    return result


@pytest.mark.parametrize("leakage", [None, 0.99])
def test_a_killed_run_goes_on_where_it_was(made, tmp_path: Path, leakage: float | None):
    """Under a limit on leakage too, where a round learns from all answers before it."""
    how = replace(CLEAR, leakage=leakage)
    whole = CaPriDe(*made, how).run()

    class Killed(Watch):
        def finished(self, name, record):
            if name == "round-1/P2/answers":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CaPriDe(*made, how, out=tmp_path).run(Killed())
    assert len(list(tmp_path.glob("round-*/*/answers-*.pt"))) == 2
    resumed = CaPriDe(*made, how, out=tmp_path)
    counts = dict(resumed.released)
    assert counts, "what was released before stays counted"
    found = resumed.run()
    strip = lambda records: {n: [{**r, "seconds": 0} for r in rs] for n, rs in records.items()}
    assert strip(found.records) == strip(whole.records)
    for name, (model,) in whole.models.items():
        pairs = zip(found.models[name][0].state_dict().values(), model.state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)
    assert counts.items() <= found.released.items()
    with pytest.raises(
        CheckpointError, match=r"holds another run, which differs in temperature \(5.0 there, 3.0 now\)"
    ):
        CaPriDe(*made, replace(how, temperature=3.0), out=tmp_path)
    last = next(tmp_path.glob("round-2/P1/model-*.pt"))
    last.write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"model-\w+.pt cannot be read"):
        CaPriDe(*made, how, out=tmp_path).run()
    last.unlink()
    with pytest.raises(CheckpointError, match=r"model-\w+.pt is missing; remove round-2/P1/model-\w+.json"):
        CaPriDe(*made, how, out=tmp_path).run()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a run of an older version"):
        CaPriDe(*made, how, out=tmp_path)


def test_two_models(tmp_path: Path):
    parties, test, classes = federation("digits", 2, samples=48, test_samples=60, large="resnet8")
    result = CaPriDe(parties, test, classes, replace(CLEAR, rounds=1), out=tmp_path).run()
    record = result.records["P1"][-1]
    assert len(result.models["P1"]) == 2 and 0 <= record["small_accuracy"] <= 1
    assert result.parameters.depth == 5, "the chain is for the small model"


def test_subsets_and_peers_are_drawn_anew():
    parties, test, classes = federation("digits", 3, samples=48, test_samples=20)
    run = CaPriDe(parties, test, classes, replace(CLEAR, fraction=0.5, peers=1))
    drawn = {tuple(algorithm.subset(parties[0], t, run.settings).tolist()) for t in range(5)}
    assert len(drawn) == 5 and all(len(s) == 24 for s in drawn)
    asked = lambda t: algorithm.asked_peers(("P1", "P2", "P3"), "P1", t, run.settings)
    assert {name for t in range(20) for name in asked(t)} == {
        "P2",
        "P3",
    }
    assert all(len(record["asked"]) == 1 for record in run.run().records["P1"][1:])


def test_epsilon_is_the_accountant_s(made):
    from sectorch.dp.noise import epsilon_of, gaussian_curve

    how = replace(CLEAR, sigma=20.0)
    result = CaPriDe(*made, how).run()
    # Two rounds of 28 numbers, each moved by 1 / T.
    curve = 2 * gaussian_curve(20.0, 28**0.5 / how.temperature)
    assert result.epsilon == pytest.approx(epsilon_of(curve, how.delta))
    assert CaPriDe(*made, CLEAR).run().epsilon is None
    louder = {
        name: [{**r, "sigma": 40.0} if "sigma" in r else r for r in found] for name, found in result.records.items()
    }
    assert epsilon(louder, how) < result.epsilon


def test_the_three_splits():
    labels = torch.arange(1000) % 10
    parts = divide(labels, 2, "no-overlap")
    assert [labels[p].unique().tolist() for p in parts] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert len(divide(labels, 5, "no-overlap", samples=30)[4]) == 30
    alike, uneven = (
        torch.stack([labels[p].bincount(minlength=10) for p in divide(labels, 2, split)]).double()
        for split in ("homogeneous", "heterogeneous")
    )
    assert float(alike.std(0).max()) < 1 < float(uneven.std(0).max())
    for split in ("homogeneous", "heterogeneous", "no-overlap"):
        assert len(torch.cat(divide(labels, 5, split)).unique()) == 1000
    with pytest.raises(FederationError, match="no split 'odd'"):
        divide(labels, 2, "odd")
    with pytest.raises(FederationError, match="11 parties cannot have classes of their own"):
        divide(labels, 11, "no-overlap")


def test_missing_data_sets_say_where_and_how(tmp_path: Path):
    for name in ("cifar10", "cifar100", "ham10000"):
        with pytest.raises(DatasetMissingError, match=f"{name} is not on disk: looked"):
            load(name, tmp_path)
    with pytest.raises(DataError, match="no data set 'moon'"):
        load("moon")


def test_ham10000_from_a_folder(tmp_path: Path):
    from PIL import Image

    rows = [("a", "nv"), ("b", "mel"), ("c", "nv"), ("d", "bkl"), ("e", "nv"), ("f", "mel"), ("g", "nv")]
    (tmp_path / "HAM10000_metadata.csv").write_text(
        "lesion_id,image_id,dx\n" + "".join(f"x,{i},{k}\n" for i, k in rows)
    )
    (tmp_path / "part_1").mkdir()
    for i, (image, _) in enumerate(rows):
        Image.new("RGB", (60, 45), (30 * i, 0, 0)).save(tmp_path / "part_1" / f"{image}.jpg")
    found = load("ham10000", tmp_path)
    assert found.shape == (3, 64, 64) and found.classes == 3 and (len(found.train), len(found.test)) == (6, 1)
    (tmp_path / "part_1" / "c.jpg").unlink()
    with pytest.raises(DatasetMissingError, match=r"1 pictures of the table are missing .* c.jpg"):
        load("ham10000", tmp_path)


def test_report_and_plots(made, tmp_path: Path):
    pytest.importorskip("matplotlib")
    results = [CaPriDe(*made, replace(CLEAR, method=m)).run() for m in ("local", "capride")]
    paths = [path for path in results[1].write(tmp_path, drawn=True) if path.suffix == ".png"]
    assert len(paths) == 3 and all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["encrypted"] is False and written["gain"] == pytest.approx(results[1].gain)
    assert len(list(csv.DictReader((tmp_path / "accuracy.csv").read_text().splitlines()))) == 6
    assert results[1].class_table().row_count == 10
    study = Study("method")
    for result in results:
        study.add(result.label, 0, result)
    assert study.values("capride (head)", "after") == [results[1].accuracy(-1)]


def test_the_command(tmp_path: Path, capsys):
    assert experiment.COMMAND.main([*QUICK, "--controls", "local", "dml", "--no-plots", "--out", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("3 conditions, 1 seed", "local", "dml", "against the first", "written:"):
        assert part in text
    assert experiment.COMMAND.main([*QUICK, "--no-plots", "--out", str(tmp_path / "one")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Test accuracy", "P1", "Per class", "Simulated in the clear", "written:"):
        assert part in text
    assert experiment.COMMAND.main([*QUICK, "--json", "--no-plots", "--out", str(tmp_path / "json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "json" / "results.json").read_text())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--data", "cifar100"], "cifar100 is not on disk"),
        (["--samples", "10"], "over 10 samples"),
        (["--levels", "2"], "a chain of 2 levels is too short"),
        (["--leakage", "0.2", "--sigma", "0.1"], "P1 could explain"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, capsys, options, text):
    assert (
        experiment.COMMAND.main(
            [*QUICK, "--no-plots", "--data-root", str(tmp_path), "--out", str(tmp_path / "o"), *options]
        )
        == 1
    )
    shown = capsys.readouterr()
    assert text in " ".join(shown.err.split()) and "Traceback" not in shown.err and shown.out == ""


@pytest.mark.parametrize(
    "options, text",
    [
        (["--parties", "1"], "--parties must be at least 2, got 1"),
        (["--leakage", "2"], "--leakage must be above 0"),
    ],
)
def test_a_number_that_an_option_does_not_take_is_named_with_it(tmp_path: Path, capsys, options, text):
    check_refused_number(
        experiment.COMMAND.main, [*QUICK, "--no-plots", "--out", str(tmp_path / "o"), *options], text, capsys
    )
    assert not (tmp_path / "o").exists()


def test_ctrl_c_stops_cleanly(tmp_path: Path, capsys, monkeypatch):
    def stop(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "agreed_logits", stop)
    assert experiment.COMMAND.main([*QUICK, "--no-plots", "--out", str(tmp_path)]) == 130
    assert "the same command goes on from there" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("*.part"))


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'sectorch\[plots\]'"):
        require()
    assert experiment.COMMAND.main([*QUICK, "--out", str(tmp_path)]) == 0
    assert "no plots: a plot needs matplotlib" in " ".join(capsys.readouterr().out.split())


def test_an_estimate_grows_with_what_is_asked(made):
    """Simulated, it is the training's; encrypted, an answer is tried where more than a few are asked."""
    short, long = (CaPriDe(*made, replace(CLEAR, rounds=n)).estimate() for n in (2, 200))
    assert short is not None and long is not None and long.seconds > 5 * short.seconds and long.bytes == 0
    few = CaPriDe(*made, replace(CLEAR, rounds=2, encrypted=True))
    assert few.estimate() is None
