"""What a protocol declares: its name, its roles, where it comes from, and every message that it may send."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

import torch

from ..errors import ArgumentError, UndeclaredMessageError
from .accepted import check_arguments, taken_by
from .roles import STAR, Roles


@dataclass(frozen=True)
class Message:
    """One declared message of a protocol: who sends what to whom, and what hides it from the receiver.

    `shows` is empty where the receiver sees uniform bits only, and otherwise says what the receiver learns. `opens` is
    the role of whoever learns a value by this message although another one receives it: a half that goes to the learner
    under a mask, by way of S; `outermost`: only where no other protocol sends it, and says what it is.
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
    """What a protocol declares: its name, where it comes from, and every message that it may send."""

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
"""They call what a program hands them."""


def in_package(code: Any) -> bool:
    """Whether code is this package's, which keeps to what its protocols say of their masks."""
    file = getattr(code, "co_filename", "")
    return file.startswith(_PACKAGE) and (file == __file__ or not file.startswith(_CALLS))


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.Size, int, float, bool, str, bytes, type(None)))
_OURS = frozenset(("sectorch", "torch", "numpy", "cryptography")) | sys.stdlib_module_names


def _foreign(value: Any, depth: int = 4) -> bool:
    """Whether an argument of a protocol computes by other code than this package's and torch's, which its messages
    may not hide: a function, or an object with operators of its own, also within others."""
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
        ours = code.co_filename.startswith((_PACKAGE, _TORCH))
        return not ours or (depth > 0 and any(callable(v) and _foreign(v, depth - 1) for v in inside))
    named = value if isinstance(value, type) else kind
    if named.__module__.split(".")[0] not in _OURS:
        return True
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


class Declared(Protocol):
    """A protocol that a call is in."""

    ours: bool

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: Any) -> None: ...


class Declaring(Protocol):
    """What a protocol needs of the call that it runs in (`choreography.Net`)."""

    lock: RLock
    origins: Any

    def declared(self, spec: ProtocolSpec) -> Declared: ...


def protocol(name: str, source: str, messages: Iterable[Message] = (), roles: Roles = STAR) -> Callable:
    """Declare the decorated function `f(net, ...)` as a protocol. A message that is not listed here cannot be sent.

    Args:
        roles: who takes part; Q, A, S and the dealer D of secure inference unless named.

    Raises:
        TopologyError: a message between roles that have no edge.
        ArgumentError: of a call, before anything is drawn or sent: a parameter that is annotated with what protocols
            take (`Located`, `Shares`, `Masked`) was given something else.
    """

    if isinstance(messages, Message):
        raise ArgumentError(f"the messages of a protocol are a list, [Message({messages.label!r}, ...)]")

    def decorate(f):
        summary = (f.__doc__ or "").strip().split("\n")[0]
        ours = in_package(getattr(f, "__code__", None))
        spec = PROTOCOLS[name] = ProtocolSpec(name, source, tuple(messages), summary, roles)

        @functools.cache  # read at the first call: annotations may name what is defined further down
        def takes():
            return taken_by(f)

        @functools.wraps(f)
        def run(net: Declaring, *args, **kwargs):
            check_arguments(name, takes(), args, kwargs)
            called = ours and in_package(sys._getframe(1).f_code)
            with net.lock, net.declared(spec) as entered:
                if net.origins is not None and called:
                    called = not any(map(_foreign, (*args, *kwargs.values())))
                entered.ours &= called
                return f(net, *args, **kwargs)

        vars(run)["spec"] = spec
        return run

    return decorate
