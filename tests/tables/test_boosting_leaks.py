"""What the parties see of a tree that is trained on shares, by the statistics of `sectorch.testing`.

A tree is held to its word as a protocol is: its messages are uniform and the same for any two secrets, and no party's
joint view tells them apart. The secrets are gradients, curvatures, and the bins of A, of S or of an owner that holds
no share. The control is a mask that is used twice. And a fit shows nobody anything, but the edges that owners of rows
agree on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sectorch
from sectorch import Scheme, Session
from sectorch.choreography import Located, Net, Party
from sectorch.choreography.located import compute, run_in
from sectorch.choreography.roles import STAR
from sectorch.mpc.star.shares import Shares
from sectorch.session import Members
from sectorch.tables import BoostedTreesClassifier, owned
from sectorch.tables.boosting import HIGH, _Boosting, _Rows
from sectorch.tensor.table import Context
from sectorch.testing import Given, ProtocolFault, check_protocol

ROWS, FEATURES, BINS = 6, 2, 3
SETTINGS = SimpleNamespace(
    max_bins=BINS, max_depth=2, learning_rate=0.5, reg_lambda=1.0, min_child_weight=0.25, min_split_gain=0.0,
    _binary=True,
)  # fmt: skip


class Within(Session):
    """A session whose operations are parts of one call of a protocol under test."""

    def __init__(self, net: Net):
        self._begin(Members(STAR))
        self.device, self.runtime, self._within = torch.device("cpu"), net.runtime, net

    def net(self, party: Party | None = None) -> Net:
        return self._within

    @contextmanager
    def operation(self, party: Party) -> Iterator[Net]:
        with run_in(self._within):
            yield self._within


def _small(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8)


def tree(session: Session, net: Net, owner: Party, g: Any, h: Any, codes: Located) -> tuple[Any, ...]:
    """The splits, leaves and rows of a tree of depth two."""
    context = Context(session, session.answering_party(), Scheme())
    matrix = context.backend.bin_matrix(compute(_small, codes), owner, BINS)
    edges = context.backend.embedded(torch.arange(FEATURES * (BINS - 1)) << 20)
    blocks = [_Rows(0, ROWS, [(matrix, list(range(FEATURES)))])]
    return _Boosting(context, SETTINGS, blocks, edges, 0).tree(g + (h << HIGH))


def protocol(owner: str, net: Net, g: Shares, h: Shares, codes: Located) -> tuple[Any, ...]:
    return tree(Within(net), net, getattr(net, owner), g, h, codes)


def reference(*given: torch.Tensor) -> tuple[Any, ...]:
    session = Session(reference=True)
    with session.call() as net:
        g, h, codes = given
        return tree(session, net, net.A, g, h, net.own(net.A, codes))


def check(owner: str) -> str:
    given = [
        Given(shape=(ROWS,), low=-(1 << 20), high=1 << 20),
        Given(shape=(ROWS,), low=1 << 17, high=1 << 18),
        Given(owner, (ROWS, FEATURES), 0, BINS - 1),
    ]
    options: Any = {"exhaustive": 0, "seconds": 1200, "elementwise": False, "elements": 12}
    return str(check_protocol(partial(protocol, owner), given, reference, **options))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("owner", ["A", "S", "Q"])
def test_no_view_of_a_tree_tells_two_secrets_apart(owner: str):
    print(check(owner))


@pytest.mark.sectorch_long
def test_a_mask_that_is_used_twice_is_found(monkeypatch):
    """The control: two products with the bins are under one mask."""
    common, seen = Net.common, dict[tuple, int]()

    def again(net: Net, p: Party, q: Party, shape: Any, label: str, dtype: torch.dtype = torch.int64) -> Any:
        before = net._draws
        if label == "b":
            net._draws = seen.setdefault((net, label, tuple(shape)), before)
        try:
            return common(net, p, q, shape, label, dtype)
        finally:
            net._draws = before + 1

    monkeypatch.setattr(Net, "common", again)
    with pytest.raises(ProtocolFault) as fault:
        check("A")
    assert {finding.check for finding in fault.value.report.findings} & {"messages", "view"}


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
