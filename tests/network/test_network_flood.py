"""A peer that sends what nobody asked for: what waits is bounded at whoever receives, and the connection ends."""

from __future__ import annotations

import os
import threading
import tracemalloc
from contextlib import suppress
from pathlib import Path
from queue import Empty

import pytest
import torch
from network_world import Trio, until
from torch import nn

from sectorch.choreography.run.frames import PART_BYTES, Frame, Kind, pack, parts_of
from sectorch.errors import FrameError, NetworkError, PeerLostError
from sectorch.network.wire import channel as channels
from sectorch.network.wire import channel as links
from sectorch.network.wire.channel import Channel, PeerLink
from sectorch.testing.local_network import Stage

SESSION = bytes(range(16))
PART = pack(Frame(Kind.DATA, SESSION, payload=bytes(PART_BYTES)))
X = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def opened() -> tuple[PeerLink, Channel]:
    link = PeerLink("a peer", lambda *_: None)
    return link, link.open(SESSION)


def queued(channel: Channel) -> int:
    """Bytes of the payloads that wait, by the queue itself."""
    size = 0
    while not channel._frames.empty():
        frame = channel._frames.get()
        size += len(frame.payload) if frame is not None else 0
    return size


def flooded(link: PeerLink, frames) -> None:
    link.pump(frames)
    assert isinstance(link.closed, FrameError), link.closed


def test_an_idle_session_takes_little_and_ends_the_connection():
    link, channel = opened()
    most = 0

    def messages():
        nonlocal most
        for _ in range(1 << 10):
            yield PART
            most = max(most, channel.unread_bytes)

    flooded(link, messages())
    assert "more than it was given room for" in str(link.closed)
    assert 2 << 20 < most <= channels.IDLE and queued(channel) == 0


def test_small_frames_count_with_what_they_take():
    link, channel = opened()
    kept, put = [], channel._frames.put
    channel._frames = type("Counted", (), {"put": lambda _, f: (kept.append(f), put(f)), "get_nowait": _empty})()
    flooded(link, (pack(Frame(Kind.DATA, SESSION)) * 100 for _ in range(10_000)))
    assert len(kept) <= channels.IDLE // channels.FRAME + 1


def _empty(_):
    raise Empty


@pytest.mark.parametrize("rest", [Kind.CREDIT, Kind.ABORT])
def test_a_small_frame_does_not_hold_what_came_with_it(rest):
    """Messages of 7 MiB, each with an empty frame for the session and a large one that nobody reads."""
    link, _ = opened()
    junk = pack(Frame(rest, bytes(16), payload=bytes(7 << 20)))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        largest = 0

        def messages():
            nonlocal largest
            for _ in range(40):
                yield pack(Frame(Kind.DATA, SESSION, payload=b"x")) + junk
                largest = max(largest, tracemalloc.get_traced_memory()[0] - before)

        link.pump(messages())
    finally:
        tracemalloc.stop()
    assert largest < 40 << 20


def test_idle_sessions_of_a_link_have_a_bound_together(monkeypatch):
    monkeypatch.setattr(links, "IDLE_BYTES", 6 << 20)
    link = PeerLink("a peer", lambda *_: None)
    opened = [link.open(bytes([i]) * 16) for i in range(1, 9)]
    parts = [pack(Frame(Kind.DATA, c.session, payload=bytes(PART_BYTES))) for c in opened]
    most = 0

    def messages():
        nonlocal most
        for part in parts:
            yield part
            most = max(most, sum(c.unread_bytes for c in opened))

    flooded(link, messages())
    assert "idle sessions" in str(link.closed) and most <= 6 << 20


def test_a_session_that_expects_more_has_room_for_it_until_it_rests():
    link, channel = opened()
    channel.grant_credit(40 << 20)
    largest = torch.zeros(40 << 17, dtype=torch.int64)
    window = [PART] * ((channels.WINDOW >> 20) - 1)
    frames = [*window, *parts_of(Frame(Kind.DATA, SESSION), largest)]
    for frame in frames:
        for f in links.unpack(frame):
            link._route(f)
    for _ in frames:
        channel.receive()
    assert channel.unread_bytes == 0
    channel.end_call()
    flooded(link, [PART] * 5)


def test_room_is_bounded_whatever_a_program_says():
    link, channel = opened()
    channel.grant_credit(1 << 50)
    assert channel._room < channels.WINDOW + channels.LARGEST + (8 << 20)
    assert link.closed is None


@pytest.mark.parametrize("count, size", [(channels.REQUESTS + 1, 2), (9, 1 << 17), (1, 2 << 20)])
def test_requests_that_nobody_answers_are_bounded(count, size):
    link, channel = opened()
    payload = b'{"do": "predict"' + b" " * size + b"}"
    flooded(link, (pack(Frame(Kind.CONTROL, SESSION, payload=payload)) for _ in range(count)))
    assert sum(map(len, channel._requests)) <= channels.REQUEST_BYTES


def test_requests_that_are_answered_are_not():
    link, channel = opened()
    payload = b'{"do": "predict"' + b" " * (1 << 17) + b"}"
    for _ in range(50):
        for frame in links.unpack(pack(Frame(Kind.CONTROL, SESSION, payload=payload))):
            link._route(frame)
        assert channel.request(dict) == {"do": "predict"}


def test_a_sender_waits_in_the_middle_of_a_message_until_the_receiver_is_ready():
    """Of 40 MiB it sends what an idle receiver keeps, and the rest once that says that it is ready."""
    there, here = opened(), opened()
    here[1].begin_call()
    big = torch.arange(5 << 20, dtype=torch.int64)
    sending = threading.Thread(target=here[1].send, args=(parts_of(Frame(Kind.DATA, SESSION), big),))
    sending.start()
    out = iter(lambda: here[0].outbox.take() or b"", None)
    while there[1].unread_bytes < channels.AHEAD:
        for frame in links.unpack(next(out)):
            there[0]._route(frame)
    assert not until(lambda: not here[0].outbox.empty(), 0.3) and sending.is_alive()
    assert there[1].unread_bytes <= channels.IDLE
    there[1].grant_credit(big.nbytes)
    for frame in links.unpack(there[0].outbox.take() or b""):
        here[0]._route(frame)
    while there[1].unread_bytes < big.nbytes:
        for frame in links.unpack(next(out)):
            there[0]._route(frame)
    sending.join()


def test_a_peer_that_takes_nothing_is_not_told_without_end():
    """Each frame of an unknown session is answered by a refusal."""
    link = PeerLink("a peer", lambda *_: None)
    frames = (pack(Frame(Kind.DATA, i.to_bytes(16, "big"))) for i in range(1, 400_000))
    link.pump(frames)
    assert isinstance(link.closed, PeerLostError) and "takes nothing" in str(link.closed)
    assert link.outbox.queued <= links.OUTBOX_BYTES + links.URGENT_BYTES + 1000


# Real parties.


def flood(link: PeerLink, session: bytes, count: int) -> None:
    part = pack(Frame(Kind.DATA, session, payload=bytes(PART_BYTES)))
    for _ in range(count):
        link.send(part)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_client_that_floods_idle_sessions_of_a_server_process(tmp_path):
    """Eight sessions, 100 MiB for each: the server's memory stays, it ends that connection, and answers others."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)
    x = torch.randn(2, 6)
    with Stage({"hospital-b": (model, x)}) as stage:
        with stage.connect("visitor", direct=True) as connection:
            assert (connection.model("hospital-b")(x) - model(x)).abs().max() < 1e-4
        before, ended = resident(stage.processes["server"].pid), 0
        for _ in range(2):
            connection = stage.connect("mallory", direct=True)
            remotes = [connection.model("hospital-b") for _ in range(4)]
            with suppress(NetworkError):
                for session in [name for remote in remotes for name in remote._sessions]:
                    flood(connection.link, session, 100)
                until(lambda: connection.link.closed is not None, 10)
            ended += connection.link.closed is not None
            connection.close()
            assert resident(stage.processes["server"].pid) - before < 100 << 20
        assert ended == 2
        with stage.connect("visitor", direct=True) as connection:
            assert (connection.model("hospital-b")(x) - model(x)).abs().max() < 1e-4


@pytest.mark.parametrize("who", "QA")
def test_a_server_that_floods_an_idle_session_of_a_client(pki, small_model, tmp_path, who):
    trio = Trio(pki[1], small_model, X, tmp_path)
    try:
        remote = trio.connection.model("hospital-b")
        remote(X)
        assert until(lambda: all(c.idle for link in trio.links("SAQ"[1]) for c in link._channels.values()), 10)
        (session,) = remote._sessions
        client = trio.connection if who == "Q" else trio.party.connection
        (link,) = [link for link in trio.links("S") if link.peer == client.name and link.closed is None]
        channel = client.link._channels[session]
        waiting, take = [], channel.take

        def watched(frame, read):
            take(frame, read)
            waiting.append(channel.unread_bytes)

        channel.take = watched
        with suppress(NetworkError):
            flood(link, session, 100)
        assert until(lambda: isinstance(client.link.closed, FrameError), 10)
        assert max(waiting) <= channels.IDLE and "given room" in str(client.link.closed)
    finally:
        trio.close()
