"""A federated run as a choreography of stages, so that a paper's algorithm is its pseudo-code and nothing else.

    def algorithm(run, data, how):
        model = {c: run.at(c, train_alone, data[c], how, stage=f"local/{c}") for c in data}
        for c in data:
            others = [model[o] for o in data if o != c]
            cast = {"Q": c, "A": [o for o in data if o != c], "S": "S"}
            labels = run.among(ask, cast, data[c], others, at=c, stage=f"labels/{c}")
            model[c] = run.at(c, retrain, data[c], labels, how, stage=f"model/{c}")
        return model

A stage is a function at one party (`at`), or a protocol among several (`among`). Its result is `Held`: present where
its party is, absent elsewhere. The same lines run with all parties in this process, as one party of a federation, in
worker processes (`each`), again after a kill, and without any work, for an estimate (`estimate`).
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import re
import time
import types
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from rich.table import Table
from torch import fx, nn

from ..choreography import Located, Message, Net, Party, Phase, protocol
from ..choreography.roles import STAR, Cast, Roles
from ..errors import ArgumentError, CheckpointError, FederationError, MisplacedValueError, RefusedError, SectorchError
from .folder import RunFolder, Workers
from .outcome import Outcome, Received, merged, titled
from .parties import TURN, Parties, Simulation, Turns, as_list, meet
from .watch import Estimate, Tick, Watch, silent

FORMAT = 3
"""Of run folders. Older ones have no number."""
STAGE = re.compile(r"[\w./ -]{1,120}", re.ASCII)

F = TypeVar("F", bound=Callable)


@dataclass
class _Later:
    """A value that is computed when it is first needed."""

    compute: Callable[[], Any]


class _Absent:
    """The value of a result whose party is elsewhere; one object, also in other processes."""

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()


EVERYBODY = ("everybody",)
"""The holders of a public value."""


class Held:
    """A value that one party holds, or several, or everybody.

    Attributes:
        parties: the holders.
        key: of what it was made: the stage, its function, and the keys of its arguments.
        public: what everybody knows of it, which takes its place where no holder is present: tensors and models on the
            meta device, or None.
    """

    def __init__(self, parties: tuple[str, ...], key: str, content: Any = ABSENT, public: Any = None):
        self.parties, self.key, self.public = parties, key, public
        self._content = content

    def __repr__(self) -> str:
        return f"Held by {' and '.join(self.parties)}" + ("" if self.present else ", not in this process")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_content": _compact(self.value)} if self.present else vars(self)

    @property
    def present(self) -> bool:
        """Whether a holder is in this process."""
        return self._content is not ABSENT

    @property
    def value(self) -> Any:
        """The value.

        Raises:
            MisplacedValueError: no holder is in this process.
        """
        if not self.present:
            raise MisplacedValueError(f"{' and '.join(self.parties)} holds this value, and is not in this process")
        if isinstance(self._content, _Later):
            self._content = self._content.compute()
        return self._content

    @property
    def known(self) -> Any:
        """The value where a holder is in this process, and elsewhere what is public of it."""
        return self.value if self.present else self.public


@dataclass
class _Stage:
    """The stage whose function runs now."""

    begin: Callable[[int | None], Tick] = lambda parts: silent
    folder: RunFolder = field(default_factory=lambda: RunFolder(None))
    facts: dict[str, Any] = field(default_factory=dict)


_stage: contextvars.ContextVar[_Stage] = contextvars.ContextVar("stage")


def progress(parts: int | None) -> Tick:
    """In a stage's function: begin a bar of so many parts (None: unknown). Call what is returned after each part."""
    return _stage.get(_Stage()).begin(parts)


def parts() -> RunFolder:
    """In a stage's function: a folder of this stage alone, for parts of its result that are finished before it is.

    What is there is the same stage's, made of the same arguments: a run that was killed in it goes on from there.
    """
    return _stage.get(_Stage()).folder


def note(**facts: Any) -> None:
    """In a stage's function: keep facts for reports in the stage's record, for JSON: seconds of its steps, counts."""
    _stage.get(_Stage()).facts.update(facts)


def estimated_by(cost: Callable[..., Estimate]) -> Callable[[F], F]:
    """Decorate a stage's function with what it costs.

    `cost` takes the same arguments, of which those that are not there yet are in their public form.
    """

    def decorate(function: F) -> F:
        function.cost = cost  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return decorate


@protocol(
    "run_turn",
    "Run.among",
    [Message("wanted", "C", "S", "nothing", "whether a party lacks a stage's result, and a digest of its lines")],
    roles=TURN,
)
def _announce(net: Net, wanted: Located) -> Located:
    """A party that was stopped may have a result on disk, which is not computed twice. int64 [2]. Rounds 1, bytes 16.

    The digest's 60 bits are those of what the party's program says of the stage: name, function, cast, numbers, words.
    """
    return wanted.send(net.C, net.S, "wanted").at(net.S)


@protocol(
    "run_turn_relay",
    "Run.among",
    [Message("wanted", "S", "C", "nothing", "whether any party lacks a stage's result, and whose lines differ")],
    roles=TURN,
)
def _relay(net: Net, wanted: Located) -> Located:
    """What all of them said, to another party. int64 [3]. Rounds 1, bytes 24."""
    return wanted.send(net.S, net.C, "wanted")


SEND = Roles("H R", edges="H-R")


@protocol(
    "run_send", "Run.send", [Message("value", "H", "R", "nothing", "a value that its holder gives away")], roles=SEND
)
def _give(net: Net, value: Located) -> Located:
    """A tensor as bytes. uint8 of any size. Rounds 1."""
    return value.send(net.H, net.R, "value")


def _sent(parties: Parties, sender: str, receivers: Sequence[str], value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"a tensor is sent, whose shape is public (`public=`), got a {type(value).__name__}")
    holder, others = Party(sender, "H"), [Party(name, "R") for name in receivers]
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    with parties.runtime(SEND, {one: one.name for one in (holder, *others)}, label="send") as runtime:
        nets = [Net(runtime, i, Cast(SEND, {"H": holder, "R": one}), Phase.ONLINE) for i, one in enumerate(others)]
        found = [net.read(_give(net, net.own(holder, flat)), net.R) for net in nets]
    here = next((one for one in (flat, *found) if not one.is_meta), flat)
    return here.view(value.dtype).reshape(value.shape)


class Run:
    """The stages of one run, and where they are computed and kept.

    Use it as a context manager where parties may be elsewhere.

    Args:
        what: what the run is, for JSON: the algorithm's name, its settings, digests of its data. The same at all
            parties.
        own: what of it is this process's own: a folder that holds another is refused too.
        members: the names of all parties, for a run whose parties may be elsewhere. The one called S, or else the
            first, passes turns on.
        parties: where the parties are: all in this process unless given.
        out: a folder for finished stages. A run that was killed goes on from there. None keeps nothing.
        shared: a folder for stages with `shared=True`, which several runs may have in common; inside `out` unless
            named.
        workers: that take sub-runs of `each` ahead, through `out`.
        watch: told of stages that begin and end.

    Raises:
        CheckpointError: `out` holds another run, or one of an older version.
        FederationError: workers, in a process that is one of several.
        ArgumentError: a name twice in `members`, or no members, where parties are elsewhere.
    """

    def __init__(
        self, what: Mapping[str, Any] | None = None, *, own: Mapping[str, Any] | None = None,
        members: Sequence[str] = (), parties: Parties | None = None, out: str | Path | None = None,
        shared: str | Path | None = None, workers: Workers | None = None, watch: Watch | None = None,
    ):  # fmt: skip
        self.parties: Parties = parties or Simulation()
        self.members, self.workers, self.watch = list(members), workers or Workers(), watch or Watch()
        if len(set(self.members)) < len(self.members):
            raise ArgumentError(f"members are the names of all parties, each once; got {', '.join(self.members)}")
        if not self.members and not isinstance(self.parties, Simulation):
            raise ArgumentError("parties may be elsewhere: name all of them, members=[...], so that they can meet")
        self.apart = not all(self.parties.present(name) for name in self.members)
        if self.apart and self.workers.count > 1:
            raise FederationError("one party of a federation works in one process; leave --processes out")
        self.folder = RunFolder(out)
        self._shared = RunFolder(shared) if shared is not None else self.folder.inside("shared")
        self.records: list[dict[str, Any]] = []
        self._agreed = json.dumps(what or {}, sort_keys=True)
        if what is not None:
            claim(self.folder, {**what, **(own or {})})
        self._seen: set[str] = set()
        self._brought: dict[str, int] = {}
        self._files: dict[str, str] = {}
        self._turns: Turns | None = None
        self._stack = ExitStack()
        self._estimate: Estimate | None = None
        self._costs: Mapping[Callable, Callable[..., Estimate]] = {}
        self._missing = 0

    def __enter__(self) -> Run:
        """Meet the other parties.

        Raises:
            RefusedError: another party has another algorithm, other settings or other parties. PeerLostError: a party
                did not come. Nothing was computed.
        """
        if self.apart:
            hub = self._hub
            clients = [name for name in self.members if name != hub]
            label = json.loads(self._agreed).get("run", "run")
            self._turns = self._stack.enter_context(
                meet(clients, self.parties, label=f"{label} turns", agreed=self._agreed, hub=hub)
            )
        return self

    def __exit__(self, *error: Any) -> None:
        self._turns = None
        self._stack.__exit__(*error)

    @property
    def _hub(self) -> str:
        return "S" if "S" in self.members else self.members[0]

    # What an algorithm says.

    def present(self, party: str) -> bool:
        """Whether a party is in this process."""
        return self.parties.present(party)

    @property
    def dry(self) -> bool:
        """Whether no stage is computed now: for an estimate, or to see what is left."""
        return self._estimate is not None

    @property
    def turns(self) -> Turns | None:
        """Where parties are elsewhere, the round of all members, for a public number that an algorithm's next lines
        depend on."""
        return self._turns

    def bring(self, party: str, value: Any, public: Any = None) -> Held:
        """A party's own input. Its digest is in the keys of what is made of it.

        Args:
            public: what stands for it where the party is elsewhere.

        Raises:
            CheckpointError: parties are elsewhere, and the run in this folder was begun with another value: the others
                could not tell that what they have was made of that one.
            ArgumentError: `public` is a tensor of another shape or dtype than the value.
        """
        self._known("an input", (party,))
        if not self.present(party):
            return Held((party,), f"brought by {party}", public=public)
        key, number = digest_of(value), self._brought.get(party, 0) + 1
        _fits(f"input {number} of {party}", value, public)
        if self.apart:
            self._brought[party] = number
            record = self.folder.record(name := f"brought/{party}-{number}")
            if record is None:
                self.folder.keep(name, record=key)
            elif record != key:
                raise CheckpointError(
                    f"{self.folder.path} holds a run that was begun with another input of {party}; bring the same one, "
                    f"or let all parties name other folders"
                )
        return Held((party,), key, value, public)

    def public(self, value: Any) -> Held:
        """What everybody knows, with a digest that is computed once."""
        return Held(EVERYBODY, digest_of(value), value)

    def at(
        self, party: str, function: Callable, *args: Any, stage: str, public: Any = None,
        into: nn.Module | None = None, keep: bool = True, shared: bool = False, replaces: Held | None = None,
    ) -> Held:  # fmt: skip
        """Compute function(*args) at a party, once: what is on disk is taken up again.

        Args:
            function: a stage is known by its name, its defaults and what it encloses, and not by its code. It may call
                `progress`, `note` and `parts`.
            args: values, or `Held` ones of this party, also in lists, tuples and dicts.
            stage: a name of its own in this run; slashes make folders.
            public: what stands for the result where the party is elsewhere.
            into: for a function that returns a module: a module of that architecture. The weights go to disk, and a
                copy of it takes them up. Elsewhere it stands for the result, on the meta device.
            keep: whether the result goes to disk. One that is cheap to make again need not, and is made when a later
                stage needs it.
            shared: whether other runs may take it up (`Run(shared=)`).
            replaces: an earlier stage's result, of this party alone, that no later stage takes: its file goes when
                this one's is on disk.

        Raises:
            MisplacedValueError: an argument is another party's. ArgumentError: a second stage of that name; a `Held`
                value where it is not opened, as in a dataclass; a result that the folder could not give back as it is;
                `replaces` of another party.
        """
        key = self._begin(stage, function, args)
        self._known(f"stage '{stage}'", (party,))
        for one in held_in(args):
            if party not in one.parties and one.parties != EVERYBODY:
                raise MisplacedValueError(
                    f"stage '{stage}': {party} does not hold what {' and '.join(one.parties)} holds; a protocol "
                    f"(run.among) has to move it"
                )
        if into is not None:
            public = copy.deepcopy(into).to("meta").eval()
        if not self.present(party):
            return Held((party,), key, public=public)
        compute = lambda: function(*opened(args))
        if not keep:
            return Held((party,), key, ABSENT if self._estimate is not None else _Later(compute), public)
        folder = self._shared if shared else self.folder
        return self._once((party,), stage, key, function, args, public, folder, compute, into, replaces)

    def among(
        self, function: Callable, cast: Mapping[str, str | Sequence[str]], *args: Any, at: str | Sequence[str],
        stage: str, roles: Roles | None = STAR, public: Any = None, into: nn.Module | None = None,
        replaces: Held | None = None, counted: bool = False,
    ) -> Held:  # fmt: skip
        """Run a protocol among several parties: all of them take part, or nobody.

        Whoever is to hold the result announces whether it lacks it, and what one lacks is computed again by all. The
        rows of the ledger, with what each role received, are kept with the result.

        Args:
            function: takes a session of these roles and the arguments' values; of an argument whose holders are all
                elsewhere, what is public. Its result counts at the parties `at`.
            cast: the parties' names by role; in secure inference A may be several.
            at: who learns the result.
            roles: of the session. None: the function is given `Run.parties`, and opens sessions of its own.
            public, into, replaces: as in `at`.
            counted: whether each start is written down before anything is sent, for `starts`.

        In a federation rounds 2 and bytes 40 for each member but one, before the protocol's own.

        Raises:
            MisplacedValueError: an argument of a party that takes no part.
            ArgumentError: as in `at`; a party that is no member.
            RefusedError: another party is at another stage, or has other numbers or words among its arguments. All
                parties raise it, before the protocol begins.
            SectorchError: of the protocol, by its own type and with the stage in the text; also PeerLostError and
                RefusedError.
        """
        key, holders = self._begin(stage, function, args), tuple(as_list(at))
        members = [name for names in cast.values() for name in as_list(names)]
        self._known(f"stage '{stage}'", (*holders, *members))
        for one in (holders, *(one.parties for one in held_in(args))):
            if not set(one) & set(members) and one != EVERYBODY:
                raise MisplacedValueError(
                    f"stage '{stage}': {' and '.join(one)} holds one of its values, and takes no part in it; its "
                    f"parties are {', '.join(members)}"
                )
        public = public if into is None else copy.deepcopy(into).to("meta").eval()
        if self.apart:
            lines = _sha(stage, digest_of([cast, holders, roles and str(roles)]), function.__qualname__, _words(args))
            wanted = self._wanted(holders, stage, key, lines)
            if not any(self.present(name) for name in members):
                return Held(holders, key, public=public)
            if wanted:
                self.folder.drop(f"{_file(stage, key)}.*")
            elif not any(self.present(name) for name in holders):  # its holder goes on from disk, and so do the others
                self.records += [record] if (record := self.folder.record(_file(stage, key))) else []
                return Held(holders, key, public=public)
        holds = any(self.present(name) for name in holders)

        def compute() -> Any:
            if counted:
                self.folder.append("starts", {"stage": stage})
            result = self._played(function, roles, cast, stage, args)
            return result if holds else None  # a party that takes part keeps its record, and no result

        found = self._once(holders, stage, key, function, args, public, self.folder, compute, into, replaces)
        return found if holds else Held(holders, key, public=public)

    def starts(self, stage: str) -> int:
        """How often a counted protocol that is finished has begun here, with those times that it was stopped."""
        return max(1, sum(line["stage"] == stage for line in self.folder.lines("starts")))

    def send(self, value: Held, to: str | Sequence[str], stage: str) -> Held:
        """Give a tensor of one party's to others, in the clear: its holder decides to show it.

        Where its holder is elsewhere, `value.public` has the shape and dtype. Rounds 1; bytes: the tensor's, to each.

        Returns:
            The same value, held by all of them.

        Raises:
            MisplacedValueError: several parties hold it. ArgumentError: it is no tensor, or its shape is not public.
        """
        if not isinstance(value, Held):
            raise ArgumentError(f"stage '{stage}': what `bring`, `at` or `among` gave is sent, got a {_kind(value)}")
        if self.members and not isinstance(value.public, torch.Tensor):
            raise ArgumentError(
                f"stage '{stage}': whoever receives a tensor knows its shape; where {value.parties[0]} made it, say "
                f"public=torch.empty(shape, device='meta')"
            )
        if len(value.parties) != 1 or value.parties == EVERYBODY:
            raise MisplacedValueError(f"stage '{stage}': one party sends what it holds, got {value!r}")
        (sender,) = value.parties
        receivers = [name for name in as_list(to) if name != sender]
        return self.among(
            _sent, {"H": sender, "R": receivers}, sender, receivers, value, at=[sender, *receivers], stage=stage,
            roles=None, public=value.public,
        )  # fmt: skip

    def each(self, parties: Sequence[str], part: Callable[..., Held], args: Callable[[str], tuple]) -> dict[str, Held]:
        """part(run, party, *args(party)) for each party: stages that do not wait for another party's part.

        With several workers in one process, those whose stages are not on disk are computed ahead, side by side.

        Raises:
            FederationError: workers, and a run without a folder. WorkerError: what cannot be sent to a worker.
        """
        if self._estimate is None and not self.apart and (self.workers.count > 1 or self.workers.kind != "processes"):
            todo = [name for name in parties if self._left(part, name, args(name))]
            tasks = [_Task(part, name, args(name), self._shared.path) for name in todo]
            self.workers.ahead(tasks, _work, self.folder)
        return {name: part(self, name, *args(name)) for name in parties}

    # Estimates.

    def estimate(
        self, algorithm: Callable[[Run], Any], costs: Mapping[Callable, Callable[..., Estimate]] | None = None
    ) -> Estimate | None:
        """What of an algorithm is not on disk yet; None in a federation.

        The algorithm's own lines run; no stage does.

        Args:
            costs: of a stage's function, as in `estimated_by`.
        """
        if self.apart:
            return None
        with self._dry():
            self._costs = costs or {}
            algorithm(self)
            return self._estimate

    @contextmanager
    def _dry(self) -> Iterator[None]:
        before = self._estimate, self._seen, self.records, self._missing
        self._estimate, self._seen, self.records, self._missing = Estimate(0.0), set(), [], 0
        try:
            yield
        finally:
            self._estimate, self._seen, self.records, self._missing = before

    def _left(self, part: Callable, party: str, args: tuple) -> bool:
        """Whether a stage of a sub-run is not on disk."""
        with self._dry():
            part(self, party, *args)
            return self._missing > 0

    # What was done.

    @property
    def received(self) -> list[dict]:
        """The ledger's rows over all protocols: what each role received."""
        return merged(record["received"] for record in self.records if record.get("received"))

    def record(self, stage: str) -> dict[str, Any]:
        """Of a finished stage: its parties and seconds, what each role received, and a number that it gave."""
        return next(record for record in self.records if record["stage"] == stage)

    def seconds(self, pattern: str) -> float:
        """Of all finished stages whose names match a regular expression as a whole."""
        return sum(r["seconds"] for r in self.records if re.fullmatch(pattern, r["stage"]))

    def table(self) -> Table:
        """The finished stages."""
        shown = titled("Stages", ("stage", "at", "seconds", "result"), 2)
        for record in self.records:
            value = record.get("value")
            result = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
            shown.add_row(record["stage"], " ".join(record["parties"]), f"{record['seconds']:.2f}", result)
        return shown

    # How a stage is computed once.

    def _begin(self, stage: str, function: Callable, args: tuple) -> str:
        if not STAGE.fullmatch(stage) or ".." in stage or stage.startswith("/"):
            raise ArgumentError(f"a stage's name has letters, digits, '.', '-', '_' and '/', got {stage!r}")
        if stage in self._seen:
            raise ArgumentError(f"two stages are called '{stage}': give each a name of its own, such as its round's")
        self._seen.add(stage)
        try:
            known = _named(function, False) if inspect.isroutine(function) else digest_of(function, False)
            return _sha(stage, known, digest_of(args))
        except ArgumentError as error:
            raise ArgumentError(f"stage '{stage}': {error}") from error

    def _known(self, where: str, names: Sequence[str]) -> None:
        for name in names:
            if self.members and name not in self.members:
                raise ArgumentError(f"{where} is at {name}, which is no member; they are {', '.join(self.members)}")

    def _once(
        self, holders: tuple[str, ...], stage: str, key: str, function: Callable, args: tuple, public: Any,
        folder: RunFolder, compute: Callable[[], Any], into: nn.Module | None = None, replaces: Held | None = None,
    ) -> Held:  # fmt: skip
        name = self._files[key] = _file(stage, key)
        if replaces is not None and (replaces.parties, len(holders)) != (holders, 1):
            raise ArgumentError(
                f"stage '{stage}': one party's result replaces an earlier one of its own; {' and '.join(holders)} may "
                f"lack this one when {' and '.join(replaces.parties)} has removed that"
            )
        record = folder.record(name)
        if self._estimate is not None:
            if record is None:
                self._missing += 1
                cost = self._costs.get(function, getattr(function, "cost", None))
                self._estimate += Estimate(0.0) if cost is None else cost(*known(args))
            return Held(holders, key, public=public)
        if record is None:
            start = time.perf_counter()
            begin = lambda count: self.watch.step(f"{holders[0]}: {stage}", count)
            now = _Stage(begin, folder.inside(f"{name}-parts"))
            token = _stage.set(now)
            try:
                with Received() as received:
                    value = compute()
                value = value.item() if isinstance(value, np.generic) else value
                _fits("its result", value, public)
                kept = _kept(value, into)
            except SectorchError as error:
                raise _in_stage(error, stage, holders) from error
            finally:
                _stage.reset(token)
            record = {"stage": stage, "parties": list(holders), "seconds": time.perf_counter() - start}
            record |= now.facts | ({"received": received.rows()} if received.messages else {})
            if type(value) in PLAIN:
                record["value"] = value
                folder.keep(name, record=record)
            else:
                folder.keep(name, [kept], record)
        elif "value" in record:
            value = record["value"]
        else:  # read where a later stage takes it: a file that another has replaced is not there any more
            value = _Later(lambda: _read(folder, name, into))
        if replaces is not None and replaces.key in self._files:
            folder.drop(f"{self._files[replaces.key]}.pt")
        self.records.append(record)
        self.watch.finished(stage, record)
        return Held(holders, key, value, public)

    def _played(self, function: Callable, roles: Roles | None, cast: Mapping, stage: str, args: tuple) -> Any:
        if roles is None:
            return function(self.parties, *known(args))
        with self.parties.session(roles, cast, label=stage, agreed=self._agreed) as session:
            return function(session, *known(args))

    def _wanted(self, holders: Sequence[str], stage: str, key: str, lines: str) -> bool:
        """Whether any holder lacks the result; everybody hears the same.

        Args:
            lines: a digest of what all parties' programs say of the stage.
        """
        if self._turns is None:
            raise FederationError("parties are elsewhere: use the run as a context manager, `with run:`")
        lacks, mark = self.folder.record(_file(stage, key)) is None, int(lines[:15], 16)
        own = {n: torch.tensor([int(lacks and n in holders), mark]) for n in self.members if self.present(n)}
        try:
            wanted, _, other = self._turns.compare(own, _announce, _relay)
        except SectorchError as error:
            raise _in_stage(error, stage, holders) from error
        if other >= 0:
            clients = [name for name in self.members if name != self._hub]
            raise RefusedError(
                f"stage '{stage}' at {' and '.join(holders)}: {clients[other]} is at another stage than {self._hub}, "
                f"or has another cast or other arguments for it. Nothing of the stage was sent; let all parties run "
                f"the same program with the same settings"
            )
        return bool(wanted)


def claim(folder: RunFolder, what: Mapping[str, Any]) -> None:
    """Make a folder this run's, or recognise it.

    Raises:
        CheckpointError: it holds another run, or one of an older version.
    """
    found = folder.claimed()
    version = {"format": FORMAT, "sectorch": metadata.version("sectorch")}
    if found is not None and not (isinstance(found, dict) and found.get("format") == FORMAT):
        raise CheckpointError(
            f"{folder.path} holds a run of an older version of sectorch, which this one cannot go on with; name "
            f"another folder or remove that one"
        )
    folder.claim({**version, **what})


R = TypeVar("R", bound=Outcome)


class Experiment(ABC, Generic[R]):
    """An algorithm with its parties and settings: what the command of a paper runs."""

    stages: Run

    @abstractmethod
    def algorithm(self, run: Run) -> Any:
        """The algorithm, as stages of `run`."""

    @abstractmethod
    def outcome(self, found: Any) -> R:
        """The result, of what `algorithm` returned."""

    def run(self, watch: Watch | None = None) -> R:
        """Run what is not on disk yet, and give the result."""
        self.stages.watch = watch or Watch()
        with self.stages as run:
            return self.outcome(self.algorithm(run))

    def estimate(self) -> Estimate | None:
        """What is left of it; see `Run.estimate`."""
        return self.stages.estimate(self.algorithm)

    def so_far(self) -> Table:
        """A table for the screen, while it runs."""
        return self.stages.table()


# Sub-runs in worker processes: their stages are files, which the run then takes up.


@dataclass(frozen=True)
class _Task:
    part: Callable[..., Held]
    party: str
    args: tuple
    shared: Path | None


def _work(task: _Task, folder: RunFolder) -> None:
    task.part(Run(out=folder.path, shared=task.shared), task.party, *task.args)


# Arguments, and what they are known by.


def held_in(value: Any) -> Iterator[Held]:
    """The `Held` values in arguments, also in lists, tuples and dicts."""
    if isinstance(value, Held):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from held_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from held_in(one)


def opened(value: Any) -> Any:
    """Arguments with values in the place of `Held` ones."""
    return _replaced(value, lambda one: one.value)


def known(value: Any) -> Any:
    """Arguments with values, or what is public of them, in the place of `Held` ones."""
    return _replaced(value, lambda one: one.known)


def _replaced(value: Any, by: Callable[[Held], Any]) -> Any:
    if isinstance(value, Held):
        return by(value)
    if isinstance(value, dict):
        return {key: _replaced(one, by) for key, one in value.items()}
    if isinstance(value, list | tuple):
        inner = (_replaced(one, by) for one in value)
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return value


def digest_of(value: Any, opens: bool = True) -> str:
    """What an argument of a stage is known by: its content, as a SHA-256 digest in hexadecimal.

    Args:
        opens: whether a `Held` value that is found here is replaced by its value before the stage's function runs.

    Raises:
        ArgumentError: a type that has no content that could be told; a `Held` value where it is not opened.
    """
    if isinstance(value, Held):
        if not opens:
            raise ArgumentError(
                f"what {' and '.join(value.parties)} holds lies inside another value or the function, where it is not "
                f"opened; give it as an argument of its own, or in a list, tuple or dict"
            )
        return value.key
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Path | torch.dtype):
        return _sha(type(value).__name__, repr(value))
    if isinstance(value, enum.Enum):
        return _sha(type(value).__qualname__, value.name)
    if isinstance(value, torch.Tensor):
        head = f"{value.dtype}{tuple(value.shape)}{value.is_meta}"
        body = b"" if value.is_meta else value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if (
            value.dim()
        ) else repr(value.item()).encode()  # fmt: skip
        return hashlib.sha256(head.encode() + body).hexdigest()
    if isinstance(value, np.ndarray):
        return _sha("numpy", digest_of(torch.from_numpy(np.ascontiguousarray(value))))
    if isinstance(value, np.generic):
        return _sha(str(value.dtype), repr(value.item()))
    if isinstance(value, fx.Graph):  # of a `GraphModule`, as `fhe_friendly` makes it
        return _sha("graph", str(value))
    if isinstance(value, nn.Module):
        return _sha(
            "module", *(digest_of([name, type(one), _attributes(one)], False) for name, one in value.named_modules())
        )
    if isinstance(value, functools.partial):
        return _sha("partial", *(digest_of(one, False) for one in (value.func, value.args, value.keywords)))
    if isinstance(value, type):
        return _sha(value.__module__, value.__qualname__)
    if dataclasses.is_dataclass(value):
        return _sha(
            digest_of(type(value)), *(digest_of(getattr(value, f.name), False) for f in dataclasses.fields(value))
        )
    if isinstance(value, Mapping):
        opens = opens and isinstance(value, dict)
        return _sha("mapping", *(x for k, v in value.items() for x in (digest_of(k, False), digest_of(v, opens))))
    if isinstance(value, list | tuple):
        return _sha("sequence", *(digest_of(one, opens) for one in value))
    if isinstance(value, set | frozenset):
        return _sha("set", *sorted(digest_of(one, False) for one in value))
    if inspect.isroutine(value):
        return _named(value)
    raise ArgumentError(
        f"a stage is known by its arguments, and a {type(value).__name__} has no content to know it by; give a "
        f"dataclass, tensors, or plain values"
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside its modules and hooks: parameters, all buffers, and attributes of its class's own."""
    known = vars(nn.Module())
    own = {name: value for name, value in vars(module).items() if name not in known or name == "training"}
    return {**own, **dict(module._parameters), **dict(module._buffers)}


def _named(function: Any, code: bool = True) -> str:
    """What a function is known by: its name, owner, defaults and what it encloses, and its code.

    Args:
        code: whether the code of a function with a name counts: of one among arguments, such as a vote, and not of the
            stage's own. What a function calls is known by its name.
    """
    owner, inner = getattr(function, "__self__", None), getattr(function, "__func__", function)
    held = None if isinstance(owner, types.ModuleType) else owner
    of = [getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)]
    enclosed = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    own = hasattr(inner, "__code__") and (inner.__module__ or "").split(".")[0] not in ("sectorch", "torch")
    coded = [_coded(inner.__code__)] if own and (code or "<lambda>" in inner.__qualname__) else []
    parts = (digest_of(one, False) for one in (held, of, *enclosed, *coded))
    return _sha(function.__module__ or "", function.__qualname__, *parts)


def _coded(code: types.CodeType) -> list:
    found = [
        _coded(one)
        if isinstance(one, types.CodeType)
        else sorted(map(repr, one))
        if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]
    return [code.co_code, code.co_names, found]


def _words(value: Any) -> str:
    """A digest of the numbers and words in arguments, which are the same at all parties, and of who holds the rest."""
    if isinstance(value, Held):
        return _sha("held", *value.parties)
    if isinstance(value, dict):
        return _sha("mapping", *(x for k, v in value.items() for x in (digest_of(k), _words(v))))
    if isinstance(value, list | tuple):
        return _sha("sequence", *map(_words, value))
    return digest_of(value) if type(value) in PLAIN else _sha(type(value).__qualname__)


# Results, and how they are kept.

PLAIN = (type(None), bool, int, float, str)
"""Results that stand in a stage's record."""


def _kind(value: Any) -> str:
    return type(value).__name__


def _fits(what: str, value: Any, public: Any) -> None:
    """Whether what stands for a value elsewhere has its shape and dtype."""
    tensors = isinstance(value, torch.Tensor) and isinstance(public, torch.Tensor)
    if tensors and (value.shape, value.dtype) != (public.shape, public.dtype):
        raise ArgumentError(
            f"{what} is a tensor of {value.dtype} {list(value.shape)}, and public= says {public.dtype} "
            f"{list(public.shape)}"
        )


def _kept(value: Any, into: nn.Module | None) -> Any:
    """What goes to disk for a result.

    Raises:
        ArgumentError: it could not be given back as it is.
    """
    if isinstance(value, nn.Module):
        if into is None:
            raise ArgumentError("its result is a model, of which the weights are kept; name its architecture, into=")
        value = value.state_dict()
    elif (odd := next(_odd(value), None)) is not None:
        raise ArgumentError(
            f"a result is kept as tensors, numbers, words, bytes, and lists, tuples, dicts and sets of these, got a "
            f"{odd}; convert it (a dataclass by `dataclasses.asdict`, an array by `torch.from_numpy`)"
        )
    return _compact(value)


def _odd(value: Any) -> Iterator[str]:
    """The types in a result that would not come back."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        yield from (kind for pair in value.items() for one in pair for kind in _odd(one))
    elif type(value) in (list, tuple, set):
        yield from (kind for one in value for kind in _odd(one))
    elif type(value) not in (*PLAIN, complex, bytes, torch.dtype, torch.Size, torch.Tensor, nn.Parameter):
        yield _kind(value)


def _compact(value: Any) -> Any:
    """The same without the rest of the storage of which a tensor is a part: a file or a worker has no use for it."""
    if type(value) is torch.Tensor and not value.is_meta and value.untyped_storage().nbytes() > value.nbytes:
        return value.detach().clone()
    if type(value) is dict:
        return {key: _compact(one) for key, one in value.items()}
    return type(value)(map(_compact, value)) if type(value) in (list, tuple) else value


def _sha(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(folder: RunFolder, name: str, into: nn.Module | None) -> Any:
    """A stage's result from disk."""
    if (found := folder.tensors(name)) is None:
        raise CheckpointError(f"{folder.path}/{name}.pt is missing; remove {name}.json, and it is done again")
    [value] = found
    if into is None:
        return value
    model = copy.deepcopy(into)
    model.load_state_dict(value)
    return model.eval()


def _file(stage: str, key: str) -> str:
    return f"{stage}-{key[:12]}"


def _in_stage(error: SectorchError, stage: str, holders: Sequence[str]) -> SectorchError:
    """The same error, with the stage and the party in its text."""
    text = f"stage '{stage}' at {' and '.join(holders)}: {error}"
    try:
        return type(error)(text)
    except TypeError:  # one that takes more than a text
        return error
