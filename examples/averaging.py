"""Weighted federated averaging: clipped updates, and a server that learns their sum and nothing else.

    python examples/averaging.py                                        # all parties in this process, a simulation
    sectorch run examples/averaging.py:program --federation federation.toml --as north --input C0=rows.npy

Each client has rows of measurements with their class in the last column. A round: the server gives its model to all,
each client trains on its rows, clips its update, weighs it by its rows, and `secure_sum` adds up. A run that was killed
goes on after its last whole stage (docs/federated.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import sectorch
from sectorch.federated import Run
from sectorch.federated.parties import Parties, Simulation
from sectorch.secure_sum import star_roles

CLIENTS, EVERYBODY = ("C0", "C1", "C2"), ("Server", "C0", "C1", "C2")
ROLES = star_roles(CLIENTS)
ROUNDS, CLIP, SHAPE = 12, 2.0, (10, 65)  # a linear model on 8 x 8 digits, with its bias in the last column


def program(parties: Parties) -> dict[str, torch.Tensor]:
    """The model, at the server."""
    what = {"run": "averaging", "rounds": ROUNDS, "clip": CLIP}
    with Run(what, members=EVERYBODY, parties=parties, out=parties.folder) as run:
        data = {c: run.bring(c, parties.inputs.get(c)) for c in CLIENTS}
        like, cast = torch.empty(SHAPE, device="meta"), {name: name for name in EVERYBODY}
        flat = torch.empty(651, device="meta", dtype=torch.float64)
        model = run.at("Server", torch.zeros, SHAPE, stage="start", public=like)
        for t in range(1, ROUNDS + 1):
            given = run.send(model, CLIENTS, stage=f"{t}/model")
            updates = {c: run.at(c, update, given, data[c], stage=f"{t}/{c}", public=flat) for c in CLIENTS}
            total = run.among(add_up, cast, updates, at="Server", roles=ROLES, stage=f"{t}/sum", public=flat)
            model = run.at("Server", moved, model, total, stage=f"{t}/moved", public=like)
    return {"model": model.value} if model.present else {}


def update(model: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A client's change of the model by 20 steps, clipped, times its rows; and how many these are."""
    x, y = F.pad(rows[:, :-1], (0, 1), value=1.0), rows[:, -1].long()
    own = model.clone().requires_grad_()
    steps = torch.optim.SGD([own], lr=0.5)
    for _ in range(20):
        steps.zero_grad()
        F.cross_entropy(x @ own.T, y).backward()
        steps.step()
    change = (own - model).detach().double().flatten()
    return torch.cat((change * min(1.0, CLIP / float(change.norm())), torch.ones(1).double())) * len(rows)


def add_up(session: sectorch.Session, updates: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the server learns."""
    return sectorch.secure_sum(updates, session).total


def moved(model: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The model, moved by the mean change."""
    return model + (total[:-1] / total[-1]).view(SHAPE).float()


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = torch.cat((torch.tensor(images) / 16, torch.tensor(labels)[:, None]), 1).float()
    parts = dict(zip(CLIENTS, rows[:1200].split([200, 400, 600]), strict=True))
    found = program(Simulation(parts, "averaging-run"))["model"]
    x, y = F.pad(rows[1200:, :-1], (0, 1), value=1.0), rows[1200:, -1]
    print(f"accuracy {((x @ found.T).argmax(1) == y).float().mean():.3f}; one process, which protects nothing")
