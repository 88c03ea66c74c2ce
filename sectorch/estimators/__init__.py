"""Estimators in the manner of scikit-learn, fitted on shares: nobody sees the data, nor the coefficients until they
are revealed. See docs/estimators.md. Needs scikit-learn."""

from __future__ import annotations

from .base import FitError as FitError
from .kmeans import KMeans as KMeans
from .linear import LinearRegression as LinearRegression
from .linear import LogisticRegression as LogisticRegression
from .linear import Ridge as Ridge

__all__ = [
    "FitError",
    "KMeans",
    "LinearRegression",
    "LogisticRegression",
    "Ridge",
]
