"""Sums of ciphertexts, and their products with plain numbers; what brings two to one level, scale and factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import ScaleError
from .bounds import held
from .cipher import Cipher, Withheld, empty_like
from .levels import need_level, rescale, settle, weight_scale
from .modular import minus_, plus_, times_


def times_integers(c: Cipher, integers: Sequence[int] | int) -> Cipher:
    """Each ciphertext times an integer of any size, mod every prime; scale and level stay as they are."""
    if integers == 1:
        return c
    out = empty_like(c.data, "a product with plain numbers")
    if not c.data.is_meta:
        out.copy_(c.data)
        for j, q in enumerate(c.primes):
            part = out[:, :, j].contiguous()
            if isinstance(integers, int):
                times_(part, integers % q, q)
            else:
                times_(part, torch.tensor([k % q for k in integers]).view(-1, 1, 1), q)
            out[:, :, j] = part
    largest = abs(integers) if isinstance(integers, int) else max(map(abs, integers), default=0)
    return replace(c, data=out, largest=c.largest * largest, error=c.error * largest, declared=False)


def times_numbers(c: Cipher, numbers: Sequence[float], what: str) -> Cipher:
    """Ciphertext i times the number i; one level. Error: of the number 1/2 of 1/scale, beside |number| e."""
    need_level(c, what)
    scaled = [v * weight_scale(c) * c.multiplier for v in numbers]
    most = max(map(abs, numbers), default=0.0) * abs(c.multiplier)
    if not all(map(math.isfinite, scaled)):
        raise ScaleError(f"{what} has a factor of magnitude {most:.3g}, which no scale holds; scale the layer down")
    error = c.error * most + (c.largest + c.error) / (2 * weight_scale(c))
    product = times_integers(c, list(map(round, scaled)))
    known = replace(product, pending=c.pending + 1, factor=1.0, withheld=None, largest=c.largest * most, error=error)
    return held(known, what)


def times_weight(c: Cipher, weight: float) -> Cipher:
    """c times a single number of the evaluator's own. Free until what comes of it leaves (`leaving.cleared`)."""
    if weight == 0:
        c, weight = times_integers(c, 0), 1.0
    return replace(c, withheld=Withheld(weight if c.withheld is None else weight * c.withheld.value))


def aligned(a: Cipher, b: Cipher) -> tuple[Cipher, Cipher]:
    """Both at one level, scale and factors, so that they can be added."""
    if a.factor != b.factor or a.withheld is not b.withheld:
        ratio = b.factor / a.factor
        same = a.withheld is b.withheld
        if same and (1 / ratio).is_integer() and abs(1 / ratio) < 1 << 12:
            a = replace(times_integers(a, int(1 / ratio)), factor=b.factor)
        elif same and ratio.is_integer() and abs(ratio) < 1 << 12:
            b = replace(times_integers(b, int(ratio)), factor=a.factor)
        else:
            one, other = (a, b) if a.left >= b.left else (b, a)
            one = replace(one, factor=one.multiplier / other.multiplier, withheld=None)
            one = times_numbers(one, [1.0] * one.count, "an addition of differently scaled terms")
            one = replace(one, factor=other.factor, withheld=other.withheld)
            a, b = (one, other) if a.left >= b.left else (other, one)
    if a.left < b.left:
        b, a = aligned(b, a)
        return a, b
    if a.left > b.left:
        goal = b
        while goal.level > a.left:
            goal = rescale(goal)
        if goal.pending == 0 and goal.level < a.left:
            # Land one above with a rescale pending: the constant then keeps scale_bits of precision.
            a = settle(lowered(a, goal.level + 1, goal.left))
        else:
            a = lowered(a, goal.level, goal.left)
        return a, goal
    least = min(a.pending, b.pending)
    return settle(a, least), settle(b, least)


def alike(ciphers: Sequence[Cipher]) -> list[Cipher]:
    """All at one level, scale and factors, with nothing pending. What two have in common may be new to both."""
    ciphers = [settle(c) for c in ciphers]
    goal = min(ciphers, key=lambda c: c.left)
    form = lambda c: (c.level, c.pending, c.factor, c.withheld, c.size)
    while any(form(c) != form(goal) for c in ciphers):
        for i, c in enumerate(ciphers):
            ciphers[i], goal = map(settle, aligned(c, goal))
    return ciphers


def lowered(c: Cipher, level: int, left: int) -> Cipher:
    """c, settled, brought to a level and to a smaller number of multiplications left."""
    c = settle(c)
    current = c.scale
    p = c.keys.parameters
    goal = p.scales[left] * math.prod(float(q) for q in p.primes[left + 1 : level + 1])
    times = round(goal / current)
    fewer = times_integers(replace(c, data=c.data[:, :, : level + 1]), times)
    off = abs(times * current / goal - 1)  # of a constant that is rounded
    fewer = replace(fewer, pending=level - left, largest=c.largest, declared=c.declared)
    return held(replace(fewer, error=c.error * (1 + off) + c.largest * off), "a ciphertext of fewer levels")


def add(a: Cipher, b: Cipher, sign: int = 1) -> Cipher:
    """a + sign * b, ciphertext by ciphertext. The error is the sum of both errors."""
    a, b = aligned(a, b)
    a = replace(a, largest=a.largest + b.largest, error=a.error + b.error, declared=False)
    held(a, "a sum")
    large = b if a.size <= b.size else a
    out = empty_like(large.data, "an addition")
    if not a.data.is_meta:
        for j, q in enumerate(a.primes):
            for k in range(large.size):
                left = a.data[:, k, j].clone() if k < a.size else torch.zeros_like(b.data[:, k, j])
                if k < b.size:
                    left = (plus_ if sign > 0 else minus_)(left, b.data[:, k, j], q)
                out[:, k, j] = left
    return replace(a, data=out)


def negate(c: Cipher) -> Cipher:
    """-c. Free."""
    return replace(c, factor=-c.factor)


def integer_constants(c: Cipher, numbers: Sequence[float]) -> list[int]:
    """The integer that a number is in every slot, at the scale of c. A constant polynomial has one value at every
    point: no encoding.
    """
    scale = c.scale / c.multiplier
    wanted = [float(v) * scale for v in numbers]
    if not all(map(math.isfinite, wanted)):
        raise ScaleError("a number is beyond floating point beside the public factor of what it is added to")
    return [round(v) for v in wanted]


def add_numbers(c: Cipher, numbers: Sequence[float]) -> Cipher:
    """Ciphertext i plus the number i in every slot. Error: of the number 1/2 of 1/scale."""
    most = max(map(abs, numbers), default=0.0)
    more = replace(c, largest=c.largest + most / abs(c.multiplier), error=c.error + 0.5 / c.scale, declared=False)
    held(more, "a sum")
    out = empty_like(c.data, "an addition")
    if not c.data.is_meta:
        out.copy_(c.data)
        integers = integer_constants(c, numbers)
        for j, q in enumerate(c.primes):
            constants = torch.tensor([k % q for k in integers]).view(-1, 1)
            out[:, 0, j] = plus_(out[:, 0, j].clone(), constants, q)
    return replace(more, data=out)
