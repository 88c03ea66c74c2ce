"""Oblivious transfer: base transfers, their extension to any number, and the relay of two clients through S.

`correlate` sets up a `Pair` of a garbler and Q once a session, by 128 base transfers with public-key operations. The
extension turns it into any number of transfers by symmetric operations. Q has two seeds in each of 128 rows, and the
garbler has the one that a bit of Delta chooses. Q expands both to streams t and t' of one bit for each transfer, and
sends u = t xor t' xor r for its choice bits r, row by row. The garbler has in row i either t_i or t'_i, and computes
q_i = t_i xor Delta_i r with Delta_i u_i. For transfer j, the columns are

    t_j = q_j xor r_j Delta.

These are labels of free-XOR garbling: q_j is the label for zero, and Q holds the label for its bit. So garbled inputs
need no further message.

Sources: Y. Ishai, J. Kilian, K. Nissim, E. Petrank, "Extending oblivious transfers efficiently", CRYPTO 2003; with
streams in place of transferred columns G. Asharov, Y. Lindell, T. Schneider, M. Zohner, "More efficient oblivious
transfer and extensions for faster secure computation", CCS 2013; hashed as in V. Kolesnikov, R. Kumaresan, "Improved OT
extension for transferring short secrets", CRYPTO 2013, for one choice of two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from ..choreography import Located, Message, Net, Party, leaf, protocol, with_shapes
from ..choreography.streams import derive
from ..errors import KeyAgreementError, TopologyError
from ..ring.bitplanes import planes, to_rows, words_for
from .circuit import LABEL_BYTES, WORDS, expand, hash_blocks, private_words

# Base transfers of random keys, by Chou and Orlandi on Ed25519.
#
# The sender publishes A = a G. For choice bit c the receiver answers R = b G + c A and has the key H(b A). The sender
# has the keys H(a R) and H(a (R - A)), of which the receiver's is the c-th. R is uniform in the group whatever c is;
# the key not chosen is H of a Diffie-Hellman value (computational Diffie-Hellman, H a random oracle). T. Chou and C.
# Orlandi, "The simplest protocol for oblivious transfer", LATINCRYPT 2015, Figure 1.
#
# Known attacks: a point outside the prime-order subgroup would show c, since a component of low order in A appears in R
# only for c = 1. So every received point is checked to be canonical, on the curve, in the subgroup and not the
# identity. H depends on the session, A, R and the number of the transfer, so an answer cannot be used in another
# transfer. The claim of universally composable security against malicious parties does not hold (Genc, Iovino, Rial,
# ePrint 2017/370; Hauck, Loss, ePrint 2017/1011); here the parties follow the protocol.
#
# Group operations are libsodium's through PyNaCl. Points and scalars are 32 bytes, tensors [.., 4] int64.


POINT_WORDS = 4


def random_scalar() -> bytes:
    """A uniform scalar modulo the group order, from the operating system's randomness."""
    return sodium.crypto_core_ed25519_scalar_reduce(os.urandom(sodium.crypto_core_ed25519_NONREDUCEDSCALARBYTES))


def base_multiple(scalar: bytes) -> bytes:
    """scalar * G."""
    return sodium.crypto_scalarmult_ed25519_base_noclamp(scalar)


def points(tensor: torch.Tensor) -> list[bytes]:
    """The points of a tensor [.., 4] as bytes.

    Raises:
        KeyAgreementError: one of them is the identity or no point of the group.
    """
    found = [row.tobytes() for row in tensor.reshape(-1, POINT_WORDS).contiguous().numpy()]
    if not all(sodium.crypto_core_ed25519_is_valid_point(point) for point in found):
        raise KeyAgreementError("the peer's oblivious transfer holds a point outside the group of Ed25519; stop here")
    return found


def tensor_of(rows: list[bytes]) -> torch.Tensor:
    """Byte strings of one length as int64 [len(rows), length / 8]."""
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int64).view(len(rows), -1)


def start() -> tuple[bytes, torch.Tensor]:
    """The sender's secret a, and A [4]."""
    secret = random_scalar()
    return secret, tensor_of([base_multiple(secret)])[0]


def choose(sender: torch.Tensor, choices: list[int], session: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The receiver's answers R [k, 4] and its keys [k, 2], for A [4] and k choice bits."""
    (A,) = points(sender)
    answers, keys = [], []
    for i, choice in enumerate(choices):
        secret = random_scalar()
        plain = base_multiple(secret)
        # Both answers are computed, so that the time does not show which one is sent.
        answers.append((plain, sodium.crypto_core_ed25519_add(plain, A))[choice])
        keys.append(_base_key(_multiple(secret, A), session, A, answers[-1], i))
    return tensor_of(answers), tensor_of(keys)


@leaf(shapes=lambda _secret, _sender, answers, _session: answers.new_empty(answers.shape[0], 2, 2))
def finish(secret: bytes, sender: torch.Tensor, answers: torch.Tensor, session: bytes) -> torch.Tensor:
    """The sender's keys [k, 2 (choice), 2], for its secret a, A [4] and answers R [k, 4]."""
    (A,) = points(sender)
    shift, keys = _multiple(secret, A), []
    for i, R in enumerate(points(answers)):
        first = _multiple(secret, R)
        for shared in (first, sodium.crypto_core_ed25519_sub(first, shift)):
            keys.append(_base_key(shared, session, A, R, i))
    return tensor_of(keys).view(-1, 2, 2)


def _multiple(scalar: bytes, point: bytes) -> bytes:
    try:
        return sodium.crypto_scalarmult_ed25519_noclamp(scalar, point)
    except CryptoError as error:
        raise KeyAgreementError("the peer's oblivious transfer holds a point of low order; stop here") from error


def _base_key(shared: bytes, session: bytes, A: bytes, R: bytes, number: int) -> bytes:
    return derive(shared, session + A + R, f"base oblivious transfer {number}", LABEL_BYTES)


# Messages between Q and A go through S, under a one-time pad.


@protocol(
    "garbled_relay",
    "PrivHFL, C.5 (CaPC without a channel between clients)",
    [
        Message("from_A", "A", "S", "pad of k_QA", opens="Q", outermost=True),
        Message("to_Q", "S", "Q", "pad of k_QA; within it, see the protocol that sends it", opens="Q", outermost=True),
        Message("from_Q", "Q", "S", "pad of k_QA", opens="A", outermost=True),
        Message("to_A", "S", "A", "pad of k_QA; within it, see the protocol that sends it", opens="A", outermost=True),
    ],
)
def relay(net: Net, value: Located, src: Party, dst: Party) -> Located:
    """Send a value from Q to A or from A to Q through S, under a one-time pad from the stream of their pair key.

    Args:
        value: int64 at `src`, any shape.
        src, dst: Q and A, in the direction of the message.

    Returns:
        The value, at `dst`.

    Rounds 2; the bytes of the value on both edges. S receives uniform bits. The pad hides the value and does not
    authenticate it: an S that deviates could flip bits.
    """
    away = src == net.A
    pad = net.common(net.Q, net.A, value.shape, "pad")
    sealed = (value.at(src) ^ pad).send(src, net.S, "from_A" if away else "from_Q")
    sealed = sealed.send(net.S, dst, "to_Q" if away else "to_A")
    return sealed.at(dst) ^ pad


def deliver(net: Net, value: Located, src: Party, dst: Party, label: str) -> Located:
    """Send a value from `src` to `dst`: over their edge where one of them is S, else by `relay`."""
    if net.S in (src, dst):
        return value.send(src, dst, label)
    return relay(net, value, src, dst)


# The setup of a garbler and Q, once a session.


TRANSFERS = 128
"""Base transfers: one for each bit of a label."""


@dataclass(frozen=True)
class Pair:
    """The setup of a garbler (an answering party, or S) and the evaluator Q, for any number of calls of one session.

    Attributes:
        delta: [2] at the garbler; its lowest bit is one.
        seeds: [128, 2] at the garbler: in each row the one of Q's two seeds that Delta's bit chooses.
        both_seeds: [128, 2, 2] at Q.
    """

    garbler: Party
    delta: Located
    seeds: Located
    both_seeds: Located


@protocol(
    "garbled_pair",
    "Chou, Orlandi 2015, Figure 1; Ishai, Kilian, Nissim, Petrank 2003",
    [
        Message("point", "Q", "S", "a public key", "a random point A of Ed25519"),
        Message("points", "S", "Q", "b G for each", "128 random points of Ed25519"),
    ],
)
def correlate(net: Net, garbler: Party) -> Pair:
    """Set up a garbler and Q by base oblivious transfers: Q sends, and the garbler's choice bits are its Delta.

    Args:
        net: the setup net of an answering party (`session.setup(A)`); its base phase makes this a part of the setup.
        garbler: that answering party for step 1c, or S for step 3.

    Returns:
        The `Pair`.

    Rounds 2 with S, 4 with A (through S, sealed); bytes 32 + 4096, with A on both edges. The messages are random group
    elements. Neither learns anything: Q has two seeds in each row and not Delta, the garbler has one of the two.

    Raises:
        TopologyError: the garbler is neither S nor this net's answering party.
        KeyAgreementError: a received point is not in the group.
    """
    if garbler not in (net.A, net.S):
        raise TopologyError(f"{garbler} cannot garble for {net.Q} in a call with {net.A} and {net.S}")
    Q, session = net.Q, net.runtime.session
    delta = net.fresh(garbler, _delta)
    secret, point = net.fresh(Q, start)
    answers, seeds = net.fresh(garbler, _answers, delta, deliver(net, point, Q, garbler, "point"), session)
    answers = deliver(net, answers, garbler, Q, "points")
    return Pair(garbler, delta, seeds, finish(secret, point, answers, session))


def _delta() -> torch.Tensor:
    """A fresh Delta."""
    words = private_words(2)
    words[0] |= 1
    return words


@with_shapes(lambda _delta, point, _session: (point.new_empty(TRANSFERS, POINT_WORDS), point.new_empty(TRANSFERS, 2)))
def _answers(delta: torch.Tensor, point: torch.Tensor, session: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The garbler's answers [128, 4] and its seeds [128, 2]: Delta's bits are its choices."""
    return choose(point, [int(word) >> i & 1 for word in delta for i in range(64)], session)


# The extension.


@leaf
def pack(bits: torch.Tensor) -> torch.Tensor:
    """Bits (int64, any shape) -> words [W]: bit t of word w is element t W + w, as in `sectorch.ring.bitplanes`."""
    positions = torch.arange(64, device=bits.device).unsqueeze(1)
    return (to_rows(bits) << positions).sum(0)


def unpack(words: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `pack`."""
    positions = torch.arange(64, device=words.device).unsqueeze(1)
    return ((words >> positions) & 1).reshape(-1)[: shape.numel()].view(shape)


def transpose_streams(columns: torch.Tensor, count: int) -> torch.Tensor:
    """Streams [128, W] -> blocks [count, 2]: block j holds bit j of every stream."""
    halves = planes(columns.view(WORDS, 64, -1))
    return halves.permute(1, 2, 0).reshape(-1, WORDS)[:count]


def _column_shapes(_seeds: torch.Tensor, bits: torch.Tensor, _nonce: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return bits.new_empty((TRANSFERS, words_for(bits.numel()))), bits.new_empty((*bits.shape, WORDS))


@leaf(shapes=_column_shapes)
def choose_columns(both_seeds: torch.Tensor, bits: torch.Tensor, nonce: torch.Tensor):
    """At Q: its message [128, W] and its blocks [*bits.shape, 2], for choice bits."""
    packed = pack(bits)
    first, second = (expand(both_seeds[:, i], nonce, packed.shape[0]) for i in range(2))
    return second.bitwise_xor_(first).bitwise_xor_(packed), transpose_streams(first, bits.numel()).view(
        *bits.shape, WORDS
    )


@leaf(shapes=lambda _seeds, _delta, columns, shape, _nonce: columns.new_empty((*shape, WORDS)))
def zero_blocks(
    seeds: torch.Tensor, delta: torch.Tensor, columns: torch.Tensor, shape: torch.Size, nonce: torch.Tensor
):
    """At the garbler: its blocks [*shape, 2], from Q's message."""
    chosen = -unpack_bits(delta).unsqueeze(1)
    own = expand(seeds, nonce, columns.shape[1])
    return transpose_streams(own.bitwise_xor_(chosen & columns), shape.numel()).view(*shape, WORDS)


def unpack_bits(block: torch.Tensor) -> torch.Tensor:
    """The 128 bits of one block [2]."""
    return ((block.unsqueeze(1) >> torch.arange(64)) & 1).view(-1)


@protocol(
    "garbled_choices",
    "Asharov, Lindell, Schneider, Zohner 2013",
    [Message("columns", "Q", "S", "the streams of seeds that the garbler lacks")],
)
def correlated_transfer(net: Net, pair: Pair, bits: Located) -> tuple[Located, Located]:
    """Compute blocks q at the garbler and t = q xor r Delta at Q, for Q's choice bits r.

    Args:
        pair: of the garbler and Q.
        bits: r, int64 zeros and ones at Q, any shape.

    Returns:
        q and t, [*shape, 2].

    Rounds 1 with S, 2 with A. Q sends 16 bytes per bit (all bits padded to a multiple of 64). The garbler receives
    pseudorandom bits, Q nothing.
    """
    Q, garbler = net.Q, pair.garbler
    nonce, shape = net.common(Q, garbler, (2,), "nonce"), bits.shape
    columns, at_Q = choose_columns(pair.both_seeds, bits, nonce)
    columns = deliver(net, columns, Q, garbler, "columns")
    return zero_blocks(pair.seeds, pair.delta, columns, shape, nonce), at_Q


@protocol(
    "garbled_transfer",
    "Ishai, Kilian, Nissim, Petrank 2003",
    [Message("sealed", "S", "Q", "hashes of q and q xor Delta", "of each two messages the one it chose")],
)
def oblivious_transfer(net: Net, pair: Pair, messages: Located, bits: Located) -> Located:
    """1-out-of-2 oblivious transfer: Q gets message r of two, and the garbler does not learn r.

    Args:
        pair: of the garbler and Q.
        messages: int64 [*shape, 2 (choice), 2 (words)] at the garbler: 128 bits each.
        bits: r, int64 zeros and ones [*shape] at Q.

    Returns:
        The chosen messages, [*shape, 2] at Q.

    Rounds 2 with S, 4 with A; bytes 16 per transfer from Q and 32 from the garbler. Q learns the chosen messages, the
    garbler nothing.
    """
    garbler = pair.garbler
    tweak = net.common(net.Q, garbler, (2,), "tweak")
    q, t = correlated_transfer(net, pair, bits)
    sealed = _sealed(messages, q, pair.delta, tweak)
    return _opened(deliver(net, sealed, garbler, net.Q, "sealed"), t, bits, tweak)


def _key(tweak: torch.Tensor) -> list[bytes]:
    return [tweak.numpy().tobytes()]


@leaf(shapes=lambda messages, *_: torch.empty_like(messages))
def _sealed(messages: torch.Tensor, q: torch.Tensor, delta: torch.Tensor, tweak: torch.Tensor) -> torch.Tensor:
    both = torch.stack((q, q ^ delta), -2)
    return hash_blocks(_key(tweak), both.unsqueeze(0))[0].bitwise_xor_(messages)


@leaf(shapes=lambda _sealed, t, *_: torch.empty_like(t))
def _opened(sealed: torch.Tensor, t: torch.Tensor, bits: torch.Tensor, tweak: torch.Tensor) -> torch.Tensor:
    chosen = torch.where(bits.unsqueeze(-1) == 1, sealed[..., 1, :], sealed[..., 0, :])
    return hash_blocks(_key(tweak), t.unsqueeze(0))[0].bitwise_xor_(chosen)
