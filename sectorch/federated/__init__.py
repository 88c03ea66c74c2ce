"""The common parts of federated experiments: participants, settings, run folders, training, progress, results.

    clients, test, classes = privhfl.federation("digits", clients=10)
    result = privhfl.PrivHFL(clients, test, classes, out="runs/first").run()      # any paper: run, look, write
    result.write("runs/first", drawn=True)

A paper's package has its algorithm and settings; all else is here.
"""

from __future__ import annotations

from ..deprecation import renamed_names
from ..display import Plot
from ..errors import ArchitectureError, CheckpointError, FederationError, PlotError, TooLongError, WorkerError
from .command import Option, Options, Study, option
from .folder import RunFolder, Workers
from .outcome import Outcome, Scores
from .participants import FederatedData, FederatedExperiment, Participant
from .run import Experiment, Held, Run, estimated_by, note, progress
from .training import LocalTraining, Training, fedavg
from .watch import Estimate, Watch

__getattr__ = renamed_names(__name__, Federation="FederatedData")

__all__ = [
    "ArchitectureError",
    "CheckpointError",
    "Estimate",
    "Experiment",
    "FederatedData",
    "FederatedExperiment",
    "FederationError",
    "Held",
    "LocalTraining",
    "Option",
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
