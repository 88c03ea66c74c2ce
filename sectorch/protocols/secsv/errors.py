"""What can be wrong with a valuation. All are raised before anything is encrypted, unless they say otherwise."""

from __future__ import annotations

from ...errors import SectorchError


class ShapleyError(SectorchError, ValueError):
    """Clients, models, test sets or settings that cannot make a valuation."""


class RoutingError(ShapleyError):
    """No client may decrypt some layer at the security level that was asked for."""


class EstimatorMissingError(SectorchError, ImportError):
    """An estimator lives in a library that is not installed."""


class CorruptedCiphertextError(SectorchError, RuntimeError):
    """A decryption that no honest computation gives. What was finished before stays in the run's folder."""


class CheckpointError(SectorchError, RuntimeError):
    """A run folder that belongs to another run, or that cannot be read."""


class PlotError(SectorchError, ImportError):
    """Plots were asked for and matplotlib is missing."""
