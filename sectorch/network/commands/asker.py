"""Who asks, and where: by certificate, key and pins, or by a federation file, which says all of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...cli.command import Parser
from ...errors import ArgumentError
from ..federation.file import read
from ..federation.listed import Listed
from ..federation.own import credentials, read_own
from ..identity.certificates import Credentials
from ..identity.identity import Pins
from ..identity.ready import ready
from .options import add_client, add_pins, known_pins


def add_asker(p: Parser) -> None:
    """Options of who asks."""
    add_client(p, required=False)
    p.add_argument("--federation", type=Path, metavar="FILE", help="all of these from a federation file, with --as")
    p.add_argument("--as", dest="party", metavar="NAME", help="which of its parties asks")
    p.add_argument("--folder", type=Path, help="where that party's certificate and keys are; the file's folder")
    add_pins(p)


def asker(options: argparse.Namespace, model: str = "") -> tuple[str, Credentials, Pins]:
    """The server's address, what this party shows, and whom it knows; nothing was sent.

    Args:
        model: that is asked: `PARTY` or `PARTY/NAME`.

    Raises:
        ArgumentError: options that do not go together, or a file that is not right.
        IdentityError: as of `ready` and `federation.own.credentials`.
    """
    pairs = (options.cert, options.key, options.ca)
    if options.federation is None:
        if None in pairs or options.party is not None:
            raise ArgumentError("say who asks: --cert, --key and --ca, or --federation FILE and --as NAME")
        return options.server, ready(*pairs, options.identity), known_pins(options)
    if options.party is None or any(pairs) or options.pins or options.trust_on_first_use:
        raise ArgumentError("--federation FILE and --as NAME say who asks and whom it knows: leave the other out")
    federated = read(options.federation)
    own = credentials(federated, options.party, read_own(options.federation, options.party, options.folder).folder)
    other = federated.member(model.partition("/")[0]).name if model else options.party
    at = other if model and other in federated.servers else federated.home(other)
    known = {member.name: member.identity for member in federated.members if member.identity}
    return federated.servers[at], own, Listed(known, str(options.federation))
