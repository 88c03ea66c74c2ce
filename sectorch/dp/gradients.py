"""DP-SGD on shares: secret batches, gradients of single rows clipped in secret, and noise that no party knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree

from ..backend import RaisedFlags
from ..deprecation import rename_arguments, renamed_attribute
from ..errors import ArgumentError, PrivacyError, SectorchError, ShapeError
from ..mpc.star.shares import at_server
from ..ops.common import raise_scale
from ..ops.structure import shuffle
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.autograd_values import Cell, Pool
from ..training.fixed_point import (
    add_known,
    at_scale_bits,
    cross_product,
    matmul,
    product,
    square_shares,
    sum_rows,
    times,
    with_known_range,
)
from ..training.operations import F, torch
from ..training.tensor import DifferentiableTensor
from .budget import Budget
from .noise import epsilon_of, on_grid, sampled_curve

# The sum of clipped gradients of single rows, in secret. For linear layers no gradient of a single row is computed.
#
# Where a weight is used T times, with the inputs a_t and the backpropagated outputs d_t, a row's gradient of it is the
# sum of the products d_t a_t^T. Its square norm is the sum of (d_s . d_t)(a_s . a_t) over all pairs of uses: |d|^2
# |a|^2 of one use. That of a bias is the sum of d_s . d_t. The sum of clipped gradients is the product of inputs with
# outputs that were made shorter. Sources: Goodfellow, "Efficient per-example gradient computations", 2015; Abadi et
# al., "Deep learning with differential privacy", CCS 2016.
#
# Every rounding keeps a norm below the bound: squares are rounded up, factors down, and the remaining error is taken
# off the bound (`margin`). A matrix of products of T uses is rounded up by T units on its diagonal, so that the
# difference is positive semidefinite; the sum of the products of two such matrices is then no smaller. Inputs beyond 16
# and outputs beyond 8 are cut there first, in secret, for the gradient only.

INPUT_BITS, OUTPUT_BITS = 4, 3
"""Inputs are below 2^4 and outputs below 2^3."""

DELTA_BITS, FACTOR_BITS, GRID_BITS, SQUARE_BITS = 22, 34, 26, 8
"""Fraction bits of outputs, of the clipping factors, of sums, and of |a|^2."""

ROOT_MARGIN = 2.0**-17
"""Above the error of `rsqrt` for results up to one, 4e-6."""


@dataclass(frozen=True)
class Use:
    """One run of a linear layer: its inputs [B, d] and backpropagated outputs [B, k], or [B, T, d] and [B, T, k] where
    it runs at T places of a row."""

    inputs: SharedTensor
    outputs: SharedTensor


@dataclass(frozen=True)
class Uses:
    """The uses of a weight [k, d], of a bias [k], or of both where they have the same: their numbers among all uses.

    Attributes:
        places: at how many places of a row these run, all together; one each unless given.
    """

    numbers: tuple[int, ...]
    inputs: int
    outputs: int
    weight: bool = True
    bias: bool = True
    places: int | None = None

    @property
    def largest(self) -> float:
        """The largest square norm of a row's gradient."""
        parts = 4.0**INPUT_BITS * self.inputs * self.weight + self.bias
        return (self.places or len(self.numbers)) ** 2 * 4.0**OUTPUT_BITS * self.outputs * parts

    @property
    def count(self) -> int:
        """Entries of the gradient."""
        return self.outputs * (self.inputs * self.weight + self.bias)


def largest(parameters: Sequence[Uses]) -> float:
    """The largest square norm of a row's gradient."""
    return sum(each.largest for each in parameters)


def margin(parameters: Sequence[Uses]) -> float:
    """The largest excess of a row's clipped gradient over the norm that it is clipped to, by rounding.

    Shortened outputs are rounded by 2^-27 each, and a factor by 2^-35. A rounded sum has sqrt(P) 2^-27 more for each of
    two neighbours.
    """
    rounded = sum(each.largest / 4.0**OUTPUT_BITS for each in parameters)
    count = sum(each.count for each in parameters)
    return (math.sqrt(rounded) + math.sqrt(count)) * 2.0**-27 + math.sqrt(largest(parameters)) * 2.0**-35


def clipped_sums(
    context: Context, uses: Sequence[Use], parameters: Sequence[Uses], clip: float
) -> list[tuple[SharedTensor | None, SharedTensor | None]]:
    """For each weight and bias the sums [k, d] and [k] over the rows, at 26 fraction bits, of clipped gradients.

    Args:
        clip: of a row's gradient of all of these, in norm; above `margin`; the number of rows times clip is below 2^15.

    Rounds about 70; a comparison of each input and output whose known bound is too large, and some of each row.
    """
    room = 59 - math.ceil(math.log2(largest(parameters)))
    bits = min(26, room - SQUARE_BITS)
    inputs = [_cut(context, use.inputs, context.frac_bits, INPUT_BITS) for use in uses]
    outputs = [_cut(context, use.outputs, DELTA_BITS, OUTPUT_BITS) for use in uses]
    squares = []
    for each in parameters:
        square = _products(context, [outputs[i] for i in each.numbers], OUTPUT_BITS, bits)
        if each.weight:
            sizes = _products(context, [inputs[i] for i in each.numbers], INPUT_BITS, SQUARE_BITS)
            square = product(context, torch.mul, square, add_known(context, sizes, int(each.bias) << SQUARE_BITS))
        else:
            square = raise_scale(context, square, bits + SQUARE_BITS)
        one = len(square.shares.shape) == 1
        squares.append(square if one else _map_shares(context, partial(_sum, dim=(1, 2)), [square]))
    total = reduce(partial(add_known, context), squares)
    factor = _factor(context, total, clip - margin(parameters), largest(parameters))
    column = {n: factor.like(context.backend.moved(partial(_as_column, dim=n), factor.shares)) for n in (2, 3)}
    short = [product(context, torch.mul, column[len(d.shares.shape)], d, GRID_BITS) for d in outputs]
    sums = []
    for each in parameters:
        d = _map_shares(context, _concatenate, [short[i] for i in each.numbers])
        a = _map_shares(context, _concatenate, [inputs[i] for i in each.numbers]) if each.weight else None
        weight = None if a is None else product(context, cross_product, d, a, GRID_BITS)
        sums.append((weight, sum_rows(context, d) if each.bias else None))
    return sums


def _as_column(x: Tensor, dim: int) -> Tensor:
    return x.view(-1, *[1] * (dim - 1))


def _concatenate(*values: Tensor) -> Tensor:
    return torch.cat([x.flatten(0, -2) for x in values])


def _stack_uses(*values: Tensor) -> Tensor:
    return torch.cat([x.view(x.shape[0], -1, x.shape[-1]) for x in values], -2)


def _parts(x: Tensor, most: int) -> Tensor:
    """[B, ..., n] -> [B, C, ..., n / C]: the last dimension in parts of so many entries at most, zeros at its end."""
    count = max(1, -(-x.shape[-1] // most))
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % count))
    return x.unflatten(-1, (count, -1)).movedim(-2, 1)


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x, y.mT.contiguous())


def _sum(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return x.sum(dim)


def _map_shares(context: Context, f: Callable, values: Sequence[SharedTensor]) -> SharedTensor:
    return values[0].like(context.backend.each(f, *(x.shares for x in values)), values[0].scale_bits)


def _products(context: Context, values: Sequence[SharedTensor], limit_bits: int, bits: int) -> SharedTensor:
    """A row's products of T uses by pairs, at so many bits and rounded up: [B, T, T], and [B] of one use.

    They are summed up in parts that are below 2^61 for any values.
    """
    one = len(values) == 1 and len(values[0].shares.shape) == 2
    x = values[0] if one else _map_shares(context, _stack_uses, values)
    count = 1 if one else x.shares.shape[1]
    x = _map_shares(context, partial(_parts, most=1 << max(0, 61 - 2 * (limit_bits + x.scale_bits))), [x])
    parts = x.shares.shape[1]
    x = (
        _map_shares(context, partial(_sum, dim=-1), [square_shares(context, x)])
        if one
        else product(context, _pairs, x, x)
    )
    found = _map_shares(context, partial(_sum, dim=1), [at_scale_bits(context, x, bits)])
    return add_known(context, found, parts if one else torch.eye(count, dtype=torch.int64) * (count * parts))


def _cut(context: Context, x: SharedTensor, bits: int, limit_bits: int) -> SharedTensor:
    """x at so many bits within -2^limit_bits and 2^limit_bits."""
    x = at_scale_bits(context, x, bits)
    if x.bound is None or x.bound > 2.0 ** (limit_bits + bits):
        x = at_scale_bits(context, torch.clamp(x, -(2.0**limit_bits), 2.0**limit_bits), bits)
    return x.bounded(None)


def _up(context: Context, x: SharedTensor, bits: int) -> SharedTensor:
    """x rounded to so many bits and no smaller."""
    return x if x.scale_bits <= bits else add_known(context, at_scale_bits(context, x, bits), 1)


def _rungs(room: int) -> list[int]:
    """10, and twice as much as long as half of the room is not reached; the largest first."""
    found = [10]
    while 2 * found[0] < room:
        found.insert(0, 2 * found[0])
    return found


def _factor(context: Context, square: SharedTensor, clip: float, most: float) -> SharedTensor:
    """min(1, clip / sqrt(square)) or a little less, [B] at 34 fraction bits.

    The ratio t = square / clip^2, rounded up, is divided by 2^10 where it is larger, and before by 2^20, 2^40 and so on
    as far as it can be large at all; its root's inverse is then within 4e-6, which is taken off.
    """
    room = max(1, math.ceil(math.log2(most / clip**2)))
    mantissa, exponent = math.frexp(1 / clip**2)
    coarse = _up(context, square, square.scale_bits - 16)
    whole = math.ceil(mantissa * 2**15)
    scale = coarse.scale_bits + 15 - exponent
    ratio = coarse.like(coarse.shares * whole, scale)
    digits = min(context.frac_bits, 60 - room)
    ratio = _up(context, ratio, digits) if scale > digits else with_known_range(context, ratio, digits)
    factors = []
    for bits in _rungs(room):
        threshold = 1 << (bits + digits)
        large = ratio.like(context.backend.at_least(ratio.shares, (threshold,))[0], 0)
        smaller = _up(context, ratio.like(ratio.shares, digits + bits), digits)
        less = smaller.like(context.backend.each(torch.sub, smaller.shares, ratio.shares), digits)
        ratio = add_known(context, ratio, product(context, torch.mul, less, large, digits))
        factors.append(large.like(large.shares * -((1 << bits // 2) - 1) + (1 << bits // 2), bits // 2))
    ratio = ratio.like(ratio.shares, digits, 2.0 ** (10 + digits), dtype=torch.float32)
    root = with_known_range(context, torch.rsqrt(torch.clamp(ratio, min=1.0)), context.frac_bits)
    found = add_known(context, root, -round(ROOT_MARGIN * 2**context.frac_bits))
    for more in factors:
        found = product(context, torch.mul, found, more)
    return at_scale_bits(context, found, FACTOR_BITS)


TRIES = 4
"""Trials for whether a model or loss mixes rows."""


class PrivateGradients:
    """Noisy gradients of a shared model, in place of `loss.backward()`, for any optimiser.

    A and S each add discrete Gaussian noise of their own to their half of the sum. Each of them knows its own
    noise only, and the other's alone suffices for `epsilon`. So `epsilon` holds against each single party, Q included,
    and against anyone who sees the model after any number of steps. It does not hold against A and S together, who have
    all data anyway.

    A row's gradient is that of all trainable parameters together: of one that several layers share, or of a layer that
    runs several times, the sum over its uses. Frozen parameters have none, nor do layers that do not run.

    Args:
        model: of `sectorch.shared`, whose trainable parameters are weights and biases of linear layers that take
            [rows, features] or, at T places of a row (the words of a text), [rows, T, features]. The rest of it, a
            frozen base say, may be anything that computes each row from that row alone. The first `backward` of a shape
            tries on random plain numbers whether model and loss do.
        max_grad_norm: the norm C that a row's gradient is clipped to.
        noise_multiplier: the standard deviation of each party's noise, as a multiple of C.
        rows: the number of rows.
        batch_size: the rows of a step, drawn in secret.
        budget: a budget that is charged before each step.

    No noise hides whether a value left the number format's range (`RangeExceededError`). Inputs beyond 16 and
    backpropagated outputs beyond 8 are cut for the gradient.

    Raises:
        ArgumentError: trainable parameters other than those, or none; max_grad_norm too small for the number format.
        PrivacyError: noise_multiplier or sizes out of range.
    """

    @rename_arguments(clip="max_grad_norm", noise="noise_multiplier", batch="batch_size")
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
        self._has_sample = batch_size >= rows  # all rows are a batch that needs no draw
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
        """Epsilon of the steps so far, for neighbours that differ in one row's content."""
        return epsilon_of(self.steps * self.curve, delta)

    def sample(self, *tensors: Any) -> tuple:
        """Draw a batch that no party knows: the first rows of a fresh `sectorch.shuffle` of the whole set.

        Raises:
            ShapeError: not `rows` rows.
        """
        if not tensors or any(len(x.shape) < 1 or x.shape[0] != self.rows for x in tensors):
            raise ShapeError(f"a sample is of {self.rows} rows, got {[tuple(x.shape) for x in tensors]}")
        found = shuffle(*tensors)
        self._has_sample = True
        return tuple(x[: self.batch_size] for x in (found if isinstance(found, tuple) else (found,)))

    def backward(self, loss: Callable, x: Any, y: Any) -> None:
        """Set each parameter's `grad` to the mean of clipped gradients with noise, for a batch of `sample`.

        A step needs a `sample` of its own, unless a batch has all rows: chance that no party knows is what makes
        `epsilon` small. That x and y are its rows is not checked: for other ones `epsilon` is too small.

        Args:
            loss: f(outputs, y, reduction="sum"), a sum over rows: `F.cross_entropy`, say.

        Raises:
            ShapeError: not a batch. PrivacyError: no `sample` since the last step. BudgetExhaustedError: nothing was
                computed.
        """
        if any(v.dim() < 1 or v.shape[0] != self.batch_size for v in (x, y)):
            raise ShapeError(f"a batch is of {self.batch_size} rows, got {tuple(x.shape)} and {tuple(y.shape)}")
        if not self._has_sample:
            raise PrivacyError("epsilon counts on rows that sample() drew for a step: call it before each backward()")
        layers = _trainable(self.model)
        if self.budget is not None:
            self.budget.check(self.curve)
        self._try(layers, loss, x, y)
        before = _secret_buffers(self.model)
        with _record_runs(layers, self.batch_size) as runs:
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
        parameters = _parameters([run.layer for run, _ in kept], [run.places for run, _ in kept])
        self._fits(parameters)
        if self.budget is not None:
            self.budget.charge(self.curve)
        self.steps += 1
        self._has_sample = self.batch_size >= self.rows
        uses = [Use(_by_place(run.inputs).as_shared(), _by_place(d).as_shared()) for run, d in kept]
        first = uses[0].inputs
        context = Context(first.session, first.party, first.scheme)
        with first.session.operation(first.party) as net:
            before = len(net.state(RaisedFlags))
            sums = clipped_sums(context, uses, parameters, self.max_grad_norm)
            most = (self.batch_size * self.max_grad_norm + 40 * self._deviation) * 2.0**GRID_BITS
            noisy = [[v if v is None else add_noise(context, v, self._deviation) for v in pair] for pair in sums]
            means = [
                [v if v is None else times(context, v.bounded(most), 1 / self.batch_size, GRID_BITS) for v in pair]
                for pair in noisy
            ]
            flags = dict.fromkeys((*(f for use in uses for v in (use.inputs, use.outputs) for f in v.flags),
                                   *net.state(RaisedFlags)[before:]))  # fmt: skip
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
        """Refuse a model or a loss that mixes rows, by trials in which random plain numbers replace some rows.

        The same shapes, modules and loss are tried once.
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
    """Error text and the two values that must agree, for two inputs that differ in the chosen rows."""
    parameters = {p: _random_like(p) / max(1, p.numel() // max(1, len(p))) ** 0.5 for p in model.parameters()}
    buffers = {b: _random_like(b).abs() + 0.5 if isinstance(b, DifferentiableTensor) else b for b in model.buffers()}
    rows, seed = _random_rows(model, x), torch.initial_seed() + TRIES
    seen = []
    for v in (rows, torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), _random_rows(model, x), rows)):
        torch.manual_seed(seed)  # the same units drop out
        given = parameters | {b: value.clone() for b, value in buffers.items()}
        with _with_parameters(model, given), _record_runs(layers, len(v)) as runs:
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
    targets = _random_like(y).abs()
    sums = [
        loss(pytree.tree_map(lambda v, k=k: v[k], outputs), targets[k], reduction="sum")
        for k in (torch.ones_like(chosen), chosen, ~chosen)
        if k.any()
    ]
    if any(not isinstance(value, torch.Tensor) or value.dim() for value in sums):
        raise ArgumentError(f"the loss of several rows is one number, got {sums[0]}; heed its reduction='sum'")
    return [*found, ("the loss of all rows is not the sum of their losses", sums[0], sum(sums[1:]))]


@contextmanager
def _with_parameters(model: nn.Module, given: dict[Any, Any]) -> Iterator[None]:
    """Within this context the model has other parameters and buffers."""
    states: list[Any] = [state for module in model.modules() for state in (module._parameters, module._buffers)]
    before = [dict(state) for state in states]
    try:
        for state in states:
            state.update({name: given.get(value, value) for name, value in state.items() if value is not None})
        yield
    finally:
        for state, own in zip(states, before, strict=True):
            state.update(own)


def _random_like(x: Any) -> Any:
    """Random numbers of a shape from -1 to 1; zeros of whole numbers."""
    numbers = 2 * torch.rand(x.shape) - 1 if x.dtype.is_floating_point else torch.zeros(x.shape)
    return numbers.to(x.dtype)


def _random_rows(model: nn.Module, x: Any) -> Any:
    """`_random_like`, and of whole numbers those that every embedding of the model takes: rows of zeros would be equal,
    and show nothing of what mixes them."""
    words = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)
    return _random_like(x) if x.dtype.is_floating_point else torch.randint(0, words, x.shape).to(x.dtype)


def add_noise(context: Context, x: SharedTensor, sigma: float) -> SharedTensor:
    """x with discrete Gaussian noise of A's and of S's own, each of deviation sigma on the grid of x. No message."""
    net, draw = context.net, partial(_draw_noise, sigma, x.scale_bits)
    for party in (net.A, net.S):
        own = context.backend.owned(net.fresh(party, at_server(draw, x.shares.shape)), party)
        x = add_known(context, x, x.like(own))
    return x


def _draw_noise(sigma: float, frac_bits: int, shape: Any) -> Any:
    return on_grid(sigma, shape, frac_bits)


class RecordedGradients(NamedTuple):
    layer: nn.Linear
    inputs: Any
    outputs: Any

    @property
    def places(self) -> int:
        return math.prod(self.inputs.shape[1:-1])


def _by_place(x: Any) -> Any:
    """[B, d], or [B, T, d] of any number of places."""
    return x if x.dim() == 2 else x.flatten(1, -2)


@contextmanager
def _record_runs(layers: list[nn.Linear], rows: int) -> Iterator[list[RecordedGradients]]:
    """Record the runs of these layers, with detached parameters, so that parameters in the graph are other uses."""
    runs: list[RecordedGradients] = []
    for layer in layers:
        layer.forward = partial(_run, runs, rows, layer)
    try:
        yield runs
    finally:
        for layer in layers:
            del layer.forward


def _run(runs: list[RecordedGradients], rows: int, layer: nn.Linear, input: Any) -> Any:
    a = DifferentiableTensor(input) if isinstance(input, SharedTensor) else input
    if a.dim() < 2 or a.shape[0] != rows:
        raise ShapeError(
            f"a linear layer that is trained takes [{rows} rows, features] or [{rows} rows, places, features] here, "
            f"got {tuple(a.shape)}; put the rows first (batch_first=True), and what belongs to a row behind them"
        )
    z = F.linear(a, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
    z = z if z.requires_grad else z.requires_grad_()
    runs.append(RecordedGradients(layer, a, z))
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
    return DifferentiableTensor(Cell(x, gradient=True, pool=Pool(flags, one_way=True)))


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


def _parameters(layers: list[nn.Linear], places: Sequence[int] | None = None) -> list[Uses]:
    """The trainable parameters of layers that run in this order, at so many places of a row each."""
    places = places or [1] * len(layers)
    numbers: dict[tuple[str, int], list[int]] = {}
    for i, layer in enumerate(layers):
        for kind, p in layer.named_parameters(recurse=False):
            if p.requires_grad:
                numbers.setdefault((kind, id(p)), []).append(i)
    kinds: dict[tuple[int, ...], set[str]] = {}
    for (kind, _), uses in numbers.items():
        kinds.setdefault(tuple(uses), set()).add(kind)
    return [
        Uses(uses, layers[uses[0]].in_features, layers[uses[0]].out_features, "weight" in kind, "bias" in kind,
             sum(places[i] for i in uses))
        for uses, kind in kinds.items()
    ]  # fmt: skip
