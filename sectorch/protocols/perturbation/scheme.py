"""`Scheme`: what server and clients compute in a round, checked, for any transport of their messages.

`algorithm.py` is the arithmetic. Source: Feng, Yang, Fang, Xia, Tang, Shao, Xiong, "A Practical Privacy-preserving
Method in Federated Deep Learning", section III. docs/perturbation.md says what it hides, and what it does not.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
)  # fmt: skip
from . import algorithm
from .algorithm import Key
from .errors import (
    BatchMismatchError,
    ExchangeError,
    NoiseError,
    NonFiniteGradientError,
    NotPerturbableError,
    StaleKeyError,
    StateMismatchError,
    WeightError,
)
from .messages import ROUND_BYTES, NoisyModel, Reply, Request, Update
from .settings import EXCHANGES, LOSSES, PLACES, Noise, exchange_of

if TYPE_CHECKING:  # it needs the accounting's packages
    from ...dp import GaussianShares

Batch = tuple[torch.Tensor, torch.Tensor]


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


# A client's round: for each batch a forward pass, and one backward pass for all terms together.


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


def batches_of(batch: Batch | list[Batch]) -> list[Batch]:
    """A client's batches as a list.

    Raises:
        BatchMismatchError: no batch, or something else than pairs of as many inputs as targets.
    """
    found = [batch] if isinstance(batch, tuple) else list(batch)
    if not found:
        raise BatchMismatchError("no batch was given")
    for one in found:
        if len(one) != 2 or not all(isinstance(part, torch.Tensor) for part in one):
            raise BatchMismatchError("a batch is a pair (inputs, targets) of tensors")
        if one[0].dim() == 0 or not len(one[0]) or len(one[0]) != len(one[1]):
            raise BatchMismatchError(f"inputs of shape {list(one[0].shape)}, targets of {list(one[1].shape)}")
    return found


class ClientRound:
    """A client's round in progress: for each batch a forward pass (`ask`) and its backward passes (`take`).

    Raises:
        BatchMismatchError: no batch, or something else.
    """

    def __init__(self, scheme: Scheme, noisy: NoisyModel, batch: Batch | list[Batch], share: float = 1.0):
        self.noisy, self._scheme, self._share = noisy, scheme, share
        self._waiting = batches_of(batch)
        self._samples = sum(len(inputs) for inputs, _ in self._waiting)
        self._alone = len(self._waiting) == 1
        self._backward: Callable[[Reply | None], tuple[torch.Tensor, torch.Tensor]] | None = None
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def ask(self) -> Request | None:
        """The forward pass of the next batch, and in the paper's exchange what to ask the server.

        Raises:
            BatchMismatchError, StateMismatchError, NonFiniteGradientError: what each says.
        """
        scheme, plan, noisy, (inputs, targets) = self._scheme, self._scheme.plan, self.noisy, self._waiting[0]
        names = (f"{plan.head}.weight", f"{plan.head}.bias")
        if missing := [n for n in (*scheme.trained, names[0]) if n not in noisy.state]:
            raise StateMismatchError(f"the noisy model lacks {', '.join(missing[:5])}; it is of another architecture")
        state = {name: tensor.detach() for name, tensor in noisy.state.items()}
        state |= self._fresh_statistics(inputs.device, next(iter(state.values())).dtype)
        try:
            features, pull = scheme.body.forward(state, inputs.detach())
        except (RuntimeError, ValueError, TypeError) as error:
            raise BatchMismatchError(f"inputs {list(inputs.shape)} {inputs.dtype}: {error}") from error
        if features.shape != (len(inputs), plan.features):
            raise BatchMismatchError(
                f"the body gives {list(features.shape)} for inputs of shape {list(inputs.shape)}; the last layer takes "
                f"[{len(inputs)}, {plan.features}]"
            )
        y, alpha = algorithm.outputs(features, state[names[0]], state.get(names[1]), scheme.noise_on)
        target = dense_targets(scheme.loss, targets, plan.outputs, len(inputs), y.dtype)
        request = secret = None
        if scheme.exchange == "paper":
            if not bool(y.isfinite().all() & alpha.isfinite().all()):
                raise NonFiniteGradientError("the noisy outputs are not finite; nothing was sent to the server")
            *asked, secret = algorithm.ask(y, alpha)
            request = Request(noisy.round, *asked)

        def backward(reply: Reply | None) -> tuple[torch.Tensor, torch.Tensor]:
            q, a = self._cotangents(y, alpha, target, reply, secret)
            q, a = q.to(y.dtype) / len(y), None if a is None else a.to(y.dtype) / len(y)
            terms = UpdateTerms(len(q), {name: state[name] for name in scheme.trained}, scheme.spare)
            terms.product(names[0], q, features)  # the head in closed form: y^ = h W^T + b, alpha = sum h + 1
            terms.put(names[1], q.sum(1))
            back = q @ state[names[0]]
            pull(back if a is None else back.add_(a[:, :, None]), terms)
            return terms.finish(), self._batch_statistics(state, features)

        self._backward = backward
        return request

    def take(self, reply: Reply | None) -> None:
        """The backward passes of the batch, with the server's reply if it was asked.

        Raises:
            ExchangeError: a reply that does not fit.
        """
        if (backward := self._backward) is None:
            raise ExchangeError("no batch is running: ask() comes before take()")
        self._backward = None
        rows, seen = backward(reply)
        weight = len(self._waiting.pop(0)[0]) / self._samples
        if self._scheme.private is not None:  # what this batch adds to the sum is bounded
            rows = self._scheme.private.clipped(rows.double() * (weight * self._share)) / (weight * self._share)
        if self._sums is None:
            self._sums = (rows, seen) if self._alone else (rows.mul_(weight), seen * weight)
        else:
            self._sums = self._sums[0].add_(rows, alpha=weight), self._sums[1] + seen * weight

    def done(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Means over all samples: the terms [T, P], the batch statistics, and the number of samples.

        Raises:
            NonFiniteGradientError: names the gradients.
        """
        if self._sums is None:
            raise BatchMismatchError("no batch was taken yet")
        total, statistics = self._sums
        if not bool(total.sum().isfinite() & statistics.sum().isfinite()):
            bad = [name for name, part in cut(total[0], self._scheme.trained).items() if not part.isfinite().all()]
            raise NonFiniteGradientError(
                f"the noisy gradient is not finite at {', '.join(bad[:5]) or 'its noise terms'}; check the batch for "
                f"NaN and the model for divergence"
            )
        return total, statistics, self._samples

    def _cotangents(
        self, y: torch.Tensor, alpha: torch.Tensor, target: torch.Tensor, reply: Reply | None,
        secret: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """q and a of every term (Lemmas 3 and 5); a is None where no term has a part of alpha's gradient."""
        loss, bias = self._scheme.loss, self._scheme.noise_on == "bias"
        if self._scheme.exchange == "shift":  # sum_i (p_i - t_i) = 0: the noise terms vanish
            return (torch.softmax(y.double(), 1) - target)[None], None
        members, additive = F.one_hot(self.noisy.partition).T.to(y), self.noisy.additive.to(y)
        if loss == "mse" and bias:
            return torch.cat([(y - target)[None], (members * additive)[:, None].expand(-1, *y.shape)]), None
        if loss == "mse":
            return algorithm.squared_terms(y, alpha, target, additive, members)
        if reply is None or secret is None:
            raise ExchangeError("the server's reply is missing; ask it with the batch's request, and take its reply")
        star, tilde = algorithm.finish(reply.log_total, reply.log_mask, reply.factor, secret)
        target, members = target.double(), members.double()
        if bias:
            return torch.cat([(star - target)[None], members[:, None] * tilde]), None
        return algorithm.exchanged_terms(star, tilde, target, additive.double(), members)

    def _fresh_statistics(self, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Zeros to run from: after one pass, a buffer is the batch's statistic times the momentum."""
        fresh: dict[str, torch.Tensor] = {}
        for name, (width, _) in self._scheme.norms.items():
            for kind in ("running_mean", "running_var"):
                fresh[f"{name}.{kind}"] = torch.zeros(width, dtype=dtype, device=device)
            fresh[f"{name}.num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device=device)
        return fresh

    def _batch_statistics(self, state: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        parts = [
            state[f"{name}.{kind}"] / (1.0 if momentum is None else momentum)
            for name, (_, momentum) in self._scheme.norms.items()
            for kind in ("running_mean", "running_var")
        ]
        return torch.cat(parts).to(like.dtype) if parts else like.new_empty(0)


# The server's checks of what it is given, and the sums of Eq. 28.


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


class Recovered(dict):
    """parameter name -> the true gradient of the weighted mean loss, in the model's dtype.

    Attributes:
        statistics: batch norm -> (mean, unbiased variance) of the batches, weighted by N_k / N. What enters such a norm
            has scale 1, so these are the true statistics.
    """

    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]]


def aggregate(
    key: Key, updates: Sequence[Update], weights: Sequence[float], openings: Sequence[MaskOpening],
    factors: torch.Tensor, counts: tuple[int, int], frac_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
    updates: Sequence[Update], openings: Sequence[MaskOpening], shares: Sequence[float], factors: torch.Tensor,
    frac_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
        private: differential privacy of the sum: what each batch adds to it is clipped, and each client adds its share
            of Gaussian noise under the masks. Takes the place of `frac_bits`; by the shift exchange only.

    Attributes:
        trained: the shapes of the parameters that train, in the model's order.
        norms: batch norms that use the batch's statistics, with their width and momentum.

    Raises:
        NotPerturbableError: a layer cannot carry a scale; names it. ValueError: an unknown loss, exchange or m.
    """

    def __init__(
        self, model: nn.Module, loss: str = "cross_entropy", partitions: int = 1, *, exchange: str | None = None,
        noise_on: str = "weights", noise: Noise | None = None, frac_bits: int = FRAC_BITS, channels: int | None = None,
        private: GaussianShares | None = None,
    ):  # fmt: skip
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
        self.frac_bits = frac_bits if private is None else private.frac_bits
        self._model, self._width = model, channels
        self._round = os.urandom(ROUND_BYTES)
        self._shapes = {name: p.shape for name, p in model.state_dict(keep_vars=True).items()}
        self.trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        self.body, self.spare = Pullback(plan.body, list(self.trained)), Spare()
        own = ((name, model.get_submodule(name)) for name, own in plan.channels.batch_norms.items() if own)
        self.norms = {name: (norm.num_features, norm.momentum) for name, norm in own if isinstance(norm, _BatchNorm)}
        self.private = private
        if private is not None and (exchange != "shift" or self.norms):
            more = f"its batches' statistics for '{next(iter(self.norms))}'" if self.norms else "other terms"
            raise NoiseError(
                f"the noise covers a client's gradient, and this scheme also sends {more}; a private sum takes "
                f"loss='cross_entropy' with exchange='shift', and norms in eval mode"
            )

    @property
    def term_count(self) -> int:
        """T: the noisy gradient and the noise terms; 1, m + 2 or 3m + 1, or m + 1 with the noise on the bias."""
        if self.noise_on == "bias":
            return self.partitions + 1
        if self.loss == "mse":
            return self.partitions + 2
        return 1 if self.exchange == "shift" else 3 * self.partitions + 1

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The plain loss whose gradient is recovered, as FedAvg would compute it: the mean over the N samples of the
        cross-entropy, or of sum_i (y_i - target_i)^2 / 2. A scalar."""
        if self.loss == "mse":
            return (outputs - targets).square().sum() / (2 * len(outputs))
        return F.cross_entropy(outputs, targets)

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
        dtype, plan, common = check_state(state_dict, self._shapes), self.plan, self.exchange == "shift"
        scales = algorithm.draw_scales(plan.channels, self.noise, dtype)
        head = f"{plan.head}.weight"
        weight = state_dict[head].detach().clone()
        algorithm.times_ratios(plan.channels, scales, {head: weight})
        size = float(weight.square().mean().sqrt()) or 1 / plan.features
        if self.noise_on == "bias":  # It stands beside logits then, which are as large as a row's length.
            size *= plan.features**0.5
        drawn = algorithm.draw_additive(plan.outputs, self.partitions, size, self.noise.size(dtype), common)
        check_noise(scales, *drawn[:3])
        self._round = following(self._round)
        key = Key(self._round, dtype, scales, *drawn)
        state = algorithm.perturb(plan.channels, plan.head, state_dict, key, self.noise_on)
        public = torch.ones_like(key.additive) if common else key.additive  # the shift exchange has no use for r_a
        return NoisyModel(state, public, key.partition, key.round, self.frac_bits), key

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
            StaleKeyError: the request belongs to another round. ExchangeError: shapes that do
                not fit, or numbers that are not finite.
        """
        if request.round != key.round:
            raise StaleKeyError("the request was made for another round's noisy model; fetch the current one")
        log_mu, alpha, count = request.log_mu, request.alpha, self.plan.outputs
        if log_mu.shape != (len(alpha), count, count) or alpha.dim() != 1:
            raise ExchangeError(
                f"a request of {len(alpha)} samples holds [{len(alpha)}, {count}, {count}] ratios, got "
                f"{list(log_mu.shape)}"
            )
        if not (alpha.isfinite().all() and log_mu.isfinite().all()):
            raise ExchangeError("the request holds numbers that are not finite")
        return Reply(key.round, *algorithm.answer(key, log_mu, alpha))

    def recover(
        self, key: Key, updates: Sequence[Update], weights: Sequence[float], openings: Sequence[MaskOpening] = (),
    ) -> Recovered:  # fmt: skip
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
        factors = algorithm.coefficients(key, self.loss, self.exchange, self.noise_on)
        total, statistics = aggregate(key, updates, weights, openings, factors, self.counts[1:], self.frac_bits)
        algorithm.times_ratios(self.plan.channels, key.scales, cut(total, self.trained))
        found = Recovered(cut(flat := total.to(key.dtype), self.trained))
        if not _finite(flat):
            bad = [name for name, gradient in found.items() if not gradient.isfinite().all()]
            raise NonFiniteGradientError(f"the recovered gradient is not finite at {', '.join(bad[:5])}")
        widths = [width for width, _ in self.norms.values() for _ in range(2)]
        pieces = iter(statistics.split(widths) if widths else ())
        found.statistics = {name: (next(pieces), next(pieces)) for name in self.norms}
        return found

    def ratios(self, key: Key) -> torch.Tensor:
        """R of all trainable parameters in the model's order, flat, float64 [P]: what the server knows beside R^a."""
        flat = torch.ones(self.counts[1], dtype=torch.float64)
        algorithm.times_ratios(self.plan.channels, key.scales, cut(flat, self.trained))
        return flat

    def update_statistics(
        self, state_dict: Mapping[str, torch.Tensor], recovered: Recovered
    ) -> dict[str, torch.Tensor]:
        """The batch norms' next running means, variances and counts: what plain training on the joint weights gives
        when the clients' running statistics are averaged by N_k / N. Only names that change."""
        out: dict[str, torch.Tensor] = {}
        for name, (_, momentum) in self.norms.items():
            count = state_dict[f"{name}.num_batches_tracked"] + 1
            factor = 1.0 / float(count) if momentum is None else momentum
            for kind, new in zip(("running_mean", "running_var"), recovered.statistics[name], strict=True):
                old = state_dict[f"{name}.{kind}"]
                out[f"{name}.{kind}"] = (1 - factor) * old + factor * new.to(old)
            out[f"{name}.num_batches_tracked"] = count
        return out

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
        copied = copy.deepcopy(self._model).eval()
        plan, dtype = make_plan(copied, self._width), state_dict[f"{self.plan.head}.weight"].dtype
        noisy = {name: tensor.detach().clone() for name, tensor in state_dict.items()}
        noisy |= plan.channels.scale(state_dict, algorithm.draw_scales(plan.channels, self.noise, dtype))
        copied.to(dtype).load_state_dict(noisy)
        return copied.requires_grad_(False)

    # --- client ---------------------------------------------------------------------------------------------------

    def client_step(
        self, noisy: NoisyModel, batch: Batch | list[Batch], *, masks: ClientMasks | None = None, share: float = 1.0,
        server: Callable[[Request], Reply] | None = None,
    ) -> Update:  # fmt: skip
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
        step = self.begin(noisy, batch, share)
        for _ in self.sizes(batch):
            request = step.ask()
            if request is not None and server is None:
                raise ExchangeError(
                    "cross-entropy with exchange='paper' asks the server once a batch; pass server=, a callable from "
                    "Request to Reply"
                )
            step.take(None if request is None or server is None else server(request))
        return self.update(noisy, *step.done(), masks=masks, share=share)

    def begin(self, noisy: NoisyModel, batch: Batch | list[Batch], share: float = 1.0) -> ClientRound:
        """`client_step` before its messages: ask, take the reply, and so on; `update` ends it."""
        return ClientRound(self, noisy, batch, share)

    def sizes(self, batch: Batch | list[Batch]) -> list[int]:
        """The number of samples of each of a client's batches, which are public.

        Raises:
            BatchMismatchError: something else than batches.
        """
        return [len(inputs) for inputs, _ in batches_of(batch)]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._model.parameters()).device

    @property
    def counts(self) -> tuple[int, int, int]:
        """T, P and the number of statistics: an update is of T P + statistics numbers."""
        trained = sum(shape.numel() for shape in self.trained.values())
        return self.term_count, trained, sum(2 * width for width, _ in self.norms.values())

    def update(
        self, noisy: NoisyModel, terms: torch.Tensor, statistics: torch.Tensor, samples: int, *,
        masks: ClientMasks | None = None, share: float = 1.0,
    ) -> Update:  # fmt: skip
        """What a client sends of its terms: see `client_step`."""
        if masks is None and self.private is None:
            return Update(noisy.round, terms, statistics, samples)
        if masks is None:
            raise MaskError("a private gradient is sent under masks: alone it has a part of the noise")
        if not 0 < share <= 1:
            raise WeightError(f"a masked update needs share = N_k / N in (0, 1], got {share}")
        parts = (terms.reshape(-1), statistics)
        for part in parts:
            check_range(part, noisy.frac_bits, 2.0 ** (HEADROOM_BITS - noisy.frac_bits))  # the shares sum to one
        encoded = None if self.private is None else self.private.noisy(parts[0] * share)
        words = masks.words(noisy.round, sum(map(len, parts)))
        masked = words.split([len(part) for part in parts])
        if encoded is not None:
            words.add_(encoded)
        else:
            for own, part in zip(masked, parts, strict=True):
                add_encoded(own, part, share, noisy.frac_bits)
        return Update(
            noisy.round, masked[0].view(terms.shape), masked[1], samples, share, masks.client, masks.cohort,
            masks.double, masks.peers,
        )  # fmt: skip

    def prepare(self, noisy: NoisyModel, masks: ClientMasks) -> None:
        """Draw a client's mask of the round after this model's, while it waits for the next. Only time changes.

        Raises:
            MaskError: the masks have not joined a cohort, or masked that round already.
        """
        terms, trained, statistics = self.counts
        masks.prepare(following(noisy.round), terms * trained + statistics)
