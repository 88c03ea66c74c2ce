"""CaPC: confidential and private collaborative learning, on secure tensors, garbled circuits and exact noise.

    parties, test, classes = collaboration("digits", parties=50)
    result = CaPC(parties, test, classes, Settings(epsilon=10), out="runs/first").run()

`ask.py` is the protocol of the paper's Figure 1 for a panel of trained models; `algorithm.py` the whole collaboration.
Parties, models and data may be your own: see `Party`.
"""

from __future__ import annotations

from .ask import Answer as Answer
from .ask import Panel as Panel
from .ask import SimulatedPanel as SimulatedPanel
from .ask import Voter as Voter
from .experiment import CaPC as CaPC
from .plan import Forecast as Forecast
from .plan import Plan as Plan
from .plan import plan as plan
from .report import Record as Record
from .report import Result as Result
from .settings import PRESETS as PRESETS
from .settings import Collaboration as Collaboration
from .settings import Party as Party
from .settings import Settings as Settings
from .settings import TooFewVotersError as TooFewVotersError
from .settings import collaboration as collaboration

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
