"""Names of parties and models, and the rule that they are checked by wherever one comes in.

Names stand in certificates, requests, logs, paths, commands and lines of the pins file. So a name is one word of ASCII:
names that look alike are the same, and none ends a line, names another folder or controls a terminal.
"""

from __future__ import annotations

import re
import zlib

from ..errors import ArgumentError, SectorchError

LONGEST = 64
"""Characters of a name; a certificate's common name holds as many."""
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.@-]{{0,{LONGEST - 1}}}")


def name_of(value: object, whose: str, kind: type[SectorchError] = ArgumentError) -> str:
    """The value, if it is a name.

    Args:
        value: of any type, from a user, a file or another party.
        whose: what the name is, for the error text.
        kind: the type of the error.

    Raises:
        SectorchError: it is no name; of type `kind`.
    """
    if isinstance(value, str) and NAME.fullmatch(value):
        return value
    came = ascii(value[: LONGEST + 1]) if isinstance(value, str) else type(value).__name__
    raise kind(
        f"{whose} is 1 to {LONGEST} letters (ASCII), digits and _ . - @, and starts with a letter or digit; got {came}"
    )


def model_name(value: object, whose: str, kind: type[SectorchError] = ArgumentError) -> str:
    """The value, if it is a model's name: PARTY, or PARTY/MODEL for a party with several models.

    The part before the slash is the name that the party's certificate proves (`party_of`).

    Raises:
        SectorchError: as of `name_of`.
    """
    party, slash, model = value.partition("/") if isinstance(value, str) else (value, "", "")
    name_of(party, whose, kind)
    return f"{party}/{name_of(model, f'{whose}, after the /,', kind)}" if slash else str(party)


def account_of(name: str) -> str:
    """The name under which a party is counted: names that differ in case alone are one party's to a reader."""
    return name.lower()


def party_of(model: str) -> str:
    """The party that answers with a model of that name."""
    return model.partition("/")[0]


def readable(text: str, longest: int = 600) -> str:
    """Text of another party for a terminal or a line of a log: characters that are not printable become spaces."""
    return "".join(character if character.isprintable() else " " for character in text[:longest])


def worker_of(name: str, workers: int) -> int:
    """The number of the server's worker process that serves a client; all parties compute it from `account_of`."""
    return zlib.crc32(account_of(name).encode()) % max(1, workers)
