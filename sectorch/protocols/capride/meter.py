"""The meter: how much of a peer's logits P_k can reconstruct from all its answers so far, known before it asks.

P_k, honest but curious, knows its directions q, its own logits u, and that the peer's model resembles its own. It takes
the difference d = z - u for a linear function of its features, d_j = W (h_j, 1) with Gaussian W, and z for the same in
all rounds. `tests/capride/test_capride_meter.py` holds this prior against attacks with other ones. Under it the
answers are a linear regression with noise of deviation sigma, and what it leaves unknown depends on the directions and
the noise alone, not on the answers:

    leakage of sample j = 1 - E |d_j - its estimate|^2 / E |d_j|^2

P_k can therefore measure it before it asks. P_l cannot, who sees ciphertexts. It is a mean over the prior and no bound
for every pair of models. A peer further from P_k than the prior reckons with would tell more through the same noise. So
P_k states the size of its own logits, P_l scales its logits down to it (`parties.fitted`), and |z - u| <= |z| + |u| is
at most twice that size.
"""

from __future__ import annotations

import torch

from .directions import Directions, contrasts
from .errors import DisaggregationError

SPREAD = 2.0
"""The size of z - u that is reckoned with, in sizes of P_k's own logits about their row means: the most that logits of
no larger size are away; unrelated ones are 1.4 away."""
SIGMAS = (1e-4, 1e4)
"""Between which a deviation is looked for."""


class Meter:
    """What one party can know of one peer.

    Args:
        features: [n, d], of P_k's own model on its own samples. logits: [n, M], its own.
        peer: whose logits; for errors.
    """

    def __init__(self, features: torch.Tensor, logits: torch.Tensor, peer: str):
        h = torch.cat([features.detach().double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
        u = logits.detach().double()
        left, singular, _ = torch.linalg.svd(h, full_matrices=False)
        kept = singular > 1e-9 * singular[0]
        self.peer, self.contrasts = peer, contrasts(u.shape[1])
        self.basis = left[:, kept] * singular[kept]
        size = float((u - u.mean(1, keepdim=True)).norm())
        # A model that says the same of everything tells nothing of the size of others' logits.
        size = max(size, float(len(u)) ** 0.5)
        self.basis *= SPREAD * size / float(self.basis.norm()) / self.contrasts.shape[1] ** 0.5
        width = self.basis.shape[1] * self.contrasts.shape[1]
        self.own, self.known = u, torch.zeros(width, width, dtype=torch.float64)
        """`known` is the information in all answers that were asked for, [K, K]; the prior's is the identity."""
        self.go_back(None)

    @classmethod
    def of(cls, peer: str, basis: torch.Tensor, known: torch.Tensor, own: torch.Tensor) -> Meter:
        """A meter as `tensors` kept it, which has heard nothing yet; see `go_back`."""
        self = cls.__new__(cls)
        self.peer, self.basis, self.known, self.own = peer, basis, known, own
        self.contrasts = contrasts(len(known) // basis.shape[1] + 1)
        self.go_back(None)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """What is counted: on disk before a question is asked, and never taken back."""
        return [self.basis, self.known, self.own]

    def heard(self) -> list[torch.Tensor]:
        """What was answered, and the information in that: a part of the round that made use of it."""
        return [self.found, self.learned]

    def go_back(self, heard: list[torch.Tensor] | None) -> None:
        """To what was heard by the end of a round; nothing where it is None. What was asked stays counted."""
        nothing = torch.zeros_like(self.known)
        self.found, self.learned = (nothing[0], nothing) if heard is None else heard

    @property
    def size(self) -> float:
        """What logits about their row means may measure for the prior to hold: a root mean square over samples."""
        return float(self.basis.norm()) * (self.contrasts.shape[1] / len(self.basis)) ** 0.5 / SPREAD

    def information(self, directions: Directions, temperature: float) -> torch.Tensor:
        """Of the answers to one question, under noise of deviation 1: [K, K]."""
        rows = self._rows(directions, temperature)
        return rows.t() @ rows

    def _rows(self, directions: Directions, temperature: float) -> torch.Tensor:
        weights = directions.weights @ self.contrasts
        return torch.einsum("rna,ni->ria", weights, self.basis).flatten(1) / temperature

    def learn(self, directions: Directions, answers: torch.Tensor, sigma: float, temperature: float) -> None:
        """Take in what was answered to a question that `spend` has counted."""
        missing, variance = answers - directions.on(self.own, temperature), max(sigma, SIGMAS[0]) ** 2
        self.found = self.found + self._rows(directions, temperature).t() @ missing / variance
        self.learned = self.learned + self.information(directions, temperature) / variance

    def expected(self, own: torch.Tensor) -> torch.Tensor:
        """The peer's logits given all answers that came, under the prior about P_k's logits of now: float64 [n, M].

        The prior's size is the one under which the answers are likeliest; 0 where noise is all that they hold.
        """
        moved = torch.linalg.lstsq(self.basis, (own.double() - self.own) @ self.contrasts).solution.flatten()
        values, vectors = torch.linalg.eigh(self.learned)
        missing = vectors.t() @ (self.found - self.learned @ moved)
        variance = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-16, 1)]).double().unsqueeze(1)
        grown = 1 + variance * values.clamp_min(0)
        likeliest = int((variance * missing.square() / grown - grown.log()).sum(1).argmax())
        w = vectors @ (variance[likeliest] * missing / grown[likeliest])
        return own.double() + self.basis @ w.view(self.basis.shape[1], -1) @ self.contrasts.t()

    def leakage(self, more: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Of each sample, with `more` information beside what is known: float64 [n], from 0 to 1."""
        found = self.known + more
        found.diagonal().add_(1)
        r, a = self.basis.shape[1], self.contrasts.shape[1]
        left = torch.cholesky_inverse(torch.linalg.cholesky(found)).view(r, a, r, a).diagonal(dim1=1, dim2=3).sum(2)
        before = a * self.basis.square().sum(1)
        return (1 - ((self.basis @ left) * self.basis).sum(1) / before.clamp_min(1e-300)).clamp(0, 1)

    def sigma_for(self, asked: torch.Tensor, limit: float, times: int = 1) -> float:
        """The least deviation, within a hundredth, with which this question may be asked so many times.

        Raises:
            DisaggregationError: none is enough, as too much is known already.
        """
        fits = lambda sigma: float(self.leakage(asked * (times / sigma**2)).max()) <= limit
        low, high = SIGMAS
        if fits(low):
            return low
        if not fits(high):
            raise DisaggregationError(
                f"what is known of {self.peer}'s logits leaves no room under leakage {limit:g}, whatever the noise; "
                f"stop here, or allow more (leakage=)"
            )
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def spend(self, owner: str, asked: torch.Tensor, sigma: float, limit: float | None) -> float:
        """Count a question before it is asked, and give the largest leakage of a sample after it.

        Raises:
            DisaggregationError: above the limit; nothing is counted then.
        """
        more = asked / max(sigma, SIGMAS[0]) ** 2
        found = float(self.leakage(more).max())
        if limit is not None and found > limit:
            enough = self.sigma_for(asked, limit)
            raise DisaggregationError(
                f"{owner} could explain {found:.3f} of what sets {self.peer}'s logits on a sample apart from its own; "
                f"the limit is {limit:g}. Noise of sigma={enough:.3g} is enough for this round; or leave sigma out, "
                f"ask for fewer numbers (head_rank, directions), or allow more (leakage=)"
            )
        self.known = self.known + more
        return found
