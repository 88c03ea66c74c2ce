"""Differential privacy for answers by vote: noise, mechanisms, accounting, budgets.

    mechanism = GNMax(scale_for("gaussian", epsilon=10, delta=1e-5, queries=100))
    budget = Budget(10, 1e-5)
    budget.charge(mechanism.curve)                 # raises before the limit is passed
    label = mechanism.labels(votes)                # in the clear; `protocols/capc` does it on shares

See docs/privacy.md for what the figures promise and what they do not.
"""

from __future__ import annotations

from .budget import Budget as Budget
from .budget import BudgetFile as BudgetFile
from .budget import charge as charge
from .errors import BudgetExhaustedError as BudgetExhaustedError
from .errors import BudgetFileError as BudgetFileError
from .errors import BudgetInUseError as BudgetInUseError
from .errors import PrivacyError as PrivacyError
from .gradients import PrivateGradients as PrivateGradients
from .mechanisms import MECHANISMS as MECHANISMS
from .mechanisms import ConfidentGNMax as ConfidentGNMax
from .mechanisms import GNMax as GNMax
from .mechanisms import LNMax as LNMax
from .mechanisms import Mechanism as Mechanism
from .mechanisms import NoisyMax as NoisyMax
from .mechanisms import epsilon_for as epsilon_for
from .mechanisms import queries_for as queries_for
from .mechanisms import reachable_epsilon as reachable_epsilon
from .mechanisms import scale_for as scale_for
from .noise import ORDERS as ORDERS
from .noise import DiscreteGaussian as DiscreteGaussian
from .noise import DiscreteLaplace as DiscreteLaplace
from .noise import Noise as Noise
from .noise import epsilon_of as epsilon_of
from .noise import on_grid as on_grid
from .noise import sampled_curve as sampled_curve
from .sums import GaussianShares as GaussianShares

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
