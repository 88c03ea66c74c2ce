"""The measured tables of CaPriDe, made of the rows in benchmarks/results/capride."""

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


def curves(split: str, method: str) -> list[float]:
    """Figure 2: the mean accuracy of two parties after each round."""
    return [statistics.mean(values) for values in zip(*_found(2, split, method, lambda row: row["curve"]), strict=True)]


def _by(rows: list[dict], key: str, column: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row[key], [])
        if column in row:
            found[row[key]].append(row[column])
    return found


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


CAPRIDE: dict[str, Callable[[], str]] = {"attack": attack, "leakage": leakage}
CAPRIDE_FIGURES: dict[str, Callable[[], str]] = {
    "encrypted": encrypted, "capride-gains": gains,
}  # fmt: skip
