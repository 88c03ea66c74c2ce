"""Messages of one call: their digests as they are sent, and the same messages computed a second time.

A dealer has no input and no randomness of its own: its messages are a function of the streams that it shares with the
other parties. A party that is given the keys of these streams for one call runs the dealer's part of the program
(`DealerReplay`), and compares the digest of the results with that of the messages that came (`DealtDigest`).

`CallDigests` hashes what a party sends and receives in a call. `CallReplay` runs some parties' part of a program from
the keys of the call's streams and from the messages that others have sent them, and sends nothing. Both serve a party
that checks what S has computed (`sectorch/decoys.py`).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ...errors import ArgumentError
from ..ledger import Observer, sole_observer
from ..net import Compute, Draw, Party, Phase, Sent
from ..program.projection import DealerSplit
from ..program.trace import Program, Slot
from ..streams import PairKeys

DIGEST_BYTES = 32


class DealtDigest(Observer):
    """The digest (HMAC-SHA-256) of the messages that a dealer sends ahead of a query, with their places.

    Args:
        key: without it, the digest shows nothing of what was dealt.
    """

    def __init__(self, dealer: Party, key: bytes):
        self._dealer = dealer
        self._sum = hmac.new(key, digestmod=hashlib.sha256)
        self._waiting: list[tuple[bytes, torch.Tensor]] = []
        self._bytes = 0

    def message(self, line: Sent, value: torch.Tensor) -> None:
        if line.src != self._dealer or line.phase == Phase.ONLINE or value.is_meta:
            return
        self._waiting.append((message_identity(line.path, line.label, line.dst.name, line.shape, line.dtype), value))
        self._bytes += line.bytes
        if self._bytes > 1 << 20:
            self._hash_waiting()

    def digest(self) -> bytes:
        self._hash_waiting()
        return self._sum.digest()

    def _hash_waiting(self) -> None:
        """Hash the waiting messages in one run, which takes half the time for small ones."""
        for about, value in self._waiting:
            self._sum.update(about)
            self._sum.update(value.cpu().contiguous().numpy().data)
        self._waiting.clear()
        self._bytes = 0


@functools.lru_cache(maxsize=1 << 14)
def message_identity(path: str, label: str, dst: str, shape: torch.Size, dtype: torch.dtype) -> bytes:
    """The identity of a message as bytes, after their length, so that the hashed text is unambiguous."""
    about = repr((path, label, dst, tuple(shape), str(dtype))).encode()
    return len(about).to_bytes(8, "big") + about


class DealerReplay:
    """The runtime of a dealer that sends nothing: `replay` gives the digest of the messages that it would send.

    Args:
        dealer: the party whose part is run.
        session: the session's name.
        keys: the keys of the dealer's pairs from which the part draws.
        device: the device of the tensors.
    """

    graphs = None

    def __init__(self, dealer: Party, session: bytes, keys: PairKeys, device: torch.device):
        self.session, self.here, self.keys = session, frozenset((dealer,)), keys
        self._dealer, self._device = dealer, device
        self._dealt: DealtDigest | None = None

    def replay(
        self, split: DealerSplit, call: int, setup: Mapping[Slot, Any], key: bytes
    ) -> tuple[bytes, dict[Slot, Any]]:
        """The digest of a call, and the values that the dealer keeps of it.

        Args:
            setup: the dealer's values of the setup.
            key: the key of the digest.
        """
        self._dealt = DealtDigest(self._dealer, key)
        with sole_observer(Observer()):
            begun = split.begin(self, call, setup)
        return self._dealt.digest(), begun

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        return self.keys.words(pair, label, call, draw, count).to(self._device)

    def draw_all(self, draws: Sequence[Draw], call: int) -> list[torch.Tensor]:
        counts = [draw.words for draw in draws]
        words, at = torch.empty(sum(counts), dtype=torch.int64, device="cpu"), 0
        out = words.numpy().data.cast("B") if len(words) else memoryview(b"")
        for draw, count in zip(draws, counts, strict=True):
            self.keys.fill(draw.owners, draw.name, call, draw.number, out[at : at + 8 * count])
            at += 8 * count
        return [draw.of(drawn) for draw, drawn in zip(draws, words.to(self._device).split(counts), strict=True)]

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if self._dealt is not None:
            self._dealt.message(line, value)
        return value

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        raise ArgumentError("a program that is rehearsed agrees no keys")

    def forget(self, call: int) -> None:
        self.keys.forget(call)

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        pass


def check_recomputable(program: Program, dealer: Party) -> None:
    """Raise ArgumentError unless the dealer's messages ahead of the query are a function of its streams."""
    who, ahead = dealer.name, "ahead of the query, so that nobody can recompute what it deals"
    for node in (*program.setup, *program.call):
        step = node.step
        if isinstance(step, Compute) and step.random and dealer in step.owners:
            raise ArgumentError(f"{who} draws randomness of its own in '{step.path}', which nobody can recompute")
    inputs = [i.name for i in program.inputs if i.party == dealer and i.phase != Phase.ONLINE]
    if inputs:
        raise ArgumentError(f"{who} brings '{inputs[0]}' {ahead}")
    for m in program.messages:
        if m.dst == dealer and m.phase != Phase.ONLINE:
            raise ArgumentError(f"{who} is sent '{m.path}/{m.label}' {ahead}")
        if m.src == dealer and m.phase == Phase.ONLINE and m.protocol != "share":
            raise ArgumentError(f"{who} sends '{m.path}/{m.label}' after the query, which is no dealing")


EDGES = (("Q", "S"), ("S", "Q"), ("A", "S"), ("S", "A"))
"""Senders and receivers of S's messages, by role."""
PHASES = (Phase.OFFLINE, Phase.ONLINE)


def message_digest(key: bytes, line: Any, value: torch.Tensor) -> bytes:
    """HMAC-SHA-256 of one message, with its place. `line`: its `Header`."""
    found = hmac.new(key, digestmod=hashlib.sha256)
    _update(found, line, value)
    return found.digest()


def _update(found: hmac.HMAC, line: Any, value: torch.Tensor) -> None:
    found.update(_identity(line.path, line.label, line.dst.name, line.shape, line.dtype))
    found.update(value.cpu().contiguous().numpy().data)


_identity = functools.lru_cache(maxsize=8192)(message_identity)
"""Of the headers of a process's programs, which come again in every call."""
LARGE = 1 << 20
"""Bytes from which a message is hashed in another thread, while the call goes on. To hand over a smaller one costs the
processor more than it saves: a copy, and two threads that wait for the interpreter."""


@functools.cache
def _hashing(pid: int) -> ThreadPoolExecutor:
    """The threads that hash large messages: a hash of many bytes leaves the interpreter to others. `pid`: since a fork
    has no threads."""
    return ThreadPoolExecutor(2, "hashing messages")


def _content_digest(value: torch.Tensor) -> bytes:
    return hashlib.sha256(value.numpy().data).digest()


class CallDigests(Observer):
    """Digests of the messages between S and the others in one call, by edge and phase.

    A digest is the HMAC-SHA-256 of each message's place and SHA-256, in their order. A message is hashed when it
    crosses, or copied and hashed by another thread, since a later step may overwrite its memory.

    Args:
        keys: of the digests, by the role of S's peer; edges whose key is missing are left out.
        copied: edges whose messages are kept as copies.
    """

    def __init__(
        self, session: bytes, call: int, keys: Mapping[str, bytes], copied: Sequence[tuple[str, str]] = ()
    ):  # fmt: skip
        self._session, self._call = session, call
        self._keys = {edge: keys[peer] for edge in EDGES for peer in edge if peer in keys}
        self._messages: dict[tuple[str, str, Phase], list[tuple[bytes, bytes | Future[bytes]]]] = {
            (*edge, phase): [] for edge in self._keys for phase in PHASES
        }
        self.copies: dict[tuple[str, str], list[torch.Tensor]] = {edge: [] for edge in copied}

    def message(self, line: Sent, value: torch.Tensor) -> None:
        if line.call != self._call or line.session != self._session or value.is_meta:
            return
        edge = (line.src.role, line.dst.role)
        found, copy = self._messages.get((*edge, line.phase)), None
        if edge in self.copies:
            copy = value.clone()
            self.copies[edge].append(copy)
        if found is not None:
            content = (value if copy is None else copy).cpu().contiguous()
            if content.nbytes < LARGE:
                digest = _content_digest(content)
            else:
                content = content.clone() if content is value else content
                digest = _hashing(os.getpid()).submit(_content_digest, content)
            found.append((_identity(line.path, line.label, line.dst.name, line.shape, line.dtype), digest))

    def digest(self, edge: tuple[str, str], phase: Phase) -> bytes:
        """The digest of an edge's messages in a phase; zeros for an edge without a key."""
        found = self._messages.get((*edge, phase))
        if found is None:
            return bytes(DIGEST_BYTES)
        digest = hmac.new(self._keys[edge], digestmod=hashlib.sha256)
        for identity, content in found:
            digest.update(identity + (content if isinstance(content, bytes) else content.result()))
        return digest.digest()


class CallReplay:
    """The runtime of parties that repeat their part of one call, and send nothing.

    Args:
        here: the parties.
        session: the session's name.
        keys: of the streams that they draw from.
        setup, messages: what others sent to these parties, in the program's order: in the setup, and in the call.
    """

    graphs = None

    def __init__(
        self, here: frozenset[Party], session: bytes, keys: PairKeys, setup: Sequence[torch.Tensor],
        messages: Sequence[torch.Tensor], device: torch.device | None = None,
    ):  # fmt: skip
        self.here, self.session, self.keys = here, session, keys
        self._device = device or torch.device("cpu")
        self._setup, self._messages = iter(setup), iter(messages)
        self.observer = Observer()
        """Is told of the call's messages."""

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        return self.keys.words(pair, label, call, draw, count).to(self._device)

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if line.dst in self.here and line.src not in self.here:
            # A clone, since a step may overwrite it.
            came = next(self._setup if line.phase == Phase.SETUP else self._messages, None)
            if came is None or came.shape != line.shape or came.dtype != line.dtype:
                raise ArgumentError("the messages that were kept of a call are not those of its program")
            value = came.to(self._device).clone()
        if line.phase != Phase.SETUP:
            self.observer.message(line, value)
        return value

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        raise ArgumentError("a call that is repeated agrees no keys")

    def forget(self, call: int) -> None:
        self.keys.forget(call)

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        pass
