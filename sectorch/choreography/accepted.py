"""What protocols and a net take: an argument of another kind is one line, with what makes it the kind that is meant.

A class that protocols take has an attribute `made_by`, which says that. A parameter of a protocol that is annotated
with such a class takes nothing else.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from .located import Located


def taken_by(f: Callable) -> tuple[tuple[str, type | None], ...]:
    """The parameters of a protocol after its net, and what each takes; None where its annotation does not say."""
    try:
        hints = typing.get_type_hints(f)
    except (NameError, TypeError, AttributeError):  # names that are there for the type checker only
        hints = {}
    kinds = ((name, hints.get(name)) for name in list(inspect.signature(f).parameters)[1:])
    return tuple((name, kind if hasattr(kind, "made_by") else None) for name, kind in kinds)


def check_arguments(protocol: str, takes: tuple[tuple[str, type | None], ...], args: tuple, named: dict) -> None:
    """Raise ArgumentError where one is of another kind."""
    for (name, kind), value in zip(takes, args, strict=False):
        if kind is not None and type(value) is not kind and not isinstance(value, kind):
            raise _refusal(f"protocol '{protocol}' takes {kind.__name__} as {name}", kind, value)
    if named:
        for name, kind in takes:
            if kind is not None and name in named and not isinstance(named[name], kind):
                raise _refusal(f"protocol '{protocol}' takes {kind.__name__} as {name}", kind, named[name])


def check_located(value: Any, doing: str) -> None:
    """Raise ArgumentError unless a net can do this with it: read it, send it."""
    if type(value) is not Located:
        raise _refusal(f"{doing} takes a located value", Located, value)


def check_content(value: Any, here: bool) -> None:
    """Raise ArgumentError for what no party brings in: a value that has parties already, a list, nothing. Of one that
    is not here nothing will do."""
    if hasattr(type(value), "made_by"):
        raise ArgumentError(
            f"net.own brings in what has no party yet, got {_said(value)}, which protocols take as it is"
        )
    if (value is None and here) or isinstance(value, (str, list, tuple, set)):
        way = "" if value is None else "torch.as_tensor(x) makes one of numbers; "
        raise ArgumentError(
            f"net.own brings in a tensor, got {_said(value)}; {way}of a party that is elsewhere, the shape is enough: "
            f"torch.empty(shape, dtype=torch.int64)"
        )


def plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose class has no say in what is computed with it: it could leave out a mask.

    Raises:
        ArgumentError: its content is where its class says.
    """
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if not torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python):
            return x.as_subclass(torch.Tensor)
    raise ArgumentError(f"a {kind.__name__} computes as its class says; give its content as a plain torch.Tensor")


def _refusal(what: str, kind: type, value: Any) -> ArgumentError:
    way = kind.made_by  # pyright: ignore[reportAttributeAccessIssue]  `taken_by` looks for it
    if value is None:
        way = "a protocol without a return gives None"
    elif kind is Located and hasattr(type(value), "made_by"):
        way = "reveal(net, x) makes a value at Q of Shares"
    return ArgumentError(f"{what}, got {_said(value)}; {way}")


def _said(value: Any) -> str:
    """Of which kind a value is, and no content."""
    if isinstance(value, torch.Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return repr(value) if type(value) is Located else type(value).__name__ if value is not None else "None"
