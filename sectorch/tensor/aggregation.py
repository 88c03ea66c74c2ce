"""The sum of several answering parties' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import reduce

import torch

from ..backend import Backend, Value
from ..choreography.located import running
from ..errors import ArgumentError, SessionMismatchError, ShapeError
from ..ring import HEADROOM_BITS, decode
from .infinity import refuse_infinite
from .shared import Opening, SharedTensor, rounded, unwrapped


def _hold(backend: Backend, shares: Value, x: SharedTensor, scale_bits: int, times: int) -> None:
    """Raise a flag where so many times x, rounded to so many fraction bits, may leave the ring and does."""
    bound = x.bound and x.bound / 2.0 ** (x.scale_bits - scale_bits) + 1
    if bound and bound * times > 2.0**HEADROOM_BITS and x.scheme.range_check:
        backend.flag_outside(shares, HEADROOM_BITS - (times - 1).bit_length())


def aggregate(
    tensors: Sequence[SharedTensor], noise: Callable[[Sequence[int], int], torch.Tensor] | None = None
) -> torch.Tensor:
    """The sum of several answering parties' tensors, learned by Q, who learns nothing else about the summands.

    Args:
        tensors: one of each answering party of one session, all of one shape. PrivHFL, Figure 5 (Pi_Agg). Of a single
            one the sum is the tensor itself, as with `reveal`.
        noise: what S adds to the sum before Q gets it: a function of a shape and a number of fraction bits f that S
            alone calls, for int64 multiples of 2^-f, such as `functools.partial(sectorch.dp.on_grid, sigma)`. Whether
            the sum left the number format's range is not noised.

    Rounds 2, bytes 8 per element and answering party, and 8 per element from S to Q.

    Raises:
        SessionMismatchError, ArgumentError, ShapeError: nothing was sent.
    """
    if not tensors or not all(isinstance(x, SharedTensor) for x in tensors):
        raise ArgumentError("aggregate() takes a non-empty list of SharedTensors")
    first = tensors[0]
    if any(x.session is not first.session for x in tensors):
        raise SessionMismatchError("aggregate() adds tensors of one session; these are of several")
    if len({first.session.answering_party(x.party) for x in tensors}) < len(tensors):
        raise ArgumentError("aggregate() takes one tensor of each answering party; add a party's own tensors up first")
    if any(x.shares.shape != first.shares.shape for x in tensors):
        raise ShapeError(f"aggregate() needs equal shapes, got {[tuple(x.shares.shape) for x in tensors]}")
    for x in tensors:
        refuse_infinite(x, "aggregate()")
    calls, scales, guarded = [], [], any(x.scheme.range_check for x in tensors)
    with ExitStack() as open_calls:
        for x in tensors:
            net = open_calls.enter_context(x.session.call(x.party))
            backend = x.session.backend(net, x.scheme)
            shares, bits = rounded(backend, x.shares, x.scale_bits, x.scheme)
            calls.append((net, backend, shares))
            scales.append(bits)
        scale, terms = max(scales), []
        for (net, backend, shares), bits, x in zip(calls, scales, tensors, strict=True):
            with running(net):
                _hold(backend, shares, x, bits, len(tensors) << scale - bits)
                terms.append((backend, shares << scale - bits, (*x.flags, *net.raised)))
        # An answering party does not know of the others' flags: all are guarded, or none.
        net, backend, _ = calls[0]
        drawn = None if noise is None else lambda shape: noise(shape, scale)
        opened, right = backend.aggregate(terms, guarded, drawn)
        right = None if right is None else net.read(right, first.session.Q)
        elements = unwrapped(Opening(net.read(opened, first.session.Q), right))
    with torch._C.DisableTorchFunctionSubclass():
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
        dtype = torch.int64 if dtype == torch.bool and len(tensors) > 1 else dtype  # a sum of yes and no is a count
    return torch.empty_like(elements, dtype=dtype) if elements.is_meta else decode(elements, scale, dtype)
