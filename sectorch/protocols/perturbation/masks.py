"""Client masks in Z_2^64 from pairwise keys, so that one client's update is uniform and the sum is exact.

The paper adds real numbers phi_k with sum_k N_k phi_k = 0 (Eq. 27). Real masks do not hide perfectly, rounding keeps
them from cancelling, and mod 2^64 an even N_k has no inverse. So a client encodes its terms times N_k / N in fixed
point, adds PRG(k, j) for each peer j > k and subtracts it for each j < k: over the clients these sum to zero exactly.
Every term has words of its own (the paper's "for simplicity" one phi for all terms would show their differences).
With many clients each may share masks with a few only (`graph.py`).

A round's words depend on its name, not on what is masked, and the name of the next round is known (`following`). So a
client draws them ahead, while it waits for the next model (`prepare`), and a step only adds its terms to them.

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

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ...choreography.streams import SECRET_BYTES, KeyStream, agree, derive, keypair, random_secret
from ...errors import FixedPointRangeError
from ...nn.pullback import Spare
from ...ring import HEADROOM_BITS
from .errors import MaskError

# Who shares a mask with whom: everybody with everybody, or a random graph in which each client has a few neighbours.
#
# With K - 1 neighbours a client draws K - 1 streams a round. With d neighbours it draws d, and what hides it is this:
# the server and those who collude with it learn the sum of the clients of each *connected part* that is left of the
# graph when the colluding and the dropped are taken away. While one part is left that is the sum over all, as in the
# complete graph. The graph is d-regular, so d of them can always cut one client off: its neighbours. Whether fewer can
# is a property of the graph drawn, its connectivity, which `attacks.fewest_that_cut` finds; nearly every random
# d-regular graph has d.
#
# The graph follows from the session's public name, so whoever colludes must not have chosen that after seeing who is
# where. Source: Bell, Bonawitz, Gascon, Lepoint, Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic
# Overhead", CCS 2020, section 3.


Graph = Mapping[int, tuple[int, ...]]
_SWITCHES = 20
"""Switches of two edges for each edge of the graph."""


def neighbours(clients: Sequence[int], degree: int | None, session: bytes) -> Graph:
    """client -> those it shares a mask with, in order.

    Args:
        degree: how many; even. None, or as many as there are others: all of them. session: public bytes that the
            graph follows from.

    A ring in which each has degree / 2 on either side, whose edges are then switched at random: (a, b), (c, d) become
    (a, d), (c, b) where these are no edges yet. The degrees stay. Drawn until it is connected.

    Raises:
        MaskError: a degree that is odd or below 2.
    """
    clients = sorted(clients)
    if degree is not None and (degree < 2 or degree % 2):
        raise MaskError(f"each client has an even number of neighbours, 2 or more, got {degree}")
    count = len(clients)
    if degree is None or degree >= count - 1:
        return {client: tuple(other for other in clients if other != client) for client in clients}
    stream = KeyStream(bytes(SECRET_BYTES), session, "perturbation/graph")
    while True:
        near = _switched(count, degree, stream)
        if len(parts({client: tuple(others) for client, others in enumerate(near)})) == 1:
            return {clients[i]: tuple(clients[j] for j in sorted(others)) for i, others in enumerate(near)}


def _switched(count: int, degree: int, stream: KeyStream) -> list[set[int]]:
    edges = [(i, (i + step) % count) for i in range(count) for step in range(1, degree // 2 + 1)]
    near = [{(i + step) % count for step in range(-degree // 2, degree // 2 + 1) if step} for i in range(count)]
    drawn = np.empty(2 * _SWITCHES * len(edges), dtype=np.uint64)
    stream.fill(drawn.data.cast("B"))
    for first, second in (drawn % np.uint64(2 * len(edges))).reshape(-1, 2).tolist():
        (a, b), (c, d) = edges[first // 2], edges[second // 2]
        if first % 2:
            a, b = b, a
        if len({a, b, c, d}) < 4 or d in near[a] or b in near[c]:
            continue
        edges[first // 2], edges[second // 2] = (a, d), (c, b)
        for x, y, z in ((a, b, d), (b, a, c), (c, d, b), (d, c, a)):
            near[x].remove(y)
            near[x].add(z)
    return near


def parts(graph: Graph, without: Iterable[int] = ()) -> list[list[int]]:
    """The connected parts that are left without some clients: the sums that the server and these can see."""
    left, found = set(graph).difference(without), []
    while left:
        part, waiting = [], [left.pop()]
        while waiting:
            part.append(waiting.pop())
            near = left.intersection(graph[part[-1]])
            left -= near
            waiting += near
        found.append(sorted(part))
    return sorted(found)


FRAC_BITS = 40
"""Fraction bits of a masked term: each client's rounding is at most 2^-41, and terms may be as large as 2^22."""

SPAN = 1 << 14
"""Words drawn or added up at a time: they stay in the second-level cache."""


@functools.cache
def loops() -> ModuleType:
    """The compiled loops; numba takes half a second to load."""
    return importlib.import_module("sectorch.protocols.perturbation.loops")


@dataclass(frozen=True)
class Opening:
    """What a survivor reveals: its own seed of the round, and its pair seeds of the round with the dropped that it
    shared a mask with."""

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
        degree: how many others it shares masks with, the same for all; None for every other one. See `graph.py`.

    Attributes:
        cohort: all clients, in order. peers: those it shares a mask with.
    """

    def __init__(self, client: int, double: bool = False, degree: int | None = None):
        self.client = client
        self.double = double
        self.degree = degree
        self.cohort: tuple[int, ...] = ()
        self.peers: tuple[int, ...] = ()
        self._ahead: tuple[bytes, torch.Tensor] | None = None
        self._spare = Spare()
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
        """Agree a secret with every client of its graph, from the public halves that the server passed on.

        Args:
            publics: client -> 32 bytes; this client's own among them. session: any bytes all clients share.

        Raises:
            MaskError: fewer than two clients, this one's own key is missing or was changed, or no such degree.
            KeyAgreementError: a key is not a point of the curve.
        """
        if len(publics) < 2:
            raise MaskError(f"masks need two clients or more, got {len(publics)}; send a lone update without masks")
        if publics.get(self.client) != self.public:
            raise MaskError(f"the list of public keys lacks the one of client {self.client}, or holds another for it")
        peers = neighbours(list(publics), self.degree, session)[self.client]
        secrets = {peer: agree(self._private, self.public, publics[peer], session) for peer in peers}
        self._secrets, self.cohort, self.peers, self._ahead = secrets, tuple(sorted(publics)), peers, None
        self._publics, self._session = dict(publics), session

    def secret_state(self) -> dict[str, Any]:
        """Everything but what was drawn ahead as plain values, for a client that is another process each time. Holds
        the private key: keep it at the client, and keep the latest only; an older one would let a round be masked
        twice."""
        return {
            "client": self.client, "double": self.double, "degree": self.degree or 0,
            "private": self._private.private_bytes_raw(),
            "own": self._own, "clients": sorted(self._publics),
            "publics": [public for _, public in sorted(self._publics.items())],
            "session": self._session, "used": sorted(self._used), "opened": sorted(self._opened),
        }  # fmt: skip

    @classmethod
    def from_secret_state(cls, state: Mapping[str, Any]) -> ClientMasks:
        """The client whose `secret_state` this was."""
        found = cls(int(state["client"]), bool(state["double"]), int(state["degree"]) or None)
        found._private = X25519PrivateKey.from_private_bytes(state["private"])
        found.public = found._private.public_key().public_bytes_raw()
        found._own, found._used, found._opened = state["own"], set(state["used"]), set(state["opened"])
        if state["clients"]:
            found.join(dict(zip(state["clients"], state["publics"], strict=True)), state["session"])
        return found

    def prepare(self, round_id: bytes, count: int) -> None:
        """Draw the mask of a round ahead. It is used if that round comes, and else thrown away.

        Raises:
            MaskError: not joined yet, or the round was masked before.
        """
        self._check(round_id)
        self._ahead = None  # Its memory first: two masks are not held at once.
        self._ahead = round_id, self._drawn(round_id, count)

    def words(self, round_id: bytes, count: int) -> torch.Tensor:
        """This client's mask of a round, int64 [count], for the caller to keep. Over the cohort the masks sum to 0 (but
        for own masks).

        Raises:
            MaskError: not joined yet, or this round was masked before.
        """
        self._check(round_id)
        self._used.add(round_id)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == round_id and len(ahead[1]) == count:
            return ahead[1]
        return self._drawn(round_id, count)

    def _check(self, round_id: bytes) -> None:
        if not self._secrets:
            raise MaskError(f"client {self.client} has not joined a cohort; call join(publics, session) first")
        if round_id in self._used:
            raise MaskError("this round was masked already; a second update needs a new noisy model")

    def _drawn(self, round_id: bytes, count: int) -> torch.Tensor:
        streams = [(peer > self.client, _stream(_round_seed(key, round_id))) for peer, key in self._secrets.items()]
        if self.double:
            streams.append((True, _stream(_round_seed(self._own, round_id))))
        mask = self._spare.take((1, count), torch.empty(0, dtype=torch.int64))[0]
        words = mask.numpy()
        for low in range(0, count, SPAN):
            piece = words[low : low + SPAN]
            piece.fill(0)
            pour(streams, piece)
        return mask

    def open(self, round_id: bytes, survivors: Iterable[int]) -> Opening:
        """What the server needs once it named the survivors of a round: 32 bytes, and 32 a dropped client of its graph.

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
        dropped = [peer for peer in self.peers if peer not in survivors]
        pairs = {peer: _round_seed(self._secrets[peer], round_id) for peer in dropped}
        return Opening(self.client, round_id, _round_seed(self._own, round_id), pairs)


def cohort(clients: int, double: bool = False, session: bytes = b"", degree: int | None = None) -> list[ClientMasks]:
    """`clients` ends of pairwise keys, joined, all in this process: for tests and simulation."""
    members = [ClientMasks(client, double, degree) for client in range(clients)]
    publics = {member.client: member.public for member in members}
    for member in members:
        member.join(publics, session)
    return members


def following(round_id: bytes) -> bytes:
    """The name of the round after this one: the number that the name is, and one."""
    number = int.from_bytes(round_id, "big") + 1
    return (number % (1 << 8 * len(round_id))).to_bytes(len(round_id), "big")


def check_range(values: torch.Tensor, frac_bits: int) -> None:
    """Raise unless the terms, flat, fit the ring.

    Raises:
        FixedPointRangeError: a value is 2^(62 - frac_bits) or more. Below it the weighted mean fits the ring, whatever
            the others send, because the shares sum to one.
    """
    limit = 2.0 ** (HEADROOM_BITS - frac_bits)
    if float(torch.dot(values, values)) < limit**2:  # The fast way: no value is larger than their norm.
        return
    largest = max(abs(float(end)) for end in values.aminmax())
    if not largest < limit:
        raise FixedPointRangeError(
            f"a term reaches magnitude {largest:.6g}, but with {frac_bits} fraction bits the range is below {limit:g}; "
            f"use Scheme(..., frac_bits=...) with fewer, or less noise"
        )


def add_encoded(words: torch.Tensor, values: torch.Tensor, share: float, frac_bits: int) -> None:
    """words += round(share * v * 2^frac_bits), in place; flat, and within `check_range`."""
    values = values.detach().cpu().contiguous()
    loops().add_encoded(words.numpy(), values.numpy(), share * 2.0**frac_bits)


def left_over(openings: Iterable[Opening]) -> list[tuple[bool, KeyStream]]:
    """What takes off the survivors' sum the masks that did not cancel, for `pour`: the server's side of `open`."""
    found = []
    for opening in openings:
        found.append((False, _stream(opening.own)))
        found += [(peer < opening.client, _stream(seed)) for peer, seed in opening.pairs.items()]
    return found


def pour(streams: Iterable[tuple[bool, KeyStream]], into: np.ndarray) -> None:
    """Add the next words of each stream to `into`, or subtract them where its mark is false."""
    drawn = np.empty(len(into), dtype=np.int64)
    for added, stream in streams:
        stream.fill(drawn.data.cast("B"))
        (np.add if added else np.subtract)(into, drawn, out=into)


def _round_seed(secret: bytes, round_id: bytes) -> bytes:
    return derive(secret, round_id, "perturbation/round seed", 32)


def _stream(seed: bytes) -> KeyStream:
    return KeyStream(seed, b"perturbation", "mask")
