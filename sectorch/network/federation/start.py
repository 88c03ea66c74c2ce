"""Starting a program among parties that are up: propose it to each, hear their yes or no, and wait for its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, TypeVar

import msgspec

from ...errors import ArgumentError, IdentityError, PeerLostError, RefusedError, SectorchError
from ..messages import AreUp, Delivered, IsUp, Note, WhoIsUp
from ..names import readable
from ..wire.channel import again
from .file import Federated
from .papers import PAPERS, cast_of, settings_of
from .party import Federation
from .programs import rehearsed, source_of
from .proposals import Ended, Proposal, Word, YesOrNo, opened, signed

W = TypeVar("W", bound=Word)
ANSWER = 30.0
"""Seconds for a party to say yes or no."""
LOOK = 1.0
"""Seconds between two looks at who is still up."""


def described(
    federated: Federated,
    by: str,
    program: str,
    arguments: Sequence[str] = (),
    among: Sequence[str] = (),
    job: str = "1",
) -> Proposal:
    """What would be proposed.

    Args:
        program: FILE.py:FUNCTION or MODULE:FUNCTION on this party's disk, or a paper's name.
        arguments: a paper's options. among: who takes part; whom the program names, or all that have a role.

    Raises:
        ArgumentError: there is no such program, it needs parties that the federation has not, or options are not right.
    """
    named = tuple(federated.named(name).name for name in among)
    if program in PAPERS:
        settings_of(program, arguments)
        parties = named or cast_of(program, arguments, federated)
        return Proposal(federated.digest, by, parties, "paper", program, arguments=tuple(arguments), job=job)
    if arguments:
        raise ArgumentError(
            f"options after -- are of a paper's command, and {program[:80]!r} is a program: leave them out"
        )
    source = source_of(program)
    found = rehearsed(source, federated)
    return Proposal(
        federated.digest,
        by,
        named or found.parties,
        "program",
        source.name,
        source.digest,
        source.function,
        found.traced,
        job=job,
    )


@dataclass
class Start:
    """One run, from its proposal to its end at all parties.

    Args:
        notes: what came for this party (`Federation(on_note=notes.put)`).
    """

    federation: Federation
    proposal: Proposal
    notes: Queue[Delivered]
    say: Callable[[str], None] = lambda _: None

    def run(self, wait: float = 60.0) -> dict[str, dict[str, Any]]:
        """What each party says of its end: `outcome` is "done", or what ended it.

        Args:
            wait: seconds for all parties to be up.

        Raises:
            PeerLostError: a party is not up, or does not answer. RefusedError: a party has not accepted it; says why.
        """
        proposal, link = self.proposal, self.federation.connection
        self._refused: set[str] = set()
        link.ask(IsUp(tag=proposal.nonce, time=time.time()))
        self._await(wait)
        begun = False
        try:
            for name in proposal.parties:
                self._tell("proposal", name, proposal.body())
            self._agreed()
            up = self._up()
            for name in proposal.parties:
                self._tell("begin", name, {"run": proposal.nonce, "proposal": proposal.digest})
            begun = True
            self.say(f"run {proposal.nonce[:16]}: {proposal.name} begins at {', '.join(proposal.parties)}")
            return self._ended(up)
        except BaseException:
            for name in sorted(set(proposal.parties) - self._refused):
                with suppress(SectorchError):
                    self._tell("cancel", name, {"run": proposal.nonce, "proposal": proposal.digest})
            if begun:
                self.say("the parties were told to stop")
            raise

    def _up(self) -> dict[str, str]:
        return self.federation.connection.ask(WhoIsUp(parties=list(self.proposal.parties)), AreUp).up

    def _await(self, seconds: float) -> None:
        """Until all are up, and then until the proposal's time begins."""
        end, told = time.monotonic() + seconds, ""
        while missing := [name for name in self.proposal.parties if name not in self._up()]:
            words = ", ".join(missing)
            if time.monotonic() > end:
                raise PeerLostError(
                    f"{words} did not come up in {seconds:.0f} s: `sectorch up FILE --as {missing[0]}` there, and run "
                    f"this again"
                )
            if words != told:
                self.say(f"waiting for {words} to be up, {seconds:.0f} s at most (--wait)")
            told = words
            time.sleep(min(LOOK, seconds))

    def _tell(self, kind: str, to: str, said: Mapping[str, Any]) -> None:
        body = {**said, "by": self.federation.name, "federation": self.federation.file.digest}
        note = signed(kind, body, self.federation.connection.identity)
        self.federation.connection.ask(Note(to=to, note=note))

    def _heard(self, kind: type[W], seconds: float) -> W | None:
        """The next note of that kind about this run, by one of its parties; None if none came in time."""
        end = time.monotonic() + seconds
        while True:
            if (closed := self.federation.connection.link.closed) is not None:
                raise again(closed)
            try:
                request = self.notes.get(timeout=min(0.2, max(0.001, end - time.monotonic())))
            except Empty:
                if time.monotonic() >= end:
                    return None
                continue
            try:
                word = opened(request.note, self.federation.file)
            except (IdentityError, SectorchError) as error:
                self.say(f"a note that is not right: {error}")
                continue
            if isinstance(word, kind) and word.run == self.proposal.nonce and word.by in self.proposal.parties:
                return word

    def _agreed(self) -> None:
        answers: dict[str, str] = {}
        end = time.monotonic() + ANSWER
        while missing := [name for name in self.proposal.parties if name not in answers]:
            answer = self._heard(YesOrNo, end - time.monotonic())
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

    def _ended(self, up: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        while len(found) < len(self.proposal.parties):
            ended = self._heard(Ended, LOOK)
            if ended is not None and ended.proposal == self.proposal.digest:
                said = {
                    k: v for k, v in msgspec.to_builtins(ended).items() if k not in ("kind", *Word.__struct_fields__)
                }
                found[ended.by] = {**said, "outcome": readable(ended.outcome)}
                continue
            now = self._up()
            for name in self.proposal.parties:
                if name not in found and now.get(name) != up.get(name):
                    found[name] = {"outcome": f"PeerLostError: '{name}' is not up any more, or was started again"}
        return {name: found[name] for name in self.proposal.parties}
