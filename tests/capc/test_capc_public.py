"""A vote on queries that are no secret (examples/public_queries.py): who learns what; queries chosen to show a vote."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from cases import long

import sectorch
from sectorch.choreography.ledger import Profile
from sectorch.dp import epsilon_for

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "public_queries.py"))
MECHANISM, COUNT, LIMIT = EXAMPLE["MECHANISM"], EXAMPLE["COUNT"], EXAMPLE["LIMIT"]


def test_q_learns_the_labels_and_nobody_else_learns_anything():
    """Of the messages of a vote, and bit for bit the labels of the mechanism in the clear."""
    session, generator = sectorch.Session(answering=4), torch.Generator().manual_seed(0)
    votes = [torch.nn.functional.one_hot(torch.randint(10, (COUNT,), generator=generator), 10) for _ in range(4)]
    noise = MECHANISM.draw(COUNT, 10)
    with Profile() as profile:
        labels = EXAMPLE["winners"](session, votes, noise)
    assert torch.equal(labels, MECHANISM.labelled(sum(votes), noise))
    assert {m.learner.name for m in profile.ledger if m.learner} == {"Q"}
    assert not any(m.dst.name == "Q" for m in profile.ledger if not m.learner)  # the result, and no other message


@pytest.mark.parametrize("seed", [0, *long(1, 2, 3, 4)])
def test_queries_chosen_to_show_a_vote_show_what_epsilon_allows(seed):
    """The asker spends its whole budget on one image, on which the other fourteen, all colluding, vote 7 to 7: so the
    fifteenth's vote decides. It wins as often as the exact distribution of the labels says, clearly more often than by
    chance, and its frequencies prove less than the epsilon that was charged."""
    torch.manual_seed(seed)
    trials, either = 250, [torch.tensor([7 + (own == 0), 7 + (own == 1), *[0] * 8]) for own in (0, 1)]
    counts = []
    for votes in either:
        labels = MECHANISM.labels(votes.expand(trials * COUNT, 10)).view(trials, COUNT)
        counts.append((labels == 0).sum(1) - (labels == 1).sum(1))
    right = [float((c > 0).double().mean() + (c == 0).double().mean() / 2) for c in (counts[0], -counts[1])]
    p, q = MECHANISM.distribution(either[0].tolist())[:2]
    sigma = math.sqrt(COUNT * (p + q - (p - q) ** 2))
    expected = 0.5 * (1 + math.erf(COUNT * (p - q) / sigma / math.sqrt(2)))
    assert abs(sum(right) / 2 - expected) < 0.02 + 7 * 0.5 / math.sqrt(2 * trials) and expected > 0.55
    charged = epsilon_for(MECHANISM, COUNT, LIMIT[1])
    for threshold in range(-5, 6):
        hit, false = (float((c > threshold).double().mean()) for c in counts)
        least, most = hit - 5 * math.sqrt(0.25 / trials), false + 5 * math.sqrt(0.25 / trials)
        assert least <= 0 or math.log(least / most) < charged <= LIMIT[0]
