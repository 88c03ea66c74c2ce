"""Plain tensors that a forward makes and writes secrets into: `out = torch.zeros(n, d); out[i] = x`.

A plain tensor cannot become a secret one, but every torch function of a forward is seen, and so a secret tensor can
stand for it wherever it is used from then on. It may have no views then, which would not see what is written, and its
own memory is filled with what no call takes (not a number, or a whole number out of range), so that a later call, which
knows nothing of this, has no wrong number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from ..tensor import ComplexShared, SharedTensor
from ..tensor.table import IN_PLACE

_T = torch.Tensor
MAKES = {
    torch.zeros, torch.ones, torch.full, torch.empty, torch.zeros_like, torch.ones_like, torch.full_like,
    torch.empty_like, torch.tensor, torch.eye, torch.arange, torch.clone, _T.clone, _T.new, _T.new_tensor, _T.new_zeros,
    _T.new_ones, _T.new_full, _T.new_empty,
}  # fmt: skip
"""What makes a tensor whose memory nobody else has."""
_WHOLE = (torch.int32, torch.int64)


class Written:
    """The plain tensors of one call that were made by `MAKES`, and the secret ones that stand for some of them."""

    def __init__(self):
        self._made: dict[int, ref] = {}
        self._secret: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def made(self, func: Callable, result: Any) -> Any:
        if func in MAKES and type(result) is torch.Tensor:
            self._made[id(result)] = ref(result)
        return result

    def swapped(self, tree: Any) -> Any:
        """The tree with secret tensors in the places of those for which they stand."""
        if not self._secret:
            return tree
        return pytree.tree_map(lambda v: self._secret[id(v)][1] if id(v) in self._secret else v, tree)

    def taken(self, func: Callable, args: Any) -> Any:
        """The arguments of a function; where it writes a secret into a plain tensor, a secret one stands for that from
        now on."""
        if self._takes(func, args):
            self._take(args)
            return self.swapped(args)
        return args

    def _takes(self, func: Callable, args: tuple) -> bool:
        target: Any = args[0] if args else None
        known = self._made.get(id(target))
        if known is None or known() is not target or func not in IN_PLACE:
            return False
        fillable = not _is_whole(target) or target.dtype in _WHOLE
        return fillable and self._from(args) is not None and _holders(target) == _holders(torch.zeros(1))

    def _take(self, args: tuple) -> None:
        target, secret = args[0], self._from(args)
        part = secret.real if secret.is_complex() else secret
        start, zero = target.detach().clone(), part.flatten()[:0].sum()
        zero = zero if _is_whole(target) else zero.to(target.dtype.to_real())
        self._secret[id(target)] = target, start + zero
        with torch._C.DisableTorchFunction(), torch.no_grad():
            target.fill_(torch.iinfo(target.dtype).max if _is_whole(target) else float("nan"))

    def _from(self, args: tuple) -> Any:
        """A secret tensor among what is written whose numbers the target can hold."""
        given = [v for v in pytree.tree_leaves(args[1:]) if isinstance(v, (SharedTensor, ComplexShared))]
        fits = lambda v: torch.can_cast(v.dtype, args[0].dtype)
        return next((v for v in given if fits(v)), None)


def _holders(x: torch.Tensor) -> int:
    """How many there are of a tensor's memory: views and arrays beside it would not see what is written."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _is_whole(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()
