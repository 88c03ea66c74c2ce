"""The models that a process serves, as far as their programs are the same in every session: worked out once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch

from ...choreography import Party
from ...nn.module import SecureModule
from ...nn.program import load_program
from ...nn.served import Served
from ...session import Session
from ...tensor import Scheme
from ..store.store import fingerprint

MOST = 32
"""Descriptions and number formats that are remembered; a client chooses the formats."""


OWN = 4
"""Models of this process's own whose weights are kept, though nobody may serve them any more."""


class Known:
    """Descriptions read back, and the programs of their calls. It holds no secret but the weights of its own process.

    A session of the same model and number format takes the programs that another one has traced: to open it costs
    nothing then, and calls of several sessions can be taken together (`joint.py`), since they are of one program.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._served: OrderedDict[tuple, tuple[Served, Any]] = OrderedDict()
        self._first: OrderedDict[tuple, SecureModule] = OrderedDict()

    def served(self, description: dict, weights: dict[str, torch.Tensor] | None = None) -> tuple[Served, tuple]:
        """A description that was checked and read, and what it is known as.

        Raises:
            ProgramError: as of `load_program`.
        """
        key = fingerprint(description), id(weights)
        with self._lock:
            held = self._served.get(key)
            if held is None:
                held = self._served[key] = load_program(description, weights), weights  # so that the id stays its own
            _latest(self._served, key)
            self._drop_old()
        return held[0], key

    def _drop_old(self) -> None:
        for old in [key for key, (_, weights) in self._served.items() if weights is not None][:-OWN]:
            del self._served[old]
            for key in [key for key in self._first if key[: len(old)] == old]:
                del self._first[key]

    def module(self, served: Served, key: tuple, session: Session, party: Party, scheme: Scheme) -> SecureModule:
        """A session's module of that description, for one of its answering parties."""
        count, place = len(session.answering), session.answering.index(party)
        key = (*key, repr(scheme), count, place)
        with self._lock:
            first = self._first.get(key)
            if first is None or first._served is not served:
                shapes = Session(count, dry=True)
                first = self._first[key] = SecureModule(served, shapes, shapes.answering[place], scheme, None)
            _latest(self._first, key)
        return SecureModule(served, session, party, scheme, None, like=first)


def _latest(kept: OrderedDict, key: Any) -> None:
    kept.move_to_end(key)
    while len(kept) > MOST:
        kept.popitem(last=False)
