"""What an honest-but-curious P_k of CaPriDe makes of its answers: attacks that the meter is held against.

Every answer is sum_j q_rj . z_j / T, and noise, with q known to P_k. `recover` solves for the logits with no further
knowledge. `reconstructions` uses what P_k has besides: its own logits as a first guess, all rounds together as if the
peer had not changed, the noise's deviation, and what makes logits of two samples alike (its own features, the inputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sectorch.federated.training import predict
from sectorch.protocols.capride import CaPriDe, Settings
from sectorch.protocols.capride.algorithm import first_loop, round_
from sectorch.protocols.capride.settings import Directions
from sectorch.protocols.capride.training import Meter, State, own_view

SIZES = (0.3, 1.0, 3.0)
"""Sizes of the unknown, in those of P_k's own logits, that `reconstructions` tries."""
CHANGES = (1e-3, 0.03, 0.3)
"""Deviations of an answer beside the noise, as the peer changes from round to round, that it tries."""


@dataclass(frozen=True)
class Recovered:
    """The attacker's estimate [n, M], each row with mean zero, and the rank of what it had over n (M - 1)."""

    logits: torch.Tensor
    determined: float

    def error(self, true: torch.Tensor) -> float:
        """Relative to the true logits about their row means: 0 is a full recovery, 1 no better than zeros."""
        return float((self.logits - centred(true)).norm() / centred(true).norm())


def centred(logits: torch.Tensor) -> torch.Tensor:
    """About their row means, which enter no derivative."""
    return logits.double() - logits.double().mean(1, keepdim=True)


def recover(directions: Directions, released: torch.Tensor, temperature: float) -> Recovered:
    """The least-squares solution of smallest norm, centred.

    Args:
        directions: all that the attacker published, [R, n, M]; `released`: the answers, [R].
    """
    n, classes = directions.weights.shape[1:]
    system = directions.weights.flatten(1)
    found = torch.linalg.lstsq(system, temperature * released.unsqueeze(1), driver="gelsd")
    logits = found.solution.view(n, classes)
    return Recovered(logits - logits.mean(1, keepdim=True), min(1.0, int(found.rank) / (n * (classes - 1))))


def reconstructions(
    directions: Directions,
    released: torch.Tensor,
    sigma: torch.Tensor,
    own: torch.Tensor,
    features: torch.Tensor,
    inputs: torch.Tensor,
    temperature: float,
    *,
    sizes: tuple[float, ...] = SIZES,
    alike: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The peer's logits, centred [n, M], by each of 54 Gaussian priors; an attacker does not know which is best.

    Args:
        directions, released: of all rounds, [R, n, M] and [R]. sigma: of the noise, [R].
        own, features, inputs: P_k's own logits [n, M], its features and its inputs on the samples.
        sizes: of the unknown. alike: further priors, as how alike the logits of two samples are thought, [n, n].
    """
    rows, u = directions.weights / temperature, centred(own)
    guesses = {"zero": torch.zeros_like(u), "own": u}
    missing = torch.stack([released - torch.einsum("rnm,nm->r", rows, g) for g in guesses.values()], 1)
    out = {}
    for name, kernel in (_kernels(features, inputs) | (alike or {})).items():
        spread = torch.einsum("rnm,nk->rkm", rows, kernel)
        square = spread.flatten(1) @ rows.flatten(1).t()
        for size, change in itertools.product(sizes, CHANGES):
            variance = size**2 * float(u.square().mean().clamp_min(1e-6))
            system = variance * square + (sigma.double().square() + change**2).diag()
            solved = torch.cholesky_solve(missing, torch.linalg.cholesky(system))
            steps = variance * torch.einsum("rg,rnm->gnm", solved, spread)
            for (guess, start), step in zip(guesses.items(), steps, strict=True):
                out[f"{name}, from {guess}, {size}, {change}"] = centred(start + step)
    return out


def leaked(found: dict[str, torch.Tensor], true: torch.Tensor, own: torch.Tensor) -> float:
    """The largest share that any reconstruction explains of what P_k's own logits leave, at their best scale."""
    z, u = centred(true), centred(own)
    factor = (z * u).sum() / u.square().sum().clamp_min(1e-12)
    guess = float((z - factor * u).square().sum())
    best = min(float((estimate - z).square().sum()) for estimate in found.values())
    return 1 - best / guess if guess > 0 else 0.0


class Steps:
    """Algorithm 1 in one process, round by round: local training first, then each `round`."""

    def __init__(self, made: tuple, how: Settings, **known):
        self.run, self.t = CaPriDe(*made, how, **known), 0
        self.settings, self.parties, self.exchange = self.run.settings, self.run.parties, self.run.exchange
        self.given = self.run.inputs(self.run.stages)
        self.theta = first_loop(self.run.stages, self.given)

    def round(self) -> None:
        """The next round. What it raises leaves the models as they were."""
        self.theta = round_(self.run.stages, self.given, self.t + 1, self.theta)
        self.t += 1

    @property
    def states(self) -> dict[str, State]:
        """The parties' models as they are now, copied."""
        return {p.name: State(p, self.settings, self.theta[p.name].value) for p in self.parties}

    def change(self, name: str, state: State) -> None:
        """Go on with other models of a party."""
        self.theta[name] = self.run.stages.bring(name, state.tensors())

    @property
    def records(self) -> dict[str, list[dict]]:
        return self.run.records()

    def meter(self, pair: str) -> Meter:
        """What one party has measured of another, by "peer>owner"."""
        peer, owner = pair.split(">")
        found = self.states[owner].meters[peer]
        found.known = self.exchange.known[pair]
        return found


class Tap:
    """What one party of a simulation hears of one peer, round by round, and the truth that it does not see.

    The truth is the logits of the model that answered: a peer that scales its logits down tells them up to that factor.
    """

    def __init__(self, run: Steps, owner: str = "P1", peer: str = "P2"):
        self.run, self.peer = run, peer
        self.party = next(party for party in run.parties if party.name == owner)
        self.link = run.exchange
        self._ask, self.link.ask = self.link.ask, self._tapped
        self.weights: list[torch.Tensor] = []
        self.answers: list[torch.Tensor] = []
        self.noise: list[torch.Tensor] = []

    def _tapped(
        self,
        round_: int,
        owner,
        directions,
        samples: int,
        models: Mapping[str, nn.Module],
        sigma: float = 0.0,
        sizes: Mapping[str, float] | None = None,
    ) -> dict[str, torch.Tensor]:
        found = self._ask(round_, owner, directions, samples, models, sigma, sizes)
        if owner is self.party and self.peer in models:
            self.weights.append(directions.weights)
            self.answers.append(found[self.peer])
            self.noise.append(torch.full((len(directions),), self.link.sigma(owner, sigma), dtype=torch.float64))
            self.features, self.own = own_view(self.run.states[owner.name].small, owner.images)
            size = (sizes or {}).get(self.peer, 0.0)
            answering = self.link.peers[self.peer].answering(owner.name, models[self.peer], size)
            self.true = predict(answering, owner.images)
        return found

    def attack(self, answers: torch.Tensor | None = None, rounds: int | None = None, **priors) -> dict:
        """`reconstructions` of the last rounds (all unless named), of these answers in place of what was heard."""
        last = slice(-rounds if rounds else None, None)
        weights, heard, noise = (torch.cat(kept[last]) for kept in (self.weights, self.answers, self.noise))
        return reconstructions(
            Directions(weights, torch.ones(1)), heard if answers is None else answers, noise, self.own, self.features,
            self.party.images, self.run.settings.temperature, **priors,
        )  # fmt: skip

    def leaked(self, answers: torch.Tensor | None = None, rounds: int | None = None, **priors) -> float:
        """The share that the attack finds."""
        return leaked(self.attack(answers, rounds, **priors), self.true, self.own)


def _kernels(features: torch.Tensor, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """How alike the logits of two samples are thought: [n, n], of mean diagonal 1."""
    h = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
    apart = torch.cdist(inputs.flatten(1).double(), inputs.flatten(1).double()).square()
    one, alike = torch.eye(len(h), dtype=torch.float64), (-apart / apart.median().clamp_min(1e-12)).exp()
    of_features = h @ h.t() / h.square().sum(1).mean()
    return {"single samples": one, "features": 0.99 * of_features + 0.01 * one, "inputs": 0.95 * alike + 0.05 * one}
