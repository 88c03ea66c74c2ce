"""What can be wrong with a federation. All are raised before any training starts, unless they say otherwise."""

from __future__ import annotations

from ..errors import CheckpointError as CheckpointError
from ..errors import PlotError as PlotError
from ..errors import SectorchError


class FederationError(SectorchError, ValueError):
    """Settings, participants or data that cannot make a run.

    Example:
        a federation makes one run at a time: one seed, one value, no controls

    What to do:
        Correct the option that the text names; `--help` lists all. Nothing has been trained.
    """


class ArchitectureError(FederationError):
    """An architecture that is not known, or that does not fit its owner's samples.

    Example:
        there is no architecture resnet9; there are cnn, lenet, vgg7

    What to do:
        Take one of the names in the text, or a model whose classes and input fit its owner's samples.
    """


class TooLongError(FederationError):
    """A run whose estimate is over the limit, and that nobody agreed to.

    Example:
        this run takes about 9 hours; ask for less, or agree to it with --yes

    What to do:
        Agree with `--yes`, or ask for fewer clients, queries, rounds or seeds.
    """


class WorkerError(SectorchError, RuntimeError):
    """A worker process ended in the middle, or what spreads the work is not installed.

    Example:
        a worker process ended in the middle; run again from the folder

    What to do:
        Run the same command again: it goes on from the folder. If the machine killed the worker, it lacked memory: use
        fewer processes.
    """
