"""Identity keys: a server that stands in between is noticed, an unknown or a changed key is refused."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace

import pytest
import torch
from network_world import Trio, until

from sectorch import errors
from sectorch.choreography.run.party import PartyRuntime
from sectorch.choreography.streams import keypair
from sectorch.mpc.star.key_agreement import Identities
from sectorch.mpc.star.key_agreement import _statement as seed_statement
from sectorch.network import Pins, Server, answer, connect
from sectorch.network.identity.authority import keys
from sectorch.network.identity.identity import context, fingerprint_of, new_identity
from sectorch.session import A, Q, S
from sectorch.tensor import Scheme

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    yield trio
    trio.close()


def own_pins(trio: Trio, **options) -> dict[str, Pins]:
    """Give the answering and the querying party a file of pins each, in which nobody stands."""
    pins = {who: Pins(trio.folder / f"pins-{who}", **options) for who in "AQ"}
    trio.party._pins, trio.connection.pins = pins["A"], pins["Q"]
    return pins


def test_whom_nobody_has_pinned_is_refused_unless_somebody_says_otherwise(pki, small_model, tmp_path, monkeypatch):
    """Without a word about pins, on either side: no key comes of it, and the error is the command that pins it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    _, made = pki
    installed, install = [], PartyRuntime.install

    def recorded(self, pair, secret):
        installed.append((self.me, pair))
        install(self, pair, secret)

    monkeypatch.setattr(PartyRuntime, "install", recorded)
    server = Server("localhost:0", made["server"])
    address = f"localhost:{server.port}"
    party = answer(address, made["hospital-b"], small_model, X)
    try:
        with connect(address, made["alice"]) as connection:
            with pytest.raises(errors.IdentityError) as refused:
                connection.model("hospital-b")
            assert installed == []
            command = f"sectorch keys pin hospital-b {fingerprint_of(made['hospital-b'].identity)}"
            assert str(refused.value).endswith(f": {command}")
            assert keys(shlex.split(command)[2:]) == 0
            with pytest.raises(errors.IdentityError, match="'alice' is not among them"):
                connection.model("hospital-b")(X)
        assert (A, frozenset((Q, A))) not in installed
        assert Pins().fingerprints() == {"hospital-b": fingerprint_of(made["hospital-b"].identity)}
    finally:
        party.close()
        server.stop()


def test_both_clients_learn_each_other_on_first_use_where_that_is_said_and_know_each_other_then(trio, small_model):
    pins = own_pins(trio, first_use=True)
    for _ in range(2):
        remote = trio.connection.model("hospital-b")
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
        remote.close()
    of = {name: fingerprint_of(trio.made[name].identity) for name in ("alice", "hospital-b")}
    assert pins["Q"].fingerprints() == {"hospital-b": of["hospital-b"]}
    assert pins["A"].fingerprints() == {"alice": of["alice"]}


@pytest.mark.parametrize("first_use", [False, True])
def test_a_changed_key_is_refused_with_both_fingerprints_and_the_way_out(trio, small_model, first_use):
    trio.pins.first_use = first_use
    trio.connection.model("hospital-b").close()
    old = fingerprint_of(trio.made["hospital-b"].identity)
    trio.party.close()
    trio.made = {**trio.made, "hospital-b": replace(trio.made["hospital-b"], identity=new_identity())}
    new = fingerprint_of(trio.made["hospital-b"].identity)
    trio.start_answering()
    with pytest.raises(errors.IdentityError) as refused:
        trio.connection.model("hospital-b")
    command = f"sectorch keys pin hospital-b {new} --pins {trio.pins.path}"
    for part in (old, new, command):
        assert part in str(refused.value)
    assert keys(shlex.split(command)[2:]) == 0
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


def test_a_querying_party_whose_key_changed_is_refused_by_the_answering_one(trio):
    trio.connection.model("hospital-b").close()
    trio.connection.close()
    trio.made = {**trio.made, "alice": replace(trio.made["alice"], identity=new_identity())}
    trio.start_querying()
    with pytest.raises(errors.IdentityError, match="knows 'alice' by another key than SHA256:") as told:
        trio.connection.model("hospital-b")(X)
    assert str(trio.folder) not in str(told.value), "no path of the other party's"


def test_pins_are_required(trio, small_model):
    trio.connection.close()
    pins = Pins(trio.folder / "required")
    with connect(trio.address, trio.made["alice"], pins=pins) as connection:
        with pytest.raises(errors.IdentityError, match="pins are required; its key is SHA256:"):
            connection.model("hospital-b")
        pins.pin("hospital-b", fingerprint_of(trio.made["hospital-b"].identity))
        assert (connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


def test_pins_that_the_answering_party_requires(trio, small_model, caplog):
    """Q is told whose key is missing there, and no more; A's own log has the command that pins it."""
    caplog.set_level(logging.INFO, "sectorch.answer")
    pins = own_pins(trio)["A"]
    trio.connection.pins = trio.pins
    with pytest.raises(errors.IdentityError) as told:
        trio.connection.model("hospital-b")(X)
    key = fingerprint_of(trio.made["alice"].identity)
    assert str(told.value).startswith("the other party answers to keys that it has pinned, and 'alice' is not among")
    assert f"its key is {key}" in str(told.value) and str(trio.folder) not in str(told.value)
    command = f"sectorch keys pin alice {key} --pins {pins.path}"
    assert until(lambda: any(command in record.getMessage() for record in caplog.records), 30)
    pins.pin("alice", key)
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


def test_a_client_without_an_identity_key_does_not_start(trio):
    with pytest.raises(errors.IdentityError, match="keys identity"):
        connect(trio.address, replace(trio.made["alice"], identity=None))


# A server in the middle: it exchanges what it relays.


@pytest.fixture
def meddling(monkeypatch):
    """A function that makes S change its messages by `change(label, value)`."""

    def begin(change) -> None:
        class Meddling(PartyRuntime):
            def _send(self, line, value):
                super()._send(line, change(line.label, value.clone()) if self.me == S else value)

        monkeypatch.setattr("sectorch.network.parties.session.PartyRuntime", Meddling)

    return begin


def exchanged(label: str, at: slice):
    def change(said: str, value: torch.Tensor) -> torch.Tensor:
        if said == label:
            value[at] = torch.frombuffer(bytearray(keypair()[1]), dtype=torch.uint8)
        return value

    return change


@pytest.mark.parametrize(
    ("label", "at"),
    [
        ("public_Q_relayed", slice(0, 32)),
        ("signed_A_relayed", slice(0, 32)),
        ("signed_A_relayed", slice(32, 64)),
        ("signed_A_relayed", slice(64, 96)),
        ("signed_Q_relayed", slice(0, 32)),
        ("signed_Q_relayed", slice(32, 64)),
    ],
)
def test_a_server_in_the_middle_is_noticed_before_a_key_is_used(trio, small_model, meddling, label, at):
    """Whatever it exchanges: X25519 keys, identity keys or signatures."""
    installed = []
    meddling(exchanged(label, at))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartyRuntime, "install", lambda self, pair, secret: installed.append((self.me, pair)))
        with pytest.raises((errors.KeyAgreementError, errors.AbortedError)):
            trio.connection.model("hospital-b")(X)
    with pytest.raises(errors.KeyAgreementError, match="in between"):
        trio.connection.model("hospital-b")(X)
    side = A if label == "signed_Q_relayed" else Q
    assert (side, frozenset((Q, A))) not in installed
    meddling(lambda label, value: value)
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


def test_a_middle_that_signs_for_itself_is_refused_by_the_pins(trio, meddling):
    """Its keys and signatures are right, in the name of the other; but that name is pinned to another key."""
    trio.connection.model("hospital-b").close()
    (offer,) = trio.party._offers.latest()
    agreed = context(offer.description, offer.edition, Scheme(), 0, 1)
    own = Identities({"Q": "alice", "A": "hospital-b"}, context=agreed)
    public, heard = keypair()[1], {}

    def change(label: str, value: torch.Tensor) -> torch.Tensor:
        if label == "public_Q_relayed":
            heard["Q"] = bytes(value.tolist())
        if label == "signed_A_relayed":
            statement = seed_statement(heard["session"], "A", own, heard["Q"], public)
            proof = public + own.key.public_key().public_bytes_raw() + own.key.sign(statement)
            return torch.frombuffer(bytearray(proof), dtype=torch.uint8)
        return value

    ask = trio.connection.ask

    def asked(request, *args):
        heard["session"] = bytes.fromhex(request.session)
        return ask(request, *args)

    trio.connection.ask = asked
    meddling(change)
    with pytest.raises(errors.IdentityError, match="the identity key of 'hospital-b' has changed"):
        trio.connection.model("hospital-b")


def test_a_signature_of_another_session_does_not_verify(trio, meddling):
    """What A signed once, sent again by S in a later session."""
    kept = {}

    def keep(label: str, value: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(label, value) if label == "signed_A_relayed" else value

    meddling(keep)
    trio.connection.model("hospital-b").close()
    with pytest.raises(errors.KeyAgreementError, match="in between"):
        trio.connection.model("hospital-b")
