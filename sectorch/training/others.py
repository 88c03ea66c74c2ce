"""Operators of aten without a row of their own: the function of that name in the other table, or torch's composition.

An operator forward mostly has the name of a torch function, which SharedTensors compute already. One backward mostly
is a formula that torch knows, in terms of other operators (`torch._decomp`); these come to the table again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from ..tensor import SharedTensor
from ..tensor.table import SHARES, Context, row_of
from .elementwise import content
from .tensor import GRADIENTS, WITHOUT_ROW

PLACES = ((torch, ""), (F, ""), (torch.linalg, "linalg_"), (torch.special, "special_"), (torch.Tensor, ""))
"""Where a torch function with the name of an operator may be, and what the operator's name begins with then."""

NAMES = {
    "_adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "_adaptive_avg_pool3d": F.adaptive_avg_pool3d,
    "_unsafe_masked_index": None,
}
"""Operators whose function has another name, or that have none although a name is the same."""


@cache
def namesake(func: Any) -> Callable | None:
    """The torch function of an operator's name, if SharedTensors compute it."""
    name = func._schema.name.split("::")[1]
    if not func._schema.name.startswith("aten::") or func._schema.is_mutable:
        return None
    if name in NAMES:
        return NAMES[name]
    for module, prefix in PLACES:
        found = getattr(module, name[len(prefix) :], None) if name.startswith(prefix) else None
        if found is not None and row_of(found) is not None:
            return found
    return None


def _computed(function: Callable) -> Callable:
    def handler(context: Context, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(content, (args, kwargs))
        result = function(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else result

    return handler


def without_row(func: Any) -> Callable | None:
    """Gives an operator its namesake's row; or what composes it of other operators, on tensors; or None."""
    function = namesake(func)
    if function is not None:
        GRADIENTS.implements(SHARES.row_of[function].name, func)(_computed(function))
        return None
    if func in decomposition_table:
        return decomposition_table[func]
    return func.decompose if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else None


WITHOUT_ROW.append(without_row)
