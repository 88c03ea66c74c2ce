"""Tensors of several parties: their sum at Q (`aggregate`), and the shape of an owner's tensor (`announced`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import reduce
from math import prod
from typing import Any

import torch

from ..backend import Backend, RaisedFlags, Value
from ..choreography import Party
from ..choreography.located import run_in
from ..errors import ArgumentError, SessionMismatchError, ShapeError
from ..ring import HEADROOM_BITS, decode
from ..session import Session, default_session
from .secret import SecretTensor
from .shared import Opening, SharedTensor, refuse_infinite, round_shares, unwrap_openings
from .table import LARGEST


def _check_sum_fits(backend: Backend, shares: Value, x: SharedTensor, scale_bits: int, times: int) -> None:
    """Flag entries of x, rounded to so many fraction bits, that `times` such terms could take out of the ring."""
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
            shares, bits = round_shares(backend, x.shares, x.scale_bits, x.scheme)
            calls.append((net, backend, shares))
            scales.append(bits)
        scale, terms = max(scales), []
        for (net, backend, shares), bits, x in zip(calls, scales, tensors, strict=True):
            with run_in(net):
                _check_sum_fits(backend, shares, x, bits, len(tensors) << scale - bits)
                terms.append((backend, shares << scale - bits, (*x.flags, *net.state(RaisedFlags))))
        # An answering party does not know the others' flags: all sums are guarded, or none.
        net, backend, _ = calls[0]
        drawn = None if noise is None else lambda shape: noise(shape, scale)
        opened, right = backend.aggregate(terms, guarded, drawn)
        right = None if right is None else net.read(right, first.session.Q)
        elements = unwrap_openings(Opening(net.read(opened, first.session.Q), right))
    with torch._C.DisableTorchFunctionSubclass():
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
        dtype = torch.int64 if dtype == torch.bool and len(tensors) > 1 else dtype  # a sum of yes and no is a count
    return torch.empty_like(elements, dtype=dtype) if elements.is_meta else decode(elements, scale, dtype)


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_DIMS = 12


def announced(
    x: torch.Tensor | None, *, owner: Any, session: Session | None = None, party: Party | None = None
) -> torch.Tensor:
    """x at its owner, and at every other party a tensor without content. The shape and the dtype of x become public.

        rows = sectorch.announced(parties.inputs.get("H1"), owner="H1", session=session)
        shared = sectorch.share(rows, owner="H1", session=session)

    Args:
        x: the owner's tensor, of at most 12 dimensions; ignored at other parties.
        owner, session, party: as of `sectorch.share`.

    Between processes 2 rounds (1 if S is the owner), and 112 bytes from the owner to S and from S to each party.

    Raises:
        ArgumentError: no tensor at its owner, an owner that is not of the session, or a rehearsal, in which nobody
            has an input.
        ShapeError: the owner's message is not a shape.
    """
    session = session or default_session()
    party = session.answering_party(party)
    (holder,) = session.parties_named(owner, party)
    here = session.present(holder)
    if here and (not isinstance(x, torch.Tensor) or isinstance(x, SecretTensor) or x.is_meta):
        raise ArgumentError(f"{holder.name}, which is here, announces no plain tensor: a {type(x).__name__}")
    if here and x is not None and (x.dim() > _DIMS or x.dtype not in _DTYPES):
        raise ArgumentError(f"{holder.name} announces {x.dim()} dimensions of {x.dtype}, which cannot be shared")
    if here and x is not None and session.complete:
        return x
    message = torch.zeros(_DIMS + 2, dtype=torch.int64)
    if here and x is not None:
        message = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *x.shape, *(_DIMS - x.dim()) * (0,)])
    received = session.agreement.broadcast(party, "announce", holder, message)
    if received.is_meta:
        raise ArgumentError(f"the shape of what {holder.name} brings is not known in a rehearsal")
    kind, count, *sizes = received.tolist()
    # The message comes from another party: a false one may not make this party allocate a tensor of any size.
    if not (0 <= kind < len(_DTYPES) and 0 <= count <= _DIMS and min(sizes) >= 0 and prod(sizes[:count]) < LARGEST):
        raise ShapeError(f"{holder.name} announced what is no shape: {sizes[: max(0, count)]}")
    like = torch.empty(sizes[:count], dtype=_DTYPES[kind], device="meta")
    session.agreement.note(party, "announced", holder.name, like)
    return x if here and x is not None else like
