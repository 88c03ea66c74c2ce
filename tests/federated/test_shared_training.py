"""Retraining on shares: the plain training on the same labels, what each role receives, and what the model tells."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from example_counts import fewer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch.errors import RangeExceededError
from sectorch.federated.outcome import Received
from sectorch.federated.shared_training import kept_halves, retrain_on_shares
from sectorch.federated.training import Training, train

SGD = Training("sgd", 0.1, 4, 2, (1,), momentum=0.5)


def network(seed: int, normalised: bool = False, features: int = 6) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(features, 5), *([nn.BatchNorm1d(5)] if normalised else []), nn.ReLU(), nn.Linear(5, 3)]
        return nn.Sequential(*layers).eval()


def data(seed: int, own: int, asked: int, features: int = 6) -> tuple[torch.Tensor, ...]:
    """A party's images and labels, its queries, and soft labels that nobody is to see."""
    draw = torch.Generator().manual_seed(seed)
    images, x = torch.rand(own, features, generator=draw), torch.rand(asked, features, generator=draw)
    labels, soft = torch.randint(3, (own,), generator=draw), torch.randn(asked, 3, generator=draw).softmax(1)
    return images, labels, x, soft


def halves(soft: torch.Tensor, reference: bool = False) -> dict[str, torch.Tensor]:
    """Of labels that Q and S hold, as the protocols' sessions leave them."""
    session = sectorch.Session(reference=reference)
    held = sectorch.collect([sectorch.share(soft, session=session, owner="A")])
    return kept_halves(held, "asker")


def retrained(
    model: nn.Module, given: tuple[torch.Tensor, ...], how: Training = SGD, *, reference: bool = False
) -> nn.Module:
    images, labels, x, soft = given
    made = halves(soft, reference)
    whole = not soft.is_floating_point()
    found = retrain_on_shares(
        sectorch.Session(reference=reference), "asker", model, images, labels, x, [made], 3, how, 7, 20, whole
    )
    assert found is not None
    return found


def plainly(model: nn.Module, given: tuple[torch.Tensor, ...], how: Training = SGD) -> nn.Module:
    images, labels, x, soft = given
    model = copy.deepcopy(model)
    train(model, torch.cat((images, x)), torch.cat((F.one_hot(labels, 3), soft)).double(), how, 7)
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@fewer(6)
@given(st.integers(2, 7), st.integers(2, 7), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_the_model_is_that_of_plain_training_on_the_same_labels(own, asked, normalised, whole, seed):
    """A factor of a product is rounded to 2^-20, as is a label, and a gradient sums fewer than 2^6 of them; a rate of
    0.1 and momentum over seven steps make that 2^-14 at most. Batch normalisation divides by a deviation of 2^-3."""
    images, labels, x, soft = data(seed, own, asked)
    soft = F.one_hot(soft.argmax(1), 3) if whole else soft
    given_ = images, labels, x, soft
    model = network(seed, normalised)
    before = copy.deepcopy(model)
    how = SGD.but(batch_size=own + asked) if normalised else SGD
    found, plain = retrained(model, given_, how, reference=True), plainly(model, given_, how)
    assert apart(found, plain) < 2.0 ** (-11 if normalised else -14) < apart(plain, before)
    assert apart(model, before) == 0 and not found.training
    other = images, labels, x, soft.flip(1)
    assert apart(retrained(model, other, how, reference=True), found) > 2.0**-11, "labels are in the model"


def test_on_shares_as_in_the_reference_and_who_receives_what():
    """A and S see uniform bits, and Q the model. A half alone is uniform: it is not the label."""
    given_ = data(0, 4, 5)
    model = network(0)
    with Received() as received:
        found = retrained(model, given_)
    assert apart(found, retrained(model, given_, reference=True)) == 0
    rows = received.rows()
    shown = {(row["role"], row["protocol"]) for row in rows if row["shows"] and row["protocol"] != "seed"}
    assert shown == {("Q", "reveal"), ("Q", "guard")} and {row["role"] for row in rows} == {"Q", "A", "S"}
    one, other = halves(given_[-1]), halves(given_[-1])
    for name in ("asker", "S"):
        assert not torch.equal(one[name], other[name]) and float((one[name].abs() > 2**40).float().mean()) > 0.9
    opened = (one["asker"] + one["S"]).double() / 2**20
    assert float((opened - given_[-1]).abs().max()) < 2.0**-20


def test_the_revealed_model_may_tell_all_labels():
    """What is not promised: of one step on no more queries than features, the labels are the solution of a linear
    system whose other numbers Q has."""
    images, labels, x, soft = data(3, 2, 5, features=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 3)).eval()
    lr, rows = 0.5, torch.cat((images, x)).double()
    found = retrained(model, (images, labels, x, soft), Training("sgd", lr, len(rows), 1))
    moved = (model[0].weight - found[0].weight).detach().double() * len(rows) / lr  # the sum of (p - y) x
    p = model(rows.float()).softmax(1).double().detach()
    rest = p.T @ rows - moved - F.one_hot(labels, 3).double().T @ images.double()
    solved = torch.linalg.lstsq(x.double().T, rest.T).solution
    assert float((solved - soft).abs().max()) < 1e-3


def test_a_training_that_leaves_the_range_shows_nothing_of_the_model():
    given_ = data(1, 4, 4)
    with pytest.raises(RangeExceededError):
        retrained(network(1), given_, Training("sgd", 1e4, 4, 3), reference=True)
