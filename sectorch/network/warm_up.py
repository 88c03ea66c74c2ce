"""`sectorch warm`: compiles the loops of secure inference before the first query, once on a machine.

`ring/jit.py` compiles a loop when it is first called, and keeps it on disk. Here a small net runs with all parties in
this process, so that each loop is called with arguments like a query's; loops on disk are loaded. Of several processes
that start at the same time one compiles, and the others wait for it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from ..cli.command import Parser, command_status, print_json
from ..config import Scheme
from ..errors import ArgumentError
from ..nn.module import secure
from ..ring import products
from ..session import Session

NOWHERE = (
    "compiled loops cannot be kept on this machine, and each start compiles them anew, for some seconds: name a folder "
    "that can be written as NUMBA_CACHE_DIR"
)


def warm(say: Callable[[str], None] = lambda _: None) -> float:
    """Compile the loops that are not on disk; returns the seconds that this took, 0 if all were there.

    Args:
        say: called with a line for the user if this takes a while.
    """
    folder = loop_folder()
    began = time.perf_counter()
    if folder is None:
        say(NOWHERE)
        _run_net(Scheme())
        return time.perf_counter() - began
    stamp = folder / f"sectorch-{_kind()}.compiled"
    if stamp.exists():
        _run_net(Scheme())
        return 0.0
    if not os.access(folder, os.W_OK):  # of another kind of processor, or another version of the package
        say(f"the loops in {folder} are not for this processor and version, and it cannot be written: {NOWHERE}")
        _run_net(Scheme())
        return time.perf_counter() - began
    say(f"compiling loops for this processor, once on this machine, into {folder}")
    with _lock(folder):
        for scheme in (Scheme(), Scheme(network="wan"), Scheme(verified=True)):
            _run_net(scheme)
        try:
            stamp.touch()
        except OSError:
            say(NOWHERE)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """`sectorch warm`."""
    p = Parser(
        "warm",
        "Compile the loops of secure inference for this processor, once on a machine, before the first query.\n"
        "A server and an answering party do it when they start, and a query while it connects.",
        [
            "sectorch warm",
            "sectorch warm --into /opt/sectorch/loops      in an image, which has NUMBA_CACHE_DIR=/opt/sectorch/loops",
        ],
    )
    p.add_argument(
        "--into", type=Path, metavar="FOLDER",
        help="keep them in this folder, which all may read; later NUMBA_CACHE_DIR names it, and it may be read-only",
    )  # fmt: skip
    p.takes_json("the folder and the seconds")
    return command_status(p, arguments, _main)


def _main(options: argparse.Namespace, _: Console) -> None:
    if options.into is not None:
        return _warm_into(options.into, options.json)
    screen = Console(stderr=True, soft_wrap=True)
    seconds = warm(lambda words: screen.print(words, highlight=False, markup=False))
    folder = loop_folder()
    if options.json:
        print_json({"folder": None if folder is None else str(folder), "seconds": round(seconds, 3)})
    elif folder is not None:
        print(f"compiled in {seconds:.1f} s" if seconds else f"compiled before, in {folder}")


def _warm_into(folder: Path, json: bool) -> None:
    """`sectorch warm` in a process whose loops are in this folder: numba reads its place when it is imported.

    Raises:
        ArgumentError: the folder cannot be written, or the process failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"compiled loops cannot be kept in {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"compiled loops cannot be kept in {folder}: it cannot be written")
    command = [sys.executable, "-m", "sectorch", "warm", *(["--json"] if json else [])]
    ended = subprocess.run(command, env={**os.environ, "NUMBA_CACHE_DIR": str(folder.resolve())}, check=False)
    if ended.returncode:
        raise ArgumentError(f"compiling into {folder} ended with exit code {ended.returncode}")
    for path in (folder, *folder.rglob("*")):  # whoever runs a party later, whatever umask this process has
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def loop_folder() -> Path | None:
    """The folder of compiled loops; None if it cannot be written."""
    from ..ring import bitloops  # numba takes half a second to load

    kept = bitloops.planes.stats.cache_path  # pyright: ignore[reportFunctionMemberAccess] # of numba's dispatchers
    return None if kept is None else Path(kept)


def _kind() -> str:
    """A digest of what compiled loops depend on: the processor, the compiler and the loops' sources."""
    import llvmlite
    import numba
    from llvmlite import binding

    from ..mpc import harmonicloops
    from ..ring import jit

    places = *sorted(Path(jit.__file__).parent.glob("*.py")), Path(harmonicloops.__file__)
    sources = [hashlib.sha256(place.read_bytes()).digest() for place in places]  # an image's layers round times
    known = [
        numba.__version__,
        llvmlite.__version__,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    ]
    return hashlib.sha256(repr([known, sources]).encode()).hexdigest()[:16]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder: one process of this machine at a time runs such a block."""
    try:
        lock = (folder / "sectorch.lock").open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@torch.no_grad()
def _run_net(scheme: Scheme) -> None:
    """Run a net with the products, comparisons and series of most nets, large enough for the processor's matrix unit.

    It has no large images: their convolution is called by itself.
    """
    zeros = torch.zeros(1, 1, 3, 3, dtype=torch.int64)
    products.convolve_karatsuba(zeros, products.prepare_taps(zeros), (0, 0))
    few = nn.Conv2d(8, 8, 1)  # few channels have a loop of their own
    layers = [few, nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 16)]
    net = nn.Sequential(*layers, *([] if scheme.verified else [nn.GELU()])).eval()
    secure(net, scheme, session=Session())(torch.rand(2, 8, 16, 16))
