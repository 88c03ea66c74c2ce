"""Before anything is encrypted: what a model takes of the modulus chain, layer by layer, and how much memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from ...display import Display
from ...errors import ArgumentError, SectorchError
from ..errors import LevelError, ScaleError, SecurityLevelError
from ..scheme.ciphertext import capacity, clear_pending_factor, metering
from ..scheme.keys import Keys, PublicKeys
from ..scheme.seal import INTEGER_BITS, VALUE_BOUND, Parameters, choose
from .ckks_tensor import CKKSTensor, blank_encryption, observe_operations

_UNBOUNDED = 38


@dataclass(frozen=True)
class EncryptedStep:
    """One operation of the model on encrypted values."""

    layer: str
    operation: str
    shape: tuple[int, ...]
    ciphertexts: int
    levels_left: int
    bytes: int
    bound: float = math.inf
    """Values are below it in magnitude."""
    error: float = 0.0
    """Values are within it of the plain computation's."""
    room: float = math.inf
    """Values below it fit this place of the chain."""


@dataclass
class Report(Display):
    """The result of `explain`.

    Attributes:
        depth: levels that the model takes; None if it does not run to its end.
        parameters: the parameters that the caller named, or the smallest that fit.
        problem: why the model does not run on them, naming the layer; empty if it does.
        peak_bytes: the most bytes of ciphertexts that exist at a time from encryption to the result, as the same
            program makes and drops them on shapes. The process itself (torch, SEAL, keys) takes some hundred MB beside.
    """

    steps: list[EncryptedStep]
    parameters: Parameters | None
    depth: int | None
    problem: str = ""
    peak_bytes: int = 0
    runs_out: str = field(default="")
    too_large: bool = False
    """Whether the problem is a value that may not fit its level."""

    @property
    def supported(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        return self.table(140)

    def sections(self) -> Iterator[RenderableType]:
        """A row for each operation, and what the whole of them takes."""
        yield str(self.parameters) if self.parameters else "no secure parameters fit"
        table = Table(title="level by level")
        for column in ("layer", "operation", "result", "ciphertexts", "levels left", "bound", "room", "error", "MB"):
            table.add_column(column, justify="left" if column in ("layer", "operation", "result") else "right")
        for s in self.steps:
            sizes = (f"{s.bound:.3g}", f"{s.room:.3g}", f"{s.error:.1g}", f"{s.bytes / 1e6:.1f}")
            table.add_row(s.layer, s.operation, str(s.shape), str(s.ciphertexts), str(s.levels_left), *sizes)
        yield table
        if self.depth is not None:
            yield (f"depth {self.depth}; about {self.peak_bytes / 2**30:.2f} GiB of ciphertexts at the peak")
        if self.problem:
            yield Text(f"does not run: {self.problem}", style="red")


def _step(layer: str, name: str, e: CKKSTensor) -> EncryptedStep:
    c = e.cipher
    room = capacity(c.keys.parameters, c.levels_left) * abs(c.multiplier)
    return EncryptedStep(
        layer, name, tuple(e.full_shape), c.count, c.levels_left, e.ciphertext_bytes, c.bound, c.error_bound, room
    )


def _dry_run(
    model: nn.Module, x: torch.Tensor, parameters: Any, bound: float
) -> tuple[list[EncryptedStep], CKKSTensor | None, SectorchError | None]:
    """The model on shapes alone: the handlers run, and no ciphertext exists."""
    e = blank_encryption(x, parameters, bound)
    steps = [_step("input", "encrypt", e)]

    def watch(name: str, layer: str | None, result: Any) -> None:
        if isinstance(result, CKKSTensor):
            steps.append(_step((layer or "").removeprefix("layer "), name, result))

    try:
        with observe_operations(watch), torch.no_grad():
            answer = model(e)
        if isinstance(answer, CKKSTensor) and answer.cipher.pending_factor is not None:
            answer = CKKSTensor(clear_pending_factor(answer.cipher), answer.batch, answer.row_shape, answer.float_dtype)
            steps.append(_step("answer", "mul", answer))
        elif isinstance(answer, CKKSTensor) and answer.levels_left < steps[-1].levels_left:
            steps.append(_step("answer", "polynomial", answer))  # which is no torch function, so nothing watched it
        return steps, answer, None
    except SectorchError as error:
        return steps, None, error


LADDER = (INTEGER_BITS, 14, 20)
"""What `explain` tries for the room of the last level."""


def _fitting(model: nn.Module, x: torch.Tensor, depth: int, bound: float) -> Parameters:
    """The first parameters that hold the model's values: more room at the last level, or a level that stays unused."""
    for levels, bits in (*((depth, bits) for bits in LADDER), (depth + 1, INTEGER_BITS)):
        try:
            parameters = choose(levels, slots=x.shape[0], integer_bits=bits)
        except SecurityLevelError:
            if (levels, bits) == (depth, INTEGER_BITS):
                raise
            continue
        if not isinstance(_dry_run(model, x, parameters, bound)[2], ScaleError):
            return parameters
    return choose(depth, slots=x.shape[0])


def explain(
    model: nn.Module, x: torch.Tensor, keys: Keys | PublicKeys | Parameters | None = None, *, bound: float = VALUE_BOUND
) -> Report:
    """What `model(encrypt(x, keys, bound=bound))` takes of the chain, without keys, ciphertexts or values.

    The bounds of the steps come from the largest sums of magnitudes in a layer's weights: they are for whoever has the
    model. `integer_bits` of the parameters that are chosen without keys is one of `LADDER`, and tells Q that much.

    Args:
        bound: on the input's values.
        x: only its shape and dtype are used; the batch is dimension 0.
        keys: whose chain is asked about; without, the smallest secure parameters that the model needs are chosen.

    A model that is not supported, or whose chain runs out, gives a report with `problem`, naming the layer.
    """
    if x.dim() < 1:
        raise ArgumentError("explain() needs an input with a batch dimension")
    if keys is None:
        # A chain that does not run out, to count the levels that the model takes.
        fake = SimpleNamespace(
            degree=8192, primes=(1 << 48, *(1 << 28,) * _UNBOUNDED), scales=(2.0**28,) * (_UNBOUNDED + 1),
            depth=_UNBOUNDED, slots=1 << 20, special=1 << 50,
        )  # fmt: skip
        steps, _, error = _dry_run(model, x, fake, bound)
        if error is not None:
            return Report(steps, None, None, str(error))
        depth = _UNBOUNDED - min((s.levels_left for s in steps), default=_UNBOUNDED)
        try:
            parameters = _fitting(model, x, max(1, depth), bound)
        except SecurityLevelError as refused:
            return Report(steps, None, depth, str(refused))
    else:
        parameters = keys if isinstance(keys, Parameters) else keys.parameters
    with metering() as meter:
        steps, _, error = _dry_run(model, x, parameters, bound)
    layer = str(getattr(error, "layer", "") or "") if isinstance(error, LevelError) else ""
    used = parameters.depth - min(s.levels_left for s in steps) if error is None else None
    too_large = isinstance(error, ScaleError)
    return Report(steps, parameters, used, "" if error is None else str(error), meter.peak, layer, too_large)
