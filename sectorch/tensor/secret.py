"""What every tensor of secrets has in common: a shape, a dtype, no storage, and calls that the dispatch table takes.

`__torch_function__` hands every torch call to the dispatch table; `__torch_dispatch__` refuses whatever got past it. A
plain subclass of `torch.Tensor` would run `relu` on raw shares without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..choreography import Party
from ..errors import SecretAccessError, UnsupportedOpError
from ..ring.scheme import Scheme as Scheme
from ..session import Session

_dispatch: Callable[..., Any]


def set_dispatch(call: Callable) -> None:
    """The dispatch table plugs itself in here when it is imported."""
    global _dispatch
    _dispatch = call


class SecretTensor(torch.Tensor):
    """What SharedTensor and PrivateTensor have in common: no way to the content but the declared ones."""

    session: Session
    party: Party
    scheme: Scheme
    differentiable = False
    """Whether autograd follows it; then it takes the calls in which others of these meet it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(getattr(kind, "differentiable", False) for kind in types):
            return NotImplemented
        return _dispatch(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedOpError(
            f"{func} reached the content of a {cls.__name__} past the dispatch table; nothing was computed. "
            f"sectorch.supported_ops() lists what works"
        )

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise SecretAccessError(f"a {type(self).__name__} cannot be pickled, copied or saved: it would carry secrets")

    def __deepcopy__(self, memo) -> NoReturn:
        self.__reduce_ex__(2)

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)
