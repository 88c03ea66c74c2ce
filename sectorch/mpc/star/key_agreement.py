"""Key agreement (Pi_Seed): pair keys without a direct channel between the clients.

Q and A exchange X25519 public keys through S; S draws the keys that it shares with each of them. S sees both public
keys and learns nothing about the pair secret of Q and A (computational Diffie-Hellman). The keys that S draws travel
inside the secured channel (TLS) to their owner.

The paper trusts S to relay the public keys unchanged. Here each client signs both fresh public keys with its long-term
Ed25519 key (as SIGMA and the station-to-station protocol do), together with the session, its role, both names and a
digest of the program and number format, and the other client checks the signature before it derives anything. A client
that knows the other's identity key (`Identities.trust`) detects an S that replaces keys; both detect an S that tells
them of different programs or number formats.

Source: PrivHFL, Figure 18; H. Krawczyk, "SIGMA", CRYPTO 2003.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ...choreography import Message, Net, ProtocolSpec, leaf, protocol
from ...choreography.streams import SECRET_BYTES, agree, keypair, random_secret
from ...errors import ArgumentError, KeyAgreementError

KEY_BYTES, SIGNATURE_BYTES = 32, 64
_CONTEXT = b"sectorch v2 seed signature"


@dataclass
class Identities:
    """The names of Q and A, the long-term key of the client of this process, and a check of the other client's key.

    The defaults are for a process that holds all parties: a fresh key, and no check.

    Attributes:
        names: of Q and A, by role.
        key: this client's long-term key.
        context: further bytes that both clients sign and have to agree on: a digest of the program and number format.
    """

    names: dict[str, str] = field(default_factory=lambda: {"Q": "Q", "A": "A"})
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)
    context: bytes = b""
    public: bytes = field(default=b"", init=False)
    """The other client's long-term key, once its signature was checked and `trust` accepted it."""

    def trust(self, name: str, public: bytes) -> None:
        """Raise IdentityError unless `public` is the long-term key of `name`. Called after its signature is checked."""


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def _statement(session: bytes, role: str, who: Identities, public_q: bytes, public_a: bytes) -> bytes:
    """The bytes that a client signs; every part is preceded by its length."""
    names = (who.names["Q"].encode(), who.names["A"].encode())
    parts = (_CONTEXT, session, role.encode(), *names, who.context, public_q, public_a)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _signed(session: bytes, role: str, who: Identities, public_q: bytes, public_a: bytes) -> bytes:
    """This client's long-term public key and its signature."""
    statement = _statement(session, role, who, public_q, public_a)
    return who.key.public_key().public_bytes_raw() + who.key.sign(statement)


def _check(proof: bytes, session: bytes, role: str, who: Identities, public_q: bytes, public_a: bytes) -> None:
    """Raise unless `proof` is the long-term key and the signature of the expected client in this role."""
    public, signature = proof[:KEY_BYTES], proof[KEY_BYTES:]
    statement = _statement(session, role, who, public_q, public_a)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        raise KeyAgreementError(
            f"the key that came for '{who.names[role]}' is not signed by it for this session: the server, or "
            f"somebody in its place, has put a key of its own in between, or tells the two of you of different "
            f"models, number formats or versions. Nothing was sent; ask the operator"
        ) from None
    who.trust(who.names[role], public)
    who.public = public


@protocol(
    "seed",
    "PrivHFL, Figure 18; signed as in SIGMA (Krawczyk 2003)",
    [
        Message("public_Q", "Q", "S", "a public key", "Q's public key"),
        Message("public_Q_relayed", "S", "A", "a public key", "Q's public key"),
        Message("signed_A", "A", "S", "a public key", "A's public keys and signature"),
        Message("signed_A_relayed", "S", "Q", "a public key", "A's public keys and signature"),
        Message("signed_Q", "Q", "S", "a public key", "Q's long-term public key and signature"),
        Message("signed_Q_relayed", "S", "A", "a public key", "Q's long-term public key and signature"),
        Message("key_SA", "S", "A", "the secured channel", "the pair key that it shares with S"),
        Message("key_SQ", "S", "Q", "the secured channel", "the pair key that it shares with S"),
    ],
)
def seed(net: Net, *, first: bool = True, known: bool = False, identities: Identities | None = None) -> None:
    """Install the three pair keys of Q, A and S.

    Args:
        first: whether S draws k_SQ; the further answering parties of a session share it.
        known: whether k_SA is installed already, where a dealer other than Q gets its keys.
        identities: of Q and A; fresh ones, which prove nothing, unless given.

    Rounds 6, bytes 2 * (32 + 128 + 96) through S, and 32 for each key that S draws. S learns the keys that it draws and
    public keys, Q and A their own pair keys.

    Raises:
        KeyAgreementError: a signature is false, at the client that checks it.
        IdentityError: the other client is not the expected one. In both cases that client installs no key with it.
    """
    Q, A, S = net.Q, net.A, net.S
    session, who = net.runtime.session, identities or Identities()

    secret_q, public_q = net.fresh(Q, _keypair)
    secret_a, public_a = net.fresh(A, _keypair)
    at_a = public_q.send(Q, S, "public_Q").send(S, A, "public_Q_relayed")
    answer = _answer(at_a, public_a, session, who)
    answer = answer.send(A, S, "signed_A").send(S, Q, "signed_A_relayed")
    confirmation = _confirmation(public_q, answer, session, who)
    confirmation = confirmation.send(Q, S, "signed_Q").send(S, A, "signed_Q_relayed")
    net.install(Q, A, _pair_secret(secret_q, public_q, answer[:KEY_BYTES], session))
    net.install(Q, A, _confirmed_pair_secret(secret_a, public_a, at_a, confirmation, session, who))

    if not known:
        key_sa = net.fresh(S, _secret).send(S, A, "key_SA")
        net.install(S, A, key_sa)
    if first:
        key_sq = net.fresh(S, _secret).send(S, Q, "key_SQ")
        net.install(S, Q, key_sq)


def edge_keys(net: Net) -> None:
    """Install a pair key at both ends of every edge of custom roles: one end draws it and sends it to the other.

    Rounds 1, bytes 32 an edge. A reader of the edge reads the key, so every edge has to be a secured channel.

    Raises:
        ArgumentError: a pair of roles that share a stream has no edge.
    """
    roles = net.cast.roles
    if roles.streams != roles.edges:
        raise ArgumentError(f"pairs that share a stream need an edge; the roles are {roles}")
    edges = sorted(sorted(edge) for edge in roles.edges)
    shown = "the pair key of the two"
    messages = tuple(Message(f"key_{p}_{q}", p, q, "the secured channel", shown) for p, q in edges)
    with net.declared(
        ProtocolSpec("agree", "sectorch.mpc.star.key_agreement", messages, "Pair keys along the edges.", roles)
    ):
        for p, q in edges:
            one, other = net.cast.parties[p], net.cast.parties[q]
            net.install(one, other, net.fresh(one, _secret).send(one, other, f"key_{p}_{q}"))


def _keypair():
    private, public = keypair()
    return private, _tensor(public)


def _secret() -> torch.Tensor:
    return _tensor(random_secret())


def _bytes_of(count: int) -> Callable[..., torch.Tensor]:
    """A shape function of steps whose result has so many bytes."""
    return lambda *_: torch.empty(count, dtype=torch.uint8, device="meta")


@leaf(shapes=_bytes_of(2 * KEY_BYTES + SIGNATURE_BYTES))
def _answer(public_q: torch.Tensor, public_a: torch.Tensor, session: bytes, who: Identities) -> torch.Tensor:
    """At A: its fresh public key, its long-term one and its signature."""
    return torch.cat([public_a, _tensor(_signed(session, "A", who, _bytes(public_q), _bytes(public_a)))])


@leaf(shapes=_bytes_of(KEY_BYTES + SIGNATURE_BYTES))
def _confirmation(public_q: torch.Tensor, answer: torch.Tensor, session: bytes, who: Identities) -> torch.Tensor:
    """At Q: check A's answer, and return its own long-term key and signature."""
    fresh = _bytes(public_q), _bytes(answer[:KEY_BYTES])
    _check(_bytes(answer[KEY_BYTES:]), session, "A", who, *fresh)
    return _tensor(_signed(session, "Q", who, *fresh))


@leaf(shapes=_bytes_of(SECRET_BYTES))
def _pair_secret(private: X25519PrivateKey, own: torch.Tensor, peer: torch.Tensor, session: bytes) -> torch.Tensor:
    return _tensor(agree(private, _bytes(own), _bytes(peer), session))


@leaf(shapes=_bytes_of(SECRET_BYTES))
def _confirmed_pair_secret(private, public_a, public_q, confirmation, session: bytes, who: Identities) -> torch.Tensor:
    """At A: check Q's confirmation, and return the pair secret."""
    _check(_bytes(confirmation), session, "Q", who, _bytes(public_q), _bytes(public_a))
    return _pair_secret(private, public_a, public_q, session)
