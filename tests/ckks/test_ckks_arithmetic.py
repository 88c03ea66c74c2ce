"""Modular arithmetic against Python integers; transforms, rescaling and products against SEAL, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tenseal import sealapi

from sectorch import ckks
from sectorch.ckks.linalg import rotate
from sectorch.ckks.scheme import ciphertext
from sectorch.ckks.scheme.ntt import (
    dot,
    limb_width,
    minus_,
    plus_,
    reduce_,
    reversed_bits,
    row_sum,
    smallest_root,
    times_,
    transform,
)
from sectorch.ckks.scheme.seal import DEGREES, Parameters, context_of, is_prime, load_seal_object, max_bits
from sectorch.ckks.tensor.layers import _digits, encode_weights, weighted_sums

PRIMES = (8209, 268369921, 2147483647, 68719230977, (1 << 50) - 27)


@given(q=st.sampled_from(PRIMES), values=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40))
def test_reduction(q, values):
    edges = [k * q + d for k in (-3, -1, 0, 1, 2**62 // q) for d in (-1, 0, 1) if abs(k * q + d) <= 2**62]
    x = torch.tensor(values + edges)
    assert reduce_(x, q).tolist() == [v % q for v in values + edges]


@given(q=st.sampled_from(PRIMES), data=st.data())
def test_products_and_sums(q, data):
    residue = st.integers(0, q - 1) | st.sampled_from([0, 1, q - 1, q // 2])
    pairs = [*data.draw(st.lists(st.tuples(residue, residue), min_size=1, max_size=30)), (q - 1, q - 1)]
    x, y = (torch.tensor(v) for v in zip(*pairs, strict=True))
    assert times_(x.clone(), y, q).tolist() == [a * b % q for a, b in pairs]
    assert plus_(x.clone(), y, q).tolist() == [(a + b) % q for a, b in pairs]
    assert minus_(x.clone(), y, q).tolist() == [(a - b) % q for a, b in pairs]


@given(
    q=st.sampled_from(PRIMES),
    bits=st.integers(1, 45),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 70)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_matrix_products_are_exact(q, bits, shape, seed):
    rng = np.random.default_rng(seed)
    rows, inner, columns = shape
    weight = torch.from_numpy(rng.integers(-(2**bits), 2**bits, (rows, inner)))
    residues = torch.from_numpy(rng.integers(0, q, (inner, columns)))
    residues[0] = q - 1
    expected = (weight.numpy().astype(object) @ residues.numpy().astype(object)) % q
    assert dot(weight, residues, q).tolist() == expected.tolist()


@given(q=st.sampled_from(PRIMES), total=st.floats(1, 2.0**57))
def test_the_bound_beside_the_code(q, total):
    """Either residues stay whole and total q <= 2^62, or a piece's largest sum plus a carry fits int64."""
    width = limb_width(q, total)
    assert total * q <= 2.0**62 if width >= q.bit_length() else total * 2.0**width + q < 2.0**63


def test_too_large_rows_are_refused():
    with pytest.raises(ckks.ScaleError, match="scale the weights"):
        limb_width(PRIMES[1], 2.0**60)


@given(weight=st.lists(st.integers(-(2**61), 2**61), min_size=1, max_size=50))
def test_row_sums_are_upper_bounds(weight):
    assert row_sum(torch.tensor([weight])) >= sum(abs(w) for w in weight)


@given(depth=st.integers(1, 12), integer_bits=st.integers(4, 12))
@settings(max_examples=25)
def test_chosen_parameters_are_secure_and_keep_their_scale(depth, integer_bits):
    p = ckks.choose(depth, integer_bits=integer_bits)
    assert p.depth == depth and p.degree in DEGREES and p.total_bits <= max_bits(p.degree)
    assert all(is_prime(q) and q % (2 * p.degree) == 1 for q in (*p.primes, p.special))
    assert p.special > max(p.primes)
    # The primes are the nearest there are: a scale is off by the gap to the next prime, doubled at the level below.
    assert all(abs(s / 2.0**p.scale_bits - 1) < 0.02 for s in p.scales)


def test_weak_parameters_are_refused():
    good = ckks.choose(5)
    with pytest.raises(ckks.SecurityLevelError, match="weaker than 128 bits"):
        Parameters(4096, good.primes, good.special, good.scale_bits)
    with pytest.raises(ckks.SecurityLevelError, match=r"depth .* fits"):
        ckks.keygen(depth=30, degree=8192)
    with pytest.raises(ckks.SecurityLevelError, match="one of"):
        ckks.choose(1, degree=1024)
    with pytest.raises(ckks.SecurityLevelError, match="cut the batch"):
        ckks.choose(1, slots=1 << 20)


def test_seal_says_128_bits(keys):
    context = keys.public.context.seal
    assert context.parameters_set()
    assert context.key_context_data().qualifiers().sec_level == sealapi.SEC_LEVEL_TYPE.TC128


def test_special_steps_of_the_chain(keys):
    p = keys.parameters
    for t in range(1, p.depth + 1):
        assert p.scales[t - 1] == pytest.approx(p.scales[t] ** 2 / p.primes[t], rel=1e-15)


@pytest.mark.parametrize("degree", [4096, 8192, 16384])
def test_transforms_are_inverse_and_seals(degree):
    p = ckks.choose(1, degree=degree)
    generator = np.random.default_rng(degree)
    for q in p.primes:
        x = torch.from_numpy(generator.integers(0, q, (3, degree)))
        values = transform(degree, q).forward(x)
        assert torch.equal(transform(degree, q).inverse(values), x)
    # SEAL's own transform of a ciphertext out of NTT form and back.
    keys = ckks.keygen(1, degree=degree)
    e = ckks.encrypt(torch.randn(4, 1, dtype=torch.float64), keys.public)
    context = keys.public.context
    seal = context.write(e.cipher.data[0], e.cipher.scale)
    context.evaluator.transform_from_ntt_inplace(seal)
    array = seal.dyn_array()
    for j, q in enumerate(keys.parameters.primes):
        mine = transform(degree, q).inverse(e.cipher.data[0, 0, j])
        start = j * degree
        assert mine[:200].tolist() == [array[start + i] for i in range(200)]


def test_rescaling_is_seals_bit_for_bit(keys):
    e = ckks.encrypt(torch.randn(8, 2, dtype=torch.float64), keys.public)
    c, context = e.cipher, keys.public.context
    c = replace(c, pending=1)
    for _ in range(2):
        ours = ciphertext.rescale(c)
        for i in range(c.count):
            seal = context.write(c.data[i], c.scale)
            context.evaluator.rescale_to_next_inplace(seal)
            assert np.array_equal(context.read(seal)[0], ours.data[i].numpy())
        c = replace(ours, pending=1)


def test_products_are_seals_bit_for_bit(keys):
    a, b = (ckks.encrypt(torch.randn(8, 2, dtype=torch.float64), keys.public).cipher for _ in range(2))
    context = keys.public.context
    for x, y in ((a, b), (a, a)):
        ours = ciphertext.multiply(x, y)
        for i in range(x.count):
            left, right = (context.write(v.data[i], v.scale) for v in (x, y))
            context.evaluator.multiply_inplace(left, right)
            assert np.array_equal(context.read(left)[0], ours.data[i].numpy())


def test_relinearising_is_seals_bit_for_bit(keys):
    e = ckks.encrypt(torch.randn(8, 3, dtype=torch.float64), keys.public, bound=None)
    context, relin = keys.public.context, sealapi.RelinKeys()
    load_seal_object(relin, context, keys.public.blobs()["relin"], "key")
    c = ciphertext.multiply(e.cipher, e.cipher)
    for _ in range(3):
        ours = ciphertext.relinearise(c)
        for i in range(c.count):
            seal = context.write(c.data[i], c.scale)
            context.evaluator.relinearize_inplace(seal, relin)
            assert np.array_equal(context.read(seal)[0], ours.data[i].numpy())
        lower = ciphertext.settle(ours)
        c = ciphertext.multiply(lower, lower)


@pytest.mark.parametrize("steps", [1, 5, -3])
def test_rotations_are_seals_bit_for_bit(steps):
    keys = ckks.keygen(1, rotations=[steps])
    context, galois = keys.public.context, sealapi.GaloisKeys()
    load_seal_object(galois, context, keys.public.blobs()["galois"], "key")
    c = ckks.encrypt(torch.randn(8, 2, dtype=torch.float64), keys.public).cipher
    ours = rotate(c, steps)
    for i in range(c.count):
        seal = context.write(c.data[i], c.scale)
        context.evaluator.rotate_vector_inplace(seal, steps, galois)
        assert np.array_equal(context.read(seal)[0], ours.data[i].numpy())


def test_inner_products_are_the_sums_of_seals_products(keys):
    """Of two ciphertexts, and of a ciphertext with plaintexts; residues at their ends included."""
    a, b = (ckks.encrypt(torch.randn(8, 4, dtype=torch.float64), keys.public).cipher for _ in range(2))
    for c in (a, b):
        c.data[0, :, :, :8] = torch.tensor(keys.parameters.primes).view(-1, 1) - 1
    q = torch.tensor(keys.parameters.primes).view(-1, 1)
    products = ciphertext.multiply(a, b).data
    assert torch.equal(ciphertext.inner(a, b).data[0], products.sum(0).remainder(q))
    plain = ciphertext.inner_products(a, a.data.numpy(), b.data[:, :1].contiguous().numpy(), "a test")
    assert torch.equal(plain[0, 0], products[:, 0].sum(0).remainder(q))


@given(bits=st.integers(1, 61), q=st.sampled_from(PRIMES), seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_weights_are_cut_into_exact_digits(bits, q, seed):
    """The digits add up to the weights, and what a loop adds up of one digit stays below 2^62."""
    weights = torch.from_numpy(np.random.default_rng(seed).integers(-(2**bits) + 1, 2**bits, (3, 7)))
    try:
        digits, base = _digits(weights, q)
    except ckks.ScaleError:
        assert bits > 40
        return
    assert digits.shape[1:] == (4, 8) and not digits[:, 3].any() and not digits[:, :, 7].any()
    total = np.zeros((3, 7), object)
    for digit in digits[:, :3, :7].astype(object):
        assert max(abs(digit).sum(1)) * (q - 1) + 2 * q < 2**62
        total = total * base + digit
    assert (total % q == weights.numpy().astype(object) % q).all()


@pytest.mark.parametrize("degree", [4096, 32768])
def test_transforms_at_the_largest_primes(degree):
    """The bounds beside the code are tightest for primes near 2^50 and residues at either end."""
    q = next(n for n in range((1 << 50) - 2 * degree + 1, 0, -2 * degree) if is_prime(n))
    rng = np.random.default_rng(degree)
    x = torch.from_numpy(
        np.stack([rng.integers(0, q, degree), rng.integers(0, 2, degree) * (q - 1), np.full(degree, q // 2)])
    )
    values = transform(degree, q).forward(x)
    assert torch.equal(transform(degree, q).inverse(values), x)
    # Place i is the value at psi^(2 br(i) + 1): a few of them by Horner's rule in Python integers.
    psi = smallest_root(q, 2 * degree)
    for i in (0, 1, 63, 64, degree // 2 + 5, degree - 1):
        point, value = pow(psi, 2 * int(reversed_bits(degree)[i]) + 1, q), 0
        for c in reversed(x[1].tolist()):
            value = (value * point + c) % q
        assert int(values[1, i]) == value


def test_sums_are_seals_bit_for_bit(keys):
    a, b = (ckks.encrypt(torch.randn(8, 2, dtype=torch.float64), keys.public).cipher for _ in range(2))
    context = keys.public.context
    for sign, name in ((1, "add_inplace"), (-1, "sub_inplace")):
        seal = context.write(a.data[0], a.scale)
        getattr(context.evaluator, name)(seal, context.write(b.data[0], b.scale))
        assert np.array_equal(context.read(seal)[0], ciphertext.add(a, b, sign).data[0].numpy())


def test_weighted_sums_are_seals_bit_for_bit(keys):
    """A linear layer against SEAL's multiply_plain and add, with the integer weights as plaintext constants."""
    c = ckks.encrypt(torch.randn(8, 3, dtype=torch.float64), keys.public).cipher
    weights = torch.randn(2, 3, dtype=torch.float64)
    ours, integers = weighted_sums(c, weights), encode_weights(weights, c)
    context = keys.public.context
    for o in range(2):
        total = None
        for k in range(3):
            term = context.write(c.data[k], c.scale)
            # An integer constant at scale 1 is the constant polynomial of exactly that integer.
            context.evaluator.multiply_plain_inplace(term, context.encode(int(integers[o, k]), c.level, 1.0))
            if total is None:
                total = term
            else:
                context.evaluator.add_inplace(total, term)
        assert np.array_equal(context.read(total)[0], ours.data[o].numpy())


def test_contexts_are_kept(keys):
    assert context_of(keys.parameters) is keys.public.context
