"""Rows of losses of distances, classes and densities."""

from __future__ import annotations

from sectorch.errors import ArgumentError, ShapeError, UnsupportedOpError

from .base import Data, call, index, number, op, refused
from .losses import forms
from .normalization import STANDARD
from .smooth import LOG, SOFTPLUS

X = number(3, 4, low=-2, high=2)
FAR = number(3, 4, low=3, high=4)
LOGITS = number(3, 4)
CLASSES = index(3, below=4)
SIGNS = Data((3,), "signs", -1, 2, "public")
LABELS = Data((3, 4), "whole", 0, 2, "public")
VARIANCE = number(3, 4, low=0.5, high=4)
DISTANCE = 12 + 4 * 12
"""Of two points at most 12 apart."""
COSINE = 2 * 2.24 * (STANDARD + 1)
DENSITY = (LOG + 2) / 2 + 4 * 24 + 8 + 2

ROWS = (
    op(
        "triplet_margin_loss",
        *forms(X, FAR, X.public, ulps=2 * DISTANCE + 1, largest=14, n=3),
        call(X, FAR, number(3, 4), 0.3, 1.0, swap=True, reduction="none"),
        ulps=2 * DISTANCE + 1,
        why="two distances, as pairwise_distance states them, and a margin",
        errors=(refused(ArgumentError, "margin", X, X, X, 0.0),),
    ),
    op(
        "cosine_embedding_loss",
        *forms(LOGITS, FAR, SIGNS, ulps=COSINE + 1, largest=2, n=3),
        call(LOGITS, FAR, Data((3,), "signs", -1, 2), 0.3, reduction="none"),
        ulps=COSINE + 2,
        why="cosine_similarity, and a choice",
    ),
    op(
        "gaussian_nll_loss",
        *forms(X, number(3, 4).public, VARIANCE, ulps=DENSITY, largest=40, n=12),
        call(X, X, number(3, low=1, high=4), True, reduction="none"),
        call(X, X, VARIANCE.public, reduction="none"),
        call(X, X, 2.0, reduction="none"),
        ulps=DENSITY,
        why="half of a log, and of a difference up to 8 times a quotient by 1/2 or more",
        errors=(
            refused(ShapeError, "variances", X, X, number(2, 3, 4, low=1, high=2)),
            refused(ArgumentError, "not negative", X, X, -1.0),
            refused(ArgumentError, "not negative", X, X, number(3, 4, low=-2, high=-1).public),
        ),
    ),
    op(
        "multi_margin_loss",
        *forms(LOGITS, CLASSES, ulps=7, largest=9, n=3),
        call(LOGITS, CLASSES, 2, 0.5, reduction="none", ulps=40),
        call(number(4), index(1, below=4), reduction="sum"),
        call(LOGITS, CLASSES, weight=number(4, low=0.5, high=2).public, reduction="none", ulps=2 * 7 + 9 / 2 + 1),
        ulps=7,
        why="four entries of three encodings, over 4; a square is of 9 at most",
        errors=(refused(UnsupportedOpError, "secret targets", LOGITS, Data((3,), "whole", 0, 4)),),
    ),
    op(
        "multilabel_soft_margin_loss",
        *forms(LOGITS, LABELS, ulps=SOFTPLUS + 5, largest=6, n=3),
        call(LOGITS, LABELS, number(4, low=0, high=1).public, reduction="none", ulps=SOFTPLUS + 9),
        ulps=SOFTPLUS + 5,
        why="binary_cross_entropy_with_logits, and its mean over 4",
        errors=(refused(ShapeError, "targets", LOGITS, number(2, 3, 4).public),),
    ),
)
