"""What travels between server and clients in a round, with its size in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class NoisyModel:
    """Server to every client: the perturbed model of one round. The same to each client (after Eq. 29).

    Attributes:
        state: perturbed parameters, and the running statistics of batch norms in eval mode; the model's names.
        additive: r_a, float64 [n_L]. partition: int64 [n_L], which I_s an output is in.
        round: names the round. frac_bits: fraction bits of the ring encoding under the clients' masks.
        server: answers the cross-entropy exchange in this process; None after the model was sent elsewhere.
    """

    state: dict[str, torch.Tensor] = field(repr=False)
    additive: torch.Tensor = field(repr=False)
    partition: torch.Tensor = field(repr=False)
    round: bytes
    frac_bits: int
    server: Callable[[Request], Reply] | None = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without framing."""
        return sum(t.nbytes for t in self.state.values()) + self.additive.nbytes + self.partition.nbytes + 16

    def detached(self) -> NoisyModel:
        """The same without the in-process way to the server: what may be sent."""
        return replace(self, server=None)


@dataclass(frozen=True)
class Request:
    """Client to server in the paper's exchange: log mu [B, n_L, n_L] (the diagonal is not used) and alpha [B]."""

    round: bytes
    log_mu: torch.Tensor = field(repr=False)
    alpha: torch.Tensor = field(repr=False)

    @property
    def nbytes(self) -> int:
        """B (n_L (n_L - 1) + 1) float64."""
        batch, outputs, _ = self.log_mu.shape
        return 8 * batch * (outputs * (outputs - 1) + 1)


@dataclass(frozen=True)
class Reply:
    """Server to client: log y'_i, log sum_j exp(r*_ij) and (1 - exp(delta_i)) / xi_i, each float64 [B, n_L]."""

    round: bytes
    log_total: torch.Tensor = field(repr=False)
    log_mask: torch.Tensor = field(repr=False)
    factor: torch.Tensor = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.log_total.nbytes + self.log_mask.nbytes + self.factor.nbytes


@dataclass(frozen=True)
class Update:
    """Client to server: the noisy gradient and the noise terms of a round.

    Attributes:
        terms: [T, P] with T = 1 + the number of noise terms and P trainable numbers: noisy gradient, then sigma_1..m,
            beta (MSE) or sigma_1..m, beta_1..m, psi_1..m (the paper's exchange), or nothing more (shift). Floats, or
            ring elements (int64) times the client's share under its mask.
        statistics: batch means and variances of the batch norms in train mode, flat; floats or ring elements.
        share: N_k / N, which is inside masked terms. client: its number in the cohort; None for an unmasked update.
        samples: how many samples the client's batches had.
    """

    round: bytes
    terms: torch.Tensor = field(repr=False)
    statistics: torch.Tensor = field(repr=False)
    samples: int
    share: float = 1.0
    client: int | None = None
    cohort: tuple[int, ...] = ()
    double: bool = False

    @property
    def masked(self) -> bool:
        return self.client is not None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without framing."""
        return self.terms.nbytes + self.statistics.nbytes
