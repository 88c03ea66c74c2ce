"""The honest-but-curious adversary that solves for a peer's logits, and what P_l refuses and counts by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from capride_attacks import Steps, recover

from sectorch.ckks import ReleaseLedger
from sectorch.protocols.capride import DisaggregationError, Settings
from sectorch.protocols.capride.settings import Directions

OFF = Settings(leakage=None)


def random_directions(count: int, n: int, classes: int, seed: int = 0) -> Directions:
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randn(count, n, classes, generator=draws, dtype=torch.float64)
    return Directions.of(
        weights - weights.mean(2, keepdim=True)
    )  # as derivatives of probabilities, which add up to one


def exchange(made, how: Settings):
    run = Steps(made, replace(how, warmup=0))
    return run, run.exchange, run.states["P2"].small


def ask(link, run, model, directions: Directions) -> torch.Tensor:
    return link.ask(1, run.parties[0], directions, len(run.parties[0].labels), {"P2": model})["P2"]


def attack(made, how: Settings, share: float, per_round: int = 50):
    """Ask again and again in the same version of the model, then solve. Gives the recovery and the true logits."""
    run, link, model = exchange(made, how)
    n = len(run.parties[0].labels)
    asked, answers = [], []
    for i in range(round(share * n * 9 / per_round)):
        asked.append(random_directions(per_round, n, 10, i))
        answers.append(ask(link, run, model, asked[-1]))
    together = Directions(torch.cat([d.weights for d in asked]), torch.cat([d.scales for d in asked]))
    with torch.no_grad():
        true = model(run.parties[0].images)
    return recover(together, torch.cat(answers), how.temperature), true


def test_with_the_guard_off_and_enough_released_the_logits_are_solved_for(made):
    found, true = attack(made, replace(OFF, encrypted=False), 1.2)
    assert found.determined == 1.0
    assert found.error(true) < 1e-4  # the model is in float32
    some, _ = attack(made, replace(OFF, encrypted=False), 0.5)
    assert some.determined < 0.52 and some.error(true) > 0.5


def test_noise_blunts_the_attack(made):
    clear, _ = attack(made, replace(OFF, encrypted=False), 1.2)
    noisy, true = attack(made, replace(OFF, encrypted=False, sigma=1.0), 1.2)
    assert clear.error(true) < 1e-4 and noisy.error(true) > 0.3


def test_counts_are_kept_by_receiver_and_version():
    ledger = ReleaseLedger("P2", least_samples=16)
    for version in ("v", "v", "w"):
        ledger.release("P1", version, 100, 48, 9)
    again = ReleaseLedger("P2", {**ledger.released, "P3>P1@v": [1, 9]})
    again.release("P1", "v", 1, 16, 9)
    assert again.released == {"P2>P1@v": [201, 144], "P2>P1@w": [100, 432]}


def test_a_question_of_nothing_is_refused():
    """The size of a question is a message: a negative number would take from what was counted."""
    ledger = ReleaseLedger("P2")
    ledger.release("P1", "v", 100, 48, 9)
    for numbers, samples in ((0, 48), (-100, 48), (1, 0), (1, -48)):
        for ledger.least_samples in (1, 16):
            with pytest.raises(DisaggregationError, match=f"P2 releases no {numbers} numbers over {samples} samples"):
                ledger.release("P1", "v", numbers, samples, 9)
    assert ledger.released == {"P2>P1@v": [100, 432]}


def test_few_sample_aggregates_are_refused():
    with pytest.raises(DisaggregationError, match="no aggregate over 15 samples"):
        ReleaseLedger("P2", least_samples=16).release("P1", "v", 1, 15, 9)
    ReleaseLedger("P2").release("P1", "v", 1, 15, 9)
