"""Shares modulo the ciphertext modulus, exact products, Matrix Reducing and its counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tenseal import sealapi

from sectorch import ckks
from sectorch.ckks import linalg
from sectorch.ckks.convert import ResidueRing
from sectorch.ckks.linalg import (
    ENCODING_BITS,
    ProductCounts,
    Reducing,
    decrypt_columns,
    encrypt_matrix,
    product,
    products,
    residues,
    to_centred,
    uniform,
)
from sectorch.errors import FixedPointRangeError, NonFiniteError, ShapeError
from sectorch.protocols.secsv.secsv import WEIGHT_BITS, Format

PRIMES = ckks.choose(2, degree=4096).primes


def signed(field: ResidueRing, r: torch.Tensor) -> torch.Tensor:
    return field.small(r)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(PRIMES), st.integers(1, 300), st.integers(1, 6))
def test_products_are_exact(seed, q, inner, summands):
    draw = torch.Generator().manual_seed(seed)
    a = torch.randint(0, q, (3, inner), generator=draw)
    parts = [torch.randint(0, q, (inner, 2), generator=draw) for _ in range(summands)]
    a[0], parts[0][:, 0] = q // 2, q // 2 + 1  # the largest magnitudes
    got = residues(product(to_centred(a, q), sum(to_centred(p, q) for p in parts), q, summands * (q / 2 + 1)), q)
    wanted = [[sum(x * sum(int(p[k, j]) for p in parts) for k, x in enumerate(row)) % q for j in range(2)]
              for row in a.tolist()]  # fmt: skip
    assert got.tolist() == wanted


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(PRIMES), st.integers(1, 300), st.integers(1, 40))
def test_many_small_products_are_exact(seed, q, inner, summands):
    """With one digit, two, operands that are reduced first, and sums that are cut in two (all occur here)."""
    draw = torch.Generator().manual_seed(seed)
    largest = summands * (q // 2)
    a = torch.randint(-(q // 2), q // 2 + 1, (2, 3, inner), generator=draw)
    b = torch.randint(-largest, largest + 1, (2, inner, 9), generator=draw)
    a[:, 0], b[:, :, 0], b[:, :, 1] = q // 2, largest, -largest
    got = residues(products(a.double(), b.double(), q, largest), q)
    assert torch.equal(got, (a[:, :, :, None] * b.remainder(q)[:, None]).remainder(q).sum(2).remainder(q))


def test_uniform_residues_are_uniform():
    """Mean and occupied range of 30000 draws: eight standard deviations, q / sqrt(12 n)."""
    for draws, q in zip(uniform((30000,), PRIMES), PRIMES, strict=True):
        assert int(draws.min()) >= 0 and int(draws.max()) < q
        assert abs(float(draws.double().mean()) / q - 0.5) < 8 / math.sqrt(12 * 30000)


@given(st.lists(st.integers(-(2**28), 2**28), min_size=1, max_size=5))
def test_shares_add_up(values):
    field = ResidueRing(PRIMES, 12)
    a, b = field.share(field.reduce(torch.tensor(values)))
    assert signed(field, field.add(a, b)).tolist() == values


@given(st.lists(st.integers(-(2**26), 2**26), min_size=1, max_size=5))
def test_truncation_of_shares_is_right_within_one_unit(values):
    from sectorch.protocols.secsv.secsv import OFFSET_BITS

    field, v = ResidueRing(PRIMES, 12), torch.tensor(values)
    a, b = field.share(field.reduce(v))
    rho = field.mask(v.shape)
    above = field.shifted(
        field.add(field.add(a, field.add(b, rho)), field.reduce(torch.full(v.shape, 1 << OFFSET_BITS)))
    )
    offset = field.reduce(torch.full(v.shape, 1 << (OFFSET_BITS - 12)))
    quotient = signed(field, field.subtract(field.subtract(above, offset), field.shifted(rho)))
    assert set((quotient - (v >> 12)).tolist()) <= {0, 1}


def test_the_truncation_mask_is_forty_bits_longer_than_what_it_hides():
    """|v| < 2^26 where gates are below one at twice 12 fraction bits and sums below 2; rho is uniform below Q/4."""
    assert ResidueRing(PRIMES, 12).bits - 2 - 26 >= 40


def test_features_outside_the_format_are_refused(field):
    with pytest.raises(NonFiniteError):
        field.encode(torch.tensor([float("nan")]))
    with pytest.raises(FixedPointRangeError, match="scale them"):
        field.encode(torch.tensor([2.0**14]))


def test_a_chain_that_is_too_short_is_refused(field):
    with pytest.raises(ckks.LevelError, match="lower frac_bits or value_bits"):
        Format(field, 14).check(22)
    with pytest.raises(ShapeError, match="narrow the layer"):
        Reducing(5000, 3, 4096)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(2, 48, 1100), (4, 49, 100), (10, 64, 130), (70, 33, 40)])
def test_matrix_reducing_on_shares(keys, field, rows, inner, columns):
    """enc(A) x' + enc(A) x'' = enc(A) x to the last bit, decrypts to A X, and takes d_in products a ciphertext."""
    draw = torch.Generator().manual_seed(1)
    a = torch.randn(rows, inner, generator=draw, dtype=torch.float64) / 2
    x = torch.rand(inner, columns, generator=draw, dtype=torch.float64)
    layout = Reducing(rows, inner, 4096)
    half, seed = encrypt_matrix(layout, a * 2**WEIGHT_BITS, keys)
    left = layout.prepare(half, linalg.second(seed, inner, keys.parameters), field.primes)
    whole = field.encode(x)
    moduli = torch.tensor(field.primes).view(1, 1, -1, 1)
    bound = [q / 2 + 1 for q in field.primes]

    def times(share):
        return layout.multiply(left, layout.encode(share, field.primes), field.primes, bound)

    first, second = (times(half) for half in field.share(whole))
    assert torch.equal((first + second).remainder(moduli), times(whole))
    scale = 2.0 ** (keys.parameters.scale_bits + WEIGHT_BITS + field.frac_bits + ENCODING_BITS)
    got = decrypt_columns(layout, times(whole), keys, scale)[:rows, :columns]
    # A slot errs by 8 sigma of a fresh encryption, 8 sqrt(N (1 + 2N/3) / 12) / 2^26 for each weight; the features by
    # half a unit of 2^-12 and, encoded, by 0.4 W 2^-19 of their size (8 sigma of either); d_in independent terms.
    weight = (
        8 * math.sqrt(4096 * (1 + 2 * 4096 / 3) / 12 + 16 * 4096) / 2.0 ** (keys.parameters.scale_bits + WEIGHT_BITS)
    )
    feature = 2.0**-13 + 8 * 0.4 * layout.width * 2.0**-19
    bound = math.sqrt(inner) * (weight * float(x.abs().max()) + feature * float(a.abs().max()))
    assert float((got - a @ x).abs().max()) < bound < 0.05
    assert layout.counts(columns) == ProductCounts(inner * -(-columns // (2 * layout.width)), 0)
    assert layout.width * rows <= 2048
    # The same number as Algorithm 5 in sectorch.ckks takes for so many columns.
    assert ckks.MatrixReducing(rows, inner, layout.width, 2048).terms == inner


def by_seal(data, keys, scale):
    context, plain, out = keys.public.context, sealapi.Plaintext(), []
    for one in data:
        keys.secret.decryptor.decrypt(context.write(one, scale), plain)
        out.append(context.encoder.decode_complex(plain))
    return np.array(out)


def test_seeded_encryptions_are_seals(keys):
    """SEAL decrypts them to what was encrypted, and what we decrypt is what SEAL does."""
    p = keys.parameters
    scale = p.scales[p.depth]
    x = torch.randn(p.slots, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    first, seed = linalg.encrypt_seeded(x, keys)
    second = linalg.second(seed, 3, p)
    both = torch.stack([first.long(), second.permute(1, 0, 2)], dim=1)
    assert bool((both >= 0).all()) and bool((both < torch.tensor(p.primes)[:, None]).all())
    # The error is e alone, of deviation 3.24 in N coefficients, and half a unit of rounding: 8 sigma in a slot.
    error = 8 * 3.3 * math.sqrt(p.degree) / scale
    assert np.abs(by_seal(both, keys, scale).real.T - x.numpy()).max() < error
    for primes in (1, 2, 3):  # fewer primes: the same ciphertext of a lower level
        lowered = both[:, :, :primes]
        # In float64 on both sides: sums of N numbers below 2^53 units in the last place.
        assert np.abs(linalg.decrypt(lowered, keys, scale) - by_seal(lowered, keys, scale)).max() < 1e-9


def test_seeds_are_used_once_and_show_no_key(keys):
    x = torch.zeros(keys.parameters.slots, 1, dtype=torch.float64)
    (first, seed), (other, later) = linalg.encrypt_seeded(x, keys), linalg.encrypt_seeded(x, keys)
    assert not torch.equal(seed, later) and int((first == other).sum()) < 20
    with pytest.raises(ckks.ScaleError, match="scale it down"):
        linalg.encrypt_seeded(x + 1e12, keys)
    with pytest.raises(ckks.ScaleError, match="NaN"):
        linalg.encrypt_seeded(x * math.inf, keys)
