"""Ciphertexts as one tensor of residues: what `levels.py`, `arithmetic.py` and `multiply.py` compute on.

A `Cipher` is n ciphertexts of one form. `data` is int64 [n, size, level + 1, N], residues in NTT form and SEAL's order.
What a linear layer or a product leaves to be rescaled is kept pending and done when a product needs it, so a layer that
reduces 845 ciphertexts to 100 is rescaled as 100. With t = level - pending the scale is exactly D_t q_(t+1) .. q_level
(`parameters.py`), and t is how many more multiplications there are.

`largest` and `error` bound the values before that factor, and their error (`bounds.py`).

`factor` is a public number that the decoded values are to be multiplied by: averages and scalar factors cost no level,
because the next layer's weights take them in. `withheld` is one more, of the evaluator's own weights: it waits for the
next weights as well, and takes a level where none come, for it never leaves (`leaving.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from .keys import PublicKeys
from .memory import room


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
