"""The run folder: what is finished is on disk, whole or not at all, so that a killed run goes on where it was.

    run.json        what the run is; another run in the same folder is refused
    round-T.pt      models and optimisers after round T (0: after local training); the newest alone is kept
    state.json      which round that is, and the records; written last
    ledger.json     the ledger, written before anything is released: its counts are never behind

Tensors are loaded with `weights_only=True`. A run folder holds all parties' models, but no key: a run that is taken up
makes new keys. It belongs to a simulation, and is as secret as the models are.
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
from torch import nn

from .errors import CheckpointError
from .settings import Party, Settings


def digest(*tensors: torch.Tensor) -> str:
    """Names contents and shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def weights_digest(model: nn.Module) -> str:
    """The version of a model: another one for other weights."""
    return digest(*model.state_dict().values())


class Store:
    """Finished work of one run. With no folder it remembers nothing."""

    def __init__(self, folder: str | Path | None):
        self.folder = Path(folder) if folder is not None else None

    def claim(self, parties: Sequence[Party], test: tuple[torch.Tensor, torch.Tensor], how: Settings) -> None:
        """Make the folder this run's, or recognise it.

        Raises:
            CheckpointError: it holds another run.
        """
        if self.folder is None:
            return
        people = {
            p.name: digest(
                p.images, p.labels, *p.model.state_dict().values(), *(p.large or nn.Identity()).state_dict().values()
            )
            for p in parties
        }
        wanted = {**json.loads(json.dumps(asdict(how))), "parties": people, "test": digest(*test)}
        path = self.folder / "run.json"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(path, lambda p: p.write_text(json.dumps(wanted, indent=2)))
            return
        found = _read(path, lambda p: json.loads(p.read_text()))
        different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if different:
            shown = ", ".join(f"{n} ({_short(found.get(n))} there, {_short(wanted.get(n))} now)" for n in different[:3])
            raise CheckpointError(
                f"{self.folder} holds another run, which differs in {shown}; name another folder or remove that one"
            )

    def load(self) -> tuple[int, dict, dict] | None:
        """Round, records, and tensors of the newest finished round; None if there is none."""
        path = self.folder / "state.json" if self.folder else None
        if path is None or not path.is_file():
            return None
        state = _read(path, lambda p: json.loads(p.read_text()))
        tensors = _read(self.folder / f"round-{state['round']}.pt", lambda p: torch.load(p, weights_only=True))
        return state["round"], state["records"], tensors

    def keep(self, round_: int, records: dict, tensors: dict) -> None:
        """Write a finished round, and drop the one before it."""
        if self.folder is None:
            return
        _replace(self.folder / f"round-{round_}.pt", lambda p: torch.save(tensors, p))
        text = json.dumps({"round": round_, "records": records})
        _replace(self.folder / "state.json", lambda p: p.write_text(text))
        for old in self.folder.glob("round-*.pt"):
            if old.name != f"round-{round_}.pt":
                old.unlink()

    def keep_ledger(self, kept: dict) -> None:
        if self.folder is not None:
            _replace(self.folder / "ledger.json", lambda p: p.write_text(json.dumps(kept)))

    def ledger(self) -> dict | None:
        path = self.folder / "ledger.json" if self.folder else None
        return _read(path, lambda p: json.loads(p.read_text())) if path and path.is_file() else None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else "other content"


def _read(path: Path, how: Callable[[Path], Any]) -> Any:
    try:
        return how(path)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); remove {path.parent} and start again"
        ) from error


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    beside = path.with_name(path.name + ".part")
    write(beside)
    with open(beside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)
