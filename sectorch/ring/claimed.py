"""What has to hold of dealt values, element by element: kernels of `mpc/star/proved.py`.

Each has a compiled loop (`claimloops.py`), and torch's functions give the same bits elsewhere.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F

from . import bitplanes, logical_shift
from .bitplanes import masks_of


@functools.cache
def _compiled() -> ModuleType:
    return importlib.import_module("sectorch.ring.claimloops")


def sum_bits(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The bit planes of x + y and those of its last carry, xor a mask [65, W]."""
    if loops := bitplanes.fast(x, y, mask):
        out = torch.empty_like(mask)
        arrays = [loops.array(v).reshape(-1) for v in (x, y)]
        loops.on_words(mask.shape[1], _compiled().sum_bits, *arrays, mask.numpy(), out.numpy())
        return out
    bits = bitplanes.planes_below(x + y)
    first, second = (bitplanes.signs_of(v) for v in (x, y))
    return torch.cat((bits, ((first & second) | ((first | second) & ~bits[63]))[None])).bitwise_xor_(mask)


def complements(words: torch.Tensor, v: torch.Tensor, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the other half of a bit as a number has to be, of one half v = bit - other [N] or [copies, N].

    Returns:
        It where the other half of the packed bits is 0, as int64, and what is different where it is 1.
    """
    if loops := bitplanes.fast(words, v):
        zero, difference = (v.new_empty(v.shape, dtype=torch.int64) for _ in range(2))
        matrix = words.view(copies or 1, -1).numpy()
        arrays = [x.view(len(matrix), -1).numpy() for x in (v, zero, difference)]
        loops.on_words(matrix.shape[1], _compiled().complements, matrix, *arrays)
        return zero, difference
    bit = masks_of(words, v.shape if copies is None else v.shape[1:], copies).bitwise_and_(1)
    zero, one = ((bit ^ i).to(v.dtype).sub_(v).to(torch.int64) for i in (0, 1))
    return zero, zero ^ one


def chosen(
    zero: torch.Tensor, one: torch.Tensor, words: torch.Tensor, copies: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The word that each bit takes of two, and what is different in the other."""
    if loops := bitplanes.fast(zero, one, words):
        base, difference = torch.empty_like(zero), torch.empty_like(zero)
        matrix = words.view(copies or 1, -1).numpy()
        first, *rest = [x.view(len(matrix), -1).numpy() for x in (zero, one, base, difference)]
        loops.on_words(matrix.shape[1], _compiled().chosen, first, rest[0], matrix, *rest[1:])
        return base, difference
    difference = zero ^ one
    return zero ^ (difference & masks_of(words, zero.shape if copies is None else zero.shape[1:], copies)), difference


def quotients(
    v: torch.Tensor, r: torch.Tensor, low: torch.Tensor, last: torch.Tensor, shift: int
) -> tuple[torch.Tensor, ...]:
    """The coefficients of 1, c, c' and c c' in (r >> shift) - v + (low xor c) - 2^(64 - shift) (last xor c')."""
    if loops := bitplanes.fast(v, r, low, last):
        out = v.new_empty(4, *v.shape)
        arrays = [loops.array(x).reshape(-1) for x in (v, r, low, last)]
        loops.on_words(len(low), _compiled().quotients, *arrays, shift, out.view(4, -1).numpy())
        return out.unbind()
    rest = logical_shift(r, shift) - v
    low, last = (masks_of(words, r.shape, None).bitwise_and_(1) for words in (low, last))
    zero, first, second, both = (rest + (low ^ i) - ((last ^ j) << (64 - shift)) for j in (0, 1) for i in (0, 1))
    return zero, zero ^ first, zero ^ second, zero ^ first ^ second ^ both


def columns_of(parts: Sequence[torch.Tensor], copies: Sequence[int], nothing: torch.Tensor) -> torch.Tensor:
    """The elements of all parts as bits of packed words stand: [64, W], with zeros at the end of each copy."""
    counts = [(number, part.numel() // number) for number, part in zip(copies, parts, strict=True)]
    width, at = sum(number * bitplanes.words_for(count) for number, count in counts), 0
    out = nothing.new_empty(64, width)
    if loops := bitplanes.fast(out, *parts):
        place, found = _compiled().placed, out.numpy()
        for (number, count), part in zip(counts, parts, strict=True):
            place(loops.array(part).reshape(number, count), found, at)
            at += number * bitplanes.words_for(count)
        return out
    for (number, count), part in zip(counts, parts, strict=True):
        width = bitplanes.words_for(count)
        whole = F.pad(part.reshape(number, count), (0, -count % 64)).view(number, 64, width)
        out[:, at : at + number * width] = whole.transpose(0, 1).reshape(64, -1)
        at += number * width
    return out
