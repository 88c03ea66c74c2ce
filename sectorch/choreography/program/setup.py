"""What the programs of one model have in common: the steps that are taken once a session.

Draws, messages and what a party draws on its own are taken once, in the order of the programs that first need them;
everybody counts them all, so that all agree on their numbers. What is computed from them is worked out where it is
needed, and kept. A mask that programs take in another form alone is kept in that form alone, and is made of it again
for a program that takes it as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch

from ...errors import MaterialError
from ..pages import give_back
from ..steps import Compute, Draw, Move, Runtime
from .nodes import Node, Slot
from .part import Line, Part, given, lines_of, same, with_drops


@runtime_checkable
class Restoring(Protocol):
    """What brings a weight into a form of which the weight can be made again."""

    def restorable(self, made: Any) -> bool: ...
    def restored(self, made: Any, weight: torch.Size) -> torch.Tensor: ...


class Setup:
    """The settled values of one model's programs in a session, as far as they are here. Its repr shows no content.

    Attributes:
        call: the number that addresses its randomness; None in a session that is taken up again: nothing of it is drawn
            or sent a second time.
    """

    def __init__(self, call: int | None, of: Setup | None = None):
        self.call = call
        self._lock = threading.Lock()
        self._values: dict[Slot, Any] = {}
        self._taken: set[Slot] = set()
        """The first result of each draw, message, check and random step that was taken."""
        self._numbers: dict[Slot, int] = {} if of is None else of._numbers
        """Of the draws, in the order in which they were first taken."""
        self._brought: dict[str, torch.Tensor] = {}
        """The inputs that it was made with."""
        self._of: WeakKeyDictionary[Part, dict[Slot, Any]] = WeakKeyDictionary()
        self._forms: dict[Slot, tuple[Slot, Callable[[Any], torch.Tensor]]] = {}
        """Of values that are not kept: the form of theirs that is, and what makes them of it."""

    def __repr__(self) -> str:
        return f"Setup({len(self._values)} values)"

    def rehearsed(self) -> Setup:
        """One that has taken nothing, and whose draws have the numbers that they have here: for who takes another's
        part of what was taken here."""
        return Setup(self.call, self)

    def values(self, part: Part, runtime: Runtime, inputs: Mapping[str, torch.Tensor]) -> dict[Slot, Any]:
        """What a part of a program needs of the setup; what is missing of it is done now.

        Raises:
            SectorchError: a weight does not fit, at its owner, before anything is drawn or sent.
            ArgumentError: an input has another value than before: what was made of it is in use.
            MaterialError: the session was taken up again, and something would have to be drawn or sent.
        """
        with self._lock, torch.inference_mode():
            same(self._brought, inputs, "the setup was made")
            if part not in self._of:
                self._of[part] = self._settled(part, runtime, inputs)
            return self._of[part]

    def made(self, part: Part) -> bool:
        """Whether nothing of it is missing for a part of a program."""
        return part in self._of

    def check(self, part: Part, runtime: Runtime, inputs: Mapping[str, torch.Tensor]) -> None:
        """What whoever is here works out of its own values alone, as `values` does first; nothing is drawn or sent.

        Raises:
            SectorchError: a weight does not fit, at its owner.
        """
        with self._lock, torch.inference_mode():
            if part not in self._of:
                self._settled(part, runtime, inputs, own=True)

    def _settled(
        self, part: Part, runtime: Runtime, inputs: Mapping[str, torch.Tensor], own: bool = False
    ) -> dict[Slot, Any]:
        wanted = part.settled_online if self.call is None else part.settled
        plan, count = self._plan(part, wanted)
        needed = {slot for _, line in plan if line for slot in line.needed}
        self._restore(needed | wanted)
        brought = [i for i in part.program.inputs if i.slot in needed]
        values = self._values | given(brought, inputs)
        last = {slot: at for at, (_, line) in enumerate(plan) if line for slot in line.needed}
        used, forms, size = wanted.union(*self._of.values()), dict[Slot, Node](), 0
        for at, (node, line) in enumerate(plan[:count] if own else plan):
            if at == count:  # what is drawn and sent from here on is of these inputs
                self._brought |= {i.name: inputs[i.name] for i in brought}
            if self._take(node, line, part, runtime, values):
                self._values |= {slot: values[slot] for slot in node.slots if slot in values}
            forms |= {slot: node for slot in node.needs if node.slots[0] in wanted}
            for slot in node.needs - used:
                if last.get(slot) == at and slot in forms:
                    self._drop(slot, forms[slot], part, values)
            size += sum(getattr(part.shapes[slot], "nbytes", 0) for slot in node.slots)
            if size > UNTRIMMED:
                size = 0
                give_back()
        self._values |= {slot: values[slot] for slot in wanted if slot in values}
        self._brought |= {i.name: inputs[i.name] for i in brought}
        if not own and not wanted <= set(self._values):
            raise MaterialError("the session was taken up again, and its setup lacks what this program needs")
        return {} if own else {slot: self._values[slot] for slot in wanted}

    def _drop(self, slot: Slot, node: Node, part: Part, values: dict[Slot, Any]) -> None:
        """Forget what a step brought into another form, if it can be made of that again."""
        step, form = node.step, values.get(node.slots[0])
        product = getattr(step.f, "__self__", None) if isinstance(step, Compute) else None
        if slot in self._values and isinstance(product, Restoring) and product.restorable(form):
            self._forms[slot] = node.slots[0], partial(product.restored, weight=part.shapes[slot].shape)
            self._values.pop(slot)
            values.pop(slot, None)

    def _restore(self, needed: set[Slot]) -> None:
        for slot in needed & set(self._forms):
            form, back = self._forms.pop(slot)
            self._values[slot] = back(self._values[form])

    def _take(self, node: Node, line: Line | None, part: Part, runtime: Runtime, values: dict[Slot, Any]) -> bool:
        """Take a step; whether its results are kept, since it is taken once a session."""
        step, first = node.step, node.slots[0]
        once = _once(node)
        if once and (first in self._taken or self.call is None):
            if isinstance(step, Move) and step.holders & part.here:
                values[first] = values[node.operands[0].slot]  # what was sent
            elif step.owners & part.here:
                raise MaterialError("a step of the setup needs what was made before and not kept, or never made here")
            return False
        if isinstance(step, Draw):
            number = self._numbers.setdefault(first, len(self._numbers))
            line = line and replace(line, step=replace(step, number=number))
        if line is not None:
            line.take(runtime, self.call or 0, values)
        if not _pure(node):
            self._taken.add(first)
        return once and not (isinstance(step, Move) and step.header.dst not in part.here)

    def _plan(self, part: Part, wanted: set[Slot]) -> tuple[list[tuple[Node, Line | None]], int]:
        """The steps that are missing, with what is done of them here; first those, so many, that are on own values."""
        kept = set(self._values) | set(self._forms)
        nodes, needed = [], wanted - kept
        for node in reversed(part.program.setup):
            again = self.call is None and _once(node)
            missing = not _pure(node) and node.slots[0] not in self._taken and not again
            if missing or needed.intersection(node.slots):
                nodes.append(node)
                needed |= node.needs - kept
        nodes.reverse()
        brought = {i.slot for i in part.program.inputs if i.party in part.here} | kept
        own: dict[Node, None] = {}
        for node in nodes:
            if isinstance(node.step, Compute) and node.step.owners & part.here and node.needs <= brought:
                own[node] = None
                brought |= set(node.slots)
        nodes = [*own, *(node for node in nodes if node not in own)]
        lines = [next(iter(lines_of([node], part.shapes, part.here)), None) for node in nodes]
        kept = wanted | {slot for node in nodes if _once(node) for slot in node.slots}
        dropping = iter(with_drops([line for line in lines if line], kept))
        return [(node, line and next(dropping)) for node, line in zip(nodes, lines, strict=True)], len(own)


UNTRIMMED = 1 << 27
"""Bytes of results after which the memory of those that are gone is given back."""


def _pure(node: Node) -> bool:
    return isinstance(node.step, Compute) and node.step.pure


def _once(node: Node) -> bool:
    """Whether it cannot be taken again: a draw, a message, or a step with randomness of a party's own."""
    return not isinstance(node.step, Compute) or node.step.random
