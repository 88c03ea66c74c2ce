"""What a party has accepted before anything of its own is used: the tables [[accept]] of its own file.

[[accept]]                              # a program on this party's disk, as it was when it was accepted
program = "secure_sum.py:program"
source = "9c7a..."                      # SHA-256 of the file, as sha256sum prints it
traced = "86a5..."                      # and of all that it sends; left out where inputs decide that, and then
reveals = ["reveal:collector=4"]        # so many elements may others learn beyond what a rehearsal finds
parties = ["north", "south", "west", "collector"]
from = ["collector"]                    # who may start it
inputs = { H1 = "a.npy" }               # of this party's own, read as a run begins
runs = 10                               # at most, in all

[[accept]]                              # a paper's command
paper = "capride"
settings = "1f03..."                    # digest of all its settings, but for those bounded by
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
from .reveals import Bound, bounds_of

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
    """One table.

    Args:
        kind: "program", "paper" or "model". what: its path and function, or its name.
        digest: of the program's source, or the paper's settings.
        starters: who may start it, or ask the model. runs: at most in all; any number if 0.
        reveals: how much others may learn beyond what the rehearsal finds.
        most: largest values of some settings. own: words of a paper's command line that this party adds for itself.
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
        """Of its runs, for counting them."""
        return f"{self.what} {self.digest}"


@dataclass(frozen=True)
class AcceptedRun:
    """What a party takes part in: the proposal, the table that accepts it, and the program's source on its own disk."""

    proposal: Proposal
    accepted: AcceptanceRule
    source: Source | None = None

    def inputs(self) -> dict[str, torch.Tensor]:
        """Raises ArgumentError: one cannot be read."""
        return {name: tensor_in(path, name) for name, path in self.accepted.inputs.items()}


class Policy:
    """All that a party accepts. Making it checks the tables; `check` their files too.

    Raises:
        ArgumentError: a table that is none, or of parties that are not in the federation.
    """

    def __init__(self, own: PartyConfig, federated: FederationFile, name: str):
        self._own, self._file, self._name = own, federated, name
        try:
            self.accepted = tuple(_accepted(entry, own, federated) for entry in own.accept)
        except ArgumentError as error:
            raise in_file(error, own.path) from None
        if sum(entry.kind == "model" for entry in self.accepted) > 1:
            raise ArgumentError(f"{own.path}: a party answers with one model; its tables name several")

    @property
    def model(self) -> AcceptanceRule | None:
        """The model that this party answers with."""
        return next((entry for entry in self.accepted if entry.kind == "model"), None)

    def check(self) -> None:
        """Whether all that is accepted is there as it was then.

        Raises:
            ArgumentError: it is not, or a program needs a role or an edge that the federation has not.
        """
        for entry in self.accepted:
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
        """What accepts a proposal.

        Raises:
            RefusedError: nothing does; the first line that comes near says why, as the proposer is told.
        """
        me = self._name
        if proposal.version != metadata.version("sectorch"):
            raise RefusedError(
                f"'{me}' has sectorch {metadata.version('sectorch')}, and the proposal is of {proposal.version}"
            )
        if me not in proposal.parties:
            raise RefusedError(f"'{me}' is not among the parties of the proposal: {', '.join(proposal.parties)}")
        near = [e for e in self.accepted if e.kind == proposal.kind and _name(e) == _proposed(proposal)]
        if not near:
            raise RefusedError(f"'{me}' has accepted no {proposal.kind} '{short_repr(proposal.name)[1:-1]}'")
        refusals = []
        for entry in near:
            try:
                return self._matched(entry, proposal)
            except (RefusedError, ArgumentError) as error:
                # What is wrong with this party's own files is for its own log, where paths may stand.
                own = isinstance(error, ArgumentError)
                refusals.append(RefusedError(f"'{me}' cannot run it: its own log says why") if own else error)
                refusals[-1].__cause__ = error if own else None
        raise refusals[0]

    def _matched(self, entry: AcceptanceRule, proposal: Proposal) -> AcceptedRun:
        me = self._name
        if proposal.by not in entry.starters:
            raise RefusedError(f"'{me}' does not let '{proposal.by}' start it, but {', '.join(entry.starters)}")
        if set(proposal.parties) != set(entry.parties) or len(proposal.parties) != len(entry.parties):
            raise RefusedError(
                f"'{me}' has accepted it with {', '.join(entry.parties)}, and not with {', '.join(proposal.parties)}"
            )
        if entry.kind == "paper":
            _check_settings(me, entry, proposal)
            return AcceptedRun(proposal, entry)
        if proposal.source != entry.digest or proposal.traced != entry.traced:
            raise RefusedError(
                f"'{me}' has accepted {proposal.name} with source {entry.digest[:16]} and steps "
                f"{entry.traced[:16] or 'none'}, and the proposal says {short_repr(proposal.source[:16])[1:-1]} and "
                f"{short_repr(proposal.traced[:16])[1:-1] or 'none'}"
            )
        return AcceptedRun(proposal, entry, self._source(entry))


def check_bounded(found: ProgramReport, bounds: Sequence[Bound], name: str) -> None:
    """Raises ArgumentError: what a program reveals cannot be worked out ahead, and nobody has said how much it may."""
    if not found.whole and not bounds:
        raise ArgumentError(
            f"what {name} reveals cannot be worked out without inputs: its rehearsal ended with: {found.stopped}. Name "
            f"the shapes (sectorch.share(..., shape=)) in place of announcing them; or accept it with --reveals "
            f"PARTY=ELEMENTS, how much each party may learn at most in one run, which is enforced while it runs"
        )


def _check_settings(me: str, entry: AcceptanceRule, proposal: Proposal) -> None:
    try:
        settings = settings_of(entry.what, proposal.arguments)
    except Exception as error:  # what a settings class finds wrong is of several kinds
        raise RefusedError(f"'{me}' cannot read the settings: {' '.join(str(error).split())}") from None
    for name, most in entry.most.items():
        value = settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= most:
            raise RefusedError(f"'{me}' accepts {name} up to {most:g}, got {short_repr(value)}")
    digest = settings_digest(entry.what, settings, tuple(entry.most))
    if digest != entry.digest:
        raise RefusedError(f"'{me}' has accepted settings {entry.digest[:16]}, and the proposal's are {digest[:16]}")


def _name(entry: AcceptanceRule) -> str:
    return entry.what.rpartition(":")[2] if entry.kind == "program" else entry.what


def _proposed(proposal: Proposal) -> str:
    return proposal.function if proposal.kind == "program" else proposal.name


def tensor_in(path: Path, name: str) -> torch.Tensor:
    """The one array of a file. Raises ArgumentError."""
    found = array_files.read_arrays(path)
    if not isinstance(found, torch.Tensor):
        raise ArgumentError(f"{path} holds several arrays; the input {name} takes one: a .npy")
    return found


def _accepted(said: Mapping[str, Any], own: PartyConfig, federated: FederationFile) -> AcceptanceRule:
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
    inputs = {name: own.within(path) for name, path in entry.inputs.items()}
    reveals = bounds_of(entry.reveals, lambda name: federated.member_named(name).name)
    return AcceptanceRule(
        kind, entry.program, entry.source, entry.traced, parties, starters, runs, inputs, reveals=reveals
    )


def table_text(kind: str, what: str, facts: Iterable[tuple[str, Any]]) -> str:
    """A table as text."""
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
