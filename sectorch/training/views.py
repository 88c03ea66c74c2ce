"""Views, and what puts tensors together: rows that have the same form forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..tensor import SharedTensor
from ..tensor.table import Context
from .cells import Cell
from .elementwise import constant, content
from .functions import aten, torch
from .operations import GRADIENTS

row = GRADIENTS.implements


def _view(func: Callable) -> Callable:
    """A view: of what was worked out of its base too, so that a weight and its transpose are rounded once."""

    def viewed(context: Context, x: Cell, *args: Any, **kwargs: Any) -> Any:
        back = x.kept.get("transposed") if func is torch.t and x.base is not None else None
        if back is not None:
            return back
        run = partial(_run, func, args, kwargs)
        base = x if x.base is None else x.base[0]
        made = run(x.content)
        if not isinstance(made, SharedTensor):
            return [_cell(v, x, base) for v in made]
        cell = _cell(made, x, base)
        for key, value in x.kept.items():
            if isinstance(value, SharedTensor) and key != "positive":
                cell.kept[key] = run(value)
        if func is torch.t:
            cell.kept["transposed"] = x
        return cell

    return viewed


def _run(func: Callable, args: tuple, kwargs: dict, x: SharedTensor) -> Any:
    return func(x, *args, **kwargs)


def _cell(made: SharedTensor, x: Cell, base: Cell) -> Cell:
    if x.gradient:  # memory of its own: torch gives it to a parameter's `grad`, which may be changed in place
        return Cell(made, True, pool=x.pool)
    return Cell(made, base=base)


for _overload, _func in {
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.reshape.default: torch.reshape,
    aten._reshape_alias.default: lambda x, size, stride: torch.reshape(x, size),
    aten.expand.default: lambda x, size, implicit=False: x.expand(size),
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.default: torch.squeeze,
    aten.squeeze.dim: torch.squeeze,
    aten.squeeze.dims: torch.squeeze,
    aten.select.int: torch.select,
    aten.slice.Tensor: lambda x, dim=0, start=None, end=None, step=1: x[
        (slice(None),) * (dim % x.dim()) + (slice(start, end, step),)
    ],
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
    aten.diagonal.default: torch.diagonal,
    aten.unbind.int: torch.unbind,
}.items():
    row("view", _overload, view=True)(_view(_func))


@row("detach", aten.detach.default, aten.alias.default, view=True)
def detach(context: Context, x: Cell) -> Cell:
    return x


@row("cat", aten.cat.default)
def cat(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return torch.cat([content(v) for v in tensors], dim)


@row("stack", aten.stack.default)
def stack(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return torch.stack([content(v) for v in tensors], dim)


@row("select_backward", aten.select_backward.default)
def select_backward(context: Context, g: Cell, size: Any, dim: int, index: int) -> SharedTensor:
    zeros = constant(context, g.content.unsqueeze(dim), 0)
    dim %= len(size)
    index %= size[dim]
    parts = [zeros.expand([n if d != dim else index for d, n in enumerate(size)]) for _ in (0,)]
    after = zeros.expand([n if d != dim else size[dim] - 1 - index for d, n in enumerate(size)])
    return torch.cat([*parts, g.content.unsqueeze(dim), after], dim)


@row("slice_backward", aten.slice_backward.default)
def slice_backward(context: Context, g: Cell, size: Any, dim: int, start: int, end: int, step: int) -> SharedTensor:
    def placed(v: Tensor) -> Tensor:
        return aten.slice_backward(v, size, dim, start, end, step)

    value = g.content
    return value.like(context.backend.each(placed, value.shares), bound=value.bound)
