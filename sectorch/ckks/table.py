"""The dispatch of CKKSTensor: a torch function -> its handler, and nothing that is not in the table.

As with SharedTensor (`dispatch.py`): torch itself runs first, on meta tensors, so that shapes and error texts are
torch's own; then the handler; and its result must have the shape that torch gave. What is missing raises with the
nearest name. Errors name the layer of the model that was running.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from ..errors import (
    ArgumentError,
    DimensionError,
    DtypeError,
    SecretAccessError,
    SectorchError,
    ShapeError,
    UnsupportedOpError,
)
from .cipher import Cipher
from .tensor import CKKSTensor, set_dispatch

_T = torch.Tensor
_METADATA = {
    getattr(_T, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_meta",
                 "is_sparse", "is_quantized", "is_nested", "grad", "grad_fn", "names", "itemsize")
    if hasattr(getattr(_T, name, None), "__get__")
} | {
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, _T.is_complex, _T.__hash__,
    _T.is_contiguous, _T.get_device, _T.element_size, torch.is_floating_point, torch.is_complex, torch.numel,
    torch.is_tensor,
}  # fmt: skip
_SECRETS = {
    _T.numpy, _T.item, _T.tolist, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__, _T.__array__,
    _T.data_ptr, _T.storage, _T.untyped_storage, _T.__contains__, _T.__format__, _T.is_nonzero, _T.equal, _T.allclose,
    torch.equal, torch.allclose, torch.is_nonzero, _T.nonzero, torch.nonzero, _T.data.__get__, _T.data.__set__,
    _T.__dlpack__, _T.__deepcopy__, _T.__reduce_ex__, _T.__repr__,
}  # fmt: skip

HANDLERS: dict[Any, Callable] = {}
NAMES: dict[str, list[Any]] = {}
_observers: list[Callable] = []


def implements(name: str, *functions: Any) -> Callable:
    """Register a handler f(*args, **kwargs) -> (Cipher, ...) for some torch functions."""

    def register(handler: Callable) -> Callable:
        for function in functions:
            HANDLERS[function] = handler
        NAMES.setdefault(name, []).extend(functions)
        return handler

    return register


def supported_ops() -> list[str]:
    """Names of the operations that CKKSTensors take."""
    return sorted(NAMES)


@contextmanager
def observed(observer: Callable) -> Iterator[None]:
    """Within, observer(name, layer, result) is called after every operation of this process's CKKSTensors."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def call(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What `CKKSTensor.__torch_function__` does."""
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _SECRETS:
        raise SecretAccessError(
            f"{spelled(func)} would take the content out of a CKKSTensor; only .decrypt(secret) does, at the key's "
            f"holder"
        )
    handler = HANDLERS.get(func)
    try:
        if handler is None:
            raise UnsupportedOpError(_unsupported(func))
        meta = _on_meta(func, args, kwargs)
        result = _checked(handler(*args, **kwargs), meta, func)
    except SectorchError as error:
        raise _located(error) from error.__cause__
    for observer in _observers:
        observer(spelled(func), layer_here(), result)
    return result


def _on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, CKKSTensor):
            return torch.empty(leaf.full_shape, dtype=leaf.float_dtype, device="meta")
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to("meta")
        return leaf

    args, kwargs = pytree.tree_map(to_meta, (args, kwargs))
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    except NotImplementedError as error:
        raise UnsupportedOpError(f"{spelled(func)}: {error}") from None
    except IndexError as error:
        raise DimensionError(str(error)) from None
    except TypeError as error:
        raise DtypeError(str(error)) from None
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    except RuntimeError as error:
        raise ShapeError(str(error)) from None


def _checked(result: Any, meta: Any, func: Callable) -> Any:
    if isinstance(result, (tuple, list)):
        return type(meta)(_checked(r, m, func) for r, m in zip(result, meta, strict=True))
    if result.full_shape[1:] == meta.shape[1:] and result.full_shape[0] != meta.shape[0]:
        raise UnsupportedOpError(
            f"{spelled(func)} would change the batch from {result.full_shape[0]} to {meta.shape[0]} samples; they lie "
            f"in the slots, and none can be taken away or moved. Encrypt the batch that is meant, or decrypt first"
        )
    if result.full_shape != meta.shape:
        raise ShapeError(f"internal error: {spelled(func)} gave {tuple(result.full_shape)}, torch {tuple(meta.shape)}")
    return result


def spelled(func: Callable) -> str:
    """The name under which a user knows a torch function."""
    known = resolve_name(func) or getattr(func, "__name__", str(func))
    return known.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")


def _unsupported(func: Callable) -> str:
    name = spelled(func).split(".")[-1].strip("_")
    close = difflib.get_close_matches(name, NAMES, n=3, cutoff=0.5)
    hint = f"nearest supported: {', '.join(close)}. " if close else ""
    return (
        f"{spelled(func)} is not supported on CKKSTensors. {hint}Homomorphic encryption computes polynomials only: "
        f"sectorch.nn.fhe_friendly(model) replaces ReLU and max-pooling, and sectorch.ckks.to_shares(e, ...) goes on "
        f"with shares"
    )


def layer_here() -> str | None:
    """The dotted name and type of the innermost nn.Module whose forward is running, within the outermost one."""
    inner = outer = None
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            inner, outer = inner if inner is not None else module, module
        frame = frame.f_back
    if inner is None:
        return None
    name = next((n for n, m in outer.named_modules() if m is inner), "")
    return f"layer '{name}' ({type(inner).__name__})" if name else f"layer {type(inner).__name__}"


def _located(error: SectorchError) -> SectorchError:
    layer = layer_here()
    if layer is None or getattr(error, "layer", None):
        return error
    located = type(error)(f"{layer}: {error}")
    located.layer = layer
    return located


def wrap(like: CKKSTensor, cipher: Cipher, shape: Any) -> CKKSTensor:
    """A handler's result: the batch and dtype of `like`, the ciphertexts' shape without the batch."""
    return CKKSTensor(cipher, like.batch, tuple(shape), like.float_dtype)


set_dispatch(call)
