"""The usual losses, as values: what a party may compute on predictions that stay secret."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ShapeError
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import real, refuse, require, shortened, summand, typed
from .moments import mean_of_squares, standardised
from .powers import logarithm
from .ranges import domain_bits

UNIT_BITS = 30
"""Fraction bits of vectors of length one: a product of two fills 60."""


def _reduced(loss: Any, reduction: str, count: float | None = None) -> SharedTensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if count is None else loss.sum() / count


def _plain_options(size_average: Any, reduce: Any, weight: Any = None) -> None:
    if size_average is not None or reduce is not None:
        refuse("size_average and reduce", "use reduction=")
    if weight is not None:
        refuse("class weights in a loss", "weight the losses with reduction='none'")


@implements("mse_loss", F.mse_loss, note="result < 2^16; error 2e-6 + 1e-6 |result|")
def mse_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
             weight: Any = None) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    difference = x - y
    if reduction == "none":
        return difference.square()
    flat, count = difference.flatten(), difference.numel()
    if not count:
        return _reduced(flat.square(), reduction)
    total = mean_of_squares(context, flat, (0,), count if reduction == "mean" else 1, False)
    return typed(total, difference.dtype).reshape(())


@implements("l1_loss", F.l1_loss, note="exact")
def l1_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
            weight: Any = None) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    return _reduced((x - y).abs(), reduction)


@implements("huber_loss", F.huber_loss, note="error 2e-6 + 2e-6 |result|")
def huber_loss(
    context: Context, x: Any, y: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> SharedTensor:
    _plain_options(None, None, weight)
    difference = x - y
    if delta < 1:
        return _reduced(_smooth_l1(context, difference, delta) * delta, reduction)
    inside = difference.clamp(-delta, delta)
    _within(context, difference, delta)
    return _reduced(inside * (difference - inside * 0.5), reduction)


def _smooth_l1(context: Context, difference: SharedTensor, beta: float) -> torch.Tensor:
    """|d| - beta / 2, and d^2 / (2 beta) within beta, which is rounded to the last place, and is one at least."""
    last = 2.0**-context.frac_bits
    beta = max(last, round(beta / last) * last)
    inside = difference.clamp(-beta, beta)
    rest = difference - inside * 0.5
    if beta <= 1:
        return (inside / beta) * rest
    # Three bits more: a difference multiplies what the ratio is off by.
    ratio = shortened(context, inside * (8 / beta), context.frac_bits)
    return ratio.like(ratio.shares, ratio.scale_bits + 3, ratio.bound) * rest


def _within(context: Context, difference: SharedTensor, factor: float) -> None:
    """That a product of a difference with something up to a public factor stays in the ring, where that may fail."""
    most = 2.0 ** (HEADROOM_BITS - 2 * context.frac_bits)
    if factor * 2.0 ** (domain_bits(context) + 1) > most:
        require(context, difference, -most / factor, most / factor)


@implements("smooth_l1_loss", F.smooth_l1_loss, note="error 2e-6 + 2e-6 |result|")
def smooth_l1_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None,
                   reduction: str = "mean", beta: float = 1.0) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce)
    if beta == 0:
        return l1_loss(context, x, y, reduction=reduction)
    return _reduced(_smooth_l1(context, x - y, beta), reduction)


@implements("nll_loss", F.nll_loss, note="public targets")
def nll_loss(
    context: Context, x: SharedTensor, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    kept = _kept(target, ignore_index, reduction)
    dim = 1 if x.dim() > 1 else 0
    return _of_kept(-x.gather(dim, (target * kept).unsqueeze(dim)).squeeze(dim), kept, reduction)


def _kept(target: Any, ignore_index: int, reduction: str) -> torch.Tensor:
    """Which public targets count."""
    if isinstance(target, SharedTensor):
        refuse("nll_loss with secret targets", "use (one_hot * log_softmax).sum()")
    kept = target != ignore_index
    if reduction == "mean" and kept.numel() and not bool(kept.any()):
        refuse("the mean loss of no target", "all of them are ignored: use reduction='sum'")
    return kept


def _of_kept(loss: torch.Tensor, kept: torch.Tensor, reduction: str) -> SharedTensor:
    """Zero where a target does not count, and the mean over the others."""
    if bool(kept.all()):
        return _reduced(loss, reduction)
    return _reduced(loss * kept.long(), reduction, int(kept.sum()))


@implements(
    "cross_entropy", F.cross_entropy, note="public class targets, some of them ignored; or probabilities of any kind"
)
def cross_entropy(
    context: Context, x: SharedTensor, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    dim = 1 if x.dim() > 1 else 0
    label_smoothing = max(label_smoothing, 0.0)  # as torch has it
    if target.is_floating_point():
        logs = F.log_softmax(x, dim)
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
        return _reduced(-(logs * target).sum(dim), reduction)
    kept = _kept(target, ignore_index, reduction)
    logs = F.log_softmax(x, dim)
    loss = F.nll_loss(logs, target, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        loss = loss * (1 - label_smoothing) - logs.mean(dim) * label_smoothing
    return _of_kept(loss, kept, reduction)


@implements("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, note="error 5e-6 + 1e-6 |x|")
def bce_with_logits(
    context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", pos_weight: Any = None,
) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    if pos_weight is not None:
        refuse("pos_weight", "weight the losses with reduction='none'")
    return _reduced(F.softplus(x) - x * target, reduction)


@implements("binary_cross_entropy", F.binary_cross_entropy, note="as log; logarithms not below -100, as torch's")
def bce(context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
        reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce, weight)
    last = 2.0**-context.frac_bits
    require(context, summand(context, x), 0.0, 1.0 + last)
    yes, no = (_log(context, v, -100.0) for v in (x, 1 - x))
    return _reduced(-(yes * target + no * (1 - target)), reduction)


def _log(context: Context, x: Any, zero: float) -> Any:
    """log x, and `zero` where x is 0."""
    if not isinstance(x, SharedTensor):
        return torch.log(x).clamp(min=zero)
    return logarithm(context, x, zero)


@implements("kl_div", F.kl_div, note="log-probabilities against public or secret ones")
def kl_div(context: Context, x: Any, target: Any, size_average: Any = None, reduce: Any = None,
           reduction: str = "mean", log_target: bool = False) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce)
    if log_target:
        loss = torch.exp(target) * (target - x)
    elif isinstance(target, SharedTensor):
        require(context, target, 0.0)
        loss = target * (_log(context, target, 0.0) - x)
    else:
        loss = torch.special.xlogy(target, target) - x * target
    return _reduced(loss, reduction, x.shape[0] if reduction == "batchmean" else None)


@implements("soft_margin_loss", F.soft_margin_loss, note="error 5e-6")
def soft_margin_loss(context: Context, x: Any, target: Any, size_average: Any = None, reduce: Any = None,
                     reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce)
    if torch.broadcast_shapes(x.shape, target.shape) != x.shape:
        raise ShapeError(f"soft_margin_loss: targets of {list(target.shape)} for predictions of {list(x.shape)}")
    return _reduced(F.softplus(-x * target), reduction)


@implements("hinge_embedding_loss", F.hinge_embedding_loss, note="public targets")
def hinge_embedding_loss(context: Context, x: SharedTensor, target: Any, margin: float = 1.0, size_average: Any = None,
                         reduce: Any = None, reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce)
    if bool((target.abs() != 1).any()):
        refuse("hinge_embedding_loss with targets other than 1 and -1", "use those")
    return _reduced(torch.where(target == 1, x, torch.relu(margin - x)), reduction)


@implements("margin_ranking_loss", F.margin_ranking_loss, note="exact")
def margin_ranking_loss(context: Context, a: Any, b: Any, target: Any, margin: float = 0.0, size_average: Any = None,
                        reduce: Any = None, reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce)
    return _reduced(torch.relu((b - a) * target + margin), reduction)


@implements("poisson_nll_loss", F.poisson_nll_loss, note="log_input=True without full")
def poisson_nll_loss(
    context: Context, x: Any, target: Any, log_input: bool = True, full: bool = False, size_average: Any = None,
    eps: float = 1e-8, reduce: Any = None, reduction: str = "mean",
) -> SharedTensor:  # fmt: skip
    _plain_options(size_average, reduce)
    if full or not log_input:
        refuse("poisson_nll_loss with full=True or log_input=False", "give log rates, without full")
    return _reduced(torch.exp(x) - x * target, reduction)


@implements("cosine_similarity", F.cosine_similarity, torch.cosine_similarity, note="everywhere; error 4e-6")
def cosine_similarity(context: Context, a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> SharedTensor:
    shape = torch.broadcast_shapes(a.shape, b.shape)
    operands = (real(summand(context, v)).expand(shape) for v in (a, b))
    if eps > 2.0**-context.frac_bits:  # else of vectors that are not zero, the norm is above
        a, b = (F.normalize(v, dim=dim, eps=eps) for v in operands)
        return (a * b).sum(dim)
    units = (standardised(context, v, (dim,), 0.0, False, unit=True) for v in operands)
    a, b = (shortened(context, v, UNIT_BITS) for v in units)
    backend = context.backend
    product = backend.each(torch.sum, backend.multiply(torch.mul, a.shares, b.shares), dim)
    return shortened(context, a.like(product, a.scale_bits + b.scale_bits), 2 * context.frac_bits)
