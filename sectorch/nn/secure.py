"""`sectorch.secure(model)`: the same predictions while model, input and every value between stay secret."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from ..choreography import Party
from ..default import default_session
from ..errors import ArgumentError, LeakyProtocolWarning
from ..ring.scheme import scheme_fields, scheme_of
from ..session import Session
from ..tensor import Scheme
from .accept import check_model, device_of, refuse_unused
from .calibrate import calibrate as calibrated
from .exported import taken
from .inputs import Inputs
from .module import SecureModule

if TYPE_CHECKING:
    from ..ckks import CKKSModule, Keys


@overload
def secure(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    chunk: int | None = None,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    backend: Literal["shares"] = "shares",
    keys: None = None,
) -> SecureModule: ...


@overload
def secure(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    backend: Literal["ckks"],
    keys: Keys | None = None,
) -> CKKSModule: ...


@scheme_fields
def secure(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    chunk: int | None = None,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    backend: str = "shares",
    keys: Keys | None = None,
) -> SecureModule | CKKSModule:
    """Wrap a module: its weights become A's secret, its inputs Q's, and only Q learns the result.

    The secure module is made of a copy: later changes of the model's weights, layers or hooks do not reach it.

    Args:
        model: any nn.Module made of supported operations (`sectorch.supported_ops()`), in evaluation mode, on the CPU
            or a CUDA device, where the session then computes as well; or what torch.export.export made of one.
        scheme: the number format, the range, and which protocols compute (`sectorch.Scheme`), or the network, "lan" or
            "wan", which stands for `Scheme(network=...)`; exact ReLU, fewest bytes
            and checked ranges unless named. Where it names no format, that is 20 fraction bits and activations below
            4096; or 16 to 19 bits, as many as the weights allow, from the first call on (`explain` says which, and
            why). All parties learn it.
        session: where it runs; the process's default session on the model's device unless named, with all parties in
            this process.
        party: the answering party of the session that owns the model; the first unless named.
        chunk: rows per piece of a batch; chosen by memory unless named.
        calibrate: a batch of typical inputs, as the model is called with it: a tensor, `Inputs(...)` of several, or the
            dict or list that is its only argument. The fraction bits (at most the scheme's) and, unless it is named,
            the range are chosen from the values it gives; see `sectorch.nn.calibrate`. The owner's check of precision
            looks at its first rows as well.
        strict: whether a model that loses digits in fixed point is refused on the first call of a form, by the owner's
            own check (`PrecisionError`), in place of a warning; the check runs the whole reference then.
        backend: "shares", or "ckks": Q encrypts under `keys` (`sectorch.ckks.keygen`), A evaluates the model in plain
            on ciphertexts, one message each way; for FHE-friendly modules (`sectorch.nn.fhe_friendly`).

    Raises:
        TrainingModeError: the model is not in evaluation mode.
        NonFiniteError, FixedPointRangeError: weights that do not fit; on a call, whose sums could leave the ring.
        ArgumentError: a choice that does not exist, or choices that do not go together; a party that is none of the
            session's answering ones. The model is never changed.

    Warns:
        LeakyProtocolWarning: for Scheme(relu="privhfl").
        DeprecationWarning: for fields of the scheme as keywords.
        PrecisionWarning: on the first call of a form, for weights that lose digits in fixed point.
    """
    model = taken(model)
    if backend not in ("shares", "ckks"):
        raise ArgumentError(f"backend must be 'shares' or 'ckks', got {backend!r}")
    if backend == "ckks":
        refuse_unused({"scheme": scheme is not None, "chunk": chunk is not None, "calibrate": calibrate is not None})
        refuse_unused({"strict": strict})
        from ..ckks import CKKSModule  # SEAL, which shares do without

        return CKKSModule(model, keys, session=session, party=party)
    scheme = scheme_of("secure", scheme)
    session = session or default_session(device_of(model))
    party = session.answering_party(party)
    if keys is not None:
        raise ArgumentError("keys: of backend='ckks', and not used by shares")
    if calibrate is not None:
        check_model(model, device_of(model))
        scheme = calibrated(model, calibrate, scheme)
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"chunk must be at least one row, got {chunk}")
    typical = None if calibrate is None else Inputs.of(calibrate)
    secured = SecureModule(model, session, party, scheme, chunk, strict=strict, typical=typical)
    if scheme.relu == "privhfl":
        warnings.warn(
            "relu='privhfl' shows the querying party the sign and the size of every activation (and, asked the same "
            "thing often enough, its value); relu='exact' shows nothing and sends fewer bytes",
            LeakyProtocolWarning,
            stacklevel=3,
        )
    return secured
