"""SecSV: contributions of the clients of cross-silo federated learning, without showing models or test data.

    result = ShapleyEvaluation(model, rounds, tests, settings=Settings(protocol="secsv", skip=True)).run()

`secsv.py` and `hesv.py` are the paper's protocols, to be read beside it; `routing.py` says who may decrypt what;
`docs/secsv.md` says what each party learns.
"""

from __future__ import annotations

from .data import federation as federation
from .errors import CheckpointError as CheckpointError
from .errors import CorruptedCiphertextError as CorruptedCiphertextError
from .errors import EstimatorMissingError as EstimatorMissingError
from .errors import RoutingError as RoutingError
from .estimators import estimate as estimate
from .evaluation import ShapleyEvaluation as ShapleyEvaluation
from .metrics import contribution_index as contribution_index
from .metrics import group_values as group_values
from .metrics import gtg as gtg
from .metrics import truncated as truncated
from .models import GRUClassifier as GRUClassifier
from .models import build as build
from .report import Result as Result
from .settings import Settings as Settings
from .training import Training as Training
from .training import fedavg as fedavg
from .values import shapley as shapley

__all__ = [
    "CheckpointError",
    "CorruptedCiphertextError",
    "EstimatorMissingError",
    "GRUClassifier",
    "Result",
    "RoutingError",
    "Settings",
    "ShapleyEvaluation",
    "Training",
    "build",
    "contribution_index",
    "estimate",
    "fedavg",
    "federation",
    "group_values",
    "gtg",
    "shapley",
    "truncated",
]
