"""`sectorch bench`: three processes over an emulated link, in seconds, rounds and bytes."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..choreography.ledger import Profile
from ..cli.command import Parser, above_zero, at_least, bars, ended, not_negative, print_json, writable
from ..errors import ArgumentError
from ..nn.models import ZOO, randomize_batchnorm
from ..ring.scheme import Scheme
from .parties.query import RemoteModel
from .parties.stage import NETWORKS, Network, Stage

console = Console(stderr=True)


@dataclass
class Figures:
    """Medians of one net and batch: a query with everything, its offline part alone, and its online part alone."""

    net: str
    batch: int
    network: str
    seconds: float
    offline_seconds: float
    online_seconds: float
    rounds: int
    offline_bytes: int
    online_bytes: int
    weights_bytes: int
    error: float


def example(net: str, batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A net of the zoo with random weights, and random images."""
    torch.manual_seed(0)
    construct, shape = ZOO[net]
    model = construct().eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, torch.randn(max(2, batch), *shape)


def _timed(call: Callable[[], Any]) -> tuple[float, Profile]:
    start = time.perf_counter()
    with Profile() as profile:
        call()
    return time.perf_counter() - start, profile


def measure(model: RemoteModel, x: torch.Tensor, repeats: int) -> dict:
    """Seconds of whole, of offline-only and of online-only calls in turns, and what a call sends."""
    with Profile() as first:
        result = model(x)
    whole = [_timed(lambda: model(x)) for _ in range(repeats)]
    prepared = [_timed(lambda: model.prepare(tuple(x.shape))) for _ in range(repeats + 1)]
    online = [_timed(lambda: model(x)) for _ in range(repeats + 1)]
    seconds = [statistics.median(second for second, _ in found) for found in (whole, prepared, online)]
    profile, offline, later = (found[-1][1] for found in (whole, prepared, online))
    return dict(
        seconds=seconds[0], offline_seconds=seconds[1], online_seconds=seconds[2], rounds=profile.rounds,
        offline_bytes=offline.bytes, online_bytes=later.bytes, weights_bytes=first.setup_bytes, result=result,
        bytes=profile.bytes,
    )  # fmt: skip


def network_of(name: str, delay_ms: float | None, mbit: float | None) -> Network:
    """A named link with its figures, or others.

    Raises:
        ArgumentError: not a link.
    """
    if name not in NETWORKS:
        raise ArgumentError(f"--network is one of {', '.join(NETWORKS)}, got {name!r}")
    known = NETWORKS[name]
    delay = known.delay if delay_ms is None else delay_ms / 2000
    rate = known.rate if mbit is None else mbit * 1e6
    if delay < 0 or rate <= 0:
        raise ArgumentError("a link has a round trip of at least 0 ms and a rate above 0 Mbit/s")
    return Network(delay, rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """`sectorch bench`."""
    p = Parser(
        "bench",
        "Measure three processes over an emulated network.",
        (
            "sectorch bench --network wan --nets lenet",
            "sectorch bench --nets lenet vgg7 --batches 1 32 --round-trip 100 --mbit 20 --out runs/mobile",
        ),
    )
    p.add_argument(
        "--network", default="lan", choices=tuple(NETWORKS), help="0.5 ms and 1 Gbit/s, or 40 ms and 100 Mbit/s"
    )
    p.add_argument("--nets", nargs="+", default=["lenet", "vgg7"], choices=tuple(ZOO), metavar="NET",
                   help=f"of {', '.join(ZOO)}")  # fmt: skip
    p.add_argument("--batches", type=at_least(1), nargs="+", default=[1, 8], help="batch sizes")
    p.add_argument("--repeats", type=at_least(1), default=3, help="of each; medians are printed")
    p.add_argument("--round-trip", type=not_negative, help="ms, instead of the network's")
    p.add_argument("--mbit", type=above_zero, help="Mbit/s each way, instead of the network's")
    p.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of results.json")
    p.takes_json("results.json")
    return ended(p, arguments, _run, "stopped; what was measured is in {out}")


def _run(options: argparse.Namespace, results: Console) -> None:
    link = network_of(options.network, options.round_trip, options.mbit)
    writable(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    path, rows = options.out / "results.json", []
    about = {"round_trip_ms": 2000 * link.delay, "mbit": link.rate / 1e6, "torch_threads_each": 1}
    found = {"network": about, "rows": []}
    with bars(console) as progress:
        task = progress.add_task("measuring", total=len(options.nets) * len(options.batches))
        for net in options.nets:
            model, x = example(net, max(options.batches))
            with Stage({net: (model, x)}, link) as stage, stage.connect("alice") as connection, torch.no_grad():
                for batch in options.batches:
                    remote = connection.model(net, Scheme(network=options.network))
                    figures = measure(remote, x[:batch], options.repeats)
                    remote.close()
                    error = float((figures.pop("result") - model(x[:batch])).abs().max())
                    del figures["bytes"]
                    rows.append(Figures(net, batch, options.network, **figures, error=error))
                    found["rows"].append(asdict(rows[-1]))
                    path.write_text(json.dumps(found, indent=1) + "\n")
                    progress.advance(task)
    if options.json:
        print_json(found)
        return
    results.print(table(rows, about))
    results.print(f"written: {path}")


def table(rows: list[Figures], about: dict) -> Table:
    """Figures for people."""
    title = f"Three processes, {about['round_trip_ms']:g} ms round trip, {about['mbit']:g} Mbit/s each way"
    shown = Table(title=title)
    for column in ("net", "batch", "s", "s offline", "s online", "rounds", "MB offline", "MB online", "error"):
        shown.add_column(column, justify="left" if column == "net" else "right")
    for row in rows:
        shown.add_row(
            row.net, str(row.batch), f"{row.seconds:.3f}", f"{row.offline_seconds:.3f}", f"{row.online_seconds:.3f}",
            str(row.rounds), f"{row.offline_bytes / 1e6:.2f}", f"{row.online_bytes / 1e6:.2f}", f"{row.error:.0e}",
        )  # fmt: skip
    return shown
