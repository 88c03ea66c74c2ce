"""Estimators with scikit-learn's interface, fitted on shares; see docs/estimators.md.

Nobody sees the data, and nobody sees the coefficients until they are revealed. The estimators need scikit-learn.
Without it this package can be imported, so that `from sectorch import *` works, and its names raise ArgumentError.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from ..errors import ArgumentError

with suppress(ArgumentError):  # scikit-learn is missing
    from .base import FitError
    from .kmeans import KMeans
    from .linear import LinearRegression, LogisticRegression, Ridge

__all__ = ["FitError", "KMeans", "LinearRegression", "LogisticRegression", "Ridge"]


def __getattr__(name: str) -> object:
    """Names that could not be imported: importing them anew raises the error that says what to install."""
    if name not in __all__:
        raise AttributeError(f"module 'sectorch.estimators' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.base"), name)
