"""CaPriDe: decentralised learning on encrypted data (Tastan and Nandakumar, CVPR 2023).

    parties, test, classes = federation("digits", parties=2, split="no-overlap")
    result = CaPriDe(parties, test, classes, Settings(update="head"), out="runs/first").run()

`algorithm.py` is Algorithm 1, to be read beside the paper; `exchange.py` has what travels, and what a peer refuses.
`settings.py` has the directions, and `training.py` the updates by which a decrypted number becomes a gradient, and the
meter of what answers tell. `experiment.py` puts all of it to work.
"""

from __future__ import annotations

from ...ckks import ReleaseLedger as ReleaseLedger
from ...deprecation import renamed_names
from .experiment import CaPriDe, Result, divide, federation
from .settings import CorruptedCiphertextError, DisaggregationError, ModelError, Party, Settings
from .training import Update

__getattr__ = renamed_names(__name__, Guard="ReleaseLedger")

__all__ = [
    "CaPriDe",
    "CorruptedCiphertextError",
    "DisaggregationError",
    "ModelError",
    "Party",
    "Result",
    "Settings",
    "Update",
    "divide",
    "federation",
]
