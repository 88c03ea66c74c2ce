"""Accuracy, balanced accuracy, and the fairness criteria of CaPC's appendix D."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import CaPCError


@dataclass(frozen=True)
class Scores:
    """How well predictions fit: the fraction of right ones, and the recall of each class (NaN where it has no sample).

    `balanced` is the mean of the recalls (definition 9).
    """

    accuracy: float
    per_class: list[float]

    @property
    def balanced(self) -> float:
        there = [value for value in self.per_class if value == value]
        return sum(there) / len(there)


def scores(predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> Scores:
    """Of predicted classes [N] against true ones [N]."""
    _check(predicted, labels)
    right = predicted == labels
    recalls = [float(right[labels == k].double().mean()) for k in range(classes)]
    return Scores(float(right.double().mean()), recalls)


def equal_opportunity(predicted: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, favoured: int = 1) -> float:
    """The largest difference between groups of Pr[prediction = favoured | label = favoured] (definition 11); 0 is fair.

    Args:
        group: [N], the protected attribute A, with any number of values.
    """
    return _spread(predicted == favoured, labels == favoured, group)


def equalized_odds(predicted: torch.Tensor, labels: torch.Tensor, group: torch.Tensor) -> float:
    """The largest difference between groups of Pr[prediction = k | label = y] over all k and y (definition 10, for any
    number of classes); 0 is fair. Combinations that only one group has do not count.
    """
    _check(predicted, labels, group)
    kinds = torch.cat((predicted, labels)).unique()
    return max(_spread(predicted == k, labels == y, group) for k in kinds for y in labels.unique())


def _spread(hit: torch.Tensor, among: torch.Tensor, group: torch.Tensor) -> float:
    """Largest less smallest rate of `hit` among `among`, over the groups that have any."""
    _check(hit, among, group)
    rates = [hit[among & (group == a)].double().mean() for a in group.unique() if bool((among & (group == a)).any())]
    return float(max(rates) - min(rates)) if rates else 0.0


def _check(*vectors: torch.Tensor) -> None:
    shapes = {tuple(v.shape) for v in vectors}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1 or not len(vectors[0]):
        raise CaPCError(f"predictions, labels and groups are vectors of one length from 1, got {sorted(shapes)}")
