"""`sectorch capc`."""

from __future__ import annotations

import sys

from ...federated.command import Command
from ...session import S
from .experiment import CaPC
from .settings import CONTROLS, PRESETS, Collaboration, Settings, divided


def _base(how: Collaboration) -> Settings:
    return PRESETS.get(how.data, PRESETS["digits"]).settings()


def _cast(how: Collaboration, settings: Settings) -> list[str]:
    return [*(f"p{i}" for i in range(1, (how.parties or PRESETS.get(how.data, PRESETS["digits"]).parties) + 1)), S.name]


COMMAND = Command(
    "capc",
    "Confidential and private collaborative learning (CaPC): all parties in this process, a simulation of the real\n"
    "protocols, or one of a federation, whose roles are p1, p2, ... and S. A run that was stopped goes on when\n"
    "started again.",
    (
        "sectorch capc --data digits --parties 50 --epsilon 10 --delta 1e-5 --noise gaussian --inference mpc",
        "sectorch capc --parties 20 50 100 --inference simulated --out runs/parties      gain per party count",
        "sectorch capc --parties 20 --plan --seed 0 1 2 3 4 --controls --inference simulated --out runs/gains",
        "sectorch capc --parties 60 --models-each 3 --skewed --selection entropy --pool 100 --queries 50",
        "sectorch capc --parties 5 --querying 1 --epsilon 40 --federation federation.toml --as north",
    ),
    Collaboration(),
    Settings(),
    _cast,
    CaPC.prepared(divided),
    _base,
    {name: {"control": name} for name in CONTROLS},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
