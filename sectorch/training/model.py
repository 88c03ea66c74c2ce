"""A module whose parameters nobody knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..choreography import Party
from ..errors import ArgumentError
from ..nn.accept import refuse_scattered
from ..session import Session
from ..tensor import Scheme, share_tensor
from .scale import parameter_bits
from .tensor import DifferentiableTensor


def shared(
    module: nn.Module, *, owner: Any = "Q", session: Session | None = None, party: Party | None = None,
    scheme: Scheme | None = None,
) -> nn.Module:  # fmt: skip
    """The module with parameters and buffers in shares, to be trained as any other; it is changed itself.

    Args:
        module: with initial values that its owner knows, and that are no secret of training: after a step nobody
            knows the parameters.
        owner: the party whose initial values these are: "Q", "A" or "S".
        session, party, scheme: as of `sectorch.share`.

    Raises:
        ArgumentError: no module, a DataParallel, or one that is shared already.
        FixedPointRangeError, NonFiniteError, DtypeError: a parameter that cannot be shared; nothing was changed.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"shared() takes an nn.Module, got a {type(module).__name__}")
    refuse_scattered(module)
    limit = 2.0 ** parameter_bits(scheme or Scheme())
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
    return module


def _parameter(made: dict[int, Any], tensor: torch.Tensor) -> Any:
    made[id(tensor)] = nn.Parameter(made[id(tensor)], tensor.requires_grad)
    return made[id(tensor)]
