"""Oblivious transfer of random keys from public-key operations: Chou and Orlandi on Ed25519.

The sender publishes A = a G. For choice bit c the receiver answers R = b G + c A and has the key H(b A). The sender has
the keys H(a R) and H(a (R - A)), of which the receiver's is the c-th. R is uniform in the group whatever c is; the key
not chosen is H of a Diffie-Hellman value (computational Diffie-Hellman, H a random oracle). T. Chou and C. Orlandi,
"The simplest protocol for oblivious transfer", LATINCRYPT 2015, Figure 1.

What is known against it, and what is done: points outside the prime-order subgroup would show c (a component of low
order in A appears in R only for c = 1), so every point received is checked to be canonical, on the curve, in the
subgroup and not the identity; H takes the session, A, R and the number of the transfer in, so that no answer of one
transfer means anything in another. The claim of universally composable security against malicious parties does not hold
(Genc, Iovino, Rial, ePrint 2017/370; Hauck, Loss, ePrint 2017/1011); here the parties follow the protocol.

Group operations are libsodium's through PyNaCl. Points and scalars are 32 bytes, tensors [.., 4] int64.
"""

from __future__ import annotations

import os

import torch
from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from ..choreography import leaf
from ..choreography.streams import derive
from ..errors import KeyAgreementError
from .hashing import LABEL_BYTES

POINT_WORDS = 4


def random_scalar() -> bytes:
    """Uniform modulo the group order, from the operating system."""
    return sodium.crypto_core_ed25519_scalar_reduce(os.urandom(sodium.crypto_core_ed25519_NONREDUCEDSCALARBYTES))


def base_multiple(scalar: bytes) -> bytes:
    """scalar * G."""
    return sodium.crypto_scalarmult_ed25519_base_noclamp(scalar)


def points(tensor: torch.Tensor) -> list[bytes]:
    """The points of a tensor [.., 4], checked.

    Raises:
        KeyAgreementError: one of them is not a point of the group, or its identity.
    """
    found = [row.tobytes() for row in tensor.reshape(-1, POINT_WORDS).contiguous().numpy()]
    if not all(sodium.crypto_core_ed25519_is_valid_point(point) for point in found):
        raise KeyAgreementError("the peer's oblivious transfer holds a point outside the group of Ed25519; stop here")
    return found


def tensor_of(rows: list[bytes]) -> torch.Tensor:
    """Byte strings of equal length as int64 [len(rows), length / 8]."""
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
        # Both answers are made, so that the time does not show which one is sent.
        answers.append((plain, sodium.crypto_core_ed25519_add(plain, A))[choice])
        keys.append(_key(_multiple(secret, A), session, A, answers[-1], i))
    return tensor_of(answers), tensor_of(keys)


@leaf(shapes=lambda _secret, _sender, answers, _session: answers.new_empty(answers.shape[0], 2, 2))
def finish(secret: bytes, sender: torch.Tensor, answers: torch.Tensor, session: bytes) -> torch.Tensor:
    """The sender's keys [k, 2 (choice), 2], for its secret a, A [4] and answers R [k, 4]."""
    (A,) = points(sender)
    shift, keys = _multiple(secret, A), []
    for i, R in enumerate(points(answers)):
        first = _multiple(secret, R)
        for shared in (first, sodium.crypto_core_ed25519_sub(first, shift)):
            keys.append(_key(shared, session, A, R, i))
    return tensor_of(keys).view(-1, 2, 2)


def _multiple(scalar: bytes, point: bytes) -> bytes:
    try:
        return sodium.crypto_scalarmult_ed25519_noclamp(scalar, point)
    except CryptoError as error:
        raise KeyAgreementError("the peer's oblivious transfer holds a point of low order; stop here") from error


def _key(shared: bytes, session: bytes, A: bytes, R: bytes, number: int) -> bytes:
    return derive(shared, session + A + R, f"base oblivious transfer {number}", LABEL_BYTES)
