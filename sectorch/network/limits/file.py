"""The file of a party's limits.

    usage = "limits.usage"      # where what is used is kept; beside this file, with this ending, unless named

    [default]                   # of each client
    queries_a_day = 1000
    rows_a_day = 20000
    sessions_a_day = 500
    megabytes_a_day = 20000
    queries_in_all = 50000      # of each model, for good
    rows_in_all = 1000000

    [clients.hospital-a]        # what differs for one
    rows_a_day = 100000

    [models.hospital-b]         # of all clients together
    rows_in_all = 5000000

What is not named has no limit. A day is the last 24 hours, whenever one looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import ArgumentError
from ..names import model_name, name_of
from ..tables import Entries, in_file, read_table, read_toml

DAILY = {"queries": "queries_a_day", "rows": "rows_a_day", "sessions": "sessions_a_day", "bytes": "megabytes_a_day"}
"""What is counted over a day, and its entry."""
IN_ALL = {"queries": "queries_in_all", "rows": "rows_in_all"}
"""What is counted for good, and its entry."""
MEGABYTE = 1_000_000
LARGEST = 1 << 60


@dataclass(frozen=True)
class Limit:
    """Of one client: the most of each thing, by what is counted; what is missing has no limit."""

    daily: Mapping[str, int] = field(default_factory=dict)
    in_all: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What a file of limits says.

    Args:
        usage: the file in which what is used is kept.
        default, clients: of each client, and of those that differ.
        models: of all clients together, by model.
    """

    usage: Path
    default: Limit = Limit()
    clients: Mapping[str, Limit] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, client: str) -> Limit:
        """What this client may ask."""
        return self.clients.get(client, self.default)


def read(path: str | Path) -> Limits:
    """The limits in a file.

    Raises:
        ArgumentError: it is not there, or not one; in one line, with what is wrong in it.
    """
    path = Path(path)
    try:
        return _parsed(read_toml(path, "the limits", "limits"), path)
    except ArgumentError as error:
        raise in_file(error, path) from None


_Most = Annotated[
    Annotated[int, Meta(ge=0, le=LARGEST // MEGABYTE)] | None, Meta(description="a whole number of at least 0")
]


class _Model(msgspec.Struct, frozen=True):
    queries_in_all: _Most = None
    rows_in_all: _Most = None


class _Client(msgspec.Struct, frozen=True):
    queries_a_day: _Most = None
    rows_a_day: _Most = None
    sessions_a_day: _Most = None
    megabytes_a_day: _Most = None
    queries_in_all: _Most = None
    rows_in_all: _Most = None


class _File(msgspec.Struct, frozen=True):
    usage: Annotated[str, Meta(pattern=r"\A[^\0]+\Z", description="the file in which what is used is kept")] = ""
    default: Entries = {}
    clients: Entries = {}
    models: Entries = {}


def _parsed(said: object, path: Path) -> Limits:
    file = read_table(_File, said, "the file")
    usage = path.parent / (file.usage or f"{path.stem}.usage")
    if usage.resolve() == path.resolve():
        raise ArgumentError("usage names this file itself; name another")
    default = read_table(_Client, file.default, "[default]")
    clients = {}
    for name, table in file.clients.items():
        own = read_table(_Client, table, f"[clients.{name_of(name, 'the name of a table in [clients]')}]")
        clients[name] = _limit(own, default)
    models = {
        name: _numbers(
            read_table(_Model, table, f"[models.{model_name(name, 'the name of a table in [models]')}]"), IN_ALL
        )
        for name, table in file.models.items()
    }
    return Limits(usage, _limit(default), clients, models)


def _limit(own: _Client, default: _Client | None = None) -> Limit:
    """A client's limits, and where it has none those of each."""
    daily, in_all = ({**_numbers(default, known), **_numbers(own, known)} for known in (DAILY, IN_ALL))
    if "bytes" in daily:
        daily["bytes"] *= MEGABYTE
    return Limit(daily, in_all)


def _numbers(entries: _Client | _Model | None, known: Mapping[str, str]) -> dict[str, int]:
    """What has a limit, by what is counted."""
    found = {what: getattr(entries, name, None) for what, name in known.items()}
    return {what: most for what, most in found.items() if most is not None}
