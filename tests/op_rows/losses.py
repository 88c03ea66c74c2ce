"""Rows of losses: means over 6 entries unless a sample says otherwise."""

from __future__ import annotations

from sectorch.errors import UnsupportedOpError

from .base import Data, call, index, number, op, refused
from .normalization import STANDARD, TERM
from .smooth import E_X, LOG, SOFTPLUS

X = number(2, 3)
Y = number(2, 3).public
SIGNS = Data((2, 3), "signs", -1, 2, "public")
PROBABILITY = number(2, 3, low=0.125, high=0.875)
LOGITS = number(3, 4)
CLASSES = index(3, below=4)
ROWS, SOME = number(12, 4), index(12, below=3)
"""Of the targets some are 1, and some are not."""
WEIGHT = refused(UnsupportedOpError, "weight", X, X, weight=number(2, 3).public)
REDUCE = refused(UnsupportedOpError, "reduction", X, X, reduce=False)


def forms(*tensors, ulps: float, largest: float, n: int = 6):
    """none, sum and mean of n entries that err by `ulps` and are at most `largest`; 1/n is encoded: the sum / 2."""
    return (
        call(*tensors, ulps=ulps + 1 + largest * n / 2 + 0.5),
        call(*tensors, reduction="sum", ulps=ulps * n),
        call(*tensors, reduction="none", ulps=ulps),
    )


ENTROPY = 4 * TERM + LOG + 3
WEIGHTED = 2 * 0.5 + 4 / 2 + 1
"""An entry up to 4 times a weight up to 2."""
WHOLE = 3 * 0.5 + 1
MEAN = 2.1 + 1.05 * 4 / 0.5 + 2 * 3 * WEIGHTED + 8
"""The quotient of a sum of entries up to 4 by one of weights: 2e-6, 1e-6 of it, and the errors of both."""

ROWS = (
    op(
        "mse_loss",
        *forms(X, Y, ulps=17, largest=64),
        *forms(X, X, ulps=17, largest=64),
        ulps=17,
        why="2 8 1 per square",
        errors=(REDUCE, WEIGHT),
    ),
    op("l1_loss", *forms(X, Y, ulps=1, largest=8), ulps=1, why="1/2 + 1/2", errors=(REDUCE,)),
    op(
        "huber_loss",
        *forms(X, Y, ulps=17, largest=32),
        call(X, Y, "none", 0.7, ulps=17),
        ulps=17,
        why="inside (1/2 or 1) and difference - inside / 2 (3/2 + truncation): 8 / 2 + 2.5, at most",
    ),
    op(
        "smooth_l1_loss",
        *forms(X, Y, ulps=17, largest=8),
        call(X, Y, beta=0.5, ulps=60),
        call(X, Y, beta=0.0, ulps=26),
        ulps=17,
        why="as huber_loss, over beta",
        errors=(REDUCE,),
    ),
    op(
        "nll_loss",
        *forms(LOGITS, CLASSES, ulps=0.5, largest=4, n=3),
        call(ROWS, SOME, ignore_index=1, reduction="sum", ulps=6.0),
        call(ROWS, SOME, ignore_index=1, ulps=1.0),
        call(LOGITS, Data((3,), "whole", 0, 4), ulps=6 + WHOLE),
        call(LOGITS, CLASSES, number(4, low=0.5, high=2).public, reduction="sum", ulps=3 * WEIGHTED),
        call(LOGITS, Data((3,), "whole", 0, 4), number(4, low=0.5, high=2).public, ulps=MEAN),
        call(ROWS, Data((12,), "whole", -1, 3), ignore_index=-1, ulps=MEAN),
        call(ROWS, Data((12,), "whole", 0, 3), ignore_index=1, ulps=MEAN),
        call(LOGITS, CLASSES, number(4, low=0.5, high=2).private, reduction="none", ulps=WEIGHTED),
        ulps=0.5,
        why="entries are taken, times a weight up to 2 that errs by 1/2; a mean over secret weights is a quotient",
    ),
    op(
        "cross_entropy",
        *forms(LOGITS, CLASSES, ulps=ENTROPY, largest=10, n=3),
        call(LOGITS, CLASSES, label_smoothing=0.1, reduction="none", ulps=2 * ENTROPY + 10),
        call(LOGITS, number(3, 4, low=0, high=1).public, ulps=4 * ENTROPY + 90),
        call(ROWS, SOME, ignore_index=1, ulps=ENTROPY),
        call(ROWS, SOME, ignore_index=1, label_smoothing=0.1, reduction="none", ulps=2 * ENTROPY + 10),
        call(LOGITS, CLASSES, number(4, low=0.5, high=2).public, ulps=2 * ENTROPY + MEAN),
        call(
            ROWS,
            Data((12,), "whole", -1, 3),
            number(4, low=0.5, high=2).public,
            ignore_index=-1,
            label_smoothing=0.1,
            ulps=4 * ENTROPY + 2 * MEAN,
        ),
        call(
            LOGITS,
            number(3, 4, low=0, high=1).public,
            number(4, low=0.5, high=2).public,
            reduction="none",
            ulps=8 * ENTROPY + 2 * 90,
        ),
        ulps=ENTROPY,
        why="log_softmax",
        errors=(
            refused(UnsupportedOpError, "no target", ROWS, index(12, below=1), ignore_index=0),
            refused(UnsupportedOpError, "reduction", LOGITS, CLASSES, reduce=False),
        ),
    ),
    op(
        "binary_cross_entropy_with_logits",
        *forms(X, PROBABILITY.public, ulps=SOFTPLUS + 4, largest=8),
        call(X, PROBABILITY, reduction="none", ulps=SOFTPLUS + 4),
        call(X, PROBABILITY, pos_weight=number(3, low=0.5, high=3).public, reduction="none", ulps=3 * SOFTPLUS + 16),
        call(X, PROBABILITY.public, number(3, low=0.5, high=2).public, reduction="none", ulps=2 * (SOFTPLUS + 4) + 4),
        call(
            X,
            PROBABILITY,
            None,
            pos_weight=number(3, low=0.5, high=3).private,
            reduction="none",
            ulps=3 * SOFTPLUS + 16,
        ),
        ulps=SOFTPLUS + 4,
        why="softplus and x y: 4 / 2 + 1 / 2; a weight up to 3 multiplies the error, and that of 1 + (w - 1) y is 2",
    ),
    op(
        "binary_cross_entropy",
        *forms(PROBABILITY, PROBABILITY.public, ulps=LOG + 8, largest=3),
        call(PROBABILITY, PROBABILITY, number(3, low=0.5, high=2).public, reduction="none", ulps=2 * (LOG + 8) + 4),
        ulps=LOG + 8,
        whole=False,
        why="log at p >= 1/8 errs by LOG + 8 / 2, truncated 1; times y and 1 - y in all, and 2.1 / 2",
    ),
    op(
        "kl_div",
        *forms(X, PROBABILITY.public, ulps=4, largest=6),
        call(X, X, log_target=True, reduction="sum", ulps=6 * (55 * (8.5 * (E_X + 1) + 1))),
        call(X, PROBABILITY, reduction="none", ulps=LOG + 12),
        call(X, PROBABILITY.public, reduction="batchmean", ulps=24 + 18),
        ulps=4,
        why="x y: 4 / 2 + 1 / 2, and y log y 1/2",
    ),
    op("soft_margin_loss", *forms(X, SIGNS, ulps=SOFTPLUS + 1.5, largest=5), ulps=SOFTPLUS + 1.5, why="softplus"),
    op("hinge_embedding_loss", *forms(X, SIGNS, ulps=1, largest=5), ulps=1, why="a choice"),
    op(
        "margin_ranking_loss",
        *forms(X, X, SIGNS, ulps=1.5, largest=9),
        call(X, X, SIGNS, 0.3, reduction="none"),
        ulps=1.5,
        why="three encodings",
    ),
    op(
        "poisson_nll_loss",
        *forms(number(2, 3, low=-2, high=2), PROBABILITY.public, ulps=7.4 * E_X + 4, largest=10),
        ulps=7.4 * E_X + 4,
        why="exp and x y",
    ),
    op(
        "cosine_similarity",
        call(LOGITS, number(3, 4)),
        call(LOGITS, number(3, 4).public),
        call(number(5), number(5), 0),
        ulps=2 * 2.24 * (STANDARD + 1),
        why="two normalised vectors of 5 entries that err by STANDARD: sqrt 5 for the sum of the magnitudes of either",
    ),
)
