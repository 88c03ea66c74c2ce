"""Which questions an answering party takes, and whose it takes no more."""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import datetime, timezone
from pathlib import Path

from ... import files
from ...errors import ArgumentError, RefusedError
from ...mpc.star.audit import Evidence
from ...ring.scheme import MOST_AUDITED, Scheme
from ..log import write

log = logging.getLogger("sectorch.answer")


class Admission:
    """What an answering party asks of a question, and the identity keys of those who dealt falsely.

    Evidence is a file, `false-dealing-FINGERPRINT.json`, whose presence is the ban: whoever removes it lifts it.

    Args:
        unchecked: whether questions with range_check=False are answered too.
        audited: of how many calls at least one is used (`Scheme.audited`); 1 where clients are trusted to deal.
        folder: where evidence is kept; a ban ends with this process where there is none.

    Raises:
        ArgumentError: that is no number of calls.
    """

    def __init__(self, unchecked: bool = False, audited: int = 1, folder: Path | None = None):
        if type(audited) is not int or not 1 <= audited <= MOST_AUDITED:
            raise ArgumentError(f"audited is a whole number of calls, 1 to {MOST_AUDITED}, got {audited!r}")
        self._unchecked, self._audited, self._folder = unchecked, audited, folder
        self._banned: set[str] = set()

    def check(self, who: str, scheme: Scheme, of: int) -> None:
        """Raise RefusedError for a question that is not taken.

        Args:
            who: this party. of: how many parties answer it.
        """
        if not (self._unchecked or scheme.range_check):
            raise RefusedError(f"'{who}' answers with range checks only: leave range_check=False out")
        if of > 1 and max(scheme.audited, self._audited) > 1:
            raise RefusedError(f"what Q deals for several answering parties is not audited, and '{who}' is asked alone")
        if scheme.audited < self._audited:
            raise RefusedError(
                f"'{who}' answers those only whose dealing it can look at: ask with Scheme(audited={self._audited}), "
                f"or --audited {self._audited}"
            )

    def check_key(self, client: str, key: str) -> None:
        """Raise RefusedError where evidence is kept of what this identity key has dealt."""
        if key and (key in self._banned or (self._folder is not None and self._file(key).exists())):
            raise RefusedError(
                f"'{client}' has dealt falsely before, as it has signed, and is not answered any more; the answering "
                f"party keeps the evidence"
            )

    def ban(self, client: str, key: str, model: str, evidence: Evidence) -> None:
        """Answer this key no more, and keep why."""
        self._banned.add(key)
        promise = evidence.promise
        said = {
            "client": client, "key": key, "model": model, "found_at": datetime.now(timezone.utc).isoformat(),
            "session": promise.session.hex(), "program": promise.program, "calls": list(promise.calls),
            "promised": [digest.hex() for digest in promise.digests],
            "streams": [named.hex() for named in promise.streams], "signature": promise.signature.hex(),
            "public_key": evidence.public.hex(), "call": evidence.call, "digest_of_its_streams": evidence.found.hex(),
            "stream_with_A": evidence.with_A.hex(), "stream_with_S": evidence.with_S.hex(),
        }  # fmt: skip
        kept = None if self._folder is None else self._file(key)
        if kept is not None:
            files.write(kept, json.dumps(said, indent=1).encode())
        write(log, "false dealing", logging.ERROR, client=client, key=key, model=model, call=evidence.call,
              evidence=str(kept or "not kept: no --store"))  # fmt: skip

    def _file(self, key: str) -> Path:
        folder = self._folder or Path()
        return folder / f"false-dealing-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
