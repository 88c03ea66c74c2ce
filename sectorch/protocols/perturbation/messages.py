"""What travels between server and clients in a round: what it holds, and the one tensor that it is on the way.

Floats travel as their bytes, which change nothing; masked terms as the ring elements that they are (`protocol.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

ROUND_BYTES = 16
"""Of a round's name, which ends a noisy model's bytes."""


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes, one after the other: uint8."""
    return torch.cat([t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors])


def unpacked(data: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `packed` was given, of these shapes and dtypes; views where the bytes lie as their type wants."""
    found, start = [], 0
    for dtype, run in itertools.groupby(like, lambda t: t.dtype):
        run = list(run)
        end = start + sum(t.nbytes for t in run)
        piece, start = data[start:end], end
        piece = (piece.clone() if piece.storage_offset() % dtype.itemsize else piece).view(dtype)
        offset = piece.storage_offset()
        for one in run:
            found.append(piece.as_strided(one.shape, one.stride(), offset))
            offset += one.numel()
    return found


@dataclass(frozen=True)
class NoisyModel:
    """Server to every client: the perturbed model of one round. The same to each client (after Eq. 29).

    Attributes:
        state: perturbed parameters, and the running statistics of batch norms in eval mode; the model's names.
        additive: r_a, float64 [n_L]. partition: int64 [n_L], which I_s an output is in.
        round: names the round. frac_bits: fraction bits of the ring encoding under the clients' masks.
    """

    state: dict[str, torch.Tensor] = field(repr=False)
    additive: torch.Tensor = field(repr=False)
    partition: torch.Tensor = field(repr=False)
    round: bytes
    frac_bits: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without framing."""
        return sum(t.nbytes for t in self.state.values()) + self.additive.nbytes + self.partition.nbytes + ROUND_BYTES

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(tensor.dtype for tensor in self.state.values() if tensor.is_floating_point())

    @cached_property
    def _order(self) -> list[str]:
        """Names of the state, the largest elements first: each tensor then lies as its type wants."""
        return sorted(self.state, key=lambda name: (-self.state[name].itemsize, str(self.state[name].dtype)))

    def _tensors(self) -> list[torch.Tensor]:
        return [*(self.state[name] for name in self._order), self.additive, self.partition]

    def packed(self) -> torch.Tensor:
        """uint8 [nbytes]; the fraction bits are known to whoever has the scheme."""
        return packed([*self._tensors(), torch.frombuffer(bytearray(self.round), dtype=torch.uint8)])

    def unpacked(self, data: torch.Tensor, device: torch.device) -> NoisyModel:
        """The model whose bytes these are, where this one says the shapes."""
        *tensors, additive, partition = unpacked(data[:-ROUND_BYTES], self._tensors())
        found = dict(zip(self._order, tensors, strict=True))
        state = {name: found[name] for name in self.state}
        if device.type != "cpu":
            state = {name: tensor.to(device) for name, tensor in state.items()}
        name = bytes(data[-ROUND_BYTES:].tolist())
        return replace(self, state=state, additive=additive, partition=partition, round=name)


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
        return self.size(batch, outputs)

    @staticmethod
    def size(batch: int, outputs: int) -> int:
        """Bytes of a request about so many samples."""
        return 8 * batch * (outputs * (outputs - 1) + 1)

    def packed(self) -> torch.Tensor:
        """uint8 [nbytes]."""
        return packed([self.log_mu[:, _apart(self.log_mu.shape[1])], self.alpha])

    @classmethod
    def unpacked(cls, data: torch.Tensor, round_id: bytes, outputs: int) -> Request:
        """The request of a round whose bytes these are, with zeros on the diagonal."""
        values = data.view(torch.float64)
        batch = len(values) // (outputs * (outputs - 1) + 1)
        log_mu = values.new_zeros(batch, outputs, outputs)
        log_mu[:, _apart(outputs)] = values[:-batch].view(batch, -1)
        return cls(round_id, log_mu, values[-batch:])


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

    @staticmethod
    def size(batch: int, outputs: int) -> int:
        """Bytes of a reply about so many samples."""
        return 24 * batch * outputs

    def packed(self) -> torch.Tensor:
        """uint8 [nbytes]."""
        return packed([self.log_total, self.log_mask, self.factor])

    @classmethod
    def unpacked(cls, data: torch.Tensor, round_id: bytes, outputs: int, device: torch.device) -> Reply:
        """The reply of a round whose bytes these are."""
        return cls(round_id, *data.view(torch.float64).view(3, -1, outputs).to(device))


def _apart(outputs: int) -> torch.Tensor:
    """Which entries of a square are not on its diagonal."""
    return ~torch.eye(outputs, dtype=torch.bool)


@dataclass(frozen=True)
class Update:
    """Client to server: the noisy gradient and the noise terms of a round.

    Attributes:
        terms: [T, P] with T = 1 + the number of noise terms and P trainable numbers: noisy gradient, then sigma_1..m,
            beta (MSE) or sigma_1..m, beta_1..m, psi_1..m (the paper's exchange), or nothing more (shift). Floats, or
            ring elements (int64) times the client's share under its mask.
        statistics: batch means and variances of the batch norms in train mode, flat; floats or ring elements.
        share: N_k / N, which is inside masked terms. client: its number in the cohort; None for an unmasked update.
        peers: the clients it shares a mask with; None for all others of the cohort.
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
    peers: tuple[int, ...] | None = None

    @property
    def masked(self) -> bool:
        return self.client is not None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without framing."""
        return self.terms.nbytes + self.statistics.nbytes

    def packed(self) -> torch.Tensor:
        """Ring elements [T P + statistics] as they are, or the bytes of floats."""
        if self.masked and not len(self.statistics):
            return self.terms.reshape(-1)
        if self.masked:
            return torch.cat([self.terms.reshape(-1), self.statistics])
        return packed([self.terms, self.statistics])
