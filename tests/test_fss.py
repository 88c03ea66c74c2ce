"""The distributed comparison function against plain comparison, exhaustively, and its generator against AES itself."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sectorch.mpc.star.fss import SPAN, _permute, evaluate, generate
from sectorch.ring import bitplanes


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, dtype=torch.int64, generator=generator)


def both(r, c, flip, payload, low, high, seed=1):
    seeds = random(2, len(r), 2, seed=seed)
    words = generate(tuple(seeds), r, flip, payload, low, high)
    return [evaluate(seeds[i], c, *words, high, second=bool(i)) for i in (0, 1)]


@pytest.mark.parametrize("bits", [1, 2, 5, 6])
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_pair_of_small_numbers(bits: int, words: int, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bitplanes, "COMPILED", compiled)
    n = 1 << bits
    r, c = (torch.arange(n * n) // n), torch.arange(n * n) % n
    for flip in (torch.zeros_like(r), torch.full_like(r, -1)):
        payload = random(n * n, words)
        first, second = both(r, c, flip, payload, 0, bits)
        wanted = (c < r) ^ (flip < 0)
        assert torch.equal(first + second, payload * wanted.long()[:, None])


@given(
    low=st.integers(0, 62), length=st.integers(1, 64), near=st.integers(-2, 2), seed=st.integers(0, 1 << 30),
    n=st.sampled_from([1, 2, 65]),
)  # fmt: skip
def test_any_planes_and_numbers_that_are_close(low: int, length: int, near: int, seed: int, n: int):
    high = min(64, low + length)
    r = random(n, seed=seed)
    c = torch.where(torch.arange(n) % 2 == 0, r + near, random(n, seed=seed + 1))
    flip, payload = random(n, seed=seed + 2) >> 63, random(n, 2, seed=seed + 3)
    first, second = both(r, c, flip, payload, low, high, seed)
    span = (1 << (high - low)) - 1
    inside = [[(v >> low) & span for v in x.tolist()] for x in (c, r)]
    less = torch.tensor([a < b for a, b in zip(*inside, strict=True)])
    assert torch.equal(first + second, payload * (less ^ (flip < 0)).long()[:, None])


def test_pieces_meet():
    n = SPAN + 3
    r, c = random(n), random(n, seed=4)
    first, second = both(r, c, torch.zeros_like(r), random(n, 2), 60, 63)
    less = ((c >> 60) & 7) < ((r >> 60) & 7)
    assert torch.equal(first + second, random(n, 2) * less.long()[:, None])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("keys", [0, 1, 100, SPAN + 3])
def test_one_key_serves_several_points(keys: int, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bitplanes, "COMPILED", compiled)
    r, c, zero = random(keys), random(3 * keys, seed=4), torch.zeros(keys, dtype=torch.int64)
    seeds, payload = random(2, keys, 2, seed=1), random(keys, 1, seed=2)
    words = generate(tuple(seeds), r, zero, payload, 60, 63)
    first, second = (evaluate(seeds[i], c, *words, 63, second=bool(i)) for i in (0, 1))
    less = ((c >> 60) & 7) < ((r >> 60) & 7).repeat(3)
    assert torch.equal(first + second, payload.repeat(3, 1) * less.long()[:, None])


def test_compiled_loops_make_the_same_words(monkeypatch: pytest.MonkeyPatch):
    r, flip, payload, seeds = random(70), random(70, seed=1) >> 63, random(70, 2, seed=2), random(2, 70, 2, seed=3)
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(bitplanes, "COMPILED", compiled)
        words = generate(tuple(seeds), r, flip, payload, 0, 63)
        found.append([*words, *(evaluate(seeds[i], random(70, seed=5), *words, 63, bool(i)) for i in (0, 1))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_one_half_is_uniform_for_every_point():
    n = 1 << 14
    r = torch.full((n,), 5)
    for c in (3, 9):
        for half in both(r, torch.full((n,), c), torch.zeros_like(r), torch.ones(n, 2, dtype=torch.int64), 0, 5):
            counts = torch.bincount(half.view(torch.uint8).flatten().long(), minlength=256).numpy()
            assert stats.chisquare(counts).pvalue > 1e-9


def test_the_generator_is_matyas_meyer_oseas_with_aes():
    blocks = random(3, 2)
    encryptor = Cipher(algorithms.AES(b"sectorch dcf s/1"), modes.ECB()).encryptor()
    for block, made in zip(blocks, _permute(blocks), strict=True):
        plain = block.numpy().tobytes()
        assert made.numpy().tobytes() == bytes(a ^ b for a, b in zip(plain, encryptor.update(plain), strict=True))
