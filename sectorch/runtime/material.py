"""Offline material: everything of a call that does not depend on the query, made ahead of it.

`Recorder` runs a program once without its query: offline steps are executed (and their messages sent), online steps run
on shapes only. What an online step took from an offline one is kept on the tape. `Replayer` runs the same program later
with the query: offline steps come from the tape, online steps are executed. Both count offline steps in program order,
so the two runs meet at the same places; a tape is used once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..choreography import Located, Phase
from ..errors import MaterialError
from ..steps import shape_of


@dataclass
class Tape:
    """The kept results of the offline steps of one call, in program order. Its repr shows no content."""

    call: int
    session: bytes
    steps: list[list | None] = field(default_factory=list, repr=False)
    plural: list[bool] = field(default_factory=list, repr=False)
    fingerprints: list[int] = field(default_factory=list, repr=False)
    position: int = 0
    _claimed: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, result: object, fingerprint: int) -> None:
        """The result's shapes, as those of the next offline step."""
        self.steps.append([shape_of(v) for v in (result if isinstance(result, tuple) else (result,))])
        self.plural.append(isinstance(result, tuple))
        self.fingerprints.append(fingerprint)

    def claim(self, session: bytes) -> None:
        """Take the tape for one replay, of whichever thread comes first: its masks hide one query.

        Raises:
            MaterialError: it is of another session, or was used or claimed already.
        """
        if self.session != session:
            raise MaterialError("the prepared material belongs to another session")
        if self.position or not self._claimed.acquire(blocking=False):
            raise MaterialError(f"the material of call {self.call} was used already; prepare it again")

    def release(self) -> None:
        """End a replay: a tape of which nothing was taken can be claimed again."""
        if not self.position:
            self._claimed.release()

    @property
    def bytes(self) -> int:
        """Memory that the kept results take."""
        held = {v.untyped_storage().data_ptr(): v for s in self.steps if s for v in s if _real(v)}
        return sum(v.untyped_storage().nbytes() for v in held.values())


def _real(value) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


class Recorder:
    """Runs the offline part of a call and fills a tape."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self._places: dict[int, int] = {}

    def step(self, number: int, phase: Phase, args: tuple, run: Callable, fingerprint: int, ours: bool):
        if phase == Phase.ONLINE:
            for value in args if ours else ():  # what only others will use need not be kept here
                if type(value) is Located and value.slot is not None:
                    call, step, output = value.slot
                    if call == self.tape.call and step in self._places:
                        self.tape.steps[self._places[step]][output] = value._value
            return run(False)
        result = run(True)
        if phase == Phase.OFFLINE:
            self._places[number] = len(self.tape.steps)
            self.tape.add(result, fingerprint)
        return result


class Replayer:
    """Runs the online part of a call on a filled tape, and empties it."""

    def __init__(self, tape: Tape, session: bytes):
        tape.claim(session)
        self.tape = tape

    def step(self, number: int, phase: Phase, args: tuple, run: Callable, fingerprint: int, ours: bool):
        tape = self.tape
        if phase != Phase.OFFLINE:
            return run(True)
        if tape.position >= len(tape.steps) or tape.steps[tape.position] is None:
            raise MaterialError("the program asks for more offline steps than were prepared: it is another program")
        if tape.fingerprints[tape.position] != fingerprint:
            raise MaterialError("the material was prepared for another program, other shapes or other arguments")
        outputs, tape.steps[tape.position] = tape.steps[tape.position], None
        plural = tape.plural[tape.position]
        tape.position += 1
        return tuple(outputs) if plural else outputs[0]

    def finish(self) -> None:
        """Raise unless the whole tape was used."""
        if self.tape.position != len(self.tape.steps):
            raise MaterialError("the program asked for fewer offline steps than were prepared: it is another program")


class Settled:
    """The setup of a session that is taken up again for its tapes: nothing of it is drawn or sent a second time.

    What a party computes from values of its own (A's encoded weights) it computes again; all else stays a shape.
    """

    def step(self, number: int, phase: Phase, args: tuple, run: Callable, fingerprint: int, ours: bool):
        absent = any(type(v) is Located and not _real(v._value) for v in args)
        return run(not absent and bool(args))
