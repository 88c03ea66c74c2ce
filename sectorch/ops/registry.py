"""Operations from a user's own file: `@sectorch.register_op(torch.special.entr, ...)`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnsupportedOpError
from ..tensor import SharedTensor
from ..tensor.table import SHARES, Context, row_of, spell


@dataclass(frozen=True)
class RegisteredOp:
    """The claims of a registered operation, which `sectorch.testing.check_op` tests.

    Attributes:
        reference: the function on plain float64 tensors.
        domain: the interval of its operands' elements.
        error: the largest absolute error there; a number, or a function of the reference's result.
        rounds: online rounds, for any number of elements; None for no claim.
        bytes: an upper bound of the online bytes per element of the result, for many elements; None for no claim.
    """

    reference: Callable
    domain: tuple[float, float]
    error: float | Callable
    rounds: int | None
    bytes: float | None


REGISTERED: dict[Any, RegisteredOp] = {}
"""By torch function."""


def register_op(
    func: Callable,
    *,
    error: float | Callable,
    domain: tuple[float, float] = (-math.inf, math.inf),
    reference: Callable | None = None,
    rounds: int | None = None,
    bytes: float | None = None,
    exact: bool = False,
    note: str = "",
    override: bool = False,
) -> Callable:
    """Decorate a function of SharedTensors: it is called for `func` on secret tensors from now on.

        @sectorch.register_op(torch.special.entr, domain=(2**-10, 1.0), error=1e-4)
        def entr(x):
            return -x * torch.log(x)

    The function takes what `func` takes, with `SharedTensor` and `PrivateTensor` for tensors, and gives a SharedTensor
    (or several). It is made of torch functions that have a handler, or of `x.backend` on `x.shares`. Models that call
    `func` are secured, explained, prepared and run by the reference as with any other operation, and `supported_ops`
    lists it.

    Args:
        func: a function of torch's, or of anybody's that goes through `__torch_function__`.
        error: the largest absolute error in the domain, as a number or a function of the result; 0 for an exact one.
        domain: the interval of the operands' elements in which the error holds.
        reference: the function on float64 tensors; by default `func` itself.
        rounds, bytes: its online cost, if it is to be held to it: rounds, and bytes per element of the result.
        exact: whether the result depends on the operands' ring elements alone, so that it goes through no series.
        note: for people, in `supported_ops()`.
        override: take a function that has a handler away from it, in every model of this process.

    Raises:
        ArgumentError: `func` is no function, or has a handler; an empty domain; a negative error.
    """
    if not callable(func):
        raise ArgumentError(f"register_op takes a torch function, got a {type(func).__name__}")
    if not domain[0] < domain[1]:
        raise ArgumentError(f"a domain goes from a number to a larger one, got {domain}")
    if not callable(error) and not error >= 0:
        raise ArgumentError(f"an error is at least 0, got {error}")

    def register(f: Callable) -> Callable:
        @functools.wraps(f)
        def handler(_context: Context, *args: Any, **kwargs: Any) -> Any:
            return _results(func, f(*args, **kwargs))

        own = inspect.signature(f)
        first = inspect.Parameter("_context", inspect.Parameter.POSITIONAL_ONLY)
        vars(handler)["__signature__"] = own.replace(parameters=[first, *own.parameters.values()])
        name = _free_name(getattr(func, "__name__", f.__name__), func)
        SHARES.implements(name, func, note=note, exact=exact, override=override)(handler)
        SHARES.rows[name].exact = exact
        REGISTERED[func] = RegisteredOp(reference or func, domain, error, rounds, bytes)
        return f

    return register


def _results(func: Callable, found: Any) -> Any:
    if isinstance(found, SharedTensor):
        return found
    if isinstance(found, (list, tuple)):
        return [_results(func, y) for y in found]
    raise UnsupportedOpError(
        f"the function registered for {spell(func)} gave a {type(found).__name__}; it has to give a SharedTensor"
    )


def _free_name(name: str, func: Callable) -> str:
    """The function's name, or with its module's where an operation of another function has it."""
    row = SHARES.rows.get(name)
    if row is None or row is row_of(func):
        return name
    return f"{getattr(func, '__module__', None) or 'torch'}.{name}"
