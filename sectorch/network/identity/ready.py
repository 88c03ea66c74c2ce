"""A party's own files, found right before a port opens or anything is sent: each fault is a line that names the file.

TLS would find most of these at the first handshake, in words of its own, and at the other side.
"""

from __future__ import annotations

import datetime
import os
import stat
import time
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from ...errors import ArgumentError, IdentityError
from .certificates import Credentials
from .identity import read_identity

BACKWARDS = 300.0
"""Seconds by which a file may be younger than the clock says that it is now."""


def ready(
    certificate: str | Path,
    key: str | Path,
    authority: str | Path,
    identity: str | Path | None = None,
    *,
    serving: bool = False,
) -> Credentials:
    """What a party starts with, checked as far as it can be without the other side.

    Args:
        identity: as of `Credentials.read`. serving: whether the certificate is shown to those that dial.

    Raises:
        ArgumentError: a file is not there, or cannot be read.
        IdentityError: a key that others can read; a certificate that is not of the key, is for the other purpose or
            not valid now; a CA of which the same is true; a file that is younger than the clock says that it is now.
    """
    certificate = Path(certificate)
    beside = certificate.with_name(f"{certificate.stem}-identity.pem")
    if identity is None and beside.exists():
        identity = beside
    for path in (key, identity):
        if path is not None:
            _private(Path(path))
    found = Credentials.read(certificate, key, authority, identity)
    if found.identity is not None:
        read_identity(found.identity, str(identity))
    _check_clock(certificate)
    found.check_dates()
    _check_authority(found.authority, Path(authority))
    _check_purpose(found, certificate, serving)
    return found


def _private(path: Path) -> None:
    """Whether nobody else can read a file; where it is root's, its group may, as a service's own group."""
    try:
        found = path.stat()
    except OSError as error:
        raise ArgumentError(
            f"cannot read {path}: {error.strerror}; `sectorch keys request` makes a party's keys"
        ) from None
    if os.name != "posix":
        return
    lent = found.st_uid == 0 and os.geteuid() != 0
    if found.st_mode & (stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if lent else stat.S_IRWXG)):
        raise IdentityError(f"others can read {path}: chmod 600 {path}, and think of making new keys")


def _check_clock(path: Path) -> None:
    """Whether a file is from the future, which means that this machine's clock was set back."""
    ahead = path.stat().st_mtime - time.time()
    if ahead > BACKWARDS:
        raise IdentityError(f"{path} was written {ahead:.0f} s after what this machine's clock says: set it (NTP)")


def _check_authority(pem: bytes, path: Path) -> None:
    """Whether one of a CA's certificates is valid now: beside it its successor may stand."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise IdentityError(f"{path} does not hold the certificate of a CA in PEM") from None
    now = datetime.datetime.now(datetime.timezone.utc)
    if not any(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in found):
        first, last = found[-1].not_valid_before_utc, found[-1].not_valid_after_utc
        raise IdentityError(
            f"the CA's certificate {path} is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC, and it is "
            f"{now:%Y-%m-%d %H:%M}: set the clock (NTP), or ask the CA for its new one"
        )


def _check_purpose(found: Credentials, path: Path, serving: bool) -> None:
    usage = x509.load_pem_x509_certificate(found.certificate).extensions
    named = [list(e.value) for e in usage if isinstance(e.value, x509.ExtendedKeyUsage)]
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if serving else ExtendedKeyUsageOID.CLIENT_AUTH
    if named and purpose not in named[0]:
        good, wanted, host = ("calling", "serving", "with") if serving else ("serving", "calling", "without")
        raise IdentityError(
            f"the certificate {path} is good for {good} only, and one for {wanted} is needed: have it issued again "
            f"{host} --host (`sectorch keys issue`)"
        )
