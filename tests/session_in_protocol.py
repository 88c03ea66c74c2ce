"""Tensor code under `check_protocol`: its session runs within one call of a protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sectorch import Session
from sectorch.choreography import Net, Party
from sectorch.choreography.located import run_in
from sectorch.choreography.roles import STAR
from sectorch.session import Members


class Within(Session):
    """A session whose operations are parts of one call of a protocol under test."""

    def __init__(self, net: Net):
        self._begin(Members(STAR))
        self.device, self.runtime, self._within = torch.device("cpu"), net.runtime, net

    def net(self, party: Party | None = None) -> Net:
        return self._within

    @contextmanager
    def operation(self, party: Party) -> Iterator[Net]:
        with run_in(self._within):
            yield self._within
