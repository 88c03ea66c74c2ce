"""docs/perturbation.md's claims on security, each shown: what holds, and what does not."""

from __future__ import annotations

import copy
import math
import statistics

import perturbation_attacks as attacks
import pytest
import torch
from perturbation_cases import NETS, batches, plain_gradient
from torch import nn

from sectorch.protocols.perturbation import BatchMismatchError, Noise, Request, Scheme, algorithm, cohort
from sectorch.protocols.perturbation.algorithm import ask, finish


def chain(model: nn.Module, state: dict) -> list[torch.Tensor]:
    return [state[name] for name, p in model.named_parameters() if name.endswith("weight")]


def test_signs_zeros_and_row_ratios_survive():
    """First layer: W^_ij / W^_ik = W_ij / W_ik. Every hidden layer: signs and zeros."""
    torch.manual_seed(0)
    model = NETS["mlp5"][0]().double()
    with torch.no_grad():
        model[2].weight[model[2].weight.abs() < 0.05] = 0
    state = model.state_dict()
    noisy, _ = Scheme(model).perturb(state)
    torch.testing.assert_close(
        noisy.state["0.weight"] / noisy.state["0.weight"][:, :1], state["0.weight"] / state["0.weight"][:, :1]
    )
    for name in ("0.weight", "2.weight", "4.weight", "6.weight", "0.bias"):
        assert torch.equal(noisy.state[name].sign(), state[name].sign())
    assert (noisy.state["2.weight"] == 0).sum() > 10


def test_the_game_of_definition_2_is_won_every_time():
    """Semantic security (Lemma 6) fails: of two models of the same shape, the perturbed one is told."""
    torch.manual_seed(0)
    models = [NETS["mlp5"][0]().double() for _ in range(2)]
    candidates = [chain(model, model.state_dict()) for model in models]
    for index in (0, 1) * 10:
        noisy, _ = Scheme(models[index], "mse").perturb(models[index].state_dict())
        assert attacks.distinguish(chain(models[index], noisy.state), *candidates) == index


def test_hidden_layers_are_known_up_to_a_harmless_scale():
    model = NETS["mlp7"][0]().double()
    noisy, _ = Scheme(model).perturb(model.state_dict())
    seen = attacks.canonical(chain(model, noisy.state))
    true = attacks.canonical(chain(model, model.state_dict()))
    for a, b in zip(seen, true, strict=True):
        torch.testing.assert_close(a, b)


def test_powers_of_two_leave_the_digits_of_every_hidden_weight():
    """float32's scales: mantissas are the model's own; real scales change nearly all of them."""
    torch.manual_seed(0)
    model = NETS["mlp5"][0]()
    for exact, open_share in ((True, 1.0), (False, 0.0)):
        noisy, _ = Scheme(model, noise=Noise(powers_of_two=exact)).perturb(model.state_dict())
        for name in ("0.weight", "0.bias", "2.weight", "4.weight"):
            same = noisy.state[name].frexp().mantissa == model.state_dict()[name].frexp().mantissa
            assert same.float().mean() == pytest.approx(open_share, abs=0.1)


def exchange_of(m: int, samples: int, classes: int = 4):
    torch.manual_seed(m)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes)).double()
    scheme = Scheme(model, "cross_entropy", m, exchange="paper")
    _, key = scheme.perturb(model.state_dict())
    true = 3 * torch.randn(samples, classes, dtype=torch.float64)
    alpha = torch.rand(samples, dtype=torch.float64) * 8 + 1
    *asked, secret = ask(true + alpha[:, None] * key.shift, alpha)
    request = Request(key.round, *asked)
    return key, true, request, secret, scheme.answer(key, request)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_the_papers_exchange_shows_the_client_the_prediction(m):
    """Against Lemma 7: m samples of a batch (8 here) give every sample's softmax."""
    key, true, _, secret, reply = exchange_of(m, 8)
    noisy, helper = finish(reply.log_total, reply.log_mask, reply.factor, secret)
    torch.testing.assert_close(helper, noisy * reply.factor)
    found = attacks.prediction_from_reply(noisy, reply, key.partition)
    torch.testing.assert_close(found, torch.softmax(true, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_the_papers_exchange_shows_the_client_a_network_of_the_true_function(m):
    """With the prediction of eight samples gamma is known, and with gamma the noise on the last layer."""
    torch.manual_seed(m)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    scheme = Scheme(model, "cross_entropy", m, exchange="paper")
    noisy, key = scheme.perturb(model.state_dict())
    body = {name: value for name, value in noisy.state.items() if name[0] == "0"}
    hidden = torch.func.functional_call(model[:2], body, (torch.randn(8, 6).double(),))
    logits, alpha = algorithm.outputs(hidden, noisy.state["2.weight"], noisy.state["2.bias"], "weights")
    *asked, secret = ask(logits, alpha)
    reply = scheme.answer(key, Request(key.round, *asked))
    star, _ = finish(reply.log_total, reply.log_mask, reply.factor, secret)
    prediction = attacks.prediction_from_reply(star, reply, noisy.partition)
    shift = attacks.gamma_from_prediction(logits, alpha, prediction, noisy.additive, noisy.partition)[noisy.partition]
    shift *= noisy.additive
    last = {"2.weight": noisy.state["2.weight"] - shift[:, None], "2.bias": noisy.state["2.bias"] - shift}
    x = torch.randn(50, 6).double()
    found, seen = (torch.func.functional_call(model, noisy.state | more, (x,)) for more in (last, {}))
    torch.testing.assert_close(torch.softmax(found, 1), torch.softmax(model(x), 1), rtol=1e-4, atol=1e-5)
    assert (seen - model(x)).abs().max() > 1e-2
    if m < 4:
        torch.testing.assert_close(shift, key.shift, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "classes"), [(1, 3), (3, 3), (1, 4), (4, 4), (2, 10)])
def test_the_papers_exchange_shows_the_server_the_prediction(m, classes):
    """Against "the server only sees the aggregate": one sample is enough, whatever lambda is."""
    key, true, request, _, _ = exchange_of(m, 200, classes)
    found = attacks.prediction_from_request(key, request)
    torch.testing.assert_close(found, torch.softmax(true, 1), rtol=1e-4, atol=1e-5)


def test_of_two_classes_the_server_knows_the_odds_within_a_factor_of_twenty():
    """log lambda is within 3 of the ratio that it masks, in both rows: two intervals that hold the noised odds."""
    key, true, request, _, _ = exchange_of(1, 500, 2)
    one, other, near, far = *(request.log_mu[:, i, 1 - i] for i in (0, 1)), *(math.log1p(math.exp(t)) for t in (-3, 3))
    low, high = torch.maximum(one - far, near - other), torch.minimum(one - near, far - other)
    noise = request.alpha * (key.shift[1] - key.shift[0])
    odds = true[:, 1] - true[:, 0]
    assert bool((low - noise <= odds + 1e-9).all() and (odds - 1e-9 <= high - noise).all())
    assert float((high - low).max()) <= 3 + 1e-9
    with pytest.raises(BatchMismatchError, match="n_L is at least 3"):
        attacks.prediction_from_request(key, request)


def test_the_shift_exchange_shows_the_client_the_softmax_but_not_the_logits():
    torch.manual_seed(0)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model)
    x = torch.randn(5, 12, dtype=torch.float64)
    noisy, key = scheme.perturb(model.state_dict())
    seen, true = torch.func.functional_call(model, noisy.state, (x,)), model(x)
    torch.testing.assert_close(torch.softmax(seen, 1), torch.softmax(true, 1))
    gap = seen - true
    torch.testing.assert_close(gap, gap[:, :1].expand_as(gap))
    assert gap.abs().min() > 0
    assert torch.equal(noisy.additive, torch.ones(4, dtype=torch.float64)), "r_a is not sent"
    assert key.shift.unique().numel() == 1


def test_mse_hides_one_direction_a_partition():
    """n_L - m of the n_L dimensions of the true prediction are seen at once."""
    torch.manual_seed(0)
    model = NETS["mlp3"][0]().double()
    x = torch.randn(5, 12, dtype=torch.float64)
    for m in (1, 2, 4):
        noisy, key = Scheme(model, "mse", m).perturb(model.state_dict())
        seen, true = torch.func.functional_call(model, noisy.state, (x,)), model(x)
        a, b = (attacks.known_part(y, key.additive, key.partition) for y in (seen, true))
        torch.testing.assert_close(a, b)
        assert torch.linalg.matrix_rank(b, tol=1e-9) == 4 - m
        assert (seen - true).abs().min() > 0


def test_mse_gamma_is_found_once_the_model_fits():
    """With residuals of size e, least squares gives gamma within about e / (alpha r_a): the better the model, the less
    is hidden."""
    torch.manual_seed(0)
    model = NETS["mlp3"][0]().double()
    x = torch.randn(64, 12, dtype=torch.float64)
    targets = model(x).detach() + 1e-3 * torch.randn(64, 4, dtype=torch.float64)
    noisy, key = Scheme(model, "mse", 2).perturb(model.state_dict())
    logits = torch.func.functional_call(model, noisy.state, (x,)).detach()
    hidden = torch.func.functional_call(model[:-1], {n: t for n, t in noisy.state.items() if n[0] != "4"}, (x,))
    alpha = hidden.detach().sum(1) + 1
    found = attacks.gamma_from_targets(logits, alpha, targets, noisy.additive, noisy.partition)
    assert ((found - key.gamma) / key.gamma).abs().max() < 0.05


@pytest.mark.parametrize(
    ("loss", "m", "noise_on"),
    [("mse", m, "weights") for m in (1, 2, 4)] + [("mse", 1, "bias"), ("cross_entropy", 1, "weights")],
)
def test_gamma_is_found_from_two_rounds_whatever_m_is(loss, m, noise_on):
    """Against Lemma 7 at m = n_L too, and by `shift` the number that all logits have in common. Medians of 20 keys; the
    control has another model in the second round."""
    torch.manual_seed(m)
    x, target = torch.randn(64, 12).double(), 3 * torch.randn(64, 4).double()
    model, other = NETS["mlp3"][0]().double(), NETS["mlp3"][0]().double()
    scheme = Scheme(model, loss, m, noise_on=noise_on)
    optimizer, after = torch.optim.SGD(model.parameters(), 0.02), []
    for _ in range(51):
        after = [*after[-1:], copy.deepcopy(model)]
        optimizer.zero_grad()
        scheme.loss_fn(model(x), target if loss == "mse" else target.argmax(1)).backward()
        optimizer.step()

    def view(model: nn.Module) -> attacks.View:
        noisy, _ = scheme.perturb(model.state_dict())
        body = {name: value for name, value in noisy.state.items() if name[0] != "4"}
        hidden = torch.func.functional_call(model[:-1], body, (x,)).detach()
        seen = algorithm.outputs(hidden, noisy.state["4.weight"], noisy.state["4.bias"], noise_on)
        return attacks.View(*seen, noisy.additive, noisy.partition)

    true, errors = after[0](x).detach(), []
    spread = (true - true.mean(0)).square().mean().sqrt()
    for _ in range(20):
        first, *seconds = (view(one) for one in (after[0], after[1], other))
        gammas = [attacks.gamma_from_rounds(first, second) for second in seconds]
        noise = [first.alpha[:, None] * gamma[first.partition] * first.additive for gamma in gammas]
        guesses = [*(first.logits - one for one in noise), first.logits]
        errors.append([float((guess - true).square().mean().sqrt() / spread) for guess in guesses])
    step, control, noised = (statistics.median(column) for column in zip(*errors, strict=True))
    assert step < 0.2 and 3 * step < control and noised > 3, (step, control, noised)


def test_gamma_is_read_off_the_model_alone():
    """No data: least squares on r_a of what the last layer received. What is left of the noise is how far the true
    numbers lean along r_a, exactly, wherever the noise is; here a tenth of the noise or less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 256), nn.ReLU(), nn.Linear(256, 10)).double()
    for place, m in (("weights", 1), ("weights", 2), ("bias", 1), ("bias", 2)):
        noisy, key = Scheme(model, "mse", m, noise_on=place, noise=Noise(additive=4.0)).perturb(model.state_dict())
        kind = "weight" if place == "weights" else "bias"
        found = attacks.gamma_from_model(noisy.state[f"2.{kind}"], noisy.additive, noisy.partition)
        true = model[2].bias if place == "bias" else model[2].weight / key.scales[1:257]
        lean = attacks.gamma_from_model(true.detach(), noisy.additive, noisy.partition)
        torch.testing.assert_close(found, key.gamma + lean)
        assert ((found - key.gamma) / key.gamma).abs().max() < 0.1


def test_noise_on_the_bias_shows_differences_and_the_last_layers_ratios():
    """What the cheaper mode gives up: with it the outputs of two inputs differ as the true ones do, and each column of
    the last layer is the true one times a number. With the paper's noise neither holds."""
    torch.manual_seed(0)
    model = NETS["mlp3"][0]().double()
    x = torch.randn(5, 12, dtype=torch.float64)
    true, weight = model(x), model.state_dict()["4.weight"]
    for place, shown in (("bias", True), ("weights", False)):
        noisy, _ = Scheme(model, "mse", noise_on=place).perturb(model.state_dict())
        seen, received = torch.func.functional_call(model, noisy.state, (x,)), noisy.state["4.weight"]
        assert torch.allclose(seen[1:] - seen[0], true[1:] - true[0]) == shown
        assert torch.allclose(received / received[0], weight / weight[0]) == shown
        assert (seen - true).abs().min() > 0


def test_noise_on_the_bias_is_of_the_size_of_a_row():
    """|r_i| is gamma, 1/2 to 2, times r_a, 1/2 to 3/2 of the root mean square length of the last layer's
    scaled rows."""
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model, "mse", noise_on="bias")
    noisy, key = scheme.perturb(model.state_dict())
    length = noisy.state["4.weight"].square().sum(1).mean().sqrt()
    torch.testing.assert_close(noisy.state["4.bias"], model[4].bias + key.shift)
    assert 0.25 * length <= key.shift.abs().min() and key.shift.abs().max() <= 3 * length


def test_mse_shows_the_server_the_mean_features_of_the_joint_batch():
    """Under masks, from the sums alone: sigma of the last layer's weights is r_a,i times the clients' mean features
    with the noise on the bias, and their mean weighted by alpha with the paper's."""
    torch.manual_seed(0)
    model = NETS["mlp3"][0]().double()
    parts = batches((12,), 4, "mse", 3, torch.float64)
    samples = sum(len(x) for x, _ in parts)
    for place in ("bias", "weights"):
        scheme = Scheme(model, "mse", noise_on=place)
        noisy, key = scheme.perturb(model.state_dict())
        total = sum(
            scheme.client_step(noisy, part, masks=mask, share=len(part[0]) / samples).terms
            for part, mask in zip(parts, cohort(3), strict=True)
        )
        sigma = total[1].double() * 2.0**-40
        names = dict(model.named_parameters())
        head = sigma.split([p.numel() for p in names.values()])[list(names).index("4.weight")].view(4, 16)
        body = {name: t for name, t in noisy.state.items() if name[0] != "4"}
        features = torch.func.functional_call(model[:-1], body, (torch.cat([x for x, _ in parts]),))
        alpha = torch.ones(samples, 1) if place == "bias" else features.sum(1, keepdim=True) + 1
        expected = (alpha * features).mean(0)
        torch.testing.assert_close(head / key.additive[:, None], expected.expand(4, 16), rtol=1e-6, atol=1e-9)


def test_an_unmasked_update_gives_the_server_the_input():
    """One sample, first layer with bias: dL/dW = dL/db x. The masks are what stands between."""
    torch.manual_seed(0)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model)
    part = batches((12,), 4, "cross_entropy", 1, torch.float64)[0]
    x, y = part[0][:1], part[1][:1]
    noisy, key = scheme.perturb(model.state_dict())
    gradient = scheme.recover(key, [scheme.client_step(noisy, (x, y))], [1])
    torch.testing.assert_close(attacks.input_from_gradient(gradient["0.weight"], gradient["0.bias"]), x[0])
    masked = scheme.client_step(noisy, (x, y), masks=cohort(2)[0], share=0.5)
    size = model[0].weight.numel()
    seen = masked.terms[0].double() * 2.0**-40 * scheme.ratios(key)
    guess = attacks.input_from_gradient(seen[:size].reshape(16, 12), seen[size : size + 16])
    assert torch.corrcoef(torch.stack([guess, x[0]]))[0, 1].abs() < 0.95


def test_deep_leakage_on_plain_gradients_and_on_masked_ones():
    """Table IV's attack: L-BFGS finds the input behind a plain gradient, and not behind a masked update."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.3), nn.Linear(32, 4)).double()
    scheme = Scheme(model)
    x, y = torch.rand(1, 16, dtype=torch.float64), torch.tensor([2])
    gradient = plain_gradient(scheme, model, [(x, y)], [1])
    found, _ = attacks.deep_leakage(model, scheme.loss_fn, gradient, (16,), 4, 200)
    assert (found - x).square().mean() < 1e-3
    noisy, key = scheme.perturb(model.state_dict())
    update = scheme.client_step(noisy, (x, y), masks=cohort(2)[0], share=0.5)
    seen = (update.terms[0].double() * 2.0**-40 * scheme.ratios(key)).split([g.numel() for g in gradient.values()])
    hidden = {name: s.reshape(g.shape) for (name, g), s in zip(gradient.items(), seen, strict=True)}
    found, _ = attacks.deep_leakage(model, scheme.loss_fn, hidden, (16,), 4, 200)
    assert not (found - x).square().mean() < 0.05
