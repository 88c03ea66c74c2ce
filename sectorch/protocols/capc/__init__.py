"""CaPC: confidential and private collaborative learning, on secure tensors, garbled circuits and exact noise.

    parties, test, classes = collaboration("digits", parties=50)
    result = CaPC(parties, test, classes, Settings(epsilon=10), out="runs/first").run()

`ask.py` is the protocol of the paper's Figure 1 for a panel of trained models; `algorithm.py` the whole collaboration.
Parties, models and data may be your own: see `Party`.
"""

from __future__ import annotations

from .ask import Answer, Panel, SimulatedPanel, Voter
from .experiment import CaPC, Record, Result
from .plan import Forecast, Plan, plan
from .settings import PRESETS, Collaboration, Party, Settings, TooFewVotersError, collaboration

__all__ = [
    "PRESETS",
    "Answer",
    "CaPC",
    "Collaboration",
    "Forecast",
    "Panel",
    "Party",
    "Plan",
    "Record",
    "Result",
    "Settings",
    "SimulatedPanel",
    "TooFewVotersError",
    "Voter",
    "collaboration",
    "plan",
]
