"""Python programs in processes of their own, as of `subprocess`, that have nothing to import: an import of torch, its
optimizers and the package takes five seconds of a processor, and the suite starts hundreds of programs.

Each is a fork of a server that has imported them, has one thread, and has run one inference (`apart.forked`). It has
its own arguments, environment, folder, files and signals, and whatever ends it ends it alone. How a program starts cold
is for the tests that use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch
from distributed_parties import forked

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL


class Command:
    """A running `[sys.executable, "-m", module | "-c", code | script, *arguments]`, with what
    tests use of `subprocess.Popen`. Its output is text.
    """

    def __init__(
        self, arguments: Sequence[str], *, cwd: Any = None, env: Mapping[str, str] | None = None,
        stdin: Any = DEVNULL, stdout: Any = None, stderr: Any = None,
    ):  # fmt: skip
        executable, *self.args = map(str, arguments)
        assert executable == sys.executable, executable
        self.stdin, into = _input(stdin)
        self.stdout, out = _end(stdout, 1)
        self.stderr, err = (None, os.dup(out)) if stderr == STDOUT else _end(stderr, 2)
        folder = os.path.abspath(cwd or os.getcwd())
        environment = dict(os.environ if env is None else env)
        self._process = forked(_work, (self.args, folder, environment, _Ends(into, out, err)))
        self._process.start()
        for descriptor in (into, out, err):
            os.close(descriptor)
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """What is left of its output, at its end."""
        said: dict[int, str] = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed]
        readers = [threading.Thread(target=lambda s=s: said.update({id(s): s.read()}), daemon=True) for s in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        for stream in streams:
            stream.close()
        return said.get(id(self.stdout)), said.get(id(self.stderr))

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def run_command(
    arguments: Sequence[str], *, cwd: Any = None, env: Mapping[str, str] | None = None, timeout: float | None = None,
    check: bool = False, stdout: Any = PIPE, stderr: Any = PIPE,
) -> subprocess.CompletedProcess:  # fmt: skip
    """`subprocess.run`, with its output."""
    with Command(arguments, cwd=cwd, env=env, stdout=stdout, stderr=stderr) as process:
        try:
            said = process.communicate(timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(arguments, process.wait(), *said)
    if check:
        done.check_returncode()
    return done


def _end(asked: Any, own: int) -> tuple[io.TextIOBase | None, int]:
    """The end of an output that is read here, if it is, and the descriptor that the program writes to."""
    if asked == PIPE:
        read, write = os.pipe()
        return open(read, encoding="utf-8"), write
    if asked == DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    return None, os.dup(own if asked is None else asked.fileno())


def _input(asked: Any) -> tuple[io.TextIOBase | None, int]:
    """The end of its input that is written here, if it is, and the descriptor that the program reads."""
    if asked == PIPE:
        read, write = os.pipe()
        return open(write, "w", encoding="utf-8"), read
    assert asked == DEVNULL
    return None, os.open(os.devnull, os.O_RDONLY)


class _Ends:
    """The descriptors of its input and output, on their way to a process."""

    def __init__(self, *descriptors: int):
        self._descriptors = descriptors

    def __reduce__(self) -> tuple:
        return _detached, tuple(DupFd(descriptor) for descriptor in self._descriptors)


def _detached(*ends: Any) -> list[int]:
    return [end.detach() for end in ends]


def _work(arguments: Sequence[str], folder: str, environment: Mapping[str, str], ends: Sequence[int]) -> None:
    """In the process: what the interpreter does before and after a program."""
    for own, descriptor in enumerate(ends):
        os.dup2(descriptor, own)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or 1))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    kind, *left = arguments
    try:
        if kind == "-c":
            code, *left = left
            sys.argv, sys.path[:0] = ["-c", *left], [""]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv, sys.path[:0] = left, [folder]
            sys.modules.pop(left[0], None)
            runpy.run_module(left[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = [kind, *left], [str(Path(kind).resolve().parent)]
            runpy.run_path(kind, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
