"""`sectorch bench --network`: three processes over an emulated link, in seconds, rounds and bytes."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..errors import ArgumentError
from ..nn.models import ZOO, randomize_batchnorm
from ..runtime.ledger import Profile
from .query import RemoteModel
from .stage import NETWORKS, Network, Stage

console = Console(stderr=True)


@dataclass
class Figures:
    """Medians of one net and batch: a query with everything, its part ahead alone, and its online part alone."""

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


def measure(model: RemoteModel, x: torch.Tensor, repeats: int) -> dict:
    """Seconds of whole, of offline-only and of online-only calls in turns, and what a call sends."""
    with Profile() as first:
        result = model(x)
    whole, ahead, online = [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        with Profile() as profile:
            model(x)
        whole.append(time.perf_counter() - start)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with Profile() as offline:
            model.prepare(tuple(x.shape))
        ahead.append(time.perf_counter() - start)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with Profile() as prepared:
            model(x)
        online.append(time.perf_counter() - start)
    return dict(
        seconds=statistics.median(whole), offline_seconds=statistics.median(ahead),
        online_seconds=statistics.median(online), rounds=profile.rounds, offline_bytes=offline.bytes,
        online_bytes=prepared.bytes, weights_bytes=first.setup_bytes, result=result, bytes=profile.bytes,
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


def bench(
    network: Annotated[str, typer.Option(help="lan: 0.5 ms and 1 Gbit/s; wan: 40 ms and 100 Mbit/s")] = "lan",
    nets: Annotated[str, typer.Option(help="nets of the zoo, with commas")] = "lenet,vgg7",
    batches: Annotated[str, typer.Option(help="batch sizes, with commas")] = "1,8",
    repeats: Annotated[int, typer.Option(help="of each; medians are printed")] = 3,
    round_trip: Annotated[float | None, typer.Option(help="ms, instead of the network's")] = None,
    mbit: Annotated[float | None, typer.Option(help="Mbit/s each way, instead of the network's")] = None,
    out: Annotated[Path, typer.Option(help="where the figures go")] = Path("results.json"),
) -> None:
    """Measure three processes over an emulated link. Example: sectorch bench --network wan --nets lenet"""
    link = network_of(network, round_trip, mbit)
    try:
        sizes = [int(b) for b in batches.split(",")]
    except ValueError:
        raise ArgumentError(f"--batches is whole numbers with commas, got {batches!r}") from None
    names = nets.split(",")
    if unknown := set(names) - set(ZOO):
        raise ArgumentError(f"no net {', '.join(sorted(unknown))} in the zoo; there are {', '.join(sorted(ZOO))}")
    rows: list[Figures] = []
    about = {"round_trip_ms": 2000 * link.delay, "mbit": link.rate / 1e6, "torch_threads_each": 1}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(names) * len(sizes))
        for net in names:
            model, x = example(net, max(sizes))
            with Stage({net: (model, x)}, link) as stage, stage.connect("alice") as connection, torch.no_grad():
                for batch in sizes:
                    remote = connection.model(net, network=network)
                    found = measure(remote, x[:batch], repeats)
                    remote.close()
                    error = float((found.pop("result") - model(x[:batch])).abs().max())
                    del found["bytes"]
                    rows.append(Figures(net, batch, network, **found, error=error))
                    out.write_text(
                        json.dumps({"network": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
                    )
                    progress.advance(task)
    Console().print(table(rows, about))
    console.print(f"written to {out}")


def table(rows: list[Figures], about: dict) -> Table:
    """Figures for people."""
    title = f"Three processes, {about['round_trip_ms']:g} ms round trip, {about['mbit']:g} Mbit/s each way"
    shown = Table(title=title)
    for column in ("net", "batch", "s", "s ahead", "s online", "rounds", "MB ahead", "MB online", "error"):
        shown.add_column(column, justify="left" if column == "net" else "right")
    for row in rows:
        shown.add_row(
            row.net, str(row.batch), f"{row.seconds:.3f}", f"{row.offline_seconds:.3f}", f"{row.online_seconds:.3f}",
            str(row.rounds), f"{row.offline_bytes / 1e6:.2f}", f"{row.online_bytes / 1e6:.2f}", f"{row.error:.0e}",
        )  # fmt: skip
    return shown
