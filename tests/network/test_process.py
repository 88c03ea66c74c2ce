"""What a command asks of the operating system for its process."""

from __future__ import annotations

import argparse
import os

import pytest
import torch

from sectorch.errors import ArgumentError
from sectorch.network.commands import options


@pytest.fixture
def given(monkeypatch):
    """Cores 2, 5 and 7 may be used; which a process takes, and its threads of torch's."""
    taken = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: taken.update({thread: cores}), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: taken.update(torch=count))
    return taken


@pytest.mark.parametrize(("core", "worker", "mine"), [(2, 0, 2), (5, 0, 5), (5, 1, 7), (5, 2, 2), (7, 4, 2)])
def test_each_worker_has_the_next_core(given, core, worker, mine):
    options.on_core(argparse.Namespace(core=core), worker)
    assert given.pop("torch") == 1
    assert os.getpid() in given, "this thread"
    assert set(map(frozenset, given.values())) == {frozenset({mine})}


def test_without_a_core_nothing_is_asked(given):
    options.on_core(argparse.Namespace(core=None), 1)
    assert not given


@pytest.mark.parametrize("core", [0, -1, 3, 64])
def test_a_core_that_is_not_this_process_s_is_refused(given, core):
    with pytest.raises(ArgumentError, match=rf"--core is one of 2, 5, 7 here, got {core}"):
        options.on_core(argparse.Namespace(core=core))
    assert not given


def test_a_system_without_a_choice_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(ArgumentError, match="leave it out"):
        options.on_core(argparse.Namespace(core=0))
