"""The run folder: what is finished is on disk, whole or not at all, so that a killed run goes on where it was.

    run.json        what the run is; another run in the same folder is refused
    NAME.pt         tensors of a finished part, loaded with `weights_only=True`
    NAME.json       its record, written last: where it is, the tensors are
    NAME.jsonl      lines that are appended and synchronised one by one; a line that a kill cut short is dropped

Names may hold slashes. A run folder holds the models of all participants: it belongs to a simulation, and is as secret
as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .. import files
from .errors import CheckpointError

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
        CheckpointError: by any method, a file that cannot be read; the text says what to remove.
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
            CheckpointError: it holds another run; names what differs.
        """
        wanted = json.loads(json.dumps(wanted))
        found = load_json(self._file("run.json"), "remove its folder and start again")
        if found is None:
            save_json(self._file("run.json"), wanted, indent=2)
        elif self.path is not None:
            same_run(self.path, found, wanted)

    def record(self, name: str) -> Any:
        """What was kept as the record of a finished part, or None."""
        return load_json(self._file(f"{name}.json"), AGAIN)

    def tensors(self, name: str) -> Any:
        """What was kept as the tensors of a part, or None."""
        return load_tensors(self._file(f"{name}.pt"), AGAIN)

    def keep(self, name: str, tensors: Any = None, record: Any = None) -> None:
        """Write tensors, and then the record that says they are finished; None is not written."""
        if tensors is not None:
            save_tensors(self._file(f"{name}.pt"), tensors)
        if record is not None:
            save_json(self._file(f"{name}.json"), record)

    def drop(self, pattern: str, *but: str) -> None:
        """Remove the files that a glob pattern finds, but for those of these names."""
        for old in self.path.glob(pattern) if self.path else ():
            if old.name not in but:
                old.unlink()

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
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _file(self, name: str) -> Path | None:
        return self.path / name if self.path else None


def named(what: dict[str, Any]) -> str:
    """A folder's name for what a run is, so that two that differ never meet."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def same_run(folder: Path, found: dict, wanted: dict) -> None:
    """Whether the run that `folder` holds is the one that is wanted.

    Args:
        found: what the run there is, as it was read from JSON.
        wanted: what this run is, in JSON's types.

    Raises:
        CheckpointError: it is another; names what differs, three at most.
    """
    different = list(_differences(found, wanted))
    if different:
        raise CheckpointError(
            f"{folder} holds another run, which differs in {', '.join(different[:3])}; name another folder or remove "
            "that one"
        )


def load_json(path: Path | None, way_out: str) -> Any:
    """What `save_json` wrote, or None if it is not there.

    Raises:
        CheckpointError: it cannot be read; ends with `way_out`.
    """
    return _load(path, lambda p: json.loads(p.read_text()), way_out)


def load_tensors(path: Path | None, way_out: str) -> Any:
    """What `save_tensors` wrote, or None if it is not there.

    Raises:
        CheckpointError: it cannot be read; ends with `way_out`.
    """
    return _load(path, lambda p: torch.load(p, weights_only=True), way_out)


def save_json(path: Path | None, value: Any, indent: int | None = None) -> None:
    """Write a file, whole or not at all, and its folder where it is missing."""
    _save(path, lambda p: p.write_text(json.dumps(value, indent=indent)))


def save_tensors(path: Path | None, value: Any) -> None:
    """Write a file, whole or not at all, and its folder where it is missing."""
    _save(path, lambda p: torch.save(value, p))


def _load(path: Path | None, how: Callable[[Path], Any], way_out: str) -> Any:
    if path is None or not path.is_file():
        return None
    try:
        return how(path)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); {way_out}") from error


def _save(path: Path | None, write: Callable[[Path], Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    write(beside)
    files.move(beside, path)


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
