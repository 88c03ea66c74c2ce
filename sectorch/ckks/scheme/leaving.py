"""Ciphertexts as they leave a party: nothing withheld, and a form that follows from shapes alone."""

from __future__ import annotations

from .arithmetic import times_numbers
from .cipher import Cipher
from .levels import drop_to, settle


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
