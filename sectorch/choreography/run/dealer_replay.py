"""Recomputing a dealer's messages, and the digest of those that it sent.

A dealer has no input and no randomness of its own: its messages are a function of the streams that it shares with the
other parties. A party that is given the keys of these streams for one call runs the dealer's part of the program, and
compares the digest of the results with that of the messages that came.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Mapping, Sequence
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
