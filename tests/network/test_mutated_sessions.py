"""Frames that are changed in the middle of real sessions: a typed error in time or the right result, at each role.

`test_network_faults.py` feeds such frames to a party that is in no session, or in one that has just been opened.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import long
from network_world import Trio, resident, until

import sectorch
from sectorch import errors
from sectorch.choreography.run.frames import Frame, Kind, pack, unpack
from sectorch.network.wire.channel import PeerLink

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
IN_TIME = 60.0
"""A bound against hanging for ever; each wait of these parties has a limit of `PATIENCE`."""
PATIENCE = 3.0
RATES = {"Q>S": 4, "S>Q": 4, "A>S": 24, "S>A": 24}
"""One of so many frames is changed, about one in a query."""
LENGTHS = slice(38, 46)
"""Where a header has its dimensions and lengths."""
WAYS = ("bit", "cut", "longer", "doubled", "swapped", "length", "kind", "another session's", "lost", "number")


class Changing:
    """What a party sends over some links, one frame in `rate` changed; the payload of a message never is, which only
    TLS protects."""

    def __init__(self, rng: random.Random, rate: int):
        self.rng, self.rate, self.on = rng, rate, False
        self.old: list[Frame] = []
        self.done: Counter[str] = Counter()
        self._held: bytes | None = None
        self._lock = threading.Lock()

    def over(self, link: PeerLink) -> None:
        """From now on over this link."""
        if getattr(link, "changed", None) is None:
            link.changed, inner = self, link.send  # type: ignore[attr-defined]

            def send(data: bytes, urgent: bool = False) -> None:
                with self._lock:
                    pieces = self._changed(data)
                for piece in pieces:
                    inner(piece, urgent)

            link.send = send  # type: ignore[method-assign]

    def _changed(self, data: bytes) -> list[bytes]:
        frames = list(unpack(data)) if data else []
        held, self._held = self._held, None
        after = [held] if held else []
        if not frames or not self.on:
            self.old = (self.old + frames)[-200:]
            return [data, *after]
        if self.rng.randrange(self.rate):
            return [data, *after]
        at = self.rng.randrange(len(frames))
        way = self.rng.choice(WAYS)
        self.done[way] += 1
        if way == "swapped":  # with whatever goes next
            self._held = data
            return after
        packed = [pack(frame) for frame in frames]
        packed[at] = self._made(way, frames[at], packed[at])
        return [b"".join(packed), *after]

    def _made(self, way: str, frame: Frame, packed: bytes) -> bytes:
        rng, data = self.rng, bytearray(packed)
        head = len(packed) - (len(frame.payload) if frame.kind == Kind.DATA else 0)
        if way == "cut":
            return packed[: rng.randrange(1, len(packed))]
        if way == "longer":
            return packed + rng.randbytes(rng.randrange(1, 60))
        if way == "doubled":
            return packed + packed
        if way == "lost":
            return b""
        if way == "another session's":
            other = rng.choice(self.old)
            return pack(replace(other, session=frame.session) if rng.randrange(2) else other)
        if way == "kind":
            return pack(replace(frame, kind=rng.choice(list(Kind))))
        if way == "number":
            more = rng.choice([1, 2, 255, 2**31])
            field = rng.choice(["call", "number", "part", "parts"])
            return pack(replace(frame, **{field: (getattr(frame, field) + more) % 2**32}))
        place = rng.randrange(LENGTHS.start, LENGTHS.stop) if way == "length" else rng.randrange(head)
        data[place] ^= 1 << rng.randrange(8)
        return bytes(data)


def links(trio: Trio, direction: str) -> list[PeerLink]:
    """Over which a direction's frames are sent."""
    sender, receiver = direction.split(">")
    if sender != "S":
        return trio.links(sender)
    name = {"Q": "alice", "A": "hospital-b"}[receiver]
    return [link for link in trio.server._links if link.peer == name and link.closed is None]


def mended(trio: Trio) -> None:
    """An answering party whose connection has ended comes back; Q's dials again by itself."""
    if trio.party.connection.link.closed is not None:
        trio.party.close()
        trio.start_answering()


@pytest.mark.parametrize("direction", list(RATES))
@pytest.mark.parametrize("count", [2, *long(75)])
def test_frames_that_change_in_a_session(pki, small_model, tmp_path, direction, count):
    sectorch.secure(small_model)(X)  # its loops are compiled then, which takes longer than anybody's patience here
    trio = Trio(pki[1], small_model, X, tmp_path, PATIENCE)
    changing = Changing(random.Random(direction), RATES[direction])
    remote = trio.connection.model("hospital-b")
    for link in links(trio, direction):
        changing.over(link)
    expected, outcomes, slowest, baseline, grown = remote(X), Counter(), 0.0, 0, 0
    remote(X)
    assert changing.old
    while changing.done.total() < count:
        baseline = baseline or (resident() if changing.done.total() > count // 3 else 0)
        mended(trio)
        for link in links(trio, direction):
            changing.over(link)
        changing.on, start = True, time.monotonic()
        try:
            y = remote(X)
        except errors.SectorchError as error:
            outcomes[type(error).__name__] += 1
            assert "Error: at" not in str(error) or "own log says more" not in str(error), error
        else:
            outcomes["right"] += 1
            assert torch.equal(y, expected), "a wrong result"
        changing.on = False
        slowest = max(slowest, time.monotonic() - start)
    gc.collect()
    grown = resident() - baseline if baseline else 0
    print(f"{direction}: {dict(changing.done)}: {dict(outcomes)}, slowest {slowest:.1f} s, grown by {grown >> 20} MiB")
    assert slowest < IN_TIME
    assert grown < 100 << 20
    mended(trio)
    assert until(lambda: _right(remote, expected), IN_TIME)
    remote.close()
    assert until(trio.idle, IN_TIME)
    trio.close()


def _right(remote, expected: torch.Tensor) -> bool:
    try:
        return torch.equal(remote(X), expected)
    except errors.SectorchError:  # what was on its way still
        return False
