"""SecretTensor, the base class of tensors with secret content: a shape and a dtype, but no storage.

`__torch_function__` hands every torch call to `dispatch.call`; `__torch_dispatch__` refuses what bypasses it. A plain
subclass of `torch.Tensor` would run `relu` on raw shares without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from ..choreography import Party
from ..config import Scheme as Scheme
from ..errors import SecretAccessError, UnsupportedOpError
from ..session import Session

_dispatch: Callable[..., Any]


def set_dispatch(call: Callable) -> None:
    """Called by `dispatch.py` when it is imported: it needs the subclasses of SecretTensor."""
    global _dispatch
    _dispatch = call


def _public(x: Any) -> Any:
    """An operand of a numpy function as torch takes it: an array as a tensor, a scalar as a Python number."""
    if isinstance(x, np.generic):
        return x.item()
    return torch.as_tensor(x) if isinstance(x, np.ndarray) else x


def dtype_of(x: Any) -> torch.dtype:
    """The dtype that a secret tensor has for torch."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype


def bypassed_dispatch(func: Any) -> str:
    """The text of an error for code whose calls do not reach the dispatch."""
    name = str(getattr(func, "__name__", func)).partition(".")[0].strip("_")
    asked = "a Python number was asked for" if name == "local_scalar_dense" else f"'{name}' was called"
    return (
        f"{asked} on the content of a secret tensor, by code that does not pass its calls on to Python (torch.func, "
        f"torch.jit, C++ of a library); nothing was computed. Call torch's functions on the tensor itself: "
        f"sectorch.supported_ops() lists what works"
    )


class SecretTensor(torch.Tensor):
    """The base of SharedTensor and PrivateTensor. Its content can be reached by declared operations alone."""

    session: Session
    party: Party
    scheme: Scheme
    passes_as: type | None = None
    """The value of `x.__class__` inside `compile_mode.as_plain`."""
    differentiable = False
    """Whether autograd records it. Such a class takes the calls in which its tensors meet others."""

    def __init__(self, *_args, **_kwargs):
        super().__init__()

    @property
    def __class__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.passes_as or type(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        called: Any = cls._handle_call
        if torch.compiler.is_dynamo_compiling():  # torch.compile does not follow the call
            called = torch.compiler.disable(called)
        return called(func, types, args, kwargs or {})

    @classmethod
    def _handle_call(cls, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if any(getattr(kind, "differentiable", False) for kind in types):
            return NotImplemented
        return _dispatch(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedOpError(bypassed_dispatch(func))

    def on_meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype without content, on which torch itself computes what a call gives."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Run torch's function of the same name, as in `array + secret`, with arrays as public tensors."""
        computed = getattr(torch, "pow" if ufunc is np.power else str(ufunc.__name__), None)
        if computed is None or method != "__call__" or kwargs:
            raise UnsupportedOpError(
                f"numpy.{ufunc.__name__} of a secret tensor: use torch's, or torch.from_numpy(array)"
            )
        return computed(*(_public(x) for x in inputs))

    def __format__(self, spec: str) -> str:
        """`repr` in an f-string. A format for numbers would need the content and is refused."""
        return repr(self) if not spec else super().__format__(spec)

    def __dir__(self) -> list[str]:
        """The names for completion in a notebook, without a call of torch."""
        return sorted({*dir(type(self)), *self.__dict__})

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise SecretAccessError(
            f"a {type(self).__name__} cannot be pickled, copied or saved: it would carry secrets; .reveal() gives the "
            f"values to who may know them, and sectorch.Checkpoints keeps what nobody may"
        )

    def __deepcopy__(self, memo) -> NoReturn:
        self.__reduce_ex__(2)

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)
