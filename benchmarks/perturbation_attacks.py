"""What an honest-but-curious client or server can work out. Each claim of docs/perturbation.md has a function here.

These are not tools to be used on others: they say what the scheme does not hide, and the tests run them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from sectorch.protocols.perturbation import BatchMismatchError, Key, Reply, Request


def canonical(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A chain of layers' weights with every channel's incoming weights scaled to length 1, and the next layer's columns
    by the inverse. Positive channel scales do not change it, so a noised chain and the true one give the same result
    (but for the last layer, which takes additive noise and is left out). Weights [out, in, ...]."""
    result, above = [], None
    for weight in weights[:-1]:
        if above is not None:
            weight = weight * above.reshape(1, -1, *(1,) * (weight.dim() - 2))
        above = weight.flatten(1).norm(dim=1)
        result.append(weight / above.reshape(-1, *(1,) * (weight.dim() - 1)))
    return result


def distinguish(noisy: Sequence[torch.Tensor], first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> int:
    """The game of Definition 2: which of two models, 0 or 1, was perturbed. Wins always when their canonical forms
    differ, so the scheme is not semantically secure and Lemma 6 is false: its proof takes multiples of a fixed vector
    for uniform."""
    seen = canonical(noisy)
    distances = [
        sum(float((a - b).square().sum()) for a, b in zip(seen, canonical(candidate), strict=True))
        for candidate in (first, second)
    ]
    return int(distances[1] < distances[0])


def prediction_from_reply(prediction: torch.Tensor, reply: Reply, partition: torch.Tensor) -> torch.Tensor:
    """Client: the true softmax of every sample, from the paper's cross-entropy exchange with at least m samples.

    y*_i (1 - c_i xi_s) = p_i sums to one, which is linear in the m unknown xi_s. Against Lemma 7.

    Args:
        prediction: y* of Eq. 24, float64 [B, n_L]. reply: the server's. partition: I_s of each output [n_L].

    Returns:
        float64 [B, n_L].
    """
    members = torch.nn.functional.one_hot(partition).to(prediction)
    weighted = prediction * reply.factor
    if len(prediction) < members.shape[1]:
        raise BatchMismatchError(f"{members.shape[1]} unknown xi need as many samples, got {len(prediction)}")
    xi = torch.linalg.lstsq(weighted @ members, prediction.sum(1, keepdim=True) - 1).solution
    return prediction - weighted * (members @ xi).T


def prediction_from_request(key: Key, request: Request) -> torch.Tensor:
    """Server: the true softmax of every sample of a client, from mu_ij and alpha; n_L of at least 3.

    With e = exp(y^) and any third class k, 1 + mu_ij - mu_ik = (e_i + e_j - e_k) / e_i: lambda_i falls out, and rows i
    and j together give e_j / e_i. Against "the server only sees the aggregate".

    Returns:
        float64 [B, n_L].
    """
    outputs = request.log_mu.shape[1]
    if outputs < 3:
        raise BatchMismatchError(f"two rows need a column besides them: n_L is at least 3, got {outputs}")

    def log_sum(i: int, j: int, k: torch.Tensor) -> torch.Tensor:
        """log |1 + mu_ij - mu_ik|."""
        terms = torch.stack([torch.zeros(len(k)), request.log_mu[:, i, j], request.log_mu[:, i].gather(1, k)[:, 0]])
        scale = terms.amax(0)
        return scale + (torch.exp(terms - scale) * torch.tensor([1, 1, -1])[:, None]).sum(0).abs().log()

    log_ratio = torch.zeros(len(request.log_mu), outputs, dtype=torch.float64)
    for j in range(1, outputs):  # y^_j - y^_0, by the smallest of the others
        own = torch.zeros(outputs, dtype=torch.bool).index_fill(0, torch.tensor([0, j]), True)
        third = request.log_mu[:, j].masked_fill(own, torch.inf).argmin(1, keepdim=True)
        log_ratio[:, j] = log_sum(0, j, third) - log_sum(j, 0, third)
    return torch.softmax(log_ratio - request.alpha[:, None] * key.shift, 1)


def gamma_from_prediction(
    logits: torch.Tensor, alpha: torch.Tensor, prediction: torch.Tensor, additive: torch.Tensor, partition: torch.Tensor
) -> torch.Tensor:
    """Client, once it has the true softmax p (`prediction_from_reply`): gamma, exactly.

    log p is y less a constant c of each sample, so y^ - log p = c + alpha gamma_s r_a,i is linear in c and gamma. With
    gamma the client has the true logits y^ - alpha gamma r_a, and of the last layer R o W: a network of the true
    function. (With m = n_L a number that all gamma_i r_a,i have in common is left open, which softmax does not see.)
    Rows are weighted by p, since log p errs by as much as p does, over p.

    Args:
        logits: y^ [B, n_L], of samples enough: B + m unknowns in B n_L equations.

    Returns:
        float64 [m].
    """
    noise = _noise_by_gamma(alpha, additive, partition)
    own = torch.eye(len(logits), dtype=torch.float64).repeat_interleave(logits.shape[1], 0)
    weight = prediction.clamp(min=0).flatten()[:, None]
    difference = (logits.double() - prediction.clamp(min=1e-300).log()).flatten()[:, None]
    system = torch.cat([noise, own], 1)
    return torch.linalg.lstsq(weight * system, weight * difference, driver="gelsd").solution[: noise.shape[1], 0]


def _noise_by_gamma(alpha: torch.Tensor, additive: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
    """The matrix [B n_L, m] by which gamma becomes the noise alpha gamma_s r_a,i on all logits."""
    members = torch.nn.functional.one_hot(partition).double()
    return (alpha.double()[:, None, None] * additive[:, None] * members).flatten(0, 1)


class View(NamedTuple):
    """What a client has of a round: y^ [B, n_L] and alpha [B] of its samples, r_a [n_L], and the partition [n_L]."""

    logits: torch.Tensor
    alpha: torch.Tensor
    additive: torch.Tensor
    partition: torch.Tensor


def gamma_from_rounds(first: View, second: View) -> torch.Tensor:
    """Client, from the same samples in two rounds: gamma of the first, float64 [m].

    A step of training moves the true prediction little, and the noise is drawn anew: y^ - y^' is alpha gamma r_a less
    alpha' gamma' r_a' but for that step, which is linear in the 2 m unknown gammas. Off by about the step, averaged
    over all outputs of all samples.
    """
    noise = [_noise_by_gamma(*view[1:]) for view in (first, second)]
    difference = (first.logits - second.logits).double().flatten()[:, None]
    found = torch.linalg.lstsq(torch.cat([noise[0], -noise[1]], 1), difference, driver="gelsd").solution
    return found[: noise[0].shape[1], 0]


def gamma_from_targets(
    logits: torch.Tensor, alpha: torch.Tensor, targets: torch.Tensor, additive: torch.Tensor, partition: torch.Tensor
) -> torch.Tensor:
    """Client, MSE: least squares of y^ - target on alpha r_a, part by part. As the model learns the targets this tends
    to gamma, and y^ - alpha gamma r_a to the true prediction. float64 [m]."""
    residual = (logits - targets).double()
    found = []
    for part in range(int(partition.max()) + 1):
        chosen = partition == part
        direction = alpha.double()[:, None] * additive[chosen]
        found.append((residual[:, chosen] * direction).sum() / direction.square().sum())
    return torch.stack(found)


def gamma_from_model(noised: torch.Tensor, additive: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
    """Client, without any data: gamma from what the last layer received, float64 [m].

    Every weight of a row, or the bias of a row where only that takes noise, is a true number plus gamma_s r_a,i. r_a is
    public, so least squares of the numbers on it gives gamma_s, off by as much as the true numbers lean along r_a: with
    weights the mean of a row's, with biases the biases themselves.

    Args:
        noised: the last layer's noised weights [n_L, n], or its noised biases [n_L].
    """
    means = noised.double().reshape(len(noised), -1).mean(1)
    masses = means.new_zeros(int(partition.max()) + 1).index_add_(0, partition, additive.square())
    return torch.zeros_like(masses).index_add_(0, partition, means * additive) / masses


def known_part(logits: torch.Tensor, additive: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
    """Client, MSE: the part of the true prediction that is visible at once, whatever gamma is: in each I_s the noise
    lies along r_a, so all that is orthogonal to it is exact. n_L - m of n_L dimensions; [B, n_L]."""
    out = logits.clone()
    for part in range(int(partition.max()) + 1):
        chosen = partition == part
        axis = (additive[chosen] / additive[chosen].norm()).to(logits)
        out[:, chosen] -= (logits[:, chosen] @ axis)[:, None] * axis
    return out


def input_from_gradient(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The input of a first linear layer with bias from the gradient of one sample: dL/dW_i = dL/db_i x. Exact."""
    row = int(bias.abs().argmax())
    return weight[row] / bias[row]


def deep_leakage(
    model: nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    gradient: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    classes: int,
    steps: int = 100,
) -> tuple[torch.Tensor, float]:
    """DLG (Zhu et al. 2019): an input and soft label whose gradient on the known model matches a seen one, by L-BFGS.

    Args:
        gradient: parameter name -> what was seen. shape: of one input, without the batch.

    Returns:
        The input found [1, *shape], and the last distance between the gradients.
    """
    names = list(gradient)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    seen = [gradient[name] for name in names]
    guess = torch.rand(1, *shape, dtype=seen[0].dtype).requires_grad_()
    label = torch.zeros(1, classes, dtype=seen[0].dtype).requires_grad_()
    optimizer = torch.optim.LBFGS([guess, label], lr=1.0, max_iter=20, line_search_fn="strong_wolfe")

    def distance() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss_fn(functional_call(model, parameters, (guess,)), torch.softmax(label, 1))
        found = torch.autograd.grad(value, [parameters[name] for name in names], create_graph=True)
        gap = functools.reduce(torch.add, ((a - b).square().sum() for a, b in zip(found, seen, strict=True)))
        gap.backward(inputs=[guess, label])
        return gap

    gap = float("inf")
    for _ in range(max(1, steps // 20)):
        gap = float(optimizer.step(distance).detach())
        if not gap < float("inf"):
            break
    return guess.detach(), gap
