"""CaPC on queries that are no secret, beside secret ones: what the asker loses and gains.

python benchmarks/capc_public.py gains    digits, five seeds: the asker's own images, strokes that a public program
                                          draws, noise; the same mechanism and budget, labels by the same vote
python benchmarks/capc_public.py cost     seconds and bytes of a batch of queries: secure inference, or votes in shares
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from public_queries import strokes  # pyright: ignore[reportMissingImports]  an example

import sectorch
from sectorch.choreography.ledger import Profile
from sectorch.dp import GNMax
from sectorch.federated.command import verdict
from sectorch.federated.training import Task, answer_of, train_all
from sectorch.protocols.capc import PRESETS, CaPC, Panel, Settings, Voter, collaboration
from sectorch.session import Session


def drawn(kind: str, count: int, seed: int) -> torch.Tensor:
    """Queries [count, 1, 8, 8] that everybody may see."""
    if kind == "noise":
        return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return strokes(count).view(-1, 1, 8, 8)


def gains(options: argparse.Namespace) -> dict:
    """Accuracy before and after. Inference is simulated: the labels come from the same mechanism as in a secure run."""
    found: dict[str, dict[str, list[float]]] = {}
    for parties in options.counts:
        how = Settings(epsilon=options.epsilon, queries=options.queries, inference="simulated")
        for seed in range(options.seeds):
            for kind in ("own images", "strokes", "noise", "longer"):
                people, test, classes = collaboration("digits", parties, seed=seed)
                for person in people:
                    if person.pool is not None and kind in ("strokes", "noise"):
                        person.pool, person.truth = drawn(kind, len(person.pool), seed), None
                now = replace(how, seed=seed, control="longer" if kind == "longer" else None)
                records = CaPC(people, test, classes, now).run().records.values()
                row = found.setdefault(f"{parties} parties, {kind}", {"gain": [], "before": [], "entropy": []})
                row["before"].append(100 * statistics.fmean(r.before.accuracy for r in records))
                row["gain"].append(
                    100 * statistics.fmean(r.after.accuracy - r.before.accuracy for r in records if r.after)
                )
                labels = torch.cat([torch.as_tensor(r.labels) for r in records]) if kind != "longer" else torch.zeros(1)
                shares = torch.bincount(labels.long(), minlength=classes).double() / len(labels)
                row["entropy"].append(float(torch.special.entr(shares).sum() / torch.tensor(2.0).log()))
    for name, row in found.items():
        print(f"{name}: before {statistics.fmean(row['before']):.1f}, gain {verdict(row['gain'])}, bits of a label "
              f"{statistics.fmean(row['entropy']):.2f}")  # fmt: skip
        if not name.endswith("own images"):
            first = found[f"{name.split(',')[0]}, own images"]["gain"]
            print(f"    against own images {verdict([a - b for a, b in zip(row['gain'], first, strict=True)])}")
    return found


def voted(session: Session, votes: list[torch.Tensor], argmax: Any) -> torch.Tensor:
    """`winners` of examples/public_queries.py."""
    own = zip(session.answering, votes, strict=True)
    shared = [sectorch.share(v, owner=p.name, session=session, party=p) for p, v in own]
    return GNMax(7.0).release(sectorch.collect(shared), engine=argmax)


def cost(options: argparse.Namespace) -> dict:
    """The same voters on the same images; processor time of all parties."""
    people, _, classes = collaboration("digits", options.counts[0], querying=1, seed=0)
    tasks = [Task(p.name, p.model, p.images, p.labels) for p in people[1:]]
    models = train_all(tasks, replace(PRESETS["digits"].training, epochs=5), 0)
    images, found = people[0].questions[: options.queries or 30], {}
    for argmax in ("yao", "shares"):
        panel = Panel([Voter(*pair) for pair in models.items()], classes, argmax=argmax)
        session = Session(answering=len(models))
        for way in ("secret", "public"):
            spent, profile = [], Profile()
            for turn in range(options.seeds + 1):  # the first makes keys, base transfers and masked weights
                start = time.process_time()
                with profile if turn else nullcontext():
                    if way == "secret":
                        panel.ask(images, GNMax(7.0))
                    else:
                        voted(session, [F.one_hot(answer_of(m, images), classes) for m in models.values()], argmax)
                spent.append(time.process_time() - start)
            seconds, size = statistics.median(spent[1:]), profile.bytes / options.seeds
            found[f"{way}, {argmax}"] = dict(seconds=seconds, bytes=size, rounds=profile.rounds / options.seeds)
            shape = f"{len(images)} images, {len(models)} voters"
            print(f"{way}, {argmax}: {seconds:.3f} s, {size / 1e6:.3f} MB: {shape}", flush=True)
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("gains", "cost"))
    p.add_argument("--counts", type=int, nargs="+", default=[20, 50], help="parties")
    p.add_argument("--epsilon", type=float, default=10.0)
    p.add_argument("--queries", type=int, help="of each asker; the pool of 75 unless named")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--json", type=Path, help="also write the figures there")
    options = p.parse_args()
    torch.set_num_threads(1)
    found = globals()[options.what](options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
