"""The run folder: every tested coalition is a line on disk before the next is begun, so a killed run loses one at most.

    run.json            what the run is; another run in the same folder is refused
    models.pt           the local models of the rounds (of a simulation's own training only)
    round-001.jsonl     a line for each coalition: its right answers, the samples tested, what it cost

Lines are appended and synced by one process. A line that a kill cut short is dropped. The folder holds models and which
samples are right: it belongs to a simulation, and is as secret as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .errors import CheckpointError


class Store:
    """With no folder it remembers nothing.

    Raises:
        CheckpointError: the folder holds another run, or a file that cannot be read.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def claim(self, what: dict) -> None:
        """Make the folder this run's, or recognise it."""
        if not self.folder:
            return
        path = self.folder / "run.json"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(path, lambda p: p.write_text(json.dumps(what, indent=2)))
            return
        found = _read(path, lambda p: json.loads(p.read_text()))
        different = sorted(k for k in what.keys() | found.keys() if what.get(k) != found.get(k))
        if different:
            raise CheckpointError(
                f"{self.folder} holds another run, which differs in {', '.join(different[:4])}; name another folder "
                f"or remove that one"
            )

    def records(self, t: int) -> list[dict]:
        """The finished coalitions of a round, in the order in which they were tested."""
        path = self._path(t)
        if not path or not path.is_file():
            return []
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read; remove it, and that round is done again") from error

    def append(self, t: int, record: dict) -> None:
        """A finished coalition."""
        path = self._path(t)
        if path:
            with open(path, "ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def models(self) -> Any:
        """What `keep_models` wrote, or None."""
        path = self.folder / "models.pt" if self.folder else None
        return _read(path, lambda p: torch.load(p, weights_only=True)) if path and path.is_file() else None

    def keep_models(self, models: Any) -> None:
        """The training's outcome."""
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / "models.pt", lambda p: torch.save(models, p))

    def _path(self, t: int) -> Path | None:
        return self.folder / f"round-{t + 1:03}.jsonl" if self.folder else None


def digest(*tensors: torch.Tensor) -> str:
    """A name for the content of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def digest_of(models: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """A name for a round's local models."""
    return digest(*(v for name in sorted(models) for _, v in sorted(models[name].items())))


def _read(path: Path, how) -> Any:
    try:
        return how(path)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); remove it, and it is made again"
        ) from error


def _replace(path: Path, write) -> None:
    beside = path.with_name(path.name + ".part")
    write(beside)
    with open(beside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)
