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
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ...errors import FrameError, IdentityError, RefusedError
from ..identity.identity import fingerprint
from ..names import NAME, readable
from .file import Federated
from .notes import CLOCKS, LONGEST

VALID = CLOCKS
"""Seconds for which a proposal is good, by the clocks of both."""
KINDS = ("proposal", "answer", "begin", "cancel", "ended")


def signed(kind: str, body: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, str]:
    """A note as it goes over the network."""
    text = json.dumps({**body, "kind": kind}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > LONGEST - 400:
        raise FrameError(f"a note of {len(text)} bytes; at most {LONGEST - 400}")
    return {
        "body": text, "key": key.public_key().public_bytes_raw().hex(), "signature": key.sign(_message(text)).hex(),
    }  # fmt: skip


def opened(note: Any, federated: Federated) -> dict[str, Any]:
    """What a note says, whose signature is right and whose signer is in the federation; see `check_same` too.

    Raises:
        FrameError: it is none. IdentityError: somebody else has signed it.
    """
    try:
        text, key, signature = str(note["body"]), bytes.fromhex(note["key"]), bytes.fromhex(note["signature"])
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _message(text))
        body = json.loads(text)
    except InvalidSignature:
        raise IdentityError("a note whose signature is not right: it was changed on the way, or made up") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise FrameError("a note that is none") from None
    known = isinstance(body, dict) and body.get("kind") in KINDS
    if not known or not isinstance(body.get("by"), str) or not isinstance(body.get("run"), str):
        raise FrameError("a note of no kind that this version knows")
    member = next((m for m in federated.members if m.name == body["by"]), None)
    if member is None or fingerprint(key) != member.identity:
        raise IdentityError(f"a note in the name of {ascii(body['by'])[:70]} that another key has signed")
    return body


def check_same(body: Mapping[str, Any], federated: Federated) -> None:
    """Raises RefusedError: the signer of a note has another federation file."""
    if body.get("federation") != federated.digest:
        raise RefusedError(
            f"'{body['by']}' has another federation file (digest {readable(str(body.get('federation')), 16)}, here "
            f"{federated.digest[:16]}): all need the same"
        )


def _message(text: str) -> bytes:
    return b"sectorch v1 note\x00" + text.encode()


@dataclass(frozen=True)
class Proposal:
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
    parties: tuple[str, ...]
    kind: str
    name: str
    source: str = ""
    function: str = ""
    traced: str = ""
    arguments: tuple[str, ...] = ()
    job: str = "1"
    version: str = field(default_factory=lambda: metadata.version("sectorch"))
    nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    time: float = field(default_factory=time.time)

    def body(self) -> dict[str, Any]:
        """As a note says it."""
        said = {**vars(self), "run": self.nonce}
        said["what"] = said.pop("kind")
        return said

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


def proposal_of(body: Mapping[str, Any]) -> Proposal:
    """The proposal that a note has. Raises FrameError: it has none."""
    said = {name: value for name, value in body.items() if name not in ("run", "what")}
    said["kind"] = body.get("what")
    lists = {"parties": list, "arguments": list}
    fields = Proposal.__dataclass_fields__
    texts = {name: str for name in fields if name not in (*lists, "time")}
    right = set(said) == set(fields) and all(isinstance(said[n], t) for n, t in (lists | texts).items())
    if not right or type(said["time"]) not in (int, float) or not abs(said["time"]) < 1e12:
        raise FrameError("a proposal that is none")
    names, arguments = said["parties"], said["arguments"]
    if not all(isinstance(x, str) for x in (*names, *arguments)) or not all(NAME.fullmatch(x) for x in names):
        raise FrameError("a proposal whose parties are no names")
    if said["kind"] not in ("program", "paper") or not NAME.fullmatch(said["job"]) or body["run"] != said["nonce"]:
        raise FrameError("a proposal of no kind that this version knows")
    if len(said["nonce"]) != 32 or not all(c in "0123456789abcdef" for c in said["nonce"]):
        raise FrameError("a proposal without a nonce")
    return Proposal(**{**said, "parties": tuple(names), "arguments": tuple(arguments), "time": float(said["time"])})
