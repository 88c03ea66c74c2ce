"""Aggregates out of ciphertexts: the right sums, and nothing else that could be decrypted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch import ckks
from sectorch.ckks.exchange import _check_tag, _tag, _words
from sectorch.protocols.capride import CorruptedCiphertextError
from sectorch.protocols.capride.exchange import blocks, copies


@pytest.fixture(scope="module")
def keys() -> ckks.Keys:
    return ckks.keygen(1, degree=4096, scale_bits=28)


@given(st.integers(1, 9000), st.sampled_from([2048, 4096, 8192]))
def test_copies_fill_the_slots(samples: int, slots: int):
    count = copies(samples, slots)
    assert count & (count - 1) == 0
    assert count == 1 or count * samples <= slots < 2 * count * samples


def products(keys: ckks.Keys, directions: torch.Tensor, z: torch.Tensor, count: int) -> ckks.CKKSTensor:
    q, e = (ckks.encrypt(v, keys, bound=None) for v in (blocks(directions, count), z.repeat_interleave(count, 0)))
    return ckks.inner(q, e.unsqueeze(1))


@given(st.integers(1, 2048), st.integers(1, 11), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=12)
def test_sums_are_the_samples_own(n: int, numbers: int, classes: int, seed: int):
    keys = test_sums_are_the_samples_own.keys = getattr(test_sums_are_the_samples_own, "keys", None) or ckks.keygen(
        1, degree=4096, scale_bits=28
    )
    draws = torch.Generator().manual_seed(seed)
    directions = 2 * torch.rand(numbers, n, classes, generator=draws, dtype=torch.float64) - 1
    directions /= directions.abs().sum(2).amax(1).clamp_min(1e-9).view(-1, 1, 1)
    z = 4 * torch.randn(n, classes, generator=draws, dtype=torch.float64)
    p, count = keys.parameters, copies(n, keys.parameters.slots)
    found = ckks.sum_batch(products(keys, directions, z, count), count, 1.0).decrypt(keys.secret).reshape(-1)[:numbers]
    # A fresh encryption e; a product |q| e + |z| e, and a rescale and an encryption of zero, below e each; summed over
    # all slots of a group, used or not. The flooding is eight standard deviations.
    e = 8 * (p.degree * ((1 + 2 * p.degree / 3) / 12 + 16)) ** 0.5 / 2**p.scale_bits
    bound = p.slots / count * e * (1 + classes * (float(z.abs().max()) + 1) + 2) + 8 * ckks.sum_noise(p, count, 1.0)
    torch.testing.assert_close(found, torch.einsum("rnm,nm->r", directions, z), rtol=0, atol=bound)


def test_single_samples_cannot_be_decrypted(keys: ckks.Keys):
    """The owner opens all that it was sent, every coefficient: the groups' sums are right and the slots are noise."""
    n, slots = 200, keys.parameters.slots
    count = copies(n, slots)
    z = torch.randn(n, 1, dtype=torch.float64)
    directions = torch.ones(1, n, 1, dtype=torch.float64)
    whole = products(keys, directions, z, count)
    sums = ckks.sum_batch(whole, count, 1.0)
    sealed = sums.data
    assert sealed.shape == (1, 2 * count + keys.parameters.degree)
    constants, body = sealed[:, : 2 * count], sealed[:, 2 * count :]
    # What an answer that was not sealed would show.
    assert float((whole.decrypt(keys.secret)[::count, 0] - z[:, 0]).abs().max()) < 0.1
    context, p = keys.public.context, keys.parameters
    from tenseal import sealapi

    from sectorch.ckks.scheme.ntt import transform

    first = torch.zeros_like(body)
    first[:, :: p.degree // (2 * count)] = constants
    q = p.primes[0]
    residues = torch.stack([transform(p.degree, q).forward(first), body], 1)[0].unsqueeze(1).contiguous()
    plain = sealapi.Plaintext()
    keys.secret.decryptor.decrypt(context.write(residues, p.scales[0]), plain)
    opened = torch.tensor(context.encoder.decode_double(plain)[: n * count]).view(n, count)[:, 0].double()
    # Uniform coefficients mod q: slots of deviation q / scale sqrt(N / 12), far beyond any logit, unrelated to them.
    assert float(opened.std()) > 100
    correlation = torch.corrcoef(torch.stack([opened, z[:, 0]]))[0, 1]
    assert abs(float(correlation)) < 6 / n**0.5
    assert float((sums.decrypt(keys.secret)[0, 0] - z.sum()).abs()) < 1


def test_two_seals_of_one_answer_differ(keys: ckks.Keys):
    """Rerandomised: the body is fresh, and so is the noise."""
    whole = products(keys, torch.ones(1, 50, 1), torch.ones(50, 1), 32)
    one, other = (ckks.sum_batch(whole, 32, 4.0).data for _ in range(2))
    assert float((one[:, 64:] == other[:, 64:]).double().mean()) < 0.01
    assert not torch.equal(one[:, :64], other[:, :64])


def test_noise_is_what_was_asked_for(keys: ckks.Keys):
    """400 aggregates of zero carry noise of the deviation that `ckks.sum_noise` states, within 6 standard errors."""
    count, p = 16, keys.parameters
    bits = ckks.flood_bits_for(p, count, 0.5, 1.0, 1.0)
    assert ckks.sum_noise(p, count, bits) == pytest.approx(0.5)
    zero = ckks.encrypt(torch.zeros(100 * count, 25, dtype=torch.float64), keys, bound=None) * 1.0
    zero = ckks.inner(zero.unsqueeze(2), ckks.encrypt(torch.zeros(100 * count, 25, 1), keys, bound=None))
    found = ckks.sum_batch(zero, count, bits).decrypt(keys.secret).reshape(-1)
    assert found.std() == pytest.approx(0.5, rel=6 / (2 * len(found)) ** 0.5)
    assert abs(float(found.mean())) < 6 * 0.5 / len(found) ** 0.5
    assert ckks.flood_bits_for(p, count, 0.0, 1.0, 3.0) == 3.0


def test_the_wrong_key_and_damage_are_named(keys: ckks.Keys):
    sums = ckks.sum_batch(products(keys, torch.ones(1, 50, 1), torch.ones(50, 1), 32), 32, 1.0)
    mine, other = keys.public, ckks.keygen(1, degree=4096, scale_bits=28).public
    sealed = _words(sums)
    tag = _tag(sums, sealed)
    _check_tag("the aggregates of P2", sealed, tag, mine)
    names = f"{mine.identity[:8]}.*{other.identity[:8]}"
    with pytest.raises(ckks.KeyMismatchError, match=f"aggregates of P2 are under keys {names}"):
        _check_tag("the aggregates of P2", sealed, tag, other)
    for damage in (0, 64 + 7):
        worse = sealed.clone()
        worse[0, damage] ^= 1
        with pytest.raises(CorruptedCiphertextError, match="aggregates of P2 arrived damaged"):
            _check_tag("the aggregates of P2", worse, tag, mine)
    worse = tag.clone()
    worse[-1] ^= 1
    with pytest.raises(CorruptedCiphertextError, match="P1's inputs arrived damaged"):
        _check_tag("P1's inputs", sealed, worse, mine)


def test_a_product_at_another_level_is_not_sealed():
    """Its residues would be read at the scale of the last level."""
    keys = ckks.keygen(2, degree=8192, scale_bits=28)
    with pytest.raises(ckks.LevelError, match="aggregates are of one prime, and 2 are left"):
        ckks.sum_batch(products(keys, torch.ones(1, 50, 1), torch.ones(50, 1), 32), 32, 1.0)
