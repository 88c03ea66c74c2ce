"""Parties that die, hang, replay or send garbage: a typed error in time, nothing kept, and the next query is right."""

from __future__ import annotations

import gc
import os
import random
import threading
import time

import pytest
import torch
from cases import long
from network_world import Trio, handles, resident, until

from sectorch import errors
from sectorch.choreography.run.frames import Frame, Kind, pack, unpack
from sectorch.network.wire.channel import PeerLink
from sectorch.network.wire.endpoints import Listener
from sectorch.nn.models import ZOO

IN_TIME = 60.0
"""A bound against hanging for ever, on a machine that may be busy; `sweep` prints what it took."""
X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    yield trio
    trio.close()


def asked(trio: Trio, x: torch.Tensor) -> torch.Tensor:
    remote = trio.connection.model("hospital-b")
    y = remote(x)
    remote.close()
    return y


def sweep(trio: Trio, model, x, who: str, steps: range | None) -> int:
    """Kill one party at each of its messages; the number of messages that a query takes of it."""
    expected, message, slowest = model(x), 0, 0.0
    numbers = iter(steps) if steps is not None else iter(range(10_000))
    for message in numbers:
        sent = trio.kill_at(who, message)
        start = time.monotonic()
        try:
            y = asked(trio, x)
        except errors.SectorchError as error:
            assert isinstance(error, (errors.NetworkError, errors.MaterialError))
            slowest = max(slowest, time.monotonic() - start)
            if who != "S":
                assert until(trio.idle if who == "A" else lambda: trio.server.sessions == 0, IN_TIME)
        else:
            assert (y - expected).abs().max() < 1e-3
            if sent[0] <= message:  # the query is over before that message
                break
        trio.restart(who)
        assert (asked(trio, x) - expected).abs().max() < 1e-3, f"after {who} died at message {message}"
    print(f"{who} killed at {message} messages: the slowest error came after {slowest:.2f} s")
    assert slowest < IN_TIME
    return message


@pytest.mark.parametrize(("who", "first"), [("Q", 1), ("A", 4), ("S", 8)])
def test_a_party_that_dies_at_some_messages(trio, small_model, who, first):
    """At every eleventh from another one for each; `test_a_party_that_dies_at_each_message...` takes all."""
    sweep(trio, small_model, X, who, range(first, 40, 11))
    assert until(trio.idle, IN_TIME)


@pytest.mark.sectorch_long
@pytest.mark.parametrize("who", "QAS")
def test_a_party_that_dies_at_each_message_of_a_lenet_query(pki, tmp_path, who):
    _, made = pki
    model = ZOO["lenet"][0]().eval().requires_grad_(False)
    x = torch.rand(1, *ZOO["lenet"][1])
    trio = Trio(made, model, x, tmp_path)
    sweep(trio, model, x, who, range(3))
    gc.collect()
    before = handles(), threading.active_count()
    messages = sweep(trio, model, x, who, None)
    assert messages > 20
    assert until(trio.idle, IN_TIME)
    gc.collect()
    # Each death ends a connection; a few handles and threads of the last ones may still be on their way out.
    assert until(lambda: handles() <= before[0] + 10 and threading.active_count() <= before[1] + 10, 20)
    print(f"{who}: killed at each of {messages} messages")
    trio.close()


@pytest.mark.parametrize(("who", "kind", "begins"), [
    ("A", errors.AbortedError, "PeerLostError: "), ("S", errors.PeerLostError, ""),
])  # fmt: skip
def test_the_error_at_the_asking_party_says_who_was_lost(trio, small_model, who, kind, begins):
    """Q is connected to S only: of A's death it hears from S, whose reason is the text of an AbortedError."""
    for message in (0, 4, 8):
        trio.kill_at(who, message)
        with pytest.raises(errors.NetworkError) as raised:
            asked(trio, X)
        assert type(raised.value) is kind and str(raised.value).startswith(begins), (message, repr(raised.value))
        trio.restart(who)
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4


@pytest.mark.parametrize("error", [errors.PeerLostError("secret"), ZeroDivisionError("secret")])
def test_an_answering_party_that_aborts_amid_a_query(trio, small_model, error):
    """The text of Q's error begins with the type of A's, and has no text of code outside the package."""
    (link,) = trio.links("A")
    inner, sent = link.send, [0]

    def fails(data: bytes, urgent: bool = False) -> None:
        sent[0] += 1
        if sent[0] == 5:
            raise error
        inner(data, urgent)

    link.send = fails
    with pytest.raises(errors.NetworkError) as raised:
        asked(trio, X)
    link.send = inner
    assert type(raised.value) is errors.AbortedError
    assert str(raised.value) == f"{type(error).__name__}: at 'hospital-b', whose own log says more"
    assert until(trio.idle, IN_TIME)
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4


def test_a_party_that_hangs_is_an_error_after_the_stated_time(trio, small_model):
    """A's process lives and its connection too, but nothing comes any more.

    The server waits for a second in this query alone: on a busy machine an honest party may be silent for longer.
    """
    asked(trio, X)
    (link,) = trio.links("A")
    waits = [(at_server, at_server._timeouts) for at_server in trio.links("S")]
    for at_server, (_, call) in waits:
        at_server._timeouts = 1.0, call
    inner, sent = link.send, [0]

    def hanging(data: bytes, urgent: bool = False) -> None:
        sent[0] += 1
        if sent[0] < 8:
            inner(data, urgent)

    link.send = hanging
    start = time.monotonic()
    with pytest.raises(errors.NetworkError, match="said nothing for 1 s"):
        asked(trio, X)
    assert time.monotonic() - start >= 1.0
    link.send = inner
    for at_server, before in waits:
        at_server._timeouts = before
    assert until(trio.idle, IN_TIME)
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4


def recorded(link: PeerLink) -> list[bytes]:
    """The packed frames that go over a link from now on."""
    frames, inner = [], link.send

    def send(data: bytes, urgent: bool = False) -> None:
        frames.append(data)
        inner(data, urgent)

    link.send = send
    return frames


def test_a_replayed_session_is_refused(trio, small_model):
    """What Q sent in a session that is over, sent once more: the session is not open, and the sender is told."""
    frames = recorded(trio.connection.link)
    asked(trio, X)
    data = [f for f in frames if next(unpack(f)).kind == Kind.DATA]
    session = next(unpack(data[0])).session
    assert until(trio.idle, IN_TIME)
    assert trio.connection.models() == ["hospital-b"], "what S said of the session that is over has come"
    channel = trio.connection.link.open(session)
    for frame in data:
        trio.connection.link.send(frame)
    with pytest.raises(errors.AbortedError, match="not open here"):
        channel.receive()
    channel.close()
    assert trio.server.sessions == 0
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4


def test_frames_for_another_session_or_of_another_place_are_refused(trio, small_model):
    """In an open session: a frame of an old one under the new one's name, and a frame that comes twice."""
    frames = recorded(trio.connection.link)
    asked(trio, X)
    old = [next(unpack(f)) for f in frames if next(unpack(f)).kind == Kind.DATA]
    assert until(trio.idle, IN_TIME)
    for chosen in (old[0], old[-1]):
        remote = trio.connection.model("hospital-b")
        (session,) = remote._sessions
        frame = Frame(
            Kind.DATA, session, chosen.call, chosen.number, chosen.path, chosen.label, chosen.dtype, chosen.shape,
            payload=chosen.payload,
        )  # fmt: skip
        trio.connection.link.send(pack(frame))
        with pytest.raises(errors.NetworkError, match="does not belong here"):
            remote(X)
    assert until(trio.idle, IN_TIME)
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4


def test_one_session_taken_up_twice_makes_each_prepared_call_once(trio, small_model):
    first = trio.connection.model("hospital-b")
    first.prepare(2)
    second = trio.connection.model("hospital-b")
    assert (first(X) - small_model(X)).abs().max() < 1e-4
    assert second.prepared() == {}
    assert (second(X) - small_model(X)).abs().max() < 1e-4


# Mutated frames.


def mutated(frame: bytes, rng: random.Random) -> bytes:
    data = bytearray(frame)
    head = min(len(data), 160)
    kind = rng.randrange(4)
    if kind == 0:
        data[rng.randrange(head)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data[rng.randrange(head) : rng.randrange(head)] = rng.randbytes(rng.randrange(1, 9))
    else:
        data += rng.randbytes(rng.randrange(1, 60))
    return bytes(data)


def small(frames: list[bytes]) -> list[bytes]:
    """Without what is longest: most of the bytes of a large frame are its payload, which anything may be."""
    return [frame for frame in frames if len(frame) < 20_000]


@pytest.mark.parametrize("count", [120, *long(10_000)])
def test_mutated_frames_at_the_server(trio, small_model, count):
    frames = recorded(trio.connection.link)
    asked(trio, X)
    frames = small(frames)
    rng, dials, sessions, baseline = random.Random(1), 0, 0, 0
    request = {"do": "open", "models": ["hospital-b"]}
    trio.start_querying(name="bob")
    bob, channel = trio.connection, None
    for i in range(count):
        baseline = baseline if i != count // 3 else resident()
        if bob.link.closed is not None:
            bob.close()
            trio.start_querying(name="bob")
            bob, channel, dials = trio.connection, None, dials + 1
        try:
            if channel is None or channel._failure is not None:
                session = os.urandom(16)
                channel, sessions = bob.link.open(session), sessions + 1
                bob.ask({**request, "session": session.hex()})
            frame = rng.choice(frames)
            frame = frame[:4] + session + frame[20:] if any(frame[4:20]) else frame  # of the session that is open
            bob.link.send(mutated(frame, rng))
            if rng.random() < 0.5:  # so that refusals are seen, and not only queued
                until(lambda: bob.link.closed is not None or channel._failure is not None, 0.01)
        except errors.BusyError:
            time.sleep(0.01)
        except errors.NetworkError:
            continue
    bob.close()
    assert dials > 0
    assert sessions > dials
    assert until(lambda: trio.server.sessions == 0, IN_TIME)
    gc.collect()
    assert resident() - baseline < 100 << 20
    print(f"{count} frames, {dials} connections, grown by {(resident() - baseline) / 2**20:.1f} MiB")
    trio.start_querying()
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4


class Posing:
    """A server of the right certificate that says what it likes."""

    def __init__(self, credentials):
        self.links: list[PeerLink] = []
        self.listener = Listener("localhost:0", credentials, self._welcome)
        self.port = self.listener.port

    def _welcome(self, name: str, certificate: str) -> PeerLink:
        self.links.append(PeerLink(name, self._request))
        return self.links[-1]

    def _request(self, link: PeerLink, request: dict) -> None:
        said = {"hello": {"protocol": 4}, "register": {"sessions": []}, "meet": {"missing": []}}.get(request["do"], {})
        link.tell({"do": "reply", "number": request.get("number"), **said})

    def stop(self) -> None:
        for link in self.links:
            link.close(errors.PeerLostError("over"))
        self.listener.stop(0)


@pytest.mark.parametrize("role", "QA")
@pytest.mark.parametrize("count", [120, *long(10_000)])
def test_mutated_frames_at_a_client(trio, pki, small_model, tmp_path, role, count):
    """What the server sent to this client in a real query, changed, from a server that has the right certificate."""
    _, made = pki
    name = "alice" if role == "Q" else "hospital-b"
    asked(trio, X)
    (link,) = [link for link in trio.server._links if link.peer == name]
    frames = recorded(link)
    asked(trio, X)
    frames = small(frames)
    posing, rng, dials, baseline = Posing(made["server"]), random.Random(2), 0, 0
    real, trio.port = trio.port, posing.port
    victims, refused = [], 0

    def connected():
        if role == "Q":
            trio.start_querying()
            victims.append(trio.connection)
        else:
            trio.start_answering()
            victims.append(trio.party)
        return posing.links[-1]

    before = trio.connection, trio.party
    link = connected()
    for i in range(count):
        baseline = baseline if i != count // 3 else resident()
        if link.closed is not None or (victims[-1] if role == "Q" else victims[-1].connection).link.closed is not None:
            victims.pop().close()
            refused += 1
            link = connected()
            posing.links[:] = [link]
            dials += 1
        try:
            link.send(mutated(rng.choice(frames), rng))
        except errors.NetworkError:
            continue
        if rng.random() < 0.5:
            until(lambda: link.outbox.empty() or link.closed is not None, 0.01)
    last = victims[-1] if role == "Q" else victims[-1].connection
    dials += until(lambda: link.closed is not None or last.link.closed is not None, 30) is not False
    victims.pop().close()
    posing.stop()
    assert dials > 0
    gc.collect()
    assert resident() - baseline < 100 << 20
    print(f"{count} frames at {role}, {dials} connections, grown by {(resident() - baseline) / 2**20:.1f} MiB")
    trio.port, (trio.connection, trio.party) = real, before
    assert (asked(trio, X) - small_model(X)).abs().max() < 1e-4
