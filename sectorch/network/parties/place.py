"""Which of several servers a client is connected to: workers behind one port, and replicas behind one address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import BusyError, FrameError
from ..names import NAME, worker_of

MOST = 64


@dataclass(frozen=True)
class Place:
    """A process that serves.

    Attributes:
        worker, workers: which of how many behind its port.
        replica: the name of all of these together, if they have one.
    """

    worker: int = 0
    workers: int = 1
    replica: str = ""

    @property
    def label(self) -> str:
        """By which material is known that was prepared here; empty where there is one server only."""
        return f"{self.replica}.{self.worker}of{self.workers}" if self.replica or self.workers > 1 else ""

    def said(self) -> dict[str, Any]:
        """What a client is told, who reads it by `read`."""
        return {"worker": self.worker, "workers": self.workers, "replica": self.replica}

    @classmethod
    def read(cls, said: dict) -> Place:
        """What a server says.

        Raises:
            FrameError: that is no place.
        """
        worker, workers, replica = said.get("worker", 0), said.get("workers", 1), said.get("replica", "")
        numbers = type(worker) is int and type(workers) is int and 0 <= worker < workers <= MOST
        if not numbers or not isinstance(replica, str) or (replica and not NAME.fullmatch(replica)):
            raise FrameError("the server does not say which of its workers it is")
        return cls(worker, workers, replica)

    def check(self, client: str) -> None:
        """Raise BusyError where a client is another worker's."""
        if worker_of(client, self.workers) != self.worker:
            raise BusyError(f"this is not the worker of '{client}'; dial again, with this version of sectorch")

    def check_first(self) -> None:
        """Raise BusyError where parties do not meet here: those of one session have to be at one worker."""
        if self.worker:
            raise BusyError("parties meet at the first worker of a server; dial again, with this version of sectorch")
