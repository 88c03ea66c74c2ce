"""`sectorch federation`: write the file that says who the parties are, check it, and set one up to try it out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ... import files
from ...cli.command import Parser, ended, print_json
from ...errors import ArgumentError
from ..identity.authority import enrol, make_authority
from ..identity.identity import fingerprint_of, new_identity
from .accepting import accept, add_accept
from .file import Federated, parse, read, text
from .own import credentials, read_own, server_credentials
from .policy import Policy

Made = tuple[dict, str]
"""What was made or found, for JSON and in words."""


def federation(arguments: Sequence[str] | None = None) -> int:
    """`sectorch federation ACTION`."""
    p = Parser(
        "federation",
        "Write the file that says who the parties of a federation are, check it, or set one up to try it out.",
        (
            "sectorch federation init sum.toml --server cloud.example:7100 --party north H1 SHA256:...   each party",
            "sectorch federation check sum.toml --as north      whether this party's own files fit",
            "sectorch federation accept sum.toml sum.py:program --as north --input H1=a.npy   north takes part",
            "sectorch federation try here north=H1 south=H2     a CA, keys and a file, all in one folder",
        ),
    )
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Action)

    def named(line: str, run: Callable[[argparse.Namespace], Made], example: str) -> Parser:
        return actions.add_parser(example.split()[0], help=line, line=line, run=run, example=example)

    action = named("write a federation file", _init, "init sum.toml --server cloud.example:7100 --party ...")
    action.add_argument("file", type=Path, help="the file to write")
    action.add_argument("--server", required=True, help="host:port where all parties meet")
    action.add_argument(
        "--party", nargs=3, action="append", default=[], metavar=("NAME", "ROLE", "FINGERPRINT"),
        help="a party, its role and what `sectorch keys show` printed there; once for each",
    )  # fmt: skip
    action = named("check a federation file, and a party's own files", _check, "check sum.toml --as north")
    action.add_argument("file", type=Path, help="the federation file")
    action.add_argument("--as", dest="name", help="the party whose files are checked too")
    action.add_argument("--folder", type=Path, help="where they are; that of the file")
    action = named(
        "show a program, paper or model, and write that a party accepts it",
        accept,
        "accept sum.toml sum.py:program ...",
    )
    add_accept(action)
    action = named("a CA, keys and a file in one folder, to try it out", _try, "try here north=H1 south=H2")
    action.add_argument("folder", type=Path, help="the folder to make")
    action.add_argument("parties", nargs="+", metavar="NAME=ROLE", help="the parties and their roles")
    action.add_argument("--server", default="localhost:7100", help="host:port where all parties meet")
    p.rest = "arguments"
    return ended(p, arguments, _run)


class _Action(Parser):
    """The parser of one action; all of them take `--json`."""

    def __init__(self, prog: str, line: str, run: Callable[[argparse.Namespace], Made], example: str):
        described = f"{line[0].upper()}{line[1:]}."
        super().__init__(prog.removeprefix("sectorch "), described, [f"sectorch federation {example}"])
        self.set_defaults(run=run)
        self.takes_json("what was made or found")


def _run(options: argparse.Namespace, _: Console) -> None:
    if options.arguments and options.run is not accept:
        raise ArgumentError("what stands after -- are a paper's options, for `sectorch federation accept`")
    made, words = options.run(options)
    if options.json:
        print_json(made)
    else:
        print(words)


def _described(federated: Federated) -> dict:
    members = {
        m.name: {"role": m.role, "identity": m.identity, **({"address": m.address} if m.address else {})}
        for m in federated.members
    }
    return {"name": federated.name, "servers": federated.servers, "parties": members, "digest": federated.digest}


def _init(options: argparse.Namespace) -> Made:
    if options.file.exists():
        raise ArgumentError(f"{options.file} is there already; name another, or remove it")
    parties: dict[str, dict[str, str]] = {}
    for name, role, identity in options.party:
        if name in parties:
            raise ArgumentError(f"--party names '{name}' twice")
        parties[name] = {"role": role, "identity": identity}
    said = {"federation": {"name": options.file.stem, "server": options.server}, "parties": parties}
    federated = parse(said)
    _write(options.file, federated)
    words = (
        f"{options.file}: {len(parties)} parties, digest {federated.digest[:16]}\n"
        f"Give it to all of them as it is. Each checks its own entry (`sectorch federation check {options.file} --as "
        f"NAME`), and compares the others' fingerprints with them by telephone."
    )
    return _described(federated), words


def _check(options: argparse.Namespace) -> Made:
    federated = read(options.file)
    at = ", ".join(federated.servers.values())
    words = f"{options.file}: '{federated.name}', digest {federated.digest[:16]}, meets at {at}"
    for member in federated.members:
        words += f"\n  {member.name} plays {member.role or 'nothing by itself'}, {member.identity}"
    if options.name is not None:
        words += _check_own(federated, options)
    return _described(federated), words


def _check_own(federated: Federated, options: argparse.Namespace) -> str:
    if options.name not in federated.servers:
        federated.member(options.name)
    own = read_own(options.file, options.name, options.folder)
    own.check_room(options.name)
    words = ""
    if options.name in federated.servers:
        server_credentials(options.name, own.folder)
        words += f"\n'{options.name}' has what it shows as a server"
    if options.name in {member.name for member in federated.members if member.identity}:
        credentials(federated, options.name, own.folder)
        Policy(own, federated, options.name).check()
        words += f"\n'{options.name}' has its certificate and keys, and they fit; it accepts {len(own.accept)} things"
    return words


def _try(options: argparse.Namespace) -> Made:
    folder = options.folder
    roles: dict[str, str] = {}
    for entry in options.parties:
        name, _, role = entry.partition("=")
        if name in roles:
            raise ArgumentError(f"'{name}' is named twice")
        roles[name] = role
    if (folder / "ca.pem").exists():
        raise ArgumentError(f"{folder} holds a CA already; name another folder")
    host = options.server.rsplit(":", 1)[0].strip("[]")
    made = {name: new_identity() for name in roles}
    parties = {name: {"role": role, "identity": fingerprint_of(made[name])} for name, role in roles.items()}
    head = {"name": folder.resolve().name, "server": options.server}
    federated = parse({"federation": head, "parties": parties})  # before anything is made
    make_authority(folder)
    enrol(folder, "server", hosts=(host,))
    for name, identity in made.items():
        files.write(folder / f"{name}-identity.pem", identity, 0o600)
        enrol(folder, name)
    _write(folder / "federation.toml", federated)
    server = f"sectorch up {folder}/federation.toml --as server"
    words = (
        f"{folder}/federation.toml: {', '.join(roles)}; all keys are in one folder, which is for trying it out only\n"
        f"the server: {server}\n"
        f"each party: sectorch federation accept {folder}/federation.toml PROGRAM --as NAME, and sectorch up "
        f"{folder}/federation.toml --as NAME\n"
        f"then: sectorch run {folder}/federation.toml PROGRAM --as NAME"
    )
    return _described(federated) | {"server_command": server}, words


def _write(path: Path, federated: Federated) -> None:
    files.write(path, text(federated).encode())
