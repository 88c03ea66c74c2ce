"""Where a walk back begins: the gradients that a user gives are gradients, of their bits and their limit."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import SectorchError
from ..tensor.table import typed
from .cells import Cell
from .tensor import FUNCTIONS, DifferentiableTensor

WALKING: ContextVar[bool] = ContextVar("whether a walk back over shares runs", default=False)

_walked = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]  torch gives no other place


def _walk(*args: Any, **kwargs: Any) -> Any:
    """What a checkpoint computes again while the graph is walked back is computed as it was forward."""
    if not WALKING.get():
        return _walked(*args, **kwargs)
    with torch._C._EnableTorchFunction():
        return _walked(*args, **kwargs)


torch.autograd._engine_run_backward = _walk  # pyright: ignore[reportPrivateImportUsage]


def _gradient(given: Any, like: DifferentiableTensor) -> Any:
    """A shared gradient as one, and a public one as shares of it: no message."""
    if isinstance(given, DifferentiableTensor):
        return DifferentiableTensor(Cell(given.cell.content, True, pool=given.cell.pool))
    if not isinstance(given, torch.Tensor):
        return given
    content: Any = like.cell.content
    return DifferentiableTensor(Cell(content.reshape(-1)[:0].sum() + given, True))


def _started(func: Callable, place: int, name: str) -> Callable:
    """A function of torch's that walks back from its first argument, with gradients in this place, of this name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        like = next((v for v in pytree.tree_leaves(args[0]) if isinstance(v, DifferentiableTensor)), None)
        if like is not None:
            lifted = lambda v: pytree.tree_map(lambda g: _gradient(g, like), v)
            args = tuple(lifted(v) if i == place else v for i, v in enumerate(args))
            kwargs = {k: lifted(v) if k == name else v for k, v in kwargs.items()}
        token = WALKING.set(like is not None)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except SectorchError:
            raise
        except Exception as error:
            raise typed(func, error) from None
        finally:
            WALKING.reset(token)

    return run


for _func, _place, _name in (
    (torch.Tensor.backward, 1, "gradient"),
    (torch.autograd.backward, 1, "grad_tensors"),
    (torch.autograd.grad, 2, "grad_outputs"),
):
    FUNCTIONS[_func] = _started(_func, _place, _name)
