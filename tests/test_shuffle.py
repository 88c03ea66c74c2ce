"""The shuffle: exact rows, an order that no party's view tells anything of, and what is refused."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from cases import long
from helpers import ring_values
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import sectorch
from sectorch import DifferentiableTensor, Session
from sectorch.choreography import PROTOCOLS, Message, protocol
from sectorch.choreography.ledger import Transcript
from sectorch.errors import ArgumentError, ShapeError
from sectorch.mpc.star.shares import Shares, each
from sectorch.mpc.star.shuffle import in_order, shuffle
from sectorch.testing import Given, ProtocolFault, check_protocol

ANY = Given(shape=(3, 2), low=-(1 << 63), high=(1 << 63) - 1)


def summed(v: torch.Tensor) -> torch.Tensor:
    return v.sum(0)


def of_sums(f: Any) -> Any:
    """A protocol whose result no order changes, so that the rest of it can be held to a reference."""
    return lambda net, x: each(summed, f(net, x))


KEYS = re.compile(r"draws: of shuffle/(rho|pi|sigma), which .* draw, the lowest bit changes nothing .*")


def faults(f: Any, **options: Any) -> list[str]:
    with pytest.raises(ProtocolFault) as fault:
        check_protocol(of_sums(f), [ANY], summed, elementwise=False, seconds=1e6, **options)
    return str(fault.value).splitlines()


@pytest.mark.parametrize("dealer", ["Q", *long("D")])
def test_it_is_held_to_its_word(dealer: str):
    """All that is said of it is that of a key the lowest bits hardly ever decide an order."""
    assert all(KEYS.fullmatch(text) for text in faults(shuffle, dealer=dealer))


def broken(missing: str) -> Any:
    """The shuffle without one of its masks."""
    masks = {"a": "D S", "b": "D A", "c": "D A"}

    @protocol(
        "broken_shuffle",
        "this test",
        [Message("m", "S", "A", ""), Message("y", "A", "S", ""), Message("e", "D", "S", "")],
    )
    def shuffled(net: Any, x: Any) -> Any:
        D, A, S = net.D, net.A, net.S
        rho = net.common(A, S, x.shape[:1], "rho")
        pi, sigma = net.common(D, A, x.shape[:1], "pi"), net.common(D, S, x.shape[:1], "sigma")
        a, b, c = (
            net.common(*(getattr(net, r) for r in roles.split()), x.shape, name) * (name != missing)
            for name, roles in masks.items()
        )
        e = (in_order(in_order(a, pi) - c, sigma) - b).send(D, S, "e")
        m = (in_order(x.S, rho) - a).send(S, A, "m")
        y = (in_order(in_order(x.A, rho) + m, pi) + c).send(A, S, "y")
        return Shares(b, in_order(y, sigma) + e)

    del PROTOCOLS["broken_shuffle"]
    return shuffled


@pytest.mark.sectorch_long
@pytest.mark.parametrize("missing", "abc")
def test_without_a_mask_it_is_found_out(missing: str):
    assert any("tells" in text or "messages" in text for text in faults(broken(missing)))


ORDERS = {order: i for i, order in enumerate(permutations(range(3)))}


def orders(monkeypatch: Any, runs: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Of so many shuffles of three rows: the number of the order that came out, and those of the drawn ones."""
    drawn: dict[str, list] = {"rho": [], "pi": [], "sigma": []}
    common = type(Session().setup()).common

    def noted(net: Any, p: Any, q: Any, shape: Any, label: str, *rest: Any) -> Any:
        value = common(net, p, q, shape, label, *rest)
        if label in drawn:
            drawn[label].append(ORDERS[tuple(torch.argsort(value._value, stable=True).tolist())])
        return value

    monkeypatch.setattr(type(Session().setup()), "common", noted)
    session = Session()
    x, found = sectorch.share(torch.arange(3), session=session), []
    with session.call():
        shuffled = [sectorch.shuffle(x) for _ in range(runs)]
        rows = torch.stack(shuffled).reveal().tolist()
    found = [ORDERS[tuple(row)] for row in rows]
    return np.array(found), {name: np.array(values) for name, values in drawn.items()}


KNOWN = {"A": ("rho", "pi"), "S": ("rho", "sigma"), "D": ("pi", "sigma")}


def test_the_order_is_uniform_whatever_a_party_knows_of_it(monkeypatch):
    """All 6 orders come as often, given each of the 36 pairs of orders that a party knows. The control: with all
    three the order is certain."""
    runs = 1300  # six for each of 36 pairs and 6 orders
    found, drawn = orders(monkeypatch, runs)
    assert stats.chisquare(np.bincount(found, minlength=6)).pvalue > 1e-6
    for one, other in KNOWN.values():
        table = np.zeros((36, 6))
        np.add.at(table, (drawn[one] * 6 + drawn[other], found), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-6
    everything = drawn["rho"] * 36 + drawn["pi"] * 6 + drawn["sigma"]
    assert all(len(set(found[everything == key])) == 1 for key in set(everything))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(0, 3), st.booleans(), st.integers(0, 1 << 20))
def test_several_tensors_take_one_order(n: int, width: int, reference: bool, seed: int):
    session = Session(reference=reference)
    x = ring_values((n, width, 2), 40, seed).double() * 2.0**-20
    y, z = torch.arange(n), torch.arange(n) > n // 2
    given = [sectorch.share(v, session=session, owner=o) for v, o in ((x, "A"), (y, "S"), (z, "Q"))]
    rows, numbers, more = (v.reveal() for v in sectorch.shuffle(*given))
    assert rows.dtype == x.dtype and more.dtype == z.dtype
    assert torch.equal(rows, x[numbers]) and torch.equal(more, z[numbers]) and torch.equal(numbers.sort().values, y)


def test_what_it_costs_and_shows():
    session = Session()
    with session.call() as net, Transcript() as sent, sectorch.profile() as seen:
        x = Shares(*(net.own(party, torch.zeros(100, 7, dtype=torch.int64)) for party in (net.A, net.S)))
        shuffle(net, x)
    assert (seen.rounds, seen.online_bytes, seen.offline_bytes) == (2, 16 * 700, 8 * 700)
    assert not any(line.shows for line, _ in sent.lines)
    assert {line.dst.role for line, _ in sent.lines} == {"A", "S"}, "who deals is sent nothing"


def test_a_tensor_that_is_trained_on_is_shuffled_too():
    x = DifferentiableTensor(sectorch.share(torch.arange(5.0), session=Session(reference=True)))
    assert torch.equal(sectorch.shuffle(x).reveal().sort().values, torch.arange(5.0))


def test_what_is_refused():
    session = Session(reference=True)
    x = sectorch.share(torch.ones(3, 2), session=session)
    with pytest.raises(ArgumentError, match="takes tensors in shares, got a Tensor; share it first"):
        sectorch.shuffle(x, torch.ones(3))
    with pytest.raises(ArgumentError, match="of one session"):
        sectorch.shuffle(x, sectorch.share(torch.ones(3), session=Session(reference=True)))
    for other in (torch.ones(4), torch.tensor(1.0)):
        with pytest.raises(ShapeError, match="equal numbers of rows, got"):
            sectorch.shuffle(x, sectorch.share(other, session=session))
