"""Which of several calls is used, of those whose dealing Q has promised; the others are looked at.

Covert security (Aumann and Lindell, TCC 2007) by cut and choose: Q promises what it will deal in n calls by a digest of
each, and signs them. Which one is used, A and S draw from k_SA, of which Q knows nothing. For each of the others S
shows A its stream of that call with Q. A has the other stream, recomputes what Q has to deal, and compares. Only then
is Q told: who leaves when it hears that a false one was looked at has left evidence by then. It deals for the one that
is used, and S holds it to its digest.

Every call has streams of its own (`PairKey.of_call`), so that the ones that are shown say nothing of the one that is
used, and what is shown has hidden nothing: no query was ever under it. The digests are under keys that A lacks until
they are shown, or it could try out what few bits it does not know. Looking takes no part in a query, so that an abort
says nothing about the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ...choreography import Message, Net, leaf, protocol
from ...choreography.located import compute, with_shapes
from ...choreography.run.dealer_replay import DIGEST_BYTES
from ...choreography.streams import SECRET_BYTES
from ...errors import FalseDealingError
from .key_agreement import SIGNATURE_BYTES

_CONTEXT = b"sectorch v1 promised dealing"


@dataclass(frozen=True)
class Promise:
    """What Q signs before it knows which call is used.

    Attributes:
        session, program: their names: of the session, and the program's digest.
        calls: the numbers of the calls. digests: of what is dealt in each.
        streams: SHA-256 of the two keys that it is dealt from, with A's first: so that nobody can name others later.
        signature: Q's, by its identity key.
    """

    session: bytes
    program: str
    calls: tuple[int, ...]
    digests: tuple[bytes, ...]
    streams: tuple[bytes, ...]
    signature: bytes = b""

    def statement(self) -> bytes:
        """What is signed; every part carries its length."""
        calls = b"".join(call.to_bytes(8, "big") for call in self.calls)
        said = (b"".join(self.digests), b"".join(self.streams))
        parts = (_CONTEXT, self.session, self.program.encode(), calls, *said)
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def sent(self) -> bytes:
        """The message: what the other parties do not know of it."""
        return b"".join(self.digests) + b"".join(self.streams) + self.signature

    @classmethod
    def read(cls, session: bytes, program: str, calls: tuple[int, ...], sent: bytes) -> Promise:
        """What came, for these calls."""
        words = [sent[at : at + DIGEST_BYTES] for at in range(0, 2 * len(calls) * DIGEST_BYTES, DIGEST_BYTES)]
        digests, streams = tuple(words[: len(calls)]), tuple(words[len(calls) :])
        return cls(session, program, calls, digests, streams, sent[-SIGNATURE_BYTES:])

    def check(self, public: bytes) -> None:
        """Raise FalseDealingError unless it is signed by this key."""
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(self.signature, self.statement())
        except (InvalidSignature, ValueError):
            raise FalseDealingError("what Q promises to deal is not signed by the key that it proved") from None


@dataclass(frozen=True)
class Evidence:
    """That Q has promised what is not the dealing of a call: for A to keep, and to show.

    Attributes:
        promise: signed. public: the key that Q proved, of 32 bytes.
        call: the one of its calls that was looked at. found: the digest of the dealing as its streams give it.
        with_A, with_S: the keys of Q's streams in that call, which hides nothing.
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
    """Which of `count` calls is used, after A has looked at all others.

    Args:
        promise: at Q, gives `promised`, uint8: 64 bytes a call, and a signature of 64.
        show: at S, of the number in its place: 32 bytes a call, zeros for the one that is used.
        look: at A, of the number, what was promised and what was shown; gives one byte, or raises FalseDealingError.

    Returns:
        its number, from 0, and what was promised, as S has it.

    Rounds 4, as S waits for A before it tells Q; 64 bytes a call and 64 from Q to S, 96 a call and 64 from S to A, 1
    from A to S, 8 from S to Q. S learns digests of what it will be dealt; A learns S's streams of calls that are never
    used.
    """
    Q, A, S = net.Q, net.A, net.S
    length = 2 * count * DIGEST_BYTES + SIGNATURE_BYTES
    promised = net.fresh(Q, with_shapes(lambda: _bytes_of(length))(promise)).send(Q, S, "promised")
    chosen = compute(_chosen, net.common(A, S, (1,), "chosen"), count)
    shown = net.fresh(S, with_shapes(lambda *_: _bytes_of(count * SECRET_BYTES))(show), chosen.at("S"))
    shown, at_A = shown.send(S, A, "shown"), promised.send(S, A, "promised_on")
    net.check(A, with_shapes(lambda *_: _bytes_of(1))(look), chosen, at_A, shown).send(A, S, "looked")
    chosen = chosen.send(S, Q, "chosen")  # S has waited for A: a call is taken verb by verb here, and never traced
    return int(net.agreed(chosen, (Q, A, S))), net.read(promised, S)


def _bytes_of(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


@leaf
def _chosen(word: torch.Tensor, count: int) -> torch.Tensor:
    """A number below count: of 63 bits, so that none is likelier by more than count / 2^63."""
    return torch.bitwise_and(word, (1 << 63) - 1) % count
