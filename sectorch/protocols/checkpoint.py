"""What run folders have in common: files that are whole or not there, one run to a folder, names for contents.

Files are written beside their place and moved there. Tensors are loaded with `weights_only=True`. Every function takes
None for the path of a run that keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .. import files
from ..errors import CheckpointError


def digest(*tensors: torch.Tensor) -> str:
    """A name for contents, dtypes and shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def claim(path: Path | None, wanted: dict) -> None:
    """Make the folder of `path` this run's, or recognise it.

    Args:
        path: the file that says what the run is.
        wanted: what this run is.

    Raises:
        CheckpointError: the folder holds another run; names what differs.
    """
    wanted = json.loads(json.dumps(wanted))
    if path is None:
        return
    found = load_json(path, "remove its folder and start again")
    if found is None:
        save_json(path, wanted, indent=2)
        return
    same_run(path.parent, found, wanted)


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
