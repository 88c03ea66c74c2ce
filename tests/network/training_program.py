"""Trainings among parties: one that goes on where it was, with rows of a hospital that has no shares, and others."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.dp import Budget, PrivateGradients
from sectorch.estimators import KMeans, LogisticRegression
from sectorch.federated.parties import Parties

NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H1"]}
FEW = {"Q": "Q", "A": "A", "S": "S"}
ROWS = 6
EPOCHS, BATCHES = 2, 2


def rows_of(owner: str) -> torch.Tensor:
    """Four measurements and what is to be predicted; all are made up."""
    return torch.rand((ROWS, 5), generator=torch.Generator().manual_seed(sum(owner.encode())))


def program(parties: Parties, after: Callable[[int], None] = lambda step: None) -> dict[str, torch.Tensor]:
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
        after(done)
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
            after(step + 1)
        return {name: p.reveal(to=["A", "H1"]) for name, p in model.state_dict().items()}


def stuck(parties: Parties) -> dict[str, torch.Tensor]:
    """The same, in which A waits after half of the steps, the first time; and where it began."""
    seen: list[int] = []

    def wait(step: int) -> None:
        seen.append(step)
        if step == EPOCHS * BATCHES // 2 and parties.present("A") and not Path("there").exists():
            Path("there").touch()
            time.sleep(600)

    learned = program(parties, wait)
    return learned | {"began": torch.tensor(seen[0])}


def steps(parties: Parties, constant: float = 0.25, power: int = 2) -> dict[str, torch.Tensor]:
    """Three steps of a layer, from the programs of the first and of the later ones; Q learns the loss, A the layer."""
    with parties.session(STAR, FEW, label="steps") as session:
        parts = [sectorch.share(parties.inputs.get(o), owner=o, shape=(ROWS, 5), session=session) for o in "QAS"]
        rows = torch.cat(parts)
        model = sectorch.shared(nn.Linear(4, 1), session=session)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.shape))
        optimiser, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.empty(0)
        for _ in range(3):
            with sectorch.step(session):
                optimiser.zero_grad()
                loss = ((model(rows[:, :4]) - rows[:, 4:] + constant) ** power).mean()
                loss.backward()
                optimiser.step()
        return {"loss": loss.reveal(), **{k: v.reveal(to="A") for k, v in model.state_dict().items()}}


def collected(parties: Parties) -> dict[str, torch.Tensor]:
    """The same, at a party that looks for cycles at nearly every object that it makes."""
    gc.set_threshold(1)
    return steps(parties)


def other_steps(parties: Parties) -> dict[str, torch.Tensor]:
    """The same with another constant."""
    return steps(parties, constant=0.5)


def estimators(parties: Parties) -> dict[str, torch.Tensor]:
    """A logistic regression and two clusters, on the rows of three; A learns what is fitted."""
    with parties.session(STAR, FEW, label="estimators") as session:
        parts = [sectorch.share(parties.inputs.get(o), owner=o, shape=(ROWS, 5), session=session) for o in "QAS"]
        rows = torch.cat(parts)
        logistic = LogisticRegression(max_iter=1, tol=0.5).fit(rows[:, :2], (rows[:, 4] > 0.5).float())
        clusters = KMeans(n_clusters=2, max_iter=1, random_state=0).fit(rows[:, :2])
        found = {"logistic": logistic.coef_, "clusters": clusters.cluster_centers_}
        return {name: value.reveal(to="A") for name, value in found.items()}


def private(parties: Parties, noise: float = 2.0**-40) -> dict[str, torch.Tensor]:
    """A step of DP-SGD on all rows, in an order that nobody knows; its noise is zero, so that bits can be compared."""
    with parties.session(STAR, FEW, label="private") as session:
        parts = [sectorch.share(parties.inputs.get(o), owner=o, shape=(ROWS, 5), session=session) for o in "QAS"]
        rows = torch.cat(parts)
        model = sectorch.shared(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)), session=session)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.shape) + 0.1 * i)
        budget = Budget(1e30, 1e-5)
        gradients = PrivateGradients(
            model, max_grad_norm=0.6, noise_multiplier=noise, rows=3 * ROWS, batch_size=3 * ROWS, budget=budget
        )
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        with session.call():
            x, y = gradients.sample(rows[:, :4], rows[:, 4:])
            gradients.backward(F.mse_loss, x, y)
            optimiser.step()
        return {name: p.reveal(to="A") for name, p in model.state_dict().items()}
