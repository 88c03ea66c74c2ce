"""What can be wrong with a valuation. All are raised before anything is encrypted, unless they say otherwise."""

from __future__ import annotations

from ...errors import CheckpointError as CheckpointError
from ...errors import CorruptedCiphertextError as CorruptedCiphertextError
from ...errors import PlotError as PlotError
from ...errors import SectorchError


class ShapleyError(SectorchError, ValueError):
    """Clients, models, test sets or settings that cannot make a valuation."""


class RoutingError(ShapleyError):
    """No client may decrypt some layer at the security level that was asked for."""


class EstimatorMissingError(SectorchError, ImportError):
    """An estimator lives in a library that is not installed."""
