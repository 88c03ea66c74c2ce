"""An answering party at several servers, and at each of their workers: a connection to every one, dialled again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ...errors import ArgumentError, IdentityError, NetworkError
from ..parties.answer import Answering
from ..parties.place import MOST
from .options import console

RETRY = 2.0
"""Seconds between attempts of an answering party to reach the server again."""


def addresses(server: str) -> list[str]:
    """The servers that an option names, with commas between them.

    Raises:
        ArgumentError: one twice, or too many.
    """
    named = [address.strip() for address in server.split(",") if address.strip()]
    if not named or len(set(named)) < len(named) or len(named) > MOST:
        raise ArgumentError(f"--server names 1 to {MOST} different servers, with commas between them; got {server}")
    return named


def keep_answering(
    party: Answering, name: str, stopped: threading.Event, server: str, retry: float = RETRY,
    registered: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Answer until stopped: where the server is not there, or goes away, dial again; a line says so once.

    Args:
        registered: called each time that it is.

    Raises:
        IdentityError: this party, or the server, is not who the other expects: waiting does not help.
    """
    told = ""
    while not stopped.is_set():
        try:
            party.register(name)
            told = ""
            console.print(f"'{name}' answers through {server}; Ctrl-C stops", highlight=False)
            registered()
            party.wait()
        except IdentityError:
            raise
        except NetworkError as error:
            if str(error) != told and not stopped.is_set():
                told = str(error)
                console.print(f"{told}; dialling again every {retry:g} s until it is there", highlight=False)
        stopped.wait(retry)


class Everywhere:
    """The connections of one answering party. `run` returns when it was stopped.

    Args:
        party: its first connection. name: under which it answers. servers: addresses.
    """

    def __init__(self, party: Answering, name: str, servers: list[str], stopped: threading.Event):
        self._party, self._name, self._servers, self._stopped = party, name, servers, stopped
        self._lock = threading.Lock()
        self._others: dict[tuple[str, int], Answering] = {}
        self._error: IdentityError | None = None

    def run(self) -> None:
        """Answer everywhere until stopped.

        Raises:
            IdentityError: as of `keep_answering`.
        """
        first, *others = self._servers
        for address in others:
            self._go_to(address, 0)
        try:
            self._keep(self._party, first)
        except IdentityError:
            self._stopped.set()
            raise
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all connections but the first one, which is the party's own."""
        with self._lock:
            others = list(self._others.values())
        for other in others:
            other.leave()

    def _go_to(self, address: str, worker: int) -> None:
        with self._lock:
            if (address, worker) in self._others or self._stopped.is_set():
                return
            other = self._others[address, worker] = self._party.beside(address, worker)
        thread = threading.Thread(target=self._beside, args=(other, address), daemon=True, name=f"at {address}")
        thread.start()

    def _beside(self, other: Answering, address: str) -> None:
        try:
            self._keep(other, address)
        except IdentityError as error:
            self._error = error
            self._stopped.set()
            with suppress(NetworkError):  # whoever waits for the first connection hears of it
                self._party.connection.link.close(error)

    def _keep(self, party: Answering, address: str) -> None:
        def more() -> None:
            for worker in range(1, party.connection.place.workers):
                self._go_to(address, worker)

        keep_answering(party, self._name, self._stopped, address, registered=more)
