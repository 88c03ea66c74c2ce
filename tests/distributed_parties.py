"""Distributed parties: each in a thread or a process, with a runtime, a session and its ends of edges."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from sectorch.choreography import Party
from sectorch.choreography.run.frames import unpack
from sectorch.choreography.run.party import PartyRuntime
from sectorch.errors import PeerLostError

PROCESSES = multiprocessing.get_context("forkserver")
"""Each is a fork of a server that has imported the package and nothing of the tests: an import takes five seconds."""
PRELOADED = ["sectorch", "sectorch.cli.main", "torch._dynamo", "sklearn.datasets", "preloaded_modules"]


def preload_fork_server() -> None:
    """Whoever starts the server first, it has imported `PRELOADED`: also a run with workers, which asks for less.

    Otherwise every process that this one starts later would import the package, and load compiled loops, itself.
    """
    server = forkserver._forkserver
    start = server.ensure_running

    def ensure_running() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            server.set_forkserver_preload(PRELOADED)
            start()

    server.ensure_running = ensure_running


def forked(target: Callable, args: Iterable[Any]) -> Any:
    """A process that runs the target, not started yet."""
    return PROCESSES.Process(target=target, args=tuple(args))


class Pipe:
    """A channel over a connection: a pipe between two processes, or queues between two threads."""

    def __init__(self, connection):
        self._connection = connection

    def send(self, parts, later=False):
        for part in parts:
            self._connection.send_bytes(part)

    def flush(self):
        pass

    def close(self):
        self._connection.close()

    def receive(self):
        try:
            (frame,) = unpack(self._connection.recv_bytes())
        except (EOFError, queue.Empty):
            raise PeerLostError("the other end is gone") from None
        return frame


class Queues:
    """One end of a connection between two threads."""

    def __init__(self, out: queue.Queue, come: queue.Queue):
        self._out, self._come = out, come

    def send_bytes(self, data):
        self._out.put(bytes(data))

    def recv_bytes(self):
        found = self._come.get(timeout=60)  # the limit only keeps a broken protocol from hanging
        if found is None:
            raise EOFError
        return found

    def close(self):
        self._out.put(None)


def runtime_of(me: Party, ends: Mapping[Party, Any]) -> PartyRuntime:
    """The runtime of a party that has these ends of its edges."""
    return PartyRuntime(me, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})


def in_threads(edges: Iterable[tuple[Party, Party]], work: Callable[[Party, dict], Any]) -> dict[str, Any]:
    """What work(party, ends) gives in a thread of each party, by name; a party that raises closes its edges. Nothing is
    left on an edge whose two ends are whole.
    """
    ends: dict[Party, dict[Party, Queues]] = {}
    queues = []
    for p, q in edges:
        there, back = queue.Queue(), queue.Queue()
        ends.setdefault(p, {})[q] = Queues(there, back)
        ends.setdefault(q, {})[p] = Queues(back, there)
        queues += [there, back]
    found: dict[str, Any] = {}

    def run(party: Party) -> None:
        torch.set_num_threads(1)
        try:
            found[party.name] = work(party, ends[party])
        except BaseException as error:
            found[party.name] = error
            for end in ends[party].values():
                end.close()

    threads = [threading.Thread(target=run, args=(party,), daemon=True) for party in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if not any(isinstance(value, BaseException) for value in found.values()):
        assert all(q.empty() for q in queues)
    return found


def in_processes(edges: Iterable[tuple[str, str]], work: Callable, *args: Any) -> dict[str, Any]:
    """The same with a process for each party: work(name, ends by name, *args), and what it gives can be pickled."""
    ends: dict[str, dict] = {}
    for p, q in edges:
        ends.setdefault(p, {})[q], ends.setdefault(q, {})[p] = PROCESSES.Pipe()
    processes, heard = [], {}
    for name in ends:
        heard[name], told = PROCESSES.Pipe(duplex=False)
        process = forked(_told, (told, work, name, ends[name], *args))
        process.start()
        told.close()
        processes.append(process)
    try:
        return {name: end.recv() for name, end in heard.items()}
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def _told(told: Any, work: Callable, *args: Any) -> None:
    torch.set_num_threads(1)
    told.send(work(*args))
