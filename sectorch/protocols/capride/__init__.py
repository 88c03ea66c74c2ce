"""CaPriDe: decentralised learning on encrypted data (Tastan and Nandakumar, CVPR 2023).

    parties, test, classes = federation("digits", parties=2, split="no-overlap")
    result = CaPriDe(parties, test, classes, Settings(update="head"), out="runs/first").run()

`algorithm.py` is Algorithm 1, to be read beside the paper. `directions.py` and `update.py` say how a number that is
decrypted becomes a gradient, `exchange.py` what travels, `aggregate.py` how nothing but aggregates can be decrypted,
`meter.py` what answers tell, and `guard.py` what a peer refuses.
"""

from __future__ import annotations

from .algorithm import CaPriDe as CaPriDe
from .cli import divide as divide
from .cli import federation as federation
from .exchange import Guard as Guard
from .report import Result as Result
from .settings import CorruptedCiphertextError as CorruptedCiphertextError
from .settings import DisaggregationError as DisaggregationError
from .settings import ModelError as ModelError
from .settings import Party as Party
from .settings import Settings as Settings
from .training import Update as Update

__all__ = [
    "CaPriDe",
    "CorruptedCiphertextError",
    "DisaggregationError",
    "Guard",
    "ModelError",
    "Party",
    "Result",
    "Settings",
    "Update",
    "divide",
    "federation",
]
