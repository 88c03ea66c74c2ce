"""The extra exchange of the paper for cross-entropy (III-B1 b, Eqs. 22 to 25), in float64 and log space.

It hides less than Lemma 7 says. The client holds y*_i = p_i exp(-delta_i) and c_i = (1 - exp(delta_i)) / xi_i, so
p_i = y*_i (1 - c_i xi_s) and sum_i p_i = 1 is one linear equation for xi per sample: m samples give the true
predictions (`attacks.prediction_from_reply`). The server holds n_L (n_L - 1) numbers mu_ij under n_L masks lambda_i
and finds the predictions of every sample of every client as well (`attacks.prediction_from_request`). Use it to follow
the paper; `exchange="shift"` shows the client no more than m = 1 does here, shows the server nothing, and needs no
noise terms.

The paper prints the factor once as (1 - exp(delta)) / xi and twice as its inverse; only the former fits Lemma 5.
"""

from __future__ import annotations

import math

import torch

from .errors import ExchangeError
from .messages import Reply, Request
from .noise import Key, signs, uniform

LAMBDA_NATS = 3.0
"""log lambda_i is within this of the smallest log ratio of its row."""


def ask(round_id: bytes, logits: torch.Tensor, alpha: torch.Tensor) -> tuple[Request, torch.Tensor]:
    """Step (1): mu_ij = exp(y^_j - y^_i) + lambda_i.

    Args:
        logits: noisy outputs [B, n_L]; alpha: [B].

    Returns:
        The request and the client's secret log lambda, float64 [B, n_L]. lambda_i is of the size of the smallest ratio
        of its row, within e^3. No ratio is then lost beside it, and what the client subtracts in Eq. 24 is at most e^3
        times what is left, so the prediction's relative error is about e^3 2^-52 times the largest log ratio, however
        large the noise.
    """
    logits = logits.detach().double()
    batch, outputs = logits.shape
    differences = logits[:, None, :] - logits[:, :, None]
    own = torch.eye(outputs, dtype=torch.bool, device=logits.device)
    smallest = differences.masked_fill(own, math.inf).amin(2)
    log_lambda = smallest + uniform(batch * outputs, -LAMBDA_NATS, LAMBDA_NATS).reshape(batch, outputs).to(smallest)
    return Request(round_id, torch.logaddexp(differences, log_lambda[:, :, None]), alpha.detach().double()), log_lambda


def answer(key: Key, request: Request) -> Reply:
    """Step (2), Eq. 23: remove the noise from the sums of mu, put exp(delta_i) in its place.

    delta is fresh for each sample and class, at least 1/2 and at most 2 in magnitude; xi is the round's.

    Raises:
        ExchangeError: shapes that do not fit, or numbers that are not finite.
    """
    outputs = len(key.additive)
    alpha, log_mu = request.alpha, request.log_mu
    if log_mu.shape != (len(alpha), outputs, outputs) or alpha.dim() != 1:
        raise ExchangeError(
            f"a request of {len(alpha)} samples holds [{len(alpha)}, {outputs}, {outputs}] ratios, got "
            f"{list(log_mu.shape)}"
        )
    if not (alpha.isfinite().all() and log_mu.isfinite().all()):
        raise ExchangeError("the request holds numbers that are not finite")
    shift = alpha[:, None] * key.shift.to(alpha)
    count = alpha.numel() * outputs
    delta = (signs(count) * uniform(count, 0.5, 2.0)).reshape(-1, outputs).to(alpha)
    correction = delta[:, :, None] - (shift[:, None, :] - shift[:, :, None])  # r*_ij
    own = torch.eye(outputs, dtype=torch.bool, device=alpha.device)
    masked = correction.masked_fill(own, -math.inf)
    log_total = torch.logaddexp(delta, torch.logsumexp(log_mu + masked, 2))
    factor = (1 - torch.exp(delta)) / key.xi[key.partition].to(alpha)
    return Reply(key.round, log_total, torch.logsumexp(masked, 2), factor)


def finish(reply: Reply, log_lambda: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 24: y* = exp(-delta) softmax(y), and y~* = y* (1 - exp(delta)) / xi; float64 [B, n_L] each.

    Raises:
        ExchangeError: the reply does not fit the request, or rounding left no positive number.
    """
    if reply.log_total.shape != log_lambda.shape:
        raise ExchangeError(f"the reply is for {list(reply.log_total.shape)}, asked was {list(log_lambda.shape)}")
    removed = log_lambda + reply.log_mask - reply.log_total
    if not bool((removed < 0).all()):
        raise ExchangeError("the server's sums are smaller than the client's own masks; the noise is too large")
    noisy = torch.exp(-(reply.log_total + torch.log(-torch.expm1(removed))))
    return noisy, noisy * reply.factor
