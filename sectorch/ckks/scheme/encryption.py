"""Encryptions under a public key, as SEAL makes them, on our transforms.

(c0, c1) = round((p u + e) / P) + (m, 0): u ternary, e of SEAL's distribution (`loops.binomial`), p the public key
modulo all primes and the special one P, which is divided away: the error is that of the rounding, whatever e is.
Randomness is an AES-CTR stream under a key of the operating system's for each call. SEAL's own encryption takes several
times as long through its binding, most of it to compress the result on its way out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch

from ...choreography.streams import PairKey, random_secret
from ...errors import ArgumentError, ScaleError
from ...ring.jit import run_in_threads
from . import loops
from .ciphertext import Cipher, allocate_ciphertexts
from .keys import PublicKeys
from .ntt import plus_, tables, transform

_PIECE = 16
"""Ciphertexts whose randomness is drawn at a time."""


def encrypt_fresh(keys: PublicKeys, count: int, primes: int, messages: np.ndarray | None = None) -> torch.Tensor:
    """So many fresh encryptions with the first `primes` primes, int64 [count, 2, primes, N]; of zero unless given.

    Args:
        messages: coefficients, integers as float64 [count, N].

    Raises:
        MemoryBudgetError: before anything is done.
    """
    p, key = keys.parameters, keys.encryption_key
    out = allocate_ciphertexts((count, 2, primes, p.degree), False, "encrypting")
    chain = (*p.primes[:primes], p.special)
    t = tables(p.degree, chain)
    rows = np.ascontiguousarray(np.concatenate([key[:, :primes], key[:, -1:]], axis=1))
    factors = np.array([_near(pow(p.special, -1, q), q) for q in chain[:-1]])
    stream, nothing = PairKey(random_secret(), random_secret()), np.empty((0, 0))
    for call, start in enumerate(range(0, count, _PIECE)):
        target = out[start : start + _PIECE].numpy()
        u, errors = _drawn(stream, call, len(target), p.degree)
        message = nothing if messages is None else messages[start : start + _PIECE]
        arguments = message, u, errors, rows, target, t.roots, t.scales, t.primes, factors
        run_in_threads(len(target), loops.encrypt_loop, *arguments)
    return out


def _drawn(stream: PairKey, call: int, count: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """u int8 [count, N] and both errors int8 [count, 2, N]."""
    u, errors = np.empty((count, degree), np.int8), np.empty((count, 2, degree), np.int8)
    # N / 5 bytes are needed, of which one in twenty is refused: N / 4 fall short with a probability below 2^-300.
    bits = stream.words("ckks ternary", call, 0, count * degree // 32).numpy().view(np.uint8)
    if not loops.ternary(bits.reshape(count, degree // 4), u):
        raise RuntimeError("internal error: the randomness gives too few ternary digits")
    words = stream.words("ckks error", call, 0, 2 * count * degree).numpy()
    loops.binomial(words, errors.reshape(-1))
    return u, errors


def encode_slots(columns: np.ndarray, degree: int, scale: float) -> np.ndarray:
    """Real slots [count, up to N/2] as coefficients of their plaintexts at a scale: integers as float64 [count, N].

    Slot j is the value at zeta^(3^j), zeta = exp(i pi / N). Coefficient k is 2/N times the real part of the sum of
    slots times zeta^(-k 3^j): a transform of length N with half of its places empty, and a turn by zeta^-k.
    """
    places, turn = _places(degree)
    spread = np.zeros((len(columns), degree), np.complex128)
    spread[:, places[: columns.shape[1]]] = columns * (2.0 * scale / degree)
    return np.rint((np.fft.fft(spread, axis=1) * turn).real)


def decode_slots(coefficients: np.ndarray, scale: float) -> np.ndarray:
    """The slots complex128 [count, N/2] of plaintexts with these coefficients: what `encoded` takes back."""
    degree = coefficients.shape[1]
    places, turn = _places(degree)
    return np.fft.ifft(coefficients * np.conj(turn), axis=1)[:, places] * (degree / scale)


@lru_cache(maxsize=8)
def _places(degree: int) -> tuple[np.ndarray, np.ndarray]:
    powers = np.array([pow(3, j, 2 * degree) for j in range(degree // 2)])
    return (powers - 1) // 2, np.exp(-1j * np.pi * np.arange(degree) / degree)


def _near(value: int, q: int) -> float:
    return float(value - q if value > q // 2 else value)


# Noise flooding of decrypted results that others get.
#
# The error of a CKKS decryption depends on the secret key; with several exact decryptions of known values the key can
# be computed (Li and Micciancio, 2021, IND-CPA-D). Gaussian noise of 2^flood_bits times the error's standard deviation
# hides it (Li, Micciancio, Schultz and Sorrell, 2022). A ciphertext shows all N coefficients of its error at once, so
# that the statistical distance is of the order of sqrt(N) 2^-flood_bits, and grows with the root of the number of
# ciphertexts: `flood_distance` has the bound and its derivation.


def coefficient_error(degree: int, terms: int = 1) -> float:
    """Standard deviation of a settled ciphertext's error per coefficient, for `terms` independent ones added.

    A rescale (or an encryption) rounds two polynomials, one of which meets a ternary key: variance (1 + 2N/3) / 12.
    """
    return math.sqrt(terms * ((1 + 2 * degree / 3) / 12 + 3.2**2))


def flood_distance(degree: int, flood_bits: float, results: int = 1) -> float:
    """A bound on how far flooded results are from results whose error does not depend on the key: total variation.

    Args:
        degree: N, the ring degree: coefficients of the error that one ciphertext shows.
        flood_bits: k; the noise of a coefficient has 2^k times the error's standard deviation s.
        results: q, ciphertexts that are decrypted and handed out under one key, all together: a tensor has one for each
            element of a row.

    Returns:
        min(1, sqrt(q N) 2^-k / 2), which is 2^-22.5 for N = 2^13, k = 28 and one ciphertext. For a distance of 2^-d
        take k = d - 1 + log2(q N) / 2.

    Derivation. The noise of one ciphertext is N(0, sigma^2 I), sigma = 2^k s, rounded; the error is a vector e of
    integers, so that rounding comes after the sum and adds nothing, nor does decoding to slots. Normal distributions
    that are apart by e differ along e only: their distance is exactly 2 Phi(|e| / (2 sigma)) - 1, which is
    erf(|e| / (2 sqrt(2) sigma)) and at most |e| / (sqrt(2 pi) sigma), and their divergence is |e|^2 / (2 sigma^2).
    With N coefficients of mean square s^2 the mean of |e|^2 is N s^2. Divergences of q results add up, also where later
    ones are chosen after earlier ones were seen: at most q N 2^-2k / 2 on average over the errors, and by Pinsker's
    inequality a distance of at most sqrt(q N) 2^-k / 2. For errors that are given the exact distance is lower by a
    factor of sqrt(pi / 2) = 1.26 where it is small: nothing of another order can be promised.

    The bound is as good as s: an error larger than assumed counts by as much. What the sampler itself is apart from a
    normal distribution (`_gaussian`) is not in it.

    Raises:
        ArgumentError: a degree or number of results below one, or flood_bits that are not finite.
    """
    if not (degree >= 1 and results >= 1 and math.isfinite(flood_bits)):
        raise ArgumentError(
            f"a distance is of at least one coefficient and result and finite bits, got degree {degree}, "
            f"{results} results, {flood_bits} bits"
        )
    return 2.0 ** min(0.0, (math.log2(results) + math.log2(degree)) / 2 - flood_bits - 1)


def add_flood_noise(c: Cipher, flood_bits: float, terms: int = 64) -> Cipher:
    """c with a fresh Gaussian polynomial added to its message, of 2^flood_bits times the error's standard deviation.

    Args:
        c: settled.
        flood_bits: at least 1, and of any use from log2(sqrt(N)) on: what the result is then apart from one without an
            error of its own is `flood_distance(N, flood_bits, n)` for the n ciphertexts of c. Costs that many bits of
            precision: the values' error grows to about 2^flood_bits * sqrt(N) * 8 * coefficient_error / scale.
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
    return replace(c, data=out, error=c.error + flood_cost(degree, c.scale, flood_bits, terms))


def _gaussian(count: int, deviation: float) -> np.ndarray:
    """Rounded Gaussian integers from the operating system's randomness: 53-bit uniforms by Box and Muller.

    What lies beyond 8.6 standard deviations, 2^-54 of a normal distribution's radius, does not come up.
    """
    words = PairKey(random_secret(), random_secret()).words("ckks flood", 0, 0, 2 * count)
    words = words.numpy().view("<u8").reshape(2, count) >> np.uint64(11)
    first, second = (words.astype(np.float64) + 0.5) / 2.0**53
    return np.rint(deviation * np.sqrt(-2 * np.log(first)) * np.cos(2 * math.pi * second)).astype(np.int64)


def flood_cost(degree: int, scale: float, flood_bits: float, terms: int = 64) -> float:
    """The error that flooding adds to a slot, with probability 1 - 2^-50 below this bound."""
    sigmas = -NormalDist().inv_cdf(2.0**-51)
    return sigmas * 2.0**flood_bits * coefficient_error(degree, terms) * math.sqrt(degree) / scale
