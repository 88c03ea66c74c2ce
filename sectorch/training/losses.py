"""Losses and the functions in them, forward and backward; labels that are public, or shares."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ArgumentError, DimensionError
from ..tensor import SharedTensor
from ..tensor.table import Context
from .cells import Cell
from .elementwise import coded, constant, content, kept_bits
from .functions import F, aten, torch
from .operations import GRADIENTS
from .public import VARYING, Varying, labels_form
from .scale import as_gradient, factor, operand, times

row = GRADIENTS.implements

MEAN, SUM = 1, 2
"""How aten calls reductions."""


def _reduced(loss: Any, reduction: int) -> SharedTensor:
    return loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss


def _weighted(context: Context, g: Cell, x: SharedTensor, reduction: int) -> SharedTensor:
    """A gradient of each term: that of the mean over their number."""
    value = as_gradient(context, g.content)
    product = torch.mul(value, x)
    return times(context, product, 1 / x.numel(), kept_bits(context, product)) if reduction == MEAN else product


@row("log_softmax", aten._log_softmax.default, note="error 1e-5 + 2e-6 sqrt(n) of n entries")
def log_softmax(context: Context, x: Cell, dim: int, half_to_float: bool = False) -> SharedTensor:
    return F.log_softmax(x.content, dim)


@row("log_softmax", aten._log_softmax_backward_data.default)
def log_softmax_backward(context: Context, g: Cell, y: Cell, dim: int, dtype: Any) -> SharedTensor:
    value = as_gradient(context, g.content)
    total = value.sum(dim, keepdim=True)
    return value - torch.mul(torch.exp(y.content), total)


@row("softmax", aten._softmax.default, note="error 1e-5 + 2e-6 sqrt(n) |result| of n entries")
def softmax(context: Context, x: Cell, dim: int, half_to_float: bool = False) -> SharedTensor:
    return F.softmax(x.content, dim)


@row("softmax", aten._softmax_backward_data.default)
def softmax_backward(context: Context, g: Cell, y: Cell, dim: int, dtype: Any) -> SharedTensor:
    value, probability = as_gradient(context, g.content), factor(context, y)
    weighted = torch.mul(value, probability)
    return weighted - torch.mul(probability, weighted.sum(dim, keepdim=True))


def _code(context: Context, target: Any, classes: int) -> Any:
    """One-hot codes of labels; of secret ones nobody learns which, and one out of range withholds the result.

    Raises:
        DimensionError: public labels out of range.
    """
    if isinstance(target, Cell):
        if "code" not in target.kept:
            target.kept["code"] = F.one_hot(target.content, classes)
        return target.kept["code"]
    if isinstance(target, Varying):
        return target.made(context, public_code, torch.Size((*target.size, classes)), classes)
    return public_code(target, classes)


def public_code(target: Tensor, classes: int) -> Tensor:
    """One-hot codes of public labels. Raises DimensionError where one is out of range."""
    if target.numel() and (int(target.min()) < 0 or int(target.max()) >= classes):
        raise DimensionError(f"labels are from 0 to {classes - 1}, got {int(target.min())} to {int(target.max())}")
    return F.one_hot(target.long(), classes)


def _plain_nll(x: Any, weight: Any, ignore_index: int) -> int:
    if weight is not None or ignore_index >= 0:
        raise ArgumentError("class weights and ignored labels are not supported in training on shares")
    if content(x).dim() > 2:
        raise ArgumentError("labels of every pixel are not supported in training on shares; flatten them to rows")
    return content(x).dim() - 1


@row("nll_loss", aten.nll_loss_forward.default, note="public or secret labels")
def nll_loss(context: Context, x: Cell, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple:
    dim = _plain_nll(x, weight, ignore_index)
    code = _code(context, target, x.content.shape[dim])
    taken = -coded(context, x.content, code).sum(dim)
    count = taken.numel()
    return _reduced(taken, reduction), constant(context, taken.sum(), float(count))


VARYING |= {aten.nll_loss_forward.default: {1: labels_form}, aten.nll_loss_backward.default: {2: labels_form}}


@row("nll_loss", aten.nll_loss_backward.default)
def nll_loss_backward(
    context: Context, g: Cell, x: Cell, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any
) -> SharedTensor:
    dim = _plain_nll(x, weight, ignore_index)
    code = _code(context, target, x.content.shape[dim])
    value = as_gradient(context, g.content)
    value = value.unsqueeze(dim) if reduction not in (MEAN, SUM) else value
    if reduction == MEAN:
        count = code.shape.numel() // code.shape[dim]
        value = times(context, value, 1 / max(1, count), kept_bits(context, value))
    return -coded(context, value, code)


@row("mse_loss", aten.mse_loss.default)
def mse_loss(context: Context, x: Any, y: Any, reduction: int = MEAN) -> SharedTensor:
    difference = content(x) - content(y)
    return _reduced(torch.square(difference), reduction)


@row("mse_loss", aten.mse_loss_backward.default)
def mse_loss_backward(context: Context, g: Cell, x: Any, y: Any, reduction: int) -> SharedTensor:
    difference = 2 * (content(x) - content(y))
    return _weighted(context, g, difference, reduction)


@row("bce_with_logits", aten.binary_cross_entropy_with_logits.default, note="error 5e-6 + 1e-6 |x|")
def bce_with_logits(
    context: Context, x: Cell, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> SharedTensor:
    if weight is not None or pos_weight is not None:
        raise ArgumentError("weights of a loss are not supported in training on shares; weight its terms")
    value = operand(context, x)
    return _reduced(F.softplus(value) - torch.mul(value, content(target)), reduction)
