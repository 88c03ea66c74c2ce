"""What `sectorch query --out` keeps of each batch until all are done: a job that is killed goes on where it was.

OUT.parts/about.json            what was asked: digest of the inputs, model and its version, batch, number format
OUT.parts/NUMBER.safetensors    the result of a batch, or NUMBER.withheld where it has none
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from ... import files
from ...errors import ArgumentError
from .arrays import by_name

Result = dict[str, torch.Tensor] | None


class Kept:
    """The batches of one job that are done.

    Args:
        out: where the whole result will be.
        about: what is asked.

    Raises:
        ArgumentError: what is there is of another question, or cannot be used.
    """

    def __init__(self, out: Path, about: dict):
        self.folder = out.with_name(f"{out.name}.parts")
        said = self.folder / "about.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if said.exists() and json.loads(said.read_bytes()) != about:
                raise ArgumentError(
                    f"{self.folder} holds results of another question: remove it, or name another --out"
                )
            files.write(said, json.dumps(about).encode())
        except (OSError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"cannot use {self.folder}: {error}") from None

    def result(self, number: int, ask: Callable[[], Any]) -> Result:
        """Of that batch, by name: what is kept of it, or what `ask` gives, which is kept before this returns."""
        whole, withheld = self.folder / f"{number:06d}.safetensors", self.folder / f"{number:06d}.withheld"
        if withheld.exists():
            return None
        if not whole.exists():
            asked = ask()
            if asked is None:
                files.write(withheld, b"")
                return None
            files.write(whole, save({name: value.contiguous().clone() for name, value in by_name(asked).items()}))
        return load_file(whole)

    def done(self) -> None:
        """The whole result is written: the parts go."""
        shutil.rmtree(self.folder, ignore_errors=True)


def digest(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        whole = hashlib.sha256()
        while part := file.read(1 << 20):
            whole.update(part)
    return whole.hexdigest()
