"""Answering with a module of this process's own, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from ...nn.describe import Example, describe
from ..identity.certificates import Credentials
from ..identity.identity import Pins
from ..names import name_of
from ..store.store import Store
from .answer import Answering


def answer(
    address: str,
    credentials: Credentials,
    model: nn.Module | ExportedProgram,
    inputs: Example | Sequence[Example],
    name: str | None = None,
    *,
    pins: Pins | None = None,
    store: Store | None = None,
    patience: float | None = None,
    unchecked: bool = False,
    receipts: str | Path | None = None,
    limits: str | Path | None = None,
    replica: bool = False,
    audited: int = 1,
    verified: bool = False,
    imprecise: bool = False,
) -> Answering:
    """Answer queries with `model`.

    Args:
        model: in evaluation mode: whatever `sectorch.secure` takes, or what torch.export made of it.
        inputs: what it is called with; see `save_model`.
        name: the certificate's common name, which is the default.
        pins, store, unchecked, receipts, limits, replica, audited, verified, imprecise: see `Answering`.
        patience: seconds without a word after which a party counts as hanging; 60 unless named.

    Raises:
        SectorchError: what `secure` raises for such a call. ProgramError: it cannot be described.
        PrecisionError: it loses digits in fixed point.
        ArgumentError: what is no name. IdentityError: the name or the certificate is refused.
        ReceiptError: see `Answering`.
    """
    name = name_of(name or credentials.name, "an answering party's name")  # before a recording, which takes its time
    description, weights = describe(model, inputs)
    running = Answering(
        address,
        credentials,
        description,
        weights,
        pins,
        store,
        patience,
        unchecked,
        receipts,
        limits,
        replica=replica,
        audited=audited,
        verified=verified,
        imprecise=imprecise,
    )
    try:
        running.register(name)
    except BaseException:
        running.close()
        raise
    return running
