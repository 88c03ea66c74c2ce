"""PrivHFL: heterogeneous federated learning without an auxiliary data set, on secure tensors.

    clients, test, classes = federation("digits", clients=10)
    result = PrivHFL(clients, test, classes, Settings(queries=500), out="runs/first").run()

`algorithm.py` is Algorithm 1, to be read beside the paper; `query.py` is its secure querying; `experiment.py` puts both
to work. Clients, models and data
may be your own: each is a `sectorch.federated.Participant`.
"""

from __future__ import annotations

from .experiment import PrivHFL as PrivHFL
from .query import plain_query as plain_query
from .query import secure_query as secure_query
from .query import soft_labels as soft_labels
from .report import Result as Result
from .settings import PRESETS as PRESETS
from .settings import Settings as Settings
from .settings import federation as federation

__all__ = [
    "PRESETS",
    "PrivHFL",
    "Result",
    "Settings",
    "federation",
    "plain_query",
    "secure_query",
    "soft_labels",
]
