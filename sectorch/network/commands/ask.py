"""`sectorch query`, which asks a model or prepares for it, and `sectorch models`, which lists the models."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save

from ... import files
from ...choreography.ledger import Cost
from ...cli.command import Parser, add_link, at_least, bars, chosen_network, command_status, print_json
from ...config import Scheme, limit_bits_of
from ...decoys import Decoys, KnownAnswers
from ...errors import ArgumentError, RangeExceededError, StoreInUseError
from ...nn.inputs import Inputs
from ..federation.config import ListedPins, credentials, read_federation, read_party_config
from ..identity.certificate_files import check_own_files
from ..identity.identity import Credentials, Pins, ServerKey
from ..observe import add_traces, tracing
from ..parties.client import connect
from ..parties.remote_model import RemoteModel
from ..store import Store
from ..warm_up import warm
from .array_files import Given, as_array, batches, by_name, check_out, in_json, join_batches, read_arrays, write_arrays
from .options import (
    add_client,
    add_log,
    add_patience,
    add_pins,
    add_receipts,
    begin_log,
    check_room,
    console,
    pins_of,
    tell,
)

# The asking party: named by certificate, key and pins, or by a federation file, which has all of these.


def add_asker(p: Parser) -> None:
    """Add the options of the asking party."""
    add_client(p, required=False)
    p.add_argument("--federation", type=Path, metavar="FILE", help="all of these from a federation file, with --as")
    p.add_argument("--as", dest="party", metavar="NAME", help="which of its parties asks")
    p.add_argument("--folder", type=Path, help="where that party's certificate and keys are; the file's folder")
    add_pins(p)


def asking_party(options: argparse.Namespace, model: str = "") -> tuple[str, Credentials, Pins]:
    """The server's address, and this party's credentials and pins.

    Args:
        model: the model to ask, `PARTY` or `PARTY/NAME`.

    Raises:
        ArgumentError: options contradict each other, or a file is invalid.
        IdentityError: see `check_own_files` and `federation.config.credentials`.
    """
    pairs = (options.cert, options.key, options.ca)
    if options.federation is None:
        if None in pairs or options.party is not None:
            raise ArgumentError("say who asks: --cert, --key and --ca, or --federation FILE and --as NAME")
        return options.server, check_own_files(*pairs, options.identity), pins_of(options)
    if options.party is None or any(pairs) or options.pins or options.trust_on_first_use:
        raise ArgumentError("--federation FILE and --as NAME say who asks and whom it knows: leave the other out")
    federated = read_federation(options.federation)
    folder = read_party_config(options.federation, options.party, options.folder).folder
    own = credentials(federated, options.party, folder)
    other = federated.member(model.partition("/")[0]).name if model else options.party
    at = other if model and other in federated.servers else federated.home(other)
    known = {member.name: member.identity for member in federated.members if member.identity}
    return federated.servers[at], own, ListedPins(known, str(options.federation))


Result = dict[str, torch.Tensor] | None
BATCH = 32
"""Rows of a query, at least, where none are named: a query costs each party some 0.1 s, however few its rows are."""
BATCH_MEMORY = 32 << 20
"""Bytes that a larger query takes at a party, about."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a job asks: the results of another question are not used for it.

    Attributes:
        inputs: SHA-256 of the file of inputs. batch: rows per query.
        network, limit, checked: of the number format (`Scheme.network`, `--activation-limit`, `Scheme.range_check`).
    """

    inputs: str
    model: str
    version: str
    batch: int
    network: str
    limit: float | None
    checked: bool


class ResultFiles:
    """The results of a job's batches on disk, so that a job that was killed continues where it was.

        OUT.parts/about.json            the question
        OUT.parts/NUMBER.safetensors    the result of a batch, or NUMBER.withheld if it has none

    Args:
        out: the file of the complete result.
        question: of the job.

    Raises:
        ArgumentError: the folder has results of another question, or cannot be used.
    """

    def __init__(self, out: Path, question: Question):
        self.folder = out.with_name(f"{out.name}.parts")
        about = self.folder / "about.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if about.exists() and msgspec.json.decode(about.read_bytes(), type=Question) != question:
                raise ArgumentError(
                    f"{self.folder} holds results of another question: remove it, or name another --out"
                )
            files.write(about, msgspec.json.encode(question))
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise ArgumentError(f"cannot use {self.folder}: {error}") from None

    @classmethod
    def begun(cls, out: Path) -> Question | None:
        """The question of a job that was begun and has no complete result; None without one."""
        with suppress(OSError, msgspec.MsgspecError, UnicodeError):
            return msgspec.json.decode((out.with_name(f"{out.name}.parts") / "about.json").read_bytes(), type=Question)
        return None

    def result(self, number: int, ask: Callable[[], Any]) -> Result:
        """The result of a batch, by name: the one on disk, or what `ask` gives, which is written first."""
        path, withheld = self.folder / f"{number:06d}.safetensors", self.folder / f"{number:06d}.withheld"
        if withheld.exists():
            return None
        if not path.exists():
            result = ask()
            if result is None:
                files.write(withheld, b"")
                return None
            files.write(path, save({name: value.contiguous().clone() for name, value in by_name(result).items()}))
        return load_file(path)

    def remove(self) -> None:
        """Remove the batches; the complete result is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def query(arguments: Sequence[str] | None = None) -> int:
    """`sectorch query`."""
    p = Parser(
        "query",
        "Ask a model, or prepare for asking it. You alone learn the result.",
        (
            "sectorch query hospital-b images.npy --cert alice.pem --key alice-key.pem --ca ca.pem --out logits.npy",
            "sectorch query tagger texts.npz --cert alice.pem --key alice-key.pem --ca ca.pem --out tags.npz",
            "sectorch query hospital-b images.npy --federation federation.toml --as hospital-a",
            "sectorch query hospital-b --prepare 1000 --cert alice.pem --key alice-key.pem --ca ca.pem",
        ),
    )
    p.add_argument("name", help="which model to ask; `sectorch models` lists them")
    p.add_argument("inputs", type=Path, nargs="?", help="a .npy file, or arrays by name (.npz, .safetensors)")
    add_asker(p)
    p.add_argument("--out", type=Path, help="where to write the predictions (.npy, .npz, .safetensors)")
    p.add_argument(
        "--batch",
        type=at_least(1),
        help=f"rows per query; {BATCH}, or more where a row takes little memory, and "
        "to be named where rows may depend on each other",
    )
    p.add_argument(
        "--prepare", type=at_least(0), default=0, help="have so many rows prepared ahead; what is at hand counts"
    )
    add_link(p)
    p.add_argument(
        "--activation-limit", type=float, metavar="L", help="a power of two that inputs and activations are below; 4096"
    )
    p.add_argument("--no-range-check", action="store_true", help="trust model and inputs to stay below it")
    p.add_argument(
        "--audited",
        type=at_least(1),
        default=1,
        metavar="N",
        help="use one of N calls, and have what is dealt in others looked at",
    )
    p.add_argument("--verified", action="store_true", help="prove what is dealt")
    p.add_argument(
        "--decoys", type=float, metavar="RATE",
        help="have the server sign what it sends, and this fraction of all calls checked, on inputs that are made up",
    )  # fmt: skip
    p.add_argument(
        "--server-key", default="", metavar="KEY",
        help="with --decoys, the fingerprint of the key with which the server has to sign",
    )  # fmt: skip
    p.add_argument(
        "--known-answers", type=Path, metavar="FILE",
        help="rows x whose answers or labels you know (.npz, .safetensors), asked among your own: others end the job",
    )  # fmt: skip
    p.add_argument("--known-rate", type=float, metavar="RATE", help="the probability that a call is on these; 0.05")
    p.add_argument(
        "--known-accuracy",
        type=float,
        metavar="A",
        help="with labels, the fraction that the model was said to get right",
    )
    p.add_argument("--model-version", metavar="VERSION", help="ask this version of the model only; --json shows it")
    p.add_argument("--store", type=Path, help="folder for prepared material")
    add_patience(p)
    add_log(p)
    add_receipts(p)
    add_traces(p)
    p.takes_json("figures, and the predictions unless --out takes them,")
    p.parse_args = p.parse_intermixed_args  # the optional file of inputs may come after options
    return command_status(
        p,
        arguments,
        _query,
        "stopped; the other parties were told, what was prepared is kept, and --out goes on where it was",
    )


def _query(options: argparse.Namespace, _: Console) -> None:
    check_room(options)
    begin_log(options, logging.WARNING)
    if options.inputs is None and not options.prepare:
        raise ArgumentError("name a file of inputs, or rows to --prepare")
    limit = None if options.activation_limit is None else limit_bits_of(options.activation_limit)
    checked, levels = not options.no_range_check, {"audited": options.audited, "verified": options.verified}
    accountable, rate = options.decoys is not None, options.decoys or 0.0
    if accountable and options.prepare:
        raise ArgumentError(
            "--prepare is for later commands, and the server signs in the session that prepared: leave "
            "--decoys or --prepare out"
        )
    scheme = Scheme(
        network=chosen_network(options), range_check=checked, limit_bits=limit, accountable=accountable, **levels
    )
    Decoys(rate).check(accountable)
    ServerKey(options.server_key)
    if options.server_key and not accountable:
        raise ArgumentError("the server signs with --decoys alone: add it, or leave --server-key out")
    given = None if options.inputs is None else read_arrays(options.inputs)
    answers = _known_answers(options)
    if options.out is not None:
        check_out(options.out)
        if options.inputs is not None and options.out.exists() and options.out.samefile(options.inputs):
            raise ArgumentError(f"{options.out} holds the inputs, which would be lost; name another file with --out")
    at, credentials, known = asking_party(options, options.name)
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    folder = options.store or data / "sectorch" / credentials.name
    kept = _own_store(folder, needed=options.prepare > 0)
    kept_in = options.receipts
    with (
        tracing(options),
        connect(at, credentials, pins=known, store=kept, silence=options.patience, receipts=kept_in) as connection,
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(warm, tell)  # while the session begins and the other parties work
        model = connection.model(
            options.name, scheme, version=options.model_version, decoys=rate, server_key=options.server_key,
            known=answers,
        )  # fmt: skip
        model.only = model.version  # all rows of a job are answered by one
        figures: dict[str, Any] = {"version": model.version}
        if options.prepare:
            _prepare(model, options.prepare, options.batch or BATCH)
            figures["prepared_rows"] = options.prepare
        if given is not None:
            figures |= _ask(model, given, options)
        if answers is not None:
            figures |= {"known_rows": answers.rows, "known_right": answers.right}
            if not options.json:
                console.print(f"{answers.rows} rows with known answers were asked, {answers.right} answered as known")
        if accountable:
            figures |= {"decoys": model.decoys_asked, "decoys_checked": model.decoys_checked}
            if not options.json:
                console.print(
                    f"{model.decoys_asked} decoys, of which A has reported {model.decoys_checked} right so far"
                )
        model.close()
    withheld = figures.pop("withheld", [])
    if options.json:
        print_json(figures)
    if withheld:
        named = ", ".join(withheld[:8]) + (f" and {len(withheld) - 8} more batches" if len(withheld) > 8 else "")
        raise RangeExceededError(
            f"no predictions for rows {named}, which are nan (null in JSON): a value between input and result left its "
            f"range. The other rows are right, and the other parties do not know; asking again may tell them"
        )


def _known_answers(options: argparse.Namespace) -> KnownAnswers | None:
    """The rows of `--known-answers`.

    Raises:
        ArgumentError: the file has no x with answers or labels, or a number is out of its range.
    """
    rate, accuracy = options.known_rate, options.known_accuracy
    if options.known_answers is None:
        if (rate, accuracy) != (None, None):
            raise ArgumentError("--known-rate and --known-accuracy are of rows in --known-answers FILE: name it")
        return None
    if options.inputs is None:
        raise ArgumentError("known answers are asked among your own questions: name a file of inputs")
    found = read_arrays(options.known_answers)
    if not isinstance(found, dict) or set(found) not in ({"x", "answers"}, {"x", "labels"}):
        names = "one array" if isinstance(found, torch.Tensor) else ", ".join(sorted(found))
        raise ArgumentError(f"{options.known_answers} has to hold x, and answers or labels; it holds {names}")
    return KnownAnswers(
        found["x"], found.get("answers"), labels=found.get("labels"), rate=0.05 if rate is None else rate,
        accuracy=1.0 if accuracy is None else accuracy,
    )  # fmt: skip


def _prepare(model: RemoteModel, rows: int, batch: int) -> None:
    """Prepare calls until there are enough for so many rows; after an interruption this continues where it was."""
    if len(model.served.calls) > 1:
        raise ArgumentError(f"--prepare is for models of one kind of call; in Python, prepare(Inputs(...)). {model!r}")
    call = model.served.calls[0]
    batch = batch if call.least else call.inputs.rows or 1
    whole = call.of(batch if call.least else 0)
    missing = -(-rows // batch) if not call.least else rows // batch
    calls = [(whole, batch)] * max(0, missing - model.prepared_calls(whole))
    if call.least and rows % batch:
        rest = call.of(rows % batch)
        calls += [(rest, rows % batch)] if not model.prepared_calls(rest) else []
    with bars(console) as progress:
        task = progress.add_task("preparing", total=rows, completed=rows - sum(count for _, count in calls))
        for inputs, count in calls:
            model.prepare(inputs)
            progress.advance(task, count)
    sizes = [batch] * (missing > 0) + [rows % batch] * bool(call.least and rows % batch)
    of = " and ".join(map(str, sizes))
    console.print(f"{rows} rows are prepared, in calls of {of}, for queries of as many rows (--batch)")


def _batch(model: RemoteModel, given: Given, options: argparse.Namespace) -> int:
    """The rows of a query where none are named: those of a job that goes on, of prepared calls, or `BATCH` and more.

    Where the server or the model's owner looks into some of the calls, it depends on their rows what that shows.

    Raises:
        ArgumentError: there are more, and the model's program does not show that a row's result depends on that row
            alone.
    """
    begun = None if options.out is None else ResultFiles.begun(options.out)
    if begun is not None:
        return begun.batch
    first, *others = batches(model.served, given, BATCH)
    if others and not model.can_cut(first):
        rows = sum(piece.rows or 1 for piece in (first, *others))
        raise ArgumentError(
            f"a query takes {BATCH} rows and there are {rows}, and rows of this model may depend on each other: "
            f"--batch {rows} asks all at once, a smaller one so many at a time, each batch as if it were alone"
        )
    if not others or model.prepared() or options.audited > 1 or options.verified or options.decoys is not None:
        return BATCH
    return model.rows_within(first, BATCH_MEMORY)


def _ask(model: RemoteModel, given: Given, options: argparse.Namespace) -> dict:
    """Ask about all rows, and print the predictions or write them; returns figures.

    All batches are asked, also after one without a result, of which the other parties learn nothing.
    """
    batch = options.batch or _batch(model, given, options)
    pieces = [model.check(piece) for piece in batches(model.served, given, batch, tell)]
    results, withheld, start, at = [], [], time.perf_counter(), 0
    kept = None
    if options.out is not None:
        kept = ResultFiles(options.out, Question(
            inputs=digest(options.inputs), model=options.name, version=model.version, batch=batch,
            network=str(chosen_network(options)), limit=options.activation_limit,
            checked=not options.no_range_check,
        ))  # fmt: skip
    ahead, total = sum(model.prepared().values()), sum(piece.rows or 1 for piece in pieces)
    with Cost() as profile, bars(console) as progress:
        task = progress.add_task("asking", total=total)
        for number, piece in enumerate(pieces):
            count = piece.rows or 1
            result = _result(model, piece) if kept is None else kept.result(number, lambda p=piece: _result(model, p))
            results.append(result)
            if result is None:
                withheld.append(f"{at} to {at + count - 1}")
            at += count
            progress.advance(task, count)
    used = ahead - sum(model.prepared().values())
    figures = {"rows": total, **profile.as_dict(), "seconds": time.perf_counter() - start, "prepared_calls": used}
    del figures["online_seconds"], figures["offline_seconds"]  # of this process's own arithmetic, which is little
    figures["withheld"] = withheld
    predictions = join_batches(results, [piece.rows or 1 for piece in pieces])
    if kept is not None and options.out is not None:
        write_arrays(predictions, options.out)
        kept.remove()
    else:
        figures["predictions"] = in_json(predictions)
    if options.json:
        return figures
    console.print(
        f"{total} row{'s' * (total != 1)} in {figures['seconds']:.2f} s, {profile.bytes / total / 1e6:.3f} MB a row, "
        f"{profile.rounds} rounds" + (f"; written to {options.out}" if options.out else "")
    )
    if options.out is None:
        for name, values in by_name(predictions).items():
            shown = np.array2string(as_array(values), precision=4, threshold=200)
            print(f"{name}: {shown}" if name else shown)
    return figures


def _result(model: RemoteModel, piece: Inputs) -> Any:
    """The result of a batch; None if a value left its range."""
    try:
        return model.ask(piece)
    except RangeExceededError:
        return None


def models(arguments: Sequence[str] | None = None) -> int:
    """`sectorch models`."""
    p = Parser(
        "models",
        "List the models that can be asked.",
        ["sectorch models --server cloud.example:7100 --cert alice.pem --key alice-key.pem --ca ca.pem"],
    )
    add_asker(p)
    p.add_argument("--store", type=Path, help="folder of `query --prepare`: list the prepared calls of each, too")
    p.takes_json("the names, with --store an object of them and their prepared calls,")
    return command_status(p, arguments, _models)


def _models(options: argparse.Namespace, _: Console) -> None:
    at, credentials, known = asking_party(options)
    with connect(at, credentials, pins=known) as connection:
        names = connection.models()
    counts = {} if options.store is None else _prepared_of(options.store, credentials.name, names)
    if options.json:
        print_json(counts if options.store is not None else list(names))
        return
    if not names:
        tell("no model is connected now; a party that has just been started compiles first: ask again in a minute")
    for name in names:
        print(f"{name}  {counts[name]} call{'s' * (counts[name] != 1)} prepared" if counts else name)


def _prepared_of(folder: Path, client: str, names: list[str]) -> dict[str, int]:
    """The number of prepared calls in a store, by model, for all number formats and numbers of rows."""
    if not folder.is_dir():
        raise ArgumentError(f"there is no store at {folder}: `sectorch query --prepare N --store {folder}` makes one")
    store = Store(folder)
    try:
        return {name: sum(map(len, store.shelves(client=client, model=name))) for name in names}
    finally:
        store.close()


def _own_store(folder: Path, needed: bool) -> Store:
    """The store; a temporary one if another query of this user uses it and nothing is to be prepared."""
    try:
        return Store(folder)
    except StoreInUseError:
        if needed:
            raise
        console.print("another query uses the prepared material; this one goes without")
        return Store()
