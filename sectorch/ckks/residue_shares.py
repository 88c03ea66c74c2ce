"""Additive shares modulo the ciphertext modulus, in their own file beside those mod 2^64: the factor of `E @ share`.

x = x' + x'' mod Q, x' uniform. Sharing modulo the modulus of the encryption, and not modulo a field of its own, makes
enc(w) x' + enc(w) x'' = enc(w) x hold exactly: a mask costs no precision, and nothing of the wrapped sum is left for
the party that decrypts (the "modulo" step of SecSV, section 5.1, is not needed). Source: SecSV, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import FixedPointRangeError, NonFiniteError
from .linalg import uniform


@dataclass(frozen=True)
class ResidueRing:
    """Integers modulo Q as residues int64 [primes, ...], and fixed-point numbers with so many fraction bits in them.

    Its functions give shapes of shapes.
    """

    primes: tuple[int, ...]
    frac_bits: int

    @property
    def first(self) -> ResidueRing:
        """The first prime alone: enough for labels, and a third of the work."""
        return ResidueRing(self.primes[:1], self.frac_bits)

    @property
    def bits(self) -> float:
        return math.log2(math.prod(self.primes))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        """[primes, ...] modulo each prime, in place."""
        return x.remainder_(torch.tensor(self.primes, device=x.device).view(-1, *[1] * (x.dim() - 1)))

    def reduce(self, integers: torch.Tensor) -> torch.Tensor:
        """Integers [...] -> residues [primes, ...]."""
        return self._reduced(integers.repeat(len(self.primes), *[1] * integers.dim()))

    def encode(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        """round(x * 2^(times * frac_bits)) as residues. Error: half a unit.

        Raises:
            NonFiniteError, FixedPointRangeError: NaN or infinity; |x| of 2^14 and more.
        """
        if x.is_meta:
            return self.reduce(x.to(torch.int64))
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError("a feature is NaN or infinite")
        if x.numel() and float(x.abs().max()) >= 2.0**14:
            raise FixedPointRangeError(f"features must stay below 2^14, got {float(x.abs().max()):.3g}; scale them")
        return self.reduce((x.double() * 2.0 ** (times * self.frac_bits)).round().to(torch.int64))

    def share(self, residues: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two halves, the first uniform."""
        if residues.is_meta:
            return torch.empty_like(residues), torch.empty_like(residues)
        mask = uniform(tuple(residues.shape[1:]), self.primes)
        return mask, self._reduced(residues - mask)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._reduced(x + y)

    def subtract(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._reduced(x - y)

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Element by element; primes below 2^31 keep products in int64."""
        return self._reduced(x * y)

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Residues [primes, k, m] -> their sums over k."""
        return self._reduced(x.sum(dim=1))

    def small(self, residues: torch.Tensor) -> torch.Tensor:
        """The integers in [-q_0/2, q_0/2) that have these residues, from the first prime; int64."""
        q = self.primes[0]
        return torch.where(residues[0] > q // 2, residues[0] - q, residues[0])

    def mask(self, shape: tuple[int, ...]) -> torch.Tensor:
        """rho for `truncate`: residues of integers uniform in [0, Q/4), as mixed-radix digits (see `shifted`)."""
        digits = uniform(shape, self.primes)
        digits[-1] //= 4
        return self._residues(digits)

    def _residues(self, digits: torch.Tensor) -> torch.Tensor:
        """d_0 + q_0 d_1 + q_0 q_1 d_2 + .. as residues."""
        total, weight = torch.zeros_like(digits), 1
        for digit, prime in zip(digits, self.primes, strict=True):
            factors = torch.tensor([weight % q for q in self.primes]).view(-1, *[1] * digit.dim())
            total = self.add(total, self.multiply(self.reduce(digit), factors.expand_as(total)))
            weight *= prime
        return total

    def shifted(self, residues: torch.Tensor) -> torch.Tensor:
        """floor(v / 2^frac_bits) of the integer v in [0, Q) with these residues, as residues.

        v = d + q_0 D with D < Q / q_0 < 2^46. With q_0 = a 2^f + b, floor(v / 2^f) = a D + floor((b D + d) / 2^f): the
        second term fits int64, and a D does too where Q < 2^76.
        """
        q, f = self.primes[0], self.frac_bits
        digits = self._digits(residues)
        rest, weight = torch.zeros_like(digits[0]), 1
        for digit, prime in zip(digits[1:], self.primes[1:], strict=True):
            rest = rest + digit * weight
            weight *= prime
        a, b = q >> f, q & ((1 << f) - 1)
        return self.reduce(a * rest + ((b * rest + digits[0]) >> f))

    def _digits(self, residues: torch.Tensor) -> list[torch.Tensor]:
        """Garner's mixed-radix digits."""
        digits: list[torch.Tensor] = []
        for j, q in enumerate(self.primes):
            rest, weight = residues[j].clone(), 1
            for digit, below in zip(digits, self.primes, strict=False):
                rest = (rest - digit.remainder(q) * (weight % q)).remainder_(q)
                weight *= below
            digits.append((rest * pow(weight, -1, q)).remainder_(q))
        return digits
