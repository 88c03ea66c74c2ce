"""Steps as programs: the bits of steps taken operator by operator, few programs, and no number of an earlier step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import long, some
from torch import nn

import sectorch
from sectorch import DifferentiableTensor, Session
from sectorch.choreography.ledger import Transcript
from sectorch.errors import ArgumentError, DimensionError, RangeExceededError, SecretAccessError, SectorchError
from sectorch.training import programs as stepping

OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.reveal() if isinstance(v, DifferentiableTensor) else v for k, v in model.state_dict().items()}


def trained(session: Session, name: str, steps: int, recorded: bool = True) -> tuple[dict, list]:
    """A model's state and losses after steps with labels, masks of dropout and learning rates of their own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
    model = sectorch.shared(model, session=session)
    chosen, losses = OPTIMISERS[name](model.parameters()), []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 400)
    for _ in range(steps):
        x, y = torch.rand(5, 4), torch.randint(0, 3, (5,))
        with sectorch.step(session) if recorded else session.call():
            chosen.zero_grad()
            loss = F.cross_entropy(model(sectorch.share(x, session=session, limit=2.0)), y)
            loss.backward()
            if name == "sgd":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            chosen.step()
        schedule.step()
        losses.append(loss.reveal())
    return state(model), losses


def same(found: tuple[dict, list], wanted: tuple[dict, list]) -> bool:
    pairs = [*zip(found[1], wanted[1], strict=True), *((v, wanted[0][k]) for k, v in found[0].items())]
    return all(torch.equal(a, b) for a, b in pairs)


# AdamW is Adam and a decay of its own, and does more than SGD, whose steps `test_training_steps.py` has as well.
CASES = some(OPTIMISERS, ["adamw"])


@pytest.mark.parametrize("name", CASES)
def test_a_step_from_its_program_is_bit_for_bit_the_one_taken_operator_by_operator(name: str):
    session = Session()
    found = trained(session, name, 5)
    assert sectorch.step(session).programs == 3 and None not in stepping.PROGRAMS[session].traced_steps.values()
    wanted = trained(Session(reference=True), name, 5, recorded=False)
    assert same(found, wanted)
    assert same(trained(Session(reference=True), name, 5), wanted)


@pytest.mark.parametrize("steps", [10, *long(50)])
@pytest.mark.parametrize("name", CASES)
def test_many_steps_are_three_programs(name: str, steps: int, monkeypatch: pytest.MonkeyPatch):
    keys, run = set(), stepping._run

    def noted(recording: Any) -> None:
        keys.add(stepping._key(recording, stepping._groups(recording)[0]))
        run(recording)

    monkeypatch.setattr(stepping, "_run", noted)
    trained(Session(reference=True), name, steps)
    assert len(keys) <= 3


@pytest.mark.parametrize("often", [False, True])
def test_a_collection_of_cycles_changes_no_program(often: bool, monkeypatch: pytest.MonkeyPatch):
    """What lies in a cycle is there at the end of its step in every process, whenever Python looks for cycles."""
    alive, run, session = [], stepping._run, Session(reference=True)

    def noted(recording: Any) -> None:
        alive.append(len(recording.live_cells))
        run(recording)

    monkeypatch.setattr(stepping, "_run", noted)
    p = DifferentiableTensor(sectorch.share(torch.rand(3), session=session), requires_grad=True)
    was = gc.get_threshold()
    gc.set_threshold(1 if often else 0)
    try:
        for _ in range(2):
            with sectorch.step(session):
                cycle: list[Any] = [p * 2]
                cycle.append(cycle)
                del cycle
                (p * 3).sum().backward()
    finally:
        gc.set_threshold(*was)
    assert alive == [2, 2] and gc.isenabled(), "the gradient, and what lies in the cycle"


def test_no_number_of_an_earlier_step_is_used():
    """Numbers of one form are inputs of a program, and any other is another program's."""
    plain, session = Session(reference=True), Session()
    losses = []
    for s in (plain, session):
        torch.manual_seed(0)
        p = DifferentiableTensor(sectorch.share(torch.rand(3), session=s), requires_grad=True)
        found = []
        for factor, more, rate in (
            (0.3, 0.0, 0.1), (0.3, 0.0, 0.1), (0.45, 0.0, 0.07), (0.3, 0.25, 0.07),
            (1.0, 0.5, 2.0**-4), (0.7, 0.5, 0.0), (-3.0, 1.5, 0.3),
        ):  # fmt: skip
            with sectorch.step(s):
                p.grad = None
                loss = (p * factor + more).sum() / (factor + 4)
                loss.backward()
                torch.optim.SGD([p], rate).step()
            found += [loss.reveal(), p.detach().reveal()]
        losses.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert sectorch.step(session).programs == 6, "0.45 and 0.07 are of the form of 0.3 and 0.1, and only they"


LOSSES = {
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "written": lambda x, y: ((y - x) ** 2 * (y + 1)).mean(),
    "masked": lambda x, y: (x * (y > 0.5).float()).abs().sum(),
    "smooth": F.smooth_l1_loss,
}
BESIDE = (
    lambda p, y: p / (y + 1), lambda p, y: torch.sub(y, p, alpha=0.3), lambda p, y: (p * 1.5).add_(y[:, :1]).mul_(y[0]),
    lambda p, y: p * (y * 5000), lambda p, y: F.mse_loss(p, y.double()), lambda p, y: (p[:0] - y[:0]).sum(),
    lambda p, y: F.binary_cross_entropy_with_logits(p, y, pos_weight=torch.tensor([2.0, 3.0])),
)  # fmt: skip


@pytest.mark.parametrize("name", some(LOSSES, ["bce", "written"]))
def test_plain_targets_are_inputs_of_the_program_and_have_the_bits_of_shared_ones(name: str):
    """Targets, summands, weights and masks of floats that are others in each step."""

    def trained(session: Session, shared: bool = False, recorded: bool = True) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = sectorch.shared(nn.Linear(4, 1), session=session)
        optimiser, found = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), []
        for _ in range(6):
            x, y = sectorch.share(torch.rand(5, 4), session=session), torch.rand(5, 1)
            with sectorch.step(session) if recorded else session.call():
                optimiser.zero_grad()
                loss = LOSSES[name](model(x), sectorch.share(y, session=session, limit=1.0) if shared else y)
                loss.backward()
                optimiser.step()
            found.append(loss.reveal())
        return [*found, *state(model).values()]

    session = Session()
    found, wanted = trained(session), trained(Session(reference=True), recorded=False)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert sectorch.step(session).programs <= 4 and None not in stepping.PROGRAMS[session].traced_steps.values()
    if name in ("mse", "bce", "smooth"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(found, trained(Session(reference=True), True, recorded=False), strict=True)
        )


@pytest.mark.parametrize("f", BESIDE, ids=range(len(BESIDE)))
def test_plain_tensors_beside_shared_ones_in_a_step(f: Any):
    """Divisors and what is large are parts of the program; all are as in the reference, and in PyTorch."""
    found, x, y = [], torch.rand(3, 2), torch.rand(3, 2)
    for session in (Session(), Session(reference=True)):
        p = DifferentiableTensor(sectorch.share(x, session=session), requires_grad=True)
        with sectorch.step(session):
            result = f(p, y)
            result.sum().backward()
        found.append((result.reveal(), p.grad.reveal()))
    plain = x.clone().requires_grad_()
    wanted = f(plain, y)
    wanted.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0][0].dtype == wanted.dtype
    assert torch.allclose(found[0][0], wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(found[0][1], plain.grad, rtol=1e-4, atol=1e-3)


def test_plain_targets_of_other_sizes_are_other_programs_and_what_is_no_number_is_refused():
    session = Session()
    p = DifferentiableTensor(sectorch.share(torch.ones(2), session=session), requires_grad=True)

    def attempt(y: torch.Tensor) -> float:
        with sectorch.step(session):
            loss = F.mse_loss(p, y)
        return float(loss.reveal())

    for y, programs in ((0.5, 1), (-1.0, 1), (3.0, 2), (256.0, 2), (300.0, 3), (2000.0, 3)):
        assert attempt(torch.full((2,), y)) == pytest.approx((y - 1) ** 2, rel=1e-4)
        assert sectorch.step(session).programs == programs
    for wrong in (float("nan"), 1e9):
        with pytest.raises(SectorchError):
            attempt(torch.full((2,), wrong))
    assert attempt(torch.full((2,), 0.5)) == 0.25 and p.detach().reveal().tolist() == [1, 1]


def test_what_python_counts_goes_on_and_what_is_asked_inside_is_computed():
    session = Session()
    p = DifferentiableTensor(sectorch.share(torch.ones(2), session=session), requires_grad=True)
    seen = []

    @sectorch.step(session)
    def step(x: torch.Tensor) -> Any:
        p.grad = None
        loss = F.mse_loss(p, x)
        seen.append(loss.reveal())
        loss.backward()
        with torch.no_grad():
            p.sub_(p.grad)
        return loss

    for k in range(3):
        assert torch.equal(step(sectorch.share(torch.full((2,), 3.0), session=session)).reveal(), seen[-1])
        assert len(seen) == k + 1
    assert seen[0] == 4.0 and torch.equal(p.detach().reveal(), torch.full((2,), 3.0))


def test_what_fails_leaves_everything_as_it_was():
    session = Session()
    model = sectorch.shared(nn.Linear(2, 2), session=session)
    before = state(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    x = sectorch.share(torch.ones(1, 2), session=session)

    def attempt(labels: torch.Tensor, fails: bool = False) -> Any:
        with sectorch.step(session):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimiser.step()
            if fails:
                raise KeyError
        return loss

    for labels, fails, error in (
        (torch.tensor([2]), False, DimensionError), (torch.tensor([1]), True, KeyError),
    ):  # fmt: skip
        with pytest.raises(error):
            attempt(labels, fails)
        assert all(torch.equal(v, before[k]) for k, v in state(model).items())
        if not fails:
            assert model.weight.grad is None  # labels are checked before there is anything of the step
            continue
        with pytest.raises(ArgumentError, match="the step that this tensor was to come from failed"):
            model.weight.grad.reveal()
    with pytest.raises(SecretAccessError), sectorch.step(session):
        bool(model.weight.sum() > 0)
    with Transcript() as sent:
        attempt(torch.tensor([1]))
    assert sent.lines and not any(line.shows for line, _ in sent.lines)
    assert not torch.equal(state(model)["weight"], before["weight"])
    assert sectorch.step(session).programs == 1


def test_what_leaves_the_range_withholds_what_depends_on_it():
    session = Session()
    p, other = (DifferentiableTensor(sectorch.share(torch.ones(3), session=session), requires_grad=True) for _ in "12")
    for rate, left in ((1.0, False), (2.0, True), (1.0, True)):
        with sectorch.step(session):
            p.grad = other.grad = None
            loss = (p * 30).sum() + other.sum()
            (p * 30).sum().backward()
            torch.optim.SGD([p], rate).step()
            large = (other * 1000).sum()
            torch.exp(large)
        if left:
            with pytest.raises(RangeExceededError, match="left the range"):
                p.detach().reveal()
        else:
            assert p.detach().reveal().tolist() == [-29.0] * 3 and loss.reveal() == 93
    assert other.detach().reveal().tolist() == [1, 1, 1]
    assert sectorch.step(session).programs == 3
