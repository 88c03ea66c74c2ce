"""The measured tables of CaPC, made of the rows that its benchmarks wrote into benchmarks/results/capc."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from measured import difference, rows_of, table

from sectorch.federated.command import differs


def _rows(command: str) -> Any:
    return rows_of("capc", command)


def _points(values: Sequence[float]) -> str:
    """Mean and spread, in points; in italics what a t test does not tell from none."""
    shown = f"{statistics.mean(values):+.1f} ± {statistics.stdev(values):.1f}"
    return shown if differs(values) else f"*{shown}*"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def steps() -> str:
    """Table 1: medians of seconds."""
    body = [
        [f"the paper, P = {p}", shown, *(("0.12", "0.030") if p == 8192 else ("", "")), ""]
        for p, shown in ((8192, "14.22"), (16384, "29.46"), (32768, "57.26"))
    ]
    for name, row in _rows("steps").items():
        seconds = [f"{statistics.median(row[s]):.3g}" for s in ("step 1a", "steps 1b-1c", "steps 2-3")]
        body.append([f"here: {name}", *seconds, f"{row['bytes'] / 1e6:.3g}"])
    return table(["", "step 1a, s", "steps 1b-1c, s", "steps 2-3, s", "MB a query"], body)


def gains() -> str:
    """The whole pool and the plan, and the gains of the plan's number of images with other labels."""
    names = ("longer", "own-labels", "no-noise", "true-labels")
    body = []
    for parties, found in _rows("gains").items():
        pool = found["means"]["whole pool"]
        for name in ("whole pool", "planned"):
            one, runs = found["means"][name], found["study"]["runs"][name]
            before, after = (statistics.mean(run[when] for run in runs.values()) for when in ("before", "after"))
            body.append([
                parties, f"{name}, {one['queries']:.0f}", f"{one['scale']:.2f}",
                f"{_percent(one['right'])} ({_percent(one['expected'])})", _percent(before), _percent(after),
                _points([100 * g for g in one["gains"]]),
                "" if one is pool else difference(one["gains"], pool["gains"]),
                *("" if one is pool else _points([100 * g for g in found["means"][f"planned, {other}"]["gains"]])
                  for other in names),
            ])  # fmt: skip
    head = ["parties", "queries", "sigma", "answers right, % (forecast)", "before, %", "after, %", "gain, points",
            "against the pool", "longer: own samples again", "own labels", "the vote without noise",
            "true labels"]  # fmt: skip
    return table(head, body)


def figures() -> str:
    """Figures 2, 4 and 11."""
    second, fourth, eleventh = _rows("fig2"), _rows("fig4"), _rows("fig11")
    third = _rows("fig3")["rows"]
    kinds = "; ".join(f"{kind} {_points(found['gains'])}" for kind, found in second.items())
    others = [name for name in third if name != "random"]
    balanced = ", ".join(f"{n} {_points([100 * v for v in found['balanced_gain']])}" for n, found in third.items())
    over = ", ".join(f"{n} {difference(third[n]['balanced_gain'], third['random']['balanced_gain'])}" for n in others)
    weak = ", ".join(f"{n} {_percent(statistics.mean(found['weak']))} %" for n, found in third.items())
    more = ", ".join(f"{n} {difference(third[n]['weak'], third['random']['weak'])}" for n in others)
    parties = ", ".join(f"{count}: {_points(found['gains'])}" for count, found in fourth.items())
    epsilon = next(iter(fourth.values()))["epsilon"]
    shown = sorted((float(sigma), values) for sigma, values in eleventh.items())
    votes = ", ".join(
        f"{f'{sigma:g}' if sigma >= 1 else 'none'}: {statistics.mean(values):.1f}" for sigma, values in shown
    )
    body = [
        ["2: gain, 50 parties, epsilon 10 (`fig2`)", kinds,
         "CIFAR10 +4.09, SVHN +1.92, SVHN with three architectures +2.64"],
        ["3, 10: skewed, gain in balanced accuracy by choice of 50 queries out of 100 (`fig3`)",
         f"{balanced}; over random: {over}",
         "best over random: CIFAR10 +0.8, SVHN +0.38, MNIST +0.45, Fashion-MNIST +2.48"],
        ["9: queries whose true class is a weak one, 1 or 2 (`fig3`)", f"{weak}; over random: {more}",
         "\"sampled more frequently than in a random strategy\""],
        [f"4, 12: gain by parties, at one noise (epsilon {epsilon:.1f} whatever the votes; `fig4`)", parties,
         "SVHN, 150 to 400 parties: +0.62 to +3.87"],
        ["11: accuracy of the noisy vote of 50 models by sigma, % (`fig11`)", votes,
         "no loss up to 7 (CIFAR10, 50 models) and 40 (250 models)"],
    ]  # fmt: skip
    return table(["figure", "digits, here", "the paper"], body, words=3)


def series() -> tuple[list[tuple[int, list[float]]], list[tuple[float, float]]]:
    """Gains by the number of parties (Figure 4), and the vote's accuracy in percent by sigma (Figure 11)."""
    gained = [(int(count), found["gains"]) for count, found in _rows("fig4").items()]
    votes = sorted((float(sigma), statistics.mean(values)) for sigma, values in _rows("fig11").items())
    return gained, votes


CAPC: dict[str, Callable[[], str]] = {"steps": steps, "gains": gains, "figures": figures}
