"""The command: its output, its files, its errors, and Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import PIPE, Command
from helpers import check_refused_number

from sectorch.cli.main import run
from sectorch.errors import LeakyProtocolWarning
from sectorch.federated import PlotError, Training
from sectorch.protocols.privhfl import PrivHFL, Settings, experiment, federation

QUICK = ["--clients", "3", "--samples", "20", "--local-epochs", "1", "--retraining-epochs", "1"]


@pytest.mark.sectorch_long  # `test_cli.py` has one net's
def test_json_and_files(tmp_path: Path, capsys):
    assert experiment.COMMAND.main([*QUICK, "--queries", "6", "--json", "--no-plots", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert [client["architecture"] for client in printed["clients"]] == [
        "vgg7-small",
        "resnet8-small",
        "resnet10-small",
    ]
    rows = list(csv.DictReader((tmp_path / "accuracy.csv").read_text().splitlines()))
    assert len(rows) == 6 and float(rows[1]["accuracy"]) == printed["clients"][0]["accuracy"][1]
    assert printed["bytes"] > 0 and printed["settings"]["queries"] == 6


def test_table_and_statement(tmp_path: Path, capsys):
    small = [*QUICK, "--architectures", "mlp", "--no-plots"]
    assert experiment.COMMAND.main([*small, "--queries", "6", "8", "--out", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("2 conditions, 1 seed", "queries 8", "(one seed)"):
        assert part in text
    assert set(json.loads((tmp_path / "study.json").read_text())["runs"]) == {"queries 6", "queries 8"}
    assert (tmp_path / "queries-8-seed-0" / "results.json").is_file()
    assert experiment.COMMAND.main([*small, "--queries", "6", "--out", str(tmp_path / "one")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Test accuracy", "c3", "What each role received", "no summand", "this is a simulation"):
        assert part in text


def test_the_papers_relu_and_noise_come_through(tmp_path: Path, capsys):
    """What Q learns with each is in the statement that is counted from the ledger."""
    small = [*QUICK, "--architectures", "mlp", "--queries", "6", "--no-plots", "--json"]
    with pytest.warns(LeakyProtocolWarning):
        assert experiment.COMMAND.main([*small, "--relu", "privhfl", "--out", str(tmp_path / "relu")]) == 0
    leaky = json.loads(capsys.readouterr().out)
    assert leaky["settings"]["relu"] == "privhfl" and "leaky_drelu" in " ".join(leaky["statement"])
    assert (
        experiment.COMMAND.main(
            [*small, "--normalise", "--sigma", "8", "--delta", "1e-6", "--out", str(tmp_path / "noise")]
        )
        == 0
    )
    noised = json.loads(capsys.readouterr().out)
    assert "leaky" not in " ".join(noised["statement"])
    assert 0 < noised["epsilon"]["one"] < noised["epsilon"]["all"]
    assert any("at delta 1e-06 (Renyi composition)" in sentence for sentence in noised["statement"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sigma", "1"], "noise (sigma) needs normalise"),
        (["--sigma", "1", "--normalise", "--relu", "privhfl"], "noise (sigma) hides nothing beside relu='privhfl'"),
        (["--data", "cifar10"], "cifar10 is not on disk: looked in"),
        (["--architectures", "alexnet"], "no architecture 'alexnet'"),
        (["--samples", "5"], "c1 has 5 samples, fewer than one batch of 10"),
        (["--partition", "skew", "--classes-each", "1"], "c1 has samples of class"),
        (["--queries", "9", "--pool", "8"], "9 queries of a pool of 8"),
        (["--expansion", "private", "--queries", "21"], "21 queries were asked of 20 images"),
        (["--data", "svhn"], "svhn is not on disk: looked in"),
        (["--data", "tiny-imagenet"], "tiny-imagenet is not on disk: looked for"),
        (["--queries", "4", "5", "-C", "0.5", "1"], "one option takes several values at a time"),
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
        (["-C", "0"], "--fraction must be above 0 and at most 1"),
        (["--processes", "0"], "--processes must be at least 1, got 0"),
    ],
)
def test_a_number_that_an_option_does_not_take_is_named_with_it(tmp_path: Path, capsys, options, text):
    check_refused_number(
        experiment.COMMAND.main, [*QUICK, "--no-plots", "--out", str(tmp_path / "o"), *options], text, capsys
    )
    assert not (tmp_path / "o").exists()


def test_help_through_the_program(capsys):
    """`sectorch privhfl --help` shows all options and an example, and not those of the program around it."""
    with pytest.raises(SystemExit) as stopped:
        run(["privhfl", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--queries", "--expansion", "--controls", "sectorch privhfl --data digits --clients 10 --queries 500"):
        assert part in shown


def test_an_unknown_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        experiment.COMMAND.main(["--data", "imagenet"])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
    assert "invalid choice: 'imagenet' (choose from" in shown.err and "--help lists the options" in shown.err


@pytest.mark.sectorch_long  # the sibling of `test_capc_cli.py`
def test_ctrl_c_stops_cleanly(tmp_path: Path):
    options = [
        "--clients",
        "3",
        "--samples",
        "20",
        "--local-epochs",
        "2000",
        "--architectures",
        "mlp",
        "--no-plots",
        "--out",
    ]
    command = [sys.executable, "-m", "sectorch", "privhfl", *options, str(tmp_path / "run")]
    process = Command(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=PIPE)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "run.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from there" in " ".join(text.split())
    assert "Traceback" not in text
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.fixture(scope="module")
def result():
    clients, test, classes = federation("digits", 3, samples=20, test_samples=20)
    how = dict(local=Training("sgd", 0.1, 10, 0), retraining=Training("adam", 2e-3, 16, 0), secure=False)
    return PrivHFL(clients, test, classes, Settings(queries=4, **how)).run()


def test_plots(result, tmp_path: Path):
    pytest.importorskip("matplotlib")
    paths = [path for path in result.write(tmp_path, drawn=True) if path.suffix == ".png"]
    assert [path.stem for path in paths] == ["accuracy_per_round", "accuracy_per_architecture"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    json.dumps([plot.as_dict() for plot in result.plots()])


def test_plots_without_matplotlib(result, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'sectorch\[plots\]'"):
        result.write(tmp_path, drawn=True)
    assert (
        experiment.COMMAND.main([*QUICK, "--architectures", "mlp", "--queries", "4", "--out", str(tmp_path / "out")])
        == 0
    )
    assert "no plots: a plot needs matplotlib" in " ".join(capsys.readouterr().out.split())
