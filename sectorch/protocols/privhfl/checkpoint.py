"""The run folder: what is finished is on disk, whole or not at all, so that a killed run goes on where it was.

    local/NAME.pt, .json          after local training; shared by runs with the same clients and local training
    round-T/NAME.labels.pt        soft labels, once the query is answered
    round-T/NAME.pt, .json        after retraining
    run.json                      what the run is; another run in the same folder is refused

A run folder holds all clients' models: it belongs to a simulation, and is as secret as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import claim, digest, load_json, load_tensors, save_json, save_tensors

LOCAL = ("local", "seed")
"""Settings that local training depends on."""
AGAIN = "remove it and its .json, and that part is done again"


class Store:
    """Finished work of one run. With no folder it remembers nothing and every question is answered no.

    Raises:
        CheckpointError: the folder holds another run, or a file that cannot be read.
    """

    def __init__(self, folder: Path | None, local: Path | None = None):
        self.folder = folder
        self.local = local or (folder / "local" if folder else None)

    def claim(
        self, clients: Mapping[str, Iterable[torch.Tensor]], test: tuple[torch.Tensor, torch.Tensor],
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        """Make the folders this run's, or recognise them: clients by their data and their models' weights."""
        people = {name: digest(*tensors) for name, tensors in clients.items()}
        if self.folder:
            claim(self.folder / "run.json", {**settings, "clients": people, "test": digest(*test)})
        if self.local:
            claim(self.local / "run.json", {**{name: settings[name] for name in LOCAL}, "clients": people})

    def _path(self, stage: str, file: str) -> Path | None:
        if stage == "local":
            return self.local / file if self.local else None
        return self.folder / stage / file if self.folder else None

    def record(self, stage: str, name: str) -> dict | None:
        """The JSON of a finished client, or None. It is written last, so the tensors are there if it is."""
        return load_json(self._path(stage, f"{name}.json"), AGAIN)

    def tensors(self, stage: str, name: str) -> Any:
        """What was kept with `keep`, or None."""
        return load_tensors(self._path(stage, f"{name}.pt"), AGAIN)

    def keep(self, stage: str, name: str, tensors: Any, record: dict | None = None) -> None:
        """Write tensors, and then the record that says they are finished."""
        save_tensors(self._path(stage, f"{name}.pt"), tensors)
        if record is not None:
            save_json(self._path(stage, f"{name}.json"), record)
