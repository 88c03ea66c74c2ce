"""The border between handlers and protocols: each method of a backend, by the protocols and as the plain function.

`test_ops.py` holds every row of the op table to the plain backend, bit for bit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import LONG
from helpers import ring_values, weight_like
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch.backend import SERIES_BITS, Backend, Normal, RaisedFlags
from sectorch.choreography import Phase
from sectorch.config import Scheme
from sectorch.errors import DimensionError
from sectorch.mpc.plain import Plain
from sectorch.mpc.series import draw_error
from sectorch.mpc.star import backend as star
from sectorch.mpc.star import maximum
from sectorch.mpc.star.backend import Star
from sectorch.mpc.star.bins import BinChoices, BinSums, indicators
from sectorch.ops.series import SIGMOID
from sectorch.ring.products import Conv2d, Linear, matmul
from sectorch.session import Session

METHODS = {name for name, f in vars(Backend).items() if inspect.isfunction(f) and not name.startswith("_")}
SHAPES = [(), (0,), (1,), (65,), (3, 43)]
SCHEMES = [Scheme(), Scheme(network="wan")]


@functools.cache
def session(reference: bool) -> Session:
    return Session(reference=reference)


@pytest.mark.parametrize("kind", [Star, Plain])
def test_a_backend_has_all_methods_and_no_others(kind: type):
    own = {name for name, f in vars(kind).items() if callable(f) and not name.startswith("_")}
    assert own == METHODS
    for name in METHODS:
        wanted, found = (inspect.signature(getattr(c, name)).parameters.values() for c in (Backend, kind))
        assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in wanted], name


@dataclass(frozen=True)
class Case:
    """A method on operands of so many bits: f(backend, *values) gives a value, or several."""

    method: str
    f: Callable
    bits: tuple[int, ...] = (61,)

    def __str__(self) -> str:
        return self.method


def revealed(reference: bool, scheme: Scheme, case: Case, inputs: list[torch.Tensor], whole: bool) -> list:
    """What Q learns, and whether it is told that it is right."""
    at = session(reference)
    with at.call(at.answering[0]) as net:
        backend = at.backend(net, scheme)
        found = case.f(backend, *(backend.share(net.own(net.Q, x), whole) for x in inputs))
        found = [found.mantissa, found.bits] if isinstance(found, Normal) else found
        learned = []
        for value in found if isinstance(found, (list, tuple)) else [found]:
            opened, right = backend.reveal(value, tuple(net.state(RaisedFlags)))
            learned.append((net.read(opened, net.Q), right is None or bool(net.read(right, net.Q))))
        return learned


def private(backend: Any, shape: tuple[int, ...]) -> Any:
    """The answering party's numbers."""
    net = backend.net
    return net.setup.own(net.A, weight_like(shape), Phase.SETUP)


def by_weight(product: Callable, shape: Callable[[torch.Size], tuple[int, ...]]) -> Callable:
    return lambda b, x: b.linear(product, x, b.weight(private(b, shape(x.shape))))


def by_streamed(b: Backend, x: Any) -> Any:
    weight = b.viewed(b.streamed(private(b, (*x.shape, 2)), tripled), lambda w: w[..., 1])
    return b.linear(lambda v, w, _: v * w, x, weight)


def tripled(w: torch.Tensor) -> torch.Tensor:
    return 3 * w


def by_view(b: Backend, x: Any) -> Any:
    weight = b.viewed(b.weight(private(b, (*x.shape, 2))), lambda w: w[..., 1])
    return b.linear(lambda v, w, _: v * w, x, weight)


def from_own_halves(b: Any, x: Any) -> Any:
    """The value again, of the two halves that its holders have."""
    return b.from_halves(*map(b.net.own, (b.net.A, b.net.S), b.halves(x)))


def flagged(b: Backend, x: Any) -> Any:
    b.flag(b.at_least(x, (1 << 60,))[0])
    return x


def flagged_outside(b: Backend, x: Any) -> Any:
    b.flag_outside(x, 59)
    return x


def joined(b: Backend, x: Any) -> Any:
    """Of two checks, the flags joined twice; they stand for those that were raised."""
    flagged_outside(b, x)
    flagged(b, x)
    b.net.state(RaisedFlags)[:] = [b.join_flags((b.join_flags(tuple(b.net.state(RaisedFlags))),))]
    return x


def owned(b: Backend, party: Any) -> Any:
    return b.owned(b.net.own(party, torch.tensor(12345)), party)


def by_bins(owner: str | None, b: Backend, x: Any) -> Any:
    """Sums and choices by bins of a party, or by a matrix in shares."""
    x = b.each(lambda v: v.reshape(1, -1), x)
    codes = torch.arange(10, dtype=torch.uint8).view(5, 2) % 4
    if owner is None:
        matrix = b.embedded(indicators(codes, 4)) + b.embedded(ring_values((5, 6), 63))
    else:
        party = getattr(b.net, owner)
        matrix = b.bin_matrix(b.net.own(party, codes), party, 4)
    rows = b.each(lambda v: v.expand(5, -1), x)
    table = b.each(lambda v: v.T.expand(-1, 6), x)
    return [b.by_bins(BinSums(4), rows, matrix), b.by_bins(BinChoices(4), table, matrix)]


def image(v: torch.Tensor) -> torch.Tensor:
    return torch.cat((v.reshape(-1), v.new_zeros(2))).view(1, 1, 1, -1)


def stacked(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values)


def halved(v: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return v * number, v + v


def beside(v: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat((v.reshape(-1), torch.full((2,), number)))


def upright(v: torch.Tensor) -> torch.Tensor:
    return v.reshape(-1, 1)


def end_to_end(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat([v.reshape(-1) for v in values])


def summed(v: torch.Tensor) -> torch.Tensor:
    """What no order changes."""
    return v.sum(0)


CASES = [
    Case("share", lambda b, x: x, (63,)),
    Case("reveal", flagged, (61,)),
    Case("owner_summand", lambda b, x: x + b.owner_summand(private(b, tuple(x.shape))), (63,)),
    Case("embedded", lambda b, x: x - b.embedded(b.owner_summand(private(b, tuple(x.shape)))), (63,)),
    Case("embedded", lambda b, x: b.embedded(torch.arange(7)) << 3),
    Case("each", lambda b, x, y: b.each(stacked, x, -y), (63, 63)),
    Case("moved", lambda b, x: b.moved(halved, x, 5), (63,)),
    Case("shuffled", lambda b, x: b.each(summed, b.shuffled(b.each(upright, x))), (63,)),
    Case("affine", lambda b, x: b.affine(beside, x, -(1 << 62)), (63,)),
    Case("linear", by_weight(lambda v, w, _: v * w, tuple), (63,)),
    Case("linear", lambda b, x: by_weight(Linear(), lambda s: (130, s[1]))(b, b.each(lambda v: v.reshape(1, -1), x))),
    Case("linear", lambda b, x: by_weight(Conv2d((1, 1), (1, 1)), lambda s: (3, 1, 3, 3))(b, b.each(image, x))),
    *(Case("by_bins", partial(by_bins, owner), (63,)) for owner in ("A", "S", "Q", None)),
    Case("viewed", by_view, (63,)),
    Case("streamed", by_streamed, (63,)),
    Case("multiply", lambda b, x, y: b.multiply(torch.mul, x, y), (63, 63)),
    Case(
        "multiply",
        lambda b, x: b.multiply(matmul, b.each(lambda v: v.reshape(1, -1), x), b.each(lambda v: v.reshape(-1, 1), x)),
    ),
    Case("square", lambda b, x: b.square(x), (63,)),
    *(
        Case(
            "square_sum",
            lambda b, x, c=c: b.each(end_to_end, *b.square_sum(b.each(upright, x), (0,), c, 5 << 60, (1, 64))),
        )
        for c in (True, False)
    ),
    *(Case("truncate", lambda b, x, s=s: b.truncate(x, s)) for s in (1, 20, 32)),
    Case("truncate", lambda b, x: b.truncate(x, 20, 39)),
    Case("truncate_and_multiply", lambda b, x, y: b.truncate_and_multiply(x, 32, y), (61, 63)),
    Case("at_least", lambda b, x: b.at_least(x), (63,)),
    Case("at_least", lambda b, x: b.at_least(x, (-5, 0, 1 << 40))),
    Case("is_zero", lambda b, x: b.is_zero(x), (63,)),
    Case("where_positive", lambda b, x, y: b.where_positive(x, (x, y)), (63, 63)),
    Case("where_between", lambda b, x, y: b.where_between(x, -5, 1 << 40, y), (61, 63)),
    Case("where_between", lambda b, x, y: b.where_between(x, -(1 << 40), None, y, 50)[0], (48, 63)),
    Case("where_between", lambda b, x, y: b.where_between(x, 7, None, y, squared=True)[0], (61, 63)),
    *(Case("ramps", lambda b, x, s=s: b.ramps(x, (0, -7, 1 << 20), s)) for s in (0, 20)),
    *(Case("ramps", lambda b, x, s=s: b.ramps(x, (3,), s, limit_bits=30)) for s in (0, 20)),
    Case("ramps", lambda b, x: b.ramps(x, (0,), 20, 45), (44,)),
    *(Case("relu_and_rest", lambda b, x, s=s: b.relu_and_rest(x, s, 63, 39)) for s in (0, 20)),
    Case("leaky_relu", lambda b, x: b.leaky_relu(x, 20, 51), (50,)),
    Case("leaky_relu", lambda b, x: b.leaky_relu(x, 20, 58), (58,)),
    Case("leaky_largest", lambda b, x, y: b.leaky_largest(b.each(stacked, x, y, -x), 51), (49, 49)),
    Case("maximum", lambda b, x, y: b.maximum(x, y), (61, 61)),
    Case("largest", lambda b, x, y: b.largest(b.each(stacked, x, y, -x)), (61, 61)),
    *(
        Case(
            "ramp_of_largest",
            lambda b, x, y, k=k: b.ramp_of_largest(b.each(stacked, *(x, y, -x, y)[:k]), 20, 62, 63, 39),
            (60, 61),
        )
        for k in (1, 2, 4)
    ),
    Case("ramp_of_largest", lambda b, x: b.ramp_of_largest(b.each(stacked, *[x] * 5), 20), (61,)),
    *(Case("normalise", lambda b, x, k=k: b.normalise(x, *k)) for k in ((0, 62), (5, 40))),
    Case("normalise", lambda b, x: b.normalise(x, 3, 40, planes=41), (40,)),
    Case("flag", flagged),
    Case("join_flags", joined),
    Case("owned", lambda b, x: x + owned(b, b.net.A) - owned(b, b.net.S), (63,)),
    Case("reveal_to", lambda b, x: b.owned(b.reveal_to(x, b.net.A), b.net.A) + x, (61,)),
    Case("reveal_to", lambda b, x: b.owned(b.reveal_to(x, b.net.S), b.net.S) + x, (61,)),
    Case("flag_outside", flagged_outside, (63,)),
    Case("halves", from_own_halves),
]
"""By method; `weight` comes with `linear`, `bin_matrix` with `by_bins`; `series` and `aggregate` have tests of their
own below."""


COMPARED = {
    "truncate",
    "truncate_and_multiply",
    "at_least",
    "where_between",
    "ramps",
    "relu_and_rest",
    "maximum",
    "largest",
    "ramp_of_largest",
    "flag_outside",
}
OTHERS = {
    "weight", "bin_matrix", "series", "aggregate", "check_index", "own_code", "export_shares", "import_shares",
    "named_shares", "collect", "from_halves", "check_flags", "rounded_series", "series_and_later",
    "finish_series",
}  # fmt: skip
"""Methods with tests of their own: from the fourth on in test_indexing.py, test_generation.py and test_holders.py;
the last two by the slope of GELU in tests/training."""


def test_every_method_has_a_case():
    assert {case.method for case in CASES} | OTHERS == METHODS


WAYS = [
    pytest.param(
        case, scheme, id=f"{case}-{scheme.network}",
        marks=[] if scheme.network == "lan" or case.method in COMPARED else LONG,
    )
    for scheme in SCHEMES for case in CASES
]  # fmt: skip
"""Slow networks change comparisons; what else is computed there, long runs see."""


@pytest.mark.parametrize(("case", "scheme"), WAYS)
@settings(max_examples=4)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1 << 20))
def test_protocols_compute_the_plain_function(case: Case, scheme: Scheme, shape, seed: int):
    agree(case, scheme, shape, seed)


def agree(case: Case, scheme: Scheme, shape: tuple[int, ...], seed: int) -> None:
    """The same numbers bit for bit, and the same word on whether they are right."""
    inputs = [ring_values(shape, bits, seed + i) for i, bits in enumerate(case.bits)]
    secure, plain = (revealed(reference, scheme, case, inputs, False) for reference in (False, True))
    assert len(secure) == len(plain)
    for (y, right), (wanted, known) in zip(secure, plain, strict=True):
        assert right == known and torch.equal(y, wanted)


@pytest.mark.parametrize("case", [case for case in CASES if case.method in COMPARED], ids=str)
@settings(max_examples=4)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1 << 20))
def test_large_tensors_are_compared_without_keys(case: Case, shape, seed: int):
    with patch.object(star, "KEYED", 0), patch.object(maximum, "WORTH", seed % 2 * maximum.WORTH):
        agree(case, Scheme(network="wan"), shape, seed)


def test_a_series_is_the_plain_one_to_what_the_dealer_draws():
    case = Case("series", lambda b, x: b.series(x, 20, SIGMOID))
    x = torch.randint(-14 << 20, 14 << 20, (500,))
    (secure, _), (plain, _) = (revealed(reference, Scheme(), case, [x], False)[0] for reference in (False, True))
    assert ((secure - plain).abs() <= draw_error(SIGMOID) * 2.0**SERIES_BITS).all()


@pytest.mark.parametrize("count", [500, 3 * star.PIECE + 5])
def test_a_series_of_what_is_compared_is_the_plain_one_inside_and_outside_of_its_interval(count: int):
    """One opening serves both, in one piece and in several."""

    def both(b, x):
        return b.rounded_series(x, 40, SIGMOID, 32, opened=True), b.where_between(x, -5, 5, x)[0]

    x = torch.randint(-(1 << 61), 1 << 61, (count,))
    secure, plain = (revealed(r, Scheme(), Case("series", both), [x], False) for r in (False, True))
    assert all(torch.equal(one[0], other[0]) for one, other in zip(secure, plain, strict=True))


@pytest.mark.parametrize("count", [1, 500, 40_000])
@pytest.mark.parametrize("network", ["lan", "wan"])
def test_a_rounded_series_is_the_plain_one_bit_for_bit(count: int, network: str):
    """By keys, wide blocks and trees, with a factor in the same round and in one of its own."""

    def both(b, x, y):
        return b.rounded_series(x, 40, SIGMOID, 32), b.rounded_series(x, 40, SIGMOID, 30, y)

    x, y = torch.randint(-(5 << 40), 5 << 40, (count,)), torch.randint(-(1 << 40), 1 << 40, (count,))
    secure, plain = (revealed(r, Scheme(network=network), Case("", both), [x, y], False) for r in (False, True))
    assert all(torch.equal(one[0], other[0]) for one, other in zip(secure, plain, strict=True))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_sums_of_several_parties(reference: bool, guarded: bool):
    at, x = Session(3, reference=reference), ring_values((65,), 59)
    for bad in (False, True) if guarded else (False,):
        terms = []
        for party in at.answering:
            net = at._net(party, Phase.OFFLINE)
            backend = at.backend(net, Scheme())
            with at._running(net):
                value = backend.share(net.own(net.Q, x), False)
                if bad:
                    backend.flag_outside(value, 3)
                terms.append((backend, value, tuple(net.state(RaisedFlags))))
        for noise in (None, lambda shape: torch.arange(shape.numel()).view(shape)):
            with at._running(terms[0][0].net) as net:
                total, right = terms[0][0].aggregate(terms, guarded, noise)
                expected = 3 * x + (0 if noise is None else torch.arange(65))
                assert torch.equal(net.read(total, net.Q), 0 * x if bad else expected)
                assert right is None or bool(net.read(right, net.Q)) is not bad


@pytest.mark.parametrize("reference", [False, True])
def test_an_index_of_qs_own_is_looked_at(reference: bool):
    at, x = session(reference), torch.tensor([0, 3, 1])
    with at.call(at.answering[0]) as net:
        backend = at.backend(net, Scheme())
        own, other = (backend.share(net.own(net.Q, x), whole) for whole in (True, False))
        assert backend.check_index(own, 4) and not backend.check_index(other, 4)
        assert backend.check_index(backend.moved(torch.flip, own, (0,)), 4)
        assert all(backend.check_index(part, 7) for part in backend.moved(halved, own, 1))
        assert not backend.check_index(own + 1, 5)
        with pytest.raises(DimensionError, match="index out of range: 1 of 3"):
            backend.check_index(own, 3)
