"""The hash, half gates and base transfers against slow versions made from the definitions, and published vectors."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from garbled_reference import (
    BASE,
    ORDER,
    P,
    add_points,
    aes,
    encoded,
    evaluated_and,
    garbled_and,
    hashed,
    low_order_points,
    multiple,
    number,
    on_curve,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sectorch.errors import KeyAgreementError
from sectorch.garbled import transfer
from sectorch.garbled.circuit import Builder, evaluate, expand, garble, hash_blocks, private_words, sigma, tweaks

P_VALUE = 1e-12
"""As in `sectorch/testing/outcomes.py`: some hundred such values are computed here."""


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


# AES and the hash.


def test_the_slow_aes_is_aes():
    """FIPS 197, appendix C.1."""
    key, block = bytes(range(16)), bytes.fromhex("00112233445566778899aabbccddeeff")
    assert aes(key, block) == bytes.fromhex("69c4e0d86a7b0430d8cdb78070b4c55a")


NONCE = st.binary(min_size=16, max_size=16)


@settings(max_examples=20)
@given(keys=st.integers(1, 3), blocks=st.integers(1, 3), first=st.sampled_from([0, 1, 1 << 40]), seed=NONCE)
def test_the_hash_is_its_definition(keys: int, blocks: int, first: int, seed: bytes):
    nonce, x = tensor(seed), private_words(keys, blocks, 2)
    found = hash_blocks(tweaks(nonce, first, keys), x)
    for i in range(keys):
        for j in range(blocks):
            assert number(found[i, j]) == hashed(number(x[i, j]), number(nonce) + first + i)


def test_tweaks_wrap_around():
    start = torch.tensor([-1, -1])
    assert tweaks(start, 0, 3) == [b"\xff" * 16, bytes(16), b"\1" + bytes(15)]


def test_sigma_is_a_linear_orthomorphism():
    """Linear, and both x -> sigma(x) and x -> sigma(x) xor x are one to one (their kernels are zero, over GF(2))."""
    x, y = private_words(2, 50, 2)
    assert torch.equal(sigma(x ^ y), sigma(x) ^ sigma(y))
    units = torch.tensor([[1 << i if i < 63 else -(1 << 63), 0] for i in range(64)])
    units = torch.cat((units, units.flip(1)))
    for image in (sigma(units), sigma(units) ^ units):
        basis: dict[int, int] = {}
        for row in image:
            value = number(row)
            while value and value.bit_length() in basis:
                value ^= basis[value.bit_length()]
            assert value, "an image that is a sum of others"
            basis[value.bit_length()] = value


@pytest.mark.parametrize("words", [0, 1, 2, 3, 8192, 8193, 20_000])
def test_streams_are_counter_mode(words: int):
    """Independent AES on the counter blocks, big-endian from the nonce on; the ends of long streams too."""
    seeds, nonce = private_words(2, 2), private_words(2)
    out = expand(seeds, nonce, words)
    assert out.shape == (2, words)
    start = int.from_bytes(nonce.numpy().tobytes(), "big")
    for seed, row in zip(seeds, out, strict=True):
        data = row.numpy().tobytes()
        for block in {0, 1, 4095, 4096, words // 2 - 1}:
            if 0 <= block < words // 2:
                counter = ((start + block) % (1 << 128)).to_bytes(16, "big")
                assert data[16 * block : 16 * block + 16] == aes(seed.numpy().tobytes(), counter)


# Half gates.


@settings(max_examples=30)
@given(data=st.data())
def test_an_and_is_garbled_as_in_the_paper(data):
    b = Builder(1, 1)
    circuit = b.compile([b.land(b.garbler[0], b.evaluator[0])])
    delta, nonce, zero = private_words(2), private_words(2), private_words(2, 1, 2)
    delta[0] |= 1
    tables, out = garble(circuit, delta, zero, nonce)
    expected = garbled_and(number(delta), number(zero[0, 0]), number(zero[1, 0]), number(nonce))
    assert (number(tables[0, 0, 0]), number(tables[0, 1, 0]), number(out[0, 0])) == expected
    x, y = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    labels = zero ^ (torch.tensor([-x, -y]).view(2, 1, 1) & delta)
    found = number(evaluate(circuit, labels, tables, nonce)[0, 0])
    assert found == evaluated_and(number(labels[0, 0]), number(labels[1, 0]), *expected[:2], number(nonce))
    assert found == expected[2] ^ (number(delta) if x and y else 0)


# Ed25519 and the base transfers.


def test_the_base_point_multiples_are_those_of_rfc_8032():
    """Section 7.1, test 1: the public key of a secret is a clamped hash times the base point."""
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    clamped = bytearray(hashlib.sha512(secret).digest()[:32])
    clamped[0] &= 248
    clamped[31] = clamped[31] & 127 | 64
    scalar = (int.from_bytes(clamped, "little") % ORDER).to_bytes(32, "little")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert transfer.base_multiple(scalar).hex() == public
    assert encoded(multiple(int.from_bytes(clamped, "little"), BASE)).hex() == public


def transfers(choices: list[int], session: bytes = b"session"):
    secret, A = transfer.start()
    answers, keys = transfer.choose(A, choices, session)
    return secret, A, answers, keys, transfer.finish(secret, A, answers, session)


def test_the_receiver_has_the_key_that_it_chose():
    choices = [i % 2 for i in range(20)] + [1, 1, 0]
    _, _, answers, keys, both = transfers(choices)
    assert answers.shape == (23, 4)
    for choice, key, pair in zip(choices, keys, both, strict=True):
        assert torch.equal(pair[choice], key)
        assert not torch.equal(pair[1 - choice], key)
    assert len({number(key) for pair in both for key in pair}) == 46


def test_the_group_operations_are_those_of_the_protocol(monkeypatch):
    """R = b G + c A, and H is taken of b A, a R and a (R - A): by the slow arithmetic."""
    seen, scalars = [], []
    key, scalar = transfer._base_key, transfer.random_scalar
    monkeypatch.setattr(transfer, "_base_key", lambda *a: seen.append(a) or key(*a))
    monkeypatch.setattr(transfer, "random_scalar", lambda: scalars.append(scalar()) or scalars[-1])
    transfers([0, 1])
    a, b0, b1 = (int.from_bytes(s, "little") for s in scalars)
    A = multiple(a, BASE)
    minus_A = (P - A[0], A[1])
    answers = [multiple(b0, BASE), add_points(multiple(b1, BASE), A)]
    wanted = [multiple(b0, A), multiple(b1, A)]
    for R in answers:
        wanted += [multiple(a, R), multiple(a, add_points(R, minus_A))]
    assert [shared for shared, *_ in seen] == [encoded(p) for p in wanted]
    assert [R for _, _, _, R, _ in seen] == [encoded(answers[i]) for i in (0, 1, 0, 0, 1, 1)]


def test_keys_depend_on_session_answer_and_number():
    secret, A, answers, _, both = transfers([0, 0])
    assert not torch.equal(transfer.finish(secret, A, answers, b"another"), both)
    again = transfer.finish(secret, A, answers[[0, 0]], b"session")
    assert torch.equal(again[0], both[0])
    assert not torch.equal(again[1], again[0])


NOT_CANONICAL = (P + 3).to_bytes(32, "little")
OFF_CURVE = next(y for y in range(2, 100) if on_curve(y) is None).to_bytes(32, "little")
MIXED = encoded(add_points(multiple(5, BASE), next(p for p in low_order_points() if p[0] not in (0,))))
REJECTED = {f"low order {i}": encoded(p) for i, p in enumerate(low_order_points())}
REJECTED |= {
    "the other sign of x = 0": (1 | 1 << 255).to_bytes(32, "little"), "not canonical": NOT_CANONICAL,
    "off the curve": OFF_CURVE, "outside the subgroup": MIXED, "zero": bytes(32), "ones": b"\xff" * 32,
}  # fmt: skip


def test_the_points_to_reject_are_what_they_are_called():
    low = low_order_points()
    assert len(low) == 8
    assert all(multiple(8, p) == (0, 1) for p in low)
    assert (0, 1) in low, "the identity"
    assert on_curve(int.from_bytes(OFF_CURVE, "little")) is None
    assert on_curve(3) is not None, "only its encoding is wrong"


@pytest.mark.parametrize("name", REJECTED)
def test_points_outside_the_group_are_rejected_on_both_sides(name: str):
    point = tensor(REJECTED[name])
    with pytest.raises(KeyAgreementError, match="outside the group"):
        transfer.choose(point, [0], b"session")
    secret, A, answers, _, _ = transfers([0, 1])
    answers[1] = point
    with pytest.raises(KeyAgreementError, match="outside the group"):
        transfer.finish(secret, A, answers, b"session")
    with pytest.raises(KeyAgreementError, match="outside the group"):
        transfer.finish(secret, point, answers[:1], b"session")


def test_answers_do_not_show_the_choice():
    """Bytes of R for choices zero and one, under one A: the same distribution, and that of random points."""
    _, A = transfer.start()
    count = 1500
    samples = [transfer.choose(A, [c] * count, b"session")[0] for c in (0, 1)]
    samples.append(transfer.tensor_of([transfer.base_multiple(transfer.random_scalar()) for _ in range(count)]))
    bytes_of = [s.numpy().view(np.uint8).reshape(count, 32) for s in samples]
    for i in range(1, 3):
        # All bytes but the last, which holds 7 bits of y and the sign of x and is looked at by its bits.
        counts = np.stack([np.bincount(b[:, :31].reshape(-1), minlength=256) for b in (bytes_of[0], bytes_of[i])])
        assert stats.chi2_contingency(counts).pvalue > P_VALUE
        for bit in range(8):
            ones = [int((b[:, 31] >> bit & 1).sum()) for b in (bytes_of[0], bytes_of[i])]
            table = [[ones[0], count - ones[0]], [ones[1], count - ones[1]]]
            assert min(map(min, table)) == 0 or stats.chi2_contingency(table).pvalue > P_VALUE
    for b in bytes_of:
        assert stats.chisquare(np.bincount(b[:, :31].reshape(-1), minlength=256)).pvalue > P_VALUE


def test_scalars_are_uniform():
    scalars = np.frombuffer(b"".join(transfer.random_scalar() for _ in range(3000)), np.uint8).reshape(-1, 32)
    assert stats.chisquare(np.bincount(scalars[:, :31].reshape(-1), minlength=256)).pvalue > P_VALUE
    assert all(int.from_bytes(s.tobytes(), "little") < ORDER for s in scalars)
