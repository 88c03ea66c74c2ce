"""Programs that train boosted trees among parties: columns, or rows, of Q, A, S and a fourth hospital."""

from __future__ import annotations

from typing import Any

import torch

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.federated.parties import Parties
from sectorch.tables import BoostedTreesClassifier

NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H4"]}
OWNERS = ("Q", "A", "S", "H4")


def vertical(parties: Parties) -> dict[str, Any]:
    """Each has a column of all people, and H4 the labels as well."""
    return _trained(parties, {"Q": ["a"], "A": ["b"], "S": ["c"], "H4": ["d", "ill"]}, True)


def horizontal(parties: Parties) -> dict[str, Any]:
    """Each has all columns of some people."""
    return _trained(parties, {owner: ["a", "b", "c", "d", "ill"] for owner in OWNERS}, False)


def _trained(parties: Parties, columns: dict[str, list[str]], beside: bool) -> dict[str, Any]:
    with parties.session(STAR, NAMES) as session:
        tables, labels = [], []
        for owner, names in columns.items():
            own = parties.inputs.get(owner)
            frame = None if own is None else {name: own[:, i].numpy() for i, name in enumerate(names)}
            features = dict.fromkeys((name for name in names if name != "ill"), "number")
            tables.append(sectorch.owned(frame, owner=owner, session=session, columns=features))
            if "ill" in names:
                label = sectorch.owned(frame, owner=owner, session=session, columns={"ill": "flag"})
                labels.append(label.share()["ill"])
        y = labels[0] if beside else torch.cat(labels)
        model = BoostedTreesClassifier(2, max_depth=2, max_bins=8).fit(tables, y)
        risk = model.predict_proba(tables)[:, 1]
        plain = model.revealed(to=["A", "H4"])  # elsewhere the model stays in shares
        found = {"risk": risk.reveal(to="Q")}
        for name in model._fitted:
            value = getattr(plain, name)
            absent = isinstance(value, sectorch.SharedTensor)
            found[name] = torch.empty(value.shape, device="meta") if absent else torch.from_numpy(value)
        return found
