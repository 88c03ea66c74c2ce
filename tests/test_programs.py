"""Random programs: sequences of operations on secret tensors against plain torch in float64.

Every step carries an error bound derived from its operands', so that the tolerance of a result is that of its program.
`pytest -m long tests/test_programs.py` runs ten thousand. A failing program shrinks and is printed as Python.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from op_stage import Stage, lines, reference_stage, scale_0, stage
from program_steps import KINDS, LIMIT, ULP, Step, Value

import sectorch
from sectorch.ring import FRAC_BITS
from sectorch.session import Session
from sectorch.tensor import SharedTensor

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

    def run(self, at: Stage):
        """Yield every step's result on secret tensors."""
        held = [
            at.place("shared", tensor, scale_0) if role == "whole" else at.place(role, tensor)
            for tensor, role in self.inputs
        ]
        for step in self.steps:
            held.append(step.run(*(held[i] for i in step.reads)))
            yield held[-1]


@st.composite
def programs(draw, longest: int = 8) -> Program:
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


def secret(program: Program, number: int) -> bool:
    """Whether a variable depends on a shared input."""
    inputs = len(program.inputs)
    if number < inputs:
        return program.inputs[number][1] in ("shared", "whole")
    return any(secret(program, i) for i in program.steps[number - inputs].reads)


def agrees(program: Program) -> None:
    """Every step is torch's within its bound, and the reference's bit for bit."""
    both = zip(program.run(stage()), program.run(reference_stage()), strict=True)
    for number, (result, ideal) in enumerate(both, start=len(program.inputs)):
        value = program.values[number]
        step = f"v{number} = {program.steps[number - len(program.inputs)]}"
        if not secret(program, number):
            continue
        assert isinstance(result, SharedTensor), f"{step} is a {type(result).__name__}"
        assert result.shape == value.plain.shape, f"{step} has shape {tuple(result.shape)}, torch {value.shape}"
        assert result.dtype == value.plain.dtype, f"{step} is {result.dtype}, torch {value.plain.dtype}"
        output = result.reveal()
        assert torch.equal(output, ideal.reveal()), f"{step} is not what the reference gives"
        error = float((output - value.plain).abs().max()) / ULP
        allowed = 1.001 * value.error + (result.scale_bits > FRAC_BITS)  # reveal rounds
        assert error <= allowed, (
            f"{step} errs by {error:.2f} ulps, allowed {allowed:.2f}, at {result.scale_bits} fraction bits:\n"
            f"{output}\ninstead of\n{value.plain}"
        )
    event(f"{len(program.steps)} steps")


FEW = settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(programs())
def test_programs_agree_with_torch(program: Program):
    agrees(program)


@pytest.mark.long
@MANY
@given(programs(16))
def test_ten_thousand_programs_agree_with_torch(program: Program):
    agrees(program)


@settings(FEW, max_examples=60)
@given(programs())
def test_programs_cost_what_their_dry_run_says(program: Program):
    ledgers = []
    for at in (stage(), Stage(Session(dry=True))):
        with sectorch.profile() as profile:
            shapes = [tuple(result.shape) for result in program.run(at)]
        ledgers.append((shapes, lines(profile)))
    assert ledgers[0] == ledgers[1]
