"""SecSV: contributions of the clients of cross-silo federated learning, without showing models or test data.

    result = ShapleyEvaluation(model, rounds, tests, settings=Settings(protocol="secsv")).run()

Except by "secretsv", a client that decrypts can find others' test samples (docs/secsv.md, "Where the claim is weak").

`algorithm.py` is the paper's algorithms, to be read beside them; `secsv.py` and `hesv.py` are their steps;
`secsv/settings.py` says who may decrypt what; `docs/secsv.md` says what each party learns.
"""

from __future__ import annotations

from ...data.partition import federation
from ...federated.training import LocalTraining as Training
from ...federated.training import fedavg
from .experiment import ShapleyEvaluation, Valuation
from .program import GRUClassifier, build
from .report import Result
from .settings import Settings, estimate
from .values import (
    CheckpointError,
    CorruptedCiphertextError,
    EstimatorMissingError,
    RoutingError,
    contribution_index,
    group_values,
    gtg,
    shapley,
    truncated,
)

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
