"""Which questions an answering party takes, and whose it takes no more."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path

from ... import files
from ...errors import ArgumentError, FalseDealingError, RefusedError
from ...mpc.star.audit import Evidence
from ...ring.scheme import MOST_AUDITED, Scheme
from ..log import write
from ..wire.turns import Turns

log = logging.getLogger("sectorch.answer")
MANY = 128
"""Questions of one client that may wait here: the server has them wait before."""


class Admission:
    """What an answering party asks of a question, and the identity keys of those who dealt falsely.

    Evidence is a file, `false-dealing-FINGERPRINT.json`, whose presence is the ban: whoever removes it lifts it. Where
    it cannot be kept, the ban ends with this process.

    Args:
        unchecked: whether questions with range_check=False are answered too.
        audited: of how many calls at least one is used (`Scheme.audited`); 1 where clients are trusted to deal.
        verified: whether clients have to prove what they deal (`Scheme.verified`); who asks so is never audited.
        folder: where evidence is kept, if it is.

    Raises:
        ArgumentError: that is no number of calls.
    """

    def __init__(
        self, unchecked: bool = False, audited: int = 1, folder: Path | None = None, verified: bool = False
    ):  # fmt: skip
        if type(audited) is not int or not 1 <= audited <= MOST_AUDITED:
            raise ArgumentError(f"audited is a whole number of calls, 1 to {MOST_AUDITED}, got {audited!r}")
        if type(verified) is not bool or (verified and audited != 1):
            raise ArgumentError(
                "verified is True or False, and covers what audited=n does but for operations without a proof: name "
                "one of the two"
            )
        self._unchecked, self._audited, self._folder, self._verified = unchecked, audited, folder, verified
        self._banned: set[str] = set()
        self._guard, self._asking = threading.Lock(), defaultdict[str, Turns](lambda: Turns(1, MANY, MANY))

    def check(self, who: str, scheme: Scheme, of: int) -> None:
        """Raise RefusedError for a question that is not taken.

        Args:
            who: this party. of: how many parties answer it.
        """
        if not (self._unchecked or scheme.range_check):
            raise RefusedError(f"'{who}' answers with range checks only: leave range_check=False out")
        if scheme.verified:
            return
        if self._verified:
            raise RefusedError(
                f"'{who}' answers those only who prove what they deal: ask with Scheme(verified=True), or --verified"
            )
        if of > 1 and max(scheme.audited, self._audited) > 1:
            raise RefusedError(f"what Q deals for several answering parties is not audited, and '{who}' is asked alone")
        if scheme.audited < self._audited:
            raise RefusedError(
                f"'{who}' answers those only whose dealing it can look at: ask with Scheme(audited={self._audited}), "
                f"or --audited {self._audited}"
            )

    @contextmanager
    def asking(self, client: str, key: str, model: str, tick: Callable[[], None]) -> Iterator[None]:
        """A question of this identity key's, and no other of its own beside it where dealing is to be audited: who
        cheats in many sessions at once is found out in one, and banned, before the next begins.

        Args:
            tick: called now and then while it waits.

        Raises:
            RefusedError: evidence is kept of what this key has dealt.
            FalseDealingError: as from the question; evidence is kept, and the key banned.
        """
        with self._guard:
            turns = self._asking[key]
        with turns.turn(key, tick) if self._audited > 1 else nullcontext():
            self.check_key(client, key)
            try:
                yield
            except FalseDealingError as error:
                if error.evidence is not None:
                    self._ban(client, key, model, error.evidence)
                raise

    def check_key(self, client: str, key: str) -> None:
        """Raise RefusedError where evidence is kept of what this identity key has dealt."""
        if key in self._banned or (self._folder is not None and self._file(key).exists()):
            raise RefusedError(
                f"'{client}' has dealt falsely before, as it has signed, and is not answered any more; the answering "
                f"party keeps the evidence"
            )

    def ended(self, error: Exception, facts: dict[str, str]) -> None:
        """A session has ended with this error: note a false dealing of which there is no evidence, and so no ban.

        S may find it out when this party has done its part of the call already.
        """
        if isinstance(error, FalseDealingError) and error.evidence is None:
            write(log, "false dealing", logging.ERROR, **facts, evidence="none that it has signed: no ban")

    def _ban(self, client: str, key: str, model: str, evidence: Evidence) -> None:
        """Answer this key no more, and keep why."""
        promise = evidence.promise
        said = {
            "client": client, "key": key, "model": model, "found_at": datetime.now(timezone.utc).isoformat(),
            "session": promise.session.hex(), "program": promise.program, "calls": list(promise.calls),
            "promised": [digest.hex() for digest in promise.digests],
            "streams": [named.hex() for named in promise.streams], "signature": promise.signature.hex(),
            "public_key": evidence.public.hex(), "call": evidence.call, "digest_of_its_streams": evidence.found.hex(),
            "stream_with_A": evidence.with_A.hex(), "stream_with_S": evidence.with_S.hex(),
        }  # fmt: skip
        kept = self._kept(key, json.dumps(said, indent=1).encode())
        facts = {"client": client, "key": key, "model": model, "call": evidence.call}
        write(log, "false dealing", logging.ERROR, **facts, evidence=kept)

    def _kept(self, key: str, said: bytes) -> str:
        """Where evidence is kept, or why not."""
        if self._folder is not None:
            try:
                files.write(self._file(key), said, 0o600)
                return str(self._file(key))
            except OSError as error:
                why = f"not kept: {error.strerror}"
        else:
            why = "not kept: no --store"
        self._banned.add(key)
        return why

    def _file(self, key: str) -> Path:
        folder = self._folder or Path()
        return folder / f"false-dealing-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
