"""Random programs: inputs, and steps on tensors of which each says how far its fixed-point result may be off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .optional import strategies as st
from .steps import KINDS, LIMIT, Step, Value

SHAPES = [(), (1,), (3,), (2, 3), (3, 2), (2, 1), (3, 3), (1, 2, 3, 3), (2, 2, 2, 2)]
ROLES = ["shared", "shared", "whole", "private", "public"]
"""Who holds an input; `whole` is shared as integers, which have no fraction bits, and passes for float64."""


class Program:
    """Inputs v0, v1, ... with who holds them, and the steps that follow. Its repr is what a failure prints."""

    def __init__(self):
        self.inputs: list[tuple[torch.Tensor, str]] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []

    def __repr__(self) -> str:
        text = [
            f"v{i} = {role}(torch.tensor({tensor.tolist()}).double())" for i, (tensor, role) in enumerate(self.inputs)
        ]
        text += [f"v{i + len(self.inputs)} = {step}" for i, step in enumerate(self.steps)]
        return "\n" + "\n".join(text) + "\n"

    def grow(self, step: Step) -> bool:
        """Append a step if torch takes it and its result stays in the range."""
        try:
            plain = step.run(*(self.values[i].plain for i in step.reads))
        except (RuntimeError, IndexError):
            return False
        value = Value(plain, step.error)
        if not plain.numel() or plain.numel() > 200 or value.size > LIMIT or value.error > 2**14:
            return False
        self.steps.append(step)
        self.values.append(value)
        return True

    def run(self, place: Callable[[str, torch.Tensor], Any]) -> Iterator[Any]:
        """Yield every step's result; `place(role, tensor)` gives an input in its owner's hands."""
        held = [place(role, tensor) for tensor, role in self.inputs]
        for step in self.steps:
            held.append(step.run(*(held[i] for i in step.reads)))
            yield held[-1]


@st.composite
def programs(draw: Any, longest: int = 8) -> Program:
    """Up to three inputs from the grid of 1/8 in [-2, 2], the first of them shared, and some steps."""
    program = Program()
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from(SHAPES))
        count = torch.Size(shape).numel()
        eighths = draw(st.lists(st.integers(-16, 16), min_size=count, max_size=count))
        role = draw(st.sampled_from(ROLES[:3] if number == 0 else ROLES))
        tensor = torch.tensor(eighths, dtype=torch.float64).view(shape) / 8
        tensor = tensor.round() if role == "whole" else tensor
        program.inputs.append((tensor, role))
        program.values.append(Value(tensor, 0.0))
    wanted = draw(st.sampled_from([1, 2, *sorted(2 * [*range(3, longest + 1)])]))
    for _ in range(2 * wanted):
        step = draw(st.sampled_from(KINDS))(draw, program.values)
        if step is not None and program.grow(step) and len(program.steps) == wanted:
            break
    return program
