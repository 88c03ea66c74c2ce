"""Pick the number representation from the values that a model really sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from ..choreography.ledger import Profile, alone
from ..errors import ArgumentError, FixedPointRangeError
from ..ring import HEADROOM_BITS
from ..ring.scheme import LEAST_FRAC_BITS, Need, reason_of, scheme_fields, scheme_of
from ..session import Session
from ..tensor import Scheme
from .accept import copied, dtype_of
from .check import plain
from .inputs import Inputs
from .module import SecureModule
from .nodes import op_name
from .shapes import Traces
from .trace import Trace
from .where import place_of

MARGIN_BITS = 3
"""Values may exceed those of the calibration batch by this factor, as a power of two."""


@scheme_fields
def calibrate(
    model: nn.Module,
    batch: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any],
    scheme: Scheme | Literal["lan", "wan"] | None = None,
) -> Scheme:
    """The scheme with the most fraction bits, up to its own, that holds all values of a plain run with a margin, and
    the model's weights.

    The limit of activations is the largest one seen times 2^`MARGIN_BITS`. An input that exceeds it ends in
    `RangeExceededError`: calibrate on data like that of the queries. Without range checks it is taken for granted,
    comparisons look at no plane above, and such an input gives a wrong result. A limit that the scheme names stays.

    Args:
        model: as in `secure`.
        batch: typical inputs, as the model is called with them: a tensor, `Inputs(...)` of several, or the dict or list
            that is its only argument.
        scheme: as in `secure`; its `frac_bits` are the most that are chosen.

    Raises:
        FixedPointRangeError: naming the layer whose values cannot fit, or with it the weight that leaves no room.
        ArgumentError: the module runs operation by operation, since it changes from call to call.
        SectorchError: the forward asks for what cannot be computed on secrets.
    """
    scheme = scheme_of("calibrate", scheme)
    if isinstance(batch, Iterator | torch.utils.data.DataLoader):
        raise ArgumentError(
            f"calibration takes one batch, as the model is called with it, got {type(batch).__name__}: "
            f"next(iter(batches)) gives its first, and where that has labels too, [0] of it the inputs"
        )
    several = isinstance(batch, list | tuple)
    batch = Inputs.of(batch)
    if not all(x.numel() for x in batch.tensors):
        raise ArgumentError(f"calibration looks at typical inputs, and these are empty: {batch!r}")
    try:
        program = recorded(model, batch)
    except TypeError as error:
        if not several:
            raise
        raise ArgumentError(
            "calibration takes one batch, as the model is called with it, and this model takes no list of tensors: "
            "torch.cat(batches) makes one batch of several"
        ) from error
    if program is None:
        raise ArgumentError(
            "calibration needs values that are the same in each call, and this module changes itself or draws random "
            "numbers; name frac_bits instead"
        )
    largest, at = ranges(program, batch)
    limit_bits = max(1, math.ceil(math.log2(max(largest, 2.0**-20)))) + MARGIN_BITS
    hidden = any(op_name(node) in _HIDE_VALUES for node in program.graph.nodes)
    # A layer's sum has 2 f fraction bits, six more where averages add them, and one for a difference of two values.
    fitting = (HEADROOM_BITS - 1 - limit_bits - 6) // 2
    if fitting < LEAST_FRAC_BITS:
        raise FixedPointRangeError(
            f"{at} reaches magnitude {largest:.4g}, which leaves {fitting} fraction bits; normalise the model there"
        )
    if scheme.limit_bits is not None:
        limit_bits = scheme.limit_bits
    elif hidden:
        limit_bits = None
    made = replace(scheme, frac_bits=min(scheme.frac_bits, fitting), limit_bits=limit_bits)
    needs = weights_needs(model, batch, made)
    held = made.holding(needs)
    if held is None:
        raise FixedPointRangeError(
            f"no number format of {LEAST_FRAC_BITS} fraction bits or more holds both: {at} reaches magnitude "
            f"{largest:.4g}, and there is no room, {reason_of(needs)}; normalise the model at one of the two"
        )
    return held


def weights_needs(model: nn.Module, batch: Inputs, scheme: Scheme) -> list[Need]:
    """What the weights ask of a number format, those too that graph passes make."""
    try:
        with alone(Profile()):
            session = Session(device=batch.tensors[0].device)
            return SecureModule(model, session, session.answering[0], scheme, None).needs(batch)
    except FixedPointRangeError as error:
        return list(error.needs)


_HIDE_VALUES = (
    "lstm", "lstm_cell", "gru", "gru_cell", "rnn_tanh", "rnn_tanh_cell", "rnn_relu", "rnn_relu_cell",
    "multi_head_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Functions with activations inside: nobody saw them, so nothing is assumed."""


def recorded(model: nn.Module, batch: Inputs) -> Trace | None:
    """The program of a module for a batch of this shape; None where the module runs operation by operation."""
    module, given = copied(model)
    shapes = Session(dry=True, device=batch.tensors[0].device)
    programs = Traces(module, Scheme(), dtype_of(model), shapes, shapes.answering[0], given)
    return programs.of(batch.meta())


def ranges(program: Trace, batch: Inputs) -> tuple[float, str]:
    """The largest magnitude of any value of a plain run, and where it stands."""
    largest, at = max(float(x.abs().max()) for x in batch.tensors), "the input"

    def watch(node, compute, args, kwargs):
        nonlocal largest, at
        y = compute(*args, **kwargs)
        if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
            seen = float(y.abs().max())
            if not math.isfinite(seen):
                raise FixedPointRangeError(f"{place_of(node)} gives a value that is not finite on the batch")
            if seen > largest:
                largest, at = seen, place_of(node)
        return y

    plain(program, batch.wide(), step=watch)
    return largest, at
