"""Private sums of perturbed gradients: accuracy on digits by who adds how much noise, five seeds.

python benchmarks/perturbation_private.py

none: no clip and no noise. plain: clients add shares of the noise, on models whose channels are not scaled (the noise
of a central mechanism on plain gradients). shares: the same on noised models, the named mode. local: each client adds
as much noise as all honest ones together, so that its own gradient has the epsilon.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

from sectorch.dp import epsilon_of
from sectorch.federated.command import verdict
from sectorch.protocols.perturbation import Federation, Noise, Scheme, Settings
from sectorch.protocols.perturbation.experiment import score_of
from sectorch.protocols.perturbation.settings import batch_of, load, shards


def trained(kind: str, how: Settings) -> float:
    """Test accuracy after the rounds, in percent."""
    data, private = load("digits"), None if kind == "none" else how.private
    if private is not None and kind == "local":
        private = type(private)(private.sigma, private.clip, 1, 0, private.frac_bits)
    torch.manual_seed(how.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    noise = Noise(spread=1 + 1e-9) if kind == "plain" else None
    scheme, parts = Scheme(model, noise=noise, private=private), shards(len(data.train[0]), how.clients, how.seed)
    federation = Federation(scheme, how.clients)
    optimizer = torch.optim.SGD(model.parameters(), how.learning_rate, how.momentum)
    for number in range(how.rounds):
        batches = []
        for client, part in enumerate(parts):
            turns = range(number * how.local_batches, (number + 1) * how.local_batches)
            drawn = [batch_of(part, client, turn, how.batch_size, how.seed) for turn in turns]
            batches.append([(data.train[0][i], data.train[1][i]) for i in drawn])
        gradient = federation.round(model.state_dict(), batches, [len(part) for part in parts])
        if gradient is not None:
            scheme.step(model, optimizer, gradient)
    return score_of(model, data)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("--batches", type=int, default=48, help="records of a client in a round")
    p.add_argument("--clip", type=float, default=2.0)
    p.add_argument("--noise-multiplier", type=float, default=4.0)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--json", type=Path, help="also write the figures there")
    options = p.parse_args()
    torch.set_num_threads(1)
    how = Settings(clients=5, rounds=options.rounds, batch_size=1, local_batches=options.batches, clip=options.clip,
                   noise_multiplier=options.noise_multiplier, colluding=1, learning_rate=0.3, momentum=0.5)  # fmt: skip
    shares = how.private
    sizes = [len(part) for part in shards(len(load("digits").train[0]), how.clients, 0)]
    if shares is not None:
        sums = how.sums_of_a_record(sizes, how.rounds)
        print(f"epsilon {epsilon_of(sums * shares.curve, how.delta):.3g} of a record, in {sums} sums at most")
    found = {
        k: [trained(k, how.but(seed=s)) for s in range(options.seeds)] for k in ("none", "plain", "shares", "local")
    }
    for kind, row in found.items():
        spread = statistics.stdev(row) if len(row) > 1 else 0.0
        against = verdict([a - b for a, b in zip(row, found["plain"], strict=True)])
        print(f"{kind}: {statistics.fmean(row):.1f} ± {spread:.1f} %, against plain {against}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
