"""SecSV with a model of your own: which of four hospitals contributed, though nobody shows a model or a test record?

    python examples/shapley.py

The paper's claim: Shapley values under encryption are those in the clear, in time that makes them usable. One
hospital here has records with wrong labels, and the values show it. The local models may come from any federated run:
a state_dict for each client and round. All parties run in this process: it shows what they would compute, send and
learn, and protects nothing.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from torch import nn

from sectorch.protocols.secsv import Settings, ShapleyEvaluation, Training, fedavg

NAMES = ("north", "east", "south", "careless")


def main() -> dict[str, float]:
    """The values, and their error against those in the clear."""
    console = Console()
    data = load_breast_cancer()
    rows, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    rows = (rows - rows.mean(0)) / (4 * rows.std(0))  # values of a few units keep the fixed-point format small
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = dict(zip(NAMES, order[:400].split(100), strict=True))
    train = {name: (rows[part[:60]], labels[part[:60]]) for name, part in parts.items()}
    tests = {name: (rows[part[60:]], labels[part[60:]]) for name, part in parts.items()}
    x, y = train["careless"]
    wrong = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.7
    train["careless"] = x, torch.where(wrong, 1 - y, y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 2))
    rounds, weights = fedavg(model, train, rounds=2, how=Training(epochs=3, lr=2e-2))
    secure = ShapleyEvaluation(model, rounds, tests, weights, Settings(protocol="secsv")).run()

    table = Table("hospital", "value, encrypted", "value, in the clear", title="Contributions to two rounds")
    for name in NAMES:
        table.add_row(name, f"{secure.values[name]:+.4f}", f"{secure.exact[name]:+.4f}")
    console.print(table)
    console.print(f"Error of the values (Euclidean) against those in the clear: {secure.error:.1e}")
    for sentence in secure.statement():
        console.print(f"- {sentence}", markup=False)
    console.print(
        "The servers learned which test samples each coalition gets right, and from that the values. They saw no model "
        "and no record. A hospital that decrypts a layer saw its outputs for others' test records."
    )
    return {**secure.values, "error": secure.error}


if __name__ == "__main__":
    main()
