"""A party's certificate, key and CA are renewed in place: their files are looked at now and then, and new ones used.

Files are looked at every `EVERY` seconds, and at once on SIGHUP. Looking is what works everywhere: whatever renews a
certificate (an ACME client, a secret that an orchestrator mounts) replaces files, and often cannot signal a process in
a container. New handshakes use what was read; sessions that run go on. What cannot be used changes nothing: a pair that
does not belong together or is half written, one that is not valid today, one for another name.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cryptography import x509

from ...errors import IdentityError, SectorchError
from ..log import write
from .certificates import Credentials

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
                ends = ending(found.certificate)
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
        ending(found.authority)
        if found.called != self.credentials.called:
            raise IdentityError(
                f"the new certificate is for '{found.called}' and this is '{self.credentials.called}': start it anew"
            )

    def figures(self) -> dict[str, float]:
        """When what is used now ends, in seconds since 1970."""
        used = self.credentials
        return {
            "certificate_expiry_timestamp_seconds": ending(used.certificate).timestamp(),
            "authority_expiry_timestamp_seconds": ending(used.authority, last=True).timestamp(),
        }

    def _warn(self) -> None:
        if self._warned and time.monotonic() - self._warned < DAY:
            return
        used, now = self.credentials, datetime.datetime.now(datetime.timezone.utc)
        for what, ends in (
            ("certificate expires", ending(used.certificate)),
            ("CA expires", ending(used.authority, last=True)),
        ):
            if ends - now < datetime.timedelta(days=SOON):
                self._warned = time.monotonic()
                write(log, what, logging.WARNING, until=f"{ends:%Y-%m-%dT%H:%MZ}", days=max(0, (ends - now).days))


def ending(pem: bytes, last: bool = False) -> datetime.datetime:
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
