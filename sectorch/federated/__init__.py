"""The common parts of federated experiments: participants, settings, run folders, training, progress, results.

    clients, test, classes = privhfl.federation("digits", clients=10)
    result = privhfl.PrivHFL(clients, test, classes, out="runs/first").run()      # any paper: run, look, write
    result.write("runs/first", drawn=True)

A paper's package has its algorithm and settings; all else is here.
"""

from __future__ import annotations

from ..deprecation import renamed_names
from ..display import Plot as Plot
from .command import Options as Options
from .command import Study as Study
from .command import option as option
from .errors import ArchitectureError as ArchitectureError
from .errors import CheckpointError as CheckpointError
from .errors import FederationError as FederationError
from .errors import PlotError as PlotError
from .errors import TooLongError as TooLongError
from .errors import WorkerError as WorkerError
from .folder import RunFolder as RunFolder
from .folder import Workers as Workers
from .outcome import Outcome as Outcome
from .outcome import Scores as Scores
from .participants import FederatedData as FederatedData
from .participants import Participant as Participant
from .run import Experiment as Experiment
from .run import Held as Held
from .run import Run as Run
from .run import estimated_by as estimated_by
from .run import note as note
from .run import progress as progress
from .training import LocalTraining as LocalTraining
from .training import Training as Training
from .training import fedavg as fedavg
from .watch import Estimate as Estimate
from .watch import Watch as Watch

__getattr__ = renamed_names(__name__, Federation="FederatedData")

__all__ = [
    "ArchitectureError",
    "CheckpointError",
    "Estimate",
    "Experiment",
    "FederatedData",
    "FederationError",
    "Held",
    "LocalTraining",
    "Options",
    "Outcome",
    "Participant",
    "Plot",
    "PlotError",
    "Run",
    "RunFolder",
    "Scores",
    "Study",
    "TooLongError",
    "Training",
    "Watch",
    "WorkerError",
    "Workers",
    "estimated_by",
    "fedavg",
    "note",
    "option",
    "progress",
]
