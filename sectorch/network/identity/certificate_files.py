"""A party's certificate, key and CA are renewed in place: their files are looked at now and then, and new ones used.

Files are looked at every `EVERY` seconds, and at once on SIGHUP. Looking is what works everywhere: whatever renews a
certificate (an ACME client, a secret that an orchestrator mounts) replaces files, and often cannot signal a process in
a container. New handshakes use what was read; sessions that run go on. What cannot be used changes nothing: a pair that
does not belong together or is half written, one that is not valid today, one for another name.
"""

from __future__ import annotations

import datetime
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from ...errors import ArgumentError, IdentityError, SectorchError
from ..log import write
from .identity import Credentials, read_identity

log = logging.getLogger("sectorch.certificate")
EVERY = 30.0
"""Seconds between looks."""
SETTLES = 0.2
"""Seconds between two readings that have to give the same: a file may be half written."""
SOON = 14
"""Days before its end from which on a certificate is a warning in the log, once a day."""
DAY = 86400.0


class Renewal:
    """Looks at the files of a party's credentials until `close`.

    Args:
        credentials: what the party began with. The identity key stays what it was then: others know the party by it.
        read: reads them anew.
        use: from now on, new handshakes are made with these; may refuse them with a SectorchError.
    """

    def __init__(self, credentials: Credentials, read: Callable[[], Credentials], use: Callable[[Credentials], None]):
        self.credentials = credentials
        self._read, self._use = read, use
        self._kept_because, self._warned = "", 0.0
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="certificates")

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def soon(self) -> None:
        """Look at once, as after SIGHUP."""
        self._wake.set()

    def _watch(self) -> None:
        while not self._ended:
            self.look()
            self._wake.wait(EVERY)
            self._wake.clear()

    def look(self) -> bool:
        """Look once; whether other credentials are used now. A line says so, or why not."""
        try:
            found = self._settled()
            changed = found != self.credentials
            if changed:
                self._check(found)
                self._use(found)
        except SectorchError as error:
            if str(error) != self._kept_because:
                self._kept_because = str(error)
                write(log, "certificate", logging.WARNING, outcome="kept", why=error)
            changed = False
        else:
            self._kept_because = ""
            if changed:
                self.credentials = found
                ends = certificate_end(found.certificate)
                write(log, "certificate", outcome="renewed", of=found.called, until=f"{ends:%Y-%m-%dT%H:%MZ}")
        self._warn()
        return changed

    def _settled(self) -> Credentials:
        """The files as they are, if they are the same twice; with the identity key of before.

        Raises:
            IdentityError: they change just now, or are not a pair. ArgumentError: one cannot be read.
        """
        found = replace(self._read(), identity=self.credentials.identity)
        if found != self.credentials:
            time.sleep(SETTLES)
            if found != replace(self._read(), identity=self.credentials.identity):
                raise IdentityError("the files of the certificate are being written")
        return found

    def _check(self, found: Credentials) -> None:
        """Raise IdentityError for what new handshakes could not be made with."""
        found.check_dates()
        certificate_end(found.authority)
        if found.called != self.credentials.called:
            raise IdentityError(
                f"the new certificate is for '{found.called}' and this is '{self.credentials.called}': start it anew"
            )

    def figures(self) -> dict[str, float]:
        """When what is used now ends, in seconds since 1970."""
        used = self.credentials
        return {
            "certificate_expiry_timestamp_seconds": certificate_end(used.certificate).timestamp(),
            "authority_expiry_timestamp_seconds": certificate_end(used.authority, last=True).timestamp(),
        }

    def _warn(self) -> None:
        if self._warned and time.monotonic() - self._warned < DAY:
            return
        used, now = self.credentials, datetime.datetime.now(datetime.timezone.utc)
        for what, ends in (
            ("certificate expires", certificate_end(used.certificate)),
            ("CA expires", certificate_end(used.authority, last=True)),
        ):
            if ends - now < datetime.timedelta(days=SOON):
                self._warned = time.monotonic()
                write(log, what, logging.WARNING, until=f"{ends:%Y-%m-%dT%H:%MZ}", days=max(0, (ends - now).days))


def certificate_end(pem: bytes, last: bool = False) -> datetime.datetime:
    """When the first certificate in a file ends, which is a party's own, or with `last` the one that ends last: beside
    a CA's certificate its successor may stand.

    Raises:
        IdentityError: there is none.
    """
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise IdentityError("the file of the CA does not hold certificates in PEM") from None
    return max(one.not_valid_after_utc for one in (found if last else found[:1]))


# A party's own files, found right before a port opens or anything is sent: each fault is a line that names the file.
#
# TLS would find most of these at the first handshake, in words of its own, and at the other side.


BACKWARDS = 300.0
"""Seconds by which a file may be younger than the clock says that it is now."""


def check_own_files(
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
