"""Gaussian noise that the clients of a secure sum add in shares: nobody draws all of it, and nobody is trusted to.

    shares = GaussianShares(sigma=4.0, clip=1.0, honest=80, colluding=10)  # of 100 clients; 10 may be lost
    masks = PairwiseMasks(session, clients, drop_outs=True, least=shares.least)
    total, came = masks.sum({c: shares.encode(updates[c]) for c in clients})
    mean = shares.decode(total) / len(came)

Each client adds discrete Gaussian noise of deviation sigma / sqrt(honest), on the grid of the sum. So `honest` shares
are the noise of a central mechanism of deviation sigma, and more shares are more noise. Noise and numbers meet as whole
numbers: the sum of what the clients encoded is exact, and no low bits of a float tell them apart.

**Who is protected, from whom.** One unit: a client with all its data, or each tensor that a client clips by itself,
such as the gradient of one record. The server, and colluding clients with it, see the sum. They subtract what they
added, noise too; what is left is the others' sum under the others' noise. Where h honest clients are in the sum, the
Renyi cost is honest / h times `curve`, at most `curve` while h >= honest, and more below it (`curve_of`). A client that
is lost takes its share of the noise along. A sum is therefore opened for `least` survivors or more, which each client
checks before it opens (`secure_sum`): of those, `colluding` may be on the server's side. Masks are of all pairs; a
graph of masks (`degree`) is refused, for by one colluding clients can cut off a part whose sum has the noise of few. A
client that adds no noise counts as colluding.

**Error.** The sum has the noise of every client in it: of K clients deviation sigma sqrt(K / honest). Clients that each
add noise enough for themselves (local differential privacy) make it sigma sqrt(K).

Source: Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure
aggregation", ICML 2021: a sum of n discrete Gaussians of scale s on the integers costs at most
alpha change^2 / 2 n s^2 + tau d at order alpha, tau = 10 sum_k exp(-2 pi^2 s^2 k / (k + 1)). Here s is 8 or more, so
tau is below n 2^-900.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..errors import FixedPointRangeError, NonFiniteError, ShapeError
from ..ring import HEADROOM_BITS
from ..secure_sum import NoiseCarriers
from .errors import PrivacyError
from .noise import gaussian_curve, on_grid

MARGIN = 2.0**-16
"""A clipped tensor is shorter than the bound by this part of it. Rounding to the grid takes half of it at most, and the
rest is far above the errors of norms and sums in float64."""
_LEAST_ON_GRID = 8.0
_MOST = 2.0**HEADROOM_BITS


@dataclass(frozen=True)
class GaussianShares:
    """Gaussian noise for a sum, in shares of its clients.

    Args:
        sigma: deviation of the noise of `honest` shares, in units of the sum.
        clip: L2 norm of what one unit adds to the sum, at most.
        honest: how many shares make the noise whole: clients that neither collude with the server nor are lost.
        colluding: how many clients the server may have on its side.
        frac_bits: f; the grid of the sum is the multiples of 2^-f.

    Raises:
        PrivacyError: a number out of range, or noise too small for the grid.
    """

    sigma: float
    clip: float
    honest: int
    colluding: int = 0
    frac_bits: int = 32

    def __post_init__(self):
        for name, value in (("sigma", self.sigma), ("clip", self.clip)):
            if not 0 < value < math.inf:
                raise PrivacyError(f"{name} must be above 0 and finite, got {value}")
        if not (isinstance(self.honest, int) and isinstance(self.colluding, int) and self.honest > 0 <= self.colluding):
            raise PrivacyError(
                f"the noise is of 1 honest client or more, beside 0 colluding ones or more, got {self.honest!r} and "
                f"{self.colluding!r}"
            )
        if not (isinstance(self.frac_bits, int) and 0 <= self.frac_bits <= 60):
            raise PrivacyError(f"frac_bits is a whole number from 0 to 60, got {self.frac_bits!r:.40}")
        if self.clip * 2.0**self.frac_bits >= _MOST:
            raise PrivacyError(
                f"a clip of {self.clip:g} leaves the 62 bits of a sum with {self.frac_bits} fraction bits; use fewer"
            )
        if self.share * 2.0**self.frac_bits < _LEAST_ON_GRID:
            raise PrivacyError(
                f"a share of the noise has deviation {self.share:.3g}, and a grid of {self.frac_bits} fraction bits "
                f"needs {_LEAST_ON_GRID / 2**self.frac_bits:.3g} or more; use more frac_bits"
            )

    @property
    def share(self) -> float:
        """The deviation of one client's noise."""
        return self.sigma / math.sqrt(self.honest)

    @cached_property
    def curve(self) -> np.ndarray:
        """RDP of one sum over `ORDERS`, with `honest` honest clients in it: one unit is replaced by another."""
        return self.curve_of(self.honest)

    def curve_of(self, present: int) -> np.ndarray:
        """RDP of one sum with so many honest clients in it; infinite for none, whose sum is the adversary's own."""
        if present < 1:
            return np.full_like(gaussian_curve(1.0, 1.0), np.inf)
        return gaussian_curve(self.share * math.sqrt(present), 2 * self.clip)

    @property
    def least(self) -> NoiseCarriers:
        """Fewest survivors for whom a sum may be opened, so that `curve` holds."""
        return NoiseCarriers(max(2, self.honest + self.colluding))

    def clipped(self, x: torch.Tensor) -> torch.Tensor:
        """x in float64, scaled down where its norm is above `clip` (1 - 2^-16).

        Raises:
            NonFiniteError: x holds NaN or infinity.
        """
        x = x.detach().double()
        norm, room = float(torch.linalg.vector_norm(x)), self.clip * (1 - MARGIN)
        if not math.isfinite(norm):
            raise NonFiniteError("what a client adds to a private sum holds NaN or infinity, or is too large to clip")
        return x if norm <= room else x * (room / norm)

    def encode(self, *units: torch.Tensor) -> torch.Tensor:
        """What a client adds to the sum: its units, each clipped, and its share of the noise, int64 on the grid.

        Args:
            units: tensors of one shape: the client's update, or of each of its records one.

        Exact: the sum of these over the clients is that of their rounded values and noises. Each number is rounded
        once, by at most 2^-(f+1). Fresh noise in each call, never seeded: two encodings of one update cost twice.

        Raises:
            NonFiniteError: a unit holds NaN or infinity. PrivacyError: so many numbers round by more than the margin.
            ShapeError: units of several shapes. FixedPointRangeError: their sum leaves the 62 bits of the grid.
        """
        if len(shapes := {tuple(unit.shape) for unit in units}) != 1:  # a unit that is repeated is longer than the clip
            raise ShapeError(f"the units of a client are tensors of one shape, got {sorted(shapes)}")
        return self.noisy(sum((self.clipped(unit) for unit in units[1:]), self.clipped(units[0])))

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        """`encode` of a sum of units that are clipped already."""
        if math.sqrt(x.numel()) * 2.0**-self.frac_bits > self.clip * MARGIN:
            raise PrivacyError(
                f"{x.numel()} numbers of {self.frac_bits} fraction bits round by more than 2^-17 of the clip "
                f"{self.clip:g}; use more frac_bits"
            )
        x = x.double() * 2.0**self.frac_bits
        if x.numel() and float(x.abs().max()) >= _MOST:
            raise FixedPointRangeError(
                f"a client's units together leave the 62 bits of a sum with {self.frac_bits} fraction bits; use fewer"
            )
        return x.round().long() + on_grid(self.share, x.shape, self.frac_bits)

    def decode(self, total: torch.Tensor) -> torch.Tensor:
        """A sum of encodings as float64; of shape alone where the sum is elsewhere."""
        return total.double() * 2.0**-self.frac_bits
