"""The command: its output, its files, its errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import PIPE, Command
from helpers import check_refused_number

from sectorch.protocols.capc import experiment

QUICK = ["--parties", "12", "--querying", "2", "--pool", "10", "--epsilon", "20", "--inference", "simulated"]
QUICK += ["--local-epochs", "2"]


def test_json_and_files(tmp_path: Path, capsys):
    assert experiment.COMMAND.main([*QUICK, "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert [q["queries"] for q in printed["querying"]] == [10, 10]
    for name in ("parties.csv", "queries.csv", "epsilon_per_query.png", "class_balance.png", "scale_accuracy.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_tables_and_sweep(tmp_path: Path, capsys):
    arguments = [*QUICK[2:], "--parties", "12", "14", "--out", str(tmp_path)]
    assert experiment.COMMAND.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("2 conditions, 1 seed", "parties 12", "(one seed)"):
        assert part in text
    assert set(json.loads((tmp_path / "study.json").read_text())["runs"]) == {"parties 12", "parties 14"}
    assert (tmp_path / "study.png").is_file() and (tmp_path / "parties-14-seed-0" / "results.json").is_file()
    assert experiment.COMMAND.main([*QUICK, "--no-plots", "--out", str(tmp_path / "one")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Querying parties", "Recall of each class", "left", "NOT private itself", "this is a simulation"):
        assert part in text
    worse = [*QUICK, "--voter-accuracy", "0.3", "--local-epochs", "5", "--no-plots", "--out", str(tmp_path / "worse")]
    assert experiment.COMMAND.main(worse) == 0
    shown = capsys.readouterr()
    text = " ".join((shown.err + shown.out).split())
    assert text.count("it may well be worse afterwards") == 4, (
        "before the training and in the statement, for each of two"
    )


def test_seeds_controls_and_the_plan(tmp_path: Path, capsys):
    """One local training serves all conditions of a seed."""
    options = [*QUICK, "--plan", "--local-epochs", "5", "--seed", "0", "1", "--controls", "longer", "--no-plots"]
    assert experiment.COMMAND.main([*options, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "study.json").read_text())["runs"]
    assert set(found) == {"capc", "longer"} and all(set(seeds) == {"0", "1"} for seeds in found.values())
    assert len(list((tmp_path / "shared" / "local").glob("*.json"))) == 2
    assert found["capc"]["0"]["before"] == found["longer"]["0"]["before"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--epsilon", "0.5"], "are too few for 10 queries"),
        (["--threshold", "5", "--noise", "laplace"], "under gaussian noise"),
        (["--data", "mnist"], "mnist is not on disk: looked in"),
        (["--architectures", "alexnet"], "no architecture 'alexnet'"),
        (["--pool", "400"], "need more than the 450 images"),
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
        (["--epsilon", "0"], "--epsilon must be above 0"),
        (["--delta", "1"], "--delta must be above 0 and below 1"),
        (["--colluding", "0"], "--colluding must be at least 1"),
    ],
)
def test_a_number_that_an_option_does_not_take_is_named_with_it(tmp_path: Path, capsys, options, text):
    check_refused_number(
        experiment.COMMAND.main, [*QUICK, "--no-plots", "--out", str(tmp_path / "o"), *options], text, capsys
    )
    assert not (tmp_path / "o").exists()


@pytest.mark.sectorch_long
def test_ctrl_c_and_resume(tmp_path: Path, capsys):
    """A real process, stopped while it asks; the same command goes on and keeps what was answered.

    Every run stops PrivHFL's command (`test_privhfl_cli.py`), and this run within one process (`test_capc_run.py`).
    """
    options = ["--parties", "6", "--querying", "2", "--pool", "4", "--epsilon", "40", "--chunk", "2", "--no-plots"]
    options += ["--local-epochs", "2", "--argmax", "shares", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sectorch", "capc", *options]
    with Command(command, stdout=PIPE, stderr=PIPE, env=environment) as process:
        while not (found := list(tmp_path.glob("p1/0/labels-*.json"))) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130 and "goes on from there" in " ".join(err.split()) and "Traceback" not in err
    first = found[0].read_text()
    assert experiment.COMMAND.main(options) == 0
    assert found[0].read_text() == first
    assert json.loads((tmp_path / "results.json").read_text())["querying"][1]["queries"] > 0
    capsys.readouterr()
