"""The papers' claims recomputed from their text: what holds, and the counterexamples to what does not.

Here are those that no test of the code itself decides. docs/papers.md lists all claims, each with its test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sectorch import ckks
from sectorch.data import select
from sectorch.dp import ORDERS, GNMax, epsilon_for, epsilon_of
from sectorch.dp.noise import gaussian_curve, response_curve
from sectorch.nn.fhe import GELU, Polynomial
from sectorch.protocols.capride.training import true_kl
from sectorch.protocols.secsv.testers import averaged

RING = 1 << 64
words = st.integers(0, RING - 1)


# PrivHFL.


@given(words, words, words, words, words)
def test_privhfl_beavers_shares_as_printed_add_up_to_something_else(x, y, a, b, c_0):
    """C.4.1 gives P_1 ([x]_0 + a) [y]_1 - [c]_1. With b in the place of [y]_1 the shares add up to [x]_0 [y]_1, as do
    those of Figure 3 with w for x; as printed they miss it by ([x]_0 + a) ([y]_1 - b)."""
    c_1 = a * b - c_0
    first = x * (y - b) - c_0
    assert (first + (x + a) * b - c_1 - x * y) % RING == 0
    missed = first + (x + a) * y - c_1 - x * y
    assert (missed - (x + a) * (y - b)) % RING == 0
    assert (missed % RING != 0) == ((x + a) * (y - b) % RING != 0)


@given(words, words, words, words)
def test_privhfl_one_pi_matmul_is_no_product_of_two_shared_values(x_0, x_1, d_0, d_1):
    """3.3 (ii) computes x DReLU(x) by Pi_Matmul, whose first factor P_A knows in the clear. P_A knows [x]_0 alone: one
    instance gives [x]_0 d, and a second with the server in P_A's place gives the rest."""
    matmul = lambda known: known * (d_0 + d_1)
    assert (matmul(x_0) + matmul(x_1) - (x_0 + x_1) * (d_0 + d_1)) % RING == 0
    assert (matmul(x_0) - (x_0 + x_1) * (d_0 + d_1)) % RING == -x_1 * (d_0 + d_1) % RING


@given(words, words)
def test_privhfl_ten_of_sixteen_products_of_blocks_are_left(e, f):
    """Equation 6, in float64: the six products that it leaves out are multiples of 2^64, the ten are exact."""
    blocks = lambda value: [value >> 16 * i & 0xFFFF for i in range(4)]
    pairs = [(i, j) for i in range(4) for j in range(4) if i + j < 4]
    product = lambda i, j: int(float(blocks(e)[i]) * float(blocks(f)[j]))
    assert len(pairs) == 10
    assert (sum(product(i, j) << 16 * (i + j) for i, j in pairs) - e * f) % RING == 0


def test_privhfl_factors_above_2_to_26_may_have_an_exact_product():
    """C.6 says "if and only if" both factors are within 2^26: that is enough, and neither is needed. Doubles hold all
    integers up to 2^53 and not 2^52, and 2^20 products of blocks may be added."""
    assert float(2**40 + 1) * 3.0 == (2**40 + 1) * 3
    assert int(float(2**53 - 1)) == 2**53 - 1 and int(float(2**53 + 1)) != 2**53 + 1
    assert (2**16 - 1) ** 2 * 2**20 < 2**53


@given(st.integers(2, 8), st.data(), st.integers(0, 1000))
def test_the_greedy_k_center_is_within_twice_the_best(size, data, seed):
    """PrivHFL's Equation 4 and CaPC's Equation 9 ask for the best centers; the greedy choice is so near to them."""
    budget, points = (
        data.draw(st.integers(1, size)),
        torch.randn(size, 2, generator=torch.Generator().manual_seed(seed)),
    )
    known = torch.randn(1, 2, generator=torch.Generator().manual_seed(seed + 1))
    radius = lambda chosen: float(torch.cdist(points, torch.cat([known, points[chosen]])).min(1).values.max())
    best = min(radius(list(rows)) for rows in torch.combinations(torch.arange(size), budget).tolist())
    found = radius(select("kcenter", budget, features=points, known=known, seed=seed).tolist())
    assert best <= found <= 2 * best + 1e-6


# CaPC.


def response_delta(epsilon: float, times: int, at: float) -> float:
    """The exact delta of randomised response with odds e^epsilon, so many times, at another epsilon."""
    odds = np.arange(times + 1)
    log_p = [math.lgamma(times + 1) - math.lgamma(k + 1) - math.lgamma(times - k + 1) for k in odds]
    log_p = np.array(log_p) + odds * epsilon - times * math.log1p(math.exp(epsilon))
    loss = (2 * odds - times) * epsilon
    return float(np.sum(np.exp(log_p) * np.maximum(0, -np.expm1(np.minimum(at - loss, 700)))))


@given(st.floats(0.01, 2), st.integers(1, 200), st.floats(1e-9, 0.5))
def test_capc_theorem_1_holds_for_the_worst_mechanism(epsilon, times, delta):
    """Strong composition, of epsilon-DP mechanisms, of which randomised response loses most in every composition."""
    total = epsilon * math.sqrt(2 * times * math.log(1 / delta)) + times * epsilon * math.expm1(epsilon)
    assert response_delta(epsilon, times, total) <= delta * (1 + 1e-9)


@given(st.floats(0.01, 2), st.integers(1, 200), st.floats(1e-9, 0.1))
def test_capc_theorem_2_is_what_a_budget_charges_or_more(epsilon, times, delta):
    """From RDP to DP. The sharper theorem that budgets use lies between the printed one and the truth."""
    curve = times * response_curve(epsilon)
    printed = float((curve + math.log(1 / delta) / (ORDERS - 1)).min())
    charged = epsilon_of(curve, delta)
    assert charged <= printed * (1 + 1e-9)
    assert response_delta(epsilon, times, charged) <= delta * (1 + 1e-6)
    assert response_delta(epsilon, times, printed) <= delta * (1 + 1e-6)


@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(0.1, 40))
def test_capc_equations_3_to_6_are_one_quantity(seed, outcomes, order):
    """The moments accountant at lambda is lambda times the Renyi divergence of order lambda + 1, by either of
    Equation 5's forms; the privacy loss is the logarithm whose moments they are."""
    draws = np.random.default_rng(seed)
    p, q = draws.dirichlet(np.ones(outcomes), 2) + 1e-3
    p, q = p / p.sum(), q / q.sum()
    loss = np.log(p / q)
    moments = math.log(np.sum(p * np.exp(order * loss)))
    of_q = math.log(np.sum(q * (p / q) ** (order + 1))) / order
    of_p = math.log(np.sum(p * (p / q) ** order)) / order
    assert of_q == pytest.approx(of_p, rel=1e-9, abs=1e-12)
    assert moments == pytest.approx(order * of_p, rel=1e-9, abs=1e-12)


@given(st.floats(1, 100), st.integers(1, 500), st.integers(2, 6))
def test_capc_a_group_of_c_costs_more_than_c_times_as_much(sigma, queries, group):
    """3.1 says "a factor proportional to C". At the same noise the Renyi cost grows by C^2 and epsilon by between C and
    C^2, here by 3.5 for a C of 2; at C times the noise it does not grow."""
    assert epsilon_for(GNMax(1, 2), 500, 1e-5) > 3.4 * epsilon_for(GNMax(1, 1), 500, 1e-5)
    alone, together = (epsilon_for(GNMax(sigma, moved), queries, 1e-5) for moved in (1, group))
    np.testing.assert_allclose(GNMax(sigma, group).curve, group**2 * GNMax(sigma).curve, rtol=1e-12)
    assert alone * group * 0.98 <= together <= alone * group**2 * (1 + 1e-9)  # 2 %: orders are a grid
    assert epsilon_for(GNMax(group * sigma, group), queries, 1e-5) == pytest.approx(alone, rel=1e-9)


def test_capc_one_vote_moves_the_histogram_by_the_root_of_two():
    """3.3 has "a sensitivity of 1". A party that votes otherwise takes one from a count and gives one to another."""
    before, after = torch.tensor([3.0, 2.0, 0.0]), torch.tensor([2.0, 3.0, 0.0])
    change = float((before - after).norm())
    assert change == pytest.approx(math.sqrt(2))
    np.testing.assert_allclose(GNMax(7.0).curve, gaussian_curve(7.0, change), rtol=1e-6)
    assert (GNMax(7.0).curve > 1.9 * gaussian_curve(7.0, 1.0)).all()


# CaPriDe.


@given(st.integers(0, 10**6), st.floats(0.5, 8), st.integers(2, 12))
def test_capride_equation_8_has_log_c_once(seed, temperature, classes):
    """It prints M log C. The M terms p^m log C add up to log C, so that the printed sum is too large by (M - 1) log C:
    two equal predictions would be log C apart."""
    draws = torch.Generator().manual_seed(seed)
    u, z = (3 * torch.randn(1, classes, generator=draws, dtype=torch.float64) for _ in range(2))
    log_c = float((z / temperature).logsumexp(1))
    true = float(
        F.kl_div((z / temperature).log_softmax(1), (u / temperature).log_softmax(1), log_target=True, reduction="sum")
    )
    assert float(true_kl(u, z, temperature)) == pytest.approx(true, abs=1e-9)
    p = (u / temperature).softmax(1)
    printed = float((p * p.log()).sum() - (p * z / temperature).sum()) + classes * log_c
    assert printed - true == pytest.approx((classes - 1) * log_c, abs=1e-9)


def test_capride_the_polynomial_of_4_2_is_gelu_near_zero_alone():
    """Within 0.15 for |x| <= 3; at 5 it is 4 below, and it falls from there."""
    x = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    off = (Polynomial(GELU)(x) - F.gelu(x)).abs()
    assert float(off[x.abs() <= 3].max()) < 0.15 < float(off[x.abs() > 3.2].min())
    assert float(off[x == 5]) == pytest.approx(3.99, abs=0.01)


# Perturbed models.


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_perturbation_equation_4(seed, rows, columns):
    """D (A o B) = (D A) o B and (A o B) D = (A D) o B for diagonal D: why a scaled channel passes a linear layer."""
    draws = np.random.default_rng(seed)
    a, b = draws.normal(size=(2, rows, columns))
    left, right = np.diag(draws.normal(size=rows)), np.diag(draws.normal(size=columns))
    np.testing.assert_allclose(left @ (a * b), (left @ a) * b)
    np.testing.assert_allclose((a * b) @ right, (a @ right) * b)
    np.testing.assert_allclose(a[:, 0] * b[:, 0], np.diag(a[:, 0]) @ b[:, 0])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_perturbation_equation_15_counts_from_zero(channels, height, width):
    """j runs from 1 and the channels do too: the index has to round up. Rounded down, as in Lemma 2's proof, the first
    columns name a channel 0 that there is not, and the last entry of each channel has the next one's scale."""
    area = height * width
    wanted = torch.arange(1, channels + 1).repeat_interleave(area).tolist()  # of the flattened [c, h, w]
    columns = range(1, channels * area + 1)
    assert [math.ceil(j / area) for j in columns] == wanted
    assert ([j // area for j in columns] == wanted) == (area == 1)


# SecSV.


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 40), st.integers(0, 10**6))
def test_secsv_lemmas_5_2_and_5_3(d_out, d_in, columns, slots, seed):
    """Matrix Reducing in the clear: the slot-wise products of the shifted copies add up to A B, for any shape, and a
    wider B is its parts side by side."""
    draws = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-9, 10, shape, generator=draws).double() for shape in ((d_out, d_in), (d_in, columns)))
    plan = ckks.MatrixReducing(d_out, d_in, columns, slots)
    (rows, width), found = plan.tile, torch.zeros(d_out, columns).double()
    for top in range(0, d_out, rows):
        for start in range(0, columns, width):
            left, right = plan._copies(a[top : top + rows], True), plan._copies(b[:, start : start + width], False)
            assert len(left) == d_in, "Lemma 6.1: d_in products and no rotation"
            part = (left * right).sum(0)[: rows * width].view(rows, width)
            found[top : top + rows, start : start + width] = part[: d_out - top, : columns - start]
    assert torch.equal(found, a @ b)


small = st.integers(-2, 2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_secsv_theorem_6_3_holds_where_scores_are_equal(classes, features, first, second, data):
    """If ties go to the first class, as in argmax, and no weight is below zero."""
    matrix = lambda: torch.tensor([[data.draw(small) for _ in range(features)] for _ in range(classes)]).double()
    models, x = [{"w": matrix()}, {"w": matrix()}], torch.tensor([data.draw(small) for _ in range(features)]).double()
    labels = [int((model["w"] @ x).tolist().index(max((model["w"] @ x).tolist()))) for model in models]
    scores = (first * models[0]["w"] + second * models[1]["w"]) @ x
    torch.testing.assert_close(averaged(models, [first, second])["w"] @ x, scores / (first + second))
    if labels[0] == labels[1]:
        assert scores.tolist().index(max(scores.tolist())) == labels[0]


def test_secsv_theorem_6_3_needs_weights_of_one_sign():
    first, second, x = torch.tensor([[3.0], [0.0]]), torch.tensor([[1.0], [0.0]]), torch.tensor([1.0])
    assert int((first @ x).argmax()) == int((second @ x).argmax()) == 0
    assert int(((2 * second - first) @ x).argmax()) == 1


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 10**6))
def test_secsv_linear_layers_are_no_one_way_functions(d_in, more, seed):
    """Proposition 6.8 assumes that they are. Whoever has input and output of enough samples has the weights, and
    whoever has weights and outputs has the input, by least squares; routes keep the two apart, hardness does not. Its
    proof names an owner of the model, which an aggregated model lacks: a member that decrypts for S and for S less
    itself has the outputs of its own model, and so the others' samples."""
    draws = torch.Generator().manual_seed(seed)
    weights, others = (torch.randn(d_in + more, d_in, generator=draws, dtype=torch.float64) for _ in range(2))
    x = torch.randn(d_in, d_in + more, generator=draws, dtype=torch.float64)
    solve = lambda left, right: torch.linalg.lstsq(left, right, driver="gelsd").solution
    close = dict(rtol=1e-4, atol=1e-4)
    if min(float(torch.linalg.matrix_norm(m, -2)) for m in (weights, x)) < 1e-3:
        return  # too near to a singular matrix to be solved in double precision
    torch.testing.assert_close(solve(x.T, (weights @ x).T).T, weights, **close)
    torch.testing.assert_close(solve(weights, weights @ x), x, **close)
    with_own, without = (0.25 * weights + 0.75 * others) @ x, 0.75 * others @ x
    torch.testing.assert_close(solve(0.25 * weights, with_own - without), x, **close)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_secsv_who_reduces_after_decryption_sees_sums_of_weights(d_in, d_out, seed):
    """Algorithm 4, step 7: shares add up to x or to x + p, so that a client decrypts A x + p A k with k of 0 and 1, and
    what is left of a division by p are sums of A's columns. Each column stands alone where one feature wraps around."""
    draws, p = np.random.default_rng(seed), 2**31 - 1
    weights, x = draws.integers(-50, 50, (d_out, d_in)), draws.integers(0, 50, (d_in, 64))
    first = draws.integers(0, p, x.shape)
    second = (x - first) % p
    decrypted = weights @ first + weights @ second
    wrapped = (first + second) // p
    left = (decrypted + p // 2) // p
    np.testing.assert_array_equal(decrypted - p * left, weights @ x)
    np.testing.assert_array_equal(left, weights @ wrapped)
    for column in np.flatnonzero(wrapped.sum(0) == 1):
        np.testing.assert_array_equal(left[:, column], weights[:, wrapped[:, column].argmax()])
