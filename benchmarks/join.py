"""A join of two owners' tables with several columns each: seconds, bytes and rounds, and whether it is pandas.merge's.

python benchmarks/join.py [--rows 100000] [--columns 4] [--how inner left bound] [--repeats 3] [--json FILE]

Half of the ids are in both tables. All parties are in this process, with as many threads as torch takes
(OMP_NUM_THREADS), so that seconds are the sum of what all parties compute.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

import sectorch


def frames(rows: int, columns: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables of as many rows, whose ids are text, and half of them in both."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(2 * rows)[: 2 * rows - rows // 2]
    made = []
    for name, own in (("l", ids[:rows]), ("r", ids[len(ids) - rows :])):
        own = rng.permutation(own)
        data: dict[str, Any] = {"id": [f"patient-{i:08d}" for i in own]}
        for column in range(columns):
            numbers = np.round(256 * rng.normal(size=rows)) / 256
            data[f"{name}{column}"] = rng.integers(-1000, 1000, rows) if column % 2 else numbers
        made.append(pd.DataFrame(data))
    return made[0], made[1]


def measured(rows: int, columns: int, how: str, seed: int) -> dict[str, Any]:
    """One join: its cost, and whether its rows are those of pandas.merge."""
    first, second = frames(rows, columns, seed)
    session = sectorch.Session(owners=("H1", "H2"))
    left = sectorch.owned(first, owner="H1", session=session, columns=[f"l{i}" for i in range(columns)])
    right = sectorch.owned(second, owner="H2", session=session, columns=[f"r{i}" for i in range(columns)])
    options: dict[str, Any] = {"inner": {}, "left": {"how": "left"}, "bound": {"bound": rows // 2 + rows // 10}}[how]
    with sectorch.profile() as seen:
        clock, processor = time.perf_counter(), time.process_time()
        table = sectorch.join(left, right, on="id", **options)
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
    plain = first.merge(second, on="id", how="left" if how == "left" else "inner").drop(columns="id")
    opened = np.stack([table[name].reveal().double().numpy() for name in table.columns], 1)
    if table.present is not None:
        opened = opened[table.present.reveal().numpy()]
    wanted = plain[list(table.columns)].to_numpy(dtype=np.float64)
    by_row = lambda x: x[np.lexsort(x.T)]
    right_rows = np.array_equal(by_row(opened), by_row(wanted), equal_nan=True)  # all values are multiples of 1 / 256
    return {
        "rows": rows, "columns": columns, "how": how, "matches": len(plain), "seconds": clock, "cpu": processor,
        "online_mb": sum(line.bytes for line in seen.ledger if line.phase.name == "ONLINE") / 1e6,
        "mb": sum(line.bytes for line in seen.ledger) / 1e6,
        "rounds": max(line.round for line in seen.ledger), "equal": right_rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--columns", type=int, default=4, help="of each table")
    parser.add_argument("--how", nargs="+", default=["inner", "left", "bound"], choices=("inner", "left", "bound"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    table = Table(title="Joins, all parties in one process: the fastest of the repeats")
    for column in (
        "rows of each",
        "columns of each",
        "join",
        "matches",
        "s",
        "CPU s",
        "MB",
        "MB online",
        "rounds",
        "right",
    ):
        table.add_column(column, justify="right")
    found = []
    for rows in given.rows:
        for how in given.how:
            runs = [measured(rows, given.columns, how, seed) for seed in range(given.repeats)]
            best = min(runs, key=lambda run: run["cpu"])
            best["equal"] = all(run["equal"] for run in runs)
            found.append(best)
            table.add_row(
                f"{rows:,}", f"{best['columns']}", how, f"{best['matches']:,}", f"{best['seconds']:.1f}",
                f"{best['cpu']:.1f}", f"{best['mb']:.0f}", f"{best['online_mb']:.0f}", str(best["rounds"]),
                str(best["equal"]),
            )  # fmt: skip
    Console(width=120).print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
