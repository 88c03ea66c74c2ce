"""Samples against the exact probabilities, and the probabilities against direct sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import by_turns
from frequencies import fits
from hypothesis import given
from hypothesis import strategies as st

from sectorch.dp import (
    ConfidentGNMax,
    DiscreteGaussian,
    DiscreteLaplace,
    GNMax,
    LNMax,
    PrivacyError,
    on_grid,
)

KINDS = (DiscreteGaussian, DiscreteLaplace)
DRAWN = 30_000


@by_turns(scale=[0.25, 0.7, 1.0, 3.349609375, 40.0], kind=KINDS)
def test_samples_fit(kind, scale):
    noise = kind(scale)
    x = np.arange(-noise.span, noise.span + 1)
    drawn = noise.sample(DRAWN)
    assert drawn.dtype == torch.int64
    observed = np.bincount(np.clip(drawn.numpy() + noise.span, 0, 2 * noise.span), minlength=len(x))
    assert fits(observed, np.exp(noise.log_pmf(x)))
    assert not fits(observed, np.exp(kind(1.2 * scale).log_pmf(x))), "the control: a fifth more in scale"


def test_two_samples_differ_and_shapes():
    noise = DiscreteGaussian(1000.0)
    assert not torch.equal(noise.sample(50), noise.sample(50))
    assert noise.sample(3, 4).shape == (3, 4) and noise.sample(0, 4).shape == (0, 4)


def test_neither_seed_steers_it():
    noise = DiscreteGaussian(1000.0)
    torch.manual_seed(0)
    np.random.seed(0)
    first = noise.sample(20)
    torch.manual_seed(0)
    np.random.seed(0)
    assert not torch.equal(first, noise.sample(20))


@given(st.sampled_from(KINDS), st.floats(0.3, 30), st.integers(-40, 40))
def test_probabilities(kind, scale, gap):
    noise = kind(scale)
    x = np.arange(-noise.span, noise.span + 1)
    pmf = np.exp(noise.log_pmf(x))
    assert pmf.sum() == pytest.approx(1, abs=1e-12)
    assert np.exp(noise.log_above(gap)) == pytest.approx(pmf[x >= gap].sum(), rel=1e-9, abs=1e-15)
    difference = np.convolve(pmf, pmf[::-1])
    d = np.arange(-2 * noise.span, 2 * noise.span + 1)
    assert np.exp(noise.log_beaten(gap)) == pytest.approx(difference[d >= gap].sum(), rel=1e-9, abs=1e-15)


@by_turns(votes=[[30, 5, 5, 4, 3, 2, 0, 0, 0, 0], [5, 5, 5], [1, 0]], kind=[GNMax, LNMax])
def test_labels_fit_the_mechanism(kind, votes):
    mechanism = kind(5.0)
    labels = mechanism.labels(torch.tensor(votes).expand(DRAWN // 3, -1))
    probabilities = mechanism.distribution(votes)
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    assert fits(np.bincount(labels.numpy(), minlength=len(votes)), probabilities)


def test_confident_answers_as_often_as_it_says():
    confident = ConfidentGNMax(20, 4.0, GNMax(2.0))
    for top in (15, 20, 24):
        votes = torch.tensor([top, 3, 2])
        answered = int(confident.answered(votes.expand(10_000, -1)).sum())
        p = np.exp(confident.log_answered(votes))
        assert fits(np.array([answered, 10_000 - answered]), np.array([p, 1 - p]))


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), 2.0**21])
def test_scales_out_of_range(scale):
    for make in (DiscreteGaussian, DiscreteLaplace, GNMax, LNMax):
        with pytest.raises(PrivacyError, match="the scale of noise must be above 0"):
            make(scale)


def test_noise_on_a_grid():
    """Whole numbers of 2^-f: with no fraction bits the discrete Gaussian itself, else of 2^f times its scale. 4000
    draws: their standard deviation is within 8 % of sigma but with a probability below 1e-12."""
    for bits in (0, 20):
        found = on_grid(3.0, (40, 100), bits)
        assert found.dtype == torch.int64 and found.shape == (40, 100)
        assert 0.92 < float(found.double().std()) / (3 * 2**bits) < 1.08
    assert on_grid(3.0, (0, 2), 20).shape == (0, 2)
    for sigma, bits in ((0.0, 20), (-1.0, 20), (2.0**20 + 1, 20), (float("nan"), 20)):
        with pytest.raises(PrivacyError, match="sigma must be above 0 and at most 1"):
            on_grid(sigma, (1,), bits)


def test_other_errors():
    with pytest.raises(PrivacyError, match="votes that a step moves"):
        GNMax(1.0, 0)
    with pytest.raises(PrivacyError, match="threshold"):
        ConfidentGNMax(-1, 1.0, GNMax(1.0))
    with pytest.raises(PrivacyError, match="whole numbers for at least two classes"):
        GNMax(1.0).log_error([1])
    with pytest.raises(PrivacyError, match="whole numbers"):
        GNMax(1.0).distribution(np.array([1.0, 2.0]))
