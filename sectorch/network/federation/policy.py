"""The acceptance rules of a party, tables [[accept]] of its own file: what it takes part in, and with which inputs.

[[accept]]                              # a program on this party's disk, as it was when it was accepted
program = "secure_sum.py:program"
source = "9c7a..."                      # SHA-256 of the file, as sha256sum prints it
traced = "86a5..."                      # digest of its messages; left out if they depend on inputs, and then
reveals = ["reveal:collector=4"]        # elements that others may learn beyond what a dry run finds
parties = ["north", "south", "west", "collector"]
from = ["collector"]                    # who may start it
inputs = { H1 = "a.npy" }               # of this party, read when a run begins
runs = 10                               # at most, in all

[[accept]]                              # a paper's command
paper = "capride"
settings = "1f03..."                    # digest of all its settings but those that `most` bounds
most = { rounds = 20 }
parties = ["north", "south"]
from = ["north", "south"]

[[accept]]                              # any inference of a model
model = "model.safetensors"
clients = ["alice", "bob"]
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import UNSET, Meta, UnsetType

from ...config import MOST_AUDITED
from ...errors import ArgumentError, FrameError, IdentityError, RefusedError
from ...tables.release import Policy, PolicyError, ReleaseGovernor
from ..commands import array_files
from ..identity.identity import fingerprint
from ..messages import Flag, Names, Run, SignedNote, Time, in_file, parse_message, read_table, short_repr
from ..names import NAME, readable
from .broker import CLOCKS, LONGEST
from .config import FederationFile, PartyConfig
from .programs import (
    ProgramReport,
    Source,
    command_of,
    dry_run_program,
    own_words,
    settings_digest,
    settings_of,
    source_of,
)
from .reveals import Bound, bounds_of, uncovered_reveals

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


_HASH = "of 64 digits; `sectorch federation accept` writes it"
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description=_HASH)]
_Traced = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z", description=_HASH)]
_Text = Annotated[str, Meta(description="a text")]
_Runs = Annotated[int, Meta(ge=0, description="a whole number")]


class _Model(msgspec.Struct, frozen=True):
    model: _Text
    clients: Names
    unchecked: Flag = False
    audited: Annotated[int, Meta(ge=1, le=MOST_AUDITED, description=f"1 to {MOST_AUDITED} calls")] = 1
    verified: Flag = False
    imprecise: Flag = False


class _Program(msgspec.Struct, frozen=True):
    program: _Text
    source: _Digest
    parties: Names
    starters: Names = msgspec.field(name="from")
    traced: _Traced = ""
    reveals: Annotated[list[str], Meta(description='bounds, as ["reveal:alpha=1"]')] = []
    inputs: Annotated[dict[str, str], Meta(description='files by name, as { H1 = "a.npy" }')] = {}
    runs: _Runs = 0


class _Paper(msgspec.Struct, frozen=True):
    paper: _Text
    settings: _Digest
    parties: Names
    starters: Names = msgspec.field(name="from")
    most: Annotated[
        dict[str, int | float], Meta(description="numbers by the name of a setting, as { rounds = 20 }")
    ] = {}
    own: Annotated[
        dict[str, str | int | float], Meta(description='values by the name of a setting, as { budgets = "mine" }')
    ] = {}
    runs: _Runs = 0


_KINDS = {"program": _Program, "paper": _Paper, "model": _Model}


@dataclass(frozen=True)
class AcceptanceRule:
    """One table [[accept]].

    Args:
        kind: "program", "paper" or "model". what: a program's path and function, a paper's name, or a model's path.
        digest: of the program's source, or of the paper's settings.
        starters: parties that may start it, or query the model. runs: largest number of runs; 0 sets no limit.
        reveals: bounds of reveals that the dry run does not find.
        most: largest values of some settings. own: arguments of a paper's command that this party decides.
    """

    kind: str
    what: str
    digest: str = ""
    traced: str = ""
    parties: tuple[str, ...] = ()
    starters: tuple[str, ...] = ()
    runs: int = 0
    inputs: Mapping[str, Path] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    unchecked: bool = False
    audited: int = 1
    verified: bool = False
    imprecise: bool = False
    reveals: tuple[Bound, ...] = ()

    @property
    def key(self) -> str:
        """The name under which its runs are counted."""
        return f"{self.what} {self.digest}"


@dataclass(frozen=True)
class AcceptedRun:
    """A run that a party takes part in: the proposal, the rule that accepts it, and the source on its own disk.

    `governor` is the party's policy and ledger, which its releases are held to, or None.
    """

    proposal: Proposal
    accepted: AcceptanceRule
    source: Source | None = None
    governor: ReleaseGovernor | None = None

    def inputs(self) -> dict[str, torch.Tensor]:
        """Raises ArgumentError: one cannot be read."""
        return {name: tensor_in(path, name) for name, path in self.accepted.inputs.items()}


class AcceptancePolicy:
    """The rules of a party. The constructor checks the tables, and `check` the files that they name.

    Raises:
        ArgumentError: a table is invalid, or names parties that are not in the federation.
    """

    def __init__(self, own: PartyConfig, federated: FederationFile, name: str):
        self._own, self._file, self._name = own, federated, name
        try:
            self.accepted = tuple(_rule(entry, own, federated) for entry in own.accept)
        except ArgumentError as error:
            raise in_file(error, own.path) from None
        self.governor = governor_of(own)
        if sum(entry.kind == "model" for entry in self.accepted) > 1:
            raise ArgumentError(f"{own.path}: a party answers with one model; its tables name several")

    @property
    def model(self) -> AcceptanceRule | None:
        """The rule of the model that this party answers with, if there is one."""
        return next((entry for entry in self.accepted if entry.kind == "model"), None)

    def check(self) -> None:
        """Check that all accepted programs and inputs are as they were when they were accepted.

        Raises:
            ArgumentError: one is not, or a program needs a role or an edge that the federation lacks.
        """
        for entry in self.accepted:
            if entry.kind == "paper" and self.governor is not None:
                raise ArgumentError(f"{self._own.path}: {_PAPER_UNGOVERNED.format(entry.what)}")
            if entry.kind == "program":
                source = self._source(entry)
                found = dry_run_program(source, self._file)
                if found.traced != entry.traced:
                    raise ArgumentError(
                        f"{source.path} does something else than when it was accepted, with the same source (digest "
                        f"{found.traced[:16] or 'none'}, accepted {entry.traced[:16] or 'none'}): sectorch, or what it "
                        f"imports, is another version; accept it again"
                    )
                check_bounded(found, entry.reveals, source.name)
                check_governed(found, entry.reveals, source.name, self.governor)
                for input_, path in entry.inputs.items():
                    tensor_in(path, input_)

    def _source(self, entry: AcceptanceRule) -> Source:
        source = source_of(entry.what, self._own.path.parent)
        if source.digest != entry.digest:
            raise ArgumentError(
                f"{source.path} was changed since '{self._name}' accepted it (SHA-256 {source.digest[:16]}, accepted "
                f"{entry.digest[:16]}): look at it, and accept it again with `sectorch federation accept`, or put the "
                f"old one back"
            )
        return source

    def agree(self, proposal: Proposal) -> AcceptedRun:
        """The run of a proposal that a rule accepts.

        Raises:
            RefusedError: no rule accepts it; the proposer gets the reason of the first rule of that name.
        """
        me = self._name
        if proposal.version != metadata.version("sectorch"):
            raise RefusedError(
                f"'{me}' has sectorch {metadata.version('sectorch')}, and the proposal is of {proposal.version}"
            )
        if me not in proposal.parties:
            raise RefusedError(f"'{me}' is not among the parties of the proposal: {', '.join(proposal.parties)}")
        program = proposal.kind == "program"
        name = proposal.function if program else proposal.name
        near = [
            rule
            for rule in self.accepted
            if rule.kind == proposal.kind and (rule.what.rpartition(":")[2] if program else rule.what) == name
        ]
        if not near:
            raise RefusedError(f"'{me}' has accepted no {proposal.kind} '{short_repr(proposal.name)[1:-1]}'")
        refusals = []
        for entry in near:
            try:
                return self._match(entry, proposal)
            except (RefusedError, ArgumentError) as error:
                # Errors in this party's files, whose texts have paths, are for its own log.
                own = isinstance(error, ArgumentError)
                refusals.append(RefusedError(f"'{me}' cannot run it: its own log says why") if own else error)
                refusals[-1].__cause__ = error if own else None
        raise refusals[0]

    def _match(self, entry: AcceptanceRule, proposal: Proposal) -> AcceptedRun:
        me = self._name
        if proposal.by not in entry.starters:
            raise RefusedError(f"'{me}' does not let '{proposal.by}' start it, but {', '.join(entry.starters)}")
        if set(proposal.parties) != set(entry.parties) or len(proposal.parties) != len(entry.parties):
            raise RefusedError(
                f"'{me}' has accepted it with {', '.join(entry.parties)}, and not with {', '.join(proposal.parties)}"
            )
        if entry.kind == "paper":
            if self.governor is not None:
                raise RefusedError(f"'{me}' releases under a policy, and {entry.what} does not")
            _check_settings(me, entry, proposal)
            return AcceptedRun(proposal, entry)
        if proposal.source != entry.digest or proposal.traced != entry.traced:
            raise RefusedError(
                f"'{me}' has accepted {proposal.name} with source {entry.digest[:16]} and steps "
                f"{entry.traced[:16] or 'none'}, and the proposal says {short_repr(proposal.source[:16])[1:-1]} and "
                f"{short_repr(proposal.traced[:16])[1:-1] or 'none'}"
            )
        return AcceptedRun(proposal, entry, self._source(entry), self.governor)


_PAPER_UNGOVERNED = "[governed] covers programs, and what {} reveals is under no policy; leave one of them out"


def governor_of(own: PartyConfig) -> ReleaseGovernor | None:
    """The policy and the ledger of [governed] in a party's own file, or None.

    Raises:
        ArgumentError: the policy cannot be read, or is none.
    """
    if own.policy is None or own.ledger is None:
        return None
    try:
        return ReleaseGovernor(Policy.read(own.policy), own.ledger)
    except PolicyError as error:
        raise ArgumentError(str(error)) from None


def check_governed(found: ProgramReport, bounds: Sequence[Bound], name: str, governor: ReleaseGovernor | None) -> None:
    """Raises ArgumentError: a program reveals something in no release under this party's policy."""
    if governor is None:
        return
    left = uncovered_reveals(found.reveals, governor.policy.digest, bounds)
    if left:
        raise ArgumentError(
            f"{name} reveals what this party's policy ({governor.policy.digest[:16]}, {governor.policy.text}) does not "
            f"cover: {left[0].text}"
            + (f", and {len(left) - 1} reveals more" if len(left) > 1 else "")
            + ". Let the program release statistics by sectorch.release under that policy (tensors with counts of its "
            "own need plain = true there); what is no result, such as an "
            "announced shape, needs a bound that names its protocol, --reveals announce:PARTY=ELEMENTS"
        )


def check_bounded(found: ProgramReport, bounds: Sequence[Bound], name: str) -> None:
    """Raises ArgumentError: the dry run stopped, so that not all reveals are known, and there are no bounds."""
    if not found.complete and not bounds:
        raise ArgumentError(
            f"what {name} reveals cannot be worked out without inputs: its dry run ended with: {found.stopped}. Name "
            f"the shapes (sectorch.share(..., shape=)) in place of announcing them; or accept it with --reveals "
            f"PARTY=ELEMENTS, how much each party may learn at most in one run, which is enforced while it runs"
        )


def _check_settings(me: str, entry: AcceptanceRule, proposal: Proposal) -> None:
    try:
        settings = settings_of(entry.what, proposal.arguments)
    except Exception as error:  # settings classes raise several types
        raise RefusedError(f"'{me}' cannot read the settings: {' '.join(str(error).split())}") from None
    for name, most in entry.most.items():
        value = settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= most:
            raise RefusedError(f"'{me}' accepts {name} up to {most:g}, got {short_repr(value)}")
    digest = settings_digest(entry.what, settings, tuple(entry.most))
    if digest != entry.digest:
        raise RefusedError(f"'{me}' has accepted settings {entry.digest[:16]}, and the proposal's are {digest[:16]}")


def tensor_in(path: Path, name: str) -> torch.Tensor:
    """The one array of a file. Raises ArgumentError."""
    found = array_files.read_arrays(path)
    if not isinstance(found, torch.Tensor):
        raise ArgumentError(f"{path} holds several arrays; the input {name} takes one: a .npy")
    return found


def _rule(said: Mapping[str, Any], own: PartyConfig, federated: FederationFile) -> AcceptanceRule:
    kinds = [kind for kind in _KINDS if kind in said]
    if len(kinds) != 1 or not isinstance(said[kinds[0]], str):
        raise ArgumentError(f"a table [[accept]] names one of {', '.join(_KINDS)}, got {', '.join(said) or 'nothing'}")
    (kind,) = kinds
    if kind == "paper":
        command_of(said[kind])
    entry = read_table(_KINDS[kind], said, f"an [[accept]] of a {kind}")
    names = lambda given: tuple(federated.member(name).name for name in given)
    if isinstance(entry, _Model):
        return AcceptanceRule(
            kind, entry.model, starters=names(entry.clients), unchecked=entry.unchecked, audited=entry.audited,
            verified=entry.verified, imprecise=entry.imprecise,
        )  # fmt: skip
    parties, starters, runs = names(entry.parties), names(entry.starters), entry.runs
    if isinstance(entry, _Paper):
        words = own_words(entry.paper, entry.own, own.path.parent)
        return AcceptanceRule(
            kind, entry.paper, entry.settings, "", parties, starters, runs, most=entry.most, own=tuple(words)
        )
    inputs = {name: own.resolve(path) for name, path in entry.inputs.items()}
    reveals = bounds_of(entry.reveals, lambda name: federated.member_named(name).name)
    return AcceptanceRule(
        kind, entry.program, entry.source, entry.traced, parties, starters, runs, inputs, reveals=reveals
    )


def table_text(kind: str, what: str, facts: Iterable[tuple[str, Any]]) -> str:
    """A table [[accept]] as text; entries that are empty are left out."""
    return "\n".join(["[[accept]]", f"{kind} = {_toml(what)}", *(f"{k} = {_toml(v)}" for k, v in facts if v)]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in value)
    return f'"{escaped}"'
