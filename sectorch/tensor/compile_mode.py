"""The modes in which a model's own Python code runs on secret tensors, and the module class that runs it.

Inside `as_if_compiling` the code finds that torch is compiling it, and takes the branches that look at no values.
Inside `as_plain` it finds that a secret tensor's type is torch.Tensor. `InferenceModule` is for inference alone.
"""

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
from .table import refuse_move

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_LOCK = threading.RLock()
_compiling_depth = 0
_flags_before: list[bool] = []


_NOTE_PREFIX = "_torchdynamo_disable"
"""The prefix of the names under which torch notes what it leaves out of an export."""


def _export_notes() -> dict:
    return traceback.current_meta.setdefault("custom", {})


_export_notes()


@contextmanager
def as_if_compiling(module: nn.Module | None = None) -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` are true inside.

    Code that looks at values to save work (whether a mask hides anything, say) tests these flags, and then takes the
    branch that looks at none. The flags are the process's, as with torch.export. The last of several threads resets
    them.

    Under these flags torch keeps a dict of the process, under "custom", of what it would leave out of an export. It
    creates and deletes the dict call by call, which fails if two threads do so at once, but it keeps one that exists.
    So this module creates one when it is imported. The last thread removes the notes of threads that overlapped.
    """
    global _compiling_depth
    with _LOCK:
        if not _compiling_depth:
            _flags_before[:] = [getattr(torch.compiler, flag, False) for flag in _FLAGS]
            _export_notes()
        _compiling_depth += 1
        for flag in _FLAGS:
            setattr(torch.compiler, flag, True)
    try:
        with as_plain(module):
            yield
    finally:
        with _LOCK:
            _compiling_depth -= 1
            if not _compiling_depth:
                for flag, value in zip(_FLAGS, _flags_before, strict=True):
                    setattr(torch.compiler, flag, value)
                notes = _export_notes()
                for name in [name for name in notes if name.startswith(_NOTE_PREFIX)]:
                    notes.pop(name, None)


def is_exporting() -> bool:
    """Whether torch itself is exporting, apart from the flags that `as_if_compiling` sets."""
    with _LOCK:
        return any(_flags_before) if _compiling_depth else torch.compiler.is_compiling()


class _TypeMeta(type):
    """The metaclass that lets `_TypeOfPlain` pass for `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _TypeOfPlain:  # a class of classes that was made where `type` stood for `_TypeOfPlain`
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        if issubclass(kind, SecretTensor):
            return nn.Parameter if getattr(args[0], "_is_param", False) else torch.Tensor
        return cls if kind in (type, _TypeMeta) else kind

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type) if cls is _TypeOfPlain else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type) if cls is _TypeOfPlain else super().__subclasscheck__(subclass)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class _TypeOfPlain(type, metaclass=_TypeMeta):
    """`type`, of which `type(x) is torch.Tensor` holds for a secret tensor."""


_LIBRARIES = {*sys.stdlib_module_names, "torch", "sectorch", "numpy", "functorch", "triton", "numba", "llvmlite"} - {
    "__main__"
}
"""Packages whose code reads the type of a tensor to pass it on, and not to choose a branch."""
_scanned: list[Any] = []
"""The modules that were loaded at the last scan."""
_model_names: list[dict] = []
"""The namespaces of the modules that may be the model's."""
_patched_count = -1
_patched: list[dict] = []
"""The namespaces in which `_TypeOfPlain` stands now; `_patched_count`: how many modules were loaded then."""
_plain_depth = 0
_validate_before = True
_import = builtins.__import__


def _patch_all() -> None:
    """Put `_TypeOfPlain` in the place of `type` in all loaded modules but those of `_LIBRARIES`."""
    global _patched_count, _scanned
    if _patched_count == len(sys.modules):
        return
    modules, begun = list(sys.modules.values()), False
    if len(modules) != len(_scanned) or not all(map(operator.is_, modules, _scanned)):
        _model_names.clear()
        for name, module in list(sys.modules.items()):
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                begun = True  # what it makes of `type` while it is imported stays
            elif _is_model_code(name) and isinstance(names := getattr(module, "__dict__", None), dict):
                _model_names.append(names)
        _scanned = [] if begun else modules
    for names in _model_names:  # thousands, in each trace: `_patch`, inlined
        if "type" not in names:
            names["type"] = _TypeOfPlain
            _patched.append(names)
    _patched_count = -1 if begun else len(modules)


def _is_model_code(name: Any) -> bool:
    return not isinstance(name, str) or name.partition(".")[0] not in _LIBRARIES


def _patch(names: dict) -> None:
    if "type" not in names:
        names["type"] = _TypeOfPlain
        _patched.append(names)


def _import_and_patch(*args: Any, **kwargs: Any) -> Any:
    depth = _thread.imports = getattr(_thread, "imports", 0) + 1
    try:
        made = _import(*args, **kwargs)
    finally:
        _thread.imports = depth - 1
    if depth == 1 and len(sys.modules) != _patched_count:  # a package's thousands of modules: all at its end
        with _LOCK:
            if _plain_depth:
                _patch_all()
    return made


_thread = threading.local()
apis: Any = _apis
vmaps: Any = _vmaps
_vmap_impl = apis.vmap_impl
MOST_MAPPED = 64
"""Entries that torch.vmap maps over at most: the function is called once for each."""


def _vmap_by_entry(
    func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
) -> Any:
    """torch.vmap by a call for each entry: torch's own batched tensors cannot hold secrets."""
    if not getattr(_thread, "depth", 0):
        return _vmap_impl(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    size, dims, leaves, spec = vmaps._process_batched_inputs(in_dims, args, func)
    if not 0 < size <= MOST_MAPPED:
        raise UnsupportedOpError(
            f"vmap over {size} entries of a model on secret tensors: each is computed by itself, and {MOST_MAPPED} at "
            f"most; call the function on the whole batch"
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

    No class can change `type(x)`, so code that tests for the exact type would take another branch, without a warning.
    A name `type` in a module's namespace takes precedence over Python's. Validation looks at values; torch skips it in
    compiled code. torch.vmap calls its function for each entry. All of this is set in the process, until the last of
    several threads leaves.

    Args:
        module: whose forwards run inside.
    """
    global _plain_depth, _validate_before, _patched_count, _import
    with _LOCK:
        if not _plain_depth:
            SecretTensor.passes_as = torch.Tensor
            apis.vmap_impl = _vmap_by_entry
            _validate_before, Distribution._validate_args = Distribution._validate_args, False
            _import, builtins.__import__ = builtins.__import__, _import_and_patch
        _plain_depth += 1
        _patch_all()
        for layer in module.modules() if module is not None else ():  # of a class that no imported module holds
            names = getattr(type(layer).forward, "__globals__", None)
            if isinstance(names, dict) and _is_model_code(names.get("__name__")):
                _patch(names)
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1
        with _LOCK:
            _plain_depth -= 1
            if not _plain_depth:
                SecretTensor.passes_as = None
                apis.vmap_impl = _vmap_impl
                Distribution._validate_args = _validate_before
                if builtins.__import__ is _import_and_patch:
                    builtins.__import__ = _import
                for names in _patched:
                    if names.get("type") is _TypeOfPlain:
                        del names["type"]
                _patched.clear()
                _patched_count = -1


class InferenceModule(nn.Module):
    """A module without parameters, for inference alone, whose device and mode are fixed. torch.compile leaves it alone.

    Raises:
        TrainingModeError: by `train()`.
        ArgumentError: by a move to another device or dtype; by a call inside torch.export or torch.jit.trace, which see
            tensors without content; by `state_dict()` and `load_state_dict()`, which would be empty and load nothing.
    """

    session: Session

    def train(self, mode: bool = True):
        if mode:
            raise TrainingModeError("a secure module is for inference; train the plain model and call secure() again")
        return super().train(False)

    def _apply(self, fn: Callable, recurse: bool = True):
        """Refuse .to(), .cuda(), .half() and their like; nn.Module calls this for all of them."""
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
