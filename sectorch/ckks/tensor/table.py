"""The dispatch of CKKSTensor: a torch function -> its handler, and nothing that is not in the table.

The table is one of `sectorch.tensor.table`, as SharedTensor's is, with its canonical names; the steps are those of
`sectorch.tensor.dispatch`: torch itself runs first, on meta tensors, so that shapes and error texts are torch's own;
then the handler; and its result must have the shape that torch gave. What is missing raises with the nearest name.
Errors name the layer of the model that was running.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import DtypeError, SecretAccessError, SectorchError, ShapeError, UnsupportedOpError
from ...tensor.arguments import CONVERSIONS, stays
from ...tensor.dispatch import METADATA, SECRETS, is_operator
from ...tensor.on_meta import torch_on_meta
from ...tensor.table import OpTable, spell, typed
from ..scheme.cipher import Cipher
from .encrypted import CKKSTensor, set_dispatch

CIPHERTEXTS = OpTable(
    "CKKSTensors",
    "Homomorphic encryption computes polynomials only: sectorch.nn.fhe_friendly(model) replaces activations and "
    "max-pooling (then fine-tune it: sectorch.nn.fine_tune), and sectorch.ckks.to_shares(e, ...) goes on with shares",
)
"""The operations of CKKSTensors. Handlers are f(*args, **kwargs) -> CKKSTensor, or a list or tuple of them."""

implements = CIPHERTEXTS.implements
_OBSERVERS: ContextVar[tuple[Callable, ...]] = ContextVar("sectorch_ckks_observers", default=())


def supported_ops() -> list[str]:
    """Names of the operations that CKKSTensors take."""
    return sorted(CIPHERTEXTS.rows)


@contextmanager
def observed(observer: Callable) -> Iterator[None]:
    """Within, observer(name, layer, result) is called after every operation of this thread's CKKSTensors."""
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def call(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What `CKKSTensor.__torch_function__` does."""
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in SECRETS:
        raise SecretAccessError(
            f"{spell(func)} would take the content out of a CKKSTensor; only .decrypt(secret) does, at the key's holder"
        )
    handler = CIPHERTEXTS.handler.get(func)
    try:
        if handler is None:
            raise UnsupportedOpError(CIPHERTEXTS.unsupported(func, args, kwargs))
        if func in CONVERSIONS:
            stays(args[0], args[1:], kwargs)
        meta = _on_meta(func, args, kwargs)
        result = _checked(handler(*args, **kwargs), meta, func)
    except SectorchError as error:
        if isinstance(error, DtypeError) and is_operator(func, args):
            error = UnsupportedOpError(str(error))  # Python takes a TypeError for "ask the other operand"
        raise located(error) from error.__cause__
    except Exception as error:
        raise located(typed(func, error)) from None
    for observer in _OBSERVERS.get():
        observer(spell(func), layer_here(), result)
    return result


def _on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on shapes; a mask among the indices of `x[...]` keeps its content, which the shape comes from.

    Raises:
        DtypeError: an operand that is no real number, or a tensor of none.
    """

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, CKKSTensor):
            return torch.empty(leaf.full_shape, dtype=leaf.float_dtype, device="meta")
        if isinstance(leaf, torch.Tensor):
            if leaf.is_complex():
                raise DtypeError(f"{spell(func)}: complex operands are not supported on CKKSTensors")
            return leaf if func is torch.Tensor.__getitem__ else leaf.to("meta")
        if isinstance(leaf, numbers.Complex) and not isinstance(leaf, numbers.Real):
            raise DtypeError(f"{spell(func)}: complex operands are not supported on CKKSTensors")
        return leaf

    args, kwargs = pytree.tree_map(to_meta, (args, kwargs))
    return torch_on_meta(func, args, kwargs)


def _checked(result: Any, meta: Any, func: Callable) -> Any:
    if isinstance(result, (tuple, list)):
        return type(meta)(_checked(r, m, func) for r, m in zip(result, meta, strict=True))
    if result.full_shape[1:] == meta.shape[1:] and result.full_shape[0] != meta.shape[0]:
        raise UnsupportedOpError(
            f"{spell(func)} would change the batch from {result.full_shape[0]} to {meta.shape[0]} samples; they lie "
            f"in the slots, and none can be taken away or moved. Encrypt the batch that is meant, or decrypt first"
        )
    if result.full_shape != meta.shape:
        raise ShapeError(f"internal error: {spell(func)} gave {tuple(result.full_shape)}, torch {tuple(meta.shape)}")
    if meta.dtype != result.float_dtype and meta.dtype in (torch.float32, torch.float64):
        return CKKSTensor(result.cipher, result.batch, result.row_shape, meta.dtype)
    return result


def _own(frame: FrameType) -> Any:
    """`self` of a running function. Before Python 3.13 its locals come as a copy that the frame keeps, and with it
    tensors that the function has let go: it is emptied.
    """
    found = frame.f_locals
    own = found.get("self")
    if type(found) is dict:
        found.clear()
    return own


def layer_here() -> str | None:
    """The dotted name and type of the innermost nn.Module whose forward is running, within the outermost one."""
    inner = outer = None
    frame = sys._getframe(1)
    while frame is not None:
        module = _own(frame) if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            inner = inner if inner is not None else module
            outer = module if any(m is inner for m in module.modules()) else outer
        frame = frame.f_back
    if inner is None or outer is None:
        return None
    name = next((n for n, m in outer.named_modules() if m is inner), "")
    return f"layer '{name}' ({type(inner).__name__})" if name else f"layer {type(inner).__name__}"


def located(error: SectorchError) -> SectorchError:
    layer = layer_here()
    if layer is None or getattr(error, "layer", None):
        return error
    found = type(error)(f"{layer}: {error}")
    found.layer = layer
    return found


def wrap(like: CKKSTensor, cipher: Cipher, shape: Any) -> CKKSTensor:
    """A handler's result: the batch and dtype of `like`, the ciphertexts' shape without the batch."""
    return CKKSTensor(cipher, like.batch, tuple(shape), like.float_dtype)


set_dispatch(call)
