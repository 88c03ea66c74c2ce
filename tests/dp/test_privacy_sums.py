"""Noise that clients add in shares: exact, of the promised size in a sum, and what colluding clients and losses do."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import kstest, norm

from sectorch.dp import ORDERS, DiscreteGaussian, GaussianShares, PrivacyError, epsilon_of, noise
from sectorch.dp.noise import gaussian_curve
from sectorch.errors import (
    ArgumentError,
    DroppedClientError,
    FixedPointRangeError,
    MaskError,
    NonFiniteError,
    ShapeError,
)
from sectorch.secure_sum import PairwiseMasks, star_roles
from sectorch.session import Session

SEEDS = [0, *long(1, 2, 3, 4)]
CLIENTS = [f"C{i}" for i in range(8)]
F = 28


def noise_of(count: int, shares: GaussianShares, names: list[str] = CLIENTS, **how) -> torch.Tensor:
    """What a whole secure sum of clipped numbers adds to their sum, in units of sigma."""
    torch.manual_seed(count)
    values = {c: shares.clipped(torch.randn(count, dtype=torch.float64)) for c in names}
    masks = PairwiseMasks(Session(roles=star_roles(CLIENTS)), CLIENTS, **how)
    total, came = masks.sum({c: shares.noisy(x) for c, x in values.items()})
    assert came == tuple(names)
    exact = sum((x * 2.0**shares.frac_bits).round() for x in values.values())
    left = shares.decode(total) - exact * 2.0**-shares.frac_bits
    assert torch.equal(left * 2.0**shares.frac_bits, (left * 2.0**shares.frac_bits).round())  # on the grid
    return left / shares.sigma


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("there", "honest"), [(8, 8), (8, 5), (5, 5)])
def test_the_noise_of_a_sum_is_that_of_a_central_mechanism(seed, there, honest):
    """Through the secure sum: of deviation sigma sqrt(there / honest), by Kolmogorov-Smirnov and by its variance."""
    shares = GaussianShares(0.7, 1.0, honest, frac_bits=F)
    found = noise_of(2000 + seed, shares, CLIENTS[:there], drop_outs=True, least=honest).numpy()
    scale = math.sqrt(there / honest)
    assert kstest(found, norm(scale=scale).cdf).pvalue > 1e-10
    assert abs(np.mean(found**2) / scale**2 - 1) < 7 * math.sqrt(2 / len(found))


class Attack:
    """The server and some of the clients look which of two units a client has added: clip or -clip.

    Each number of a sum is a trial of its own. They know what they added, noise too, and the other honest clients'
    numbers: what is left is the unit under the honest clients' noise.
    """

    def __init__(self, shares: GaussianShares, seed: int, trials: int):
        torch.manual_seed(seed)
        self.shares, self.trials = shares, trials
        self.secret = (torch.randint(2, (trials,)) * 2 - 1).double() * shares.clip
        self.others = {c: torch.randn(trials, dtype=torch.float64) * 0.1 for c in CLIENTS[1:]}
        self.sent = {c: shares.noisy(x) for c, x in ({CLIENTS[0]: self.secret} | self.others).items()}
        masks = PairwiseMasks(Session(roles=star_roles(CLIENTS)), CLIENTS)
        self.total, _ = masks.sum(self.sent)

    def left(self, colluding: int) -> torch.Tensor:
        """The unit under the noise that these clients do not know."""
        theirs = sum((self.sent[c] for c in CLIENTS[8 - colluding :]), torch.zeros(self.trials, dtype=torch.int64))
        return self.shares.decode(self.total - theirs) - sum(self.others[c] for c in CLIENTS[1 : 8 - colluding])

    def won(self, colluding: int) -> float:
        """How often the nearer unit is the right one."""
        return float(((self.left(colluding) > 0) == (self.secret > 0)).double().mean())

    def epsilon(self, colluding: int, delta: float) -> float:
        """What the frequencies of one event prove at least: that what is left is above a deviation of its noise. Five
        deviations of the frequencies are taken off."""
        event = self.left(colluding) > self.shares.share * math.sqrt(8 - colluding)
        hit, false = (event[self.secret * sign > 0].double().mean() for sign in (1, -1))
        hit, false = (p + sign * 5 * math.sqrt(0.5 / self.trials) * p**0.5 for p, sign in ((hit, -1), (false, 1)))
        return math.log(max(float(hit) - delta, 1e-9) / float(false))


@pytest.mark.parametrize("seed", SEEDS)
def test_colluding_clients_win_as_often_as_the_noise_that_is_left_says(seed):
    """The attack reaches what the derivation allows it, sigma sqrt(left / honest), and no more."""
    shares = GaussianShares(1.5, 1.0, honest=5, colluding=3)
    attack = Attack(shares, seed, 10000)
    for colluding in (0, 3, 5, 6, 7):
        expected = norm.cdf(shares.clip / (shares.share * math.sqrt(8 - colluding)))
        assert abs(attack.won(colluding) - expected) < 7 * 0.5 / math.sqrt(10000), colluding
        assert attack.epsilon(colluding, 1e-5) < epsilon_of(shares.curve_of(8 - colluding), 1e-5), colluding


def test_more_colluding_clients_than_were_assumed_break_the_promise():
    """The control: where seven of the eight clients that carry the noise collude, the frequencies prove more than was
    promised, so that the bound above is not one that any attack would keep."""
    shares, delta = GaussianShares(2 / 0.7, 1.0, honest=8), 0.02
    attack, promised = Attack(shares, 0, 10000), epsilon_of(shares.curve, delta)
    assert attack.epsilon(0, delta) < promised < attack.epsilon(7, delta)
    assert attack.epsilon(7, delta) < epsilon_of(shares.curve_of(1), delta)


def test_what_is_left_of_the_noise_costs_honest_over_present_times():
    shares = GaussianShares(3.0, 1.0, honest=10, colluding=4)
    assert np.allclose(shares.curve, gaussian_curve(3.0, 2.0), rtol=1e-12)
    for present in (1, 5, 10, 20):
        assert np.allclose(shares.curve_of(present), shares.curve * 10 / present, rtol=1e-12)
    assert np.isinf(shares.curve_of(0)).all() and shares.least == 14
    assert GaussianShares(1.0, 1.0, honest=1).least == 2


def test_no_sum_is_opened_for_fewer_than_carry_the_noise():
    """At the server, and at a client that a server asks to open for fewer."""
    shares = GaussianShares(1.0, 1.0, honest=4, colluding=2)
    masks = PairwiseMasks(Session(roles=star_roles(CLIENTS)), CLIENTS, drop_outs=True, least=shares.least)
    sent = {c: shares.noisy(torch.zeros(3)) for c in CLIENTS}
    total, came = masks.sum({c: sent[c] for c in CLIENTS[:6]})  # two are lost: six carry what six are asked for
    assert len(came) == 6 and shares.decode(total).abs().max() < 20
    with pytest.raises((ArgumentError, DroppedClientError)):
        masks.sum({c: sent[c] for c in CLIENTS[:5]})
    own = masks.of(0)
    own.words(b"another sum", 3)
    with pytest.raises(MaskError, match="5 survivors"):
        own.open(b"another sum", range(5), shares.least)
    with pytest.raises(ArgumentError, match="leave degree out"):
        PairwiseMasks(Session(roles=star_roles(CLIENTS)), CLIENTS, degree=2, least=shares.least)
    with pytest.raises(ArgumentError, match="least=9"):
        PairwiseMasks(Session(roles=star_roles(CLIENTS)), CLIENTS, least=GaussianShares(1.0, 1.0, 9).least)


@pytest.mark.parametrize(("scale", "count"), [(0.6, 2), (0.7, 3), (1.0, 4)])
def test_a_sum_of_discrete_gaussians_costs_what_the_source_says(scale, count):
    """The exact Renyi divergence of the sum, by convolution, on scales where the bound's second term counts."""
    x = np.arange(-60, 61)
    one = np.exp(DiscreteGaussian(scale).log_pmf(x))
    pmf = one
    for _ in range(count - 1):
        pmf = np.convolve(pmf, one)
    tau = 10 * sum(math.exp(-2 * math.pi**2 * scale**2 * k / (k + 1)) for k in range(1, count))
    log_p = np.log(pmf[pmf > 1e-200])
    for change in (1, 2):
        for order in (1.5, 2.0, 8.0):
            terms = order * log_p[:-change] + (1 - order) * log_p[change:]
            exact = float(np.asarray(logsumexp(terms[terms > -400]))) / (order - 1)
            assert exact <= order * change**2 / (2 * count * scale**2) + tau + 1e-9
    assert 10 * 1000 * math.exp(-(math.pi**2) * 64) < 1e-200  # of a thousand clients, at the least scale on the grid


@given(
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40), st.floats(1e-3, 1e3), st.integers(32, 40),
    st.integers(1, 4),
)  # fmt: skip
def test_a_unit_moves_what_is_sent_by_its_clip_at_most(numbers, clip, frac_bits, units):
    """With the noise taken off: exactly, in units of the grid."""
    shares = GaussianShares(clip, clip, 3, frac_bits=frac_bits)
    x = torch.tensor(numbers, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "on_grid", lambda sigma, shape, bits: torch.zeros(*shape, dtype=torch.int64))
        alone = shares.encode(x)
        moved = shares.encode(*([x] * units)) - shares.encode(*([x] * (units - 1)), -x)
    square = lambda words: sum(int(n) ** 2 for n in words)
    bound = Fraction(clip) * 2**frac_bits
    assert square(alone) <= bound**2 and square(moved) <= (2 * bound) ** 2
    if float(x.norm()) < clip * 0.9:
        assert (shares.decode(alone) - x).abs().max() <= 2.0 ** -(frac_bits + 1) * 1.001


def test_two_encodings_have_noise_of_their_own():
    shares = GaussianShares(1.0, 1.0, 4)
    first, second = (shares.encode(torch.ones(50) / 50) for _ in range(2))
    assert not torch.equal(first, second)
    meta = shares.decode(torch.empty(3, dtype=torch.int64, device="meta"))
    assert meta.is_meta and meta.dtype == torch.float64 and len(ORDERS) == len(shares.curve)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (dict(sigma=0.0), "sigma must be above 0"), (dict(sigma=math.inf), "sigma must be"),
        (dict(clip=-1.0), "clip must be above 0"), (dict(clip=math.nan), "clip must be"), (dict(honest=0), "got 0"),
        (dict(honest=2.5), "2.5"), (dict(colluding=-1), "-1"), (dict(sigma=1e-9), "use more frac_bits"),
        (dict(clip=2.0**30), "leaves the 62 bits"), (dict(frac_bits=-1), "from 0 to 60"), (dict(frac_bits=61), "60"),
    ],
)  # fmt: skip
def test_what_is_no_noise_is_refused(how, text):
    with pytest.raises(PrivacyError, match=text):
        GaussianShares(**{"sigma": 1.0, "clip": 1.0, "honest": 3, **how})


def test_what_cannot_be_clipped_or_rounded_is_refused():
    shares = GaussianShares(1.0, 1.0, 3)
    for bad in (math.nan, math.inf, 1e300):
        with pytest.raises(NonFiniteError, match="what a client adds"):
            shares.encode(torch.tensor([bad, bad], dtype=torch.float64))
    with pytest.raises(PrivacyError, match="use more frac_bits"):
        GaussianShares(1.0, 1e-4, 3, frac_bits=20).encode(torch.zeros(100))


def test_a_unit_of_another_shape_is_refused():
    """Repeated over the other's shape it was ten times as long as the clip, and the noise was for one."""
    shares = GaussianShares(1.0, 1.0, 3)
    for units in ((torch.zeros(100), torch.ones(1)), (torch.zeros(1, 2), torch.zeros(2)), ()):
        with pytest.raises(ShapeError, match="of one shape"):
            shares.encode(*units)


def test_units_that_leave_the_grid_together_are_refused():
    """They wrapped around: five times 2^29 came out with the wrong sign."""
    shares, unit = GaussianShares(1.0, 2.0**29.9, 3), torch.full((1,), 2.0**29)
    assert float(shares.decode(shares.encode(unit))) > 2**28
    for bad in (5 * [unit], 5 * [-unit], 8 * [unit]):
        with pytest.raises(FixedPointRangeError, match="leave the 62 bits"):
            shares.encode(*bad)
