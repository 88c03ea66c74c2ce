"""A program of statistics of hospitals' tables: rows of Q and H4, and a registry's column of all patients."""

from __future__ import annotations

from typing import Any

import torch

import sectorch
from sectorch import tables
from sectorch.choreography.roles import STAR
from sectorch.federated.parties import Parties
from sectorch.tables import Column, Table

NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H4"]}
COLUMNS: dict[str, Any] = {"age": Column("number", limit=128.0), "months": Column("integer", limit=32), "sex": (0, 1)}


def statistics(parties: Parties) -> dict[str, Any]:
    """The hospitals have age, months and sex of their patients, in one array; A knows who died."""
    with parties.session(STAR, NAMES) as session:

        def owned(owner: str, columns: dict[str, Any], missing: Any = ()) -> Table:
            own = parties.inputs.get(owner)
            frame = None if own is None else {name: own[:, i].numpy() for i, name in enumerate(columns)}
            return sectorch.owned(frame, owner=owner, session=session, columns=columns, missing=missing).share()

        patients = Table.concat([owned(hospital, COLUMNS, ["age"]) for hospital in ("Q", "H4")])
        patients = patients.with_columns(died=owned("A", {"died": "flag"})["died"])
        old = patients.where(patients["age"] >= 60)
        found: dict[str, tables.Statistic] = {
            "mean": tables.mean(patients, "age", "months", by="sex"),
            "old": tables.count(old, by=["sex", "died"]),
            "deviation": tables.std(old, "months"),
            "median": tables.median(old, "age"),
            "correlation": tables.correlation(patients, "age", "months"),
            "curve": tables.kaplan_meier(patients, "months", "died", times=range(1, 13), by="sex"),
            "log_rank": tables.log_rank(patients, "months", "died", times=range(1, 13), by="sex"),
            "t_test": tables.t_test(patients, "age", by="died"),
        }
        return {name: one.reveal(to=["H4", "S"]).values for name, one in found.items()}


def example(owner: str) -> torch.Tensor:
    """What a party of the program has."""
    draws = torch.Generator().manual_seed(len(owner))
    if owner == "A":
        return torch.randint(0, 2, (50, 1), generator=draws).double()
    rows = 30 if owner == "Q" else 20
    age = (torch.rand(rows, generator=draws) * 60 + 30).round()
    age[::7] = torch.nan
    months, sex = (torch.randint(0, n, (rows,), generator=draws) for n in (15, 2))
    return torch.stack((age, months, sex), 1).double()
