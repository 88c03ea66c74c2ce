"""This process is one party: it has the party's values alone, and messages cross the network.

Every message is checked against the program before it is used: session, call, place in the sequence, protocol, label,
shape and dtype. If the parties' programs differ, that is an error and not a wrong result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...errors import ArgumentError, FrameError
from ..ledger import observers
from ..net import Party, Phase, Sent
from ..pages import keep_pages
from ..streams import PairKey, PairKeys
from .frames import Frame, Kind, parts_of, tensor_of


class MessageChannel(Protocol):
    """One end of an edge, for one session: frames in order. `send` takes the frames of one message.

    A message with `later` may wait for the next one, or for `flush`. A channel must accept 4 MiB and one more message
    while the peer does not read; otherwise two parties that send to each other at the same time block each other.
    """

    def send(self, parts: Iterable[bytes], later: bool = False) -> None: ...
    def flush(self) -> None: ...
    def receive(self) -> Frame: ...


class PartyRuntime:
    """The runtime of `me`.

    Args:
        session: 16 bytes that the parties agreed on.
        wire: 16 bytes that identify the session in frames; those of the session unless given. A resumed session has new
            ones, so that no frame from before the interruption is accepted.
        channels: for each party that `me` has an edge to.
        alive: called before each message.
    """

    graphs = None

    def __init__(
        self,
        me: Party,
        session: bytes,
        channels: Mapping[Party, MessageChannel],
        alive: Callable[[], None] | None = None,
        wire: bytes | None = None,
    ):
        keep_pages()
        self.me = me
        self.session = session
        self.here = frozenset((me,))
        self._wire = wire or session
        self._channels = channels
        self._alive = alive
        self.keys = PairKeys(session)
        self._guard: Callable[[Sent, torch.Tensor], None] | None = None
        self._sent = {party: itertools.count() for party in channels}
        self._received = {party: itertools.count() for party in channels}

    def watch(self, guard: Callable[[Sent, torch.Tensor], None]) -> None:
        """Call `guard` before this party sends a message; it raises if the message must not be sent.

        Raises:
            ArgumentError: the runtime has a guard; no program takes it off.
        """
        if self._guard is not None:
            raise ArgumentError("this runtime has a guard, which watches its messages to their end")
        self._guard = guard

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        return self.keys.words(pair, label, call, draw, count)

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        if self.me in pair:
            self.keys.install(pair, PairKey(bytes(secret.tolist()), self.session))

    def forget(self, call: int) -> None:
        self._flush()
        self.keys.forget(call)

    def close(self) -> None:
        """Drop the pair keys."""
        self.keys.clear()

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if self._alive is not None:
            self._alive()
        if line.src == self.me:
            self._send(line, value)
        elif line.dst == self.me:
            value = self._receive(line)
        for observer in observers():
            observer.message(line, value)
        return value

    def post(self, line: Sent, value: torch.Tensor) -> None:
        """Send a message together with the next ones, at the latest with `flush_together`."""
        self._send(line, value, later=True)

    def flush_together(self, others: Sequence[PartyRuntime]) -> None:
        """Send the messages posted here and in other sessions, those over one connection in one piece."""
        for party, channel in self._channels.items():
            together: Any = channel  # of a link that several sessions go over (`network/wire/channel.py`)
            together.flush_together([other._channels[party] for other in others])

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        for observer in observers():
            observer.computed(path, owners, phase, seconds)

    def _send(self, line: Sent, value: torch.Tensor, later: bool = False) -> None:
        if self._guard is not None:
            self._guard(line, value)
        number = next(self._sent[line.dst])
        frame = Frame(Kind.DATA, self._wire, line.call, number, line.path, line.label)
        # Dealt material is sent when this party itself waits: a small net deals dozens of small messages.
        self._channels[line.dst].send(parts_of(frame, value), later=later or line.phase == Phase.OFFLINE)

    def _flush(self) -> None:
        for channel in self._channels.values():
            channel.flush()

    def _receive(self, line: Sent) -> torch.Tensor:
        number = next(self._received[line.src])
        self._flush()
        channel, size = self._channels[line.src], line.bytes
        frame = channel.receive()
        self._check(frame, line, number, 0)
        if frame.parts == 1 and len(frame.payload) == size:
            return tensor_of(frame.payload, line.shape, line.dtype)
        out = torch.empty(line.shape, dtype=line.dtype)
        into = out.reshape(-1).view(torch.uint8).numpy().data
        done, part, parts = 0, 0, 1
        while part < parts:
            if part:
                frame = channel.receive()
                self._check(frame, line, number, part)
            count = len(frame.payload)
            if done + count > size:
                raise FrameError(f"{line.src} sent more bytes for {line.path}/{line.label} than its shape holds")
            into[done : done + count] = frame.payload
            done, part, parts = done + count, part + 1, frame.parts
        if done != size:
            raise FrameError(f"{line.src} sent {done} bytes for {line.path}/{line.label}, expected {size}")
        return out

    def _check(self, frame: Frame, line: Sent, number: int, part: int) -> None:
        received = (
            frame.kind, frame.session, frame.call, frame.number, frame.path, frame.label, frame.shape, frame.dtype,
            frame.part,
        )  # fmt: skip
        expected = (
            Kind.DATA, self._wire, line.call, number, line.path, line.label, line.shape, line.dtype, part,
        )  # fmt: skip
        if received != expected:
            names = ("kind", "session", "call", "number", "protocol", "label", "shape", "dtype", "part")
            wrong = ", ".join(n for n, r, e in zip(names, received, expected, strict=True) if r != e)
            error = FrameError(
                f"{line.src} sent a frame that does not belong here (wrong {wrong}): expected {line.path}/{line.label} "
                f"{tuple(line.shape)} in call {line.call}; both sides must run the same version on the same model"
            )
            # The peer is told a shorter text: an expected shape may be that of this party's own input.
            vars(error)["told"] = f"{line.src} sent a frame that does not belong here (wrong {wrong}); see its own log"
            raise error
