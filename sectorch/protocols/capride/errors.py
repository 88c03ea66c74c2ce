"""What can be wrong with a CaPriDe run. None of it changes a model: a round is kept only when all of it went well."""

from __future__ import annotations

from ...errors import CheckpointError as CheckpointError
from ...errors import CorruptedCiphertextError as CorruptedCiphertextError
from ...errors import PlotError as PlotError
from ...errors import SectorchError


class CaPriDeError(SectorchError, ValueError):
    """Settings, parties or data that cannot make a run."""


class ModelError(CaPriDeError):
    """A model that cannot be evaluated under encryption, or whose chain of levels is too short."""


class DisaggregationError(SectorchError, RuntimeError):
    """One more release would let the receiver take an aggregate apart. Nothing was released."""
