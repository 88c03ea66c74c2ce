"""The losses of the estimators: squares, and logistic."""

from __future__ import annotations

from torch import Tensor

from ..ops.ranges import forbid
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import held, minus, plus, product, vouched, whole_bits
from ..training.functions import torch
from ..training.scale import at
from .descent import Loss
from .standard import Columns

CURVED_BITS = 18


class Squares(Loss):
    """Half the mean of squares of X w - y. y is taken in units of a power of two, by its bound.

    Attributes:
        unit_bits: coefficients are 2^unit_bits as large as those of the unit.
    """

    halvings = 0

    def __init__(self, made: Columns, y: SharedTensor):
        context, self._context = made.context, made.context
        self.unit_bits = whole_bits(y)
        y = held(context, y, self.unit_bits)
        self.bits = min(context.frac_bits + 6, HEADROOM_BITS - 4 - context.frac_bits - made.halves)
        self._room = HEADROOM_BITS - 1 - context.frac_bits - self.bits - made.halves
        self._y = vouched(context, y.like(y.shares, y.scale_bits + self.unit_bits, dtype=torch.float32), self.bits)

    def residual(self, z: SharedTensor) -> SharedTensor:
        found = minus(self._context, z, self._y)
        return found if z.bound is None else held(self._context, found.bounded(None), self._room)


class Logistic(Loss):
    """The mean of log(1 + e^z) - y z. Labels are 0 or 1, and both occur, which is checked in secret."""

    halvings = 2

    def __init__(self, made: Columns, y: SharedTensor):
        self._context, self.bits = made.context, made.context.frac_bits
        check_labels(made.context, y)
        self._y = vouched(made.context, y.like(y.shares, y.scale_bits, dtype=torch.float32), self.bits)
        self._probability: SharedTensor | None = None

    def residual(self, z: SharedTensor) -> SharedTensor:
        self._probability = at(self._context, torch.sigmoid(z), self.bits).bounded(None)
        return minus(self._context, self._probability, self._y)

    def weights(self) -> SharedTensor | None:
        p = self._probability
        if p is None:
            return None
        rest = plus(self._context, p.like(-p.shares), 1 << p.scale_bits)
        return product(self._context, torch.mul, p, rest, CURVED_BITS)


def check_labels(context: Context, y: SharedTensor) -> None:
    """Nothing is revealed unless each label is 0 or 1 and both occur. Rounds beside those of the fit."""
    y = held(context, y, 12)
    other = product(context, torch.mul, y, plus(context, y.bounded(None), -(1 << y.scale_bits)))
    forbid(context, -context.backend.is_zero(other.shares) + 1)
    count, n = context.backend.each(_count, y.shares), y.shares.shape.numel()
    enough = context.backend.at_least(count, (1, ((n - 1) << y.scale_bits) + 1))
    forbid(context, -enough[0] + 1)
    forbid(context, enough[1])


def _count(x: Tensor) -> Tensor:
    return x.sum().reshape(1)
