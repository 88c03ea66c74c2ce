"""`python -m sweeps`: run the sweeps, or go on with them, and print their table.

    PYTHONPATH=.:tests/network python -m sweeps kill perturbed-fl --out /tmp/sweeps     20 places of each party
    PYTHONPATH=.:tests/network python -m sweeps links perturbed-fl --out /tmp/sweeps    each link failing in each way
    PYTHONPATH=.:tests/network python -m sweeps idle inference --out /tmp/sweeps        idle and half-open connections
    PYTHONPATH=.:tests/network python -m sweeps table --out /tmp/sweeps

`--seconds` ends it after the case in which they are over; started again it goes on. OUT/results.jsonl has the cases.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sweeps import faults, idle, inference, sweep, training
from sweeps.papers import PAPERS
from sweeps.world import warm


def main() -> int:
    p = argparse.ArgumentParser(
        prog="sweeps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=("kill", "links", "idle", "table"))
    p.add_argument("of", nargs="?", default="", help=f"inference, training or one of {', '.join(PAPERS)}")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--places", type=int, default=sweep.PLACES)
    p.add_argument("--fractions", type=int, default=1, choices=(1, 2, 3), help="how far in a run links fail")
    p.add_argument("--seconds", type=float)
    p.add_argument("--only", default="", help="cases whose name has this in it")
    p.add_argument("--pause", type=Path, help="no case is begun while this file exists")
    options = p.parse_args()
    out = options.out.resolve()
    cases = sweep.Cases(out / "results.jsonl", options.seconds, options.pause)
    if options.what != "table":
        warm()
        os.environ["XDG_CONFIG_HOME"] = str(out / "settings")
        if options.of == "inference":
            _inference(options, cases, out)
            options.of = ""
    if options.what != "table" and options.of:
        of_training = options.of == training.TRAINING.name
        world, reference = training.prepared(out) if of_training else sweep.prepared(PAPERS[options.of], out)
        print(f"{options.of}: {reference.seconds:.1f} s a run, spread {max(reference.spread.values()):.2g}", flush=True)
        print({name: len(events) for name, events in reference.events.items()}, flush=True)
        try:
            if options.what == "kill":
                sweep.kills(world, reference, cases, options.places, options.only)
            else:
                faults.of_paper(world, reference, cases, options.fractions, options.only)
        finally:
            world.close()
    for line in sweep.table(cases.rows):
        print(line)
    return 0 if all(row["ok"] for row in cases.rows) else 1


def _inference(options: argparse.Namespace, cases: sweep.Cases, out: Path) -> None:
    star = inference.Star(out / "inference")
    try:
        whole = inference.Whole(star)
        print({name: len(events) for name, events in whole.events.items()}, flush=True)
        if options.what == "kill":
            inference.kills(star, whole, cases, options.places, options.only)
        elif options.what == "idle":
            idle.beside(star, whole, cases)
        else:
            faults.of_inference(star, whole, cases, options.fractions, options.only)
    finally:
        star.close()


if __name__ == "__main__":
    sys.exit(main())
