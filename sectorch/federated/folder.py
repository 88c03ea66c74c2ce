"""The run folder, with the finished parts of a run, and workers in other processes.

A finished part is on disk as a whole or not at all, so a killed run goes on after its last finished part.

    run.json        what the run is; another run in the same folder is refused
    NAME.pt         tensors of a finished part, loaded with `weights_only=True`
    NAME.json       its record, written last: where it is, the tensors are
    NAME.jsonl      lines that are appended and synchronised one by one; a line that a kill cut short is dropped

Names may have slashes. The run folder of a simulation has the models of all participants, and is as secret as they are:
its files can be read by their owner alone.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .. import files
from ..errors import CheckpointError, FederationError, WorkerError
from ..optional_deps import required_imports

AGAIN = "remove it and the files of its name, and that part is done again"


def digest(*tensors: torch.Tensor) -> str:
    """A name for contents, dtypes and shapes; a tensor on the meta device has no content."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.is_meta:
            continue
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


class RunFolder:
    """Finished work of one run. Without a path it keeps nothing, and every question is answered no.

    Raises:
        CheckpointError: by any method, a file that cannot be read or written; the text says what to do.
    """

    def __init__(self, path: str | Path | None):
        self.path = Path(path) if path is not None else None

    def inside(self, name: str) -> RunFolder:
        """A folder in it, which may be another run's."""
        return RunFolder(self.path / name if self.path else None)

    def claim(self, wanted: dict[str, Any]) -> None:
        """Make the folder this run's, or recognise it.

        Args:
            wanted: what the run is, for JSON.

        Raises:
            CheckpointError: it holds another run; names what differs, three at most.
        """
        wanted = json.loads(json.dumps(wanted))
        found = self.claimed()
        if found is None:
            self._save("run.json", json.dumps(wanted, indent=2).encode())
        elif different := list(_differences(found, wanted)):
            raise CheckpointError(
                f"{self.path} holds another run, which differs in {', '.join(different[:3])}; name another folder or "
                f"remove that one"
            )

    def claimed(self) -> Any:
        """What the run in this folder is, or None."""
        return self._load("run.json", _read_json, "remove its folder and start again")

    def record(self, name: str) -> Any:
        """What was kept as the record of a finished part, or None."""
        return self._load(f"{name}.json", _read_json)

    def tensors(self, name: str) -> Any:
        """What was kept as the tensors of a part, or None."""
        return self._load(f"{name}.pt", functools.partial(torch.load, weights_only=True))

    def keep(self, name: str, tensors: Any = None, record: Any = None) -> None:
        """Write tensors, and then the record that says they are finished; None is not written."""
        if tensors is not None:
            torch.save(tensors, data := io.BytesIO())
            self._save(f"{name}.pt", data.getvalue())
        if record is not None:
            self._save(f"{name}.json", json.dumps(record).encode())

    def drop(self, pattern: str, *but: str) -> None:
        """Remove the files that a glob pattern finds, but for those of these names."""
        found = self.path.glob(pattern) if self.path else ()
        for old in sorted(found, key=lambda path: path.suffix != ".json"):  # a record says that the others are there
            if old.name in but:
                continue
            try:
                old.unlink()
            except OSError as error:
                raise CheckpointError(f"{old} cannot be removed ({error.strerror}); {AGAIN}") from error

    def lines(self, name: str) -> list[dict]:
        """What was appended to NAME.jsonl, in order."""
        path = self._file(f"{name}.jsonl")
        if path is None or not path.is_file():
            return []
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read; {AGAIN}") from error

    def append(self, name: str, line: dict) -> None:
        """One line more, on disk when this returns. Call `lines` first: it drops what a kill cut short."""
        path = self._file(f"{name}.jsonl")
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _file(self, name: str) -> Path | None:
        return self.path / name if self.path else None

    def _load(self, name: str, read: Callable[[Path], Any], way_out: str = AGAIN) -> Any:
        """The content of a file, or None if it is not there."""
        path = self._file(name)
        if path is None or not path.is_file():
            return None
        try:
            return read(path)
        except (OSError, ValueError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); {way_out}") from error

    def _save(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all, and its folder where it is missing."""
        path = self._file(name)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write(path, data, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror or type(error).__name__}); what is finished is kept, and "
                f"the same run goes on from there"
            ) from error


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _differences(there: dict, now: dict, within: str = "") -> Iterator[str]:
    """What differs, in words: plain values as they are, collections of other sizes by size, contents as such."""
    for name in sorted(there.keys() | now.keys()):
        old, new = there.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            yield from _differences(old, new, f"{within}{name}.")
            continue
        if isinstance(old, dict | list) and isinstance(new, dict | list) and len(old) != len(new):
            old, new = len(old), len(new)
        old, new = _short(old), _short(new)
        yield f"{within}{name} " + (f"({old} there, {new} now)" if old != new else "(other content)")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return "other content" if len(text) > 40 or re.fullmatch('"[0-9a-f]{32}"', text) else text


# Work in other processes of this machine, or on other machines through Ray.
#
# `Workers.ahead` starts new processes. Their tasks are pickled, their results are files, and only errors come back.
# `forked` forks, for parties whose keys must not be written anywhere: a child inherits the parties with their keys,
# uses one thread, and sends its results back.

Work = Callable[[Any], Iterable[dict]]
KINDS = ("processes", "ray")


@dataclass(frozen=True)
class Workers:
    """Worker processes.

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
        """Do tasks in parallel, whose results are files in the folder.

        With one process of this machine nothing is done here, and a result is made when it is needed. A worker uses one
        thread, so its result may differ in the last bits from one that was made on several.

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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "sectorch", "torch._dynamo"])  # optimizers import the last
    _completed(ProcessPoolExecutor(count, context, _alone, (dict(os.environ),)), _do, sent, lambda _: done())


def _completed(pool: ProcessPoolExecutor, do: Callable, tasks: Sequence, receive: Callable[[Any], None]) -> None:
    """receive(do(task)) as each task is done; the first error ends all of them."""
    others = set(multiprocessing.active_children())
    try:
        for future in as_completed([pool.submit(do, task) for task in tasks]):
            receive(future.result())
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
            (path / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write(path / name, made[name], 0o600)
        done()


def forked(tasks: Sequence, work: Work, processes: int, receive: Callable[[dict], None]) -> None:
    """receive(record) for every record that work(task) gives; the tasks are divided among processes.

    Raises:
        SectorchError: the first error of a task, by its own type; what came before it was received.
        WorkerError: a process ended in the middle.
    """

    def took(records: Iterable[dict]) -> None:
        for record in records:
            receive(record)

    if processes < 2 or len(tasks) < 2:
        for task in tasks:
            took(work(task))
        return
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, of which a child uses none
        _completed(ProcessPoolExecutor(min(processes, len(tasks)), context, _inherit, (work,)), _forked, tasks, took)


_inherited: list[Work] = []
"""In a child of `forked`: its work, which holds the parties with their keys and was not pickled."""


def _inherit(work: Work) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _inherited.append(work)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children, which have keys."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _forked(task: Any) -> list[dict]:
    return list(_inherited[-1](task))


def ray() -> Any:
    """Ray, started or joined.

    Raises:
        WorkerError: it is not installed.
    """
    with required_imports("reaching other machines", "ray", WorkerError, "or use processes=N"):
        import ray as found  # pyright: ignore[reportMissingImports]  an extra of its own, in no checked environment
    if not found.is_initialized():
        found.init()
    return found
