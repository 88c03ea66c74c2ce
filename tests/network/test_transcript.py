"""A server that tells Q and A of different programs, weights, formats or groups: refused before anything is sent."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from network_world import Trio, known, until
from torch import nn

from sectorch import errors
from sectorch.choreography.run.party import PartyRuntime
from sectorch.mpc.star import key_agreement as seeding
from sectorch.network import Server, answer, connect
from sectorch.network.identity.identity import context
from sectorch.network.messages import Serve, message_form
from sectorch.network.parties.server import Registry
from sectorch.network.wire.channel import PeerLink
from sectorch.session import S
from sectorch.tensor import Scheme

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
SEED = {"Q": ["public_Q"], "A": ["signed_A"]}
"""What leaves Q and A where Q notices: nothing that depends on a secret, and no confirmation by Q."""


@pytest.fixture
def trio(pki, small_model, tmp_path):
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    yield trio
    trio.close()


@pytest.fixture
def sent(monkeypatch):
    """What Q and the answering parties send, by role: labels of the seed protocol, or path and label of others."""
    labels: dict[str, list[str]] = {"Q": [], "A": []}
    send, install = PartyRuntime._send, PartyRuntime.install

    def recorded(self, line, value):
        if self.me != S:
            labels[self.me.role].append(line.label if line.path == "seed" else f"{line.path}/{line.label}")
        send(self, line, value)

    def installed(self, pair, secret):
        if self.me != S and S not in pair:
            labels[self.me.role].append("installs its key")
        install(self, pair, secret)

    monkeypatch.setattr(PartyRuntime, "_send", recorded)
    monkeypatch.setattr(PartyRuntime, "install", installed)
    return labels


@pytest.fixture
def ended(monkeypatch):
    """The errors with which sessions ended at answering parties."""
    found = []
    answering = sys.modules["sectorch.network.parties.answer"]  # the package's `answer` is the function
    abort_reason = answering.abort_reason

    def kept(error, who):
        found.append(type(error))
        return abort_reason(error, who)

    monkeypatch.setattr(answering, "abort_reason", kept)
    return found


def told(monkeypatch, change) -> None:
    """From here on S tells the answering parties what `change` makes of its requests to serve."""
    tell = PeerLink.tell

    def telling(self, request, *session):
        tell(self, change(message_form(request)) if isinstance(request, Serve) else request, *session)

    monkeypatch.setattr(PeerLink, "tell", telling)


def otherwise(request: dict, change: dict) -> dict:
    """A request to serve with other places, or another number format."""
    places = {"place", "of"} & change.keys()
    return request | (change if places else {"scheme": request["scheme"] | change})


def shown(monkeypatch, change) -> None:
    """From here on S shows Q what `change` makes of the model's description and edition, and runs that itself.

    A hears of its own edition.
    """
    find, real = Registry.find, {}

    def found(self, name, *args):
        model = find(self, name, *args)
        other = copy.deepcopy({"description": model.description, "edition": model.edition})
        change(other)
        real[name] = model.edition
        return replace(model, **other)

    monkeypatch.setattr(Registry, "find", found)
    told(monkeypatch, lambda request: request | {"edition": real[request["model"]]})


def call(part: dict, name: str) -> dict:
    nodes = part["description"]["programs"][0]["nodes"]
    return next(node for node in nodes if name in node["name"])


def other_operation(part: dict) -> None:
    call(part, "relu")["name"] = "torch.sigmoid"


def other_argument(part: dict) -> None:
    call(part, "max_pool2d")["args"][1] = [2, 2]


def another_weight(part: dict) -> None:
    part["description"]["weights"][0]["name"] = "other"


def an_entry_more(part: dict) -> None:
    part["description"]["note"] = "nothing reads it"


def other_edition(part: dict) -> None:
    part["edition"] = "00" * 16


@pytest.mark.parametrize("change", [other_operation, other_argument, another_weight, other_edition])
def test_another_model_for_q_than_a_has_is_refused_by_both(trio, small_model, monkeypatch, sent, ended, change):
    with monkeypatch.context() as patch:
        shown(patch, change)
        with pytest.raises(errors.KeyAgreementError, match="tells the two of you of different models"):
            trio.connection.model("hospital-b")
        assert until(lambda: ended, 30) and ended == [errors.KeyAgreementError]
    assert sent == SEED
    assert until(trio.idle, 30)
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


def test_an_entry_that_nothing_reads_is_refused_before_anything_is_sent(trio, small_model, monkeypatch, sent):
    with monkeypatch.context() as patch:
        shown(patch, an_entry_more)
        with pytest.raises(errors.ProgramError, match="unknown field `note`"):
            trio.connection.model("hospital-b")
    assert sent == {"Q": [], "A": []}
    assert until(trio.idle, 30)
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


@pytest.mark.parametrize("change", [{"frac_bits": 16}, {"network": "wan"}, {"limit_bits": 12}, {"of": 2}])
def test_another_number_format_or_group_for_a_than_q_asked_for_is_refused_by_both(
    trio, small_model, monkeypatch, sent, ended, change
):
    with monkeypatch.context() as patch:
        told(patch, lambda request: otherwise(request, change))
        with pytest.raises(errors.KeyAgreementError, match="number formats"):
            trio.connection.model("hospital-b")
        assert until(lambda: ended, 30) and ended == [errors.KeyAgreementError]
    assert sent == SEED
    assert until(trio.idle, 30)
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


@pytest.mark.parametrize("change", [{"frac_bits": 16}, {"network": "wan"}])
def test_a_notices_by_itself_and_sends_nothing_after_it(trio, monkeypatch, sent, ended, change):
    """Where Q is careless: as if A's signature covered nothing of it."""
    inner = seeding._statement

    def careless(session, role, who, *keys):
        bare = seeding.Identities(who.names, context=b"" if role == "A" else who.context)
        return inner(session, role, bare, *keys)

    monkeypatch.setattr(seeding, "_statement", careless)
    told(monkeypatch, lambda request: otherwise(request, change))
    remote = None
    with pytest.raises(errors.SectorchError):
        remote = trio.connection.model("hospital-b")
        remote(X)
    # Where A's refusal is slow to arrive, `model` returns, and the call opens a second session, which A refuses too.
    assert until(lambda: ended, 30) and set(ended) == {errors.KeyAgreementError}
    assert set(sent["A"]) == {"signed_A"}


# Several answering parties.


@pytest.fixture
def group(pki, small_model, tmp_path):
    _, made = pki
    pins = known(tmp_path / "pins", made)
    server = Server("localhost:0", made["server"])
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval().requires_grad_(False)
    models = {"hospital-b": small_model, "bob": other}
    parties = [answer(f"localhost:{server.port}", made[n], m, X, pins=pins) for n, m in models.items()]
    connection = connect(f"localhost:{server.port}", made["alice"], pins=pins)
    yield connection, models
    connection.close()
    for party in parties:
        party.close()
    server.stop()


def larger(request: dict) -> dict:
    return request | {"of": 3}


def alone(request: dict) -> dict:
    return request | {"place": 0, "of": 1}


def second_in_another_format(request: dict) -> dict:
    return otherwise(request, {"frac_bits": 16} if request["place"] == 1 else {})


@pytest.mark.parametrize("change", [larger, alone, second_in_another_format])
def test_a_sum_is_over_the_parties_places_and_formats_that_q_asked_for(group, monkeypatch, sent, ended, change):
    connection, models = group
    with monkeypatch.context() as patch:
        told(patch, change)
        with pytest.raises(errors.KeyAgreementError, match="in between, or tells the two of you"):
            connection.aggregate(list(models))
        assert until(lambda: len(ended) == 2, 30) and errors.KeyAgreementError in ended
    assert not [label for label in sent["Q"] if label not in ("public_Q", "signed_Q", "installs its key")]
    assert sent["Q"].count("signed_Q") == (change is second_in_another_format), "for the first party alone"
    expected = sum(model(X) for model in models.values())
    assert (connection.aggregate(list(models))(X) - expected).abs().max() < 1e-4


def test_parties_in_each_others_places_do_not_even_sign(group, monkeypatch, sent, ended):
    connection, models = group
    with monkeypatch.context() as patch:
        told(patch, lambda request: request | {"place": 1 - request["place"]})
        with pytest.raises(errors.AbortedError, match="wrong call"):
            connection.aggregate(list(models))
        assert until(lambda: len(ended) == 2, 30)
    assert sent == {"Q": ["public_Q"], "A": []}


def test_a_sum_is_of_the_models_that_q_was_shown(group, monkeypatch, sent, ended):
    connection, models = group
    with monkeypatch.context() as patch:
        shown(patch, another_weight)
        with pytest.raises(errors.KeyAgreementError):
            connection.aggregate(list(models))
        assert until(lambda: len(ended) == 2, 30)
    assert sent["Q"] == ["public_Q"] and set(sent["A"]) == {"signed_A"}


# What is signed.

PARTS = st.fixed_dictionaries(
    {
        "description": st.dictionaries(
            st.text(max_size=3), st.integers() | st.booleans() | st.floats(allow_nan=False), max_size=3
        ),
        "edition": st.text(max_size=3),
        "scheme": st.builds(
            Scheme,
            st.integers(1, 26),
            limit_bits=st.none() | st.integers(1, 9),
            network=st.sampled_from(["lan", "wan"]),
        ),
        "place": st.integers(0, 3),
        "of": st.integers(1, 4),
    }
)


def in_order(parts: dict) -> str:
    return repr(sorted({**parts, "description": sorted(parts["description"].items())}.items()))


@given(PARTS, PARTS)
def test_contexts_are_the_same_for_the_same_only(one, other):
    assert context(**one) == context(**copy.deepcopy(one)) and len(context(**one)) == 32
    assert (context(**one) == context(**other)) == (in_order(one) == in_order(other))


@given(st.binary(max_size=40), st.binary(max_size=40), st.sampled_from("QA"), st.text(max_size=4), st.text(max_size=4))
def test_no_two_statements_are_the_same_bytes(session, agreed, role, q, a):
    """Each part carries its length, so nothing moves from one into the next."""
    of = lambda session, agreed, q, a: seeding._statement(
        session, role, seeding.Identities({"Q": q, "A": a}, context=agreed), bytes(32), bytes(32)
    )
    mine = of(session, agreed, q, a)
    assert mine != of(session, agreed + b"\0", q, a) and mine != of(session + b"\0", agreed, q, a)
    if q:
        assert mine != of(session, agreed, q[:-1], q[-1] + a)
    if agreed:
        assert mine != of(session, agreed[1:], q, a + agreed[:1].decode("latin-1"))
