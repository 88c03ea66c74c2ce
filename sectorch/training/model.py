"""`sectorch.shared(module)`: a module whose parameters are in shares, to be trained."""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch
from torch import nn

from ..choreography import Party
from ..config import scheme_of
from ..errors import ArgumentError, UnsupportedOpError
from ..nn.weights import refuse_scattered
from ..session import Session
from ..tensor import Scheme, share_tensor
from ..tensor.compile_mode import as_plain
from .fixed_point import parameter_bits
from .tensor import DifferentiableTensor


def shared(
    module: nn.Module, *, owner: Any = "Q", session: Session | None = None, party: Party | None = None,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
) -> nn.Module:  # fmt: skip
    """Put a module's parameters and buffers in shares, in place, so that it can be trained as any other.

    Args:
        module: its initial values are known to its owner. After a step nobody knows the parameters.
        owner: the party whose initial values these are: "Q", "A" or "S".
        session, party, scheme: as of `sectorch.share`.

    Raises:
        ArgumentError: no module, a DataParallel, or one that is shared already; under `torch.inference_mode`.
        UnsupportedOpError: a lazy module that has not been run.
        FixedPointRangeError, NonFiniteError, DtypeError: a parameter that cannot be shared; nothing was changed.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"shared() takes an nn.Module, got a {type(module).__name__}")
    if torch.is_inference_mode_enabled():
        raise ArgumentError("a model that is shared under torch.inference_mode() has no gradients; share it outside")
    refuse_scattered(module)
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(p, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise UnsupportedOpError(f"'{name}' is uninitialised (a lazy module): run the module once in plain first")
    scheme = scheme_of("shared", scheme)
    limit = 2.0 ** parameter_bits(scheme)
    made: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DifferentiableTensor):
            raise ArgumentError(f"{name} is in shares already")
        if tensor.is_floating_point():
            content = share_tensor(
                tensor.detach(), owner=owner, session=session, party=party, scheme=scheme, name=name, limit=limit
            )
            made[id(tensor)] = DifferentiableTensor(content, tensor.requires_grad)
    for child in module.modules():
        for name, tensor in list(child._parameters.items()):
            if tensor is not None and id(tensor) in made:
                new = made[id(tensor)]
                child._parameters[name] = new if isinstance(new, nn.Parameter) else _parameter(made, tensor)
        for name, tensor in list(child._buffers.items()):
            if tensor is not None and id(tensor) in made:
                child._buffers[name] = made[id(tensor)]
        if child is module or not type(child).__module__.startswith("torch."):
            child.register_forward_pre_hook(_before_forward)
            child.register_forward_hook(_after_forward, always_call=True)
    return module


_running = threading.local()
"""The forwards that run in this thread, each with its `as_plain` context."""


def _before_forward(module: nn.Module, _args: Any) -> None:
    inside = as_plain(module)
    inside.__enter__()
    _running.stack = [*getattr(_running, "stack", []), (module, inside)]


def _after_forward(module: nn.Module, _args: Any, _result: Any) -> None:
    stack = getattr(_running, "stack", [])
    if any(entered is module for entered, _ in stack):  # a hook before ours may have raised
        while stack:
            entered, inside = stack.pop()
            inside.__exit__(None, None, None)
            if entered is module:
                break


def _parameter(made: dict[int, Any], tensor: torch.Tensor) -> Any:
    made[id(tensor)] = nn.Parameter(made[id(tensor)], tensor.requires_grad)
    return made[id(tensor)]
