"""What each party knows in a run of a protocol under test, and how it came by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..choreography.steps import Header

TESTS = "the test"
"""The first part of the paths of what the test does itself: it opens results that are in shares."""


@dataclass(frozen=True)
class Known:
    """A value that a party has, and how it came by it.

    Attributes:
        how: "drawn", "brought" (half an input), "received", "sent", "opened" (computed by several of a message),
            "shown" (two that it and another sent each other, added mod 2), "joined" (two that it was sent or drew at
            one place, added mod 2), or "computed", of several values.
        shows: what of the protocol's purpose a message is declared to show.
    """

    name: str
    how: str
    value: torch.Tensor
    shows: str = ""


@dataclass
class Played:
    """One run: what each party knows, by name, the messages, and the results with those who learn them."""

    known: dict[str, list[Known]] = field(default_factory=dict)
    messages: list[tuple[Header, torch.Tensor]] = field(default_factory=list)
    results: list[tuple[frozenset[str], torch.Tensor]] = field(default_factory=list)


def side_by_side(runs: Sequence[Played]) -> Played:
    """What parties know in all of these runs, each value with the runs as its last dimension."""
    found = Played()
    for party, known in runs[0].known.items():
        columns = zip(*(run.known[party] for run in runs), strict=True)
        found.known[party] = [
            replace(k, value=torch.stack([c.value for c in column], -1))
            for k, column in zip(known, columns, strict=True)
        ]
    return found


def seen(run: Played) -> dict[str, list[torch.Tensor]]:
    """What each party brings, is sent, sends and learns."""
    found = {
        name: [k.value for k in known if k.how in ("brought", "received", "sent")] for name, known in run.known.items()
    }
    for owners, y in run.results:
        for owner in owners:
            found[owner].append(y)
    return found


def alike(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    """Whether it is the same, bit for bit."""
    return all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(one.values(), other.values(), strict=True)
    )


def is_tests(path: str) -> bool:
    """Whether a step of this path is the test's own."""
    return path.split("/")[0] == TESTS
