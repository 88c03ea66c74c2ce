"""Evaluation of a secret model on a secret test set: seconds, bytes and rounds, and how far metrics are from
scikit-learn's.

    python benchmarks/evaluation.py [--rows 1000 10000] [--repeats 3] [--json FILE]

Scores, labels and groups of two are in shares, all parties in one process; the first call, with compiled loops, is not
counted. `pairs` are all comparisons of pairs of scores, by which areas could be computed in fewer rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn import metrics as known

import sectorch
from sectorch.tables.evaluation import METRICS

ALL = [name for name in METRICS if name != "gaps"]


def measured(run: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """The result, and the least seconds; bytes and rounds are the same each time."""
    found, costs, clock, processor = run(), [], [], []
    for _ in range(repeats):
        began, busy = time.perf_counter(), time.process_time()
        with sectorch.profile() as seen:
            found = run()
        clock.append(time.perf_counter() - began)
        processor.append(time.process_time() - busy)
        costs.append(seen)
    cost = costs[-1]
    return found, {
        "seconds": min(clock), "processor_seconds": min(processor), "rounds": cost.rounds,
        "online_mb": cost.online_bytes / 1e6, "dealt_mb": cost.offline_bytes / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=1000, help="at most so many rows are compared in pairs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lines = []
    for n in given.rows:
        torch.manual_seed(0)
        session = sectorch.Session()
        scores = torch.randn(n) * 2
        labels, group = (torch.rand(n) < torch.sigmoid(scores)).long(), torch.randint(0, 2, (n,))
        z, y, g = (sectorch.share(v, session=session, owner="S") for v in (scores, labels, group))
        groups = {"sex": (g, ("f", "m"))}
        runs: dict[str, Callable[[], Any]] = {
            "auroc": lambda z=z, y=y: sectorch.evaluate(None, z, y, ["auroc"]),
            "auprc": lambda z=z, y=y: sectorch.evaluate(None, z, y, ["auprc"]),
            "eight": lambda z=z, y=y: sectorch.evaluate(None, z, y, ALL),
            "eight, gaps, 2 groups": lambda z=z, y=y, v=groups: sectorch.evaluate(None, z, y, METRICS, v),
        }
        if n <= given.pairs:
            runs["pairs"] = lambda z=z: (z.unsqueeze(0) > z.unsqueeze(1)).sum(1)
        for name, run in runs.items():
            found, line = measured(run, given.repeats)
            line = {"rows": n, "what": name, **line}
            if name == "eight":
                p = torch.sigmoid(scores.double()).numpy()
                line["off"] = {
                    "auroc": abs(float(found["auroc"].reveal()) - known.roc_auc_score(labels, scores)),
                    "auprc": abs(float(found["auprc"].reveal()) - known.average_precision_score(labels, scores)),
                    "log_loss": abs(float(found["log_loss"].reveal()) - known.log_loss(labels, p)),
                    "brier": abs(float(found["brier"].reveal()) - known.brier_score_loss(labels, p)),
                }
            lines.append(line)
            off = "".join(f"; {k} off by {v:.1e}" for k, v in line.get("off", {}).items())
            print(
                f"{n} rows, {name}: {line['seconds']:.2f} s ({line['processor_seconds']:.2f} s of the processor), "
                f"{line['rounds']} rounds, {line['online_mb']:.1f} MB online, {line['dealt_mb']:.1f} MB dealt{off}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
