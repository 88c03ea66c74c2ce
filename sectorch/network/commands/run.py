"""`sectorch run`: a program among parties, simulated in this process or as one party of a federation."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from queue import Queue

import torch
from rich.console import Console
from rich.table import Table

from ...choreography.ledger import Cost
from ...cli.command import Parser, above_zero, command_status, print_json
from ...errors import AbortedError, ArgumentError
from ...federated.parties import Simulation, tensors
from ..federation.config import read_federation, read_party_config
from ..federation.party import Federation
from ..federation.programs import dry_run_source, function_of, source_of
from ..federation.service import ProgramStart, describe_proposal
from ..messages import Delivery
from . import array_files
from .options import add_log, begin_log, console, tell


def start(options: argparse.Namespace, screen: Console) -> None:
    """`sectorch run FEDERATION.toml PROGRAM`: start a program among parties that are up, and wait for its end.

    Raises:
        ArgumentError: the command line is invalid. RefusedError: a party has not accepted the program.
        AbortedError: it ended with an error at a party; the text has each party's outcome.
        PeerLostError: a party or the server cannot be reached.
    """
    path, program, arguments = Path(options.program[0]), options.program[1:], options.arguments
    if len(program) != 1 or options.name is None:
        raise ArgumentError(f"sectorch run {path} PROGRAM --as NAME: which program, and which party starts it")
    if options.input or options.out is not None or options.federation is not None:
        raise ArgumentError(
            "--input, --out and --federation are for a party that runs the program itself; a party that is up takes "
            "its inputs from what it accepted, and keeps what it learns among its results"
        )
    notes: Queue[Delivery] = Queue()
    federated = read_federation(path)
    by = federated.member(options.name).name
    proposal = describe_proposal(federated, by, program[0], arguments, options.among, options.job)
    with Federation(path, by, options.folder, patience=options.wait, on_note=notes.put) as federation:
        found = ProgramStart(federation, proposal, notes, tell).run(options.wait)
    if options.json:
        print_json({"run": proposal.nonce, "program": proposal.name, "parties": found})
    else:
        table = Table(title=f"{proposal.name}, run {proposal.nonce[:16]}")
        for column in ("party", "outcome", "seconds", "learned", "rounds", "bytes online"):
            table.add_column(column)
        for name, report in found.items():
            learned = ", ".join(f"{k} {shape}" for k, shape in report.get("learned", {}).items())
            seconds, *figures = (str(report.get(key, "")) for key in ("seconds", "rounds", "online_bytes"))
            table.add_row(name, report["outcome"], seconds, learned or "nothing", *figures)
        screen.print(table)
    failed = [f"{name}: {report['outcome']}" for name, report in found.items() if report["outcome"] != "done"]
    if failed:
        raise AbortedError(f"the run ended. {'; '.join(failed)}. Where all are up, the same command runs it again")


def run(arguments: Sequence[str] | None = None) -> int:
    """`sectorch run`."""
    p = Parser(
        "run",
        "Run a program among parties: all of them in this process, or as one party of a federation.",
        [
            "sectorch run examples/secure_sum.py:program                  all parties in this process",
            "sectorch run examples/secure_sum.py:program --federation federation.toml --as north --input H1=x.npy",
            "sectorch run federation.toml secure_sum.py:program --as north      among parties that are up",
            "sectorch run federation.toml capride --as north -- --parties 3 --rounds 20",
        ],
    )
    p.add_argument(
        "program", nargs="+", metavar="[FEDERATION.toml] PROGRAM",
        help="MODULE:FUNCTION or FILE.py:FUNCTION, of a `sectorch.federated.parties.Parties`; after a federation file "
        "it is started among the parties that are up (`sectorch up`), or is a paper's name with its options after --",
    )  # fmt: skip
    p.add_argument("--federation", type=Path, help="the federation file; a simulation without it")
    p.add_argument("--as", dest="name", help="which of its parties this process is")
    p.add_argument("--folder", type=Path, help="where this party's certificate and keys are; that of the file")
    p.add_argument("--input", action="append", default=[], metavar="NAME=FILE", help="a tensor that the program takes")
    p.add_argument("--out", type=Path, help="file for what this party learns: .npy, .npz or .safetensors")
    p.add_argument(
        "--among", nargs="+", default=[], metavar="NAME", help="of the parties that are up; all of the program"
    )
    p.add_argument("--job", default="1", help="which of several runs of the same to go on with")
    p.add_argument(
        "--wait", type=above_zero, default=600.0, help="seconds to wait for the server and the other parties"
    )
    add_log(p)
    p.takes_json("what this party learned and sent")
    p.rest = "arguments"
    return command_status(p, arguments, _run)


def _run(options: argparse.Namespace, screen: Console) -> None:
    begin_log(options)
    logging.getLogger("sectorch.federation").setLevel(logging.INFO)
    if options.program[0].endswith(".toml"):
        start(options, screen)
        return
    if len(options.program) > 1 or options.among or options.arguments:
        raise ArgumentError("a program is one word, and options after -- and --among are for parties that are up")
    if (options.federation is None) != (options.name is None):
        raise ArgumentError("--federation and --as go together: the file, and which of its parties this process is")
    if options.out is not None:
        array_files.check_out(options.out)
    program, inputs = function_of(options.program[0]), _inputs(options.input)
    kept = source_of(options.program[0]).folder_name(options.job)
    waits = dict(patience=options.wait, wait=options.wait)
    if options.federation is not None:  # before it dials: checks roles and edges
        if read_party_config(options.federation, options.name, options.folder).policy is not None:
            raise ArgumentError(
                f"'{options.name}' releases under a policy ([governed] in its file), to which a run by this command is "
                f"not held: `sectorch federation accept` the program, and start it among the parties that are up"
            )
        dry_run_source(program, read_federation(options.federation))
    with Cost() as cost:
        if options.federation is None:
            found = program(Simulation(inputs, Path("kept") / kept))
        else:
            with Federation(options.federation, options.name, options.folder, inputs, **waits) as federation:
                console.print(f"{federation.name} is connected to {federation.address}", highlight=False)
                found = program(federation.for_run(inputs, "", federation.folder / kept))
    learned = tensors(found)
    if options.out is not None and learned:
        array_files.write_arrays(learned if len(learned) > 1 else next(iter(learned.values())), options.out)
    if options.json:
        values = {key: value.tolist() for key, value in learned.items()}
        print_json({"party": options.name, "learned": values, "cost": cost.as_dict()})
    else:
        _show(learned, options.name, screen)
        screen.print(cost.learned())
        sent = f"{cost.online_bytes} bytes online and {cost.offline_bytes} offline, all parties"
        screen.print(f"{cost.seconds:.1f} s; {cost.rounds} rounds online, {sent}", highlight=False)


def _inputs(given: list[str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for entry in given:
        name, equals, path = entry.partition("=")
        if not equals or name in found:
            raise ArgumentError(f"--input is NAME=FILE, each name once; got {entry[:80]!r}")
        read = array_files.read_arrays(Path(path))
        if not isinstance(read, torch.Tensor):
            raise ArgumentError(f"{path} holds several arrays; --input {name} takes one: a .npy")
        found[name] = read
    return found


def _show(learned: dict[str, torch.Tensor], name: str | None, screen: Console) -> None:
    table = Table(title=f"What {'the parties' if name is None else name} learned")
    for column in ("name", "shape", "values"):
        table.add_column(column)
    for key, value in learned.items():
        first = ", ".join(f"{x:.6g}" for x in value.reshape(-1)[:6].tolist())
        table.add_row(key, str(list(value.shape)), first + (", ..." if value.numel() > 6 else ""))
    if not learned:
        table.add_row("nothing", "", "")
    screen.print(table)
