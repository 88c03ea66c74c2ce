"""What can be wrong with a PrivHFL run. All are raised before any training starts, unless they say otherwise."""

from __future__ import annotations

from ...errors import SectorchError


class PrivHFLError(SectorchError, ValueError):
    """Settings, clients or data that cannot make a run."""


class ArchitectureError(PrivHFLError):
    """An architecture that is not known, or that does not fit the images."""


class CheckpointError(SectorchError, RuntimeError):
    """A run folder that belongs to another run, or that cannot be read."""


class PlotError(SectorchError, ImportError):
    """Plots were asked for and matplotlib is missing."""
