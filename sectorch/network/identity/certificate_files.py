"""The files of a party's certificate, key and CA: checks before the start, and renewal while the party runs.

`Renewal` reads the files every `EVERY` seconds, and at once on SIGHUP. An ACME client, or an orchestrator that mounts a
secret, replaces files and often cannot signal a process in a container. New handshakes use the new files, and running
sessions go on. Files that are half written, do not belong together, are not valid now, or are for another name change
nothing.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from ... import files
from ...errors import ArgumentError, IdentityError, SectorchError
from ..log import write
from .identity import Credentials, identity_file, read_identity

log = logging.getLogger("sectorch.certificate")
EVERY = 30.0
"""Seconds between two readings of the files."""
SETTLES = 0.2
"""Seconds between two readings that must agree, since a file may be half written."""
SOON = 14
"""Days before the end of a certificate from which on the log has a warning, once a day."""
DAY = 86400.0


class Renewal:
    """Renews a party's credentials when their files change, until `close`.

    Args:
        credentials: the first ones. The identity key stays the same, since other parties know this one by it.
        read: reads the files.
        use: makes new handshakes use new credentials; may refuse them with a SectorchError.
    """

    def __init__(self, credentials: Credentials, read: Callable[[], Credentials], use: Callable[[Credentials], None]):
        self.credentials = credentials
        self._read, self._use = read, use
        self._kept_because, self._warned = "", 0.0
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="certificates")

    def start(self) -> None:
        """Read the files from now on."""
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def soon(self) -> None:
        """Read the files at once, as on SIGHUP."""
        self._wake.set()

    def _watch(self) -> None:
        while not self._ended:
            self.look()
            self._wake.wait(EVERY)
            self._wake.clear()

    def look(self) -> bool:
        """Read the files once; returns whether other credentials are used now. The log has a line of it, or why not."""
        try:
            found = self._read_twice()
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

    def _read_twice(self) -> Credentials:
        """The files' content, if two readings agree; with the former identity key.

        Raises:
            IdentityError: they change meanwhile, or are not a pair. ArgumentError: one cannot be read.
        """
        found = replace(self._read(), identity=self.credentials.identity)
        if found != self.credentials:
            time.sleep(SETTLES)
            if found != replace(self._read(), identity=self.credentials.identity):
                raise IdentityError("the files of the certificate are being written")
        return found

    def _check(self, found: Credentials) -> None:
        """Raise IdentityError for credentials that new handshakes could not use."""
        found.check_dates()
        certificate_end(found.authority)
        if found.called != self.credentials.called:
            raise IdentityError(
                f"the new certificate is for '{found.called}' and this is '{self.credentials.called}': start it anew"
            )

    def unready(self) -> str:
        """Why new connections fail now: this party's certificate, or the CA of the others, is not valid; else empty."""
        used = self.credentials
        try:
            used.check_dates()
            _check_authority(used.authority, Path("that this party was started with"))
        except IdentityError as error:
            return str(error)
        return ""

    def figures(self) -> dict[str, float]:
        """The ends of the certificate and the CA that are in use, in seconds since 1970 and in days from now."""
        used, now = self.credentials, time.time()
        ends = {
            "certificate": certificate_end(used.certificate).timestamp(),
            "authority": certificate_end(used.authority, last=True).timestamp(),
        }
        return {
            **{f"{what}_expiry_timestamp_seconds": end for what, end in ends.items()},
            **{f"{what}_days_left": (end - now) / DAY for what, end in ends.items()},
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
    """The end of the first certificate in a file, which is a party's own.

    Args:
        last: take the latest end of all certificates: a CA's file may have its successor, too.

    Raises:
        IdentityError: there is none.
    """
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise IdentityError("the file of the CA does not hold certificates in PEM") from None
    return max(one.not_valid_after_utc for one in (found if last else found[:1]))


CLOCK_TOLERANCE = 300.0
"""Seconds by which a file's time may be after this machine's clock."""


def check_own_files(
    certificate: str | Path,
    key: str | Path,
    authority: str | Path,
    identity: str | Path | None = None,
    *,
    serving: bool = False,
) -> Credentials:
    """A party's credentials, checked before a port opens or anything is sent.

    TLS would find most errors only at the first handshake, at the other side, and without the file's name.

    Args:
        identity: as in `Credentials.read`. serving: whether the certificate is a server's.

    Raises:
        ArgumentError: a file cannot be read.
        IdentityError: others can read a key; the certificate is not the key's, is for the other purpose or not valid
            now; the CA is not valid now; or the certificate's file is from the future of this machine's clock.
    """
    certificate = Path(certificate)
    identity = identity_file(certificate) if identity is None else identity
    for path in (key, identity):
        if path is not None:
            _check_private(Path(path))
    found = Credentials.read(certificate, key, authority, identity)
    if found.identity is not None:
        read_identity(found.identity, str(identity))
    _check_clock(certificate)
    found.check_dates()
    _check_authority(found.authority, Path(authority))
    _check_purpose(found, certificate, serving)
    return found


def _check_private(path: Path) -> None:
    """Check that nobody else can read a file."""
    try:
        open_to_others = files.others_can_read(path)
    except OSError as error:
        raise ArgumentError(
            f"cannot read {path}: {error.strerror}; `sectorch keys request` makes a party's keys"
        ) from None
    if open_to_others:
        raise IdentityError(f"others can read {path}: chmod 600 {path}, and think of making new keys")


def _check_clock(path: Path) -> None:
    """Check that a file is not from the future, which means that this machine's clock was set back."""
    ahead = path.stat().st_mtime - time.time()
    if ahead > CLOCK_TOLERANCE:
        raise IdentityError(f"{path} was written {ahead:.0f} s after what this machine's clock says: set it (NTP)")


def _check_authority(pem: bytes, path: Path) -> None:
    """Check that one of a CA's certificates is valid now; its file may have its successor, too."""
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
