"""Losses of distances, classes and densities: what metric learning and classification use beside the usual ones."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError, ShapeError
from ..tensor import SharedTensor
from ..tensor.table import COMPOSED, ON_META, Context, implements, stepwise
from .common import is_secret, refuse, require
from .losses import _plain_options, _reduced


def _public_targets(name: str, target: Any) -> None:
    if is_secret(target):
        refuse(f"{name} with secret targets", "compute it from torch.where, or give public targets")


@implements("triplet_margin_loss", F.triplet_margin_loss, note="as pairwise_distance")
@stepwise
def triplet_margin_loss(
    context: Context, anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Balntas et al., BMVC 2016: max(0, d(a, p) - d(a, n) + margin)."""
    _plain_options(size_average, reduce)
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
    return _reduced(torch.relu(distance(anchor, positive) - far + margin), reduction)


def _triplet_with_distance(
    anchor: Any, positive: Any, negative: Any, *, distance_function: Any = None, margin: float = 1.0,
    swap: bool = False, reduction: str = "mean",
) -> Any:  # fmt: skip
    """The same with a distance of the caller's, which is made of torch functions."""
    return _triplet(distance_function or F.pairwise_distance, anchor, positive, negative, margin, swap, reduction)


COMPOSED[F.triplet_margin_with_distance_loss] = _triplet_with_distance


@implements("cosine_embedding_loss", F.cosine_embedding_loss, note="error 1e-5; secret targets are compared")
@stepwise
def cosine_embedding_loss(
    context: Context, x: Any, y: Any, target: Any, margin: float = 0.0, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    _plain_options(size_average, reduce)
    cosine = F.cosine_similarity(x, y, -1)
    near, far = 1 - cosine, torch.relu(cosine - margin)
    return _reduced(near * (target == 1).to(near.dtype) + far * (target == -1).to(far.dtype), reduction)


def _checked_variances(x: Any, target: Any, var: Any, reduction: str = "mean") -> Any:
    """torch's rule for the shape of variances; a number stands for all."""
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
    """torch looks at the variances' content."""
    x, var = input, _checked_variances(input, target, var)
    loss = 0.5 * ((x - target) ** 2 / var + x * 0)
    return loss if reduction == "none" else loss.sum()


ON_META[F.gaussian_nll_loss] = _gaussian_on_meta


@implements(
    "gaussian_nll_loss",
    F.gaussian_nll_loss,
    note="|x - y| / v below the limit; v >= 2^-16 for shared v; error as div, log",
)
@stepwise
def gaussian_nll_loss(
    context: Context, x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Nix and Weigend, ICNN 1994: half of log v + (x - y)^2 / v."""
    var = _checked_variances(x, target, var)
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
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@implements("multi_margin_loss", F.multi_margin_loss, note="public targets; exact but for its mean")
@stepwise
def multi_margin_loss(
    context: Context, x: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Crammer and Singer, JMLR 2001: of each class but the right one max(0, margin - x_right + x)^p, over all."""
    _plain_options(size_average, reduce, weight)
    _public_targets("multi_margin_loss", target)
    rows = x.unsqueeze(0) if x.dim() < 2 else x
    rows = rows.unsqueeze(0) if rows.dim() < 2 else rows
    target = target.reshape(-1, 1)
    short = torch.relu(rows - rows.gather(1, target) + margin)
    short = short * (1 - F.one_hot(target.squeeze(1), rows.shape[1])).to(x.dtype)
    loss = (short if p == 1 else short.square()).sum(1) / rows.shape[1]
    return _reduced(loss if x.dim() > 1 else loss.reshape(()), reduction)


@implements("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, note="as binary_cross_entropy_with_logits")
@stepwise
def multilabel_soft_margin_loss(
    context: Context, x: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    _plain_options(size_average, reduce)
    target = target if isinstance(target, torch.Tensor) else torch.tensor(target)
    if torch.broadcast_shapes(x.shape, target.shape) != x.shape:
        raise ShapeError(f"multilabel_soft_margin_loss: targets of {list(target.shape)} for {list(x.shape)}")
    loss = F.softplus(x) - x * target
    loss = loss if weight is None else loss * weight
    return _reduced(loss.mean(-1), reduction)
