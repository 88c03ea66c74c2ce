"""What the parties see of a fit of boosted trees, by the statistics of `sectorch.testing`.

All messages of many fits to one secret are uniform, and the same for two secrets of which everything public is equal.
The control is a mask that is left out. The two protocols that are new with trees are held to their word, joint views
included, with all others (`testing/test_own_protocols.py`). And a fit shows nobody anything, but the edges that owners
of rows agree on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from helpers import findings

import sectorch
from sectorch import Session
from sectorch.choreography import Net, Party
from sectorch.choreography.ledger import Transcript
from sectorch.tables import BoostedTreesClassifier, owned

RUNS = 24
ROWS = 64


def secret(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns of A, S and H1, and classes: all zero and equal, or random."""
    random = np.random.default_rng(seed)
    if seed == 0:
        return np.zeros((ROWS, 3)), np.zeros(ROWS, np.int64)
    return random.normal(size=(ROWS, 3)).round(3), random.integers(0, 2, ROWS)


def views(seed: int) -> dict[Any, np.ndarray]:
    """The words of each message of many fits, by the message's place in a fit, its label and its receiver."""
    x, y = secret(seed)
    found = defaultdict(list)
    for _ in range(RUNS):
        session = Session(owners=("H1",))
        with Transcript() as transcript:
            tables = [owned({o: x[:, i]}, owner=o, session=session) for i, o in enumerate(("A", "S", "H1"))]
            labels = sectorch.share(torch.from_numpy(y), session=session, owner="Q")
            BoostedTreesClassifier(1, max_depth=2, max_bins=4).fit(tables, labels)
        for place, (line, value) in enumerate(transcript.lines):
            found[place, line.path, line.label, str(line.dst)].append(value.flatten().numpy())
    return {key: np.concatenate(values) for key, values in found.items()}


@pytest.mark.sectorch_long
def test_messages_of_a_fit_are_uniform_and_do_not_depend_on_the_data():
    assert findings(views(0), views(1)) == []


@pytest.mark.sectorch_long
def test_a_mask_that_is_left_out_is_found(monkeypatch):
    common = Net.common

    def without(net: Net, p: Party, q: Party, shape: Any, label: str, dtype: torch.dtype = torch.int64) -> Any:
        drawn = common(net, p, q, shape, label, dtype)
        return drawn * 0 if label == "a" else drawn

    monkeypatch.setattr(Net, "common", without)
    found = findings(views(0), views(1))
    assert found and all("masked_at_" in text for text in found)


@pytest.mark.parametrize(("way", "shows"), [
    ("columns", set()),
    ("rows", {("reveal_to_A", "A"), ("reveal", "H1")}),
])  # fmt: skip
def test_a_fit_shows_nothing_but_common_edges_to_the_owners_of_rows(way: str, shows: set):
    """And which messages it takes does not depend on the data."""
    found = []
    for seed in (0, 1):
        random = np.random.default_rng(seed)
        x, y = random.normal(size=(30, 2)).round(1 + seed), random.integers(0, 2, 30)
        session = Session(owners=("H1",))
        parts = (
            [owned({f"x{i}": x[:, i]}, owner=o, session=session) for i, o in enumerate(("A", "H1"))]
            if way == "columns"
            else [
                owned({"x0": x[rows, 0], "x1": x[rows, 1]}, owner=o, session=session)
                for o, rows in (("A", slice(0, 13)), ("H1", slice(13, 30)))
            ]
        )
        labels = sectorch.share(torch.from_numpy(y), session=session, owner="S")
        with sectorch.profile() as profile:
            BoostedTreesClassifier(1, max_depth=2, max_bins=3).fit(parts, labels)
        found.append([(m.path, m.label, str(m.src), str(m.dst), m.shape) for m in profile.ledger])
        learned = {(m.protocol, str(m.learner)) for m in profile.ledger if m.shows}
        assert learned == shows
    assert found[0] == found[1]
