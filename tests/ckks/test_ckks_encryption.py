"""Encryptions on our transforms, held to SEAL: what its decryptor finds, and what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tenseal import sealapi

from sectorch import ckks
from sectorch.choreography.streams import PairKey, random_secret
from sectorch.ckks.scheme import loops
from sectorch.ckks.scheme.encryption import _drawn, encode_slots, encrypt_fresh


@pytest.fixture(scope="module")
def small():
    return ckks.keygen(2, degree=4096)


def coefficients(keys: ckks.Keys, data: torch.Tensor) -> np.ndarray:
    """What SEAL decrypts ciphertexts [n, 2, P, N] to, modulo the first prime, centred: [n, N]."""
    from sectorch.ckks.scheme.ntt import transform

    context, q = keys.public.context, keys.parameters.primes[0]
    rows = []
    for one in data:
        plain = sealapi.Plaintext()
        keys.secret.decryptor.decrypt(context.write(one, 1.0), plain)
        values = torch.from_numpy(context.parse_plain(plain, one.shape[1] - 1)[:1].copy())
        rows.append(transform(keys.parameters.degree, q).inverse(values)[0].numpy())
    found = np.stack(rows)
    return np.where(found > q // 2, found - q, found)


@pytest.mark.parametrize("primes", [1, 2, 3])
def test_seal_decrypts_zeros_to_an_error_of_its_own_size(small, primes):
    """The variance of a coefficient is that of the rounding, (1 + 2N/3) / 12, and the mean is zero; as for SEAL's."""
    count, degree = 16, 4096
    error = coefficients(small, encrypt_fresh(small.public, count, primes))
    variance, size = (1 + 2 * degree / 3) / 12, error.size
    # The coefficients of one error lie along each other by the key; a tenth is far outside of what sampling gives.
    assert abs(error.mean()) < 8 * math.sqrt(variance / size) and abs(error.var() / variance - 1) < 0.1
    assert np.abs(error).max() < 8 * math.sqrt(variance)
    encryptor, others = sealapi.Encryptor(small.public.context.seal, public_key(small)), []
    for _ in range(count):
        ciphertext = sealapi.Ciphertext(small.public.context.seal)
        encryptor.encrypt_zero(ciphertext)
        others.append(torch.from_numpy(np.array(small.public.context.read(ciphertext)[0])))
    theirs = coefficients(small, torch.stack(others))
    assert abs(error.var() / theirs.var() - 1) < 0.1


def public_key(keys: ckks.Keys):
    from sectorch.ckks.scheme.seal import load_seal_object

    return load_seal_object(sealapi.PublicKey(), keys.public.context, keys.public.blobs()["public"], "public key")


def test_seal_encrypts_the_same_under_the_same_randomness_but_for_the_rounding(small):
    """What is divided by the special prime: with no errors and u = 1 the ciphertext is the public key, rounded."""
    p, t = small.parameters, None
    from sectorch.ckks.scheme.ntt import tables, transform

    t = tables(p.degree, (*p.primes, p.special))
    u, errors = np.zeros((1, p.degree), np.int8), np.zeros((1, 2, p.degree), np.int8)
    u[0, 0] = 1
    out = np.empty((1, 2, 3, p.degree), np.int64)
    factors = np.array([float(pow(p.special, -1, q)) for q in p.primes])
    factors = np.where(factors > np.array(p.primes) / 2, factors - np.array(p.primes), factors)
    loops.encrypt_loop(
        np.empty((0, 0)), u, errors, small.public.encryption_key, out, t.roots, t.scales, t.primes, factors, 0, 1
    )
    words = small.public.context.parse_public_key(small.public.blobs()["public"])
    for k in range(2):
        tail = transform(p.degree, p.special).inverse(torch.from_numpy(words[k, 3:].copy()))[0]
        tail = torch.where(tail > p.special // 2, tail - p.special, tail)
        for j, q in enumerate(p.primes):
            rest = transform(p.degree, q).forward(tail.remainder(q)[None])[0]
            wanted = [(int(a) - int(b)) * pow(p.special, -1, q) % q for a, b in zip(words[k, j], rest, strict=True)]
            assert out[0, k, j].tolist() == wanted


def test_two_are_never_equal_and_look_uniform(small):
    data = encrypt_fresh(small.public, 40, 3)
    assert len({tuple(v.tolist()) for v in data[:, :, 0, :4].flatten(1)}) == 40
    again = encrypt_fresh(small.public, 40, 3)
    assert not any(torch.equal(a, b) for a, b in zip(data, again, strict=True))
    for j, q in enumerate(small.parameters.primes):
        words = data[:, :, j].double() / q
        assert int(data[:, :, j].min()) >= 0 and int(data[:, :, j].max()) < q
        assert abs(float(words.mean()) - 0.5) < 8 * 12**-0.5 / math.sqrt(words.numel())
        assert abs(float((words**2).mean()) - 1 / 3) < 8 * math.sqrt(4 / 45 / words.numel())
    difference = (data[:1, 1] - data[1:, 1]).remainder(torch.tensor(small.parameters.primes).view(-1, 1))
    assert int((difference == 0).sum()) < 20, "no two share their u"


def test_the_draws_have_seals_distributions():
    """Ternary: thirds, independent of the place. Errors: centred binomial of 42 bits, every value as often as it is."""
    stream = PairKey(random_secret(), random_secret())
    u, errors = _drawn(stream, 0, 64, 4096)
    for value in (-1, 0, 1):
        assert abs((u == value).mean() - 1 / 3) < 8 * math.sqrt(2 / 9 / u.size)
        assert abs((u == value).mean(0) - 1 / 3).max() < 8 * math.sqrt(2 / 9 / 64)
    assert abs((u[:, 1:] * u[:, :-1]).mean()) < 8 * (2 / 3) / math.sqrt(u.size)
    e = errors.astype(np.float64)
    assert np.abs(e).max() <= loops.PAIRS and abs(e.mean()) < 8 * math.sqrt(10.5 / e.size)
    assert abs(e.var() / 10.5 - 1) < 8 * math.sqrt(2 / e.size) and abs((e**3).mean()) < 8 * math.sqrt(
        15 * 10.5**3 / e.size
    )
    for k in range(-21, 22):
        share = math.comb(42, 21 + k) / 2**42
        assert abs((errors == k).mean() - share) < 8 * math.sqrt(share / e.size) + 8 / e.size
    assert abs(np.corrcoef(e[:, 0].ravel(), e[:, 1].ravel())[0, 1]) < 8 / math.sqrt(e[:, 0].size)


def test_bytes_that_are_refused_leave_no_digit_out():
    out = np.full((1, 20), 7, np.int8)
    bits = np.array([[255, 0, 243, 242, 1, 3]], np.uint8)
    assert loops.ternary(bits, out)
    assert out[0].tolist() == [-1] * 5 + [1] * 5 + [0, -1, -1, -1, -1] + [-1, 0, -1, -1, -1]
    assert not loops.ternary(np.full((1, 20), 250, np.uint8), out), "too few digits are told, not made up"


@pytest.mark.parametrize("scale_bits", [20, 40, 70])
def test_slots_are_encoded_as_seal_encodes_them(small, scale_bits):
    """To the last unit where float64 has it: SEAL's transform and this one add up in another order."""
    context, scale = small.public.context, 2.0**scale_bits
    slots = np.concatenate([np.random.default_rng(1).normal(size=2000), np.zeros(48)])
    if scale_bits == 70:
        slots *= 2.0**-40  # what the modulus of 74 bits holds
        scale = 2.0**70
    plain = context.parse_plain(context.encode(slots.tolist(), 2, scale), 2)
    from sectorch.ckks.scheme.ntt import transform

    ours = encode_slots(slots[None, :2000], 4096, scale)[0]
    q = small.parameters.primes[0]
    found = transform(4096, q).inverse(torch.from_numpy(plain[:1].copy()))[0].numpy()
    off = (found - ours.astype(np.int64)) % q
    off = np.minimum(off, q - off)
    assert off.max() <= max(1, np.abs(ours).max() * 2.0**-48)


@pytest.mark.parametrize("size", [1.0, 2.0**20, 2.0**43])
def test_values_decrypt_whatever_their_size(small, size):
    """Up to 2^43: coefficients pass 2^52, and are reduced by another way."""
    x = torch.tensor([[1.0], [-1.0], [0.5], [0.0]], dtype=torch.float64).repeat(512, 1) * size
    data = encrypt_fresh(small.public, 1, 3, encode_slots(x.t().numpy(), 4096, 2.0**22))
    plain = sealapi.Plaintext()
    small.secret.decryptor.decrypt(small.public.context.write(data[0], 2.0**22), plain)
    found = np.asarray(small.public.context.encoder.decode_complex(plain)).real
    assert np.abs(found - x[:, 0].numpy()).max() < 2e-3 + size * 2.0**-44
