"""`sectorch.reference(model)`: the public function that a secure module computes, without parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..ring.scheme import scheme_fields, scheme_of
from ..session import Session
from ..tensor import Scheme
from .accept import check_model, device_of
from .calibrate import calibrate as calibrated
from .exported import taken
from .inputs import Inputs
from .module import SecureModule


@scheme_fields
def reference(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    chunk: int | None = None,
) -> SecureModule:
    """The public fixed-point function that `secure(model)` computes, as a module: no parties, shares or randomness.

    Its results equal those of a secure run bit for bit: in one process or three, with network "lan" or "wan", prepared
    or not, in any batch and any piece of it. So "Q learns the result and nothing else" means that Q learns
    `reference(model)(x)`. It costs little more than the products of whole numbers, and protects nothing.

    Args:
        model: as in `secure`.
        scheme, calibrate: as in `secure`; `secure(...).scheme` is a secure module's.
        chunk: rows a piece of a batch; chosen by memory unless named.

    Smooth functions (series of a masked opening: `mpc/smooth/trigonometric.py`) are equal but for about one value in
    2^28 (with 20 fraction bits), which that module derives. Values beyond the range may differ. With relu="privhfl" the
    results are the same, and the secure run leaks.

    Raises:
        ArgumentError: no Scheme. SectorchError: what `secure` raises.
    """
    model = taken(model)
    scheme = scheme_of("reference", scheme)
    if calibrate is not None:
        check_model(model, device_of(model))
        scheme = calibrated(model, calibrate, scheme)
    session = Session(reference=True, device=device_of(model))
    return SecureModule(model, session, session.answering[0], scheme, chunk)
