"""Functions on shapes: a step whose operands are held elsewhere, or by nobody in a dry run, runs on meta tensors.

torch's kernels for meta tensors are written in Python and take 0.1 ms for a sum of two. A trace has thousands of such
steps, most of them many times, so `run_on_shapes` remembers their results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
import torch._compile
import torch._decomp

# Functions with some of their arguments: the step of a call f(x, 2, dim=1) has only x as an operand.


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """Stands for the operand of this number among the arguments of a `PartialCall`."""

    number: int


@dataclass(frozen=True, slots=True)
class PartialCall:
    """A function with its arguments, in which an `ArgumentSlot` stands for each operand."""

    f: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return getattr(self.f, "__name__", type(self.f).__name__)

    @property
    def shapes(self) -> Callable:
        return PartialCall(getattr(self.f, "shapes", self.f), self.args, self.kwargs)

    def __call__(self, *values: Any) -> Any:
        if not self.kwargs:
            return self.f(*fill_arguments(self.args, values))
        return self.f(
            *fill_arguments(self.args, values), **{k: fill_arguments(v, values) for k, v in self.kwargs.items()}
        )


def fill_arguments(value: Any, values: Sequence[Any]) -> Any:
    """An argument of a `PartialCall` with the operands in place of their slots."""
    kind = type(value)
    if kind is ArgumentSlot:
        return values[value.number]
    return kind([fill_arguments(v, values) for v in value]) if kind is tuple or kind is list else value


# torch's kernels for meta tensors, without an import of torch's compiler.
#
# These kernels are Python functions that torch hides from its compiler. To hide one it imports the compiler, which
# takes two seconds: half of the time of a process up to its first secure call. While the compiler is not imported,
# nothing is compiled, and nothing needs to be hidden. Once it is imported, the kernels behave as torch defines them.


_HIDDEN = "__dynamo_disable"
"""The attribute of a function in which torch keeps the same function hidden from its compiler."""
_hide: Callable[[Callable], Callable] = getattr(torch._compile, "_disable_dynamo", lambda f: f)
_HIDES = getattr(_hide(lambda: None), "__code__", None)
"""The code of every function that torch has hidden and that imports its compiler."""


def spare_the_compiler() -> None:
    """Let kernels run without an import of the compiler. Where torch keeps its kernels elsewhere, nothing changes."""
    seen: set[int] = set()
    for table in getattr(torch._decomp, "global_decomposition_table", {}).values():
        for kernel in table.values():
            spare(kernel, seen)


def spare(f: Callable, seen: set[int] | None = None) -> None:
    """As `spare_the_compiler`, for one function that torch hides, or whose wrappers or parts it hides."""
    for hidden in _hidden_in(f, set() if seen is None else seen):
        if not hasattr(hidden, _HIDDEN):
            setattr(hidden, _HIDDEN, _hidden_later(hidden))


def _hidden_later(f: Callable) -> Callable:
    """f, which is hidden when it first runs after the compiler was imported."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
            return f(*args, **kwargs)
        vars(f).pop(_HIDDEN, None)
        return _hide(f)(*args, **kwargs)

    return call


def _hidden_in(f: Any, seen: set[int]) -> Iterator[FunctionType]:
    """The functions that torch hides among a function and what it calls through its wrappers."""
    if not isinstance(f, FunctionType) or id(f) in seen:
        return
    seen.add(id(f))
    inner = [cell_content(cell) for cell in f.__closure__ or ()]
    if f.__code__ is _HIDES:
        yield from (g for g in inner if isinstance(g, FunctionType))
    for g in (*inner, getattr(f, "__wrapped__", None)):
        yield from _hidden_in(g, seen)


def cell_content(cell: CellType, empty: Any = None) -> Any:
    """The content of a closure's variable; `empty` where it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


spare_the_compiler()

# Shapes of results, which are remembered by function and operands.

MOST = 1 << 13
"""The most results that are remembered."""
_KEPT: dict[tuple, tuple[bool, tuple[_Like, ...]]] = {}


class _Like(NamedTuple):
    """Shape, strides and type of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> _Like:
        return cls(x.shape, x.stride(), x.dtype)

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


FORMS: dict[type, Callable[[Any], Any]] = {}
"""By type, for values that hold tensors (ciphertexts, say): the function that gives a value without its content."""


def shape_of(value: Any) -> Any:
    """A tensor's shape and dtype as a meta tensor, a value of `FORMS` without content; anything else as it is."""
    if (form := FORMS.get(type(value))) is not None:
        return form(value)
    return fresh_shape(value) if isinstance(value, torch.Tensor) and not value.is_meta else value


def fresh_shape(x: torch.Tensor) -> torch.Tensor:
    """Another meta tensor of the same shape and dtype."""
    return _Like.of(x).tensor()


def run_on_shapes(f: Callable, values: Sequence[Any]) -> Any:
    """f(*values) on meta tensors. A result of a function of torch or of a module is remembered.

    The result is always a new tensor, also where f gives a view or its argument.
    """
    key: Any = (_key(f), *[_key_of(v) if type(v) is torch.Tensor else _key(v) for v in values])
    if None in key:
        return f(*values)
    if (known := _KEPT.get(key)) is not None:
        single, parts = known
        return parts[0].tensor() if single else tuple(part.tensor() for part in parts)
    result = f(*values)
    single = type(result) is not tuple
    made = (result,) if single else result
    if all(type(part) is torch.Tensor and part.is_meta for part in made):
        if len(_KEPT) >= MOST:
            _KEPT.clear()
        _KEPT[key] = single, tuple(map(_Like.of, made))
    return result


_NUMBERS = frozenset((int, bool, float, str, type(None), torch.dtype))


def _key_of(x: torch.Tensor) -> Any:
    return (x.shape, x.stride(), x.dtype) if x.is_meta else None


def _key(value: Any) -> Any:
    """What determines the result's shape of a function or an argument; None where that is not known."""
    kind = type(value)
    if kind is torch.Tensor:
        return _key_of(value)
    if kind in _NUMBERS:
        return kind, value  # 1 and True are the same key, and not the same index
    if kind in (tuple, list, torch.Size):
        parts = tuple(map(_key, value))
        return None if None in parts else (kind, parts)
    if kind is slice:
        return _key((slice.__name__, value.start, value.stop, value.step))
    if kind is PartialCall:
        return _key((value.f, value.args, tuple(value.kwargs.items())))
    if kind in (BuiltinFunctionType, MethodDescriptorType, ArgumentSlot):
        return value
    named = kind is FunctionType and value.__closure__ is None and "<locals>" not in value.__qualname__
    return value if named else None
