"""The files that a party starts with: its certificate and key, the CA, and a client's identity key.

A client's common name is the name it goes by.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from ...errors import ArgumentError, IdentityError
from ..names import name_of, readable


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
        return f"Credentials({self.called})"

    @property
    def name(self) -> str:
        """The common name of the certificate, by which a client goes.

        Raises:
            IdentityError: it is not a name, see `sectorch.network.names`, or there is not exactly one.
        """
        return name_of(common_name(self._certificate), "the common name of a client's certificate", IdentityError)

    @property
    def called(self) -> str:
        """The common name for people; a server's may be any, or none."""
        return readable(common_name(self._certificate), 64)

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
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            raise IdentityError(
                f"the certificate of '{self.called}' is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} "
                f"UTC, and it is {now:%Y-%m-%d %H:%M}; issue a new one"
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
        try:
            x509.load_pem_x509_certificate(self.certificate)
        except ValueError:
            raise IdentityError(f"{certificate} does not hold a certificate in PEM") from None
        if public_pem(secret.public_key()) != public_pem(self._certificate.public_key()):
            raise IdentityError(f"the certificate {certificate} and the key {key} do not belong together; name a pair")


def common_name(subject: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """The one common name in a certificate or a request; empty if there is none that can be read, or more than one."""
    try:
        names = subject.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, UserWarning):  # too long: a warning, which may be an error
        names = []
    return str(names[0].value) if len(names) == 1 else ""


def peer_name(pem: bytes) -> str:
    """The name of the client whose certificate TLS has verified.

    Raises:
        IdentityError: its common name is none.
    """
    return Credentials(pem, b"", b"").name


def certificate_print(pem: bytes) -> str:
    """A certificate's fingerprint, in hexadecimal digits as `openssl x509 -fingerprint -sha256` shows it."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def public_pem(key) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
