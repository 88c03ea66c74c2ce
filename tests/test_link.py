"""`Scheme(network=Link(...))`: links as numbers, two of them "lan" and "wan"; what is refused; who compares."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch import Link, Scheme
from sectorch.config import LINKS, link_of, scheme_of_fields
from sectorch.errors import ArgumentError, FrameError
from sectorch.network.identity.identity import context
from sectorch.network.messages import NumberFormat
from sectorch.network.parties.session import scheme_from_message, scheme_to_message
from sectorch.nn.models import ZOO

NUMBERS = st.tuples(st.floats(0.001, 60e3), st.floats(0.01, 1e6))
BAD = [0, 0.0, -1, -0.5, float("nan"), float("inf"), float("-inf"), 1e300, 10**30, 1e-9, True, None, "50", [50], 5j]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_numbers_that_are_no_link_are_refused_by_name(bad):
    for name in ("rtt_ms", "mbit"):
        with pytest.raises(ArgumentError, match=f"{name} of a link is a number"):
            Link(**{"rtt_ms": 50, "mbit": 100, name: bad})


@pytest.mark.parametrize("bad", ["moon", "", 50, None, ["lan"], {"rtt_ms": 50, "mbit": 100}], ids=repr)
def test_a_network_is_a_link_or_the_name_of_one(bad):
    with pytest.raises(ArgumentError, match="network must be one of lan, wan"):
        Scheme(network=bad)


@given(NUMBERS)
def test_a_scheme_of_a_link_survives_json_and_messages(numbers):
    scheme = Scheme(network=Link(*numbers))
    assert scheme_of_fields(json.loads(json.dumps(scheme.fields()))) == scheme
    sent = msgspec.json.encode(scheme_to_message(scheme))
    assert scheme_from_message(msgspec.json.decode(sent, type=NumberFormat)) == scheme
    assert hash(scheme) == hash(Scheme(network=Link(*numbers))) and scheme.link == Link(*numbers)


@pytest.mark.parametrize("network", [{"rtt_ms": 0, "mbit": 1}, {"rtt_ms": 1e99, "mbit": 1}, "moon"], ids=str)
def test_a_message_of_an_absurd_link_is_refused(network):
    with pytest.raises(FrameError):
        scheme_from_message(msgspec.convert({"network": network}, NumberFormat))


@pytest.mark.parametrize(
    "network", [{"rtt_ms": 1}, {"rtt_ms": 1, "mbit": 1, "more": 1}, {"rtt_ms": "1", "mbit": 1}], ids=str
)
def test_a_message_of_another_form_is_refused(network):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"network": network}, NumberFormat)


@given(NUMBERS, NUMBERS)
def test_parties_agree_on_the_same_link_only(one, other):
    of = lambda numbers: context({}, "e", Scheme(network=Link(*numbers)), 0, 1)
    assert (of(one) == of(other)) == (Link(*one) == Link(*other))


def test_names_are_links_and_equal_to_their_numbers():
    assert LINKS["wan"] == Link(rtt_ms=50, mbit=100) and LINKS["lan"].round_bytes == 1 << 16
    for name, link in LINKS.items():
        assert Scheme(network=link) == Scheme(network=name) and Scheme(network=link).network == name
        assert repr(Scheme(network=Link(link.rtt_ms, link.mbit))) == repr(Scheme(network=name))
        assert link_of(name) == link
    assert Link(50, 100) == Link(50.0, 100.0) and repr(Link(50, 100)) == repr(Link(50.0, 100.0))
    assert link_of("wan", 10, 50) == Link(10, 50) and link_of("lan", mbit=50) == Link(0.5, 50)
    for numbers in ((0, None), (None, 0), (-1, None)):
        with pytest.raises(ArgumentError):
            link_of("lan", *numbers)


@pytest.mark.parametrize(
    ("link", "few"),
    [
        ((0.5, 1000), False),
        ((4.9, 1e5), False),
        ((5, 1000), True),
        ((50, 10), False),
        ((50, 100), True),
        ((100, 1), False),
    ],
)
def test_few_rounds_where_a_round_trip_is_long_and_carries_much(link, few):
    assert Scheme(network=Link(*link)).few_rounds == few
    if few:
        with pytest.raises(ArgumentError, match="fast links"):
            Scheme(network=Link(*link), verified=True)
    else:
        assert Scheme(network=Link(*link), verified=True).verified


def test_the_same_results_over_every_link_and_fewer_rounds_over_longer_ones():
    torch.manual_seed(0)
    model, x = ZOO["lenet"][0]().eval(), torch.randn(1, 1, 28, 28)
    expected = sectorch.reference(model)(x)
    rounds = {}
    for numbers in ((0.1, 1e4), (10, 100), (20, 100), (50, 100), (200, 1000), (300, 0.1)):
        scheme = Scheme(network=Link(*numbers))
        secured = sectorch.secure(model, scheme, session=sectorch.Session())
        with sectorch.profile() as seen:
            assert torch.equal(secured(x), expected)
        rounds[numbers] = seen.rounds
        assert sectorch.explain(model, x, scheme).rounds == seen.rounds
    assert rounds[200, 1000] <= rounds[50, 100] <= rounds[10, 100] < rounds[300, 0.1]


def test_the_bytes_dealt_for_a_round_grow_with_what_it_is_worth():
    model, x = nn.Sequential(nn.Linear(8, 900), nn.ReLU()).eval(), torch.zeros(1, 8)
    ahead = [
        sectorch.explain(model, x, Scheme(network=Link(50, mbit))).offline_bytes for mbit in (11, 50, 87, 88, 1000)
    ]
    assert ahead == sorted(ahead) and ahead[2] < ahead[3] == ahead[4], "by keys where these are worth a round"
    assert "over 50 ms, 88 Mbit/s" in str(sectorch.explain(model, x, Scheme(network=Link(50, 88))))
