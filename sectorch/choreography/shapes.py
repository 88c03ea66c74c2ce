"""Functions on shapes: what a dry run and a trace compute with where nobody present holds a value.

torch's kernels for meta tensors are written in Python and take 0.1 ms for a sum of two. A trace has thousands of such
steps, and most of them again and again; what they give is therefore kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch

from .applied import Applied, Place
from .kernels import spare_the_compiler

spare_the_compiler()

MOST = 1 << 13
"""Results that are kept."""
_KEPT: dict[tuple, tuple[bool, tuple[_Like, ...]]] = {}


class _Like(NamedTuple):
    """What a meta tensor says of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> _Like:
        return cls(x.shape, x.stride(), x.dtype)

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def shape_of(value: Any) -> Any:
    """A tensor's shape and dtype as a meta tensor; anything else as it is."""
    return fresh_shape(value) if isinstance(value, torch.Tensor) and not value.is_meta else value


def fresh_shape(x: torch.Tensor) -> torch.Tensor:
    """Another meta tensor of the same shape and dtype."""
    return _Like.of(x).tensor()


def on_shapes(f: Callable, values: Sequence[Any]) -> Any:
    """f(*values) on meta tensors; looked up where f is a function of torch or of a module and was asked that before.

    The result is always another tensor, also where f gives a view or its argument.
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
    """What of a function or of an argument decides about the result's shape; None where that is not known."""
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
    if kind is Applied:
        return _key((value.f, value.args, tuple(value.kwargs.items())))
    if kind in (BuiltinFunctionType, MethodDescriptorType, Place):
        return value
    named = kind is FunctionType and value.__closure__ is None and "<locals>" not in value.__qualname__
    return value if named else None
