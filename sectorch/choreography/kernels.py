"""torch's kernels for meta tensors, without torch's compiler.

These kernels are Python functions that torch hides from its compiler, and to hide one it imports the compiler: two
seconds, or half of what a process needs up to its first secure call. Where the compiler is not there yet, nothing is
compiled and there is nothing to hide from; as soon as somebody has imported it, all is as torch has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch._compile
import torch._decomp

_HIDDEN = "__dynamo_disable"
"""Where torch keeps, at a function, the same function hidden from its compiler."""
_hide: Callable[[Callable], Callable] = getattr(torch._compile, "_disable_dynamo", lambda f: f)
_HIDES = getattr(_hide(lambda: None), "__code__", None)
"""The code of every function that torch has hidden and that imports its compiler."""


def spare_the_compiler() -> None:
    """From now on a kernel that runs imports no compiler. Where torch keeps its kernels otherwise, nothing changes."""
    seen: set[int] = set()
    for table in getattr(torch._decomp, "global_decomposition_table", {}).values():
        for kernel in table.values():
            spare(kernel, seen)


def spare(f: Callable, seen: set[int] | None = None) -> None:
    """The same of one function that torch hides, or whose wrappers or parts it hides."""
    for hidden in _hidden_in(f, set() if seen is None else seen):
        if not hasattr(hidden, _HIDDEN):
            setattr(hidden, _HIDDEN, _hidden_later(hidden))


def _hidden_later(f: Callable) -> Callable:
    """f, which is hidden when it first runs beside a compiler."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
            return f(*args, **kwargs)
        vars(f).pop(_HIDDEN, None)
        return _hide(f)(*args, **kwargs)

    return call


def _hidden_in(f: Any, seen: set[int]) -> Iterator[FunctionType]:
    """What a function calls through its wrappers that torch hides."""
    if not isinstance(f, FunctionType) or id(f) in seen:
        return
    seen.add(id(f))
    inner = [_content(cell) for cell in f.__closure__ or ()]
    if f.__code__ is _HIDES:
        yield from (g for g in inner if isinstance(g, FunctionType))
    for g in (*inner, getattr(f, "__wrapped__", None)):
        yield from _hidden_in(g, seen)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
