"""CaPC's planner, judged on data that its assumptions were not made on: every row of it in benchmarks/results/capc.

    python benchmarks/capc_planner.py --out runs/capc-planner --json benchmarks/results/capc/planner.json

The correlation that forecasts assume (0.25) was chosen on digits with a small convolution. Judged are: the same digits;
digits by another kind of model; scikit-learn's breast cancer table; and two synthetic tables, an easy and a hard one.
For each: what the voters' accuracy and correlation really are, the forecast beside the answers, and the gain of the
planned number of queries beside the whole pool and beside fixed numbers.

Training takes all samples in one batch: with batches of 16 a last one of a few samples costs more points than a choice
of queries brings (`remainder`), and which numbers have such a one is chance.

    python benchmarks/capc_planner.py --what remainder --json benchmarks/results/capc/remainder.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sectorch.data import Dataset, load
from sectorch.data.datasets import Split
from sectorch.federated import Training
from sectorch.federated.command import verdict
from sectorch.protocols.capc import CaPC, Result, Settings, collaboration

COUNTS = (10, 20, 35, 50)
WHOLE = Training("adam", 1e-2, 256, 120)
"""More than any party has in a batch."""


def _table(name: str, values: np.ndarray, labels: np.ndarray, train: int) -> Dataset:
    """Columns scaled to 0 .. 255 by the training rows; a row is an image of one line."""
    order = np.random.default_rng(0).permutation(len(labels))
    values, labels = values[order], labels[order]
    low, high = values[:train].min(0), values[:train].max(0)
    pixels = torch.from_numpy(np.clip(255 * (values - low) / (high - low), 0, 255).astype(np.uint8))
    pixels, targets = pixels.view(len(labels), 1, 1, -1), torch.from_numpy(labels).long()
    parts = [Split(pixels[part], targets[part]) for part in (slice(train), slice(train, None))]
    return Dataset(name, *parts, int(labels.max()) + 1)


def _cancer() -> Dataset:
    from sklearn.datasets import load_breast_cancer

    return _table("breast-cancer", *load_breast_cancer(return_X_y=True), 300)


def _synthetic(name: str, spread: float, wrong: float) -> Dataset:
    from sklearn.datasets import make_classification

    values, labels = make_classification(
        2400, 20, n_informative=10, n_redundant=4, n_classes=5, class_sep=spread, flip_y=wrong, random_state=1
    )
    return _table(name, values, labels, 1500)


CASES: dict[str, tuple[Callable[[], Dataset], tuple[str, ...], tuple[int, ...], int]] = {
    "digits": (lambda: load("digits"), ("cnn",), (20, 50), 75),
    "digits, mlp": (lambda: load("digits"), ("mlp",), (20, 50), 75),
    "breast cancer": (_cancer, ("mlp",), (12, 20), 50),
    "synthetic, apart": (lambda: _synthetic("apart", 2.0, 0.0), ("mlp",), (20, 50), 75),
    "synthetic, mixed": (lambda: _synthetic("mixed", 1.0, 0.1), ("mlp",), (20, 50), 75),
}
"""Data, architectures, numbers of parties, images of a pool."""


def truth_of(result: Result) -> tuple[float, float]:
    """The voters' mean accuracy on the asked images, and the correlation of two voters' being right, by moments."""
    shares, count = [], 0
    for record in result.records.values():
        for votes, label in zip(record.votes, record.truth[record.asked].tolist(), strict=True):
            count = sum(votes)
            shares.append(votes[label] / count)
    mean = statistics.fmean(shares)
    alone = mean * (1 - mean)
    return mean, (statistics.variance(shares) - alone / count) / (alone * (1 - 1 / count))


def judged(name: str, parties: int, options: argparse.Namespace) -> dict:
    make, architectures, _, pool = CASES[name]
    dataset, base = make(), Settings(epsilon=options.epsilon, inference="simulated", local=WHOLE)
    conditions = {"pool": base, "planned": replace(base, planned=True)}
    conditions |= {str(n): replace(base, queries=n) for n in COUNTS if n < pool}
    gains: dict[str, list[float]] = {condition: [] for condition in conditions}
    row: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        made = collaboration(dataset, parties, architectures=architectures, pool=pool, seed=seed)
        place = options.out / name.replace(", ", "-").replace(" ", "-") / f"{parties}-{seed}"
        for condition, how in conditions.items():
            run = CaPC(*made, replace(how, seed=seed), out=place / condition, local=place / "local")
            result = run.run()
            gains[condition].append(100 * result.mean("gain"))
            if condition in ("pool", "planned"):
                own, expected = (
                    statistics.fmean(getattr(f, of) for f in result.forecasts.values()) for of in ("own", "vote")
                )
                accuracy, correlation = truth_of(result)
                warned = sum(f.worse for f in result.forecasts.values())
                known = dict(queries=statistics.fmean(len(r.asked) for r in result.records.values()), own=own,
                             expected=expected, right=result.mean("right"), before=result.mean("before"),
                             accuracy=accuracy, correlation=correlation, warned=warned)  # fmt: skip
                for key, value in known.items():
                    row.setdefault(f"{condition} {key}", []).append(value)
    against = {c: verdict([a - b for a, b in zip(gains["planned"], gains[c], strict=True)]) for c in gains
               if c != "planned"}  # fmt: skip
    mean = {key: statistics.fmean(values) for key, values in row.items()}
    percent = {key: f"{100 * value:.1f} %" for key, value in mean.items()}
    print(
        f"{name}, {parties} parties: voters {percent['pool accuracy']} right, correlation "
        f"{mean['pool correlation']:.2f}; own {percent['pool own']} (tested {percent['pool before']})"
    )
    for c in ("pool", "planned"):
        print(
            f"  {c}: {mean[f'{c} queries']:.0f} queries, right {percent[f'{c} right']} (forecast "
            f"{percent[f'{c} expected']}), gain {verdict(gains[c])}, warned {sum(row[f'{c} warned'])} of "
            f"{3 * options.seeds}"
        )
    print("  planned against " + "; ".join(f"{c}: {text}" for c, text in against.items()), flush=True)
    print("  gain of " + "; ".join(f"{c}: {verdict(values)}" for c, values in gains.items()), flush=True)
    return dict(data=name, parties=parties, seeds=options.seeds, epsilon=options.epsilon, gains=gains, found=row)


def remainder(options: argparse.Namespace) -> list[dict]:
    """30 own samples and so many labelled by the vote without noise, in batches of 16 and in one."""
    make, architectures, _, pool = CASES["synthetic, apart"]
    dataset, rows = make(), []
    for training in (Training("adam", 3e-3, 16, 60), WHOLE):
        for count in (33, 34, 35, 36, 38):
            gains = []
            for seed in range(options.seeds):
                made = collaboration(dataset, 50, architectures=architectures, pool=pool, seed=seed)
                how = Settings(inference="simulated", queries=count, seed=seed, local=training, control="no-noise")
                gains.append(100 * CaPC(*made, how, local=options.out / "remainder").run().mean("gain"))
            samples = len(made[0][0].images) + count
            print(f"batches of {training.batch_size}, {samples} samples, {samples % training.batch_size} in the last: "
                  f"{verdict(gains)}", flush=True)  # fmt: skip
            rows.append(dict(batch=training.batch_size, samples=samples, last=samples % training.batch, gains=gains))
    return rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--what", choices=("plans", "remainder"), default="plans")
    p.add_argument("--data", nargs="+", choices=list(CASES), default=list(CASES))
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--epsilon", type=float, default=10.0)
    p.add_argument("--out", type=Path, default=Path("runs/capc-planner"))
    p.add_argument("--json", type=Path, help="also write the rows there")
    options = p.parse_args()
    if options.what == "remainder":
        rows = remainder(options)
    else:
        rows = [judged(name, parties, options) for name in options.data for parties in CASES[name][2]]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
