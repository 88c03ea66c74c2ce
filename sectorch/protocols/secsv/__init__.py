"""SecSV: contributions of the clients of cross-silo federated learning, without showing models or test data.

    result = ShapleyEvaluation(model, rounds, tests, settings=Settings(protocol="secsv")).run()

Except by "secretsv", a client that decrypts can find others' test samples (docs/secsv.md, "Where the claim is weak").

`algorithm.py` is the paper's algorithms, to be read beside them; `secsv.py` and `hesv.py` are their steps;
`secsv/settings.py` says who may decrypt what; `docs/secsv.md` says what each party learns.
"""

from __future__ import annotations

from ...data.partition import federation as federation
from ...federated.training import LocalTraining as Training
from ...federated.training import fedavg as fedavg
from .experiment import ShapleyEvaluation as ShapleyEvaluation
from .experiment import Valuation as Valuation
from .program import GRUClassifier as GRUClassifier
from .program import build as build
from .report import Result as Result
from .settings import Settings as Settings
from .settings import estimate as estimate
from .values import CheckpointError as CheckpointError
from .values import CorruptedCiphertextError as CorruptedCiphertextError
from .values import EstimatorMissingError as EstimatorMissingError
from .values import RoutingError as RoutingError
from .values import contribution_index as contribution_index
from .values import group_values as group_values
from .values import gtg as gtg
from .values import shapley as shapley
from .values import truncated as truncated

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
    "Valuation",
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
