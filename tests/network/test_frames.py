"""Frames: what is packed is unpacked, what is mutated is refused or is another frame, and a runtime refuses that."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st

from sectorch.choreography import Phase, Sent
from sectorch.choreography.run.frames import Frame, Kind, pack, parts_of, unpack
from sectorch.choreography.run.party import PartyRuntime
from sectorch.errors import ArgumentError, FrameError, NetworkError, PeerLostError
from sectorch.network.wire.channel import TOGETHER, Channel, Deadline, PeerLink
from sectorch.session import A, Q, S

SESSION = bytes(range(16))


@given(
    st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.text(max_size=20),
    st.lists(st.integers(0, 2**40), max_size=6), st.binary(max_size=64),
)  # fmt: skip
def test_round_trip(kind, call, number, path, shape, payload):
    frame = Frame(kind, SESSION, call, number, path, "label", torch.int32, tuple(shape), payload=payload)
    (back,) = unpack(pack(frame))
    assert back.size == len(pack(frame))
    assert bytes(back.payload) == payload
    assert (back.kind, back.session, back.call, back.number, back.path, back.shape, back.dtype) == (
        kind, SESSION, call, number, path, tuple(shape), torch.int32,
    )  # fmt: skip


class Given:
    """A channel that gives prepared frames."""

    def __init__(self, frames):
        self.frames = [frame for f in frames for frame in unpack(f)]
        self.sent = []

    def send(self, parts, later=False):
        self.sent.extend(parts)

    def flush(self):
        pass

    def receive(self):
        if not self.frames:
            raise FrameError("no more frames")
        return self.frames.pop(0)


LINE = Sent(
    "relu/open_masked", "c_A", A, S, Phase.ONLINE, 1, torch.Size((4, 300)), torch.int64, "", "", None, True, call=7
)
VALUE = torch.arange(1200).view(4, 300)


def frames_of(value: torch.Tensor) -> list[bytes]:
    channel = Given([])
    PartyRuntime(A, SESSION, {S: channel}).transfer(LINE, value)
    return channel.sent


def received(frames: list[bytes]) -> torch.Tensor:
    return PartyRuntime(S, SESSION, {A: Given(frames), Q: Given([])}).transfer(LINE, torch.empty(4, 300, device="meta"))


def test_a_tensor_crosses_in_parts(monkeypatch):
    monkeypatch.setattr("sectorch.choreography.run.frames.PART_BYTES", 1000)
    frames = frames_of(VALUE)
    assert len(frames) == 10
    assert torch.equal(received(frames), VALUE)
    for broken in (frames[1:], frames[:-1], [frames[1], frames[0], *frames[2:]], [frames[0], *frames]):
        with pytest.raises(FrameError):
            received(broken)


@pytest.mark.parametrize("count", [1000, *long(10_000)])
def test_mutated_frames_never_pass_for_another_message(count):
    """A frame with flipped, cut or added bytes is refused, or differs from the original in the payload only.

    What changes the payload cannot be noticed here: the transport's TLS is what protects it.
    """
    rng = random.Random(0)
    (frame,) = frames_of(VALUE)
    head = len(frame) - 8 * VALUE.numel()
    link = PeerLink("a peer", lambda *_: None)
    link.open(SESSION)
    refused = 0
    for _ in range(count):
        data = bytearray(frame)
        kind = rng.randrange(3)
        if kind == 0:
            data[rng.randrange(len(data) if rng.random() < 0.2 else head)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data)) :]
        else:
            data += rng.randbytes(rng.randrange(1, 9))
        if bytes(data) == frame:
            continue
        try:
            y = received([bytes(data)])
        except NetworkError:
            refused += 1
            continue
        assert y.shape == VALUE.shape and (y != VALUE).any()
        assert data[:head] == frame[:head] and len(data) == len(frame)
    assert refused > 0.7 * count


def test_a_link_ends_on_garbage_with_a_typed_error():
    link = PeerLink("a peer", lambda *_: None)
    channel = link.open(SESSION)
    link.pump([b"garbage"])
    with pytest.raises(FrameError):
        channel.receive()
    with pytest.raises(FrameError):
        link.send(b"")


@pytest.mark.parametrize("payload", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_requests_must_be_objects(payload):
    link = PeerLink("a peer", lambda *_: None)
    link.pump([pack(Frame(Kind.CONTROL, bytes(16), payload=payload))])
    assert isinstance(link.closed, FrameError)


def test_frames_of_another_session_are_not_delivered():
    link = PeerLink("a peer", lambda *_: None)
    channel = link.open(SESSION)
    link.pump(parts_of(Frame(Kind.DATA, bytes(16)), VALUE))
    with pytest.raises(Exception, match="closed"):
        channel.receive()
    (refusal,) = unpack(link.outbox.take() or b"")
    assert (refusal.kind, refusal.session) == (Kind.ABORT, bytes(16)), "whoever sent it is told"


class Taken:
    """A link that keeps what it is given to send."""

    peer = "S"

    def __init__(self):
        self.sent = []

    def send(self, data, urgent=False):
        self.sent.append(data)


def test_frames_that_nobody_waits_for_travel_together():
    """Dealt frames are held until there are enough, something else goes, the party waits, or the call is over."""
    link = Taken()
    channel = Channel(link, SESSION, Deadline("S", 0.01))
    runtime = PartyRuntime(A, SESSION, {S: channel})
    dealt, small = replace(LINE, phase=Phase.OFFLINE), VALUE[:, :1].contiguous()
    dealt, online = (replace(line, shape=small.shape) for line in (dealt, LINE))
    numbers = lambda data: [frame.number for frame in unpack(data)]

    def deal(count: int) -> None:
        for _ in range(count):
            runtime.transfer(dealt, small)

    deal(2)
    assert not link.sent
    runtime.transfer(online, small)
    assert [numbers(data) for data in link.sent] == [[0, 1, 2]]
    deal(1)
    with pytest.raises(PeerLostError):
        runtime.transfer(replace(online, src=S, dst=A), small.to("meta"))
    assert numbers(link.sent[1]) == [3]
    deal(1)
    runtime.forget(7)
    assert numbers(link.sent[2]) == [4]
    deal(1000)
    assert 1 < len(link.sent) - 3 < 20 and all(len(data) < TOGETHER + 1000 for data in link.sent)
    runtime.forget(7)
    assert [n for data in link.sent for n in numbers(data)] == list(range(1005))


def test_a_guard_is_not_taken_off():
    """A program that has the runtime sets an attribute, or another guard: messages are still refused."""

    class Refused(Exception):
        pass

    def refuse(*_):
        raise Refused

    runtime: Any = PartyRuntime(A, SESSION, {S: Given([])})
    runtime.watch(refuse)
    runtime.guard = None
    with pytest.raises(ArgumentError, match="has a guard"):
        runtime.watch(lambda *_: None)
    with pytest.raises(Refused):
        runtime.transfer(LINE, torch.zeros(4, 300, dtype=torch.int64))
