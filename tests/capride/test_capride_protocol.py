"""The encrypted round: it gives the updates that the simulation gives, decrypts aggregates only, and fails cleanly."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from sectorch import ckks
from sectorch.ckks.keys import SecretKey
from sectorch.data.seeds import generator
from sectorch.nn.fhe import Polynomial, fhe_friendly
from sectorch.protocols.capride import (
    CaPriDe,
    CaPriDeError,
    CorruptedCiphertextError,
    DisaggregationError,
    ModelError,
    Party,
    Settings,
    losses,
)
from sectorch.protocols.capride import exchange as exchange_module
from sectorch.protocols.capride.algorithm import Question
from sectorch.protocols.capride.exchange import Exchange, Simulated
from sectorch.protocols.capride.settings import layout
from sectorch.protocols.capride.training import predict


def error_bound(model: nn.Module, x: torch.Tensor, count: int, p: ckks.Parameters, how: Settings) -> float:
    """How far a released number may be from the plain one (docs/ckks.md, "Error"; eight standard deviations each).

    f: a fresh encryption; r: a rescale. A linear layer multiplies the error by its largest row sum of magnitudes,
    rounds its weights (|x| / 2 weight scale each) and rescales; a polynomial multiplies it by its derivative on the
    activations' range, doubled for the error itself, and its two products rescale. The inner product with |q| <= 1 a
    sample, its rescale and the encryption of zero, for every slot of a group, used or not; at last the flooding.
    """
    root, s = p.degree**0.5, 2.0**p.scale_bits
    r = 8 * root * ((1 + 2 * p.degree / 3) / 12) ** 0.5 / s
    f = 8 * root * ((1 + 2 * p.degree / 3) / 12 + 3.2**2) ** 0.5 / s
    e = f
    with torch.no_grad():
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fan_in = layer.weight.shape[1]
                e = float(layer.weight.abs().sum(1).max()) * e + float(x.abs().max()) * fan_in / s + r
            elif isinstance(layer, Polynomial):
                top = float(x.abs().max())
                derivative = sum(k * abs(c) * top ** (k - 1) for k, c in enumerate(layer.coefficients) if k)
                e = 2 * derivative * e + r * (sum(map(abs, layer.coefficients)) * 2 * (1 + top**2) + 1)
            x = layer(x)
    z = float(x.abs().max())
    slot = (e + f * x.shape[1] * (z + e) + r + f) / how.temperature
    flood = Exchange.sigma(_Only(p, how), Party("P1", model, torch.empty(p.slots // count), torch.empty(0)))
    return p.slots / count * slot + 8 * flood


class _Only(Exchange):
    """An exchange of no parties, for its noise."""

    def __init__(self, p: ckks.Parameters, how: Settings):
        self.parameters, self.how = p, how


def trained(made, how: Settings) -> CaPriDe:
    run = CaPriDe(*made, how)
    run._local(exchange_module.Watch())
    return run


def both(made, how: Settings):
    """One question of P1 to P2, encrypted and in the clear."""
    run = trained(made, how)
    party, models = run.parties[0], {n: s.small for n, s in run.states.items()}
    question = Question(party, models["P1"], run.subset(1, party), how, generator(0, "directions"))
    asked, rest = question.published(len(party.labels)), {"P2": models["P2"]}
    arguments = (1, party, asked, len(question.subset), rest)
    hidden = Exchange(run.parties, run.parameters, how, run.ledger, exchange_module.Watch())
    plain = Simulated(run.parties, run.parameters, how, type(run.ledger)(), exchange_module.Watch())
    return run, question, hidden, hidden.ask(*arguments)["P2"], plain.ask(*arguments)["P2"], models


def test_released_numbers_are_the_plain_ones(made, quick):
    """The loss of Eq. 9, the head's gradient and the forward gradient, each within the bound of what was released."""
    how = replace(quick, update="forward", directions=5, fraction=0.75)
    run, question, hidden, found, plain, models = both(made, how)
    party = run.parties[0]
    count = layout(run.parameters, len(party.images))
    bound = error_bound(models["P2"], party.images, count, run.parameters, how)
    assert bound < 3, "else the comparison would say nothing: the loss below is a sum over 36 samples"
    torch.testing.assert_close(found, plain, rtol=0, atol=bound)
    z = predict(models["P2"], question.images).double()
    u = question.logits.double()
    loss = float(losses.local_uncertainty(u, how.temperature)) - float(found[0])
    assert loss == pytest.approx(float(losses.approximate_kl(u, z, how.temperature)), abs=bound)
    update, exact = question.update(found, hidden.sigma(party)), question.update(plain, 0.0)
    # The gradient is an orthonormal basis applied to the numbers times their scales.
    scale = float(question.moved.scales[: question.numbers].norm())
    torch.testing.assert_close(update.head, exact.head, rtol=0, atol=bound * scale)
    p = (question.logits.double() / how.temperature).softmax(1)
    pulled = p * (z - (p * z).sum(1, keepdim=True)) / how.temperature**2
    features = torch.cat([_features(models["P1"], question.images), torch.ones(len(p), 1)], 1).double()
    strongest = question.basis.features
    true = pulled.t() @ features @ strongest @ strongest.t()
    torch.testing.assert_close(update.head, true, rtol=0, atol=bound * scale + 1e-4)  # float32 features


def test_more_samples_than_slots_go_in_chunks(made, quick, monkeypatch):
    """As if the ring had room for 30 of the 48 samples: two ciphertexts each, added up before they are sealed."""
    build = exchange_module.Owner.__init__

    def small(self, *args):
        build(self, *args)
        self.chunk = 30

    monkeypatch.setattr(exchange_module.Owner, "__init__", small)
    run, _, hidden, found, plain, models = both(made, quick)
    party = run.parties[0]
    assert [len(part) for part in hidden.owners["P1"].inputs.parts] == [30 * 64, 18 * 64]
    bound = 2 * error_bound(models["P2"], party.images, layout(run.parameters, 48), run.parameters, quick)
    torch.testing.assert_close(found, plain, rtol=0, atol=bound)


def _features(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from sectorch.protocols.capride.directions import features_and_logits

    with torch.no_grad():
        return features_and_logits(model, x)[0]


def test_nothing_but_aggregates_is_decrypted(made, quick, monkeypatch):
    """SEAL decrypts as often as the ledger says; each time what was sealed; and no tensor's `decrypt` is ever
    called.
    """
    opened, sealed = [], []
    monkeypatch.setattr(ckks.CKKSTensor, "decrypt", lambda *_a, **_k: pytest.fail("a tensor was decrypted"))
    original = exchange_module.unseal
    monkeypatch.setattr(exchange_module, "unseal", lambda s, keys: sealed.append(s) or original(s, keys))

    class Counting:
        def __init__(self, decryptor):
            self.decryptor = decryptor

        def decrypt(self, ciphertext, plain):
            opened.append(ciphertext.size())
            return self.decryptor.decrypt(ciphertext, plain)

    build = SecretKey.__init__

    def counted(self, *args):
        build(self, *args)
        self.decryptor = Counting(self.decryptor)

    monkeypatch.setattr(SecretKey, "__init__", counted)
    run = CaPriDe(*made, quick)
    result = run.run()
    rows = result.ledger.rows
    decrypted = [row for row in rows if row.kind == "decrypted"]
    assert {row.what for row in decrypted} == {"aggregates"}
    assert [(row.sender, row.receiver) for row in decrypted] == [("P2", "P1"), ("P1", "P2")]
    asked = 1 + 9 * quick.head_rank
    assert [row.numbers for row in decrypted] == [asked, asked]
    count = layout(run.parameters, 48)
    assert len(opened) == sum(len(s.body) for s in sealed) == 2 * -(-asked // count)
    hidden = {(row.what, row.hidden_by) for row in rows if row.kind == "message" and row.receiver == "P2"}
    assert hidden == {
        ("public keys", "public"),
        ("inputs", "P1's secret key"),
        ("directions", "P1's secret key"),
        ("aggregates", "P2's secret key"),
    }
    inputs = [row for row in rows if row.what == "inputs"]
    assert len(inputs) == 2 and {row.round for row in inputs} == {0}, "inputs are published once"
    assert "2 numbers" not in result.statement[0] and f"{2 * asked} numbers were decrypted" in result.statement[0]


def state_of(run: CaPriDe) -> list:
    return [*copy.deepcopy([s.tensors() for s in run.states.values()]), copy.deepcopy(run.records)]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [
        ("inputs", CorruptedCiphertextError, "P2's inputs arrived damaged"),
        ("directions", CorruptedCiphertextError, "P2's directions arrived damaged"),
        ("aggregates", CorruptedCiphertextError, "the aggregates of P1 arrived damaged"),
        ("key", ckks.KeyMismatchError, "are under keys"),
    ],
)
def test_a_failed_round_changes_nothing(made, quick, monkeypatch, harm, error, text):
    """The second party's part fails, after the first one's went well."""
    run = trained(made, quick)
    run.exchange = Exchange(run.parties, run.parameters, quick, run.ledger, exchange_module.Watch())
    before = state_of(run)
    owner = exchange_module.Owner
    publish, inputs, opened = owner.publish, owner.publish_inputs, owner.open

    def damaged(published):
        published.parts[0].cipher.data[0, 0, 0, 5] ^= 1
        return published

    if harm == "inputs":
        fresh = lambda self: damaged(inputs(self)) if self.party.name == "P2" and self.inputs is None else inputs(self)
        monkeypatch.setattr(owner, "publish_inputs", fresh)
    elif harm == "directions":
        bad = lambda self, d: damaged(publish(self, d)) if self.party.name == "P2" else publish(self, d)
        monkeypatch.setattr(owner, "publish", bad)
    elif harm == "aggregates":

        def worse(self, sealed, directions):
            if self.party.name == "P2":
                sealed.body[0, 0] ^= 1
            return opened(self, sealed, directions)

        monkeypatch.setattr(owner, "open", worse)
    else:
        other = ckks.keygen(1, degree=8192)
        monkeypatch.setattr(
            owner,
            "open",
            lambda self, s, d: exchange_module.unseal(s, other) if self.party.name == "P2" else opened(self, s, d),
        )
    with pytest.raises(error, match=text):
        run.round(1)
    assert same(before, state_of(run))
    assert any(row.kind == "decrypted" for row in run.ledger.rows), "P1's part had gone well"


def test_a_refused_round_changes_nothing(made, quick):
    how = replace(quick, encrypted=False, head_rank=None)
    run = trained(made, how)
    run.exchange = Simulated(run.parties, run.parameters, how, run.ledger, exchange_module.Watch())
    before = state_of(run)
    with pytest.raises(DisaggregationError, match=r"P2 refuses .* numbers to P1|directions would isolate"):
        run.round(1)
    assert same(before, state_of(run)) and not run.ledger.released


def unfriendly_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def with_model(made, model: nn.Module):
    parties, test, classes = made
    return [parties[0], replace(parties[1], model=model)], test, classes


def test_bad_models_are_named_before_anything_starts(made, quick):
    with pytest.raises(ModelError, match=r"P2's model is not FHE-friendly.*'2' \(ReLU\).*fhe_friendly"):
        CaPriDe(*with_model(made, unfriendly_model()), quick)
    with pytest.raises(ModelError, match=r"a chain of 4 levels is too short: P1's model takes 4"):
        CaPriDe(*made, replace(quick, levels=4))
    other = fhe_friendly(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 7)))
    with pytest.raises(ModelError, match=r"P2's model gives \(7,\) logits, but the parties share 10 classes"):
        CaPriDe(*with_model(made, other), quick)
    wide = fhe_friendly(nn.Sequential(nn.Flatten(), nn.Linear(65, 8), nn.ReLU(), nn.Linear(8, 10)))
    with pytest.raises(ModelError, match="P2's model does not take its images"):
        CaPriDe(*with_model(made, wide), quick)
    CaPriDe(*with_model(made, unfriendly_model()), replace(quick, method="local"))


def test_logits_that_would_wrap_around_are_refused(made, quick):
    run = trained(made, quick)
    run.exchange = Exchange(run.parties, run.parameters, quick, run.ledger, exchange_module.Watch())
    with torch.no_grad():
        list(run.states["P2"].small.parameters())[-1].add_(100)
    with pytest.raises(ModelError, match="P2's logits reach"):
        run.round(1)


def test_few_samples_and_bad_settings_are_refused(made, quick):
    parties, test, classes = made
    few = [replace(p, images=p.images[:10], labels=p.labels[:10]) for p in parties]
    with pytest.raises(CaPriDeError, match="over 10 samples"):
        CaPriDe(few, test, classes, quick)
    with pytest.raises(CaPriDeError, match="at least two are needed"):
        CaPriDe(parties[:1], test, classes, quick)
    with pytest.raises(CaPriDeError, match="has 1 peers, 2 were to be asked"):
        CaPriDe(parties, test, classes, replace(quick, peers=2))
    for change, text in (
        ({"update": "all"}, "no update 'all'"),
        ({"method": "x"}, "no method 'x'"),
        ({"rounds": -1}, "rounds must be at least 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"margin": 1.5}, "margin must be above 0 and at most 1"),
        ({"sigma": -1.0}, "sigma must be at least 0"),
    ):
        with pytest.raises(CaPriDeError, match=text):
            Settings(**change)
