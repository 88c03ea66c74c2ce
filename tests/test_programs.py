"""Random programs: sequences of operations on secret tensors against plain torch in float64.

Every step carries an error bound derived from its operands', so that the tolerance of a result is that of its program.
`pytest -m sectorch_long tests/test_programs.py` runs ten thousand. A failing program shrinks and is printed as Python.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from op_stage import Stage, lines, reference_stage, scale_0, stage

import sectorch
from sectorch.ring import FRAC_BITS
from sectorch.session import Session
from sectorch.tensor import SharedTensor
from sectorch.testing.strategies import ULP, RandomProgram, programs


def placed(at: Stage):
    """Inputs in their owners' hands; whole numbers without fraction bits."""
    return lambda role, x: at.place("shared", x, scale_0) if role == "whole" else at.place(role, x)


def secret(program: RandomProgram, number: int) -> bool:
    """Whether a variable depends on a shared input."""
    inputs = len(program.inputs)
    if number < inputs:
        return program.inputs[number][1] in ("shared", "whole")
    return any(secret(program, i) for i in program.steps[number - inputs].reads)


def agrees(program: RandomProgram) -> None:
    """Every step is torch's within its bound, and the reference's bit for bit."""
    both = zip(program.run(placed(stage())), program.run(placed(reference_stage())), strict=True)
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


FEW = settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(programs())
def test_programs_agree_with_torch(program: RandomProgram):
    agrees(program)


@pytest.mark.sectorch_long
@MANY
@given(programs(16))
def test_ten_thousand_programs_agree_with_torch(program: RandomProgram):
    agrees(program)


@settings(FEW, max_examples=12)
@given(programs())
def test_programs_cost_what_their_dry_run_says(program: RandomProgram):
    ledgers = []
    for at in (stage(), Stage(Session(dry=True))):
        with sectorch.profile() as profile:
            shapes = [tuple(result.shape) for result in program.run(placed(at))]
        ledgers.append((shapes, lines(profile)))
    assert ledgers[0] == ledgers[1]
