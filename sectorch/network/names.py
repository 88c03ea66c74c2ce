"""The names that parties go by: one rule, at every place where a name comes in.

A name stands in certificates, requests, logs, paths, commands and lines of the pins file. So it is one word of ASCII:
two that look alike are the same, and none ends a line, names another folder or controls a terminal.
"""

from __future__ import annotations

import re
import zlib

from ..errors import ArgumentError, SectorchError

LONGEST = 64
"""Characters; the most that a certificate's common name holds."""
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.@-]{{0,{LONGEST - 1}}}")


def name_of(value: object, whose: str, kind: type[SectorchError] = ArgumentError) -> str:
    """`value`, if it is a name.

    Args:
        value: from a user, a file or another party; of any type.
        whose: what the name is, for the error's text.
        kind: of error where it is none.

    Raises:
        SectorchError: it is none; of the kind that was named.
    """
    if isinstance(value, str) and NAME.fullmatch(value):
        return value
    came = ascii(value[: LONGEST + 1]) if isinstance(value, str) else type(value).__name__
    raise kind(
        f"{whose} is 1 to {LONGEST} letters (ASCII), digits and _ . - @, and starts with a letter or digit; got {came}"
    )


def model_name(value: object, whose: str, kind: type[SectorchError] = ArgumentError) -> str:
    """`value`, if it is a model's name: the name of the party that answers, or PARTY/MODEL where that has several.

    What is before the slash is what the party's certificate proves (`party_of`).

    Raises:
        SectorchError: as of `name_of`.
    """
    party, slash, model = value.partition("/") if isinstance(value, str) else (value, "", "")
    name_of(party, whose, kind)
    return f"{party}/{name_of(model, f'{whose}, after the /,', kind)}" if slash else str(party)


def party_of(model: str) -> str:
    """Who answers with a model of that name."""
    return model.partition("/")[0]


def readable(text: str, longest: int = 600) -> str:
    """Words of another party's, fit for a terminal and a line of a log: what is not printed becomes a space."""
    return "".join(character if character.isprintable() else " " for character in text[:longest])


def worker_of(name: str, workers: int) -> int:
    """Which of a server's worker processes a client's is; everybody works it out from the name."""
    return zlib.crc32(name.encode()) % max(1, workers)
