"""The shape of an input, told to all by its owner: so that only the owner has to have the tensor."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..choreography import Party
from ..default import default_session
from ..errors import ArgumentError, ShapeError
from ..session import Session
from .on_meta import LARGEST
from .secret import SecretTensor

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_DIMS = 12


def announced(
    x: torch.Tensor | None, *, owner: Any, session: Session | None = None, party: Party | None = None
) -> torch.Tensor:
    """x where its owner is; elsewhere a tensor without content of its shape and type, which are public from now on.

        rows = sectorch.announced(parties.inputs.get("H1"), owner="H1", session=session)
        shared = sectorch.share(rows, owner="H1", session=session)

    Args:
        x: the owner's tensor, of at most 12 dimensions; elsewhere it is not looked at.
        owner, session, party: as of `sectorch.share`.

    Where the parties are apart 2 rounds (1 of S), and 112 bytes from the owner to S and from S to each.

    Raises:
        ArgumentError: no tensor where its owner is, an owner that the session has not, or a rehearsal, in which
            nobody has an input.
        ShapeError: the owner said what no shape is.
    """
    session = session or default_session()
    party = session.answering_party(party)
    (holder,) = session.named(owner, party)
    here = session.present(holder)
    if here and (not isinstance(x, torch.Tensor) or isinstance(x, SecretTensor) or x.is_meta):
        raise ArgumentError(f"{holder.name}, which is here, announces no plain tensor: a {type(x).__name__}")
    if here and x is not None and (x.dim() > _DIMS or x.dtype not in _DTYPES):
        raise ArgumentError(f"{holder.name} announces {x.dim()} dimensions of {x.dtype}, which cannot be shared")
    if here and x is not None and session.complete:
        return x
    said = torch.zeros(_DIMS + 2, dtype=torch.int64)
    if here and x is not None:
        said = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *x.shape, *(_DIMS - x.dim()) * (0,)])
    heard = session.agreement.told(party, "announce", holder, said)
    if heard.is_meta:
        raise ArgumentError(f"the shape of what {holder.name} brings is not known in a rehearsal")
    kind, count, *sizes = heard.tolist()
    if not (0 <= kind < len(_DTYPES) and 0 <= count <= _DIMS and min(sizes) >= 0 and prod(sizes[:count]) < LARGEST):
        raise ShapeError(f"{holder.name} announced what is no shape: {sizes[: max(0, count)]}")
    like = torch.empty(sizes[:count], dtype=_DTYPES[kind], device="meta")
    session.agreement.note(party, "announced", holder.name, like)
    return x if here and x is not None else like
