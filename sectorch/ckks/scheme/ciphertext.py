"""Ciphertexts as one tensor of residues, and the arithmetic on them: levels, sums, products, polynomials, bounds.

A `Cipher` is n ciphertexts of one form. `data` is int64 [n, size, level + 1, N], residues in NTT form and SEAL's order.
The rescaling after a linear layer or a product is pending until a product needs it, so a layer that reduces 845
ciphertexts to 100 is rescaled as 100. With t = level - pending, the scale is exactly D_t q_(t+1) .. q_level (see
`seal.Parameters`), and the chain allows t more multiplications.

`factor` is a public number by which the decoded values are multiplied. Averages and scalar factors cost no level,
because the next layer's weights take them in. `pending_factor` is a second one, made of the evaluator's weights. The
next weights take it in too. It never leaves the evaluator, so where no weights follow it costs a level.

`largest` and `error` bound the values before these factors, and their error.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...errors import ArgumentError, KeyMismatchError, LevelError, MemoryBudgetError, ScaleError
from ...ring.jit import run_in_threads
from . import loops
from .keys import PublicKeys, SwitchingKey
from .ntt import minus_, plus_, tables, times_

# Memory of ciphertexts.
#
# `allocate_ciphertexts` makes every tensor of ciphertexts. It refuses before it allocates, and counts the tensor until
# the last reference to its storage is gone. A dry run makes the same tensors without content (meta tensors) and drops
# them at the same places, so its count is the run's.

LIMIT_BYTES = 12 << 30
_limit = [LIMIT_BYTES]


class Meter:
    """Bytes of ciphertexts that exist now (`live`), and the largest number so far (`peak`)."""

    def __init__(self):
        self.live = self.peak = 0

    def count(self, holder: Any, size: int) -> None:
        """Count `size` bytes until `holder` is gone."""
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(holder, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


_real = Meter()
_dry: ContextVar[Meter | None] = ContextVar("sectorch_ckks_meter", default=None)


@contextmanager
def metering() -> Iterator[Meter]:
    """Within this context a meter of its own counts the ciphertexts of a dry run."""
    meter = Meter()
    token = _dry.set(meter)
    try:
        yield meter
    finally:
        _dry.reset(token)


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[None]:
    """Within this context the ciphertexts of this process may take at most `limit_bytes` together."""
    previous, _limit[0] = _limit[0], int(limit_bytes)
    try:
        yield
    finally:
        _limit[0] = previous


def limit() -> int:
    """The limit in bytes."""
    return _limit[0]


def live() -> int:
    """Bytes of the ciphertexts that exist in this process."""
    return _real.live


def allocate_ciphertexts(shape: tuple[int, ...], meta: bool, what: str) -> torch.Tensor:
    """Allocate an uninitialised int64 tensor, if the memory limit allows it.

    Args:
        meta: make a meta tensor, which the meter of the dry run counts.
        what: the operation, for the error text.

    Raises:
        MemoryBudgetError: with the estimate and the ways out. Never in a dry run, which makes nothing.
    """
    size = 8 * math.prod(shape)
    if meta:
        out = torch.empty(shape, dtype=torch.int64, device="meta")
        meter = _dry.get()
        if meter is not None:
            meter.count(out, size)
        return out
    needed = _real.live + size
    if needed > _limit[0]:
        raise MemoryBudgetError(
            f"{what} would take {size / 2**30:.1f} GiB of ciphertexts beside {_real.live / 2**30:.1f} GiB that exist, "
            f"more than the {_limit[0] / 2**30:.1f} GiB allowed. Every element is a ciphertext whatever the batch: use "
            f"a smaller input or network, a smaller depth (a smaller ring), or sectorch.ckks.memory_limit(bytes)"
        )
    array = np.empty(shape, np.int64)  # numpy asks for huge pages, which cost a tenth of the page faults
    _real.count(array, size)
    return torch.from_numpy(array)


@dataclass(frozen=True, eq=False)
class PendingFactor:
    """A number made of the evaluator's weights.

    Two of them compare by identity, so that no decision depends on the values of weights.
    """

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
    """Whether `largest` is the bound that the encrypting party declared, without plain operands of the evaluator."""
    pending_factor: PendingFactor | None = None

    @property
    def multiplier(self) -> float:
        """The product of both factors; only the evaluator may know it."""
        return self.factor if self.pending_factor is None else self.factor * self.pending_factor.value

    @property
    def bound(self) -> float:
        """Every decoded value is below this in magnitude, but for its error."""
        return self.largest * abs(self.multiplier)

    @property
    def error_bound(self) -> float:
        """Every decoded value is within this of what it should be (8 standard deviations)."""
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
    def levels_left(self) -> int:
        """Multiplications that the chain still allows."""
        return self.level - self.pending

    @property
    def primes(self) -> tuple[int, ...]:
        return self.keys.parameters.primes[: self.level + 1]

    @property
    def scale(self) -> float:
        scale = self.keys.parameters.scales[self.levels_left]
        return scale * math.prod(float(q) for q in self.primes[self.levels_left + 1 :])

    def __repr__(self) -> str:
        return f"Cipher(count={self.count}, size={self.size}, level={self.level}, pending={self.pending})"


def empty(count: int, size: int, primes: int, degree: int, meta: bool, what: str) -> torch.Tensor:
    """Allocate ciphertexts, if the memory limit allows it."""
    return allocate_ciphertexts((count, size, primes, degree), meta, what)


def empty_like(data: torch.Tensor, what: str, count: int | None = None) -> torch.Tensor:
    """Allocate ciphertexts of the form of `data`: `count` of them, by default as many."""
    return allocate_ciphertexts((len(data) if count is None else count, *data.shape[1:]), data.is_meta, what)


def words(data: torch.Tensor) -> np.ndarray:
    """Residues as the compiled loops take them: contiguous."""
    return data.contiguous().numpy()


# Bounds: on a ciphertext's values, on their error, and on the values that fit a level.
#
# A `Cipher` decrypts to m / scale times its public factor. With every slot of m / scale below `largest` in magnitude
# and within `error` of its exact value, each coefficient of m is below (largest + error) scale, because it is an
# average of slots times roots of unity. So a ciphertext with t multiplications left decrypts to m itself, and not to
# m mod Q_t, where
#
#     largest + error < Q_t / (2 D_t),    Q_t = q_0 .. q_t, D_t the scale of level t.
#
# A rescale that is pending multiplies modulus and scale alike and changes nothing in this.
# `check_capacity` refuses values that do not fit, before anything is computed.
#
# Errors are slots' errors of 8 standard deviations, added up: that of a slot is a sum of N coefficients' errors of
# variance v, and has the variance N v. A bound fails in a slot with a probability below 2^-49 (of normal errors).

SIGMAS = 8.0
KEY_VARIANCE = 3.2**2
"""Variance of the error in a key, and in an encryption under the secret key."""


def capacity(parameters: Any, left: int) -> float:
    """Q_t / (2 D_t): values of a ciphertext with t multiplications left are below it."""
    return _capacities(tuple(parameters.primes), tuple(parameters.scales))[left]


@functools.lru_cache(64)
def _capacities(primes: tuple[int, ...], scales: tuple[float, ...]) -> tuple[float, ...]:
    modulus, found = 1, []
    for q, scale in zip(primes, scales, strict=True):
        modulus *= q
        found.append(math.exp(min(700.0, math.log(modulus) - math.log(2 * scale))))
    return tuple(found)


def _slot(degree: int, variance: float, scale: float) -> float:
    return SIGMAS * math.sqrt(degree * variance) / scale


def _rounding(degree: int) -> float:
    """Variance of two polynomials rounded, one of which meets a ternary key."""
    return (1 + 2 * degree / 3) / 12


def rescaling_error(degree: int, scale: float) -> float:
    """Error of a rescale to this scale."""
    return _slot(degree, _rounding(degree), scale)


def fresh_error(degree: int, scale: float) -> float:
    """Error of an encryption: that of SEAL's last rounding, of the key, and of the encoding."""
    return _slot(degree, _rounding(degree) + 16.0, scale)


def encoding_error(degree: int, scale: float) -> float:
    """Error of a plain vector, whose coefficients are rounded."""
    return _slot(degree, 1 / 12, scale)


def switching_error(parameters: Any, level: int, scale: float) -> float:
    """Error of a key switch at this level, in the slot where it is largest.

    The digit of q_j is a polynomial of coefficients in 0 .. q_j - 1; slot by slot it meets a key's error, of the
    deviation 3.2 sqrt(N), and the special prime P is divided out. As SEAL does not centre the digits, their mean
    q_j / 2 adds up in the slots next to the root 1: |sum_k zeta^k| is 2 N / pi there. The rest varies by
    q_j sqrt(N / 12).
    """
    n = parameters.degree
    digits = math.sqrt(sum((q / parameters.special) ** 2 for q in parameters.primes[: level + 1]))
    size = n / math.pi + SIGMAS * math.sqrt(n / 12)
    return SIGMAS * math.sqrt(KEY_VARIANCE * n) * digits * size / scale + rescaling_error(n, scale)


def largest_known(values: Iterable[float]) -> float:
    """The largest of the values; nan, unknown, if one of them is."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def check_capacity(c: Any, what: str) -> Any:
    """Return `c` if its values fit its level.

    Raises:
        ScaleError: they may not, and the result would wrap.
    """
    if math.isnan(c.largest):  # unknown: the encrypting party answers for it
        return c
    room, wanted = capacity(c.keys.parameters, c.levels_left), c.largest + c.error
    if not wanted < room:
        spelled = f"2^{math.log2(wanted):.1f}" if 0 < wanted < math.inf else "any size"
        raise ScaleError(
            f"{what} may give values up to {spelled} where its level, with {c.levels_left} multiplications left, holds "
            f"those below 2^{math.log2(room):.1f}: they would wrap. Declare a smaller bound "
            f"(encrypt(x, keys, bound=...), or e.bounded(...)), make keys with integer_bits= or one level more, or "
            f"scale the layer down"
        )
    return c


# Levels: rescaling, relinearisation, key switching, and dropping primes that are no longer needed.

_PIECE = 32
"""Ciphertexts that are rescaled, or prepared for a product, at a time; so no rescaled copy of all of them exists."""


def need_level(c: Cipher, what: str) -> None:
    if c.levels_left < 1:
        raise LevelError(
            f"{what} needs one more level, and the modulus chain (depth {c.keys.parameters.depth}) is used up. Make "
            f"keys with a larger depth (sectorch.ckks.explain(model, x) says which), fold layers, or lower a "
            f"polynomial's degree"
        )


def weight_scale(c: Cipher) -> float:
    """The scale of a plain factor with which the product, rescaled once, has the canonical scale of the next level."""
    p = c.keys.parameters
    return p.scales[c.levels_left - 1] * p.primes[c.levels_left] / p.scales[c.levels_left]


def rescale(c: Cipher) -> Cipher:
    """Divide by the last prime and drop it, rounding: SEAL's `rescale_to_next`, bit for bit.

    Cost: one inverse transform and `level` forward ones for each polynomial. Adds a rounding error of at most 1/2 per
    coefficient and polynomial, that is, for a ternary key, below 8 sqrt(N (1 + 2N/3) / 12) / scale in a slot (8 sigma).
    """
    return settle(c, c.pending - 1)


def settle(c: Cipher, pending: int = 0) -> Cipher:
    """Rescale until `pending` rescales are left; relinearise first, while the scale is large and the error small."""
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
    run_in_threads(
        len(source), loops.rescale_loop, words(source), target.numpy(), t.roots, t.scales, t.primes, inverses
    )


def relinearise(c: Cipher) -> Cipher:
    """From three polynomials to two, with the relinearisation key: SEAL's `relinearize`, bit for bit."""
    return c if c.size == 2 else switch(c, c.keys.relin)


def switch(c: Cipher, key: SwitchingKey) -> Cipher:
    """c0 + c1 s + c2 s' -> two polynomials, with a key that takes s' to s. SEAL's hybrid key switching, bit for bit.

    Cost: about (level + 1)^2 transforms a ciphertext. Error: `switching_error`, most of it in the first slots.
    """
    out = empty(c.count, 2, c.level + 1, c.data.shape[3], c.data.is_meta, "key switching")
    if not c.data.is_meta:
        p = c.keys.parameters
        t = tables(p.degree, (*p.primes, p.special))
        inverses = np.array([pow(p.special, -1, q) for q in p.primes], np.float64)
        arguments = (words(c.data), key.residues, out.numpy(), t.roots, t.scales, t.primes, inverses)
        run_in_threads(c.count, loops.switch_key_loop, *arguments)
    return replace(c, data=out, error=c.error + switching_error(c.keys.parameters, c.level, c.scale))


def drop_to(c: Cipher, level: int) -> Cipher:
    """Drop the highest primes (SEAL's `mod_switch_to`): exact and free. For ciphertexts with nothing pending."""
    if c.pending:
        raise ScaleError("internal error: primes that a rescale still needs cannot be dropped")
    if c.level == level:
        return c
    dropped = replace(c, data=c.data[:, :, : level + 1])
    ratio = c.scale / dropped.scale
    dropped = replace(dropped, largest=c.largest * ratio, error=c.error * ratio)
    # The residues keep their scale; what differs from the canonical one of the lower level goes into the public factor.
    return check_capacity(replace(dropped, factor=c.factor / ratio), "a ciphertext of fewer primes")


def smallest(c: Cipher) -> Cipher:
    """`c` with no rescale pending and as few primes as its values need, at least two."""
    c = settle(c)
    for level in range(1, c.level):
        with suppress(ScaleError):
            return drop_to(c, level)
    return c


# Sums of ciphertexts, products with plain numbers, and the alignment of two to one level, scale and factor.


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
    known = replace(
        product, pending=c.pending + 1, factor=1.0, pending_factor=None, largest=c.largest * most, error=error
    )
    return check_capacity(known, what)


def times_weight(c: Cipher, weight: float) -> Cipher:
    """`c` times a single number of the evaluator's own. Free until the result is sent (`clear_pending_factor`)."""
    if weight == 0:
        c, weight = times_integers(c, 0), 1.0
    return replace(
        c, pending_factor=PendingFactor(weight if c.pending_factor is None else weight * c.pending_factor.value)
    )


def check_keys(*held: Any) -> None:
    """Look whether all are under one key set: what comes of several decrypts to noise. Forms are under none.

    Raises:
        KeyMismatchError: they are not.
    """
    known = {c.keys.identity for c in held if isinstance(c.keys, PublicKeys)}
    if len(known) > 1:
        raise KeyMismatchError("two tensors under different keys cannot meet; encrypt both under one public key")


def align_pair(a: Cipher, b: Cipher) -> tuple[Cipher, Cipher]:
    """Bring two to one level, scale and factor, so that they can be added."""
    check_keys(a, b)
    if a.factor != b.factor or a.pending_factor is not b.pending_factor:
        ratio = b.factor / a.factor
        same = a.pending_factor is b.pending_factor
        if same and (1 / ratio).is_integer() and abs(1 / ratio) < 1 << 12:
            a = replace(times_integers(a, int(1 / ratio)), factor=b.factor)
        elif same and ratio.is_integer() and abs(ratio) < 1 << 12:
            b = replace(times_integers(b, int(ratio)), factor=a.factor)
        else:
            one, other = (a, b) if a.levels_left >= b.levels_left else (b, a)
            one = replace(one, factor=one.multiplier / other.multiplier, pending_factor=None)
            one = times_numbers(one, [1.0] * one.count, "an addition of differently scaled terms")
            one = replace(one, factor=other.factor, pending_factor=other.pending_factor)
            a, b = (one, other) if a.levels_left >= b.levels_left else (other, one)
    if a.levels_left < b.levels_left:
        b, a = align_pair(b, a)
        return a, b
    if a.levels_left > b.levels_left:
        goal = b
        while goal.level > a.levels_left:
            goal = rescale(goal)
        if goal.pending == 0 and goal.level < a.levels_left:
            # Land one above with a rescale pending: the constant then keeps scale_bits of precision.
            a = settle(lower_level(a, goal.level + 1, goal.levels_left))
        else:
            a = lower_level(a, goal.level, goal.levels_left)
        return a, goal
    least = min(a.pending, b.pending)
    return settle(a, least), settle(b, least)


def align_all(ciphers: Sequence[Cipher]) -> list[Cipher]:
    """Bring all to one level, scale and factor, with no rescale pending.

    Aligning two of them may give a form that neither had, so it is repeated until all agree.
    """
    ciphers = [settle(c) for c in ciphers]
    goal = min(ciphers, key=lambda c: c.levels_left)
    form = lambda c: (c.level, c.pending, c.factor, c.pending_factor, c.size)
    while any(form(c) != form(goal) for c in ciphers):
        for i, c in enumerate(ciphers):
            ciphers[i], goal = map(settle, align_pair(c, goal))
    return ciphers


def lower_level(c: Cipher, level: int, left: int) -> Cipher:
    """Bring `c` to a level and to a smaller number of multiplications left."""
    c = settle(c)
    current = c.scale
    p = c.keys.parameters
    goal = p.scales[left] * math.prod(float(q) for q in p.primes[left + 1 : level + 1])
    times = round(goal / current)
    fewer = times_integers(replace(c, data=c.data[:, :, : level + 1]), times)
    off = abs(times * current / goal - 1)  # of a constant that is rounded
    fewer = replace(fewer, pending=level - left, largest=c.largest, declared=c.declared)
    return check_capacity(replace(fewer, error=c.error * (1 + off) + c.largest * off), "a ciphertext of fewer levels")


def add(a: Cipher, b: Cipher, sign: int = 1) -> Cipher:
    """a + sign * b, ciphertext by ciphertext. The error is the sum of both errors."""
    a, b = align_pair(a, b)
    a = replace(a, largest=a.largest + b.largest, error=a.error + b.error, declared=False)
    check_capacity(a, "a sum")
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
    check_capacity(more, "a sum")
    out = empty_like(c.data, "an addition")
    if not c.data.is_meta:
        out.copy_(c.data)
        integers = integer_constants(c, numbers)
        for j, q in enumerate(c.primes):
            constants = torch.tensor([k % q for k in integers]).view(-1, 1)
            out[:, 0, j] = plus_(out[:, 0, j].clone(), constants, q)
    return replace(more, data=out)


# Ciphertexts that leave a party: without a pending factor, and in a form that follows from shapes alone.


def clear_pending_factor(c: Cipher) -> Cipher:
    """Multiply the pending factor in. It costs one level where there is one, else nothing."""
    return (
        c
        if c.pending_factor is None
        else times_numbers(c, [1.0] * c.count, "a product with a weight of a single number")
    )


def residues(c: Cipher) -> torch.Tensor:
    """The residues of `c`, to be sent.

    Raises:
        ScaleError: a weight of a single number is not multiplied in yet, so the ciphertexts alone decrypt to other
            numbers.
    """
    if c.pending_factor is not None:
        raise ScaleError(
            "a weight of a single number waits at its owner to be multiplied in, so that the ciphertexts alone are of "
            "other values; end the model with a layer, or send e.smallest_form()"
        )
    return c.data


def make_sendable(c: Cipher) -> Cipher:
    """`c` with its pending factor multiplied in, no rescale pending, and at most two primes.

    Its form then follows from shapes alone.

    Raises:
        ScaleError: its values may not fit two primes.
    """
    c = settle(clear_pending_factor(c))
    return drop_to(c, min(c.level, 1))


# Products of ciphertexts, slot by slot, and inner products in one pass.

_SPAN = 1024  # coefficients of an inner product at a time


def multiply(a: Cipher, b: Cipher, what: str = "a product") -> Cipher:
    """a * b, slot by slot: three polynomials, one rescale pending. Relinearised when something needs two.

    Error: |a| e_b + |b| e_a + e_a e_b.
    """
    same = a is b
    left = min(a.levels_left, b.levels_left)
    if left < 1:
        need_level(a if a.levels_left <= b.levels_left else b, what)
    n, _, _, degree = a.data.shape
    known = _product(a, b, left, 1, what)
    out = empty(n, 3, left + 1, degree, a.data.is_meta, what)
    if not a.data.is_meta:
        primes = tables(degree, a.keys.parameters.primes[: left + 1]).primes
        for start in range(0, n, _PIECE):
            x = _factor_of(a, slice(start, start + _PIECE), left)
            y = x if same else _factor_of(b, slice(start, start + _PIECE), left)
            target = out[start : start + _PIECE].numpy()
            run_in_threads(len(x), loops.multiply_loop, x, y, target, primes)
    return replace(known, data=out)


def _product(a: Cipher, b: Cipher, left: int, terms: int, what: str) -> Cipher:
    """The form and bounds of a sum of `terms` products, without ciphertexts; refused if it does not fit its level."""
    check_keys(a, b)
    x, y = (prepare_factor(replace(c, data=torch.empty(0, *c.data.shape[1:], device="meta")), left) for c in (a, b))
    error = terms * (x.largest * y.error + y.largest * x.error + x.error * y.error)
    data = torch.empty(0, 3, left + 1, 0, device="meta")
    known = replace(a, data=data, pending=1, factor=a.factor * b.factor, declared=False)
    if b.pending_factor is not None:
        known = times_weight(known, b.pending_factor.value)
    return check_capacity(replace(known, largest=terms * x.largest * y.largest, error=error), what)


def inner(a: Cipher, b: Cipher, what: str = "an inner product") -> Cipher:
    """sum_i a_i * b_i as one ciphertext of three polynomials, one rescale pending, in one pass. Error: the products'
    added up.
    """
    left = min(a.levels_left, b.levels_left)
    if left < 1:
        need_level(a if a.levels_left <= b.levels_left else b, what)
    known = _product(a, b, left, a.count, what)
    if a.data.is_meta:
        data = empty(1, 3, left + 1, a.data.shape[3], True, what)
    else:
        x, y = (_factor_of(c, slice(None), left) for c in (a, b))
        data = inner_products(a, x, y, what)
    return replace(known, data=data)


def inner_products(c: Cipher, x: np.ndarray, y: np.ndarray, what: str) -> torch.Tensor:
    """sum_i x[i] y[i] for ciphertexts [n, 2, P, N] under c's keys and others, or plaintexts [n, 1, P, N]."""
    primes, degree = x.shape[2:]
    out = empty(1, 1 + y.shape[1], primes, degree, False, what)
    q = np.array(c.keys.parameters.primes[:primes], np.float64)
    run_in_threads(primes * degree // _SPAN, loops.inner, x, y, out.numpy(), q, _SPAN)
    return out


def _factor_of(c: Cipher, part: slice, left: int) -> np.ndarray:
    """Some ciphertexts as a product takes them; see `prepare_factor`."""
    return words(prepare_factor(replace(c, data=c.data[part]), left).data)


def prepare_factor(c: Cipher, left: int) -> Cipher:
    """Relinearise and rescale `c`, and bring it to `left` multiplications left."""
    c = settle(relinearise(c))
    return c if c.levels_left == left else settle(lower_level(c, left + 1, left))


# Polynomials of a ciphertext by Paterson and Stockmeyer, in the smallest depth.
#
# p = q x^(2^k) + r with deg q < 2^k, recursively until the degree is below 4, which leaves c3 x^3 + c2 x^2 + c1 x + c0.
# Its powers have depths 2, 1 and 0, all different, so the constant of the deepest one waits as the ciphertext's
# public factor and those of the others use levels that they have to spare: no constant costs depth. A polynomial of
# degree d takes ceil(log2(d + 1)) levels, and one fewer if d = 2^k and what follows x^d is at most k - 1 deep (as in
# CaPriDe's GELU). Source: Paterson and Stockmeyer (1973); the depth-minimal variant as in Bossuat et al. (2021).

_LEAF = 4


def depth(coefficients: Sequence[float]) -> int:
    """Levels that `evaluate` takes."""
    degree = _degree(coefficients)
    if degree <= 1:
        return 0
    if degree < _LEAF:
        return 2 if degree == 3 else 1
    k = degree.bit_length() - 1
    if degree == 1 << k:
        # Two terms of one depth have different public factors: taking one in costs a level.
        return k + (depth(coefficients[:degree]) == k)
    top = max(k, depth(coefficients[1 << k :])) + 1
    return max(top, depth(coefficients[: 1 << k]))


def _degree(coefficients: Sequence[float]) -> int:
    return max((k for k, c in enumerate(coefficients) if c != 0), default=0)


def evaluate(c: Cipher, coefficients: Sequence[float]) -> Cipher:
    """sum_k coefficients[k] x^k.

    Error: sum_k |c_k| k |x|^(k-1) e_x, and for each product what `multiply` and a rescale add.

    Raises:
        LevelError: the chain is too short.
        ArgumentError: no coefficients.
    """
    degree = _degree(coefficients)
    if not len(coefficients) or degree < 1:
        raise ArgumentError("a polynomial needs at least a linear term")
    # The public factor f of x goes into the coefficients: c_k f^k of the bare x.
    scaled = [float(a) * c.factor**k for k, a in enumerate(coefficients[: degree + 1])]
    powers = {1: replace(c, factor=1.0)}
    return _evaluate(scaled, powers)


def _power(powers: dict[int, Cipher], k: int) -> Cipher:
    """x^k from powers of two below it, in ceil(log2 k) levels."""
    if k not in powers:
        half = k // 2 if k & (k - 1) == 0 else 1 << (k.bit_length() - 1)
        powers[k] = multiply(_power(powers, half), _power(powers, k - half), f"the power x^{k}")
    return powers[k]


def _evaluate(coefficients: list[float], powers: dict[int, Cipher]) -> Cipher:
    degree = _degree(coefficients)
    if degree < _LEAF:
        return _combined(coefficients, powers)
    k = 1 << (degree.bit_length() - 1)
    if degree == k:
        top = replace(_power(powers, k), factor=coefficients[k])
    else:
        top = multiply(_evaluate(coefficients[k:], powers), _power(powers, k), "a polynomial")
    rest = coefficients[:k]
    if _degree(rest) >= 1:
        return add(top, _evaluate(rest, powers))
    return add_numbers(top, [rest[0]] * top.count) if rest[0] else top


def _combined(coefficients: list[float], powers: dict[int, Cipher]) -> Cipher:
    """A polynomial of degree 1 to 3, the deepest power first."""
    degrees = (k for k in range(_degree(coefficients), 0, -1) if coefficients[k] != 0)
    total = functools.reduce(add, (replace(_power(powers, k), factor=coefficients[k]) for k in degrees))
    constant = coefficients[0]
    return add_numbers(total, [constant] * total.count) if constant else total
