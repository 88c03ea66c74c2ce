"""The sum of the clients' tensors at a server that sees no summand: pairwise masks, exact, with drop-outs.

    total, clients = sectorch.secure_sum({"C0": x0, "C1": x1, "C2": x2}, session)

A client encodes its tensor in fixed point, adds PRG(k, j) for each peer j > k and subtracts it for each j < k, in
Z_2^64: over the clients these masks sum to zero exactly, and one client's message alone is uniform. Keys are agreed by
X25519; the server passes the public halves on. Each sum has seeds of its own, derived from the pair's secret and the
sum's name, which the server gives; the name of the next is known, so a client can draw its mask ahead (`prepare`). A
client masks under a name once.

**Drop-outs.** With `drop_outs=False` a missing client leaves the sum hidden: `DroppedClientError` at the server. The
others then sum *new* values, since an update that arrives late would otherwise give the server two sums whose
difference is that client's. With `drop_outs=True` a client adds a mask of its own as well. When the server has named
the survivors, each of them reveals its own seed of this sum and its pair seeds with the dropped (Bonawitz et al. 2017,
without the sharing of seeds: a client that goes between its tensor and its opening costs a new sum). A late tensor
stays hidden under its client's own mask. A client opens a sum once, and never for a set without itself or of fewer than
`least`.

**What each party learns.** The server: the sum over the survivors, and who survived. It learns one client's tensor
where all the others collude with it, or where `degree` neighbours do (below). A client: the others' public keys, and
who survived. Parties are honest but curious: an active server could put keys of its own in the clients' place, or name
other survivors to each.

**Who shares a mask with whom.** Everybody with everybody, or a random graph in which each has `degree` neighbours.
With K - 1 neighbours a client draws K - 1 streams, with d it draws d. The server and those who collude with it then
learn the sum of each *connected part* that is left of the graph when the colluding and the dropped are taken away. The
graph is d-regular, so d of them can always cut one client off. Whether fewer can is its connectivity, which
`tests/test_secure_sum.py` computes; nearly every random d-regular graph has d. The graph follows from a name that the
server draws and sends with the keys: whoever colludes must not have been chosen after that.

Noise that makes a sum differentially private, in shares of the clients: `sectorch.dp.GaussianShares`.

Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, 4; Bell et
al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020, 3.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from .choreography import Located, Message, Net, Roles, protocol, with_shapes
from .choreography.pages import Spare
from .choreography.streams import SECRET_BYTES, KeyStream, agree, derive, keypair, random_secret
from .errors import (
    ArgumentError,
    DroppedClientError,
    DtypeError,
    FixedPointRangeError,
    MaskError,
    MisplacedValueError,
    NetworkError,
    ShapeError,
)
from .ring import HEADROOM_BITS, check_encodable
from .session import Session

Graph = Mapping[int, tuple[int, ...]]
_SWITCHES = 20
"""Switches of two edges for each edge of the graph."""


class NoiseCarriers(int):
    """How many clients of a sum carry noise that makes it private: the fewest for whom it is opened."""


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
    stream = KeyStream(bytes(SECRET_BYTES), session, "secure_sum/graph")
    while True:
        near = _switched(count, degree, stream)
        if len(parts({client: tuple(others) for client, others in enumerate(near)})) == 1:
            return {clients[i]: tuple(clients[j] for j in sorted(others)) for i, others in enumerate(near)}


def _switched(count: int, degree: int, stream: KeyStream) -> list[set[int]]:
    edges = [(i, (i + step) % count) for i in range(count) for step in range(1, degree // 2 + 1)]
    near = [{(i + step) % count for step in range(-degree // 2, degree // 2 + 1) if step} for i in range(count)]
    drawn = np.empty(2 * _SWITCHES * len(edges), dtype=np.uint64)
    stream.fill(drawn.data.cast("B"))
    # A draw is an edge and, in its lowest bit, a direction, so that both ways to switch two edges occur.
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
    return importlib.import_module("sectorch.ring.maskloops")


@dataclass(frozen=True)
class MaskOpening:
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
        client: this client's number. double: survive drop-outs by opening (see the module).
        degree: how many others it shares masks with, the same for all; None for every other one. See above.

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

    def open(self, round_id: bytes, survivors: Iterable[int], least: int = 2) -> MaskOpening:
        """What the server needs once it named the survivors of a round: 32 bytes, and 32 a dropped client of its graph.

        Raises:
            MaskError: this client is not among the survivors, sent nothing, or opened the round before.
        """
        survivors = set(survivors)
        if not self.double:
            raise MaskError("these masks were made without double=True; redo the round without the dropped client")
        # The survivors are the server's word, which the client does not trust: a round it was not in, a list of few
        # survivors or a second list for one round would show more than one sum over enough clients.
        if self.client not in survivors or round_id not in self._used:
            raise MaskError(f"client {self.client} only opens a round that it took part in and survived")
        if len(survivors) < least:
            few = "a single survivor" if len(survivors) == 1 else f"{len(survivors)} survivors"
            raise MaskError(f"opening for {few} would show too much of an update; redo the round")
        if round_id in self._opened:
            raise MaskError("this round was opened already; opening it for another set would show one update")
        self._opened.add(round_id)
        dropped = [peer for peer in self.peers if peer not in survivors]
        pairs = {peer: _round_seed(self._secrets[peer], round_id) for peer in dropped}
        return MaskOpening(self.client, round_id, _round_seed(self._own, round_id), pairs)


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


def check_range(values: torch.Tensor, frac_bits: int, limit: float) -> None:
    """Raise unless the values, flat, are below a limit.

    Raises:
        FixedPointRangeError: one is not. Below it the sum fits the ring, whatever the others send.
    """
    if values.is_floating_point() and float(torch.dot(values, values)) < limit**2:  # No value is above their norm.
        return
    largest = max(abs(float(end)) for end in values.aminmax()) if len(values) else 0.0
    if not largest < limit:
        raise FixedPointRangeError(
            f"a term reaches magnitude {largest:.6g}, but with {frac_bits} fraction bits the range is below {limit:g}; "
            f"use fewer (frac_bits=), or smaller numbers"
        )


def add_encoded(words: torch.Tensor, values: torch.Tensor, share: float, frac_bits: int) -> None:
    """words += round(share * v * 2^frac_bits), in place; flat, and within `check_range`."""
    values = values.detach().cpu().contiguous()
    if not values.is_floating_point():
        words += values.long() << frac_bits  # of a share of 1
        return
    values = values if values.dtype.itemsize > 2 else values.float()
    loops().add_encoded(words.numpy(), values.numpy(), share * 2.0**frac_bits)


def left_over(openings: Iterable[MaskOpening]) -> list[tuple[bool, KeyStream]]:
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
    return derive(secret, round_id, "secure_sum/round seed", 32)


def _stream(seed: bytes) -> KeyStream:
    return KeyStream(seed, b"secure_sum", "mask")


def add_sum(
    real: np.ndarray, columns: Sequence[np.ndarray], streams: Iterable[tuple[bool, KeyStream]], factor: float
) -> None:
    """real += factor times the exact sum of columns of words, free of masks. The words are read once, a piece of every
    column at a time, and their sum is not kept: reading them is most of what the server of small tensors does."""
    for low in range(0, len(real), SPAN):
        piece = real[low : low + SPAN]
        summed = columns[0][low : low + SPAN].copy()
        for column in columns[1:]:
            summed += column[low : low + SPAN]
        pour(streams, summed)
        loops().add_decoded(piece, summed, factor)


# The messages: a server and its clients, of whom each has an edge to the server alone.


PAIR = Roles("Server Client", edges="Server-Client")
NAME_BYTES = 16
"""Of the name of a sum."""


def star_roles(clients: Iterable[str], server: str = "Server") -> Roles:
    """The roles of a session for `secure_sum`: an edge from the server to each client, and no other."""
    names = list(clients)
    return Roles(" ".join((server, *names)), edges=" ".join(f"{server}-{name}" for name in names))


@protocol("secure_sum_key", "Bonawitz et al. 2017", [
    Message("public", "Client", "Server", "a public key", "the client's public key"),
], roles=PAIR)  # fmt: skip
def send_key(net: Net, public: Located) -> Located:
    """A client's public key, of which the masks are made. 32 bytes."""
    return public.send(net.Client, net.Server, "public")


@protocol("secure_sum_keys", "Bonawitz et al. 2017", [
    Message("publics", "Server", "Client", "public keys", "the public keys of all clients"),
], roles=PAIR)  # fmt: skip
def send_keys(net: Net, publics: Located) -> Located:
    """All clients' public keys, and the name that the graph of masks follows from. 32 bytes a client, and 16."""
    return publics.send(net.Server, net.Client, "publics")


@protocol("secure_sum_name", "the beginning of a sum", [
    Message("name", "Server", "Client", "", "the sum's name, a number that was random at first"),
], roles=PAIR)  # fmt: skip
def send_name(net: Net, name: Located) -> Located:
    """The name of a sum, from which its masks follow. 16 bytes."""
    return name.send(net.Server, net.Client, "name")


@protocol("secure_sum_masked", "Bonawitz et al. 2017", [
    Message("masked", "Client", "Server", "the pair keys of the clients", "with the others', their sum"),
], roles=PAIR)  # fmt: skip
def send_masked(net: Net, words: Located) -> Located:
    """A client's tensor under its masks: 8 bytes a number. Alone it is uniform."""
    return words.send(net.Client, net.Server, "masked")


@protocol("secure_sum_survivors", "Bonawitz et al. 2017", [
    Message("survivors", "Server", "Client", "", "which clients sent their tensor"),
], roles=PAIR)  # fmt: skip
def send_survivors(net: Net, survivors: Located) -> Located:
    """Which of the clients sent their tensor: a byte each."""
    return survivors.send(net.Server, net.Client, "survivors")


@protocol("secure_sum_opening", "Bonawitz et al. 2017", [
    Message("opening", "Client", "Server", "", "this sum's seeds: the client's own, and those with the dropped"),
], roles=PAIR)  # fmt: skip
def send_opening(net: Net, opening: Located) -> Located:
    """What takes the masks off the survivors' sum: 32 bytes, and 32 for each client that it shares a mask with, zero
    for those that have not dropped."""
    return opening.send(net.Client, net.Server, "opening")


def of_shape(f: Callable, result: Any) -> Callable:
    """f for one party to compute, of which the others know the result's shapes; None stands for what is no tensor."""
    return with_shapes(lambda *_: result)(lambda *values: f(*values))


def meta_bytes(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A message's shape."""
    return torch.empty(count, dtype=dtype, device="meta")


def as_tensor(data: bytes) -> torch.Tensor:
    """Bytes as uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _seeds(data: torch.Tensor) -> list[bytes]:
    return [bytes(part.tolist()) for part in data.split(SECRET_BYTES)]


class ServerAndClients:
    """A server and its clients, for protocols of the server and one client (`PAIR`).

    Args:
        session: of all of them; or a session of each client with the server, by client, which ends for nobody else when
            that client is lost (`federated.parties.client_sessions`). Of those without a part here there is none.
        clients, server: their names.

    Attributes:
        lost: which clients the server went on without in the last call of `met`, and why.

    Raises:
        ArgumentError: a name is of no party of the session, or twice. TopologyError: a client without an edge.
    """

    def __init__(self, session: Session | Mapping[str, Session | None], clients: Sequence[str], server: str = "Server"):
        self.clients = tuple(clients)
        of = session if isinstance(session, Mapping) else dict.fromkeys(self.clients, session)
        self._sessions, self._pairs = [of.get(client) for client in self.clients], []
        for client, one in zip(self.clients, self._sessions, strict=True):
            parties = {party.name: party for party in one.parties} if one else {}
            if len({server, *self.clients}) <= len(self.clients) or (one and not {server, client} <= set(parties)):
                raise ArgumentError(
                    f"the server and its clients are parties of the session, each once; got "
                    f"{', '.join((server, *self.clients))} for {one.roles if one else 'no session'}"
                )
            self._pairs.append((parties.get(server), parties.get(client)))
        ends = list(zip(self._sessions, self._pairs, strict=True))
        self.serves = any(one.present(served) for one, (served, _) in ends if one and served)
        self._here = [bool(one and party and one.present(party)) for one, (_, party) in ends]
        self.lost: dict[int, str] = {}

    def present(self, client: int) -> bool:
        """Whether this client is in this process."""
        return self._here[client]

    @contextmanager
    def calls(self) -> Iterator[list[Net | None]]:
        """One call of each session: the net of each client, None of a client without a session here."""
        with ExitStack() as stack:
            nets = {one: stack.enter_context(self._call(one)) for one in dict.fromkeys(self._sessions) if one}
            yield [nets[one] if one else None for one in self._sessions]

    @contextmanager
    def _call(self, session: Session) -> Iterator[Net]:
        try:
            with session.call() as net:
                yield net
        except NetworkError:
            if not self.lost:  # else the call of a client that is lost ends
                raise

    @contextmanager
    def pair(self, net: Net | None, client: int) -> Iterator[Net]:
        """Inside, the server and this client are the two of a protocol."""
        server, party = self._pairs[client]
        if net is None or server is None or party is None:
            raise MisplacedValueError(f"this process has no session with {self.clients[client]}")
        with net.playing(PAIR, Server=server, Client=party):
            yield net

    @contextmanager
    def met(self, net: Net | None, client: int) -> Iterator[Net]:
        """The same; the server goes on where the edge to the client breaks."""
        try:
            with self.pair(net, client) as both:
                yield both
        except NetworkError as error:
            if not self.serves:
                raise
            self.lost[client] = f"{self.clients[client]}: {error}"


class SecureSum(NamedTuple):
    """A sum, and whose it is.

    Attributes:
        total: at the server; elsewhere a tensor without content. float64 of floats, and int64 of integers.
        clients: the names of those whose tensors are in it.
    """

    total: torch.Tensor
    clients: tuple[str, ...]


class PairwiseMasks(ServerAndClients):
    """The pairwise keys of a session's clients, for any number of sums.

        masks = sectorch.PairwiseMasks(session, ["C0", "C1", "C2"], drop_outs=True)
        total, clients = masks.sum({"C0": x0, "C1": x1, "C2": x2})

    Making it exchanges the clients' public keys: 2 rounds, 32 bytes up and 16 and 32 a client down, for each client.

    Args:
        session: with an edge from the server to each client (`secure_sum.star_roles`), or one of each client with the
            server. In a federation a session ends for all when one of its parties is lost, so drop-outs need the
            latter.
        clients: names, at least two.
        server: the name of the party that learns the sums.
        drop_outs: whether a sum goes on without clients that are lost; see the module.
        degree: with how many others a client shares masks, even; None for all.
        least: fewest clients whose sum is opened; of a private sum `GaussianShares.least`, which takes no degree.

    Raises:
        ArgumentError: names of no party; a degree for a private sum. MaskError: fewer than two clients, or no such
            degree. KeyAgreementError: a key is not a point of the curve.
    """

    def __init__(
        self,
        session: Session | Mapping[str, Session | None],
        clients: Sequence[str],
        server: str = "Server",
        *,
        drop_outs: bool = False,
        degree: int | None = None,
        least: int = 2,
    ):
        super().__init__(session, clients, server)
        count = len(self.clients)
        if count < 2:
            raise MaskError("masks need two clients or more: one alone has nobody to hide behind")
        if not 2 <= least <= count:
            raise ArgumentError(f"a sum is of 2 to {count} clients at least, got least={least}")
        if degree is not None and isinstance(least, NoiseCarriers):
            raise ArgumentError(
                "a sum that noise makes private is under masks of all pairs: by a graph of masks (degree=) colluding "
                "clients can cut off a part, whose sum has the noise of few; leave degree out"
            )
        self.drop_outs, self.least, self._degree = drop_outs, least, degree
        self.near = neighbours(range(count), degree, b"")
        self._masks = [ClientMasks(k, drop_outs, degree) if self.present(k) else None for k in range(count)]
        self._name = random_secret()[:NAME_BYTES]
        self._join()

    def __repr__(self) -> str:
        return f"PairwiseMasks({len(self.clients)} clients)"

    def of(self, client: int) -> ClientMasks:
        """A client's end of the keys.

        Raises:
            MisplacedValueError: the client is in another process.
        """
        if (masks := self._masks[client]) is None:
            raise MisplacedValueError(f"{self.clients[client]} is in another process, and so are its masks")
        return masks

    def sum(self, values: Mapping[str, torch.Tensor], frac_bits: int | None = None) -> SecureSum:
        """The sum of the clients' tensors, at the server.

        Args:
            values: by client, of one shape and dtype: real floating point or integers. Of a client that is elsewhere
                only shape and dtype count (device "meta"). A client that is not named takes no part in this sum, which
                all parties have to know and `drop_outs` has to allow.
            frac_bits: f, of the encoding; 40 for floats and 0 for integers.

        Exact for integers. Of floats each client's number is rounded to a multiple of 2^-f, so the sum is within
        K 2^-(f+1) of the true one, and exactly the sum of what was rounded. Rounds 2, bytes 16 and 8 a number for each
        client; with `drop_outs` 2 more rounds, a byte a client down, and 32 (1 + neighbours) up.

        Raises:
            ArgumentError, ShapeError, DtypeError: values that do not fit together; nothing was sent.
            NonFiniteError, FixedPointRangeError: at the client whose number it is, which then sends nothing.
            DroppedClientError: at the server: clients are missing, and the others' masks cannot be taken off.
        """
        like = self._like(values)
        f = (FRAC_BITS if like.is_floating_point() else 0) if frac_bits is None else frac_bits
        if not 0 <= f <= 60:
            raise ArgumentError(f"frac_bits is a number from 0 to 60, got {f}")
        # Each summand below 2^62 / K, so that no sum of K of them wraps.
        limit = 2.0 ** (HEADROOM_BITS - f) / len(self.clients)
        taking = [k for k, client in enumerate(self.clients) if client in values]
        self.lost.clear()
        self._name = following(self._name)
        with self.calls() as nets:
            names, sent = {}, {}
            for k in taking:
                if nets[k] is not None:
                    with self.met(nets[k], k) as net:
                        name = as_tensor(self._name) if self.serves else meta_bytes(NAME_BYTES)
                        names[k] = send_name(net, net.own(net.Server, name, name="name of the sum"))
            for k, given in names.items():

                def masked(name: torch.Tensor, own: torch.Tensor, k: int = k) -> torch.Tensor:
                    check_encodable(own, 0, "what a client adds to the sum")
                    own = own.reshape(-1) if own.dtype != torch.bool else own.reshape(-1).long()
                    check_range(own, f, limit)
                    words = self.of(k).words(bytes(name.tolist()), len(own))
                    add_encoded(words, own, 1.0, f)
                    return words

                with self.met(nets[k], k) as net:
                    own = net.own(net.Client, values[self.clients[k]].detach(), name="summand")
                    words = net.fresh(net.Client, of_shape(masked, meta_bytes(like.numel(), torch.int64)), given, own)
                    sent[k] = net.read(send_masked(net, words), net.Server)
            came, openings = self.openings(nets, names, sent if self.serves else dict.fromkeys(taking))
        clients = tuple(self.clients[k] for k in came)
        if not self.serves:
            kind = torch.float64 if like.is_floating_point() else torch.int64
            return SecureSum(torch.empty(like.shape, dtype=kind, device="meta"), clients)
        words = torch.stack([sent[k] for k in came]).sum(0)
        pour(left_over(self.opened(self._name, came, openings)), words.numpy())
        total = words.double() * 2.0**-f if like.is_floating_point() else words >> f
        return SecureSum(total.view(like.shape), clients)

    def openings(
        self, nets: Sequence[Net | None], names: Mapping[int, Located], sent: Iterable[int]
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Who survived, in order, and with `drop_outs` at the server what each of them opens.

        Args:
            names: of the sum, uint8 [16] at each client that was given it. sent: those whose words came.

        Raises:
            DroppedClientError: at the server: clients are missing, and the others' masks cannot be taken off.
        """
        came, count = sorted(sent), len(self.clients)
        if self.serves and len(came) < (self.least if self.drop_outs else count):
            self._refuse(came, "so the others' masks do not cancel; sum new values without them, or use drop_outs=True")
        if not self.drop_outs:
            return came, []
        marks = torch.tensor([k in came for k in range(count)]).byte() if self.serves else meta_bytes(count)
        heard, found = {}, {}
        for k in came:
            if nets[k] is not None:
                with self.met(nets[k], k) as net:
                    heard[k] = send_survivors(net, net.own(net.Server, marks, name="survivors"))
        for k, survivors in heard.items():

            def opened(name: torch.Tensor, survivors: torch.Tensor, k: int = k) -> torch.Tensor:
                there = survivors.nonzero().flatten().tolist()
                opening = self.of(k).open(bytes(name.tolist()), there, self.least)
                pairs = (opening.pairs.get(peer, bytes(SECRET_BYTES)) for peer in self.near[k])
                return as_tensor(b"".join((opening.own, *pairs)))

            size = SECRET_BYTES * (1 + len(self.near[k]))
            with self.met(nets[k], k) as net:
                opening = net.fresh(net.Client, of_shape(opened, meta_bytes(size)), names[k], survivors)
                found[k] = net.read(send_opening(net, opening), net.Server)
                if self.present(k):
                    came = net.read(survivors, net.Client).nonzero().flatten().tolist()
        if self.serves and len(found) < len(came):
            self._refuse(sorted(found), "after the others had sent theirs; sum new values without them")
        return came, [found[k] for k in came if k in found]

    def opened(self, name: bytes, came: Sequence[int], data: Sequence[torch.Tensor]) -> list[MaskOpening]:
        """At the server: the openings that `openings` has brought."""
        found = []
        for k, (own, *pairs) in zip(came, map(_seeds, data), strict=False):
            dropped = {peer: seed for peer, seed in zip(self.near[k], pairs, strict=True) if peer not in came}
            found.append(MaskOpening(k, name, own, dropped))
        return found

    def _refuse(self, came: Sequence[int], why: str) -> None:
        missing = [self.clients[k] for k in range(len(self.clients)) if k not in came]
        raise DroppedClientError("; ".join([f"{', '.join(missing)} sent nothing, {why}", *self.lost.values()]))

    def _like(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The shape and dtype of the values, checked as far as everybody knows them."""
        if unknown := [client for client in values if client not in self.clients]:
            raise ArgumentError(f"values of {', '.join(map(str, unknown))}; the clients are {', '.join(self.clients)}")
        missing = [client for client in self.clients if client not in values]
        if (missing and not self.drop_outs) or len(values) < self.least:
            raise ArgumentError(f"no value of {', '.join(missing)}: a sum without them needs drop_outs=True, and is of "
                                f"{self.least} clients at least")  # fmt: skip
        for k, client in enumerate(self.clients):
            x = values.get(client, torch.empty(0))
            if not isinstance(x, torch.Tensor) or (self.present(k) and x.is_meta):
                kind = "tensor without content" if isinstance(x, torch.Tensor) else type(x).__name__
                raise ArgumentError(f"{client} adds a {kind} to the sum; a tensor was expected")
        first, *rest = values.values()
        if any(x.shape != first.shape for x in rest):
            raise ShapeError(f"a sum needs equal shapes, got {[tuple(x.shape) for x in values.values()]}")
        if any(x.dtype != first.dtype for x in rest):
            raise DtypeError(f"a sum needs one dtype, got {', '.join(sorted({str(x.dtype) for x in values.values()}))}")
        return torch.empty(first.shape, dtype=first.dtype, device="meta")

    def _join(self) -> None:
        """Every client gets every public key, and agrees a secret with each client of its graph."""
        count, here = len(self.clients), [k for k, one in enumerate(self._sessions) if one]
        with self.calls() as nets:
            publics = []
            for k in here:
                with self.pair(nets[k], k) as net:
                    own = of_shape(lambda k=k: as_tensor(self.of(k).public), meta_bytes(SECRET_BYTES))
                    publics.append(net.read(send_key(net, net.fresh(net.Client, own)), net.Server))
            size = SECRET_BYTES * count + NAME_BYTES
            every = torch.cat([*publics, as_tensor(self._name)]) if self.serves else meta_bytes(size)
            for k in here:

                def join(sent: torch.Tensor, k: int = k) -> None:
                    *publics, name = _seeds(sent)
                    self.of(k).join(dict(enumerate(publics)), name)
                    self.near = neighbours(range(count), self._degree, name)

                with self.pair(nets[k], k) as net:
                    net.fresh(net.Client, of_shape(join, None), send_keys(net, net.own(net.Server, every, name="keys")))
        if self.serves:
            self.near = neighbours(range(count), self._degree, self._name)


def secure_sum(
    values: Mapping[str, torch.Tensor],
    session: Session | Mapping[str, Session | None] | None = None,
    *,
    at: str = "Server",
    drop_outs: bool = False,
    degree: int | None = None,
    least: int = 2,
    frac_bits: int | None = None,
) -> SecureSum:
    """The sum of the clients' tensors at a server that learns nothing else of them.

        def program(parties):  # one of several processes of a federation, or all of them (`federated.Simulation`)
            mine = lambda c: parties.inputs[c] if parties.present(c) else torch.empty(10, device="meta")
            roles = sectorch.Roles("Server C0 C1", edges="Server-C0 Server-C1")
            with parties.session(roles) as session:
                return sectorch.secure_sum({c: mine(c) for c in ("C0", "C1")}, session).total

    Args:
        values: by client; see `PairwiseMasks.sum`.
        session: with an edge from the server to each client, or one for each client (see `PairwiseMasks`); all parties
            in this process unless given, which protects nothing.
        at: the name of the server.
        drop_outs, degree, least: see `PairwiseMasks`, which does several sums under one exchange of keys.
        frac_bits: see `PairwiseMasks.sum`.

    Rounds, bytes, error, what each party learns, errors: those of `PairwiseMasks` and `PairwiseMasks.sum`. Source:
    Bonawitz et al., CCS 2017.
    """
    session = session or Session(roles=star_roles(values, at))
    masks = PairwiseMasks(session, list(values), at, drop_outs=drop_outs, degree=degree, least=least)
    return masks.sum(values, frac_bits)
