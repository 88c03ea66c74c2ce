"""A model's weights become an answering party's private tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from ..choreography import Party, Phase
from ..errors import FixedPointRangeError, NonFiniteError
from ..ring import check_encodable
from ..session import Session
from ..tensor import PrivateTensor, Scheme, private_tensor
from ..tensor.infinity import beyond
from .accept import Given
from .trace import CONSTANT, Trace

LARGE_MODEL, LARGE_WEIGHT = 1 << 28, 1 << 20
"""Elements. The large weights of a large model are not kept in several forms (`mpc.star.streamed`): in one process 20
bytes an element in place of 60, or 24 where something was folded into it."""


def plain_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The floating-point parameters and buffers of a module by name; a tied one has its first name only."""
    named = {id(t): (name, t.detach()) for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    return {name: t for name, t in reversed(named.values()) if t.is_floating_point()}


def bind(
    module: nn.Module,
    session: Session,
    party: Party,
    scheme: Scheme,
    dtype: torch.dtype,
    given: Mapping[int, Given],
) -> tuple[nn.Module, dict[str, PrivateTensor]]:
    """A copy of `module` whose floating-point parameters and buffers are private to `party`, and these by name.

    Args:
        module: in float64, so that folding and encoding round once.
        given: by id of the module's tensors, the user's. They pass for tensors of the same dtype, and stand for them
            wherever the forward has them from.
        dtype: what those pass for that are not among them.

    Integer and boolean buffers (position indices, attention masks) are part of the architecture and stay public, and so
    is a mask of floating-point numbers: a buffer of zeros and of what is beyond the range of fixed point.

    Raises:
        NonFiniteError, FixedPointRangeError: naming the parameter. A buffer is checked where it is used; the statistics
            of a BatchNorm, which enter as a factor and a summand, need to be finite.
    """
    named = {id(t): name for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    meta = not session.present(party)
    # What becomes private is not copied; a public buffer is, since a forward may write into it.
    memo = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}
    large = is_large(memo.values())
    bound = copy.deepcopy(module, memo)
    made: dict[int, PrivateTensor] = {}
    for layer in bound.modules():
        stores: list[Any] = [layer._parameters, layer._buffers]
        for store in stores:
            for name, tensor in list(store.items()):
                if tensor is None or not tensor.is_floating_point():
                    continue
                if store is layer._buffers and is_public_mask(tensor, scheme):
                    store[name] = tensor.detach().to(dtype)
                    continue
                if id(tensor) not in made:
                    value = tensor.detach().to("meta") if meta else tensor.detach()
                    label = f"weight '{named.get(id(tensor), name)}'"
                    user = given.get(id(tensor), Given(dtype, ref(tensor)))
                    made[id(tensor)] = private_weight(
                        value, session, party, scheme, label, user.dtype, large=large,
                        statistic=is_normalising(layer), read=store is layer._parameters,
                    )  # fmt: skip
                    made[id(tensor)]._is_param = isinstance(tensor, nn.Parameter)
                    made[id(tensor)].stands_for = ref(tensor), user.tensor
                store[name] = made[id(tensor)]
        if isinstance(layer, nn.RNNBase):
            layer.__dict__["_flat_weights"] = [getattr(layer, name) for name in layer._flat_weights_names]
    return bound, {named[i]: tensor for i, tensor in made.items() if i in named}


def is_large(weights: Iterable[torch.Tensor]) -> bool:
    """Whether a model of these weights is."""
    return sum(w.numel() for w in weights) >= LARGE_MODEL


def is_normalising(layer: nn.Module) -> bool:
    """Whether a layer's tensors are a BatchNorm's, which are finite and of any size."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)


def private_weight(
    x: torch.Tensor,
    session: Session,
    party: Party,
    scheme: Scheme,
    label: str,
    dtype: torch.dtype,
    *,
    statistic: bool,
    large: bool,
    read: bool = True,
) -> PrivateTensor:
    """A private tensor that lasts as long as the session.

    Args:
        x: float64 (a folded one of a large model may be float32), or of a shape only where its owner is absent.
        statistic: whether it is of a BatchNorm: finite, of any size.
        large: whether the model is (`is_large`).
        read: whether the forward is known to read it; else it is checked where it is read.

    Raises:
        NonFiniteError, FixedPointRangeError: naming it.
    """
    if statistic or not read:
        if statistic:
            check_encodable(x if x.is_meta else torch.where(torch.isfinite(x), 0.0, x), scheme.frac_bits, label)
        owned = session.setup(party).own(party, x, Phase.SETUP, label)
        made = PrivateTensor(owned, session, party, scheme, dtype, label)
    else:
        try:
            made = private_tensor(x, session, party, scheme, label, dtype)
        except (NonFiniteError, FixedPointRangeError) as error:
            if not _is_mask(x, scheme):
                raise
            raise type(error)(
                f"{label} holds what stands for minus infinity, as an attention mask does, and no weight is so large; "
                f"keep the mask as a buffer of torch.bool, for x.masked_fill(~mask, float('-inf'))"
            ) from None
    made.lasting = True
    made.streamed = large and x.numel() >= LARGE_WEIGHT
    return made


def _is_mask(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether it consists of negative numbers beyond the range and of small ones."""
    far = beyond(scheme, x)
    return far is not None and bool((far & (x < 0) | ~far & (x.abs() < 2.0**16)).all())


def is_public_mask(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether a buffer holds zeros and numbers beyond the range, and nothing else: no weight does."""
    far = beyond(scheme, x)
    return far is not None and bool((far | (x == 0)).all())


class Weights:
    """What the names of a program stand for in a session: private tensors, each made and sent once.

    Args:
        own: those of the module by name; passes make further ones, which are named by what they were made of.
        dtype: what those pass for of which a program does not say it. A folded weight is rounded to what it passes for
            (or to float32, if that is finer): so that a model file computes the same numbers as the model.
    """

    def __init__(
        self,
        own: dict[str, PrivateTensor],
        session: Session,
        party: Party,
        scheme: Scheme,
        dtype: torch.dtype,
    ):
        self._made = dict(own)
        with torch._C.DisableTorchFunctionSubclass():
            self._large = is_large(own.values())
        self._session, self._party, self._scheme, self._dtype = session, party, scheme, dtype
        self._lock = threading.Lock()

    def of(self, program: Trace) -> dict[str, torch.Tensor]:
        """The tensors that a program reads; public constants are as they are.

        Raises:
            NonFiniteError, FixedPointRangeError: a folded weight that fixed point cannot hold, by its name.
        """
        with self._lock:
            return {name: self._tensor(program, name) for name in program.values}

    def _tensor(self, program: Trace, name: str) -> torch.Tensor:
        value = program.values[name]
        if name.startswith(CONSTANT) or not value.is_floating_point():
            return value
        if name not in self._made:
            dtype = program.dtypes.get(name, self._dtype)
            value = value.detach().to(torch.promote_types(dtype, torch.float32))
            if self._large:
                program.values[name] = value  # nobody needs what the rounding took away
            else:
                value = value.to(torch.float64)
            value = value if self._session.present(self._party) else value.to("meta")
            self._made[name] = private_weight(
                value, self._session, self._party, self._scheme, f"weight '{name}'", dtype,
                statistic=False, large=self._large,
            )  # fmt: skip
        return self._made[name]
