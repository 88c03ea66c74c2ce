"""What can be wrong with a valuation. All are raised before anything is encrypted, unless they say otherwise."""

from __future__ import annotations

from ...errors import CheckpointError as CheckpointError
from ...errors import CorruptedCiphertextError as CorruptedCiphertextError
from ...errors import SectorchError
from ...federated.errors import FederationError as FederationError


class RoutingError(FederationError):
    """No client may decrypt some layer at the security level that was asked for.

    Example:
        client 3 owns the model under test and may not decrypt its outputs

    What to do:
        Ask for a lower routing level, or have more clients take part: every layer needs a client that may decrypt it.
    """


class EstimatorMissingError(SectorchError, ImportError):
    """An estimator lives in a library that is not installed.

    Example:
        permutation sampling or KernelSHAP needs shapiq, which is not installed: pip install 'sectorch[shapley]', or use
        estimator 'exact' or 'group-testing'

    What to do:
        `pip install 'sectorch[shapley]'`, or take an estimator that is here.
    """
