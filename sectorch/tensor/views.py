"""Tensors that share memory: what a write into one of them is to the others.

Shares have no memory in common, so a view is a tensor of its own, which knows how torch would lay it in the memory that
it shares. A write gives the written tensor a new value, and so it does to every living tensor of the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .on_meta import torch_on_meta

_T = torch.Tensor
_COPY_OR_VIEW = {
    torch.reshape, _T.reshape, _T.reshape_as, torch.flatten, _T.flatten, torch.ravel, _T.ravel, _T.contiguous,
}  # fmt: skip
"""Whether these give a copy hangs on strides, which an operation on shares does not have."""


class Layout:
    """Where the entries of a tensor lie in memory that others share; found when a write asks for it.

    Attributes:
        members: the living tensors of this memory, in one list for all of them.
    """

    def __init__(self, twin: Callable[[], torch.Tensor | None], members: list[weakref.ref]):
        self._find, self._twin, self._known = twin, None, False
        self.members = members

    @property
    def twin(self) -> torch.Tensor | None:
        """torch's own tensor of this shape in such memory, without content; None where torch gives none."""
        if not self._known:
            self._twin, self._known = self._find(), True
        return self._twin

    def viewed(self, func: Callable, args: tuple, kwargs: dict, at: int | None) -> Layout:
        """The layout of func(x, *args, **kwargs), or of one of its results, where x has this one."""

        def find() -> torch.Tensor | None:
            if self.twin is None or func in _COPY_OR_VIEW:
                return None
            try:
                found = torch_on_meta(func, (self.twin, *args), kwargs)
                return found if at is None else found[at]
            except Exception:
                return None

        return Layout(find, self.members)


def layout_of(x: Any) -> Layout:
    """The layout of a tensor, which is made alone in its memory where it has none."""
    if x.layout_in_memory is None:
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = x.shape, x.dtype
        members = [weakref.ref(x)]
        x.layout_in_memory = Layout(lambda: torch.empty(shape, dtype=dtype, device="meta"), members)
    return x.layout_in_memory


def overlap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The numbers of the entries of x that are also entries of y, and of those of y; None if there are none.

    Raises:
        ValueError: an entry of y is several of its entries, as after `expand`.
    """
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return None
    of_x, of_y = _places(x), _places(y)
    ordered, order = of_y.sort()
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("entries that share one place")
    if not len(ordered) or not len(of_x):
        return None
    at = torch.searchsorted(ordered, of_x).clamp(max=len(ordered) - 1)
    found = (ordered[at] == of_x).nonzero().squeeze(1)
    return (found, order[at[found]]) if len(found) else None


def _places(x: torch.Tensor) -> torch.Tensor:
    places = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.reshape(-1)


def rewritten(x: Any, y: Any, shape: tuple[int, ...], of_x: torch.Tensor, of_y: torch.Tensor, call: Callable) -> Any:
    """x, of this shape, with the entries `of_y` of y in the places `of_x`; call(func, *args) runs a torch function."""
    line = call(torch.reshape, y, (-1,))
    if not torch.equal(of_y, torch.arange(of_y.numel())) or len(of_y) != y.numel():
        line = call(torch.index_select, line, 0, of_y)
    if len(of_x) < x.numel():
        line = call(torch.index_copy, call(torch.reshape, x, (-1,)), 0, of_x, line)
    return call(torch.reshape, line, shape)


def strided(line: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    """Of a shared tensor of one dimension, what torch.as_strided gives: another tensor of the same memory."""
    made: Any = torch.index_select(line, 0, strided_places(line, shape, stride, offset)).reshape(shape)
    layout = layout_of(line)
    made.layout_in_memory = layout.viewed(torch.as_strided, (shape, stride, offset), {}, None)
    layout.members.append(weakref.ref(made))
    return made


def strided_places(line: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Which entries of the line these are."""
    return torch.as_strided(torch.arange(line.numel()), shape, stride, offset).reshape(-1)
