"""Three hospitals train one classifier of breast tumours, and none of them shows a record to anybody.

    python examples/hospitals.py

Twice: each hospital has some of the patients (horizontal), and each knows something else of all patients (vertical).
A hospital plays Q, A or S each; all are in this process: it shows what they would compute, send and learn, and protects
nothing. At the end all learn the model, and nothing else was shown to anybody.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

import sectorch

HOSPITALS = {"Q": "North", "A": "East", "S": "South"}
STEPS = 12


def records() -> tuple[torch.Tensor, torch.Tensor]:
    """569 tumours: 30 measurements, which are scaled, and whether the tumour is benign. Shuffled."""
    x, y = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    scaled = torch.tensor(StandardScaler().fit_transform(x), dtype=torch.float32).clamp(-4, 4)
    return scaled[order], torch.tensor(y, dtype=torch.float32)[order, None]


def by_patients(x: torch.Tensor, y: torch.Tensor, session: sectorch.Session) -> tuple[torch.Tensor, torch.Tensor]:
    """Each hospital shares its patients' rows and labels."""
    parts = [
        [sectorch.share(part, session=session, owner=owner, limit=8.0) for part in (rows, labels)]
        for owner, rows, labels in zip(HOSPITALS, x.chunk(3), y.chunk(3), strict=True)
    ]
    return torch.cat([rows for rows, _ in parts]), torch.cat([labels for _, labels in parts])


def by_measurements(x: torch.Tensor, y: torch.Tensor, session: sectorch.Session) -> tuple[torch.Tensor, torch.Tensor]:
    """Each hospital shares ten measurements of every patient, and one of them the labels."""
    parts = [
        sectorch.share(columns, session=session, owner=owner, limit=8.0)
        for owner, columns in zip(HOSPITALS, x.chunk(3, 1), strict=True)
    ]
    return torch.cat(parts, 1), sectorch.share(y, session=session, owner="S", limit=8.0)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, session: sectorch.Session | None = None) -> None:
    """Logistic regression on all rows at once. Inside of one call a value is opened once, whatever uses it."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(STEPS):
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimiser.step()


def main() -> dict[str, float]:
    """Test accuracy: of each way, of plain training on everything, and of one hospital alone."""
    x, y = records()
    (x, y), (test, truth) = (x[:426], y[:426]), (x[426:], y[426:])

    def accuracy(model: nn.Module) -> float:
        return float(((model(test) > 0) == (truth > 0.5)).float().mean())

    found, shown = {}, set()
    start = nn.Linear(30, 1)
    nn.init.zeros_(start.weight), nn.init.zeros_(start.bias)
    for name, rows, labels in (("in the clear", x, y), ("North alone", x.chunk(3)[0], y.chunk(3)[0])):
        plain = nn.Linear(30, 1)
        plain.load_state_dict(start.state_dict())
        train(plain, rows, labels)
        found[name] = accuracy(plain)
    for name, joined in (("by patients", by_patients), ("by measurements", by_measurements)):
        session = sectorch.Session()
        with sectorch.profile() as seen:
            with session.call():
                rows, labels = joined(x, y, session)
                model = sectorch.shared(nn.Linear(30, 1), session=session)
                with torch.no_grad():
                    model.weight.zero_(), model.bias.zero_()
                train(model, rows, labels)
            weights = {key: value.reveal(to=["Q", "A", "S"]) for key, value in model.state_dict().items()}
        shown |= {(line.protocol, line.shows) for line in seen.ledger if line.shows}
        learned = nn.Linear(30, 1)
        learned.load_state_dict(weights)
        found[name] = accuracy(learned)
    table = Table(title=f"Logistic regression of breast tumours, {STEPS} steps on 426 patients")
    for column in ("the records", "test accuracy"):
        table.add_column(column)
    for name, value in found.items():
        table.add_row(name, f"{value:.3f}")
    console = Console()
    console.print(table)
    console.print("What anybody was shown:", "; ".join(sorted(f"{shows} ({name})" for name, shows in shown)))
    console.print("All parties ran in this process, which shows what they would learn and protects nothing.")
    return found


if __name__ == "__main__":
    main()
