"""Perturbed-model federated learning: clients train on a noised model, the server recovers the exact gradient."""

from ...errors import DroppedClientError, MaskError
from ...secure_sum import ClientMasks, cohort
from ...secure_sum import MaskOpening as Opening
from .algorithm import Key
from .errors import (
    BatchMismatchError,
    ExchangeError,
    NoiseError,
    NonFiniteGradientError,
    NotPerturbableError,
    PerturbationError,
    StaleKeyError,
    StateMismatchError,
    WeightError,
)
from .experiment import PerturbedFL
from .messages import NoisyModel, Reply, Request, Update
from .protocol import Federation
from .scheme import Recovered, Scheme
from .settings import Noise, Settings

__all__ = [
    "BatchMismatchError",
    "ClientMasks",
    "DroppedClientError",
    "ExchangeError",
    "Federation",
    "Key",
    "MaskError",
    "Noise",
    "NoiseError",
    "NoisyModel",
    "NonFiniteGradientError",
    "NotPerturbableError",
    "Opening",
    "PerturbationError",
    "PerturbedFL",
    "Recovered",
    "Reply",
    "Request",
    "Scheme",
    "Settings",
    "StaleKeyError",
    "StateMismatchError",
    "Update",
    "WeightError",
    "cohort",
]
