"""`sectorch run FEDERATION.toml PROGRAM`: start a program among parties that are up, and say how it ended at each."""

from __future__ import annotations

import argparse
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.table import Table

from ...cli.command import print_json
from ...errors import AbortedError, ArgumentError
from ..federation.file import read
from ..federation.party import Federation
from ..federation.start import Start, described
from ..messages import Delivered
from .options import tell


def start(options: argparse.Namespace, screen: Console) -> None:
    """Start it, and wait for its end.

    Raises:
        ArgumentError: a command line that is not right. RefusedError: a party has not accepted it.
        AbortedError: it did not end well at all parties; the text says how at each.
        PeerLostError: somebody, or the server, is not there.
    """
    path, program, arguments = Path(options.program[0]), options.program[1:], options.arguments
    if len(program) != 1 or options.name is None:
        raise ArgumentError(f"sectorch run {path} PROGRAM --as NAME: which program, and which party starts it")
    if options.input or options.out is not None or options.federation is not None:
        raise ArgumentError(
            "--input, --out and --federation are for a party that runs the program itself; a party that is up takes "
            "its inputs from what it accepted, and keeps what it learns among its results"
        )
    notes: Queue[Delivered] = Queue()
    federated = read(path)
    by = federated.member(options.name).name
    proposal = described(federated, by, program[0], arguments, options.among, options.job)
    with Federation(path, by, options.folder, patience=options.wait, on_note=notes.put) as federation:
        found = Start(federation, proposal, notes, tell).run(options.wait)
    if options.json:
        print_json({"run": proposal.nonce, "program": proposal.name, "parties": found})
    else:
        table = Table(title=f"{proposal.name}, run {proposal.nonce[:16]}")
        for column in ("party", "outcome", "seconds", "learned", "rounds", "bytes online"):
            table.add_column(column)
        for name, said in found.items():
            learned = said.get("learned") or {}
            what = ", ".join(f"{k} {list(v)}" for k, v in learned.items()) if isinstance(learned, dict) else ""
            figures = (str(said.get(key, "")) for key in ("rounds", "online_bytes"))
            table.add_row(name, str(said["outcome"]), str(said.get("seconds", "")), what or "nothing", *figures)
        screen.print(table)
    failed = [f"{name}: {said['outcome']}" for name, said in found.items() if said["outcome"] != "done"]
    if failed:
        raise AbortedError(f"the run ended. {'; '.join(failed)}. Where all are up, the same command runs it again")
