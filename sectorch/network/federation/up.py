"""A party that is up: it takes part in what others propose, if it has accepted it before, until it is stopped.

A proposal is judged when it comes (`policy.py`): yes or no, with a reason, goes back to whoever proposes. It begins
when that one has heard yes from all and says so. Each run has a folder among this party's results: `run.json` says
what was run, for whom and how it ended, and what this party learned stands beside it.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any

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
)
from ..identity.certificates import Credentials
from ..log import write
from ..messages import Delivered, IsUp, Note
from ..names import readable
from ..parties.said import in_full, join, reason
from ..receipts.receipts import Receipts
from ..wire.channel import again
from ..wire.turns import Turns
from .file import Federated
from .own import Own
from .party import Federation
from .policy import Agreed, Policy
from .proposals import Begin, Cancel, Proposed, Word, check_same, opened, proposal_of, signed
from .taking import Run

log = logging.getLogger("sectorch.federation")
NOTES = 256
"""Notes that may wait to be read; further ones are dropped, as a party that is proposed to in earnest hears of it."""
PENDING = 60.0
"""Seconds for which a yes holds until the starter says that all agree."""
RETRY = 2.0
"""Seconds between attempts to reach the server again."""


class Up:
    """A party of a federation whose process goes on; `keep` runs it, `drain` and `stop` end it.

    Args:
        path: of the federation file. own: this party's own file.

    Raises:
        ArgumentError, IdentityError: something that it has or accepts is not right; nothing was sent.
        ReceiptError: receipts cannot be written.
    """

    def __init__(self, path: Path, federated: Federated, own: Own, policy: Policy, credentials: Credentials):
        self.path, self.file, self.own, self.policy = path, federated, own, policy
        self.name = credentials.name
        self.results = own.results(self.name)
        self.results.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = own.receipts(self.name, "P")
        self.receipts = None if kept is None else Receipts(kept, credentials, "P")
        self._seen, self._counts = _earlier(self.results)
        self._turns = Turns(own.limits.runs)
        self._notes: Queue[Delivered | None] = Queue(NOTES)
        self._agreed: dict[str, tuple[Agreed, float]] = {}
        self._runs: dict[str, Run] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._federation: Federation | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="notes")
        self._reader.start()

    def keep(self, stopped: threading.Event, say: Callable[[str], None]) -> None:
        """Be up until stopped; where the server is not there, or goes away, dial again.

        Raises:
            IdentityError, ArgumentError, RefusedError: waiting does not help.
        """
        told = ""
        while not stopped.is_set():
            try:
                with Federation(
                    self.path, self.name, self.own.folder, wait=self.own.limits.wait_seconds, on_note=self._take
                ) as federation:
                    federation.connection.ask(IsUp(time=time.time()))
                    self._federation, told = federation, ""
                    say(f"'{self.name}' is up at {federation.address}; Ctrl-C stops")
                    federation.connection.ended.wait()
                    raise again(federation.connection.link.closed or PeerLostError("the connection ended"))
            except (IdentityError, RefusedError):
                raise
            except NetworkError as error:
                if str(error) != told and not stopped.is_set():
                    told = str(error)
                    say(f"{told}; dialling again every {RETRY:g} s until it is there")
            stopped.wait(RETRY)

    def drain(self, seconds: float) -> bool:
        """Take part in no more runs; whether those that are under way ended in that time."""
        return self._turns.drain(f"'{self.name}' is stopping; propose again when it is back", seconds)

    def stop(self) -> None:
        """End all runs, and leave."""
        for run in list(self._runs.values()):
            run.give_up(AbortedError(f"'{self.name}' was stopped"))
        join(self._threads)
        if self._federation is not None:
            self._federation.close()
        with suppress(Full):
            self._notes.put_nowait(None)
        if self.receipts is not None:
            self.receipts.close()

    def unready(self) -> str:
        """Why nothing would be taken part in now; empty where it would."""
        if self._turns.closed:
            return self._turns.closed
        there = self._federation is not None and self._federation.connection.link.closed is None
        return "" if there else f"'{self.name}' has no connection to the server"

    def renew(self, credentials: Credentials) -> None:
        """Nothing to do: the files are read whenever it dials."""

    def figures(self) -> dict[str, float]:
        """What is watched."""
        return self._turns.figures()

    def _take(self, request: Delivered) -> None:
        """In the thread that reads the connection."""
        try:
            self._notes.put_nowait(request)
        except Full:
            log.warning("more notes come than are read; one was dropped")

    def _read(self) -> None:
        while (request := self._notes.get()) is not None:
            sender = readable(request.sender, 64)
            try:
                word = opened(request.note, self.file)
                if word.by != request.sender:
                    raise IdentityError(f"a note of '{word.by}' that came from another")
                self._heard(word)
            except SectorchError as error:
                write(log, "note refused", logging.WARNING, by=sender, why=in_full(error))
            except Exception as error:  # the next one is read whatever was wrong with this one
                write(log, "note refused", logging.ERROR, by=sender, why=in_full(error))
                log.debug("in detail", exc_info=error)

    def _heard(self, word: Proposed | Word) -> None:
        if isinstance(word, Proposed):
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

    def _answer(self, word: Proposed) -> None:
        said: dict[str, Any] = {"yes": True, "why": ""}
        try:
            check_same(word, self.file)
            proposal = proposal_of(word)
            proposal.check_time()
            self._admit(self.policy.agree(proposal))
        except (RefusedError, BusyError, FrameError) as error:
            said = {"yes": False, "why": f"{type(error).__name__}: {error}"[:600]}
            own = None if error.__cause__ is None else in_full(error.__cause__)
            write(log, "refused", run=word.run, by=word.by, why=error, own=own)
        except Exception as error:
            said = {"yes": False, "why": f"RefusedError: '{self.name}' cannot run it: its own log says why"}
            write(log, "refused", logging.ERROR, run=word.run, by=word.by, own=in_full(error))
        else:
            write(log, "accepted", run=proposal.nonce, by=proposal.by, program=proposal.name)
        digest = "" if not said["yes"] else proposal_of(word).digest
        self.tell("answer", word.by, word.run, {"proposal": digest, **said})

    def _admit(self, agreed: Agreed) -> None:
        """Keep what was agreed on until its starter says that all have.

        Raises:
            RefusedError: it was run before, or as often as is accepted. BusyError: too many are under way.
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

    def _begin(self, agreed: Agreed) -> None:
        proposal, federation = agreed.proposal, self._federation
        if federation is None:
            return
        with self._lock:
            self._seen.add(proposal.nonce)
            self._counts[agreed.accepted.key] += 1
        time_ = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S")
        called = re.sub("[^A-Za-z0-9_.-]", "-", proposal.name)[:60]
        folder = self.results / f"{time_}-{called}-{proposal.nonce}"
        run = self._runs[proposal.nonce] = Run(agreed, federation, folder, self.own, self.receipts)
        thread = threading.Thread(target=self._run, args=(run,), daemon=True, name=f"run {proposal.nonce[:8]}")
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _run(self, run: Run) -> None:
        proposal = run.agreed.proposal
        try:
            with self._turns.turn(proposal.nonce, lambda: None):
                said = run.take_part()
        except BaseException as error:
            said = {"outcome": reason(error, f"'{self.name}'")}
            write(log, "run ended", run=proposal.nonce, program=proposal.name, why=in_full(error))
            log.debug("in detail", exc_info=error)
        else:
            write(log, "run ended", run=proposal.nonce, program=proposal.name, outcome="done", folder=run.folder)
        self._runs.pop(proposal.nonce, None)
        self.tell("ended", proposal.by, proposal.nonce, {"proposal": proposal.digest, **said})

    def tell(self, kind: str, to: str, run: str, said: dict[str, Any]) -> None:
        """Send a note to whoever proposed a run, if it still waits."""
        federation = self._federation
        if federation is None:
            return
        body = {"by": self.name, "federation": self.file.digest, "run": run, **said}
        note = signed(kind, body, federation.connection.identity)
        with suppress(SectorchError):
            federation.connection.link.tell(Note(to=to, tag=run, note=note))


def _earlier(results: Path) -> tuple[set[str], Counter[str]]:
    """The nonces of earlier runs, and how often each thing was run."""
    seen, counts = set[str](), Counter[str]()
    for path in results.glob("*/run.json"):
        try:
            said = json.loads(path.read_bytes())
            seen.add(str(said["run"]))
            counts[str(said["accepted"])] += 1
        except (OSError, ValueError, KeyError, TypeError):
            raise ArgumentError(f"{path} is not of a run: move it away, and count what it stood for") from None
    return seen, counts
