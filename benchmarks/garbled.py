"""Steps 1c and 3 of CaPC: seconds and bytes, by garbled circuits and on three-party shares.

    python benchmarks/garbled.py                       # the paper's size: 1,000 queries, 10 classes, 50 parties
    python benchmarks/garbled.py --queries 100 --parties 5 --bits 16 24 32
    python benchmarks/garbled.py --json garbled.json

All parties run in this process, one after the other. A row's seconds are those of all of them together: the garbler's,
the evaluator's, and the pads of what passes through S. CPU seconds are of the process, for a machine with other work.
Labels are checked against torch.argmax of the same numbers.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sectorch.choreography.ledger import Profile
from sectorch.garbled import argmax_noisy, argmax_noisy_shares, argmax_onehot, argmax_onehot_shares, correlate
from sectorch.session import Session

PAPER = {"1b, 1c": 0.12, "2, 3": 0.030}
"""CaPC, Table 1: seconds for one query, one answering party, on the authors' machine."""

SCALE = 40
"""Fraction bits of the logits, as the last linear layer leaves them."""


class Bench:
    """One session, its pairs, and the two steps on random logits and votes."""

    def __init__(self):
        self.session = Session()
        self.A = self.session.answering[0]
        start = time.perf_counter()
        with Profile() as profile:
            self.pair_A = correlate(self.session.setup(self.A), self.A)
        self.setup = dict(seconds=time.perf_counter() - start, bytes=profile.bytes)
        self.pair_S = correlate(self.session.setup(self.A), self.session.S)

    def onehot(self, parties: int, queries: int, classes: int, bits: int, shares: bool) -> dict:
        """Step 1c, all parties in turn: seconds, bytes, rounds of one party's call."""
        seconds, cpu, size, rounds, lost = 0.0, 0.0, 0, 0, 0
        drop = min(SCALE, SCALE + 16 - bits) if bits < 56 else 0
        for _ in range(parties):
            values = torch.round(torch.randn(queries, classes, dtype=torch.float64) * 4 * 2.0**SCALE).long()
            mask = torch.randint(-(1 << 63), (1 << 63) - 1, values.shape)
            start = time.process_time()
            with self.session.call(self.A) as net, Profile() as profile:
                own, other = net.own(self.A, mask), net.own(net.Q, values - mask)
                if shares:
                    s, s_hat = argmax_onehot_shares(net, own, other, drop=drop, bits=bits)
                else:
                    s, s_hat = argmax_onehot(net, self.pair_A, own, other, drop=drop, bits=bits)
            cpu += time.process_time() - start
            hot = net.read(s, net.Q) + net.read(s_hat, self.A)
            lost += int((hot != F.one_hot(values.argmax(-1), classes)).any(-1).sum())
            seconds, size, rounds = seconds + profile.seconds, size + profile.bytes, profile.rounds
        return dict(seconds=seconds, cpu=cpu, bytes=size, rounds=rounds, differ=lost)

    def noisy(self, queries: int, classes: int, bits: int, shares: bool) -> dict:
        """Step 3 on votes of 50 parties with noise of standard deviation 7, in whole numbers."""
        values = torch.round(torch.randn(queries, classes, dtype=torch.float64) * 7).long() + torch.randint(0, 51, (1,))
        mask = torch.randint(-(1 << 63), (1 << 63) - 1, values.shape)
        start = time.process_time()
        with self.session.call(self.A) as net, Profile() as profile:
            own, other = net.own(net.S, mask), net.own(net.Q, values - mask)
            if shares:
                label = argmax_noisy_shares(net, own, other, bits=bits)
            else:
                label = argmax_noisy(net, self.pair_S, own, other, bits=bits)
        cpu = time.process_time() - start
        differ = int((net.read(label, net.Q) != values.argmax(-1)).sum())
        return dict(
            seconds=profile.seconds, cpu=cpu, bytes=profile.bytes, rounds=profile.rounds, differ=differ
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--parties", type=int, default=50)
    parser.add_argument("--bits", type=int, nargs="+", default=[32], help="bits that are compared")
    parser.add_argument("--repeat", type=int, default=11, help="runs of the single query; the median is shown")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the steps are many small operations that fit the cache: more threads wait for each other
    bench = Bench()
    bench.onehot(1, 1, options.classes, 32, False), bench.noisy(1, options.classes, 32, False)  # warm
    rows = []
    table = Table(title=f"{options.queries} queries, {options.classes} classes, {options.parties} answering parties")
    for column in ("step", "by", "bits", "runs", "s", "CPU s", "ms each", "MB", "bytes each", "rounds", "differ"):
        table.add_column(column, justify="left" if column in ("step", "by") else "right")

    def add(step: str, by: str, bits: int, count: int, result: dict) -> None:
        rows.append(dict(step=step, by=by, bits=bits, count=count, **result))
        table.add_row(
            step, by, str(bits), str(count), f"{result['seconds']:.3f}", f"{result['cpu']:.3f}",
            f"{1e3 * result['seconds'] / count:.3f}",
            f"{result['bytes'] / 1e6:.2f}", f"{result['bytes'] / count:.0f}", str(result["rounds"]),
            str(result["differ"]),
        )  # fmt: skip

    shape = (options.parties, options.queries, options.classes)
    with Progress(transient=True) as progress:
        for bits in progress.track(options.bits, description="garbled circuits and shares"):
            for by, shares in (("circuits", False), ("shares", True)):
                add("1c", by, bits, shape[0] * shape[1], bench.onehot(*shape, bits, shares))
                add("3", by, bits, shape[1], bench.noisy(*shape[1:], bits, shares))
    for by, shares in (("circuits", False), ("shares", True)):
        for step, run in (
            ("1c", lambda shares=shares: bench.onehot(1, 1, options.classes, 32, shares)),
            ("3", lambda shares=shares: bench.noisy(1, options.classes, 32, shares)),
        ):
            runs = [run() for _ in range(options.repeat)]
            add(step, by, 32, 1, {
                **runs[0], **{key: statistics.median(r[key] for r in runs) for key in ("seconds", "cpu")}
            })  # fmt: skip
    console = Console(width=110)
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    console.print(
        f"Once a session and answering party: {bench.setup['seconds']:.3f} s, {bench.setup['bytes']} bytes. "
        f"Largest memory {peak:.2f} GB, {torch.get_num_threads()} threads. "
        f"CaPC's Table 1, one query: {PAPER['1b, 1c']} s for 1b and 1c, {PAPER['2, 3']} s for 2 and 3."
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(dict(rows=rows, setup=bench.setup, peak_GB=peak, paper=PAPER), file, indent=1)


if __name__ == "__main__":
    main()
