"""One party's process: a command line of sectorch, with its events counted and a place at which it kills itself.

An event is a message that the party sends or has received, a request to the server, a frame that the server takes, or
a file that is about to be put in its place or was. A place is the number of an event; kill -9 comes there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = {"send": "s", "receive": "r", "ask": "a", "file": "f", "receipt": "p", "frame": "v"}
"""Kinds of events, and the letter by which the list of a run's events names each."""


class Events:
    """Counts them, and kills this process at the one that is named.

    Args:
        kill: number of the event, of those of the kinds `among` (all if empty); None for never.
        killed: file for the time at which that was.
    """

    def __init__(self, kill: int | None, among: str, killed: str | None):
        self._kill, self._among, self._killed = kill, among, killed
        self._lock = threading.Lock()
        self.seen: list[str] = []
        self._count = 0

    def __call__(self, kind: str) -> None:
        with self._lock:
            self.seen.append(KINDS[kind])
            if self._among and KINDS[kind] not in self._among:
                return
            if self._count == self._kill:
                die(self._killed)
            self._count += 1


def die(killed: str | None) -> None:
    """Note the time, and kill -9 this process."""
    if killed is not None:
        handle = os.open(killed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(handle, repr(time.monotonic()).encode())
        os.close(handle)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Recorder:
    """What this party is sent, in the clear as its protocol has it: a line of JSON and the bytes, for each message."""

    def __init__(self, path: str | None):
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()

    def __call__(self, line: Any, value: Any) -> None:
        if self._file is None:
            return
        data = value.detach().contiguous().view(-1).numpy().tobytes()
        head = dict(
            path=line.path, label=line.label, call=line.call, src=line.src.name, dst=line.dst.name, role=line.dst.role,
            hidden=line.mask != "nothing", dtype=str(value.dtype).split(".")[-1], size=len(data),
        )  # fmt: skip
        with self._lock:
            os.write(self._file, json.dumps(head).encode() + b"\n" + data)


def hook(events: Events, recorder: Recorder, serves: bool, port: int | None) -> None:
    """Have the events of this process counted; a client dials `port` in place of its server's."""
    from sectorch import files
    from sectorch.choreography.run.party import PartyRuntime
    from sectorch.network.parties import client
    from sectorch.network.receipts import Receipts
    from sectorch.network.wire import channel

    send, receive = PartyRuntime._send, PartyRuntime._receive

    def sending(self, line, *args, **more):
        events("send")
        return send(self, line, *args, **more)

    def receiving(self, line, *args, **more):
        value = receive(self, line, *args, **more)
        recorder(line, value)
        events("receive")
        return value

    def around(kind: str, before: bool, inner: Callable) -> Callable:
        def wrapped(*args, **more):
            if before:
                events(kind)
            found = inner(*args, **more)
            if kind != "ask":
                events(kind)
            return found

        return wrapped

    PartyRuntime._send, PartyRuntime._receive = sending, receiving
    files.move = around("file", True, files.move)
    Receipts._write = around("receipt", True, Receipts._write)
    client.Connection._ask = around("ask", True, client.Connection._ask)
    if serves:
        channel.PeerLink._route = around("frame", False, channel.PeerLink._route)
    if port is not None:
        dial = client.dial
        client.dial = lambda address, *args, **more: dial(f"localhost:{port}", *args, **more)


def main(job: dict) -> int:
    """Run a party.

    Args:
        job: `argv` of a command, or `asks` (see `inference.asking`), `proxy` (`links.Proxy`), `makes`
            (`inference.made`); `events`, `traffic` and `killed`: files to write;
            `kill`, `among`: see `Events`; `port`: to dial; `serves`: whether it is a server; `env`.
    """
    with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(job.get("env", {}))
    if "proxy" in job:
        from sweeps.links import Proxy

        return Proxy(**job["proxy"]).run()
    if "makes" in job:
        from sweeps.inference import made

        return made(Path(job["makes"]))
    import torch

    torch.set_num_threads(1)
    events = Events(job.get("kill"), job.get("among", ""), job.get("killed"))
    hook(events, Recorder(job.get("traffic")), job.get("serves", False), job.get("port"))
    try:
        if "asks" in job:
            from sweeps.inference import asking

            return asking(job["asks"])
        from sectorch.cli.main import run

        return run(job["argv"])
    finally:
        if job.get("events"):
            Path(job["events"]).write_text("".join(events.seen))
            Path(job["events"] + ".modules").write_text("\n".join(sorted(sys.modules)))


def with_parent() -> None:
    """Whoever started this process takes it along."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def forked(job: dict) -> None:
    """`main` in a process that was just forked, and its end."""
    status = 70
    try:
        status = main(job)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
