"""Pi_Seed: pair keys without a direct channel between the clients. PrivHFL, Figure 18.

Q and A exchange X25519 public keys through S; S draws the keys that it shares with each of them. Two messages each way,
one dependent round more than a direct exchange. S sees both public keys and learns nothing about the pair secret of Q
and A (computational Diffie-Hellman). The keys that S hands out travel inside the secured channel (TLS) to their owner.
"""

from __future__ import annotations

import torch

from ..choreography import Message, Net, protocol
from ..randomness import SECRET_BYTES, agree, keypair, random_secret


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _keypair():
    private, public = keypair()
    return private, _tensor(public)


@protocol(
    "seed",
    "PrivHFL, Figure 18",
    [
        Message("public_Q", "Q", "S", "a public key", "Q's public key"),
        Message("public_Q_relayed", "S", "A", "a public key", "Q's public key"),
        Message("public_A", "A", "S", "a public key", "A's public key"),
        Message("public_A_relayed", "S", "Q", "a public key", "A's public key"),
        Message("key_SA", "S", "A", "the secured channel", "the pair key that it shares with S"),
        Message("key_SQ", "S", "Q", "the secured channel", "the pair key that it shares with S"),
    ],
)
def seed(net: Net, *, first: bool = True) -> None:
    """Install the three pair keys of Q, A and S.

    Args:
        first: whether k_SQ has still to be made; a second answering party of the session shares it.
    """
    Q, A, S = net.Q, net.A, net.S
    session = net.runtime.session

    def agreed(private, own, peer):
        if peer.is_meta:
            return torch.empty(SECRET_BYTES, dtype=torch.uint8, device="meta")
        return _tensor(agree(private, bytes(own.tolist()), bytes(peer.tolist()), session))

    secret_q, public_q = net.locally(Q, _keypair)
    secret_a, public_a = net.locally(A, _keypair)
    public_q = net.send(net.send(public_q, Q, S, "public_Q"), S, A, "public_Q_relayed")
    public_a = net.send(net.send(public_a, A, S, "public_A"), S, Q, "public_A_relayed")
    net.install(Q, A, net.locally(Q, agreed, secret_q, public_q, public_a))
    net.install(Q, A, net.locally(A, agreed, secret_a, public_a, public_q))

    key_sa = net.send(net.locally(S, lambda: _tensor(random_secret())), S, A, "key_SA")
    net.install(S, A, key_sa)
    if first:
        key_sq = net.send(net.locally(S, lambda: _tensor(random_secret())), S, Q, "key_SQ")
        net.install(S, Q, key_sq)
