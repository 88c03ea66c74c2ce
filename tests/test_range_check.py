"""A value that leaves its range is an error at Q and no result; a value within a quarter of the limit never is."""

from __future__ import annotations

import contextlib
import functools
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from example_counts import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch import Scheme, errors
from sectorch.choreography.ledger import Transcript
from sectorch.config import limit_bits_of
from sectorch.mpc.star.guard import inner_product, linear_hash

BEYOND = (errors.RangeExceededError, errors.FixedPointRangeError)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + x)


class Powers(nn.Module):
    def forward(self, x):
        return x * x - 0.5 * x


def layers(width: int) -> list:
    return [
        lambda: nn.Linear(width, width), nn.ReLU, lambda: nn.LeakyReLU(0.1), nn.GELU, nn.Hardtanh, nn.ReLU6,
        lambda: Residual(width), nn.Sigmoid, nn.Softplus, Powers, nn.ELU, lambda: nn.BatchNorm1d(width),
    ]  # fmt: skip


@st.composite
def scaled_models(draw):
    """A model of random layers with random scales, and an input with one."""
    width, choices = draw(st.integers(2, 6)), draw(st.lists(st.integers(0, 11), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    parts = []
    for choice in choices:
        layer = layers(width)[choice]()
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 2.0 ** draw(st.floats(-2, 9))
        parts += [nn.Linear(width, width), layer]
        parts[-2].weight.data *= 2.0 ** draw(st.floats(-2, 9))
    x = torch.randn(3, width) * 2.0 ** draw(st.floats(-4, 13))
    return nn.Sequential(*parts).eval().requires_grad_(False), x


def largest(model: nn.Module, x: torch.Tensor) -> float:
    """The largest magnitude of any value between the layers, and inside of the composite ones."""
    found = [float(x.abs().max())]

    def note(_module, inputs, output):
        found.extend(float(v.abs().max()) for v in (*inputs, output))

    hooks = [m.register_forward_hook(note) for m in model.modules()]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


def weights_fit(model: nn.Module, scheme: sectorch.Scheme) -> bool:
    sums = [p.abs().flatten(1).sum(1).max() if p.dim() > 1 else torch.zeros(()) for p in model.parameters()]
    biases = [p.abs().max() for p in model.parameters() if p.dim() == 1]
    return max(map(float, sums)) <= scheme.gain and max(map(float, biases)) < scheme.activation_limit / 4


def check(model: nn.Module, x: torch.Tensor) -> str:
    """Right or an error; no error within a quarter of the limit. Which of them it was."""
    plain = model.double()
    wanted, reached = plain(x.double()), largest(plain, x.double())
    model.float()
    secure = sectorch.secure(model, Scheme(range_check=True), session=sectorch.Session())
    limit = secure.scheme.activation_limit
    squares = any(isinstance(m, Powers) for m in model)
    # Two factors of a product that is computed have a limit of their own: together they stay below 2^(62 - 2f).
    allowed = min(limit, 2.0 ** (31 - secure.scheme.frac_bits)) if squares else limit
    try:
        got = secure(x)
    except BEYOND:
        assert reached >= allowed / 4 or not weights_fit(model, secure.scheme)
        return "refused"
    # Each layer adds some units of 2^-20 times the weights that follow it.
    error = (got.double() - wanted).abs().max()
    gains = [max(1.0, float(p.abs().flatten(1).sum(1).max())) for p in model.parameters() if p.dim() > 1]
    assert error <= 2.0**-16 * max(1.0, reached) * math.prod(gains), (float(error), reached)
    return "right"


@fewer(20)
@given(scaled_models())
def test_a_model_that_breaks_says_so(drawn):
    check(*drawn)


@pytest.mark.sectorch_long
def test_three_hundred_models_scaled_until_they_break():
    seen = {"right": 0, "refused": 0}

    @settings(max_examples=300, deadline=None, database=None)
    @given(scaled_models())
    def run(drawn):
        seen[check(*drawn)] += 1

    run()
    assert min(seen.values()) >= 20, seen  # about 60 are refused, and how many, the draws decide


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("place", [-2, -1, 0, 1])
def test_the_limit_is_sharp_where_it_is_checked(network: str, place: int):
    """A ReLU's result is below the limit, or there is none; in the reference likewise."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.fill_(2.0), model[2].weight.fill_(0.5)
    x = torch.tensor([[2048.0 + place * 2.0**-10], [1.0]])
    secure = sectorch.secure(model, Scheme(network=network, range_check=True), session=sectorch.Session())
    for module in (secure, sectorch.reference(model, secure.scheme)):
        if place < 0:
            assert torch.equal(module(x), x.detach())
        else:
            with pytest.raises(errors.RangeExceededError, match="left the range"):
                module(x)


def test_no_result_stands_in_what_q_receives():
    """With a flag set Q gets the same number of words, and none of them is the result or the key to it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    session = sectorch.Session()
    secure = sectorch.secure(model, Scheme(range_check=True), session=session)
    shapes = []
    for x in (torch.ones(4, 2), torch.full((4, 2), 50.0)):
        with Transcript() as transcript:
            with contextlib.suppress(errors.RangeExceededError):
                secure(x)
        to_Q = [(line, value) for line, value in transcript.lines if line.dst == session.Q]
        shapes.append([(line.path, line.label, value.shape) for line, value in to_Q])
    assert shapes[0] == shapes[1]
    assert any(path.startswith("guard") for path, _, _ in shapes[0])


def test_a_withheld_result_is_uniform_to_q():
    """The words that come for one withheld result again and again: each bit is set half of the time."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.fill_(2.0), model[2].weight.fill_(0.5)
    session = sectorch.Session()
    secure, x = sectorch.secure(model, Scheme(range_check=True), session=session), torch.tensor([[4000.0]])
    keys = []
    for _ in range(400):
        with Transcript() as transcript, pytest.raises(errors.RangeExceededError):
            secure(x)
        keys += [value for line, value in transcript.lines if line.label == "key"]
    bits = torch.stack([(torch.stack(keys) >> i) & 1 for i in range(64)]).double().mean(1)
    # 128 means of 400 coins: five standard deviations.
    assert (bits - 0.5).abs().max() < 5 * 0.5 / 20


def test_a_flag_goes_with_what_depends_on_it():
    session = sectorch.Session()
    x = sectorch.share(torch.tensor([3000.0, 1.0]), session=session, scheme=sectorch.Scheme(range_check=True))
    bad, good = x * x, x * 2.0
    assert good.reveal().tolist() == [6000.0, 2.0]
    for y in (bad, bad.sum(), bad[1], bad + good, torch.cat([good, bad]), bad > 0, good * (bad > 0)):
        with pytest.raises(errors.RangeExceededError):
            y.reveal()
    with pytest.raises(errors.RangeExceededError):
        sectorch.aggregate([bad])
    good += bad
    with pytest.raises(errors.RangeExceededError):
        good.reveal()


magnitudes = st.floats(-20, 12).map(lambda e: 2.0**e * (1 - 2.0**-20))


@given(magnitudes, magnitudes, st.booleans(), st.booleans(), st.sampled_from(["lan", "wan"]))
def test_a_product_is_right_or_withheld(a: float, b: float, negative: bool, averaged: bool, network: str):
    """An error only from half of what the ring holds on: 2^21 with 2 f = 40 fraction bits, 2^15 with six more."""
    x, y = (torch.tensor([v, 0.5], dtype=torch.float64) for v in (a, -b if negative else b))
    x, y = ((v * 2**20).round() / 2**20 for v in (x, y))
    session = sectorch.Session()
    shared = [sectorch.share(v, session=session, scheme=sectorch.Scheme(network=network)) for v in (x, y)]
    if averaged:  # an average of 64 has six fraction bits more
        shared[0] = shared[0].unsqueeze(0).expand(64, 2).mean(0)
    try:
        got = (shared[0] * shared[1]).reveal()
    except errors.RangeExceededError:
        assert (x * y).abs().max() >= 2.0 ** (15 if averaged else 21) * 0.99
        return
    assert torch.allclose(got, x * y, rtol=1e-12, atol=2.0**-20), (got, x * y)


@fewer(15)
@given(st.integers(1, 300), st.floats(-4, 12), st.floats(-4, 12), st.integers(0, 99))
def test_a_product_of_matrices_is_right_or_withheld(n: int, p: float, q: float, seed: int):
    """Factors of n terms: an error only from 2^(31 - f) / sqrt(n) on, less a factor of two for whole powers."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (
        ((torch.rand(s, generator=draw, dtype=torch.float64) * 2 - 1) * 2.0**e * 2**20).round() / 2**20
        for s, e in (((2, n), p), ((n, 2), q))
    )
    session = sectorch.Session()
    try:
        got = (sectorch.share(x, session=session) @ sectorch.share(y, session=session)).reveal()
    except errors.RangeExceededError:
        assert max(x.abs().max(), y.abs().max()) >= 2.0**10 / math.sqrt(n)
        return
    assert torch.allclose(got, x @ y, rtol=1e-12, atol=2.0**-20)


@fewer(15)
@given(st.integers(2, 800), st.floats(-4, 8.5), st.integers(0, 99))
def test_sums_before_a_division_may_be_beyond_the_limit(n: int, size: float, seed: int):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**size
    x = (x * 2**20).round() / 2**20
    wanted, mean = x / torch.sqrt((x * x).mean() + 1e-6), (x * x).sum() / n
    session = sectorch.Session()
    shared = sectorch.share(x, session=session)
    try:
        got = ((shared * shared).sum() / n).reveal()
    except errors.RangeExceededError:
        assert x.abs().max() >= 700 or (x * x).sum() > 2.0**20
    else:
        assert abs(got - mean) < 2.0**-17 + 1e-6 * mean
    if x.abs().max() < 1000:
        got = (shared / torch.sqrt((shared * shared).mean() + 1e-6)).reveal()
        assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("value", [200.0, 1000.0, 4000.0])
def test_averages_carry_fraction_bits_into_a_layer_whose_weights_sum_to_much(value: float):
    """Six bits more would take the range away: 1000 came out as -92."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2, bias=False)).eval()
    with torch.no_grad():
        model[2].weight.fill_(60.0)
    x = torch.full((1, 4, 8, 8), value)
    assert torch.equal(sectorch.secure(model, session=sectorch.Session())(x), model(x).detach())


@pytest.mark.parametrize("n", [2, 3, 7, 64])
@pytest.mark.parametrize("value", [300.0, 600.0, 1400.0])
@pytest.mark.parametrize("checked", [True, False])
def test_means_of_large_squares(n: int, value: float, checked: bool):
    """The mean of three squares of 600 came out as -164288."""
    x = torch.full((n,), value, dtype=torch.float64)
    shared = sectorch.share(x, scheme=sectorch.Scheme(range_check=checked))
    for y in ((shared * shared).mean(), (shared * shared).sum() / n):
        assert abs(y.reveal() - value**2) < 2.0**-20


@pytest.mark.parametrize("large", [True, False])
def test_a_sum_over_parties_is_right_or_withheld(large: bool):
    """Each is in the ring, and eight together need not be."""
    session = sectorch.Session(answering=8)
    values = [4000.0 * 2.0**29 if large else 4000.0 * 2.0**20 + i for i in range(8)]
    terms = [
        sectorch.share(torch.tensor([v / 2.0**29], dtype=torch.float64), session=session, party=party)
        * 2.0**20
        * 2.0**9
        for v, party in zip(values, session.answering, strict=True)
    ]
    if large:
        with pytest.raises(errors.RangeExceededError):
            sectorch.aggregate(terms)
    else:
        assert abs(sectorch.aggregate(terms).item() - sum(values)) <= 8 * 2.0**8


def test_a_sum_of_checked_and_unchecked_terms_is_withheld():
    """Whoever stands first: the flags of one term are not lost."""
    session = sectorch.Session(answering=2)
    one, other = session.answering
    free = sectorch.share(torch.ones(1), session=session, party=one, scheme=sectorch.Scheme(range_check=False))
    bad = sectorch.share(torch.full((1,), 3000.0), session=session, party=other)
    for terms in ([free, bad * bad], [bad * bad, free]):
        with pytest.raises(errors.RangeExceededError):
            sectorch.aggregate(terms)


def test_other_pieces_are_run_all_the_same():
    """One piece without a result: the others' messages are the same, and the whole call has none."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(10.0)
    secure = sectorch.secure(model, Scheme(range_check=True), session=sectorch.Session(), chunk=1)
    rows = torch.tensor([[1.0], [2000.0], [3.0]])
    with sectorch.profile() as fine:
        secure(rows.clamp(max=5))
    secure(rows[:1])
    with sectorch.profile() as broken, pytest.raises(errors.RangeExceededError):
        secure(rows)
    assert broken.online_bytes == fine.online_bytes
    assert torch.allclose(secure(rows[2:]), torch.tensor([[30.0]]))


def test_without_the_check_nothing_is_said():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(10.0)
    secure = sectorch.secure(model, Scheme(range_check=False), session=sectorch.Session())
    assert torch.allclose(secure(torch.tensor([[2000.0]])), torch.tensor([[20000.0]]))


def test_the_owner_refuses_weights_whose_sums_could_leave_the_ring():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[2].weight.fill_(200.0)
    with pytest.raises(errors.FixedPointRangeError, match=r"'2\.weight'.*sum to magnitude 800.*frac_bits=19, lim"):
        sectorch.secure(model, Scheme(limit_bits=12), session=sectorch.Session())(torch.ones(1, 4))
    secure = sectorch.secure(model, Scheme(limit_bits=11), session=sectorch.Session())
    x = torch.ones(1, 4)
    assert torch.allclose(secure(x), model(x), atol=1e-2)


@pytest.mark.parametrize("bits", [0, -3, 22, 30, 3.0, "8", float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(bits):
    with pytest.raises(errors.ArgumentError):
        Scheme(limit_bits=bits)


@pytest.mark.parametrize("limit", [0, 1, 3, -8, "8", float("inf"), float("nan")])
def test_a_limit_is_a_power_of_two(limit):
    with pytest.raises(errors.ArgumentError):
        limit_bits_of(limit)


words = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(words, min_size=1, max_size=9), st.lists(words, min_size=1, max_size=9), st.data())
def test_the_hash_is_linear_and_zero_only_of_zero(a: list[int], b: list[int], data):
    n = min(len(a), len(b))
    a, b = torch.tensor(a[:n]), torch.tensor(b[:n])
    keys = torch.tensor(data.draw(st.lists(words, min_size=n + 1, max_size=n + 1)))
    assert torch.equal(linear_hash(a ^ b, keys), linear_hash(a, keys) ^ linear_hash(b, keys))
    assert linear_hash(torch.zeros_like(a), keys).tolist() == [0, 0]


def test_the_field_is_a_field():
    """Against whole numbers of Python: carry-less products, and the remainder of x^64 + x^4 + x^3 + x + 1."""

    def product(x: int, y: int) -> int:
        wide = 0
        for bit in range(64):
            wide ^= (x << bit) * ((y >> bit) & 1)
        for bit in range(127, 63, -1):
            if wide >> bit & 1:
                wide ^= ((1 << 64) | 0b11011) << (bit - 64)
        return wide

    torch.manual_seed(3)
    x, y = torch.randint(-(2**63), 2**63 - 1, (2, 50))
    unsigned = lambda v: [i % 2**64 for i in v.tolist()]
    wanted = [product(a, b) for a, b in zip(unsigned(x), unsigned(y), strict=True)]
    assert [unsigned(inner_product(a, b))[0] for a, b in zip(x.split(1), y.split(1), strict=True)] == wanted
    for n in (0, 1, 2, 7, 50):
        assert unsigned(inner_product(x[:n], y[:n])) == [functools.reduce(operator.xor, wanted[:n], 0)]
    x, y = torch.randint(-(2**63), 2**63 - 1, (2, 10_000))
    halves = [inner_product(x[at : at + 5000], y[at : at + 5000]) for at in (0, 5000)]
    assert torch.equal(inner_product(x, y), halves[0] ^ halves[1])
    # The polynomial is irreducible: x^(2^64) = x, and x^(2^32) is not.
    power = torch.tensor([2])
    for step in range(64):
        if step == 32:
            assert power.item() != 2
        power = inner_product(power, power)
    assert power.item() == 2
