"""Running programs among parties that are up: the service of each party, and the start of a run.

`PartyService` keeps a party up and takes part in proposed runs that its policy accepts (`policy`). A proposal is
answered with yes or no and a reason. The run begins when its starter (`ProgramStart`) has a yes from all parties and
sends `begin`. Each run (`ProgramRun`) has a folder among this party's results: `run.json` records what was run, for
whom and how it ended, and this party's results are beside it.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ... import files
from ...choreography import Party
from ...choreography.ledger import Cost
from ...errors import (
    AbortedError,
    ArgumentError,
    BusyError,
    FrameError,
    IdentityError,
    NetworkError,
    PeerLostError,
    RefusedError,
    SectorchError,
    VersionError,
)
from ...federated.parties import tensors
from ...tables.release import ReleaseGovernor
from ..identity.identity import Credentials
from ..log import query, write
from ..messages import Delivery, IsUp, Note, PartiesUp, WhoIsUp
from ..names import readable
from ..parties.session import abort_reason, join_threads, log_text
from ..receipts import Receipts
from ..wire.channel import copy_error
from ..wire.fair_queue import FairQueue
from .config import FederationFile, PartyConfig
from .party import Federation
from .policy import (
    AcceptancePolicy,
    AcceptedRun,
    Begin,
    Cancel,
    Proposal,
    ProposalAnswer,
    ProposalNote,
    RunEnd,
    Word,
    check_same,
    open_note,
    proposal_of,
    sign_note,
)
from .programs import PAPERS, cast_of, command_of, dry_run_program, settings_of, source_of
from .reveals import Ledger, word_counts

log = logging.getLogger("sectorch.federation")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


TEXT = 2000
"""Characters of the revealed values that a line of the log names; the receipts name all."""


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file `run.json` of a run: what was run, for whom, and how it ended at this party.

    Attributes:
        run: the proposal's nonce. accepted: the rule that accepted it (`AcceptanceRule.key`).
        outcome: "begun", "done", or the error that ended it. The entries after it are there once the run has ended.
        learned: names and shapes of the results that the starter hears of. revealed: all reveals, in words.
    """

    run: str
    accepted: str
    by: str
    program: str
    digest: str
    proposal: dict[str, Any]
    outcome: str = "begun"
    seconds: float | UnsetType = UNSET
    learned: dict[str, list[int]] | UnsetType = UNSET
    rounds: int | UnsetType = UNSET
    online_bytes: int | UnsetType = UNSET
    offline_bytes: int | UnsetType = UNSET
    revealed: list[str] | UnsetType = UNSET


class RunParties:
    """The `federated.parties.Parties` that a program gets: it has no connection, and only sessions of the run."""

    def __init__(self, parties: Federation):
        self.inputs, self.folder = parties.inputs, parties.folder
        self.present, self.session, self.runtime = parties.present, parties.session, parties.runtime


class ProgramRun:
    """One run at this party: its inputs, its part of the program, its results and its record.

    Args:
        agreed: what this party has accepted.
        folder: for the record and the results; made by `take_part`, before any input is read.
        own: this party's configuration.
    """

    def __init__(
        self, agreed: AcceptedRun, federation: Federation, folder: Path, own: PartyConfig, receipts: Receipts | None
    ):
        self.agreed, self.folder, self._own, self._receipts = agreed, folder, own, receipts
        bound = f"{agreed.proposal.nonce} {agreed.proposal.digest}"
        kept = folder.parent / "kept"
        kept = kept if agreed.source is None else kept / agreed.source.folder_name(agreed.proposal.job)
        self._file, self._number = federation.file, None
        self._results: Mapping[str, tuple[int, ...]] = {}
        self._ledger = self._make_ledger(federation.name)
        self._parties = federation.for_run({}, bound, kept, self._ledger)
        role = self._file.member(federation.name).role or federation.name
        self._me = Party(role, role)  # as a program's sessions name it, unless they have names of their own

    def _make_ledger(self, me: str) -> Ledger:
        """The ledger of what this party has agreed to reveal. For a paper's command, it records only: the party has
        accepted the command's settings."""
        source, accepted = self.agreed.source, self.agreed.accepted
        if source is None:
            return Ledger(me, None, receipt=self._write_receipt)
        rule = self.agreed.governor
        governor = None if rule is None else ReleaseGovernor(rule.policy, rule.folder, self._write_release)
        found = dry_run_program(source, self._file)
        self._results = found.results
        return Ledger(
            me, found.reveals, accepted.reveals, found.sessions, self._write_receipt, found.digests, found.messages,
            governor,
        )  # fmt: skip

    def _write_release(self, facts: Mapping[str, Any]) -> None:
        """Write a receipt of a release that is charged, if receipts are kept."""
        if self._receipts is not None and self._number is not None:
            self._receipts.record_release(self._number, **facts)

    def _write_receipt(self, what: str, to: str, most: int) -> None:
        """Write a receipt of a value before it is revealed, if receipts are kept."""
        if self._receipts is not None and self._number is not None:
            self._receipts.record_reveal(self._number, what, to, most)

    def give_up(self, error: SectorchError) -> None:
        """End the run, at all parties."""
        self._parties.give_up(error)

    def take_part(self) -> dict[str, Any]:
        """Run this party's part; returns what its starter is last.

        Raises:
            Exception: the error that ended the run, which is in the record too.
        """
        proposal, limit = self.agreed.proposal, self._own.limits.run_seconds
        self.folder.mkdir(parents=True, mode=0o700)
        record = RunRecord(
            run=proposal.nonce, accepted=self.agreed.accepted.key, by=proposal.by, program=proposal.name,
            digest=proposal.digest, proposal=proposal.body(),
        )  # fmt: skip
        self._write_record(record)
        late = PeerLostError(f"the run took longer than {limit:g} s, which is run_seconds at '{self._parties.name}'")
        timer = threading.Timer(limit, self.give_up, [late])
        timer.daemon = True
        timer.start()
        began, cost = time.perf_counter(), Cost()
        try:
            with query(self._me, self._receipts, session=proposal.nonce, **self._facts()) as logged, cost:
                self._number = logged.number
                try:
                    learned = self._paper() if proposal.kind == "paper" else self._program()
                finally:
                    logged.more["revealed"] = self._ledger.text[:TEXT]
        except BaseException as error:
            self._write_record(replace(record, outcome=log_text(error), seconds=time.perf_counter() - began))
            raise
        finally:
            timer.cancel()
        report = {
            "outcome": "done", "seconds": round(time.perf_counter() - began, 3), "learned": learned,
            "rounds": cost.rounds, "online_bytes": cost.online_bytes, "offline_bytes": cost.offline_bytes,
        }  # fmt: skip
        self._write_record(replace(record, **report, revealed=word_counts(self._ledger.sent)))
        return report

    def _program(self) -> dict[str, list[int]]:
        source = self.agreed.source
        program = source.load() if source is not None else None
        self._parties.inputs = self.agreed.inputs()
        learned = tensors(program(RunParties(self._parties))) if program is not None else {}
        arrays = {name: value.detach().cpu().numpy() for name, value in learned.items()}  # a secret one is refused here
        for number, (name, array) in enumerate(arrays.items()):
            path = self.folder / f"{name if _FILE.fullmatch(name) else number}.npy"
            with open(path, "wb", opener=files.private) as file:
                np.save(file, array)
        # The starter gets the names and shapes that the dry run found: others could depend on secrets.
        shapes = {name: tuple(value.shape) for name, value in learned.items()}
        return {name[:100]: list(shape) for name, shape in shapes.items() if self._results.get(name) == shape}

    def _paper(self) -> dict[str, list[int]]:
        proposal, accepted = self.agreed.proposal, self.agreed.accepted
        out = self.folder.parent / f"{accepted.what}-{accepted.digest[:12]}-{proposal.job}"
        arguments = [*proposal.arguments, *accepted.own]
        command_of(accepted.what).take_part(arguments, self._parties, out, self._own.files.get("data"))
        return {}

    def _facts(self) -> dict[str, Any]:
        """The facts of the log's line and the receipts."""
        proposal, accepted = self.agreed.proposal, self.agreed.accepted
        learned = f"what-{accepted.what}-tells-its-parties"
        if self.agreed.source is not None:
            found = dry_run_program(self.agreed.source, self._file)
            bounds = ", ".join(map(str, accepted.reveals))
            learned = "; ".join([*found.learned, *([f"within {bounds}"] if bounds else [])]) or "nothing"
        return {
            "call": 0, "client": proposal.by, "key": self._file.member(proposal.by).identity, "model": proposal.name,
            "version": accepted.digest[:16], "asked": "run", "learned": learned[:TEXT],
        }  # fmt: skip

    def _write_record(self, record: RunRecord) -> None:
        text = json.dumps(msgspec.to_builtins(record), indent=1) + "\n"
        files.write(self.folder / "run.json", text.encode(), 0o600)


NOTES = 256
"""Notes that may wait to be read; further ones are dropped, and their senders get no answer."""
PENDING = 60.0
"""Seconds for which a yes is valid until the starter sends `begin`."""
RETRY = 2.0
"""Seconds between attempts to reach the server again."""


class PartyService:
    """A party that stays up; `keep` runs it, `drain` and `stop` end it.

    Args:
        path: of the federation file.
        federated: its content.
        own: this party's own file.
        policy: what it accepts.

    Raises:
        ArgumentError: the folder of results has an invalid record.
        IdentityError, ReceiptError: receipts cannot be signed or written.
    """

    def __init__(
        self,
        path: Path,
        federated: FederationFile,
        own: PartyConfig,
        policy: AcceptancePolicy,
        credentials: Credentials,
    ):
        self.path, self.file, self.own, self.policy = path, federated, own, policy
        self.name = credentials.name
        self.results = own.results(self.name)
        self.results.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = own.receipts(self.name, "P")
        self.receipts = None if kept is None else Receipts(kept, credentials, "P")
        self._seen, self._counts = _earlier_runs(self.results)
        self._turns = FairQueue(own.limits.runs)
        self._notes: Queue[Delivery | None] = Queue(NOTES)
        self._agreed: dict[str, tuple[AcceptedRun, float]] = {}
        self._runs: dict[str, ProgramRun] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._federation: Federation | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="notes")
        self._reader.start()

    def keep(self, stopped: threading.Event, say: Callable[[str], None]) -> None:
        """Stay up until stopped, and connect again whenever the server cannot be reached.

        Raises:
            IdentityError, ArgumentError, RefusedError: an error that connecting again does not mend.
        """
        last = ""
        while not stopped.is_set():
            try:
                with Federation(
                    self.path, self.name, self.own.folder, wait=self.own.limits.wait_seconds, on_note=self._queue_note
                ) as federation:
                    federation.connection.ask(IsUp(time=time.time()))
                    self._federation, last = federation, ""
                    say(f"'{self.name}' is up at {federation.address}; Ctrl-C stops")
                    federation.connection.ended.wait()
                    raise copy_error(federation.connection.link.closed or PeerLostError("the connection ended"))
            except (IdentityError, RefusedError, VersionError):
                raise
            except NetworkError as error:
                if str(error) != last and not stopped.is_set():
                    last = str(error)
                    say(f"{last}; dialling again every {RETRY:g} s until it is there")
            stopped.wait(RETRY)

    def drain(self, seconds: float) -> bool:
        """Begin no more runs; returns whether the running ones ended within `seconds`."""
        return self._turns.drain(f"'{self.name}' is stopping; propose again when it is back", seconds)

    def stop(self) -> None:
        """End all runs and close the connection."""
        for run in list(self._runs.values()):
            run.give_up(AbortedError(f"'{self.name}' was stopped"))
        join_threads(self._threads)
        if self._federation is not None:
            self._federation.close()
        with suppress(Full):
            self._notes.put_nowait(None)
        if self.receipts is not None:
            self.receipts.close()

    def unready(self) -> str:
        """Why this party would take part in no run now; empty where it would."""
        if self._turns.closed:
            return self._turns.closed
        connected = self._federation is not None and self._federation.connection.link.closed is None
        if not connected:
            return f"'{self.name}' has no connection to the server"
        return self.receipts.unready() if self.receipts is not None else ""

    def renew(self, credentials: Credentials) -> None:
        """Do nothing: the files are read at each connection."""

    def figures(self) -> dict[str, float]:
        """The current values of the gauges of `observe.GAUGES`."""
        return self._turns.figures()

    def _queue_note(self, request: Delivery) -> None:
        """Queue a note; called in the thread that reads the connection."""
        try:
            self._notes.put_nowait(request)
        except Full:
            log.warning("more notes come than are read; one was dropped")

    def _read(self) -> None:
        while (request := self._notes.get()) is not None:
            sender = readable(request.sender, 64)
            try:
                word = open_note(request.note, self.file)
                if word.by != request.sender:
                    raise IdentityError(f"a note of '{word.by}' that came from another")
                self._handle(word)
            except SectorchError as error:
                write(log, "note refused", logging.WARNING, by=sender, why=log_text(error))
            except Exception as error:  # a bad note must not end this thread
                write(log, "note refused", logging.ERROR, by=sender, why=log_text(error))
                log.debug("in detail", exc_info=error)

    def _handle(self, word: ProposalNote | Word) -> None:
        if isinstance(word, ProposalNote):
            self._answer(word)
            return
        nonce = word.run
        agreed, _ = self._agreed.get(nonce, (None, 0.0))
        run = self._runs.get(nonce)
        known = agreed.proposal if agreed is not None else run.agreed.proposal if run is not None else None
        if known is None or word.by != known.by or word.proposal != known.digest:
            raise RefusedError(f"a word about a run that '{word.by}' has not proposed, or whose time is over")
        self._agreed.pop(nonce, None)
        if isinstance(word, Begin) and agreed is not None:
            self._begin(agreed)
        elif isinstance(word, Cancel) and run is not None:
            run.give_up(AbortedError(f"'{word.by}', who started it, has stopped it"))

    def _answer(self, word: ProposalNote) -> None:
        answer: dict[str, Any] = {"yes": True, "why": ""}
        try:
            check_same(word, self.file)
            proposal = proposal_of(word)
            proposal.check_time()
            self._admit(self.policy.agree(proposal))
        except (RefusedError, BusyError, FrameError) as error:
            answer = {"yes": False, "why": f"{type(error).__name__}: {error}"[:600]}
            own = None if error.__cause__ is None else log_text(error.__cause__)
            write(log, "refused", run=word.run, by=word.by, why=error, own=own)
        except Exception as error:
            answer = {"yes": False, "why": f"RefusedError: '{self.name}' cannot run it: its own log says why"}
            write(log, "refused", logging.ERROR, run=word.run, by=word.by, own=log_text(error))
        else:
            write(log, "accepted", run=proposal.nonce, by=proposal.by, program=proposal.name)
        digest = "" if not answer["yes"] else proposal_of(word).digest
        self.tell("answer", word.by, word.run, {"proposal": digest, **answer})

    def _admit(self, agreed: AcceptedRun) -> None:
        """Reserve a place for an accepted run until its starter sends `begin`.

        Raises:
            RefusedError: the proposal was used before, or the rule was used as often as it accepts.
            BusyError: too many runs are under way.
        """
        proposal, accepted = agreed.proposal, agreed.accepted
        now = time.monotonic()
        with self._lock:
            self._agreed = {n: (a, end) for n, (a, end) in self._agreed.items() if end > now}
            if proposal.nonce in self._seen or proposal.nonce in self._agreed:
                raise RefusedError(f"'{self.name}' has had this proposal before; a new run has a new one")
            if accepted.runs and self._counts[accepted.key] >= accepted.runs:
                raise RefusedError(f"'{self.name}' has run it {accepted.runs} times, as often as it accepts")
            if self._turns.closed:
                raise BusyError(self._turns.closed)
            if len(self._runs) + len(self._agreed) >= self.own.limits.runs:
                raise BusyError(f"'{self.name}' takes part in {len(self._runs)} runs already; ask again later")
            self._agreed[proposal.nonce] = agreed, now + PENDING

    def _begin(self, agreed: AcceptedRun) -> None:
        proposal, federation = agreed.proposal, self._federation
        if federation is None:
            return
        with self._lock:
            self._seen.add(proposal.nonce)
            self._counts[agreed.accepted.key] += 1
        time_ = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S")
        called = re.sub("[^A-Za-z0-9_.-]", "-", proposal.name)[:60]
        folder = self.results / f"{time_}-{called}-{proposal.nonce}"
        run = self._runs[proposal.nonce] = ProgramRun(agreed, federation, folder, self.own, self.receipts)
        thread = threading.Thread(target=self._run, args=(run,), daemon=True, name=f"run {proposal.nonce[:8]}")
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _run(self, run: ProgramRun) -> None:
        proposal = run.agreed.proposal
        try:
            with self._turns.turn(proposal.nonce, lambda: None):
                report = run.take_part()
        except BaseException as error:
            report = {"outcome": abort_reason(error, f"'{self.name}'")}
            write(log, "run ended", run=proposal.nonce, program=proposal.name, why=log_text(error))
            log.debug("in detail", exc_info=error)
        else:
            write(log, "run ended", run=proposal.nonce, program=proposal.name, outcome="done", folder=run.folder)
        self._runs.pop(proposal.nonce, None)
        self.tell("ended", proposal.by, proposal.nonce, {"proposal": proposal.digest, **report})

    def tell(self, kind: str, to: str, run: str, report: dict[str, Any]) -> None:
        """Send a note to the starter of a run, if it still waits."""
        federation = self._federation
        if federation is None:
            return
        body = {"by": self.name, "federation": self.file.digest, "run": run, **report}
        note = sign_note(kind, body, federation.connection.identity)
        with suppress(SectorchError):
            federation.connection.link.tell(Note(to=to, tag=run, note=note))


def _earlier_runs(results: Path) -> tuple[set[str], Counter[str]]:
    """The nonces of earlier runs, and how often each rule was used."""
    seen, counts = set[str](), Counter[str]()
    for path in results.glob("*/run.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
            raise ArgumentError(f"{path} is not of a run: move it away, and count what it stood for") from None
        seen.add(record.run)
        counts[record.accepted] += 1
    return seen, counts


W = TypeVar("W", bound=Word)
ANSWER = 30.0
"""Seconds for a party to say yes or no."""
LOOK = 1.0
"""Seconds between two queries of the parties that are up."""


def describe_proposal(
    federated: FederationFile,
    by: str,
    program: str,
    arguments: Sequence[str] = (),
    among: Sequence[str] = (),
    job: str = "1",
) -> Proposal:
    """The proposal of a run.

    Args:
        by: the starter's name.
        program: FILE.py:FUNCTION or MODULE:FUNCTION on this party's disk, or a paper's name.
        arguments: a paper's options.
        among: the parties that take part; by default those that the program names, or all that have a role.
        job: tells apart runs that keep different things for later runs.

    Raises:
        ArgumentError: there is no such program, it needs parties that the federation lacks, or an option is invalid.
    """
    named = tuple(federated.member_named(name).name for name in among)
    if program in PAPERS:
        settings_of(program, arguments)
        parties = named or cast_of(program, arguments, federated)
        return Proposal(federated.digest, by, parties, "paper", program, arguments=tuple(arguments), job=job)
    if arguments:
        raise ArgumentError(
            f"options after -- are of a paper's command, and {program[:80]!r} is a program: leave them out"
        )
    source = source_of(program)
    found = dry_run_program(source, federated)
    return Proposal(
        federated.digest, by, named or found.parties, "program", source.name, source.digest, source.function,
        found.traced, job=job,
    )  # fmt: skip


@dataclass
class ProgramStart:
    """One run at its starter, from the proposal to the end at all parties.

    Args:
        notes: the notes that this party gets (`Federation(on_note=notes.put)`).
        say: called with progress, in words.
    """

    federation: Federation
    proposal: Proposal
    notes: Queue[Delivery]
    say: Callable[[str], None] = lambda _: None

    def run(self, wait: float = 60.0) -> dict[str, dict[str, Any]]:
        """Run the program; returns each party's report, in which `outcome` is "done" or the error that ended it.

        Args:
            wait: seconds to wait for all parties to be up.

        Raises:
            PeerLostError: a party is not up, or does not answer.
            RefusedError: a party does not accept the proposal; the text has its reason.
        """
        proposal, link = self.proposal, self.federation.connection
        self._refused: set[str] = set()
        link.ask(IsUp(tag=proposal.nonce, time=time.time()))
        self._wait_for_parties(wait)
        begun = False
        try:
            for name in proposal.parties:
                self._tell("proposal", name, proposal.body())
            self._collect_answers()
            up = self._parties_up()
            for name in proposal.parties:
                self._tell("begin", name, {"run": proposal.nonce, "proposal": proposal.digest})
            begun = True
            self.say(f"run {proposal.nonce[:16]}: {proposal.name} begins at {', '.join(proposal.parties)}")
            return self._collect_reports(up)
        except BaseException:
            for name in sorted(set(proposal.parties) - self._refused):
                with suppress(SectorchError):
                    self._tell("cancel", name, {"run": proposal.nonce, "proposal": proposal.digest})
            if begun:
                self.say("the parties were told to stop")
            raise

    def _parties_up(self) -> dict[str, str]:
        return self.federation.connection.ask(WhoIsUp(parties=list(self.proposal.parties)), PartiesUp).up

    def _wait_for_parties(self, seconds: float) -> None:
        """Wait until all parties are up."""
        end, last = time.monotonic() + seconds, ""
        while missing := [name for name in self.proposal.parties if name not in self._parties_up()]:
            words = ", ".join(missing)
            if time.monotonic() > end:
                raise PeerLostError(
                    f"{words} did not come up in {seconds:.0f} s: `sectorch up FILE --as {missing[0]}` there, and run "
                    f"this again"
                )
            if words != last:
                self.say(f"waiting for {words} to be up, {seconds:.0f} s at most (--wait)")
            last = words
            time.sleep(min(LOOK, seconds))

    def _tell(self, kind: str, to: str, report: Mapping[str, Any]) -> None:
        body = {**report, "by": self.federation.name, "federation": self.federation.file.digest}
        note = sign_note(kind, body, self.federation.connection.identity)
        self.federation.connection.ask(Note(to=to, note=note))

    def _next_note(self, kind: type[W], seconds: float) -> W | None:
        """The next note of that kind about this run by one of its parties; None if none comes in time."""
        end = time.monotonic() + seconds
        while True:
            if (closed := self.federation.connection.link.closed) is not None:
                raise copy_error(closed)
            try:
                request = self.notes.get(timeout=min(0.2, max(0.001, end - time.monotonic())))
            except Empty:
                if time.monotonic() >= end:
                    return None
                continue
            try:
                word = open_note(request.note, self.federation.file)
            except (IdentityError, SectorchError) as error:
                self.say(f"a note that is not right: {error}")
                continue
            if isinstance(word, kind) and word.run == self.proposal.nonce and word.by in self.proposal.parties:
                return word

    def _collect_answers(self) -> None:
        answers: dict[str, str] = {}
        end = time.monotonic() + ANSWER
        while missing := [name for name in self.proposal.parties if name not in answers]:
            answer = self._next_note(ProposalAnswer, end - time.monotonic())
            if answer is None:
                raise PeerLostError(
                    f"{', '.join(missing)} did not answer in {ANSWER:.0f} s; what was wrong with the proposal stands "
                    f"in the log there"
                )
            right = answer.yes and answer.proposal == self.proposal.digest
            answers[answer.by] = "" if right else readable(answer.why or "it agreed on something else")
        self._refused = {name for name, why in answers.items() if why}
        refusals = [f"{name}: {why}" for name, why in answers.items() if why]
        if refusals:
            raise RefusedError("nothing was run. " + "; ".join(refusals))

    def _collect_reports(self, up: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        while len(found) < len(self.proposal.parties):
            ended = self._next_note(RunEnd, LOOK)
            if ended is not None and ended.proposal == self.proposal.digest:
                report = {
                    k: v for k, v in msgspec.to_builtins(ended).items() if k not in ("kind", *Word.__struct_fields__)
                }
                found[ended.by] = {**report, "outcome": readable(ended.outcome)}
                continue
            now = self._parties_up()
            for name in self.proposal.parties:
                if name not in found and now.get(name) != up.get(name):
                    found[name] = {"outcome": f"PeerLostError: '{name}' is not up any more, or was started again"}
        return {name: found[name] for name in self.proposal.parties}
