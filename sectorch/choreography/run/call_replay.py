"""One party's messages of one call: their digests as they are sent, and the same messages computed a second time.

`CallDigests` hashes what a party sends and receives in a call. `CallReplay` runs some parties' part of a program from
the keys of the call's streams and from the messages that others have sent them, and sends nothing. Both serve a party
that checks what S has computed (`sectorch/decoys.py`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
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
    found.update(message_identity(line.path, line.label, line.dst.name, line.shape, line.dtype))
    found.update(value.cpu().contiguous().numpy().data)


class CallDigests(Observer):
    """Digests (HMAC-SHA-256) of the messages between S and the others in one call, by edge and phase.

    A message is hashed when it crosses, since a later step may overwrite its memory.

    Args:
        keys: of the digests, by the role of S's peer; edges whose key is missing are left out.
        copied: edges whose messages are kept as copies.
    """

    def __init__(
        self, session: bytes, call: int, keys: Mapping[str, bytes], copied: Sequence[tuple[str, str]] = ()
    ):  # fmt: skip
        self._session, self._call = session, call
        self._sums = {
            (*edge, phase): hmac.new(keys[peer], digestmod=hashlib.sha256)
            for edge in EDGES
            for phase in PHASES
            for peer in edge
            if peer in keys
        }
        self.copies: dict[tuple[str, str], list[torch.Tensor]] = {edge: [] for edge in copied}

    def message(self, line: Sent, value: torch.Tensor) -> None:
        if line.call != self._call or line.session != self._session or value.is_meta:
            return
        edge = (line.src.role, line.dst.role)
        found = self._sums.get((*edge, line.phase))
        if found is not None:
            _update(found, line, value)
        if edge in self.copies:
            self.copies[edge].append(value.clone())

    def digest(self, edge: tuple[str, str], phase: Phase) -> bytes:
        """The digest of an edge's messages in a phase; zeros for an edge without a key."""
        found = self._sums.get((*edge, phase))
        return bytes(DIGEST_BYTES) if found is None else found.digest()


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
