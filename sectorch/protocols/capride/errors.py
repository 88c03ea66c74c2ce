"""What can be wrong with a CaPriDe run. None of it changes a model: a round is kept only when all of it went well."""

from __future__ import annotations

from ...errors import CorruptedCiphertextError as CorruptedCiphertextError
from ...errors import SectorchError
from ...federated.errors import FederationError


class ModelError(FederationError):
    """A model that cannot be evaluated under encryption, or whose chain of levels is too short.

    Example:
        the model has no linear layer, so it has no classifier head; end it with nn.Linear

    What to do:
        End the model with one `nn.Linear`, keep its logits small (a smaller rate, weight decay), or make keys with one
        more level.
    """


class DisaggregationError(SectorchError, RuntimeError):
    """One more release would let the receiver take an aggregate apart. Nothing was released.

    Example:
        north releases no aggregate over 3 samples of south; at least 8 are needed

    What to do:
        Ask over more samples, for fewer numbers, or with more noise, as the text says. Allowing more (`leakage=`) is
        for the owner of the logits to decide.
    """
