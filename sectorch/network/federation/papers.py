"""The papers that can be run among parties that are up, by their commands' names, and their settings' digests."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...errors import ArgumentError
from ...federated.command import Command
from ...federated.options import chosen, sweeps

PAPERS = {
    "capride": "protocols.capride.cli",
    "perturbed-fl": "protocols.perturbation.cli",
    "privhfl": "protocols.privhfl.cli",
}
"""Where the `COMMAND` of each is."""
_ELSEWHERE = ("data_root", "worker_count", "worker_kind", "yes", "out", "no_plots", "json", "debug", "controls")
"""Options that are each party's own, or of simulations."""


def command_of(paper: str) -> Command:
    """Raises ArgumentError: there is no such paper."""
    if paper not in PAPERS:
        raise ArgumentError(f"there is no paper {ascii(paper)[:60]}; there are {', '.join(PAPERS)}")
    return importlib.import_module(f"sectorch.{PAPERS[paper]}").COMMAND


def settings_of(paper: str, arguments: Sequence[str]) -> dict[str, Any]:
    """All settings of a paper's command with these options: which data, and how.

    Raises:
        ArgumentError: what is no option of it, or is each party's own, or makes several runs.
    """
    command = command_of(paper)
    parser = command.parser()

    def error(message: str) -> NoReturn:
        raise ArgumentError(f"{paper}: {message}; `sectorch {paper} --help` lists the options")

    parser.error = error
    if {"--help", "-h"} & set(arguments):
        error("a run has no --help")
    options = parser.parse_args(list(arguments))
    plain = parser.parse_args([])
    for name in _ELSEWHERE:
        if getattr(options, name, None) != getattr(plain, name, None):
            raise ArgumentError(f"--{name.replace('_', '-')} is each party's own, and not a part of what all agree on")
    if sweeps(options, type(command.federation), type(command.settings)):
        raise ArgumentError(f"{paper}: among parties one run at a time, and an option has several values")
    federation = chosen(options, command.federation)
    settings = chosen(options, command.base(federation))
    return {**_flat("", settings.as_dict()), **_flat("", federation.as_dict())}


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
