"""The usual losses, as values: what a party may compute on predictions that stay secret."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ShapeError
from ..table import Context, Fixed, implements
from ..tensor import SharedTensor
from .common import fixed, refuse


def _reduced(loss: Any, reduction: str, count: float | None = None) -> Fixed:
    if reduction == "none":
        return fixed(loss)
    if reduction == "sum":
        return fixed(loss.sum())
    return fixed(loss.mean() if count is None else loss.sum() / count)


def _plain_options(size_average: Any, reduce: Any, weight: Any = None) -> None:
    if size_average is not None or reduce is not None:
        refuse("size_average and reduce", "use reduction=")
    if weight is not None:
        refuse("class weights in a loss", "weight the losses with reduction='none'")


@implements("mse_loss", F.mse_loss, note="1 round")
def mse_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
             weight: Any = None) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    return _reduced((x - y).square(), reduction)


@implements("l1_loss", F.l1_loss, note="exact")
def l1_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
            weight: Any = None) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    return _reduced((x - y).abs(), reduction)


@implements("huber_loss", F.huber_loss, note="exact")
def huber_loss(
    context: Context, x: Any, y: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> Fixed:
    _plain_options(None, None, weight)
    difference = x - y
    inside = difference.clamp(-delta, delta)
    return _reduced(inside * (difference - inside * 0.5), reduction)


@implements("smooth_l1_loss", F.smooth_l1_loss, note="exact")
def smooth_l1_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None,
                   reduction: str = "mean", beta: float = 1.0) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce)
    if beta == 0:
        return l1_loss(context, x, y, reduction=reduction)
    return _reduced(F.huber_loss(x, y, "none", beta) / beta, reduction)


@implements("nll_loss", F.nll_loss, note="public targets")
def nll_loss(
    context: Context, x: SharedTensor, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    if isinstance(target, SharedTensor):
        refuse("nll_loss with secret targets", "use (one_hot * log_softmax).sum()")
    if bool((target == ignore_index).any()):
        refuse("nll_loss with ignored targets", "leave those rows out")
    dim = 1 if x.dim() > 1 else 0
    return _reduced(-x.gather(dim, target.unsqueeze(dim)).squeeze(dim), reduction)


@implements("cross_entropy", F.cross_entropy, note="public class targets, or probabilities of any kind")
def cross_entropy(
    context: Context, x: SharedTensor, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    dim = 1 if x.dim() > 1 else 0
    logs = F.log_softmax(x, dim)
    if target.is_floating_point():
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
        loss = -(logs * target).sum(dim)
    else:
        loss = F.nll_loss(logs, target, reduction="none")
        if label_smoothing:
            loss = loss * (1 - label_smoothing) - logs.mean(dim) * label_smoothing
    return _reduced(loss, reduction)


@implements("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, note="error 5e-6")
def bce_with_logits(
    context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", pos_weight: Any = None,
) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    if pos_weight is not None:
        refuse("pos_weight", "weight the losses with reduction='none'")
    return _reduced(F.softplus(x) - x * target, reduction)


@implements("binary_cross_entropy", F.binary_cross_entropy, note="probabilities in [2^-14, 1 - 2^-14]")
def bce(context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
        reduction: str = "mean") -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    return _reduced(-(torch.log(x) * target + torch.log(1 - x) * (1 - target)), reduction)


@implements("kl_div", F.kl_div, note="log-probabilities against public or secret ones")
def kl_div(context: Context, x: Any, target: Any, size_average: Any = None, reduce: Any = None,
           reduction: str = "mean", log_target: bool = False) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce)
    if log_target:
        loss = torch.exp(target) * (target - x)
    elif isinstance(target, SharedTensor):
        loss = target * (torch.log(target) - x)
    else:
        loss = torch.special.xlogy(target, target) - x * target
    return _reduced(loss, reduction, x.shape[0] if reduction == "batchmean" else None)


@implements("soft_margin_loss", F.soft_margin_loss, note="error 5e-6")
def soft_margin_loss(context: Context, x: Any, target: Any, size_average: Any = None, reduce: Any = None,
                     reduction: str = "mean") -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce)
    if torch.broadcast_shapes(x.shape, target.shape) != x.shape:
        raise ShapeError(f"soft_margin_loss: targets of {list(target.shape)} for predictions of {list(x.shape)}")
    return _reduced(F.softplus(-x * target), reduction)


@implements("hinge_embedding_loss", F.hinge_embedding_loss, note="public targets")
def hinge_embedding_loss(context: Context, x: SharedTensor, target: Any, margin: float = 1.0, size_average: Any = None,
                         reduce: Any = None, reduction: str = "mean") -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce)
    if bool((target.abs() != 1).any()):
        refuse("hinge_embedding_loss with targets other than 1 and -1", "use those")
    return _reduced(torch.where(target == 1, x, torch.relu(margin - x)), reduction)


@implements("margin_ranking_loss", F.margin_ranking_loss, note="exact")
def margin_ranking_loss(context: Context, a: Any, b: Any, target: Any, margin: float = 0.0, size_average: Any = None,
                        reduce: Any = None, reduction: str = "mean") -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce)
    return _reduced(torch.relu((b - a) * target + margin), reduction)


@implements("poisson_nll_loss", F.poisson_nll_loss, note="log_input=True without full")
def poisson_nll_loss(
    context: Context, x: Any, target: Any, log_input: bool = True, full: bool = False, size_average: Any = None,
    eps: float = 1e-8, reduce: Any = None, reduction: str = "mean",
) -> Fixed:  # fmt: skip
    _plain_options(size_average, reduce)
    if full or not log_input:
        refuse("poisson_nll_loss with full=True or log_input=False", "give log rates, without full")
    return _reduced(torch.exp(x) - x * target, reduction)


@implements("cosine_similarity", F.cosine_similarity, torch.cosine_similarity, note="error 1e-5")
def cosine_similarity(context: Context, a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Fixed:
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = (F.normalize(v.expand(shape), dim=dim) for v in (a, b))
    return fixed((a * b).sum(dim))
