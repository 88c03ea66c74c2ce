"""`sectorch capride`."""

from __future__ import annotations

import functools
import sys

from ...federated.command import Command, Place
from ...federated.dividing import dataset_of
from .algorithm import CaPriDe
from .federation import Parties, divided
from .settings import METHODS, Settings


def _prepare(how: Parties, settings: Settings, place: Place) -> CaPriDe:
    made = divided(dataset_of(how.data, place.root), how, place.own(how.seed))
    return CaPriDe(*made, settings, out=place.out, together=place.parties, own=place.own(settings.seed))


def _by(settings: Settings, method: str) -> Settings:
    return settings.but(method=method)


def _cast(how: Parties, settings: Settings) -> list[str]:
    return [f"P{i}" for i in range(1, how.parties + 1)]


COMMAND = Command(
    "capride",
    "Decentralised learning on encrypted data (CaPriDe): all parties in this process, or one of a federation, whose\n"
    "roles are P1, P2, .... A run that was stopped goes on when started again.",
    (
        "sectorch capride --data digits --parties 3 --split no-overlap --rounds 20 --update head",
        "sectorch capride --simulate --controls local fedavg fedavg-dp dml l2       in the clear, with baselines",
        "sectorch capride --large resnet8 --update forward                          two models a party",
        "sectorch capride --parties 2 --federation federation.toml --as north",
    ),
    Parties(),
    Settings(),
    _cast,
    _prepare,
    lambda how: Settings(),
    {method: functools.partial(_by, method=method) for method in METHODS if method != "capride"},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
