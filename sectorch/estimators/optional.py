"""scikit-learn, which is not needed by anything else here: one error with the way out where it is missing."""

from __future__ import annotations

from ..errors import ArgumentError
from ..extras import needed

with needed("sectorch.estimators", "scikit-learn", ArgumentError, "for 1.6 or newer", extra="estimators"):
    from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "ClusterMixin",
    "RegressorMixin",
    "check_classification_targets",
    "check_is_fitted",
    "check_random_state",
    "validate_data",
]
