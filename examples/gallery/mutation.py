"""Faults planted in sectorch's own protocols, one at a time: which of them `check_protocol` finds, and by which check.

python examples/gallery/mutation.py                         # all protocols, 60 faults of each
python examples/gallery/mutation.py relu_20 --most 10000    # one, with every fault
python examples/gallery/mutation.py --json FILE             # goes on with what is missing in FILE
python examples/gallery/mutation.py --table FILE [FILE ...] # what was found in these, as the table of docs/testing.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

from sectorch.testing import mutate_protocol

sys.path.insert(0, str(Path(__file__).parent))
from own import OWN, Own

LEAKS = ("no mask", "mask twice", "short mask", "low bit unmasked", "mask told")
"""Faults that leave the result right, as a rule: to be found by what somebody sees."""


def elements_of(own: Own) -> int:
    """Fewer where keys are long; shapes of their own say nothing of a number."""
    return 1024 if own.deep else 4096


def planted(own: Own, most: int, seed: int) -> dict:
    """One report, printed, and as a dict; half as many faults where keys are long."""
    elements = elements_of(own)
    report = mutate_protocol(
        own.protocol,
        own.given,
        own.reference,
        most=most // (1 + own.deep),
        seed=seed,
        **{"elements": elements, **own.options},
    )
    print(f"{own.name}\n{report.table()}", flush=True)
    return {"elements": elements, **report.as_dict()}


def counts(report: dict, kinds: tuple[str, ...] | None = None) -> Counter:
    """Of these kinds, or of all: how many were found by each check, survived, change nothing, cannot run."""
    total: Counter = Counter()
    for kind, found in report["kinds"].items():
        if kinds is None or kind in kinds:
            total.update(found)
    return total


def share(total: Counter, raised: bool = False) -> str:
    """Found, of those that count; with those that raise before anything is compared, as if these were found."""
    found = sum(total[by] for by in ("result", "draws", "messages", "view")) + raised * total["fails"]
    return f"{found / max(1, found + total['survivors']):.1%} of {found + total['survivors']}".replace("%", " %")


def table(found: dict[str, dict]) -> str:
    """One row a protocol, and their sum."""
    rows, total, leaks, possible = [], Counter(), Counter(), 0
    for own in OWN:
        if own.name not in found:
            continue
        report = found[own.name]
        here, told = counts(report), counts(report, LEAKS)
        total.update(here)
        leaks.update(told)
        possible += report["possible"]
        cells = own.name, report["possible"], share(here), share(told), here["same"], here["fails"]
        rows.append("| `{}` | {} | {} | {} | {} | {} |".format(*cells))
    head = "| protocol | possible | found | leaks found | change nothing | raise |\n| --- |" + " ---: |" * 5
    last = f"| all {len(rows)} | {possible} | {share(total)} | {share(leaks)} | {total['same']} | {total['fails']} |"
    by = ", ".join(f"{total[by]} by {by}" for by in ("result", "draws", "messages", "view"))
    said = f"Found {by}. With those that raise counted as found: {share(total, True)}."
    return "\n".join(
        [head, *rows, last, "", said, *(f"- {name}: {s}" for name in found for s in found[name]["survivors"])]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="protocols; all if none is named")
    parser.add_argument("--most", type=int, default=60, help="faults of each protocol, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the reports by name; those that are there are not made again")
    parser.add_argument("--table", type=Path, nargs="+", help="reports that `--json` has written")
    arguments = parser.parse_args()
    if arguments.table:
        print(
            table({name: report for file in arguments.table for name, report in json.loads(file.read_text()).items()})
        )
        return
    torch.set_num_threads(1)
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    for own in OWN:
        if (arguments.names and own.name not in arguments.names) or own.name in found:
            continue
        found[own.name] = planted(own, arguments.most, arguments.seed)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
