"""PrivHFL: heterogeneous federated learning without an auxiliary data set, on secure tensors.

    clients, test, classes = federation("digits", clients=10)
    result = PrivHFL(clients, test, classes, Settings(queries=500), out="runs/first").run()

`algorithm.py` is Algorithm 1, to be read beside the paper; `query.py` is its secure querying. Clients, models and data
may be your own: see `Client`.
"""

from __future__ import annotations

from .algorithm import PrivHFL as PrivHFL
from .errors import ArchitectureError as ArchitectureError
from .errors import CheckpointError as CheckpointError
from .errors import PlotError as PlotError
from .errors import PrivHFLError as PrivHFLError
from .federation import federation as federation
from .query import plain_query as plain_query
from .query import secure_query as secure_query
from .query import soft_labels as soft_labels
from .report import Result as Result
from .settings import Client as Client
from .settings import Settings as Settings
from .training import PRESETS as PRESETS
from .training import Training as Training
from .watch import Watch as Watch
