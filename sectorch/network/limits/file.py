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

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..names import model_name, name_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # the same, before Python 3.11

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
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read the limits {path}: {error.strerror}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is not TOML of limits: it is nested too deeply") from None
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        raise ArgumentError(f"{path} is not TOML: {str(error).splitlines()[0][:200]}") from None
    try:
        return _parsed(said, path)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _parsed(said: Mapping[str, Any], path: Path) -> Limits:
    _only(said, ("usage", "default", "clients", "models"), "the file")
    usage = said.get("usage", f"{path.stem}.usage")
    if not isinstance(usage, str) or not usage or "\0" in usage:
        raise ArgumentError(f'usage = "FILE" names the file in which what is used is kept, got {_short(usage)}')
    if (path.parent / usage).resolve() == path.resolve():
        raise ArgumentError("usage names this file itself; name another")
    default = _table(said, "default", "[default]")
    clients = {
        name_of(name, "the name of a table in [clients]"): _limit({**default, **_table(own, name, f"[clients.{name}]")})
        for own in [_table(said, "clients", "[clients]")]
        for name in own
    }
    models = {}
    for name, entries in _table(said, "models", "[models]").items():
        where = f"[models.{model_name(name, 'the name of a table in [models]')}]"
        if not isinstance(entries, Mapping):
            raise ArgumentError(f"{where} is a table")
        _only(entries, tuple(IN_ALL.values()), where)
        models[name] = _numbers(entries, IN_ALL, where)
    return Limits(path.parent / usage, _limit(default), clients, models)


def _limit(entries: Mapping[str, Any]) -> Limit:
    where = "[default] or a client's table"
    _only(entries, (*DAILY.values(), *IN_ALL.values()), where)
    daily = _numbers(entries, DAILY, where)
    if "bytes" in daily:
        daily["bytes"] *= MEGABYTE
    return Limit(daily, _numbers(entries, IN_ALL, where))


def _numbers(entries: Mapping[str, Any], known: Mapping[str, str], where: str) -> dict[str, int]:
    found = {}
    for what, name in known.items():
        value = entries.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= LARGEST // MEGABYTE:
            raise ArgumentError(f"{name} in {where} is a whole number of at least 0, got {_short(value)}")
        found[what] = value
    return found


def _table(said: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = said.get(name, {})
    if not isinstance(found, Mapping):
        raise ArgumentError(f"{where} is a table, got {_short(found)}")
    return found


def _only(said: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    strange = sorted(set(said) - set(known))
    if strange:
        raise ArgumentError(f"{where} has no '{_short(strange[0])[1:-1]}'; it has {', '.join(known)}")


def _short(value: object) -> str:
    return ascii(value)[:60]
