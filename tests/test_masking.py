"""Deferred corrections of products: the same results however they are made, and halves, once read, that are uniform."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from helpers import ring_values, run, session, weight_like, world_of
from hypothesis import given
from hypothesis import strategies as st

import sectorch
from sectorch import Scheme
from sectorch.choreography.ledger import Profile
from sectorch.choreography.located import run_in
from sectorch.mpc.star.compare import drelu
from sectorch.mpc.star.dealing_proofs import DealingProofs
from sectorch.mpc.star.linear import linear
from sectorch.mpc.star.masking import DeferredShares, open_masked
from sectorch.mpc.star.multiply import multiply, square
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.select import select
from sectorch.mpc.star.shares import Shares, each, reveal
from sectorch.mpc.star.truncate import truncate
from sectorch.ring import rounded_shift
from sectorch.ring.products import Linear, matmul
from sectorch.testing.outcomes import not_uniform

OMEGA = weight_like((4, 6), 3)


def product(world, x) -> Shares:
    return linear(world.net, world.setup, lambda x, w, *_: matmul(x, w), x, world.weight(OMEGA))


def of(x: torch.Tensor) -> torch.Tensor:
    return x @ OMEGA


STEPS = {
    "a public number": lambda y, x, p, _: y + p,
    "a public number less": lambda y, x, p, _: y - p,
    "from a public number": lambda y, x, p, _: p - y,
    "shares": lambda y, x, p, _: (
        y + x.sum(-1, keepdim=True).expand(y.shape) if torch.is_tensor(x) else y + _spread(x, y)
    ),
    "the other way": lambda y, x, p, _: p + y,
    "what is owed too": lambda y, x, p, more: y + more,
    "less what is owed too": lambda y, x, p, more: y - more,
    "times a number": lambda y, x, p, _: y * 3,
    "shifted": lambda y, x, p, _: y << 2,
    "negative": lambda y, x, p, _: -y,
    "turned": lambda y, x, p, _: _each(lambda v: v.flip(-1), y),
    "a row": lambda y, x, p, _: y[:1] + y,
    "less a row": lambda y, x, p, _: y - y[:1],
    "from a row": lambda y, x, p, _: y[:1] - y,
    "a row from shares": lambda y, x, p, _: (
        _spread(x, y) - y[:1] if isinstance(y, Shares) else x.sum(-1, keepdim=True) - y[:1]
    ),
    "a row and a public number": lambda y, x, p, _: y[:1] + p,
}


def _each(f, y):
    return each(f, y) if isinstance(y, Shares) else f(y)


def _spread(x: Shares, y: Shares) -> Shares:
    return each(lambda v: v.sum(-1, keepdim=True).expand(y.shape), x)


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.integers(0, 1 << 30), st.booleans())
def test_sums_and_moves_of_what_is_owed(names: list[str], seed: int, opened: bool):
    """Exact mod 2^64, read at once, or opened under a mask before it is read."""
    x, public = ring_values((3, 4), 63, seed), ring_values((3, 6), 63, seed + 1)

    def program(world, x):
        y, more = product(world, x), product(world, x)
        assert type(y) is type(more) is DeferredShares
        for name in names:
            y = STEPS[name](y, x, public, more)
        if opened:  # and the halves of a mask in which D took its part
            masked = open_masked(world.net, y)
            y = Shares(masked.c - masked.r_A, -masked.r_S)
        return y

    expected = more = of(x)
    for name in names:
        expected = STEPS[name](expected, x, public, more)
    assert torch.equal(run(program, x), expected)


@given(st.integers(0, 1 << 30))
def test_products_of_secret_values_owe_too(seed: int):
    x, y = ring_values((5, 4), 63, seed), ring_values((5, 4), 63, seed + 1)

    def program(world, x, y):
        net = world.net
        first, second = multiply(net, torch.mul, x, y), square(net, x)
        assert type(first) is type(second) is DeferredShares
        return multiply(net, torch.mul, first, second - y)  # halves of both masks are asked for

    assert torch.equal(run(program, x, y), x * y * (x * x - y))


@given(st.integers(0, 1 << 30))
def test_one_product_is_rounded_compared_chosen_and_read(seed: int):
    x, y = ring_values((2, 70), 30, seed), ring_values((2, 70), 30, seed + 1)

    def program(world, x, y):
        net, xy = world.net, multiply(world.net, torch.mul, x, y)
        masked = open_masked(net, xy)
        chosen = select(net, drelu(net, masked), masked)
        return truncate(net, xy, 20), relu(net, xy, 20), chosen, xy

    xy = x * y
    expected = rounded_shift(xy, 20), rounded_shift(xy, 20).clamp(min=0), xy.clamp(min=0), xy
    assert all(map(torch.equal, run(program, x, y), expected))


def messages(program, *inputs) -> list:
    with Profile() as profile:
        run(program, *inputs)
    return [(m.path, m.label) for m in profile.ledger]


def test_nothing_is_dealt_of_what_is_rounded():
    x = ring_values((3, 4), 20, 1)
    rounded = messages(lambda world, x: truncate(world.net, product(world, x), 20), x)
    both = messages(lambda world, x: (lambda y: (truncate(world.net, y, 20), y))(product(world, x)), x)
    assert not [path for path, label in rounded if label == "c_S" and path.endswith("linear")]
    dealt = [sum(path.endswith("deal") for path, _ in found) for found in (rounded, both)]
    assert dealt[1] == dealt[0] + 1


@pytest.mark.parametrize("by", ["reveal", "halves"])
def test_halves_say_nothing_even_of_a_mask_that_is_zero(by: str):
    """Of what is not dealt yet Q could work out omega b: here b is zero and so are x and both numbers."""
    here = session()
    inner, seen = here.runtime.draw, []

    def draw(pair, label, call, number, count):
        words = inner(pair, label, call, number, count)
        return words.zero_() if label == "linear/b" or label.startswith("share/") else words

    def program(world, x):
        y = product(world, x)
        assert not world.net.read(y.half_S, world.net.S).any()
        assert not world.net.read(y.half_A, world.net.A).any()
        if by == "reveal":
            found = reveal(world.net, y)
            seen.append(world.net.read(y.S, world.net.S))
            return found
        seen.append(world.net.read(y.A, world.net.A))
        return y

    with mock.patch.object(here.runtime, "draw", draw):
        assert not run(program, torch.zeros(4096, 4, dtype=torch.int64), session=here).any()
    assert not not_uniform(seen[0].numpy())


def test_a_dealer_that_proves_owes_nothing():
    """An unproved part would be an unproved mask."""
    x = ring_values((3, 4), 63, 1)

    def program(world, x):
        world.net.state(DealingProofs).required = True
        y = linear(world.net, world.setup, Linear(), x, world.weight(weight_like((5, 4))))
        assert type(y) is Shares
        return y

    assert torch.equal(run(program, x, session=sectorch.Session()), x @ weight_like((5, 4)).T)


def test_its_repr_shows_a_shape_and_pays_nothing():
    def program(world, x):
        y = product(world, x)
        assert repr(y) == "DeferredShares((3, 6))" and y._complete is None
        return y

    run(program, ring_values((3, 4)))


@pytest.mark.parametrize("network", ["lan", "wan"])
def test_a_prediction_has_the_bits_of_the_reference(network: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(75, 6), torch.nn.Softmax(-1)
    ).eval()
    x = torch.randn(2, 2, 7, 7)
    assert torch.equal(sectorch.secure(model, Scheme(network=network))(x), sectorch.reference(model)(x))


def test_threads_that_ask_for_one_value_have_it_dealt_once():
    """A half of one dealing and the other half of another would be another number, and nobody would notice."""
    held = session()
    x, y = ring_values((64, 4), 63, 1), ring_values((64, 4), 63, 2)
    with held.call(held.answering[0]) as net, ThreadPoolExecutor(8) as threads:
        world = world_of(held, net, {})
        for i in range(20):
            with run_in(net):
                product = multiply(net, torch.mul, world.query(x), world.query(y + i))
                masked = open_masked(net, multiply(net, torch.mul, world.query(x), world.query(y - i)))
            ways = (lambda: (product.A, product.S), lambda: (masked.r_A, masked.r_S)) * 8
            halves = list(threads.map(lambda way: way(), ways))
            read = [net.read(a, net.A) + net.read(s, net.S) for a, s in halves]
            assert all(torch.equal(v, x * (y + i)) for v in read[::2])
            assert all(torch.equal(net.read(masked.c, net.A) - v, x * (y - i)) for v in read[1::2])


def test_what_is_asked_for_in_a_later_call_is_dealt_there():
    """The places of a call that is over are not drawn from again."""
    held = sectorch.Session()
    for _ in range(3):
        (sectorch.share(torch.tensor([2, 3]), session=held) ** 2).reveal()
    assert not [call for key in held.runtime.keys._keys.values() for call in key._latest]


def test_a_larger_view_is_dealt_as_the_whole():
    def program(world, x):
        wide = each(lambda v: v.expand(9, 3, 6), product(world, x))
        assert wide.A.shape == (9, 3, 6)
        return wide

    x = ring_values((3, 4), 63, 1)
    with Profile() as profile:
        assert torch.equal(run(program, x), of(x).expand(9, 3, 6))
    assert [line.shape for line in profile.ledger if line.label == "v_S"] == [(3, 6)]


def test_to_look_at_a_mask_sends_nothing():
    def program(world, x):
        masked = open_masked(world.net, product(world, x))
        with Profile() as profile:
            assert repr(masked) == "Masked((3, 6))" and masked == masked and hash(masked)
        assert not profile.ledger
        return Shares(masked.c - masked.r_A, -masked.r_S)

    run(program, ring_values((3, 4)))
