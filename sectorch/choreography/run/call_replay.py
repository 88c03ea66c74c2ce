"""One party's messages of one call: their digests as they are sent, and the same messages computed a second time.

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
from ..ledger import Observer
from ..net import Party, Phase, Sent
from ..streams import PairKeys
from .dealer_replay import DIGEST_BYTES, message_identity

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
LARGE = 1 << 18
"""Bytes from which a message is hashed in another thread, while the call goes on."""


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
