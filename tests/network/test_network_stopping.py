"""Signals of the server and the answering party, and a job of the querying one that is killed half-way."""

from __future__ import annotations

import json
import os
import signal
import threading

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from network_world import Trio, until

from sectorch import errors
from sectorch.network.commands import serve
from sectorch.network.commands.ask import Question, ResultFiles
from sectorch.network.parties.session import PartySession
from sectorch.network.wire.fair_queue import FairQueue

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def signals():
    """Signals of this process are again what they were."""
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


def stopped_by(*signs: signal.Signals, drained: bool = True) -> list[str]:
    """What happens in a process that gets these signals, each while it waits for what the last one made it do."""
    happened, left = [], list(signs)

    def next_one() -> None:
        if left:
            os.kill(os.getpid(), left.pop(0))

    def wait() -> None:
        while left:
            next_one()
            happened.append("went on")

    def drain(seconds: float) -> bool:
        happened.append(f"drained {seconds:g} s")
        next_one()
        return drained

    serve.until_stopped(wait, drain, lambda: happened.append("stopped"), 30)
    return happened


def test_sigterm_lets_running_calls_end_and_sighup_changes_nothing(signals, capsys):
    assert stopped_by(signal.SIGTERM) == ["drained 30 s", "stopped"]
    assert stopped_by(signal.SIGHUP, signal.SIGTERM) == ["went on", "drained 30 s", "stopped"]
    assert stopped_by(signal.SIGTERM, signal.SIGTERM) == ["drained 30 s", "stopped"]
    assert stopped_by(signal.SIGTERM, drained=False) == ["drained 30 s", "stopped"]
    said = capsys.readouterr().err
    assert "SIGHUP: going on" in said and "stopping although calls are running" in said


def test_turns_that_are_drained_let_those_that_run_end_and_refuse_the_others():
    turns, said = FairQueue(1), []

    def waiting() -> None:
        try:
            with turns.turn("b", lambda: None):
                said.append("ran")
        except errors.BusyError as error:
            said.append(str(error))

    with turns.turn("a", lambda: None):
        thread = threading.Thread(target=waiting)
        thread.start()
        assert until(lambda: turns._waiting, 30)
        assert not turns.drain("stopping", 0.0)
        thread.join()
    assert said == ["stopping"] and turns.drain("stopping", 0.0)
    with pytest.raises(errors.BusyError, match="stopping"), turns.turn("a", lambda: None):
        pass


@pytest.mark.parametrize("who", "SA")
def test_a_running_query_ends_well_while_a_party_drains_and_the_next_is_refused(
    pki, small_model, tmp_path, monkeypatch, who
):
    trio = Trio(pki[1], small_model, X, tmp_path)
    running, go_on, drained = threading.Event(), threading.Event(), []
    take_part = PartySession._take_part

    def slowly(self, *args):
        if self._me.role == who:
            running.set()
            assert go_on.wait(30)
        return take_part(self, *args)

    monkeypatch.setattr(PartySession, "_take_part", slowly)
    remote = trio.connection.model("hospital-b")
    results = []
    asking = threading.Thread(target=lambda: results.append(remote(X)))
    asking.start()
    assert running.wait(30)
    party = trio.server if who == "S" else trio.party
    draining = threading.Thread(target=lambda: drained.append(party.drain(30)))
    draining.start()
    assert until(lambda: party._turns.closed, 30)
    go_on.set()
    for thread in (asking, draining):
        thread.join()
    assert drained == [True] and (results[0] - small_model(X)).abs().max() < 1e-4
    with pytest.raises(errors.BusyError, match="is stopping; ask again when it is back"):
        remote(X)
    with pytest.raises(errors.BusyError, match="is stopping"):
        trio.connection.model("hospital-b")(X)
    trio.close()


# A job that is killed.

QUESTION = Question(inputs="3f", model="hospital-b", version="v", batch=32, network="lan", limit=None, checked=True)


def test_a_job_goes_on_where_it_was(tmp_path):
    """Batches that are done are not asked again, one without a result stays one; another question is refused."""
    out = tmp_path / "logits.npy"
    asked: list[int] = []

    def ask(number: int):
        asked.append(number)
        if number == 3:
            raise KeyboardInterrupt
        return None if number == 1 else torch.full((2, 3), float(number))

    kept = ResultFiles(out, QUESTION)
    with pytest.raises(KeyboardInterrupt):
        for number in range(4):
            kept.result(number, lambda n=number: ask(n))
    again = ResultFiles(out, QUESTION)
    results = [again.result(number, lambda: torch.full((2, 3), 9.0)) for number in range(4)]
    assert asked == [0, 1, 2, 3] and results[1] is None
    assert [r[""][0, 0].item() for r in results if r is not None] == [0.0, 2.0, 9.0]
    with pytest.raises(errors.ArgumentError, match="another question"):
        ResultFiles(out, replace(QUESTION, inputs="40"))
    about = tmp_path / "logits.npy.parts" / "about.json"
    right = about.read_bytes()
    for wrong in (b"{}", right.replace(b"32", b'"32"'), right[:-1] + b',"more":1}', right[:-1], b"\xff"):
        about.write_bytes(wrong)
        with pytest.raises(errors.ArgumentError, match=r"cannot use .*parts"):
            ResultFiles(out, QUESTION)
    about.write_bytes(json.dumps(json.loads(right)).encode())
    assert ResultFiles(out, QUESTION).folder == about.parent
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_results_of_several_tensors_are_kept_by_name(tmp_path):
    kept = ResultFiles(tmp_path / "tags.npz", QUESTION)
    result = {"logits": torch.ones(2, 3).t(), "states": (torch.zeros(2), torch.ones(2))}
    first = kept.result(0, lambda: result)
    assert first is not None and sorted(first) == ["logits", "states.0", "states.1"]
    assert np.array_equal(first["logits"].numpy(), np.ones((3, 2)))
