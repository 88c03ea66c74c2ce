"""Noise flooding: what a decrypted CKKS result may be given away with.

The error of a CKKS decryption depends on the secret key; with several exact decryptions of known values the key can be
computed (Li and Micciancio, 2021, IND-CPA-D). Gaussian noise of 2^flood_bits times the error's standard deviation hides
it: statistical distance about 2^-flood_bits for each shared result (Li, Micciancio, Schultz and Sorrell, 2022).
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import torch

from ..randomness import PairKey, random_secret
from .cipher import Cipher
from .errors import ScaleError
from .modular import plus_
from .ntt import transform


def coefficient_error(degree: int, terms: int = 1) -> float:
    """Standard deviation of a settled ciphertext's error per coefficient, for `terms` independent ones added.

    A rescale (or an encryption) rounds two polynomials, one of which meets a ternary key: variance (1 + 2N/3) / 12.
    """
    return math.sqrt(terms * ((1 + 2 * degree / 3) / 12 + 3.2**2))


def flooded(c: Cipher, flood_bits: int, terms: int = 64) -> Cipher:
    """c with a fresh Gaussian polynomial added to its message, of 2^flood_bits times the error's standard deviation.

    Args:
        c: settled.
        flood_bits: at least 1. Costs that many bits of precision: the values' error grows to about
            2^flood_bits * sqrt(N) * 8 * coefficient_error / scale.
        terms: the error is taken to be that of so many fresh ciphertexts added up.

    Raises:
        ScaleError: the noise would not fit the modulus that is left.
    """
    n, _, _, degree = c.data.shape
    deviation = 2.0**flood_bits * coefficient_error(degree, terms)
    room = math.log2(c.primes[0]) + sum(math.log2(q) for q in c.primes[1:])
    if flood_bits < 1 or math.log2(deviation) + 4 > min(room - 2, 50):
        raise ScaleError(
            f"flooding by {flood_bits} bits does not fit the {room:.0f} bits of modulus left; flood before a rescale"
        )
    if c.data.is_meta:
        return c
    out = c.data.clone()
    for i in range(n):
        noise = torch.from_numpy(_gaussian(degree, deviation))
        for j, q in enumerate(c.primes):
            out[i, 0, j] = plus_(
                out[i, 0, j].clone(), transform(degree, q).forward(noise.remainder(q).view(1, -1))[0], q
            )
    return replace(c, data=out)


def _gaussian(count: int, deviation: float) -> np.ndarray:
    """Rounded Gaussian integers from the operating system's randomness: 53-bit uniforms by Box and Muller."""
    words = PairKey(random_secret(), random_secret()).words("ckks flood", 0, 0, 2 * count)
    words = words.numpy().view("<u8").reshape(2, count) >> np.uint64(11)
    first, second = (words.astype(np.float64) + 0.5) / 2.0**53
    return np.rint(deviation * np.sqrt(-2 * np.log(first)) * np.cos(2 * math.pi * second)).astype(np.int64)


def flood_cost(degree: int, scale: float, flood_bits: int, terms: int = 64) -> float:
    """The error that flooding adds to a slot, with probability 1 - 2^-50 below this bound."""
    sigmas = -NormalDist().inv_cdf(2.0**-51)
    return sigmas * 2.0**flood_bits * coefficient_error(degree, terms) * math.sqrt(degree) / scale
