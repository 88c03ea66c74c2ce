"""What can be wrong with a CaPriDe run. None of it changes a model: a round is kept only when all of it went well."""

from __future__ import annotations

from ...errors import SectorchError


class CaPriDeError(SectorchError, ValueError):
    """Settings, parties or data that cannot make a run."""


class ModelError(CaPriDeError):
    """A model that cannot be evaluated under encryption, or whose chain of levels is too short."""


class DisaggregationError(SectorchError, RuntimeError):
    """One more release would let the receiver take an aggregate apart. Nothing was released."""


class CorruptedCiphertextError(SectorchError, RuntimeError):
    """A message whose ciphertexts are not those that were sent."""


class CheckpointError(SectorchError, RuntimeError):
    """A run folder that belongs to another run, or that cannot be read."""


class PlotError(SectorchError, ImportError):
    """Plots were asked for and matplotlib is missing."""
