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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ...config import MOST_AUDITED
from ...errors import ArgumentError, RefusedError
from ...tables.release import Policy, PolicyError, ReleaseGovernor
from ..commands import array_files
from ..messages import Flag, Names, in_file, read_table, short_repr
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
from .proposals import Proposal
from .reveals import Bound, bounds_of, uncovered_reveals

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
