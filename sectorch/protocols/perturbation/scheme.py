"""The scheme: the server perturbs a model, clients send noisy gradients and noise terms, the server recovers.

Source: Feng, Yang, Fang, Xia, Tang, Shao, Xiong, "A Practical Privacy-preserving Method in Federated Deep Learning"
section III. docs/perturbation.md says what it hides, and what it does not.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...choreography.pages import Spare
from ...errors import ChannelScaleError, DroppedClientError, MaskError
from ...nn.channels import Channels, channels
from ...nn.pullback import Pullback, UpdateTerms
from ...nn.symbolic_trace import layer_location
from ...ring import HEADROOM_BITS
from ...secure_sum import (
    FRAC_BITS,
    ClientMasks,
    MaskOpening,
    add_encoded,
    add_sum,
    check_range,
    following,
    left_over,
)
from .errors import (
    BatchMismatchError,
    ExchangeError,
    NonFiniteGradientError,
    NotPerturbableError,
    StaleKeyError,
    StateMismatchError,
    WeightError,
)
from .messages import (
    ROUND_BYTES,
    Key,
    Noise,
    NoisyModel,
    Reply,
    Request,
    Update,
    check_noise,
    draw_additive,
    draw_scales,
    random_partition,
    signs,
    uniform,
)
from .settings import EXCHANGES, LOSSES, PLACES, exchange_of

# The network as the scheme sees it: a body, and a last linear layer that takes the additive noise.


@dataclass(frozen=True)
class Plan:
    """Everything about a model that does not depend on its weights.

    Attributes:
        channels: which of the network's channels share a scale.
        body: the graph up to the features that enter the last linear layer.
        head: name of that layer; its rows have scale 1 and take the additive noise instead.
        outputs, features: n_L and n_{L-1}. head_bias: whether the last layer has a bias.
    """

    channels: Channels
    body: fx.GraphModule
    head: str
    outputs: int
    features: int
    head_bias: bool


def make_plan(model: nn.Module, width: int | None = None) -> Plan:
    """Find the channels of `model` and its last layer; the model itself is left alone.

    Raises:
        NotPerturbableError: names the layer that cannot carry a scale, and says why.
    """
    try:
        found = channels(model, width)
    except ChannelScaleError as error:
        raise NotPerturbableError(str(error)) from error
    nodes = list(found.graph.graph.nodes)
    if (inputs := sum(node.op == "placeholder" for node in nodes)) != 1:
        raise NotPerturbableError(f"the model takes {inputs} inputs; one tensor [N, ...] was expected")
    head = nodes[-1].args[0]
    while isinstance(head, fx.Node) and head.op == "call_module":
        module = found.graph.get_submodule(str(head.target))
        if type(module) is not nn.Identity:
            break
        head = head.args[0]
    else:
        module = None
    if not isinstance(head, fx.Node) or type(module) is not nn.Linear:
        name = layer_location(head, found.graph) if isinstance(head, fx.Node) else f"a {type(head).__name__}"
        raise NotPerturbableError(
            f"the model ends in {name}; it has to end in an nn.Linear, which takes the additive noise (Eq. 8). Leave "
            f"softmax to the loss"
        )
    if sum(node.target == head.target for node in nodes) > 1 or len(head.users) > 1:
        raise NotPerturbableError(
            f"{layer_location(head, found.graph)} cannot be perturbed: the last linear layer is used in more than one "
            f"place"
        )
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.graph_copy(found.graph.graph, copies)
    graph.output(copies[head.all_input_nodes[0]])
    body = fx.GraphModule(found.graph, graph)
    body.graph.eliminate_dead_code()
    body = fx.GraphModule(body, body.graph)  # once more: the head's weights are not carried along
    size = (module.out_features, module.in_features)
    return Plan(found, body, str(head.target), *size, module.bias is not None)


# The extra exchange of the paper for cross-entropy (III-B1 b, Eqs. 22 to 25), in float64 and log space.
#
# It hides less than Lemma 7 says. The client holds y*_i = p_i exp(-delta_i) and c_i = (1 - exp(delta_i)) / xi_i, so p_i
# = y*_i (1 - c_i xi_s) and sum_i p_i = 1 is one linear equation for xi per sample: m samples give the true predictions
# (`benchmarks/perturbation_attacks.py`). The server holds n_L (n_L - 1) numbers mu_ij under n_L masks lambda_i and
# finds the predictions of every sample of every client as well (same file). Use it to follow the paper;
# `exchange="shift"` shows the client no more than m = 1 does here, shows the server nothing, and needs no noise terms.
#
# The paper prints the factor once as (1 - exp(delta)) / xi and twice as its inverse; only the former fits Lemma 5.


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


# The two losses, as the plain training loop would compute them, and the check of a batch's targets.


def loss_of(loss: str, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the N samples of the cross-entropy, or of sum_i (y_i - target_i)^2 / 2. A scalar."""
    if loss == "mse":
        return (outputs - targets).square().sum() / (2 * len(outputs))
    return F.cross_entropy(outputs, targets)


def dense_targets(loss: str, targets: torch.Tensor, outputs: int, samples: int, dtype: torch.dtype) -> torch.Tensor:
    """Targets as [N, n_L] numbers.

    Raises:
        BatchMismatchError: the shape, a class number outside 0 .. n_L - 1, or probabilities that do not sum to one.
    """
    if loss == "cross_entropy" and not targets.is_floating_point():
        if targets.shape != (samples,):
            raise BatchMismatchError(f"{samples} samples need class numbers [{samples}], got {list(targets.shape)}")
        if samples and (int(targets.min()) < 0 or int(targets.max()) >= outputs):
            raise BatchMismatchError(
                f"class numbers run from {int(targets.min())} to {int(targets.max())}; the model has {outputs} outputs"
            )
        return F.one_hot(targets.long(), outputs).to(dtype)
    if targets.shape != (samples, outputs):
        raise BatchMismatchError(f"targets of shape {list(targets.shape)} for outputs of shape [{samples}, {outputs}]")
    if not targets.is_floating_point():
        raise BatchMismatchError(f"targets of dtype {targets.dtype}; real numbers were expected")
    if loss == "cross_entropy" and not torch.allclose(targets.sum(1), targets.new_ones(()), atol=1e-6):
        raise BatchMismatchError("target probabilities do not sum to one, which Lemma 4 needs")
    return targets.to(dtype)


# The client's side of Lemmas 3 and 5: every term as a vector-Jacobian product of one forward pass.
#
# A term is a cotangent q [B, n_L] of the noisy outputs and one a [B] of alpha, so its gradient is that of
# sum q o y^ + sum a alpha. The head (y^ = h W^T + b, alpha = sum h + 1) is done in closed form for all terms at once;
# `pullback` walks the body.


def squared_terms(
    logits: torch.Tensor, alpha: torch.Tensor, target: torch.Tensor, additive: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lemma 3 and the contraction after Eq. 27: noisy gradient, sigma_s = r_a^T (alpha J + (y^ - y) d alpha), beta.

    Args:
        logits, target: [B, n_L]; alpha: [B]; additive: r_a [n_L]; members: [m, n_L], 1 where output i is in I_s.

    Returns:
        q [m + 2, B, n_L] and a [m + 2, B].
    """
    residual = logits - target
    by_part = members * additive
    zero = torch.zeros_like(alpha)[None]
    q = torch.cat([residual[None], alpha[None, :, None] * by_part[:, None, :], torch.zeros_like(residual)[None]])
    return q, torch.cat([zero, by_part @ residual.T, alpha[None]])


def exchanged_terms(
    noisy: torch.Tensor, helper: torch.Tensor, target: torch.Tensor, additive: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lemma 5: noisy gradient, sigma_s, beta_s, psi_s from y* and y~* of the exchange; q [3m + 1, B, n_L], a."""
    residual = noisy - target
    by_part = members * additive
    zero = torch.zeros_like(residual[:, 0])
    none = torch.zeros_like(residual)
    parts = len(members)
    q = torch.cat([residual[None], none.expand(2 * parts, *none.shape), members[:, None, :] * helper])
    a = torch.cat([zero[None], by_part @ residual.T, by_part @ helper.T, zero.expand(parts, *zero.shape)])
    return q, a


def head_terms(
    name: str, features: torch.Tensor, weight: torch.Tensor, q: torch.Tensor, a: torch.Tensor | None, terms: UpdateTerms
) -> torch.Tensor:
    """The last layer's gradients into `terms`, and the cotangents [T, B, n_{L-1}] of the features.

    Args:
        features: h [B, n_{L-1}]; weight: [n_L, n_{L-1}]; q, a: [T, B, n_L] and [T, B], already over the batch size; a
            is None where no term has a part of alpha's gradient.
    """
    terms.product(f"{name}.weight", q, features)
    terms.put(f"{name}.bias", q.sum(1))
    back = q @ weight
    return back if a is None else back.add_(a[:, :, None])


# A client's forward and backward passes on a noisy model.


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward pass, and what its backward passes need of it."""

    state: dict[str, torch.Tensor]
    features: torch.Tensor
    pull: Callable
    logits: torch.Tensor
    alpha: torch.Tensor
    target: torch.Tensor


class ClientWork:
    """Turns a noisy model and batches into the rows of an update. Holds no weights.

    Attributes:
        norms: batch norms that use the batch's statistics, with their width and momentum.
        statistic_count: how many numbers their means and variances are.
    """

    def __init__(self, plan: Plan, names: list[str], loss: str, exchange: str | None, noise_on: str, model: nn.Module):
        self.plan, self.names, self.loss, self.exchange, self.noise_on = plan, names, loss, exchange, noise_on
        norms = plan.channels.batch_norms.items()
        named = ((name, model.get_submodule(name)) for name, own in norms if own)
        self.norms: dict[str, tuple[int, float | None]] = {
            name: (norm.num_features, norm.momentum) for name, norm in named if isinstance(norm, _BatchNorm)
        }
        self.statistic_count = sum(2 * width for width, _ in self.norms.values())
        self._body = Pullback(plan.body, names)
        self._spare = Spare()

    def terms(
        self, noisy: NoisyModel, batches: Sequence[tuple], server: Callable[[Request], Reply] | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Means over all samples: the terms [T, P], the batch statistics, and the number of samples.

        Raises:
            BatchMismatchError, StateMismatchError, ExchangeError, NonFiniteGradientError: what each says.
        """
        step = ClientRound(self, noisy, batches)
        for _ in batches:
            request = step.ask()
            if request is None:
                step.take(None)
            elif server is None:
                raise ExchangeError(
                    "cross-entropy with exchange='paper' asks the server once a batch; pass server=, a callable from "
                    "Request to Reply"
                )
            else:
                step.take(server(request))
        return step.done()

    def size(self, batch: tuple) -> int:
        if len(batch) != 2 or not all(isinstance(part, torch.Tensor) for part in batch):
            raise BatchMismatchError("a batch is a pair (inputs, targets) of tensors")
        if batch[0].dim() == 0 or not len(batch[0]) or len(batch[0]) != len(batch[1]):
            raise BatchMismatchError(f"inputs of shape {list(batch[0].shape)}, targets of {list(batch[1].shape)}")
        return len(batch[0])

    def split(self, flat: torch.Tensor, noisy: NoisyModel) -> list[torch.Tensor]:
        return list(flat.split([noisy.state[name].numel() for name in self.names]))

    def forward(self, noisy: NoisyModel, inputs: torch.Tensor, targets: torch.Tensor) -> Forward:
        """A forward pass on the noisy model."""
        plan = self.plan
        head = f"{plan.head}."
        if missing := [n for n in (*self.names, f"{head}weight") if n not in noisy.state]:
            raise StateMismatchError(f"the noisy model lacks {', '.join(missing[:5])}; it is of another architecture")
        state = {name: tensor.detach() for name, tensor in noisy.state.items()}
        state |= self._fresh_statistics(inputs.device, state)
        try:
            features, pull = self._body.forward(state, inputs.detach())
        except (RuntimeError, ValueError, TypeError) as error:
            raise BatchMismatchError(f"inputs {list(inputs.shape)} {inputs.dtype}: {error}") from error
        if features.shape != (len(inputs), plan.features):
            raise BatchMismatchError(
                f"the body gives {list(features.shape)} for inputs of shape {list(inputs.shape)}; the last layer takes "
                f"[{len(inputs)}, {plan.features}]"
            )
        logits = F.linear(features, state[f"{head}weight"], state.get(f"{head}bias"))
        alpha = features.new_ones(len(features))  # the bias is the weight of a feature that is 1
        if self.noise_on == "weights":
            alpha = features.sum(1) + plan.head_bias
        target = dense_targets(self.loss, targets, plan.outputs, len(inputs), logits.dtype)
        return Forward(state, features, pull, logits, alpha, target)

    def backward(
        self, noisy: NoisyModel, done: Forward, reply: Reply | None, secret: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The terms and the statistics of a batch. `secret` is the client's of the exchange that `reply` ends."""
        logits, size = done.logits, len(done.logits)
        q, a = self._cotangents(noisy, done, reply, secret)
        q, a = q.to(logits.dtype) / size, None if a is None else a.to(logits.dtype) / size
        terms = UpdateTerms(len(q), {name: done.state[name] for name in self.names}, self._spare)
        weight = done.state[f"{self.plan.head}.weight"]
        done.pull(head_terms(self.plan.head, done.features, weight, q, a, terms), terms)
        return terms.finish(), self._statistics(done.state, done.features)

    def _cotangents(
        self, noisy: NoisyModel, done: Forward, reply: Reply | None, secret: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, alpha, target = done.logits, done.alpha, done.target
        if self.exchange == "shift":
            return (torch.softmax(logits.double(), 1) - target)[None], None
        members = F.one_hot(noisy.partition).T.to(logits)
        additive = noisy.additive.to(logits)
        if self.loss == "mse" and self.noise_on == "bias":
            return torch.cat([(logits - target)[None], (members * additive)[:, None].expand(-1, *logits.shape)]), None
        if self.loss == "mse":
            return squared_terms(logits, alpha, target, additive, members)
        if reply is None or secret is None:
            raise ExchangeError("the server's reply is missing; ask it with the batch's request, and take its reply")
        y, helper = finish(reply, secret)
        if self.noise_on == "bias":
            return torch.cat([(y - target.double())[None], members.double()[:, None] * helper]), None
        return exchanged_terms(y, helper, target.double(), additive.double(), members.double())

    def _fresh_statistics(self, device: torch.device, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Zeros to run from: after one pass, a buffer is the batch's statistic times the momentum."""
        fresh: dict[str, torch.Tensor] = {}
        for name, (width, _) in self.norms.items():
            dtype = next(iter(state.values())).dtype
            for kind in ("running_mean", "running_var"):
                fresh[f"{name}.{kind}"] = torch.zeros(width, dtype=dtype, device=device)
            fresh[f"{name}.num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device=device)
        return fresh

    def _statistics(self, state: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        parts = [
            state[f"{name}.{kind}"] / (1.0 if momentum is None else momentum)
            for name, (_, momentum) in self.norms.items()
            for kind in ("running_mean", "running_var")
        ]
        return torch.cat(parts).to(like.dtype) if parts else like.new_empty(0)


class ClientRound:
    """A client's round in progress: for each batch a forward pass (`ask`) and its backward passes (`take`).

    Raises:
        BatchMismatchError: no batch, or something else.
    """

    def __init__(self, work: ClientWork, noisy: NoisyModel, batches: Sequence[tuple]):
        if not batches:
            raise BatchMismatchError("no batch was given")
        self.noisy, self._work = noisy, work
        self._sizes = [work.size(batch) for batch in batches]
        self._waiting = list(zip(self._sizes, batches, strict=True))
        self._running: tuple[Forward, torch.Tensor | None] | None = None
        self._total: torch.Tensor | None = None
        self._statistics: torch.Tensor | None = None

    def ask(self) -> Request | None:
        """The forward pass of the next batch, and in the paper's exchange what to ask the server.

        Raises:
            BatchMismatchError, StateMismatchError, NonFiniteGradientError: what each says.
        """
        done = self._work.forward(self.noisy, *self._waiting[0][1])
        if self._work.exchange != "paper":
            self._running = done, None
            return None
        if not bool(done.logits.isfinite().all() & done.alpha.isfinite().all()):
            raise NonFiniteGradientError("the noisy outputs are not finite; nothing was sent to the server")
        request, secret = ask(self.noisy.round, done.logits, done.alpha)
        self._running = done, secret
        return request

    def take(self, reply: Reply | None) -> None:
        """The backward passes of the batch, with the server's reply if it was asked.

        Raises:
            ExchangeError: a reply that does not fit.
        """
        if self._running is None:
            raise ExchangeError("no batch is running: ask() comes before take()")
        (done, secret), self._running = self._running, None
        rows, seen = self._work.backward(self.noisy, done, reply, secret)
        size, _ = self._waiting.pop(0)
        weight = size / sum(self._sizes)
        if self._total is None or self._statistics is None:
            alone = len(self._sizes) == 1
            self._total, self._statistics = (rows, seen) if alone else (rows.mul_(weight), seen * weight)
        else:
            self._total.add_(rows, alpha=weight)
            self._statistics = self._statistics + seen * weight

    def done(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """See `ClientWork.terms`.

        Raises:
            NonFiniteGradientError: names the gradients.
        """
        total, statistics = self._total, self._statistics
        if total is None or statistics is None:
            raise BatchMismatchError("no batch was taken yet")
        if not bool(total.sum().isfinite() & statistics.sum().isfinite()):
            parts = zip(self._work.names, self._work.split(total[0], self.noisy), strict=True)
            bad = [name for name, part in parts if not part.isfinite().all()]
            raise NonFiniteGradientError(
                f"the noisy gradient is not finite at {', '.join(bad[:5]) or 'its noise terms'}; check the batch for "
                f"NaN and the model for divergence"
            )
        return total, statistics, sum(self._sizes)


# The server's pass over the weights: Eqs. 6 and 13 in training, III-D for inference.


def check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> torch.dtype:
    """The dtype of the weights. Raises unless `state` has the model's names and shapes and finite real numbers.

    Raises:
        StateMismatchError: names and shapes that differ. NonFiniteGradientError: names the tensors.
    """
    if missing := [name for name in shapes if name not in state]:
        raise StateMismatchError(f"the state dict lacks {', '.join(missing[:5])}")
    if extra := [name for name in state if name not in shapes]:
        raise StateMismatchError(f"the state dict has {', '.join(extra[:5])}, which the model lacks")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise StateMismatchError(f"'{name}' has shape {list(state[name].shape)}; the model's is {list(shape)}")
    real = {name: tensor.detach() for name, tensor in state.items() if tensor.is_floating_point()}
    sums = [float(tensor.sum()) for tensor in real.values()]  # One pass; not finite if an entry is not, or on overflow.
    bad = [] if all(map(math.isfinite, sums)) else [n for n, tensor in real.items() if not tensor.isfinite().all()]
    if bad:
        raise NonFiniteGradientError(f"the state dict is not finite at {', '.join(bad[:5])}; the run has diverged")
    kinds = {tensor.dtype for tensor in real.values()}
    if len(kinds) != 1 or kinds - {torch.float32, torch.float64}:
        raise StateMismatchError(
            f"the weights are of {kinds or 'no real dtype'}; all float32 or all float64 is expected"
        )
    return kinds.pop()


def cut(flat: torch.Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Views of a flat vector [P] as tensors of these shapes, in their order."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def head_size(plan: Plan, state: Mapping[str, torch.Tensor], scales: torch.Tensor) -> float:
    """Root mean square of the last layer's scaled weights; 1 / n_{L-1} where they are all zero."""
    name = f"{plan.head}.weight"
    weight, scales = state[name].detach().clone(), scales.to(state[name])
    return (
        float(plan.channels.parameters[name].scale_(weight, scales, 1 / scales).square().mean().sqrt())
        or 1 / plan.features
    )


def perturbed_state(
    plan: Plan, state: Mapping[str, torch.Tensor], scales: torch.Tensor, shift: torch.Tensor, noise_on: str = "weights"
) -> dict[str, torch.Tensor]:
    """W^ = R o W, plus R^a in the last layer (Eqs. 6 and 13) of the shift r [n_L].

    R^a is added to the bias as well: the bias is the weight of a feature that is 1, so alpha = sum_j y^_j + 1. With the
    noise on the bias alone, alpha = 1.
    """
    out = plan.channels.scale(state, scales)
    for kind in ("weight", "bias"):
        name = f"{plan.head}.{kind}"
        if name in out and (kind == "bias" or noise_on == "weights"):
            out[name] += (shift[:, None] if out[name].dim() == 2 else shift).to(out[name])
    return out


def inference_copy(
    model: nn.Module, state: Mapping[str, torch.Tensor], noise: Noise, channels: int | None = None
) -> nn.Module:
    """A perturbed copy of `model` in eval mode: fresh scales, no additive noise (III-D)."""
    copied = copy.deepcopy(model).eval()
    plan = make_plan(copied, channels)
    dtype = state[f"{plan.head}.weight"].dtype
    scales = draw_scales(plan.channels.roots, plan.channels.count, noise, dtype)
    noisy = {name: tensor.detach().clone() for name, tensor in state.items()}
    noisy |= plan.channels.scale(state, scales)
    copied.to(dtype)
    copied.load_state_dict(noisy)
    return copied.requires_grad_(False)


# The server's side of a round's end: aggregate, remove the noise terms, undo R (III-C, Eqs. 28 and 29).


class Recovered(dict):
    """parameter name -> the true gradient of the weighted mean loss, in the model's dtype.

    Attributes:
        statistics: batch norm -> (mean, unbiased variance) of the batches, weighted by N_k / N. What enters such a norm
            has scale 1, so these are the true statistics.
    """

    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def split(
        cls,
        flat: torch.Tensor,
        statistics: torch.Tensor,
        shapes: Mapping[str, torch.Size],
        norms: Mapping[str, tuple[int, float | None]],
    ) -> Recovered:
        """Cut the flat vectors into tensors.

        Raises:
            NonFiniteGradientError: names the gradients that hold NaN or infinity.
        """
        found = cls(cut(flat, shapes))
        if not _finite(flat):
            bad = [name for name, gradient in found.items() if not gradient.isfinite().all()]
            raise NonFiniteGradientError(f"the recovered gradient is not finite at {', '.join(bad[:5])}")
        widths = [width for width, _ in norms.values() for _ in range(2)]
        pieces = iter(statistics.split(widths) if widths else ())
        found.statistics = {name: (next(pieces), next(pieces)) for name in norms}
        return found


def aggregate(
    key: Key,
    updates: Sequence[Update],
    weights: Sequence[float],
    openings: Sequence[MaskOpening],
    factors: torch.Tensor,
    counts: tuple[int, int],
    frac_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eqs. 28 and 29 but for R: sum_k N_k / N sum_t factors_t term_kt, flat [P], and the mean statistics.

    Floats are read once, a client at a time: no sum of a single term is kept. Masked updates already hold N_k / N and
    are summed in the ring first, exactly, for only the sum is free of masks.

    Args:
        factors: what each term is multiplied by, float64 [T]; see `coefficients`.
        counts: P, and how many statistics.

    Raises:
        StaleKeyError, StateMismatchError, WeightError, MaskError, DroppedClientError, NonFiniteGradientError:
            what each says.
    """
    shares = _check(key, updates, weights, (len(factors), counts[0]), counts[1])
    if updates[0].masked:
        return _unmasked_sum(updates, openings, shares, factors, frac_bits)
    if openings:
        raise MaskError("openings were given for updates without masks")
    total = updates[0].terms.new_zeros(counts[0])
    statistics = torch.zeros_like(updates[0].statistics)
    for share, update in zip(shares, updates, strict=True):
        total.addmv_(update.terms.T, (share * factors).to(total))
        statistics.add_(update.statistics, alpha=share)
    if not (_finite(total) and _finite(statistics)):
        for place, update in enumerate(updates):
            if not (update.terms.isfinite().all() and update.statistics.isfinite().all()):
                raise NonFiniteGradientError(f"update {place} holds NaN or infinity")
    return total, statistics


def _unmasked_sum(
    updates: Sequence[Update],
    openings: Sequence[MaskOpening],
    shares: Sequence[float],
    factors: torch.Tensor,
    frac_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_cohort(updates, openings)
    present = math.fsum(update.share for update in updates)
    for share, update in zip(shares, updates, strict=True):
        if not math.isclose(update.share / present, share, rel_tol=1e-9):
            raise WeightError(
                f"client {update.client} masked its update for a share of {update.share:.6g}, but its weight makes "
                f"{share * present:.6g}; the weights have to be those announced with the round"
            )
    trained, scale, streams = updates[0].terms.shape[1], 2.0**-frac_bits / present, left_over(openings)
    real, statistics = np.zeros(trained), np.zeros(len(updates[0].statistics))
    for term, factor in enumerate(factors.tolist()):
        add_sum(real, [update.terms[term].numpy() for update in updates], streams, factor * scale)
    add_sum(statistics, [update.statistics.numpy() for update in updates], streams, scale)
    return torch.from_numpy(real), torch.from_numpy(statistics)


def _check(
    key: Key, updates: Sequence[Update], weights: Sequence[float], shape: tuple[int, int], statistic_count: int
) -> list[float]:
    if not updates:
        raise DroppedClientError("no client sent an update")
    if len(updates) != len(weights):
        raise WeightError(f"{len(updates)} updates and {len(weights)} weights; one weight N_k a client is expected")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise WeightError(f"a weight N_k is a positive number, got {weight}")
    for place, update in enumerate(updates):
        if update.round != key.round:
            raise StaleKeyError(f"update {place} was made on another round's noisy model; it has to be made again")
        if update.terms.shape != shape or update.statistics.shape != (statistic_count,):
            raise StateMismatchError(
                f"update {place} has terms {list(update.terms.shape)} and {len(update.statistics)} statistics; this "
                f"scheme takes {list(shape)} and {statistic_count}"
            )
        if update.masked != updates[0].masked:
            raise MaskError("some updates are masked and some are not; all or none have to be")
        if update.masked != (update.terms.dtype == torch.int64):
            raise StateMismatchError(f"update {place} is of {update.terms.dtype}, which does not fit its masks")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _finite(values: torch.Tensor) -> bool:
    """Whether every entry is finite; the sum tells in one pass but where it overflows itself."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _check_cohort(updates: Sequence[Update], openings: Sequence[MaskOpening]) -> None:
    """Every mask has to cancel or be opened."""
    first = updates[0]
    present = [update.client for update in updates]
    if len(set(present)) != len(present) or any(u.cohort != first.cohort or u.double != first.double for u in updates):
        raise MaskError(f"updates of clients {present} do not form one cohort {list(first.cohort)}, each once")
    dropped = {client for client in first.cohort if client not in present}
    if not first.double:
        if openings:
            raise MaskError("openings were given for masks that were made without double=True")
        if dropped:
            raise DroppedClientError(
                f"clients {sorted(dropped)} sent nothing, so the others' masks do not cancel; redo the round without "
                f"them, with a new noisy model and new batches, or use double masks"
            )
        return
    expected = {u.client: dropped.intersection(first.cohort if u.peers is None else u.peers) for u in updates}
    opened = sorted(opening.client for opening in openings)
    there = sorted(client for client in present if client is not None)
    if opened != there or any(set(o.pairs) != expected[o.client] or o.round != first.round for o in openings):
        raise DroppedClientError(
            f"double masks need this round's opening of each of the clients {there} with the dropped "
            f"{sorted(dropped)} that it shared a mask with; got openings of {opened}"
        )


def coefficients(key: Key, loss: str, exchange: str | None, noise_on: str = "weights") -> torch.Tensor:
    """What each term is multiplied by, float64 [T]: 1, then -gamma_s and v (Eq. 29), or -gamma_s, gamma_s xi_s and
    -xi_s (the cross-entropy form, whose printed bracket has the wrong sign at xi_s gamma_s; its second line is right).
    With the noise on the bias alone, what goes with the gradient of alpha is zero: 1, then -gamma_s or -xi_s.
    """
    one = torch.ones(1, dtype=torch.float64)
    if noise_on == "bias":
        return torch.cat([one, -key.gamma if loss == "mse" else -key.xi])
    if loss == "mse":
        return torch.cat([one, -key.gamma, torch.tensor([key.energy], dtype=torch.float64)])
    if exchange == "shift":
        return one
    return torch.cat([one, -key.gamma, key.gamma * key.xi, -key.xi])


def statistics_state(
    norms: Mapping[str, tuple[int, float | None]], state: Mapping[str, torch.Tensor], recovered: Recovered
) -> dict[str, torch.Tensor]:
    """The running statistics after this round: (1 - momentum) old + momentum new, as nn.BatchNorm has it."""
    out: dict[str, torch.Tensor] = {}
    for name, (_, momentum) in norms.items():
        count = state[f"{name}.num_batches_tracked"] + 1
        factor = 1.0 / float(count) if momentum is None else momentum
        for kind, new in zip(("running_mean", "running_var"), recovered.statistics[name], strict=True):
            old = state[f"{name}.{kind}"]
            out[f"{name}.{kind}"] = (1 - factor) * old + factor * new.to(old)
        out[f"{name}.num_batches_tracked"] = count
    return out


Batch = tuple[torch.Tensor, torch.Tensor]


class Scheme:
    """Perturbed-model federated learning of one architecture. Server and clients make one each from the same model.

    Args:
        model: an nn.Module of positively homogeneous layers that ends in nn.Linear. Its weights are not used, only its
            structure and, for each batch norm and dropout, whether it is in training mode *now*.
        loss: "cross_entropy", or "mse", the paper's sum_i (y_i - target_i)^2 / 2; the mean over samples of either.
        partitions: m of Lemma 7, 1 .. n_L: how many independent gamma there are.
        exchange: for cross-entropy only. "shift" puts the same noise on every logit of a sample; softmax does not
            change, so the noisy gradient needs no correction (m = 1 only). "paper" is Lemmas 4 and 5 with one more
            exchange with the server. None means "shift" for m = 1, where the paper's exchange shows the client no less
            and the server far more (see `exchange`), and "paper" for m > 1.
        noise_on: "weights", the paper's: the last layer's weights and bias take the additive noise. "bias": its bias
            alone. That hides less (docs/perturbation.md) and takes m + 1 terms in place of m + 2 or 3m + 1.
        noise: how large the noise is. frac_bits: fraction bits under client masks. channels: width of the input's
            dimension 1, for a model that concatenates its input before a layer tells that.

    Raises:
        NotPerturbableError: a layer cannot carry a scale; names it. ValueError: an unknown loss, exchange or m.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str = "cross_entropy",
        partitions: int = 1,
        *,
        exchange: str | None = None,
        noise_on: str = "weights",
        noise: Noise | None = None,
        frac_bits: int = FRAC_BITS,
        channels: int | None = None,
    ):
        if loss not in LOSSES:
            raise NotPerturbableError(f"loss {loss!r} is not known; there are {', '.join(LOSSES)}")
        plan = make_plan(model, channels)
        if isinstance(partitions, bool) or not isinstance(partitions, int) or not 1 <= partitions <= plan.outputs:
            raise StateMismatchError(f"partitions (m) is a number from 1 to n_L = {plan.outputs}, got {partitions!r}")
        if exchange not in (None, *EXCHANGES):
            raise NotPerturbableError(f"exchange {exchange!r} is not known; there are {', '.join(EXCHANGES)}")
        exchange = exchange_of(loss, partitions, exchange)
        if exchange == "shift" and partitions > 1:
            raise StateMismatchError("the shift exchange has one noise for all classes; use partitions=1 or 'paper'")
        if noise_on not in PLACES:
            raise NotPerturbableError(f"noise on {noise_on!r} is not known; there are {', '.join(PLACES)}")
        if noise_on == "bias" and not plan.head_bias:
            raise NotPerturbableError(
                f"'{plan.head}' has no bias to take the noise; give it one, or noise_on='weights'"
            )
        if noise_on == "bias" and exchange == "shift":
            raise StateMismatchError(
                "the shift exchange has one term already, and hides less with the noise on the bias"
            )
        if not 1 <= frac_bits <= 60:
            raise StateMismatchError(f"frac_bits is a number from 1 to 60, got {frac_bits}")
        self.plan = plan
        self.loss = loss
        self.exchange, self.partitions, self.noise_on = exchange, partitions, noise_on
        self.noise = noise or Noise()
        self.frac_bits = frac_bits
        self._model, self._channels = model, channels
        self._round = os.urandom(ROUND_BYTES)
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._shapes = {name: p.shape for name, p in model.state_dict(keep_vars=True).items()}
        self._trained = {name: self._shapes[name] for name in self._names}
        self._client = ClientWork(plan, self._names, self.loss, self.exchange, noise_on, model)

    @property
    def term_count(self) -> int:
        """T: the noisy gradient and the noise terms; 1, m + 2 or 3m + 1, or m + 1 with the noise on the bias."""
        if self.noise_on == "bias":
            return self.partitions + 1
        if self.loss == "mse":
            return self.partitions + 2
        return 1 if self.exchange == "shift" else 3 * self.partitions + 1

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The plain loss whose gradient is recovered: what FedAvg would compute on [N, n_L] outputs. A scalar."""
        return loss_of(self.loss, outputs, targets)

    # --- server ---------------------------------------------------------------------------------------------------

    def perturb(self, state_dict: Mapping[str, torch.Tensor]) -> tuple[NoisyModel, Key]:
        """One round's noisy model, for every client alike, and its key (III-A). Fresh noise every time; one pass over
        the weights.

        Clients learn what docs/perturbation.md lists: signs, zeros, ratios inside a row behind the first layer's input,
        and more. Bytes: those of the model, and n_L float64.

        Raises:
            StateMismatchError: names or shapes that are not the model's. NonFiniteGradientError: NaN in the weights.
            NoiseError: the noise is not positive.
        """
        dtype = check_state(state_dict, self._shapes)
        plan = self.plan
        common = self.exchange == "shift"
        scales = draw_scales(plan.channels.roots, plan.channels.count, self.noise, dtype)
        size = head_size(plan, state_dict, scales)
        if self.noise_on == "bias":  # It stands beside logits then, which are as large as a row's length.
            size *= plan.features**0.5
        gamma, xi, additive = draw_additive(plan.outputs, self.partitions, size, self.noise.size(dtype), common)
        check_noise(scales, gamma, xi, additive)
        partition = random_partition(plan.outputs, self.partitions)
        self._round = following(self._round)
        key = Key(self._round, dtype, scales, gamma, xi, additive, partition)
        state = perturbed_state(plan, state_dict, scales, key.shift, self.noise_on)
        public = torch.ones_like(additive) if common else additive  # the shift exchange has no use for r_a
        return NoisyModel(state, public, partition, key.round, self.frac_bits), key

    def blank(self) -> NoisyModel:
        """The shapes of every round's noisy model, which everybody knows."""
        found = self.plan.channels
        state = found.scale(self._model.state_dict(), torch.ones(found.count, dtype=torch.float64))
        shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
        additive = torch.empty(self.plan.outputs, dtype=torch.float64, device="meta")
        return NoisyModel(shapes, additive, additive.to(torch.int64), bytes(16), self.frac_bits)

    def answer(self, key: Key, request: Request) -> Reply:
        """The server's part of the paper's cross-entropy exchange (Eq. 23). The server learns every sample's true
        prediction and alpha from the request, and the client the prediction from the reply: see `exchange`.

        Raises:
            StaleKeyError: the request belongs to another round. ExchangeError: see `exchange.answer`.
        """
        if request.round != key.round:
            raise StaleKeyError("the request was made for another round's noisy model; fetch the current one")
        return answer(key, request)

    def recover(
        self,
        key: Key,
        updates: Sequence[Update],
        weights: Sequence[float],
        openings: Sequence[MaskOpening] = (),
    ) -> Recovered:
        """The true gradient of the weighted mean loss, sum_k N_k/N grad F_k (Eq. 29 and its cross-entropy form).

        Args:
            updates: one a client. weights: N_k, in the same order. openings: of every survivor, if masks are double.

        Returns:
            parameter name -> gradient, with the batch norms' averaged statistics in `.statistics`.

        Numeric error: rounding of float32 or float64 times the size of the noise terms over that of the gradient; under
        masks also at most K 2^-(frac_bits + 1) times the sum of the coefficients. The server learns the weighted mean
        gradient, and each client's own if the updates are unmasked.

        Raises:
            StaleKeyError, StateMismatchError, WeightError, MaskError, DroppedClientError, NonFiniteGradientError:
                what each says; nothing is changed by a failed call.
        """
        factors = coefficients(key, self.loss, self.exchange, self.noise_on)
        total, statistics = aggregate(key, updates, weights, openings, factors, self.counts[1:], self.frac_bits)
        self._times_ratios(key, total)
        return Recovered.split(total.to(key.dtype), statistics, self._trained, self._client.norms)

    def ratios(self, key: Key) -> torch.Tensor:
        """R of all trainable parameters in the model's order, flat, float64 [P]: what the server knows beside R^a."""
        return self._times_ratios(key, torch.ones(sum(s.numel() for s in self._trained.values()), dtype=torch.float64))

    def _times_ratios(self, key: Key, flat: torch.Tensor) -> torch.Tensor:
        scales = key.scales.to(flat)
        inverses = 1 / scales
        for name, part in cut(flat, self._trained).items():
            self.plan.channels.parameters[name].scale_(part, scales, inverses)
        return flat

    def update_statistics(
        self, state_dict: Mapping[str, torch.Tensor], recovered: Recovered
    ) -> dict[str, torch.Tensor]:
        """The batch norms' next running means, variances and counts: what plain training on the joint weights gives
        when the clients' running statistics are averaged by N_k / N. Only names that change."""
        return statistics_state(self._client.norms, state_dict, recovered)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, recovered: Recovered) -> None:
        """Give the recovered gradient to a torch optimiser (momentum and weight decay act at the server, on the true
        weights), and the statistics to the model's batch norms."""
        parameters = dict(model.named_parameters())
        wrong = [n for n, g in recovered.items() if n not in parameters or parameters[n].shape != g.shape]
        if wrong:
            raise StateMismatchError(f"the gradient does not fit the model at {', '.join(wrong[:5])}")
        buffers = dict(model.named_buffers())
        changed = self.update_statistics(buffers, recovered)
        for name, gradient in recovered.items():
            parameters[name].grad = gradient.to(parameters[name])
        optimizer.step()
        for name, value in changed.items():
            buffers[name].copy_(value)

    def inference_model(self, state_dict: Mapping[str, torch.Tensor]) -> nn.Module:
        """A module in eval mode with perturbed weights that gives the true outputs (III-D): channel scales, but no
        additive noise. Batch norms pass their scales on through their running statistics.

        Raises:
            StateMismatchError, NonFiniteGradientError: as `perturb`.
        """
        check_state(state_dict, self._shapes)
        return inference_copy(self._model, state_dict, self.noise, self._channels)

    # --- client ---------------------------------------------------------------------------------------------------

    def client_step(
        self,
        noisy: NoisyModel,
        batch: Batch | list[Batch],
        *,
        masks: ClientMasks | None = None,
        share: float = 1.0,
        server: Callable[[Request], Reply] | None = None,
    ) -> Update:
        """A client's work in a round: one forward pass, and one backward pass a term (III-B).

        Args:
            batch: (inputs [B, ...], targets); targets are class numbers [B] or probabilities [B, n_L] for
                cross-entropy, and [B, n_L] for mse. A list of batches gives the mean over all their samples at the
                same weights (a noisy model cannot be stepped locally: its gradient is the noisy one).
            masks: the client's pairwise masks; without them the server sees this client's gradient.
            share: N_k / N, needed with masks.
            server: where to send the paper's exchange.

        Bytes: T P numbers of the model's dtype, or of 8 bytes under masks; T is `term_count`.

        Raises:
            BatchMismatchError, StateMismatchError, NonFiniteGradientError, ExchangeError, MaskError: what each says.
            WeightError, FixedPointRangeError: a share or a term that masks cannot carry.
                In all cases nothing was sent, and no mask was used.
        """
        found = self._client.terms(noisy, batches_of(batch), server)
        return self.update(noisy, *found, masks=masks, share=share)

    def begin(self, noisy: NoisyModel, batch: Batch | list[Batch]) -> ClientRound:
        """`client_step` before its messages: ask, take the reply, and so on; `update` ends it."""
        return ClientRound(self._client, noisy, batches_of(batch))

    def sizes(self, batch: Batch | list[Batch]) -> list[int]:
        """The number of samples of each of a client's batches, which are public.

        Raises:
            BatchMismatchError: something else than batches.
        """
        return [self._client.size(one) for one in batches_of(batch)]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._model.parameters()).device

    @property
    def counts(self) -> tuple[int, int, int]:
        """T, P and the number of statistics: an update is of T P + statistics numbers."""
        trained = sum(shape.numel() for shape in self._trained.values())
        return self.term_count, trained, self._client.statistic_count

    def update(
        self,
        noisy: NoisyModel,
        terms: torch.Tensor,
        statistics: torch.Tensor,
        samples: int,
        *,
        masks: ClientMasks | None = None,
        share: float = 1.0,
    ) -> Update:
        """What a client sends of its terms: see `client_step`."""
        if masks is None:
            return Update(noisy.round, terms, statistics, samples)
        if not 0 < share <= 1:
            raise WeightError(f"a masked update needs share = N_k / N in (0, 1], got {share}")
        parts = (terms.reshape(-1), statistics)
        for part in parts:
            check_range(part, noisy.frac_bits, 2.0 ** (HEADROOM_BITS - noisy.frac_bits))  # the shares sum to one
        masked = masks.words(noisy.round, terms.numel() + len(statistics)).split([terms.numel(), len(statistics)])
        for words, part in zip(masked, parts, strict=True):
            add_encoded(words, part, share, noisy.frac_bits)
        rows = masked[0].view(terms.shape)
        return Update(
            noisy.round, rows, masked[1], samples, share, masks.client, masks.cohort, masks.double, masks.peers
        )

    def prepare(self, noisy: NoisyModel, masks: ClientMasks) -> None:
        """Draw a client's mask of the round after this model's, while it waits for the next. Only time changes.

        Raises:
            MaskError: the masks have not joined a cohort, or masked that round already.
        """
        terms, trained, statistics = self.counts
        masks.prepare(following(noisy.round), terms * trained + statistics)


def batches_of(batch: Batch | list[Batch]) -> list[Batch]:
    """One batch, or several, as a list."""
    return [batch] if isinstance(batch, tuple) else list(batch)
