"""Levels of ciphertexts: rescaling, relinearisation, key switching, and primes that are no longer needed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from ...ring.loops import over
from ..errors import LevelError, ScaleError
from . import kernels
from .bounds import held, rescaling_error, switching_error
from .cipher import Cipher, empty, words
from .keys import SwitchingKey
from .ntt import tables

_PIECE = 32
"""Ciphertexts rescaled at a time."""


def need_level(c: Cipher, what: str) -> None:
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
