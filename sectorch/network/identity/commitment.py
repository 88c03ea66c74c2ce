"""An answering party's signed commitment to a model. Its own file: the parties and `sectorch audit` read it.

A model's edition is SHA-256 of a salt and the weights. The salt is derived from the party's identity key and the
weights: whoever lacks that key learns nothing of the weights from an edition, and all processes of the party, after a
restart too, name one edition. A model's version is a digest of its description and edition, and the party signs each
version that it registers. To open a version to an auditor, the party shows weights and salt.

Binding is as strong as SHA-256, and hiding as HKDF-SHA256 under the identity key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ...choreography.streams import derive
from ...errors import IdentityError
from ..store import tensor_digest, version
from .identity import fingerprint

_CONTEXT = b"sectorch v1 commitment to a model"
_SIGNED = b"sectorch v1 version of a model"
SALT_BYTES = 32
_KEY_DIGITS = 64


def commitment_to(weights: Mapping[str, torch.Tensor], identity: Ed25519PrivateKey) -> tuple[str, bytes]:
    """The edition of a model with these weights, and the salt that opens it."""
    digest = tensor_digest(sorted(weights.items()))
    salt = derive(identity.private_bytes_raw(), digest, "salt of a commitment", SALT_BYTES)
    return _edition(digest, salt), salt


def opens(shown: str, description: dict, weights: Mapping[str, torch.Tensor], salt: bytes) -> bool:
    """Whether a version, as receipts have it, is that of this description and these weights."""
    digest = tensor_digest(sorted(weights.items()))
    return len(salt) == SALT_BYTES and version(description, _edition(digest, salt)) == shown


def _edition(digest: bytes, salt: bytes) -> str:
    return hashlib.sha256(_CONTEXT + salt + digest).hexdigest()


def sign_version(identity: Ed25519PrivateKey, model: str, shown: str) -> str:
    """The party's public key and its signature of a model's version, in hexadecimal digits."""
    return (identity.public_key().public_bytes_raw() + identity.sign(_text(model, shown))).hex()


def signer_of(signed: str, model: str, shown: str) -> str:
    """The fingerprint of the key that has signed a model's version.

    Raises:
        IdentityError: the signature is not right.
    """
    try:
        public = bytes.fromhex(signed[:_KEY_DIGITS])
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(signed[_KEY_DIGITS:]), _text(model, shown))
    except (InvalidSignature, ValueError):
        raise IdentityError(f"the answering party has not signed the version of '{model}' that is shown") from None
    return fingerprint(public)


def _text(model: str, shown: str) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (_SIGNED, model.encode(), shown.encode()))
