"""Fine-tuning with a secret base: one party's frozen weights take part in forward and backward, and are not shared."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import some
from distributed_parties import in_threads, runtime_of
from session_in_protocol import Within
from test_training_leaks import SCHEME
from torch import nn

import sectorch
from sectorch import DifferentiableTensor, PrivateTensor, Session, SharedTensor
from sectorch.choreography import Net, Phase
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.located import compute, run_in
from sectorch.errors import (
    ArgumentError,
    FixedPointRangeError,
    NonFiniteError,
    RangeExceededError,
    SectorchError,
    UnsupportedOpError,
)
from sectorch.mpc.star.shares import Shares
from sectorch.session import A, Q, S
from sectorch.testing import Given, check_protocol
from sectorch.training import programs as stepping


class LoRA(nn.Module):
    """A linear layer with a low-rank adapter, as users write it."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / 4)
        self.up = nn.Parameter(torch.randn(layer.out_features, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    """A block of a transformer over token and position embeddings, of which adapters and the last layer are trained."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(3, 6)
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.query, self.key, self.value = LoRA(nn.Linear(6, 6)), nn.Linear(6, 6), LoRA(nn.Linear(6, 6))
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)
        self.requires_grad_(False)
        for adapted in (self.query, self.value):
            adapted.down.requires_grad_()
            adapted.up.requires_grad_()
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.tokens(ids) + self.places(torch.arange(3)))
        heads = [f(x).view(-1, 3, 2, 3).transpose(1, 2) for f in (self.query, self.key, self.value)]
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, 3, 6)
        x = self.second(x)
        return self.head((x + self.narrow(F.gelu(self.wide(x)))).mean(1))


def bitfit() -> nn.Module:
    """Only biases are trained: below, between and above frozen weights."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for name, p in net.named_parameters():
        p.requires_grad_("bias" in name)
    return net


def convolutional() -> nn.Module:
    """Frozen convolutions, groups and norms over a trained first layer, and a trained last one."""
    frozen = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, stride=2),
        nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(2), nn.Conv1d(2, 2, 3, padding=1),
    ).requires_grad_(False).eval()  # fmt: skip
    for norm in (frozen[1], frozen[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.uniform_(norm.bias)
    nn.init.uniform_(frozen[1].running_mean), nn.init.uniform_(frozen[1].running_var, 0.5, 2.0)
    return nn.Sequential(nn.Conv2d(1, 2, 1), frozen, nn.Flatten(), nn.LazyLinear(3))


RECIPES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "biases": (bitfit, lambda: torch.rand(4, 6)),
    "block": (Block, lambda: torch.randint(0, 11, (4, 3))),
    "convolutions": (convolutional, lambda: torch.rand(4, 1, 5, 5)),
    "lstm": (
        lambda: nn.Sequential(nn.LSTM(2, 3, batch_first=True).requires_grad_(False), Last(), nn.Linear(3, 3)),
        lambda: torch.rand(4, 3, 2),
    ),
}


class Last(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x[0][:, -1]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = RECIPES[name][0]()
    with torch.no_grad():
        net(RECIPES[name][1]())
    return net


def fitted(net: nn.Module, name: str, session: Session | None, recorded: bool, steps: int = 3) -> dict[str, Any]:
    """The losses and what was trained, in shares or (without a session) in plain."""
    if session is not None:
        net = sectorch.shared(net, owner="A", session=session)
    torch.manual_seed(1)
    optimiser, losses = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), []
    for _ in range(steps):
        x, y = RECIPES[name][1](), torch.randint(0, 3, (4,))
        x = x if session is None else sectorch.share(x, session=session)
        with sectorch.step(session) if recorded else torch.enable_grad():
            optimiser.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimiser.step()
        losses.append(loss)
    value = lambda p: p.detach() if session is None else p.reveal()
    trained = {k: value(p) for k, p in net.named_parameters() if p.requires_grad}
    return {**{f"loss {i}": value(loss) for i, loss in enumerate(losses)}, **trained}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


@pytest.mark.parametrize("name", RECIPES)
def test_steps_over_a_frozen_base_are_bit_for_bit_the_references_and_near_plain_torchs(name: str):
    wanted = fitted(made(name), name, Session(reference=True), recorded=False)
    session = Session()
    with Transcript() as sent:
        found = fitted(made(name), name, session, recorded=True)
    assert equal(found, wanted)
    assert None not in stepping.PROGRAMS[session].traced_steps.values()
    masked = sum(value.numel() for line, value in sent.lines if line.label == "omega_masked")
    own = [p for p in made(name).state_dict().values() if p.is_floating_point()]
    assert 0 < masked <= sum(p.numel() for p in own), "each weight is masked once, for all steps and programs"
    assert not any(line.shows for line, _ in sent.lines if line.dst.role != "Q")
    plain = fitted(made(name), name, None, recorded=False)
    for key, value in plain.items():
        assert torch.allclose(found[key], value, atol=2e-4), key


@pytest.mark.parametrize("name", some(RECIPES, ["biases"]))
def test_operators_one_by_one_have_the_same_bits(name: str):
    wanted = fitted(made(name), name, Session(reference=True), recorded=False)
    assert equal(fitted(made(name), name, Session(), recorded=False), wanted)
    assert equal(fitted(made(name), name, Session(reference=True), recorded=True), wanted)


def test_a_product_with_a_frozen_weight_sends_nothing_of_the_weight():
    """Of a weight in shares, each product opens all elements to A and to S."""
    sent = {}
    for owner in ("A", "S"):
        session = Session()
        net = sectorch.shared(nn.Linear(64, 64, bias=False).requires_grad_(False), owner=owner, session=session)
        x = DifferentiableTensor(sectorch.share(torch.rand(2, 64), session=session), requires_grad=True)
        for _ in range(2):
            with Transcript() as seen, session.call():
                net(x).sum().backward()
        sent[owner] = sum(value.numel() for _, value in seen.lines)
    assert sent["A"] <= sent["S"] - 2 * 2 * 64 * 64


def test_steps_in_two_parts_and_a_base_in_use_elsewhere():
    """A graph that outlives its step, an average of the model, and the frozen weights as shares and as their owner's
    own."""
    results = []
    for session in (Session(), Session(reference=True)):
        net = sectorch.shared(made("biases"), owner="A", session=session)
        average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        optimiser, x = torch.optim.SGD(net.parameters(), 0.1), torch.linspace(0, 1, 12).view(2, 6)
        for _ in range(3):
            with sectorch.step(session):
                optimiser.zero_grad()
                loss = net(sectorch.share(x, session=session)).square().mean()
            with sectorch.step(session):
                loss.backward()
                optimiser.step()
            average.update_parameters(net)
        if not session.reference:
            assert sectorch.step(session).programs <= 4, "what outlives a step is the same weight to the next"
        results.append([p.reveal() for m in (net, average) for p in m.parameters() if p.requires_grad])
        weight = made("biases")[2].weight
        assert torch.allclose(net[2].weight.reveal(to="A"), weight.detach(), atol=2**-20)
        doubled = (net[2].weight * 2 + 1).as_shared().reveal()
        assert torch.allclose(doubled, weight.detach() * 2 + 1, atol=2**-18)
        same = copy.deepcopy(net)
        assert same[2].weight.cell.content is net[2].weight.cell.content
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_frozen_names_is_frozen_and_the_rest_is_trained():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    net[1].bias.requires_grad_(False)
    net = sectorch.shared(net, owner="A", frozen=["0"], session=Session(reference=True))
    assert {k: p.cell.own for k, p in net.named_parameters()} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": True,
    }  # fmt: skip
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, False]
    whole = sectorch.shared(nn.Linear(2, 2), owner="A", frozen=True, session=Session(reference=True))
    assert all(p.cell.own for p in whole.parameters())


NAN = float("nan")


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda net, s: sectorch.shared(net, frozen=["0"], session=s), ArgumentError, "give owner='A'"),
        (lambda net, s: sectorch.shared(net, owner="S", frozen=True, session=s), ArgumentError, "the owner is S"),
        (lambda net, s: sectorch.shared(net, owner="A", frozen=["7"], session=s), ArgumentError, "no parameter or"),
        (lambda net, s: base(net, s).requires_grad_(), ArgumentError, "its owner's alone"),
        (lambda net, s: base(net, s)[0].weight.reveal(), ArgumentError, "revealed to nobody else"),
        (lambda net, s: base(net, s)[0].weight.reveal(to=["A", "S"]), ArgumentError, "revealed to nobody else"),
        (lambda net, s: base(net, s).load_state_dict({"0.weight": torch.zeros(2, 2)}, strict=False),
         RuntimeError, "does not change"),
        (lambda net, s: base(net, s)[0].weight.data.mul_(2), UnsupportedOpError, "does not change"),
        (lambda net, s: base(net, s)[1].train()(sectorch.share(torch.rand(4, 2), session=s)), ArgumentError,
         "call .eval"),
    ],
)  # fmt: skip
def test_wrong_uses_of_a_frozen_base_are_refused(wrong: Callable, error: type[Exception], words: str):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    session = Session()
    with Transcript() as sent, pytest.raises(error, match=re.escape(words)):
        wrong(net, session)
    assert not [line for line, _ in sent.lines if line.phase == Phase.ONLINE and line.path != "share"]


def base(net: nn.Module, session: Session) -> Any:
    return sectorch.shared(net, owner="A", frozen=True, session=session)


def test_weights_that_do_not_fit_are_refused_at_their_owner():
    net = nn.Linear(2, 2)
    for value, error in ((NAN, NonFiniteError), (1e9, FixedPointRangeError)):
        wrong = copy.deepcopy(net)
        nn.init.constant_(wrong.weight, value)
        with pytest.raises(error):
            sectorch.shared(wrong, owner="A", frozen=True, session=Session())
        assert type(wrong.weight) is nn.Parameter, "nothing was changed"
    session, wide = Session(), nn.Linear(4, 1)
    nn.init.constant_(wide.weight, 1000.0)
    wide = sectorch.shared(wide, owner="A", frozen=True, session=session)
    x = DifferentiableTensor(sectorch.share(torch.rand(1, 4), session=session), requires_grad=True)
    with pytest.raises(SectorchError, match="weights of one output sum to"), sectorch.step(session):
        wide(x).sum().backward()


def test_a_value_that_leaves_the_range_behind_a_frozen_layer_withholds_what_depends_on_it():
    for session in (Session(), Session(reference=True)):
        net = nn.Linear(2, 1, bias=False)
        nn.init.constant_(net.weight, 200.0)
        net = sectorch.shared(net, owner="A", frozen=True, session=session)
        p = DifferentiableTensor(sectorch.share(torch.full((1, 2), 16.0), session=session), requires_grad=True)
        with sectorch.step(session):
            y = torch.relu(net(p)) * 0.5
        with pytest.raises(RangeExceededError):
            y.reveal()


def test_a_state_holds_what_is_trained_and_refuses_a_frozen_weight(tmp_path: Any):
    session = Session()
    net = sectorch.shared(made("biases"), owner="A", session=session)
    kept = sectorch.Checkpoints(tmp_path, session=session)
    with pytest.raises(ArgumentError, match="frozen weight"):
        kept.save(1, {"model": net.state_dict()})
    trained = {k: p for k, p in net.named_parameters() if p.requires_grad}
    kept.save(1, {"model": trained})
    other = sectorch.shared(bitfit(), owner="A", session=session)
    found = kept.newest()
    assert found is not None
    other.load_state_dict(found.state["model"], strict=False)
    for name, p in other.named_parameters():
        assert not p.requires_grad or torch.equal(p.reveal(), trained[name].reveal())


# What the parties see, as in `test_training_leaks.py`.


def ring_to_float(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) * 2.0**-20


class WithinSetup(Within):
    """As `Within`, with a setup."""

    def setup(self, party: Any = None) -> Net:
        return self._within.setup


def step(session: Session, frozen: Any, given: list[Any]) -> tuple[Any, ...]:
    """Weights below a frozen one after a step of SGD, one neuron an element: found = relu(frozen (x weight))."""

    def tensor(value: Any, trained: bool) -> DifferentiableTensor:
        x = SharedTensor(value, 20, session, session.answering_party(), SCHEME, torch.float32, 2.0**20)
        return DifferentiableTensor(x, trained)

    with run_in(session.setup()):
        value = compute(ring_to_float, frozen)
    own = PrivateTensor(value, session, session.answering_party(), SCHEME, torch.float32)
    weight, x, y = (tensor(v, i == 0) for i, v in enumerate(given))
    found = torch.relu(DifferentiableTensor(stepping.Cell(own)) * (x * weight))
    found.backward((found - y).detach())
    torch.optim.SGD([weight], 0.5).step()
    return (weight.cell.content.shares,)


def protocol(net: Net, frozen: Any, *given: Shares) -> tuple[Any, ...]:
    return step(WithinSetup(net), frozen, list(given))


def reference(frozen: torch.Tensor, *given: torch.Tensor) -> tuple[Any, ...]:
    session = Session(reference=True)
    with session.call():
        return step(session, session.setup().own(session.answering_party(), frozen, Phase.SETUP, "w"), list(given))


GIVEN = [Given("A", low=-(3 << 18), high=3 << 18, phase=Phase.SETUP), *[Given(low=-(3 << 18), high=3 << 18)] * 3]
"""The frozen weight at A, and trained weights, inputs and labels in shares."""


@pytest.mark.sectorch_long
def test_the_owner_learns_nothing_of_the_data_and_nobody_anything_of_the_frozen_weight():
    print(check_protocol(protocol, GIVEN, reference, exhaustive=0, seconds=1200))


def test_three_parties_apart_have_the_same_bits_and_only_the_owner_has_the_base():
    """Elsewhere than at A the base has other numbers, which count for nothing; Q alone has the data."""
    x, labels = torch.rand(2, 4, 6), torch.randint(0, 3, (2, 4))
    made = bitfit()  # threads have torch's generator in common

    def program(session: Session, base: bool, data: bool) -> dict[str, torch.Tensor]:
        net = copy.deepcopy(made)
        for p in () if base else net.parameters():
            nn.init.constant_(p, 7.0)
        net = sectorch.shared(net, owner="A", session=session)
        optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for i in range(2):
            given = sectorch.share(x[i] if data else None, session=session, owner="Q", shape=(4, 6))
            with sectorch.step(session):
                optimiser.zero_grad()
                F.cross_entropy(net(given), labels[i]).backward()
                optimiser.step()
        return {k: p.reveal(to="S") for k, p in net.named_parameters() if p.requires_grad}

    def party(me: Any, ends: dict) -> dict[str, torch.Tensor]:
        session = Session(runtime=runtime_of(me, ends))
        return program(session, me.name == "A", me.name == "Q")

    found = in_threads([(Q, S), (A, S)], party)
    assert not [error for error in found.values() if isinstance(error, BaseException)], found
    assert equal(found["S"], program(Session(reference=True), True, True))
    assert all(value.is_meta for name in "QA" for value in found[name].values())


@pytest.mark.parametrize("label", [3, -1])
def test_labels_out_of_range_are_named_before_anything_of_their_step_is_sent(label: int):
    session = Session()
    model, labels = sectorch.shared(nn.Linear(4, 3), owner="A", session=session), torch.tensor([0, 1, label, 2])
    x, secret = (sectorch.share(v, session=session) for v in (torch.rand(4, 4), labels))
    for target in (secret, labels):
        with Transcript() as transcript, pytest.raises(IndexError, match=re.escape("0 to 2")), sectorch.step(session):
            F.cross_entropy(model(x), target, label_smoothing=0.1).backward()
        assert not transcript.lines
    with Transcript() as transcript, sectorch.step(session):
        model.zero_grad()
        F.cross_entropy(model(x), sectorch.share(labels.clamp(0, 2), session=session)).backward()
    assert transcript.lines


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("word", [6, -1])
def test_public_ids_out_of_range_are_named_in_torchs_words(word: int, frozen: bool):
    table = nn.Embedding(6, 4).requires_grad_(not frozen)
    table = sectorch.shared(table, owner="A", session=Session())
    with Transcript() as transcript, pytest.raises(IndexError, match="index out of range in self"):
        table(torch.tensor([1, word]))
    assert not transcript.lines
