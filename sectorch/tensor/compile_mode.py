"""What a model's code is told while it runs on secrets: that it is being compiled, as in torch.export, and that its
tensors are torch's own."""

from __future__ import annotations

import builtins
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch._functorch import apis as _apis
from torch._functorch import vmap as _vmaps
from torch.distributions import Distribution
from torch.fx import traceback
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, TrainingModeError, UnsupportedOpError
from ..session import Session
from .secret import SecretTensor
from .signatures import refuse_move

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_LOCK = threading.RLock()
_inside = 0
_before: list[bool] = []


_NOTED = "_torchdynamo_disable"
"""How the names of torch's notes begin."""


def _notes() -> dict:
    return traceback.current_meta.setdefault("custom", {})


_notes()


@contextmanager
def as_if_compiling(module: nn.Module | None = None) -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` are true inside.

    Code that looks at a tensor's values to save work (whether a mask hides anything, say) asks that, and then takes the
    way that looks at nothing. torch.export's own tracing sets the same flags, of the process. The last of several
    threads sets them back.

    Under these flags torch notes in a dict of the process, under "custom", what it would leave out of an export. It
    makes and deletes that entry call by call, which fails where two threads do so at once, but leaves one that it
    finds. So there is one from the import of this module on, and the last thread takes away notes that threads which
    overlapped have left in it.
    """
    global _inside
    with _LOCK:
        if not _inside:
            _before[:] = [getattr(torch.compiler, flag, False) for flag in _FLAGS]
            _notes()
        _inside += 1
        for flag in _FLAGS:
            setattr(torch.compiler, flag, True)
    try:
        with as_plain(module):
            yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                for flag, value in zip(_FLAGS, _before, strict=True):
                    setattr(torch.compiler, flag, value)
                notes = _notes()
                for name in [name for name in notes if name.startswith(_NOTED)]:
                    notes.pop(name, None)


def is_exporting() -> bool:
    """Whether torch says so by itself, whatever threads are inside of `compiling`."""
    with _LOCK:
        return any(_before) if _inside else torch.compiler.is_compiling()


class _Kind(type):
    """What makes `_Type` pass for `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a class of classes that was made where `type` stood for `_Type`
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        if issubclass(kind, SecretTensor):
            return nn.Parameter if getattr(args[0], "_is_param", False) else torch.Tensor
        return cls if kind in (type, _Kind) else kind

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type) if cls is _Type else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type) if cls is _Type else super().__subclasscheck__(subclass)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class _Type(type, metaclass=_Kind):
    """`type`, of which `type(x) is torch.Tensor` holds for a secret tensor."""


_NOT_THE_MODELS = {
    *sys.stdlib_module_names,
    "torch",
    "sectorch",
    "numpy",
    "functorch",
    "triton",
    "numba",
    "llvmlite",
} - {"__main__"}
"""Packages whose code asks for the type of a tensor to hand it on, and not to choose a branch."""
_looked: list[Any] = []
"""The modules that there were when all were looked through."""
_theirs: list[dict] = []
"""The names of those of them that are the model's, as far as can be known."""
_spread_to = -1
_changed: list[dict] = []
"""The names among which `_Type` stands now, and how many modules there were when it was put there."""
_plain_inside = 0
_validates = True
_import = builtins.__import__


def _spread() -> None:
    """`_Type` stands for `type` in the modules that there are now, but those of `_NOT_THE_MODELS`."""
    global _spread_to, _looked
    if _spread_to == len(sys.modules):
        return
    modules, begun = list(sys.modules.values()), False
    if len(modules) != len(_looked) or not all(map(operator.is_, modules, _looked)):
        _theirs.clear()
        for name, module in list(sys.modules.items()):
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                begun = True  # what it makes of `type` while it is imported stays
            elif _is_theirs(name) and isinstance(names := getattr(module, "__dict__", None), dict):
                _theirs.append(names)
        _looked = [] if begun else modules
    for names in _theirs:  # thousands, in each trace: `_stand` in place
        if "type" not in names:
            names["type"] = _Type
            _changed.append(names)
    _spread_to = -1 if begun else len(modules)


def _is_theirs(name: Any) -> bool:
    return not isinstance(name, str) or name.partition(".")[0] not in _NOT_THE_MODELS


def _stand(names: dict) -> None:
    if "type" not in names:
        names["type"] = _Type
        _changed.append(names)


def _importing(*args: Any, **kwargs: Any) -> Any:
    depth = _here.imports = getattr(_here, "imports", 0) + 1
    try:
        made = _import(*args, **kwargs)
    finally:
        _here.imports = depth - 1
    if depth == 1 and len(sys.modules) != _spread_to:  # a package's thousands of modules: all at its end
        with _LOCK:
            if _plain_inside:
                _spread()
    return made


_here = threading.local()
apis: Any = _apis
vmaps: Any = _vmaps
_vmap_impl = apis.vmap_impl
MAPPED = 64
"""What torch.vmap maps over at most: a function is called once for each."""


def _mapped(func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.vmap: its own batches hold no secrets, so that the function is called for each entry in turn."""
    if not getattr(_here, "depth", 0):
        return _vmap_impl(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    size, dims, leaves, spec = vmaps._process_batched_inputs(in_dims, args, func)
    if not 0 < size <= MAPPED:
        raise UnsupportedOpError(
            f"vmap over {size} entries of a model on secret tensors: each is computed by itself, and {MAPPED} at most; "
            f"call the function on the whole batch"
        )
    found = []
    for i in range(size):
        entry = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in zip(leaves, dims, strict=True)]
        found.append(pytree.tree_flatten(func(*pytree.tree_unflatten(entry, spec), **kwargs)))
    wanted = vmaps._broadcast_to_and_flatten(out_dims, found[0][1])
    if wanted is None:
        raise ValueError(f"vmap: out_dims={out_dims} is not compatible with the structure of the results")
    results = [
        column[0] if dim is None else torch.stack(column, dim)
        for column, dim in zip(zip(*(leaves for leaves, _ in found), strict=True), wanted, strict=True)
    ]
    return pytree.tree_unflatten(results, found[0][1])


@contextmanager
def as_plain(module: nn.Module | None = None) -> Iterator[None]:
    """Code outside torch finds that a secret tensor's type is torch.Tensor, and torch.distributions validates nothing.

    No class can make `type(x)` another, so that code which tells an input from a list of them by its exact type would
    take its other branch, without a word. What code looks up as `type` is a name of its module before it is Python's.
    Validation looks at values; torch leaves it out in compiled code. torch.vmap calls its function for each entry. All
    that is set in the process, until the last of several threads leaves.

    Args:
        module: whose forwards run inside.
    """
    global _plain_inside, _validates, _spread_to, _import
    with _LOCK:
        if not _plain_inside:
            SecretTensor.passes_as = torch.Tensor
            apis.vmap_impl = _mapped
            _validates, Distribution._validate_args = Distribution._validate_args, False
            _import, builtins.__import__ = builtins.__import__, _importing
        _plain_inside += 1
        _spread()
        for layer in module.modules() if module is not None else ():  # of a class that no imported module holds
            names = getattr(type(layer).forward, "__globals__", None)
            if isinstance(names, dict) and _is_theirs(names.get("__name__")):
                _stand(names)
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _LOCK:
            _plain_inside -= 1
            if not _plain_inside:
                SecretTensor.passes_as = None
                apis.vmap_impl = _vmap_impl
                Distribution._validate_args = _validates
                if builtins.__import__ is _importing:
                    builtins.__import__ = _import
                for names in _changed:
                    if names.get("type") is _Type:
                        del names["type"]
                _changed.clear()
                _spread_to = -1


# A module that is for inference alone: where it computes, and in which mode, is settled when it is made.


class Inference(nn.Module):
    """A module without parameters, in evaluation mode, that nothing records; torch.compile leaves it as it is, and so
    does `compile()`.

    Raises:
        TrainingModeError: of `train()`.
        ArgumentError: of a move to another device or dtype, which would change nothing; of a call inside torch.export
            or torch.jit.trace, which see tensors without content; of `state_dict()` and `load_state_dict()`, which
            would be empty and load nothing.
    """

    session: Session

    def train(self, mode: bool = True):
        if mode:
            raise TrainingModeError("a secure module is for inference; train the plain model and call secure() again")
        return super().train(False)

    def _apply(self, fn: Callable, recurse: bool = True):
        """What .to(), .cuda(), .half() and their like do to a module's tensors."""
        refuse_move(fn, self.session.device)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        pass

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(
            "a secure module has no weights to save, they are their owner's secret: its state_dict() would be empty; "
            "take that of the plain model"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError("a secure module loads no weights: load them into the plain model, and call secure() again")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentError(
            "a secure module has keys and shares, and cannot be copied or saved: save the plain model, and call "
            "secure() again; sectorch.network.save_model writes one for `sectorch answer`"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # torch.compile leaves the call, and all in it, as it is
            return torch.compiler.disable(super().__call__)(*args, **kwargs)
        if is_exporting() or torch._C._is_tracing():
            raise ArgumentError(
                "torch.export and torch.jit.trace cannot follow a secure module: call it as it is; a model is exported "
                "before it is given to secure()"
            )
        return super().__call__(*args, **kwargs)
