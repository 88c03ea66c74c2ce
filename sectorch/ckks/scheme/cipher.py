"""Ciphertexts as one tensor of residues, and the evaluator's arithmetic on them.

A `Cipher` is n ciphertexts of one form. `data` is int64 [n, size, level + 1, N], residues in NTT form and SEAL's order.
What a linear layer or a product leaves to be rescaled is kept pending and done when a product needs it, so a layer that
reduces 845 ciphertexts to 100 is rescaled as 100. With t = level - pending the scale is exactly D_t q_(t+1) .. q_level
(`parameters.py`), and t is how many more multiplications there are.

`largest` and `error` bound the values before that factor, and their error (`bounds.py`).

`factor` is a public number that the decoded values are to be multiplied by: averages and scalar factors cost no level,
because the next layer's weights take them in. `withheld` is one more, of the evaluator's own weights: it waits for the
next weights as well, and takes a level where none come, for it never leaves (`cleared`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...ring.loops import over
from ..errors import LevelError, ScaleError
from . import kernels
from .bounds import held, rescaling_error, switching_error
from .keys import PublicKeys, SwitchingKey
from .memory import room
from .modular import minus_, plus_, times_
from .ntt import tables

_PIECE = 32
"""Ciphertexts rescaled at a time."""


@dataclass(frozen=True, eq=False)
class Withheld:
    """A number made of the evaluator's weights. Compared as an object: which two are equal is no matter of weights."""

    value: float = field(repr=False)


@dataclass(frozen=True)
class Cipher:
    """n ciphertexts under one key. See the module's docstring."""

    data: torch.Tensor
    keys: PublicKeys
    pending: int = 0
    factor: float = 1.0
    largest: float = math.inf
    error: float = 0.0
    declared: bool = False
    """Whether `largest` is what was declared, by whoever encrypted: no plain operand of an evaluator's is in it."""
    withheld: Withheld | None = None

    @property
    def multiplier(self) -> float:
        """Both factors together: the evaluator's to know."""
        return self.factor if self.withheld is None else self.factor * self.withheld.value

    @property
    def bound(self) -> float:
        """Every decoded value is below this in magnitude, but for its error."""
        return self.largest * abs(self.multiplier)

    @property
    def error_bound(self) -> float:
        """Every decoded value is within this of what it should be (8 standard deviations; `bounds.py`)."""
        return self.error * abs(self.multiplier)

    @property
    def count(self) -> int:
        return self.data.shape[0]

    @property
    def size(self) -> int:
        return self.data.shape[1]

    @property
    def level(self) -> int:
        """Index of the highest prime that the residues still have."""
        return self.data.shape[2] - 1

    @property
    def left(self) -> int:
        """Multiplications that the chain still allows."""
        return self.level - self.pending

    @property
    def primes(self) -> tuple[int, ...]:
        return self.keys.parameters.primes[: self.level + 1]

    @property
    def scale(self) -> float:
        scale = self.keys.parameters.scales[self.left]
        return scale * math.prod(float(q) for q in self.primes[self.left + 1 :])

    def __repr__(self) -> str:
        return f"Cipher(count={self.count}, size={self.size}, level={self.level}, pending={self.pending})"


def empty(count: int, size: int, primes: int, degree: int, meta: bool, what: str) -> torch.Tensor:
    """Room for ciphertexts, after asking whether memory allows it."""
    return room((count, size, primes, degree), meta, what)


def empty_like(data: torch.Tensor, what: str, count: int | None = None) -> torch.Tensor:
    """Room for ciphertexts of the form of these: for as many, or for so many."""
    return room((len(data) if count is None else count, *data.shape[1:]), data.is_meta, what)


def words(data: torch.Tensor) -> np.ndarray:
    """Residues as the compiled loops take them: contiguous."""
    return data.contiguous().numpy()


def _need_level(c: Cipher, what: str) -> None:
    if c.left < 1:
        raise LevelError(
            f"{what} needs one more level, and the modulus chain (depth {c.keys.parameters.depth}) is used up. Make "
            f"keys with a larger depth (sectorch.ckks.explain(model, x) says which), fold layers, or lower a "
            f"polynomial's degree"
        )


def weight_scale(c: Cipher) -> float:
    """The scale of a plain factor with which the product, rescaled once, has the canonical scale of the next level."""
    p = c.keys.parameters
    return p.scales[c.left - 1] * p.primes[c.left] / p.scales[c.left]


def rescale(c: Cipher) -> Cipher:
    """Divide by the last prime and drop it, rounding: SEAL's `rescale_to_next`, bit for bit.

    Cost: one inverse transform and `level` forward ones for each polynomial. Adds a rounding error of at most 1/2 per
    coefficient and polynomial, that is, for a ternary key, below 8 sqrt(N (1 + 2N/3) / 12) / scale in a slot (8 sigma).
    """
    return settle(c, c.pending - 1)


def settle(c: Cipher, pending: int = 0) -> Cipher:
    """Rescale until only so much is pending; relinearise first, while the scale is large and the error small."""
    drops = c.pending - pending
    if drops < 1:
        return c
    n, _, primes, degree = c.data.shape
    out = empty(n, 2, primes - drops, degree, c.data.is_meta, "rescaling")
    if not c.data.is_meta:
        for source, target in zip(c.data.split(_PIECE), out.split(_PIECE), strict=True):
            part = relinearise(replace(c, data=source)).data
            while part.shape[2] > target.shape[2]:
                lower = target if part.shape[2] == target.shape[2] + 1 else torch.empty_like(part[:, :, 1:])
                _rescale_into(part, lower, c.primes)
                part = lower
    p, error = c.keys.parameters, c.error
    if c.size == 3:
        error += switching_error(p, c.level, c.scale)
    for _ in range(drops):
        c = replace(c, data=out[:0, :, :1].expand(0, 2, c.level, degree), pending=c.pending - 1)
        error += rescaling_error(p.degree, c.scale)
    return replace(c, data=out, pending=pending, error=error)


def _rescale_into(source: torch.Tensor, target: torch.Tensor, primes: tuple[int, ...]) -> None:
    # SEAL rounds by adding half the prime, taking the remainder, and taking half off again in the other primes: what it
    # takes off is the remainder nearest to zero, which is what the inverse transform gives here.
    primes = primes[: source.shape[2]]
    t = tables(source.shape[3], primes)
    inverses = np.array([pow(primes[-1], -1, q) for q in primes[:-1]], np.float64)
    over(len(source), kernels.rescaled, words(source), target.numpy(), t.roots, t.scales, t.primes, inverses)


def relinearise(c: Cipher) -> Cipher:
    """From three polynomials to two, with the relinearisation key: SEAL's `relinearize`, bit for bit."""
    return c if c.size == 2 else switch(c, c.keys.relin)


def switch(c: Cipher, key: SwitchingKey) -> Cipher:
    """c0 + c1 s + c2 s' -> two polynomials, with a key that takes s' to s. SEAL's hybrid key switching, bit for bit.

    Cost: about (level + 1)^2 transforms a ciphertext. Error: `bounds.switching_error`, most of it in the first slots.
    """
    out = empty(c.count, 2, c.level + 1, c.data.shape[3], c.data.is_meta, "key switching")
    if not c.data.is_meta:
        p = c.keys.parameters
        t = tables(p.degree, (*p.primes, p.special))
        inverses = np.array([pow(p.special, -1, q) for q in p.primes], np.float64)
        arguments = (words(c.data), key.residues, out.numpy(), t.roots, t.scales, t.primes, inverses)
        over(c.count, kernels.switched, *arguments)
    return replace(c, data=out, error=c.error + switching_error(c.keys.parameters, c.level, c.scale))


def drop_to(c: Cipher, level: int) -> Cipher:
    """Forget the highest primes (SEAL's `mod_switch_to`): exact and free. For ciphertexts with nothing pending."""
    if c.pending:
        raise ScaleError("internal error: primes that a rescale still needs cannot be dropped")
    if c.level == level:
        return c
    dropped = replace(c, data=c.data[:, :, : level + 1])
    ratio = c.scale / dropped.scale
    dropped = replace(dropped, largest=c.largest * ratio, error=c.error * ratio)
    # The residues keep their scale; what differs from the canonical one of the lower level goes into the public factor.
    return held(replace(dropped, factor=c.factor / ratio), "a ciphertext of fewer primes")


def smallest(c: Cipher) -> Cipher:
    """c, settled, with the primes dropped that its values do not need; one beyond the first is left."""
    c = settle(c)
    for level in range(1, c.level):
        with suppress(ScaleError):
            return drop_to(c, level)
    return c


def cleared(c: Cipher) -> Cipher:
    """c without a factor that it withholds, which is multiplied in: one level where there is one, else free."""
    return c if c.withheld is None else times_numbers(c, [1.0] * c.count, "a product with a weight of a single number")


def sendable(c: Cipher) -> Cipher:
    """c, cleared and settled, of at most two primes: its form follows from shapes alone.

    Raises:
        ScaleError: values that two primes may not hold.
    """
    c = settle(cleared(c))
    return drop_to(c, min(c.level, 1))


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
    _need_level(c, what)
    scaled = [v * weight_scale(c) * c.multiplier for v in numbers]
    most = max(map(abs, numbers), default=0.0) * abs(c.multiplier)
    if not all(map(math.isfinite, scaled)):
        raise ScaleError(f"{what} has a factor of magnitude {most:.3g}, which no scale holds; scale the layer down")
    error = c.error * most + (c.largest + c.error) / (2 * weight_scale(c))
    product = times_integers(c, list(map(round, scaled)))
    known = replace(product, pending=c.pending + 1, factor=1.0, withheld=None, largest=c.largest * most, error=error)
    return held(known, what)


def times_weight(c: Cipher, weight: float) -> Cipher:
    """c times a single number of the evaluator's own. Free until what comes of it leaves (`cleared`)."""
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
            a = settle(_lowered(a, goal.level + 1, goal.left))
        else:
            a = _lowered(a, goal.level, goal.left)
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


def _lowered(c: Cipher, level: int, left: int) -> Cipher:
    """c, settled, brought to a level and to a smaller number of multiplications left."""
    c = settle(c)
    current = c.scale
    p = c.keys.parameters
    goal = p.scales[left] * math.prod(float(q) for q in p.primes[left + 1 : level + 1])
    times = round(goal / current)
    lowered = times_integers(replace(c, data=c.data[:, :, : level + 1]), times)
    off = abs(times * current / goal - 1)  # of a constant that is rounded
    lowered = replace(lowered, pending=level - left, largest=c.largest, declared=c.declared)
    return held(replace(lowered, error=c.error * (1 + off) + c.largest * off), "a ciphertext of fewer levels")


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
    return [round(float(v) * scale) for v in numbers]


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
