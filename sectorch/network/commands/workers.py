"""Several processes behind one port: each serves the clients whose worker it is, and one that dies is started again.

The workers share the port (SO_REUSEPORT) and nothing else but files that several processes may use. A client has one
worker, which its name says (`names.worker_of`), and dials until it is there; an answering party is connected to each.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ...cli.command import Parser, number
from ...errors import ArgumentError, PeerLostError
from ...files import write as write_file
from ..names import name_of
from ..wire.address import unheard
from .options import console

PROGRAM = [sys.executable, "-c", "from sectorch.cli.main import main; main()"]
MOST = 64
SHORT = 10.0
"""Seconds below which a life was short; after so many of those in a row, nothing is started again."""
LIVES = 3
PAUSE = 0.5
ENDING = 15.0
"""Seconds beyond the drain that workers have to end."""


def add_workers(p: Parser) -> None:
    p.add_argument(
        "--workers", type=number(int, lambda n: 1 <= n <= MOST, f"1 to {MOST}"), default=1,
        help="processes behind the port, each with clients of its own",
    )  # fmt: skip
    p.add_argument("--replica", default="", help="this server's name, where several share an address; kept over starts")
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)


def checked(options: argparse.Namespace) -> None:
    """Raises ArgumentError: a name that cannot be."""
    if options.replica:
        name_of(options.replica, "--replica", ArgumentError)


def in_worker(options: argparse.Namespace) -> None:
    """What a worker does first: it ends with whoever started it."""
    if options.worker is not None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def supervise(command: str, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the workers until this process is stopped; the exit status.

    Raises:
        ArgumentError: a key file that cannot be made. PeerLostError: the address is in use.
    """
    _keep_key(options)
    with ExitStack() as stack:
        address = _reserved(stack, options.listen)
        mine = _without(arguments)
        commands = [[*PROGRAM, command, *mine, *_own(options, i), "--listen", address] for i in range(options.workers)]
        return _Workers(commands, options.drain).run()


class _Workers:
    def __init__(self, commands: list[list[str]], drain: float):
        self._commands, self._drain = commands, drain
        self._processes: list[subprocess.Popen] = []
        self._started: list[float] = []
        self._short = [0] * len(commands)
        self._stopping = 0

    def run(self) -> int:
        heard = [signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as of a script's background
            heard.append(signal.SIGINT)
        kept = {sign: signal.signal(sign, self._heard) for sign in heard}
        try:
            for command in self._commands:
                self._processes.append(self._start(command))
                self._started.append(time.monotonic())
            while not self._stopping:
                for i, process in enumerate(self._processes):
                    code = process.poll()
                    if code is not None and not self._stopping:
                        failed = self._again(i, code)
                        if failed:
                            return failed
                time.sleep(0.1)
            return 0
        finally:
            self._end()
            for sign, handler in kept.items():
                signal.signal(sign, handler)

    def _start(self, command: list[str]) -> subprocess.Popen:
        # A session of its own: what a terminal sends comes from here, once.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def _again(self, i: int, code: int) -> int:
        """Start a worker that has ended again; an exit status where that is no use."""
        short = time.monotonic() - self._started[i] < SHORT
        self._short[i] = self._short[i] + 1 if short else 0
        if (code > 0 and short) or self._short[i] >= LIVES:
            console.print(f"worker {i} ended with {code} as soon as it was started; stopping")
            return code if code > 0 else 1
        console.print(f"worker {i} ended with {code}: its clients' calls are lost, and it is started again")
        time.sleep(PAUSE)
        self._processes[i], self._started[i] = self._start(self._commands[i]), time.monotonic()
        return 0

    def _heard(self, sign: int, _: object) -> None:
        if sign != signal.SIGHUP:
            self._stopping += 1
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(sign)

    def _end(self) -> None:
        for process in self._processes:
            if not self._stopping and process.poll() is None:
                process.terminate()
        end = time.monotonic() + self._drain + ENDING
        for process in self._processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _without(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that each worker gets of its own."""
    found, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--listen":
            skip = True
        elif not argument.startswith("--listen="):
            found.append(argument)
    return found


def _own(options: argparse.Namespace, i: int) -> list[str]:
    """What is a worker's own: a folder, a file of receipts, an address for its operator."""
    own = ["--worker", str(i), "--store-budget", str(options.store_budget / options.workers)]
    if options.store is not None:
        own += ["--store", str(options.store / f"worker-{i}"), "--store-key", str(_key_of(options))]
    if options.receipts is not None:
        own += ["--receipts", str(options.receipts.with_suffix(f".{i}{options.receipts.suffix}"))]
    if options.manage is not None:
        host, _, port = options.manage.rpartition(":")
        own += ["--manage", f"{host}:{int(port) + i if port.isdigit() else port}"]
    return own


def _key_of(options: argparse.Namespace) -> Path:
    return options.store_key or options.store / "store.key"


def _keep_key(options: argparse.Namespace) -> None:
    """The key of the store, before several ask for it at once."""
    if options.store is None:
        return
    path = _key_of(options)
    try:
        options.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_file(path, os.urandom(32), 0o600)
    except OSError as error:
        raise ArgumentError(f"cannot keep material in {options.store}: {error.strerror}") from None


def _reserved(stack: ExitStack, address: str) -> str:
    """The address with its port, which stays this process's although it does not listen there itself.

    Raises:
        ArgumentError: that is no address. PeerLostError: it is in use.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentError(f"an address is HOST:PORT, got {address}")
    bare, number = host.strip("[]"), int(port)
    try:
        for family, kind, _, _, where in socket.getaddrinfo(bare, number, type=socket.SOCK_STREAM):
            to = (where[0], number, *where[2:])
            with socket.socket(family, kind) as alone:  # among one's own processes a shared port is never in use
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    alone.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                alone.bind(to)
                number = alone.getsockname()[1]
            held = stack.enter_context(socket.socket(family, kind))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind((where[0], number, *where[2:]))
    except OSError as error:
        raise PeerLostError(f"cannot listen on {address}: {unheard(error)}") from None
    return f"{host}:{number}"
