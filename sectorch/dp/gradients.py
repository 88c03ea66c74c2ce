"""DP-SGD on shares: batches that nobody knows, gradients of single rows clipped in secret, noise that nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ..errors import ArgumentError, ShapeError
from ..mpc.star.share import at_server
from ..ops.shuffle import shuffle
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import plus
from ..training.cells import Cell, Pool
from ..training.functions import torch
from ..training.scale import times
from ..training.tensor import DifferentiableTensor
from .budget import Budget
from .clipping import GRID_BITS, Rows, clipped_sums, largest, margin
from .errors import PrivacyError
from .noise import on_grid
from .renyi import epsilon_of
from .sampled import sampled_curve

ROW_BY_ROW = (nn.Linear, nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.GELU, nn.Flatten, nn.Identity, nn.Dropout)
"""Modules that compute each row from that row alone, and whose parameters are those of linear layers."""


class PrivateGradients:
    """Noisy gradients of a shared model, in the place of `loss.backward()`; any optimiser takes them.

    A and S each add discrete Gaussian noise of their own to their half of the sum. So nobody knows the noise: each of
    the two knows its own, and the other's is enough for `epsilon`, which holds against each party by itself, Q too, and
    against whoever is shown the model after any number of steps. It does not hold against A and S together, who have
    all data anyway.

    Args:
        model: of `sectorch.shared`; linear layers and functions of single rows. Its own code must not mix rows.
        clip: the norm C that a row's gradient is clipped to.
        noise: the standard deviation of each party's noise, as a multiple of C.
        rows: how many rows there are. batch: how many of them a step takes, in secret.
        budget: is charged before each step.

    What is not noised: whether a value left the number format's range (`RangeExceededError`). Inputs beyond 16 and
    backpropagated outputs beyond 8 are cut for the gradient.

    Raises:
        ArgumentError: a module that mixes rows, or has other parameters; clip too small for the number format.
        PrivacyError: noise or sizes out of range.
    """

    def __init__(
        self, model: nn.Module, *, clip: float, noise: float, rows: int, batch: int, budget: Budget | None = None
    ):
        self.model, self.clip, self.noise, self.rows, self.batch = model, float(clip), float(noise), rows, batch
        self.budget, self.steps = budget, 0
        self._layers = _linear(model)
        sizes = [(layer.in_features, layer.out_features) for layer in self._layers]
        if not 2 * margin(sizes) < self.clip < 2.0**15 / max(1, batch) or largest(sizes) > 2.0**40:
            raise ArgumentError(
                f"clip is above {2 * margin(sizes):.2g} for these layers and below {2**15 / max(1, batch):g} for "
                f"{batch} rows, got {clip}"
            )
        if not 0 < self.noise * self.clip * 2.0**GRID_BITS <= 2.0**40:
            raise PrivacyError(f"noise is above 0 and at most {2.0 ** (40 - GRID_BITS) / self.clip:g}, got {noise}")
        self.curve = sampled_curve(lambda order: 2 * order / self.noise**2, batch, rows)
        """RDP of a step over `ORDERS`: a replaced row moves the sum by 2 C."""

    def epsilon(self, delta: float) -> float:
        """Of the steps so far, for neighbours that differ in one row's content."""
        return epsilon_of(self.steps * self.curve, delta)

    def sample(self, *tensors: Any) -> tuple:
        """A batch that nobody knows: the first rows of a fresh `sectorch.shuffle` of the whole set.

        Raises:
            ShapeError: not `rows` rows.
        """
        if not tensors or any(len(x.shape) < 1 or x.shape[0] != self.rows for x in tensors):
            raise ShapeError(f"a sample is of {self.rows} rows, got {[tuple(x.shape) for x in tensors]}")
        found = shuffle(*tensors)
        return tuple(x[: self.batch] for x in (found if isinstance(found, tuple) else (found,)))

    def backward(self, loss: Callable, x: Any, y: Any) -> None:
        """Set each parameter's `grad` to the mean of clipped gradients with noise, for a batch of `sample`.

        Args:
            loss: f(outputs, y, reduction="sum"), a sum over rows: `F.cross_entropy`, say.

        Raises:
            ShapeError: not a batch. BudgetExhaustedError: nothing was computed.
        """
        if x.shape[0] != self.batch:
            raise ShapeError(f"a batch is of {self.batch} rows, got {tuple(x.shape)}")
        if self.budget is not None:
            self.budget.charge(self.curve)
        self.steps += 1
        with self._recorded() as seen:
            total = loss(self.model(x), y, reduction="sum")
            if [module for module, *_ in seen] != self._layers:
                raise ArgumentError("each linear layer of the model is to be used once, in the order of its modules")
            deltas = torch.autograd.grad(total, [z for *_, z in seen])
        layers = [Rows(a.as_shared(), d.as_shared()) for (_, a, _), d in zip(seen, deltas, strict=True)]
        first = layers[0].inputs
        context = Context(first.session, first.party, first.scheme)
        with first.session.operation(first.party) as net:
            before = len(net.raised)
            sums = [
                tuple(noised(context, v, self.noise * self.clip) for v in pair)
                for pair in clipped_sums(context, layers, self.clip)
            ]
            most = (self.batch * self.clip + 40 * self.noise * self.clip) * 2.0**GRID_BITS
            means = [[times(context, v.bounded(most), 1 / self.batch, GRID_BITS) for v in pair] for pair in sums]
            flags = dict.fromkeys((*(f for layer in layers for v in (layer.inputs, layer.outputs) for f in v.flags),
                                   *net.raised[before:]))  # fmt: skip
        for layer, (weight, bias) in zip(self._layers, means, strict=True):
            layer.weight.grad = _gradient(weight, flags)
            if layer.bias is not None:
                layer.bias.grad = _gradient(bias, flags)

    @contextmanager
    def _recorded(self) -> Iterator[list]:
        """Each linear layer's input and output, as the model runs."""
        seen: list = []
        hooks = [layer.register_forward_hook(partial(_noted, seen)) for layer in self._layers]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


def noised(context: Context, x: SharedTensor, sigma: float) -> SharedTensor:
    """x with discrete Gaussian noise of A's and of S's own, each of deviation sigma on the grid of x. No message."""
    net, draw = context.net, partial(_drawn, sigma, x.scale_bits)
    for party in (net.A, net.S):
        own = context.backend.owned(net.fresh(party, at_server(draw, x.shares.shape)), party)
        x = plus(context, x, x.like(own))
    return x


def _drawn(sigma: float, frac_bits: int, shape: Any) -> Any:
    return on_grid(sigma, shape, frac_bits)


def _noted(seen: list, module: nn.Module, inputs: tuple, output: Any) -> None:
    if inputs[0].dim() != 2:
        raise ShapeError(f"a linear layer takes [rows, features] here, got {tuple(inputs[0].shape)}")
    a = inputs[0] if isinstance(inputs[0], DifferentiableTensor) else DifferentiableTensor(inputs[0])
    seen.append((module, a, output))


def _gradient(x: SharedTensor, flags: dict) -> Any:
    return DifferentiableTensor(Cell(x, gradient=True, pool=Pool(flags, settled=True)))


def _linear(model: nn.Module) -> list[nn.Linear]:
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if (own and type(module) is not nn.Linear) or (not list(module.children()) and type(module) not in ROW_BY_ROW):
            raise ArgumentError(
                f"{name or 'the model'} is a {type(module).__name__}; gradients of single rows are for linear layers "
                f"and functions of single rows: {', '.join(kind.__name__ for kind in ROW_BY_ROW)}"
            )
    found = [module for module in model.modules() if type(module) is nn.Linear]
    if not found or any(not isinstance(layer.weight, DifferentiableTensor) for layer in found):
        raise ArgumentError("private gradients are of a shared model with linear layers: sectorch.shared(model)")
    return found
