"""Files of TOML that a party or a federation has: what a table may hold is a declared type, which `read_table` checks.

An entry's `Meta(description=...)` says in words what is expected, for the error where something else came.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ..errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # the same, before Python 3.11

T = TypeVar("T", bound=msgspec.Struct)
Entries = Annotated[dict[str, Any], Meta(description="a table")]
"""Of tables under names, each of which is read by itself, so that an error has its name."""
Flag = Annotated[bool, Meta(description="true or false")]
Names = Annotated[list[str], Meta(min_length=1, description="a list of names of parties")]


def read_toml(path: Path, what: str, of: str) -> dict[str, Any]:
    """What a file of TOML says.

    Args:
        what: the file, in words, and `of` what it is, for errors.

    Raises:
        ArgumentError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {what} {path}: {error.strerror}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is not TOML of {of}: it is nested too deeply") from None
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        twice = "; a party's name, and each key, stands there once" if "Cannot" in str(error) else ""
        raise ArgumentError(f"{path} is not TOML: {str(error).splitlines()[0][:200]}{twice}") from None


def read_table(kind: type[T], said: object, where: str) -> T:
    """A table as a value of its declared type.

    Args:
        where: the table, as the file's reader knows it.

    Raises:
        ArgumentError: it is no table, or an entry is unknown, missing or of another kind; names it, what came, and what
            is expected.
    """
    if not isinstance(said, Mapping):
        raise ArgumentError(f"{where} is a table, got {short(said)}")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    strange = sorted(set(said) - set(fields))
    if strange:
        raise ArgumentError(f"{where} has no {short(strange[0])}; it has {', '.join(fields)}")
    found = {}
    for name, field in fields.items():
        if name in said or field.required:
            try:
                found[field.name] = msgspec.convert(said[name], field.type)
            except (KeyError, msgspec.ValidationError, UnicodeError, RecursionError):
                came = short(said.get(name))
                raise ArgumentError(f"{name} in {where} is {_expected(field.type)}, got {came}") from None
    return kind(**found)


def _expected(kind: Any) -> str:
    return next(meta.description for meta in kind.__metadata__ if meta.description)


def in_file(error: ArgumentError, path: Path) -> ArgumentError:
    """The error with the file's name, once."""
    return error if str(path) in str(error) else ArgumentError(f"{path}: {error}")


def short(value: object) -> str:
    """What came, for a message."""
    return ascii(value)[:60] if value is not None else "nothing"
