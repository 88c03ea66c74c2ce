"""Evidence against a server as a file, and `sectorch evidence`. Its own file: what a third party runs and reads.

The file has S's statement of one call with its signature, the keys of S's two streams in that call, all messages that S
has received for it, and the model's description, from which the program is traced. Nothing of it runs: a description
is read as one that came over the network. What it shows to whom is in docs/decoys.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from .. import files
from ..choreography.program.trace import Program
from ..cli.command import Parser, command_status, print_json
from ..config import Scheme
from ..decoys import ServerEvidence
from ..errors import ArgumentError, DecoyError, SectorchError
from ..mpc.star.statement import STATEMENT_BYTES, Statement
from ..nn.module import SecureModule
from ..sealed import SealedHead, read_tensors, write_tensors
from ..serving.description import from_json, load_program, to_json
from ..session import Session
from .identity.identity import fingerprint
from .messages import NumberFormat
from .names import readable
from .parties.session import scheme_from_message, scheme_to_message

KIND = "sectorch evidence against a server 1"
LARGEST = 1 << 34
"""Bytes of a file that is read."""


class EvidenceHead(SealedHead, frozen=True, kw_only=True):
    """The facts of a file of evidence; its values are the messages from A in the setup, from Q, and from A."""

    kind: str
    model: str
    version: str
    found_at: str
    description: str
    scheme: NumberFormat
    rows: int
    session: str
    program: str
    call: int
    statement: str
    with_Q: str
    with_A: str
    setup_key: str
    counts: tuple[int, int, int]


def write_evidence(
    path: Path, evidence: ServerEvidence, program: Program, description: dict, scheme: Scheme, facts: dict[str, str]
) -> None:
    """Write a file of evidence, which only its owner can read.

    Args:
        program: of the call, which the description gives.
        facts: model, version and time, for people.

    Raises:
        OSError: it cannot be written.
    """
    statement = evidence.statement
    head = {
        "kind": KIND, **{name: facts.get(name, "") for name in ("model", "version", "found_at")},
        "description": to_json(description).decode(), "scheme": msgspec.to_builtins(scheme_to_message(scheme)),
        "rows": max((i.shape[0] for i in program.inputs if i.party.role == "Q" and i.shape), default=0),
        "session": statement.session.hex(), "program": statement.program, "call": statement.call,
        "statement": statement.to_message().hex(), "with_Q": evidence.with_Q.hex(), "with_A": evidence.with_A.hex(),
        "setup_key": evidence.setup_key.hex(),
        "counts": [len(evidence.setup), len(evidence.from_Q), len(evidence.from_A)],
    }  # fmt: skip
    parts, _ = write_tensors(head, [*evidence.setup, *evidence.from_Q, *evidence.from_A])
    files.write(path, b"".join(bytes(part) for part in parts), 0o600)


def read_evidence(path: Path) -> tuple[EvidenceHead, ServerEvidence]:
    """Read a file of evidence; nothing is checked but its form.

    Raises:
        ArgumentError: it cannot be read, or is no such file.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ArgumentError(f"{path} is larger than {LARGEST >> 30} GiB, and no evidence against a server")
        head, values = read_tensors(bytearray(path.read_bytes()), EvidenceHead)
        statement = bytes.fromhex(head.statement)
        setup, from_Q, _ = head.counts
        if head.kind != KIND or len(statement) != STATEMENT_BYTES or sum(head.counts) != len(values):
            raise ValueError
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise ValueError
        session = bytes.fromhex(head.session)
        evidence = ServerEvidence(
            Statement.from_message(session, head.program, head.call, statement), bytes.fromhex(head.with_Q),
            bytes.fromhex(head.with_A), bytes.fromhex(head.setup_key), values[:setup], values[setup : setup + from_Q],
            values[setup + from_Q :],
        )  # fmt: skip
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError):
        raise ArgumentError(f"{path} is no evidence against a server of this version of sectorch") from None
    return head, evidence


def program_of(head: EvidenceHead) -> Program:
    """The program of the call, traced from the model's description.

    Raises:
        DecoyError: the description has no program of this digest.
    """
    served = load_program(from_json(head.description.encode()))
    scheme = served.scheme(scheme_from_message(head.scheme))
    session = Session(dry=True)
    module = SecureModule(served, session, session.answering[0], scheme, None)
    for number in range(len(served.calls)):
        for rows in dict.fromkeys((head.rows, 0)):
            with suppress(SectorchError):
                program = module.choreography(served.inputs((number, rows)))
                if program.digest == head.program:
                    return program
    raise DecoyError("no evidence: its description of the model has no program that S has signed for")


def evidence_command(arguments: Sequence[str] | None = None) -> int:
    """`sectorch evidence`."""
    p = Parser(
        "evidence",
        "Check a file of evidence against a server: that it signed for messages which its program does not give.",
        ["sectorch evidence false-server-1f03.evidence --key SHA256:..."],
    )
    p.add_argument("file", type=Path, help="the file that `sectorch answer --audit-server` has written")
    p.add_argument("--key", metavar="FINGERPRINT", help="who has to have signed: the fingerprint of the server's key")
    p.takes_json("what it shows")
    return command_status(p, arguments, _evidence)


def _evidence(options: argparse.Namespace, console: Console) -> None:
    head, evidence = read_evidence(options.file)
    key = fingerprint(evidence.statement.public)
    if options.key not in (None, key):
        raise DecoyError(f"no evidence: it is signed by {key} and not by {options.key}")
    evidence.check(program_of(head))
    facts: dict[str, Any] = {
        "key": key, "session": head.session, "call": head.call, "program": head.program, "model": head.model,
        "version": head.version, "found_at": head.found_at,
    }  # fmt: skip
    if options.json:
        print_json(facts)
        return
    known = "" if options.key else ", which is for you to compare with what the server's operator published (--key)"
    for line in (
        f"the server has signed for messages of call {head.call} that its program does not give on what it received",
        f"signed by {key}{known}",
        f"session {head.session}, program {head.program}",
        f"as the file says, of '{head.model}' {head.version}, found at {head.found_at}",
    ):
        console.print(readable(line, 400), markup=False, highlight=False, soft_wrap=True)
