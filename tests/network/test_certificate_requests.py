"""Requests for certificates: keys stay where they belong, and the CA takes a name and a public key and no more."""

from __future__ import annotations

import shlex
import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sectorch import errors
from sectorch.network import Credentials, Pins, Server, connect
from sectorch.network.identity.authority import issue, keys, make_authority, make_request
from sectorch.network.identity.identity import fingerprint_of
from sectorch.testing.local_network import enrol

P256 = ec.generate_private_key(ec.SECP256R1())


def request(*names: str, key=P256, extensions=(), tampered: bool = False, others=()) -> bytes:
    """A request with these common names, as anybody can make one."""
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name, _validate=False) for name in names]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([*others, *subject]))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    signed = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else SHA256())
    der = bytearray(signed.public_bytes(Encoding.DER))
    if tampered:
        der[-1] ^= 1
        return x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM)
    return signed.public_bytes(Encoding.PEM)


def content(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def ca(tmp_path):
    make_authority(tmp_path / "pki")
    return tmp_path / "pki"


def test_the_authority_never_holds_a_private_key_of_a_party(ca, tmp_path):
    """From the commands: two parties with a folder each, and files handed over."""
    own = {name: tmp_path / name for name in ("alice", "server")}
    assert keys(["request", "alice", "--folder", str(own["alice"])]) == 0
    assert keys(["request", "server", "--server", "--folder", str(own["server"])]) == 0
    assert {path.name for path in own["alice"].iterdir()} == {"alice-key.pem", "alice.csr", "alice-identity.pem"}
    assert {path.name for path in own["server"].iterdir()} == {"server-key.pem", "server.csr"}
    for path in (*own["alice"].glob("*-*.pem"), *own["server"].glob("*-*.pem")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys(["issue", str(ca), str(own["alice"] / "alice.csr")]) == 0
    assert keys(["issue", str(ca), str(own["server"] / "server.csr"), "--host", "localhost"]) == 0
    assert {path.name for path in ca.iterdir()} == {"ca.pem", "ca-key.pem", "alice.pem", "server.pem"}
    made = {}
    for name, folder in own.items():
        identity = folder / "alice-identity.pem" if name == "alice" else None
        made[name] = Credentials.read(ca / f"{name}.pem", folder / f"{name}-key.pem", ca / "ca.pem", identity)
    server = Server("localhost:0", made["server"])
    try:
        with connect(f"localhost:{server.port}", made["alice"]) as connection:
            assert connection.models() == []
    finally:
        server.stop()


def test_a_renewal_keeps_key_and_identity(ca, tmp_path):
    first = enrol(tmp_path / "pki", "alice")
    again = enrol(tmp_path / "pki", "alice")
    assert (first.key, first.identity) == (again.key, again.identity) and first.certificate != again.certificate


def test_the_old_form_is_one_line_that_names_the_new_one(ca, capsys):
    before = content(ca)
    assert keys(["issue", str(ca), "alice"]) == 1
    shown = capsys.readouterr().err
    assert (
        shown.count("\n") == 1
        and f"`sectorch keys request alice`, then here `sectorch keys issue {ca} alice.csr`" in shown
    )
    with pytest.raises(errors.ArgumentError, match="sectorch keys request"):
        issue(ca, "alice")
    assert content(ca) == before


@pytest.mark.parametrize(
    ("pem", "said"),
    [
        (b"", "not a request"),
        (b"\xff" * 1000, "not a request"),
        (b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "not a request"),
        (b" " * (1 << 17) + request("alice"), "not a request"),
        (request("alice", tampered=True), "not signed by the key"),
        (request("alice", key=rsa.generate_private_key(65537, 1024)), "2048 bits or more"),
        (request("alice", key=ec.generate_private_key(ec.SECP256K1())), "P-256"),
        (request("alice", key=ed25519.Ed25519PrivateKey.generate()), "P-256"),
        (request(), "a party's name is 1 to 64"),
        (request("alice", "hospital-b"), "a party's name is 1 to 64"),
        (
            P256.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "not a request",
        ),
    ],
    ids=[
        "empty",
        "junk",
        "no DER",
        "large",
        "tampered",
        "RSA 1024",
        "secp256k1",
        "Ed25519",
        "no name",
        "two names",
        "key",
    ],
)
def test_what_is_no_sound_request_is_refused_and_nothing_is_written(ca, pem, said):
    before = content(ca)
    with pytest.raises(errors.ArgumentError, match=said):
        issue(ca, pem)
    assert content(ca) == before


NO_NAMES = [
    *("..", "../evil", "a/b", "/tmp/evil", ".hidden", "a\\b", "a\n", "a\nb", "a\x00b", "alice ", " alice", "a b", "-a"),
    *(
        "\u0430lice",
        "\uff41lice",
        "al\u200bice",
        "\u202ealice",
        "alice\u00a0",
        "*",
        "ca",
        "CA",
        "alice-key",
        "bob-Identity",
    ),
]


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_a_name_that_is_no_plain_one_is_neither_asked_for_nor_issued(ca, tmp_path, name):
    before = content(tmp_path)
    for made in (lambda: make_request(tmp_path / "own", name), lambda: issue(ca, request(name))):
        with pytest.raises(errors.ArgumentError, match=r"a party's name is 1 to 64|cannot be called"):
            made()
    assert content(tmp_path) == before


def test_what_else_a_request_asks_for_is_ignored(ca):
    """A CA's rights, other names, a server's usage, an organisation."""
    asked = request(
        "alice",
        extensions=(
            x509.BasicConstraints(ca=True, path_length=None),
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.DNSName("cloud.example")]),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
            x509.KeyUsage(True, False, False, False, False, True, True, False, False),
        ),
        others=[x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Hospital B")],
    )
    plain = x509.load_pem_x509_certificate(issue(ca, asked).read_bytes())
    assert {type(e.value) for e in plain.extensions} == {x509.BasicConstraints, x509.ExtendedKeyUsage}
    assert plain.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert list(plain.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert plain.subject.rfc4514_string() == "CN=alice"
    served = x509.load_pem_x509_certificate(issue(ca, asked, hosts=("s.example", "10.0.0.1")).read_bytes())
    hosts = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(host.value) for host in hosts] == ["s.example", "10.0.0.1"]
    assert list(served.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]


def test_a_name_is_issued_for_another_key_only_when_the_operator_says_so(ca):
    """Else whoever sends a request in another's name has it."""
    path = issue(ca, request("alice"))
    before = content(ca)
    other = request("alice", key=ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(errors.ArgumentError, match="is for another key; if 'alice' itself asks"):
        issue(ca, other)
    assert content(ca) == before
    issue(ca, request("alice"))
    path.unlink()
    issue(ca, other)


@pytest.mark.parametrize(
    "host", ["", "a b", "a\n", "-a", "a..b", "\u0430.example", "x" * 64, "http://a", "a/b", "a:7100"]
)
def test_what_is_no_host_is_not_certified(ca, host):
    before = content(ca)
    with pytest.raises(errors.ArgumentError, match="a host is a host name or an address"):
        issue(ca, request("server"), hosts=("localhost", host))
    assert content(ca) == before


@pytest.mark.parametrize("what", [b"", b"junk", ed25519.Ed25519PrivateKey.generate()])
def test_a_key_file_that_is_none_is_not_written_over(tmp_path, what):
    if not isinstance(what, bytes):
        what = what.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "alice-key.pem").write_bytes(what)
    before = content(tmp_path)
    with pytest.raises(errors.ArgumentError, match=r"alice-key.pem does not hold a key for certificates"):
        make_request(tmp_path, "alice")
    assert content(tmp_path) == before


def test_a_request_holds_the_name_and_the_public_key_and_no_more(tmp_path):
    path = make_request(tmp_path, "alice")
    made = x509.load_pem_x509_csr(path.read_bytes())
    assert made.subject.rfc4514_string() == "CN=alice" and list(made.extensions) == []
    assert b"PRIVATE" not in path.read_bytes()
    public = made.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert public != P256.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_the_commands_of_the_documents_make_three_parties_that_know_each_other(tmp_path, monkeypatch, capsys):
    """As they stand in docs/deploying.md, with the fingerprint that was printed last in place of the dots."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("sectorch keys ", "cp "))]
    shown = ""
    for line in lines:
        words = shlex.split(line.replace("SHA256:...", shown), comments=True)
        if words[0] == "cp":
            for source in words[1:-1]:
                shutil.copy(source, words[-1])
            continue
        assert keys(words[2:]) == 0, line
        printed = capsys.readouterr().out.strip()
        shown = printed if words[2] == "show" else shown
    assert len(lines) == 16
    of = lambda folder, name: Credentials.read(f"{folder}/{name}.pem", f"{folder}/{name}-key.pem", f"{folder}/ca.pem")
    a, b = of("a", "hospital-a"), of("b", "hospital-b")
    assert Pins("a/pins").fingerprints() == {"hospital-b": fingerprint_of(b.identity)}
    assert Pins("b/pins").fingerprints() == {"hospital-a": fingerprint_of(a.identity)}
    server = Server("localhost:0", of("s", "server"))
    try:
        with connect(f"localhost:{server.port}", a, pins=Pins("a/pins")) as connection:
            assert connection.models() == []
    finally:
        server.stop()
