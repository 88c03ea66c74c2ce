"""Losses and softmax, forward and backward, with public or secret labels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import ArgumentError, DimensionError
from ..ops.indexing import IGNORED, check_own_labels, code_of_labels
from ..ops.infinity import negated_infinite
from ..tensor import SecretTensor, SharedTensor
from ..tensor.table import Context
from .autograd_values import VARYING, Cell, PublicInput, labels_form
from .elementwise import constant, content, finer_quotient, kept_bits, times_code
from .fixed_point import as_gradient, factor, operand, times
from .operations import GRADIENTS, F, aten, torch
from .tensor import FUNCTIONS, DifferentiableTensor

row = GRADIENTS.implements

MEAN, SUM = 1, 2
"""aten's numbers of reductions."""


def _reduce(loss: Any, reduction: int) -> SharedTensor:
    return loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss


def _term_gradients(context: Context, g: Cell, x: SharedTensor, reduction: int) -> SharedTensor:
    """The gradient of each term, g x, divided by the number of terms if the loss is their mean."""
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


def _code(context: Context, target: Any, classes: int, dim: int, weight: Any, ignored: int) -> Any:
    """The weight of each class in each label's loss: one-hot codes of the labels, times the weights of their classes.

    Without weights the codes are integers. Of secret labels they are shared: nobody learns a label, and one out of
    range withholds the result.

    Raises:
        ArgumentError: secret class weights. DimensionError: public labels out of range.
    """
    if isinstance(weight, Cell):
        raise ArgumentError("secret class weights are not supported on shares; give them as a plain tensor")
    if isinstance(target, Cell):
        key = "code" if ignored == IGNORED else f"code {ignored}"
        if key not in target.reusable:
            target.reusable[key] = code_of_labels(context, target.content, classes, ignored)
        code = target.reusable[key]
        return (code if weight is None else torch.mul(code.to(weight.dtype), weight)).movedim(-1, dim)
    if isinstance(target, PublicInput):
        if weight is not None or ignored >= 0:
            raise ArgumentError("what each label counts is a part of the program")
        size = [*target.size]
        size.insert(dim, classes)
        return target.apply(context, public_code, torch.Size(size), classes, dim)
    return public_code(target, classes, dim, weight, ignored)


def public_code(target: Tensor, classes: int, dim: int, weight: Tensor | None = None, ignored: int = -100) -> Tensor:
    """One-hot codes of public labels, zero for ignored ones. Raises DimensionError where one is out of range."""
    labels, kept = _check_public(target, classes, ignored)
    code = F.one_hot(labels.long(), classes) * kept.unsqueeze(-1)
    return (code if weight is None else code * weight).movedim(-1, dim)


def _check_public(target: Tensor, classes: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Labels with zeros in place of ignored ones, and which are none. Raises DimensionError for one out of range."""
    kept = target != ignored
    labels = torch.where(kept, target, 0)
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise DimensionError(f"labels are from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")
    return labels, kept


def _count(code: Any, dim: int, weight: Any, ignored: int) -> Any:
    """The divisor of the mean loss: the number of labels, or the sum of their weights.

    Of secret labels it is a shared number, but where all count alike.
    """
    if isinstance(code, SharedTensor) and (weight is not None or ignored != IGNORED):
        return code.sum()
    return float(code.sum()) if isinstance(code, Tensor) and not isinstance(code, SharedTensor) else (
        math.prod(code.shape) / max(1, code.shape[dim])
    )  # fmt: skip


def _times_code(context: Context, x: SharedTensor, code: Any) -> SharedTensor:
    """x times the weights of `_code`."""
    weighted = isinstance(code, Tensor) and code.is_floating_point()
    return torch.mul(x, code.to(x.dtype)) if weighted else times_code(context, x, code)


@row("nll_loss", aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, note="public or secret labels")
def nll_loss(context: Context, x: Cell, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple:
    dim = min(1, x.content.dim() - 1)
    code = _code(context, target, x.content.shape[dim], dim, weight, ignore_index)
    value = x.content
    taken = -_times_code(context, value if value.infinite is None else value.bounded(value.bound), code).sum(dim)
    if value.infinite is not None:  # whether a stand-in was taken is checked where the terms are added up
        taken.infinite = negated_infinite(replace(value.infinite, at=None, certain=False))
    count = _count(code, dim, weight, ignore_index)
    if isinstance(count, SharedTensor):
        loss = taken.sum() if reduction in (MEAN, SUM) else taken
        return torch.div(loss, count) if reduction == MEAN else loss, count
    if reduction == MEAN and not count:
        raise ArgumentError("the mean loss of no label is not a number: all are ignored, or there is none")
    loss = taken.sum() if reduction in (MEAN, SUM) else taken
    loss = times(context, loss, 1 / count, kept_bits(context, loss)) if reduction == MEAN else loss
    return loss, constant(context, taken.sum(), count)


for _forward, _backward in (
    (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
):
    VARYING |= {_forward: {1: labels_form}, _backward: {2: labels_form}}


@row("nll_loss", aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    context: Context, g: Cell, x: Cell, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any
) -> SharedTensor:
    dim = min(1, x.content.dim() - 1)
    code = _code(context, target, x.content.shape[dim], dim, weight, ignore_index)
    value = as_gradient(context, g.content)
    value = value.unsqueeze(dim) if reduction not in (MEAN, SUM) else value
    count = _count(code, dim, weight, ignore_index)
    if reduction == MEAN and isinstance(count, SharedTensor):
        value = as_gradient(context, finer_quotient(value, count))
    elif reduction == MEAN:
        value = times(context, value, 1 / count, kept_bits(context, value))
    return -_times_code(context, value, code)


@row("mse_loss", aten.mse_loss.default)
def mse_loss(context: Context, x: Any, y: Any, reduction: int = MEAN) -> SharedTensor:
    difference = content(x) - content(y)
    return _reduce(torch.square(difference), reduction)


@row("mse_loss", aten.mse_loss_backward.default)
def mse_loss_backward(context: Context, g: Cell, x: Any, y: Any, reduction: int) -> SharedTensor:
    difference = 2 * (content(x) - content(y))
    return _term_gradients(context, g, difference, reduction)


@row("bce_with_logits", aten.binary_cross_entropy_with_logits.default, note="error 5e-6 + 1e-6 |x|")
def bce_with_logits(
    context: Context, x: Cell, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> SharedTensor:
    """With a weight w of positive labels, as in torch: (1 - t) x + (1 + (w - 1) t) softplus(-x)."""
    value, t = operand(context, x), content(target)
    if pos_weight is None:
        loss = F.softplus(value) - torch.mul(value, t)
    else:
        loss = torch.mul(value, 1 - t) + torch.mul(F.softplus(-value), 1 + (content(pos_weight) - 1) * t)
    return _reduce(loss if weight is None else torch.mul(loss, content(weight)), reduction)


def _check_labels(target: Any, classes: int, ignored: int) -> None:
    """Raise DimensionError where labels are no classes: at Q for its own, at all parties for public ones.

    Labels that the step computes, and those of other parties, are not known yet.
    """
    if type(target) is Tensor and not target.is_meta:
        _check_public(target, classes, ignored)
    elif isinstance(target, DifferentiableTensor) and target.cell.pending is None and target.cell.deferred is None:
        labels = target.cell.content
        with labels.session.operation(labels.party):
            check_own_labels(Context(labels.session, labels.party, labels.scheme), labels, classes, ignored)


def cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = IGNORED,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Smoothed cross entropy of secret labels that are weighted or ignored, whose weights torch would look up.

    Both parts have the mean over the weights of the labels, which `nll_loss` has computed. Labels that somebody knows
    are checked first, before anything of the loss, or of the step that it is a part of, is sent.
    """
    numbers = isinstance(target, Tensor) and not target.is_floating_point()
    secret, plain = isinstance(target, SecretTensor) and numbers, weight is None and ignore_index == IGNORED
    dim = 1 if input.dim() > 1 else 0
    if numbers and input.dim():
        _check_labels(target, input.shape[dim], ignore_index)
    if not secret or label_smoothing <= 0 or plain or size_average is not None or reduce is not None:
        return NotImplemented
    classes = input.shape[dim]
    logs = F.log_softmax(input, dim).movedim(dim, -1).reshape((-1, classes))
    labels = target.reshape(-1)
    kept = 1 if ignore_index == IGNORED else (labels != ignore_index).to(logs.dtype)
    number = {"none": 0, "mean": MEAN, "sum": SUM}[reduction]
    taken, total = aten.nll_loss_forward(logs, labels, weight, number, ignore_index)
    even = -(logs if weight is None else logs * weight).sum(-1) * kept
    if reduction == "none":
        return (taken * (1 - label_smoothing) + even * (label_smoothing / classes)).reshape(target.shape)
    even = even.sum() / total if reduction == "mean" else even.sum()
    return taken * (1 - label_smoothing) + even * (label_smoothing / classes)


FUNCTIONS[F.cross_entropy] = cross_entropy
