"""The choice of ring degree and modulus chain at 128-bit security, and the canonical scale of every level.

A chain is q_0, q_1 .. q_depth and the special prime P of key switching. A ciphertext of level t holds its residues mod
q_0 .. q_t. At level t a settled ciphertext has exactly the scale D_t, where D_depth = 2^scale_bits and
D_(t-1) = D_t^2 / q_t: the scale that a product of two of them has after one rescale. Plain weights are encoded at
D_(t-1) q_t / D_t, so linear layers land on it too, and no two ciphertexts ever disagree on their scale (Kim,
Papadimitriou and Polyakov, 2020, "reduced-error CKKS"). The primes are chosen one by one so that D_t stays near
2^scale_bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tenseal import sealapi

from ..errors import SecurityLevelError
from .modular import MAX_PRIME_BITS

DEGREES = (4096, 8192, 16384, 32768)
SECURITY_BITS = 128
INTEGER_BITS = 8
"""log2 of the magnitude that fits the last level: q_0 = 2^(scale_bits + INTEGER_BITS), half of it on each side of 0."""
VALUE_BOUND = 8.0
"""The bound on a fresh ciphertext's values unless another is declared: the same for all data."""
SPECIAL_BITS = 4
"""The special prime is this many bits larger than q_0, where 2^50 allows it: key switching then adds less error than a
rescale does."""
_PREFERRED, _LEAST, _MOST = 28, 20, 40


def max_bits(degree: int) -> int:
    """log2 of the largest modulus, special prime included, that SEAL calls 128-bit secure
    (HomomorphicEncryption.org).
    """
    return sealapi.CoeffModulus.MaxBitCount(degree, sealapi.SEC_LEVEL_TYPE.TC128)


@dataclass(frozen=True)
class Parameters:
    """Public parameters: everything that both sides must agree on.

    Attributes:
        degree: N of the ring Z[X]/(X^N + 1); N/2 slots.
        primes: q_0 .. q_depth, each 1 mod 2N and below 2^50.
        special: the prime of key switching.
        scale_bits: log2 of the scale of a fresh ciphertext.

    Raises:
        SecurityLevelError: SEAL does not accept the set at 128 bits.
    """

    degree: int
    primes: tuple[int, ...]
    special: int
    scale_bits: int

    def __post_init__(self):
        if self.degree not in DEGREES:
            raise SecurityLevelError(f"the ring degree must be one of {DEGREES}, got {self.degree}")
        if self.total_bits > max_bits(self.degree):
            raise SecurityLevelError(
                f"a modulus of {self.total_bits} bits at degree {self.degree} is weaker than {SECURITY_BITS} bits of "
                f"security; {max_bits(self.degree)} bits is SEAL's limit: take a larger degree or a smaller depth"
            )
        if not 2 <= len(self.primes) <= 40 or len({*self.primes, self.special}) != len(self.primes) + 1:
            raise SecurityLevelError("a modulus chain is made of 2 to 40 distinct primes and one special prime")
        if max(self.special, *self.primes).bit_length() > MAX_PRIME_BITS:
            raise SecurityLevelError(f"primes of a chain, the special one included, must be below 2^{MAX_PRIME_BITS}")
        for q in (*self.primes, self.special):
            if q < 1 << 12 or not is_prime(q) or (q - 1) % (2 * self.degree):
                raise SecurityLevelError(f"{q} is not a prime that is 1 mod {2 * self.degree}")

    @property
    def depth(self) -> int:
        return len(self.primes) - 1

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def integer_bits(self) -> int:
        """log2 of q_0 over the scale: what `choose` was asked for."""
        return round(math.log2(self.primes[0])) - self.scale_bits

    @property
    def total_bits(self) -> int:
        return math.prod((self.special, *self.primes)).bit_length()

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """D_0 .. D_depth."""
        scales = [2.0**self.scale_bits]
        for q in reversed(self.primes[1:]):
            scales.append(scales[-1] ** 2 / q)
        return tuple(reversed(scales))

    def __str__(self) -> str:
        bits = [q.bit_length() for q in self.primes]
        return (
            f"CKKS with N = {self.degree} ({self.slots} slots), depth {self.depth}, scale 2^{self.scale_bits}, primes "
            f"of {bits} + {self.special.bit_length()} bits: {self.total_bits} of the {max_bits(self.degree)} that "
            f"{SECURITY_BITS}-bit security allows"
        )


def choose(
    depth: int,
    *,
    slots: int | None = None,
    scale_bits: int | None = None,
    integer_bits: int = INTEGER_BITS,
    degree: int | None = None,
) -> Parameters:
    """The smallest degree whose 128-bit modulus carries a depth, and the largest scale up to 2^40 that fits it.

    Args:
        depth: multiplications in sequence (a linear layer, a square and a product each take one).
        slots: samples in a batch that must fit; N/2 slots.
        scale_bits: log2 of the scale; unless named, at least 28 and as large as the degree allows.
        integer_bits: the results are below 2^(integer_bits - 1) in magnitude.
        degree: the ring degree, if it must be this one.

    Raises:
        SecurityLevelError: nothing secure has this depth and scale; the message names what would fit.
    """
    if not 1 <= depth <= 38 or not 2 <= integer_bits <= 20:
        raise SecurityLevelError(
            f"depth must be between 1 and 38 and integer_bits between 2 and 20, got {depth} and {integer_bits}"
        )
    most = min(_MOST, MAX_PRIME_BITS - integer_bits)
    if scale_bits is not None and not _LEAST <= scale_bits <= most:
        raise SecurityLevelError(f"scale_bits must be between {_LEAST} and {most}, got {scale_bits}")
    if slots is not None and slots > DEGREES[-1] // 2:
        raise SecurityLevelError(
            f"at most {DEGREES[-1] // 2} slots in one ciphertext, asked for {slots}; cut the batch"
        )
    for candidate in DEGREES if degree is None else (degree,):
        if candidate not in DEGREES:
            raise SecurityLevelError(f"the ring degree must be one of {DEGREES}, got {candidate}")
        if slots is not None and candidate // 2 < slots:
            continue
        room = (max_bits(candidate) - 2 * integer_bits - SPECIAL_BITS) // (depth + 2)
        wanted = scale_bits or (_LEAST if degree is not None else _PREFERRED)
        # Primes lie a little above or below their power of two: where the product is a bit too long, one bit less will
        # do.
        for bits in [scale_bits] if scale_bits else range(min(room, most), wanted - 1, -1):
            chain = _chain(candidate, depth, bits, integer_bits) if room >= bits else None
            if chain is not None:
                return chain
    limit = degree or DEGREES[-1]
    least = scale_bits or _LEAST
    fits = (max_bits(limit) - 2 * integer_bits - SPECIAL_BITS) // least - 2
    raise SecurityLevelError(
        f"no 128-bit secure chain at degree {limit} has depth {depth} with scale 2^{least}; depth {fits} fits. Fold "
        f"layers together, use square in place of higher polynomials, or run the non-linear layers on shares"
    )


def _chain(degree: int, depth: int, scale_bits: int, integer_bits: int) -> Parameters | None:
    """Primes from the top: each the unused one nearest to D_t^2 / 2^scale_bits, so that the next scale is near it.

    None where their product is longer than the degree's limit.
    """
    aim = 2.0**scale_bits
    used: set[int] = set()

    def take(near: float, limit: int | None = None) -> int:
        q = _nearest_prime(near, 2 * degree, used, limit)
        used.add(q)
        return q

    special_bits = min(scale_bits + integer_bits + SPECIAL_BITS, MAX_PRIME_BITS)
    special = take(2.0**special_bits, 1 << special_bits)
    first = take(2.0 ** (scale_bits + integer_bits), 1 << (scale_bits + integer_bits))
    scale, upper = aim, []
    for _ in range(depth):
        upper.append(take(scale * scale / aim))
        scale = scale * scale / upper[-1]
    if math.prod((special, first, *upper)).bit_length() > max_bits(degree):
        return None
    return Parameters(degree, (first, *reversed(upper)), special, scale_bits)


def _nearest_prime(near: float, step: int, used: set[int], limit: int | None) -> int:
    centre = round(near / step) * step + 1
    for distance in range(1 << 20):
        for q in (centre - distance * step, centre + distance * step):
            if q > 1 << 12 and q not in used and (limit is None or q < limit) and is_prime(q):
                return q
    raise SecurityLevelError(f"no prime that is 1 mod {step} near {near:.0f}")


def is_prime(n: int) -> bool:
    """Miller-Rabin with the bases that decide every n below 3.3 * 10^24 (Sorenson and Webster, 2015)."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if n < 2 or any(n % p == 0 for p in bases):
        return n in bases
    d, twos = n - 1, 0
    while d % 2 == 0:
        d, twos = d // 2, twos + 1
    for base in bases:
        x = pow(base, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
