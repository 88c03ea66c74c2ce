"""The run folder: what is finished is on disk, whole or not at all, so that a killed run goes on where it was.

    local/NAME.pt, .json          after local training; shared by runs with the same clients and local training
    round-T/NAME.labels.pt        soft labels, once the query is answered
    round-T/NAME.pt, .json        after retraining
    run.json                      what the run is; another run in the same folder is refused

Files are written beside their place and moved there. Tensors are loaded with `weights_only=True`. A run folder holds
all clients' models: it belongs to a simulation, and is as secret as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .errors import CheckpointError
from .settings import Client, Settings

LOCAL = ("local", "seed")
"""Settings that local training depends on."""


class Store:
    """Finished work of one run. With no folder it remembers nothing and every question is answered no.

    Raises:
        CheckpointError: the folder holds another run, or a file that cannot be read.
    """

    def __init__(self, folder: Path | None, local: Path | None = None):
        self.folder = folder
        self.local = local or (folder / "local" if folder else None)

    def claim(self, clients: Sequence[Client], test: tuple[torch.Tensor, torch.Tensor], how: Settings) -> None:
        """Make the folders this run's, or recognise them."""
        people = {c.name: _digest(c.images, c.labels, *c.model.state_dict().values()) for c in clients}
        settings = json.loads(json.dumps(asdict(how)))
        if self.folder:
            _claim(self.folder / "run.json", {**settings, "clients": people, "test": _digest(*test)})
        if self.local:
            _claim(self.local / "run.json", {**{name: settings[name] for name in LOCAL}, "clients": people})

    def _base(self, stage: str, name: str) -> Path | None:
        if stage == "local":
            return self.local / name if self.local else None
        return self.folder / stage / name if self.folder else None

    def record(self, stage: str, name: str) -> dict | None:
        """The JSON of a finished client, or None. It is written last, so the tensors are there if it is."""
        base = self._base(stage, name)
        path = base.with_name(f"{name}.json") if base else None
        return _read(path, lambda p: json.loads(p.read_text())) if path and path.is_file() else None

    def tensors(self, stage: str, name: str) -> Any:
        """What was kept with `keep`, or None."""
        base = self._base(stage, name)
        path = base.with_name(f"{name}.pt") if base else None
        return _read(path, lambda p: torch.load(p, weights_only=True)) if path and path.is_file() else None

    def keep(self, stage: str, name: str, tensors: Any, record: dict | None = None) -> None:
        """Write tensors, and then the record that says they are finished."""
        base = self._base(stage, name)
        if base is None:
            return
        base.parent.mkdir(parents=True, exist_ok=True)
        _replace(base.with_name(f"{name}.pt"), lambda p: torch.save(tensors, p))
        if record is not None:
            _replace(base.with_name(f"{name}.json"), lambda p: p.write_text(json.dumps(record)))


def _claim(path: Path, wanted: dict) -> None:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, lambda p: p.write_text(json.dumps(wanted, indent=2)))
        return
    found = _read(path, lambda p: json.loads(p.read_text()))
    different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if different:
        shown = ", ".join(f"{n} ({_short(found.get(n))} there, {_short(wanted.get(n))} now)" for n in different[:3])
        raise CheckpointError(
            f"{path.parent} holds another run, which differs in {shown}; name another folder or remove that one"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else "other content"


def _digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def _read(path: Path, how: Callable[[Path], Any]) -> Any:
    try:
        return how(path)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); remove it and its .json, and that part is done again"
        ) from error


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    beside = path.with_name(path.name + ".part")
    write(beside)
    with open(beside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)
