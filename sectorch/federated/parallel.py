"""Work in other processes of this machine, or on others through Ray.

`Workers.ahead` starts new processes, which leave files; what they are to do is pickled to them, and nothing comes back
but errors. `forked` forks, for parties whose keys must not be written down: results come back as JSON lines.

A forked child inherits the parties with their keys, so no key is ever written down for it. It uses one thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import selectors
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import SectorchError
from ..extras import needed
from .errors import FederationError, WorkerError
from .folder import RunFolder

Work = Callable[[Any], Iterable[dict]]
KINDS = ("processes", "ray")


@dataclass(frozen=True)
class Workers:
    """Who works beside each other.

    Args:
        count: processes of this machine; 1 forks none.
        kind: "processes", or "ray": tasks go to the cluster that Ray was started or joined with.
    """

    count: int = 1
    kind: str = "processes"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise FederationError(f"processes must be at least 1, got {self.count}")
        if self.kind not in KINDS:
            raise FederationError(f"there is no way to work in parallel {self.kind!r}; there are {', '.join(KINDS)}")

    def ahead(
        self, tasks: Sequence, work: Callable[[Any, RunFolder], Any], folder: RunFolder,
        done: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Do tasks beside each other whose results are the files that they leave in the folder.

        With one process of this machine nothing is done: whoever needs a result makes it then. A result made on one
        thread, as a worker's, may differ in its last bits from one that was made on several.

        Args:
            work: does a task, and keeps its result in the folder that it is given.
            done: called after each task.

        Raises:
            FederationError: the run has no folder.
            SectorchError: the first error of a task.
        """
        if (self.count < 2 and self.kind == "processes") or len(tasks) < 2:
            return
        if folder.path is None:
            raise FederationError("workers hand over their results in the run folder, and this run has none; name out=")
        if self.kind == "ray":
            _on_ray(tasks, work, folder.path, done)
            return

        _in_processes(tasks, work, folder, self.count, done)


def _in_processes(
    tasks: Sequence, work: Callable[[Any, RunFolder], Any], folder: RunFolder, count: int, done: Callable[[], None]
) -> None:
    """In forks of a server that has imported the package and done nothing: torch does not train in a fork of a process
    that has trained, and a process that imports torch and its optimizers anew takes five seconds to begin."""
    try:
        sent = [pickle.dumps((work, task, folder)) for task in tasks]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WorkerError(
            f"what is to be done cannot be sent to another process ({str(error).splitlines()[0]}); define models in a "
            f"module, or use one process"
        ) from error
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "sectorch", "torch._dynamo"])  # optimizers import the last
    pool = ProcessPoolExecutor(count, context, _alone, (dict(os.environ),))
    try:
        for future in as_completed([pool.submit(_do, one) for one in sent]):
            future.result()
            done()
    except BrokenProcessPool as error:
        raise WorkerError("a worker process ended in the middle; run again from the folder") from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _alone(environment: dict[str, str]) -> None:
    """A worker uses one thread, and ends without a word where it is interrupted; its server may be older than what is
    in the environment now."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _do(sent: bytes) -> None:
    work, task, folder = pickle.loads(sent)
    work(task, folder)


def _on_ray(tasks: Sequence, work: Callable[[Any, RunFolder], Any], path: Path, done: Callable[[], None]) -> None:
    """Each task in a folder of its own on some machine, whose files are then put here."""
    found = ray()

    def one(task: Any) -> dict[str, bytes]:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as name:
            work(task, RunFolder(name))
            return {str(p.relative_to(name)): p.read_bytes() for p in Path(name).rglob("*") if p.is_file()}

    waiting = [found.remote(one).remote(task) for task in tasks]
    while waiting:
        (ready, *_), waiting = found.wait(waiting)
        made = found.get(ready)
        # Tensors first: a record says that they are there.
        for name in sorted(made, key=lambda n: n.endswith(".json")):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            files.write(path / name, made[name])
        done()


def forked(tasks: Sequence, work: Work, processes: int, receive: Callable[[dict], None]) -> None:
    """receive(record) for every record that work(task) gives, as they come; the tasks are divided among processes.

    Raises:
        SectorchError: the first error of a child, by its own type; what came before it was received.
    """
    if processes < 2 or len(tasks) < 2:
        for task in tasks:
            for record in work(task):
                receive(record)
        return
    children, pipes = [], selectors.DefaultSelector()
    try:
        for k in range(min(processes, len(tasks))):
            reading, writing = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                os.close(reading)
                _child(tasks[k::processes], work, writing)
            os.close(writing)
            children.append(child)
            pipes.register(reading, selectors.EVENT_READ, bytearray())
        _collect(pipes, receive)
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGTERM)
        raise
    finally:
        for key in list(pipes.get_map().values()):
            os.close(key.fd)
        pipes.close()
        for child in children:
            os.waitpid(child, 0)


def _child(tasks: Sequence, work: Work, writing: int) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        for task in tasks:
            for record in work(task):
                _write(writing, record)
        status = 0
    except SectorchError as error:
        _write(writing, {"error": type(error).__name__, "message": str(error)})
    except Exception as error:
        _write(writing, {"error": "", "message": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(status)


def _write(writing: int, record: dict) -> None:
    line = json.dumps(record).encode() + b"\n"
    while line:
        line = line[os.write(writing, line) :]


def _collect(pipes: selectors.BaseSelector, receive: Callable[[dict], None]) -> None:
    while pipes.get_map():
        for key, _ in pipes.select():
            part = os.read(key.fd, 1 << 16)
            if not part:
                pipes.unregister(key.fd)
                os.close(key.fd)
                if key.data:
                    raise WorkerError("a worker process ended in the middle; run again from the folder")
                continue
            key.data.extend(part)
            *lines, rest = bytes(key.data).split(b"\n")
            key.data[:] = rest
            for line in lines:
                record = json.loads(line)
                if "error" in record:
                    raise _error(record)
                receive(record)


def _error(record: dict) -> Exception:
    kinds = [SectorchError]
    for kind in kinds:
        if kind.__name__ == record["error"]:
            return kind(record["message"])
        kinds.extend(kind.__subclasses__())
    return WorkerError(f"a worker process failed: {record['message']}")


def ray() -> Any:
    """Ray, started or joined.

    Raises:
        WorkerError: it is not installed.
    """
    with needed("reaching other machines", "ray", WorkerError, "or use processes=N"):
        import ray as found  # pyright: ignore[reportMissingImports]  an extra of its own, in no checked environment
    if not found.is_initialized():
        found.init()
    return found
