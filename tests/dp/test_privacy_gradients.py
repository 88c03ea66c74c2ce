"""DP-SGD on shares: rows are clipped below the bound and hardly further, noise is two parties', the account right."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import long
from dp_accounting import NeighboringRelation, dp_event, rdp
from frequencies import fits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch import Session
from sectorch.dp import (
    ORDERS,
    Budget,
    BudgetExhaustedError,
    DiscreteGaussian,
    PrivacyError,
    PrivateGradients,
    sampled_curve,
)
from sectorch.dp.gradients import (
    DELTA_BITS,
    GRID_BITS,
    SQUARE_BITS,
    Use,
    Uses,
    add_noise,
    clipped_sums,
    largest,
    margin,
)
from sectorch.errors import ArgumentError, ShapeError
from sectorch.mpc.star.shares import Shares
from sectorch.tensor.table import Context


def curve_of(noise: float) -> Any:
    return lambda order: 2 * order / noise**2


@pytest.mark.parametrize(
    ("noise", "sample", "rows"),
    [(1.0, 50, 1000), *long((2.0, 1, 10), (4.0, 64, 1400), (20.0, 500, 1000))],
)
def test_the_account_of_a_sample_lies_between_two_others(noise: float, sample: int, rows: int):
    """The theorem's sum by whole numbers; above what one pair of neighbours costs, by quadrature, and above what
    dp-accounting has for the continuous Gaussian, of which it uses more than its curve."""
    found = sampled_curve(curve_of(noise), sample, rows)
    z, q = noise / 2, sample / rows
    account = rdp.RdpAccountant(ORDERS.tolist(), NeighboringRelation.REPLACE_ONE)
    account.compose(dp_event.SampledWithoutReplacementDpEvent(rows, sample, dp_event.GaussianDpEvent(z)))
    theirs = np.minimum(np.array(account._rdp), [curve_of(noise)(a) for a in ORDERS])
    assert (found >= theirs * (1 - 1e-6)).all()
    for order in (2, 3, 9, 14):
        e = lambda j: 2 * j / noise**2
        terms = [2 * math.comb(order, j) * q**j * math.exp((j - 1) * e(j)) for j in range(3, order + 1)]
        terms.append(math.comb(order, 2) * q**2 * min(4 * math.expm1(e(2)), 2 * math.exp(e(2))))
        whole = math.log1p(math.fsum(terms)) / (order - 1)
        at = np.interp(order, ORDERS, found * (ORDERS - 1)) / (order - 1)
        wanted = min(whole, e(order))
        assert wanted * (1 - 1e-9) <= at <= wanted * 1.03, "none of the orders is whole: this lies on a chord"
    x = np.linspace(-12 * z - 2, 12 * z + 2, 200_001)
    mixed = [np.logaddexp(np.log1p(-q), np.log(q) + (2 * x * m - m * m) / (2 * z * z)) for m in (0.5, -0.5)]
    base = -x * x / (2 * z * z) - np.log(z * np.sqrt(2 * np.pi))
    for order in (1.5, 2.0, 3.5, 8.0, 32.0):
        logs = base + order * mixed[0] + (1 - order) * mixed[1]
        top = logs.max()
        least = (top + np.log(np.exp(logs - top).sum() * (x[1] - x[0]))) / (order - 1)
        assert np.interp(order, ORDERS, found) >= least * (1 - 1e-6), "a neighbour would be told apart more easily"


def test_a_sample_of_all_gains_nothing_and_of_few_much():
    assert np.allclose(sampled_curve(curve_of(3.0), 10, 10), [curve_of(3.0)(a) for a in ORDERS])
    curves = [sampled_curve(curve_of(3.0), n, 1000) for n in (1, 10, 100, 1000)]
    assert all((a <= b * (1 + 1e-12)).all() for a, b in pairwise(curves))
    for sample in (0, 11):
        with pytest.raises(PrivacyError, match="a sample is of 1 to all 10 rows"):
            sampled_curve(curve_of(1.0), sample, 10)


def of_rows(session: Session, a: np.ndarray, d: np.ndarray, clip: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The clipped sums of one layer, and the inputs as the fixed point has them."""
    x = [sectorch.share(torch.from_numpy(v), session=session, limit=4096.0) for v in (a, d)]
    context = Context(x[0].session, x[0].party, x[0].scheme)
    with session.call():
        ((weight, bias),) = clipped_sums(context, [Use(*x)], [Uses((0,), a.shape[1], d.shape[1])], clip)
        opened = [context.backend.reveal(v.shares, ())[0] for v in (weight, bias)]
        weight, bias = (session.net().read(v, session.Q).numpy() * 2.0**-GRID_BITS for v in opened)
    return weight, bias, np.round(d * 2**20) / 2**20


SIZES = st.sampled_from([0.0, 1e-6, 1e-3, 0.02, 0.5, 3.0, 15.9, 40.0, 4000.0])


@settings(deadline=None)
@given(
    st.lists(st.tuples(SIZES, SIZES), min_size=6, max_size=6),
    st.sampled_from([0.05, 1.0, 30.0]),
    st.integers(0, 1 << 20),
)
def test_a_row_is_clipped_below_the_bound_and_hardly_further(sizes: list, clip: float, seed: int):
    """Each row has an input of its own place, so that the sum shows every row's gradient by itself."""
    rng = np.random.default_rng(seed)
    inputs = np.round(np.diag([v for v, _ in sizes]) * 2**20) / 2**20
    d = rng.uniform(-1, 1, (6, 3)) * [[v] for _, v in sizes]
    weight, _, d = of_rows(Session(reference=True), inputs, d, clip)
    shape, u = [Uses((0,), 6, 3)], 2.0**-GRID_BITS
    a, d = inputs.clip(-16, 16), d.clip(-8, 8)
    room = 59 - math.ceil(math.log2(largest(shape)))
    bits = min(26, room - SQUARE_BITS)
    digits = min(20, 60 - max(1, math.ceil(math.log2(largest(shape) / (clip - margin(shape)) ** 2))))
    for i in range(6):
        square = (d[i] ** 2).sum() * (a[i, i] ** 2 + 1)
        found = weight[:, i]
        if a[i, i]:
            norm = np.linalg.norm(found) * math.sqrt(a[i, i] ** 2 + 1) / a[i, i]
            assert norm <= clip + (math.sqrt(3) / 2 + 1) * u * math.sqrt(a[i, i] ** 2 + 1) / a[i, i], (
                "it is longer than C"
            )
        # Squares are rounded up by 3/2 of a unit at each of their roundings, the ratio at two or three.
        most = ((d[i] ** 2).sum() + 1.5 * 2.0**-bits) * (a[i, i] ** 2 + 1 + 1.5 * 2.0**-SQUARE_BITS)
        most = (most + 1.5 * 2.0 ** (16 - bits - SQUARE_BITS)) / (clip - margin(shape)) ** 2 * (1 + 2.0**-14)
        most = (most + 1.5 * 2.0**-digits) * (1 + 1.5 * 2.0**-digits) ** 3 + 1.5 * 2.0**-digits
        least = max(0.0, max(1.0, most) ** -0.5 * (1 - 1.2e-5 * 32) - 2.0**-34)
        wanted = d[i] * a[i, i]
        allowed = abs(wanted) * (1 - least) + u * (a[i, i] + 1)
        assert (abs(found) <= abs(wanted) + u * (a[i, i] + 1)).all()
        assert (abs(wanted - found) <= allowed).all(), (square, found, wanted)


def of_uses(session: Session, uses: list, parameters: list[Uses], clip: float) -> np.ndarray:
    """The clipped sums of several parameters, one after the other."""
    given = [[sectorch.share(torch.from_numpy(v), session=session, limit=4096.0) for v in use] for use in uses]
    context = Context(session, given[0][0].party, given[0][0].scheme)
    with session.call():
        sums = clipped_sums(context, [Use(*use) for use in given], parameters, clip)
        opened = [context.backend.reveal(v.shares, ())[0] for pair in sums for v in pair if v is not None]
        return np.concatenate([session.net().read(v, session.Q).numpy().ravel() * 2.0**-GRID_BITS for v in opened])


KINDS = {
    "tied": [Uses((0, 1, 2), 4, 3)],
    "tied weight": [Uses((0, 1, 2), 4, 3, bias=False), *(Uses((i,), 4, 3, weight=False) for i in range(3))],
    "tied bias": [Uses((0, 2), 4, 3, weight=False), Uses((0,), 4, 3, bias=False), Uses((1,), 4, 3)],
}


@settings(deadline=None)
@given(
    st.tuples(SIZES, SIZES, SIZES), st.tuples(SIZES, SIZES, SIZES), st.sampled_from([0.05, 1.0, 30.0]),
    st.sampled_from(list(KINDS)), st.sampled_from([0.0, 1e-4, 1.0]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_the_norm_is_that_of_the_sum_over_uses(
    inputs: tuple, outputs: tuple, clip: float, kind: str, apart: float, seed: int
):
    """Of one row; uses that cancel each other nearly have a gradient that is far shorter than theirs."""
    rng, u = np.random.default_rng(seed), 2.0**-GRID_BITS
    a, d = rng.uniform(-1, 1, 4), rng.uniform(-1, 1, 3)
    uses = [
        [np.round(np.clip(v, -4000, 4000) * 2**20)[None] / 2**20 for v in (m * (a + apart * rng.normal(size=4)),
         (-1) ** i * n * (d + apart * rng.normal(size=3)))]
        for i, (m, n) in enumerate(zip(inputs, outputs, strict=True))
    ]  # fmt: skip
    found = of_uses(Session(reference=True), uses, KINDS[kind], clip)
    assert np.linalg.norm(found) <= clip + len(found) ** 0.5 * u / 2
    uses = [(a[0].clip(-16, 16), d[0].clip(-8, 8)) for a, d in uses]
    wanted, more, bits = [], 0.0, min(26, 59 - math.ceil(math.log2(largest(KINDS[kind]))) - SQUARE_BITS)
    for each in KINDS[kind]:
        mine = [uses[i] for i in each.numbers]
        wanted += [sum(np.outer(d, a) for a, d in mine).ravel()] * each.weight + [sum(d for _, d in mine)] * each.bias
        lengths = [sum((v**2).sum() for v in column) + 1 for column in zip(*mine, strict=True)]
        more += 3 * len(mine) ** 2 * (2.0**-bits * lengths[0] + 2.0**-SQUARE_BITS * lengths[1] * each.weight)
    wanted = np.concatenate(wanted)
    square = (wanted**2).sum() + more + 2.0 ** (17 - bits - SQUARE_BITS)
    least = min(1.0, (clip - margin(KINDS[kind])) / math.sqrt(square)) * (1 - 1e-3) - 2.0**-33
    assert (abs(found - wanted) <= abs(wanted) * (1 - max(0.0, least)) + 99 * u).all(), (found, wanted)


def test_squares_of_long_rows_stay_in_the_ring():
    """40,000 inputs of 15.9 have a square norm of 10^7, which is beyond the ring at twice the fraction bits."""
    a, d = np.full((2, 40_000), 15.9), np.full((2, 1), 7.9)
    weight, *_ = of_rows(Session(reference=True), a, d, 1.0)
    assert 2 * 0.97 < np.linalg.norm(weight) <= 2
    weight, *_ = of_rows(Session(reference=True), d, np.full((2, 10_000), 7.9), 1.0)
    assert 2 * 0.97 < np.linalg.norm(weight) <= 2


def test_parties_clip_as_the_reference():
    rng = np.random.default_rng(1)
    a, d = rng.normal(size=(5, 4)) * 9, rng.normal(size=(5, 2)) * [[0], [1e-3], [1], [7], [100]]
    secure, plain = (of_rows(Session(reference=reference), a, d, 1.0) for reference in (False, True))
    assert all(np.abs(x - y).max() <= 2.0**-19 for x, y in zip(secure, plain, strict=True))
    assert DELTA_BITS < GRID_BITS
    uses = [(rng.normal(size=(5, 4)) * 3, rng.normal(size=(5, 3))) for _ in range(3)]
    for parameters in KINDS.values():
        secure, plain = (of_uses(Session(reference=reference), uses, parameters, 1.0) for reference in (False, True))
        assert np.abs(secure - plain).max() <= 2.0**-19 and np.abs(plain).max() > 0.01


def test_noise_is_two_parties_and_of_the_exact_distribution():
    """What A drew is discrete Gaussian, so is what S drew, and independent of it: nobody is sent anything, and each
    party's own draw tells nothing of the other's."""
    session, sigma, n = Session(), 3.0, 20_000
    with session.call() as net, sectorch.profile() as seen:
        zeros = sectorch.share(torch.zeros(n), session=session, owner="A")
        context = Context(session, zeros.party, zeros.scheme)
        zero = zeros.like(zeros.shares * 0, GRID_BITS)
        made = add_noise(context, zero, sigma * 2.0**-GRID_BITS).shares
        assert isinstance(made, Shares)
        at_A, at_S = net.read(made.A, net.A).numpy(), net.read(made.S, net.S).numpy()
    assert not list(seen.ledger)
    values = np.arange(-14, 15)
    pmf = np.exp(DiscreteGaussian(sigma).log_pmf(values))
    both = np.convolve(pmf, pmf)[14:-14]
    for drawn, law in ((at_A, pmf), (at_S, pmf), (at_A + at_S, both)):
        counts = np.array([(drawn == v).sum() for v in values])
        assert fits(np.append(counts, n - counts.sum()), np.append(law, max(0.0, 1 - law.sum())))
    assert abs(np.corrcoef(at_A, at_S)[0, 1]) < 7 / math.sqrt(n)


def tiny(session: Session) -> nn.Module:
    torch.manual_seed(0)
    return sectorch.shared(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), session=session)


@pytest.mark.parametrize("reference", [True, False])
def test_a_step_is_that_of_clipped_gradients_and_shows_nothing(reference: bool):
    session = Session(reference=reference)
    model = tiny(session)
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plain.load_state_dict({k: v.reveal() for k, v in model.state_dict().items()})
    x, y, clip = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1, 0]), 0.6
    private = PrivateGradients(model, max_grad_norm=clip, noise_multiplier=2.0**-22, rows=6, batch_size=6)
    with sectorch.profile() as seen, session.call():
        rows, labels = private.sample(sectorch.share(x, session=session, limit=8.0), sectorch.share(y, session=session))
        private.backward(F.cross_entropy, rows, labels)
    assert not [line for line in seen.ledger if line.shows]
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for i in range(6):
        parts = torch.autograd.grad(F.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]), list(plain.parameters()))
        norm = float(torch.sqrt(sum((g * g).sum() for g in parts)))
        for sums, g in zip(total, parts, strict=True):
            sums += g * min(1, clip / norm) / 6
    # Gradients err by some 2^-16 on shares, and a row of norm one is clipped to some 2^-11 less.
    for p, wanted in zip(model.parameters(), total, strict=True):
        assert torch.allclose(p.grad.reveal(), wanted, atol=1e-3)
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert private.steps == 1 and model[0].weight.reveal().shape == (4, 3)


def test_what_is_spent_and_what_is_refused():
    session = Session(reference=True)
    budget = Budget(3.0, 1e-5)
    private = PrivateGradients(
        tiny(session), max_grad_norm=1.0, noise_multiplier=4.0, rows=200, batch_size=8, budget=budget
    )
    assert repr(private) == (
        f"PrivateGradients(max_grad_norm=1, noise_multiplier=4, rows=200, batch_size=8, steps=0, budget={budget!r})"
    )
    x = sectorch.share(torch.randn(200, 3), session=session, limit=8.0)
    y = sectorch.share(torch.randint(0, 2, (200,)), session=session)
    with pytest.raises(PrivacyError, match=r"call it before each backward"):
        private.backward(F.cross_entropy, x[:8], y[:8])
    batch = private.sample(x, y)
    private.backward(F.cross_entropy, *batch)
    with pytest.raises(PrivacyError, match=r"call it before each backward"):
        private.backward(F.cross_entropy, *batch)
    assert private.steps == 1
    assert private.epsilon(1e-5) == pytest.approx(budget.spent) and 0 < budget.spent < 3
    budget.charge(budget.curve * 0 + 1.0)
    budget = private.budget = Budget(0.01, 1e-5)
    before = private.steps
    with pytest.raises(BudgetExhaustedError):
        private.backward(F.cross_entropy, *private.sample(x, y))
    assert private.steps == before and budget.spent == 0
    with pytest.raises(ShapeError, match="a sample is of 200 rows"):
        private.sample(x[:9])
    with pytest.raises(ShapeError, match="a batch is of 8 rows"):
        private.backward(F.cross_entropy, x, y)
    with pytest.raises(ArgumentError, match="max_grad_norm is above"):
        PrivateGradients(tiny(session), max_grad_norm=1e-9, noise_multiplier=1.0, rows=9, batch_size=3)
    with pytest.raises(PrivacyError, match="noise_multiplier is above 0"):
        PrivateGradients(tiny(session), max_grad_norm=1.0, noise_multiplier=0.0, rows=9, batch_size=3)
    with pytest.raises(ArgumentError, match="of a shared model with linear layers"):
        PrivateGradients(nn.Sequential(nn.Linear(3, 2)), max_grad_norm=1.0, noise_multiplier=1.0, rows=9, batch_size=3)
