"""`sectorch keys`: identity keys, requests for certificates, and a small certificate authority for trying it out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ... import files
from ...cli.command import Parser, command_status, number, print_json
from ...errors import ArgumentError
from ..names import NAME
from .authority import Made, issue, make_authority, make_request, try_out
from .identity import Pins, fingerprint_of, new_identity

LONGEST_DAYS = 36500
_DAYS = number(float, lambda days: 0 < days <= LONGEST_DAYS, f"above 0 and at most {LONGEST_DAYS}")


def keys(arguments: Sequence[str] | None = None) -> int:
    """`sectorch keys ACTION`."""
    p = Parser(
        "keys",
        "Identity keys, requests for certificates, and a small certificate authority for trying it out.",
        (
            "sectorch keys try trial                               all of the following for a server and two hospitals",
            "sectorch keys init pki                                a CA in the folder pki",
            "sectorch keys request alice                           at alice: her keys, and a request for the CA",
            "sectorch keys issue pki alice.csr                     at the CA: a client's certificate",
            "sectorch keys issue pki server.csr --host localhost   at the CA: the server's certificate",
            "sectorch keys show alice-identity.pem                 the fingerprint, to tell the other party",
            "sectorch keys pin hospital-b SHA256:...               know the other party by this from now on",
        ),
    )
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Action)

    def named(line: str, run: Callable[[argparse.Namespace], Made], example: str) -> Parser:
        return actions.add_parser(example.split()[0], help=line, line=line, run=run, example=example)

    action = named("a CA and three parties' folders on one machine, to try it out", try_out, "try trial")
    action.add_argument("folder", type=Path, help="the folder to make, with one for each party in it")
    action.add_argument("--server", default="localhost:7100", help="host:port at which the server will be reached")
    action.add_argument("--asking", default="hospital-a", help="name of the party that asks")
    action.add_argument("--answering", default="hospital-b", help="name of the party that has a model")
    action = named("make a CA", _init, "init pki")
    action.add_argument("folder", type=Path, help="where the CA is made")
    action = named("make a party's keys, and a request for its certificate", _request, "request alice")
    action.add_argument("name", help="the party's name")
    action.add_argument("--folder", type=Path, default=Path(), help="where the files are made (default here)")
    action.add_argument("--server", action="store_true", help="for a server, which needs no identity key")
    action = named("sign a request: issue a certificate", _issue, "issue pki alice.csr")
    action.add_argument("folder", type=Path, help="the CA's folder")
    action.add_argument("request", help="the request, a file that `sectorch keys request` made at the party")
    action.add_argument("--host", action="append", help="for a server: a host name or address; may be repeated")
    action.add_argument("--days", type=_DAYS, default=90, help="how long it is valid")
    action = named("make an identity key alone", _identity, "identity alice-identity.pem")
    action.add_argument("path", type=Path, help="the file to make")
    action = named("print an identity key's fingerprint", _show, "show alice-identity.pem")
    action.add_argument("path", type=Path, help="an identity file")
    action = named("know another party by this identity key", _pin, "pin hospital-b SHA256:...")
    action.add_argument("name", help="the other party's name")
    action.add_argument("fingerprint", help="the fingerprint that it told you")
    action.add_argument("--pins", type=Path, help="file of known identity keys")
    return command_status(p, arguments, _run)


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


def _request(options: argparse.Namespace) -> Made:
    path = make_request(options.folder, options.name, server=options.server)
    made = {"request": str(path), "key": str(path.with_name(f"{options.name}-key.pem"))}
    words = f"{made['request']}: give it to the CA\n{made['key']}: keep it here"
    if not options.server:
        identity = path.with_name(f"{options.name}-identity.pem")
        made |= {"identity": str(identity), "fingerprint": fingerprint_of(identity.read_bytes())}
        words += f"\n{made['identity']}: {made['fingerprint']}"
    return made, words


def _issue(options: argparse.Namespace) -> Made:
    folder, request = options.folder, Path(options.request)
    if not request.exists() and request.suffix != ".csr":
        name = options.request if NAME.fullmatch(options.request) else "NAME"
        server, host = (" --server", f" --host {options.host[0]}") if options.host else ("", "")
        raise ArgumentError(
            f"keys issue makes no keys any more, it signs a request: at '{name}' run `sectorch keys request "
            f"{name}{server}`, then here `sectorch keys issue {folder} {name}.csr{host}`"
        )
    hosts = tuple(options.host or ())
    path = issue(folder, _content(request), hosts=hosts, days=options.days)
    made = {"certificate": str(path), "ca": str(folder / "ca.pem")}
    kind = f"a server's certificate, for {', '.join(hosts)}" if hosts else "a client's certificate"
    return made, f"{path}: {kind}; give it back with {made['ca']}"


def _identity(options: argparse.Namespace) -> Made:
    if options.path.exists():
        raise ArgumentError(f"{options.path} is there already; an identity is made once")
    pem = new_identity()
    files.write(options.path, pem, 0o600)
    made = {"identity": str(options.path), "fingerprint": fingerprint_of(pem)}
    return made, f"{made['identity']}: {made['fingerprint']}"


def _show(options: argparse.Namespace) -> Made:
    print_ = fingerprint_of(_content(options.path), str(options.path))
    return {"fingerprint": print_}, print_


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None


def _pin(options: argparse.Namespace) -> Made:
    known = Pins(options.pins)
    known.pin(options.name, options.fingerprint)
    made = {"name": options.name, "fingerprint": options.fingerprint, "pins": str(known.path)}
    return made, f"{known.path} knows '{options.name}' by {options.fingerprint}"
