"""PrivHFL: heterogeneous federated learning without an auxiliary data set, on secure tensors.

    clients, test, classes = federation("digits", clients=10)
    result = PrivHFL(clients, test, classes, Settings(queries=500), out="runs/first").run()

`algorithm.py` is Algorithm 1, to be read beside the paper; `query.py` is its secure querying; `experiment.py` puts both
to work. Clients, models and data
may be your own: each is a `sectorch.federated.Participant`.
"""

from __future__ import annotations

from .experiment import PrivHFL, Result
from .query import plain_query, secure_query, soft_labels
from .settings import PRESETS, Settings, federation

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
