"""Declarations of protocols: the `protocol` decorator, with the name, roles, source and messages of a protocol."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, UndeclaredMessageError
from .located import Located
from .roles import STAR, Roles

# Checks of arguments. A refusal names the expected class and how to make a value of it.
#
# A class that protocols take has an attribute `made_by`, which says how its values are made. A parameter of a protocol
# that is annotated with such a class takes no other value.


def accepted_types(f: Callable) -> tuple[tuple[str, type | None], ...]:
    """The parameters of a protocol after its net, each with the class that it takes; None where any value may be."""
    try:
        hints = typing.get_type_hints(f)
    except (NameError, TypeError, AttributeError):  # names that are there for the type checker only
        hints = {}
    kinds = ((name, hints.get(name)) for name in list(inspect.signature(f).parameters)[1:])
    return tuple((name, kind if hasattr(kind, "made_by") else None) for name, kind in kinds)


def check_arguments(protocol: str, takes: tuple[tuple[str, type | None], ...], args: tuple, named: dict) -> None:
    """Raise ArgumentError where an argument is of another class than its parameter takes."""
    for (name, kind), value in zip(takes, args, strict=False):
        if kind is not None and type(value) is not kind and not isinstance(value, kind):
            raise _refusal(f"protocol '{protocol}' takes {kind.__name__} as {name}", kind, value)
    if named:
        for name, kind in takes:
            if kind is not None and name in named and not isinstance(named[name], kind):
                raise _refusal(f"protocol '{protocol}' takes {kind.__name__} as {name}", kind, named[name])


def check_located(value: Any, doing: str) -> None:
    """Raise ArgumentError unless the value is located."""
    if type(value) is not Located:
        raise _refusal(f"{doing} takes a located value", Located, value)


def check_content(value: Any, here: bool) -> None:
    """Raise ArgumentError for a value that cannot be an input: one that parties hold already, or a list, or None.

    None is enough where the party is not in this process.
    """
    if hasattr(type(value), "made_by"):
        raise ArgumentError(
            f"net.own brings in what has no party yet, got {_kind_of(value)}, which protocols take as it is"
        )
    if (value is None and here) or isinstance(value, (str, list, tuple, set)):
        way = "" if value is None else "torch.as_tensor(x) makes one of numbers; "
        raise ArgumentError(
            f"net.own brings in a tensor, got {_kind_of(value)}; {way}of a party that is elsewhere, the shape is "
            f"enough: torch.empty(shape, dtype=torch.int64)"
        )


def plain(x: torch.Tensor) -> torch.Tensor:
    """The content of a tensor as a plain tensor. A class of its own could change what is computed, and omit a mask.

    Raises:
        ArgumentError: the tensor's class defines where its content is.
    """
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if not torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python):
            return x.as_subclass(torch.Tensor)
    raise ArgumentError(f"a {kind.__name__} computes as its class says; give its content as a plain torch.Tensor")


def _refusal(what: str, kind: type, value: Any) -> ArgumentError:
    way = kind.made_by  # pyright: ignore[reportAttributeAccessIssue]  `accepted_types` looks for it
    if value is None:
        way = "a protocol without a return gives None"
    elif kind is Located and hasattr(type(value), "made_by"):
        way = "reveal(net, x) makes a value at Q of Shares"
    return ArgumentError(f"{what}, got {_kind_of(value)}; {way}")


def _kind_of(value: Any) -> str:
    """A description of a value without its content."""
    if isinstance(value, torch.Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return repr(value) if type(value) is Located else type(value).__name__ if value is not None else "None"


@dataclass(frozen=True)
class Message:
    """One declared message of a protocol.

    Attributes:
        label: its name in the protocol.
        src, dst: the roles of sender and receiver.
        mask: what hides the content from the receiver.
        shows: what the receiver learns; empty where it sees uniform bits only.
        opens: the role that learns a value by this message although another role receives it: a share that goes to the
            learner under a mask, through S.
        outermost: `opens` holds only where no other protocol runs this one.
    """

    label: str
    src: str
    dst: str
    mask: str
    shows: str = ""
    opens: str = ""
    outermost: bool = False


@dataclass(frozen=True)
class ProtocolSpec:
    """The declaration of a protocol: its name, its source and every message that it may send."""

    name: str
    source: str
    messages: tuple[Message, ...]
    summary: str = ""
    roles: Roles = STAR

    def __post_init__(self):
        for message in self.messages:
            self.roles.check_edge(message.src, message.dst)

    @property
    def leaks(self) -> bool:
        return any(m.shows for m in self.messages)

    def message(self, label: str) -> Message:
        for message in self.messages:
            if message.label == label:
                return message
        raise UndeclaredMessageError(
            f"protocol '{self.name}' sent '{label}', which it does not declare; it declares "
            f"{', '.join(m.label for m in self.messages) or 'no message'}"
        )


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_CALLS = (f"{_PACKAGE}session.py", f"{_PACKAGE}choreography{os.sep}")
"""Files whose code calls functions that a user's program passes in, so that their frames prove nothing."""


def in_package(code: Any) -> bool:
    """Whether code is this package's, whose messages are masked as their protocols declare."""
    file = getattr(code, "co_filename", "")
    return file.startswith(_PACKAGE) and (file == __file__ or not file.startswith(_CALLS))


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.Size, int, float, bool, str, bytes, type(None)))
_OURS = frozenset(("sectorch", "torch", "numpy", "cryptography")) | sys.stdlib_module_names


def _foreign(value: Any, depth: int = 4) -> bool:
    """Whether an argument of a protocol computes by other code than this package's and torch's.

    Such code, a function or an object with operators of its own, also inside other values, may send unmasked values.
    """
    kind = type(value)
    if kind in _PLAIN or (depth == 0 and kind.__module__.startswith("sectorch.")):
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_foreign(v, depth) for v in value)
    if isinstance(value, dict):
        return any(_foreign(v, depth) for v in value.values())
    if isinstance(value, functools.partial):
        return any(_foreign(v, depth) for v in (value.func, value.args, value.keywords))
    if (code := getattr(value, "__code__", None)) is not None:
        inside = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_full(cell)]
        from_package = code.co_filename.startswith((_PACKAGE, _TORCH))
        return not from_package or (depth > 0 and any(callable(v) and _foreign(v, depth - 1) for v in inside))
    named = value if isinstance(value, type) else kind
    if named.__module__.split(".")[0] not in _OURS:
        return True
    # What has a runtime (a net, a session) reaches everything; it sends by declared steps only.
    if isinstance(value, type) or not named.__module__.startswith("sectorch.") or hasattr(value, "runtime"):
        return False
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    held = [v for name in slots if (v := _held(value, name)) is not None]
    return any(_foreign(v, depth - 1) for v in (*held, *getattr(value, "__dict__", {}).values()))


def _held(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


PAYLOADS = (torch.int64, torch.int32, torch.uint8)
"""The types of tensors that messages carry, in the order of their numbers in a frame."""

PROTOCOLS: dict[str, ProtocolSpec] = {}
"""Every protocol by name. Filled by the `protocol` decorator; documentation and tests read it."""


def protocol(name: str, source: str, messages: Iterable[Message] = (), roles: Roles = STAR) -> Callable:
    """Declare the decorated function `f(net, ...)` as a protocol. It can send only the messages that are listed here.

    Args:
        name: of the protocol, unique in the process.
        source: the paper and figure, or the module that explains it.
        messages: that it may send.
        roles: that take part; Q, A, S and the dealer D of secure inference unless given.

    Raises:
        TopologyError: a message is between roles that have no edge.
        ArgumentError: by a call, before anything is drawn or sent: an argument is of another class than its parameter
            is annotated with (`Located`, `Shares`, `Masked`).
    """

    if isinstance(messages, Message):
        raise ArgumentError(f"the messages of a protocol are a list, [Message({messages.label!r}, ...)]")

    def decorate(f):
        summary = (f.__doc__ or "").strip().split("\n")[0]
        from_package = in_package(getattr(f, "__code__", None))
        spec = PROTOCOLS[name] = ProtocolSpec(name, source, tuple(messages), summary, roles)

        @functools.cache  # at the first call, since annotations may name classes that are defined further down
        def takes():
            return accepted_types(f)

        @functools.wraps(f)
        def run(net: Any, *args, **kwargs):
            check_arguments(name, takes(), args, kwargs)
            called = from_package and in_package(sys._getframe(1).f_code)
            with net.lock, net.declared(spec) as entered:
                if net.origins is not None and called:
                    called = not any(map(_foreign, (*args, *kwargs.values())))
                entered.from_package &= called
                return f(net, *args, **kwargs)

        vars(run)["spec"] = spec
        return run

    return decorate
