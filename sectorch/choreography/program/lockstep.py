"""Lockstep: several calls of one program in one process, which takes each step for all calls before the next step.

The calls are of different sessions, with their own streams, masks, channels and values; no values of two calls meet.
They share the work beside the arithmetic: messages of all calls to one party are sent together, and a thread waits once
for all of them.

A call that fails does not affect the others. No call waits for a party that takes part in one call only: the messages
from such a party are received before the steps (`receive`), and those to it are sent after them (`finish`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import SectorchError
from ..ledger import Observer, observers, sole_observer
from ..net import Compute, Move, Sent
from ..roles import Party
from ..run.party import PartyRuntime
from .projection import ConstantValue, ProjectedStep, Projection, bring_inputs
from .trace import Slot


class BatchedCall:
    """One call of a batch.

    Args:
        part, runtime, call, settled, inputs: as in `Projection.call`.
        own: parties that take part in this call only. Messages from them come first, and messages to them go last.
    """

    def __init__(
        self, part: Projection, runtime: PartyRuntime, call: int, settled: Mapping[Slot, Any],
        inputs: Mapping[str, torch.Tensor], own: frozenset[Party] = frozenset(),
    ):  # fmt: skip
        self.part, self.runtime, self.call, self.own = part, runtime, call, own
        self.values: dict[Slot, Any] = {**settled, **bring_inputs(part.required_inputs, inputs)}
        self.error: BaseException | None = None
        self.failed: Callable[[], None] = lambda: None
        """Called when the call has failed, to tell its other parties, which wait."""
        self._watching = observers()
        self._ahead: deque[torch.Tensor] = deque()
        self._left: list[tuple[Sent, torch.Tensor]] = []

    def __repr__(self) -> str:
        return f"BatchedCall(call {self.call} of {self.part!r})"

    def sent(self, line: ProjectedStep) -> Sent:
        return Sent.of(line.step.header, self.call, self.runtime.session)  # type: ignore[union-attr]

    def receive(self) -> None:
        """Receive all messages of `own` parties in this call.

        Raises:
            SectorchError: as from `Runtime.transfer`.
        """
        for line in self.part.lines:
            if isinstance(line.step, Move) and line.step.header.src in self.own:
                self._ahead.append(self.runtime.transfer(self.sent(line), torch.empty(0, device="meta")))

    def finish(self) -> Any:
        """Send the messages to `own` parties, and return the call's results.

        Raises:
            SectorchError: the error that ended the call.
        """
        if self.error is not None:
            raise self.error
        for line, value in self._left:
            self.runtime.transfer(line, value)
        return self.part.copy_results(self.values)

    def move(self, line: ProjectedStep, value: Any) -> Any:
        """Send or receive a message of this call; defer it where it is to one of the `own` parties."""
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
    """Take all steps of these calls, which have one projection. A call that fails keeps its error for `finish`."""
    with sole_observer(Observer()):  # each call's observers are told by `BatchedCall.move`
        _run_all(list(calls))


def _run_all(alive: list[BatchedCall]) -> None:
    first = alive[0]
    for line in first.part.lines:
        header = line.step.header if isinstance(line.step, Move) else None
        if header is not None and header.dst in first.part.here and header.src not in first.own:  # waits
            # The other end may wait for what was deferred, and send nothing before it comes.
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
