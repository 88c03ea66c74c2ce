"""What a party charges of queries and sessions, and what it does not charge twice.

A query is charged before this party does anything of it: one query, and a row for each row of the batch (one at least).
A step of a language model is a query with a row for each text, which is a row a token. Preparing is charged by its
bytes alone, as nothing is learned from it; what was prepared is charged when it is asked. Bytes are counted at the end.

Nothing is given back, however a query ends, with one exception. It may be asked again, under the same name and as
large, where this party had sent nothing of it, or where it ended because a process of this party or the server went
away before this party had done its part. Who asks cannot bring that about: a query that ended because its asker went
away, or gave it up, is paid for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import ArgumentError, QuotaError
from ..log import write
from ..messages import ModelQuery, Prepare
from ..wire.channel import Channel
from .file import Limits, read
from .usage import Charge, Usage

log = logging.getLogger("sectorch.limits")


class Quotas:
    """The limits of one party, and what is used of them.

    Args:
        limits: the file in which they stand.
        party, role: whose they are.

    Raises:
        ArgumentError: that is no file of limits. QuotaFileError: what is used cannot be kept.
    """

    def __init__(self, limits: str | Path, party: str, role: str):
        self.path = Path(limits)
        self.limits: Limits = read(limits)
        who = "the server" if role == "S" else f"'{party}'"
        self.usage = Usage(self.limits.usage, party, role, who)
        if self.usage.new:
            log.warning("%s was not there: what clients use is counted from now on", self.usage.path)

    def __repr__(self) -> str:
        return f"Quotas({self.path}, {self.usage.path})"

    def reload(self) -> None:
        """Read the limits anew; what is used stays where it is. Where they are wrong, those that were read hold."""
        try:
            limits = read(self.path)
        except ArgumentError as error:
            log.error("the limits stay as they were: %s", error)
            return
        log.info("the limits in %s hold now", self.path)
        self.limits = Limits(self.limits.usage, limits.default, limits.clients, limits.models)

    def session(self, client: str, key: str, models: Sequence[str]) -> None:
        """A client opens a session. Raises QuotaError, QuotaFileError."""
        self._charge(Charge(client, key, tuple(models), {"sessions": 1}), "session")

    @contextmanager
    def query(
        self, asked: ModelQuery, rows: int | None, client: str, key: str, models: Sequence[str],
        channels: Sequence[Channel], others: Sequence[Channel],
    ) -> Iterator[None]:  # fmt: skip
        """A query is served in the block.

        Args:
            asked: the request. rows: that it is for.
            channels: over which what it takes is counted. others: than the client's, whose end is not its doing.

        Raises:
            QuotaError: it is not served. QuotaFileError: it is not served, or may not count as served.
        """
        counts = {} if isinstance(asked, Prepare) else {"queries": 1, "rows": max(1, rows or 0)}
        charge = Charge(client, key, tuple(models), counts, asked.query if counts else "")
        everywhere = {*channels, *others}
        before, sent = _carried(channels), _sent(everywhere)
        self._charge(charge, asked.do)
        again = True
        try:
            yield
            again = False
        except BaseException:
            again = _sent(everywhere) == sent or any(channel.link.closed is not None for channel in others)
            raise
        finally:
            self.usage.end(charge, {"bytes": _carried(channels) - before}, again)

    def _charge(self, charge: Charge, what: str) -> None:
        try:
            counted = self.usage.charge(charge, self.limits)
        except QuotaError as error:
            write(log, "over its limit", client=charge.client, asked=what, why=str(error))
            raise
        if not counted:
            write(log, "asked again", client=charge.client, asked=what, models=",".join(charge.models))

    def close(self) -> None:
        """Let go of what is used."""
        self.usage.close()


def _carried(channels: Sequence[Channel]) -> int:
    return sum(sum(channel.carried) for channel in channels)


def _sent(channels: Iterable[Channel]) -> int:
    return sum(channel.carried[1] for channel in channels)
