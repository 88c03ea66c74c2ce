"""Products and activations, forward and backward."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError
from ..ops.bilinear import bilinear
from ..tensor import SharedTensor
from ..tensor.table import Context
from .cells import Cell, Made
from .elementwise import content, scaled
from .functions import F, aten, torch
from .operations import GRADIENTS
from .scale import as_gradient, no_larger, operand, total

row = GRADIENTS.implements


def summed(context: Context, product: Any, x: Any, y: Any, terms: int) -> SharedTensor:
    """product(x, y), of which each output sums up so many products."""
    left, right = operand(context, x, terms), operand(context, y, terms)
    bound = lambda w: w.sum().expand(1)
    return bilinear(context, product, left, right, terms, (bound, bound))


@row("mm", aten.mm.default, aten.bmm.default, note="1 round for two secrets")
def mm(context: Context, x: Any, y: Any) -> SharedTensor:
    terms = content(x).shape[-1]
    return torch.matmul(operand(context, x, terms), operand(context, y, terms))


@row("addmm", aten.addmm.default, note="1 round for two secrets")
def addmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = mm(context, x, y)
    return total(context, scaled(context, product, alpha), scaled(context, bias, beta))


@row("relu", aten.relu.default, note="exact; its sign is kept for the backward pass")
def relu(context: Context, x: Cell) -> Made:
    value = operand(context, x)
    positive = torch.gt(value, 0)
    result = torch.mul(value, positive)
    return Made(no_larger(result, value), positive=positive)


@row("threshold", aten.threshold_backward.default)
def threshold_backward(context: Context, g: Cell, x: Cell, threshold: float) -> SharedTensor:
    positive = x.kept.get("positive") if threshold == 0 else None
    return _where(context, g, torch.gt(x.content, threshold) if positive is None else positive)


def _where(context: Context, g: Cell, chosen: Any) -> SharedTensor:
    """The gradient where something is true, and zero elsewhere."""
    value = as_gradient(context, g.content)
    return no_larger(torch.mul(value, chosen), value)


@row("hardshrink", aten.hardshrink_backward.default)
@row("softshrink", aten.softshrink_backward.default)
def shrink_backward(context: Context, g: Cell, x: Cell, lambd: float) -> SharedTensor:
    return _where(context, g, torch.gt(torch.abs(x.content), lambd))


@row("sigmoid", aten.sigmoid.default)
def sigmoid(context: Context, x: Cell) -> SharedTensor:
    return torch.sigmoid(x.content)


@row("sigmoid", aten.sigmoid_backward.default)
def sigmoid_backward(context: Context, g: Cell, y: Cell) -> SharedTensor:
    slope = torch.mul(y.content, 1 - y.content)
    return torch.mul(as_gradient(context, g.content), slope)


@row("tanh", aten.tanh.default)
def tanh(context: Context, x: Cell) -> SharedTensor:
    return torch.tanh(x.content)


@row("tanh", aten.tanh_backward.default)
def tanh_backward(context: Context, g: Cell, y: Cell) -> SharedTensor:
    return torch.mul(as_gradient(context, g.content), 1 - torch.mul(y.content, y.content))


def sloped(context: Context, g: Cell, slope: SharedTensor) -> SharedTensor:
    """A gradient times a slope, which is a value of the forward kind."""
    return torch.mul(as_gradient(context, g.content), slope)


@row("softplus", aten.softplus_backward.default)
def softplus_backward(context: Context, g: Cell, x: Cell, beta: float, threshold: float) -> SharedTensor:
    """Beyond torch's threshold the slope is 1 within 2^-20 too."""
    return sloped(context, g, torch.sigmoid(x.content if beta == 1 else x.content * beta))


@row("logsigmoid", aten.log_sigmoid_backward.default)
def log_sigmoid_backward(context: Context, g: Cell, x: Cell, buffer: Any) -> SharedTensor:
    return sloped(context, g, torch.sigmoid(-x.content))


@row("silu", aten.silu_backward.default)
def silu_backward(context: Context, g: Cell, x: Cell) -> SharedTensor:
    gate = torch.sigmoid(x.content)
    return sloped(context, g, gate + torch.mul(F.silu(x.content), 1 - gate))


@row("elu", aten.elu.default)
def elu(context: Context, x: Cell, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> SharedTensor:
    """ELU, CELU and SELU are one operator of torch's."""
    value = x.content
    made = F.elu(value, alpha) if input_scale == 1 else F.celu(value, 1 / input_scale)
    if input_scale != 1 and abs(alpha * input_scale - 1) > 1e-12:
        raise ArgumentError(f"an ELU with alpha {alpha} and input_scale {input_scale} is not computed on shares")
    return made if scale == 1 else made * scale


@row("elu", aten.elu_backward.default)
def elu_backward(
    context: Context, g: Cell, alpha: float, scale: float, input_scale: float, is_result: bool, x: Cell
) -> SharedTensor:
    """Of what is not positive alone the exponential is taken: it is at most one."""
    low = torch.clamp(x.content, None, 0)
    below = low + alpha * scale if is_result else torch.exp(low * input_scale) * (alpha * scale)
    slope = torch.where(torch.gt(x.content, 0), scale, below * input_scale)
    return sloped(context, g, slope)


@row("logit", aten.logit_backward.default)
def logit_backward(context: Context, g: Cell, x: Cell, eps: float | None = None) -> SharedTensor:
    """Zero where the input was clamped; without eps an input of 0 or 1 has no slope: a range error."""
    value = x.content
    inside = None if eps is None else torch.logical_and(torch.ge(value, eps), torch.le(value, 1 - eps))
    value = value if eps is None else torch.clamp(value, eps, 1 - eps)
    slope = torch.reciprocal(torch.mul(value, 1 - value))
    return sloped(context, g, slope if inside is None else torch.mul(slope, inside))
