"""What is noted for the parties of a protocol under test, step by step."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..choreography.program.nodes import Node, Slot
from ..choreography.program.trace import Program
from ..choreography.steps import Compute, Draw, Header, Move
from .known import Known, Played, is_tests

_TYPES = {torch.int64: "int64", torch.int32: "int32", torch.uint8: "bytes"}
LINEAR = (operator.add, operator.sub, operator.xor)
"""Steps whose result says no more than their operands."""


class Notes:
    """What the parties of a program know, as its steps are taken."""

    def __init__(self, program: Program):
        self.played = Played({party.name: [] for party in program.parties})
        self._moved = {slot for node in program.nodes if isinstance(node.step, Move) for slot in node.slots}
        self._shown: dict[tuple, list[torch.Tensor]] = {}
        self._latest: dict[tuple, Known] = {}
        self._has: dict[str, set[Slot]] = {party.name: set() for party in program.parties}
        for i in program.inputs:
            self._has[i.party.name].add(i.slot)

    def brought(self, party: str, name: str, half: torch.Tensor) -> None:
        """A party has a half of an input."""
        self._note(party, Known(f"its half of {name}", "brought", half))

    def take(self, node: Node, result: Any) -> None:
        """A step was taken, with this result."""
        step = node.step
        for party in step.owners:
            self._has[party.name].update(node.slots)
        if isinstance(step, Draw):
            for party in step.owners:
                known = Known(f"{_last(step.name)} of {step.name.rsplit('/', 1)[0]}", "drawn", result)
                self._note(party.name, known)
                self._join(party.name, step.path, known)
        elif isinstance(step, Move):
            self._has[step.header.dst.name].update(node.taken)
            self._move(step.header, result)
        elif isinstance(step, Compute) and not is_tests(step.path):
            self._compute(node, step, result)

    def _note(self, party: str, known: Known) -> None:
        self.played.known[party].append(known)

    def _move(self, header: Header, value: torch.Tensor) -> None:
        self.played.messages.append((header, value))
        name = f"{header.label} of {header.protocol}{'' if value.dtype == torch.int64 else f' ({_TYPES[value.dtype]})'}"
        own = is_tests(header.path)
        shows = "a result" if own and header.label == "result" else header.shows
        received = Known(f"{name}, from {header.src.name}", "received", value, shows)
        self._note(header.dst.name, received)
        self._note(header.src.name, Known(f"{name}, to {header.dst.name}", "sent", value, shows))
        if not own:
            self._show(header, value)
            self._join(header.dst.name, header.path, received)

    def _show(self, header: Header, value: torch.Tensor) -> None:
        """What two send each other at one place is, as a rule, one value in two halves."""
        key = header.path, value.shape, value.dtype
        others = self._shown.get((*key, header.dst, header.src))
        if not others:
            self._shown.setdefault((*key, header.src, header.dst), []).append(value)
            return
        name = f"what {header.src.name} and {header.dst.name} show in {_last(header.path)}"
        both = others.pop(0) ^ value
        for party in (header.src, header.dst):
            self._note(party.name, Known(name, "shown", both))

    def _join(self, party: str, path: str, known: Known) -> None:
        """What a party has at one place may be the halves of one value."""
        place = party, path, known.value.shape, known.value.dtype
        if place in self._latest:
            other = self._latest[place]
            self._note(party, Known(f"({other.name} + {known.name})", "joined", other.value ^ known.value))
        self._latest[place] = known

    def _compute(self, node: Node, step: Compute, result: Any) -> None:
        """What parties make of several values is often no linear function of these. What several parties make of a
        message is open to them. Who has what another's step takes may take it too."""
        if not step.random:
            for has in self._has.values():
                if node.taken and has.issuperset(node.taken):
                    has.update(node.slots)
        of_message = len(step.owners) > 1 and not self._moved.isdisjoint(node.taken)
        if not of_message and (len(node.taken) < 2 or step.f in LINEAR):
            return
        name = f"what {_last(step.path) or 'the program'} {'opens' if of_message else 'makes'}"
        able = [party for party, has in self._has.items() if has.issuperset(node.slots)]
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
                for party in able:
                    own = of_message and party in {p.name for p in step.owners}
                    self._note(party, Known(name, "opened" if own else "computed", value))


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]
