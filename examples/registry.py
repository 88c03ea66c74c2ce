"""Two hospitals, a disease registry and a vendor: joined, looked at under a policy, trained on, and evaluated.

    python examples/registry.py                 all parties in this process
    python examples/registry.py FOLDER          writes what each party has: FOLDER/north.npy and so on
    sectorch run examples/registry.py:program --input Q=FOLDER/north.npy --input south=FOLDER/south.npy ...

North and south have their patients' age, sex, body mass index, blood pressure and triglycerides. The registry knows how
the disease went on. A vendor sells a model. Nobody shows anybody a record or the model:

1. each hospital's patients are joined with the registry's by their numbers, and nobody learns who is in both;
2. all look at statistics under a policy: no cell of fewer than ten patients is released;
3. they train boosted trees and a logistic regression on the patients of the first year, which nobody learns;
4. these two and the vendor's model are evaluated on those of the second year, by sex and by hospital.

Data: scikit-learn's diabetes, 442 patients. In one process it protects nothing; docs/tables.md has the commands by
which each party is a process of its own, with the same lines and the same bits.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from sklearn.datasets import load_diabetes
from sklearn.neural_network import MLPClassifier
from torch import nn

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.estimators import LogisticRegression
from sectorch.federated.parties import Parties, Simulation
from sectorch.tables import BoostedTreesClassifier, Column, statistics

NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["south", "registry"]}
"""North is Q; the vendor is A, the party whose weights stay secret; S is a computing centre without data."""
HOSPITALS = {"north": "Q", "south": "south"}
LEARN = ["Q", "south", "registry"]
"""Who learns what is released."""

NUMBERS = {"age": (48.0, 13.0), "bmi": (26.0, 4.5), "pressure": (95.0, 14.0), "triglycerides": (4.6, 0.5)}
"""The columns that models look at, with a usual value and a usual deviation: public knowledge of doctors."""
EDGES = {name: [centre + k * width / 2 for k in range(-3, 4)] for name, (centre, width) in NUMBERS.items()}
COLUMNS: dict[str, Any] = {
    "age": Column("number", limit=128.0),
    "sex": ("f", "m"),
    "bmi": Column("number", limit=64.0),
    "pressure": Column("number", limit=256.0),
    "triglycerides": Column("number", limit=16.0),
    "hospital": tuple(HOSPITALS),
}
POLICY = sectorch.Policy(minimum=10, releases=30)


def program(parties: Parties) -> dict[str, torch.Tensor]:
    """What the hospitals and the registry learn, by name: values as the policy releases them, NaN where it does not."""
    with parties.session(STAR, NAMES, label="registry") as session:
        first, second = (patients(parties, session, year) for year in (0, 1))
        found: dict[str, torch.Tensor] = {}

        def release(name: str, statistic: sectorch.tables.Statistic, to: list[str] = LEARN) -> None:
            ledger = Path(parties.folder) / "releases"
            found[name] = sectorch.release(statistic, POLICY, to=to, name=name, ledger=ledger).values

        everybody = sectorch.Table.concat([first, second])
        release("mean by sex", statistics.mean(everybody, "age", "bmi", "pressure", by="sex"))
        release("worse by hospital", statistics.cross_table(everybody, "hospital", "worse"))
        release("young and worse", statistics.count(everybody.where(everybody["age"] < 25), by="worse"))

        trees = BoostedTreesClassifier(8, max_depth=3, max_bins=8, learning_rate=0.3, edges=EDGES)
        trees.fit(first[list(NUMBERS)], first["worse"].long())
        logistic = LogisticRegression(max_iter=24).fit(scaled(first), first["worse"].long())
        vendor = sectorch.secure(net(parties.inputs.get("A")), session=session)
        for name, model, rows in (
            ("trees", trees, second[list(NUMBERS)]),
            ("logistic regression", logistic, scaled(second)),
            ("vendor", vendor, scaled(second)),
        ):
            measured = sectorch.evaluate(
                model, rows, second[["worse"]], ["auroc", "brier", "gaps"], second[["sex", "hospital"]],
                version="1.0" if model is vendor else None,
            )  # fmt: skip
            for metric, value in measured.items():
                release(f"{name}: {metric}", value, [*LEARN, "A"] if model is vendor else LEARN)
    return found


def patients(parties: Parties, session: sectorch.Session, year: int) -> sectorch.Table:
    """The patients of both hospitals in one year whom the registry knows, in an order that nobody knows."""
    own = parties.inputs.get("registry")
    registry = sectorch.owned(
        None if own is None else {"number": own[:, 0].long(), "worse": own[:, 1] > 0.5},
        owner="registry", session=session, columns=["worse"],
    )  # fmt: skip
    found = []
    for hospital, owner in HOSPITALS.items():
        frame = frame_of(hospital, parties.inputs.get(owner), year)
        table = sectorch.owned(frame, owner=owner, session=session, columns=COLUMNS)
        found.append(sectorch.join(table, registry, on="number"))
    return sectorch.Table.concat(found)


def frame_of(hospital: str, x: torch.Tensor | None, year: int) -> dict[str, Any] | None:
    """A hospital's rows of one year by column; None elsewhere."""
    if x is None:
        return None
    x = x[x[:, -1] == year].double()
    sex = ["m" if male else "f" for male in (x[:, 2] > 1.5).tolist()]
    numbers = {"age": x[:, 1], "bmi": x[:, 3], "pressure": x[:, 4], "triglycerides": x[:, 5]}
    return {"number": x[:, 0].long(), **numbers, "sex": sex, "hospital": [hospital] * len(x)}


def scaled(table: sectorch.Table) -> sectorch.SharedTensor:
    """The numbers in units of their usual deviation."""
    centre, width = (torch.tensor(values) for values in zip(*NUMBERS.values(), strict=True))
    return (table.tensor(*NUMBERS) - centre) / width


def net(weights: torch.Tensor | None) -> nn.Module:
    """The vendor's network, of a known shape; at other parties without weights."""
    with torch.device("meta" if weights is None else "cpu"):
        made = nn.Sequential(nn.Linear(len(NUMBERS), 8), nn.ReLU(), nn.Linear(8, 1))
    if weights is not None:
        nn.utils.vector_to_parameters(weights.float(), made.parameters())
    return made.eval().requires_grad_(False)


# What each party has.


def records() -> dict[str, torch.Tensor]:
    """What each party has, by its name: numbers of patients are drawn, and a fifth are in the registry alone."""
    x, target = (np.asarray(v) for v in load_diabetes(return_X_y=True, scaled=False))
    random = np.random.default_rng(0)
    worse = (target > 150).astype(float)
    number = random.permutation(10**6)[: len(x)]
    year = random.integers(0, 3, len(x)) == 2
    table = np.column_stack((number, x[:, [0, 1, 2, 3, 8]], year)).astype(np.float64)
    order = random.permutation(len(x))
    vendors, north, south, registered = order[:70], order[70:250], order[250:420], order[90:]
    columns, spread = (np.array(values) for values in zip(*NUMBERS.values(), strict=True))
    own = (x[vendors][:, [0, 2, 3, 8]] - columns) / spread
    fitted = MLPClassifier((8,), alpha=1.0, max_iter=3000, random_state=0).fit(own, worse[vendors])
    weights = [v for layer in zip(fitted.coefs_, fitted.intercepts_, strict=True) for v in (layer[0].T, layer[1])]
    return {
        "Q": torch.tensor(table[north]),
        "south": torch.tensor(table[south]),
        "registry": torch.tensor(np.column_stack((number, worse))[registered]),
        "A": torch.tensor(np.concatenate([w.reshape(-1) for w in weights])),
    }


FILES = {"Q": "north", "south": "south", "registry": "registry", "A": "vendor"}


def main(folder: Path | None = None) -> dict[str, torch.Tensor]:
    """Writes what the parties have, or runs all of them and prints what is released."""
    own = records()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for role, x in own.items():
            np.save(folder / f"{FILES[role]}.npy", x.numpy())
        return {}
    with tempfile.TemporaryDirectory() as kept, sectorch.profile() as seen:
        found = program(Simulation(own, kept))
    console = Console()
    for name, values in found.items():
        cells = values.reshape(-1, values.shape[-1] if values.dim() else 1).tolist()
        rows = [" ".join("withheld" if v != v else f"{v:.3f}" for v in row) for row in cells]
        console.print(f"{name}: {' | '.join(rows)}", highlight=False)
    console.print(f"{(seen.online_bytes + seen.offline_bytes) / 1e6:.0f} MB, {seen.seconds:.0f} s")
    console.print("All parties ran in this process, which shows what they would learn and protects nothing.")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
