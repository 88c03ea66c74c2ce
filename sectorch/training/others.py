"""Operators of aten without a row of their own: the function of that name in the other table, or torch's composition.

An operator forward mostly has the name of a torch function, which SharedTensors compute already. One backward mostly
is a formula that torch knows, in terms of other operators (`torch._decomp`); these come to the table again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from ..tensor.table import SHARES, Context, row_of
from .elementwise import content
from .operations import GRADIENTS
from .tensor import WITHOUT_ROW

PLACES = ((torch, ""), (F, ""), (torch.linalg, "linalg_"), (torch.special, "special_"), (torch.Tensor, ""))
"""Where a torch function with the name of an operator may be, and what the operator's name begins with then."""

NAMES: dict[str, Any] = {
    "_adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "_adaptive_avg_pool3d": F.adaptive_avg_pool3d,
    "_unsafe_masked_index": None,
}
"""Operators whose function has another name, or that have none although a name is the same."""


REDUCTIONS = ("none", "mean", "sum")
"""How functions call what operators number."""


@cache
def namesake(func: Any) -> Callable | None:
    """The torch function of an operator's name, if SharedTensors compute it and it takes the operator's arguments."""
    name = func._schema.name.split("::")[1]
    if not func._schema.name.startswith("aten::") or func._schema.is_mutable or "backward" in name:
        return None
    if name in NAMES:
        return NAMES[name]
    for module, prefix in PLACES:
        found = getattr(module, name[len(prefix) :], None) if name.startswith(prefix) else None
        if found is not None and row_of(found) is not None and _named(func, found) is not None:
            return found
    return None


def _named(func: Any, function: Callable) -> tuple[str, ...] | None:
    """The names of an operator's arguments, if the function calls them so: those of torch's own are in its order."""
    names = tuple(argument.name for argument in func._schema.arguments)
    if not isinstance(function, FunctionType):
        return names
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
        return None
    known = tuple(parameters)
    if "_overload" in function.__qualname__ or len(known) < len(names):  # of several functions by a flag
        return None
    same = all(n in known or i == 0 for i, n in enumerate(names))
    return (known[0], *names[1:]) if same else None


def _computed(func: Any, function: Callable) -> Callable:
    names = _named(func, function) if isinstance(function, FunctionType) else None

    def handler(context: Context, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(content, (args, kwargs))
        if names is not None:
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
            if "reduction" in kwargs:
                kwargs["reduction"] = REDUCTIONS[kwargs["reduction"]]
        result = function(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else result

    return handler


def without_row(func: Any) -> Callable | None:
    """Gives an operator its namesake's row; or what composes it of other operators, on tensors; or None."""
    function = namesake(func)
    if function is not None:
        name = SHARES.row_of[function].name
        taken = name in GRADIENTS.rows and GRADIENTS.rows[name].view  # what this computes is a copy
        GRADIENTS.implements(f"{name}_copy" if taken else name, func)(_computed(func, function))
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if func in decomposition_table:
        return decomposition_table[func]
    return func.decompose if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else None


WITHOUT_ROW.append(without_row)
