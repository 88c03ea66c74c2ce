"""Faults planted in sectorch's own protocols, one at a time: which of them `check_protocol` finds, and by which check.

python examples/gallery/mutation.py                         # all protocols, 60 faults of each
python examples/gallery/mutation.py relu_20 --most 10000    # one, with every fault
python examples/gallery/mutation.py --json FILE             # goes on with what is missing in FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from sectorch.testing import mutate_protocol

sys.path.insert(0, str(Path(__file__).parent))
from own import OWN, Own


def planted(own: Own, most: int, seed: int) -> dict:
    """One report, printed, and as a dict; of fewer elements where each run is one experiment, or keys are long."""
    elements = 64 if own.options.get("elementwise") is False else 1024 if own.deep else 4096
    report = mutate_protocol(
        own.protocol, own.given, own.reference, elements=elements, most=most, seed=seed, **own.options
    )
    print(f"{own.name}\n{report.table()}", flush=True)
    return {"elements": elements, **report.as_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="protocols; all if none is named")
    parser.add_argument("--most", type=int, default=60, help="faults of each protocol, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the reports by name; those that are there are not made again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    for own in OWN:
        if (arguments.names and own.name not in arguments.names) or own.name in found:
            continue
        found[own.name] = planted(own, arguments.most, arguments.seed)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    counted = sum(r["counted"] for r in found.values())
    missed = sum(len(r["survivors"]) for r in found.values())
    print(f"{len(found)} protocols: {counted - missed} of {counted} faults found, {1 - missed / max(1, counted):.1%}")


if __name__ == "__main__":
    main()
