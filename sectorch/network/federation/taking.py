"""One run of a party that is up: its inputs, its part of the program, what it learned, and the record of it."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import files
from ...choreography import Party
from ...choreography.ledger import Cost
from ...errors import PeerLostError, SectorchError
from ...federated.parties import tensors
from ..log import query
from ..parties.said import in_full
from ..receipts.receipts import Receipts
from .own import Own
from .papers import command_of
from .party import Federation
from .policy import Agreed
from .programs import rehearsed
from .reveals import Ledger, often

log = logging.getLogger("sectorch.federation")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


TEXT = 2000
"""Characters of what was revealed, in a line of the log; the receipts have all."""


class Taking:
    """`federated.parties.Parties` as a program gets it: no connection, and no sessions but the run's own."""

    def __init__(self, parties: Federation):
        self.inputs, self.folder = parties.inputs, parties.folder
        self.present, self.session, self.runtime = parties.present, parties.session, parties.runtime


class Run:
    """A run that was agreed on and begun.

    Args:
        folder: for its record and what this party learns; it is made here, before anything of the party's is used.
    """

    def __init__(self, agreed: Agreed, federation: Federation, folder: Path, own: Own, receipts: Receipts | None):
        self.agreed, self.folder, self._own, self._receipts = agreed, folder, own, receipts
        bound = f"{agreed.proposal.nonce} {agreed.proposal.digest}"
        kept = folder.parent / "kept"
        kept = kept if agreed.source is None else kept / agreed.source.kept(agreed.proposal.job)
        self._file, self._number = federation.file, None
        self._results: Mapping[str, tuple[int, ...]] = {}
        self._ledger = self._agreed_to(federation.name)
        self._parties = federation.taking({}, bound, kept, self._ledger)
        role = self._file.member(federation.name).role or federation.name
        self._me = Party(role, role)  # as a program's sessions name it, unless they have names of their own

    def _agreed_to(self, me: str) -> Ledger:
        """What this party has agreed to reveal; a paper's command, whose settings it has accepted, only notes it."""
        source, accepted = self.agreed.source, self.agreed.accepted
        if source is None:
            return Ledger(me, None, receipt=self._opens)
        found = rehearsed(source, self._file)
        self._results = found.results
        return Ledger(me, found.reveals, accepted.reveals, found.sessions, self._opens, found.digests, found.messages)

    def _opens(self, what: str, to: str, most: int) -> None:
        """A value is about to leave: nothing does without a receipt, where they are kept."""
        if self._receipts is not None and self._number is not None:
            self._receipts.opened(self._number, what, to, most)

    def give_up(self, error: SectorchError) -> None:
        """End it, at all parties."""
        self._parties.give_up(error)

    def take_part(self) -> dict[str, Any]:
        """This party's part; what its starter is told of it.

        Raises:
            Exception: what ended it, which its record says too.
        """
        proposal, limit = self.agreed.proposal, self._own.limits.run_seconds
        self.folder.mkdir(parents=True, mode=0o700)
        record = {
            "run": proposal.nonce, "accepted": self.agreed.accepted.key, "by": proposal.by, "program": proposal.name,
            "digest": proposal.digest, "proposal": proposal.body(), "outcome": "begun",
        }  # fmt: skip
        self._keep(record)
        late = PeerLostError(f"the run took longer than {limit:g} s, which is run_seconds at '{self._parties.name}'")
        timer = threading.Timer(limit, self.give_up, [late])
        timer.daemon = True
        timer.start()
        began, cost = time.perf_counter(), Cost()
        try:
            with query(self._me, self._receipts, session=proposal.nonce, **self._facts()) as asked, cost:
                self._number = asked.number
                try:
                    learned = self._paper() if proposal.kind == "paper" else self._program()
                finally:
                    asked.more["revealed"] = self._ledger.text[:TEXT]
        except BaseException as error:
            self._keep({**record, "outcome": in_full(error), "seconds": time.perf_counter() - began})
            raise
        finally:
            timer.cancel()
        said = {
            "outcome": "done", "seconds": round(time.perf_counter() - began, 3), "learned": learned,
            "rounds": cost.rounds, "online_bytes": cost.online_bytes, "offline_bytes": cost.offline_bytes,
        }  # fmt: skip
        self._keep({**record, **said, "revealed": often(self._ledger.sent)})
        return said

    def _program(self) -> dict[str, list[int]]:
        source = self.agreed.source
        program = source.load() if source is not None else None
        self._parties.inputs = self.agreed.inputs()
        learned = tensors(program(Taking(self._parties))) if program is not None else {}
        for number, (name, value) in enumerate(learned.items()):
            path = self.folder / f"{name if _FILE.fullmatch(name) else number}.npy"
            np.save(path, value.detach().cpu().numpy())
            path.chmod(0o600)
        # Its starter is told what the rehearsal knows: other names and shapes could be chosen by a secret.
        shapes = {name: tuple(value.shape) for name, value in learned.items()}
        return {name[:100]: list(shape) for name, shape in shapes.items() if self._results.get(name) == shape}

    def _paper(self) -> dict[str, list[int]]:
        proposal, accepted = self.agreed.proposal, self.agreed.accepted
        out = self.folder.parent / f"{accepted.what}-{accepted.digest[:12]}-{proposal.job}"
        arguments = [*proposal.arguments, *accepted.own]
        command_of(accepted.what).take_part(arguments, self._parties, out, self._own.files.get("data"))
        return {}

    def _facts(self) -> dict[str, Any]:
        """Of the log's line and the receipts."""
        proposal, accepted = self.agreed.proposal, self.agreed.accepted
        learned = f"what-{accepted.what}-tells-its-parties"
        if self.agreed.source is not None:
            found = rehearsed(self.agreed.source, self._file)
            bounds = ", ".join(map(str, accepted.reveals))
            learned = "; ".join([*found.learned, *([f"within {bounds}"] if bounds else [])]) or "nothing"
        return {
            "call": 0, "client": proposal.by, "key": self._file.member(proposal.by).identity, "model": proposal.name,
            "version": accepted.digest[:16], "asked": "run", "learned": learned[:TEXT],
        }  # fmt: skip

    def _keep(self, record: dict[str, Any]) -> None:
        files.write(self.folder / "run.json", (json.dumps(record, indent=1) + "\n").encode(), 0o600)
