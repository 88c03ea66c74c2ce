"""Private sums of perturbed gradients: what is sent, what the server recovers, what is refused, and an attack."""

from __future__ import annotations

import math

import pytest
import torch
from cases import long
from scipy.stats import norm
from torch import nn

from sectorch.dp import GaussianShares, PrivacyError, epsilon_of, noise
from sectorch.dp.noise import gaussian_curve
from sectorch.errors import ArgumentError, MaskError
from sectorch.federated.watch import Watch
from sectorch.protocols.perturbation import Federation, Scheme, Settings
from sectorch.protocols.perturbation.errors import NoiseError, WeightError
from sectorch.protocols.perturbation.experiment import PerturbedFL, scheme_of
from sectorch.protocols.perturbation.settings import batch_of, load
from sectorch.secure_sum import cohort

SEEDS = [0, *long(1, 2, 3, 4)]
WEIGHTS = [20, 30, 50]


def net(width: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)).double()


def batches(seed: int, clients: int = 3, count: int = 4) -> list[list[tuple]]:
    g = torch.Generator().manual_seed(seed)
    one = lambda: (3 * torch.randn(1, 6, generator=g, dtype=torch.float64), torch.randint(4, (1,), generator=g))
    return [[one() for _ in range(count)] for _ in range(clients)]


def flat(gradients) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


def clipped_mean(scheme: Scheme, model: nn.Module, data: list, key) -> torch.Tensor:
    """What should be recovered but for noise: each batch's plain gradient by autograd, divided by R, clipped, weighted
    and multiplied by R again."""
    ratios, total, private = scheme.ratios(key), 0, scheme.private
    assert private is not None
    for weight, mine in zip(WEIGHTS, data, strict=True):
        share = weight / sum(WEIGHTS) / len(mine)
        for x, y in mine:
            gradient = torch.autograd.grad(scheme.loss_fn(model(x), y), list(model.parameters()))
            scaled = share * torch.cat([g.flatten() for g in gradient]) / ratios
            total = total + scaled * min(1.0, private.clip * (1 - 2.0**-16) / float(scaled.norm()))
    return total * ratios


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.02, 100.0])
def test_the_server_recovers_clipped_gradients_with_noise_of_the_promised_size(seed, clip):
    """Noise of sigma sqrt(3 / 2) in the noised model's coordinates, of three clients of whom two carry it."""
    model, shares = net(), GaussianShares(0.01, clip, honest=2, colluding=1, frac_bits=32)
    scheme, data = Scheme(model, private=shares), batches(seed)
    noisy, key = scheme.perturb(model.state_dict())
    masks = cohort(3)
    updates = [
        scheme.client_step(noisy, mine, masks=own, share=w / sum(WEIGHTS))
        for mine, own, w in zip(data, masks, WEIGHTS, strict=True)
    ]
    found = flat(scheme.recover(key, updates, WEIGHTS)) - clipped_mean(scheme, model, data, key)
    noise = found / scheme.ratios(key) / (shares.share * math.sqrt(3))
    assert abs(float(noise.square().mean()) - 1) < 7 * math.sqrt(2 / len(noise)) and float(noise.abs().max()) < 8


def test_a_federation_sends_private_sums_of_all_its_clients():
    """The same through the messages; without a clip in force and with little noise it is the plain mean gradient."""
    model, data = net(), batches(0)
    plain = Federation(Scheme(model), 3).round(model.state_dict(), data, WEIGHTS)
    shares = GaussianShares(1e-6, 100.0, honest=3, frac_bits=40)
    private = Federation(Scheme(model, private=shares), 3, double=True).round(model.state_dict(), data, WEIGHTS)
    assert 1e-8 < float((flat(private) - flat(plain)).abs().max()) < 1e-3


def terms(scheme: Scheme, noisy, batch) -> torch.Tensor:
    """What one of three clients of one batch adds to the sum but for noise: its noisy gradient, clipped."""
    step = scheme.begin(noisy, batch, 1 / 3)
    step.ask()
    step.take(None)
    return step.done()[0].flatten() / 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_is_found_as_often_as_the_noise_allows(seed, monkeypatch):
    """The server, who has R, and one of three clients look which of two targets a client's only record has. They know
    all else, and the colluding client's noise; the best test is the projection on the difference of the two gradients,
    which are as far apart as clipping leaves them. Each round is a trial, at one model."""
    model, trials, drawn = net(5), 300, []
    shares = GaussianShares(0.05, 0.05, honest=2, colluding=1, frac_bits=32)
    scheme, won, distances = Scheme(model, private=shares), 0, []
    real = noise.on_grid
    monkeypatch.setattr(noise, "on_grid", lambda *how: drawn.append(real(*how)) or drawn[-1])
    generator, record = torch.Generator().manual_seed(seed), 3 * torch.ones(1, 6, dtype=torch.float64)
    for _ in range(trials):
        noisy, key = scheme.perturb(model.state_dict())
        target, masks = int(torch.randint(2, (1,), generator=generator)), cohort(3)
        data = [(record, torch.tensor([t])) for t in (target, 2, 3)]
        sent = [scheme.client_step(noisy, one, masks=own, share=1 / 3) for one, own in zip(data, masks, strict=True)]
        sum_seen = flat(scheme.recover(key, sent, [1.0] * 3)) / scheme.ratios(key)
        seen = sum_seen - shares.decode(drawn[-1]) - terms(scheme, noisy, data[1]) - terms(scheme, noisy, data[2])
        either = [terms(scheme, noisy, (record, torch.tensor([t]))) for t in (0, 1)]
        difference = either[1] - either[0]
        distances.append(float(difference.norm()))
        won += int(float((seen - sum(either) / 2) @ difference) > 0) == target
    expected = sum(norm.cdf(d / (2 * shares.sigma)) for d in distances) / trials
    assert 0.05 < max(distances) <= 2 * shares.clip
    assert abs(won / trials - expected) < 7 * math.sqrt(expected * (1 - expected) / trials)
    assert 0.7 < expected <= norm.cdf(shares.clip / shares.sigma)  # what `curve` is charged for


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda s: Scheme(net(), "mse", private=s), NoiseError, "also sends other terms"),
        (lambda s: Scheme(net(), exchange="paper", private=s), NoiseError, "also sends other terms"),
        (lambda s: Scheme(net(), partitions=2, private=s), NoiseError, "exchange='shift'"),
        (lambda s: Scheme(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), private=s),
         NoiseError, "statistics for '1'"),
        (lambda s: Federation(Scheme(net(), private=s), 3, masked=False), ArgumentError, "two clients or more"),
        (lambda s: Federation(Scheme(net(), private=s), 6, degree=2), ArgumentError, "degree="),
        (lambda s: Federation(Scheme(net(), private=s), 1), ArgumentError, "two clients or more"),
        (lambda s: Federation(Scheme(net(), private=s), 2), ArgumentError, "least=3"),
    ],
)  # fmt: skip
def test_what_the_noise_would_not_cover_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make(GaussianShares(1.0, 1.0, honest=3))


def test_a_private_gradient_without_masks_is_refused_and_masks_are_not_used_up():
    scheme = Scheme(net(), private=GaussianShares(1.0, 1e-3, honest=2, frac_bits=20))
    noisy, _ = scheme.perturb(net().state_dict())
    (own, _), batch = cohort(2), batches(0)[0][0]
    with pytest.raises(MaskError, match="under masks"):
        scheme.client_step(noisy, batch)
    with pytest.raises(PrivacyError, match="use more frac_bits"):
        scheme.client_step(noisy, batch, masks=own, share=0.5)
    assert len(own.words(noisy.round, 3)) == 3
    norms = Scheme(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval(),
                   private=GaussianShares(1.0, 1.0, honest=2))  # fmt: skip
    assert not norms.norms  # frozen statistics are no matter of a batch


HOW = Settings(clients=3, rounds=6, batch_size=1, local_batches=8, clip=1.0, noise_multiplier=4.0, colluding=1)


def test_a_run_says_its_epsilon_and_counts_what_it_repeats(tmp_path):
    data = load("breast-cancer")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    run = lambda name="out", watch=None: PerturbedFL(data, model, HOW, out=tmp_path / name).run(watch)
    begun = run()
    assert begun.epsilon == epsilon_of(gaussian_curve(4.0, 2.0), HOW.delta)  # 48 batches of an epoch of 113
    assert "with 1 other clients at most" in " ".join(begun.sentences())
    assert begun.epsilon and run().epsilon == begun.epsilon  # all is on disk

    class Stop(Watch):
        def step(self, name, total):
            if "round-4" in name:
                raise KeyboardInterrupt
            return super().step(name, total)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run("stopped", Stop())
    found = lambda sums_: pytest.approx(epsilon_of(sums_ * gaussian_curve(4.0, 2.0), HOW.delta), rel=1e-12)
    assert run("stopped").epsilon == found(3), "round 4 began three times"
    for file in (*(tmp_path / "stopped").glob("round-*"), *(tmp_path / "stopped").glob("score*")):
        file.unlink()
    assert run("stopped").epsilon == found(3 + HOW.rounds), "and each round once more"


@pytest.mark.parametrize(
    ("how", "samples", "rounds", "sums_"),
    [
        (dict(batch_size=1, local_batches=1), [10], 10, 1), (dict(batch_size=1, local_batches=1), [10, 5], 10, 2),
        (dict(batch_size=1, local_batches=5), [10], 4, 2), (dict(batch_size=1, local_batches=5), [10], 5, 3),
        (dict(batch_size=2, local_batches=3), [10], 2, 4), (dict(batch_size=20, local_batches=2), [10], 3, 12),
    ],
)  # fmt: skip
def test_sums_of_a_record_are_no_fewer_than_there_are(how, samples, rounds, sums_):
    """Against the batches that are drawn: the sum over rounds of the square of how often a record is in one."""
    settings = Settings(clients=max(1, len(samples)), clip=1.0, **how)
    assert settings.sums_of_a_record(samples, rounds) == sums_
    part = range(rounds // 2, rounds)
    again = settings.sums_of_a_record(samples, len(part), part.start)
    for client, count in enumerate(samples):
        shard, most = torch.arange(count), 0
        for seed in range(5):
            seen = torch.zeros(rounds, count, dtype=torch.int64)
            for turn in range(rounds * settings.local_batches):
                batch = batch_of(shard, client, turn, settings.batch_size, seed)
                seen[turn // settings.local_batches, batch] += 1
            most = max(most, int(seen.square().sum(0).max()))
            assert int(seen[part.start :].square().sum(0).max()) <= again
        assert most <= sums_


def test_settings_that_protect_nobody_are_refused():
    with pytest.raises(WeightError, match="none is left"):
        scheme_of(net(), Settings(clients=3, clip=1.0, colluding=3))
    assert Settings(clients=3).private is None and Settings(clip=1.0, method="fedavg").private is None
