"""What the parties see in a step of training, by the statistics of `sectorch.testing`, and what its result tells Q.

A step is held to its word as a protocol is: its messages are uniform and the same for any two secrets, no party's joint
view tells them apart, and the new parameters are those of the reference, whatever anybody draws. The secrets are
parameters, momenta, inputs and labels. The control is a mask that is used twice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from session_in_protocol import Within, with_masks_twice

from sectorch import DifferentiableTensor, Scheme, Session, SharedTensor
from sectorch.choreography import Net
from sectorch.mpc.star.shares import Shares
from sectorch.testing import Given, ProtocolFault, check_protocol

SCHEME = Scheme()


def step(session: Session, given: list[Any]) -> tuple[Any, ...]:
    """Weights and momenta of as many neurons of one weight as there are elements, after a step of SGD on their errors.

    No neuron meets another one, so that each is an experiment of its own.
    """

    def tensor(value: Any, trained: bool) -> DifferentiableTensor:
        x = SharedTensor(value, 20, session, session.answering_party(), SCHEME, torch.float32, 2.0**20)
        return DifferentiableTensor(x, trained)

    weight, momentum, x, y = (tensor(value, i == 0) for i, value in enumerate(given))
    optimiser = torch.optim.SGD([weight], 0.5, momentum=0.5)
    optimiser.state[weight]["momentum_buffer"] = momentum
    found = torch.relu(x * weight)
    found.backward((found - y).detach())  # of half the squared error; that of a loss is one scalar under one mask
    optimiser.step()
    return weight.cell.content.shares, momentum.cell.content.shares


def protocol(net: Net, *given: Shares) -> tuple[Any, ...]:
    return step(Within(net), list(given))


def reference(*given: torch.Tensor) -> tuple[Any, ...]:
    session = Session(reference=True)
    with session.call():
        return step(session, list(given))


GIVEN = [Given(low=-(3 << 18), high=3 << 18)] * 4
"""Weights, momenta, inputs and labels below 3 / 4, so that no gradient leaves its range."""


def check() -> str:
    return str(check_protocol(protocol, GIVEN, reference, exhaustive=0, seconds=1200))


@pytest.mark.sectorch_long
def test_no_view_of_a_step_tells_two_secrets_apart_and_its_result_tells_q_nothing_of_the_masks():
    print(check())


@pytest.mark.sectorch_long
def test_a_mask_that_is_used_twice_in_a_step_is_found(monkeypatch):
    """The control: two openings of the step, of other values, are under one mask."""
    with_masks_twice(monkeypatch)
    with pytest.raises(ProtocolFault) as fault:
        check()
    assert {finding.check for finding in fault.value.report.findings} & {"messages", "view"}
