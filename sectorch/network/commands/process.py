"""What a command that runs for long asks of the operating system for its process."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
from contextlib import suppress

import torch

from ...cli.command import Parser
from ...errors import ArgumentError


def add_core(p: Parser) -> None:
    p.add_argument(
        "--core", type=int, metavar="N",
        help="run on this processor core alone, and S's workers on those after it: a third faster for small models",
    )  # fmt: skip


def on_core(options: argparse.Namespace, worker: int = 0) -> None:
    """Run on one core from now on, with one thread of torch's, where `--core` asks for it.

    Python runs one thread at a time, and a small call is handed from thread to thread some hundred times. On one core
    that is a switch; between two it is a wake-up each time.

    Raises:
        ArgumentError: this process may not run there, or the system does not let it choose.
    """
    if options.core is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ArgumentError("--core: this system does not let a process choose its cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if options.core not in cores:
        raise ArgumentError(f"--core is one of {', '.join(map(str, cores))} here, got {options.core}")
    mine = {cores[(cores.index(options.core) + worker) % len(cores)]}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), mine)
    torch.set_num_threads(1)


def few_arenas() -> None:
    """Two malloc arenas: glibc's default of eight a core lets each session's thread keep freed memory of its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX


def many_files() -> None:
    """As many file descriptors as the system lets this process have: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
