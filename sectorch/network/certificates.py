"""Certificates: a small CA for trying it out, and the files that a party starts with.

A server's certificate is good for serving only and a client's for calling only (extended key usage), so a client cannot
pose as the server; a client's common name is the name it goes by.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ArgumentError, IdentityError
from .identity import new_identity

NAME = re.compile(r"\w[\w.@ -]{0,63}")
"""Names that a certificate is issued for: they name its files too, and 64 is the most that a common name holds."""


@dataclass(frozen=True)
class Credentials:
    """PEM bytes: this party's certificate and key, and the CA that the other side's certificate must come from.

    A client also has a long-term identity key, by which other clients know it; see `sectorch.network.identity`.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    identity: bytes | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.name})"

    @property
    def name(self) -> str:
        """The common name of the certificate."""
        return common_name(self._certificate)

    @property
    def _certificate(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate(self.certificate)
        except ValueError:
            raise IdentityError("the certificate file does not hold a PEM certificate") from None

    def check_dates(self) -> None:
        """Whether the certificate is valid today.

        Raises:
            IdentityError: it has expired, or is not valid yet.
        """
        certificate, now = self._certificate, datetime.datetime.now(datetime.timezone.utc)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise IdentityError(
                f"the certificate of '{self.name}' is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M}; issue a new one"
            )

    @classmethod
    def read(
        cls, certificate: str | Path, key: str | Path, authority: str | Path, identity: str | Path | None = None
    ) -> Credentials:
        """From files.

        Args:
            identity: a client's identity key; NAME-identity.pem beside NAME.pem, if it is there, unless named.

        Raises:
            ArgumentError: a file is not there (says which).
            IdentityError: the certificate is not that of the key, or one of the two is not PEM.
        """
        certificate = Path(certificate)
        beside = certificate.with_name(f"{certificate.stem}-identity.pem")
        if identity is None and beside.exists():
            identity = beside
        named = {"certificate": certificate, "key": key, "CA certificate": authority, "identity key": identity}
        contents = []
        for what, path in named.items():
            try:
                contents.append(None if path is None else Path(path).read_bytes())
            except OSError as error:
                raise ArgumentError(f"cannot read the {what} {path}: {error.strerror}") from None
        found = cls(*contents)
        found._check_key(certificate, key)
        return found

    def _check_key(self, certificate: str | Path, key: str | Path) -> None:
        """Whether certificate and key are a pair; TLS would say it in many words, and not which files."""
        try:
            secret = load_pem_private_key(self.key, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise IdentityError(f"the key file {key} does not hold a PEM private key without a password") from None
        if _public_pem(secret.public_key()) != _public_pem(self._certificate.public_key()):
            raise IdentityError(f"the certificate {certificate} and the key {key} do not belong together; name a pair")


def common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _public_pem(key) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _private_pem(key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_authority(folder: str | Path, days: int = 365) -> Path:
    """A new CA in `folder`: ca.pem and ca-key.pem. For trying it out; a deployment uses its own.

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
        .subject_name(_named("sectorch trial CA"))
        .issuer_name(_named("sectorch trial CA"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    write_secret(folder / "ca-key.pem", _private_pem(key))
    return folder / "ca.pem"


def issue(
    folder: str | Path, name: str, *, server: bool = False, hosts: tuple[str, ...] = (), days: float = 90
) -> Credentials:
    """A certificate of the CA in `folder` for a client's name, or for a server and its host names.

    Writes NAME.pem and NAME-key.pem beside the CA, and for a client NAME-identity.pem unless it is there: a client
    keeps its identity when its certificate is renewed.

    Raises:
        ArgumentError: no CA in `folder`, or a name that is not plain.
    """
    if not NAME.fullmatch(name):
        raise ArgumentError(
            f"a party's name is 1 to 64 letters, digits and _ . - @ or spaces, and starts with one of the first "
            f"three, got {name!r}"
        )
    if name == "ca" or name.endswith(("-key", "-identity")):
        raise ArgumentError(f"a party cannot be called {name!r}: its files would be the CA's or another party's")
    folder = Path(folder)
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        authority_key = load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    except OSError:
        raise ArgumentError(f"{folder} holds no CA; make one with `sectorch keys init {folder}`") from None
    key = generate_private_key(SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - datetime.timedelta(minutes=5))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
    certificate = builder.sign(authority_key, SHA256())
    pem = certificate.public_bytes(Encoding.PEM)
    (folder / f"{name}.pem").write_bytes(pem)
    write_secret(folder / f"{name}-key.pem", _private_pem(key))
    identity = None
    if not server:
        path = folder / f"{name}-identity.pem"
        if not path.exists():
            write_secret(path, new_identity())
        identity = path.read_bytes()
    return Credentials(pem, _private_pem(key), authority.public_bytes(Encoding.PEM), identity)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only this user may read."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(data)
