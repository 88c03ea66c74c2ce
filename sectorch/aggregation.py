"""The sum of several answering parties' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import reduce

import torch

from .choreography import Net
from .errors import ArgumentError, SessionMismatchError, ShapeError
from .located import running
from .mpc.guard import guard, unpadded
from .mpc.mask import open_masked
from .mpc.share import aggregate as aggregate_protocol
from .mpc.shares import Shares
from .mpc.within import raise_outside
from .ring import HEADROOM_BITS, decode
from .tensor import Opening, SharedTensor, rounded, unwrapped


def _hold(net: Net, shares: Shares, x: SharedTensor, scale_bits: int, times: int) -> None:
    """Raise a flag where so many times x, rounded to so many fraction bits, may leave the ring and does."""
    bound = x.bound and x.bound / 2.0 ** (x.scale_bits - scale_bits) + 1
    if bound and bound * times > 2.0**HEADROOM_BITS and x.scheme.range_check:
        masked = open_masked(net, shares)
        raise_outside(net, masked, masked.c, HEADROOM_BITS - (times - 1).bit_length(), fss=x.scheme.fss)


def aggregate(tensors: Sequence[SharedTensor]) -> torch.Tensor:
    """The sum of several answering parties' tensors, learned by Q, who learns nothing else about the summands.

    Args:
        tensors: one of each answering party of one session, all of one shape. PrivHFL, Figure 5 (Pi_Agg). Of a single
            one the sum is the tensor itself, as with `reveal`.

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
    terms, scales = [], []
    Q, shape = first.session.Q, first.shares.shape
    with ExitStack() as calls:
        for x in tensors:
            net = calls.enter_context(x.session.call(x.party))
            shares, bits = rounded(net, x.shares, x.scale_bits, x.scheme)
            terms.append((net, shares))
            scales.append(bits)
        scale = max(scales)
        for i, ((n, s), bits, x) in enumerate(zip(terms, scales, tensors, strict=True)):
            with running(n):
                _hold(n, s, x, bits, len(tensors) << scale - bits)
                terms[i] = n, s << scale - bits
        net, right = terms[0][0], None
        if any(x.scheme.range_check for x in tensors):  # an answering party does not know of the others' flags
            guarded = [guard(n, s, (*x.flags, *n.raised)) for (n, s), x in zip(terms, tensors, strict=True)]
            padded = [(n, s) for (n, _), (s, _) in zip(terms, guarded, strict=True)]
            keys = [key for _, key in guarded]
            total = aggregate_protocol(net, padded)
            with running(net):
                opened, right = unpadded(total, shape, *keys)
            right = net.read(right, Q)
        else:
            opened = aggregate_protocol(net, terms)
        elements = unwrapped(Opening(net.read(opened, Q), right))
    with torch._C.DisableTorchFunctionSubclass():
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
        dtype = torch.int64 if dtype == torch.bool and len(tensors) > 1 else dtype  # a sum of yes and no is a count
    return torch.empty_like(elements, dtype=dtype) if elements.is_meta else decode(elements, scale, dtype)
