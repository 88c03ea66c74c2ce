"""Ciphertexts as they leave a party: nothing withheld, and a form that follows from shapes alone."""

from __future__ import annotations

import torch

from ..errors import ScaleError
from .arithmetic import times_numbers
from .cipher import Cipher
from .levels import drop_to, settle


def cleared(c: Cipher) -> Cipher:
    """c without a factor that it withholds, which is multiplied in: one level where there is one, else free."""
    return c if c.withheld is None else times_numbers(c, [1.0] * c.count, "a product with a weight of a single number")


def residues(c: Cipher) -> torch.Tensor:
    """What is sent of c.

    Raises:
        ScaleError: it withholds a weight of a single number: whoever decrypts would miss it, and read other numbers.
    """
    if c.withheld is not None:
        raise ScaleError(
            "a weight of a single number waits at its owner to be multiplied in, so that the ciphertexts alone are of "
            "other values; end the model with a layer, or send e.settled()"
        )
    return c.data


def sendable(c: Cipher) -> Cipher:
    """c, cleared and settled, of at most two primes: its form follows from shapes alone.

    Raises:
        ScaleError: values that two primes may not hold.
    """
    c = settle(cleared(c))
    return drop_to(c, min(c.level, 1))
