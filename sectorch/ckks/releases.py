"""What a party has released of a secret by linear functions of it: the sender's count, and the receiver's measure.

The sender of encrypted answers sees shapes only. It counts the numbers that it releases (`ReleaseLedger`), refuses
those over too few samples, and has a limit. The receiver knows which functions it asked for, and can tell what all
answers together show before it asks (`LinearMeter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..errors import DisaggregationError


class ReleaseLedger:
    """The numbers that one party has released. Counts are never taken back.

    Args:
        sender: whose secret it is.
        released: what was counted before, as `released` was then; that of other senders is left out.
        before_release: called after a release is counted and before anything is computed for it, to keep the count.
        least_samples: a number is over at least so many samples.
        most: the numbers that a receiver may get about one thing, as a share of the unknowns; None sets no limit.

    Attributes:
        released: by "sender>receiver@about": numbers that were released, and the unknowns of the smallest batch.
    """

    def __init__(
        self,
        sender: str,
        released: Mapping[str, list[int]] | None = None,
        before_release: Callable[[], None] = lambda: None,
        *,
        least_samples: int = 1,
        most: float | None = None,
    ):
        self.sender, self.before_release, self.least_samples, self.most = sender, before_release, least_samples, most
        self.released = {k: list(v) for k, v in (released or {}).items() if k.startswith(f"{sender}>")}

    def release(self, receiver: str, about: str, numbers: int, samples: int, values: int = 1) -> None:
        """Count numbers, before anything is computed for them.

        Args:
            about: what they are functions of: a digest of a model's weights, say. A model that stays keeps its count.
            samples: that each number is over.
            values: unknown values of a sample.

        Raises:
            DisaggregationError: too few samples, no numbers, or more than the limit. What was refused is not counted.
        """
        if numbers < 1 or samples < 1:
            raise DisaggregationError(
                f"{self.sender} releases no {numbers} numbers over {samples} samples of {receiver}"
            )
        if samples < self.least_samples:
            raise DisaggregationError(
                f"{self.sender} releases no aggregate over {samples} samples of {receiver}; at least "
                f"{self.least_samples} are needed"
            )
        key, unknowns = f"{self.sender}>{receiver}@{about}", samples * values
        count, least = self.released.get(key, [0, unknowns])
        count, least = count + numbers, min(least, unknowns)
        if self.most is not None and count > self.most * least:
            raise DisaggregationError(
                f"{self.sender} releases no {numbers} more numbers to {receiver}: with {count} of {least} unknowns the "
                f"limit of {self.most:g} for each is passed"
            )
        self.released[key] = [count, least]
        self.before_release()


SIGMAS = (1e-4, 1e4)
"""Between which a deviation is looked for."""


class LinearMeter:
    """How much of a secret linear answers tell, measured by their receiver before it asks.

    The secret is d [n, A], one row a sample. The receiver takes it for B W, B a known basis [n, r] and W [r, A]
    standard Gaussian, the same in all rounds. Under this prior answers with noise of deviation sigma are a linear
    regression, and what it leaves unknown depends on the questions and the noise alone, not on the answers:

        leakage of sample j = 1 - E |d_j - its estimate|^2 / E |d_j|^2

    It is a mean over the prior, and no bound for every secret.

    Args:
        basis: B, float64. width: A.
        secret: whose it is, in words, for errors.

    Attributes:
        known: the information in all answers that were asked for, [r A, r A]; the prior's is the identity.
    """

    def __init__(self, basis: torch.Tensor, width: int, secret: str, known: torch.Tensor | None = None):
        self.basis, self.width, self.secret = basis, width, secret
        size = basis.shape[1] * width
        self.known = torch.zeros(size, size, dtype=torch.float64) if known is None else known

    def rows(self, weights: torch.Tensor) -> torch.Tensor:
        """Questions [R, n, A] as linear functions of W: [R, r A]."""
        return torch.einsum("rna,ni->ria", weights, self.basis).flatten(1)

    def information(self, weights: torch.Tensor) -> torch.Tensor:
        """Of the answers to questions [R, n, A] under noise of deviation 1: [r A, r A]."""
        rows = self.rows(weights)
        return rows.t() @ rows

    def leakage(self, more: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Of each sample, with `more` information beside what is known: float64 [n], from 0 to 1."""
        found = self.known + more
        found.diagonal().add_(1)
        r, a = self.basis.shape[1], self.width
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
                f"what is known of {self.secret} leaves no room under leakage {limit:g}, whatever the noise; "
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
                f"{owner} could explain {found:.3f} of what sets {self.secret} on a sample apart from its own; "
                f"the limit is {limit:g}. Noise of sigma={enough:.3g} is enough for this round; or leave sigma out, "
                f"ask for fewer numbers (head_rank, directions), or allow more (leakage=)"
            )
        self.known = self.known + more
        return found
