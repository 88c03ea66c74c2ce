"""Audited dealing: Q commits to the dealing of several calls, A checks all but one, and that one is used.

This is covert security by cut and choose (Aumann and Lindell, TCC 2007). Q commits to what it will deal in n calls by a
digest of each, and signs them. A and S draw from k_SA, which Q lacks, which call is used. For each other call S gives A
its stream with Q. A has its own stream with Q, recomputes what Q has to deal, and compares. Only then Q learns the
choice: a Q that stops when a false call was checked has left evidence by then. Q deals for the call that is used, and S
checks that against its digest.

Every call has streams of its own (`PairKey.of_call`). So a stream that is shown says nothing about the call that is
used, and no query was ever masked by it. The digests are keyed, with keys that A gets only for the calls it checks;
otherwise A could search for the few bits that it does not know. An audit is not part of a query, so that an abort says
nothing about the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ...choreography import Message, Net, leaf, protocol
from ...choreography.located import compute, with_shapes
from ...choreography.run.replay import DIGEST_BYTES
from ...choreography.streams import SECRET_BYTES
from ...errors import FalseDealingError
from .key_agreement import SIGNATURE_BYTES

_CONTEXT = b"sectorch v1 promised dealing"


@dataclass(frozen=True)
class Promise:
    """Q's commitment to the dealing of several calls, signed before Q learns which of them is used.

    Attributes:
        session: the session's number. program: the program's digest.
        calls: the numbers of the calls.
        digests: for each call the digest of what is dealt.
        streams: for each call SHA-256 of the keys of Q's two streams, that with A first, so that no party can name
            other keys later.
        signature: Q's, by its identity key.
    """

    session: bytes
    program: str
    calls: tuple[int, ...]
    digests: tuple[bytes, ...]
    streams: tuple[bytes, ...]
    signature: bytes = b""

    def statement(self) -> bytes:
        """The signed bytes; every part is preceded by its length."""
        calls = b"".join(call.to_bytes(8, "big") for call in self.calls)
        parts = (_CONTEXT, self.session, self.program.encode(), calls, b"".join(self.digests), b"".join(self.streams))
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def to_message(self) -> bytes:
        """The message: the parts that the other parties do not know."""
        return b"".join(self.digests) + b"".join(self.streams) + self.signature

    @classmethod
    def from_message(cls, session: bytes, program: str, calls: tuple[int, ...], message: bytes) -> Promise:
        """Read a message that `to_message` has written, for these calls."""
        words = [message[at : at + DIGEST_BYTES] for at in range(0, 2 * len(calls) * DIGEST_BYTES, DIGEST_BYTES)]
        digests, streams = tuple(words[: len(calls)]), tuple(words[len(calls) :])
        return cls(session, program, calls, digests, streams, message[-SIGNATURE_BYTES:])

    def check(self, public: bytes) -> None:
        """Raise FalseDealingError unless the signature is by this key."""
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(self.signature, self.statement())
        except (InvalidSignature, ValueError):
            raise FalseDealingError("what Q promises to deal is not signed by the key that it proved") from None


@dataclass(frozen=True)
class Evidence:
    """Evidence that Q has signed a digest that is not that of a call's dealing. A keeps it and can show it to others.

    Attributes:
        promise: the signed commitment.
        public: Q's identity key, 32 bytes.
        call: the number of the call that was checked.
        found: the digest of the dealing that follows from the streams.
        with_A, with_S: the keys of Q's streams in that call, which no query was masked by.
    """

    promise: Promise
    public: bytes
    call: int
    found: bytes
    with_A: bytes = field(repr=False)
    with_S: bytes = field(repr=False)


@protocol("audit", "Aumann and Lindell, TCC 2007; docs/audited.md", [
    Message("promised", "Q", "S", "digests of uniform words", "what Q promises to deal, by digest, and its signature"),
    Message("promised_on", "S", "A", "digests of uniform words", "what Q promises to deal, and its signature"),
    Message("shown", "S", "A", "streams of calls that are not used", "k_QS of the calls that are not used"),
    Message("looked", "A", "S", "always the same", "that it has looked, and found nothing"),
    Message("chosen", "S", "Q", "a draw of k_SA", "which of its calls is used"),
])  # fmt: skip
def audit(
    net: Net, count: int, promise: Callable[[], torch.Tensor], show: Callable[[torch.Tensor], torch.Tensor],
    look: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[int, torch.Tensor]:  # fmt: skip
    """Choose which of `count` calls is used, after A has checked all others.

    Args:
        promise: called at Q; returns the message of a `Promise`, uint8: 64 bytes a call, and a signature of 64.
        show: called at S with the number of the call that is used; returns the keys of S's streams with Q, 32 bytes a
            call, zeros for the call that is used.
        look: called at A with that number, the promise and the keys; returns one byte or raises FalseDealingError.

    Returns:
        The number of the call that is used, from 0, and the message of the promise, as S has it.

    Rounds 4, as S waits for A before it tells Q the choice; 64 bytes a call and 64 from Q to S, 96 a call and 64 from S
    to A, 1 from A to S, 8 from S to Q. S learns digests of what it will be dealt; A learns S's streams of calls that
    are never used; Q learns which call is used.

    Raises:
        FalseDealingError: at A, where a checked call is not as promised.
    """
    Q, A, S = net.Q, net.A, net.S
    length = 2 * count * DIGEST_BYTES + SIGNATURE_BYTES
    promised = net.fresh(Q, with_shapes(lambda: _bytes_of(length))(promise)).send(Q, S, "promised")
    chosen = compute(_chosen, net.common(A, S, (1,), "chosen"), count)
    shown = net.fresh(S, with_shapes(lambda *_: _bytes_of(count * SECRET_BYTES))(show), chosen.at("S"))
    shown, at_A = shown.send(S, A, "shown"), promised.send(S, A, "promised_on")
    net.check(A, with_shapes(lambda *_: _bytes_of(1))(look), chosen, at_A, shown).send(A, S, "looked")
    chosen = chosen.send(S, Q, "chosen")  # S has waited for A: steps run one by one here, and are never traced
    return int(net.agreed(chosen, (Q, A, S))), net.read(promised, S)


def _bytes_of(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


@leaf
def _chosen(word: torch.Tensor, count: int) -> torch.Tensor:
    """A number below `count`, from 63 random bits: no number is likelier than another by more than count / 2^63."""
    return torch.bitwise_and(word, (1 << 63) - 1) % count
