"""The label where the vote is clear, else none: both ways against the same in the clear, cost, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.choreography.ledger import Profile
from sectorch.errors import ArgumentError, MisplacedValueError, ShapeError
from sectorch.garbled import argmax_confident, argmax_confident_shares, correlate
from sectorch.garbled.circuit import confident_circuit
from sectorch.session import Session

SESSION = Session()
A, S, Q = SESSION.answering[0], SESSION.S, SESSION.Q
PAIR = correlate(SESSION.setup(A), S)
WAYS = {
    "garbled": lambda net, *v, **k: argmax_confident(net, PAIR, *v, **k),
    "shares": argmax_confident_shares,
}


def ring(shape, seed: int) -> torch.Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=torch.Generator().manual_seed(seed))


def label(way: str, counts, check, noise, mask, **how) -> torch.Tensor:
    with SESSION.call(A) as net:
        at_S = [net.own(S, counts - mask + z) for z in (check.unsqueeze(-1).expand_as(counts), noise)]
        found = WAYS[way](net, *at_S, net.own(Q, mask), **how)
        assert found.owners == {Q}
        return net.read(found, Q)


@pytest.mark.parametrize("way", WAYS)
@given(st.sampled_from([(2,), (10,), (0, 3), (3, 5, 7), (65, 2), (40, 4)]), st.integers(0, 99))
def test_it_is_the_check_and_then_the_argmax(way, shape, seed):
    counts = ring(shape, seed) % 20
    check, noise = ring(shape[:-1], seed + 1) % 25 - 22, ring(shape, seed + 2) % 15 - 7
    wanted = torch.where(counts.amax(-1) + check >= 0, (counts + noise).argmax(-1), -1)
    assert torch.equal(label(way, counts, check, noise, ring(shape, seed + 3), bits=7), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_the_ends_of_the_range(way):
    counts = torch.zeros(4, 3, dtype=torch.int64)
    check = torch.tensor([-128, -1, 0, 127])
    noise = torch.tensor([[127, -128, -128], [-128, 127, 0], [-128, -128, 127], [0, 0, 0]])
    assert label(way, counts, check, noise, ring((4, 3), 5), bits=8).tolist() == [-1, -1, 2, 0]


@pytest.mark.parametrize(("classes", "bits"), [(2, 2), (5, 9), (10, 12)])
def test_the_cost_that_is_stated(classes, bits):
    ands = 2 * classes * (bits - 1) + (2 * classes - 3) * bits + 2 * classes - 3 + (classes - 1).bit_length()
    values, check = torch.zeros(8, classes, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    with Profile() as profile:
        label("garbled", values, check, values, values, bits=bits)
    tables = sum(m.bytes for m in profile.ledger if m.label == "tables")
    assert tables == 8 * 32 * ands
    assert confident_circuit(classes, bits).garbler == 2 * classes * bits


@pytest.mark.parametrize("way", WAYS)
def test_refusals(way):
    values, check = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="bits"):
        label(way, values, check, values, values, bits=65)
    with pytest.raises(ShapeError), SESSION.call(A) as net:
        WAYS[way](net, net.own(S, values), net.own(S, values), net.own(Q, values[:2]), bits=8)
    with pytest.raises(ShapeError), SESSION.call(A) as net:
        WAYS[way](net, net.own(S, values[:2]), net.own(S, values), net.own(Q, values), bits=8)


def test_another_garblers_pair_is_refused():
    values = torch.zeros(3, 4, dtype=torch.int64)
    pair = correlate(SESSION.setup(A), A)
    with pytest.raises(MisplacedValueError, match="cannot garble"), SESSION.call(A) as net:
        argmax_confident(net, pair, net.own(S, values), net.own(S, values), net.own(Q, values), bits=8)
