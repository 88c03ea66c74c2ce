"""`sectorch privhfl`."""

from __future__ import annotations

import sys

from ...federated.command import Command
from ...federated.participants import FederatedData
from ...session import S
from .experiment import PrivHFL
from .settings import CONTROLS, PRESETS, Settings, divided


def _base(how: FederatedData) -> Settings:
    preset = PRESETS.get(how.data, PRESETS["digits"])
    return Settings(local=preset.local, retraining=preset.retraining)


COMMAND = Command(
    "privhfl",
    "Heterogeneous federated learning without an auxiliary data set (PrivHFL): all parties in this process, a\n"
    "simulation, which protects nothing, or one of a federation, whose roles are c1, c2, ... and S. A run that was\n"
    "stopped goes on when started again.",
    (
        "sectorch privhfl --data digits --clients 10 --queries 500",
        "sectorch privhfl --queries 100 250 500 --out runs/sweep          accuracy per query count, and its plot",
        "sectorch privhfl --seed 0 1 2 3 4 --controls --out runs/gains    with controls, five seeds and their spread",
        "sectorch privhfl --partition dirichlet --alpha 0.5 --selection icd --pool 2000 -C 0.6 --iterations 2",
        "sectorch privhfl --data cifar10 --data-root ~/data --clients 50 --queries 10000",
        "sectorch privhfl --clients 3 --federation federation.toml --as north",
    ),
    FederatedData(),
    Settings(),
    lambda how, settings: [*(f"c{i}" for i in range(1, how.clients + 1)), S.name],
    PrivHFL.prepared(divided),
    _base,
    {name: {"control": name} for name in CONTROLS},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
