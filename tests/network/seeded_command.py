"""`sectorch`, with draws that repeat and messages that are counted: what tests of whole commands start as a process.

Beside a paper's results, `counted.json` has what crossed the edges of the sessions that this process was in: messages
and bytes by phase, protocol, message, sender and receiver, and rounds and protocols of each call.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
from seeded_system import repeating

from sectorch.choreography.ledger import Observer
from sectorch.cli.main import run
from sectorch.federated.command import Command
from sectorch.protocols.capc import CaPC
from sectorch.protocols.capride import CaPriDe
from sectorch.protocols.perturbation.experiment import PerturbedFL
from sectorch.protocols.privhfl import PrivHFL
from sectorch.protocols.secsv import Valuation


class Counted(Observer):
    """Messages and bytes by what they are, and the longest chain of each call."""

    def __init__(self):
        self.messages, self.bytes = Counter[str](), Counter[str]()
        self.calls = dict[str, list]()
        """By phase, session and call: its rounds and its protocols."""

    def message(self, line, value):
        key = " ".join((line.phase.name, line.protocol, line.label, line.src.name, line.dst.name))
        self.messages[key] += 1
        self.bytes[key] += line.bytes
        call = f"{line.phase.name} {line.session.hex()} {line.call}"
        rounds, protocols = self.calls.get(call, (0, []))
        self.calls[call] = [max(rounds, line.round), sorted({*protocols, line.protocol})]


def counting(patch: pytest.MonkeyPatch) -> None:
    run_ = Command._run

    def counted(self, options, console, parties):
        with Counted() as found:
            run_(self, options, console, parties)
        said = {"messages": found.messages, "bytes": found.bytes, "calls": found.calls}
        (options.out / "counted.json").write_text(json.dumps(said))

    patch.setattr(Command, "_run", counted)
    for kind in (CaPC, CaPriDe, PerturbedFL, PrivHFL, Valuation):
        patch.setattr(kind, "estimate", lambda self: None)  # a trial's messages are none of the run's


if __name__ == "__main__":
    with repeating(), pytest.MonkeyPatch.context() as patch:
        counting(patch)
        sys.exit(run(sys.argv[1:]))
