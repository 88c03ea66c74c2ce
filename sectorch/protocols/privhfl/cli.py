"""`sectorch privhfl`."""

from __future__ import annotations

import sys

from ...federated.command import Command, Place
from ...federated.participants import FederatedData, dataset_of
from ...session import S
from .experiment import PrivHFL
from .settings import CONTROLS, PRESETS, Settings, divided


def _prepare(how: FederatedData, settings: Settings, place: Place) -> PrivHFL:
    found = divided(dataset_of(how.data, place.root), how, place.own(how.seed))
    return PrivHFL(
        *found, settings, out=place.out, local=place.shared, workers=place.workers, together=place.parties,
        own=place.own(settings.seed),
    )  # fmt: skip


def _base(how: FederatedData) -> Settings:
    preset = PRESETS.get(how.data, PRESETS["digits"])
    return Settings(local=preset.local, retraining=preset.retraining)


def _cast(how: FederatedData, settings: Settings) -> list[str]:
    return [*(f"c{i}" for i in range(1, how.clients + 1)), S.name]


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
    _cast,
    _prepare,
    _base,
    {name: {"control": name} for name in CONTROLS},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
