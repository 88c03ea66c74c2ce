"""Plain tensors that a forward makes and writes secrets into: `out = torch.zeros(n, d); out[i] = x`.

A plain tensor cannot become a secret one, but every torch function of a forward is seen, and so a secret tensor can
stand for it, and others for its views, wherever they are used from then on. Nobody else may have its memory then, and
that is filled with what no call takes (not a number, or a whole number out of range), so that a later call, which
knows nothing of this, has no wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from ..errors import NonFiniteError
from ..tensor import PrivateTensor, SecretTensor
from ..tensor.dispatch import METADATA
from ..tensor.table import IN_PLACE, spell

_T = torch.Tensor
MAKES = {
    torch.zeros, torch.ones, torch.full, torch.empty, torch.zeros_like, torch.ones_like, torch.full_like,
    torch.empty_like, torch.tensor, torch.eye, torch.arange, torch.clone, _T.clone, _T.new, _T.new_tensor, _T.new_zeros,
    _T.new_ones, _T.new_full, _T.new_empty,
}  # fmt: skip
"""What makes a tensor whose memory nobody else has."""
_LEFT = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, _T.new_empty, _T.new_empty_strided,
    _T.new,
}  # fmt: skip
_RESIZES = {_T.resize_, _T.resize_as_}
"""What leaves memory as it was found."""


def defined(func: Callable, args: tuple, kwargs: dict) -> Any:
    """func(*args, **kwargs), with zeros where torch leaves memory as it was found: two calls do the same."""
    target: Any = args[0] if args else None
    before = target.untyped_storage().nbytes() if func in _RESIZES and type(target) is torch.Tensor else None
    result = func(*args, **kwargs)
    if type(result) is torch.Tensor and not result.is_meta and result.layout == torch.strided:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if func in _LEFT and not (func is _T.new and not all(isinstance(v, int) for v in args[1:])):
                result.zero_()
            elif before is not None:
                result.flatten()[max(0, before // result.element_size() - result.storage_offset()) :] = 0
    return result


_WHOLE = (torch.int32, torch.int64)


class Written:
    """The plain tensors of one call that were made by `MAKES`, and the secret ones that stand for some of them."""

    def __init__(self, strided: Callable, weights: Iterable[Any] = ()):
        """`strided` is `views.strided`, or what stands for it in a recording; `weights` stand for the plain tensors of
        which they were made, which a forward may have from elsewhere: from a list, a closure."""
        self._strided = strided
        self._made: dict[int, list[ref]] = {}
        """By its memory: what was made, and the views of it."""
        self._secret: dict[int, tuple[torch.Tensor, Any]] = {}
        for weight in weights:
            plain = [one() for one in weight.stands_for] if isinstance(weight, PrivateTensor) else []
            self._secret |= {id(x): (x, weight) for x in plain if x is not None}
        self._unset: dict[int, torch.Tensor] = {}
        """Of tensors that were made of NaN, where nothing was written yet."""

    def made(self, func: Callable, result: Any) -> Any:
        for leaf in result if isinstance(result, (list, tuple)) else (result,):
            memory = _memory(leaf)
            if memory is None:
                continue
            if func in MAKES:
                self._made[memory] = [ref(leaf)]
            elif memory in self._made and any(one() is not None for one in self._made[memory]):
                self._made[memory].append(ref(leaf))
        return result

    def swapped(self, tree: Any, func: Callable | None = None) -> Any:
        """The tree with secret tensors in the places of those for which they stand.

        Raises:
            NonFiniteError: func, whose arguments it is, reads what is NaN there.
        """
        if not self._secret:
            return tree
        if self._unset:
            self._reads(tree, func)
        return self._stood(tree)

    def _stood(self, tree: Any) -> Any:
        size = lambda v: isinstance(v, torch.Size)  # which torch tells from other tuples
        return pytree.tree_map(lambda v: self._secret[id(v)][1] if id(v) in self._secret else v, tree, is_leaf=size)

    def _reads(self, tree: Any, func: Callable | None) -> None:
        for leaf in pytree.tree_leaves(tree):
            unset = self._unset.get(id(leaf))
            if unset is None or func in METADATA:
                continue
            args: tuple[Any, ...] = tree[0] if func is not None else ()
            target: Any = args[0] if args else None
            index: Any = args[1] if len(args) > 1 else ...
            known = not any(isinstance(v, SecretTensor) for v in pytree.tree_leaves(index))
            if target is leaf and func in (_T.__setitem__, _T.copy_, _T.fill_, _T.zero_):
                if func is not _T.__setitem__ or known:
                    unset[index if func is _T.__setitem__ else ...] = False
                continue
            read = unset[index] if target is leaf and func is _T.__getitem__ and known else unset
            if bool(read.any()):
                raise NonFiniteError(
                    f"{'a result' if func is None else spell(func)} holds {int(read.sum())} NaN of a tensor that "
                    f"the forward makes of NaN and has not written there; make it with torch.zeros, or write it first"
                )

    def taken(self, func: Callable, args: Any) -> Any:
        """The arguments of a function; where it writes a secret into a plain tensor, secret ones stand for that and for
        its views from now on. A weight stands for one until something else is written there."""
        if func in IN_PLACE and args and isinstance(args[0], PrivateTensor):
            at = next((at for at, (_, secret) in self._secret.items() if secret is args[0] and secret.copied), None)
            secret = self._from(args)
            if at is None or secret is None or isinstance(secret, PrivateTensor):
                return args
            made = args[0] + secret.flatten()[:0].sum().to(args[0].dtype)
            self._secret[at] = self._secret[at][0], made
            return (made, *args[1:])
        if func in IN_PLACE and args and type(args[0]) is torch.Tensor:
            sharing = self._sharing(args[0])
            if sharing and self._takes(args, sharing):
                self._take(args, sharing)
                if self._unset:
                    self._reads((args, {}), func)
                return self._stood(args)
        return args

    def _sharing(self, target: torch.Tensor) -> list[torch.Tensor]:
        """The living tensors of the target's memory, if a tensor that was made has it and all others are known."""
        memory = _memory(target)
        known = [] if memory is None else self._made.get(memory, [])
        living = list({id(x): x for x in (one() for one in known) if x is not None}.values())
        if not any(x is target for x in living):
            return []
        return living if _holders(target) == _holders(torch.zeros(1)) + len(living) - 1 else []

    def _takes(self, args: tuple, sharing: list[torch.Tensor]) -> bool:
        target, secret = args[0], self._from(args)
        fillable = not _is_whole(target) or target.dtype in _WHOLE
        alone = len(sharing) == 1 and not (isinstance(secret, PrivateTensor) and secret.is_complex())
        return fillable and secret is not None and (alone or not (target.is_complex() or secret.is_complex()))

    def _take(self, args: tuple, sharing: list[torch.Tensor]) -> None:
        target, secret = args[0], self._from(args)
        part = secret.real if secret.is_complex() else secret
        zero = part.flatten()[:0].sum()
        zero = zero if _is_whole(target) else zero.to(target.dtype.to_real())
        if len(sharing) == 1:
            start = target.detach().clone()
            if start.is_floating_point() and bool((unset := start.isnan()).any()):
                start, self._unset[id(target)] = torch.where(unset, 0.0, start), unset
            stands = start + zero
            self._secret[id(target)] = target, stands.clone() if isinstance(stands, PrivateTensor) else stands
        with torch._C.DisableTorchFunction(), torch.no_grad():
            size = target.untyped_storage().nbytes() // target.element_size()
            memory = torch.as_strided(target, (size,), (1,), 0)
            start = memory.clone()
            memory.fill_(torch.iinfo(target.dtype).max if _is_whole(target) else float("nan"))
        if len(sharing) > 1:
            line = start + zero
            for x in sharing:
                self._secret[id(x)] = x, self._strided(line, tuple(x.shape), x.stride(), x.storage_offset())

    def _from(self, args: tuple) -> Any:
        """A secret tensor among what is written whose numbers the target can hold; a weight if there is no other."""
        given = [v for v in pytree.tree_leaves(args[1:]) if isinstance(v, SecretTensor)]
        given.sort(key=lambda v: isinstance(v, PrivateTensor))
        fits = lambda v: torch.can_cast(v.dtype, args[0].dtype)
        return next((v for v in given if fits(v)), None)


def _memory(x: Any) -> int | None:
    """What names the memory of a plain tensor, if it has one."""
    try:
        return x.untyped_storage()._cdata if type(x) is torch.Tensor else None
    except (NotImplementedError, RuntimeError):  # of a sparse tensor, or of torch.func's own
        return None


def _holders(x: torch.Tensor) -> int:
    """How many there are of a tensor's memory: views and arrays beside it would not see what is written."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _is_whole(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()
