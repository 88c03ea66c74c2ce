"""SecSV's tables and figure beside the paper's conclusions (SecSV, section 7).

    python benchmarks/secsv.py compare logistic|logistic-2|cnn|dnn|rnn   # SecSV, with SampleSkip, and both HESV
    python benchmarks/secsv.py table2   # running time of all protocols by kind of work, and errors
    python benchmarks/secsv.py table3   # SampleSkip beside permutation sampling, group testing, KernelSHAP
    python benchmarks/secsv.py table4   # Matrix Reducing against Matrix Squaring for the matrices of the classifiers
    python benchmarks/secsv.py intervals  # how wide the values' confidence intervals are
    python benchmarks/secsv.py figure8  # samples skipped, and wrongly, by test samples, clients and layers

All parties work one after another in this process, on one thread; seconds are of processor time, which other work on
the machine disturbs less (`wall` beside it is what a clock showed). `compare` takes turns between the protocols, HESV
on --sample coalitions; in `table2` HESV tests every coalition unless that would take more than --hesv-limit seconds:
then a few of each size. The rest is extrapolated (the row says how many were measured). Communication is that of every
byte on a link of 1 Gbit/s. --json FILE appends the rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from hesv_variants import FastestTester, LetterTester
from rich.console import Console
from rich.table import Table
from scipy import stats

from sectorch import ckks
from sectorch.ckks.convert import ResidueRing
from sectorch.ckks.linalg import Reducing, encrypt_matrix, second
from sectorch.data.partition import DividedData
from sectorch.protocols.secsv import Settings, ShapleyEvaluation, Training, build, fedavg, federation, hesv
from sectorch.protocols.secsv.algorithm import Utilities
from sectorch.protocols.secsv.experiment import for_model
from sectorch.protocols.secsv.secsv import joint_keys
from sectorch.protocols.secsv.testers import KINDS, Spent, communication
from sectorch.protocols.secsv.values import Hits, coalitions, error, of_rounds, shapley

CASES: dict[str, dict] = {
    "logistic": dict(data="digits", tests=900, shifts=7, train=Training(epochs=3)),
    "logistic-2": dict(data="digits", tests=900, shifts=7, binary=True, train=Training(epochs=3)),
    "cnn": dict(data="digits", tests=250, train=Training(epochs=1, lr=3e-3)),
    "dnn": dict(data="digits", tests=300, shifts=5, train=Training(epochs=3, lr=5e-3)),
    "rnn": dict(data="digits", tests=200, train=Training(epochs=4, lr=1e-2)),
}
"""One federation for each classifier: five clients by Dir(0.5), bundled data in place of the paper's. What is timed is
round 10 of the training; logistic-2 tells digits below five from the others, with two outputs as the paper's BANK;
figure8 shows what other rounds let be skipped. The logistic classifier, which costs least, is timed on digits and
their shifts by a pixel to six sides, the DNN to four: the paper's sets have thousands of samples."""

CONCLUSIONS = {
    "table2": "Paper: SecSV is 7.2 to 36.6 times as fast as HESV; SecretSV computes fast, its messages cost; "
    "errors of SecSV and HESV are small; SecretSV's grows with the GRU's layers (its truncation; ours is exact).",
    "table3": "Paper: SampleSkip and KernelSHAP accelerate SecSV, permutation sampling and group testing hardly; only "
    "SampleSkip does so without a large error.",
    "table4": "Paper: Reducing takes less time a sample than Squaring, most where Squaring rotates; more so where only "
    "one matrix is encrypted.",
    "intervals": "Paper: none.",
    "figure8": "Paper: no sample is skipped wrongly for linear classifiers, few for others; more test samples and more "
    "clients let more be skipped; more layers, more wrong ones.",
}


def shifted(x: torch.Tensor, y: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as they are, and moved by one pixel to so many sides less one, the border being black."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    height, width = x.shape[-2:]
    places = ((1, 1), (1, 0), (1, 2), (0, 1), (2, 1), (0, 0), (0, 2), (2, 0), (2, 2))[:count]
    return torch.cat([padded[..., i : i + height, j : j + width] for i, j in places]), y.repeat(len(places))


def case(model: str, *, clients: int = 5, round: int = 10, tests: int | None = None, hidden: int = 2, seed: int = 0):
    """Model, one round's local models, test samples and weights."""
    how = CASES[model]
    found = federation(how["data"], clients, tests=tests or how["tests"], seed=seed)
    found = for_model(found, model)
    if how.get("binary"):
        parts = ({n: (x, (y >= 5).long()) for n, (x, y) in part.items()} for part in (found.train, found.test))
        found = DividedData(found.name, *parts, 2)
    net = build(model.split("-")[0], found.shape, found.classes, hidden=hidden, seed=seed)
    train, test = found.train, found.test
    if how.get("shifts") and not tests:
        train, test = ({n: shifted(*pair, how["shifts"]) for n, pair in part.items()} for part in (train, test))
    models, weights = fedavg(net, train, round, how["train"], seed=seed)
    return net, models[-1:], test, weights[-1:]


def evaluated(given, **settings) -> dict:
    """One protocol on a case: seconds, error, and what else the tables show."""
    start, wall = time.process_time(), time.perf_counter()
    result = ShapleyEvaluation(*given, Settings(**{"compare": False, **settings})).run()
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    compared = ShapleyEvaluation(*given, Settings(protocol="plain", compare=False)).run()
    size = sum(result.spent("bytes").values())
    error = sum((result.values[n] - compared.values[n]) ** 2 for n in result.names) ** 0.5
    kinds = {kind: result.spent("seconds")[kind] for kind in KINDS}
    return dict(seconds=seconds, wall=wall, error=error, skipped=result.skipped, megabytes=size / 1e6,
                communication=communication(size), products=result.counted("products"),
                rotations=result.counted("rotations"), routing=result.level, **kinds)  # fmt: skip


BASELINES = {"hesv, letter": LetterTester, "hesv, fastest": FastestTester}
"""Both encrypt as SecSV does."""


def baseline(run: ShapleyEvaluation, kind: type[hesv.HESVTester]) -> ShapleyEvaluation:
    """A valuation by HESV that takes this baseline."""
    run._tester = kind(run.program, run.tests, hesv.joint_keys(run.program), run.level)
    return run


def by_letter(given, limit: float) -> dict:
    """HESV on the first round of a case; a few coalitions of each size if all would pass the limit."""
    run = baseline(ShapleyEvaluation(*given, Settings(protocol="hesv", compare=False)), LetterTester)
    utilities = run.utilities(0)
    start = time.process_time()
    with Spent() as beginning:
        run._begin(0, utilities)
    begin = time.process_time() - start
    every = mixed(run)
    spent, parts = [], []
    for done, coalition in enumerate(every):
        if done >= 2 and (begin + sum(spent) / done * len(every)) > limit:
            break
        start = time.process_time()
        with Spent() as part:
            utilities.ask([coalition])
        spent.append(time.process_time() - start)
        parts.append(part)
    times = len(every) / len(spent)
    scaled = lambda of: of(beginning) + times * sum(of(part) for part in parts)
    seconds = begin + times * sum(spent)
    size = scaled(lambda s: s.bytes.total())
    kinds = {kind: scaled(lambda s, kind=kind: s.seconds[kind]) for kind in KINDS}
    plain = Utilities(run.players(0), len(run.tests), lambda: _plain(run), replace(run.settings, protocol="plain"))
    tested = list(utilities.records)
    plain.ask(tested)
    off = max(abs(utilities.value(c) - plain.value(c)) for c in tested)
    row = dict(seconds=seconds, measured=f"{len(spent)} of {len(every)}", begin=begin, worst_utility_error=off,
               megabytes=size / 1e6, communication=communication(size), routing=run.level, **kinds)  # fmt: skip
    if len(spent) == len(every):
        row["error"] = error(shapley(run.players(0), utilities.value), shapley(run.players(0), plain.value))
    return row


def mixed(run: ShapleyEvaluation) -> list[int]:
    """All coalitions of the first round, their sizes mixed."""
    every = coalitions(run.players(0))
    return sorted(every, key=lambda c: (every.index(c) * 7) % len(every))


def _plain(run: ShapleyEvaluation):
    from sectorch.protocols.secsv.testers import PlainTester

    tester = PlainTester(run.program, run.tests)
    tester.begin(*run._models(0))
    return tester


class Timed:
    """What one protocol takes: of the beginning, of what all coalitions share, and of coalitions one by one."""

    def __init__(self, given, protocol: str, skip: bool, right: dict[int, int]):
        how = Settings(protocol=protocol.split(",")[0], skip="saving" if skip else "never", compare=False)
        self.run = ShapleyEvaluation(*given, how)
        if protocol in BASELINES:
            baseline(self.run, BASELINES[protocol])
        self.once = self.taken(self._begin)
        how = replace(self.run.settings)
        self.tested = Utilities(self.run.players(0), len(self.run.tests), lambda: self.tester, how)
        self.tested._correct.update(right if skip else {})
        self.each: list[tuple[float, int]] = []

    def _begin(self) -> None:
        self.tester = self.run._begin(0, self.run.utilities(0))
        self.tester.prepare()

    @staticmethod
    def taken(work: Callable) -> tuple[float, int]:
        """Seconds of the processor, and bytes."""
        with Spent() as spent:
            start = time.process_time()
            work()
            return time.process_time() - start, spent.bytes.total()

    def test(self, coalition: int) -> None:
        self.each.append(self.taken(lambda: self.tested.ask([coalition])))

    def row(self, every: int, right: dict[int, int]) -> dict:
        seconds, size = (
            once + sum(each) / len(each) * every
            for once, each in zip(self.once, zip(*self.each, strict=True), strict=True)
        )
        samples, tested = len(self.run.tests), self.tested.records
        off = max(abs(self.tested.value(c) - right[c].bit_count() / samples) for c in tested)
        row = dict(seconds=seconds, begin=self.once[0], megabytes=size / 1e6, communication=communication(size),
                   measured=f"{len(tested)} of {every}", worst_utility_error=off, routing=self.run.level)  # fmt: skip
        row["with communication"] = seconds + row["communication"]
        if len(tested) == every:
            players, plain = self.run.players(0), lambda c: right[c].bit_count() / samples if c else 0.0
            row["error"] = error(
                shapley(players, lambda c: self.tested.value(c) if c else 0.0), shapley(players, plain)
            )
        return row


def compare(options) -> list[dict]:
    """SecSV against HESV, one round of a classifier: all in this run, coalition by coalition in turn.

    HESV tests so many coalitions of mixed sizes, and their mean stands for each of all. What SampleSkip may leave out
    is taken from the clear.
    """
    given = case(options.model, tests=options.tests)
    warm_up(given)
    clear = ShapleyEvaluation(*given, Settings(protocol="plain", compare=False))
    every, plain = mixed(clear), _plain(clear)
    right = {c: plain.correct(c, clear.tests.all) for c in every}
    found = {name: Timed(given, name.split(" ")[0] if "+" in name else name, "+" in name, right)
             for name in ("secsv", "secsv + SampleSkip", *BASELINES)}  # fmt: skip
    for done, coalition in enumerate(every):
        for name, timed in found.items():
            if name not in BASELINES or done < (options.sample or len(every)):
                timed.test(coalition)
    rows = [{"protocol": name, **timed.row(len(every), right)} for name, timed in found.items()]
    for label, of in (("seconds", "seconds"), ("with communication", "with communication")):
        for slow in rows[2:]:
            for row in rows[:2]:
                row[f"{slow['protocol']}: times, {label}"] = slow[of] / row[of]
    rows[1]["SampleSkip's factor"] = rows[0]["seconds"] / rows[1]["seconds"]
    return [{"model": options.model, "test samples": len(clear.tests), **row} for row in rows]


def warm_up(given) -> None:
    """Tables and first calls are made outside of what is timed."""
    net, models, tests, weights = given
    few = {n: (x[:2], y[:2]) for n, (x, y) in tests.items()}
    for name in ("secsv", "secretsv", *BASELINES):
        how = Settings(protocol=name.split(",")[0], compare=False, skip="never")
        run = ShapleyEvaluation(net, models[:1], few, weights[:1], how)
        if name in BASELINES:
            baseline(run, BASELINES[name])
        run.utilities(0).ask([coalitions(run.players(0))[-1]])


def table2(options) -> list[dict]:
    """Every protocol on every classifier. Kinds of work are wall seconds, the sums are of processor time and, as in the
    paper, with communication."""
    rows = []
    for model in options.models:
        given = case(model, tests=options.tests)
        warm_up(given)
        slow = by_letter(given, options.hesv_limit)
        found = {"hesv, letter": slow}
        for name, settings in (
            ("secsv", dict(protocol="secsv", skip="never")),
            ("secsv + SampleSkip", dict(protocol="secsv")),
            ("secretsv", dict(protocol="secretsv")),
            ("plain", dict(protocol="plain")),
        ):
            found[name] = evaluated(given, **settings)
        total = {name: row["seconds"] + row["communication"] for name, row in found.items()}
        for name, row in found.items():
            rows.append({"model": model, "protocol": name, "with communication": total[name],
                         "vs HESV": total["hesv, letter"] / total[name],
                         "slowdown vs plain": total[name] / found["plain"]["seconds"], **row})  # fmt: skip
    return rows


def table3(options) -> list[dict]:
    """Estimators with SecSV, without and with SampleSkip: means of --seeds federations, trainings and samplings."""
    rows = []
    for model in options.models:
        found: dict[tuple, list[dict]] = {}
        for seed in range(options.seeds):
            given = case(model, tests=options.tests, seed=seed)
            warm_up(given)
            base = None
            for estimator in ("exact", "permutation", "group-testing", "kernel"):
                for skip in (False, True):
                    settings = dict(
                        estimator=estimator, skip="saving" if skip else "never", budget=options.budget, seed=seed
                    )
                    row = evaluated(given, protocol="secsv", **settings)
                    base = base or row["seconds"]
                    row["vs SecSV"] = base / row["seconds"]
                    found.setdefault((estimator, skip), []).append(row)
        for (estimator, skip), several in found.items():
            row: dict = {"model": model, "estimator": estimator, "SampleSkip": skip, "seeds": len(several)}
            for name in ("vs SecSV", "error", "seconds", "skipped"):
                values = [one[name] for one in several]
                row[name] = statistics.fmean(values)
                row[f"{name}, deviation"] = statistics.stdev(values) if len(values) > 1 else 0.0
            row["larger error than exact's, p"] = _larger(several, found["exact", False])
            row["faster than exact, p"] = _larger(found["exact", False], several, "seconds")
            rows.append(row)
    return rows


def _larger(rows: list[dict], others: list[dict], name: str = "error") -> float:
    """One-sided paired t test over the seeds: how likely so much more would be by chance."""
    pairs = [[row[name] for row in part] for part in (rows, others)]
    if len(rows) < 2 or pairs[0] == pairs[1]:
        return 1.0
    return float(stats.ttest_rel(*pairs, alternative="greater").pvalue)


def table4(_options) -> list[dict]:
    """Seconds a column of the second matrix, each method at its largest batch."""
    keys, rows = joint_keys(), []
    field = ResidueRing(keys.parameters.primes, 12)
    for d_out, d_in in ((4, 300), (2, 48), (4, 49), (64, 256), (10, 64), (128, 96), (2, 32)):
        a = torch.randn(d_out, d_in, dtype=torch.float64) / 4
        layout = Reducing(d_out, d_in, keys.parameters.degree)
        half, seed = encrypt_matrix(layout, a, keys)
        left = layout.prepare(half, second(seed, d_in, keys.parameters), field.primes)
        share, _ = field.share(field.encode(torch.rand(d_in, layout.columns, dtype=torch.float64)))
        bound = [q / 2 + 1 for q in field.primes]
        work = lambda: layout.multiply(left, layout.encode(share, field.primes), field.primes, bound)
        reducing = best(work) / layout.columns
        squaring = ckks.MatrixSquaring(d_out, d_in, 45, 2048)
        other = ckks.keygen(1, degree=4096, scale_bits=22, integer_bits=19, rotations=squaring.rotations())
        b = torch.rand(d_in, min(squaring.tile[1], 45), dtype=torch.float64)
        squaring = ckks.MatrixSquaring(d_out, d_in, b.shape[1], 2048)
        x = squaring.prepare_left(a, other, None)
        row = {"matrix": f"{d_out} x {d_in}", "reducing us": 1e6 * reducing, "reducing columns": layout.columns,
               "reducing products": d_in, "reducing rotations": 0}  # fmt: skip
        for kind, y in (
            ("both encrypted", squaring.prepare_right(b, other, None)),
            ("one encrypted", squaring.prepare_right(b, None)),
        ):
            spent = best(lambda y=y: squaring.multiply(x, y)) / b.shape[1]
            counts = squaring.multiply(x, y).counts
            row[f"squaring us, {kind}"] = 1e6 * spent
            row[f"speed-up, {kind}"] = spent / reducing
        row |= {
            "squaring columns": b.shape[1],
            "squaring products": counts.products,
            "squaring rotations": counts.rotations,
        }
        rows.append(row)
    return rows


def best(work: Callable, repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def figure8(_options) -> list[dict]:
    """Shares of samples skipped, and wrongly: in the clear, the same as under SecSV but for its error."""
    rows = []

    def add(what: str, model: str, **settings) -> None:
        given = case(model, **settings)
        result = ShapleyEvaluation(*given, Settings(protocol="plain", skip="always")).run()
        rows.append({"varied": what, "model": model, **settings, "skipped %": 100 * result.skipped,
                     "wrong %": 100 * result.wrong, "error": result.error})  # fmt: skip

    for model in CASES:
        add("classifier", model, tests=200)
    for round in (1, 2, 5, 10):
        add("round", "logistic", tests=400, round=round)
    for tests in (50, 100, 200, 400, 800):
        add("test samples", "logistic", tests=tests)
    for clients in (3, 5, 7):
        add("clients", "logistic", clients=clients, tests=400)
    for hidden in (0, 1, 3, 5, 7):
        add("hidden layers", "dnn", hidden=hidden, tests=400)
    return rows


def intervals(options) -> list[dict]:
    """How wide the values' intervals are, beside a bootstrap over each owner's samples that sees all: in the clear."""
    rows, draw = [], np.random.default_rng(0)
    found = federation("digits", 5, tests=options.tests)
    net = build("logistic", found.shape, found.classes)
    owned = np.repeat(np.arange(5), [len(labels) for _, labels in found.test.values()])
    places = [np.flatnonzero(owned == owner) for owner in range(5)]
    models, weights = fedavg(net, found.train, 10)
    for count in (1, 4, 10):
        run = ShapleyEvaluation(
            net, models[:count], found.test, weights[:count], Settings(protocol="plain", compare=False)
        )
        result = run.run()
        tester, samples = _plain(run), len(run.tests)
        tester.begin({0: run._first}, {0: 1.0})
        nobody = Hits.of({"samples": hex(tester.correct(1, run.tests.all))}, samples)
        given = [(one.players, one.records, one.nobody) for one in result.rounds]
        told = [(p, {c: {**r, "samples": None} for c, r in records.items()}, v) for p, records, v in given]
        half = lambda ends: (ends[1] - ends[0]) / 2
        wide: dict[str, list[float]] = {"each sample": [], "counts": [], "bootstrap": []}
        for i in range(5):
            for name, what in (("each sample", given), ("counts", told)):
                each = [one[i] for one in of_rounds(what, samples, True)]
                whole = functools.reduce(operator.add, each)
                wide[name].append(half(whole.interval()))
                if name == "each sample":
                    known = whole.known + whole.counted[0][0] * nobody.each
            drawn = [np.concatenate([draw.choice(place, len(place)) for place in places]) for _ in range(1000)]
            wide["bootstrap"].append(half(np.percentile([known[take].mean() for take in drawn], [2.5, 97.5])))
        row = {name: statistics.fmean(values) for name, values in wide.items()}
        times = {f"{name}, times": row[name] / row["bootstrap"] for name in ("each sample", "counts")}
        rows.append({"rounds": count, "test samples": samples, "mean value": statistics.fmean(result.values.values()),
                     **row, **times})  # fmt: skip
    return rows


def ours(what: str, rows: list[dict]) -> str:
    """Our conclusion from the rows, to stand beside the paper's."""
    span = lambda values: f"{min(values):.1f} to {max(values):.1f}"
    if what == "compare":
        times = lambda of, row: f"{rows[row][f'{of}: times, seconds']:.1f}"
        each = [f"{times(name, 0)} times as fast as {name}, {times(name, 1)} with SampleSkip" for name in BASELINES]
        return f"SecSV is {'; '.join(each)}"
    if what == "table2":
        fast = [row["vs HESV"] for row in rows if row["protocol"] == "secsv"]
        worst = max(row["error"] for row in rows if "error" in row)
        return (
            f"SecSV with SampleSkip is {span(fast)} times as fast as HESV; the largest error of any protocol is "
            f"{worst:.1e}"
        )
    if what == "table3":
        parts = []
        for name in dict.fromkeys((row["estimator"], row["SampleSkip"]) for row in rows):
            some = [row for row in rows if (row["estimator"], row["SampleSkip"]) == name]
            label = name[0] + (" + SampleSkip" if name[1] else "")
            fast, worst = span([row["vs SecSV"] for row in some]), max(row["error"] for row in some)
            parts.append(f"{label}: {fast} times as fast as exact SecSV, error up to {worst:.1e}")
        return "; ".join(parts)
    if what == "table4":
        both, one = ([row[f"speed-up, {kind} encrypted"] for row in rows] for kind in ("both", "one"))
        return f"a column takes Squaring {span(both)} times as long with both encrypted, {span(one)} with one encrypted"
    if what == "intervals":
        each, counts = ([row[f"{name}, times"] for row in rows] for name in ("each sample", "counts"))
        return (
            f"half an interval is {span(each)} times the bootstrap's, {span(counts)} times where only counts are known"
        )
    linear = [row["wrong %"] for row in rows if row["model"].startswith("logistic") or row.get("hidden") == 0]
    other = [row["wrong %"] for row in rows if not row["model"].startswith("logistic") and row.get("hidden") != 0]
    return f"wrongly skipped: {max(linear):.3f} % at most for linear classifiers, {max(other):.3f} % at most for others"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(BENCHMARKS))
    parser.add_argument("model", nargs="?", default="logistic", choices=list(CASES), help="of compare")
    parser.add_argument(
        "--models", nargs="+", default=list(CASES)[1:], choices=list(CASES), help="of table2 and table3"
    )
    parser.add_argument("--tests", type=int, help="test samples in all")
    parser.add_argument("--budget", type=int, default=20, help="coalitions that an estimator may ask for")
    parser.add_argument("--seeds", type=int, default=5, help="of table3")
    parser.add_argument("--hesv-limit", type=float, default=180.0)
    parser.add_argument("--sample", type=int, help="compare: so many coalitions by HESV, and no more")
    parser.add_argument("--json", help="append the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = BENCHMARKS[options.what](options)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(title=options.what)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(_text(row.get(c, "")) for c in columns))
    Console(width=220).print(shown)
    print(CONCLUSIONS.get(options.what, CONCLUSIONS["table2"]))
    print(f"Ours: {ours(options.what, rows)}.")
    if options.json:
        with open(options.json, "a") as file:
            for row in rows:
                file.write(json.dumps({"what": options.what, **row}) + "\n")
    return 0


def _text(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


BENCHMARKS: dict[str, Callable] = {
    "compare": compare,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "figure8": figure8,
    "intervals": intervals,
}

if __name__ == "__main__":
    sys.exit(main())
