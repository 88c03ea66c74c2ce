"""A join of three owners' tables as a program among parties: A's, and those of two that hold no shares."""

from __future__ import annotations

from typing import Any

import torch

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.federated.parties import Parties

NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H1", "H2"]}
OWNERS = ("H1", "H2", "A")


def rows_of(owner: str) -> torch.Tensor:
    """Ids and a value, of which each owner has others: H1 0 to 59, H2 20 to 79, A every fifth. In mixed orders."""
    ids = {"H1": torch.arange(60), "H2": torch.arange(20, 80), "A": torch.arange(0, 80, 5)}[owner]
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(sum(owner.encode())))]
    return torch.stack((ids, 3 * ids + OWNERS.index(owner)), 1)


EXPECTED = {i: [3 * i, 3 * i + 1, 3 * i + 2] for i in range(20, 60, 5)}


def tables(parties: Any, session: Any, owners: tuple[str, ...] = OWNERS) -> list[Any]:
    found = []
    for owner in owners:
        own = parties.inputs.get(owner)
        frame = None if own is None else {"id": own[:, 0], owner.lower(): own[:, 1]}
        found.append(sectorch.owned(frame, owner=owner, session=session, columns=[owner.lower()]))
    return found


def program(parties: Parties, names: Any = NAMES) -> dict[str, torch.Tensor]:
    """The rows that all three have: H2 learns them, from an inner join, and how many, of one with a bound."""
    with parties.session(STAR, names, label="join") as session:
        own = tables(parties, session)
        inner = sectorch.join(*own, on="id")
        padded = sectorch.join(*own, on="id", bound=20)
        beside = sectorch.join(*own, on="id", how="left")
        present: Any = padded.present
        without: Any = beside.missing["a"]
        return {
            "rows": inner.tensor("h1", "h2", "a").reveal(to="H2"),
            "count": present.long().sum().reveal(to="H2"),
            "without": without.long().sum().reveal(to="Q"),
        }
