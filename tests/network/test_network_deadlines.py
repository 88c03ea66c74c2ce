"""A client that asks and then says nothing, or next to nothing: it holds up a call for so long, and others for less."""

from __future__ import annotations

import threading

import pytest
import torch
from network_world import Trio, until

from sectorch import errors
from sectorch.choreography.run.frames import Frame, Kind, pack
from sectorch.network.wire import channel as deadlines
from sectorch.network.wire.channel import Channel, Deadline, PeerLink
from sectorch.network.wire.fair_queue import FairQueue

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def clock(monkeypatch):
    """The time that deadlines see, as [seconds]."""
    now = [0.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("call", "ends"), [(600.0, True), (None, False)])
def test_beats_are_words_of_the_server_and_none_of_a_client(clock, call, ends):
    deadline = Deadline("mallory", 60, call)
    with deadline.start_wait(60) as remaining:
        for now in range(5, 60, 5):
            clock[0] = now
            deadline.note_frame(beat=True)
        clock[0] = 61.0
        if ends:
            with pytest.raises(errors.PeerLostError, match="mallory has said nothing for 60 s"):
                remaining()
        else:
            assert remaining() == 54.0


def test_all_waits_of_a_call_have_a_limit_together_and_bytes_lengthen_it(clock):
    deadline = Deadline("mallory", 60, 100)
    deadline.add_bytes(1 << 30)  # before the call
    deadline.begin_call()
    for _ in range(3):
        with deadline.start_wait(60) as remaining:
            clock[0] += 30
            deadline.note_frame(beat=False)
            assert remaining() is not None
        clock[0] += 1000  # of this party's own
    with deadline.start_wait(60) as remaining:
        assert remaining() == 10.0
        deadline.add_bytes(5 << 20)
        assert remaining() == 15.0
        clock[0] += 15
        with pytest.raises(errors.PeerLostError, match="keeps a call waiting for more than 100 s in all"):
            remaining()
    deadline.end_call()
    with deadline.start_wait(None) as remaining:
        assert remaining() is None


def test_credits_for_what_was_never_sent_end_the_connection():
    link = PeerLink("mallory", lambda *_: None)
    session = bytes(range(16))
    link.open(session)
    link.pump([pack(Frame(Kind.CREDIT, session, number=1 << 20))])
    assert isinstance(link.closed, errors.FrameError)


def test_an_end_is_heard_while_another_party_is_waited_for():
    ends = [PeerLink(name, lambda *_: None).open(bytes([n]) * 16) for n, name in ((1, "alice"), (2, "hospital-b"))]
    ends[0].on_failure(ends[1].fail)
    ends[0].take(Frame(Kind.ABORT, bytes([1]) * 16, payload=b"AbortedError: stopped by its user"), lambda _: {})
    with pytest.raises(errors.AbortedError, match="stopped by its user"):
        ends[1].receive()
    late: list[errors.SectorchError] = []
    ends[0].on_failure(late.append)
    assert isinstance(late[0], errors.AbortedError)


def test_an_end_is_heard_while_a_turn_is_waited_for():
    turns, channel = FairQueue(1), PeerLink("alice", lambda *_: None).open(bytes([1]) * 16)
    channel.on_failure(turns.wake)
    said = []

    def wait() -> None:
        try:
            with turns.turn("alice", channel.beat):
                said.append("ran")
        except errors.AbortedError as error:
            said.append(str(error))

    with turns.turn("bob", lambda: None):
        thread = threading.Thread(target=wait)
        thread.start()
        assert until(lambda: turns._waiting, 30)
        channel.fail(errors.AbortedError("stopped"))
        thread.join()
    assert said == ["stopped"]
    with turns.turn("carol", lambda: None):
        pass


def test_one_client_that_has_all_running_calls_does_not_keep_out_another():
    turns, ran = FairQueue(2), []
    with turns.turn("many", lambda: None), turns.turn("many", lambda: None):
        with turns.turn("one", lambda: None):
            ran.append("one")
    assert ran == ["one"]


def test_clients_that_ask_and_only_beat_are_given_up_and_others_are_answered(pki, small_model, tmp_path, monkeypatch):
    """Two sessions of one client and one of another one, on a server of two calls at a time."""
    trio = Trio(pki[1], small_model, X, tmp_path)
    trio.server._timeouts = 1.0, 600.0  # of the links that are made from now on
    over, beating = threading.Event(), []
    honest = trio.connection
    held: list[Channel] = []
    for name, count in (("bob", 2), ("alice", 1)):
        trio.start_querying(name=name)
        beating.append(trio.connection)
        for _ in range(count):
            (opened,) = trio.connection.model("hospital-b")._sessions.values()
            opened.channel.tell({"do": "predict", "program": 0, "rows": 2, "use": [], "then": []})
            held.append(opened.channel)

    def beat() -> None:
        while not over.wait(0.05):
            for channel in held:
                try:
                    channel.beat()
                except errors.NetworkError:
                    continue

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        remote = honest.model("hospital-b")
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
        remote.close()
        assert until(lambda: trio.server.sessions == 0, 30)
        for channel in held:
            with pytest.raises(errors.NetworkError, match="has said nothing for 1 s"):
                channel.beat()
    finally:
        over.set()
        thread.join()
        for connection in beating:
            connection.close()
        trio.connection = honest
        trio.close()
