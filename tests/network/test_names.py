"""One rule for names at every place where one comes in: at each party, from whoever sends it."""

from __future__ import annotations

import datetime
import logging
import re
import warnings

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st
from network_world import Trio

from sectorch import errors
from sectorch.network import Credentials, Pins, answer, connect
from sectorch.network.messages import Serve, message_form, parse_message
from sectorch.network.names import name_of, readable
from sectorch.network.parties.server import Server
from sectorch.network.wire.channel import PeerLink, parse_error

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
RULE = r"is 1 to 64 letters \(ASCII\), digits and _ \. - @, and starts with a letter or digit; got "
LOOKS = [
    *("alice ", " alice", "alice\n", "x SHA256:abc\nalice", "al ice", "\u0430lice", "\uff41lice", "alice\u200b", "-a"),
    "a" * 65,
]
"""What a person, or a line of a file, may take for another's name."""
TWO_PARTS = "a/b"
"""No party's name, and a model's."""
NO_NAMES = [
    *LOOKS,
    "",
    "..",
    "../alice",
    "a/b",
    "\x1b[2J",
    "alice\x00",
    "\u202ealice",
    None,
    1,
    True,
    ["alice"],
    {"a": 1},
]

TEXTS = [name for name in NO_NAMES if isinstance(name, str)]
"""What is no text at all is refused by a message's declared type: `test_messages.py`."""


@pytest.fixture
def trio(pki, small_model, tmp_path):
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    yield trio
    trio.close()


@given(st.text(max_size=70) | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", fullmatch=True))
def test_a_name_is_one_word_of_ascii_and_all_else_is_refused_readably(text):
    try:
        assert name_of(text, "a name") == text
    except errors.ArgumentError as error:
        assert str(error).isprintable() and len(str(error)) < 700
        return
    assert 1 <= len(text) <= 64 and text.isascii() and text.isprintable() and text[0].isalnum()
    assert not set(text) & set(" /\\\"'`$;:#~*?|&<>()[]{}!%^+=,")


@given(st.text(max_size=700))
def test_words_of_others_are_a_line_that_controls_nothing(text):
    assert readable(text).isprintable() and len(readable(text)) == min(len(text), 600)
    assert readable(text) == text[:600] or not text[:600].isprintable()


@pytest.mark.parametrize("kind", ["AbortedError", "IdentityError", "BusyError"])
def test_what_the_server_says_of_an_error_controls_no_terminal(kind):
    error = parse_error(f"{kind}: nothing\x1b[2J\nerror: trust me")
    assert str(error).isprintable() and "nothing" in str(error)


def test_who_wants_a_key_pinned_is_told_apart(star):
    """A server that words an error of its own as if this party's process had refused the other's key."""
    wish = (
        "the identity key of 'hospital-b' has changed. If it confirms: sectorch keys pin hospital-b SHA256:" + "a" * 43
    )
    assert str(parse_error(f"IdentityError: {wish}")) == f"{wish} (as the server relays it)"
    assert str(parse_error(f"IdentityError: {parse_error(f'IdentityError: {wish}')}")).count("relays it") == 1
    address, made, _ = star
    with connect(address, made["alice"]) as connection:
        connection.link.tell = lambda request: connection._request(
            connection.link, {"do": "reply", "number": request["number"], "error": "IdentityError", "text": wish}
        )
        with pytest.raises(errors.IdentityError, match=r"\(as the server relays it\)$"):
            connection.ask({"do": "hello"})
        del connection.link.tell


def test_a_reply_that_is_an_error_controls_no_terminal(star):
    address, made, _ = star
    with connect(address, made["alice"]) as connection:
        connection.link.tell = lambda request: connection._request(
            connection.link, {"do": "reply", "number": request["number"], "error": "BusyError", "text": "a\x1b[2J\nb"}
        )
        with pytest.raises(errors.BusyError) as said:
            connection.ask({"do": "hello"})
        assert str(said.value) == "a [2J b"
        del connection.link.tell


# In certificates, of a CA that is less strict than ours.


def certified(folder, *names: str, identity: bytes) -> Credentials:
    """A client's credentials with these common names, by the CA in `folder`."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signing, key = load_pem_private_key((folder / "ca-key.pem").read_bytes(), None), generate_private_key(SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one is too long
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name, _validate=False) for name in names])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
        .sign(signing, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Credentials(certificate.public_bytes(Encoding.PEM), pem, (folder / "ca.pem").read_bytes(), identity)


@pytest.mark.parametrize(
    "names", [*((name,) for name in LOOKS), (), ("alice", "hospital-b"), ("alice\x00",)], ids=ascii
)
def test_a_certificate_with_another_kind_of_name_opens_nothing(star, pki, names, monkeypatch):
    """Neither at the client that has it nor, if that does not look, at the server."""
    address, made, _ = star
    posing = certified(pki[0], *names, identity=made["bob"].identity)
    with pytest.raises(errors.IdentityError, match=f"the common name of a client's certificate {RULE}"):
        connect(address, posing, patience=5)
    welcomed = []
    monkeypatch.setattr(Server, "_welcome", lambda self, name, certificate: welcomed.append(name))
    unchecked = Careless(posing.certificate, posing.key, posing.authority, posing.identity)
    with pytest.raises(errors.IdentityError, match="the common name of a client's certificate is 1 to 64"):
        connect(address, unchecked, patience=5)
    assert welcomed == []


class Careless(Credentials):
    """Of a client that does not look at its own name."""

    @property
    def name(self) -> str:
        return "alice"


# In requests, and in what the server relays.


@pytest.mark.parametrize("name", TEXTS, ids=ascii)
def test_a_client_that_names_what_is_no_name_is_refused_by_the_server(star, name):
    address, made, _ = star
    with connect(address, made["alice"]) as connection:
        said = f"an answering party's name {RULE}" if name != TWO_PARTS else "the certificate is for 'alice'"
        with pytest.raises(errors.IdentityError, match=said):
            connection.ask({"do": "register", "name": name, "description": {}, "edition": "e"})
        for names in ([name], ["hospital-b", name]):
            said = f"a model's name in a request {RULE}" if name != TWO_PARTS else "no model 'a/b' is connected"
            with pytest.raises((errors.FrameError, errors.UnknownModelError), match=said):
                connection.ask({"do": "open", "session": "00" * 16, "models": names})
        assert connection.models() == ["hospital-b"]


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_what_is_no_name_does_not_leave_its_user(star, name, small_model):
    address, made, _ = star
    with connect(address, made["alice"]) as connection:
        connection.ask = lambda *_: pytest.fail("it was sent")
        for ask in (connection.model, lambda name: connection.aggregate(["hospital-b", name])):
            if name != TWO_PARTS:  # a model of a party that has several
                with pytest.raises(errors.ArgumentError, match=f"a model's name {RULE}"):
                    ask(name)
        assert connection.link.sessions == 0
    if name:  # none is that of the certificate
        with pytest.raises(errors.ArgumentError, match=f"an answering party's name {RULE}"):
            answer(address, made["bob"], small_model, X, name=name)


def test_a_server_that_relays_what_is_no_name_is_refused_by_the_answering_party(trio, monkeypatch, caplog):
    """And neither its pins nor its log are written to by it."""
    caplog.set_level(logging.INFO)
    for number, name in enumerate(TEXTS):
        pins = trio.folder / f"pins-{number}"
        trio.party._pins = Pins(pins, first_use=True)
        said = refused_when_relayed(trio, monkeypatch, name)
        assert re.search(f"FrameError: the name of a client that the server relays {RULE}", said), ascii(name)
        assert not pins.exists(), ascii(name)
        assert (trio.connection.model("hospital-b")(X)).shape == (2, 4), f"the query after {name!a}"
        assert trio.party._pins.fingerprints().keys() == {"alice"}, ascii(name)
    assert all(record.getMessage().isprintable() for record in caplog.records if record.name.startswith("sectorch"))


def refused_when_relayed(trio, monkeypatch, name: str) -> str:
    """What the client is told where the server names it so to the answering party."""
    tell = PeerLink.tell

    def relayed(self, request, *session):
        tell(self, {**message_form(request), "for": name} if isinstance(request, Serve) else request, *session)

    with monkeypatch.context() as patch:
        patch.setattr(PeerLink, "tell", relayed)
        with pytest.raises(errors.AbortedError) as refused:
            trio.connection.model("hospital-b")
    return str(refused.value)


@pytest.mark.parametrize(
    "listed", [*([name] for name in NO_NAMES), ["hospital-b", "x\ny"], None, "hospital-b", {"a": 1}, 3]
)
def test_a_server_that_lists_what_is_no_name_is_refused_by_the_client(star, listed):
    address, made, _ = star
    with connect(address, made["alice"]) as connection:
        connection.ask = lambda request, kind: parse_message(kind, {"models": listed}, "reply")
        if listed == [TWO_PARTS]:
            assert connection.models() == listed
            return
        with pytest.raises(
            errors.FrameError, match=r"a model's name in the server's list|a reply of no form .*: models"
        ):
            connection.models()
