"""Processes, keys and folders of a sweep. A process is forked from this one, which has imported what it needs and runs
no thread, or fresh; each is killed with this one. Whoever was forked is a process as any other, with its own sockets,
files and random numbers; it did not spend its first seconds on imports."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from sweeps import child

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TICK = 0.01


def warm(modules: Path | None = None) -> None:
    """Import what all parties need, once; nothing is computed and no thread is begun.

    Args:
        modules: names of what a party had imported at its end, one a line.
    """
    import torch

    torch.set_num_threads(1)
    import sectorch.network.commands.ask
    import sectorch.network.commands.serve
    import sectorch.network.federation.command
    import sectorch.network.federation.party  # noqa: F401
    from sectorch.network.federation.programs import PAPERS, command_of

    for paper in PAPERS:
        command_of(paper)

    for name in modules.read_text().split() if modules is not None and modules.exists() else []:
        with suppress(Exception):
            importlib.import_module(name)


def rehearsed(argv: list[str], log: Path) -> None:
    """Run a command in this process, so that what it loads and compiles is there in all that are forked from it.

    Raises:
        RuntimeError: it failed, or left a thread behind, which no fork may have.
    """
    from sectorch.cli.main import run

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        status = run(argv)
    if status or threading.active_count() > 1:
        raise RuntimeError(f"{argv[0]} ended with {status}; threads: {threading.enumerate()}; see {log}")


def settled() -> None:
    """What is here stays: a collection in a forked process leaves it alone, and so shared with this one."""
    gc.collect()
    gc.freeze()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    """A party that runs. `status` is None until it has ended (negative: by a signal), `ended` is when that was."""

    def __init__(self, name: str, job: dict, log: Path, fresh: bool = False):
        self.name, self.log, self.status, self.ended = name, log, None, 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self._size = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            if fresh:
                path = log.with_suffix(".job")
                path.write_text(json.dumps(job))
                self.pid = subprocess.Popen(
                    [sys.executable, "-m", "sweeps.child", str(path)], stdout=file, stderr=file,
                    stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE.parent}"},
                ).pid  # fmt: skip
                return
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if not self.pid:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                child.forked(job)

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        return self.status

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(TICK)
        return self.status

    def stop(self, seconds: float = 8.0) -> int | None:
        """SIGTERM, and SIGKILL where that does not help."""
        self.signal(15)
        if self.wait(seconds) is None:
            self.signal(9)
            self.wait(10)
        return self.status

    @property
    def said(self) -> str:
        """What it wrote."""
        return self.log.read_bytes()[self._size :].decode(errors="replace")

    @property
    def last(self) -> str:
        lines = [line for line in self.said.splitlines() if line.startswith("error:")] or self.said.splitlines()
        return lines[-1] if lines else ""


def running(processes: Iterable[Process]) -> list[Process]:
    """Those that have not ended; the others' ends are noted."""
    return [process for process in processes if process.poll() is None]


def wait_all(processes: list[Process], seconds: float) -> bool:
    """Whether all have ended in that time."""
    end = time.monotonic() + seconds
    while True:
        if not running(processes):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(TICK)


def listening(port: int, process: Process, seconds: float = 60.0) -> None:
    """Until something listens there, or the process was killed on the way."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    if process.poll() == -9:
        return
    raise RuntimeError(f"{process.name} does not listen: {process.said}")


def killed_at(path: Path) -> float | None:
    """When a process has killed itself, by the clock that all processes share."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
