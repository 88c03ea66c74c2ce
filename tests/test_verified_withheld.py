"""Verified dealing: results are withheld whatever Q and owners have shared, and whatever Q says it has seen.

A Q that cheats does not heed `RangeExceededError`: here what raises it at Q is taken out, and the other parties are as
they are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch import Session
from sectorch.choreography import leaf
from sectorch.config import Scheme
from sectorch.errors import RangeExceededError
from sectorch.nn import module
from sectorch.nn.inputs import Inputs
from sectorch.tensor import SharedTensor, shared
from sectorch.tensor.shared import Opening

VERIFIED = Scheme(verified=True)
FAR = 1 << 62


@pytest.fixture
def lying(monkeypatch) -> Callable[[int | None], None]:
    """lying(element): whoever shares something has this ring element in its last place, until lying(None)."""
    encoded, element = shared.encoded_input.kernel, []

    def encode(value: torch.Tensor, *how) -> torch.Tensor:
        words = encoded(value, *how)
        words.view(-1)[-1:] = torch.tensor(element or words.view(-1)[-1:].tolist())
        return words

    def set_to(word: int | None) -> None:
        element[:] = [] if word is None else [word]

    monkeypatch.setattr(shared, "encoded_input", leaf(encode, shapes=lambda value, *_: value.long()))
    return set_to


def heedless(monkeypatch) -> None:
    """Q goes on after what it should have ended at."""

    def plain(outputs):
        return pytree.tree_map(
            lambda y: y.plain if isinstance(y, Opening) else y, outputs, is_leaf=lambda y: isinstance(y, Opening)
        )

    monkeypatch.setattr(SharedTensor, "check_range", lambda self: None)
    monkeypatch.setattr(module, "unwrap_openings", plain)


OWNERS = ["H1", "H2"]


@pytest.mark.parametrize("to", [None, ["Q", "A"], ["A", "Q", "S"], ["H1"], ["H2", "Q"], ["H1", "A"]])
@pytest.mark.parametrize("owner", [None, "H1"])
def test_whoever_holds_no_shares_learns_nothing_of_what_was_out_of_range(owner, to, lying, monkeypatch):
    """Q looks first where A or S learn something; its word that it has done so is not what withholds a result."""
    session = Session(owners=OWNERS)
    x = sectorch.share(torch.ones(3), session=session, scheme=VERIFIED, owner=owner)
    assert torch.equal((x + 1).reveal(to=to), torch.full((3,), 2.0))
    lying(FAR)
    beyond = sectorch.share(torch.ones(3), session=session, scheme=VERIFIED, owner=owner)
    with pytest.raises(RangeExceededError):
        (beyond + x).reveal(to=to)
    heedless(monkeypatch)
    with pytest.raises(RangeExceededError):
        (beyond + x).reveal(to=to)


@pytest.mark.parametrize("element", [1 << 42, -(1 << 42) - 1, (1 << 63) - 1, -(1 << 63), (1 << 63) - (1 << 42)])
def test_an_owner_is_held_to_the_range_as_q_is(element, lying):
    session = Session(owners=OWNERS)
    lying(element)
    x = sectorch.share(torch.ones(3), session=session, scheme=VERIFIED, owner="H2")
    with pytest.raises(RangeExceededError):
        (x * 0.5).reveal()
    for trusted in ("A", "S"):  # who follow the protocol
        assert not sectorch.share(torch.ones(3), session=session, scheme=VERIFIED, owner=trusted).flags


RANGES = {
    torch.bool: (0, 1), torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-(1 << 15), (1 << 15) - 1),
    torch.uint16: (0, (1 << 16) - 1), torch.int32: (-(1 << 22), (1 << 22) - 1), torch.uint32: (0, (1 << 22) - 1),
    torch.int64: (-(1 << 22), (1 << 22) - 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", RANGES)
def test_whole_numbers_are_held_to_those_of_their_type(dtype, lying):
    """And all to 2^22 with 20 fraction bits: another one is a question that nobody can ask of the model."""
    session, (low, high) = Session(), RANGES[dtype]

    def answered(element: int) -> bool:
        lying(element)
        x = sectorch.share(torch.zeros(3, dtype=dtype), session=session, scheme=VERIFIED)
        try:
            return bool(x.float().reveal()[-1] == element)
        except RangeExceededError:
            return False

    assert all(map(answered, (low, high)))
    assert not any(map(answered, (low - 1, high + 1, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 63) - high)))


class Both(nn.Module):
    """What Q learns at once, and what it may learn later, in which no check of its own finds the last element."""

    def __init__(self):
        super().__init__()
        self.first, self.later = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.later(x[:, :2])


def test_what_stays_in_shares_is_withheld_later_though_q_went_on(lying, monkeypatch):
    model, x = Both().eval(), torch.zeros(2, 3)
    secure, plain = sectorch.secure(model, VERIFIED, session=Session()), sectorch.reference(model)(x)
    first, later = secure(Inputs(x).retaining_results(1))
    assert torch.equal(first, plain[0]) and torch.equal(later.reveal(), plain[1])
    lying(FAR)
    heedless(monkeypatch)
    first, later = secure(Inputs(x).retaining_results(1))
    assert not first.any(), "zeros in the place of a result"
    for y in (later, later.relu(), later[:1]):
        with pytest.raises(RangeExceededError):
            y.reveal()


def test_what_is_learned_of_what_was_shared_before_is_withheld_with_it(lying, monkeypatch):
    session, model, x = Session(), Both().eval(), torch.zeros(2, 3)
    secure, plain = sectorch.secure(model, VERIFIED, session=session), sectorch.reference(model)(x)
    within = sectorch.share(x, session=session, scheme=VERIFIED, limit=4096.0)
    first, later = secure(Inputs(within).retaining_results(1))
    assert torch.equal(first, plain[0]) and torch.equal(later.reveal(), plain[1])
    lying(FAR)
    beyond = sectorch.share(x, session=session, scheme=VERIFIED, limit=4096.0)
    heedless(monkeypatch)
    first, later = secure(Inputs(beyond).retaining_results(1))
    assert not first.any()
    with pytest.raises(RangeExceededError):
        later.reveal()


@pytest.mark.parametrize("count", [2, 256, 1 << 16])
def test_no_number_of_flags_is_none(count, monkeypatch):
    """They are summed in GF(2^64) by keys that Q lacks: an even number, or one that wraps, is no zero."""
    encoded = lambda value, *_: torch.full(value.shape, FAR)
    monkeypatch.setattr(shared, "encoded_input", leaf(encoded, shapes=lambda value, *_: value.long()))
    x = sectorch.share(torch.zeros(count), session=Session(), scheme=VERIFIED)
    with pytest.raises(RangeExceededError):
        x.reveal()
