"""`sectorch federation`: write the file that says who the parties are, check it, and set one up to try it out."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ... import files
from ...cli.command import Parser, Report, action_adder, at_least, command_status, run_action
from ...errors import ArgumentError
from ..identity.authority import enrol, make_authority
from ..identity.identity import fingerprint_of, new_identity
from .config import (
    FederationFile,
    PartyConfig,
    credentials,
    federation_text,
    parse,
    party_file,
    read_federation,
    read_party_config,
    server_credentials,
)
from .policy import AcceptancePolicy, check_bounded, check_governed, governor_of, table_text, tensor_in
from .programs import (
    PAPERS,
    cast_of,
    command_of,
    dry_run_program,
    own_of,
    own_words,
    settings_digest,
    settings_of,
    source_of,
)
from .reveals import bounds_of


def add_accept(action: argparse.ArgumentParser) -> None:
    """Add the options of `sectorch federation accept`."""
    action.add_argument("file", type=Path, help="the federation file")
    action.add_argument(
        "what",
        help="FILE.py:FUNCTION, MODULE:FUNCTION, a model file, or a paper's name; after -- its options, "
        "which all parties give alike",
    )
    action.add_argument("--as", dest="name", required=True, help="the party that accepts it")
    action.add_argument(
        "--from", dest="starters", nargs="+", metavar="NAME", help="who may start it, or ask the model; all parties"
    )
    action.add_argument("--among", nargs="+", default=[], metavar="NAME", help="who takes part; whom the program names")
    action.add_argument(
        "--input", action="append", default=[], metavar="NAME=FILE", help="a tensor of this party's own"
    )
    action.add_argument("--runs", type=at_least(1), default=0, help="at most so many runs; any number unless named")
    action.add_argument(
        "--most", action="append", default=[], metavar="SETTING=NUMBER", help="a paper's setting that may be smaller"
    )
    action.add_argument(
        "--own", action="append", default=[], metavar="SETTING=VALUE", help="a paper's setting for this party alone"
    )
    action.add_argument(
        "--reveals", nargs="+", default=[], metavar="PARTY=ELEMENTS",
        help="how much a party may learn at most in one run, beyond what accept lists; PROTOCOL:PARTY=ELEMENTS by one "
        "protocol",
    )  # fmt: skip
    action.add_argument("--show", action="store_true", help="show it, and write nothing")


def accept(options: argparse.Namespace) -> Report:
    """Show a program, paper or model, and write the rule that accepts it unless `--show` is given.

    Raises:
        ArgumentError: it is invalid, or accepted already; nothing was written.
    """
    federated = read_federation(options.file)
    name = federated.member(options.name).name
    own = read_party_config(options.file, name)
    starters = [federated.member_named(n).name for n in options.starters or [m.name for m in federated.members]]
    if options.what in PAPERS:
        table, facts, words = _paper(options, federated, own, starters)
    elif options.what.endswith(".safetensors"):
        table, facts, words = _model(options, own, [n for n in starters if n != name])
    else:
        table, facts, words = _program(options, federated, own, starters)
    facts = {"party": name, **facts, "file": str(own.path)}
    if options.show:
        return facts, f"{words}\nwould be written to {own.path}:\n\n{table}"
    _add(own, table, federated, name)
    return facts, f"{words}\n{own.path}: '{name}' accepts it"


def _program(options: argparse.Namespace, federated: FederationFile, own: PartyConfig, starters: list[str]):
    source = source_of(options.what)
    found = dry_run_program(source, federated)
    bounds = bounds_of(options.reveals, lambda name: federated.member_named(name).name)
    check_bounded(found, bounds, source.name)
    check_governed(found, bounds, source.name, governor_of(own))
    parties = [federated.member_named(name).name for name in options.among] or list(found.parties)
    inputs: dict[str, str] = {}
    for entry in options.input:
        called, equals, path = entry.partition("=")
        if not equals or called in inputs:
            raise ArgumentError(f"--input is NAME=FILE, each name once; got {entry[:80]!r}")
        tensor_in(Path(path), called)
        inputs[called] = _from(own, Path(path))
    what = f"{_from(own, source.path)}:{source.function}"
    table = table_text("program", what, [
        ("source", source.digest), ("traced", found.traced), ("parties", parties), ("from", starters),
        ("reveals", [str(bound) for bound in bounds]), ("inputs", inputs), ("runs", options.runs),
    ])  # fmt: skip
    facts: dict[str, Any] = {
        "program": source.name, "source": source.digest, "traced": found.traced, "parties": parties, "from": starters,
        "learned": list(found.learned), "reveals": [str(bound) for bound in bounds], "cost": dict(found.cost or {}),
    }  # fmt: skip
    steps = "none" if found.complete else "depend on inputs, or are many: only the source is compared"
    words = [
        f"{source.name} of {source.path}",
        f"  source {source.digest}" + (f", with {len(source.imports)} files that it imports" if source.imports else ""),
        f"  steps  {found.traced or steps}",
        f"  among  {', '.join(parties)}; started by {', '.join(starters)}",
        *(f"  {line}" for line in found.learned or (("nobody learns anything",) if found.complete else ())),
        *([f"  then   it depends on inputs ({found.stopped}): read the source"] if not found.complete else []),
        *(f"  within {bound}, elements that may be learned at most; enforced while it runs" for bound in bounds),
    ]
    if found.cost is not None:
        rounds, online, offline = (int(found.cost[k]) for k in ("rounds", "online_bytes", "offline_bytes"))
        words.append(f"  {rounds} rounds online, {online} bytes online and {offline} offline, all parties")
    rule = governor_of(own)
    if rule is not None and rule.policy.plain:
        words.append(
            "  plain  this party's policy has plain = true: the counts of what is released are the program's word"
        )
    words += [f"  uses   {path} as {called}" for called, path in inputs.items()]
    return table, facts, "\n".join(words)


def _paper(options: argparse.Namespace, federated: FederationFile, own: PartyConfig, starters: list[str]):
    most = {}
    for entry in options.most:
        setting, _, number = entry.partition("=")
        try:
            most[setting] = float(number) if "." in number else int(number)
        except ValueError:
            raise ArgumentError(f"--most is SETTING=NUMBER, got {entry[:80]!r}") from None
    mine = _own_settings(options, own)
    settings = settings_of(options.what, options.arguments)
    unknown = [setting for setting in most if type(settings.get(setting)) not in (int, float)]
    if unknown:
        numbers = ", ".join(k for k, v in settings.items() if type(v) in (int, float))
        raise ArgumentError(f"{options.what} has no number {unknown[0]!r} among its settings; it has {numbers}")
    digest = settings_digest(options.what, settings, tuple(most))
    parties = [federated.member_named(n).name for n in options.among] or [
        *cast_of(options.what, options.arguments, federated)
    ]
    table = table_text("paper", options.what, [
        ("settings", digest), ("most", most), ("own", mine), ("parties", parties), ("from", starters),
        ("runs", options.runs),
    ])  # fmt: skip
    facts = {
        "paper": options.what, "settings": digest, "parties": parties, "from": starters, "values": settings,
        "own": mine,
    }  # fmt: skip
    shown = ", ".join(f"{k}={v}" for k, v in settings.items() if v is not None)
    words = (
        f"{options.what}, settings {digest}\n  {shown}\n  among  {', '.join(parties)}; started by "
        f"{', '.join(starters)}"
        + "".join(f"\n  {k} at most {v}" for k, v in most.items())
        + "".join(f"\n  {k} {v}, of '{options.name}' alone" for k, v in mine.items())
    )
    return table, facts, words


def _own_settings(options: argparse.Namespace, own: PartyConfig) -> dict[str, Any]:
    """The settings of a paper that a party decides for itself, as its own file has them."""
    known, found = own_of(command_of(options.what)), {}
    for entry in options.own:
        name, equals, value = entry.partition("=")
        if not equals or not value or name in found:
            raise ArgumentError(f"--own is SETTING=VALUE, each setting once; got {entry[:80]!r}")
        found[name] = _from(own, Path(value)) if name in known and known[name].own == "folder" else value
    own_words(options.what, found, own.path.parent)
    return found


def _model(options: argparse.Namespace, own: PartyConfig, clients: list[str]):
    from ...serving.model_file import read_model

    read_model(Path(options.what))
    path = _from(own, Path(options.what))
    table = table_text("model", path, [("clients", clients)])
    words = f"any inference of {options.what} for {', '.join(clients)}, who learn the results"
    return table, {"model": str(options.what), "clients": clients}, words


def _from(own: PartyConfig, path: Path) -> str:
    """A path as the party's own file has it: relative to the file's folder, or absolute if it is far away."""
    near = os.path.relpath(path, own.path.parent)
    return str(path.absolute()) if near.startswith(os.path.join("..", "..")) else near


def _add(own: PartyConfig, table: str, federated: FederationFile, name: str) -> None:
    """Add a table to the party's own file, if the file is valid with it."""
    before = own.path.read_text(encoding="utf-8") if own.path.exists() else ""
    if table in before:
        raise ArgumentError(f"{own.path} has that table already")
    partial = party_file(own.path, f"{name}.new")
    files.write(partial, (before + ("\n" if before else "") + table).encode(), 0o600)
    try:
        AcceptancePolicy(read_party_config(own.path, f"{name}.new"), federated, name)
        files.move(partial, own.path)
    finally:
        partial.unlink(missing_ok=True)


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
    add_action = action_adder(p)
    action = add_action("write a federation file", _init, "init sum.toml --server cloud.example:7100 --party ...")
    action.add_argument("file", type=Path, help="the file to write")
    action.add_argument("--server", required=True, help="host:port where all parties meet")
    action.add_argument(
        "--party", nargs=3, action="append", default=[], metavar=("NAME", "ROLE", "FINGERPRINT"),
        help="a party, its role and what `sectorch keys show` printed there; once for each",
    )  # fmt: skip
    action = add_action("check a federation file, and a party's own files", _check, "check sum.toml --as north")
    action.add_argument("file", type=Path, help="the federation file")
    action.add_argument("--as", dest="name", help="the party whose files are checked too")
    action.add_argument("--folder", type=Path, help="where they are; that of the file")
    action = add_action(
        "show a program, paper or model, and write that a party accepts it",
        accept,
        "accept sum.toml sum.py:program ...",
    )
    add_accept(action)
    action = add_action("a CA, keys and a file in one folder, to try it out", _try, "try here north=H1 south=H2")
    action.add_argument("folder", type=Path, help="the folder to make")
    action.add_argument("parties", nargs="+", metavar="NAME=ROLE", help="the parties and their roles")
    action.add_argument("--server", default="localhost:7100", help="host:port where all parties meet")
    p.rest = "arguments"
    return command_status(p, arguments, _run)


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.arguments and options.run is not accept:
        raise ArgumentError("what stands after -- are a paper's options, for `sectorch federation accept`")
    run_action(options, console)


def _facts(federated: FederationFile) -> dict:
    members = {
        m.name: {"role": m.role, "identity": m.identity, **({"address": m.address} if m.address else {})}
        for m in federated.members
    }
    return {"name": federated.name, "servers": federated.servers, "parties": members, "digest": federated.digest}


def _init(options: argparse.Namespace) -> Report:
    if options.file.exists():
        raise ArgumentError(f"{options.file} is there already; name another, or remove it")
    parties: dict[str, dict[str, str]] = {}
    for name, role, identity in options.party:
        if name in parties:
            raise ArgumentError(f"--party names '{name}' twice")
        parties[name] = {"role": role, "identity": identity}
    federated = parse({"federation": {"name": options.file.stem, "server": options.server}, "parties": parties})
    _write(options.file, federated)
    words = (
        f"{options.file}: {len(parties)} parties, digest {federated.digest[:16]}\n"
        f"Give it to all of them as it is. Each checks its own entry (`sectorch federation check {options.file} --as "
        f"NAME`), and compares the others' fingerprints with them by telephone."
    )
    return _facts(federated), words


def _check(options: argparse.Namespace) -> Report:
    federated = read_federation(options.file)
    at = ", ".join(federated.servers.values())
    words = f"{options.file}: '{federated.name}', digest {federated.digest[:16]}, meets at {at}"
    for member in federated.members:
        words += f"\n  {member.name} plays {member.role or 'nothing by itself'}, {member.identity}"
    if options.name is not None:
        words += _check_own(federated, options)
    return _facts(federated), words


def _check_own(federated: FederationFile, options: argparse.Namespace) -> str:
    if options.name not in federated.servers:
        federated.member(options.name)
    own = read_party_config(options.file, options.name, options.folder)
    own.check_room(options.name)
    words = ""
    if options.name in federated.servers:
        server_credentials(options.name, own.folder)
        words += f"\n'{options.name}' has what it shows as a server"
    if options.name in {member.name for member in federated.members if member.identity}:
        credentials(federated, options.name, own.folder)
        AcceptancePolicy(own, federated, options.name).check()
        words += f"\n'{options.name}' has its certificate and keys, and they fit; it accepts {len(own.accept)} things"
    return words


def _try(options: argparse.Namespace) -> Report:
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
    federated = parse({"federation": head, "parties": parties})  # before any file is made
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
    return _facts(federated) | {"server_command": server}, words


def _write(path: Path, federated: FederationFile) -> None:
    files.write(path, federation_text(federated).encode(), files.PUBLIC)
