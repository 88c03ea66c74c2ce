"""`sectorch keys`: identity keys, and a small certificate authority for trying it out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ..command import Parser, ended, print_json
from ..errors import ArgumentError
from .certificates import issue, make_authority, write_secret
from .identity import Pins, fingerprint_of, new_identity

Made = tuple[dict[str, str], str]
"""What was made, for JSON and in words."""


def keys(arguments: Sequence[str] | None = None) -> int:
    """`sectorch keys ACTION`."""
    p = Parser(
        "keys",
        "Identity keys, and a small certificate authority for trying it out.",
        (
            "sectorch keys init pki                            a CA in the folder pki",
            "sectorch keys issue pki alice                     a client's certificate and identity key",
            "sectorch keys issue pki server --host localhost   the server's certificate",
            "sectorch keys show pki/alice-identity.pem         the fingerprint, to tell the other party",
            "sectorch keys pin hospital-b SHA256:...           know the other party by this from now on",
        ),
    )
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Action)

    def named(line: str, run: Callable[[argparse.Namespace], Made], example: str) -> Parser:
        return actions.add_parser(example.split()[0], help=line, line=line, run=run, example=example)

    action = named("make a CA", _init, "init pki")
    action.add_argument("folder", type=Path, help="where the CA is made")
    action = named("issue a certificate, and a client's identity key", _issue, "issue pki alice")
    action.add_argument("folder", type=Path, help="the CA's folder")
    action.add_argument("name", help="the party's name")
    action.add_argument("--host", action="append", help="for a server: a host name or address; may be repeated")
    action.add_argument("--days", type=float, default=90, help="how long it is valid")
    action = named("make an identity key, for certificates of another CA", _identity, "identity alice-identity.pem")
    action.add_argument("path", type=Path, help="the file to make")
    action = named("print an identity key's fingerprint", _show, "show alice-identity.pem")
    action.add_argument("path", type=Path, help="an identity file")
    action = named("know another party by this identity key", _pin, "pin hospital-b SHA256:...")
    action.add_argument("name", help="the other party's name")
    action.add_argument("fingerprint", help="the fingerprint that it told you")
    action.add_argument("--pins", type=Path, help="file of known identity keys")
    return ended(p, arguments, _run)


class _Action(Parser):
    """The parser of one action; all of them take `--json`."""

    def __init__(self, prog: str, line: str, run: Callable[[argparse.Namespace], Made], example: str):
        super().__init__(prog.removeprefix("sectorch "), f"{line[0].upper()}{line[1:]}.", [f"sectorch keys {example}"])
        self.set_defaults(run=run)
        self.takes_json("what was made")


def _run(options: argparse.Namespace, _: Console) -> None:
    made, words = options.run(options)
    if options.json:
        print_json(made)
    else:
        print(words)


def _init(options: argparse.Namespace) -> Made:
    path = make_authority(options.folder)
    return {"ca": str(path)}, f"CA certificate: {path}"


def _issue(options: argparse.Namespace) -> Made:
    folder, name = options.folder, options.name
    if not options.days > 0:
        raise ArgumentError(f"--days is above 0, got {options.days}")
    hosts = tuple(options.host or ())
    credentials = issue(folder, name, server=bool(hosts), hosts=hosts, days=options.days)
    made = {"certificate": str(folder / f"{name}.pem"), "key": str(folder / f"{name}-key.pem")}
    words = f"{made['certificate']} and {made['key']}"
    if credentials.identity is not None:
        made |= {"identity": str(folder / f"{name}-identity.pem"), "fingerprint": fingerprint_of(credentials.identity)}
        words += f"\n{made['identity']}: {made['fingerprint']}"
    return made, words


def _identity(options: argparse.Namespace) -> Made:
    if options.path.exists():
        raise ArgumentError(f"{options.path} is there already; an identity is made once")
    pem = new_identity()
    write_secret(options.path, pem)
    made = {"identity": str(options.path), "fingerprint": fingerprint_of(pem)}
    return made, f"{made['identity']}: {made['fingerprint']}"


def _show(options: argparse.Namespace) -> Made:
    try:
        pem = options.path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {options.path}: {error.strerror}") from None
    return {"fingerprint": fingerprint_of(pem)}, fingerprint_of(pem)


def _pin(options: argparse.Namespace) -> Made:
    known = Pins(options.pins)
    known.pin(options.name, options.fingerprint)
    made = {"name": options.name, "fingerprint": options.fingerprint, "pins": str(known.path)}
    return made, f"{known.path} knows '{options.name}' by {options.fingerprint}"
