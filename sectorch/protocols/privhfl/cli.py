"""`sectorch privhfl`: a run from the command line, with a live bar, tables, results.json, a CSV and plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group

from ...cli.command import (
    GOES_ON,
    Parser,
    bars,
    ended,
    plotting,
    print_json,
    watched,
    writable,
)
from ...data.datasets import DATASETS
from ...data.expansion import EXPANSIONS
from ...data.partition import PARTITIONS
from ...data.selection import SELECTIONS
from . import plots
from .algorithm import PrivHFL
from .architectures import ARCHITECTURES
from .errors import PrivHFLError
from .federation import federation
from .report import accuracy_table, add_client
from .settings import Client, Settings
from .statement import table as received_table
from .training import PRESETS
from .watch import Watch


def parser() -> Parser:
    """The options of `sectorch privhfl`."""
    p = Parser(
        "privhfl",
        "Heterogeneous federated learning without an auxiliary data set (PrivHFL), all parties in this\n"
        "process: a simulation, which protects nothing. A run that was stopped goes on when started again.",
        (
            "sectorch privhfl --data digits --clients 10 --queries 500",
            "sectorch privhfl --queries 100 250 500 --out runs/sweep          accuracy per query count, and its plot",
            "sectorch privhfl --control --out runs/control                    as long on the private data alone",
            "sectorch privhfl --partition dirichlet --alpha 0.5 --selection icd --pool 2000 -C 0.6 --iterations 2",
            "sectorch privhfl --data cifar10 --data-root ~/data --clients 50 --queries 10000",
        ),
    )
    p.add_argument("--data", default="digits", choices=list(DATASETS), help="data set (default digits)")
    p.add_argument("--data-root", type=Path, help="where data sets lie; else $SECTORCH_DATA, else ~/.cache/sectorch")
    p.add_argument("--clients", type=int, default=10, help="how many, at least two (default 10)")
    p.add_argument("--samples", type=int, help="private samples of each client (default: Table 7; digits 30)")
    p.add_argument(
        "--architectures",
        nargs="+",
        metavar="NAME",
        help=f"in turn, n/3 clients each if there are three: {', '.join(ARCHITECTURES)}",
    )
    p.add_argument("--partition", default="iid", choices=list(PARTITIONS), help="who has which classes (default iid)")
    p.add_argument("--alpha", type=float, default=0.5, help="of the Dirichlet partition; small is uneven (default 0.5)")
    p.add_argument("--classes-each", type=int, default=2, help="of the skewed partition (default 2)")
    p.add_argument("--queries", type=int, nargs="+", help="of each client; several make a sweep (default 500)")
    p.add_argument("--pool", type=int, help="images in the expanded pool (default: queries; four times, if selected)")
    p.add_argument("--fraction", "-C", type=float, default=1.0, help="C, of the other clients that answer (default 1)")
    p.add_argument("--iterations", type=int, default=1, help="in each, every client asks once (default 1)")
    p.add_argument("--expansion", default="mixup", choices=list(EXPANSIONS), help="what queries are made of")
    p.add_argument("--selection", default="random", choices=list(SELECTIONS), help="which of the pool are asked about")
    p.add_argument("--normalise", action="store_true", help="aggregate softmax outputs and not logits (Figure 13)")
    p.add_argument("--control", action="store_true", help="ask nobody: retrain as long on the private data alone")
    p.add_argument("--plain", action="store_true", help="the same in the clear, as an ablation; protects nothing")
    p.add_argument("--local-epochs", type=int, help="of local training (default: Table 7; digits 150)")
    p.add_argument("--epochs", type=int, help="of retraining (default 50, as in the paper)")
    p.add_argument(
        "--frac-bits", type=int, default=20, help="fraction bits of the shares (default 20, as in the paper)"
    )
    p.add_argument("--chunk", type=int, help="queries that cross a session at once (default: by memory)")
    p.add_argument("--seed", type=int, default=0, help="of everything but the shares (default 0)")
    p.writes_results("runs/privhfl")
    return p


class Screen(Watch):
    """A live bar and the table of accuracies."""

    def __init__(self, clients: Sequence[Client], iterations: int):
        self.clients, self.iterations = clients, iterations
        self.records: dict[str, list[dict]] = {}
        self.progress = bars()
        self.whole = self.progress.add_task("clients and rounds", total=len(clients) * (1 + iterations))
        self.part = self.progress.add_task("", total=None)

    def __rich__(self) -> Group:
        shown = accuracy_table(self.iterations)
        for client in self.clients:
            add_client(shown, client, self.records.get(client.name, []))
        return Group(shown, self.progress)

    def step(self, what: str, parts: int | None) -> Callable[[], None]:
        self.progress.remove_task(self.part)
        self.part = self.progress.add_task(what, total=parts)
        return lambda: self.progress.advance(self.part)

    def finished(self, client: Client, records: list[dict]) -> None:
        self.records[client.name] = list(records)
        self.progress.advance(self.whole)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: see `sectorch.cli.command`."""
    return ended(parser(), arguments, _run, GOES_ON)


def _run(options: argparse.Namespace, console: Console) -> None:
    writable(options.out)
    with_plots = plotting(options, console)
    clients, test, classes = federation(
        options.data,
        options.clients,
        samples=options.samples,
        architectures=options.architectures,
        kind=options.partition,
        alpha=options.alpha,
        classes_each=options.classes_each,
        seed=options.seed,
        root=options.data_root,
    )
    counts = options.queries or [None]
    if options.control and len(counts) > 1:
        raise PrivHFLError(f"--control asks nobody, so it takes one number of --queries, got {len(counts)}")
    runs = [
        PrivHFL(
            clients,
            test,
            classes,
            _settings(options, count),
            out=options.out if len(counts) == 1 else options.out / f"queries-{count}",
            local=options.out / "local",
        )
        for count in counts
    ]
    results = []
    for run in runs:
        screen = Screen(run.clients, run.settings.iterations)
        results.append(watched(lambda: run.run(screen), screen, console))
        results[-1].write(run.store.folder)
    last = results[-1]
    if len(results) > 1:
        summary = {r.records[clients[0].name][1]["queries"]: r.mean(-1) for r in results}
        (options.out / "queries.json").write_text(json.dumps({"alone": last.mean(0), **summary}, indent=2) + "\n")
    files = plots.plot(results, options.out) if with_plots else []
    if options.json:
        print_json(last.as_dict())
        return
    console.print(last.table())
    console.print(received_table(last.received))
    for sentence in last.statement:
        console.print(f"- {sentence}", markup=False)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in last.seconds().items())
    console.print(f"seconds, all clients and parties one after another: {seconds}")
    console.print(f"written: {options.out}: results.json, accuracy.csv{''.join(f', {f.name}' for f in files)}")


def _settings(options: argparse.Namespace, queries: int | None) -> Settings:
    preset = PRESETS[options.data]
    local, retraining = preset.local, preset.retraining
    if options.local_epochs is not None:
        local = replace(local, epochs=options.local_epochs)
    if options.epochs is not None:
        retraining = replace(retraining, epochs=options.epochs, milestones=(max(1, options.epochs // 2),))
    return Settings(
        queries=queries,
        pool=options.pool,
        fraction=options.fraction,
        iterations=options.iterations,
        expansion=options.expansion,
        selection=options.selection,
        local=local,
        retraining=retraining,
        normalise=options.normalise,
        secure=not options.plain,
        frac_bits=options.frac_bits,
        chunk=options.chunk,
        control=options.control,
        seed=options.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
