"""Public numbers and tensors of a step, which may be others in the next one: inputs of its program, of which the
program knows the form alone.

A row that can compute with any number of a form says so in `VARYING`. What stands anywhere else in an operation is a
part of the program, which is traced anew for another. A row that looks at the content of what varies fails, and the
step is then computed operator by operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..tensor.table import Context

SPAN = 8
"""Numbers whose size changes from step to step are of one form within so many powers of two."""


def places(number: float, wide: bool) -> int:
    """The least e, or multiple of `SPAN` if `wide`, with |number| < 2^e."""
    exponent = math.frexp(abs(number))[1]
    return -(-exponent // SPAN) * SPAN if wide else exponent


def root_places(exponent: int) -> int:
    """The multiple of `SPAN` that the root of a number below 2^exponent is below."""
    return -(-exponent // (2 * SPAN)) * SPAN


def _ordinary(number: float) -> bool:
    """Neither zero nor a power of two, by which a product moves the point."""
    return math.isfinite(number) and number != 0 and math.frexp(abs(number))[0] != 0.5


@dataclass(frozen=True)
class Form:
    """What a program knows of what varies: its kind, and what that takes."""

    kind: str
    said: tuple


def scale_form(value: Any) -> Form | None:
    """Of a number that something is multiplied by, whatever its size."""
    number = float(value)
    return Form("scale", (places(number, True),)) if _ordinary(number) else None


def inverse_form(value: Any) -> Form | None:
    """Of a divisor that is a number."""
    if isinstance(value, torch.Tensor) and value.dim():
        return None
    number = float(value)
    return Form("inverse", (places(1 / number, True), number > 0)) if _ordinary(number) else None


SIZES = (0, 8, 11)
"""Tensors of floats are of one form whose entries are at most the same one of these powers of two."""


def floats_form(value: Any) -> Form | None:
    """Of a tensor of floats that stands beside shared ones."""
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.is_floating_point():
        return None
    most = float(value.detach().abs().max()) if value.numel() else 0.0
    size = next((size for size in SIZES if most <= 2.0**size), None)
    return None if size is None else Form("floats", (tuple(value.shape), value.dtype, size))


def weight_form(value: Any) -> Form | None:
    """Of a tensor that a shared one is multiplied by: a mask of zeros and ones, or floats."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    mask = not value.is_complex() and bool(((value == 0) | (value == 1)).all())
    return Form("mask", (tuple(value.shape),)) if mask else floats_form(value)


MOST_FACTOR = 2.0**16
"""A factor from here on is a mask's, and a part of the program."""


def factor_form(value: Any) -> Form | None:
    """Of a factor; of one near one, the rest is what has a size."""
    if isinstance(value, torch.Tensor) and value.dim():
        return weight_form(value)
    number = float(value)
    if abs(number) >= MOST_FACTOR:
        return None
    if 0.5 < number < 1:
        return Form("rest", (places(1 - number, False),)) if _ordinary(1 - number) else None
    return Form("factor", (places(number, False), number > 0)) if _ordinary(number) else None


def labels_form(value: Any) -> Form | None:
    """Of whole numbers that say which; those that are ignored, below zero, are a part of the program."""
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    whole = whole and not bool((value < 0).any())
    return Form("labels", (tuple(value.shape), value.dtype)) if whole else None


VARYING: dict[Any, dict[Any, Callable[[Any], Form | None]]] = {}
"""By operator, and by the place or name of an argument: how it may vary."""

_NUMBERS: dict[str, Callable[[float], float]] = {
    "scale": lambda v: v, "factor": lambda v: v, "rest": lambda v: 1 - v, "inverse": lambda v: 1 / v,
    "root of factor": lambda v: math.sqrt(v), "root of inverse": lambda v: math.sqrt(1 / v),
}  # fmt: skip


class Varying:
    """What stands in a traced step for a public number or tensor. Its content cannot be asked for.

    Attributes:
        size: of a tensor.
        exponent: of a number, what its row multiplies by is below 2^this in magnitude.
        rest: whether its row multiplies by what it is less than one.
    """

    def __init__(self, publics: Publics, slot: int, form: Form):
        self.publics, self.slot, self.form = publics, slot, form
        self.size = torch.Size(()) if form.kind in _NUMBERS else torch.Size(form.said[0])
        self.rest = form.kind == "rest"

    @property
    def exponent(self) -> int:
        return self.form.said[0]

    def root(self) -> Varying:
        """The root of what its row multiplies by, which is positive."""
        return Varying(self.publics, self.slot, Form(f"root of {self.form.kind}", (root_places(self.exponent),)))

    def whole(self, context: Context, bits: int) -> Any:
        """The number as an integer of so many fraction bits, a value that A and S know."""
        number = _NUMBERS[self.form.kind]
        return self.publics.value(
            context, self.slot, lambda v: torch.tensor(round(number(float(v)) * 2.0**bits)), self.size
        )

    def made(self, context: Context, f: Callable, shape: torch.Size, *given: Any) -> Any:
        """f(content, ...), whole numbers of a shape, as a value that A and S know."""
        return self.publics.value(context, self.slot, lambda v: f(v, *given), shape)

    def embedded(self, context: Context, f: Callable) -> Any:
        """f(content), whole numbers of its shape, as shares that A has whole."""
        return self.publics.value(context, self.slot, f, self.size, shared=True)


class Brought(NamedTuple):
    """How a public input comes from what a step gives, and whether it is shares, of which S has none."""

    slot: int
    f: Callable[[Any], torch.Tensor]
    shared: bool

    def halves(self, publics: Sequence[Any]) -> dict[str, torch.Tensor]:
        """What A and S bring."""
        value = self.f(publics[self.slot])
        return {"A": value, "S": torch.zeros_like(value) if self.shared else value}


@dataclass
class Publics:
    """The public inputs of a program that is being traced: how each comes from what a step gives."""

    inputs: dict[str, Brought] = field(default_factory=dict)

    def value(
        self, context: Context, slot: int, f: Callable[[Any], torch.Tensor], shape: torch.Size, shared: bool = False
    ) -> Any:
        name = f"public {len(self.inputs)}"
        self.inputs[name] = Brought(slot, f, shared)
        meta = torch.empty(shape, dtype=torch.int64, device="meta")
        return context.backend.again(name, (meta, meta))
