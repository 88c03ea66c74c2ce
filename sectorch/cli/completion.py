"""`sectorch completion`: a script with which a shell completes commands and options, made by shtab of their parsers."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from rich.console import Console

from ..errors import ArgumentError
from ..optional_deps import required_imports
from .command import Described, Parser, command_status
from .main import COMMANDS, GROUPS

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
    described = Described()
    getattr(importlib.import_module(f"sectorch.{module}"), function)(described)
    return described.parser
