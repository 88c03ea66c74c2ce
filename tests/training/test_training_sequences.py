"""A transformer block and an LSTM trained beside plain ones; and what is wrong with labels, parameters and losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import long, some
from torch import nn

import sectorch
from sectorch import DifferentiableTensor, Session
from sectorch.errors import ArgumentError, DimensionError, NonFiniteError, RangeExceededError, UnsupportedOpError


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.words, self.layer, self.scores = nn.Embedding(5, 4), layer, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.words(x))
        return self.scores((y[0] if isinstance(y, tuple) else y).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, F.gelu, batch_first=True, norm_first=True),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True, bidirectional=False),
    "rnn": lambda: nn.RNN(4, 4, batch_first=True),
}


def trained(name: str, session: Session | None, steps: int) -> list[torch.Tensor]:
    """Losses of some steps, plain without a session, and the last values of the scores' weights."""
    torch.manual_seed(2)
    model, x, y = Sequence(NETS[name]()), torch.randint(0, 5, (4, 3)), torch.tensor([0, 2, 1, 1])
    model = model if session is None else sectorch.shared(model, session=session)
    optimiser, found = torch.optim.Adam(model.parameters(), 0.02), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    found.append(model.scores.weight.detach())
    return [v.reveal() if isinstance(v, DifferentiableTensor) else v for v in found]


@pytest.mark.parametrize("name", some(NETS, ["transformer", "gru"]))
def test_sequences_are_learned_as_in_plain_training(name: str):
    """A step's gradients err by some 2^-14, and Adam's steps of 0.02 make little of that."""
    for a, b in zip(trained(name, Session(reference=True), 4), trained(name, None, 4), strict=True):
        assert (a - b).abs().max() <= 2e-3


@pytest.mark.parametrize("name", ["transformer", *long("lstm")])
def test_a_step_of_a_sequence_is_that_of_the_reference(name: str):
    """But for last bits of series, which Adam's first step, of the gradient's sign, does not grow."""
    for a, b in zip(*(trained(name, Session(reference=r), 1) for r in (False, True)), strict=True):
        assert (a - b).abs().max() <= 4 * 2.0**-20


def test_dropout_in_attention_and_between_layers_is_torchs():
    session = Session(reference=True)
    for layer in (nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True), nn.LSTM(4, 4, 2, dropout=0.5)):
        model = sectorch.shared(copy.deepcopy(layer), session=session)
        x = sectorch.share(torch.rand(2, 3, 4), session=session)
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            y: Any = model(x)
            y = y[0] if isinstance(y, tuple) else y
            found.append(y.detach().reveal())
            y.sum().backward()
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
        assert all(p.grad is not None for p in model.parameters())


def test_labels_parameters_and_losses_that_cannot_be():
    session = Session(reference=True)
    model = sectorch.shared(nn.Linear(3, 4), session=session)
    before = model.weight.detach().reveal()
    x = sectorch.share(torch.rand(2, 3), session=session)
    missing = torch.full((2, 4), float("nan"))
    for loss in (F.mse_loss, F.binary_cross_entropy_with_logits, F.cross_entropy, F.huber_loss):
        with pytest.raises(NonFiniteError, match="NaN"):
            loss(model(x), missing)
    with pytest.raises(DimensionError, match="labels are from 0 to 3, got 4"):
        F.cross_entropy(model(x), torch.tensor([4, 4]))
    with pytest.raises(DimensionError, match="labels are from 0 to 3, got -1"):
        F.cross_entropy(model(x), torch.tensor([-1, -1]))
    with pytest.raises(ArgumentError, match="all are ignored"):
        F.cross_entropy(model(x), torch.tensor([-100, -100]))
    labels = sectorch.share(torch.tensor([0, -100]), session=session)
    with pytest.raises(DimensionError, match="with ignore_index=-1"):
        F.cross_entropy(model(x), labels, torch.ones(4))
    weights = DifferentiableTensor(sectorch.share(torch.ones(4), session=session))
    with pytest.raises(ArgumentError, match="secret class weights"):
        F.cross_entropy(model(x), torch.tensor([0, 1]), weights)
    plain = nn.Linear(4, 2)
    with pytest.raises(ArgumentError, match="its gradient would be known to all"):
        plain(model(x))
    with pytest.raises(ArgumentError, match="running statistics in plain"):
        F.batch_norm(model(x), torch.zeros(4), torch.ones(4), training=True)
    F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    revealed = [p.reveal() for p in model.parameters()]
    with pytest.raises(ArgumentError, match=r"a revealed parameter .*SGD\(model.parameters"):
        torch.optim.SGD(revealed, 0.1).step()
    tuned = [p.clone().requires_grad_() for p in revealed]
    sum(p.sum() for p in tuned).backward()
    torch.optim.SGD(tuned, 0.1).step()  # in plain, which is nobody's concern
    far = F.cross_entropy(model(x) * 4000 * 4000, torch.tensor([0, 1]))
    with pytest.raises(RangeExceededError, match="left the range"):
        far.detach().reveal()
    assert torch.equal(model.weight.detach().reveal(), before)


def test_what_has_no_gradient_names_the_way_out():
    session = Session(reference=True)
    x = DifferentiableTensor(sectorch.share(torch.eye(3), session=session), requires_grad=True)
    for f, way in (
        (torch.fft.rfft, "complex results are not followed"),
        (torch.special.i0e, "keep it out of what is trained"),
    ):
        with pytest.raises(UnsupportedOpError, match=rf"has no gradient on shares: .*{way}.*test_training_sequences"):
            f(x)
    assert torch.equal(torch.sinc(x.detach()).reveal(), torch.sinc(torch.eye(3)).round(decimals=5))
    with pytest.raises(UnsupportedOpError, match=r"torch.frexp.*as_shared\(\) takes what needs none"):
        torch.frexp(x)
