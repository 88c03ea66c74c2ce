"""Faults that are planted in a traced program: each is a program of its own, in which one step does something else.

Nothing of a protocol's source is changed. A program is a list of steps, and a fault is another step in the place of one
of them, or one that comes in between. It is the same for all parties who take that step, as a fault in the code is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..choreography import Party, Phase
from ..choreography.program.nodes import Node, Slot, Taken
from ..choreography.program.trace import Program
from ..choreography.steps import Compute, Draw, Header, Move
from .known import TESTS, is_tests

KINDS = {
    "no mask": "a draw is zero",
    "mask twice": "a draw is an earlier one of the same two parties",
    "short mask": "of a draw the upper half is zero",
    "low bit unmasked": "the lowest bit of a draw is never set",
    "mask told": "a draw is sent to a party that is not to know it",
    "term": "an operand of a step is zero: a correction, a term or a mask is missing",
    "sign": "a result of a step is negated",
    "modulus": "of a result of a step the upper half is lost",
    "low bit": "the lowest bit of a result of a step is lost",
    "one": "a result of a step is one more",
    "number": "a public number of a step is one more, or a yes a no: a shift, a width, who adds the public term",
}
"""The kinds of faults, and what each is."""


@dataclass(frozen=True)
class Mutant:
    """A program with one fault.

    Attributes:
        kind: of `KINDS`.
        where: the protocol, and what of it is changed.
        program: with the fault.
    """

    kind: str
    where: str
    program: Program

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


def mutants_of(program: Program, kinds: set[str] | None = None) -> Iterator[Mutant]:
    """All mutants of a program, in the order of its steps; of the step by which a test opens its result none."""
    for at, node in enumerate(program.nodes):
        path = node.step.header.path if isinstance(node.step, Move) else getattr(node.step, "path", TESTS)
        if is_tests(path):
            continue
        if isinstance(node.step, Draw):
            found = _of_draw(program, at, node, node.step)
        elif isinstance(node.step, Compute):
            found = _of_compute(program, at, node, node.step)
        else:
            continue
        yield from (mutant for mutant in found if kinds is None or mutant.kind in kinds)


# Of what two parties draw.


def _of_draw(program: Program, at: int, node: Node, step: Draw) -> Iterator[Mutant]:
    owners = " and ".join(sorted(p.name for p in step.owners))
    where = f"{step.name} (draw {step.number}) of {owners}"
    for kind, change in (("no mask", torch.zeros_like), ("short mask", _lower_half), ("low bit unmasked", _even)):
        yield Mutant(kind, where, _between(program, at, step, change, Taken(node.slots[0])))
    for earlier in reversed(program.nodes[:at]):
        other = earlier.step
        if not isinstance(other, Draw):
            continue
        if (other.owners, other.size, other.dtype) == (step.owners, step.size, step.dtype):
            said = f"{where} is {other.name} (draw {other.number})"
            yield Mutant(
                "mask twice", said, _between(program, at, step, _second, Taken(node.slots[0]), Taken(earlier.slots[0]))
            )
            break
    edges = {frozenset((m.src, m.dst)) for m in program.messages}
    for party in program.parties:
        if party not in step.owners:
            for sender in sorted(step.owners, key=lambda p: p.name):
                if frozenset((sender, party)) in edges:
                    yield Mutant(
                        "mask told", f"{where} is sent to {party}", _told(program, at, node, step, sender, party)
                    )
                    break


def _between(program: Program, at: int, step: Draw, change: Callable, *operands: Taken) -> Program:
    """Whoever takes what a step made takes it changed."""
    nodes, drawn = program.nodes, program.nodes[at]
    slot = _new_slot(program, drawn)
    taken = Compute(change, step.owners, step.phase, step.path, pure=True)
    changed = Node(taken, operands, (slot,), drawn.results, False, drawn.place)
    renamed = {drawn.slots[0]: slot}
    later = [replace(node, operands=tuple(_named(o, renamed) for o in node.operands)) for node in nodes[at + 1 :]]
    return _of_nodes(program, [*nodes[: at + 1], changed, *later], at, renamed)


def _told(program: Program, at: int, node: Node, step: Draw, sender: Party, party: Party) -> Program:
    header = Header(
        step.path, "told", sender, party, Phase.OFFLINE, 1, step.size, step.dtype, "nothing", "", None, True
    )  # fmt: skip
    moved = Node(
        Move(header, step.owners), (Taken(node.slots[0]),), (_new_slot(program, node),), node.results, False, ""
    )
    return _of_nodes(program, [*program.nodes[: at + 1], moved, *program.nodes[at + 1 :]], at, {})


def _new_slot(program: Program, node: Node) -> Slot:
    return node.slots[0][0], -2, len(program.nodes)


def _named(operand: Any, renamed: dict[Slot, Slot]) -> Any:
    return Taken(renamed.get(operand.slot, operand.slot)) if type(operand) is Taken else operand


def _of_nodes(program: Program, nodes: list[Node], at: int, renamed: dict[Slot, Slot]) -> Program:
    """A program of these steps, of which one, after the step `at`, may be new."""
    setup = len(program.setup) + (at < len(program.setup)) * (len(nodes) - len(program.nodes))
    leaves = [_named(leaf, renamed) for leaf in program.leaves]
    return Program(nodes[:setup], nodes[setup:], program.inputs, leaves, program.tree, program.before)


# Of what somebody computes.


def _of_compute(program: Program, at: int, node: Node, step: Compute) -> Iterator[Mutant]:
    name = _name(step.f)
    owners = " and ".join(sorted(p.name for p in step.owners))
    where = f"{step.path or 'the program'}: {name} at {owners} (step {at})"

    def mutant(kind: str, said: str, f: Callable) -> Mutant:
        nodes = program.nodes
        nodes[at] = replace(node, step=replace(step, f=f))
        return Mutant(kind, f"{where}{said}", _of_nodes(program, nodes, at, {}))

    for i, operand in enumerate(node.operands):
        if type(operand) is Taken:
            yield mutant("term", f", operand {i}", _Operand(step.f, i, _zeroed))
        elif isinstance(operand, int):
            yield mutant("number", f", operand {i}", _Operand(step.f, i, _next))
    for i, result in enumerate(node.results):
        if isinstance(result, torch.Tensor):
            for kind, change in _CHANGES.items():
                if result.dtype != torch.bool or kind == "sign":
                    said = f", result {i}" if node.many else ""
                    yield mutant(kind, said, _Result(step.f, i if node.many else None, change))


@dataclass(frozen=True)
class _Operand:
    """A function of which one operand is changed."""

    f: Callable
    place: int
    change: Callable

    def __call__(self, *operands: Any) -> Any:
        return self.f(*(self.change(o) if i == self.place else o for i, o in enumerate(operands)))


@dataclass(frozen=True)
class _Result:
    """A function of which a result is changed, or one of a tuple."""

    f: Callable
    place: int | None
    change: Callable

    def __call__(self, *operands: Any) -> Any:
        found = self.f(*operands)
        if self.place is None:
            return self.change(found)
        return tuple(self.change(y) if i == self.place else y for i, y in enumerate(found))


def _name(f: Any) -> str:
    while not hasattr(f, "__name__") and hasattr(f, "func" if hasattr(f, "func") else "f"):
        f = getattr(f, "func", None) or f.f
    return getattr(f, "__name__", type(f).__name__).strip("_")


def _zeroed(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else x


def _next(x: Any) -> Any:
    return not x if isinstance(x, bool) else x + 1


def _second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.clone()


def _negated(x: torch.Tensor) -> torch.Tensor:
    return ~x if x.dtype == torch.bool else -x


def _lower_half(x: torch.Tensor) -> torch.Tensor:
    if x.dtype.is_floating_point:
        return x.float().to(x.dtype)
    return x & ((1 << 4 * x.dtype.itemsize) - 1)


def _even(x: torch.Tensor) -> torch.Tensor:
    return x.floor() if x.dtype.is_floating_point else x >> 1 << 1


def _more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


_CHANGES = {"sign": _negated, "modulus": _lower_half, "low bit": _even, "one": _more}
