"""Public floats beside shared ones: targets of losses, summands and weights, which may be others in each step.

They are taken as shares that A has whole, no message, with a bound of few sizes, so that steps with other numbers in
them are one program. A row sees a cell and cannot tell it from a secret one; a target has the bits of one that is
shared. Larger numbers than `public.SIZES` has stay a part of the program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..ring import encode
from ..tensor import SharedTensor
from ..tensor.table import Context
from .cells import Cell
from .functions import aten
from .public import VARYING, Varying, floats_form

TARGET, BESIDE = "with the fraction bits of an activation", "with those of what stands beside it"

TAKEN: dict[Any, dict[Any, str]] = {
    **{key: {0: BESIDE, 1: BESIDE} for key in (aten.add.Tensor, aten.sub.Tensor)},
    aten.mse_loss.default: {0: TARGET, 1: TARGET},
    aten.mse_loss_backward.default: {1: TARGET, 2: TARGET},
    **{
        key: {1: TARGET}
        for key in (
            aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
            aten.huber_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
        )
    },
    **{
        key: {2: TARGET}
        for key in (
            aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default,
            aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default,
        )
    },
}  # fmt: skip
"""By operator, and by the place of an argument: how many fraction bits it gets."""

for _key, _places in TAKEN.items():
    VARYING.setdefault(_key, {}).update(dict.fromkeys(_places, floats_form))


def is_floats(value: Any) -> bool:
    """Whether it is such a tensor, of numbers that are small enough."""
    if isinstance(value, Varying):
        return value.form.kind == "floats"
    return type(value) is Tensor and floats_form(value) is not None


def whole(context: Context, value: Any, scale_bits: int) -> Any:
    """It as whole numbers that A and S know."""
    f = partial(encode, scale_bits=scale_bits)
    return value.made(context, f, value.size) if isinstance(value, Varying) else f(value).to(context.session.device)


def largest(value: Any, scale_bits: int) -> float:
    """The bound of the whole numbers: of a tensor's form, not of its content."""
    form: Any = value.form if isinstance(value, Varying) else floats_form(value)
    return 2.0 ** (form.said[-1] + scale_bits) + 1


def shared(context: Context, value: Any, scale_bits: int) -> SharedTensor:
    """It as shares. No message."""
    dtype = value.form.said[1] if isinstance(value, Varying) else value.dtype
    f = partial(encode, scale_bits=scale_bits)
    shares = (
        value.embedded(context, f)
        if isinstance(value, Varying)
        else context.backend.embedded(f(value).to(context.session.device))
    )
    return context.tensor(shares, scale_bits, largest(value, scale_bits), dtype)


def taken(context: Context, key: Any, args: tuple) -> tuple:
    """An operator's arguments, with shares in the places of such tensors."""
    ways = TAKEN.get(key)
    if ways is None:
        return args
    beside = max([context.frac_bits, *(x.content.scale_bits for x in args if isinstance(x, Cell))])
    bits = {TARGET: context.frac_bits, BESIDE: beside}
    return tuple(
        Cell(shared(context, v, bits[ways[i]])) if i in ways and is_floats(v) else v for i, v in enumerate(args)
    )
