"""PrivHFL's tables and figures, small on digits, or on the paper's data sets where they are on disk.

    python benchmarks/privhfl.py gains            # mixup queries, four controls that ask nobody, private-data queries
    python benchmarks/privhfl.py table1           # C and the number of queries, with retraining alone for as long
    python benchmarks/privhfl.py table5           # one mixup coefficient at a time
    python benchmarks/privhfl.py fig6 | fig7      # rounds; architectures by the number of queries
    python benchmarks/privhfl.py fig11c | fig12 | fig13 | fig15 | fig16
    python benchmarks/privhfl.py noise            # accuracy and epsilon where the server adds noise
    python benchmarks/privhfl.py equal            # secure and plain aggregation: labels and accuracy
    python benchmarks/privhfl.py fig10 | fig11ab | fig14         # pictures (matplotlib), and the numbers behind them
    python benchmarks/privhfl.py table6           # properties beside those of other frameworks
    python benchmarks/privhfl.py table2 | table3 | table4 | fig8 | memory          # seconds, bytes and memory
    python benchmarks/privhfl.py unseen           # retraining on shares: what a step costs, what the model tells
    python benchmarks/privhfl.py table1 --data cifar10 --data-root ~/data --clients 50 --queries 2500 5000 7500 10000

Figures 1 to 5, 9, 17 and 18 are drawings of the method (docs/how-it-works.md, docs/protocols.md); Figures 19 and 20 are
examples/shared_image.py. Accuracies, but for those of `equal`, are computed with plain aggregation (`--secure` for the
protocol). On digits five clients train for 60 epochs and retrain for 20 (the paper: 50), with seeds 0 to 4: minutes a
table on one core, fastest with OMP_NUM_THREADS=1. Differences carry their spread, and "within the spread" where a
paired t test of the seeds does not tell them from none. "paper" is the paper's own figure: other data, other hardware.
Finished trials are kept in --work, so that the same command goes on from there, and tables share what they have in
common.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import privhfl_pictures as pictures
import privhfl_seconds as seconds
from privhfl_paper import PAPER
from rich.console import Console
from rich.table import Table

from sectorch.federated import Study
from sectorch.federated.command import shown_with_spread, verdict
from sectorch.federated.run import digest_of
from sectorch.nn.models import ZOO
from sectorch.protocols.privhfl import PRESETS, PrivHFL, Result, Settings, federation, plain_query, secure_query
from sectorch.protocols.privhfl.settings import CONTROLS

LAMBDAS = [k / 10 for k in range(1, 10)]
ALPHAS = (0.5, 1.0, 100.0)
SIGMAS = (0.0, 1.0, 4.0, 16.0)


@dataclass
class Row:
    """One condition: a federation, settings, and what the paper has for it."""

    label: str
    paper: str = "(not in the paper)"
    federated: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)


def trial(o: argparse.Namespace, seed: int, row: Row) -> Result:
    """One run, kept in the work folder; local training is shared by all runs of one federation."""
    federated = {"clients": o.clients, "samples": o.samples, "test_samples": o.test_samples, **row.federated}
    preset = PRESETS[o.data]
    training = dict(local=preset.local.lasting(o.local_epochs), retraining=preset.retraining.lasting(o.epochs))
    how = Settings(**{"secure": o.secure, **training, "seed": seed, **row.settings})
    clients, test, classes = federation(o.data, seed=seed, root=o.data_root, **federated)
    out = o.work / o.data / digest_of(dict(how=how.as_dict(), **federated))[:16]
    return PrivHFL(clients, test, classes, how, out=out, local=o.work / o.data / "local").run()


def accuracy_rows(o: argparse.Namespace, title: str, rows: Iterable[Row], more: str = "") -> list[dict]:
    """A table of mean accuracies over clients and seeds, with the gain of each row and its difference to the first."""
    study, found = Study(""), []
    for row in rows:
        runs = [trial(o, seed, row) for seed in o.seeds]
        for seed, run in zip(o.seeds, runs, strict=True):
            study.add(row.label, seed, run)
        alone, after = study.values(row.label, "alone"), study.values(row.label, "after")
        first = next(iter(study.found))
        found.append(
            dict(
                label=row.label, paper=row.paper, seeds=o.seeds, alone=statistics.mean(alone),
                after=statistics.mean(after), alone_per_seed=alone, after_per_seed=after,
                gain=points([b - a for a, b in zip(alone, after, strict=True)]),
                against_first="" if row.label == first else points(study.difference(row.label, "after", first)),
                rounds=[[run.mean(t) for t in range(run.settings.iterations + 1)] for run in runs],
                by_architecture={a: [[r.mean(t, a) for t in (0, -1)] for r in runs] for a in runs[0].architectures},
                epsilon=runs[0].epsilon, samples=[len(c.images) for c in runs[0].clients], data=o.data,
                clients=o.clients, local_epochs=o.local_epochs, epochs=o.epochs, secure=o.secure,
            )
        )  # fmt: skip
        print(f"{row.label}: {found[-1]['alone']:.4f} -> {found[-1]['after']:.4f}", file=sys.stderr, flush=True)
    mode = "secure" if o.secure else "plain"
    shown = Table(title=f"{title}\n{o.data}, {o.clients} clients, {len(o.seeds)} seeds, {mode} aggregation, {more}%")
    for column in ("", "alone", "after", "gain", "against the first", "paper"):
        shown.add_column(column, justify="left" if column in ("", "paper") else "right")
    for r in found:
        values = (mean(r["alone_per_seed"]), mean(r["after_per_seed"]), r["gain"], r["against_first"])
        shown.add_row(r["label"], *values, r["paper"])
    o.console.print(shown)
    o.console.print("+-: standard deviation over seeds. paper: the paper's own figure.")
    return found


def mean(values: list[float]) -> str:
    """In percent, with the standard deviation of several."""
    return shown_with_spread([100 * value for value in values])


def points(differences: list[float]) -> str:
    """In percent, and whether the seeds tell them from none."""
    return verdict([100 * value for value in differences])


def gains(o: argparse.Namespace) -> list[dict]:
    """Mixup queries, the controls that ask nobody, and private-data queries."""
    q = o.queries[-1]
    preset = PRESETS[o.data]
    how, samples = preset.retraining.lasting(o.epochs), o.samples or preset.samples
    # The private data query has few rows, and so few steps an epoch: this many more epochs give it those of mixup.
    times = -(-(samples + q) // how.batch_size) // -(-2 * samples // how.batch_size)
    longer = how.lasting(times * how.epochs)
    rows = [
        Row(f"{q} mixup queries", PAPER["gains"]["mixup"], {}, dict(queries=q)),
        *(Row(f"control: {name}", settings=dict(queries=q, control=name)) for name in CONTROLS),
        Row("private-data queries", PAPER["gains"]["private"], {}, dict(expansion="private")),
        Row(f"private-data queries, {times} times the epochs", settings=dict(expansion="private", retraining=longer)),
    ]
    return accuracy_rows(o, "One iteration of PrivHFL, C = 1", rows)


def table1(o: argparse.Namespace) -> list[dict]:
    """Beside each of our query counts stands the paper's row of the same rank, which names its own count."""
    rows = [Row("private-data queries", PAPER["table1"]["private"], {}, dict(expansion="private"))]
    for i, q in enumerate(o.queries):
        theirs = q if (q, 1) in PAPER["table1"] else 2500 * (1 + 3 * i // max(1, len(o.queries) - 1))
        rows += [
            Row(f"{q} mixup, C = {c:g}", f"{theirs}: {PAPER['table1'][theirs, c]}", {}, dict(queries=q, fraction=c))
            for c in o.fractions
        ]
        rows.append(Row(f"nobody asked, steps of {q}", settings=dict(queries=q, control="longer")))
    o.console.print(f"paper, Table 1 (SVHN / CIFAR10 / Tiny ImageNet), alone: {PAPER['table1']['alone']}")
    return accuracy_rows(o, "Table 1: fraction of answering clients, and queries", rows)


def table5(o: argparse.Namespace) -> list[dict]:
    q = o.queries[-1]
    rows = [Row("all nine", settings=dict(queries=q))]
    rows += [Row(f"lambda = {v}", PAPER["table5"], {}, dict(queries=q, lambdas=(v,))) for v in LAMBDAS]
    return accuracy_rows(o, "Table 5: one mixup coefficient", rows)


def fig6(o: argparse.Namespace) -> list[dict]:
    """Private-data and mixup queries over rounds, the mean of each architecture's clients at the end."""
    rows = [
        Row("mixup", "plot: above private", {}, dict(queries=o.queries[-1], iterations=o.rounds)),
        Row("private data", "plot", {}, dict(expansion="private", iterations=o.rounds)),
        Row("control: longer", settings=dict(queries=o.queries[-1], iterations=o.rounds, control="longer")),
    ]
    found = accuracy_rows(o, f"Figure 6: query data, {o.rounds} rounds", rows)
    shown = Table(title="Figure 6: mean accuracy after each round, and that of each architecture at the end, %")
    for column in ("", *(f"round {t}" for t in range(o.rounds + 1)), *found[0]["by_architecture"]):
        shown.add_column(column, justify="right")
    for row in found:
        ends = [mean([after for _, after in runs]) for runs in row["by_architecture"].values()]
        shown.add_row(row["label"], *(mean(list(values)) for values in zip(*row["rounds"], strict=True)), *ends)
    o.console.print(shown)
    return found


def fig7(o: argparse.Namespace) -> list[dict]:
    """The runs of `table1` with C = 1, by architecture; the differences are those to no queries."""
    rows = [Row(f"{q} queries", "plot: rises with queries", {}, dict(queries=q)) for q in o.queries]
    found = accuracy_rows(o, "Figure 7: architectures by the number of queries", rows)
    shown = Table(title="Figure 7: gain of each architecture over its model alone, %")
    for column in ("architecture", "alone", *(row["label"] for row in found)):
        shown.add_column(column, justify="right")
    for name, runs in found[0]["by_architecture"].items():
        gained = [points([after - alone for alone, after in row["by_architecture"][name]]) for row in found]
        shown.add_row(name, mean([alone for alone, _ in runs]), *gained)
    o.console.print(shown)
    return found


def fig11c(o: argparse.Namespace) -> list[dict]:
    kinds = ("mixup", "noise", "flip", "cutmix", "cutout")
    rows = [Row(k, PAPER["fig11c"][k], {}, dict(queries=o.queries[-1], expansion=k)) for k in kinds]
    return accuracy_rows(o, "Figure 11(c): data set expansion", rows)


def fig12(o: argparse.Namespace) -> list[dict]:
    kinds = ("random", "margin", "entropy", "kcenter", "icd")
    q = o.queries[-1]
    rows = [Row(k, PAPER["fig12"][k], {}, dict(queries=q, selection=k, pool=4 * q)) for k in kinds]
    return accuracy_rows(o, "Figure 12: query selection from a pool four times as large", rows)


def fig13(o: argparse.Namespace) -> list[dict]:
    q = o.queries[-1]
    rows = [
        Row("logits (no normalisation)", PAPER["fig13"]["logits"], {}, dict(queries=q)),
        Row("softmax (normalised)", PAPER["fig13"]["softmax"], {}, dict(queries=q, normalise=True)),
        Row("logits, their mean", settings=dict(queries=q, average=True)),
        Row("private data only", "dashed line", {}, dict(expansion="private")),
    ]
    return accuracy_rows(o, "Figure 13: normalisation before aggregation", rows)


def fig15(o: argparse.Namespace) -> list[dict]:
    q, kinds = o.queries[-1], {"dirichlet-classes": "classes cut", "dirichlet": "clients alike in size"}
    rows = [
        Row(f"Dir({alpha:g}), {kinds[kind]}", PAPER["fig15"], dict(partition=kind, alpha=alpha), dict(queries=q))
        for kind, alphas in (("dirichlet-classes", ALPHAS), ("dirichlet", ALPHAS[:1]))
        for alpha in alphas
    ]
    return accuracy_rows(o, "Figure 15: uneven classes", rows)


def fig16(o: argparse.Namespace) -> list[dict]:
    sizes = (20, 40, 80) if o.data == "digits" else (200, 400, 600, 800, 1000)
    rows = [Row(f"{n} samples each", PAPER["fig16"], dict(samples=n), dict(queries=o.queries[-1])) for n in sizes]
    return accuracy_rows(o, "Figure 16: private samples", rows)


def noise(o: argparse.Namespace) -> list[dict]:
    """Normalised answers with the server's noise, and with nobody's."""
    q = o.queries[-1]
    rows = [Row(f"sigma = {s:g}", settings=dict(queries=q, normalise=True, sigma=s)) for s in SIGMAS]
    found = accuracy_rows(o, f"Noise at the server, {q} queries, normalised", rows)
    for row in found:
        if row["epsilon"]:
            towards = ", ".join(f"{value:.4g} towards {who}" for who, value in row["epsilon"].items())
            o.console.print(f"{row['label']}: epsilon {towards} (delta 1e-5)")
    return found


def equal(o: argparse.Namespace) -> list[dict]:
    """Secure and plain aggregation: the largest difference of a soft label, and both accuracies."""
    out, q = [], o.queries[-1]
    shown = Table(title=f"Secure against plain aggregation, {o.data}, {o.clients} clients, {q} queries")
    for column in ("seed", "largest label difference", "secure %", "plain %", "same clients"):
        shown.add_column(column, justify="right")
    for seed in o.seeds:
        both = [trial(o, seed, Row("", settings=dict(queries=q, secure=flag))) for flag in (True, False)]
        models = list(both[1].models.values())
        images = both[0].clients[0].images
        exact = plain_query(images, models[1:]).softmax(1)
        total, _ = secure_query(images, models[1:])
        difference = float((total.softmax(1) - exact).abs().max())
        same = sum(a == b for a, b in zip(both[0].accuracies(-1), both[1].accuracies(-1), strict=True))
        row = dict(
            seed=seed, difference=difference, secure=both[0].mean(-1), plain=both[1].mean(-1), same_clients=same,
            clients=len(both[0].clients), queries=q,
        )  # fmt: skip
        out.append(row)
        shown.add_row(str(seed), f"{difference:.1e}", f"{100 * row['secure']:.3f}",
                      f"{100 * row['plain']:.3f}", f"{same} of {row['clients']}")  # fmt: skip
    o.console.print(shown)
    return out


FIVE = [0, 1, 2, 3, 4]
COMMANDS = {  # queries and clients that make it a matter of minutes
    gains: ([200], 5),
    table1: ([50, 100, 200, 400], 5),
    table5: ([200], 5),
    fig6: ([200], 5),
    fig7: ([50, 100, 200, 400], 5),
    fig11c: ([200], 5),
    fig12: ([200], 5),
    fig13: ([200], 5),
    fig15: ([200], 5),
    fig16: ([200], 5),
    noise: ([200], 10),
    equal: ([100], 3),
    pictures.fig10: ([], 5),
    pictures.fig11ab: ([400], 5),
    pictures.fig14: ([], 20),
    pictures.table6: ([], 0),
    seconds.table2: ([1000, 2500, 5000], 0),
    seconds.table3: ([1], 0),
    seconds.table4: ([], 0),
    seconds.fig8: ([], 0),
    seconds.memory: ([32, 64, 256], 0),
    seconds.unseen: ([200], 3),
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=[c.__name__ for c in COMMANDS])
    p.add_argument("--data", default="digits", choices=list(PRESETS))
    p.add_argument("--data-root", type=Path)
    p.add_argument("--clients", type=int, help="default: five, ten for noise, three for equal, 20 for fig14")
    p.add_argument("--samples", type=int)
    p.add_argument("--test-samples", type=int)
    p.add_argument("--queries", type=int, nargs="+", help="of each client; the default depends on the command")
    p.add_argument("--seeds", type=int, nargs="+", default=FIVE, help="default: five")
    p.add_argument("--fractions", type=float, nargs="+", choices=(0.6, 0.8, 1.0), default=[0.6, 1.0], help="of table1")
    p.add_argument("--rounds", type=int, default=3, help="of fig6")
    p.add_argument("--answering", type=int, default=1, help="parties that answer, where seconds are measured")
    p.add_argument("--local-epochs", type=int, help="default: 60 on digits, else the paper's")
    p.add_argument("--epochs", type=int, help="of retraining; default: 20 on digits, else the paper's 50")
    p.add_argument("--secure", action="store_true", help="aggregate by the protocol")
    p.add_argument("--nets", nargs="+", choices=list(ZOO))
    p.add_argument("--work", type=Path, default=Path("runs/benchmarks"))
    p.add_argument("--json", type=Path, help="also write the rows here; docs/privhfl.md is made of benchmarks/results/")
    o = p.parse_args()
    command = next(c for c in COMMANDS if c.__name__ == o.command)
    queries, clients = COMMANDS[command]
    o.queries, o.clients = o.queries or queries, o.clients or clients
    if o.data == "digits":
        o.local_epochs = 60 if o.local_epochs is None else o.local_epochs
        o.epochs = 20 if o.epochs is None else o.epochs
    o.console = Console(width=150)
    rows = command(o)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
