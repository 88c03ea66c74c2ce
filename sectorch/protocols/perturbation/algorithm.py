"""Section III, to be read beside the paper: what server and clients compute, in its order, with its equations.

    III-A     server  draw_scales, draw_additive, perturb                     W^ and r_a, to every client
              client  outputs                                                 y^ and alpha
    III-B 1a  client  squared_terms                                           MSE
    III-B 1b  both    ask, answer, finish; client: exchanged_terms            cross-entropy
    III-B 2   client  `sectorch/secure_sum.py`, in the place of Eq. 27's phi  masked terms, to the server
    III-C     server  coefficients, times_ratios                              the gradient of Eq. 3
    III-D     server  `Channels.scale` (`sectorch/nn/channels.py`)            W^ for inference

`experiment.py` iterates III-A to III-C, `protocol.py` has the messages, and `scheme.py` the checks. A client's terms
are the gradients of cotangents q [T, B, n_L] of y^ and a [T, B] of alpha, so one forward pass serves them all. A bias
is the weight of a feature that is 1. docs/perturbation.md says what all this hides, and what it does not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from ...nn.channels import Channels
from .errors import ExchangeError
from .settings import Noise


def uniform(count: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Uniform in [low, high) with 53 bits, from the operating system; float64 [count]."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> 11
    return low + (high - low) * torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def signs(count: int) -> torch.Tensor:
    """-1 or 1, evenly, float64 [count]."""
    bits = np.frombuffer(os.urandom(count), dtype=np.uint8) & 1
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1)


# III-A, "Key selection".


@dataclass(frozen=True)
class Key:
    """One round's private key (r^(l), gamma, xi). For the server alone; its repr shows nothing.

    Attributes:
        round: 16 bytes that name the round, a number that was random at first; public. dtype: of the weights.
        scales: r, float64, positive, by channel number of `nn.channels`; entry 0 is 1.
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
        """r = gamma o r_a (Lemma 1), float64 [n_L]."""
        return self.gamma[self.partition] * self.additive

    @property
    def energy(self) -> float:
        """v = r^T r (Lemma 3)."""
        return float(self.shift.square().sum())


def draw_scales(channels: Channels, noise: Noise, dtype: torch.dtype) -> torch.Tensor:
    """r^(l) for weights of `dtype`, float64 by channel number: log-uniform where they are free, 1 elsewhere."""
    scales, count = torch.ones(channels.count, dtype=torch.float64), len(channels.roots)
    if noise.exact(dtype):
        limit = math.floor(math.log2(noise.spread))
        scales[channels.roots] = torch.exp2(uniform(count, -limit, limit + 1).floor().clamp(max=limit))
    else:
        limit = math.log(noise.spread)
        scales[channels.roots] = torch.exp(uniform(count, -limit, limit))
    return scales


def draw_additive(
    outputs: int, m: int, size: float, noise: float, common: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gamma [m], xi [m], r_a [n_L] and a partition [n_L] at random, its parts within one of a size.

    Args:
        size: the root mean square of what the noise is added to. noise: `Noise.size`. common: whether r_a is the same
            for every output (shift exchange).
    """
    gamma = signs(m) * uniform(m, noise / 2, 2 * noise)
    xi = signs(m) * uniform(m, 0.5, 2.0)
    additive = uniform(1 if common else outputs, 0.5, 1.5).expand(outputs) * size
    partition, order = torch.empty(outputs, dtype=torch.int64), torch.argsort(uniform(outputs))
    partition[order] = torch.arange(outputs) % m
    return gamma, xi, additive.clone(), partition


# III-A, "Parameter encryption" and "Forward propagation".


def perturb(
    channels: Channels, head: str, state: Mapping[str, torch.Tensor], key: Key, noise_on: str
) -> dict[str, torch.Tensor]:
    """W^ = R o W, and + R^a in the last layer (Eqs. 6 and 13; R: Eqs. 7, 14 and 15; R^a_ij = r_i: Eqs. 8 and 16)."""
    noisy = channels.scale(state, key.scales)
    for name in (f"{head}.weight", f"{head}.bias"):
        if name in noisy and (noise_on == "weights" or name.endswith("bias")):
            noisy[name] += (key.shift[:, None] if noisy[name].dim() == 2 else key.shift).to(noisy[name])
    return noisy


def outputs(
    features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, noise_on: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """y^ (Eq. 9), which is y + alpha r (Eqs. 11 and 18), and alpha, the sum of the last layer's inputs."""
    alpha = features.new_ones(len(features))  # of the bias, and of nothing else with the noise on the bias alone
    if noise_on == "weights":
        alpha = features.sum(1) + (bias is not None)
    return F.linear(features, weight, bias), alpha


# III-B 1a, MSE: Lemma 3.


def squared_terms(
    y: torch.Tensor, alpha: torch.Tensor, target: torch.Tensor, additive: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 19's noisy gradient, sigma_s contracted with r_a as after Eq. 27, and beta: q [m + 2, B, n_L], a [m + 2, B].

    Args:
        y, target: [B, n_L]; alpha: [B]; additive: r_a [n_L]; members: [m, n_L], 1 where output i is in I_s.
    """
    residual, by_part, zero = y - target, members * additive, torch.zeros_like(alpha)[None]
    q = torch.cat([residual[None], alpha[None, :, None] * by_part[:, None, :], torch.zeros_like(residual)[None]])
    return q, torch.cat([zero, by_part @ residual.T, alpha[None]])


# III-B 1b, cross-entropy: the exchange of Eqs. 22 to 25 in float64 and log space, and Lemma 5.
#
# It hides less than Lemma 7 says (`benchmarks/perturbation_attacks.py`). Of the reply the client computes xi, by one
# linear equation a sample, then the true predictions and gamma; the server finds the predictions of every sample.
# "shift" shows the client no more than m = 1 does here, shows the server nothing, and needs no noise terms.

LAMBDA_NATS = 3.0
"""log lambda_i is within this of the smallest log ratio of its row, so that neither is lost beside the other."""


def ask(y: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step (1), client: log mu_ij = log(exp(y^_j - y^_i) + lambda_i) [B, n_L, n_L], alpha, and the secret log lambda.

    What the client subtracts in Eq. 24 is at most e^3 times what is left, so the prediction's relative error is about
    e^3 2^-52 times the largest log ratio, however large the noise.
    """
    y = y.detach().double()
    ratios = y[:, None, :] - y[:, :, None]
    own = torch.eye(y.shape[1], dtype=torch.bool, device=y.device)
    smallest = ratios.masked_fill(own, math.inf).amin(2)
    log_lambda = smallest + uniform(y.numel(), -LAMBDA_NATS, LAMBDA_NATS).reshape(y.shape).to(smallest)
    return torch.logaddexp(ratios, log_lambda[:, :, None]), alpha.detach().double(), log_lambda


def answer(key: Key, log_mu: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step (2), server, Eq. 23: log y'_i, log sum_j exp(r*_ij) and (1 - exp(delta_i)) / xi_i, each [B, n_L].

    delta is fresh for each sample and class, at least 1/2 and at most 2 in magnitude; xi is the round's. (The paper
    prints the factor twice as its inverse; only this form fits Lemma 5.)
    """
    shift, count = alpha[:, None] * key.shift.to(alpha), alpha.numel() * len(key.additive)
    delta = (signs(count) * uniform(count, 0.5, 2.0)).reshape(shift.shape).to(alpha)
    correction = delta[:, :, None] - (shift[:, None, :] - shift[:, :, None])  # r*_ij
    own = torch.eye(shift.shape[1], dtype=torch.bool, device=alpha.device)
    masked = correction.masked_fill(own, -math.inf)
    log_total = torch.logaddexp(delta, torch.logsumexp(log_mu + masked, 2))
    factor = (1 - torch.exp(delta)) / key.xi[key.partition].to(alpha)
    return log_total, torch.logsumexp(masked, 2), factor


def finish(
    log_total: torch.Tensor, log_mask: torch.Tensor, factor: torch.Tensor, log_lambda: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Client, Eq. 24: y* = exp(-delta) softmax(y), and y~* = y* (1 - exp(delta)) / xi; float64 [B, n_L] each.

    Raises:
        ExchangeError: the reply does not fit the request, or rounding left no positive number.
    """
    if log_total.shape != log_lambda.shape:
        raise ExchangeError(f"the reply is for {list(log_total.shape)}, asked was {list(log_lambda.shape)}")
    removed = log_lambda + log_mask - log_total
    if not bool((removed < 0).all()):
        raise ExchangeError("the server's sums are smaller than the client's own masks; the noise is too large")
    star = torch.exp(-(log_total + torch.log(-torch.expm1(removed))))
    return star, star * factor


def exchanged_terms(
    star: torch.Tensor, tilde: torch.Tensor, target: torch.Tensor, additive: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eqs. 25 and 26: the noisy gradient, sigma_s, beta_s, psi_s of y* and y~*: q [3m + 1, B, n_L], a [3m + 1, B]."""
    residual, by_part, m = star - target, members * additive, len(members)
    zero, none = torch.zeros_like(residual[:, 0]), torch.zeros_like(residual)
    q = torch.cat([residual[None], none.expand(2 * m, *none.shape), members[:, None, :] * tilde])
    a = torch.cat([zero[None], by_part @ residual.T, by_part @ tilde.T, zero.expand(m, *zero.shape)])
    return q, a


# III-C, model update, of the sums of Eq. 28.


def coefficients(key: Key, loss: str, exchange: str | None, noise_on: str) -> torch.Tensor:
    """What each summed term is multiplied by, float64 [T]: 1, then -gamma_s and v (Eq. 29), or -gamma_s, gamma_s xi_s
    and -xi_s (the cross-entropy form, whose printed bracket has the wrong sign at xi_s gamma_s; its second line is
    right). With the noise on the bias alone, what goes with the gradient of alpha is zero: 1, then -gamma_s or -xi_s.
    """
    one = torch.ones(1, dtype=torch.float64)
    if noise_on == "bias":
        return torch.cat([one, -key.gamma if loss == "mse" else -key.xi])
    if loss == "mse":
        return torch.cat([one, -key.gamma, torch.tensor([key.energy], dtype=torch.float64)])
    return one if exchange == "shift" else torch.cat([one, -key.gamma, key.gamma * key.xi, -key.xi])


def times_ratios(channels: Channels, scales: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
    """R o (...) in place, by parameter: the last step of Eq. 29, of what the coefficients leave of the terms."""
    for name, part in parts.items():
        near = scales.to(part)
        channels.parameters[name].scale_(part, near, 1 / near)
