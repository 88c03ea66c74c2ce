"""Public bounds hold: no value is larger than what its tensor claims, and none that leaves the ring comes as a result.

`watched` looks at the ring elements of every result, put together from both halves as no party could.
"""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch
import torch.nn.functional as F
from example_counts import fewer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch import errors
from sectorch.ring import HEADROOM_BITS
from sectorch.ring.bitplanes import words_for
from sectorch.tensor import SharedTensor, dispatch

BEYOND = (errors.RangeExceededError, errors.FixedPointRangeError)


def share(x, **scheme) -> SharedTensor:
    return sectorch.share(torch.as_tensor(x, dtype=torch.float64), scheme=sectorch.Scheme(**scheme))


def raised(x: SharedTensor) -> bool:
    """Whether a flag is set: as it stands, or once its last AND is made."""
    words = [flag.A._value ^ flag.S._value for flag in x.flags]
    return any(bool((w if w.dim() == 1 else w[0] & w[1] ^ w[2]).any()) for w in words)


def hold(x: SharedTensor, name: str) -> None:
    """No element is beyond the bound, and that not beyond the ring, unless a flag says so."""
    assert x.bound is not None and x.bound <= 2.0**HEADROOM_BITS, name
    if x.shares.shape.numel() and not raised(x):
        elements = x.shares.A._value + x.shares.S._value
        assert max(int(elements.max()), -int(elements.min())) <= x.bound, (name, x.bound, x.scale_bits)


@contextlib.contextmanager
def watched():
    """Every result that a user gets is looked at."""
    flagged = dispatch._with_flags

    def look(wrapped, given, flags):
        result = flagged(wrapped, given, flags)
        if dispatch.DEPTH.get() == 1:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, SharedTensor):
                    hold(leaf, str(given))
        return result

    dispatch._with_flags = look
    try:
        yield
    finally:
        dispatch._with_flags = flagged


def filled(function):
    def run(x: SharedTensor) -> SharedTensor:
        x = x.clone()
        function(x, inplace=True)
        return x * 4000.0

    return run


SUMS = torch.full((64,), 1900.0)
CALLS = {
    "einsum of one": lambda: torch.einsum("i->", share(SUMS) * share(SUMS)),
    "einsum of a trace": lambda: torch.einsum("ii", (share(SUMS) * share(SUMS)).view(8, 8)),
    "einsum that broadcasts": lambda: torch.einsum("ij,ij->", share([[500.0] * 64] * 2), share([[1000.0]] * 2)),
    "in place": lambda: torch.stack([filled(f)(share([4000.0]) * 1.0) * share([1.0]) for f in (F.elu, F.selu, F.celu)]),
    "clamp_max": lambda: (share([-8000.0]) * 2.0**20).clamp_max(5.0) * share([1.0]),
    "quotient": lambda: (share([4096.0]) * 2.0**20 * 2.0**8) / (share([2.0]) * share([1.5])),
    "sine": lambda: torch.sin(share([8000.0]) * 2.0**20),
    "kl_div": lambda: F.kl_div(share([-8000.0]), share([8000.0]), reduction="sum"),
    "kl_div of logarithms": lambda: F.kl_div(share([-8000.0]), share([10.0]), reduction="sum", log_target=True),
    "cross_entropy": lambda: F.cross_entropy(share([[8000.0, 1.0]]) * 2.0**17, torch.tensor([[0.3, 0.7]]).double()),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(share([0.1]), share([8000.0]) * 2.0**10),
    "local_response_norm": lambda: F.local_response_norm(share([[[8000.0]]]), 1, alpha=1e-12, k=1e-3),
    "an empty product": lambda: (share(torch.zeros(2, 0)) @ share(torch.zeros(0, 2)) + share(4000.0)) * share(4000.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_leaves_the_range_is_no_result(name: str):
    """Each of these gave a number that was wrong, and no error."""
    with watched(), pytest.raises(BEYOND):
        CALLS[name]().reveal()


@pytest.mark.parametrize("keys", [256, 512])
def test_weights_over_a_power_of_two_of_keys_are_products_like_others(keys: int):
    """What truncation adds to the weights' bound was left out, and took the product's just beyond the ring."""
    scores, values = torch.linspace(-3, 3, keys)[None].double(), torch.linspace(1, 5, keys)[:, None].double()
    with watched():
        found = (share(scores).softmax(-1) @ (share(values) * share(torch.ones_like(values)))).reveal()
    assert torch.allclose(found, scores.softmax(-1) @ values, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_an_even_kernel_with_padding_same_is_checked_like_others():
    model = nn.Conv2d(1, 1, 2, padding="same", bias=False).eval()
    with torch.no_grad():
        model.weight.fill_(2000.0)
    with pytest.raises(errors.FixedPointRangeError, match="sum to magnitude 8000"):
        sectorch.secure(model, sectorch.Scheme(limit_bits=12), session=sectorch.Session())(
            torch.full((1, 1, 2, 2), 4000.0)
        )


def test_two_masks_at_once_are_no_error():
    """Their sum was beyond what a mask may be."""
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 4, 8)
    last = torch.zeros(2, 4).masked_fill(torch.arange(4) == 3, -math.inf)
    causal = nn.Transformer.generate_square_subsequent_mask(4)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x):
            return self.attention(x, x, x, key_padding_mask=last, attn_mask=causal, need_weights=False)[0]

    wanted = Masked()(x)
    got = sectorch.secure(Masked().eval(), session=sectorch.Session())(x)
    assert torch.allclose(got, wanted, atol=1e-4)


def test_averages_of_products_are_no_error():
    x = torch.full((1, 1, 32, 32), 100.0)
    products = share(x) * share(x)
    assert abs(F.adaptive_avg_pool2d(products, 1).reveal() - 1e4) < 1e-4
    assert abs(F.avg_pool2d(products, 32, divisor_override=1).reveal() - 1e4 * 1024) < 1e-2


@pytest.mark.parametrize("frac_bits, limit_bits", [(26, None), (20, 3), (20, 21), (16, 29)])
def test_limits_of_any_size(frac_bits: int, limit_bits: int | None):
    """Functions that look at x - c for a c of theirs do not hold that to the limit."""
    x = torch.tensor([1.9, -1.9, 0.1], dtype=torch.float64)
    shared = share(x, frac_bits=frac_bits, limit_bits=limit_bits)
    assert torch.allclose((shared * shared).reveal(), x * x, atol=1e-3)
    for function in (F.silu, F.gelu, F.mish, F.elu, F.softplus, F.selu, lambda x: x.clamp_min(-7.0)):
        assert (function(shared).reveal() - function(x)).abs().max() < 1e-3, function


SHAPE = (4, 6)
COLUMNS = torch.tensor([0.003, 1.0, -50.0, 3000.0, 0.4, -1.7], dtype=torch.float64)
UNARY = [
    *(lambda x, c=c: x * c for c in (0.3, -1.7, 0.001, 100.1, 3, -7, 2.0**-7, 0.5, 16.0)),
    *(lambda x, c=c: x / c for c in (3, 0.4, 1000)),
    lambda x: x * COLUMNS, lambda x: x / COLUMNS, lambda x: 1000.3 - x, torch.relu, torch.abs, torch.square,
    lambda x: x.mean(0).expand(SHAPE), lambda x: x.sum(0).expand(SHAPE), lambda x: x.cumsum(1), torch.tanh, F.hardswish,
    lambda x: x.clamp_min(700.0), lambda x: x.clamp_max(-5.0), lambda x: x.clamp(-100.5, 900.25), lambda x: -x.t().t(),
    lambda x: F.pad(x, (1, 1), value=-3.0)[:, 1:7], lambda x: torch.einsum("ij->j", x).expand(SHAPE),
    lambda x: F.avg_pool2d(x.view(1, 1, *SHAPE), 3, 1, 1, divisor_override=1).view(SHAPE),
    lambda x: F.avg_pool2d(x.view(1, 1, *SHAPE), 3, 1, 1).view(SHAPE), lambda x: F.elu(x.clone(), inplace=True),
    lambda x: F.max_pool2d(x.view(1, 1, *SHAPE), 3, 1, 1).view(SHAPE), lambda x: F.leaky_relu(x, 0.1),
    lambda x: F.interpolate(x.view(1, 1, *SHAPE), scale_factor=1.5, mode="bicubic").view(6, 9)[1:5, 1:7],
]  # fmt: skip
BINARY = [
    lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, torch.maximum, lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.cat([x, y, x])[2:6], lambda x, y: torch.stack([x, y])[1], lambda x, y: (x > 0.1) * y,
    lambda x, y: torch.where(x > 0.1, x, y), lambda x, y: torch.where(torch.arange(6) > 2, x, y),
    lambda x, y: (x @ y.t()) @ torch.eye(4, 6, dtype=torch.float64), lambda x, y: F.l1_loss(x, y).expand(SHAPE),
    lambda x, y: x.clone().add_(y), lambda x, y: x.clone().mul_(y),
]  # fmt: skip


@fewer(25)
@given(st.integers(0, 2**31), st.sampled_from([10, 16, 20, 20, 20, 24, 26]), st.booleans())
def test_chains_of_operations_are_right_or_withheld(seed: int, frac_bits: int, averaged: bool):
    """A value that wraps around is off by 2^(62 - 2 f) and more."""
    draw, scheme = random.Random(seed), sectorch.Scheme(frac_bits=frac_bits)
    torch.manual_seed(seed)
    largest, pool = 1.0, []
    with watched(), contextlib.suppress(*BEYOND):
        for _ in range(3):
            x = (torch.rand(SHAPE, dtype=torch.float64) * 2 - 1) * 2 ** draw.uniform(-3, scheme.activation_bits - 0.01)
            x = (x * 2**frac_bits).round() / 2**frac_bits
            shared = sectorch.share(x, scheme=scheme)
            pool.append((shared.unsqueeze(0).expand(64, *SHAPE).mean(0) if averaged else shared, x))
        for _ in range(5):
            function, count = draw.choice([(f, 1) for f in UNARY] + [(f, 2) for f in BINARY])
            (x, y), (plain, other) = zip(*(draw.choice(pool) for _ in range(2)), strict=True)
            pool.append((function(x), function(plain)) if count == 1 else (function(x, y), function(plain, other)))
            largest = max(largest, float(pool[-1][1].abs().max()))
    for shared, x in pool:
        with contextlib.suppress(errors.RangeExceededError):
            error = float((shared.reveal().double() - x).abs().max())
            assert error <= max(2.0 ** (20 - frac_bits), 2.0 ** (-frac_bits + 4) * largest * 300), (error, largest)


@pytest.mark.parametrize("network", ["lan", "wan"])
def test_a_flag_that_waits_for_its_last_and_is_not_one_that_is_set(network: str):
    """Else `hold` looks at nothing."""
    x = share([100.0, -3.0], network=network)
    fine, large = F.relu(x * 2.5), F.relu(x * 3000.5)
    assert fine.flags and not raised(fine)
    assert raised(large)


@pytest.mark.parametrize("n", [2, 127, 129])
def test_many_keys_of_small_weight(n: int):
    """Each e^(x - max x) is below half a unit of its last bit and rounded to zero: `attention` states this error."""
    unit = 22 + 8 - math.ceil(math.log2(1.01 * n))  # 22 bits of e for 128 keys
    keys = torch.full((1, n, 1), -(unit + 1) * math.log(2) - 0.02)
    values = torch.full((1, n, 1), 4000.0)
    keys[0, 0], values[0, 0] = 0.0, 0.0
    query = torch.ones(1, 1, 1)
    wanted = F.scaled_dot_product_attention(query.double(), keys.double(), values.double(), scale=1.0)
    y = F.scaled_dot_product_attention(share(query), share(keys), share(values), scale=1.0)
    error = (y.reveal() - wanted).abs().max()
    assert error <= n * 2.0**-23 * 4000 + 1e-5


@pytest.mark.parametrize("n", [1, 2, 7, 15, 128])
@pytest.mark.parametrize(
    ("frac_bits", "limit_bits"), [(12, 32), (16, 26), (20, 12), (20, 15), (20, 16), (20, 19), (24, 8)]
)
def test_attention_of_values_at_the_limit(frac_bits: int, limit_bits: int, n: int):
    """Where the product with the inverse of the sum has no room, values are weighted after the quotient."""
    scheme = dict(frac_bits=frac_bits, limit_bits=limit_bits)
    value = torch.full((1, n, 1), 2.0**limit_bits * 0.98, dtype=torch.float64)
    query, keys = share(torch.ones(1, 1, 1), **scheme), share(torch.zeros(1, n, 1), **scheme)
    y = F.scaled_dot_product_attention(query, keys, share(value, **scheme), scale=1.0).reveal()
    assert (y - value[:, :1]).abs().max() <= (n / 2 + 16) * 2.0 ** (limit_bits - frac_bits)


@pytest.mark.parametrize("frac_bits, n", [(10, 2048), (10, 683), (16, 1618), (20, 1000)])
def test_attention_over_many_equal_keys(frac_bits: int, n: int):
    """At 10 bits each of 2048 weights was rounded from half a unit to one: twice the value, beyond its bound."""
    zeros, most = torch.zeros(1, n, 1), sectorch.Scheme(frac_bits=frac_bits).activation_limit - 1
    q, k = share(zeros[:, :1], frac_bits=frac_bits), share(zeros, frac_bits=frac_bits)
    value = torch.relu(share(torch.full((1, n, 1), most), frac_bits=frac_bits))
    with watched():
        y = F.scaled_dot_product_attention(q, k, value)
    assert abs(y.reveal().item() / most - 1) < n * 2.0 ** -(frac_bits + 7) + 2.0 ** (4 - frac_bits)
    if frac_bits == 10:  # came out as -9.2e12
        assert (y * 2.0**18 * torch.tensor([1.9], dtype=torch.float64)).reveal().item() > 0


@pytest.mark.parametrize("frac_bits", [7, 10, 13, 20])
def test_divisors_up_to_a_quarter_of_the_limit(frac_bits: int):
    """At 10 bits there was a range error from 2^14 on, with activations up to 2^23."""
    x = torch.tensor([1.0, -1.0, 0.5]) * sectorch.Scheme(frac_bits=frac_bits).activation_limit / 4.1
    shared, error = share(x, frac_bits=frac_bits), 1e-5 * 2.0 ** (20 - frac_bits)
    assert (F.softsign(shared).reveal() - F.softsign(x.double())).abs().max() < error
    assert ((shared / shared.flip(0)).reveal() - x / x.flip(0)).abs().max() < error


@fewer(8)
@given(st.integers(0, 40), st.booleans(), st.sampled_from(("lan", "wan")))
def test_comparisons_look_at_every_plane_that_a_bound_leaves(bits: int, odd: bool, network: str):
    """A comparison looks at as many planes as the bound has: right for values on both sides at the bound itself."""
    most = (1 << bits) + (odd and bits > 0)
    values = torch.tensor([most, -most, most - 1, 1 - most, 0, 1, -1, most // 2], dtype=torch.int64).clamp(-most, most)
    x = share(torch.zeros(len(values)), network=network)
    with x.session.operation(x.party):
        tight = x.like(x.shares + values, 0, float(most))
    rows, columns = tight.unsqueeze(1), tight.unsqueeze(0)
    first, second = torch.broadcast_tensors(values.unsqueeze(1), values.unsqueeze(0))
    for f in (torch.ge, torch.gt, torch.le, torch.lt, torch.maximum, torch.minimum):
        assert torch.equal(f(rows, columns).reveal().double(), f(first, second).double()), f
    for f in (torch.sign, torch.amax, torch.amin):
        assert torch.equal(f(tight).reveal().double(), f(values).double()), f
    if most < x.scheme.activation_limit:
        assert torch.equal(tight.relu().reveal().double(), values.relu().double())
    for padding in (0, 1):
        pool = torch.nn.MaxPool1d(2, 1, padding)
        wanted = pool(values.double().view(1, 1, -1))
        assert torch.equal(pool(tight.view(1, 1, -1)).reveal().double(), wanted)


@given(st.integers(1, 40))
def test_what_no_check_holds_is_compared_in_all_planes(bits: int):
    """Without range checks a bound is a promise: values beyond it are compared right all the same."""
    values = torch.tensor([1 << bits, -1 << bits, 3 << bits, -3 << bits, 1, -1, 0])
    x = share(torch.zeros(len(values)), range_check=False)
    with x.session.operation(x.party):
        beyond = x.like(x.shares + values, 0, 1.0)
    assert torch.equal((beyond >= 0).reveal(), values >= 0)
    assert beyond.amax().reveal() == values.amax() and beyond.amin().reveal() == values.amin()
    pool = torch.nn.MaxPool1d(2, 1, 1)
    assert torch.equal(pool(beyond.view(1, 1, -1)).reveal().double(), pool(values.double().view(1, 1, -1)))


def test_no_score_of_attention_is_checked():
    """Queries and keys are, so that a difference of two scores fits; a query beyond the range withholds the result."""
    torch.manual_seed(0)
    attend = lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125)
    q, k, v = (torch.randn(1, 2, 16, 32) for _ in range(3))
    q[..., 0, :], k[..., 0, :] = 63.5 * 8, 127.0
    with sectorch.profile() as profile:
        y = attend(*map(sectorch.share, (q, k, v))).reveal()
    assert torch.allclose(y, attend(q, k, v), atol=1e-3)
    checked = {line.shape[-1] for line in profile.ledger if "raise_outside" in line.path}
    assert words_for(2 * 16 * 32) in checked and words_for(2 * 16 * 16) not in checked
    with pytest.raises(errors.RangeExceededError):
        attend(*map(sectorch.share, (1.01 * q, k, v))).reveal()
