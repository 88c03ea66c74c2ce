"""A training on shares as a federation: each party goes on with its own half of the newest state that all have."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.papers import Federated, Paper
from sweeps.sweep import Reference
from sweeps.world import Process, rehearsed, settled

PROGRAM = Path(__file__).parents[1] / "training_program.py"
TRAINING = Paper(
    "training", {"north": "Q", "east": "A", "south": "S", "west": "H1"}, f"run {PROGRAM}:program", "learned.npz",
    learns=("east", "west"),
)  # fmt: skip


class Training(Federated):
    """Its parties' folders of what they keep last as long as a run's folder."""

    def input_of(self, name: str) -> list[str]:
        role = self.paper.parties[name]
        return ["--input", f"{role}={self.folder / role}.npy"]

    def start(self, run: Path, name: str, job: Mapping[str, Any] = {}) -> Process:
        out = self.out(run, name)
        if not out.exists():
            out.mkdir(parents=True)
            shutil.rmtree(self.trial / f"{name}-kept", ignore_errors=True)
        argv = [
            *self.paper.line.split(), "--federation", str(self.trial / "federation.toml"), "--as", name,
            *self.input_of(name), "--out", str(out / "learned.npz"), "--json",
        ]  # fmt: skip
        return Process(name, {"argv": argv, "traffic": str(run / name / "traffic"), **job}, run / name / "log")

    def result(self, run: Path) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}
        for name in self.paper.learns:
            path = self.out(run, name) / "learned.npz"
            if path.exists():
                found |= {f"{name}/{key}": torch.from_numpy(x).double() for key, x in np.load(path).items()}
        return found


def prepared(folder: Path) -> tuple[Training, Reference]:
    """The federation, and undisturbed runs of it; what they load and compile is there in all processes then."""
    from training_program import rows_of

    world = Training(TRAINING, folder / "training")
    for role in TRAINING.parties.values():
        np.save(world.folder / f"{role}.npy", rows_of(role).numpy())
    inputs = [word for name in TRAINING.parties for word in world.input_of(name)]
    shutil.rmtree("kept", ignore_errors=True)
    rehearsed([*TRAINING.line.split(), *inputs, "--json"], world.folder / "rehearsal.log")
    for logger in (logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))):
        logger.handlers.clear()  # what they write to was this run's
    settled()
    return world, Reference(world, world.folder)
