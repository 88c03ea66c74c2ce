"""Settings that are declared once: the dataclass's field is the check, the command line's option, and the line in docs.

@dataclass(frozen=True)
class Settings(Options):
    queries: int | None = option(None, "B, of each client and round", least=1)
    secure: bool = option(True, "use the protocol", flag="plain", off="the same in the clear; protects nothing")
    local: Training = option(Training(), "local training")      # --local-epochs, --local-lr, ...
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from ..cli.command import OldOption, number
from ..deprecation import deprecate
from .errors import FederationError

S = TypeVar("S", bound="Options")


@dataclass(frozen=True)
class Option:
    """What is known of a field besides its type and default. See `option`."""

    about: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    among: Sequence[str] | None = None
    flag: str | None = None
    off: str | None = None
    short: str | None = None
    several: bool = False
    hidden: bool = False
    own: str | None = None

    @property
    def limits(self) -> str:
        """The range in words; empty where there is none."""
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {limit:g}" for word, limit in words if limit is not None)

    def allows(self, value: float) -> bool:
        """NaN lies in no range."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def option(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    among: Sequence[str] | None = None,
    flag: str | None = None,
    off: str | None = None,
    short: str | None = None,
    several: bool = False,
    hidden: bool = False,
    own: str | None = None,
) -> Any:
    """A field of `Options`.

    Args:
        default: the field's; None where something else decides, and `about` says what.
        about: what it is, with its unit, for help and docs.
        least, above, most, below: the range of a number, or of each of a tuple.
        among: the words that may be chosen.
        flag: its name on the command line; the field's own unless named.
        off: the help of a flag that switches off what is on by default.
        short: its name of one letter.
        several: whether several values may stand on the command line, of which each makes a run.
        hidden: whether none can stand there.
        own: that among parties apart each says it for itself, and never another for it: "value", or "folder" for a
            path.
    """
    made = Option(about, least, above, most, below, among, flag, off, short, several, hidden, own)
    return field(default=default, metadata={"option": made})


class Options:
    """The base of settings. Subclasses are frozen dataclasses, whose docstring is completed by their fields.

    Raises:
        FederationError: when made with a value that a field does not allow.
    """

    renamed_fields: ClassVar[dict[str, str]] = {}
    """Old names of fields, for this release."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        own = [(n, v.metadata["option"]) for n, v in vars(cls).items() if isinstance(v, dataclasses.Field)]
        if own:
            cls.__doc__ = "\n".join([cls.__doc__ or "", "", "Args:", *(f"    {n}: {o.about}." for n, o in own)])

    def __post_init__(self) -> None:
        for name, kind, several, o in declared(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            for one in value if several else (value,):
                _check(name, one, kind, o)

    def but(self: S, **changes: Any) -> S:
        """The same settings with others in some places."""
        for old, new in self.renamed_fields.items():
            if old in changes:
                deprecate(f"but({old}=)", f"but({new}=)")
                changes[new] = changes.pop(old)
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]  subclasses are dataclasses

    def as_dict(self) -> dict[str, Any]:
        """All settings, for JSON and for recognising a run."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]  subclasses are dataclasses


def _check(name: str, value: Any, kind: type, o: Option) -> None:
    if issubclass(kind, Options):
        wanted: Any = kind
    else:
        wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise FederationError(f"{name} must be of type {kind.__name__}, got {value!r}")
    if o.among is not None and value not in o.among:
        raise FederationError(f"there is no {name} {value!r}; there are {', '.join(o.among)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not o.allows(value):
        raise FederationError(f"{name} must be {o.limits}, got {value}")


def declared(cls: type[Options]) -> Iterator[tuple[str, type, bool, Option]]:
    """Fields in order: name, type of one value, whether it is a tuple of them, and what is known of it."""
    hints = typing.get_type_hints(cls)
    for one in fields(cls):  # pyright: ignore[reportArgumentType]  subclasses are dataclasses
        if (o := one.metadata.get("option")) is not None:
            kind, several = _kind(hints[one.name])
            yield one.name, kind, several, o


def _kind(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def add_options(parser: argparse.ArgumentParser, cls: type[Options], prefix: str = "", base: Any = None) -> None:
    """Options of a command line, one for each field that can be written there and that another class did not bring.

    Nothing is a default there: `chosen` gives what was named. Help names the dataclass's defaults.
    """
    known = {action.dest for action in parser._actions}
    for name, kind, several, o in declared(cls):
        default = getattr(base, name) if base is not None else _default(cls, name)
        if o.hidden:
            continue
        if issubclass(kind, Options):
            add_options(parser, kind, f"{prefix}{(o.flag or name).replace('_', '-')}-", default)
            continue
        dest = f"{prefix}{name}".replace("-", "_")
        if dest in known:
            continue
        flags = [f"--{prefix}{(o.flag or name).replace('_', '-')}", *([f"-{o.short}"] if o.short else [])]
        common: dict[str, Any] = dict(dest=dest, default=argparse.SUPPRESS)
        if kind is bool:
            on = not default
            parser.add_argument(*flags, action="store_const", const=on, help=o.about if on else o.off, **common)
            continue
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        about = o.about if shown in (None, "") else f"{o.about} (default {shown})"
        if o.several:
            about += "; several make a run of each"
        many: dict[str, Any] = dict(nargs="+") if several or o.several else {}
        metavar = (
            None if o.among else kind.__name__.upper().replace("STR", "NAME").replace("FLOAT", "X").replace("INT", "N")
        )
        read = number(kind, o.allows, o.limits) if o.limits else kind
        parser.add_argument(
            *flags, type=read, choices=o.among, metavar=metavar, help=about.replace("%", "%%"), **many, **common
        )
        for old in (old for old, new in cls.renamed_fields.items() if new == name):
            flag = f"--{prefix}{old.replace('_', '-')}"
            known_by: dict[str, Any] = dict(type=read, choices=o.among, help=argparse.SUPPRESS, **many, **common)
            parser.add_argument(flag, action=OldOption, const=flags[0], **known_by)


def chosen(options: argparse.Namespace, base: S, prefix: str = "") -> S:
    """`base`, with what was named on the command line in its place; of several values the first."""
    changes: dict[str, Any] = {}
    for name, kind, several, o in declared(type(base)):
        if issubclass(kind, Options):
            inner = getattr(base, name)
            if inner is not None:
                changes[name] = chosen(options, inner, f"{prefix}{(o.flag or name).replace('-', '_')}_")
            continue
        dest = f"{prefix}{name}".replace("-", "_")
        if hasattr(options, dest):
            value = getattr(options, dest)
            changes[name] = tuple(value) if several else value[0] if o.several else value
    return base.but(**changes)


def sweeps(options: argparse.Namespace, *classes: type[Options]) -> dict[str, list]:
    """The values of each option for which several were given."""
    names = [name for cls in classes for name, _, several, o in declared(cls) if o.several and not several]
    return {n: getattr(options, n) for n in dict.fromkeys(names) if len(getattr(options, n, ())) > 1}


def owned(*classes: type[Options]) -> dict[str, Option]:
    """What each party says for itself where parties are apart: by the field's name."""
    return {name: o for cls in classes for name, _, _, o in declared(cls) if o.own is not None}


def described(cls: type[Options], prefix: str = "") -> list[tuple[str, str, str]]:
    """Rows for docs: the field, its default, and what it is with its range."""
    rows = []
    for name, _, _, o in declared(cls):
        default = _default(cls, name)
        extra = [", ".join(o.among)] if o.among else []
        extra += [o.limits] if o.limits else []
        text = o.about + (f" ({'; '.join(extra)})" if extra else "")
        rows.append((prefix + name, "" if default is None else str(default), text))
    return rows


def _default(cls: type[Options], name: str) -> Any:
    return next(f.default for f in fields(cls) if f.name == name)  # pyright: ignore[reportArgumentType]  as above
