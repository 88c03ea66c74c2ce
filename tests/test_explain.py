"""explain() tells before a run what profile() measures in it; diff() finds the layer that diverges."""

from __future__ import annotations

import pytest
import torch
from cases import some
from torch import nn

import sectorch
from sectorch.choreography import Phase
from sectorch.choreography.ledger import HEADER
from sectorch.errors import ArgumentError
from sectorch.nn.models import ZOO

SMALL = ["lenet", "cryptonets", "mlp", "resnet8"]


def measured(model: nn.Module, x: torch.Tensor) -> sectorch.profile:
    secured = sectorch.secure(model, session=sectorch.Session())
    with sectorch.profile() as p:
        secured(x)
    return p


def of_setup(ledger: list, setup: bool) -> list:
    return [m for m in ledger if (m.phase == Phase.SETUP) == setup]


@pytest.mark.parametrize("name", some(ZOO, SMALL))
def test_explained_is_measured(name):
    construct, shape = ZOO[name]
    model, x = construct().eval(), torch.randn(2, *shape)
    said, seen = sectorch.explain(model, x), measured(model, x)
    for figure in ("bytes", "rounds", "setup_bytes", "offline_bytes", "online_bytes"):
        assert getattr(said, figure) == getattr(seen, figure), figure
    if len(sectorch.secure(model).pieces(x)) == 1:
        assert sum(layer.rounds for layer in said.layers) == said.rounds
        assert sum(layer.profile.bytes for layer in said.layers) == said.bytes
    for setup in (True, False):  # what is sent once a session is sent first
        assert [(m.path, m.label, m.shape, m.phase, m.round) for m in of_setup(said.profile.ledger, setup)] == [
            (m.path, m.label, m.shape, m.phase, m.round) for m in of_setup(seen.ledger, setup)
        ]


def test_a_batch_in_pieces_is_counted_whole(monkeypatch):
    monkeypatch.setattr("sectorch.nn.module.CHUNK_BYTES", 220_000)  # the largest message of two rows has 213,120
    construct, shape = ZOO["lenet"]
    model, x = construct().eval(), torch.randn(4, *shape)
    said, seen = sectorch.explain(model, x), measured(model, x)
    assert len(sectorch.secure(model).pieces(x)) == 2
    assert (said.bytes, said.rounds) == (seen.bytes, seen.rounds)


def test_explain_goes_on_after_an_unsupported_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(torch.erfinv(self.a(x)))

    said = sectorch.explain(Model().eval(), torch.randn(3, 5))
    assert not said.supported
    assert [layer.name for layer in said.layers[1:-1]] == ["a", "erfinv", "b"]
    assert said.layers[2].source.endswith(".py:" + said.layers[1].source.rsplit(":", 1)[1])
    text = str(said)
    assert "not supported: erfinv" in text and "0.5 ms" in text and "over 50 ms, 100 Mbit/s" in text


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        a, b = self.lstm(x)[0].chunk(2, 1)
        return (a + b).max(1).values + a.max(1).values


def test_a_row_is_an_operation_by_its_name_and_not_one_of_its_results():
    said = sectorch.explain(Several().eval(), torch.randn(2, 4, 3))
    kinds = [layer.kind for layer in said.layers]
    assert kinds == ["", "LSTM", "add", "max", "max", "add", ""]
    assert sum(layer.profile.bytes for layer in said.layers) == said.bytes


class Written(nn.Module):
    """Writes into a part of a tensor that others are views of, and calls what other functions compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 1:3] = x[:, 2:4]
        y.t()[0] += 1
        return torch.tensordot(y, torch.ones(6, 2), dims=1)


def test_every_line_of_a_table_is_the_models():
    """What a write changes elsewhere, and the steps of a composed function, have the line that asked for them."""
    layers = sectorch.explain(Written().eval(), torch.ones(2, 6)).layers
    places = {layer.source.rpartition(":")[0] for layer in layers if layer.source}
    assert places == {__file__}


def test_network_estimate_by_hand():
    """One linear layer, message by message, with the bytes of their tensors and a header each."""
    said = sectorch.explain(nn.Linear(4, 3, bias=False).eval(), torch.randn(2, 4))
    # share 1, product 1, then A's half of the opening and of the reveal (keys give the borrow), and S's of the reveal
    assert said.rounds == 4
    # A-S: m 8 * 8, c_A 6 * 8 (c_S is ahead), masked 6 * 8; Q-S: x_S 8 * 8, the result 6 * 8
    assert said.online_bytes == 8 * 8 + 6 * 8 + 6 * 8 + 8 * 8 + 6 * 8
    # The request, and 4 messages of half a round trip. A sends its two in one.
    on_the_way = (64, 64, 48, 48, 48)
    carried = 8 * (sum(on_the_way) + len(on_the_way) * HEADER)
    assert said.seconds("wan")["online"] == pytest.approx(5 * 0.025 + carried / 100e6, rel=1e-9)
    slow = said.seconds(sectorch.Link(rtt_ms=1000, mbit=0.01))
    assert slow["online"] == pytest.approx(5 * 0.5 + carried / 1e4, rel=1e-9)
    with pytest.raises(ArgumentError, match="network must be one of lan, wan"):
        said.seconds("moon")


def test_a_profile_adds_the_computation_that_it_saw():
    model = nn.Linear(4, 3).eval()
    secured = sectorch.secure(model, session=sectorch.Session())
    with sectorch.profile() as seen:
        secured(torch.randn(2, 4))
        secured(torch.randn(2, 4))
    first, link = sectorch.explain(model, torch.randn(2, 4)), sectorch.Link(rtt_ms=100, mbit=10)
    with sectorch.profile() as again:
        secured(torch.randn(2, 4))
    assert seen.online_seconds > 0
    travel = {phase: seconds - getattr(seen, f"{phase}_seconds") for phase, seconds in seen.seconds_over(link).items()}
    later = {phase: seconds - getattr(again, f"{phase}_seconds") for phase, seconds in again.seconds_over(link).items()}
    assert travel["online"] == pytest.approx(2 * first.seconds(link)["online"])
    assert travel["offline"] == pytest.approx(first.seconds(link)["offline"] + later["offline"])


def test_diff_finds_the_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval().requires_grad_(False)
    report = sectorch.diff(model, torch.randn(3, 4))
    assert report.first is None and "no layer diverges" in str(report)
    # 2^-21 is the best that 20 fraction bits can do for a weight; 1e-8 is out of reach from the first layer on.
    strict = sectorch.diff(model, torch.randn(3, 4), tolerance=1e-8)
    assert strict.first.name == "'0' (Linear)"


class Counts(nn.Module):
    """Changes itself, so that it runs operation by operation."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


def test_modules_that_change_are_explained_whole_and_compared_by_submodules():
    said = sectorch.explain(Counts().eval(), torch.randn(2, 2))
    assert not said.traced and len(said.layers) == 1
    report = sectorch.diff(Counts().eval(), torch.randn(2, 2))
    assert [layer.name for layer in report.layers] == ["'linear' (Linear)", "(the result)"]
    assert report.first is None
