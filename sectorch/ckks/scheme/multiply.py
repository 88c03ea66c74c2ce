"""Products of ciphertexts, slot by slot, and inner products in one pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ...ring.loops import over
from . import sums
from .arithmetic import lowered, times_weight
from .bounds import held
from .cipher import Cipher, empty, words
from .levels import need_level, relinearise, settle
from .ntt import tables

_PIECE = 32
"""Ciphertexts prepared for a product at a time: what is rescaled for it alone is never there as a whole."""
_SPAN = 1024  # coefficients of an inner product at a time


def multiply(a: Cipher, b: Cipher, what: str = "a product") -> Cipher:
    """a * b, slot by slot: three polynomials, one rescale pending. Relinearised when something needs two.

    Error: |a| e_b + |b| e_a + e_a e_b.
    """
    same = a is b
    left = min(a.left, b.left)
    if left < 1:
        need_level(a if a.left <= b.left else b, what)
    n, _, _, degree = a.data.shape
    known = _product(a, b, left, 1, what)
    out = empty(n, 3, left + 1, degree, a.data.is_meta, what)
    if not a.data.is_meta:
        primes = tables(degree, a.keys.parameters.primes[: left + 1]).primes
        for start in range(0, n, _PIECE):
            x = _factor_of(a, slice(start, start + _PIECE), left)
            y = x if same else _factor_of(b, slice(start, start + _PIECE), left)
            target = out[start : start + _PIECE].numpy()
            over(len(x), sums.multiplied, x, y, target, primes)
    return replace(known, data=out)


def _product(a: Cipher, b: Cipher, left: int, terms: int, what: str) -> Cipher:
    """What is known of a sum of so many products, without ciphertexts; refused if its level cannot hold it."""
    x, y = (prepared(replace(c, data=torch.empty(0, *c.data.shape[1:], device="meta")), left) for c in (a, b))
    error = terms * (x.largest * y.error + y.largest * x.error + x.error * y.error)
    data = torch.empty(0, 3, left + 1, 0, device="meta")
    known = replace(a, data=data, pending=1, factor=a.factor * b.factor, declared=False)
    if b.withheld is not None:
        known = times_weight(known, b.withheld.value)
    return held(replace(known, largest=terms * x.largest * y.largest, error=error), what)


def inner(a: Cipher, b: Cipher, what: str = "an inner product") -> Cipher:
    """sum_i a_i * b_i as one ciphertext of three polynomials, one rescale pending, in one pass. Error: the products'
    added up.
    """
    left = min(a.left, b.left)
    if left < 1:
        need_level(a if a.left <= b.left else b, what)
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
    over(primes * degree // _SPAN, sums.inner, x, y, out.numpy(), q, _SPAN)
    return out


def _factor_of(c: Cipher, part: slice, left: int) -> np.ndarray:
    """Some ciphertexts relinearised, rescaled and with so many levels left, as a product takes them."""
    return words(prepared(replace(c, data=c.data[part]), left).data)


def prepared(c: Cipher, left: int) -> Cipher:
    c = settle(relinearise(c))
    return c if c.left == left else settle(lowered(c, left + 1, left))
