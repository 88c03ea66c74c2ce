"""Evidence against a server as a file, and `sectorch evidence`. Its own file: what a third party runs and reads.

The file has S's statement of one call with its signature, the keys of S's two streams in that call, all messages that S
has received for it, and the model's description, from which the program is traced. Nothing of it runs: a description
is read as one that came over the network. What it shows to whom is in docs/decoys.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from rich.console import Console

from .. import files
from ..choreography.program.trace import Program
from ..cli.command import Parser, command_status, print_json
from ..config import Scheme
from ..decoys import DecoyCheck, ServerEvidence
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


class CallHead(SealedHead, frozen=True, kw_only=True):
    """The facts of a file about one call that S has signed for. Its repr shows nothing."""

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def read_statement(self) -> Statement:
        """S's statement; its signature is not checked. Raises ValueError for anything else."""
        message = bytes.fromhex(self.statement)
        if len(message) != STATEMENT_BYTES:
            raise ValueError
        return Statement.from_message(bytes.fromhex(self.session), self.program, self.call, message)


class EvidenceHead(CallHead, frozen=True, kw_only=True):
    """The facts of a file of evidence; its values are the messages from A in the setup, from Q, and from A."""

    counts: tuple[int, int, int]


def call_facts(
    call: ServerEvidence | DecoyCheck, program: Program, description: dict, scheme: Scheme, facts: dict[str, str]
) -> dict[str, Any]:
    """What `CallHead` has, without the kind. For the arguments see `write_evidence`."""
    statement = call.statement
    return {
        **{name: facts.get(name, "") for name in ("model", "version", "found_at")},
        "description": to_json(description).decode(), "scheme": msgspec.to_builtins(scheme_to_message(scheme)),
        "rows": max((i.shape[0] for i in program.inputs if i.party.role == "Q" and i.shape), default=0),
        "session": statement.session.hex(), "program": statement.program, "call": statement.call,
        "statement": statement.to_message().hex(), "with_Q": call.with_Q.hex(), "with_A": call.with_A.hex(),
        "setup_key": call.setup_key.hex(),
    }  # fmt: skip


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
    head = {
        "kind": KIND, **call_facts(evidence, program, description, scheme, facts),
        "counts": [len(evidence.setup), len(evidence.from_Q), len(evidence.from_A)],
    }  # fmt: skip
    parts, _ = write_tensors(head, [*evidence.setup, *evidence.from_Q, *evidence.from_A])
    files.write(path, b"".join(bytes(part) for part in parts), 0o600)


def read_evidence(path: Path) -> tuple[EvidenceHead, ServerEvidence]:
    """Read a file of evidence; nothing is checked but its form.

    Raises:
        ArgumentError: it cannot be read, or is no such file.
    """

    def content(head: EvidenceHead, values: list[torch.Tensor]) -> ServerEvidence:
        setup, from_Q, _ = head.counts
        if sum(head.counts) != len(values):
            raise ValueError
        return ServerEvidence(
            head.read_statement(), bytes.fromhex(head.with_Q), bytes.fromhex(head.with_A),
            bytes.fromhex(head.setup_key), values[:setup], values[setup : setup + from_Q], values[setup + from_Q :],
        )  # fmt: skip

    return read_call(path, EvidenceHead, KIND, content, "evidence against a server")


Head = TypeVar("Head", bound=CallHead)
Content = TypeVar("Content")


def read_call(
    path: Path, of: type[Head], kind: str, content: Callable[[Head, list[torch.Tensor]], Content], what: str
) -> tuple[Head, Content]:
    """Read a file about one call. `content` raises ValueError where the head and the tensors do not fit.

    Raises:
        ArgumentError: the file cannot be read, or is of another kind.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ArgumentError(f"{path} is larger than {LARGEST >> 30} GiB, and no {what}")
        head, values = read_tensors(bytearray(path.read_bytes()), of)
        if head.kind != kind or not all(isinstance(value, torch.Tensor) for value in values):
            raise ValueError
        return head, content(head, values)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError):
        raise ArgumentError(f"{path} is no {what} of this version of sectorch") from None


def trace_program(
    head: CallHead, weights: dict[str, torch.Tensor] | None = None
) -> tuple[Program, dict[str, torch.Tensor]]:
    """The program of the call, traced from the model's description, and A's inputs of it where weights are given.

    Raises:
        DecoyError: the description has no program of this digest.
        ProgramError: the weights are not of this description.
    """
    served = load_program(from_json(head.description.encode()), weights)
    scheme = served.scheme(scheme_from_message(head.scheme))
    session = Session(dry=weights is None)
    module = SecureModule(served, session, session.answering[0], scheme, None)
    for number in range(len(served.calls)):
        for rows in dict.fromkeys((head.rows, 0)):
            with suppress(SectorchError):
                inputs = served.inputs((number, rows))
                program = module.choreography(inputs)
                if program.digest == head.program:
                    own = {} if weights is None else module._program_inputs(inputs)
                    return program, {name: value for name, value in own.items() if name not in inputs.names}
    raise DecoyError("its description of the model has no program that S has signed for")


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
    evidence.check(trace_program(head)[0])
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
