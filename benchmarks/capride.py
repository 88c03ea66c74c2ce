"""CaPriDe's Tables 1 and 2 and Figures 2 to 5 on what is at hand, and a whole encrypted run.

    python benchmarks/capride.py gains         # Table 1, Figures 2 to 5: 2, 5, 10 parties, three splits, in the clear
    python benchmarks/capride.py sensitivity   # by lambda, and FedAvg by its noise
    python benchmarks/capride.py table2        # encryption, ciphertext size and encrypted inference of our networks
    python benchmarks/capride.py encrypted     # whole encrypted runs on digits, and how far they are from the clear
    python benchmarks/capride.py resnet        # the smallest ResNet by the paper's schedule, in the clear
    python benchmarks/capride.py depths        # what ResNets take of a CKKS chain

Rows go to benchmarks/results/capride, of which `docs/generate.py` makes the tables; a stopped program goes on.
With --data cifar10 (or cifar100, ham10000), --data-root and --out the same commands run on the paper's data sets.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from sectorch import ckks
from sectorch.errors import SectorchError
from sectorch.nn.fhe import fhe_friendly, fold_batchnorms
from sectorch.protocols.capride import CaPriDe, Result, Settings, federation
from sectorch.protocols.capride.experiment import SPLITS, build

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


NETWORKS = {"mlp 8x8": ("mlp", (1, 8, 8)), "cnn 8x8": ("cnn", (1, 8, 8)), "cnn32 32x32": ("cnn32", (1, 32, 32)),
            "resnet4 8x8": ("resnet4", (1, 8, 8))}  # fmt: skip


def table2(options: argparse.Namespace) -> None:
    """Our networks, beside the paper's ResNet-18 on HElayers. One thread, no GPU."""

    def one(place: tuple) -> dict:
        name, shape = NETWORKS[place[0]]
        model = fold_batchnorms(build(name, shape, 10, 0))
        depth = ckks.explain(model, torch.empty(1, *shape), bound=float("nan")).depth
        if depth is None:
            raise SectorchError(f"{name} is not evaluated")
        keys = ckks.keygen(depth + 1, scale_bits=40 if depth < 8 else None)
        p = keys.parameters
        sample, batch = torch.rand(1, *shape), torch.rand(32, *shape)
        weights = torch.rand(32, 4, 10) / 10
        _, first = timed(lambda: ckks.encrypt(sample, keys, bound=None))
        e, second = timed(lambda: ckks.encrypt(batch, keys, bound=None))
        with torch.no_grad():
            z, third = timed(lambda: model(e).smallest_form())
        error = float((z.decrypt(keys.secret) - model(batch).detach()).abs().max())
        q = ckks.encrypt(weights, keys, bound=None, level=1)
        _, fourth = timed(lambda: ckks.sum_batch(ckks.inner(q, z.unsqueeze(1)), 256, 16.0))
        return dict(values={
            "parameters": f"N {p.degree}, depth {p.depth}, 2^{p.scale_bits}", "slots": str(p.slots),
            "encrypt one sample": f"{first:.2f} s",
            "ciphertexts of one batch": f"{e.ciphertext_bytes / 1e6:.0f} MB",
            "a sample's share of a full batch": f"{e.ciphertext_bytes / p.slots / 1e3:.1f} KB",
            "encrypt a batch of 32": f"{second:.2f} s", "encrypted inference of a batch of 32": f"{third:.2f} s",
            "a sample's share of a full batch's inference": f"{1e3 * third / p.slots:.2f} ms",
            "an answer of 4 ciphertexts, sealed": f"{fourth:.2f} s", "largest error of the logits": f"{error:.1e}",
        })  # fmt: skip

    each(options, "table2", ("network",), [(name,) for name in NETWORKS], one)


PAPER = dict(optimiser="sgd", rate=0.1, milestones=(50, 75), batch=128, warmup=25, rounds=75, epochs=1)
"""Section 4.2."""


def resnet(options: argparse.Namespace) -> None:
    """The smallest ResNet by the paper's schedule, in the clear: 300 samples a party, no class in common."""

    def one(place: tuple) -> dict:
        seed, name = place
        made = federation("digits", 2, "no-overlap", network="resnet4", samples=300, seed=seed)
        result = CaPriDe(*made, Settings(seed=seed).but(**METHODS[name], **PAPER).but(directions=32)).run()
        return dict(before=round(100 * result.accuracy(0), 2), after=round(100 * result.accuracy(-1), 2))

    names = [name for name in ("local", "dml", "scalar", "head", "forward") if name in options.methods]
    each(options, "resnet", ("seed", "method"), [(s, name) for s in options.seeds for name in names], one)


ENCRYPTED = {
    "mlp, forward, 20 rounds": (dict(samples=200), dict(update="forward", directions=128)),
    "resnet4, scalar, one round": (dict(samples=300, network="resnet4"), PAPER | dict(update="scalar", rounds=1)),
    "resnet4, head, one round": (dict(samples=300, network="resnet4"), PAPER | dict(update="head", rounds=1)),
    "resnet4, forward, one round": (
        dict(samples=300, network="resnet4"), PAPER | dict(update="forward", directions=32, rounds=1)
    ),
    "mlp, the default, 20 rounds": (dict(samples=200), dict(leakage=0.5, sigma=None)),
}  # fmt: skip
"""Two parties with the even and the odd digits."""


def encrypted(options: argparse.Namespace) -> None:
    """Whole encrypted runs, and the same in the clear: seconds, bytes and what they end in."""

    def one(place: tuple) -> dict:
        parties, changes = ENCRYPTED[place[0]]
        made = federation("digits", 2, "no-overlap", seed=0, **parties)
        how = Settings(leakage=None, sigma=0.0).but(**changes)
        hidden, seconds = timed(lambda: CaPriDe(*made, how).run())
        clear = CaPriDe(*made, how.but(encrypted=False)).run()
        pairs = [(hidden.models[name][0].parameters(), clear.models[name][0].parameters()) for name in hidden.models]
        apart = max(float((a - b).detach().abs().max()) for ours in pairs for a, b in zip(*ours, strict=True))
        size = {row["message"]: 0.0 for row in hidden.messages}
        for row in hidden.messages:
            size[row["message"]] += row["bytes"] / 1e6
        return dict(
            total=round(seconds, 1), steps={n: round(v, 1) for n, v in hidden.seconds.items()}, parameters=str(
                hidden.parameters), megabytes={n: round(v, 2) for n, v in size.items()}, apart=apart,
            numbers=hidden.records["P1"][-1]["released"], rounds=how.rounds,
            hidden=[round(100 * hidden.accuracy(t), 2) for t in (0, -1)], clear=round(100 * clear.accuracy(-1), 2),
            leakage=max(hidden.leakage.values(), default=0.0),
        )  # fmt: skip

    each(options, "encrypted", ("what",), [(what,) for what in ENCRYPTED], one)


DEEP = {"resnet4": (1, 8, 8), "resnet8": (1, 8, 8), "resnet18": (3, 32, 32)}


def depths(options: argparse.Namespace) -> None:
    """What networks take of a chain, and of memory for one batch: worked out on shapes, nothing is encrypted."""

    def one(place: tuple) -> dict:
        name, activation = place
        model = fhe_friendly(build(name, DEEP[name], 10, 0, activation).eval(), activation)
        report = ckks.explain(fold_batchnorms(model), torch.empty(1, *DEEP[name]), bound=float("nan"))
        inputs = math.prod(DEEP[name])
        return dict(depth=report.depth, problem=report.problem, peak=report.peak_bytes, inputs=inputs)

    places = [(name, activation) for name in DEEP for activation in ("gelu", "square")]
    each(options, "depths", ("network", "activation"), places, one)


def main() -> None:
    commands = {f.__name__: f for f in (gains, sensitivity, table2, encrypted, resnet, depths)}
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=list(commands))
    p.add_argument("--data", default="digits")
    p.add_argument("--data-root", type=Path)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--weight", type=float, help="lambda (default: 2 for each peer)")
    p.add_argument("--samples", type=int, help="of each party (default: all)")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    p.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="of gains and sensitivity")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results/capride", help="a folder for the rows")
    options = p.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    commands[options.command](options)


if __name__ == "__main__":
    main()
