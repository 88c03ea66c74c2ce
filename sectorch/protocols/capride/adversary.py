"""The honest-but-curious attack that the guard stops: solving for a peer's logits from what was released.

Every release is sum_j q_rj . z_j / T with q known to the attacker. Differences of a sample's logits are n (M - 1)
unknowns (derivatives of predictions do not see a shift); with as many independent releases the system has one
solution. For tests, and to see what a margin is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .directions import Directions


@dataclass(frozen=True)
class Recovered:
    """The attacker's estimate [n, M], each row with mean zero, and the rank of what it had over n (M - 1)."""

    logits: torch.Tensor
    determined: float

    def error(self, true: torch.Tensor) -> float:
        """Relative to the true logits about their row means: 0 is a full recovery, 1 no better than zeros."""
        centred = true.double() - true.double().mean(1, keepdim=True)
        return float((self.logits - centred).norm() / centred.norm())


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
