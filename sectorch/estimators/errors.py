"""What can be wrong with a fit on shares. No message carries a value."""

from __future__ import annotations

from ..errors import RangeExceededError


class FitError(RangeExceededError):
    """There is no fit: its gradient is not certified to be small, or a value of it left the range. It tells no more.

    Example:
        there is no LogisticRegression of this data: a value left the range, the labels are not 0 and 1 of both kinds,
        or the gradient is not below tol = 0.0001 after max_iter = 24 steps; scale the columns, penalise more, or take
        more steps

    What to do:
        Divide columns so that they are below 4,096 and their deviations below 1,000; take a smaller C or a larger alpha
        where columns are collinear or classes separable; raise max_iter; look at labels.
    """
