"""A hospital fine-tunes a vendor's language model on its notes; the vendor sees no note, the hospital no weight.

    python examples/finetuning.py                with and without differential privacy, all parties in this process
    python examples/finetuning.py FOLDER         writes what the parties have: FOLDER/Q.npy and FOLDER/A.npy
    sectorch run examples/finetuning.py:adapted --input Q=FOLDER/Q.npy --input A=FOLDER/A.npy

A is the vendor, Q the hospital, S a third party that computes with them. The base's weights are A's secret. Adapters
and the last layer are in shares, and Q learns them at the end. A state is saved after each step: what was ended is
started again by the same command, and goes on. docs/training.md has the commands for processes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.dp import Budget, PrivateGradients
from sectorch.federated.parties import Parties, Simulation

NAMES = {"Q": "Q", "A": "A", "S": "S"}
WORDS, LENGTH, WIDTH = 24, 6, 8
ROWS, BATCH, STEPS = 240, 60, 12


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


class Base(nn.Module):
    """Embeddings, attention with one head, and GELU."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value, self.wide = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + (self.query(x) @ x.mT / WIDTH**0.5).softmax(-1) @ self.value(x)
        return F.gelu(self.wide(self.norm(x))).mean(1)


def with_adapters(base: nn.Module) -> nn.Sequential:
    """The base, frozen, with adapters of queries and values and a last layer, whose initial values are public."""
    base.requires_grad_(False)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        base.query, base.value = LoRA(base.query), LoRA(base.value)
        return nn.Sequential(base, nn.Linear(WIDTH, 2))


def adapted(parties: Parties, budget: Budget | None = None) -> dict[str, torch.Tensor]:
    """What the hospital learns: adapters and the last layer."""
    with parties.session(STAR, NAMES, label="finetuning") as session:
        base = Base()
        if parties.present("A"):
            vector_to_parameters(torch.as_tensor(parties.inputs["A"]), base.parameters())
        model = sectorch.shared(with_adapters(base), owner="A", session=session)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimiser = torch.optim.AdamW(trained.values(), lr=0.05)
        notes = sectorch.announced(parties.inputs.get("Q"), owner="Q", session=session)
        notes = sectorch.share(notes, owner="Q", session=session)
        ids, labels = notes[:, :LENGTH], notes[:, LENGTH]
        private = budget and PrivateGradients(
            model, max_grad_norm=0.5, noise_multiplier=4.0, rows=ROWS, batch_size=BATCH, budget=budget
        )
        checkpoints = sectorch.Checkpoints(parties.folder, session=session)
        found = checkpoints.newest()
        if found is not None:
            model.load_state_dict(found.state["trained"], strict=False)
            optimiser.load_state_dict(found.state["optimiser"])
        done = found.step if found else 0
        if budget and private:
            budget.charge(done * private.curve)  # of the steps before the end
        for step in range(done, STEPS):
            if private:
                private.backward(F.cross_entropy, *private.sample(ids, labels))
                optimiser.step()
            else:
                rows = torch.arange(BATCH) + BATCH * step % ROWS
                with sectorch.step(session):
                    optimiser.zero_grad()
                    F.cross_entropy(model(ids[rows]), labels[rows]).backward()
                    optimiser.step()
            checkpoints.save(step + 1, {"trained": trained, "optimiser": optimiser.state_dict()})
        return {name: p.reveal(to="Q") for name, p in trained.items()}


def adapted_privately(parties: Parties) -> dict[str, torch.Tensor]:
    """With noise: whoever sees the adapters learns little of any note (epsilon 4 at delta 1e-3)."""
    return adapted(parties, Budget(4.0, 1e-3))


def notes(count: int, seed: int) -> torch.Tensor:
    """Made-up notes of six words, and whether more are of the first third of the vocabulary than of the last."""
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return torch.cat((ids, ((ids < 8).sum(1) > (ids >= 16).sum(1)).long()[:, None]), 1)


def vendors() -> Base:
    """A base that was trained in plain on another task: how many words are of the first, and of the last third."""
    torch.manual_seed(1)
    base, head = Base(), nn.Linear(WIDTH, 2)
    optimiser = torch.optim.Adam([*base.parameters(), *head.parameters()], lr=0.01)
    for step in range(300):
        ids = notes(64, 1000 + step)[:, :LENGTH]
        counts = torch.stack(((ids < 8).float().mean(1), (ids >= 16).float().mean(1)), 1)
        optimiser.zero_grad()
        F.mse_loss(head(base(ids)), counts).backward()
        optimiser.step()
    return base


def main(folder: Path | None = None) -> dict[str, float]:
    """The part of 1,000 other notes that is put in the right class, before and after."""
    base, own, others = vendors(), notes(ROWS, 0), notes(1000, 1)
    weights = parameters_to_vector(base.parameters()).detach()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "Q.npy", own.numpy()), np.save(folder / "A.npy", weights.numpy())
        return {}
    model, found = with_adapters(base), {}
    for name, program in (("before", None), ("adapted", adapted), ("adapted with noise", adapted_privately)):
        if program is not None:
            with tempfile.TemporaryDirectory() as kept:
                model.load_state_dict(program(Simulation({"Q": own, "A": weights}, kept)), strict=False)
        found[name] = float((model(others[:, :LENGTH]).argmax(1) == others[:, LENGTH]).float().mean())
        print(f"{name}: {found[name]:.3f} of 1,000 notes are right")
    print("All parties ran in this process, which shows what they would learn and protects nothing.")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
