"""SampleSkip: Algorithm 7 against its definition, Theorem 6.3 on random linear classifiers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch.protocols.secsv.algorithm import skippable
from sectorch.protocols.secsv.testers import averaged
from sectorch.protocols.secsv.values import bits, coalitions, members, numbers


@given(st.sets(st.integers(0, 300)))
def test_sets_of_samples_are_integers(found):
    assert numbers(bits(found)) == sorted(found)


@given(st.dictionaries(st.integers(1, 31), st.integers(0, 255)), st.integers(1, 31))
def test_algorithm_7(correct, mask):
    wanted = 0
    for a in correct:
        for b in correct:
            if a & b == 0 and a | b == mask:
                wanted |= correct[a] & correct[b]
    assert skippable(mask, correct) == wanted


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(2, 5))
def test_theorem_6_3_no_sample_is_skipped_wrongly_for_linear_classifiers(seed, clients, classes):
    draw = torch.Generator().manual_seed(seed)
    models = [{"w": torch.randn(classes, 7, generator=draw, dtype=torch.float64)} for _ in range(clients)]
    weights = torch.randint(1, 9, (clients,), generator=draw).tolist()
    x, labels = (
        torch.randn(40, 7, generator=draw, dtype=torch.float64),
        torch.randint(0, classes, (40,), generator=draw),
    )
    right: dict[int, int] = {}
    for mask in coalitions(range(clients)):
        model = averaged([models[i] for i in members(mask)], [weights[i] for i in members(mask)])
        hits = ((x @ model["w"].t()).argmax(1) == labels).nonzero().flatten().tolist()
        skipped = skippable(mask, right)
        right[mask] = bits(hits)
        assert skipped & ~right[mask] == 0
