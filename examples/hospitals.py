"""Five hospitals train one classifier of breast tumours, and none of them shows a record to anybody.

    python examples/hospitals.py                 both ways, all hospitals in this process
    python examples/hospitals.py FOLDER          writes what each hospital has: FOLDER/horizontal-Q.npy and so on
    sectorch run examples/hospitals.py:horizontal --input Q=FOLDER/horizontal-Q.npy --input A=...

Twice: each hospital has some of the patients (horizontal), and each knows something else of all patients (vertical).
Three of them compute, as Q, A and S; the others share what they have with these, and learn the model as all do. In one
process it shows what they would compute, send and learn, and protects nothing; docs/training.md has the commands by
which each hospital is a process of its own, with the same lines and the same bits.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.federated.parties import Parties, Simulation

HOSPITALS = ("Q", "A", "S", "H4", "H5")
NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H4", "H5"]}
STEPS = 12


def horizontal(parties: Parties) -> dict[str, torch.Tensor]:
    """Each hospital has its patients' rows, with the label as the last column: nobody knows how many beforehand."""
    with parties.session(STAR, NAMES, label="horizontal") as session:
        return trained(session, torch.cat([part(parties, session, name) for name in HOSPITALS]))


def vertical(parties: Parties) -> dict[str, torch.Tensor]:
    """Each hospital has some measurements of all patients, in the same order, and the last one the labels as well."""
    with parties.session(STAR, NAMES, label="vertical") as session:
        return trained(session, torch.cat([part(parties, session, name) for name in HOSPITALS], 1))


def part(parties: Parties, session: sectorch.Session, name: str) -> sectorch.SharedTensor:
    """What one hospital has, in shares; its shape becomes known to all."""
    own = sectorch.announced(parties.inputs.get(name), owner=name, session=session)
    return sectorch.share(own, owner=name, session=session, limit=8.0)


def trained(session: sectorch.Session, rows: sectorch.SharedTensor) -> dict[str, torch.Tensor]:
    """The weights, which all learn. A step is traced to a program once, and run from it afterwards."""
    model = sectorch.shared(nn.Linear(rows.shape[1] - 1, 1), session=session)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    train(model, rows[:, :-1], rows[:, -1:], sectorch.step(session))
    return {key: value.reveal(to=list(HOSPITALS)) for key, value in model.state_dict().items()}


def train(model: nn.Module, x: Any, y: Any, step: AbstractContextManager[Any]) -> None:
    """Logistic regression on all rows at once."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(STEPS):
        with step:
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), y).backward()
            optimiser.step()


def records() -> tuple[torch.Tensor, torch.Tensor]:
    """569 tumours: 30 measurements, which are scaled, and whether the tumour is benign.

    Those from number 426 on are for the test. The others are in order of the tumour's size, since each hospital sees
    patients of its own kind: some are sent the large tumours, which are mostly malignant.
    """
    x, y = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    scaled = torch.tensor(StandardScaler().fit_transform(x), dtype=torch.float32).clamp(-4, 4)
    order[:426] = order[:426][scaled[order[:426], 0].argsort()]
    return scaled[order], torch.tensor(y, dtype=torch.float32)[order, None]


def shares_of(x: torch.Tensor, y: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """What each hospital has, in each of the two ways."""
    rows, columns = torch.cat((x, y), 1).chunk(5), x.chunk(5, 1)
    beside = dict(zip(HOSPITALS, columns, strict=True))
    beside[HOSPITALS[-1]] = torch.cat((columns[-1], y), 1)
    return {"horizontal": dict(zip(HOSPITALS, rows, strict=True)), "vertical": beside}


def main(folder: Path | None = None) -> dict[str, float]:
    """Test accuracy: of each way, of plain training on everything, and of each hospital alone, on the average."""
    x, y = records()
    (x, y), (test, truth) = (x[:426], y[:426]), (x[426:], y[426:])
    have = shares_of(x, y)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for way, own in have.items():
            for name, value in own.items():
                np.save(folder / f"{way}-{name}.npy", value.numpy())
        return {}

    def accuracy(state: dict[str, torch.Tensor]) -> float:
        model = nn.Linear(30, 1)
        model.load_state_dict(state)
        return float(((model(test) > 0) == (truth > 0.5)).float().mean())

    def in_the_clear(rows: torch.Tensor, labels: torch.Tensor) -> float:
        plain = nn.Linear(30, 1)
        nn.init.zeros_(plain.weight), nn.init.zeros_(plain.bias)
        train(plain, rows, labels, nullcontext())
        return accuracy(plain.state_dict())

    alone = [in_the_clear(*part) for part in zip(x.chunk(5), y.chunk(5), strict=True)]
    found = {"each hospital alone, on the average": sum(alone) / 5, "in the clear": in_the_clear(x, y)}
    shown = set()
    for way, program in (("horizontal", horizontal), ("vertical", vertical)):
        with sectorch.profile() as seen:
            found[way] = accuracy(program(Simulation(have[way])))
        shown |= {(line.protocol, line.shows) for line in seen.ledger if line.shows}
    table = Table(title=f"Logistic regression of breast tumours, {STEPS} steps on 426 patients of five hospitals")
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
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
