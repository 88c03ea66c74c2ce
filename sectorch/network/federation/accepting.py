"""`sectorch federation accept`: what would be accepted, and the table that accepts it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ... import files
from ...cli.command import at_least
from ...errors import ArgumentError
from .file import Federated, read
from .own import Own, beside, read_own
from .papers import PAPERS, cast_of, command_of, own_of, own_words, settings_digest, settings_of
from .policy import Policy, check_bounded, tensor_in, written
from .programs import rehearsed, source_of
from .reveals import bounds_of

Made = tuple[dict, str]


def add_accept(action: argparse.ArgumentParser) -> None:
    """The options of `sectorch federation accept`."""
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


def accept(options: argparse.Namespace) -> Made:
    """Show what would be accepted, and write it unless `--show` is given.

    Raises:
        ArgumentError: it is not right, or accepted already; nothing was written.
    """
    federated = read(options.file)
    name = federated.member(options.name).name
    own = read_own(options.file, name)
    starters = [federated.named(n).name for n in options.starters or [m.name for m in federated.members]]
    if options.what in PAPERS:
        table, facts, words = _paper(options, federated, own, starters)
    elif options.what.endswith(".safetensors"):
        table, facts, words = _model(options, own, [n for n in starters if n != name])
    else:
        table, facts, words = _program(options, federated, own, starters)
    said = {"party": name, **facts, "file": str(own.path)}
    if options.show:
        return said, f"{words}\nwould be written to {own.path}:\n\n{table}"
    _add(own, table, federated, name)
    return said, f"{words}\n{own.path}: '{name}' accepts it"


def _program(options: argparse.Namespace, federated: Federated, own: Own, starters: list[str]):
    source = source_of(options.what)
    found = rehearsed(source, federated)
    bounds = bounds_of(options.reveals, lambda name: federated.named(name).name)
    check_bounded(found, bounds, source.name)
    parties = [federated.named(name).name for name in options.among] or list(found.parties)
    inputs: dict[str, str] = {}
    for entry in options.input:
        called, equals, path = entry.partition("=")
        if not equals or called in inputs:
            raise ArgumentError(f"--input is NAME=FILE, each name once; got {entry[:80]!r}")
        tensor_in(Path(path), called)
        inputs[called] = _from(own, Path(path))
    what = f"{_from(own, source.path)}:{source.function}"
    table = written("program", what, [
        ("source", source.digest), ("traced", found.traced), ("parties", parties), ("from", starters),
        ("reveals", [str(bound) for bound in bounds]), ("inputs", inputs), ("runs", options.runs),
    ])  # fmt: skip
    facts: dict[str, Any] = {
        "program": source.name, "source": source.digest, "traced": found.traced, "parties": parties, "from": starters,
        "learned": list(found.learned), "reveals": [str(bound) for bound in bounds], "cost": dict(found.cost or {}),
    }  # fmt: skip
    steps = "none" if found.whole else "depend on inputs, or are many: only the source is compared"
    words = [
        f"{source.name} of {source.path}",
        f"  source {source.digest}" + (f", with {len(source.used)} files that it imports" if source.used else ""),
        f"  steps  {found.traced or steps}",
        f"  among  {', '.join(parties)}; started by {', '.join(starters)}",
        *(f"  {line}" for line in found.learned or (("nobody learns anything",) if found.whole else ())),
        *([f"  then   it depends on inputs ({found.stopped}): read the source"] if not found.whole else []),
        *(f"  within {bound}, elements that may be learned at most; enforced while it runs" for bound in bounds),
    ]
    if found.cost is not None:
        rounds, online, offline = (int(found.cost[k]) for k in ("rounds", "online_bytes", "offline_bytes"))
        words.append(f"  {rounds} rounds online, {online} bytes online and {offline} offline, all parties")
    words += [f"  uses   {path} as {called}" for called, path in inputs.items()]
    return table, facts, "\n".join(words)


def _paper(options: argparse.Namespace, federated: Federated, own: Own, starters: list[str]):
    most = {}
    for entry in options.most:
        setting, _, number = entry.partition("=")
        try:
            most[setting] = float(number) if "." in number else int(number)
        except ValueError:
            raise ArgumentError(f"--most is SETTING=NUMBER, got {entry[:80]!r}") from None
    mine = _own(options, own)
    settings = settings_of(options.what, options.arguments)
    unknown = [setting for setting in most if type(settings.get(setting)) not in (int, float)]
    if unknown:
        numbers = ", ".join(k for k, v in settings.items() if type(v) in (int, float))
        raise ArgumentError(f"{options.what} has no number {unknown[0]!r} among its settings; it has {numbers}")
    digest = settings_digest(options.what, settings, tuple(most))
    parties = [federated.named(n).name for n in options.among] or [*cast_of(options.what, options.arguments, federated)]
    table = written("paper", options.what, [
        ("settings", digest), ("most", most), ("own", mine), ("parties", parties), ("from", starters),
        ("runs", options.runs),
    ])  # fmt: skip
    facts = {
        "paper": options.what,
        "settings": digest,
        "parties": parties,
        "from": starters,
        "values": settings,
        "own": mine,
    }
    shown = ", ".join(f"{k}={v}" for k, v in settings.items() if v is not None)
    words = (
        f"{options.what}, settings {digest}\n  {shown}\n  among  {', '.join(parties)}; started by "
        f"{', '.join(starters)}"
        + "".join(f"\n  {k} at most {v}" for k, v in most.items())
        + "".join(f"\n  {k} {v}, of '{options.name}' alone" for k, v in mine.items())
    )
    return table, facts, words


def _own(options: argparse.Namespace, own: Own) -> dict[str, Any]:
    """What a party says of a paper for itself, as its own file has it."""
    known, found = own_of(command_of(options.what)), {}
    for entry in options.own:
        name, equals, value = entry.partition("=")
        if not equals or not value or name in found:
            raise ArgumentError(f"--own is SETTING=VALUE, each setting once; got {entry[:80]!r}")
        found[name] = _from(own, Path(value)) if name in known and known[name].own == "folder" else value
    own_words(options.what, found, own.path.parent)
    return found


def _model(options: argparse.Namespace, own: Own, clients: list[str]):
    from ...nn.model_file import read_model

    read_model(Path(options.what))
    path = _from(own, Path(options.what))
    table = written("model", path, [("clients", clients)])
    words = f"any inference of {options.what} for {', '.join(clients)}, who learn the results"
    return table, {"model": str(options.what), "clients": clients}, words


def _from(own: Own, path: Path) -> str:
    """A path as the party's own file names it: from its folder, where it is not far away."""
    near = os.path.relpath(path, own.path.parent)
    return str(path.absolute()) if near.startswith(os.path.join("..", "..")) else near


def _add(own: Own, table: str, federated: Federated, name: str) -> None:
    """Add a table to the party's own file, if the whole is right then."""
    before = own.path.read_text(encoding="utf-8") if own.path.exists() else ""
    if table in before:
        raise ArgumentError(f"{own.path} has that table already")
    partial = beside(own.path, f"{name}.new")
    files.write(partial, (before + ("\n" if before else "") + table).encode(), 0o600)
    try:
        Policy(read_own(own.path, f"{name}.new"), federated, name)
        files.move(partial, own.path)
    finally:
        partial.unlink(missing_ok=True)
