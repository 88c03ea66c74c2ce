"""Whole encrypted runs with the meter on, and networks with convolutions and BatchNorm under encryption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from capride_attacks import Steps, Tap

from sectorch.protocols.capride import CaPriDe, DisaggregationError, Settings, federation
from sectorch.protocols.capride.settings import Directions


def test_the_rate_falls_at_the_milestones():
    how = Settings(rate=0.1, milestones=(50, 75))
    assert [how.rate_in(t) for t in (1, 49, 50, 75)] == pytest.approx([0.1, 0.1, 0.01, 0.001])


@pytest.mark.sectorch_long
@pytest.mark.parametrize("network", ["cnn", "resnet4"])
def test_convolutions_and_batchnorm_answer_as_in_the_clear(network, quick):
    """One encrypted round of the paper's letter: the loss is that of the simulation, within the answers' error."""
    made = federation("digits", 2, network=network, samples=48, test_samples=20)
    how = replace(quick, update="scalar", scale_bits=40)
    hidden, clear = (CaPriDe(*made, replace(how, encrypted=e)).run() for e in (True, False))
    for name in hidden.records:
        found, expected = (r.records[name][1]["distillation_loss"] for r in (hidden, clear))
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.sectorch_long
def test_encrypted_rounds_carry_the_noise_that_the_limit_asks_for(made, quick):
    """Three rounds under 0.5. What is decrypted in the last is what P2's model gives in plain, with Gaussian noise of
    the stated deviation: of 37 numbers its estimate is within 5 / sqrt(74) of it but for once in a million.
    """
    run = Steps(made, replace(quick, scale_bits=40, leakage=0.5, rounds=3))
    tap = Tap(run)
    for t in (1, 2, 3):
        run.round()
        assert 0 < run.records["P1"][t]["leakage"]["P2"] <= 0.5
    plain = Directions(tap.weights[-1], torch.ones(1)).on(tap.true, run.settings.temperature)
    noise = (tap.answers[-1] - plain) / tap.noise[-1]
    assert len(noise) == 37 and abs(float(noise.square().mean().sqrt()) - 1) < 5 / 74**0.5


@pytest.mark.sectorch_long
def test_an_encrypted_run_stops_where_the_limit_is_reached(made, quick):
    """Noise for two rounds, and six are run: the refused question is not sent, and the models stay as they were."""
    short = replace(quick, scale_bits=40, leakage=0.5, rounds=2)
    enough = CaPriDe(*made, replace(short, encrypted=False)).run()
    sigma = max(r["sigma"] for found in enough.records.values() for r in found if "sigma" in r)
    run = CaPriDe(*made, replace(short, rounds=6, sigma=sigma))
    with pytest.raises(DisaggregationError, match=r"could explain .* the limit is 0\.5"):
        run.run()
    records = run.records()
    done = len(records["P1"]) - 1
    assert 1 <= done < 6 and len(records["P2"]) - 1 == done
    assert all(told <= 0.5 for found in records.values() for record in found[1:] for told in record["leakage"].values())
    questions = sum(row["messages"] for row in run.stages.received if row["message"] == "directions")
    assert 2 * done <= questions <= 2 * done + 1
