"""The reference: the public fixed-point function that a secure run computes, without parties, shares or randomness.

Every protocol is replaced by its ideal functionality. A's half of a value is then the value itself and S's half is
zero, of which only the shape is kept. The handlers above the protocols run as they are. It protects nothing: whoever
runs it holds model and input in the clear.
"""

from __future__ import annotations

import os

import torch

from ..choreography import Party, Phase
from ..errors import MaterialError
from ..steps import Sent


class ReferenceRuntime:
    """The clients are here and hold everything. Nothing is drawn, and nothing is sent."""

    ideal = True

    def __init__(self, clients: frozenset[Party]):
        self.session = os.urandom(16)
        self.here = clients

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        raise MaterialError(f"the reference has no randomness, and '{label}' was drawn: name the protocol's `ideal`")

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        raise MaterialError(f"the reference has no messages, and '{line.label}' was sent: name the protocol's `ideal`")

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        raise MaterialError("the reference has no keys")

    def forget(self, call: int) -> None:
        pass

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        pass
