"""Query selection: what each strategy promises, against a direct computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.data import SELECTIONS, SelectionError, select
from sectorch.data.selection import _clusters, entropy_of, margin_of, proportional


def pool(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(size, 4, generator=draw), torch.randn(size, 3, generator=draw)


@given(st.sampled_from(sorted(SELECTIONS)), st.integers(1, 40), st.data(), st.integers(0, 1000))
def test_different_indices_of_the_pool(kind, size, data, seed):
    budget = data.draw(st.integers(1, size))
    logits, features = pool(size, seed)
    if data.draw(st.booleans()):  # pools of equal images
        logits, features = logits[:1].expand(size, -1), features[:1].expand(size, -1)
    options = dict(size=size, logits=logits, features=features, seed=seed)
    chosen = select(kind, budget, **options)
    assert len(chosen) == budget == len(chosen.unique()) and chosen.tolist() == sorted(chosen.tolist())
    assert int(chosen.min()) >= 0 and int(chosen.max()) < size
    assert torch.equal(chosen, select(kind, budget, **options))


@given(st.integers(2, 40), st.data(), st.integers(0, 1000))
def test_margin_and_entropy_take_the_most_uncertain(size, data, seed):
    budget = data.draw(st.integers(1, size - 1))
    logits, _ = pool(size, seed)
    for kind, certainty in (("margin", margin_of(logits)), ("entropy", -entropy_of(logits))):
        mask = torch.zeros(size, dtype=torch.bool)
        mask[select(kind, budget, logits=logits)] = True
        assert float(certainty[mask].max()) <= float(certainty[~mask].min())


def test_the_measures_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]]))
    expected = torch.tensor([1.5 * 0.6931471805599453, 1.0986122886681098, 0.0]).double()
    assert torch.allclose(entropy_of(logits), expected, atol=1e-6)
    assert torch.allclose(margin_of(logits), torch.tensor([0.25, 0.0, 1.0]).double(), atol=1e-6)


@given(st.integers(2, 30), st.data(), st.integers(0, 1000))
def test_kcenter_is_farthest_first(size, data, seed):
    """Each choice was the furthest from those before: so any two are at least as far apart as any point is from them,
    which makes the radius at most twice the best (Gonzalez, 1985)."""
    budget = data.draw(st.integers(2, size))
    _, features = pool(size, seed)
    chosen = select("kcenter", budget, features=features, seed=seed)
    radius = torch.cdist(features, features[chosen]).min(1).values.max()
    apart = torch.cdist(features[chosen], features[chosen]) + torch.eye(budget) * 1e9
    assert float(apart.min()) >= float(radius) - 1e-5


def test_kcenter_skips_what_is_known():
    features = torch.tensor([[0.0], [1.0], [10.0]])
    assert select("kcenter", 1, features=features, known=torch.tensor([[10.0]])).tolist() == [0]
    assert select("kcenter", 1, features=features, known=torch.tensor([[0.0]])).tolist() == [2]


@given(st.integers(4, 60), st.data(), st.integers(0, 1000))
def test_icd_keeps_the_clusters_proportions(size, data, seed):
    budget = data.draw(st.integers(1, size))
    logits, features = pool(size, seed)
    chosen = select("icd", budget, logits=logits, features=features, seed=seed)
    clusters, margins = _clusters(features, seed), margin_of(logits)
    for cluster in clusters.unique():
        members = torch.nonzero(clusters == cluster).flatten()
        mine = chosen[clusters[chosen] == cluster]
        assert abs(len(mine) - budget * len(members) / size) <= 1
        rest = members[~torch.isin(members, mine)]
        if len(mine) and len(rest):
            assert float(margins[mine].max()) <= float(margins[rest].min())


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.data())
def test_proportional_division(counts, data):
    counts = torch.tensor(counts)
    budget = data.draw(st.integers(0, int(counts.sum())))
    parts = proportional(counts, budget)
    assert int(parts.sum()) == budget and bool((parts <= counts).all()) and bool((parts >= 0).all())
    assert bool(((parts - counts.double() * budget / counts.sum()).abs() < 1 + 1e-9).all())


@pytest.mark.parametrize(
    ("kind", "budget", "options", "text"),
    [
        ("best", 1, {}, "there is no selection 'best'; there are random, margin"),
        ("random", 6, dict(size=5), "6 queries of a pool of 5"),
        ("random", 0, dict(size=5), "0 queries of a pool of 5"),
        ("random", 1, {}, "size of the pool is not clear"),
        ("margin", 1, dict(size=5), "margin selection needs logits"),
        ("kcenter", 1, dict(size=5), "kcenter selection needs features"),
        ("entropy", 1, dict(logits=torch.full((3, 2), torch.nan)), "logits must be finite"),
        ("icd", 1, dict(logits=torch.ones(3, 2), features=torch.ones(4, 2)), "size of the pool is not clear"),
    ],
)
def test_errors(kind, budget, options, text):
    with pytest.raises(SelectionError, match=text):
        select(kind, budget, **options)
