"""A client's forward and backward passes on a noisy model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from . import exchange as exchanging
from .errors import BatchMismatchError, ExchangeError, NonFiniteGradientError, StateMismatchError
from .losses import dense_targets
from .messages import NoisyModel, Reply, Request
from .plan import Plan
from .pullback import Pullback, Spare, Terms
from .terms import exchanged_terms, head_terms, squared_terms


class ClientWork:
    """Turns a noisy model and batches into the rows of an update. Holds no weights.

    Attributes:
        norms: batch norms that use the batch's statistics, with their width and momentum.
        statistic_count: how many numbers their means and variances are.
    """

    def __init__(self, plan: Plan, names: list[str], loss: str, exchange: str | None, model: nn.Module):
        self.plan, self.names, self.loss, self.exchange = plan, names, loss, exchange
        self.norms: dict[str, tuple[int, float | None]] = {
            name: ((norm := model.get_submodule(name)).num_features, norm.momentum)
            for name, own in plan.batch_norms.items()
            if own
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
        if not batches:
            raise BatchMismatchError("no batch was given")
        sizes = [self._size(batch) for batch in batches]
        total, statistics = None, None
        for size, batch in zip(sizes, batches, strict=True):
            rows, seen = self._batch(noisy, *batch, server)
            weight = size / sum(sizes)
            if total is None:
                total, statistics = (rows, seen) if len(batches) == 1 else (rows.mul_(weight), seen * weight)
            else:
                total, statistics = total.add_(rows, alpha=weight), statistics + seen * weight
        if not bool(total.sum().isfinite() & statistics.sum().isfinite()):
            bad = [n for n, g in zip(self.names, self._split(total[0], noisy), strict=True) if not g.isfinite().all()]
            raise NonFiniteGradientError(
                f"the noisy gradient is not finite at {', '.join(bad[:5]) or 'its noise terms'}; check the batch for "
                f"NaN and the model for divergence"
            )
        return total, statistics, sum(sizes)

    def _size(self, batch: tuple) -> int:
        if len(batch) != 2 or not all(isinstance(part, torch.Tensor) for part in batch):
            raise BatchMismatchError("a batch is a pair (inputs, targets) of tensors")
        if batch[0].dim() == 0 or not len(batch[0]) or len(batch[0]) != len(batch[1]):
            raise BatchMismatchError(f"inputs of shape {list(batch[0].shape)}, targets of {list(batch[1].shape)}")
        return len(batch[0])

    def _split(self, flat: torch.Tensor, noisy: NoisyModel) -> list[torch.Tensor]:
        return list(flat.split([noisy.state[name].numel() for name in self.names]))

    def _batch(
        self,
        noisy: NoisyModel,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        server: Callable[[Request], Reply] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        weight = state[f"{head}weight"]
        logits = F.linear(features, weight, state.get(f"{head}bias"))
        alpha = features.sum(1) + plan.head_bias  # the bias is the weight of a feature that is 1
        target = dense_targets(self.loss, targets, plan.outputs, len(inputs), logits.dtype)
        q, a = self._cotangents(noisy, logits, alpha, target, server)
        q, a = q.to(logits.dtype) / len(inputs), a.to(logits.dtype) / len(inputs)
        terms = Terms(len(q), {name: state[name] for name in self.names}, self._spare)
        pull(head_terms(plan.head, features, weight, q, a, terms), terms)
        return terms.finish(), self._statistics(state, features)

    def _cotangents(
        self,
        noisy: NoisyModel,
        logits: torch.Tensor,
        alpha: torch.Tensor,
        target: torch.Tensor,
        server: Callable[[Request], Reply] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.exchange == "shift":
            return (torch.softmax(logits.double(), 1) - target)[None], torch.zeros_like(alpha)[None]
        members = F.one_hot(noisy.partition).T.to(logits)
        additive = noisy.additive.to(logits)
        if self.loss == "mse":
            return squared_terms(logits, alpha, target, additive, members)
        if server is None:
            raise ExchangeError(
                "cross-entropy with exchange='paper' asks the server once a batch, and this noisy model came without a "
                "way to it; pass server=, a callable from Request to Reply"
            )
        if not bool(logits.isfinite().all() & alpha.isfinite().all()):
            raise NonFiniteGradientError("the noisy outputs are not finite; nothing was sent to the server")
        request, secret = exchanging.ask(noisy.round, logits, alpha)
        y, helper = exchanging.finish(server(request), secret)
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
