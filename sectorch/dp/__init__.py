"""Differential privacy for answers by vote: noise, mechanisms, accounting, budgets.

    mechanism = GNMax(scale_for("gaussian", epsilon=10, delta=1e-5, queries=100))
    budget = Budget(10, 1e-5)
    budget.charge(mechanism.curve)                 # raises before the limit is passed
    label = mechanism.labels(votes)                # in the clear; `protocols/capc` does it on shares

See docs/privacy.md for what the figures promise and what they do not.
"""

from __future__ import annotations

from ..errors import BudgetExhaustedError, BudgetFileError, BudgetInUseError, PrivacyError
from .budget import Budget, BudgetFile, charge
from .gradients import PrivateGradients
from .mechanisms import (
    MECHANISMS,
    ConfidentGNMax,
    GNMax,
    LNMax,
    Mechanism,
    NoisyMax,
    epsilon_for,
    queries_for,
    reachable_epsilon,
    scale_for,
)
from .noise import ORDERS, DiscreteGaussian, DiscreteLaplace, GaussianShares, Noise, epsilon_of, on_grid, sampled_curve

__all__ = [
    "MECHANISMS",
    "ORDERS",
    "Budget",
    "BudgetExhaustedError",
    "BudgetFile",
    "BudgetFileError",
    "BudgetInUseError",
    "ConfidentGNMax",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "GNMax",
    "GaussianShares",
    "LNMax",
    "Mechanism",
    "Noise",
    "NoisyMax",
    "PrivacyError",
    "PrivateGradients",
    "charge",
    "epsilon_for",
    "epsilon_of",
    "on_grid",
    "queries_for",
    "reachable_epsilon",
    "sampled_curve",
    "scale_for",
]
