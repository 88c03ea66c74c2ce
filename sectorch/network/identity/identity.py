"""A party's credentials, and the identity keys by which clients know each other.

A certificate proves a party's name to the server. An identity key, a long-term Ed25519 key, proves it to another client
through the server. The pins file has the identity keys that a client knows: a line `NAME SHA256:FINGERPRINT` for each
name. It can be written by hand, and lines that begin with # are comments.
"""

from __future__ import annotations

import base64
import datetime
import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from ... import files
from ...deprecation import renamed_attribute
from ...errors import ArgumentError, FalseServerError, IdentityError
from ...mpc.star.key_agreement import Identities
from ...tensor import Scheme
from ..names import NAME, account_of, name_of, party_of, readable

log = logging.getLogger("sectorch.identity")
PRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_BLANK = " \t\r"


def new_identity() -> bytes:
    """A fresh identity key as PEM."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_identity(pem: bytes, named: str = "the identity file") -> Ed25519PrivateKey:
    """The identity key in a PEM file.

    Args:
        named: the file, in words for error texts.

    Raises:
        IdentityError: it holds no Ed25519 key.
    """
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError(f"{named} does not hold a PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{named} does not hold an Ed25519 key; `sectorch keys identity FILE` makes one")
    return key


def fingerprint(public: bytes) -> str:
    """The fingerprint of a public key, by which people compare keys: SHA256: and 43 characters."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(public).digest()).decode().rstrip("=")


def fingerprint_of(pem: bytes, named: str = "the identity file") -> str:
    """The fingerprint of the public key of an identity file; `named` as in `read_identity`."""
    return fingerprint(read_identity(pem, named).public_key().public_bytes_raw())


def config_folder() -> Path:
    """The folder of this user's settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sectorch"


class Pins:
    """The fingerprints that this client knows, by name. Other parties are refused.

    An invalid line, or a name with two fingerprints, affects that name only: it is refused.

    Args:
        path: a text file; by default `pins` in the user's settings.
        first_use: trust a name that is not in the file, and add it. An attacker who relays that first contact is
            trusted, too.
    """

    def __init__(self, path: str | Path | None = None, *, first_use: bool = False):
        self.path = Path(path) if path is not None else config_folder() / "pins"
        self.first_use = first_use

    known = renamed_attribute("known", "fingerprints")

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints by name.

        Raises:
            IdentityError: the file cannot be read; then no party is trusted.
        """
        return self._read()[0]

    def check(self, name: str, public: bytes) -> None:
        """Check that `public` is the key of `name`.

        Raises:
            IdentityError: it is another key (the text has both fingerprints), the name is unknown or invalid, or its
                line is invalid.
        """
        name_of(name, "the other party's name", IdentityError)
        came = fingerprint(public)
        with self._locked() if self.first_use else nullcontext():
            pins, broken = self._read()
            pinned = pins.get(name)
            if pinned == came:
                return
            confirmed = f"If '{name}' itself confirms the key {came}: {self._command(name, came)}"
            if pinned is not None:
                raise IdentityError(
                    f"the identity key of '{name}' has changed: {self.path} knows {pinned}, this one is {came}. "
                    f"Somebody may stand in between. {confirmed}",
                    told=f"the other party knows '{name}' by another key than {came}, and has to confirm this one",
                )
            if name in broken:
                raise IdentityError(
                    f"{self.path}, line {broken[name]}: expected `NAME SHA256:...`, each name once; '{name}' is not "
                    f"known by it. {confirmed}",
                    told=_unknown(name, came),
                )
            if broken and self.first_use:
                raise IdentityError(
                    f"{self.path}, line {min(broken.values())}: expected `NAME SHA256:...`, each name once; nobody "
                    f"new is trusted until it is mended. {confirmed}",
                    told=_unknown(name, came),
                )
            alike = next((other for other in pins if account_of(other) == account_of(name)), None)
            if alike is not None and self.first_use:
                raise IdentityError(
                    f"'{name}' differs from '{alike}', whom {self.path} knows, in case alone, and is not trusted at "
                    f"first use. {confirmed}",
                    told=_unknown(name, came),
                )
            if not self.first_use:
                raise IdentityError(
                    f"'{name}' is not in {self.path} and pins are required; its key is {came}. {confirmed}",
                    told=_unknown(name, came),
                )
            self._write(name, came)
        log.warning("'%s' is new: trusting its key %s from now on; ask it whether that is right", name, came)

    def pin(self, name: str, print_: str) -> None:
        """Set the fingerprint of a name, in place of a former one. Other lines stay as they are.

        Raises:
            ArgumentError: the name or the fingerprint is invalid.
        """
        name_of(name, "a party's name")
        if not isinstance(print_, str) or not PRINT.fullmatch(print_):
            raise ArgumentError(f"a fingerprint is SHA256: and 43 characters, got {ascii(print_)[:60]}")
        with self._locked():
            self._write(name, print_)

    def _command(self, name: str, print_: str) -> str:
        """The command by which a user pins this key."""
        options = () if self.path == config_folder() / "pins" else ("--pins", str(self.path))
        return shlex.join(("sectorch", "keys", "pin", name, print_, *options))

    def _lines(self) -> list[str]:
        try:
            return self.path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise IdentityError(f"cannot read the pins in {self.path}: {error.strerror}") from None

    def _read(self) -> tuple[dict[str, str], dict[str, int]]:
        """Fingerprints by name, and the numbers of invalid lines by the first word of each."""
        pins: dict[str, str] = {}
        broken: dict[str, int] = {}
        for number, line in enumerate(self._lines(), 1):
            if not line.strip(_BLANK) or line.startswith("#"):
                continue
            name, print_ = _parts(line)
            if not NAME.fullmatch(name) or not PRINT.fullmatch(print_) or pins.setdefault(name, print_) != print_:
                broken.setdefault(name, number)
        return {name: print_ for name, print_ in pins.items() if name not in broken}, broken

    def _write(self, name: str, print_: str) -> None:
        """Write the line of a name in the place of its former lines, or at the end."""
        lines, at = [], None
        for line in self._lines():
            if _parts(line)[0] != name:
                lines.append(line)
            elif at is None:
                at = len(lines)
                lines.append(f"{name} {print_}")
        while lines and not lines[-1]:
            lines.pop()
        if at is None:
            lines.append(f"{name} {print_}")
        files.write(self.path, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"), files.PUBLIC)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_name(self.path.name + ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except IdentityError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot write the pins to {self.path}: {error.strerror}") from None


def _parts(line: str) -> tuple[str, str]:
    """The first word of a line, and the rest."""
    name, _, rest = line.strip(_BLANK).replace("\t", " ").partition(" ")
    return name, rest.strip(" ")


def _unknown(name: str, print_: str) -> str:
    return (
        f"the other party answers to keys that it has pinned, and '{name}' is not among them; its key is {print_}: "
        f"tell it that fingerprint"
    )


def context(description: dict, edition: object, scheme: Scheme, place: int, of: int) -> bytes:
    """SHA-256 of the facts of a session on which Q and A must agree before they accept each other's keys.

    Args:
        description: of the model, as this party runs it; Q has it from S.
        edition: A's name for its weights, which tells nothing about them to a party without A's store.
        place, of: the number of this answering party, and how many there are.
    """
    agreed = {"program": description, "edition": edition, "scheme": repr(scheme), "place": place, "of": of}
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).digest()


@dataclass
class PinnedIdentities(Identities):
    """Identities of one session, of which the other party's key is checked against the pins."""

    pins: Pins = field(default_factory=Pins)
    proved: str = ""
    """The fingerprint of the other party's key, once it is trusted."""

    def trust(self, name: str, public: bytes) -> None:
        self.pins.check(party_of(name), public)
        self.proved = fingerprint(public)


class ServerKey:
    """The identity key with which a server signs what it sends.

    Args:
        known: its fingerprint; empty takes the key that the server shows.
        first_use: whether the first key that it shows is the one that it has to show later.

    Raises:
        ArgumentError: `known` is no fingerprint.
    """

    def __init__(self, known: str = "", first_use: bool = False):
        if not isinstance(known, str) or (known and not PRINT.fullmatch(known)):
            raise ArgumentError(
                f"the server's key is a fingerprint, SHA256: and 43 characters, got {ascii(known)[:60]}"
            )
        self._known, self._first_use = known, first_use

    def trust(self, public: bytes) -> None:
        """Raise FalseServerError unless this is the server's key."""
        came = fingerprint(public)
        if self._known not in ("", came):
            raise FalseServerError(f"the server signs with the key {came}, and {self._known} is the one that is known")
        if self._first_use:
            self._known = came


@dataclass(frozen=True)
class Credentials:
    """A party's certificate and key, the CA of its peers' certificates, and a client's identity key; all PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    identity: bytes | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.called})"

    @property
    def name(self) -> str:
        """The common name of the certificate, which is a client's name.

        Raises:
            IdentityError: it is no name (`sectorch.network.names`), or there is not exactly one.
        """
        return name_of(common_name(self._certificate), "the common name of a client's certificate", IdentityError)

    @property
    def called(self) -> str:
        """The common name for people; a server's may be any text, or empty."""
        return readable(common_name(self._certificate), 64)

    @property
    def _certificate(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate(self.certificate)
        except ValueError:
            raise IdentityError("the certificate file does not hold a PEM certificate") from None

    def check_dates(self) -> None:
        """Check that the certificate is valid now.

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
        """Read credentials from files.

        Args:
            identity: a client's identity key; by default NAME-identity.pem beside NAME.pem, if that exists.

        Raises:
            ArgumentError: a file cannot be read; the text names it.
            IdentityError: certificate and key do not belong together, or one of the two is no PEM.
        """
        identity = identity_file(certificate) if identity is None else identity
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
        """Check that certificate and key are a pair. TLS would refuse them too, without the files' names."""
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


def identity_file(certificate: str | Path) -> Path | None:
    """NAME-identity.pem beside a certificate NAME.pem; None if there is no such file."""
    path = Path(certificate)
    path = path.with_name(f"{path.stem}-identity.pem")
    return path if path.exists() else None


def common_name(subject: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """The common name of a certificate or a request; empty if it is invalid, missing, or not the only one."""
    try:
        names = subject.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, UserWarning):  # a name that is too long gives a warning, which may be an error
        names = []
    return str(names[0].value) if len(names) == 1 else ""


def peer_name(pem: bytes) -> str:
    """The name of the client whose certificate TLS has verified.

    Raises:
        IdentityError: its common name is no name.
    """
    return Credentials(pem, b"", b"").name


def certificate_print(pem: bytes) -> str:
    """A certificate's fingerprint in hexadecimal digits, as `openssl x509 -fingerprint -sha256` computes it."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def public_pem(key) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
