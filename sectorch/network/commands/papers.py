"""The papers' commands whose parties may be processes apart: with `--federation FILE --as NAME` each is one of them."""

from __future__ import annotations

from collections.abc import Sequence

from ...protocols.capc import cli as capc_cli
from ...protocols.capride import cli as capride_cli
from ...protocols.perturbation import cli as perturbation
from ...protocols.privhfl import cli as privhfl_cli
from ...protocols.secsv import cli as secsv_cli
from ..federation.party import Federation


def perturbed_fl(arguments: Sequence[str] | None = None) -> int:
    """`sectorch perturbed-fl`."""
    return perturbation.COMMAND.main(arguments, join=Federation)


def capride(arguments: Sequence[str] | None = None) -> int:
    """`sectorch capride`."""
    return capride_cli.COMMAND.main(arguments, join=Federation)


def capc(arguments: Sequence[str] | None = None) -> int:
    """`sectorch capc`."""
    return capc_cli.COMMAND.main(arguments, join=Federation)


def privhfl(arguments: Sequence[str] | None = None) -> int:
    """`sectorch privhfl`."""
    return privhfl_cli.COMMAND.main(arguments, join=Federation)


def shapley(arguments: Sequence[str] | None = None) -> int:
    """`sectorch shapley`."""
    return secsv_cli.COMMAND.main(arguments, join=Federation)
