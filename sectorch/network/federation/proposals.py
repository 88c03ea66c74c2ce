"""Proposals to run a program, and the other signed notes that parties which are up exchange through the server.

A note has its author, the federation's digest, a nonce and its kind, and is signed with the identity key that the
federation file names. So the server cannot forge a note, change it, or turn it into one of another kind. A proposal is
valid once, for some minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Any, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import UNSET, Meta, UnsetType

from ...errors import FrameError, IdentityError, RefusedError
from ..identity.identity import fingerprint
from ..messages import Run, SignedNote, Time, parse_message
from ..names import NAME, readable
from .broker import CLOCKS, LONGEST
from .config import FederationFile

VALID = CLOCKS
"""Seconds for which a proposal is valid, by the clocks of both parties."""
_Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """The content of a note about a run.

    Attributes:
        by: the author. federation: the digest of the author's federation file.
        run: the proposal's nonce. proposal: the proposal's digest.
    """

    by: str
    run: str
    federation: str
    proposal: str


class ProposalAnswer(Word, frozen=True, kw_only=True, tag="answer"):
    """The answer to a proposal; a no has a reason, and no digest of the proposal."""

    yes: bool
    why: str


class Begin(Word, frozen=True, kw_only=True, tag="begin"):
    """All parties have said yes: the run begins."""


class Cancel(Word, frozen=True, kw_only=True, tag="cancel"):
    """The proposer stops the run."""


class RunEnd(Word, frozen=True, kw_only=True, tag="ended"):
    """A party's part has ended: its outcome, "done" or an error, and the cost and the shapes of the results."""

    outcome: str
    seconds: float | UnsetType = UNSET
    learned: dict[str, list[int]] | UnsetType = UNSET
    rounds: int | UnsetType = UNSET
    online_bytes: int | UnsetType = UNSET
    offline_bytes: int | UnsetType = UNSET


class ProposalNote(msgspec.Struct, frozen=True):
    """A note that proposes a run. `proposal_of` checks its body later, so that the proposer gets the error."""

    by: str
    run: str
    federation: str
    body: dict[str, Any]


def sign_note(kind: str, body: Mapping[str, Any], key: Ed25519PrivateKey) -> SignedNote:
    """A note, signed under the word for its kind. Raises FrameError: it is too long."""
    text = json.dumps({**body, "kind": kind}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > LONGEST - 400:
        raise FrameError(f"a note of {len(text)} bytes; at most {LONGEST - 400}")
    return SignedNote(text, key.public_key().public_bytes_raw().hex(), key.sign(_message(text)).hex())


def open_note(note: SignedNote, federated: FederationFile) -> ProposalNote | Word:
    """A note's content, whose signature is right and whose author is in the federation; see `check_same`, too.

    Raises:
        FrameError: it is no note. IdentityError: its author has not signed it.
    """
    try:
        key = bytes.fromhex(note.key)
        Ed25519PublicKey.from_public_bytes(key).verify(bytes.fromhex(note.signature), _message(note.body))
        body = json.loads(note.body)
    except InvalidSignature:
        raise IdentityError("a note whose signature is not right: it was changed on the way, or made up") from None
    except (ValueError, RecursionError):
        raise FrameError("a note that is none") from None
    if isinstance(body, dict) and body.get("kind") == "proposal":
        word = parse_message(ProposalNote, {**body, "body": body}, "note")
    else:
        word = parse_message(ProposalAnswer | Begin | Cancel | RunEnd, body, "note")
    member = next((m for m in federated.members if m.name == word.by), None)
    if member is None or fingerprint(key) != member.identity:
        raise IdentityError(f"a note in the name of {ascii(word.by)[:70]} that another key has signed")
    return word


def check_same(word: ProposalNote, federated: FederationFile) -> None:
    """Raises RefusedError: the author of a proposal has another federation file."""
    if word.federation != federated.digest:
        raise RefusedError(
            f"'{word.by}' has another federation file (digest {readable(word.federation, 16)}, here "
            f"{federated.digest[:16]}): all need the same"
        )


def _message(text: str) -> bytes:
    return b"sectorch v1 note\x00" + text.encode()


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proposal to run a program or a paper: names, digests and public settings, and no code.

    Args:
        by: the proposer. parties: those that take part.
        kind: "program" or "paper". name: for people; a paper's is its command.
        source, function, traced: of a program; see `programs.py`. arguments: of a paper's command.
        job: tells apart runs of the same program, or paper and settings; a later run of a job continues it.
        nonce: a fresh name of the run.
    """

    federation: str
    by: str
    parties: tuple[_Name, ...]
    kind: Literal["program", "paper"] = msgspec.field(name="what")
    name: str
    source: str = ""
    function: str = ""
    traced: str = ""
    arguments: tuple[str, ...] = ()
    job: _Name = "1"
    version: str = msgspec.field(default_factory=lambda: metadata.version("sectorch"))
    nonce: Run = msgspec.field(default_factory=lambda: os.urandom(16).hex())
    time: Time = msgspec.field(default_factory=time.time)

    def body(self) -> dict[str, Any]:
        """The body of a note that proposes it."""
        return {**msgspec.to_builtins(self), "run": self.nonce}

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, to which the parties' sessions are bound."""
        return hashlib.sha256(json.dumps(self.body(), sort_keys=True).encode()).hexdigest()

    def check_time(self) -> None:
        """Raises RefusedError: it is too old, or from the future."""
        age = time.time() - self.time
        if abs(age) > VALID:
            when = f"{age:.0f} s old" if age > 0 else f"{-age:.0f} s ahead of this party's clock"
            raise RefusedError(
                f"the proposal is {when}, at most {VALID:.0f} are let pass: propose again, and set the clocks (NTP)"
            )


def proposal_of(word: ProposalNote) -> Proposal:
    """The proposal of a note. Raises FrameError: it has none."""
    body = {name: value for name, value in word.body.items() if name not in ("kind", "run")}
    missing = {field.encode_name for field in msgspec.structs.fields(Proposal)} - body.keys()
    proposal = parse_message(Proposal, body, "proposal")
    if missing or proposal.nonce != word.run:
        raise FrameError("a proposal that does not say all, or is of another run than its nonce")
    return proposal
