"""CaPriDe's Tables 1 and 2 and Figures 2 to 5 on what is at hand, and a whole encrypted run.

    python benchmarks/capride.py gains         # Table 1, Figures 2 to 5: 2, 5, 10 parties, three splits, in the clear
    python benchmarks/capride.py sensitivity   # by lambda, and FedAvg by its noise
    python benchmarks/capride.py table2        # encryption, ciphertext size and encrypted inference of our networks
    python benchmarks/capride.py encrypted     # a whole encrypted run on digits, and how far it is from its simulation

Rows go to benchmarks/results/capride, of which `docs/generate.py` makes the tables; a stopped program goes on.
With --data cifar10 (or cifar100, ham10000), --data-root and --out the same commands run on the paper's data sets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sectorch import ckks
from sectorch.errors import SectorchError
from sectorch.protocols.capride import CaPriDe, Result, Settings, federation
from sectorch.protocols.capride.aggregate import encrypt_low, seal
from sectorch.protocols.capride.federation import SPLITS, build

OPEN = dict(encrypted=False, leakage=None, sigma=0.0, directions=128)
"""The updates without any noise, in the clear: what they can do at best."""
METHODS: dict[str, dict] = {
    "local": OPEN | {"method": "local"},
    "fedavg": OPEN | {"method": "fedavg"},
    "fedavg-dp": OPEN | {"method": "fedavg-dp"},
    "l2": OPEN | {"method": "l2"},
    "dml": OPEN | {"method": "dml"},
    "scalar": OPEN | {"update": "scalar"},
    "head": OPEN | {"update": "head"},
    "forward": OPEN | {"update": "forward"},
    "default": {"encrypted": False},
}
"""`default` is the protocol as it comes, with its limit on what answers tell."""
CELLS = [(k, split) for split in SPLITS for k in (2, 5, 10) if (k, split) != (10, "no-overlap")]
"""Parties and splits. Ten parties without a class in common would have one class each."""
console = Console(width=140)


def run(name: str, parties: int, split: str, seed: int, options: argparse.Namespace, **changes) -> Result:
    made = federation(options.data, parties, split, seed=seed, root=options.data_root, samples=options.samples)
    how = Settings(seed=seed, rounds=options.rounds, weight=options.weight).but(**METHODS[name], **changes)
    return CaPriDe(*made, how).run()


def gains(options: argparse.Namespace) -> None:
    """Table 1 and Figures 2 to 5: every method in every cell, by seed."""

    def one(place: tuple) -> dict:
        parties, split, seed, name = place
        return _row(run(name, parties, split, seed, options))

    each(options, "gains", ("parties", "split", "seed", "method"), [
        (*cell, seed, name) for seed in options.seeds for cell in CELLS for name in options.methods
    ], one)  # fmt: skip


def _row(result: Result) -> dict:
    """The mean over parties by round, and each party's and class's before and after, in percent."""
    last = {p.name: (result.records[p.name][0], result.records[p.name][-1]) for p in result.parties}
    percent = lambda values: [round(100 * v, 2) for v in values]
    row = dict(
        curve=percent(result.accuracy(t) for t in range(result.settings.rounds + 1)),
        top5=percent(statistics.mean(r["top5"] for r in stage) for stage in zip(*last.values(), strict=True)),
        by_party=[percent(r["accuracy"] for r in pair) for pair in last.values()],
    )
    if len(result.parties) == 5:
        row["by_class"] = [[percent(found) for found in result.per_class(t)] for t in (0, -1)]
    return row


def each(
    options: argparse.Namespace, name: str, columns: tuple[str, ...], places: list[tuple], one: Callable[[tuple], dict]
) -> None:
    """A row for each place, kept as it comes: what is stopped goes on where it was."""
    kept = options.out / f"{name}.json"
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else []
    known = {tuple(row[c] for c in columns) for row in rows}
    for place in (place for place in places if place not in known):
        start = time.perf_counter()
        try:
            found = one(place)
        except SectorchError as error:
            found = dict(refused=f"{type(error).__name__}: {error}")
        rows.append(dict(zip(columns, place, strict=True)) | found | {"seconds": round(time.perf_counter() - start, 1)})
        kept.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
        console.print(f"{place}: {found.get('curve', found)}", highlight=False, soft_wrap=True)


LAMBDAS, MODEL_SIGMAS = (0.5, 1.0, 2.0, 4.0, 8.0), (0.001, 0.01, 0.03, 0.1)


def sensitivity(options: argparse.Namespace) -> None:
    """Accuracy by lambda for each peer, and of FedAvg by the noise on its models: the supplement's tables."""
    places = [
        (parties, split, seed, name, value)
        for seed in options.seeds
        for parties, split in ((2, "no-overlap"),)
        for name, values in (("head", LAMBDAS), ("forward", LAMBDAS), ("dml", LAMBDAS), ("fedavg-dp", MODEL_SIGMAS))
        for value in values
        if name in options.methods
    ]

    def one(place: tuple) -> dict:
        parties, split, seed, name, value = place
        change = {"model_sigma": value} if name == "fedavg-dp" else {"weight": value * (parties - 1)}
        result = run(name, parties, split, seed, options, **change)
        return dict(before=round(100 * result.accuracy(0), 2), after=round(100 * result.accuracy(-1), 2))

    each(options, "sensitivity", ("parties", "split", "seed", "method", "value"), places, one)


def timed(f: Callable):
    start = time.perf_counter()
    result = f()
    return result, time.perf_counter() - start


def table2(options: argparse.Namespace) -> None:
    """Our networks beside the paper's ResNet-18 on HElayers. One thread, no GPU."""
    shown = Table(title="Table 2, for our networks")
    for column in ("", "mlp 8x8", "cnn 8x8", "cnn32 32x32", "paper, CIFAR-10"):
        shown.add_column(column)
    rows = {name: [] for name in (
        "parameters", "slots", "encrypt one sample", "ciphertexts of one batch, MB", "a sample's share, KB",
        "encrypt a batch of 32", "inference of a batch of 32", "inference per sample of a full batch",
        "an answer of 4 ciphertexts, sealed", "largest error of the logits",
    )}  # fmt: skip
    paper = ["128 bits", "16384", "90 ms", "", "29.1 KB", "1.31 s", "110.21 s", "3.44 s", "", ""]
    for name, shape, classes in (("mlp", (1, 8, 8), 10), ("cnn", (1, 8, 8), 10), ("cnn32", (1, 32, 32), 10)):
        if name not in options.networks:
            for cells in rows.values():
                cells.append("")
            continue
        model = build(name, shape, classes, 0).eval()
        depth = ckks.explain(model, torch.empty(1, *shape)).depth
        keys = ckks.keygen(depth + 1, scale_bits=40 if depth < 8 else None)
        p = keys.parameters
        one, batch = torch.rand(1, *shape), torch.rand(32, *shape)
        weights = torch.rand(32, 4, classes) / classes
        _, first = timed(lambda: ckks.encrypt(one, keys, bound=1.0))
        e, second = timed(lambda: ckks.encrypt(batch, keys, bound=1.0))
        with torch.no_grad():
            z, third = timed(lambda: model(e).settled())
        error = float((z.decrypt(keys.secret) - model(batch).detach()).abs().max())
        q = encrypt_low(weights, keys)
        _, fourth = timed(lambda: seal(ckks.inner(q, z.unsqueeze(1)), 256, 16.0))
        values = (
            f"N {p.degree}, depth {p.depth}, 2^{p.scale_bits}", str(p.slots), f"{first:.2f} s",
            f"{e.ciphertext_bytes / 1e6:.0f}", f"{e.ciphertext_bytes / p.slots / 1e3:.1f}", f"{second:.2f} s",
            f"{third:.2f} s", f"{1e3 * third / p.slots:.2f} ms", f"{fourth:.2f} s", f"{error:.1e}",
        )  # fmt: skip
        for cells, value in zip(rows.values(), values, strict=True):
            cells.append(value)
        console.print(f"{name}: {dict(zip(rows, values, strict=True))}", highlight=False, soft_wrap=True)
    for (label, cells), theirs in zip(rows.items(), paper, strict=True):
        shown.add_row(label, *cells, theirs)
    console.print(shown)


def encrypted(options: argparse.Namespace) -> None:
    """A whole encrypted run, and the same run in the clear."""
    made = federation("digits", 2, "no-overlap", samples=options.samples or 200, seed=0)
    how = Settings(rounds=options.rounds).but(**METHODS[options.update], encrypted=True)
    hidden, seconds = timed(lambda: CaPriDe(*made, how).run())
    clear = CaPriDe(*made, how.but(encrypted=False)).run()
    console.print(f"{hidden.parameters}", highlight=False)
    shown = Table("round", "encrypted, %", "simulated, %", "loss of P1, encrypted", "simulated")
    for t in range(how.rounds + 1):
        losses = [r.records["P1"][t].get("distillation_loss") for r in (hidden, clear)]
        shown.add_row(
            str(t), f"{100 * hidden.accuracy(t):.2f}", f"{100 * clear.accuracy(t):.2f}",
            *("" if value is None else f"{value:.4f}" for value in losses),
        )  # fmt: skip
    console.print(shown)
    apart = max(
        float((a - b).detach().abs().max())
        for name in hidden.models
        for a, b in zip(hidden.models[name][0].parameters(), clear.models[name][0].parameters(), strict=True)
    )
    console.print(f"largest difference of a weight at the end: {apart:.2e}; whole run {seconds:.1f} s")
    console.print(f"seconds: {hidden.seconds}", highlight=False)
    size = {what: sum(row["bytes"] for row in hidden.messages if row["message"] == what) / 1e6 for what in
            ("keys", "inputs", "directions", "aggregates")}  # fmt: skip
    console.print(f"MB: {size}", highlight=False)


def main() -> None:
    commands = {f.__name__: f for f in (gains, sensitivity, table2, encrypted)}
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=list(commands))
    p.add_argument("--data", default="digits")
    p.add_argument("--data-root", type=Path)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--weight", type=float, help="lambda (default: 2 for each peer)")
    p.add_argument("--samples", type=int, help="of each party (default: all)")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    p.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="of gains and sensitivity")
    p.add_argument("--update", default="forward", choices=("scalar", "head", "forward"), help="of encrypted")
    p.add_argument("--networks", nargs="+", default=["mlp", "cnn", "cnn32"])
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results/capride", help="a folder for the rows")
    options = p.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    commands[options.command](options)


if __name__ == "__main__":
    main()
