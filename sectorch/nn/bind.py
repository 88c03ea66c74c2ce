"""A model's weights become an answering party's private tensors."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..errors import ArgumentError
from ..session import Session
from ..tensor import Scheme, private_tensor


def bind(module: nn.Module, session: Session, party: Party, scheme: Scheme, dtype: torch.dtype) -> nn.Module:
    """A copy of `module` whose floating-point parameters and buffers are private to `party`.

    Args:
        module: in float64, so that folding and encoding round once.
        dtype: what the tensors pass for: the dtype of the user's model.

    Integer and boolean buffers (position indices, attention masks) are part of the architecture and stay public.

    Raises:
        NonFiniteError, FixedPointRangeError: naming the parameter.
    """
    named = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    meta = not session.present(party)
    memo = {id(t): t for t in (*module.parameters(), *module.buffers())}
    bound = copy.deepcopy(module, memo)
    made: dict[int, torch.Tensor] = {}
    for layer in bound.modules():
        for store in (layer._parameters, layer._buffers):
            for name, tensor in list(store.items()):
                if tensor is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in made:
                    value = tensor.detach().to("meta") if meta else tensor.detach()
                    label = f"weight '{named.get(id(tensor), name)}'"
                    made[id(tensor)] = private_tensor(value, session, party, scheme, label, dtype)
                    made[id(tensor)].lasting = True
                del store[name]
                layer.__dict__[name] = made[id(tensor)]
        if isinstance(layer, nn.RNNBase):
            layer.__dict__["_flat_weights"] = [getattr(layer, name) for name in layer._flat_weights_names]
        _refuse_hidden_weights(layer, made)
    return bound


def _refuse_hidden_weights(layer: nn.Module, made: dict[int, torch.Tensor]) -> None:
    """A parameter that is also kept in another attribute would be taken for a public constant: refuse it."""
    for name, value in layer.__dict__.items():
        if name.startswith("_") and name != "_flat_weights":
            continue
        for leaf in pytree.tree_leaves(value):
            if type(leaf) in (torch.Tensor, nn.Parameter) and id(leaf) in made:
                raise ArgumentError(
                    f"{type(layer).__name__}.{name} holds a parameter outside the parameter list, where it would count "
                    f"as public; register it as a parameter or a buffer only"
                )
