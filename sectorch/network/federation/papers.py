"""The papers that can be run among parties that are up, by their commands' names, and their settings' digests."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...cli.command import Parser
from ...errors import ArgumentError
from ...federated.command import Command
from ...federated.errors import FederationError
from ...federated.options import Option, chosen, owned, sweeps
from .file import Federated

PAPERS = {
    "capc": "protocols.capc.cli",
    "capride": "protocols.capride.cli",
    "perturbed-fl": "protocols.perturbation.cli",
    "privhfl": "protocols.privhfl.cli",
    "shapley": "protocols.secsv.cli",
}
"""Where the `COMMAND` of each is."""
_ELSEWHERE = ("data_root", "worker_count", "worker_kind", "yes", "out", "no_plots", "json", "debug", "controls")
"""Options that are each party's own, or of simulations."""


def command_of(paper: str) -> Command:
    """Raises ArgumentError: there is no such paper."""
    if paper not in PAPERS:
        raise ArgumentError(f"there is no paper {ascii(paper)[:60]}; there are {', '.join(PAPERS)}")
    return importlib.import_module(f"sectorch.{PAPERS[paper]}").COMMAND


def cast_of(paper: str, arguments: Sequence[str], federated: Federated) -> tuple[str, ...]:
    """Who of a federation takes part in a paper's command with these options.

    Raises:
        ArgumentError: a role that nobody plays, or options that are none.
    """
    command = command_of(paper)
    roles = command.needs(_parser(paper, command).parse_args(list(arguments)))
    return tuple(sorted(federated.named(role).name for role in roles))


def settings_of(paper: str, arguments: Sequence[str]) -> dict[str, Any]:
    """All settings of a paper's command with these options: which data, and how.

    Raises:
        ArgumentError: what is no option of it, or is each party's own, or makes several runs.
    """
    command = command_of(paper)
    parser = _parser(paper, command)
    if {"--help", "-h"} & set(arguments):
        parser.error("a run has no --help")
    options = parser.parse_args(list(arguments))
    plain = parser.parse_args([])
    for name in _ELSEWHERE:
        if getattr(options, name, None) != getattr(plain, name, None):
            raise ArgumentError(f"--{name.replace('_', '-')} is each party's own, and not a part of what all agree on")
    own = own_of(command)
    for name in own:
        if hasattr(options, name):
            raise ArgumentError(
                f"{_flag(name, own[name])} is each party's own, which nobody says for another: leave it out here, and "
                f"say it at the party by `sectorch federation accept FILE {paper} --own {name}=...`"
            )
    if sweeps(options, type(command.federation), type(command.settings)):
        raise ArgumentError(f"{paper}: among parties one run at a time, and an option has several values")
    federation = chosen(options, command.federation)
    settings = chosen(options, command.base(federation))
    found = {**_flat("", settings.as_dict()), **_flat("", federation.as_dict())}
    return {name: value for name, value in found.items() if name not in own}


def own_of(command: Command) -> dict[str, Option]:
    """The settings of a paper that each party says for itself."""
    return owned(type(command.federation), type(command.settings))


def own_words(paper: str, own: Mapping[str, Any], folder: Path) -> list[str]:
    """Words of a command line, of what one party says for itself.

    Args:
        own: by the setting's name. folder: from which paths are named.

    Raises:
        ArgumentError: a setting that is none of a party's own, or a value that is none of it.
    """
    command, words = command_of(paper), []
    known = own_of(command)
    for name, value in own.items():
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"{paper} has no setting {ascii(name)[:60]} of a party's own; {there}")
        words += [_flag(name, known[name]), str(folder / value) if known[name].own == "folder" else str(value)]
    try:
        chosen(_parser(paper, command).parse_args(words), command.settings)
    except (FederationError, TypeError) as error:
        raise ArgumentError(f"{paper}: {error}") from None
    return words


def _parser(paper: str, command: Command) -> Parser:
    """The command's parser, which raises and does not end the process."""
    parser = command.parser()

    def refuse(message: str) -> NoReturn:
        raise ArgumentError(f"{paper}: {message}")

    parser.refuse = refuse
    return parser


def _flag(name: str, option: Option) -> str:
    return f"--{(option.flag or name).replace('_', '-')}"


def _flat(before: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{before}{name}.", value)
        else:
            found[before + name] = value
    return found


def settings_digest(paper: str, settings: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """SHA-256 of a paper's settings, but for those that are bounded otherwise."""
    kept = {name: value for name, value in settings.items() if name not in without}
    return hashlib.sha256(json.dumps([paper, kept], sort_keys=True, default=str).encode()).hexdigest()
