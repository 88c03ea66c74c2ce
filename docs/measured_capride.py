"""The measured tables of docs/capride.md, made of the rows in benchmarks/results/capride."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from measured import rows_of, table

from sectorch.federated.command import differs

OURS = {"head": "`head`", "forward": "`forward`", "default": "the default: `head`, leakage 0.5"}
OTHERS = {"dml": "DML", "fedavg": "FedAvg", "fedavg-dp": "FedAvg, sigma 0.01", "l2": "L2", "scalar": "`scalar`"}
SPLITS = ("homogeneous", "heterogeneous", "no-overlap")


def _rows(command: str) -> list[dict[str, Any]]:
    return rows_of("capride", command)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _range(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _over(ones: Sequence[float], others: Sequence[float]) -> str:
    """Of the same seeds, in points; in italics what a t test does not tell from none."""
    found = [a - b for a, b in zip(ones, others, strict=True)]
    shown = f"{statistics.mean(found):+.1f} ± {statistics.stdev(found):.1f}"
    return shown if differs(found) else f"*{shown}*"


def _found(parties: int, split: str, method: str, of: Callable[[dict], Any]) -> list[Any]:
    """By seed."""
    return [
        of(row)
        for row in sorted(_rows("gains"), key=lambda row: row["seed"])
        if (row["parties"], row["split"], row["method"]) == (parties, split, method) and "curve" in row
    ]


def _cells() -> list[tuple[int, str]]:
    return list(dict.fromkeys((row["parties"], row["split"]) for row in _rows("gains")))


def _last(row: dict) -> float:
    return row["curve"][-1]


def _gains(methods: dict[str, str], of: Callable[[dict], float]) -> str:
    body = []
    for parties, split in sorted(_cells(), key=lambda cell: (SPLITS.index(cell[1]), cell[0])):
        alone = _found(parties, split, "local", of)
        found = [_over(_found(parties, split, method, of), alone) for method in methods]
        body.append([f"{parties}, {split}", _spread(alone), *found])
    return table(["parties, split", "local, %", *methods.values()], body)


def gains() -> str:
    """Table 1: ours and the baselines."""
    return _gains(OURS | {name: OTHERS[name] for name in ("dml", "scalar", "l2", "fedavg", "fedavg-dp")}, _last)


def top5() -> str:
    """Of the five largest logits."""
    return _gains({n: (OURS | OTHERS)[n] for n in ("head", "forward", "default", "dml", "fedavg")},
                  lambda row: row["top5"][1])  # fmt: skip


ROUNDS = (0, 1, 2, 5, 10, 15, 20)


def by_round() -> str:
    """Figure 2: two parties."""
    body = []
    for split in SPLITS:
        for method in ("local", "head", "forward", "default", "dml", "fedavg"):
            curves = _found(2, split, method, lambda row: row["curve"])
            shown = [f"{statistics.mean(curve[t] for curve in curves):.1f}" for t in ROUNDS]
            body.append([f"{split}, {method}", *shown[:-1], _spread([curve[ROUNDS[-1]] for curve in curves])])
    return table(["split, method", *(f"round {t}" for t in ROUNDS)], body)


def by_parties() -> str:
    """Figure 3: the homogeneous split."""
    body = []
    for parties in (2, 5, 10):
        first = _found(parties, "homogeneous", "local", lambda row: row["curve"][0])
        found = [_found(parties, "homogeneous", m, _last) for m in ("local", "head", "forward", "dml", "fedavg")]
        body.append([str(parties), _spread(first), *(_spread(values) for values in found), _over(found[2], first),
                     _over(found[2], found[0])])  # fmt: skip
    return table(["parties", "before, %", "local, as long", "`head`", "`forward`", "DML", "FedAvg",
                  "`forward` over before", "`forward` over local"], body)  # fmt: skip


def by_class() -> str:
    """Figure 4: `forward`, five parties; and how far the parties are apart in a class."""
    body, apart = [], []
    for split in SPLITS:
        before, after = zip(*_found(5, split, "forward", lambda row: row["by_class"]), strict=True)
        alone = [found[1] for found in _found(5, split, "local", lambda row: row["by_class"])]
        mean = lambda runs, c: statistics.mean(statistics.mean(run[c]) for run in runs)
        body.append([split, *(f"{mean(before, c):.0f} → {mean(after, c):.0f}" for c in range(10))])
        spreads = [
            [statistics.mean(statistics.pstdev(found) for found in run) for run in runs]
            for runs in (before, alone, after)
        ]
        apart.append([split, *(_spread(values) for values in spreads), _over(spreads[2], spreads[1])])
    head = ["split", "before", "after, local", "after, `forward`", "`forward` over local"]
    return table(["split", *(f"class {c}" for c in range(10))], body) + "\n\n" + table(head, apart)


def by_party() -> str:
    """Figure 5: `forward`, five parties."""
    body = []
    for split in SPLITS:
        runs = _found(5, split, "forward", lambda row: row["by_party"])
        parties = [f"{_mean_of(runs, k, 0):.1f} → {_mean_of(runs, k, 1):.1f}" for k in range(5)]
        negative = sum(after <= before for run in runs for before, after in run)
        gap = [[statistics.pstdev(pair[t] for pair in run) for run in runs] for t in (0, 1)]
        body.append([split, *parties, f"{negative} of {5 * len(runs)}", *(_spread(values) for values in gap)])
    return table(["split", *(f"P{k + 1}" for k in range(5)), "parties that gained nothing", "apart before",
                  "apart after"], body)  # fmt: skip


def _mean_of(runs: Sequence[Sequence[Sequence[float]]], party: int, stage: int) -> float:
    return statistics.mean(run[party][stage] for run in runs)


def sensitivity() -> str:
    """By lambda, and FedAvg by its noise."""
    rows = _rows("sensitivity")
    parts = []
    for methods, what in ((("head", "forward", "dml"), "lambda for each peer"), (("fedavg-dp",), "sigma")):
        values = sorted({row["value"] for row in rows if row["method"] in methods})
        body = []
        for method in methods:
            found = {v: [r["after"] for r in rows if (r["method"], r["value"]) == (method, v)] for v in values}
            body.append([(OURS | OTHERS)[method].split(",")[0], *(_spread(found[v]) for v in values)])
        parts.append(table([what, *(f"{v:g}" for v in values)], body))
    return "\n\n".join(parts)


def _by(rows: list[dict], key: str, column: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row[key], [])
        if column in row:
            found[row[key]].append(row[column])
    return found


def resnet() -> str:
    """The paper's schedule on the smallest ResNet."""
    rows = _rows("resnet")
    after = _by(rows, "method", "after")
    body = [[m, _spread(v), "" if m == "local" else _over(v, after["local"])] for m, v in after.items()]
    return table(["resnet4, the paper's schedule", "after, %", "over local"], body)


def depths() -> str:
    """What ResNets take of a chain."""
    body = []
    for row in _rows("depths"):
        fits = "no 128-bit secure chain" if row["problem"] else f"{row['peak'] / 1e9:.1f} GB"
        depth = "more than 38" if row["depth"] is None else str(row["depth"])
        body.append([f"{row['network']}, {row['activation']}", depth, fits])
    return table(["network, activation", "levels", "ciphertexts at the peak, one batch"], body)


def encrypted() -> str:
    """Whole encrypted runs."""
    body = []
    for row in _rows("encrypted"):
        steps = ", ".join(f"{name} {value:g}" for name, value in row["steps"].items())
        size = row["megabytes"]
        body.append([
            row["what"], str(row["numbers"]), f"{row['hidden'][0]:.1f} → {row['hidden'][1]:.1f} ({row['clear']:.1f})",
            f"{row['apart']:.0e}", f"{row['total']:.0f} ({steps})", f"{size['keys'] + size['inputs']:.0f}",
            f"{(size['directions'] + size['aggregates']) / row['rounds']:.0f}", f"{row['leakage']:.2f}",
        ])  # fmt: skip
    head = ["run", "numbers a round", "accuracy, % (in the clear)", "largest difference of a weight", "seconds",
            "MB once", "MB a round", "leakage, stated"]  # fmt: skip
    return table(head, body)


def networks() -> str:
    """Table 2."""
    rows = {row["network"]: row["values"] for row in _rows("table2")}
    paper = ["128 bits", "16384", "90 ms", "", "29.1 KB", "1.31 s", "110.21 s", "3.44 s", "", ""]
    labels = list(next(iter(rows.values())))
    body = [[label, *(values[label] for values in rows.values()), theirs]
            for label, theirs in zip(labels, paper, strict=True)]  # fmt: skip
    return table(["", *rows, "paper, CIFAR-10, ResNet-18"], body)


def attack() -> str:
    """The meter on unkind inputs."""
    rows = _rows("attack")
    found = {column: _by(rows, "case", column) for column in ("stated", "found", "blind", "spread")}
    body = [
        [case, f"{statistics.mean(values):.2f}", *(_range(found[c][case]) for c in ("found", "blind")),
         f"{statistics.mean(found['spread'][case]):.2f}"]
        for case, values in found["stated"].items()
    ]  # fmt: skip
    return table(["case", "stated", "found", "without answers", "distance, in sizes of P_k's logits"], body)


def leakage() -> str:
    """What secrecy costs."""
    rows = _rows("leakage")
    columns = {"accuracy": 1, "sigma": 1, "stated": 2, "found": 2, "error": 2, "classes": 0}
    found = {column: _by(rows, "case", column) for column in columns}
    body = [[case, *(_range(found[c][case], digits) for c, digits in columns.items())] for case in found["accuracy"]]
    return table(["run", "accuracy, %", "sigma, last", "leakage, stated", "found", "error of the logits",
                  "classes right, %"], body)  # fmt: skip


def directions() -> str:
    """By their number."""
    found = _by(_rows("directions"), "way", "accuracy")
    return table(["", "accuracy, %"], [[way, _range(values, 1)] for way, values in found.items()])


CAPRIDE: dict[str, Callable[[], str]] = {
    f.__name__.replace("_", "-"): f
    for f in (gains, top5, by_round, by_parties, by_class, by_party, sensitivity, resnet, depths, encrypted,
              networks, attack, leakage, directions)
}  # fmt: skip
