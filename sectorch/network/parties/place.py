"""Which of several servers a client is connected to: workers behind one port, and replicas behind one address."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ...errors import BusyError
from ..messages import ServerReply
from ..names import NAME, worker_of

MOST = 64


class Place(ServerReply, frozen=True):
    """A process that serves, as it says to whoever dials.

    Attributes:
        worker, workers: which of how many behind its port.
        replica: the name of all of these together, if they have one.
    """

    worker: Annotated[int, Meta(ge=0, lt=MOST)] = 0
    workers: Annotated[int, Meta(ge=1, le=MOST)] = 1
    replica: Annotated[str, Meta(pattern=rf"\A({NAME.pattern})?\Z")] = ""

    def __post_init__(self) -> None:
        if self.worker >= self.workers:
            raise ValueError(f"worker {self.worker} of {self.workers}")

    @property
    def label(self) -> str:
        """By which material is known that was prepared here; empty where there is one server only."""
        return f"{self.replica}.{self.worker}of{self.workers}" if self.replica or self.workers > 1 else ""

    def check(self, client: str) -> None:
        """Raise BusyError where a client is another worker's."""
        if worker_of(client, self.workers) != self.worker:
            raise BusyError(f"this is not the worker of '{client}'; dial again, with this version of sectorch")

    def check_first(self) -> None:
        """Raise BusyError where parties do not meet here: those of one session have to be at one worker."""
        if self.worker:
            raise BusyError("parties meet at the first worker of a server; dial again, with this version of sectorch")
