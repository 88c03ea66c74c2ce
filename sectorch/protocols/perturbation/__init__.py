"""Perturbed-model federated learning: clients train on a noised model, the server recovers the exact gradient."""

from ...errors import DroppedClientError as DroppedClientError
from ...errors import MaskError as MaskError
from ...secure_sum import ClientMasks as ClientMasks
from ...secure_sum import MaskOpening as Opening
from ...secure_sum import cohort as cohort
from .algorithm import Key as Key
from .errors import BatchMismatchError as BatchMismatchError
from .errors import ExchangeError as ExchangeError
from .errors import NoiseError as NoiseError
from .errors import NonFiniteGradientError as NonFiniteGradientError
from .errors import NotPerturbableError as NotPerturbableError
from .errors import PerturbationError as PerturbationError
from .errors import StaleKeyError as StaleKeyError
from .errors import StateMismatchError as StateMismatchError
from .errors import WeightError as WeightError
from .experiment import PerturbedFL as PerturbedFL
from .messages import NoisyModel as NoisyModel
from .messages import Reply as Reply
from .messages import Request as Request
from .messages import Update as Update
from .protocol import Federation as Federation
from .scheme import Recovered as Recovered
from .scheme import Scheme as Scheme
from .settings import Noise as Noise
from .settings import Settings as Settings

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
