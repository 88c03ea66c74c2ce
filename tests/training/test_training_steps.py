"""Whole steps: torch's optimisers on shared models, by the protocols and by the reference, and what is said."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch import DifferentiableTensor, Scheme, Session
from sectorch.choreography.ledger import Transcript
from sectorch.errors import (
    ArgumentError,
    DimensionError,
    FixedPointRangeError,
    NonFiniteError,
    RangeExceededError,
    SecretAccessError,
    UnsupportedOpError,
)

OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


def net(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, 3),
    )  # fmt: skip


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.reveal() if isinstance(v, DifferentiableTensor) else v for k, v in model.state_dict().items()}


def trained(session: Session | None, optimiser, steps: int = 2, dropout: float = 0.5) -> tuple[dict, list]:
    """A model's state after some steps, and the losses; plain without a session."""
    torch.manual_seed(1)
    model = net(dropout)
    x, y = torch.rand(4, 1, 6, 6), torch.tensor([0, 2, 1, 1])
    model = model if session is None else sectorch.shared(model, session=session)
    chosen, losses = optimiser(model.parameters()), []
    for _ in range(steps):
        batch = x if session is None else sectorch.share(x, session=session, limit=4.0)
        chosen.zero_grad()
        loss = F.cross_entropy(model(batch), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        losses.append(loss.detach() if session is None else loss.reveal())
    return state(model), losses


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.sectorch_long] if n == "adam" else []) for n in OPTIMISERS]
)  # fmt: skip
def test_a_step_is_bit_for_bit_the_reference_step(name: str):
    secure, plain = (trained(Session(reference=reference), OPTIMISERS[name]) for reference in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(secure[1], plain[1], strict=True))
    assert all(torch.equal(value, plain[0][key]) for key, value in secure[0].items())


@pytest.mark.parametrize("name", OPTIMISERS)
def test_losses_are_those_of_plain_training(name: str):
    """A step's gradients err by some 2^-14, and three steps of 0.1 make little of that; masks would be others."""
    found, wanted = (trained(session, OPTIMISERS[name], 3, 0.0)[1] for session in (Session(reference=True), None))
    assert torch.allclose(torch.stack(found), torch.stack(wanted), atol=2e-3, rtol=0)


@pytest.mark.parametrize("f", [16, 20])
def test_a_step_of_adam_is_no_longer_than_plain_and_no_shorter_than_with_a_small_eps(f: int):
    """Of gradients from nothing to 4; each step beside what the gradients so far make of m and v, in units of the rate.

    A mean of squares gets a unit of 2^-(2f+6) a step, and errs by at most one more or less: a thousand times two
    units, 2^(5-2f), under the root. m is rounded to a unit of 2^-(f+6), which over a root of 2^(2-f) or more is at
    most 2^-9, and grows by the bias correction as m does. Public factors err by 2^-15, and series by less.
    """
    session, scheme, rate = Session(reference=True), Scheme(frac_bits=f), 0.003
    draws = torch.Generator().manual_seed(f)
    size = 2.0 ** (-f - 6 + (f + 8) * torch.rand(1000, generator=draws, dtype=torch.float64))
    size[:10] = 0.0
    p = DifferentiableTensor(sectorch.share(torch.zeros(1000), session=session, scheme=scheme), requires_grad=True)
    optimiser = torch.optim.Adam([p], rate)
    m = v = before = torch.zeros(1000, dtype=torch.float64)
    exact = lambda x: x.cell.content.shares.double() / 2.0**x.cell.content.scale_bits
    for t in range(1, 6):
        weight = 2 * size * torch.rand(1000, generator=draws, dtype=torch.float64) - size
        optimiser.zero_grad()
        ((p * (64 * weight).float()).sum() / 64).backward()
        optimiser.step()
        g, now = exact(p.grad), exact(p)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mean, squares = m.abs() / (1 - 0.9**t), v / (1 - 0.999**t)
        step, before = (before - now) * torch.where(m < 0, -1, 1) / rate, now
        slack = 2.0**-9 / (1 - 0.9**t) + 2.0**-11
        assert (step <= mean / squares.clamp(1e-30).sqrt() + slack).all()
        assert (step >= mean / (squares + 2.0 ** (5 - 2 * f)).sqrt() - slack).all()


def test_inputs_of_three_owners_meet_and_each_learns_what_is_named():
    session = Session()
    rows = {owner: torch.rand(2, 3) for owner in "QAS"}
    with Transcript() as sharing:
        parts = [sectorch.share(x, session=session, owner=owner) for owner, x in rows.items()]
    assert {(line.protocol, line.dst.role) for line, _ in sharing.lines} == {("share", "S")}, "A and S send nothing"
    x = torch.cat(parts)
    wanted = torch.cat(list(rows.values()))
    columns = torch.cat((parts[1], parts[2]), 1)
    assert torch.allclose(columns.reveal(), torch.cat((rows["A"], rows["S"]), 1), atol=1e-5)
    product = parts[1] @ parts[2].T
    assert torch.allclose(product.reveal(), rows["A"] @ rows["S"].T, atol=1e-4)
    for to, shown in (("Q", {"Q"}), ("A", {"A"}), (session.S, {"S"}), (("A", "S"), {"A", "S"}), ("QAS", None)):
        if shown is None:
            with pytest.raises(ArgumentError, match="is Q, A or S, got"):
                x.reveal(to=to)
            continue
        with Transcript() as seen:
            assert torch.allclose(x.reveal(to=to), wanted, atol=1e-5)
        learned = {line.dst.role for line, _ in seen.lines if line.shows and line.protocol != "guard"}
        assert learned == shown
    with pytest.raises(ArgumentError, match="is Q, A or S, got"):
        sectorch.share(wanted, session=session, owner="D")


def test_nothing_is_shown_while_a_model_is_trained():
    session = Session()
    with Transcript() as seen:
        model = sectorch.shared(nn.Linear(3, 2), session=session)
        F.mse_loss(model(sectorch.share(torch.rand(4, 3), session=session, owner="A")), torch.rand(4, 2)).backward()
        torch.optim.Adam(model.parameters()).step()
    assert seen.lines and not any(line.shows for line, _ in seen.lines)


def views(weight: torch.Tensor, x: torch.Tensor, labels: torch.Tensor, runs: int) -> dict[tuple, np.ndarray]:
    """The bits that A and S are sent in steps of training."""
    found = defaultdict(list)
    for _ in range(runs):
        session = Session()
        with Transcript() as seen:
            p = DifferentiableTensor(sectorch.share(weight, session=session), requires_grad=True)
            batch = sectorch.share(x, session=session)
            F.cross_entropy(F.relu(batch @ p), sectorch.share(labels, session=session)).backward()
            torch.optim.SGD([p], 0.1).step()
        for role in "AS":
            for line, value in seen.received(role):
                if value.dtype == torch.int64 and line.protocol != "seed":
                    found[role, line.path, line.label].append(value.numpy().reshape(-1))
    return {k: np.unpackbits(np.concatenate(v).view(np.uint8).reshape(-1, 8), axis=1) for k, v in found.items()}


def test_what_a_and_s_are_sent_in_a_step_is_uniform_whatever_is_trained():
    """Ones in each place of a word: beyond 7.13 standard deviations in one of 10^12 sound messages."""
    for weight, x in (
        (torch.zeros(16, 4), torch.zeros(32, 16)),
        (torch.full((16, 4), 3.0), torch.full((32, 16), -1.0)),
    ):
        for key, bits in views(weight, x, torch.zeros(32, dtype=torch.int64), 2).items():
            n = len(bits)
            assert (abs(2 * bits.sum(0, dtype=np.int64) - n) <= 7.13 * n**0.5 + 1).all() or n < 64, key


def test_what_leaves_the_range_withholds_what_depends_on_it():
    session = Session(reference=True)
    p = DifferentiableTensor(sectorch.share(torch.ones(3), session=session), requires_grad=True)
    other = DifferentiableTensor(sectorch.share(torch.ones(3), session=session), requires_grad=True)
    (p * 30).sum().backward()
    assert p.grad is not None
    torch.optim.SGD([p], 1.0).step()
    assert torch.allclose(p.detach().reveal(), torch.full((3,), -29.0))
    torch.optim.SGD([p], 2.0).step()
    with pytest.raises(RangeExceededError, match="left the range"):
        p.detach().reveal()
    with pytest.raises(RangeExceededError):
        p.detach().reveal(to="A")
    assert other.detach().reveal().tolist() == [1, 1, 1]
    large = nn.Linear(2, 2)
    nn.init.constant_(large.weight, 100)
    with pytest.raises(FixedPointRangeError, match="has to be below 64"):
        sectorch.shared(large, session=session)


def test_what_cannot_be_done_is_refused_and_changes_nothing():
    session = Session(reference=True)
    x = DifferentiableTensor(sectorch.share(torch.rand(4, 4), session=session), requires_grad=True)
    before = x.detach().reveal()
    with pytest.raises(UnsupportedOpError, match=r"torch.linalg_qr.*test_training_steps.py:\d+"):
        torch.linalg.qr(x)
    for taken in (
        lambda: float(x.sum()), lambda: x.detach().numpy(), lambda: x.tolist(), lambda: bool(x.sum() > 0),
        lambda: x.sum().item(), lambda: torch.save(x, io.BytesIO()),
    ):  # fmt: skip
        with pytest.raises(SecretAccessError):
            taken()
    assert "0." not in repr(x)
    with pytest.raises(ArgumentError, match="its gradient would be known to all"):
        _ = x @ nn.Linear(4, 4).weight
    with pytest.raises(DimensionError, match="labels are from 0 to 3"):
        F.cross_entropy(x, torch.tensor([0, 1, 2, 4]))
    withheld: Any = F.cross_entropy(x, sectorch.share(torch.tensor([0, 1, 2, 4]), session=session, owner="A"))
    with pytest.raises(RangeExceededError):
        withheld.reveal()
    with pytest.raises(NonFiniteError, match="NaN"):
        sectorch.share(torch.tensor([0.0, float("nan")]), session=session, owner="S")
    with torch.no_grad():
        view = x.t()
        with pytest.raises(UnsupportedOpError, match="a view"):
            view.add_(1)
        x.add_(1)
        with pytest.raises(UnsupportedOpError, match="take the view again"):
            _ = view + 1
        x.sub_(1)
    assert torch.equal(x.detach().reveal(), before)
    with pytest.raises(ArgumentError, match="in shares already"):
        module = nn.Linear(2, 2)
        sectorch.shared(sectorch.shared(module, session=session), session=session)


@pytest.mark.sectorch_long
@pytest.mark.parametrize(("model", "optimiser", "bits"), [("mlp", "adam", 20), ("cnn", "sgd", 20), ("cnn", "adam", 16)])
def test_digits_are_learned_as_well_as_in_plain_training(model: str, optimiser: str, bits: int):
    """Within half a point on average over five seeds, with the same batches: benchmarks/training.py."""
    import runpy
    from pathlib import Path

    program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/training.py"))
    given = program["options"](["--model", model, "--optimiser", optimiser, "--frac-bits", str(bits), "--epochs", "4"])
    found = torch.tensor([program["trained"](seed, given)[:2] for seed in range(5)])
    assert abs(float((found[:, 1] - found[:, 0]).mean())) <= 0.5


class Asks(nn.Module):
    """Code that takes another branch for what is not torch's own tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        if type(x) is not torch.Tensor or type(self.layer.weight) is not nn.Parameter:
            return x * 0
        return torch.distributions.Normal(self.layer(x), 1.0).log_prob(torch.vmap(torch.neg)(x))


def test_the_type_of_a_tensor_is_torchs_inside_a_shared_model():
    torch.manual_seed(0)
    session, x = Session(reference=True), torch.rand(4, 3)
    plain, trained = Asks(), Asks()
    trained.load_state_dict(plain.state_dict())
    sectorch.shared(trained, session=session)
    plain(x).sum().backward()
    found = trained(sectorch.share(x, session=session))
    found.sum().backward()
    assert torch.allclose(found.reveal(), plain(x), atol=1e-4) and type(found) is DifferentiableTensor
    assert torch.allclose(trained.layer.weight.grad.reveal(), plain.layer.weight.grad, atol=1e-4)
    with pytest.raises(sectorch.errors.SectorchError):
        trained(sectorch.share(torch.rand(4, 5), session=session))
    assert type(found) is DifferentiableTensor, "a call that failed leaves nothing behind"
