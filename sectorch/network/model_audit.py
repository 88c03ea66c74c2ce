"""A's record of a decoy as a file, and `sectorch check-model`. Its own file: what an auditor with the weights runs.

A record has what A holds of one decoy: S's signed statement, the keys of the call's streams and of the masks of the
weights, the seed of the made-up input, the messages that A has sent S, and the salt that opens the model's version.
With the weights, all messages of A are computed again. A record shows no other call, not even to S: other calls have
streams of their own. With the record S could remove the mask of the weights, so it is for the auditor alone.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import files
from ..choreography.program.projection import Setup
from ..choreography.streams import SECRET_BYTES, DisclosedKey
from ..cli.command import Parser, command_status, print_json
from ..config import Scheme
from ..decoys import DecoyCheck, Statements
from ..errors import ArgumentError, DecoyError, FalseServerError
from ..sealed import write_tensors
from ..serving.description import from_json
from ..serving.model_file import read_model
from ..session import Session
from .identity.commitment import opens, signer_of
from .identity.identity import fingerprint
from .names import readable
from .server_evidence import CallHead, call_facts, read_call, trace_program

KIND = "sectorch record of a decoy 1"


class RecordHead(CallHead, frozen=True, kw_only=True):
    """The facts of a record; its values are the messages from A to S in the setup, and in the call.

    Attributes:
        signed: A's signature of the version. salt: opens the version, together with the weights.
        seed: of the made-up input. between: the secret of the streams of Q and A in the call.
        setup_call: the number that addresses the setup's draws. labels: the keys of its streams between Q and A.
        numbers: of its draws (`Setup.draw_numbers`).
    """

    signed: str
    salt: str
    seed: str
    between: str
    setup_call: int
    labels: dict[str, str]
    numbers: list[int]
    counts: tuple[int, int]


def write_record(
    path: Path, check: DecoyCheck, description: dict, scheme: Scheme, facts: dict[str, str], signed: str, salt: bytes
) -> None:
    """Write the record of a decoy, which only its owner can read.

    Args:
        facts: model, version and time. signed: A's signature of the version. salt: that opens it.

    Raises:
        OSError: it cannot be written.
    """
    head = {
        "kind": KIND, **call_facts(check, check.program, description, scheme, facts), "signed": signed,
        "salt": salt.hex(), "seed": check.seed.hex(), "between": check.between.of_call(check.statement.call).hex(),
        "setup_call": check.setup.call, "labels": {name: key.hex() for name, key in check.between.labels.items()},
        "numbers": check.setup.draw_numbers(check.program), "counts": [len(check.received), len(check.sent)],
    }  # fmt: skip
    parts, _ = write_tensors(head, [*check.received, *check.sent])
    files.write(path, b"".join(bytes(part) for part in parts), 0o600)


def read_record(path: Path, weights: dict[str, torch.Tensor]) -> tuple[RecordHead, DecoyCheck, dict[str, torch.Tensor]]:
    """Read a record, and trace its program with these weights; gives the weights by their names in the program.

    Raises:
        ArgumentError: it is no record, or the weights do not open its version.
        DecoyError: its description has no program that S has signed for.
        ProgramError: the weights are not of its description.
    """

    def content(head: RecordHead, values: list[torch.Tensor]) -> tuple[bytes, ...]:
        secrets = tuple(map(bytes.fromhex, (head.with_Q, head.with_A, head.setup_key, head.seed, head.between)))
        keys = [bytes.fromhex(key) for key in head.labels.values()]
        if any(len(secret) != SECRET_BYTES for secret in secrets) or any(len(key) != 16 for key in keys):
            raise ValueError
        if sum(head.counts) != len(values) or not 0 <= head.setup_call < 1 << 32:
            raise ValueError
        messages.extend(values)
        bytes.fromhex(head.salt)
        head.read_statement()
        return secrets

    messages: list[torch.Tensor] = []
    head, (with_Q, with_A, setup_key, seed, between) = read_call(path, RecordHead, KIND, content, "record of a decoy")
    if not opens(head.version, from_json(head.description.encode()), weights, bytes.fromhex(head.salt)):
        raise ArgumentError(
            f"these weights do not open version {head.version[:16]}... of '{readable(head.model, 200)}': this is "
            f"another model, or a record of another version"
        )
    program, own = trace_program(head, weights)
    received, statement = head.counts[0], head.read_statement()
    try:
        setup = Setup.of_numbers(head.setup_call, program, head.numbers)
    except ValueError:
        raise ArgumentError(f"{path} is no record of a decoy of this program") from None
    labels = {name: bytes.fromhex(key) for name, key in head.labels.items()}
    check = DecoyCheck(
        program, setup, statement, with_Q, with_A, setup_key, seed, messages[:received], messages[received:],
        Statements(Session(dry=True)), DisclosedKey(statement.session, {statement.call: between}, labels),
        torch.device("cpu"),
    )  # fmt: skip
    return head, check, own


def check_model_command(arguments: Sequence[str] | None = None) -> int:
    """`sectorch check-model`."""
    p = Parser(
        "check-model",
        "Check, as an auditor who has the weights, that a decoy was answered with the model of the version in the\n"
        "receipts: all messages of the answering party are computed again.",
        ["sectorch check-model decoy-1f03.record model.safetensors --version 8c2e... --key SHA256:..."],
    )
    p.add_argument("record", type=Path, help="the file that `sectorch answer --keep-decoys` has written")
    p.add_argument("model", type=Path, help="the model file that the answering party shows you")
    p.add_argument("--version", help="the version that the client's receipts have")
    p.add_argument("--key", metavar="FINGERPRINT", help="who has to have signed: the fingerprint of the server's key")
    p.takes_json("what it shows")
    return command_status(p, arguments, _check_model)


def _check_model(options: argparse.Namespace, console: Console) -> None:
    _, weights = read_model(options.model)
    head, check, own = read_record(options.record, weights)
    key = fingerprint(check.statement.public)
    if options.key not in (None, key):
        raise DecoyError(f"the record is signed by {key} and not by {options.key}")
    if options.version not in (None, head.version):
        raise ArgumentError(f"the record is of version {head.version} and not of {options.version}")
    signed_by = signer_of(head.signed, head.model, head.version)
    try:
        check.statement.check()
    except FalseServerError as error:
        raise DecoyError(f"no record of a decoy: {error}") from None
    check.check_model(own)
    one = hashlib.sha256(check.statement.to_message()).digest()
    facts: dict[str, Any] = {
        "key": key, "session": head.session, "call": head.call, "program": head.program, "model": head.model,
        "version": head.version, "signed_by": signed_by, "statement": hashlib.sha256(one).hexdigest(),
        "found_at": head.found_at,
    }  # fmt: skip
    if options.json:
        print_json(facts)
        return
    known = "" if options.key else ", which is for you to compare with what the server's operator published (--key)"
    ours = "" if options.version else ", which is for you to compare with the client's receipts (--version)"
    for line in (
        f"the answering party has computed call {head.call} with these weights, to the last bit",
        f"they open version {head.version} of '{head.model}'{ours}",
        f"that version is signed by {signed_by}, and the call by the server's key {key}{known}",
        f"the client's receipt of a query of this call alone has the statement {facts['statement']}",
    ):
        console.print(readable(line, 400), markup=False, highlight=False, soft_wrap=True)
