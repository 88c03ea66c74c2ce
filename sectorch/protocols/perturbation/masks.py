"""Client masks in Z_2^64 from pairwise keys, so that one client's update is uniform and the sum is exact.

The paper adds real numbers phi_k with sum_k N_k phi_k = 0 (Eq. 27). Real masks do not hide perfectly, rounding keeps
them from cancelling, and mod 2^64 an even N_k has no inverse. So a client encodes its terms times N_k / N in fixed
point, adds PRG(k, j) for each peer j > k and subtracts it for each j < k: over the clients these sum to zero exactly.
Every term has words of its own (the paper's "for simplicity" one phi for all terms would show their differences).

Keys are agreed by X25519; the server passes the public halves on (an active server could put its own in their place:
honest-but-curious, as in the paper). Each round has its own seeds, derived from the pair's secret.

A client that drops out. Without `double`, the round is redone by the others, with new noise and a *new batch*: an
update that arrives late would otherwise give the server two sums whose difference is that client's gradient. With
`double`, a client adds a mask of its own as well; when the server has named the survivors, each of them reveals its own
seed and its pair seeds of this round with the dropped (Bonawitz et al. 2017, without the sharing of seeds: a client
that goes between its update and its opening still costs a redo). A client opens a round once, and never for a set
without itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ...choreography.streams import PairKey, agree, derive, keypair, random_secret
from ...errors import FixedPointRangeError
from ...ring import HEADROOM_BITS, encode
from .errors import MaskError

FRAC_BITS = 40
"""Fraction bits of a masked term: each client's rounding is at most 2^-41, and terms may be as large as 2^22."""


@dataclass(frozen=True)
class Opening:
    """What a survivor reveals: its own seed of the round, and its pair seeds of the round with the dropped."""

    client: int
    round: bytes
    own: bytes = field(repr=False)
    pairs: Mapping[int, bytes] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return len(self.own) + sum(len(seed) for seed in self.pairs.values())


class ClientMasks:
    """One client's end of the pairwise keys.

    Args:
        client: this client's number. double: survive dropouts by opening (see the module).
    """

    def __init__(self, client: int, double: bool = False):
        self.client = client
        self.double = double
        self.cohort: tuple[int, ...] = ()
        self._private, self.public = keypair()
        self._publics: dict[int, bytes] = {}
        self._session = b""
        self._secrets: dict[int, bytes] = {}
        self._own = random_secret()
        self._used: set[bytes] = set()
        self._opened: set[bytes] = set()

    def __repr__(self) -> str:
        return f"ClientMasks({self.client})"

    def __reduce__(self):
        raise MaskError("client masks cannot be copied or pickled: two copies would draw the same words")

    def join(self, publics: Mapping[int, bytes], session: bytes) -> None:
        """Agree a secret with every other client, from the public halves that the server passed on.

        Args:
            publics: client -> 32 bytes; this client's own among them. session: any bytes all clients share.

        Raises:
            MaskError: fewer than two clients, or this one's own key is missing or was changed.
            KeyAgreementError: a key is not a point of the curve.
        """
        if len(publics) < 2:
            raise MaskError(f"masks need two clients or more, got {len(publics)}; send a lone update without masks")
        if publics.get(self.client) != self.public:
            raise MaskError(f"the list of public keys lacks the one of client {self.client}, or holds another for it")
        secrets = {
            peer: agree(self._private, self.public, public, session)
            for peer, public in publics.items()
            if peer != self.client
        }
        self._secrets, self.cohort = secrets, tuple(sorted(publics))
        self._publics, self._session = dict(publics), session

    def secret_state(self) -> dict[str, Any]:
        """Everything as plain values, for a client that is another process each time. Holds the private key: keep it at
        the client, and keep the latest only; an older one would let a round be masked twice."""
        return {
            "client": self.client, "double": self.double, "private": self._private.private_bytes_raw(),
            "own": self._own, "clients": sorted(self._publics),
            "publics": [public for _, public in sorted(self._publics.items())],
            "session": self._session, "used": sorted(self._used), "opened": sorted(self._opened),
        }  # fmt: skip

    @classmethod
    def from_secret_state(cls, state: Mapping[str, Any]) -> ClientMasks:
        """The client whose `secret_state` this was."""
        found = cls(int(state["client"]), bool(state["double"]))
        found._private = X25519PrivateKey.from_private_bytes(state["private"])
        found.public = found._private.public_key().public_bytes_raw()
        found._own, found._used, found._opened = state["own"], set(state["used"]), set(state["opened"])
        if state["clients"]:
            found.join(dict(zip(state["clients"], state["publics"], strict=True)), state["session"])
        return found

    def words(self, round_id: bytes, count: int) -> torch.Tensor:
        """This client's mask of a round, int64 [count]. Over the cohort the masks sum to 0 (but for own masks).

        Raises:
            MaskError: not joined yet, or this round was masked before.
        """
        if not self._secrets:
            raise MaskError(f"client {self.client} has not joined a cohort; call join(publics, session) first")
        if round_id in self._used:
            raise MaskError("this round was masked already; a second update needs a new noisy model")
        self._used.add(round_id)
        mask = torch.zeros(count, dtype=torch.int64)
        for peer, secret in self._secrets.items():
            words = _stream(_round_seed(secret, round_id), count)
            mask = mask + words if peer > self.client else mask - words
        return mask + _stream(_round_seed(self._own, round_id), count) if self.double else mask

    def open(self, round_id: bytes, survivors: Iterable[int]) -> Opening:
        """What the server needs once it named the survivors of a round: 32 bytes, and 32 a dropped client.

        Raises:
            MaskError: this client is not among the survivors, sent nothing, or opened the round before.
        """
        survivors = set(survivors)
        if not self.double:
            raise MaskError("these masks were made without double=True; redo the round without the dropped client")
        if self.client not in survivors or round_id not in self._used:
            raise MaskError(f"client {self.client} only opens a round that it took part in and survived")
        if len(survivors) < 2:
            raise MaskError("opening for a single survivor would show its update; redo the round")
        if round_id in self._opened:
            raise MaskError("this round was opened already; opening it for another set would show one update")
        self._opened.add(round_id)
        dropped = [peer for peer in self.cohort if peer not in survivors]
        pairs = {peer: _round_seed(self._secrets[peer], round_id) for peer in dropped}
        return Opening(self.client, round_id, _round_seed(self._own, round_id), pairs)


def cohort(clients: int, double: bool = False, session: bytes = b"") -> list[ClientMasks]:
    """`clients` ends of pairwise keys, joined, all in this process: for tests and simulation."""
    members = [ClientMasks(client, double) for client in range(clients)]
    publics = {member.client: member.public for member in members}
    for member in members:
        member.join(publics, session)
    return members


def encode_share(values: torch.Tensor, share: float, frac_bits: int) -> torch.Tensor:
    """round(share * v * 2^frac_bits), int64, any shape.

    Raises:
        FixedPointRangeError: a value is 2^(62 - frac_bits) or more. Below it the weighted mean fits the ring, whatever
            the others send, because the shares sum to one.
    """
    limit = 2.0 ** (HEADROOM_BITS - frac_bits)
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest < limit:
        raise FixedPointRangeError(
            f"a term reaches magnitude {largest:.6g}, but with {frac_bits} fraction bits the range is below {limit:g}; "
            f"use Scheme(..., frac_bits=...) with fewer, or less noise"
        )
    return encode(values.double() * share, frac_bits).cpu()


def unmask(total: torch.Tensor, openings: Iterable[Opening], count: int) -> torch.Tensor:
    """The server's side of `open`: the sum of the survivors' updates less the masks that did not cancel."""
    total = total.clone()
    for opening in openings:
        total -= _stream(opening.own, count)
        for peer, seed in opening.pairs.items():
            words = _stream(seed, count)
            total = total - words if peer > opening.client else total + words
    return total


def _round_seed(secret: bytes, round_id: bytes) -> bytes:
    return derive(secret, round_id, "perturbation/round seed", 32)


def _stream(seed: bytes, count: int) -> torch.Tensor:
    return PairKey(seed, b"perturbation").words("mask", 0, 0, count)
