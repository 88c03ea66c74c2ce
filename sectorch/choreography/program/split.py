"""What is done ahead of the query, in two: what a dealer does, who waits for nobody, and what remains.

So a dealer can work out a call, keep what came of it, and send it later, when nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..net import Party
from ..steps import Draw, Move, Runtime
from .nodes import Slot
from .part import Line, Part, given, part_of, take, with_drops
from .trace import Program


class Dealing(Runtime, Protocol):
    """The runtime of a dealer that sends nothing (`run/rehearsal.py`)."""

    def draw_all(self, draws: Sequence[Draw], call: int) -> list[torch.Tensor]:
        """As many draws one by one, in less time."""
        ...


class Split:
    """The offline steps of a part, of a program whose dealer is here and is sent nothing ahead of the query.

    Args:
        most: bytes up to which what is between the two is kept of a call. Beyond, nothing is, and `finish` has nothing
            to go on with: the dealer's steps are there to look at what it sends.

    Attributes:
        part: what it is of. keeps: whether it is.
    """

    def __init__(self, part: Part, dealer: Party, most: int):
        self.part = part
        mine = [line for line in part.offline if _is_of(line, dealer)]
        rest = [line for line in part.offline if isinstance(line.step, Move) or not _is_of(line, dealer)]
        made = {slot for line in rest for _, slot in line.outputs}
        needed = {slot for line in rest for slot in line.needed}
        between = (needed.union(part.kept) - made) & {slot for line in mine for _, slot in line.outputs}
        self.keeps = sum(_bytes(part.shapes[slot]) for slot in between) <= most
        self._between, self._kept = sorted(between) if self.keeps else [], part.kept
        draws = [(line, line.step) for line in mine if self.keeps and isinstance(line.step, Draw)]
        self._draws, self._drawn = [step for _, step in draws], [line.outputs[0][1] for line, _ in draws]
        mine = [line for line in mine if not (self.keeps and isinstance(line.step, Draw))]
        self._mine = with_drops(mine, set(self._between))
        self._rest = with_drops(rest, set(part.kept))
        self._brought = [one for one in part.brought if one.slot in needed]

    def begin(self, runtime: Dealing, call: int, settled: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """What the dealer does; what is kept of it. The draws come first, at once: they are kept anyway."""
        drawn = runtime.draw_all(self._draws, call)
        values = take(self._mine, runtime, call, {**settled, **dict(zip(self._drawn, drawn, strict=True))})
        return {slot: values[slot] for slot in self._between}

    def finish(
        self,
        runtime: Runtime,
        call: int,
        settled: Mapping[Slot, Any],
        inputs: Mapping[str, torch.Tensor],
        begun: dict[Slot, Any],
    ) -> list[Any]:
        """What remains: the messages, and what others who are here do; as `Part.prepare`. `begun` is used up."""
        values = {**settled, **given(self._brought, inputs), **begun}
        begun.clear()
        take(self._rest, runtime, call, values)
        return [_alone(values[slot]) for slot in self._kept]


def split_of(program: Program, runtime: Runtime, dealer: Party, most: int) -> Split:
    """Of what a process takes of a program; worked out once."""
    part = part_of(program, runtime.here)
    if (dealer, most) not in part.splits:
        part.splits[dealer, most] = Split(part, dealer, most)
    return part.splits[dealer, most]


def _is_of(line: Line, dealer: Party) -> bool:
    return line.step.header.src == dealer if isinstance(line.step, Move) else dealer in line.step.owners


@torch.inference_mode()
def _alone(value: Any) -> Any:
    """The value, in memory of its own: draws that were made at once are parts of one piece, which would stay."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > _bytes(value):
        return value.clone()
    return value


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
