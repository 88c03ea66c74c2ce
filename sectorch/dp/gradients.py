"""DP-SGD on shares: batches that nobody knows, gradients of single rows clipped in secret, noise that nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree

from ..deprecation import renamed, renamed_attribute
from ..errors import ArgumentError, SectorchError, ShapeError
from ..mpc.star.share import at_server
from ..ops.shuffle import shuffle
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import plus
from ..training.cells import Cell, Pool
from ..training.functions import F, torch
from ..training.scale import times
from ..training.tensor import DifferentiableTensor
from .budget import Budget
from .clipping import GRID_BITS, Use, Uses, clipped_sums, largest, margin
from .errors import PrivacyError
from .noise import on_grid
from .renyi import epsilon_of
from .sampled import sampled_curve

TRIES = 4
"""How often it is tried whether rows are mixed."""


class PrivateGradients:
    """Noisy gradients of a shared model, in the place of `loss.backward()`; any optimiser takes them.

    A and S each add discrete Gaussian noise of their own to their half of the sum. So nobody knows the noise: each of
    the two knows its own, and the other's is enough for `epsilon`, which holds against each party by itself, Q too, and
    against whoever is shown the model after any number of steps. It does not hold against A and S together, who have
    all data anyway.

    A row's gradient is that of all trainable parameters together: of one that several layers share, or of a layer that
    runs several times, the sum over its uses. Frozen parameters have none, and what runs in no step gets none.

    Args:
        model: of `sectorch.shared`, whose trainable parameters are weights and biases of linear layers that take
            [rows, features]. The rest of it may be anything that computes each row from that row alone. The first
            `backward` of a shape tries on random plain numbers whether model and loss do.
        max_grad_norm: the norm C that a row's gradient is clipped to.
        noise_multiplier: the standard deviation of each party's noise, as a multiple of C.
        rows: how many rows there are.
        batch_size: how many of them a step takes, in secret.
        budget: is charged before each step.

    What is not noised: whether a value left the number format's range (`RangeExceededError`). Inputs beyond 16 and
    backpropagated outputs beyond 8 are cut for the gradient.

    Raises:
        ArgumentError: trainable parameters other than those, or none; max_grad_norm too small for the number format.
        PrivacyError: noise_multiplier or sizes out of range.
    """

    @renamed(clip="max_grad_norm", noise="noise_multiplier", batch="batch_size")
    def __init__(
        self,
        model: nn.Module,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        rows: int,
        batch_size: int,
        budget: Budget | None = None,
    ):
        self.model, self.rows, self.batch_size = model, rows, batch_size
        self.max_grad_norm, self.noise_multiplier = float(max_grad_norm), float(noise_multiplier)
        self.budget, self.steps = budget, 0
        self._tried: Any = None
        self._fits(_parameters(_trainable(model)))
        if not 0 < self._deviation * 2.0**GRID_BITS <= 2.0**40:
            most = 2.0 ** (40 - GRID_BITS) / self.max_grad_norm
            raise PrivacyError(f"noise_multiplier is above 0 and at most {most:g}, got {noise_multiplier}")
        self.curve = sampled_curve(lambda order: 2 * order / self.noise_multiplier**2, batch_size, rows)
        """RDP of a step over `ORDERS`: a replaced row moves the sum by 2 C."""

    clip = renamed_attribute("clip", "max_grad_norm")
    noise = renamed_attribute("noise", "noise_multiplier")
    batch = renamed_attribute("batch", "batch_size")

    def __repr__(self) -> str:
        return (
            f"PrivateGradients(max_grad_norm={self.max_grad_norm:g}, noise_multiplier={self.noise_multiplier:g}, "
            f"rows={self.rows}, batch_size={self.batch_size}, steps={self.steps}, budget={self.budget!r})"
        )

    @property
    def _deviation(self) -> float:
        """The standard deviation of each party's noise."""
        return self.noise_multiplier * self.max_grad_norm

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
        return tuple(x[: self.batch_size] for x in (found if isinstance(found, tuple) else (found,)))

    def backward(self, loss: Callable, x: Any, y: Any) -> None:
        """Set each parameter's `grad` to the mean of clipped gradients with noise, for a batch of `sample`.

        Args:
            loss: f(outputs, y, reduction="sum"), a sum over rows: `F.cross_entropy`, say.

        Raises:
            ShapeError: not a batch. BudgetExhaustedError: nothing was computed.
        """
        if any(v.dim() < 1 or v.shape[0] != self.batch_size for v in (x, y)):
            raise ShapeError(f"a batch is of {self.batch_size} rows, got {tuple(x.shape)} and {tuple(y.shape)}")
        layers = _trainable(self.model)
        if self.budget is not None:
            self.budget.check(self.curve)
        self._try(layers, loss, x, y)
        before = _secret_buffers(self.model)
        with _recorded(layers, self.batch_size) as runs:
            total = loss(self.model(x), y, reduction="sum")
        if not isinstance(total, DifferentiableTensor) or total.dim() != 0:
            raise ArgumentError(f"the loss of shared rows is one shared number, got a {type(total).__name__}")
        if _secret_buffers(self.model) != before:
            raise ArgumentError("the model keeps statistics of its rows in a buffer, which no noise hides; keep none")
        _refuse_other_uses(total, self.model)
        runs = list(runs)  # a model that is computed again in the backward pass adds to it
        deltas = (
            torch.autograd.grad(total, [run.outputs for run in runs], allow_unused=True) if total.requires_grad else ()
        )
        kept = [(run, d) for run, d in zip(runs, deltas, strict=False) if d is not None]
        if not kept:
            raise ArgumentError("the loss depends on no trainable parameter of the model; there is nothing to train")
        parameters = _parameters([run.layer for run, _ in kept])
        self._fits(parameters)
        if self.budget is not None:
            self.budget.charge(self.curve)
        self.steps += 1
        uses = [Use(run.inputs.as_shared(), d.as_shared()) for run, d in kept]
        first = uses[0].inputs
        context = Context(first.session, first.party, first.scheme)
        with first.session.operation(first.party) as net:
            before = len(net.raised)
            sums = clipped_sums(context, uses, parameters, self.max_grad_norm)
            most = (self.batch_size * self.max_grad_norm + 40 * self._deviation) * 2.0**GRID_BITS
            noisy = [[v if v is None else noised(context, v, self._deviation) for v in pair] for pair in sums]
            means = [
                [v if v is None else times(context, v.bounded(most), 1 / self.batch_size, GRID_BITS) for v in pair]
                for pair in noisy
            ]
            flags = dict.fromkeys((*(f for use in uses for v in (use.inputs, use.outputs) for f in v.flags),
                                   *net.raised[before:]))  # fmt: skip
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad = None
        for each, pair in zip(parameters, means, strict=True):
            layer = kept[each.numbers[0]][0].layer
            for p, mean in zip((layer.weight, layer.bias), pair, strict=True):
                if mean is not None:
                    p.grad = _gradient(mean, flags)

    def _fits(self, parameters: list[Uses]) -> None:
        least = 2 * margin(parameters)
        if not least < self.max_grad_norm < 2.0**15 / max(1, self.batch_size) or largest(parameters) > 2.0**40:
            raise ArgumentError(
                f"max_grad_norm is above {least:.2g} for these layers and below {2**15 / max(1, self.batch_size):g} "
                f"for {self.batch_size} rows, got {self.max_grad_norm:g}; fewer features, and fewer uses of a layer, "
                f"lower the first"
            )

    def _try(self, layers: list[nn.Linear], loss: Callable, x: Any, y: Any) -> None:
        """Refuse a model or a loss that mixes rows: random plain numbers in some rows change nothing in the others.

        Nothing is tried again for the same shapes, modules and loss.
        """
        key = tuple(x.shape), tuple(y.shape), loss, layers, [module.training for module in self.model.modules()]
        if key == self._tried or self.batch_size < 2:
            return
        with torch.random.fork_rng(devices=()), torch.no_grad():
            for seed in range(TRIES):
                torch.manual_seed(seed)
                chosen = torch.arange(self.batch_size) % 2 == seed if seed < 2 else torch.rand(self.batch_size) < 0.5
                try:
                    parts = _on_plain_numbers(self.model, layers, loss, x, y, chosen)
                except SectorchError:
                    raise
                except Exception as error:
                    raise ArgumentError(
                        f"model and loss do not run on random plain numbers of these shapes, which shows that they mix "
                        f"no rows: {type(error).__name__}: {error}"
                    ) from None
                for what, one, other in parts:
                    if not torch.allclose(one, other, 1e-4, 1e-5, equal_nan=True):
                        raise ArgumentError(
                            f"{what}, and then no norm of a row's gradient bounds what the row changes; "
                            f"normalise over features (F.layer_norm) instead of rows, and sum the losses of rows"
                        )
        self._tried = key


def _on_plain_numbers(
    model: nn.Module, layers: list[nn.Linear], loss: Callable, x: Any, y: Any, chosen: Any
) -> list[tuple[str, Any, Any]]:
    """What has to be equal, and what is said if it is not: of two inputs that differ in the chosen rows."""
    parameters = {p: _like(p) / max(1, p.numel() // max(1, len(p))) ** 0.5 for p in model.parameters()}
    buffers = {b: _like(b).abs() + 0.5 if isinstance(b, DifferentiableTensor) else b for b in model.buffers()}
    rows, seed = _like(x), torch.initial_seed() + TRIES
    seen = []
    for v in (rows, torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), _like(x), rows)):
        torch.manual_seed(seed)  # the same units drop out
        given = parameters | {b: value.clone() for b, value in buffers.items()}
        with _in_the_place_of(model, given), _recorded(layers, len(v)) as runs:
            outputs = model(v)
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if any(leaf.dim() < 1 or len(leaf) != len(v) for leaf in leaves):
            raise ShapeError(f"the model gives a result for each row, got {[tuple(leaf.shape) for leaf in leaves]}")
        seen.append((outputs, [*(run.inputs for run in runs), *leaves]))
    (outputs, one), (_, other) = seen
    if len(one) != len(other):
        raise ShapeError(f"a model runs the same layers each time, got {len(one)} results and {len(other)}")
    mixed = "the model mixes rows: what it computes of one depends on others"
    found = [(mixed, a[~chosen], b[~chosen]) for a, b in zip(one, other, strict=True)]
    targets = _like(y).abs()
    sums = [
        loss(pytree.tree_map(lambda v, k=k: v[k], outputs), targets[k], reduction="sum")
        for k in (torch.ones_like(chosen), chosen, ~chosen)
        if k.any()
    ]
    if any(not isinstance(value, torch.Tensor) or value.dim() for value in sums):
        raise ArgumentError(f"the loss of several rows is one number, got {sums[0]}; heed its reduction='sum'")
    return [*found, ("the loss of all rows is not the sum of their losses", sums[0], sum(sums[1:]))]


@contextmanager
def _in_the_place_of(model: nn.Module, given: dict[Any, Any]) -> Iterator[None]:
    """The model with other parameters and buffers; afterwards it has its own again."""
    states: list[Any] = [state for module in model.modules() for state in (module._parameters, module._buffers)]
    before = [dict(state) for state in states]
    try:
        for state in states:
            state.update({name: given.get(value, value) for name, value in state.items() if value is not None})
        yield
    finally:
        for state, own in zip(states, before, strict=True):
            state.update(own)


def _like(x: Any) -> Any:
    """Random numbers of a shape from -1 to 1; zeros of whole numbers."""
    numbers = 2 * torch.rand(x.shape) - 1 if x.dtype.is_floating_point else torch.zeros(x.shape)
    return numbers.to(x.dtype)


def noised(context: Context, x: SharedTensor, sigma: float) -> SharedTensor:
    """x with discrete Gaussian noise of A's and of S's own, each of deviation sigma on the grid of x. No message."""
    net, draw = context.net, partial(_drawn, sigma, x.scale_bits)
    for party in (net.A, net.S):
        own = context.backend.owned(net.fresh(party, at_server(draw, x.shares.shape)), party)
        x = plus(context, x, x.like(own))
    return x


def _drawn(sigma: float, frac_bits: int, shape: Any) -> Any:
    return on_grid(sigma, shape, frac_bits)


class Run(NamedTuple):
    layer: nn.Linear
    inputs: Any
    outputs: Any


@contextmanager
def _recorded(layers: list[nn.Linear], rows: int) -> Iterator[list[Run]]:
    """The runs of these layers, whose parameters take no part in the graph: in it they stand for other uses."""
    runs: list[Run] = []
    for layer in layers:
        layer.forward = partial(_run, runs, rows, layer)
    try:
        yield runs
    finally:
        for layer in layers:
            del layer.forward


def _run(runs: list[Run], rows: int, layer: nn.Linear, input: Any) -> Any:
    a = DifferentiableTensor(input) if isinstance(input, SharedTensor) else input
    if a.dim() != 2 or a.shape[0] != rows:
        raise ShapeError(
            f"a linear layer that is trained takes [{rows} rows, features] here, got {tuple(a.shape)}; flatten what "
            f"belongs to a row into its features"
        )
    z = F.linear(a, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
    z = z if z.requires_grad else z.requires_grad_()
    runs.append(Run(layer, a, z))
    return z.clone()  # which may be changed in place


def _refuse_other_uses(total: Any, model: nn.Module) -> None:
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    nodes, seen = [total.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            raise ArgumentError(
                f"{name} is used by a function beside its linear layer, where a row's gradient of it is not known; "
                f"call the layer (an nn.Linear may have the parameter of another), or freeze the parameter"
            )
        nodes.extend(following for following, _ in node.next_functions)


def _secret_buffers(model: nn.Module) -> list:
    return [(name, b.cell, b.cell.version) for name, b in model.named_buffers() if isinstance(b, DifferentiableTensor)]


def _gradient(x: SharedTensor, flags: dict) -> Any:
    return DifferentiableTensor(Cell(x, gradient=True, pool=Pool(flags, settled=True)))


def _trainable(model: nn.Module) -> list[nn.Linear]:
    """The linear layers with a parameter that is trained.

    Raises:
        ArgumentError: other modules have some, or keep statistics of a batch; there are none; they are not shared.
    """
    found = []
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        called = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, _NormBase) and (
            module.training if module.track_running_stats else isinstance(module, _BatchNorm)
        ):
            raise ArgumentError(
                f"{called}, which normalises by the rows of a batch or keeps statistics of them; call its eval() and "
                f"freeze its parameters, or use nn.LayerNorm(features, elementwise_affine=False)"
            )
        if own and (type(module) is not nn.Linear or not own.keys() <= {"weight", "bias"} or "forward" in vars(module)):
            raise ArgumentError(
                f"{called} with trainable parameters ({', '.join(own)}); gradients of single rows are of the weights "
                f"and biases of nn.Linear: freeze the others with requires_grad_(False)"
            )
        if any(not isinstance(p, DifferentiableTensor) for p in own.values()):
            raise ArgumentError("private gradients are of a shared model with linear layers: sectorch.shared(model)")
        if own:
            found.append(module)
    if not found:
        raise ArgumentError(
            "private gradients are of a shared model with linear layers that are trained; there are none"
        )
    return found


def _parameters(layers: list[nn.Linear]) -> list[Uses]:
    """The trainable parameters of layers that run in this order."""
    numbers: dict[tuple[str, int], list[int]] = {}
    for i, layer in enumerate(layers):
        for kind, p in layer.named_parameters(recurse=False):
            if p.requires_grad:
                numbers.setdefault((kind, id(p)), []).append(i)
    kinds: dict[tuple[int, ...], set[str]] = {}
    for (kind, _), uses in numbers.items():
        kinds.setdefault(tuple(uses), set()).add(kind)
    return [
        Uses(uses, layers[uses[0]].in_features, layers[uses[0]].out_features, "weight" in kind, "bias" in kind)
        for uses, kind in kinds.items()
    ]
