"""S's signed statement of the messages of a call, and Q's note whether it was a decoy.

Covert security against S: S computes its part of each call, then signs digests of all its messages of that call, and
only then Q tells A whether the call was on an input that Q has made up. For such a call Q names the key of its streams
with S, and A computes all of S's messages again (`sectorch/decoys.py`). So whatever S does, it does before it can know.

The digests of an edge are HMACs under a key that both its ends draw from the call's streams. A plain hash would let A
search for a small input, and Q for a small weight: each knows the other's mask. Q's note and A's report go through S
under AES-GCM with keys of k_QA, and have one length.

Source: Aumann and Lindell, TCC 2007 (covert adversaries); Asharov and Orlandi, ASIACRYPT 2012 (with public evidence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ...choreography import Message, Net, Phase, protocol
from ...choreography.located import with_shapes
from ...choreography.run.replay import DIGEST_BYTES, EDGES, PHASES
from ...errors import FalseServerError
from .key_agreement import KEY_BYTES, SIGNATURE_BYTES

_CONTEXT = b"sectorch v1 statement of a call"
DIGESTS = [(*edge, phase) for edge in EDGES for phase in PHASES]
"""The digests of a statement in their order: edges by role, and phase."""
STATEMENT_BYTES = (3 + len(DIGESTS)) * DIGEST_BYTES + KEY_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Statement:
    """What S signs after its last message of a call.

    Attributes:
        session, program, call: the session's name, the program's digest and the call's number.
        with_Q, with_A: SHA-256 of the keys of S's two streams in that call, so that nobody can name others later.
        setup: a digest of the messages of the setup that S has received for this program.
        digests: of S's messages, by edge and phase (`DIGESTS`).
        public, signature: S's identity key, and its signature.
    """

    session: bytes
    program: str
    call: int
    with_Q: bytes
    with_A: bytes
    setup: bytes
    digests: Mapping[tuple[str, str, Phase], bytes]
    public: bytes
    signature: bytes = b""

    def signed_bytes(self) -> bytes:
        """What is signed; every part is preceded by its length."""
        digests = [self.digests[name] for name in DIGESTS]
        parts = (
            _CONTEXT, self.session, self.program.encode(), self.call.to_bytes(8, "big"), self.with_Q, self.with_A,
            self.setup, *digests, self.public,
        )  # fmt: skip
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def to_message(self) -> bytes:
        """The message: the parts that the other parties do not know."""
        digests = b"".join(self.digests[name] for name in DIGESTS)
        return self.with_Q + self.with_A + self.setup + digests + self.public + self.signature

    @classmethod
    def from_message(cls, session: bytes, program: str, call: int, message: bytes) -> Statement:
        """Read a message that `to_message` has written, for this call."""
        words = [message[at : at + DIGEST_BYTES] for at in range(0, (3 + len(DIGESTS)) * DIGEST_BYTES, DIGEST_BYTES)]
        public, signature = message[-KEY_BYTES - SIGNATURE_BYTES : -SIGNATURE_BYTES], message[-SIGNATURE_BYTES:]
        digests = dict(zip(DIGESTS, words[3:], strict=True))
        return cls(session, program, call, words[0], words[1], words[2], digests, public, signature)

    def check(self) -> None:
        """Raise FalseServerError unless the signature is by the key that the statement names."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(self.signature, self.signed_bytes())
        except (InvalidSignature, ValueError):
            raise FalseServerError(f"S has not signed what it states of call {self.call}") from None


NOTE_BYTES = 1 + 3 * DIGEST_BYTES + 16
"""A note's bytes on the way: kind, stream key, seed, digest of the statement, and the tag of AES-GCM."""
REPORT_BYTES = 1 + 2 * 8 + 16
"""A report's bytes on the way: whether S was found out, and two counts."""


@protocol("attest", "Aumann and Lindell, TCC 2007; docs/decoys.md", [
    Message("statement_Q", "S", "Q", "keyed digests of what was sent", "what S states of the call, and its signature"),
    Message("statement_A", "S", "A", "keyed digests of what was sent", "what S states of the call, and its signature"),
    Message("note", "Q", "S", "AES-GCM under a key of k_QA"),
    Message("note_on", "S", "A", "AES-GCM under a key of k_QA", "whether the call was a decoy, and then its keys"),
    Message("report", "A", "S", "AES-GCM under a key of k_QA"),
    Message("report_on", "S", "Q", "AES-GCM under a key of k_QA", "that A has the note, and what it found before"),
])  # fmt: skip
def attest(
    net: Net, state: Callable[[], torch.Tensor], note: Callable[[torch.Tensor], torch.Tensor],
    look: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], accept: Callable[[torch.Tensor], torch.Tensor],
) -> None:  # fmt: skip
    """Let S state what it received and sent in a call, and then Q tell A whether it was a decoy.

    Q uses the result after A has confirmed the note. Otherwise an S that has sent something false could hold back every
    note, and no decoy would be checked.

    Args:
        state: at S: the message of its `Statement`.
        note: at Q, with the statement: checks it, and returns the sealed note to A.
        look: at A, with the statement and the note: checks both, takes note of a decoy, and returns the sealed report.
        accept: at Q, with the report: checks it. Returns one byte.

    Rounds 5, after S's last message of the call; 448 bytes from S to Q and to A, 113 from Q to A and 33 from A to Q,
    both through S. S learns that a call was made, as it does anyway: notes are of one length. A learns which calls were
    decoys, and of these the stream of Q and S. Q learns how many decoys A has checked.

    Raises:
        FalseServerError: at Q or A, the statement is not of what this party sent and received, or A has found S out.
    """
    Q, A, S = net.Q, net.A, net.S
    statement = net.fresh(S, with_shapes(lambda: _bytes_of(STATEMENT_BYTES))(state))
    at_Q, at_A = statement.send(S, Q, "statement_Q"), statement.send(S, A, "statement_A")
    noted = net.check(Q, with_shapes(lambda *_: _bytes_of(NOTE_BYTES))(note), at_Q)
    noted = noted.send(Q, S, "note").send(S, A, "note_on")
    report = net.check(A, with_shapes(lambda *_: _bytes_of(REPORT_BYTES))(look), at_A, noted)
    report = report.send(A, S, "report").send(S, Q, "report_on")
    net.check(Q, with_shapes(lambda *_: _bytes_of(1))(accept), report)


def _bytes_of(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")
