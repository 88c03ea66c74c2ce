"""Values of a model description as JSON: the arguments of operations, the form of a call, the form of a result.

One closed grammar for all three. A value is a number, a text, None or a list as JSON has them, or an object with one
entry: {"tuple": [...]}, {"dict": [[key, value], ...]}, {"slice": [start, stop, step]}, {"float": "inf"},
{"dtype": "torch.int64"}, ..., or a reference such as {"node": 3}, which whoever reads or writes gives its meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ProgramError
from . import bounds

DTYPES = {
    str(d): d
    for d in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
PUBLIC_DTYPES = DTYPES | {str(d): d for d in (torch.complex64, torch.complex128)}
"""Of public tensors; no weight and no input is complex."""
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": PUBLIC_DTYPES,
    "float": {name: float(name) for name in ("inf", "-inf", "nan")},
    "device": {"cpu": torch.device("cpu")},
    "layout": {str(torch.strided): torch.strided},
    "memory_format": {
        str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
    },
    "ellipsis": {"...": ...},
}
_KINDS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_SCALARS = (bool, int, float, str, type(None))
PLAIN = object()
"""What stands for a value that is no reference."""


def written(value: Any, other: Any, ref: Callable[[Any, Any], Any]) -> Any:
    """A value as JSON.

    Args:
        other: the same place of the same program for another number of rows.
        ref: gives what stands for a value that is a reference, or for two numbers that differ; `PLAIN` for others.

    Raises:
        ProgramError: a value of a kind that the grammar lacks.
    """
    found = ref(value, other)
    if found is not PLAIN:
        return found
    within = lambda values, others: [written(v, o, ref) for v, o in zip(values, others, strict=True)]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ProgramError("a dictionary whose keys are no texts cannot be described")
        return {"dict": [[key, written(v, other[key], ref)] for key, v in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"dict": [[name, written(getattr(value, name), getattr(other, name), ref)] for name in names]}
    if isinstance(value, tuple):
        return {"tuple": within(value, other)}
    if isinstance(value, list):
        return within(value, other)
    if isinstance(value, slice):
        parts = lambda s: (s.start, s.stop, s.step)
        return {"slice": within(parts(value), parts(other))}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is ...:
        return {"ellipsis": "..."}
    if isinstance(value, torch.device):  # a description says nothing of the machines that the parties compute on
        return {"device": "cpu"}
    kind = _KINDS.get(type(value))
    if kind is not None and str(value) in _NAMED[kind]:
        return {kind: str(value)}
    if type(value) in _SCALARS:
        return value
    raise ProgramError(f"a value of type {type(value).__name__} cannot be described")


class Reader:
    """Reads values, and counts what it reads.

    Args:
        most: values of all that it reads together.
    """

    def __init__(self, most: int):
        self._most, self._read = most, 0

    def read(self, value: Any, ref: Callable[[str, int], Any], depth: int = 0) -> Any:
        """A written value.

        Args:
            ref: what a reference stands for, of its kind and its number.

        Raises:
            ProgramError: it is none, or too deep, too long or too much.
        """
        self._read += 1
        if depth > bounds.MAX_DEPTH or self._read > self._most:
            raise ProgramError("a model description holds too many arguments, or lists in lists in lists")
        if isinstance(value, list):
            return self._list(value, ref, depth)
        if not isinstance(value, dict):
            return bounds.scalar(value)
        if len(value) != 1:
            raise ProgramError("a model description holds a value of no kind")
        ((kind, content),) = value.items()
        if kind == "tuple":
            return tuple(self._list(content, ref, depth))
        if kind == "dict":
            return self._dict(content, ref, depth)
        if kind == "slice":
            parts = self._list(content, ref, depth)
            if len(parts) != 3:
                raise ProgramError("a slice has a start, a stop and a step")
            return slice(*parts)
        if kind in _NAMED:
            if not isinstance(content, str) or content not in _NAMED[kind]:
                raise ProgramError(f"a model description holds a {kind} that is not in its list")
            return _NAMED[kind][content]
        if type(content) is not int or content < 0:
            raise ProgramError("a model description refers to what is not there")
        return ref(kind, content)

    def _list(self, values: Any, ref: Callable, depth: int) -> list:
        if not isinstance(values, list) or len(values) > bounds.MAX_ITEMS:
            raise ProgramError(f"a model description holds what is no list of at most {bounds.MAX_ITEMS}")
        return [self.read(v, ref, depth + 1) for v in values]

    def _dict(self, pairs: Any, ref: Callable, depth: int) -> dict[str, Any]:
        if not isinstance(pairs, list) or len(pairs) > bounds.MAX_ITEMS:
            raise ProgramError(f"a model description holds what is no dictionary of at most {bounds.MAX_ITEMS}")
        made: dict[str, Any] = {}
        for key, value in pairs:
            if not isinstance(key, str) or len(key) > bounds.MAX_TEXT or key in made:
                raise ProgramError("a dictionary in a model description has keys that are no texts, or has one twice")
            made[key] = self.read(value, ref, depth + 1)
        return made
