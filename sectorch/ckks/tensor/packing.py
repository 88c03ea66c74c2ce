"""What handlers share: which ciphertext holds which element, broadcasting, and plain operands of three kinds.

A plain operand is a number, a tensor that is the same for every sample (one number a ciphertext), or a tensor with the
batch's own dimension (one number a slot, which SEAL encodes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...errors import DtypeError, NonFiniteError, UnsupportedOpError
from ..errors import KeyMismatchError, SlotError
from ..scheme.arithmetic import add_numbers, times_numbers, times_weight
from ..scheme.bounds import encoding_error, held
from ..scheme.cipher import Cipher, empty_like
from ..scheme.levels import need_level, weight_scale
from ..scheme.modular import plus_, times_
from .encrypted import CKKSTensor


def index_of(x: CKKSTensor) -> torch.Tensor:
    """The number of the ciphertext of each element of a row: int64, of the row's shape."""
    return torch.arange(math.prod(x.row_shape)).view(x.row_shape)


def taken(c: Cipher, index: torch.Tensor) -> Cipher:
    """The ciphertexts with these numbers, in this order; repeated ones are copied."""
    flat = index.reshape(-1)
    if flat.numel() == c.count and torch.equal(flat, torch.arange(c.count)):
        return c
    out = empty_like(c.data, "a selection", flat.numel())
    if not c.data.is_meta:
        torch.index_select(c.data, 0, flat, out=out)
    return replace(c, data=out)


def spread_to(x: CKKSTensor, row_shape: tuple[int, ...]) -> Cipher:
    """x broadcast to a row shape."""
    return taken(x.cipher, index_of(x).expand(row_shape))


def broadcast(x: CKKSTensor, other: Any) -> tuple[int, ...]:
    """The row shape of x with another operand; the batch must stay the batch.

    Raises:
        UnsupportedOpError: the batch would meet another dimension.
        SlotError: two batches of different sizes.
    """
    shape = getattr(other, "full_shape", None) or (other.shape if isinstance(other, torch.Tensor) else ())
    if isinstance(other, CKKSTensor):
        if other.keys.identity != x.keys.identity:
            raise KeyMismatchError("two tensors under different keys cannot meet; encrypt both under one public key")
        if other.batch != x.batch:
            raise SlotError(f"batches of {x.batch} and {other.batch} cannot meet: their samples lie in different slots")
        if len(shape) != len(x.full_shape):
            raise UnsupportedOpError(
                f"shapes {tuple(x.full_shape)} and {tuple(shape)}: the batch (dimension 0) would meet another "
                f"dimension; unsqueeze the smaller one behind the batch"
            )
    out = torch.broadcast_shapes(x.full_shape, shape)
    if len(out) != len(x.full_shape) or out[0] != x.batch:
        raise UnsupportedOpError(
            f"shapes {tuple(x.full_shape)} and {tuple(shape)}: the batch (dimension 0) is in the slots and cannot be "
            f"broadcast"
        )
    return tuple(out[1:])


def plain(value: Any) -> torch.Tensor:
    """A plain operand as float64.

    Raises:
        DtypeError, NonFiniteError
    """
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise DtypeError("complex operands are not supported on CKKSTensors")
        value = value.detach().to(torch.float64)
    else:
        value = torch.tensor(float(value), dtype=torch.float64)
    if not value.is_meta and not bool(torch.isfinite(value).all()):
        raise NonFiniteError("a plain operand holds NaN or infinity")
    return value


def magnitude(value: torch.Tensor) -> float:
    """The largest of a plain operand's entries; 1 where only its shape is known, and nothing is computed."""
    return 1.0 if value.is_meta else float(value.abs().max()) if value.numel() else 0.0


def per_slot(value: torch.Tensor, row_shape: tuple[int, ...]) -> bool:
    """Whether a plain operand differs from sample to sample."""
    return value.dim() == len(row_shape) + 1 and value.shape[0] > 1


def numbers(value: torch.Tensor, row_shape: tuple[int, ...]) -> list[float]:
    """One number a ciphertext."""
    if value.is_meta:
        return [0.0] * math.prod(row_shape)
    value = value[0] if value.dim() == len(row_shape) + 1 else value
    return value.expand(row_shape).reshape(-1).tolist()


def _columns(value: torch.Tensor, row_shape: tuple[int, ...]) -> torch.Tensor:
    return value.expand(value.shape[0], *row_shape).reshape(value.shape[0], -1).t()


def _encoded(c: Cipher, column: torch.Tensor, scale: float) -> torch.Tensor:
    """A column of slots as residues [primes, N], encoded by SEAL."""
    context = c.keys.context
    return torch.from_numpy(context.parse_plain(context.encode(column.tolist(), c.level, scale), c.level).copy())


def plus_plain(c: Cipher, value: torch.Tensor, row_shape: tuple[int, ...]) -> Cipher:
    """c + a plain tensor. Error of the encoding: at most sqrt(N)/scale in a slot, less than a fresh encryption's."""
    if not per_slot(value, row_shape):
        return c if value.is_meta else add_numbers(c, numbers(value, row_shape))

    def add(part: torch.Tensor, encoded: torch.Tensor) -> None:
        for j, q in enumerate(c.primes):
            part[0, j] = plus_(part[0, j].clone(), encoded[j], q)

    largest = c.largest + magnitude(value) / abs(c.multiplier)
    error = c.error + encoding_error(c.keys.parameters.degree, c.scale)
    more = held(replace(c, largest=largest, error=error, declared=False), "a sum")
    return replace(more, data=_with_slots(c, value, row_shape, c.scale / c.multiplier, add).data)


def times_plain(c: Cipher, value: torch.Tensor, row_shape: tuple[int, ...]) -> Cipher:
    """c * a plain tensor: one level, which a single number takes only if no other weights follow."""
    if value.numel() == 1:
        return times_weight(c, 1.0 if value.is_meta else float(value))
    what = "a product with a plain tensor"
    need_level(c, what)
    if not per_slot(value, row_shape):
        return times_numbers(c, numbers(value, row_shape), what)

    def multiply(part: torch.Tensor, encoded: torch.Tensor) -> None:
        for j, q in enumerate(c.primes):
            part[:, j] = times_(part[:, j].contiguous(), encoded[j].expand(part.shape[0], -1), q)

    scale, most = weight_scale(c) * c.multiplier, magnitude(value) * abs(c.multiplier)
    off = encoding_error(c.keys.parameters.degree, weight_scale(c))
    product = replace(
        c, data=torch.empty(0, *c.data.shape[1:], device="meta"), pending=c.pending + 1,
        factor=1.0, withheld=None, largest=c.largest * most,
        error=c.error * (most + off) + c.largest * off, declared=False,
    )  # fmt: skip
    held(product, what)
    return replace(product, data=_with_slots(c, value, row_shape, scale, multiply).data)


def times_number(c: Cipher, number: float) -> Cipher:
    """c times a public number: free, but for zero."""
    if number == 0:
        return times_numbers(c, [0.0] * c.count, "a product with zero")
    return replace(c, factor=c.factor * number)


def _with_slots(c: Cipher, value: torch.Tensor, row_shape: tuple[int, ...], scale: float, f: Callable) -> Cipher:
    """f(ciphertext, encoded) in place on a copy of each ciphertext, with its column of slots."""
    out = empty_like(c.data, "an operation with a plain tensor")
    if not c.data.is_meta:
        out.copy_(c.data)
        sign = -1.0 if scale < 0 else 1.0
        for part, column in zip(out, _columns(value, row_shape), strict=True):
            f(part, _encoded(c, sign * column, abs(scale)))
    return replace(c, data=out)
