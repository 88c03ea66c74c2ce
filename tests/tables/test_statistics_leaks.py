"""What the parties see of statistics of tables: all messages, and each party's joint view, by `sectorch.testing`.

The secrets are a column of numbers, one of groups, and which rows count. The control is a mask that is used twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from cases import some
from session_in_protocol import Within, with_masks_twice

import sectorch
from sectorch import Scheme, Session, SharedTensor, tables
from sectorch.choreography import Net
from sectorch.mpc.star.shares import Shares
from sectorch.tables import Column, Statistic, Table
from sectorch.testing import CheckOptions, Given, ProtocolFault, check_protocol

ROWS = 3
FUNCTIONS = {
    "sum": lambda t: tables.sum(t, "x", by="b"),
    "variance": lambda t: tables.variance(t, "x"),
    "std": lambda t: tables.std(t, "x"),
    "maximum": lambda t: tables.maximum(t, "x", by="b"),
    "median": lambda t: tables.median(t, "x"),
    "histogram": lambda t: tables.histogram(t, "x", [-4, 0, 4]),
    "correlation": lambda t: tables.correlation(t, "x", "b"),
    "chi_square": lambda t: tables.chi_square(t, "b", "present"),
    "kaplan_meier": lambda t: tables.kaplan_meier(t, "x", "b", times=[-2, 2]),
    "log_rank": lambda t: tables.log_rank(t, "x", "b", times=[-2, 2], by="present"),
}


def statistic(name: str, session: Session, x: Any, b: Any, present: Any) -> tuple[Any, ...]:
    """Values and counts of a statistic of three rows, as shares."""

    def tensor(shares: Any, bits: int, dtype: torch.dtype, bound: float) -> SharedTensor:
        return SharedTensor(shares, bits, session, session.answering_party(), Scheme(), dtype, bound)

    flags = [tensor(v, 0, torch.bool, 1.0) for v in (b, present)]
    columns = {"x": tensor(x, 20, torch.float32, 2.0**22), "b": flags[0], "present": flags[1]}
    table = Table(columns, {"x": Column("number", limit=4.0)})
    found: Statistic = FUNCTIONS[name](table if name in ("chi_square", "log_rank") else table.where(table["present"]))
    return tuple(v.shares for v in (found.values, found.counts))


def reference(name: str, *given: torch.Tensor) -> tuple[Any, ...]:
    session = Session(reference=True)
    with session.call():
        return statistic(name, session, *given)


GIVEN = [
    Given(shape=(ROWS,), low=-(1 << 21), high=1 << 21),
    *[Given(shape=(ROWS,), low=0, high=1)] * 2,
]


def check(name: str) -> str:
    def protocol(net: Net, *given: Shares) -> tuple[Any, ...]:
        return statistic(name, Within(net), *given)

    options = CheckOptions(elementwise=False, exhaustive=0, pairs=2, runs=32, elements=1024)
    return str(check_protocol(protocol, GIVEN, partial(reference, name), seconds=1200, **options))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", ["sum", "variance", "maximum", "median", "chi_square", "kaplan_meier"])
def test_no_view_of_a_statistic_tells_two_tables_apart(name: str):
    print(check(name))


@pytest.mark.sectorch_long
def test_a_mask_that_is_used_twice_is_found(monkeypatch):
    """The control: openings of the statistic, of other values, are under one mask."""
    with_masks_twice(monkeypatch)
    with pytest.raises(ProtocolFault) as fault:
        check("variance")
    assert {finding.check for finding in fault.value.report.findings} & {"messages", "view"}


EVERY = some(FUNCTIONS, ["variance", "median", "log_rank"])


@pytest.mark.parametrize("name", EVERY)
def test_messages_do_not_depend_on_the_table(name: str):
    """Which messages a statistic takes, and their sizes, are the same for any two tables; none shows anything."""
    found = []
    for seed in (0, 1):
        random = np.random.default_rng(seed)
        frame = pandas.DataFrame(
            {"x": random.normal(size=20).clip(-3, 3) * seed, "b": random.random(20) < 0.3 + seed / 2}
        )
        frame["present"] = random.random(20) < 0.9 - seed / 2
        session = sectorch.Session(owners=("H1",))
        columns = {"x": Column("number", limit=4.0), "b": None, "present": None}
        table = sectorch.owned(frame, owner="H1", session=session, columns=columns).share()
        with sectorch.profile() as seen:
            FUNCTIONS[name](table if name in ("chi_square", "log_rank") else table.where(table["present"]))
        assert not {line.shows for line in seen.ledger if line.shows}
        found.append([(m.path, m.label, str(m.src), str(m.dst), m.shape) for m in seen.ledger])
    assert found[0] == found[1] and found[0]
