"""benchmarks/all.py: it knows every script, goes on where it was stopped, and says what failed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
WITHOUT = {
    "all.py",
    "capride_attacks.py",
    "hesv_variants.py",
    "huggingface_models.py",
    "privhfl_paper.py",
    "privhfl_pictures.py",
    "privhfl_seconds.py",
    "perturbation_attacks.py",
    "perturbation_cost.py",
    "peers.py",
    "peers_crypten.py",
    "peers_spu.py",
    "training_crypten.py",
    "training_peers.py",
    "trees_concrete.py",
}
"""The program itself, models and figures of a paper, which are data, parts of another program, and what installs
another library."""

FIGURE = "import json, sys; json.dump([{'n': sys.argv[1]}], open(sys.argv[2], 'w')); print('seen')"
LINES = "import sys; file = open(sys.argv[1], 'a'); [print('{\"row\": %d}' % i, file=file) for i in range(2)]"


@pytest.fixture
def every():
    spec = importlib.util.spec_from_file_location("benchmarks_all", BENCHMARKS / "all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(every, monkeypatch, tmp_path: Path):
    """The program with three benchmarks that take no time: one good, one that appends lines, one that fails."""
    scripts = {"good.py": FIGURE, "lines.py": LINES, "bad.py": "print('why it failed'); raise SystemExit(3)"}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(every, "HERE", tmp_path)
    commands = {
        "good": "good.py 7 {work}/figures.json",
        "lines": "lines.py {work}/rows.json",
        "bad": "bad.py",
    }
    monkeypatch.setattr(every, "BENCHMARKS", commands)

    def run(*arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "argv", ["all.py", "--out", str(tmp_path / "out"), *arguments])
        status = every.main()
        return status, every.read(tmp_path / "out/results.json")

    return run


def test_every_script_is_run(every):
    scripts = {shlex.split(command)[0] for command in every.BENCHMARKS.values()}
    assert scripts == {path.name for path in BENCHMARKS.glob("*.py")} - WITHOUT
    for name, command in every.BENCHMARKS.items():
        assert ("json" in command or "--out" in command) == ("{work}" in command), name


class Understood(Exception):
    """Raised in place of running, once a script has parsed its arguments."""


def test_every_command_line_is_understood(every, monkeypatch, tmp_path: Path):
    """Each script takes the options that it is given here; a script that dropped one would fail after hours."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, args=None, namespace=None):
        raise Understood(parse(self, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for command in every.BENCHMARKS.values():
        script, *arguments = shlex.split(command.format(work=tmp_path))
        if "parse_args" not in (BENCHMARKS / script).read_text(encoding="utf-8"):
            assert not arguments, command
            continue
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(Understood):
            runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


def test_one_file_has_all_figures(small, capsys):
    status, results = small()
    assert status == 1 and [results[name]["status"] for name in ("good", "lines", "bad")] == [0, 0, 3]
    assert results["good"]["figures"] == {"figures": [{"n": "7"}]}
    assert results["lines"]["figures"] == {"rows": [{"row": 0}, {"row": 1}]}
    assert results["bad"]["printed"] == ["why it failed"] and "printed" not in results["good"]
    assert "2 of 3 benchmarks succeeded" in " ".join(capsys.readouterr().out.split())


def test_it_goes_on_where_it_was_stopped(small, every, monkeypatch, tmp_path: Path, capsys):
    """What succeeded is left as it is; what failed, what is missing, and what has another command is run."""
    assert small("--only", "good")[0] == 0
    results = small()[1]
    assert results.keys() == {"good", "lines", "bad"}
    ran = []
    monkeypatch.setattr(
        every, "run", lambda command, work, limit: ran.append(command) or {**results["good"], "command": command}
    )
    small()
    assert ran == ["bad.py"]
    every.BENCHMARKS["lines"] += " "
    small()
    assert ran[1:] == ["lines.py {work}/rows.json "]
    small("--again", "--only", "good")
    assert len(ran) == 3


def test_rows_are_not_appended_to_those_of_the_run_before(small):
    small("--only", "lines")
    assert small("--only", "lines", "--again")[1]["lines"]["figures"] == {"rows": [{"row": 0}, {"row": 1}]}


def test_ctrl_c_ends_the_benchmark_and_keeps_what_is_done(small, every, monkeypatch, capsys):
    assert small("--only", "good")[0] == 0

    with monkeypatch.context() as patch:
        killed = []
        patch.setattr(every.os, "killpg", lambda group, signal: killed.append(group))
        patch.setattr(every.subprocess.Popen, "wait", _interrupted_once())
        status, results = small()
    assert status == 130 and results.keys() == {"good"} and len(killed) == 1
    assert "goes on there" in capsys.readouterr().err


def _interrupted_once():
    """`Popen.wait` that is interrupted the first time, and waits the second."""
    wait, calls = subprocess.Popen.wait, []

    def interrupted(self, timeout=None):
        calls.append(timeout)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait(self, timeout)

    return interrupted


def test_a_limit_ends_what_takes_too_long(every, monkeypatch, tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(every, "HERE", tmp_path)
    found = every.run("slow.py", tmp_path / "work", 0.5)
    assert found["status"] == "stopped after 0.5 s" and found["figures"] == {}


def test_no_such_name(small, capsys):
    assert small("--only", "nothing")[0] == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_results_are_json(small, tmp_path: Path):
    small("--only", "good")
    assert json.loads((tmp_path / "out/results.json").read_text())["good"]["command"] == "good.py 7 {work}/figures.json"
