"""Verified dealing over TLS: calls that go on from what stayed in shares of the call before."""

from __future__ import annotations

import pytest
import torch
from network_world import Trio
from torch import nn

import sectorch
from sectorch import Session, errors
from sectorch.config import Scheme
from sectorch.network import Store
from sectorch.network.parties.answer import Answering
from sectorch.nn.inputs import Inputs
from sectorch.serving.description import describe


class Stepping(nn.Module):
    """A step: what is learned, and the state of the next one."""

    def __init__(self):
        super().__init__()
        self.x, self.h, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.x(x) + self.h(h))
        return self.last(h), h


@pytest.mark.parametrize("prepared", [False, True])
def test_a_call_goes_on_from_what_stayed_in_shares_also_where_the_first_was_prepared(pki, tmp_path, prepared):
    """A step that was prepared could not be made where its session was taken up: it shows what it does elsewhere."""
    _, made = pki
    torch.manual_seed(0)
    model, x, after = Stepping().eval(), torch.randn(2, 4), torch.randn(2, 4)
    first, plain = Inputs(x, torch.zeros(2, 3)).retaining_results(1), sectorch.reference(model)
    found = plain(x, torch.zeros(2, 3))
    step = Inputs(after, sectorch.secure(model, session=Session())(first)[1]).retaining_results(1)
    world = Trio(made, nn.Linear(4, 2).eval(), x, tmp_path)
    world.party.close()
    world.party = Answering(
        world.address,
        made["hospital-b"],
        *describe(model, [first, step]),
        world.pins,
        Store(tmp_path / "a"),
        verified=True,
    )
    world.party.register("hospital-b")
    world.connection.close()
    world.start_querying(Store(tmp_path / "q"))
    try:
        remote = world.connection.model("hospital-b", Scheme(verified=True))
        if prepared:
            with pytest.raises(errors.ArgumentError, match="shown in a call of its own"):
                remote.prepare(step.meta())
            remote.prepare(first)
            remote.close()
            remote = world.connection.model("hospital-b", Scheme(verified=True))
        shown, state = remote.in_shares(first, later=[step.meta()])
        assert torch.equal(shown, found[0])
        shown, _ = remote.in_shares(Inputs(after, state).retaining_results(1))
        assert torch.equal(shown, plain(after, found[1])[0])
    finally:
        world.close()
