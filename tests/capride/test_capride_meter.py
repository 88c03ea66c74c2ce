"""The meter: what it says before a question is asked, against attacks on the answers with real directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from capride_attacks import SIZES, Steps, Tap

from sectorch.federated.folder import digest
from sectorch.federated.training import predict
from sectorch.protocols.capride import CaPriDe, DisaggregationError, Settings, federation
from sectorch.protocols.capride.algorithm import subset
from sectorch.protocols.capride.exchange import fitted
from sectorch.protocols.capride.settings import Directions, head_of
from sectorch.protocols.capride.training import Meter, Question, own_view

SHORT = Settings(rounds=2, encrypted=False, head_rank=6)


def attacked(made, how: Settings, sizes=SIZES, times: float = 1.0) -> tuple[Steps, float]:
    """A run, and the share of P2's logits that P1 finds with the best of all priors, of all rounds together.

    Args:
        times: what P2's logits are multiplied by after local training.
    """
    run = Steps(made, how)
    state = run.states["P2"]
    with torch.no_grad():
        for weight in head_of(state.small).parameters():
            weight.mul_(times)
    run.change("P2", state)
    tap = Tap(run)
    for _ in range(how.rounds):
        run.round()
    return run, tap.leaked(sizes=sizes)


def luck(meter: Meter, draws: int = 400) -> float:
    """How far the share of one pair of models may lie above the mean that the meter states.

    The largest of all draws from the prior less their mean.
    """
    generator = torch.Generator().manual_seed(0)
    width = len(meter.known)
    w = torch.randn(draws, width, generator=generator, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(meter.known)
    noise = torch.randn(draws, width, generator=generator, dtype=torch.float64) * values.clamp_min(0).sqrt()
    mean = (w @ vectors * values + noise) / (1 + values) @ vectors.t()
    sizes = meter.basis.square().sum(0).repeat_interleave(width // meter.basis.shape[1])
    shares = 1 - ((w - mean).square() @ sizes) / (w.square() @ sizes)
    return float(shares.max() - shares.mean())


@pytest.mark.parametrize("split", ["homogeneous", "no-overlap"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sectorch_long) for seed in (1, 2))])
def test_the_meter_never_says_less_than_the_attack_finds(split, seed):
    """Without noise, with noise for a limit, and the letter of the paper. The attack takes whichever of 54 priors does
    best on the true logits, which no attacker knows; `luck` is what one draw may lie above the mean.
    """
    made = federation("digits", 2, split, samples=48, test_samples=20, seed=seed)
    for change in ({"leakage": None}, {"leakage": 0.5}, {"leakage": 0.1}, {"update": "scalar", "leakage": None}):
        run, found = attacked(made, replace(SHORT, seed=seed, **change))
        meter = run.meter("P2>P1")
        stated = run.records["P1"][-1]["leakage"]["P2"]
        assert stated == pytest.approx(float(meter.leakage().max()))
        assert found <= stated + luck(meter), (change, found, stated)


def test_the_limit_holds_for_a_peer_with_far_larger_logits():
    """Noise is for a peer twice P1's size away; a peer further away would tell more through it, and scales down."""
    made = federation("digits", 2, samples=48, test_samples=20)
    run, found = attacked(made, SHORT, (0.3, 1.0, 3.0, 10.0, 30.0), times=30.0)
    assert run.records["P1"][-1]["leakage"]["P2"] <= 0.5
    assert found <= 0.5, found


def test_a_peer_is_no_larger_on_its_own_images_than_the_owner_stated(made):
    parties, test, _ = made
    model = parties[1].model.eval()
    logits = predict(model, parties[1].images)
    size = float((logits - logits.mean(1, keepdim=True)).norm()) / len(logits) ** 0.5
    assert fitted(model, parties[1].images, 1.01 * size) is model
    before = digest(*model.state_dict().values())
    torch.testing.assert_close(
        predict(fitted(model, parties[1].images, size / 3), test[0]), predict(model, test[0]) / 3, rtol=1e-4, atol=1e-5
    )
    assert digest(*model.state_dict().values()) == before


def test_under_a_limit_a_question_without_a_size_is_refused(made):
    run = Steps(made, replace(SHORT, warmup=0))
    owner, asked = run.parties[0], Directions.of(torch.rand(2, 48, 10))
    with pytest.raises(DisaggregationError, match="P1 states no size of its logits"):
        run.exchange.ask(1, owner, asked, 48, {"P2": run.states["P2"].small}, 1.0)


def test_a_default_round_without_noise_is_refused():
    """What the count of equations let through: 226 numbers on 1,800 unknowns that are most of a peer's logits."""
    made = federation("digits", 2, "no-overlap", samples=200, test_samples=20)
    with pytest.raises(DisaggregationError, match=r"P1 could explain .* what sets P2's logits"):
        CaPriDe(*made, Settings(encrypted=False, sigma=0.0)).run()
    run, found = attacked(made, Settings(encrypted=False, rounds=1, leakage=None))
    assert found > 0.5 and run.records["P1"][-1]["leakage"]["P2"] > 0.99


def question(made, how: Settings) -> tuple[Steps, Meter, torch.Tensor]:
    run = Steps(made, how)
    party, model = run.parties[0], run.states["P1"].small
    asked = Question(party, model, subset(party, 1, how), how, torch.Generator().manual_seed(0))
    meter = Meter(*own_view(model, party.images), "P2")
    return run, meter, meter.told(asked.published(len(party.labels)), how.temperature)


def test_noise_lowers_leakage_and_questions_add_up(made):
    _, meter, asked = question(made, SHORT)
    told = [float(meter.leakage(asked / sigma**2).max()) for sigma in (1.0, 10.0, 100.0)]
    assert told == sorted(told, reverse=True)
    sigma = meter.sigma_for(asked, 0.3, times=4)
    after = [meter.spend("P1", asked, sigma, 0.3) for _ in range(4)]
    assert after == sorted(after) and 0.28 < after[-1] <= 0.3
    before = meter.known.clone()
    with pytest.raises(DisaggregationError, match=r"limit is 0\.3"):
        meter.spend("P1", asked, sigma, 0.3)
    assert torch.equal(meter.known, before), "a refused question is not counted"
    with pytest.raises(DisaggregationError, match=r"no room under leakage 0\.1"):
        meter.sigma_for(asked, 0.1)
    kept = Meter.of("P2", *meter.tensors())
    kept.known = meter.known
    torch.testing.assert_close(kept.leakage(asked), meter.leakage(asked))


def test_one_sample_alone_is_seen():
    """Directions in a single sample: all of that sample, though little of all samples together."""
    draws = torch.Generator().manual_seed(0)
    features, logits = torch.randn(40, 60, generator=draws), torch.randn(40, 10, generator=draws)
    weights = torch.zeros(10, 40, 10)
    weights[:, 3] = torch.eye(10)
    meter = Meter(features, logits, "P2")
    found = meter.leakage(meter.told(Directions.of(weights), 1.0) / 1e-6)
    assert int(found.argmax()) == 3 and float(found[3]) > 0.99 and float(found.median()) < 0.5


@pytest.mark.parametrize(
    "unkind", ["few", "one class", "twice the same", "cold", "hot", "identical models", "constant model"]
)
def test_unkind_inputs(unkind):
    """The limit holds, and what is stated is a number between 0 and 1."""
    parties, test, classes = federation("digits", 2, samples=48, test_samples=20)
    how = replace(SHORT, leakage=0.4)
    first = parties[0]
    if unkind == "few":
        parties[0] = replace(first, images=first.images[:16], labels=first.labels[:16])
    if unkind == "one class":
        parties[0] = replace(first, labels=torch.zeros_like(first.labels))
    if unkind == "twice the same":
        parties[0] = replace(first, images=first.images[:1].repeat(48, 1, 1, 1), labels=first.labels[:1].repeat(48))
    if unkind in ("cold", "hot"):
        how = replace(how, temperature=0.05 if unkind == "cold" else 1e3)
    if unkind == "identical models":
        parties[1] = replace(first, name="P2")
    if unkind == "constant model":
        for weight in first.model.parameters():
            weight.data.zero_()
        how = replace(how, warmup=0)
    result = CaPriDe(parties, test, classes, how).run()
    assert result.leakage and all(0 <= value <= 0.4 for value in result.leakage.values())
    assert all(bool(p.isfinite().all()) for models in result.models.values() for p in models[0].parameters())
