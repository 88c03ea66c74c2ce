"""The figures of docs/capc.md, each with the command that makes it.

python benchmarks/capc.py steps               seconds of steps 1a, 1b-1c and 2-3 for CryptoNets, one query (Table 1)
python benchmarks/capc.py labels              1,000 queries through the secure protocol against the plain mechanism
python benchmarks/capc.py frequencies         one query many times with fresh noise: chi-square against the mechanism
python benchmarks/capc.py gains               digits: accuracy gain and epsilon for 20, 50 and 100 parties, five seeds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import nn

from sectorch.choreography.ledger import Profile
from sectorch.dp import GNMax, LNMax, Noise
from sectorch.nn.models.small import cryptonets, cryptonets_relu
from sectorch.protocols.capc import CaPC, Panel, Settings, Voter, collaboration
from sectorch.protocols.capc.experiment import PRESETS
from sectorch.protocols.capc.training import Task, answer_of, train_all

PAPER = {"step 1a": 14.22, "steps 1b-1c": 0.12, "steps 2-3": 0.030}
"""CaPC, Table 1: seconds, batch 1, N = 8192."""


def steps(options: argparse.Namespace) -> dict:
    """One query, one answering party, everything in this process; setup (masked weights, base transfers) apart."""
    out = {}
    image = torch.rand(1, 1, 28, 28)
    for name, model, inference in (
        ("cryptonets_relu, mpc", cryptonets_relu(), "mpc"),
        ("cryptonets (squares), ckks", cryptonets(), "ckks"),
    ):
        if inference not in options.inference:
            continue
        start = time.perf_counter()
        panel = Panel([Voter("a", model.eval())], 10, inference=inference, sample=image, batch=1)
        with Profile() as first:
            panel.ask(image, GNMax(7.0))
        setup = time.perf_counter() - start
        rows = []
        for _ in range(options.repeat if inference == "mpc" else 3):
            with Profile() as profile:
                rows.append(panel.ask(image, GNMax(7.0)).seconds)
        median = {step: statistics.median(row[step] for row in rows) for step in rows[0]}
        out[name] = dict(
            zip(PAPER, median.values(), strict=True), setup=setup, bytes=profile.bytes, first_bytes=first.bytes
        )
        print(
            f"{name}: "
            + ", ".join(f"{k} {median[s]:.4f} s (paper {PAPER[k]})" for k, s in zip(PAPER, median, strict=True))
        )
        print(f"  first call with setup {setup:.2f} s; {profile.bytes / 1e6:.2f} MB a query")
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
    made = collaboration("digits", parties, querying=1, pool=400, seed=seed)
    tasks = [Task(p.name, p.model, p.images, p.labels) for p in made.parties]
    models = train_all(tasks, PRESETS["digits"].training, seed)
    images = torch.cat([made.parties[0].pool, made.test[0], *(p.images for p in made.parties)])[:1000]
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


def gains(options: argparse.Namespace) -> dict:
    """Simulated inference: the labels come from the same mechanism as in the secure run (`labels` shows that)."""
    out = {}
    for parties in options.counts:
        for epsilon in options.epsilons:
            rows = []
            for seed in range(options.seeds):
                made = collaboration("digits", parties, seed=seed)
                how = Settings(epsilon=epsilon, noise=options.noise, queries=options.queries, inference="simulated",
                               local=PRESETS["digits"].training, seed=seed)  # fmt: skip
                try:
                    result = CaPC(made.parties, made.test, made.classes, how, truth=made.truth).run()
                except ValueError as error:
                    print(f"{parties} parties, epsilon {epsilon:g}: refused: {error}")
                    break
                rows.append(
                    {k: result.mean(k) for k in ("before", "after", "gain", "balanced_gain", "right", "epsilon")}
                )
                rows[-1]["scale"] = next(iter(result.records.values())).mechanism.scale
                rows[-1]["epsilon_of_all"] = result.epsilon_of_all
            if not rows:
                continue
            mean = {k: statistics.mean(row[k] for row in rows) for k in rows[0]}
            spread = statistics.stdev(row["gain"] for row in rows) if len(rows) > 1 else 0.0
            out[f"{parties}/{epsilon:g}"] = dict(mean, gain_stdev=spread, rows=rows)
            print(
                f"{parties} parties, epsilon {mean['epsilon']:.2f} (all three {mean['epsilon_of_all']:.2f}), scale "
                f"{mean['scale']:.2f}: before {100 * mean['before']:.1f}, after {100 * mean['after']:.1f}, gain "
                f"{100 * mean['gain']:+.2f} +- {100 * spread:.2f} points, answers right {100 * mean['right']:.1f} %",
                flush=True,
            )
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("steps", "labels", "frequencies", "gains"))
    p.add_argument("--repeat", type=int, default=15)
    p.add_argument("--inference", nargs="+", default=["mpc", "ckks"], help="of `steps`")
    p.add_argument("--parties", type=int, default=20, help="of `labels`")
    p.add_argument("--draws", type=int, default=5000, help="of `frequencies`")
    p.add_argument("--counts", type=int, nargs="+", default=[20, 50, 100], help="parties of `gains`")
    p.add_argument("--epsilons", type=float, nargs="+", default=[10.0])
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
