"""What CaPriDe's meter says on unkind inputs, against attacks; and the number of directions under its noise.

    python benchmarks/capride_meter.py attack
    python benchmarks/capride_meter.py directions
    python benchmarks/capride_meter.py leakage      # accuracy against what is told, by the limit

Digits, two parties with the even and the odd classes, in the clear, five seeds. Rows go to benchmarks/results/capride.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from capride_attacks import Steps, Tap, centred, leaked

from sectorch.protocols.capride import CaPriDe, Settings, federation
from sectorch.protocols.capride.settings import Directions, head_of

OUT = Path(__file__).parent / "results/capride"
SIZES = (0.3, 1.0, 3.0, 10.0)
CASES = {
    "plain": {}, "16 samples": {"few": True}, "barely changed models": {"still": True},
    "peer of one class": {"peer": 3}, "owner of one class": {"owner": 0},
    "peer's logits times 3": {"still": True, "times": 3.0}, "peer's logits times 10": {"still": True, "times": 10.0},
    "peer's images a tenth as bright": {"still": True, "dark": 0.1},
}  # fmt: skip
"""Barely changed models answer four rounds of the same samples: their noise could be averaged. A peer with dark images
sees its logits smaller than they are on P1's."""


def prepared(
    seed: int, few: bool = False, still: bool = False, peer=None, owner=None, times: float = 1.0, dark: float = 1.0
) -> Steps:
    """A run of four rounds under the default limit, after its local training."""
    parties, test, classes = federation("digits", 2, "no-overlap", samples=100, test_samples=60, seed=seed)
    if few:
        parties[0] = replace(parties[0], images=parties[0].images[:16], labels=parties[0].labels[:16])
    for k, label in enumerate((owner, peer)):
        if label is not None:
            parties[k] = replace(parties[k], labels=torch.full_like(parties[k].labels, label))
    parties[1] = replace(parties[1], images=dark * parties[1].images)
    how = Settings(encrypted=False, rounds=4, seed=seed)
    trained = Steps((parties, test, classes), how)
    run = Steps((parties, test, classes), replace(how, rate=1e-6)) if still else trained
    if still:
        before = trained.states
        for name, state in run.states.items():
            state.small.load_state_dict(before[name].small.state_dict())
            run.change(name, state)
    state = run.states["P2"]
    with torch.no_grad():
        for weight in head_of(state.small).parameters():
            weight.mul_(times)
    run.change("P2", state)
    return run


def attacked(run: Steps) -> dict:
    """P1 knows its labels, inputs, features and all rounds; `blind` is the same on answers that hold only noise."""
    tap, party = Tap(run), run.parties[0]
    for _ in range(run.settings.rounds):
        run.round()
    one = torch.eye(len(tap.own), dtype=torch.float64)
    same = (party.labels[:, None] == party.labels).double()
    alike = {"constant": 0.99 * torch.ones_like(one) + 0.01 * one, "labels": 0.95 * same + 0.05 * one}
    asked, sigma = Directions(torch.cat(tap.weights), torch.ones(1)), torch.cat(tap.noise)
    noise = torch.randn(len(sigma), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * sigma
    blind = asked.on(tap.own, run.settings.temperature) + noise
    return dict(
        stated=run.records["P1"][-1]["leakage"]["P2"], found=tap.leaked(sizes=SIZES, alike=alike),
        blind=tap.leaked(blind, sizes=SIZES, alike=alike),
        spread=float((centred(tap.true) - centred(tap.own)).norm() / centred(tap.own).norm()),
    )  # fmt: skip


def attack(seeds: list[int], out: Path) -> None:
    rows = [dict(case=case, seed=s, **attacked(prepared(s, **how))) for s in seeds for case, how in CASES.items()]
    kept(out, "attack", rows, "case", ("stated", "found", "blind", "spread"))


def directions(seeds: list[int], out: Path) -> None:
    rows = []
    ways = {"local": {"method": "local"}, "head": {}, **{f"D = {d}": dict(update="forward", directions=d)
            for d in (8, 32, 128)}}  # fmt: skip
    for seed in seeds:
        made = federation("digits", 2, "no-overlap", samples=200, seed=seed)
        for way, how in ways.items():
            result = CaPriDe(*made, Settings(encrypted=False, seed=seed, rounds=10, **how)).run()
            rows.append(dict(way=way, seed=seed, accuracy=100 * result.accuracy(-1)))
    kept(out, "directions", rows, "way", ("accuracy",))


MOST_NUMBERS = 1000
"""That the attack takes together: of the last rounds."""
RUNS = {
    "local": {"method": "local"}, "own labels": {"update": "scalar", "leakage": None}, "dml": {"method": "dml"},
    "leakage 0.5": {"leakage": 0.5}, "leakage 0.9": {"leakage": 0.9}, "leakage 0.99": {"leakage": 0.99},
    "no noise": {"leakage": None, "sigma": 0.0},
}  # fmt: skip


def leakage(seeds: list[int], out: Path) -> None:
    """Accuracy against what P1 can reconstruct of P2's logits, as its meter and the attacks say."""
    rows = []
    for seed in seeds:
        made = federation("digits", 2, "no-overlap", samples=200, seed=seed)
        for name, changes in RUNS.items():
            run = Steps(made, Settings(encrypted=False, seed=seed, rounds=10, **changes))
            rows.append(dict(case=name, seed=seed, **_told(run, "method" in changes)))
    kept(out, "leakage", rows, "case", ("accuracy", "sigma", "stated", "found", "error", "classes"))


def _told(run: Steps, baseline: bool) -> dict[str, float]:
    tap = None if baseline or run.settings.update == "scalar" else Tap(run)
    for _ in range(run.settings.rounds):
        run.round()
    accuracy = statistics.mean(found[-1]["accuracy"] for found in run.records.values())
    if tap is None:
        return dict(accuracy=100 * accuracy)
    rounds, true = max(1, MOST_NUMBERS // len(tap.answers[0])), centred(tap.true)
    found = tap.attack(rounds=rounds)
    best = min(found.values(), key=lambda z: float((z - true).norm()))
    return dict(
        accuracy=100 * accuracy, sigma=float(tap.noise[-1][0]), stated=run.records["P1"][-1]["leakage"]["P2"],
        found=leaked(found, tap.true, tap.own), error=float((best - true).norm() / true.norm()),
        classes=100 * float((best.argmax(1) == true.argmax(1)).double().mean()),
    )  # fmt: skip


def kept(out: Path, name: str, rows: list[dict], by: str, columns: tuple[str, ...]) -> None:
    """The rows as they are, and the mean and range of each column."""
    out.mkdir(exist_ok=True, parents=True)
    (out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for case in dict.fromkeys(row[by] for row in rows):
        cells = []
        for column in columns:
            v = [row[column] for row in rows if row[by] == case and column in row]
            if not v:
                continue
            cells.append(f"{column} {statistics.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})")
        print(f"{case}: {', '.join(cells)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attack", "directions", "leakage"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"attack": attack, "directions": directions, "leakage": leakage}[options.what](options.seeds, options.out)
