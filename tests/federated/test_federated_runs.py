"""What all runs have: folders, estimates that ask, studies that claim no more than seeds show, workers."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sectorch.errors import SectorchError
from sectorch.federated import (
    CheckpointError,
    Estimate,
    FederationError,
    Plot,
    RunFolder,
    Study,
    TooLongError,
    WorkerError,
    Workers,
)
from sectorch.federated import folder as parallel_module
from sectorch.federated.command import differs, verdict
from sectorch.federated.outcome import Outcome
from sectorch.federated.watch import agree


class Ended(Outcome):
    """A run that ended with an accuracy."""

    def __init__(self, before: float, after: float):
        self.found = dict(before=before, after=after)

    def headline(self):
        return self.found

    def as_dict(self):
        return self.found

    def tables(self):
        return []

    def sentences(self):
        return ["It ended."]


# Folders -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(), max_size=5), st.binary(max_size=20).filter(lambda b: b"\n" not in b))
def test_a_line_that_was_cut_short_is_dropped(tmp_path_factory, numbers, rest):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for number in numbers:
        folder.append("done", {"n": number})
    assert [line["n"] for line in folder.lines("done")] == numbers
    if numbers:
        with (folder.path / "done.jsonl").open("ab") as file:
            file.write(rest)
        assert [line["n"] for line in folder.lines("done")] == numbers
        folder.append("done", {"n": 7})
        assert [line["n"] for line in folder.lines("done")] == [*numbers, 7]


def test_a_folder_keeps_and_a_missing_one_does_not(tmp_path: Path):
    folder, none = RunFolder(tmp_path), RunFolder(None)
    for one in (folder, none):
        one.keep("a/b", {"x": torch.ones(2)}, {"done": True})
        one.append("lines", {"a": 1})
        one.claim({"a": 1})
    assert folder.record("a/b") == {"done": True} and torch.equal(folder.tensors("a/b")["x"], torch.ones(2))
    assert none.record("a/b") is None and none.tensors("a/b") is None and none.lines("lines") == []
    assert none.inside("x").path is None and folder.inside("x").path == tmp_path / "x"
    with pytest.raises(CheckpointError, match=r"holds another run, which differs in a \(1 there, 2 now\)"):
        folder.claim({"a": 2})
    (tmp_path / "lines.jsonl").write_bytes(b"no json\n")
    with pytest.raises(CheckpointError, match=r"lines.jsonl cannot be read; remove it"):
        folder.lines("lines")
    for n in (1, 2, 3):
        folder.keep(f"round-{n}", torch.ones(1))
    folder.drop("round-*.pt", "round-2.pt", "round-3.pt")
    assert sorted(p.name for p in tmp_path.glob("round-*")) == ["round-2.pt", "round-3.pt"]
    folder.drop("round-*.pt")
    assert not list(tmp_path.glob("round-*"))


# Estimates -----------------------------------------------------------------------------------------------------------


def test_a_long_run_needs_agreement(capsys):
    console = Console(force_terminal=False)
    agree(Estimate(86_399.0, 1e11), console, yes=False)
    for long in (Estimate(86_400.0), Estimate(1.0, 1e12), Estimate(8.7 * 86_400, 560e12)):
        with pytest.raises(TooLongError, match="agree to it with --yes"):
            agree(long, console, yes=False)
        agree(long, console, yes=True)
    assert "about 8.7 days and 560 TB of messages" in capsys.readouterr().out
    assert str(Estimate(90.0)) == "about 90 seconds" and str(Estimate(60.0) * 3) == "about 3 minutes"


def test_at_a_terminal_it_asks(monkeypatch):
    console = Console(force_terminal=True)
    for answer, goes_on in (("y", True), ("YES", True), ("", False), ("n", False)):
        monkeypatch.setattr(console, "input", lambda _, answer=answer: answer)
        if goes_on:
            agree(Estimate(1e6), console, yes=False)
        else:
            with pytest.raises(TooLongError):
                agree(Estimate(1e6), console, yes=False)


# Studies -------------------------------------------------------------------------------------------------------------


def test_a_difference_within_the_spread_is_called_that():
    """Where there is none, at most a twentieth of the verdicts claims one; where there is one, it is found."""
    draw = np.random.default_rng(0)
    false = sum(differs(list(draw.normal(0, 1, 5))) for _ in range(2000))
    # 100 are expected, with a standard deviation of about 10.
    assert 60 < false < 140
    assert all(differs(list(10 + draw.normal(0, 1, 5))) for _ in range(100))
    assert verdict([1.0]) == "+1 (one seed)" and verdict([]) == "" and not differs([0.5])
    assert verdict([0.1, -0.1, 0.05]).endswith("within the spread")
    assert differs([0.5, 0.5]) and not differs([0.0, 0.0])


def test_a_study_compares_the_same_seeds(tmp_path: Path):
    study = Study("queries")
    for seed, shift in enumerate((0.0, 0.1, 0.2)):
        study.add("queries 10", seed, Ended(0.5 + shift, 0.6 + shift))
        study.add("queries 20", seed, Ended(0.5 + shift, 0.65 + shift + 0.001 * seed))
    study.add("queries 30", 1, Ended(0.6, 0.8))
    assert study.difference("queries 20", "after", "queries 10") == pytest.approx([0.05, 0.051, 0.052])
    assert study.difference("queries 30", "after", "queries 10") == pytest.approx([0.1])
    study.write(tmp_path, drawn=False)
    assert json.loads((tmp_path / "study.json").read_text())["runs"]["queries 30"] == {
        "1": {"before": 0.6, "after": 0.8}
    }
    assert len((tmp_path / "study.csv").read_text().splitlines()) == 8
    assert list(study.as_plot().series["after"]) == [10.0, 20.0, 30.0]
    console = Console(width=200, record=True)
    console.print(study.table())
    text = console.export_text()
    assert "+5.1 +- 0.1" in text and "+10 (one seed)" in text


def test_plots_are_drawn_from_data(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    for kind in ("lines", "bars", "points"):
        plot = Plot(kind, "x", "y", {"a": {1: 2.0, 2: [3.0, 4.0]}, "b": {1: 1.0}}, kind=kind, levels={"limit": 2.0})
        assert plot.draw(tmp_path).read_bytes().startswith(b"\x89PNG")
        assert json.loads(json.dumps(plot.as_dict()))["series"]["a"]["2"] == [3.0, 4.0]
        axes = plot.plot(Figure().add_subplot())
        assert axes.get_xlabel() == "x" and axes.get_ylabel() == "y"


# Workers -------------------------------------------------------------------------------------------------------------


def work(task: int, folder: RunFolder) -> None:
    """Trains, as torch does not let a fork of a process that has trained."""
    if task == 3:
        raise FederationError("three is too many")
    if task == 4:
        os._exit(1)
    (torch.ones(2, requires_grad=True) * task).sum().backward()
    folder.keep(f"t{task}", torch.full((2,), task), {"task": task})


def test_workers_leave_files_and_pass_errors_on(tmp_path: Path):
    torch.ones(2, requires_grad=True).sum().backward()
    folder, done = RunFolder(tmp_path), []
    Workers(2).ahead([0, 1, 2], work, folder, lambda: done.append(1))
    assert len(done) == 3 and all(folder.tensors(f"t{i}")[0] == i for i in range(3))
    with pytest.raises(SectorchError, match="three is too many"):
        Workers(2).ahead([3, 5], work, folder)
    with pytest.raises(WorkerError, match="a worker process ended in the middle"):
        Workers(2).ahead([4, 6], work, folder)
    with pytest.raises(WorkerError, match="cannot be sent to another process"):
        Workers(2).ahead([1, 2], lambda *_: None, folder)
    Workers(1).ahead([7, 8], work, folder)
    assert folder.record("t7") is None, "one worker does nothing ahead"
    with pytest.raises(FederationError, match="processes must be at least 1"):
        Workers(0)
    with pytest.raises(FederationError, match="no way to work in parallel 'threads'"):
        Workers(2, "threads")


def test_ray_is_asked_for_what_is_not_there(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(SectorchError, match=r"pip install 'sectorch\[ray\]'"):
        Workers(2, "ray").ahead([1, 2], lambda *_: None, RunFolder(tmp_path))


class Ray:
    """Ray's interface, as far as it is used, in this process."""

    def __init__(self):
        self.waits = 0

    def remote(self, work):
        """A task reaches a worker as a copy, which is not the driver's object."""
        return type("Remote", (), {"remote": staticmethod(lambda task: work(copy.deepcopy(task)))})

    def wait(self, waiting):
        self.waits += 1
        return waiting[-1:], waiting[:-1]

    def get(self, made):
        return made


def test_what_ray_brings_lies_where_forks_leave_it(tmp_path: Path, monkeypatch):
    ray = Ray()
    monkeypatch.setattr(parallel_module, "ray", lambda: ray)
    folder = RunFolder(tmp_path)
    Workers(1, "ray").ahead([1, 2], lambda task, to: to.keep(f"a/t{task}", torch.ones(task), {"n": task}), folder)
    assert ray.waits == 2 and [len(folder.tensors(f"a/t{i}")) for i in (1, 2)] == [1, 2]
    assert folder.record("a/t2") == {"n": 2}
