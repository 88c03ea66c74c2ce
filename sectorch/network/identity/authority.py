"""A small certificate authority for trying it out, and `sectorch keys`; a deployment has a CA of its own.

A party makes its private key itself. The CA gets a request, which has the public key and the name and is signed with
the private key. A certificate is for servers or for clients (extended key usage), so that a client cannot pose as the
server. The CA's operator decides which of the two it is, and for which hosts; other entries of a request are ignored.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    SECP521R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ... import files
from ...cli.command import Parser, Report, action_adder, command_status, number, run_action
from ...errors import ArgumentError
from ..names import NAME, account_of, name_of
from ..wire.endpoints import host_port, listen_address
from .identity import Credentials, Pins, common_name, fingerprint_of, new_identity, public_pem

CURVES = (SECP256R1, SECP384R1, SECP521R1)
RSA_BITS = 2048
LARGEST_REQUEST = 64 << 10
LONGEST_DAYS = 36500
_DAYS = number(float, lambda days: 0 < days <= LONGEST_DAYS, f"above 0 and at most {LONGEST_DAYS}")
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)(\*\.)?({_LABEL}\.)*{_LABEL}")


def make_authority(folder: str | Path, days: int = 365) -> Path:
    """Make a CA in a folder: ca.pem and ca-key.pem.

    Raises:
        ArgumentError: there is a CA already.
    """
    folder = Path(folder)
    if (folder / "ca.pem").exists():
        raise ArgumentError(f"{folder} holds a CA already")
    folder.mkdir(parents=True, exist_ok=True)
    key = generate_private_key(SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_subject("sectorch trial CA"))
        .issuer_name(_subject("sectorch trial CA"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    files.write(folder / "ca-key.pem", _private_pem(key), 0o600)
    files.write(folder / "ca.pem", certificate.public_bytes(Encoding.PEM), files.PUBLIC)
    return folder / "ca.pem"


def make_request(folder: str | Path, name: str, *, server: bool = False) -> Path:
    """Make a request for a certificate, at the party that it is for; returns its path.

    Writes NAME.csr for the CA, and NAME-key.pem and, for a client, NAME-identity.pem, which stay here. A key and an
    identity that exist are used again, so that a certificate is renewed for the same ones.

    Raises:
        ArgumentError: the name is invalid, or the key file has no key for certificates.
    """
    folder = Path(folder)
    _file_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-key.pem"
    if path.exists():
        key = _own_key(path)
    else:
        key = generate_private_key(SECP256R1())
        files.write(path, _private_pem(key), 0o600)
    identity = folder / f"{name}-identity.pem"
    if not server and not identity.exists():
        files.write(identity, new_identity(), 0o600)
    request = x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(key, SHA256())
    files.write(folder / f"{name}.csr", request.public_bytes(Encoding.PEM), files.PUBLIC)
    return folder / f"{name}.csr"


def issue(folder: str | Path, request: bytes, *, hosts: tuple[str, ...] = (), days: float = 90) -> Path:
    """Sign a request with the CA in a folder; returns the certificate's path.

    Writes NAME.pem beside the CA. Of the request it has the name and the public key only.

    Args:
        hosts: host names and addresses of a server; without any, the certificate is a client's.

    Raises:
        ArgumentError: there is no CA; the request is invalid, or not signed by its key; the name is invalid, or was
            issued for another key; the key is too weak; a host is invalid.
    """
    folder, asked = Path(folder), _read_request(request)
    name = _file_name(common_name(asked))
    names = [_host(host) for host in hosts]
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        authority_key = load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    except OSError:
        raise ArgumentError(f"{folder} holds no CA; make one with `sectorch keys init {folder}`") from None
    if not isinstance(authority_key, (EllipticCurvePrivateKey, RSAPrivateKey)):
        raise ArgumentError(f"{folder / 'ca-key.pem'} is no key on an elliptic curve of ECDSA and no RSA key")
    path = folder / f"{name}.pem"
    if path.exists() and not _same_key(path, asked.public_key()):
        raise ArgumentError(
            f"{path} is for another key; if '{name}' itself asks for a certificate for a new one, remove that file and "
            f"issue again"
        )
    others = (path.stem for path in folder.glob("*.pem"))
    alike = next((other for other in others if other != name and account_of(other) == account_of(name)), None)
    if alike is not None:
        raise ArgumentError(
            f"'{name}' differs in case alone from '{alike}', who has a certificate in {folder}, and people would take "
            f"one for the other; choose another name"
        )
    now = datetime.datetime.now(datetime.timezone.utc)
    usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(authority.subject)
        .public_key(asked.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - datetime.timedelta(minutes=5))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    files.write(path, builder.sign(authority_key, SHA256()).public_bytes(Encoding.PEM), files.PUBLIC)
    return path


def enrol(
    folder: str | Path, name: str, *, hosts: tuple[str, ...] = (), days: float = 90, pki: str | Path | None = None
) -> Credentials:
    """Make a party's keys and have its certificate issued, on one machine; returns its credentials.

    Args:
        folder: of the party; gets its keys, its certificate and the CA's certificate.
        pki: the CA's folder; by default the party's.

    Raises:
        ArgumentError: see `make_request` and `issue`.
    """
    folder, authority = Path(folder), Path(folder if pki is None else pki)
    request = make_request(folder, name, server=bool(hosts))
    certificate = issue(authority, request.read_bytes(), hosts=hosts, days=days)
    if authority != folder:
        files.write(folder / certificate.name, certificate.read_bytes(), files.PUBLIC)
        files.write(folder / "ca.pem", (authority / "ca.pem").read_bytes(), files.PUBLIC)
    return Credentials.read(folder / certificate.name, folder / f"{name}-key.pem", folder / "ca.pem")


def _read_request(pem: object) -> x509.CertificateSigningRequest:
    """A request that its own key has signed: nobody can have another party's key certified."""
    if not isinstance(pem, bytes):
        raise ArgumentError(f"issue makes no keys, it signs a request (bytes), got {type(pem).__name__}; {_MAKE_ONE}")
    try:
        request = x509.load_pem_x509_csr(pem) if len(pem) <= LARGEST_REQUEST else None
        if request is None:
            raise ValueError
        key, signed = request.public_key(), request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ArgumentError(f"not a request for a certificate in PEM; {_MAKE_ONE}") from None
    if not signed:
        raise ArgumentError(f"the request is not signed by the key that it is for; {_MAKE_ONE}")
    if not _strong(key):
        raise ArgumentError(
            f"a certificate is for a key on P-256, P-384 or P-521, or RSA of {RSA_BITS} bits or more; {_MAKE_ONE}"
        )
    return request


_MAKE_ONE = "whom it is for makes one with `sectorch keys request NAME`"


def _strong(key: object) -> bool:
    if isinstance(key, (EllipticCurvePublicKey, EllipticCurvePrivateKey)):
        return isinstance(key.curve, CURVES)
    return isinstance(key, (RSAPublicKey, RSAPrivateKey)) and key.key_size >= RSA_BITS


def _own_key(path: Path) -> EllipticCurvePrivateKey | RSAPrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, (EllipticCurvePrivateKey, RSAPrivateKey)) or not _strong(key):
        raise ArgumentError(
            f"{path} does not hold a key for certificates (P-256, P-384, P-521, or RSA of {RSA_BITS} bits or more, "
            f"without a password); move it away and make the request again"
        )
    return key


def _same_key(path: Path, key: object) -> bool:
    try:
        return public_pem(x509.load_pem_x509_certificate(path.read_bytes()).public_key()) == public_pem(key)
    except (OSError, ValueError, UnsupportedAlgorithm):
        return False


def _file_name(name: str) -> str:
    """A party's name, if it can name its files, too."""
    name_of(name, "a party's name")
    if name.lower() == "ca" or name.lower().endswith(("-key", "-identity")):
        raise ArgumentError(f"a party cannot be called {name!r}: its files would be the CA's or another party's")
    return name


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _private_pem(key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise ArgumentError(f"a host is a host name or an address, got {ascii(host)[:80]}") from None
        return x509.DNSName(host)


# The command.


def keys(arguments: Sequence[str] | None = None) -> int:
    """`sectorch keys ACTION`."""
    p = Parser(
        "keys",
        "Identity keys, requests for certificates, and a small certificate authority for trying it out.",
        (
            "sectorch keys try trial                               all of the following for a server and two hospitals",
            "sectorch keys init pki                                a CA in the folder pki",
            "sectorch keys request alice                           at alice: her keys, and a request for the CA",
            "sectorch keys issue pki alice.csr                     at the CA: a client's certificate",
            "sectorch keys issue pki server.csr --host localhost   at the CA: the server's certificate",
            "sectorch keys show alice-identity.pem                 the fingerprint, to tell the other party",
            "sectorch keys pin hospital-b SHA256:...               know the other party by this from now on",
        ),
    )
    add_action = action_adder(p)
    action = add_action("a CA and three parties' folders on one machine, to try it out", _try, "try trial")
    action.add_argument("folder", type=Path, help="the folder to make, with one for each party in it")
    action.add_argument("--server", default="localhost:7100", help="host:port at which the server will be reached")
    action.add_argument("--asking", default="hospital-a", help="name of the party that asks")
    action.add_argument("--answering", default="hospital-b", help="name of the party that has a model")
    action = add_action("make a CA", _init, "init pki")
    action.add_argument("folder", type=Path, help="where the CA is made")
    action = add_action("make a party's keys, and a request for its certificate", _request, "request alice")
    action.add_argument("name", help="the party's name")
    action.add_argument("--folder", type=Path, default=Path(), help="where the files are made (default here)")
    action.add_argument("--server", action="store_true", help="for a server, which needs no identity key")
    action = add_action("sign a request: issue a certificate", _issue, "issue pki alice.csr")
    action.add_argument("folder", type=Path, help="the CA's folder")
    action.add_argument("request", help="the request, a file that `sectorch keys request` made at the party")
    action.add_argument("--host", action="append", help="for a server: a host name or address; may be repeated")
    action.add_argument("--days", type=_DAYS, default=90, help="how long it is valid")
    action = add_action("make an identity key alone", _identity, "identity alice-identity.pem")
    action.add_argument("path", type=Path, help="the file to make")
    action = add_action("print an identity key's fingerprint", _show, "show alice-identity.pem")
    action.add_argument("path", type=Path, help="an identity file")
    action = add_action("know another party by this identity key", _pin, "pin hospital-b SHA256:...")
    action.add_argument("name", help="the other party's name")
    action.add_argument("fingerprint", help="the fingerprint that it told you")
    action.add_argument("--pins", type=Path, help="file of known identity keys")
    return command_status(p, arguments, run_action)


def _init(options: argparse.Namespace) -> Report:
    path = make_authority(options.folder)
    return {"ca": str(path)}, f"CA certificate: {path}"


def _request(options: argparse.Namespace) -> Report:
    path = make_request(options.folder, options.name, server=options.server)
    made = {"request": str(path), "key": str(path.with_name(f"{options.name}-key.pem"))}
    words = f"{made['request']}: give it to the CA\n{made['key']}: keep it here"
    if not options.server:
        identity = path.with_name(f"{options.name}-identity.pem")
        made |= {"identity": str(identity), "fingerprint": fingerprint_of(identity.read_bytes())}
        words += f"\n{made['identity']}: {made['fingerprint']}"
    return made, words


def _issue(options: argparse.Namespace) -> Report:
    folder, request = options.folder, Path(options.request)
    if not request.exists() and request.suffix != ".csr":
        name = options.request if NAME.fullmatch(options.request) else "NAME"
        server, host = (" --server", f" --host {options.host[0]}") if options.host else ("", "")
        raise ArgumentError(
            f"keys issue makes no keys any more, it signs a request: at '{name}' run `sectorch keys request "
            f"{name}{server}`, then here `sectorch keys issue {folder} {name}.csr{host}`"
        )
    hosts = tuple(options.host or ())
    path = issue(folder, _content(request), hosts=hosts, days=options.days)
    made = {"certificate": str(path), "ca": str(folder / "ca.pem")}
    kind = f"a server's certificate, for {', '.join(hosts)}" if hosts else "a client's certificate"
    return made, f"{path}: {kind}; give it back with {made['ca']}"


def _identity(options: argparse.Namespace) -> Report:
    if options.path.exists():
        raise ArgumentError(f"{options.path} is there already; an identity is made once")
    pem = new_identity()
    files.write(options.path, pem, 0o600)
    made = {"identity": str(options.path), "fingerprint": fingerprint_of(pem)}
    return made, f"{made['identity']}: {made['fingerprint']}"


def _show(options: argparse.Namespace) -> Report:
    print_ = fingerprint_of(_content(options.path), str(options.path))
    return {"fingerprint": print_}, print_


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None


def _pin(options: argparse.Namespace) -> Report:
    known = Pins(options.pins)
    known.pin(options.name, options.fingerprint)
    made = {"name": options.name, "fingerprint": options.fingerprint, "pins": str(known.path)}
    return made, f"{known.path} knows '{options.name}' by {options.fingerprint}"


def _try(options: argparse.Namespace) -> Report:
    """Make a CA and three parties, each with a folder that could be its own machine; gives the commands to run next."""
    folder, asking, answering = options.folder, options.asking, options.answering
    host, _ = host_port(options.server)
    if len({asking, answering, "server", "pki"}) < 4:
        raise ArgumentError(f"the parties have different names, and none is 'server' or 'pki': {asking}, {answering}")
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(f"{folder} is not empty; name a new folder")
    own = {name: folder / name for name in ("pki", "server", asking, answering)}
    for path in own.values():
        path.mkdir(mode=0o700, parents=True)
    make_authority(own["pki"])
    enrol(own["server"], "server", hosts=(host,), pki=own["pki"])
    files.write(own["server"] / "server-identity.pem", new_identity(), 0o600)  # for --receipts
    prints = {}
    for name in (asking, answering):
        enrol(own[name], name, pki=own["pki"])
        prints[name] = fingerprint_of((own[name] / f"{name}-identity.pem").read_bytes())
    Pins(own[asking] / "pins").pin(answering, prints[answering])
    Pins(own[answering] / "pins").pin(asking, prints[asking])
    made = {name: str(path) for name, path in own.items()}
    commands = _commands(own, asking, answering, options.server)
    words = (
        f"{folder}: a folder for each party, and pki for the CA. Whoever made them has all keys: for trying out.\n"
        f"A model file and a file of inputs are yours to bring, as by\n  {commands['convert']}\n"
        f"then, each in a terminal of its own:\n  {commands['server']}\n  {commands['answer']}\n  {commands['query']}"
    )
    return {**made, **{f"{name}_command": line for name, line in commands.items()}}, words


def _commands(own: dict[str, Path], asking: str, answering: str, server: str) -> dict[str, str]:
    def client(name: str) -> str:
        at = own[name]
        return (
            f"--server {server} --cert {at}/{name}.pem --key {at}/{name}-key.pem --ca {at}/ca.pem --pins {at}/pins "
            f"--store {at}/store"
        )

    s, a, b = own["server"], own[asking], own[answering]
    return {
        "convert": f"sectorch convert FILE.py:FUNCTION {b}/model.safetensors --trust --inputs {a}/inputs.npy",
        "server": f"sectorch server --listen {listen_address(server)} --cert {s}/server.pem --key {s}/server-key.pem "
        f"--clients-ca {s}/ca.pem --store {s}/store",
        "answer": f"sectorch answer {b}/model.safetensors --name {answering} {client(answering)}",
        "query": f"sectorch query {answering} {a}/inputs.npy {client(asking)}",
    }
