"""Minima of penalised losses on shares: Newton's steps in secret, and a certificate that the gradient is small.

Both losses have the gradient Xs^T r / N + q v in standardised columns (`standard.py`), r = prediction - y. A round
takes three steps of descent by Z, nearly the inverse of the curvature, with momentum; logistic regression then takes
up the curvature of where it is. It begins with a bound of every curvature, Xs^T Xs / 4 N + q (Boehning and Lindsay,
"Monotonicity of quadratic-approximation algorithms", 1988), and inverts each curvature from the inverse of the one
before, which is near (`curvature.py`).

How many rounds is public and does not depend on the data: nobody learns when it came near. What decides is the
certificate: the gradient at the final coefficients is computed once more, this time with every range checked, and
unless it is below `tol` in each coordinate nothing is revealed. No step before it has to be right, and none is checked.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..training.arithmetic import crossed, diagonal, held, matmul, minus, plus, product, vouched
from ..training.scale import at
from .curvature import H_BITS, begun, inverted, steps_for
from .standard import COEFFICIENT_BITS, Columns, certain

INNER = 3
"""Steps of a round."""

REFRESHED = 3
"""Steps of the inverse from one curvature to the next."""

V_BITS, STATE_BITS, GRADIENT_BITS, PROBE_BITS = 26, 40, 30, 10
"""Fraction bits of coefficients as factors, as a sum of steps, of the gradient, and of the coefficients that show how
large predictions are."""


class Loss:
    """What a loss adds to the descent.

    Attributes:
        halvings: no row's curvature is above 2^-halvings.
        bits: fraction bits of predictions z [n, 1].
    """

    halvings: int
    bits: int

    def residual(self, z: SharedTensor) -> SharedTensor:
        """prediction - y [n, 1]; with every range checked where z has a bound."""
        raise NotImplementedError

    def weights(self) -> SharedTensor | None:
        """The curvature of each row [n, 1] at the last residual, at 18 fraction bits; None where it is constant."""
        return None


def minimised(made: Columns, loss: Loss, rounds: int, tol: float) -> SharedTensor:
    """v [p, 1] at 26 fraction bits, with a certified gradient.

    Rounds: 13 for each step of the inverse, some 28 for each step of descent with a sigmoid and 23 without.
    """
    context, p = made.context, made.count
    if p * 2.0 ** (made.size + COEFFICIENT_BITS + context.frac_bits + PROBE_BITS) > 2.0 ** (HEADROOM_BITS - 1):
        raise ArgumentError(f"sums over {p} columns of so many rows leave the range; fit on fewer rows or columns")
    low = vouched(context, made.xs, max(6, (39 - made.halves) // 2))
    penalty = diagonal(context, at(context, made.penalty, H_BITS))
    h = plus(context, product(context, crossed, made.xs, made.xs, H_BITS, made.halves + loss.halvings), penalty)
    z = inverted(context, h, begun(context, h), steps_for(p))
    v = made.penalty.like(made.penalty.shares * 0, STATE_BITS)
    for number in range(rounds):
        before = v
        for step in range(INNER):
            moved = minus(context, v, before)
            ahead = (
                v if step == 0 else plus(context, v, at(context, moved.like(moved.shares, STATE_BITS + 1), STATE_BITS))
            )
            gradient = _gradient(made, loss, at(context, ahead, V_BITS))
            before, v = v, minus(context, ahead, product(context, matmul, z, gradient, STATE_BITS))
        weights = loss.weights() if number + 1 < rounds else None
        if weights is not None:
            curved = product(context, crossed, low, product(context, torch.mul, low, weights), H_BITS, made.halves)
            z = inverted(context, plus(context, curved, penalty), z, REFRESHED)
    v = held(context, at(context, v, V_BITS), COEFFICIENT_BITS)
    certain(context, _gradient(made, loss, v, trusted=True), tol)
    return v


def _gradient(made: Columns, loss: Loss, v: SharedTensor, trusted: bool = False) -> SharedTensor:
    """Xs^T r / N + q v [p, 1]. Sums over rows are right by Cauchy's inequality: a column's squares sum up to N."""
    context = made.context
    z = product(context, matmul, made.xs, v)
    if trusted:
        # The sum with fewer bits cannot leave the ring, and differs from z by less than 2^12.
        most = HEADROOM_BITS - 2 - z.scale_bits
        held(context, product(context, matmul, made.xs, at(context, v.bounded(None), PROBE_BITS)), most)
        z = z.bounded(2.0 ** (z.scale_bits + most + 1))
    residual = loss.residual(at(context, z, loss.bits)).bounded(None)
    gradient = product(context, crossed, made.xs, residual, GRADIENT_BITS, made.halves)
    return plus(context, gradient, product(context, torch.mul, made.penalty, v.bounded(None), GRADIENT_BITS))
