"""`sectorch query` and `sectorch models`: asking, and what there is to ask."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ...choreography.ledger import Cost
from ...cli.command import Parser, at_least, bars, ended, print_json
from ...errors import ArgumentError, RangeExceededError, StoreInUseError
from ...nn.inputs import Inputs
from ...ring.scheme import Scheme, limit_bits_of
from ..parties.client import connect
from ..parties.query import RemoteModel
from ..store.store import Store
from ..warm import warm
from .arrays import Given, batches, by_name, check_out, in_json, joined, read, write
from .asker import add_asker, asker
from .kept import Kept, digest
from .options import (
    add_log,
    add_patience,
    add_receipts,
    begin_log,
    check_room,
    console,
    tell,
)
from .watching import add_traces, traced


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
    p.add_argument("--batch", type=at_least(1), default=32, help="rows per query")
    p.add_argument(
        "--prepare", type=at_least(0), default=0, help="have so many rows prepared ahead; what is at hand counts"
    )
    p.add_argument("--network", default="lan", choices=("lan", "wan"), help="fewest bytes, or fewest rounds")
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
    p.add_argument("--model-version", metavar="VERSION", help="ask this version of the model only; --json shows it")
    p.add_argument("--store", type=Path, help="folder for prepared material")
    add_patience(p)
    add_log(p)
    add_receipts(p)
    add_traces(p)
    p.takes_json("figures, and the predictions unless --out takes them,")
    p.parse_args = p.parse_intermixed_args  # the optional file of inputs may come after options
    return ended(
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
    scheme = Scheme(network=options.network, range_check=checked, limit_bits=limit, **levels)
    given = None if options.inputs is None else read(options.inputs)
    if options.out is not None:
        check_out(options.out)
        if options.inputs is not None and options.out.exists() and options.out.samefile(options.inputs):
            raise ArgumentError(f"{options.out} holds the inputs, which would be lost; name another file with --out")
    at, credentials, known = asker(options, options.name)
    folder = options.store or _own_folder(credentials.name)
    kept = _own_store(folder, needed=options.prepare > 0)
    kept_in = options.receipts
    with (
        traced(options),
        connect(at, credentials, pins=known, store=kept, silence=options.patience, receipts=kept_in) as connection,
        ThreadPoolExecutor(1) as beside,
    ):
        beside.submit(warm, tell)  # while the session begins and the others work
        model = connection.model(options.name, scheme, version=options.model_version)
        model.only = model.version  # all rows of a job are answered by one
        figures: dict[str, Any] = {"version": model.version}
        if options.prepare:
            _prepare(model, options.prepare, options.batch)
            figures["prepared_rows"] = options.prepare
        if given is not None:
            figures |= _ask(model, given, options)
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


def _prepare(model: RemoteModel, rows: int, batch: int) -> None:
    """Top up what is at hand; after an interruption the same command goes on where it stopped."""
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
    console.print(f"{rows} rows are prepared, in calls of {' and '.join(map(str, sizes))}")


def _ask(model: RemoteModel, given: Given, options: argparse.Namespace) -> dict:
    """Ask about all rows, and show the predictions or write them; returns figures.

    All batches are asked, whether or not one has no result: the other parties learn nothing of that.
    """
    pieces = [model.check(piece) for piece in batches(model.served, given, options.batch, tell)]
    results, withheld, start, at = [], [], time.perf_counter(), 0
    kept = None if options.out is None else Kept(options.out, _about(model, options))
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
    predictions = joined(results, [piece.rows or 1 for piece in pieces])
    if kept is not None and options.out is not None:
        write(predictions, options.out)
        kept.done()
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
            shown = np.array2string(values.numpy(), precision=4, threshold=200)
            print(f"{name}: {shown}" if name else shown)
    return figures


def _result(model: RemoteModel, piece: Inputs) -> Any:
    """The result of a batch, or None where it has none."""
    try:
        return model.ask(piece)
    except RangeExceededError:
        return None


def _about(model: RemoteModel, options: argparse.Namespace) -> dict:
    """What is asked, so that results of another question are not taken for those of this one."""
    return {
        "inputs": digest(options.inputs), "model": options.name, "version": model.version, "batch": options.batch,
        "network": options.network, "limit": options.activation_limit, "checked": not options.no_range_check,
    }  # fmt: skip


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
    return ended(p, arguments, _models)


def _models(options: argparse.Namespace, _: Console) -> None:
    at, credentials, known = asker(options)
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
    """How many prepared calls a store has of each model, whatever their number format and rows."""
    if not folder.is_dir():
        raise ArgumentError(f"there is no store at {folder}: `sectorch query --prepare N --store {folder}` makes one")
    store = Store(folder)
    try:
        return {name: sum(map(len, store.shelves(client=client, model=name))) for name in names}
    finally:
        store.close()


def _own_folder(name: str) -> Path:
    """Where this user's data are kept."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "sectorch" / name


def _own_store(folder: Path, needed: bool) -> Store:
    """The store, or a temporary one where another query of this user has it and nothing is to be prepared."""
    try:
        return Store(folder)
    except StoreInUseError:
        if needed:
            raise
        console.print("another query uses the prepared material; this one goes without")
        return Store()
