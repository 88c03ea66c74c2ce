"""The figures of docs/capc.md, each with the command that makes it.

python benchmarks/capc.py steps               seconds of steps 1a, 1b-1c and 2-3 for CryptoNets, one query (Table 1)
python benchmarks/capc.py labels              1,000 queries through the secure protocol against the plain mechanism
python benchmarks/capc.py frequencies         one query many times with fresh noise: chi-square against the mechanism
python benchmarks/capc.py gains               digits: 20, 50 and 100 parties, five seeds: all queries, as many as the
                                              planner takes, and controls; with --out it goes on where it was stopped
python benchmarks/capc.py confident           digits: the same with a threshold: answers, right ones, epsilon, gain
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from scipy.stats import chisquare
from torch import nn

from sectorch.choreography.ledger import Profile
from sectorch.dp import GNMax, LNMax, Noise
from sectorch.federated.command import Study, verdict
from sectorch.federated.training import Task, answer_of, train_all
from sectorch.nn.models import cryptonets, cryptonets_relu
from sectorch.protocols.capc import PRESETS, CaPC, Panel, Result, Settings, Voter, collaboration

PAPER = {"step 1a": 14.22, "steps 1b-1c": 0.12, "steps 2-3": 0.030}
"""CaPC, Table 1: seconds, batch 1, P = 8192; step 1a takes 29.46 s at P = 16384 and 57.26 s at P = 32768."""


def steps(options: argparse.Namespace) -> dict:
    """One query, one answering party, everything in this process; setup (masked weights, base transfers) apart.

    The ring degree of CKKS is the least whose slots hold the batch that the panel is made for.
    """
    out = {}
    image = torch.rand(1, 1, 28, 28)
    cases = [("cryptonets_relu, mpc", cryptonets_relu(), "mpc", 1, options.repeat)]
    for degree in options.degrees:
        cases.append((f"cryptonets (squares), ckks, N = {degree}", cryptonets(), "ckks", degree // 2, 3))
    for name, model, inference, batch, repeat in cases:
        if inference not in options.inference:
            continue
        start = time.perf_counter()
        panel = Panel([Voter("a", model.eval())], 10, inference=inference, sample=image, batch=batch)
        with Profile() as first:
            panel.ask(image, GNMax(7.0))
        setup = time.perf_counter() - start
        rows = []
        for _ in range(repeat):
            with Profile() as profile:
                rows.append(panel.ask(image, GNMax(7.0)).seconds)
        found = {p: [row[step] for row in rows] for p, step in zip(PAPER, rows[0], strict=True)}
        out[name] = dict(found, setup=setup, bytes=profile.bytes, first_bytes=first.bytes)
        print(f"{name}: " + ", ".join(
            f"{p} {statistics.median(values):.4f} s (paper {PAPER[p]})" for p, values in found.items()))  # fmt: skip
        print(f"  first call with setup {setup:.2f} s; {profile.bytes / 1e6:.2f} MB a query", flush=True)
    return out


class _Written:
    """The mechanism's own noise, written down for the comparison."""

    def __init__(self, noise: Noise, kept: list):
        self.inner, self.kept = noise, kept

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def sample(self, *shape):
        self.kept.append(self.inner.sample(*shape))
        return self.kept[-1]


def _trained(parties: int, seed: int = 0):
    """Models of a digits collaboration, and 1,000 images: the test split and what the training split adds."""
    people, test, _ = collaboration("digits", parties, querying=1, pool=400, seed=seed)
    tasks = [Task(p.name, p.model, p.images, p.labels) for p in people]
    models = train_all(tasks, PRESETS["digits"].training, seed)
    images = torch.cat([people[0].questions, test[0], *(p.images for p in people)])[:1000]
    return [Voter(name, model) for name, model in models.items()][1:], images


def _votes(voters: list[Voter], images: torch.Tensor) -> torch.Tensor:
    return sum(F.one_hot(answer_of(voter.model, images), 10) for voter in voters)


def labels(options: argparse.Namespace) -> dict:
    out = {}
    voters, images = _trained(options.parties)
    votes = _votes(voters, images)
    for inference, argmax in (("mpc", "yao"), ("mpc", "shares")):
        for mechanism in (GNMax(7.0), LNMax(5.0)):
            kept: list[torch.Tensor] = []
            mechanism.__dict__["noise"] = _Written(mechanism.noise, kept)
            panel = Panel(voters, 10, inference=inference, argmax=argmax)
            found = torch.cat([panel.ask(batch, mechanism).labels for batch in images.split(250)])
            equal = int((found == (votes + torch.cat(kept)).argmax(1)).sum())
            changed = int((found != votes.argmax(1)).sum())
            name = f"{inference}, {argmax}, {type(mechanism).__name__}"
            out[name] = dict(queries=len(images), equal=equal, changed_by_noise=changed)
            print(f"{name}: {equal} of {len(images)} labels equal; noise changed {changed} of them")
    return out


def frequencies(options: argparse.Namespace) -> dict:
    out = {}
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Flatten(), nn.Linear(16, 10)).eval() for _ in range(9)]
    voters, one = [Voter(f"v{i}", m) for i, m in enumerate(models)], torch.rand(1, 1, 4, 4)
    votes = _votes(voters, one)[0]
    for mechanism in (GNMax(2.0), LNMax(2.0)):
        panel = Panel(voters, 10, argmax="yao")
        batches = torch.full((options.draws // 500,), 500).tolist()
        found = torch.cat([panel.ask(one.expand(n, 1, 4, 4), mechanism).labels for n in batches])
        seen, wanted = np.bincount(found.numpy(), minlength=10), mechanism.distribution(votes)
        test = chisquare(seen, wanted * len(found))
        out[type(mechanism).__name__] = dict(draws=len(found), statistic=test.statistic, p=test.pvalue)
        print(
            f"{type(mechanism).__name__}: {len(found)} draws, chi-square {test.statistic:.2f} (9), p {test.pvalue:.3f}"
        )
    return out


def _studied(options: argparse.Namespace, parties: int, conditions: Mapping[str, Settings]) -> dict:
    """Conditions side by side over the seeds, with what they spent and how many answers were right.

    Simulated inference: the labels come from the same mechanism as in the secure run (`labels` shows that).
    """
    study, more = Study("condition"), {}
    for seed in range(options.seeds):
        made = collaboration("digits", parties, seed=seed)
        place = options.out / f"{parties}-{seed}" if options.out else None
        for name, how in conditions.items():
            out = place / name.replace(" ", "-") if place else None
            run = CaPC(*made, replace(how, seed=seed), out=out, local=place and place / "local")
            result = run.run()
            study.add(name, seed, result)
            more.setdefault(name, []).append(_besides(result))
            print(f"{parties} parties, seed {seed}, {name}: {more[name][-1]}", flush=True)
    console = Console(width=140)
    console.print(study.table())
    out = {}
    for name, rows in more.items():
        means = {k: statistics.fmean(row[k] for row in rows if row[k] is not None)
                 for k in rows[0] if any(row[k] is not None for row in rows)}  # fmt: skip
        gained = [found["after"] - found["before"] for found in study.found[name].values()]
        out[name] = dict(means, gain=verdict([100 * value for value in gained]), gains=gained)
        console.print(f"{parties} parties, {name}: gain {out[name]['gain']}; " + ", ".join(
            f"{k} {value:.3g}" for k, value in means.items()), highlight=False)  # fmt: skip
    return dict(study=study.as_dict(), means=out)


def _besides(result: Result) -> dict[str, float | None]:
    records = result.records.values()
    asked = result.settings.control is None
    known = [r.right for r in records if r.right is not None]
    return dict(
        queries=statistics.fmean(len(r.asked) for r in records),
        answers=statistics.fmean(r.answered for r in records),
        right=statistics.fmean(known) if known else None,
        expected=statistics.fmean(f.vote for f in result.forecasts.values()) if asked else None,
        own=statistics.fmean(f.own for f in result.forecasts.values()),
        scale=statistics.fmean(r.mechanism.scale for r in records) if asked else None,
        epsilon=result.mean("epsilon") if asked else None,
        epsilon_of_all=result.epsilon_of_all if asked else None,
    )


def gains(options: argparse.Namespace) -> dict:
    """All queries of the pool, as many as the planner takes, and what as many images with other labels bring."""
    out = {}
    for parties in options.counts:
        base = Settings(epsilon=options.epsilon, noise=options.noise, queries=options.queries, inference="simulated")
        planned = replace(base, planned=True)
        controls = {f"planned, {name}": replace(planned, control=name)
                    for name in ("longer", "own-labels", "no-noise", "true-labels")}  # fmt: skip
        out[str(parties)] = _studied(options, parties, {"whole pool": base, "planned": planned, **controls})
    return out


def confident(options: argparse.Namespace) -> dict:
    """With a threshold of half the voters and of seven tenths, against the whole pool without."""
    out = {}
    for parties in options.counts:
        base = Settings(epsilon=options.epsilon, queries=options.queries, inference="simulated")
        checked = {f"threshold {t}": replace(base, threshold=t) for t in (round(0.5 * parties), round(0.7 * parties))}
        out[str(parties)] = _studied(options, parties, {"whole pool": base, **checked})
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("steps", "labels", "frequencies", "gains", "confident"))
    p.add_argument("--repeat", type=int, default=15)
    p.add_argument("--inference", nargs="+", default=["mpc", "ckks"], help="of `steps`")
    p.add_argument("--degrees", type=int, nargs="+", default=[16384, 32768], help="of the ring, in `steps` with ckks")
    p.add_argument("--parties", type=int, default=20, help="of `labels`")
    p.add_argument("--draws", type=int, default=5000, help="of `frequencies`")
    p.add_argument("--counts", type=int, nargs="+", default=[20, 50, 100], help="parties of `gains`")
    p.add_argument("--epsilon", type=float, default=10.0)
    p.add_argument("--out", type=Path, help="a folder of `gains` and `confident`, which go on from there")
    p.add_argument("--queries", type=int, help="of `gains`; the pool of 75 unless named")
    p.add_argument("--noise", default="gaussian")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--json", help="also write the figures there")
    options = p.parse_args()
    found = globals()[options.what](options)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
