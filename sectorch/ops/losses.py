"""Losses, as values, on secret predictions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError, ShapeError
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import COMPOSED, ON_META, Context, implements, stepwise
from .common import as_floating, domain_bits, is_secret, refuse, require, round_scale, summand, with_dtype
from .indexing import IGNORED, check_own_labels, code_of_labels
from .normalization import mean_of_squares, standardize
from .smooth import logarithm

UNIT_BITS = 30
"""Fraction bits of vectors of length one: a product of two has 60."""


def _reduce(loss: Any, reduction: str, count: float | None = None) -> SharedTensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if count is None else loss.sum() / count


def _refuse_options(size_average: Any, reduce: Any, weight: Any = None) -> None:
    if size_average is not None or reduce is not None:
        refuse("size_average and reduce", "use reduction=")
    if weight is not None:
        refuse("class weights in a loss", "weight the losses with reduction='none'")


@implements("mse_loss", F.mse_loss, note="result < 2^16; error 2e-6 + 1e-6 |result|")
def mse_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
             weight: Any = None) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce, weight)
    difference = x - y
    if reduction == "none":
        return difference.square()
    flat, count = difference.flatten(), difference.numel()
    if not count:
        return _reduce(flat.square(), reduction)
    total = mean_of_squares(context, flat, (0,), count if reduction == "mean" else 1, False)
    return with_dtype(total, difference.dtype).reshape(())


@implements("l1_loss", F.l1_loss, note="exact")
def l1_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
            weight: Any = None) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce, weight)
    return _reduce((x - y).abs(), reduction)


@implements("huber_loss", F.huber_loss, note="error 2e-6 + 2e-6 |result|")
def huber_loss(
    context: Context, x: Any, y: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> SharedTensor:
    _refuse_options(None, None, weight)
    difference = x - y
    if delta < 1:
        return _reduce(_smooth_l1(context, difference, delta) * delta, reduction)
    inside = difference.clamp(-delta, delta)
    _require_product_fits(context, difference, delta)
    return _reduce(inside * (difference - inside * 0.5), reduction)


def _smooth_l1(context: Context, difference: SharedTensor, beta: float) -> torch.Tensor:
    """|d| - beta / 2, and d^2 / (2 beta) for |d| < beta. beta is rounded to a multiple of 2^-f, at least 2^-f."""
    last = 2.0**-context.frac_bits
    beta = max(last, round(beta / last) * last)
    inside = difference.clamp(-beta, beta)
    rest = difference - inside * 0.5
    if beta <= 1:
        return (inside / beta) * rest
    # Three bits more: the difference multiplies the error of the ratio.
    ratio = round_scale(context, inside * (8 / beta), context.frac_bits)
    return ratio.like(ratio.shares, ratio.scale_bits + 3, ratio.bound) * rest


def _require_product_fits(context: Context, difference: SharedTensor, factor: float) -> None:
    """Check that the product of a difference with numbers up to a public factor stays in the ring, if it may not."""
    most = 2.0 ** (HEADROOM_BITS - 2 * context.frac_bits)
    if factor * 2.0 ** (domain_bits(context) + 1) > most:
        require(context, difference, -most / factor, most / factor)


@implements("smooth_l1_loss", F.smooth_l1_loss, note="error 2e-6 + 2e-6 |result|")
def smooth_l1_loss(context: Context, x: Any, y: Any, size_average: Any = None, reduce: Any = None,
                   reduction: str = "mean", beta: float = 1.0) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    if beta == 0:
        return l1_loss(context, x, y, reduction=reduction)
    return _reduce(_smooth_l1(context, x - y, beta), reduction)


@implements("nll_loss", F.nll_loss, note="public or secret targets")
def nll_loss(
    context: Context, x: SharedTensor, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = IGNORED, reduce: Any = None, reduction: str = "mean",
) -> SharedTensor:  # fmt: skip
    """Where the mean is over secret weights (of secret targets, or secret ones themselves) it is a quotient of two
    shared numbers."""
    _refuse_options(size_average, reduce)
    loss, count = _class_losses(context, x, target, weight, ignore_index, reduction)
    return _reduce_counted(loss, count, reduction)


def _class_losses(
    context: Context, x: SharedTensor, target: Any, weight: Any, ignore_index: int, reduction: str
) -> tuple[Any, Any]:
    """For each target minus the entry of x in its class, times the weight of the class; and these weights.

    The weights are a boolean mask where all classes count alike and the targets are public.
    """
    dim = 1 if x.dim() > 1 else 0
    if not isinstance(target, SharedTensor):
        kept = _counted_targets(target, ignore_index, reduction)
        loss = -x.gather(dim, (target * kept).unsqueeze(dim)).squeeze(dim)
        if weight is None:
            return loss if bool(kept.all()) else loss * kept.long(), kept
        count = weight[target * kept] * kept.long()
        return loss * count, count
    code = code_of_labels(context, target, x.shape[dim], ignore_index).to(x.dtype)
    taken = -(x * code.movedim(-1, dim))
    if weight is None:
        counted = torch.ones_like(target, dtype=torch.bool) if ignore_index == IGNORED else code.sum(-1)
        return taken.sum(dim), counted
    return (taken * _of_classes(weight, x)).sum(dim), (code * weight).sum(-1)


def _of_classes(weight: Any, x: Any) -> Any:
    """The weights of classes, in the dimension that they have in x."""
    return weight.reshape((1, -1, *(1,) * (x.dim() - 2))) if x.dim() > 1 else weight


def _counted_targets(target: Any, ignore_index: int, reduction: str) -> torch.Tensor:
    """A mask of the public targets that are not ignored."""
    kept = target != ignore_index
    if reduction == "mean" and kept.numel() and not bool(kept.any()):
        refuse("the mean loss of no target", "all of them are ignored: use reduction='sum'")
    return kept


def _reduce_counted(loss: Any, count: Any, reduction: str) -> SharedTensor:
    """The reduction of losses, whose mean is over the weights `count`; ignored targets count as zero."""
    if reduction != "mean" or (not is_secret(count) and count.dtype == torch.bool and bool(count.all())):
        return _reduce(loss, reduction)
    total = count.sum()
    return loss.sum() / (total if is_secret(total) else total.item())


@implements("cross_entropy", F.cross_entropy,
            note="class targets, some of them ignored; or probabilities of any kind", exact=False)  # fmt: skip
def cross_entropy(
    context: Context, x: SharedTensor, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = IGNORED, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    dim = 1 if x.dim() > 1 else 0
    label_smoothing = max(label_smoothing, 0.0)  # as torch has it
    if target.is_floating_point():
        logs: Any = F.log_softmax(x, dim)
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
        terms = logs * target
        return _reduce(-(terms if weight is None else terms * _of_classes(weight, x)).sum(dim), reduction)
    if not isinstance(target, SharedTensor):
        _counted_targets(target, ignore_index, reduction)
    else:
        check_own_labels(context, target, x.shape[dim], ignore_index)
    logs = F.log_softmax(x, dim)
    loss, count = _class_losses(context, logs, target, weight, ignore_index, reduction)
    if label_smoothing:
        even = _evenly(context, logs, target, weight, ignore_index, dim)
        loss = loss * (1 - label_smoothing) - even * label_smoothing
    return _reduce_counted(loss, count, reduction)


def _evenly(context: Context, logs: Any, target: Any, weight: Any, ignore_index: int, dim: int) -> Any:
    """The mean of the classes' logarithms, times their weights; zero where the target is ignored."""
    even = logs.mean(dim) if weight is None else (logs * _of_classes(weight, logs)).mean(dim)
    if not isinstance(target, SharedTensor):
        kept = target != ignore_index
        return even if bool(kept.all()) else even * kept.long()
    if ignore_index == IGNORED:
        return even
    return even * code_of_labels(context, target, logs.shape[dim], ignore_index).sum(-1).to(logs.dtype)


@implements("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits,
            note="error 5e-6 + 1e-6 |x|", exact=False)  # fmt: skip
def bce_with_logits(
    context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", pos_weight: Any = None,
) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    if pos_weight is None:
        loss = F.softplus(x) - x * target
    else:
        loss = (1 - target) * x + F.softplus(-x) * (target * (pos_weight - 1) + 1)
    return _reduce(loss if weight is None else loss * weight, reduction)


@implements("binary_cross_entropy", F.binary_cross_entropy,
            note="as log; logarithms not below -100, as torch's", exact=False)  # fmt: skip
def bce(context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
        reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    last = 2.0**-context.frac_bits
    require(context, summand(context, x), 0.0, 1.0 + last)
    yes, no = (_log(context, v, -100.0) for v in (x, 1 - x))
    loss = -(yes * target + no * (1 - target))
    return _reduce(loss if weight is None else loss * weight, reduction)


def _log(context: Context, x: Any, zero: float) -> Any:
    """log x, and `zero` where x is 0."""
    if not isinstance(x, SharedTensor):
        return torch.log(x).clamp(min=zero)
    return logarithm(context, x, zero)


@implements("kl_div", F.kl_div, note="log-probabilities against public or secret ones", exact=False)
def kl_div(context: Context, x: Any, target: Any, size_average: Any = None, reduce: Any = None,
           reduction: str = "mean", log_target: bool = False) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    if log_target:
        loss = torch.exp(target) * (target - x)
    elif isinstance(target, SharedTensor):
        require(context, target, 0.0)
        loss = target * (_log(context, target, 0.0) - x)
    else:
        loss = torch.special.xlogy(target, target) - x * target
    return _reduce(loss, reduction, x.shape[0] if reduction == "batchmean" else None)


@implements("soft_margin_loss", F.soft_margin_loss, note="error 5e-6", exact=False)
def soft_margin_loss(context: Context, x: Any, target: Any, size_average: Any = None, reduce: Any = None,
                     reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    if torch.broadcast_shapes(x.shape, target.shape) != x.shape:
        raise ShapeError(f"soft_margin_loss: targets of {list(target.shape)} for predictions of {list(x.shape)}")
    return _reduce(F.softplus(-x * target), reduction)


@implements("hinge_embedding_loss", F.hinge_embedding_loss, note="public targets")
def hinge_embedding_loss(context: Context, x: SharedTensor, target: Any, margin: float = 1.0, size_average: Any = None,
                         reduce: Any = None, reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    if bool((target.abs() != 1).any()):
        refuse("hinge_embedding_loss with targets other than 1 and -1", "use those")
    return _reduce(torch.where(target == 1, x, torch.relu(margin - x)), reduction)


@implements("margin_ranking_loss", F.margin_ranking_loss, note="exact")
def margin_ranking_loss(context: Context, a: Any, b: Any, target: Any, margin: float = 0.0, size_average: Any = None,
                        reduce: Any = None, reduction: str = "mean") -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    return _reduce(torch.relu((b - a) * target + margin), reduction)


@implements("poisson_nll_loss", F.poisson_nll_loss, note="log_input=True without full", exact=False)
def poisson_nll_loss(
    context: Context, x: Any, target: Any, log_input: bool = True, full: bool = False, size_average: Any = None,
    eps: float = 1e-8, reduce: Any = None, reduction: str = "mean",
) -> SharedTensor:  # fmt: skip
    _refuse_options(size_average, reduce)
    if full or not log_input:
        refuse("poisson_nll_loss with full=True or log_input=False", "give log rates, without full")
    return _reduce(torch.exp(x) - x * target, reduction)


@implements("cosine_similarity", F.cosine_similarity, torch.cosine_similarity,
            note="everywhere; error 4e-6", exact=False, at_most=4.0)  # fmt: skip
def cosine_similarity(context: Context, a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> SharedTensor:
    shape = torch.broadcast_shapes(a.shape, b.shape)
    operands = (as_floating(summand(context, v)).expand(shape) for v in (a, b))
    if eps > 2.0**-context.frac_bits:  # otherwise the norm of any vector but zero is larger
        a, b = (F.normalize(v, dim=dim, eps=eps) for v in operands)
        return (a * b).sum(dim)
    units = (standardize(context, v, (dim,), 0.0, False, unit=True) for v in operands)
    a, b = (round_scale(context, v, UNIT_BITS) for v in units)
    backend = context.backend
    product = backend.each(torch.sum, backend.multiply(torch.mul, a.shares, b.shares), dim)
    return round_scale(context, a.like(product, a.scale_bits + b.scale_bits), 2 * context.frac_bits)


# Losses of distances, margins and densities.


@implements("triplet_margin_loss", F.triplet_margin_loss, note="as pairwise_distance", exact=False)
@stepwise
def triplet_margin_loss(
    context: Context, anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Balntas et al., BMVC 2016: max(0, d(a, p) - d(a, n) + margin)."""
    _refuse_options(size_average, reduce)
    distance = lambda x, y: F.pairwise_distance(x, y, p, eps)
    return _triplet(distance, anchor, positive, negative, margin, swap, reduction)


def _triplet(
    distance: Any, anchor: Any, positive: Any, negative: Any, margin: float, swap: bool, reduction: str
) -> Any:
    if not margin > 0:
        raise ArgumentError(f"margin must be greater than 0, got {margin}")
    far = distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return _reduce(torch.relu(distance(anchor, positive) - far + margin), reduction)


def _triplet_with_distance(
    anchor: Any, positive: Any, negative: Any, *, distance_function: Any = None, margin: float = 1.0,
    swap: bool = False, reduction: str = "mean",
) -> Any:  # fmt: skip
    """The triplet loss with a distance function of the caller's, which is made of torch functions."""
    return _triplet(distance_function or F.pairwise_distance, anchor, positive, negative, margin, swap, reduction)


COMPOSED[F.triplet_margin_with_distance_loss] = _triplet_with_distance


@implements("cosine_embedding_loss", F.cosine_embedding_loss,
            note="error 1e-5; secret targets are compared", exact=False)  # fmt: skip
@stepwise
def cosine_embedding_loss(
    context: Context, x: Any, y: Any, target: Any, margin: float = 0.0, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    _refuse_options(size_average, reduce)
    cosine = F.cosine_similarity(x, y, -1)
    near, far = 1 - cosine, torch.relu(cosine - margin)
    return _reduce(near * (target == 1).to(near.dtype) + far * (target == -1).to(far.dtype), reduction)


def variances(x: Any, target: Any, var: Any, reduction: str = "mean") -> Any:
    """The variances, checked by torch's rule for their shape. A number stands for all."""
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ArgumentError(f"gaussian_nll_loss: a variance is not negative, got {var}")
        return var
    if var.shape == x.shape or (var.dim() and var.shape[-1] == 1 and var.shape[:-1] == x.shape[:-1]):
        return var
    if var.shape == x.shape[:-1]:
        return var.unsqueeze(-1)
    raise ShapeError(f"gaussian_nll_loss: variances of {list(var.shape)} for predictions of {list(x.shape)}")


def _gaussian_on_meta(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
):
    """torch itself reads the variances' content."""
    x, var = input, variances(input, target, var)
    loss = 0.5 * ((x - target) ** 2 / var + x * 0)
    return loss if reduction == "none" else loss.sum()


ON_META[F.gaussian_nll_loss] = _gaussian_on_meta


@implements("gaussian_nll_loss", F.gaussian_nll_loss,
            note="|x - y| / v below the limit; v >= 2^-16 for shared v; error as div, log", exact=False)  # fmt: skip
@stepwise
def gaussian_nll_loss(
    context: Context, x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Nix and Weigend, ICNN 1994: half of log v + (x - y)^2 / v."""
    var = variances(x, target, var)
    if isinstance(var, SharedTensor):
        require(context, var, low=0.0)
        var = var.clamp_min(max(eps, 2.0**-16))
    elif is_secret(var):
        refuse("gaussian_nll_loss with a model's own variances", "share them, or compute the loss from its parts")
    else:
        var = torch.as_tensor(var, dtype=x.dtype)
        if bool((var < 0).any()):
            raise ArgumentError("gaussian_nll_loss: a variance is not negative, and one is")
        var = var.clamp(min=eps)
    difference = x - target
    loss = (torch.log(var) + difference * (difference / var)) * 0.5
    return _reduce(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@implements("multi_margin_loss", F.multi_margin_loss, note="public targets; exact but for its mean")
@stepwise
def multi_margin_loss(
    context: Context, x: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Crammer and Singer, JMLR 2001: of each class but the right one max(0, margin - x_right + x)^p, over all."""
    _refuse_options(size_average, reduce)
    if is_secret(target):
        refuse("multi_margin_loss with secret targets", "compute it from torch.where, or give public targets")
    rows = x.unsqueeze(0) if x.dim() < 2 else x
    rows = rows.unsqueeze(0) if rows.dim() < 2 else rows
    target = target.reshape(-1, 1)
    short = torch.relu(rows - rows.gather(1, target) + margin)
    short = short * (1 - F.one_hot(target.squeeze(1), rows.shape[1])).to(x.dtype)
    loss = (short if p == 1 else short.square()).sum(1) / rows.shape[1]
    loss = loss if weight is None else loss * weight[target.squeeze(1)]
    return _reduce(loss if x.dim() > 1 else loss.reshape(()), reduction)


@implements("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss,
            note="as binary_cross_entropy_with_logits", exact=False)  # fmt: skip
@stepwise
def multilabel_soft_margin_loss(
    context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    _refuse_options(size_average, reduce)
    target = target if isinstance(target, torch.Tensor) else torch.tensor(target)
    if torch.broadcast_shapes(x.shape, target.shape) != x.shape:
        raise ShapeError(f"multilabel_soft_margin_loss: targets of {list(target.shape)} for {list(x.shape)}")
    loss = F.softplus(x) - x * target
    loss = loss if weight is None else loss * weight
    return _reduce(loss.mean(-1), reduction)


# Connectionist temporal classification.


BELOW = 64.0
"""What is taken from a path that is not there: exp(-64) is nothing."""


def ctc_loss(log_probs: Any, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
             reduction: str = "mean", zero_infinity: bool = False) -> Any:  # fmt: skip
    """The logarithm of the sum over all alignments (Graves et al., ICML 2006), with public targets and lengths.

    An alignment goes through the labels with blanks between them; which places can be reached is public. The gradient
    is torch's, which takes `log_probs` for the result of a log_softmax.

    Raises:
        UnsupportedOpError: secret targets or lengths.
        ArgumentError: a target that is longer than its input allows, without `zero_infinity`.
    """
    if any(is_secret(v) for v in (targets, input_lengths, target_lengths)):
        refuse("ctc_loss of secret targets or lengths", "an alignment's places would be secret: give public ones")
    if log_probs.dim() in (2, 3):  # what torch says of the arguments
        torch.ctc_loss(torch.zeros(log_probs.shape), targets, input_lengths, target_lengths, blank)
    numbers = lambda v: v.flatten().tolist() if isinstance(v, torch.Tensor) else [v] if isinstance(v, int) else list(v)
    x = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    (steps, batch, _), ends, lengths = x.shape, numbers(input_lengths), numbers(target_lengths)
    flat = targets.flatten().tolist() if targets.dim() == 1 and log_probs.dim() == 3 else None
    begins = [sum(lengths[:n]) for n in range(batch)]
    rows = targets if targets.dim() == 2 else targets.unsqueeze(0)
    labels = [flat[b : b + n] if flat is not None else rows[k, :n].tolist()
              for k, (b, n) in enumerate(zip(begins, lengths, strict=True))]  # fmt: skip
    size = 2 * max(lengths) + 1
    codes = torch.full((batch, size), blank)
    for k, own in enumerate(labels):
        codes[k, 1 : 2 * len(own) : 2] = torch.tensor(own, dtype=torch.long)
    place = torch.arange(size)
    jumps = torch.zeros(batch, size, dtype=torch.bool)
    jumps[:, 2:] = (codes[:, 2:] != blank) & (codes[:, 2:] != codes[:, :-2])
    there = (place < 2).expand(batch, size) & (place < 2 * torch.tensor(lengths)[:, None] + 1)
    inside = place < 2 * torch.tensor(lengths)[:, None] + 1
    paths, found = [x[0].gather(1, codes)], [there]
    for t in range(1, steps):
        before = torch.stack([(place - k).clamp_min(0).expand(batch, size) for k in range(3)], 1)
        open_ = torch.stack([F.pad(there, (k, -k)) & (jumps if k == 2 else inside) for k in range(3)], 1)
        first = open_.int().argmax(1, keepdim=True)
        before = torch.where(open_, before, before.gather(1, first))
        absent = BELOW * (~open_ & open_.any(1, keepdim=True)).to(x.dtype)
        came = paths[-1].gather(1, before.flatten(1)).unflatten(1, (3, size)) - absent
        paths.append(torch.logsumexp(came, 1) + x[t].gather(1, codes))
        there = open_.any(1) & inside
        found.append(there)
    losses = []
    for k, (end, n) in enumerate(zip(ends, lengths, strict=True)):
        last = [s for s in (2 * n, 2 * n - 1) if s >= 0 and end > 0 and bool(found[end - 1][k, s])]
        if not last and not zero_infinity:
            raise ArgumentError(f"ctc_loss: {end} inputs have no alignment with {n} labels; give zero_infinity=True")
        total = x[0, k, 0] * 0.0 if not last else -torch.logsumexp(paths[end - 1][k, last], 0)
        if last:
            probability = x[:end, k].exp()
            total = total + (probability - probability.detach()).sum()
        losses.append(total)
    loss = torch.stack(losses)
    if reduction == "mean":
        loss = loss / torch.tensor(lengths, dtype=x.dtype).clamp_min(1)
    loss = loss if log_probs.dim() == 3 or reduction != "none" else loss[0]
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


COMPOSED[F.ctc_loss] = COMPOSED[torch.ctc_loss] = ctc_loss
