"""Perturbed-model federated learning with a model of your own: training on noised weights ends where FedAvg ends.

    python examples/perturbed.py

The paper's claim: the server sends a noised model, the clients train on that, and the server recovers the exact
gradient, so that accuracy does not suffer. It holds. That the noise hides the model from clients does not: they hold
a network of the same function, and examples/attacks.py reads ratios of its weights. All parties run in this process.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from sectorch.protocols.perturbation import Federation, Scheme

SAMPLES, ROUNDS = (200, 300, 400, 500), 80


def main() -> dict[str, float]:
    """Accuracies, the largest difference of a weight, and the distance of the weights that clients see."""
    console = Console()
    data = load_digits()
    images, labels = torch.tensor(data.images).unsqueeze(1) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    *parts, test = torch.randperm(len(labels)).split([*SAMPLES, len(labels) - sum(SAMPLES)])
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 10)
    ).double()
    plain = copy.deepcopy(model)  # FedAvg on the same batches
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (model, plain)]
    scheme = Scheme(model, loss="cross_entropy")
    federation = Federation(scheme, len(SAMPLES))  # a server and its clients, all messages between them
    shares = [n / sum(SAMPLES) for n in SAMPLES]

    for _ in range(ROUNDS):
        chosen = [part[torch.randint(len(part), (32,))] for part in parts]
        batches = [(images[rows], labels[rows]) for rows in chosen]
        # The noised model goes down, masked updates come up, and the server takes the noise off their sum.
        gradient = federation.round(model.state_dict(), batches, weights=SAMPLES)
        scheme.step(model, optimizers[0], gradient)

        optimizers[1].zero_grad()
        sum(w * F.cross_entropy(plain(x), y) for w, (x, y) in zip(shares, batches, strict=True)).backward()
        optimizers[1].step()

    with torch.no_grad():
        accuracy = [float((net(images[test]).argmax(1) == labels[test]).double().mean()) for net in (plain, model)]
        pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
        gap = max(float((a - b).abs().max()) for a, b in pairs)
        true, (noisy, _) = model[4].weight, scheme.perturb(model.state_dict())  # what a client would be sent next
        moved = float((noisy.state["4.weight"] - true).norm() / true.norm())
    table = Table("", "FedAvg", "perturbed", title=f"{len(SAMPLES)} clients, {ROUNDS} rounds")
    table.add_row("test accuracy, %", *(f"{100 * value:.2f}" for value in accuracy))
    table.add_row("largest difference of a weight", "", f"{gap:.0e}")
    table.add_row("weights that clients see, distance from the true ones", "0 %", f"{100 * moved:.0f} %")
    console.print(table)
    console.print(
        "The server learned the weighted gradient of all clients and no single one. A client learned a model with the "
        "same function as the true one, its signs and zeros, and ratios in rows: less is hidden than the paper says."
    )
    return {"plain": accuracy[0], "perturbed": accuracy[1], "gap": gap, "moved": moved}


if __name__ == "__main__":
    main()
