"""One party's part of a program, as Python code that says everything that the party does.

The code is three functions: `setup` (once a session), `offline` (what does not depend on the query) and `online`. Each
takes `io`, the party's side of the world, and what the functions before it returned:

    io.input(name)                                  a value that this party brings
    io.draw(peer, name, number, shape, dtype)       the next words of the stream that it shares with a peer
    io.send(peer, label, value)
    io.receive(peer, label, shape, dtype)
    io.result(value)                                what this party learns

Whatever else a line calls is an operator, a function of torch, or a kernel that the code imports. A function without a
name (a lambda of a handler) and a public tensor stand in `constants`.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import resolve_name

from ..applied import Applied, filled
from ..net import Party, Phase
from ..steps import Draw, Header, Move, Read
from .nodes import Input, Node, Slot, Taken

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.matmul: "@", operator.pow: "**",
    operator.xor: "^", operator.and_: "&", operator.or_: "|", operator.lshift: "<<", operator.rshift: ">>",
    operator.truediv: "/", operator.floordiv: "//", operator.mod: "%",
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_PREFIX = {operator.neg: "-", operator.invert: "~"}
SPELLED = 64
"""Entries that a public tensor may have to stand in the code."""
_ABOUT = {
    Phase.SETUP: "Once a session.",
    Phase.OFFLINE: "Once a call, before the query is known.",
    Phase.ONLINE: "Once a call, on the query.",
}


class PartyProgram:
    """What one party of a program does.

    Attributes:
        me: the party.
        code: `setup`, `offline` and `online`, for whoever wants to read what it computes, sends, receives and learns.
        constants: what the code cannot spell, by name: public tensors, and functions without a name.
    """

    def __init__(self, me: Party, nodes: list[Node], inputs: list[Input]):
        self.me = me
        self.constants: dict[str, Any] = {}
        self._imports: dict[str, tuple[str, str]] = {}
        """By the name that the code uses: module, and name there."""
        self._names: dict[Slot, str] = {}
        self._used: Counter[str] = Counter()
        # What moves from this party, it has already: what arrives there is the same value.
        self._same = {
            node.slots[0]: node.operands[0].slot
            for node in nodes
            if isinstance(node.step, Move) and me in node.step.holders
        }
        self._needed = {slot for node in nodes for slot in self._needs(node)}
        made = {slot: node.step.phase for node in nodes for slot in node.slots}
        made |= {given.slot: given.phase for given in inputs}
        needs = {phase: {s for n in nodes if n.step.phase == phase for s in self._needs(n)} for phase in Phase}
        functions, before = [], []
        for phase in Phase:
            later = set().union(*(needs[p] for p in Phase if p > phase))
            kept = [slot for slot in made if slot in later and made[slot] == phase]
            mine = [node for node in nodes if node.step.phase == phase]
            lines = self._body(mine, [given for given in inputs if given.phase == phase], set(kept))
            names = "".join(f"{self._names[slot]}, " for slot in kept).strip()
            name, taken = phase.name.lower(), [f"{all_} = {earlier}" for earlier, all_ in before if all_]
            lines = [f'"""{_ABOUT[phase]}"""', *taken, *lines, f"return ({names})"]
            head = f"def {name}({', '.join(['io', *(earlier for earlier, _ in before)])}):"
            functions.append("\n    ".join([head, *lines]))
            before.append((name, names))
        imports = ["import torch"]
        for name, (module, there) in sorted(self._imports.items(), key=lambda item: item[1]):
            imports.append(f"from {module} import {there}" + ("" if name == there else f" as {name}"))
        if self.constants:
            imports += ["", f"{', '.join(self.constants)}, = constants.values()"]
        self.code = "\n\n\n".join(["\n".join(imports), *functions]) + "\n"

    def __repr__(self) -> str:
        lines = self.code.count("\n")
        return f"PartyProgram({self.me}, {lines} lines of code)"

    def load(self) -> dict[str, Callable]:
        """The three functions of the code, by name."""
        scope: dict[str, Any] = {"constants": self.constants}
        exec(compile(self.code, f"<program of {self.me}>", "exec"), scope)
        return {phase.name.lower(): scope[phase.name.lower()] for phase in Phase}

    def _tells(self, node: Node) -> bool:
        """Whether it is a message that this party sends or gets."""
        return isinstance(node.step, Move) and self.me in (node.step.header.src, node.step.header.dst)

    def _needs(self, node: Node) -> set[Slot]:
        """The values of this party that a step takes."""
        if isinstance(node.step, Move) and node.step.header.src != self.me:
            return set()
        return {self._slot(slot) for slot in node.needs}

    def _slot(self, slot: Slot) -> Slot:
        while slot in self._same:
            slot = self._same[slot]
        return slot

    def _body(self, nodes: list[Node], inputs: list[Input], kept: set[Slot]) -> list[str]:
        """The lines of one phase; a value is dropped after its last use."""
        lines = [f"{self._name(given.slot, given.name)} = io.input({given.name!r})" for given in inputs]
        place, last = "", {slot: n for n, node in enumerate(nodes) for slot in self._needs(node)}
        dropped: dict[int, list[Slot]] = {}
        for slot, n in last.items():
            if slot not in kept:
                dropped.setdefault(n, []).append(slot)
        for n, node in enumerate(nodes):
            if node.place not in ("", place):
                lines.append(_comment(node.place))
                place = node.place
            if self._tells(node) or not isinstance(node.step, Move):
                lines.append(self._line(node))
            ended = sorted(self._names[slot] for slot in dropped.get(n, ()))
            if ended:
                lines.append(f"del {', '.join(ended)}")
        return lines

    def _line(self, node: Node) -> str:
        step = node.step
        if isinstance(step, Read):
            return f"io.result({self._said(node.operands[0])})"
        if isinstance(step, Move):
            return self._message(node, step.header)
        if isinstance(step, Draw):
            (peer,) = step.owners - {self.me}
            name = self._name(node.slots[0], step.name.rsplit("/", 1)[-1])
            return f"{name} = io.draw({peer.name!r}, {step.name!r}, {step.number}, {tuple(step.size)}, {step.dtype})"
        named = [self._name(slot, _short(step.f)) if slot in self._needed else "_" for slot in node.slots]
        called = self._called(step.f, node.operands)
        if not node.many:
            return called if named == ["_"] else f"{named[0]} = {called}"
        return f"{', '.join(named)}{',' if len(named) == 1 else ''} = {called}"

    def _message(self, node: Node, header: Header) -> str:
        label = f"{header.protocol}/{header.label}"
        if header.src == self.me:
            return f"io.send({header.dst.name!r}, {label!r}, {self._said(node.operands[0])})"
        name = self._name(node.slots[0], header.label)
        return f"{name} = io.receive({header.src.name!r}, {label!r}, {tuple(header.shape)}, {header.dtype})"

    # Expressions.

    def _called(self, f: Callable, operands: Sequence[Any]) -> str:
        named: dict[str, Any] = {}
        if isinstance(f, Applied):
            named = {name: filled(value, operands) for name, value in f.kwargs.items()}
            f, operands = f.f, filled(f.args, operands)
        said = [self._said(operand) for operand in operands]
        known = f if isinstance(f, BuiltinFunctionType) else None
        if known in _INFIX:
            return f"{said[0]} {_INFIX[known]} {said[1]}"
        if known in _PREFIX:
            return f"{_PREFIX[known]}{said[0]}"
        if known is operator.getitem:
            return f"{said[0]}[{_index(operands[1]) or said[1]}]"
        said += [f"{name}={self._said(value)}" for name, value in named.items()]
        return f"{self._said(f)}({', '.join(said)})"

    def _said(self, value: Any) -> str:
        """A name for what a step made, and a public value as Python spells it."""
        if isinstance(value, Taken):
            return self._names[self._slot(value.slot)]
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return repr(value)
        if type(value) is torch.Tensor and not value.numel():
            return f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
        if type(value) is torch.Tensor and value.numel() <= SPELLED and bool(value.isfinite().all()):
            return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
        if isinstance(value, torch.Size):
            return f"torch.Size({list(value)})"
        if isinstance(value, (tuple, list)):
            said = ", ".join(self._said(v) for v in value)
            return f"[{said}]" if isinstance(value, list) else f"({said}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._said(v)}' for key, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._said(value.start)}, {self._said(value.stop)}, {self._said(value.step)})"
        if isinstance(value, MethodType):
            return f"{self._said(value.__self__)}.{value.__name__}"
        if is_dataclass(value) and not isinstance(value, type) and _there(type(value)):
            said = ", ".join(f"{name}={self._said(getattr(value, name))}" for name in value.__dataclass_fields__)
            return f"{self._imported(type(value))}({said})"
        if isinstance(value, partial):
            self._imports["partial"] = "functools", "partial"
            said = [self._said(value.func), *map(self._said, value.args)]
            said += [f"{name}={self._said(v)}" for name, v in value.keywords.items()]
            return f"partial({', '.join(said)})"
        if value is Ellipsis:
            return "..."
        if callable(value):
            name = resolve_name(value)
            if name and name.startswith("torch."):
                return name
            if _there(value):
                return self._imported(value)
        return self._constant(value)

    def _imported(self, value: Any) -> str:
        there = value.__module__, value.__name__
        name = value.__name__
        if self._imports.setdefault(name, there) != there:  # of two modules, under one name
            name = f"{value.__module__.replace('.', '_')}_{name}"
            self._imports[name] = there
        return name

    def _constant(self, value: Any) -> str:
        known = next((name for name, constant in self.constants.items() if constant is value), None)
        name = known or f"{'f' if callable(value) else 'public'}_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _name(self, slot: Slot, wish: str) -> str:
        """A name for a value, of its own."""
        wish = re.sub(r"[^A-Za-z0-9_]+", "_", wish).strip("_")
        wish = wish if re.match("[A-Za-z]", wish) else f"v_{wish}".rstrip("_")
        self._used[wish] += 1
        name = self._names[slot] = f"{wish}_{self._used[wish]}"
        return name


def _comment(place: str) -> str:
    """Where in the model a line belongs, in one line: the layer's name comes from whoever wrote the model."""
    layer = place.split(" at ")[0]
    return "# " + "".join(c if c.isascii() and c.isprintable() else "?" for c in layer[:100])


def _short(f: Callable) -> str:
    """What a result is called: after what made it."""
    f = f.func if isinstance(f, partial) else f
    name = getattr(f, "__name__", type(f).__name__)
    return {"getitem": "part", "<lambda>": "v"}.get(name, name.strip("_").lower())


def _index(index: Any) -> str:
    """An index as Python spells it; empty where it needs a name."""
    if isinstance(index, tuple):
        said = [_index(i) for i in index]
        return ", ".join(said) if all(said) else ""
    if isinstance(index, slice) and all(
        isinstance(v, (int, type(None))) for v in (index.start, index.stop, index.step)
    ):
        said = ["" if v is None else str(v) for v in (index.start, index.stop)]
        return ":".join(said + ([] if index.step is None else [str(index.step)]))
    return str(index) if isinstance(index, int) or index is None or index is Ellipsis else ""


def _there(value: Any) -> bool:
    """Whether a function, kernel or class is what its module calls by its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    return found is not None and getattr(found, "kernel", found) is value


def spelled(value: Any) -> str:
    """All there is to a constant: a tensor's type, shape and content, a function's code and what it closes over."""
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {content.hex()}"
    if isinstance(value, FunctionType):
        code, held = value.__code__, [_content(cell) for cell in value.__closure__ or ()]
        held += [value.__defaults__, value.__kwdefaults__]
        return f"function({value.__module__}, {value.__qualname__}, {spelled(code)}, {', '.join(map(spelled, held))})"
    if isinstance(value, CodeType):
        consts = [const for const in value.co_consts if const is not None]
        return f"code({value.co_code.hex()}, {value.co_names}, {', '.join(map(spelled, consts))})"
    owner = getattr(value, "__self__", None)
    if (isinstance(value, MethodType) or isinstance(owner, torch.Tensor)) and callable(value):
        return f"method({spelled(owner)}, {value.__name__})"
    if isinstance(value, partial):
        return f"partial({spelled(value.func)}, {spelled(value.args)}, {spelled(value.keywords)})"
    if isinstance(value, slice):
        return f"slice({', '.join(map(spelled, (value.start, value.stop, value.step)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{spelled(key)}: {spelled(v)}' for key, v in value.items())})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(spelled, value)))})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(spelled, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return f"{type(value).__qualname__}({spelled(fields)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an address is another one in each process


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def listed(messages: list[Header], parties: tuple[Party, ...]) -> str:
    """Who sends what to whom, one line a message: the phase and round, an arrow between the parties' columns, bytes."""
    width = 14
    head = "".join(p.name.center(width) for p in parties)
    text = [f"{'phase':9}{'round':>6}{head}  message"]
    for m in sorted(messages, key=lambda m: (m.phase, m.round)):
        at = {p: i * width + width // 2 for i, p in enumerate(parties)}
        first, last = sorted((at[m.src], at[m.dst]))
        line = "-" * (last - first - 1)
        arrow = line[:-1] + ">" if at[m.src] < at[m.dst] else "<" + line[1:]
        row = (" " * first + "|" + arrow + "|").ljust(width * len(parties))
        text.append(f"{m.phase.name.lower():9}{m.round:6}{row}  {m.protocol}/{m.label}, {m.bytes} bytes")
    return "\n".join(text)
