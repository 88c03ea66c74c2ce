"""PrivHFL with models of your own: five clients with 30 digits each teach each other by secure queries.

    python examples/privhfl.py

The paper's claim: clients that have little data and different architectures gain by asking each other about images
that they make of their own (here cutouts), and no auxiliary data set is needed. A client's control is to train for as
long and ask nobody. Answers are added up as probabilities (`normalise`), which on digits does better than the paper's
logits. All parties run in this process: it shows what they would compute, send and learn, and protects nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from sectorch.federated import Participant, Training
from sectorch.protocols.privhfl import PrivHFL, Settings

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "deep mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ),
}


def clients_of(count: int, samples: int) -> tuple[list[Participant], tuple[torch.Tensor, torch.Tensor]]:
    """Clients with disjoint data and the three architectures in turn, and a test set of what is left."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts, test = order[: count * samples].split(samples), order[count * samples :]
    torch.manual_seed(0)
    named = [(name, MODELS[name]()) for name in (*MODELS, *MODELS)[:count]]
    made = [
        Participant(f"c{i + 1}", named[i][1], images[part], labels[part], named[i][0]) for i, part in enumerate(parts)
    ]
    return made, (images[test], labels[test])


def main(queries: int = 300) -> dict[str, float]:
    """Mean accuracies: alone, after the control, after the queries."""
    console = Console()
    clients, test = clients_of(5, 30)
    how = Settings(
        queries=queries, expansion="cutout", normalise=True,
        local=Training("sgd", 0.1, 10, 60), retraining=Training("adam", 2e-3, 32, 30, (15,)),
    )  # fmt: skip
    asked = PrivHFL(clients, test, 10, how).run()
    control = PrivHFL(clients, test, 10, replace(how, control="longer")).run()

    table = Table(
        "client", "model", "alone, %", "trained as long, %", f"after {queries} queries, %", title="Test accuracy"
    )
    for client in clients:
        (alone, after), (_, longer) = asked.records[client.name], control.records[client.name]
        shown = (100 * record["accuracy"] for record in (alone, longer, after))
        table.add_row(client.name, client.architecture, *(f"{value:.1f}" for value in shown))
    console.print(table)
    for sentence in asked.statement:
        console.print(f"- {sentence}", markup=False)
    means = {"alone": asked.mean(0), "control": control.mean(-1), "asked": asked.mean(-1)}
    console.print(
        f"The answers of four others are worth {100 * (means['asked'] - means['control']):.1f} points over training "
        "for as long without them, and no client showed an image, a label, a weight or its own answer."
    )
    return means


if __name__ == "__main__":
    main()
