"""A training among parties that goes on where it was: three of them compute, and one more hospital has rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.federated.parties import Parties

NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H1"]}
ROWS = 6
EPOCHS, BATCHES = 2, 2


def rows_of(owner: str) -> torch.Tensor:
    """Four measurements and what is to be predicted; all are made up."""
    return torch.rand((ROWS, 5), generator=torch.Generator().manual_seed(sum(owner.encode())))


def program(parties: Parties) -> dict[str, torch.Tensor]:
    """Two epochs of two batches, in a public order that is part of the state; saved after each batch."""
    with parties.session(STAR, NAMES, label="training") as session:
        owners = ("Q", "A", "S", "H1")
        parts = [sectorch.share(parties.inputs.get(o), owner=o, shape=(ROWS, 5), session=session) for o in owners]
        rows = torch.cat(parts)
        model = sectorch.shared(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), session=session)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.shape) + 0.1 * i)
        optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        order = torch.Generator().manual_seed(7)
        checkpoints = sectorch.Checkpoints(parties.folder, session=session)
        done, batches = 0, torch.empty(0, dtype=torch.int64)
        if (found := checkpoints.newest()) is not None:
            done, batches = found.step, found.state["batches"]
            model.load_state_dict(found.state["model"])
            optimiser.load_state_dict(found.state["optimiser"])
            order.set_state(found.state["order"])
        for step in range(done, EPOCHS * BATCHES):
            if step % BATCHES == 0:
                batches = torch.randperm(len(rows), generator=order)
            batch = rows[batches.chunk(BATCHES)[step % BATCHES]]
            with sectorch.step(session):
                optimiser.zero_grad()
                F.mse_loss(model(batch[:, :4]), batch[:, 4:]).backward()
                optimiser.step()
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
            checkpoints.save(step + 1, {**state, "order": order.get_state(), "batches": batches})
        return {name: p.reveal(to=["A", "H1"]) for name, p in model.state_dict().items()}
