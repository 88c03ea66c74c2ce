"""What travels between server and clients in a round: what it holds, and the one tensor that it is on the way.

Floats travel as their bytes, which change nothing; masked terms as the ring elements that they are (`rounds.py`).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from ...choreography import Located, Message, Net, Party, Roles, protocol
from ...secure_sum import PAIR, star_roles
from .errors import NoiseError

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


# What a server and a client send each other: the roles, and a declared message or two to a protocol.
#
# `rounds.py` says when a message is sent, and docs/perturbation.md what it shows.


SERVER = Party("Server", "Server")


def clients_of(count: int) -> list[str]:
    """The names of so many clients: C0, C1, ..."""
    return [f"C{client}" for client in range(count)]


def roles_of(clients: int) -> Roles:
    """The star of a server and so many clients."""
    return star_roles(clients_of(clients))


@protocol("perturbation_model", "III-A", [
    Message("model", "Server", "Client", "scales and additive noise of the server",
            "a model of the same function, and more (docs/perturbation.md)"),
], roles=PAIR)  # fmt: skip
def send_model(net: Net, model: Located) -> Located:
    """A round's noisy model, the same to each client: the model's bytes, 16 for each of its outputs, and 16."""
    return model.send(net.Server, net.Client, "model")


@protocol("perturbation_exchange", "III-B1 b, Eqs. 22 to 25", [
    Message("request", "Client", "Server", "lambda, which does not hide it", "the prediction of every sample"),
    Message("reply", "Server", "Client", "delta and xi, which do not hide it", "the prediction of every sample"),
], roles=PAIR)  # fmt: skip
def exchange(net: Net, request: Located, answer: Callable, key: Located) -> Located:
    """The paper's exchange for cross-entropy, of one batch. Rounds 2, bytes 8 B (n (n - 1) + 1) and 24 B n."""
    at_server = request.send(net.Client, net.Server, "request").at("Server")
    return net.fresh(net.Server, answer, key, at_server).send(net.Server, net.Client, "reply")


@protocol("perturbation_plain_update", "III-B", [
    Message("update", "Client", "Server", "", "the client's gradient"),
], roles=PAIR)  # fmt: skip
def send_plain(net: Net, update: Located) -> Located:
    """A client's terms and statistics without masks: the bytes of the model's floats."""
    return update.send(net.Client, net.Server, "update")


# The server's one-time noise: positive channel scales, the additive noise of the last layer, the exchange's xi.
#
# All of it comes from the operating system. Source: III-A, "Key selection".


@dataclass(frozen=True)
class Noise:
    """How large the noise is. Sizes are a trade of hiding against rounding: the server recovers a gradient as a
    difference of terms that grow with the square of `additive`.

    Attributes:
        spread: channel scales are log-uniform in [1/spread, spread]; above 1, and 2 or more for powers of two.
        additive: gamma_s is +-uniform in [additive/2, 2 additive]; the public r_a is uniform in [1/2, 3/2] times the
            root mean square of the last layer's scaled weights. At 1 what is added to a weight is of the weight's own
            size, and what is added to a logit about sqrt(n_{L-1}) times the logit. Positive. None: 1 for float64 and
            1/4 for float32, where a deep net's terms would else be a thousand times the gradient.
        powers_of_two: whether channel scales are powers of two. Floating point then rounds the noised pass exactly as
            the plain one, so no ReLU near zero turns over, but the digits of every weight stand open and a scale is
            one of 2 log2(spread) + 1. None: for float32, where one turned ReLU can cost a hundredth of a deep net's
            gradient; float64 has digits enough for any real scale.
    """

    spread: float = 4.0
    additive: float | None = None
    powers_of_two: bool | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.spread) and self.spread > 1):
            raise NoiseError(f"the spread of the channel scales has to be finite and above 1, got {self.spread}")
        if self.additive is not None and not (math.isfinite(self.additive) and self.additive > 0):
            raise NoiseError(f"the size of the additive noise has to be finite and positive, got {self.additive}")
        if self.powers_of_two and self.spread < 2:
            raise NoiseError(f"powers of two need a spread of 2 or more, got {self.spread}; or powers_of_two=False")

    def size(self, dtype: torch.dtype) -> float:
        """`additive` for weights of `dtype`."""
        return self.additive or (0.25 if dtype == torch.float32 else 1.0)

    def exact(self, dtype: torch.dtype) -> bool:
        """Whether weights of `dtype` get powers of two."""
        return self.spread >= 2 and dtype == torch.float32 if self.powers_of_two is None else self.powers_of_two


def uniform(count: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Uniform in [low, high) with 53 bits, from the operating system; float64 [count]."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> 11
    return low + (high - low) * torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def signs(count: int) -> torch.Tensor:
    """-1 or 1, evenly, float64 [count]."""
    bits = np.frombuffer(os.urandom(count), dtype=np.uint8) & 1
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1)


def random_partition(outputs: int, partitions: int) -> torch.Tensor:
    """A random assignment of the outputs to I_1 .. I_m, none empty and sizes within one; int64 [outputs]."""
    order = torch.argsort(uniform(outputs))
    part = torch.empty(outputs, dtype=torch.int64)
    part[order] = torch.arange(outputs) % partitions
    return part


@dataclass(frozen=True)
class Key:
    """One round's private key (r^(l), gamma, xi). For the server alone; its repr shows nothing.

    Attributes:
        round: 16 bytes that name the round, a number that was random at first; public. dtype: of the weights.
        scales: float64, positive, by channel number of the plan; entry 0 is 1.
        gamma, xi: float64 [m], nonzero.
        additive: r_a, float64 [n_L], pairwise different but in the shift exchange, where all are equal; public.
        partition: index of I_s of each output, int64 [n_L]; public.
    """

    round: bytes
    dtype: torch.dtype
    scales: torch.Tensor = field(repr=False)
    gamma: torch.Tensor = field(repr=False)
    xi: torch.Tensor = field(repr=False)
    additive: torch.Tensor = field(repr=False)
    partition: torch.Tensor = field(repr=False)

    def __repr__(self) -> str:
        return "Key(...)"

    @property
    def shift(self) -> torch.Tensor:
        """r = gamma o r_a, float64 [n_L]."""
        return self.gamma[self.partition] * self.additive

    @property
    def energy(self) -> float:
        """v = r^T r (Lemma 3)."""
        return float(self.shift.square().sum())


def check_noise(scales: torch.Tensor, gamma: torch.Tensor, xi: torch.Tensor, additive: torch.Tensor) -> None:
    """Raise unless the scales are positive and the rest is finite and nonzero.

    Raises:
        NoiseError: says which noise, and how many of its entries.
    """
    bad = int((~(scales > 0) | scales.isinf()).sum())
    if bad:
        raise NoiseError(
            f"{bad} of {scales.numel()} channel scales are not positive and finite; ReLU(r x) = r ReLU(x) needs r > 0"
        )
    for name, values in (("gamma", gamma), ("xi", xi), ("r_a", additive)):
        bad = int((~values.isfinite() | (values == 0)).sum())
        if bad:
            raise NoiseError(f"{bad} of {values.numel()} entries of {name} are zero or not finite")


def draw_scales(roots: torch.Tensor, count: int, noise: Noise, dtype: torch.dtype) -> torch.Tensor:
    """Scales for weights of `dtype` by channel number, float64 [count]: log-uniform at the roots, 1 elsewhere."""
    scales = torch.ones(count, dtype=torch.float64)
    if noise.exact(dtype):
        limit = math.floor(math.log2(noise.spread))
        drawn = torch.exp2(uniform(len(roots), -limit, limit + 1).floor().clamp(max=limit))
    else:
        limit = math.log(noise.spread)
        drawn = torch.exp(uniform(len(roots), -limit, limit))
    scales[roots] = drawn
    return scales


def draw_additive(
    outputs: int, partitions: int, size: float, noise: float, common: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gamma [m], xi [m], r_a [n_L]: see `Noise`; `size` is the weights' root mean square, or any positive number where
    they are all zero, and `noise` is `Noise.size`. With `common`, r_a is the same for every output (shift exchange)."""
    gamma = signs(partitions) * uniform(partitions, noise / 2, 2 * noise)
    xi = signs(partitions) * uniform(partitions, 0.5, 2.0)
    additive = uniform(1 if common else outputs, 0.5, 1.5).expand(outputs) * size
    return gamma, xi, additive.clone()
