"""The encrypted round: it gives the updates that the simulation gives, decrypts aggregates only, and fails cleanly."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from capride_attacks import Steps
from torch import nn

from sectorch import ckks
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.run.local import LocalRuntime
from sectorch.ckks.scheme.keys import SecretKey
from sectorch.data.seeds import generator
from sectorch.federated import FederationError
from sectorch.federated.training import predict
from sectorch.nn.fhe import Polynomial, fhe_friendly
from sectorch.protocols.capride import (
    CaPriDe,
    CorruptedCiphertextError,
    DisaggregationError,
    ModelError,
    Settings,
    training,
)
from sectorch.protocols.capride.algorithm import subset
from sectorch.protocols.capride.exchange import Layout, Simulated, copies, steps_of
from sectorch.protocols.capride.training import Question


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
    bits = ckks.flood_bits_for(p, count, how.sigma or 0.0, 1 / how.temperature, how.flood_bits)
    flood = ckks.sum_noise(p, count, bits, 1 / how.temperature)
    return p.slots / count * slot + 8 * flood


def both(made, how: Settings):
    """One question of P1 to P2, encrypted and in the clear."""
    run = Steps(made, how)
    party, models = run.parties[0], {n: s.small for n, s in run.states.items()}
    question = Question(party, models["P1"], subset(party, 1, how), how, generator(0, "directions"))
    asked, rest = question.published(len(party.labels)), {"P2": models["P2"]}
    arguments = (1, party, asked, len(question.subset), rest)
    hidden, plain = run.exchange, Simulated(run.parties, run.run.classes, run.run.parameters, how)
    return run.run, question, hidden, hidden.ask(*arguments)["P2"], plain.ask(*arguments)["P2"], models


def test_released_numbers_are_the_plain_ones(made, quick):
    """The loss of Eq. 9, the head's gradient and the forward gradient, each within the bound of what was released."""
    how = replace(quick, update="forward", directions=5, fraction=0.75)
    run, question, hidden, found, plain, models = both(made, how)
    party = run.parties[0]
    count = copies(len(party.images), run.parameters.slots)
    bound = error_bound(models["P2"], party.images, count, run.parameters, how)
    assert bound < 3, "else the comparison would say nothing: the loss below is a sum over 36 samples"
    torch.testing.assert_close(found, plain, rtol=0, atol=bound)
    z = predict(models["P2"], question.images).double()
    u = question.logits.double()
    loss = float(training.local_uncertainty(u, how.temperature)) - float(found[0])
    assert loss == pytest.approx(float(training.approximate_kl(u, z, how.temperature)), abs=bound)
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
    monkeypatch.setattr(Layout, "chunk", 30)
    run, _, hidden, found, plain, models = both(made, quick)
    party = run.parties[0]
    *_, inputs = hidden._published["P1", "P2"]
    assert [tuple(part.shape) for part in inputs] == 2 * [(30 * copies(48, run.parameters.slots), 1, 8, 8)]
    count = copies(48, run.parameters.slots)
    bound = 2 * error_bound(models["P2"], party.images, count, run.parameters, quick)
    torch.testing.assert_close(found, plain, rtol=0, atol=bound)


def _features(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from sectorch.protocols.capride.settings import features_and_logits

    with torch.no_grad():
        return features_and_logits(model, x)[0]


def test_nothing_but_aggregates_is_decrypted(made, quick, monkeypatch):
    """SEAL decrypts as often as the messages that show something say; each time what was sealed; and no tensor's
    `decrypt` is ever called.
    """
    opened, sealed = [], []
    monkeypatch.setattr(ckks.CKKSTensor, "decrypt", lambda *_a, **_k: pytest.fail("a tensor was decrypted"))
    original = ckks.BatchSums.decrypt
    monkeypatch.setattr(ckks.BatchSums, "decrypt", lambda s, *rest: sealed.append(s.data) or original(s, *rest))

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
    run = CaPriDe(*made, replace(quick, leakage=None, sigma=2.0))
    with Transcript() as transcript:
        result = run.run()
    shown = [(m.label, m.src.name, m.dst.name) for m, _ in transcript.lines if m.shows and "public" not in m.shows]
    assert shown == [
        ("key_Pk_Pl", "P1", "P2"), ("size", "P1", "P2"), ("aggregates", "P2", "P1"),
        ("key_Pk_Pl", "P2", "P1"), ("size", "P2", "P1"), ("aggregates", "P1", "P2"),
    ]  # fmt: skip
    asked = 1 + 9 * quick.head_rank
    sizes = [value.tolist() for m, value in transcript.lines if m.label == "size"]
    assert [size[:3] for size in sizes] == 2 * [[asked, 48, steps_of(2.0)]] and all(size[3] > 0 for size in sizes)
    assert [count for count, _ in run.released.values()] == [asked, asked]
    count = copies(48, run.parameters.slots)
    assert len(opened) == sum(len(s) for s in sealed) == 2 * -(-asked // count)
    hidden = {(row["message"], row["hidden_by"]) for row in result.messages}
    tags = "a digest of what is encrypted"
    assert hidden == {
        ("key_Pk_Pl", "the secured channel"),
        ("keys", "a public key"),
        ("inputs", "encrypted"),
        ("inputs_tag", tags),
        ("size", "nothing"),
        ("directions", "encrypted"),
        ("directions_tag", tags),
        ("aggregates", "rerandomised"),
        ("aggregates_tag", tags),
    }
    assert all(row["messages"] == 2 for row in result.messages), "inputs are published once by each"
    assert "2 numbers" not in result.statement[0] and f"{2 * asked} numbers were released" in result.statement[0]


def state_of(run: Steps) -> list:
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
        ("aggregates_tag", ckks.KeyMismatchError, "aggregates of P1 are under keys"),
    ],
)
def test_a_failed_round_changes_nothing(made, quick, monkeypatch, harm, error, text):
    """The second party's part fails, after the first one's went well."""
    run = Steps(made, quick)
    before = state_of(run)
    transfer = LocalRuntime.transfer

    def damaged(self, line, value):
        if line.label == harm and (line.dst if harm.startswith("aggregates") else line.src).name == "P2":
            value.view(-1)[5] ^= 1  # in place: in one process both ends hold one tensor
        return transfer(self, line, value)

    monkeypatch.setattr(LocalRuntime, "transfer", damaged)
    with pytest.raises(error, match=f"stage 'round-1/P2/answers' at P2: .*{text}"):
        run.round()
    assert same(before, state_of(run))
    assert any(row["message"] == "aggregates" for row in run.run.stages.received), "P1's part went well"
    assert "P2>P1" in " ".join(run.run.released)


def test_a_refused_round_changes_nothing(made, quick):
    how = replace(quick, encrypted=False, sigma=0.0, leakage=0.5)
    run = Steps(made, how)
    before = state_of(run)
    with pytest.raises(DisaggregationError, match=r"P1 could explain .* what sets P2's logits .* sigma=.* is enough"):
        run.round()
    assert same(before, state_of(run)) and not run.run.released


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
    run = Steps(made, quick)
    state = run.states["P2"]
    with torch.no_grad():
        list(state.small.parameters())[-1].add_(100)
    run.change("P2", state)
    with pytest.raises(ModelError, match="P2's logits reach"):
        run.round()


def test_few_samples_and_bad_settings_are_refused(made, quick):
    parties, test, classes = made
    few = [replace(p, images=p.images[:10], labels=p.labels[:10]) for p in parties]
    with pytest.raises(FederationError, match="over 10 samples"):
        CaPriDe(few, test, classes, quick)
    with pytest.raises(FederationError, match="at least two are needed"):
        CaPriDe(parties[:1], test, classes, quick)
    with pytest.raises(FederationError, match="has 1 peers, 2 were to be asked"):
        CaPriDe(parties, test, classes, replace(quick, peers=2))
    for change, text in (
        ({"update": "all"}, "no update 'all'"),
        ({"method": "x"}, "no method 'x'"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"leakage": 1.5}, "leakage must be above 0 and at most 1"),
        ({"sigma": -1.0}, "sigma must be at least 0"),
    ):
        with pytest.raises(FederationError, match=text):
            Settings(**change)
