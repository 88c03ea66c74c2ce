"""What a row of the op table is made of.

Tolerances are counted in units of 2^-20 (ulps), the last place at the default f = 20 fraction bits. Every derivation in
the rows starts from the same four facts:

- encoding a number errs by at most 1/2 ulp; a number of the grid (multiples of 1/8) is encoded exactly;
- a truncation errs by at most 1 ulp, an opening, a comparison or a sum by nothing;
- a product of x and y with errors d and e errs by |x| e + |y| d (and d e 2^-20, which `tolerance` covers);
- a sum of n terms adds up n errors.

On top, `reveal` truncates what has more than f fraction bits, 1 ulp, and rounds to float32: |y| 2^-24.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

ULP = 2.0**-20
BOUND = 4.0
"""Numbers are drawn from [-4, 4] unless a row says otherwise."""


@dataclass(frozen=True)
class Data:
    """One tensor argument: its shape, its domain, and whose it is (shared, private to A, or public).

    Kinds: `number` (float32; uniform, or multiples of 1/8), `whole` (int64 in low .. high - 1), `flags` (bool), `signs`
    (float32, -1 or 1), `distinct` (float32 multiples of 1/8, no two alike), `complex` (complex64; parts as number),
    `definite` (float32; M M^T / n + 2 in eighths, for a matrix M of numbers).
    """

    shape: tuple[int, ...]
    kind: str = "number"
    low: float = -BOUND
    high: float = BOUND
    role: str = "shared"

    @property
    def private(self) -> Data:
        return replace(self, role="private")

    @property
    def public(self) -> Data:
        return replace(self, role="public")

    def make(self, seed: str, grid: bool) -> torch.Tensor:
        """The plain values; the same for the same seed."""
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        if self.kind == "flags":
            return torch.randint(0, 2, self.shape, generator=generator).bool()
        if self.kind == "whole":
            return torch.randint(int(self.low), int(self.high), self.shape, generator=generator)
        if self.kind == "signs":
            return torch.randint(0, 2, self.shape, generator=generator) * 2.0 - 1
        if self.kind == "distinct":
            count = torch.Size(self.shape).numel()
            return ((torch.randperm(count, generator=generator) - count // 2) / 8.0).view(self.shape)
        if self.kind == "definite":
            factor = replace(self, kind="number").make(seed, grid)
            return (factor @ factor.mT / self.shape[-1] + 2 * torch.eye(self.shape[-1])).mul(8).round() / 8
        if self.kind == "complex":
            parts = replace(self, kind="number", shape=(*self.shape, 2))
            return torch.view_as_complex(parts.make(seed, grid))
        uniform = torch.rand(self.shape, generator=generator) * (self.high - self.low) + self.low
        return (uniform * 8).round() / 8 if grid else uniform


def whole_numbers(data: Data, plain: torch.Tensor) -> torch.Tensor:
    """The nearest whole numbers inside the domain; distinct ones stay distinct."""
    if not plain.is_floating_point():
        return plain
    if data.kind == "distinct":
        return plain * 8
    return plain.ceil() if data.low > 0 else plain.floor() if data.high < 0 else plain.round()


def number(*shape: int, low: float = -BOUND, high: float = BOUND) -> Data:
    return Data(shape, "number", low, high)


def complex_number(*shape: int, low: float = -BOUND, high: float = BOUND) -> Data:
    return Data(shape, "complex", low, high)


def definite(*shape: int, low: float = -2.0, high: float = 2.0) -> Data:
    """Symmetric matrices with eigenvalues from 1 to 3 + n max(low^2, high^2)."""
    return Data(shape, "definite", low, high)


def whole(*shape: int, low: int = -4, high: int = 5) -> Data:
    return Data(shape, "whole", low, high)


def flags(*shape: int) -> Data:
    return Data(shape, "flags", 0, 1)


def distinct(*shape: int) -> Data:
    return Data(shape, "distinct")


def index(*shape: int, below: int) -> Data:
    """Public positions."""
    return Data(shape, "whole", 0, below, "public")


def mask(*shape: int) -> Data:
    """A public condition."""
    return Data(shape, "flags", 0, 1, "public")


@dataclass(frozen=True)
class Sample:
    """Arguments of one call; `Data` stands for a tensor, anywhere inside.

    keys: the functions that take these arguments; without, all functions of the row that no other sample names.
    ulps: where the row's bound does not hold for this sample.
    """

    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    keys: tuple | None = None
    ulps: float | None = None


@dataclass(frozen=True)
class Refused:
    """A call that must raise: which error, and a pattern of its text. `key` is the row's first unless named."""

    args: tuple
    error: type[Exception]
    match: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: Callable | None = None


@dataclass(frozen=True)
class OpRow:
    """One operation.

    name: the name in `sectorch.tensor.dispatch.TABLE`.
    ulps, relative, why: the error bound of a result entry y, ulps + relative |y|, and its derivation.
    pairs: for two operands, who may hold which ("sp": the first shared, the second private; "." is public).
    operands: how many tensor operands an element-wise operation has: 1 or 2; 0 for others. They get the templates for
        broadcasting, empty tensors and tensors without dimensions.
    whole: the domain has whole numbers.
    plain: the result is not secret (it depends on shapes only).
    """

    name: str
    samples: tuple[Sample, ...]
    ulps: float
    why: str
    errors: tuple[Refused, ...] = ()
    pairs: str = ""
    operands: int = 0
    plain: bool = False
    whole: bool = True
    relative: float = 0.0

    def samples_of(self, key: Callable) -> list[tuple[int, Sample]]:
        """The samples that a spelling takes, with their numbers."""
        named = [(i, s) for i, s in enumerate(self.samples) if s.keys is not None and key in s.keys]
        return named or [(i, s) for i, s in enumerate(self.samples) if s.keys is None]

    def bound(self, sample: Sample) -> float:
        return self.ulps if sample.ulps is None else sample.ulps


def call(*args: Any, keys: tuple | None = None, ulps: float | None = None, **kwargs: Any) -> Sample:
    """A sample, written like the call."""
    return Sample(args, kwargs, keys, ulps)


def refused(error: type[Exception], match: str, *args: Any, key: Callable | None = None, **kwargs: Any) -> Refused:
    """An error case, written like the call."""
    return Refused(args, error, match, kwargs, key)


def op(name: str, *samples: Sample, ulps: float, why: str, errors: tuple = (), **more: Any) -> OpRow:
    return OpRow(name, samples, ulps, why, tuple(errors), **more)


def tolerance(ulps: float, relative: float, reference: torch.Tensor) -> torch.Tensor:
    """The bound per entry: the row's, second-order terms (below 2^-10 of it), and what `reveal` adds."""
    size = reference.to(torch.float64).abs()
    revealed = 1 if ulps else 0
    return (revealed + ulps + relative * size) * ULP * (1 + 2.0**-10) + size * 2.0**-24
