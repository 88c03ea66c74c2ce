"""What parties that are up say to each other before and after a program: signed notes, which the server hands on.

Every note names its signer, the federation's digest and a nonce, and is signed with the identity key that the
federation file names, under the word for its kind: the server cannot make one up, change it, or pass it off as another
kind. A proposal is good for minutes, and once.
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
"""Seconds for which a proposal is good, by the clocks of both."""
_Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """What a note says of a run.

    Attributes:
        by: who says it. federation: the digest of its federation file.
        run: the proposal's nonce. proposal: the proposal's digest.
    """

    by: str
    run: str
    federation: str
    proposal: str


class YesOrNo(Word, frozen=True, kw_only=True, tag="answer"):
    """Yes or no to a proposal, and why not; without a proposal's digest where it is no."""

    yes: bool
    why: str


class Begin(Word, frozen=True, kw_only=True, tag="begin"):
    """All have said yes."""


class Cancel(Word, frozen=True, kw_only=True, tag="cancel"):
    """Whoever proposed it stops it."""


class Ended(Word, frozen=True, kw_only=True, tag="ended"):
    """A party's part has ended: "done", or what ended it; and then what it cost and the shapes of what it learned."""

    outcome: str
    seconds: float | UnsetType = UNSET
    learned: dict[str, list[int]] | UnsetType = UNSET
    rounds: int | UnsetType = UNSET
    online_bytes: int | UnsetType = UNSET
    offline_bytes: int | UnsetType = UNSET


class Proposed(msgspec.Struct, frozen=True):
    """A note that proposes a run; what `proposal_of` finds wrong in its body, the proposer is told."""

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


def open_note(note: SignedNote, federated: FederationFile) -> Proposed | Word:
    """What a note says, whose signature is right and whose signer is in the federation; see `check_same` too.

    Raises:
        FrameError: it is none. IdentityError: somebody else has signed it.
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
        word = parse_message(Proposed, {**body, "body": body}, "note")
    else:
        word = parse_message(YesOrNo | Begin | Cancel | Ended, body, "note")
    member = next((m for m in federated.members if m.name == word.by), None)
    if member is None or fingerprint(key) != member.identity:
        raise IdentityError(f"a note in the name of {ascii(word.by)[:70]} that another key has signed")
    return word


def check_same(word: Proposed, federated: FederationFile) -> None:
    """Raises RefusedError: the signer of a note has another federation file."""
    if word.federation != federated.digest:
        raise RefusedError(
            f"'{word.by}' has another federation file (digest {readable(word.federation, 16)}, here "
            f"{federated.digest[:16]}): all need the same"
        )


def _message(text: str) -> bytes:
    return b"sectorch v1 note\x00" + text.encode()


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a party proposes to run: names, digests and public settings, and no code.

    Args:
        by: the party that proposes it. parties: that take part.
        kind: "program" or "paper". name: for people; a paper's is its command's.
        source, function, traced: of a program; see `programs.py`. arguments: of a paper.
        job: which of several of the same program, or paper and settings; the same one goes on where it was.
        nonce: names the run; fresh for each.
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
        """As a note says it."""
        return {**msgspec.to_builtins(self), "run": self.nonce}

    @property
    def digest(self) -> str:
        """What the parties' sessions are bound to: all of it."""
        return hashlib.sha256(json.dumps(self.body(), sort_keys=True).encode()).hexdigest()

    def check_time(self) -> None:
        """Raises RefusedError: it is too old, or from the future."""
        age = time.time() - self.time
        if abs(age) > VALID:
            when = f"{age:.0f} s old" if age > 0 else f"{-age:.0f} s ahead of this party's clock"
            raise RefusedError(
                f"the proposal is {when}, at most {VALID:.0f} are let pass: propose again, and set the clocks (NTP)"
            )


def proposal_of(word: Proposed) -> Proposal:
    """The proposal that a note has. Raises FrameError: it has none."""
    said = {name: value for name, value in word.body.items() if name not in ("kind", "run")}
    missing = {field.encode_name for field in msgspec.structs.fields(Proposal)} - said.keys()
    proposal = parse_message(Proposal, said, "proposal")
    if missing or proposal.nonce != word.run:
        raise FrameError("a proposal that does not say all, or is of another run than its nonce")
    return proposal
