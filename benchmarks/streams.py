"""Streams of AES-128 by GCM and by CTR, which make the same bytes: GB/s for draws of some lengths, and which is taken.

python benchmarks/streams.py [--repeats 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from sectorch.choreography import streams

LENGTHS = [1 << bits for bits in (12, 14, 15, 16, 17, 18, 20, 23)]


def measured(repeats: int) -> dict[int, dict[str, float]]:
    """GB/s of both for each length, in turns: medians."""
    key, draw, found = streams.PairKey(bytes(range(32)), b"streams"), 0, {}
    for length in LENGTHS:
        out, taken = memoryview(bytearray(length)), {"CTR": [], "GCM": []}
        for _ in range(repeats):
            for name, seconds in taken.items():
                with mock.patch.object(streams, "by_gcm", lambda _, name=name: name == "GCM"):
                    draw, began = draw + 1, time.perf_counter()
                    key.fill("measured", 0, draw, out)
                    seconds.append(time.perf_counter() - began)
        found[length] = {name: length / statistics.median(seconds) / 1e9 for name, seconds in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    table = Table(title="GB/s of a draw")
    for column in ("bytes", "CTR", "GCM", "taken"):
        table.add_column(column, justify="right")
    found = measured(given.repeats)
    for length, row in found.items():
        taken = "GCM" if streams.by_gcm(length) else "CTR"
        table.add_row(f"{length:,}", *(f"{value:.1f}" for value in row.values()), taken)
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
