"""What can be wrong with a CaPC run. All are raised before any training starts, unless they say otherwise."""

from __future__ import annotations

from ...errors import SectorchError


class CaPCError(SectorchError, ValueError):
    """Settings, parties, models or data that cannot make a run."""


class TooFewVotersError(CaPCError):
    """Fewer answering parties than the mechanism can serve, before a run or because some were lost in the middle."""
