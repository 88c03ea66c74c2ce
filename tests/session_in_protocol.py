"""Tensor code under `check_protocol`: its session runs within one call of a protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def with_masks_twice(monkeypatch) -> None:
    """The control of a check: openings of a call, of other values, are under one mask."""
    common, seen = Net.common, dict[tuple, int]()

    def again(net: Net, p: Party, q: Party, shape: Any, label: str, dtype: torch.dtype = torch.int64) -> Any:
        before = net._draws
        if label in ("r_A", "r_S"):
            net._draws = seen.setdefault((net, label, tuple(shape)), before)
        try:
            return common(net, p, q, shape, label, dtype)
        finally:
            net._draws = before + 1

    monkeypatch.setattr(Net, "common", again)
