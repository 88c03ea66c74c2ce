"""Files of arrays (.npy, .npz, .safetensors): inputs and results of commands."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch.utils import _pytree as pytree

from ... import files
from ...cli.command import writable
from ...errors import ArgumentError, DtypeError
from ...nn.inputs import Inputs
from ...nn.remote_program import RemoteProgram
from ...serving.description import match_named

Given = torch.Tensor | dict[str, torch.Tensor]
KINDS = (".npy", ".npz", ".safetensors")


def read_arrays(path: Path) -> Given:
    """The array of a .npy file, or the arrays of a .npz or .safetensors file by name. Nothing is unpickled.

    Raises:
        ArgumentError: the file cannot be read, or holds no rows.
    """
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            loaded = _load_numpy(path)
            found = _tensor(loaded) if isinstance(loaded, np.ndarray) else {k: _tensor(v) for k, v in loaded.items()}
    except Exception as error:  # what safetensors finds wrong has no common type
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ArgumentError(f"cannot read {path}: {why}") from None
    values = found.values() if isinstance(found, dict) else [found]
    if not values or not all(x.numel() for x in values) or (isinstance(found, torch.Tensor) and found.dim() < 1):
        raise ArgumentError(f"{path} holds no rows")
    return found


def _load_numpy(path: Path) -> Any:
    """The content of a .npy or .npz file. numpy's own error for another file tells how to unpickle it."""
    with path.open("rb") as file:
        if not file.read(6).startswith((b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")):
            raise ArgumentError("it is no file of arrays (.npy of numpy.save, .npz of numpy.savez, .safetensors)")
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return dict(loaded)


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind not in "fiub":
        raise ArgumentError(f"it holds {array.dtype}, and numbers are asked for (float32, int64, bool, ...)")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def batches(
    served: RemoteProgram, given: Given, rows: int, say: Callable[[str], None] = lambda _: None
) -> tuple[Inputs, ...]:
    """The arrays of a file as inputs of a model, in batches of `rows` rows if it takes any number of rows.

    Integers are converted to the model's dtype if that keeps all values (int32 to int64). Floating-point numbers are
    rounded to it, as a caller of the plain model has to do: numpy makes float64 by default.

    Args:
        say: called with a line for the user for each input that was rounded.

    Raises:
        ArgumentError, DtypeError, ShapeError: the model does not take these inputs.
    """
    if isinstance(given, torch.Tensor):
        names = served.calls[0].inputs.names
        if len(names) > 1:
            raise ArgumentError(f"one array says nothing of a model of several inputs: name them; {served.summary}")
        given = {names[0]: given}
    inputs = match_named(served, _convert_dtypes(served, given, say))
    return inputs.split(rows) if served.general(inputs) else (inputs,)


def _convert_dtypes(
    served: RemoteProgram, given: dict[str, torch.Tensor], say: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """The arrays in the dtypes of the call with these names; unchanged if there is none."""
    calls = [call.inputs for call in served.calls if not call.inputs.in_shares and set(call.inputs.names) == set(given)]
    if not calls or any(all(given[n].dtype == d for n, (_, d) in call.described.items()) for call in calls):
        return given
    return {name: _convert(given[name], dtype, name, say) for name, (_, dtype) in calls[0].described.items()}


def _convert(x: torch.Tensor, dtype: torch.dtype, name: str, say: Callable[[str], None]) -> torch.Tensor:
    """A tensor in another dtype. Raises DtypeError if more than digits would be lost."""
    had, wanted = (str(kind).removeprefix("torch.") for kind in (x.dtype, dtype))
    if x.is_floating_point() and dtype.is_floating_point:
        if torch.promote_types(x.dtype, dtype) != dtype:
            say(f"'{name}' holds {had} and the model takes {wanted}: rounded to {wanted}, as the plain model needs it")
    elif not _includes(x.dtype, dtype):
        raise DtypeError(
            f"'{name}' holds {had} and the model takes {wanted}: save it as the model was trained to see it (pixels of "
            f"0 to 255 scaled, say); x.astype('{wanted}') where the numbers are the same"
        )
    return x.to(dtype)


def _includes(dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Whether all values of an integer or boolean dtype are values of the other one."""
    if dtype == wider or dtype.is_floating_point or wider.is_floating_point or torch.bool in (dtype, wider):
        return dtype == wider
    have, want = torch.iinfo(dtype), torch.iinfo(wider)
    return want.min <= have.min and have.max <= want.max


def join_batches(results: list[Any], rows: list[int]) -> Any:
    """The results of all batches as one, with nan for the rows of batches without a result."""
    known = next((y for y in results if y is not None), None)
    if known is None:
        return torch.full((sum(rows),), torch.nan)
    if len(results) == 1:
        return known
    leaves, spec = pytree.tree_flatten(known)
    per_row = next(n for y, n in zip(results, rows, strict=True) if y is not None)
    parts = [[None] * len(leaves) if y is None else pytree.tree_leaves(y) for y in results]
    return pytree.tree_unflatten(
        [_join_leaf(leaf, [p[i] for p in parts], rows, per_row) for i, leaf in enumerate(leaves)], spec
    )


def _join_leaf(leaf: Any, parts: list[Any], rows: list[int], per_row: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dim() < 1 or len(leaf) != per_row:
        raise ArgumentError("a result of this model has no rows, so that batches cannot be joined: ask in one --batch")
    if all(part is not None for part in parts):
        return torch.cat(parts)
    dtype = leaf.dtype if leaf.is_floating_point() else torch.float64
    gap = lambda n: torch.full((n, *leaf.shape[1:]), torch.nan, dtype=dtype)
    return torch.cat([gap(n) if part is None else part for part, n in zip(parts, rows, strict=True)])


def by_name(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result by their paths in it; a single tensor has an empty name.

    Where two paths are written alike, `{"a": {"b": x}, "a.b": y}`, the second ends in "_".
    """
    found: dict[str, torch.Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if isinstance(leaf, torch.Tensor):
            name = ".".join(str(getattr(step, "key", getattr(step, "idx", ""))) for step in path)
            name = name or "result" if path else name
            while name in found:
                name += "_"
            found[name] = leaf
    return found


def as_array(x: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array; numpy has no bfloat16, and float32 has all its numbers."""
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def in_json(result: Any) -> Any:
    """A result as lists and dictionaries of numbers, with None for nan."""
    numbers = pytree.tree_map(lambda v: v.tolist() if isinstance(v, torch.Tensor) else v, result)
    return pytree.tree_map(lambda v: None if v != v else v, numbers)


def check_out(path: Path, named: str = "--out") -> None:
    """Check that arrays can be written to a path, before there are any.

    Raises:
        ArgumentError: the suffix is unknown, or nothing can be written there.
    """
    if path.suffix not in (*KINDS, ""):
        raise ArgumentError(f"arrays are written as {', '.join(KINDS)}, not as {path}")
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; name a file in it with {named}")
    writable(path.parent, named)
    if path.exists() and not os.access(path, os.W_OK):
        raise ArgumentError(f"{path} is there and cannot be written; name another with {named}")


def write_arrays(result: Any, path: Path) -> None:
    """Write a result in the format of the path's suffix: a single tensor as .npy, or several by name.

    Raises:
        ArgumentError: the result has several tensors, and the path is a .npy.
    """
    tensors = by_name(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".npy", ""):
        if len(tensors) != 1:
            raise ArgumentError(f"the result has {len(tensors)} arrays ({', '.join(tensors)}): name a .npz as --out")
        with _private_file(path) as file:  # to a path without a suffix, numpy would add one
            np.save(file, as_array(next(iter(tensors.values()))))
        return
    tensors = {name or "result": value.contiguous().clone() for name, value in tensors.items()}
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: as_array(value) for name, value in tensors.items()}
        with _private_file(path) as file:
            np.savez(file, **arrays)
    else:
        with _private_file(path) as file:
            file.write(save(tensors))


def _private_file(path: Path) -> BinaryIO:
    """A file to write to, which only its owner can read from now on: a result is the answer to a secret question."""
    handle = files.private(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    state = os.fstat(handle)
    if stat.S_ISREG(state.st_mode):  # and not /dev/stdout, or a pipe
        with suppress(OSError):
            os.fchmod(handle, state.st_mode & 0o600)
    return os.fdopen(handle, "wb")
