"""Several calls of one program that a process takes at the same time: a step of each of them, then the next step.

The calls are of different sessions, with streams, masks and channels of their own, and nothing of one comes near
another: each step takes a call's own values. What they have in common is the work beside the arithmetic. A thread
takes a step for all of them before it waits, what they send to one party goes in one piece, and a party that is waited
for has then sent something to all.

A call that fails leaves the others as they are. Nobody waits for a party that takes part in one of them only: what such
a party sends is there before (`receive`), and what it is sent goes out after (`finish`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...errors import SectorchError
from ..ledger import Observer, observers, sole_observer
from ..net import Compute, Move, Runtime, Sent
from ..roles import Party
from .projection import ConstantValue, ProjectedStep, Projection, bring_inputs
from .trace import Slot


class RemoteRuntime(Runtime, Protocol):
    """A runtime whose other parties are elsewhere (`run/party.py`)."""

    def post(self, line: Sent, value: torch.Tensor) -> None:
        """Send a message with those that follow it, at the latest with `flush_together`."""
        ...

    def flush_together(self, others: Sequence[Any]) -> None:
        """Send what this runtime and others have posted; what goes over one connection goes in one piece."""
        ...


class BatchedCall:
    """One call that is taken with others.

    Args:
        settled, inputs: as of `Part.call`.
        own: parties whose messages of this call are received first, and sent last, by whoever it is the call of.
    """

    def __init__(
        self, part: Projection, runtime: RemoteRuntime, call: int, settled: Mapping[Slot, Any],
        inputs: Mapping[str, torch.Tensor], own: frozenset[Party] = frozenset(),
    ):  # fmt: skip
        self.part, self.runtime, self.call, self.own = part, runtime, call, own
        self.values: dict[Slot, Any] = {**settled, **bring_inputs(part.brought, inputs)}
        self.error: BaseException | None = None
        self.failed: Callable[[], None] = lambda: None
        """Called when the call has failed: nobody takes it any more, and its other parties wait for a word."""
        self._watching = observers()
        self._ahead: deque[torch.Tensor] = deque()
        self._left: list[tuple[Sent, torch.Tensor]] = []

    def __repr__(self) -> str:
        return f"Taking(call {self.call} of {self.part!r})"

    def sent(self, line: ProjectedStep) -> Sent:
        return Sent.of(line.step.header, self.call, self.runtime.session)  # type: ignore[union-attr]

    def receive(self) -> None:
        """All that `own` parties send in this call.

        Raises:
            SectorchError: as of `Runtime.transfer`.
        """
        for line in self.part.lines:
            if isinstance(line.step, Move) and line.step.header.src in self.own:
                self._ahead.append(self.runtime.transfer(self.sent(line), torch.empty(0, device="meta")))

    def finish(self) -> Any:
        """Send `own` parties what is for them; the call's results.

        Raises:
            SectorchError: what ended the call.
        """
        if self.error is not None:
            raise self.error
        for line, value in self._left:
            self.runtime.transfer(line, value)
        return self.part.learned(self.values)

    def move(self, line: ProjectedStep, value: Any) -> Any:
        """Take a message of this call's, unless others wait for it, too."""
        header, here = line.step.header, self.part.here  # type: ignore[union-attr]
        if header.src in self.own:
            return self._ahead.popleft()
        sent = self.sent(line)
        if header.dst in self.own:
            self._left.append((sent, value))
            return value
        if header.src in here:
            self.runtime.post(sent, value)
        elif header.dst in here:
            value = self.runtime.transfer(sent, value)
        for observer in self._watching:
            observer.message(sent, value)
        return value


@torch.inference_mode()
def run_in_lockstep(calls: Sequence[BatchedCall]) -> None:
    """Take all steps of these calls, which are of one part of a program; see `Taking.finish`, and `error` of each."""
    with sole_observer(Observer()):  # each call's observers are told by `move`
        _take_all(list(calls))


def _take_all(alive: list[BatchedCall]) -> None:
    first = alive[0]
    for line in first.part.lines:
        if isinstance(line.step, Move) and _waits(line, first):
            alive[0].runtime.flush_together([one.runtime for one in alive[1:]])
        for one in alive:
            try:
                _take(line, one)
            except BaseException as error:
                one.error = error
                if isinstance(error, SectorchError):
                    error.place = line.place
                one.failed()
        if any(one.error is not None for one in alive):
            alive = [one for one in alive if one.error is None]
            if not alive:
                return
    alive[0].runtime.flush_together([one.runtime for one in alive[1:]])


def _waits(line: ProjectedStep, call: BatchedCall) -> bool:
    header = line.step.header  # type: ignore[union-attr]
    return header.dst in call.part.here and header.src not in call.own


def _take(line: ProjectedStep, one: BatchedCall) -> None:
    values, step = one.values, line.step
    contents = [source.value if type(source) is ConstantValue else values[source] for source in line.sources]
    if type(step) is Compute:
        result = step.f(*contents)
    elif type(step) is Move:
        (value,) = contents
        moved = one.move(line, value)
        result = value if line.held else moved
    else:
        result = step.run(one.runtime, one.call, contents)
    for output, slot in line.outputs:
        values[slot] = result if output is None else result[output]
    for slot in line.drops:
        del values[slot]
