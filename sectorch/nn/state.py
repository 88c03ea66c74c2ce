"""What a module remembers from one call to the next: its attributes, compared before and after a call."""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_OPAQUE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module)
MAX_ITEMS = 200_000


class State:
    """Equal to another if nothing was left behind between the two; keeps what it saw, so that an id stays its own."""

    def __init__(self, found: list, kept: dict[int, Any]):
        self._found, self._kept = found, kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._found == other._found

    __hash__ = None  # pyright: ignore[reportAssignmentType]  how Python says "not hashable"; object's stub has a method


def state_of(module: nn.Module) -> State:
    """Everything that a call could leave behind in the module.

    Tensors count by identity and version, so that a write into a buffer is seen; containers and objects are looked
    into; a module that holds more than `MAX_ITEMS` of them counts as changed, since that cannot be seen.
    """
    return state_of_layers(dict(module.named_modules()))


def state_of_layers(layers: Mapping[Any, nn.Module]) -> State:
    """The same of some layers, by name, without what they consist of."""
    found: list = []
    seen: dict[int, Any] = {}
    for name, layer in layers.items():
        found.append((name, id(layer)))
        _look(vars(layer), found, seen)
    return State(found, seen)


def attributes_of(layers: Mapping[Any, nn.Module]) -> list[tuple[dict, dict]]:
    """The dicts of some layers' attributes, parameters and buffers, each with a copy of what it holds."""
    dicts = [d for layer in layers.values() for d in (vars(layer), *vars(layer).values()) if type(d) is dict]
    return [(d, dict(d)) for d in dicts]


def put_back(held: list[tuple[dict, dict]]) -> None:
    """Give them their content again: a call that was refused leaves nothing in the user's model."""
    for attributes, before in held:
        attributes.clear()
        attributes.update(before)


def _look(value: Any, found: list, seen: dict[int, Any]) -> None:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, _PLAIN):
            found.append((type(value), value if value == value else "nan"))
            continue
        found.append(id(value))
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        if len(found) > MAX_ITEMS:
            found.append(object())  # equal to nothing
            return
        if isinstance(value, torch.Tensor):
            found.append(version(value))
            continue
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(value, kind):  # by the kind's own methods: a class of a package's may have others
                found_in: Any = kind.__iter__
                pending += found_in(value)
                pending += dict.values(value) if isinstance(value, dict) else ()
        pending.append(getattr(value, "__dict__", None))


def version(x: torch.Tensor) -> int:
    """How often a tensor was written into, as far as torch counts it."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return x._version
        except (RuntimeError, AttributeError):  # made in inference mode
            return -1
