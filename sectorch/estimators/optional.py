"""scikit-learn, which is not needed by anything else here: one error with the way out where it is missing."""

from __future__ import annotations

from ..errors import ArgumentError

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ArgumentError(
        "sectorch.estimators needs scikit-learn from 1.6 on, which is not installed: pip install scikit-learn"
    ) from None

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
