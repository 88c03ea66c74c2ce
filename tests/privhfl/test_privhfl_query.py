"""Secure querying against the clear: the sum of logits, its chunks, what each role receives, and soft labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import long
from example_counts import fewer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch.choreography.ledger import Transcript
from sectorch.dp.noise import epsilon_of, gaussian_curve
from sectorch.federated import FederationError
from sectorch.federated.outcome import Received, merged
from sectorch.federated.participants import build
from sectorch.protocols.privhfl import Settings, plain_query, secure_query, settings, soft_labels
from sectorch.protocols.privhfl.experiment import statement

NETS = ("vgg7-small", "resnet8-small", "resnet10-small")


def small(seed: int, classes: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, classes)).eval()


@fewer(6)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 10), st.booleans(), st.integers(0, 1000))
def test_equals_the_clear(parties, rows, chunk, normalise, seed):
    """With 24 bits a layer errs by about 2^-24 for each term of its sums; 1e-5 leaves a factor of ten for two layers of
    at most nine terms, four parties, and the trigonometric series in softmax (about 1e-6 each)."""
    models = [small(seed + i) for i in range(parties)]
    queries = torch.rand(rows, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    options = dict(frac_bits=24 if not normalise else 20, normalise=normalise, chunk=chunk)
    total, steps = secure_query(queries, models, **options)
    expected = plain_query(queries, models, normalise)
    assert torch.allclose(total, expected, atol=1e-5 if not normalise else 1e-4)
    assert steps.chunk == chunk and steps.predict > 0


@pytest.mark.parametrize("bits", [20, *long(24)])
def test_three_architectures_soft_labels_within_a_thousandth(bits: int):
    """On untrained networks with random batch statistics; trained ones: benchmarks."""
    models = [build(name, (1, 8, 8), 10, seed).eval() for seed, name in enumerate(NETS)]
    for model in models:
        sectorch.nn.models.randomize_batchnorm(model, torch.Generator().manual_seed(0))
    queries = torch.rand(12, 1, 8, 8)
    total, _ = secure_query(queries, models, frac_bits=bits)
    assert float((total.softmax(1) - plain_query(queries, models).softmax(1)).abs().max()) < 1e-3


def test_q_receives_the_sum_and_nothing_else_that_depends_on_the_models():
    models = [small(i) for i in range(3)]
    with Received() as received, sectorch.profile() as profile:
        secure_query(torch.rand(5, 1, 4, 4), models, chunk=2)
    rows = received.rows()
    assert sum(row["bytes"] for row in rows) == profile.bytes
    assert {row["protocol"] for row in rows if row["role"] == "Q"} == {"seed", "guard", "aggregate"}
    sums = next(row for row in rows if row["role"] == "Q" and row["protocol"] == "aggregate")
    # Chunks 2, 2, 1: a sum of three logits for each row, and a tag for each chunk.
    assert sums["messages"] == 3 and sums["bytes"] == (5 * 3 + 3) * 8
    # A and S: uniform bits, but for the public keys of the seed protocol and A's own key with S.
    assert {row["protocol"] for row in rows if row["role"] != "Q" and row["shows"]} == {"seed"}


def test_what_a_and_s_receive_does_not_repeat():
    """The same question twice gives no message twice, so none shows it.

    Public keys go to each answering party, and S sends the words of a dealt key on to A, once each.
    """
    model, queries = small(0), torch.rand(2, 1, 4, 4)
    seen: set[tuple[str, bytes]] = set()
    for _ in range(2):
        with Transcript() as transcript:
            secure_query(queries, [model, small(1)])
        for role in ("A", "S"):
            for line, value in transcript.received(role):
                content = value.numpy().tobytes()
                if line.protocol == "seed" or len(content) < 16:
                    continue
                assert (role, content) not in seen, line
                seen.add((role, content))


def test_statement():
    with Received() as received:
        secure_query(torch.rand(2, 1, 4, 4), [small(0), small(1)])
    rows = merged([received.rows(), received.rows()])
    assert [row["messages"] for row in rows] == [2 * row["messages"] for row in received.rows()]
    text = statement(rows, Settings(), 3, {})
    assert "the sum over the answering parties" in text[2] and "no summand" in text[3]
    assert "IS that party's logits" in statement(rows, Settings(), 2, {})[3]
    leaky = " ".join(statement(rows, Settings(relu="privhfl"), 3, {}))
    assert "gives each party's weights, and so every summand" in leaky and "no summand" not in leaky
    assert "in the clear" in statement([], Settings(secure=False), 3, {})[0]
    noised = " ".join(statement(rows, Settings(normalise=True, sigma=4), 2, {"all": 3.0, "one": 1.5}))
    assert "of 1 parties and the server's noise" in noised and "no noise was added" not in noised
    assert "epsilon 1.5 towards one querying party and epsilon 3 towards all others together, at delta 1e-05" in noised
    assert "one querying party" not in " ".join(statement(rows, Settings(normalise=True, sigma=4), 2, {"all": 3.0}))


def test_noise_is_on_the_grid_and_of_the_size_that_was_asked_for():
    """1200 draws: their standard deviation is within 15 % of sigma but with a probability below 1e-12. The ledger has
    the noised sum and no other."""
    models, queries = [small(0), small(1)], torch.rand(400, 1, 4, 4)
    exact = plain_query(queries, models, normalise=True)
    with Received() as received:
        total, _ = secure_query(queries, models, normalise=True, sigma=2.0)
    assert 1.7 < float((total - exact).std()) < 2.3
    assert torch.equal(total * 2.0**20, (total * 2.0**20).round())
    shown = {row["protocol"] for row in received.rows() if row["role"] == "Q" and row["shows"]}
    assert "aggregate_noisy" in shown and "aggregate" not in shown
    assert 1.7 < float((plain_query(queries, models, True, 2.0) - exact).std()) < 2.3


def test_noise_composes_over_queries_and_rounds():
    """The figures of `sectorch.dp` for as many Gaussian sums; the second round leaves only the one towards all."""
    how = Settings(normalise=True, sigma=8.0)
    round_of = lambda *answering: dict(answering=list(answering), queries=20)
    records = {"c1": [{}, round_of("c2", "c3")], "c2": [{}, round_of("c3")], "c3": [{}, round_of("c1")]}
    found = settings.spent(records, how, 10)
    wanted = [epsilon_of(n * gaussian_curve(8.0, settings.change(10)), 1e-5) for n in (20, 40)]
    assert [found["one"], found["all"]] == wanted and wanted[0] < wanted[1]
    assert 2**0.5 < settings.change(10) < 2**0.5 + 2e-4
    for again in (replace(how, iterations=2), replace(how, sequential=True)):
        assert settings.spent(records, again, 10) == {"all": wanted[1]}


def test_answers_move_the_sum_by_no_more_than_is_charged():
    """Two models that are sure of different classes, on shares: sqrt(2) and what softmax errs by."""

    class Sure(nn.Module):
        def __init__(self, which: int):
            super().__init__()
            self.last = nn.Linear(16, 10)
            nn.init.zeros_(self.last.weight)
            self.last.bias.data = 30.0 * torch.eye(10)[which]

        def forward(self, x):
            return self.last(x.flatten(1))

    queries = torch.rand(3, 1, 4, 4)
    sums = [secure_query(queries, [Sure(0).eval(), Sure(k).eval()], normalise=True)[0] for k in (1, 2)]
    moved = (sums[0] - sums[1]).norm(dim=1)
    assert bool((moved > 1.41).all()) and bool((moved <= settings.change(10)).all())


@given(st.integers(2, 10), st.floats(0.1, 50), st.integers(0, 1000))
def test_noisy_means_become_the_nearest_probabilities(classes, sigma, seed):
    """As a quadratic program would find: no point of the simplex is nearer in direction of any of its corners."""
    total = sigma * torch.randn(5, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = soft_labels(total, 3, True, None)
    assert torch.allclose(found.sum(1), torch.ones(5).double()) and bool((found >= 0).all())
    away = total / 3 - found
    corners = torch.eye(classes).double()
    assert bool((torch.einsum("ni,nki->nk", away, corners - found[:, None]) <= 1e-9 * (1 + sigma)).all())


def test_the_chunk_bounds_what_is_in_flight():
    """The largest message does not grow with the number of queries. Memory itself: the long profile."""
    model, largest = build("vgg7-small", (1, 8, 8), 10, 0).eval(), []
    for rows in (4, 16):
        with sectorch.profile() as profile:
            secure_query(torch.rand(rows, 1, 8, 8), [model], chunk=4)
        largest.append(max(line.bytes for line in profile.ledger if line.label != "omega_masked"))
    assert largest[0] == largest[1]


def test_no_answering_party():
    with pytest.raises(FederationError, match="at least one answering party, got none"):
        secure_query(torch.rand(1, 1, 4, 4), [])


@given(st.integers(2, 12), st.integers(4, 12), st.integers(0, 1000), st.booleans())
def test_soft_labels(classes, bits, seed, normalise):
    """Rounded labels add up to one. Each is within 2^-(bits + 1) of the softmax before they are divided by their sum,
    which is within classes / 2^(bits + 1) of one."""
    total = 5 * torch.randn(7, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if normalise:
        total = 3 * total.softmax(1)
    exact = soft_labels(total, 3, normalise, None)
    rounded = soft_labels(total, 3, normalise, bits)
    assert torch.allclose(exact.sum(1), torch.ones(7).double()) and torch.allclose(rounded.sum(1), exact.sum(1))
    assert float((rounded - exact).abs().max()) <= (1 + classes) * 2.0 ** -(bits + 1) / (
        1 - classes * 2.0 ** -(bits + 1)
    )


def test_rounding_takes_small_differences_away():
    """A difference of 2^-24, times some tens, almost never reaches a label of six bits."""
    total = 5 * torch.randn(2000, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy = total + 2.0**-24 * torch.randn(2000, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(soft_labels(total, 1, False, 6), soft_labels(noisy, 1, False, 6))
