"""Gradients on shares: each row's beside plain autograd's, within what rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import sectorch
from sectorch import DifferentiableTensor, Scheme, Session
from sectorch.choreography.ledger import Transcript

LAST = 2.0**-20


@dataclass(frozen=True)
class Case:
    """f of tensors of these shapes, with entries up to two; its result and gradients err by `places` last places.

    An entry, its rounding to a factor and the rounding of a gradient err by half a place each. A sum of n products of
    numbers up to m therefore errs by n m (1 + 1 / 2) places from each of its two factors, and one for its own rounding;
    the rest is what the functions of docs/ops.md state, which the chain rule multiplies with numbers up to four.
    """

    name: str
    f: Callable
    shapes: tuple
    places: float

    def __str__(self) -> str:
        return self.name


TARGET = torch.tensor([[0.25, 0.5, 0.75, 1.0, 0.0]] * 4)
LABELS = torch.tensor([0, 4, 2, 2])

CASES = [
    Case("mm", torch.mm, ((4, 5), (5, 3)), 40),
    Case("bmm", torch.bmm, ((2, 4, 5), (2, 5, 3)), 40),
    Case("linear", F.linear, ((2, 4, 5), (3, 5), (3,)), 60),
    Case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), ((2, 2, 5, 6), (3, 2, 3, 2), (3,)), 150),
    Case("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), ((2, 2, 6), (3, 2, 3), (3,)), 100),
    Case("mul", lambda x, y: x * y + y * 0.3 - x / 3, ((4, 5), (5,)), 60),
    Case("relu", torch.relu, ((4, 5),), 4),
    Case("sigmoid", torch.sigmoid, ((4, 5),), 40),
    Case("tanh", torch.tanh, ((4, 5),), 60),
    Case("exp", torch.exp, ((4, 5),), 300),
    Case("clamp", lambda x: x.clamp(-0.5, 0.75), ((4, 5),), 4),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2), ((2, 2, 5, 6),), 8),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), ((2, 2, 4, 6),), 8),
    Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), ((2, 2, 3, 3),), 8),
    Case("softmax", lambda x: F.softmax(x, 1), ((4, 5),), 120),
    Case("log_softmax", lambda x: F.log_softmax(x, 1), ((4, 5),), 120),
    Case("cross_entropy", lambda x: F.cross_entropy(x, LABELS), ((4, 5),), 60),
    Case("mse_loss", lambda x: F.mse_loss(x, TARGET), ((4, 5),), 30),
    Case("bce", lambda x: F.binary_cross_entropy_with_logits(x, TARGET), ((4, 5),), 60),
    Case("views", lambda x: (x.t()[1:4:2].unsqueeze(0) - x.mean()).reshape(-1), ((4, 5),), 30),
    Case("cat", lambda x, y: torch.cat((x[1:], y.expand(2, 5))).sum(0), ((4, 5), (1, 5)), 20),
]


def shared(x: torch.Tensor, session: Session) -> DifferentiableTensor:
    return DifferentiableTensor(sectorch.share(x, session=session), requires_grad=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=3)
@given(seed=st.integers(0, 1 << 20))
def test_gradients_are_those_of_plain_autograd(case: Case, seed: int):
    session = Session(reference=True)
    torch.manual_seed(seed)
    xs = [torch.rand(shape) * 4 - 2 for shape in case.shapes]
    # Kinks are kept away from: a rounding must not decide between two slopes.
    xs = [torch.round(x * 64) / 64 + 1 / 128 + torch.arange(x.numel()).view(x.shape) * 2.0**-14 for x in xs]
    plain, secret = [x.clone().requires_grad_() for x in xs], [shared(x, session) for x in xs]
    y, z = case.f(*plain), case.f(*secret)
    weights = torch.rand(y.shape) * 2 - 1
    (y * weights).sum().backward()
    (z * weights).sum().backward()
    assert (y - z.reveal()).abs().max() <= case.places * LAST
    for p, s in zip(plain, secret, strict=True):
        assert p.grad is not None and s.grad is not None
        assert (p.grad - s.grad.reveal()).abs().max() <= case.places * LAST


@pytest.mark.parametrize("training", [True, False])
@settings(max_examples=3)
@given(seed=st.integers(0, 1 << 20))
def test_gradients_of_batch_norm(training: bool, seed: int):
    """The inverse deviation, up to 2 here, and the normalised input, up to 6, err by 30 places: see docs/ops.md."""
    session = Session(reference=True)
    torch.manual_seed(seed)
    xs = [torch.randn(6, 3, 4, 4) + 1, torch.rand(3) + 0.5, torch.randn(3)]
    plain, secret = [x.clone().requires_grad_() for x in xs], [shared(x, session) for x in xs]
    means, variances = torch.zeros(3), torch.ones(3)
    running = [DifferentiableTensor(sectorch.share(v, session=session)) for v in (means, variances)]
    y = F.batch_norm(plain[0], means, variances, plain[1], plain[2], training)
    z = F.batch_norm(secret[0], *running, secret[1], secret[2], training)
    weights = torch.rand(y.shape) * 2 - 1
    (y * weights).sum().backward()
    (z * weights).sum().backward()
    assert (y - z.reveal()).abs().max() <= 100 * LAST
    for p, s, terms in zip(plain, secret, (1, 96, 96), strict=True):
        assert p.grad is not None and s.grad is not None
        assert (p.grad - s.grad.reveal()).abs().max() <= (60 + 6 * terms) * LAST
    for p, s in zip((means, variances), running, strict=True):
        assert (p - s.reveal()).abs().max() <= 10 * LAST


def test_secret_labels_give_the_loss_of_public_ones():
    session = Session(reference=True)
    x = torch.rand(4, 5)
    labels = sectorch.share(LABELS, session=session, owner="A")
    found = []
    for target in (LABELS, labels):
        logits = shared(x, session)
        loss = F.cross_entropy(logits, target)
        loss.backward()
        assert logits.grad is not None
        found.append((loss.reveal(), logits.grad.reveal()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("bits", [16, 20])
def test_small_gradients_are_not_lost(bits: int):
    """A thousandth of a mean over a thousand: 2^-20 where a number has 16 fraction bits."""
    session, scheme = Session(reference=True), Scheme(frac_bits=bits)
    x = DifferentiableTensor(sectorch.share(torch.ones(1024), session=session, scheme=scheme), requires_grad=True)
    (x.mean() * 2.0**-10).backward()
    assert x.grad is not None
    optimiser = torch.optim.SGD([x], 1.0)
    for _ in range(3):
        optimiser.step()
    moved = (x.detach() - 1) * 2.0**10
    assert (moved.reveal() + 3 * 2.0**-10).abs().max() <= 2.0**-12


@pytest.mark.parametrize(
    "f", [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu], ids=["gelu", "gelu by tanh", "silu"]
)
def test_an_activation_and_its_slope_come_from_one_opening(f: Callable):
    """Of 20,000 elements, which are computed in two pieces; twice, and after the forward pass of another step."""
    values, found = torch.linspace(-9, 9, 20_000), []
    for session in (Session(), Session(reference=True)):
        x = DifferentiableTensor(sectorch.share(values, session=session), requires_grad=True)
        with Transcript() as sent, session.call():
            y = f(x)
            y.backward(torch.ones(values.shape), retain_graph=True)
        opened = [value.numel() for line, value in sent.lines if (line.path, line.label) == ("trigonometric", "c_A")]
        assert session.reference or sum(opened) == values.numel()
        y.backward(torch.ones(values.shape))
        found.append((y.reveal(), x.grad.reveal()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    plain = values.double().requires_grad_()
    f(plain).sum().backward()
    assert torch.allclose(found[0][1].double(), 2 * plain.grad, atol=1e-4)
