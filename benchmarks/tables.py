"""Statistics of a table in shares: seconds, bytes and rounds of each, and how far it is from pandas and numpy.

    python benchmarks/tables.py [--rows 1000 100000] [--repeats 2] [--only NAME ...] [--json FILE]

Ten columns of two owners (half of the rows each): six numbers, one of which has missing values, a count, a category of
five, and two flags. All parties are in one process; the first call, with compiled loops, is made on few rows and is not
counted. `shared` is how the table comes into shares.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import sectorch
from sectorch import tables
from sectorch.tables import Column

NUMBERS = ("age", "weight", "pressure", "glucose", "marker", "dose")
WARDS = ("north", "east", "south", "west", "out")
COLUMNS: dict[str, Any] = {
    **dict.fromkeys(NUMBERS, Column("number", limit=512.0)), "visits": Column("integer", limit=128), "ward": WARDS,
    "treated": None, "died": None,
}  # fmt: skip
MONTHS = range(1, 25)
QUARTERS = (0.25, 0.5, 0.75)


def frame_of(rows: int) -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({name: random.normal(100, 10 + 5 * i, rows) for i, name in enumerate(NUMBERS)})
    frame[list(NUMBERS)] = np.round(frame[list(NUMBERS)] * 2**20) / 2**20
    frame.loc[random.random(rows) < 0.1, "marker"] = np.nan
    frame["visits"] = random.integers(0, 30, rows)
    frame["ward"] = random.choice(WARDS, rows)
    frame["treated"], frame["died"] = random.random(rows) < 0.5, random.random(rows) < 0.3
    return frame


def shared(frame: pd.DataFrame, session: sectorch.Session) -> tables.Table:
    cut = len(frame) // 2
    parts = [
        sectorch.owned(part, owner=owner, session=session, columns=COLUMNS, missing=["marker"]).share()
        for owner, part in (("H1", frame[:cut]), ("H2", frame[cut:]))
    ]
    return tables.Table.concat(parts)


Run = tuple[Callable[[tables.Table], Any], Callable[[pd.DataFrame], Any]]

RUNS: dict[str, Run] = {
    "sum of 6": (lambda t: tables.sum(t, *NUMBERS), lambda f: f[list(NUMBERS)].sum()),
    "mean of 6": (lambda t: tables.mean(t, *NUMBERS), lambda f: f[list(NUMBERS)].mean()),
    "variance of 6": (lambda t: tables.variance(t, *NUMBERS), lambda f: f[list(NUMBERS)].var()),
    "std of 6": (lambda t: tables.std(t, *NUMBERS), lambda f: f[list(NUMBERS)].std()),
    "correlation of 6": (
        lambda t: tables.correlation(t, *NUMBERS), lambda f: f[list(NUMBERS)].dropna().corr(),
    ),
    "count by ward": (lambda t: tables.count(t, by="ward"), lambda f: f.groupby("ward").size()[list(WARDS)]),
    "mean of 6 by ward": (
        lambda t: tables.mean(t, *NUMBERS, by="ward"),
        lambda f: f.groupby("ward")[list(NUMBERS)].mean().loc[list(WARDS)],
    ),
    "variance of 6 by ward": (
        lambda t: tables.variance(t, *NUMBERS, by="ward"),
        lambda f: f.groupby("ward")[list(NUMBERS)].var().loc[list(WARDS)],
    ),
    "maximum of 1 by ward": (
        lambda t: tables.maximum(t, "age", by="ward"), lambda f: f.groupby("ward")["age"].max()[list(WARDS)],
    ),
    "mean of 6 of a secret filter": (
        lambda t: tables.mean(t.where(t["age"] >= 100), *NUMBERS),
        lambda f: f[f["age"] >= 100][list(NUMBERS)].mean(),
    ),
    "median of a number": (lambda t: tables.median(t, "age"), lambda f: f["age"].median()),
    "quartiles of a count": (
        lambda t: tables.quantile(t, "visits", QUARTERS), lambda f: f["visits"].quantile(list(QUARTERS)),
    ),
    "histogram, 10 bins": (
        lambda t: tables.histogram(t, "age", range(50, 151, 10)),
        lambda f: np.histogram(f["age"], range(50, 151, 10))[0],
    ),
    "cross table 5 x 2": (
        lambda t: tables.cross_table(t, "ward", "treated"),
        lambda f: pd.crosstab(f["ward"], f["treated"]).loc[list(WARDS)],
    ),
    "t test": (lambda t: tables.t_test(t, "age", by="treated"), lambda f: None),
    "chi-square test": (lambda t: tables.chi_square(t, "ward", "died"), lambda f: None),
    "Kaplan-Meier, 24 times, 2 groups": (
        lambda t: tables.kaplan_meier(t, "visits", "died", times=MONTHS, by="treated"), lambda f: None,
    ),
    "log-rank test, 24 times": (
        lambda t: tables.log_rank(t, "visits", "died", times=MONTHS, by="treated"), lambda f: None,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=list(RUNS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lines = []
    for rows in given.rows:
        frame, session = frame_of(rows), sectorch.Session(owners=("H1", "H2"))
        warm = shared(frame_of(1000), session)
        began = time.perf_counter()
        with sectorch.profile() as seen:
            table = shared(frame, session)
        lines.append({"rows": rows, "what": "shared", "seconds": time.perf_counter() - began, "rounds": seen.rounds,
                      "online_mb": seen.online_bytes / 1e6, "dealt_mb": seen.offline_bytes / 1e6})  # fmt: skip
        print(json.dumps(lines[-1]), flush=True)
        for name in given.only:
            run, reference = RUNS[name]
            run(warm)
            clock, processor = [], []
            for _ in range(given.repeats):
                began, busy = time.perf_counter(), time.process_time()
                with sectorch.profile() as seen:
                    found = run(table)
                clock.append(time.perf_counter() - began)
                processor.append(time.process_time() - busy)
            wanted = reference(frame)
            off = None if wanted is None else float(np.abs(found.reveal().to_numpy() - np.asarray(wanted)).max())
            lines.append({
                "rows": rows, "what": name, "seconds": min(clock), "processor_seconds": min(processor),
                "rounds": seen.rounds, "online_mb": seen.online_bytes / 1e6, "dealt_mb": seen.offline_bytes / 1e6,
                "off": off,
            })  # fmt: skip
            print(json.dumps(lines[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
