"""The command `sectorch`: its list of commands, each of which is imported when it is called."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from ..signal_handling import interruptible, is_command

with interruptible(is_command()):
    from rich.console import Console
    from rich.table import Table

    from ..errors import ArgumentError
    from ..optional_deps import required_imports
    from ..tensor.table import supported_ops
    from .command import DONE, STOPPED, UNREAD, USAGE, Parser, ParserRequest, command_status, print_json

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "secure inference over three parties": {
        "server": ("network.commands.serve:server", "run the server S, which learns nothing"),
        "answer": ("network.commands.serve:answer", "answer queries with your model, which nobody sees"),
        "convert": ("network.convert:convert", "make a model file of a .pt2 or a function that you trust"),
        "query": ("network.commands.ask:query", "ask a model; you alone learn the result"),
        "models": ("network.commands.ask:models", "list the models that can be asked"),
        "limits": ("network.limits:limits", "what clients may ask of a party, and what they have used"),
        "audit": ("network.audit:audit_command", "check receipts: who learned what, and when"),
        "evidence": ("network.server_evidence:evidence_command", "check evidence against a server that cheated"),
        "check-model": ("network.model_audit:check_model_command", "check, with the weights, which model has answered"),
        "keys": ("network.identity.authority:keys", "identity keys, certificates, and a small CA for trying it out"),
    },
    "any program among parties": {
        "run": ("network.commands.run:run", "run a program: simulated, or among parties"),
        "up": ("network.commands.serve:up", "be a party of a federation: serve, answer, take part"),
        "federation": (
            "network.federation.command:federation",
            "write and check the file that says who the parties are",
        ),
    },
    "the papers": {
        "privhfl": ("cli.main:privhfl", "clients with models of their own teach each other (PrivHFL)"),
        "capc": ("cli.main:capc", "labels by noisy vote, within a privacy budget (CaPC)"),
        "capride": ("cli.main:capride", "distillation on encrypted data (CaPriDe)"),
        "perturbed-fl": (
            "cli.main:perturbed_fl",
            "clients train on a noised model, the server recovers",
        ),
        "shapley": ("cli.main:shapley", "what each client contributed (SecSV)"),
    },
    "tools": {
        "ops": ("cli.main:ops", "the torch operations that work on secret tensors"),
        "completion": ("cli.main:completion", "a script that completes commands and options in a shell"),
        "warm": ("network.warm_up:main", "compile what a query runs, once on a machine, ahead of it"),
        "bench": ("testing.local_network:main", "three processes over an emulated network: seconds, rounds, bytes"),
    },
}
"""Commands by group: the function of each, and its line of help."""

COMMANDS = {name: where for group in GROUPS.values() for name, (where, _) in group.items()}


def overview() -> str:
    """The text of `sectorch --help`."""
    lines = [
        "usage: sectorch COMMAND [options]",
        "",
        "Secure tensors for PyTorch: predictions that show neither model nor input.",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:14}{line}" for name, (_, line) in commands.items())]
    return "\n".join([
        *lines, "",
        "--help: options and examples; --json: JSON alone; --debug: tracebacks.",
        "Exit codes: 0 done, 1 failed, 2 not understood, 130 stopped by Ctrl-C.",
    ])  # fmt: skip


def ops(arguments: Sequence[str] | None = None) -> int:
    """`sectorch ops`: the dispatch table."""
    text = "List the torch operations that work on secret tensors."
    parser = Parser("ops", text, ["sectorch ops conv", "sectorch ops --json"])
    parser.add_argument("part", nargs="?", default="", help="list those that have this in their names")
    parser.takes_json("the table")
    return command_status(parser, arguments, _ops)


def _ops(options: argparse.Namespace, console: Console) -> None:
    rows = [row for row in supported_ops() if options.part.lower() in row["name"].lower()]
    if not rows:
        raise ArgumentError(f"no operation has {options.part!r} in its name; sectorch ops lists them all")
    if options.json:
        print_json(rows)
        return
    table = Table("operation", "kind", "note")
    for row in rows:
        table.add_row(row["name"], row["kind"], row["note"])
    console.print(table)


SHELLS = ("bash", "zsh", "tcsh")


def completion(arguments: Sequence[str] | None = None) -> int:
    """`sectorch completion`."""
    parser = Parser(
        "completion",
        "Print a script that completes sectorch's commands, their options and values.\n"
        'For this shell alone: eval "$(sectorch completion bash)".',
        ["sectorch completion bash > ~/.local/share/bash-completion/completions/sectorch"],
    )
    parser.add_argument("shell", choices=SHELLS, help=f"of {', '.join(SHELLS)}")
    return command_status(parser, arguments, _completion)


def _completion(options: argparse.Namespace, console: Console) -> None:
    with required_imports("completion in a shell", "shtab", ArgumentError):
        shtab = importlib.import_module("shtab")
    print(shtab.complete(whole_parser(), options.shell))


def whole_parser() -> argparse.ArgumentParser:
    """One parser of all commands, each with the options that it declares."""
    whole = argparse.ArgumentParser("sectorch")
    whole.add_argument("--version", action="version", version="")
    commands = whole.add_subparsers()
    for group in GROUPS.values():
        for name, (_, line) in group.items():
            commands.add_parser(name, help=line, parents=[parser_of(name)], add_help=False)
    return whole


def parser_of(name: str) -> Parser:
    """The parser of a command, which is not run."""
    module, function = COMMANDS[name].split(":")
    request = ParserRequest()
    getattr(importlib.import_module(f"sectorch.{module}"), function)(request)
    return request.parser


def _paper(command: str, arguments: Sequence[str] | None = None) -> int:
    """A paper's command, whose parties may be distributed: with `--federation FILE --as NAME` it is one of them."""
    with interruptible(is_command()):
        from ..network.federation.party import Federation
        from ..network.federation.programs import command_of

    return command_of(command).main(arguments, join=Federation)


privhfl = functools.partial(_paper, "privhfl")
capc = functools.partial(_paper, "capc")
capride = functools.partial(_paper, "capride")
perturbed_fl = functools.partial(_paper, "perturbed-fl")
shapley = functools.partial(_paper, "shapley")


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit status. `--debug` may stand before the command."""
    first, *rest = arguments or ["--help"]
    if first == "--debug" and rest:
        first, *rest = *rest, "--debug"
    if first in ("--help", "-h"):
        print(overview())
        return DONE
    if first == "--version":
        print(f"sectorch {metadata.version('sectorch')}")
        return DONE
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, 1)
        meant = f" (perhaps {near[0]})" if near else ""
        print(f"error: there is no command {first!r}{meant}; sectorch --help lists them", file=sys.stderr)
        return USAGE
    module, function = COMMANDS[first].split(":")
    with interruptible(is_command()):
        command = getattr(importlib.import_module(f"sectorch.{module}"), function)
    return command(rest)


def main() -> None:
    """Run the process's command line.

    Raises:
        SystemExit: always, with the exit status; see `command.py`.
    """
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the output that is still buffered
        status = UNREAD
    raise SystemExit(status)


if __name__ == "__main__":
    main()
