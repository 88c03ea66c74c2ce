"""What can be wrong with a PrivHFL run. All are raised before any training starts, unless they say otherwise."""

from __future__ import annotations

from ...errors import CheckpointError as CheckpointError
from ...errors import PlotError as PlotError
from ...errors import SectorchError


class PrivHFLError(SectorchError, ValueError):
    """Settings, clients or data that cannot make a run."""


class ArchitectureError(PrivHFLError):
    """An architecture that is not known, or that does not fit the images."""
