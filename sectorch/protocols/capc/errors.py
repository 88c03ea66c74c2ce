"""What is CaPC's own to go wrong; the rest is `sectorch.federated.FederationError`."""

from __future__ import annotations

from ...federated.errors import FederationError


class TooFewVotersError(FederationError):
    """Fewer answering parties than the mechanism can serve, before a run or because some were lost in the middle.

    Example:
        4 answering parties, and an answer needs 5

    What to do:
        Wait for those that were lost and ask again: nothing was revealed. Or plan with fewer
        voters and more noise, before the run.
    """
