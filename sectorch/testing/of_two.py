"""The steps of a protocol that take two tensors, to be tried on what a party has."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..choreography.program.nodes import Taken
from ..choreography.program.trace import Program
from ..choreography.steps import Compute
from .notes import LINEAR

Form = tuple[torch.Size, torch.dtype]


def steps_of_two(program: Program) -> list[tuple[Callable, tuple[Form, ...]]]:
    """Steps that take two tensors, as functions of these, and their forms; each kind of step once. No
    checks, which give nothing but an error."""
    forms: dict[Any, Form] = {i.slot: (i.shape, i.dtype) for i in program.inputs}
    for node in program.nodes:
        made = zip(node.slots, node.results, strict=True)
        forms |= {slot: (y.shape, y.dtype) for slot, y in made if isinstance(y, torch.Tensor)}
    found: dict[tuple, tuple[Callable, tuple[Form, ...]]] = {}
    for node in program.nodes:
        step = node.step
        if not isinstance(step, Compute) or not step.pure or step.f in LINEAR:
            continue
        if len(node.taken) == 2 and not node.many:
            taken = tuple(forms[slot] for slot in node.taken)
            found.setdefault((repr(step.f), taken), (functools.partial(_applied, step.f, node.operands), taken))
    return list(found.values())


def _applied(f: Callable, operands: Sequence, *tensors: torch.Tensor) -> torch.Tensor:
    left = iter(tensors)
    return f(*(next(left) if isinstance(o, Taken) else o for o in operands))


def of_every_run(f: Callable, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """f of what two tensors are in each run, [..., runs] each: of all runs at once where f is made of torch's
    operators, and run by run where it is not, as a compiled loop."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of an operator that torch takes in turn
            return torch.vmap(f, -1, -1)(a, b)
    except RuntimeError:
        return torch.stack([f(x, y) for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True)], -1)
