"""Gradients of rows over shapes, broadcasts, strides and unkind values, at 20 and 16 fraction bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_counts import fewer
from gradient_stage import PLACES, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

import sectorch
from sectorch import DifferentiableTensor, Scheme, Session
from sectorch.choreography.ledger import Cost
from sectorch.errors import RangeExceededError
from sectorch.testing.calls import OUT_OF_RANGE, RIGHT, Call

ONE: dict[str, Callable] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus 2": lambda x: F.softplus(x, 2.0),
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.5),
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "sigmoid": torch.sigmoid,
    "cos": torch.cos,
    "erf": torch.erf,
    "atan": torch.atan,
    "abs": torch.abs,
    "relu": torch.relu,
    "square": torch.square,
    "cube": lambda x: (x / 8) ** 3,
    "softmax": lambda x: F.softmax(x.reshape(-1), 0),
    "log_softmax": lambda x: F.log_softmax(x.reshape(-1), 0),
    "logsumexp": lambda x: torch.logsumexp(x.reshape(-1), 0),
    "layer_norm": lambda x: F.layer_norm(x.reshape(-1), (x.numel(),), eps=0.1),
    "norm": torch.linalg.vector_norm,
    "mean": torch.mean,
    "cumsum": lambda x: x.reshape(-1).cumsum(0),
    "flip": lambda x: x.reshape(-1).flip(0),
    "roll": lambda x: x.roll(1),
    "sort": lambda x: x.reshape(-1).sort()[0],
    "max": torch.max,
    "amax": torch.amax,
    "topk": lambda x: x.reshape(-1).topk(1)[0],
    "median": torch.median,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.5, 0.25),
    "to": lambda x: x.to(torch.float64),
    "pad": lambda x: F.pad(x.reshape(1, -1), (1, 2)),
    "var": lambda x: x.var(correction=0),
    "index": lambda x: x.reshape(-1)[torch.zeros(3, dtype=torch.int64)],
    "tril": lambda x: x.reshape(1, -1).tril(),
}
TWO: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "mse": lambda x, y: F.mse_loss(*torch.broadcast_tensors(x, y)),
    "l1": lambda x, y: F.l1_loss(*torch.broadcast_tensors(x, y)),
    "div": lambda x, y: x / (y.abs() + 1),
    "huber": lambda x, y: F.huber_loss(*torch.broadcast_tensors(x, y)),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(*torch.broadcast_tensors(x, y)),
    "hypot": lambda x, y: torch.hypot(x + 40, y),
    "atan2": lambda x, y: torch.atan2(x, y.abs() + 1),
    "logaddexp": torch.logaddexp,
}
KINKED = (
    "abs", "relu", "leaky_relu", "hardtanh", "max", "amax", "clamp", "hardshrink", "softshrink", "threshold",
    "maximum", "minimum", "l1", "where",
)  # fmt: skip
"""Functions with kinks where plain autograd chooses a slope: ours is the same, of exact comparisons."""

SESSION = Session(reference=True)
KINDS = {
    "kind": lambda shape, g: torch.rand(shape, generator=g) * 4 - 2,
    "tied": lambda shape, g: torch.randint(-2, 3, shape, generator=g) / 2.0,
    "saturated": lambda shape, g: torch.rand(shape, generator=g) * 60 - 30,
    "tiny": lambda shape, g: torch.randint(-3, 4, shape, generator=g) * 2.0**-20,
    "zero": lambda shape, g: torch.zeros(shape),
}


@st.composite
def tensors(draw: Any, count: int, kinds: tuple = tuple(KINDS)) -> tuple[torch.Tensor, ...]:
    """Tensors that broadcast, with strides of any order."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    made = []
    for _ in range(count):
        own = [1 if draw(st.booleans()) and count > 1 else n for n in shape]
        own = own[draw(st.integers(0, len(own))) :] if made else own
        g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
        x = KINDS[draw(st.sampled_from(kinds))](own, g)
        order = draw(st.permutations(range(len(own))))
        made.append(x.permute(order).contiguous().permute([order.index(d) for d in range(len(own))]).requires_grad_())
    return tuple(made)


def judged(name: str, xs: tuple, bits: int, shaken: float | None = None) -> None:
    f = ONE.get(name) or TWO[name]
    more = {} if shaken is None else {"shaken": shaken}
    how = outcome(f, Call(*xs), SESSION, Scheme(frac_bits=bits), **more)
    # A sum of 64 squares of 30 leaves the activation limit, and so does a norm's quotient at zero.
    assert how.kind in (RIGHT, OUT_OF_RANGE), (name, how)
    gentle = all(float(x.detach().abs().max()) <= 2 for x in xs) and name not in ("norm", "var", "hypot")
    assert how.kind == RIGHT or not gentle, (name, how)


@pytest.mark.parametrize("name", [*ONE, *TWO])
@fewer(3)
@given(data=st.data(), bits=st.sampled_from([20, 16]))
def test_gradients_of_each_function(name: str, data: Any, bits: int):
    judged(name, data.draw(tensors(1 if name in ONE else 2)), bits)


@pytest.mark.parametrize("name", KINKED)
@settings(max_examples=8)
@given(xs=tensors(2, ("tied", "zero")))
def test_kinks_and_ties_have_the_slope_of_plain_autograd(name: str, xs: tuple):
    judged(name, xs[:1] if name in ONE else xs, 20, shaken=0.0)


@pytest.mark.parametrize("bits", [20, 16])
@settings(max_examples=20)
@given(part=st.floats(0.5, 2.0), sign=st.sampled_from([-1, 1]))
def test_a_gradient_at_its_limit_is_right_or_withheld(bits: int, part: float, sign: int):
    """Below 2^(24 - f) it is right; what a check lets through has grown by 129/128 at most since."""
    limit = 2.0 ** (24 - bits)
    x = DifferentiableTensor(
        sectorch.share(torch.tensor([1.0, 2.0]), session=SESSION, scheme=Scheme(frac_bits=bits)), True
    )
    (torch.relu(x) * (sign * part * limit)).sum().backward()
    assert x.grad is not None
    try:
        found = x.grad.reveal()
    except RangeExceededError:
        assert part >= 1 - 2.0**-12
        return
    assert part <= 129 / 128 and (found - sign * part * limit).abs().max() <= limit * 2.0**-15 + PLACES * 2.0**-bits


@settings(max_examples=8)
@given(n=st.integers(1, 12).map(lambda k: 2**k), seed=st.integers(0, 1 << 20), bits=st.sampled_from([16, 20]))
def test_long_sums(n: int, seed: int, bits: int):
    """Each of n products of entries up to 1 with cotangents up to 1 errs by three halves of a place."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.rand(shape, generator=generator) * 2 - 1 for shape in ((3, n), (2, n)))
    how = outcome(lambda a, b: F.linear(a, b) / n, Call(x.requires_grad_(), w.requires_grad_()), SESSION, Scheme(bits))
    assert how.kind == RIGHT, how


NEW: dict[str, tuple[Callable, list]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(4, 6), (6,), (6,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 4, 4)] * 3),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2], [2, 1]]), w, padding_idx=1), [(4, 3)]),
    "conv groups": (lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 2), [(2, 4, 4, 4), (4, 2, 3, 3)]),
    "conv transposed": (lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1), [(2, 3, 4, 4), (3, 2, 3, 3)]),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), [(1, 2, 3, 3, 3), (2, 2, 2, 2, 2)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), [(1, 2, 5, 6)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [(1, 2, 5, 6)]),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), [(1, 2, 5, 7)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(1, 2, 3, 4)]),
    "gelu": (F.gelu, [(3, 4)]),
    "silu": (F.silu, [(3, 4)]),
    "elu": (F.elu, [(3, 4)]),
    "softplus": (F.softplus, [(3, 4)]),
    "sort": (lambda x: x.sort()[0], [(2, 5)]),
    "topk": (lambda x: x.topk(2)[0], [(2, 5)]),
    "max": (lambda x: x.max(1)[0], [(3, 4)]),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 0], [3, 1]])), [(2, 4)]),
    "index": (lambda x: x[torch.tensor([0, 2, 0])], [(3, 4)]),
    "cumsum": (lambda x: x.cumsum(1), [(3, 4)]),
    "pad": (lambda x: F.pad(x, (1, 2), mode="replicate"), [(1, 2, 4)]),
    "std": (lambda x: x.std(1), [(3, 5)]),
    "inverse": (lambda x: torch.linalg.inv(x + 4 * torch.eye(3)), [(3, 3)]),
    "norm": (torch.linalg.vector_norm, [(3, 4)]),
    "smoothed": (
        lambda x: F.cross_entropy(
            x, torch.tensor([1, -100, 2]), torch.tensor([1.0, 2, 0.5]).to(x.dtype), label_smoothing=0.1
        ),
        [(3, 3)],
    ),
    "kl_div": (lambda x: F.kl_div(x, torch.tensor([[0.25, 0.75]]).to(x.dtype), reduction="batchmean"), [(1, 2)]),
    "huber": (lambda x: F.huber_loss(x, torch.zeros(3, 4).to(x.dtype)), [(3, 4)]),
}


@pytest.mark.parametrize("name", NEW)
def test_gradients_of_layers_are_those_of_plain_autograd_and_of_the_protocols(name: str):
    """The protocols give the bits of the reference, or, through a series, some value a last place away from it."""
    f, shapes = NEW[name]
    torch.manual_seed(5)
    xs = [(torch.rand(shape) * 4 - 2).requires_grad_() for shape in shapes]
    how = outcome(f, Call(*xs), SESSION)
    assert how.kind == RIGHT, how
    found = []
    for session in (Session(), SESSION):
        given = [DifferentiableTensor(sectorch.share(x.detach(), session=session), requires_grad=True) for x in xs]
        y = f(*given)
        y.sum().backward()
        grads = [v.grad for v in given]
        assert all(g is not None for g in grads)
        found.append([y.detach().reveal(), *(g.reveal() for g in grads if g is not None)])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 4 * 2.0**-20


def test_a_gradient_that_is_given_keeps_its_bits():
    """A public one, and a shared one, by each of the ways that torch has; zero where nothing is followed."""
    small = torch.tensor([2.0**-24, 0.5, -0.75])
    for how in range(4):
        x = DifferentiableTensor(sectorch.share(torch.tensor([1.0, -2.0, 3.0]), session=SESSION), requires_grad=True)
        y: Any = torch.relu(x)
        if how == 0:
            y.backward(small * 16)
        elif how == 1:
            y.backward(gradient=DifferentiableTensor(sectorch.share(small * 16, session=SESSION)))
        elif how == 2:
            torch.autograd.backward([y], [small * 16])
        else:
            (x.grad,) = torch.autograd.grad(y, x, grad_outputs=small * 16)
        assert x.grad is not None
        assert (x.grad.reveal() - small * 16 * torch.tensor([1.0, 0.0, 1.0])).abs().max() == 0


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_slope_of_gelu_errs_by_4e_6_everywhere_and_costs_no_more_than_gelu(approximate: str):
    x = torch.cat((torch.linspace(-8, 8, 20001), torch.tensor([-4000.0, 4000.0])))
    p = DifferentiableTensor(sectorch.share(x, session=Session(reference=True)), requires_grad=True)
    F.gelu(p, approximate=approximate).sum().backward()
    plain = x.double().requires_grad_()
    F.gelu(plain, approximate=approximate).sum().backward()
    assert (p.grad.reveal() - plain.grad).abs().max() <= 4e-6
    sent = []
    for backward in (False, True):
        p = DifferentiableTensor(sectorch.share(torch.rand(64), session=(session := Session())), requires_grad=True)
        with Cost() as cost, session.call():
            y = F.gelu(p, approximate=approximate)
            if backward:
                y.sum().backward()
        sent.append(cost.online_bytes + cost.offline_bytes)
    assert sent[1] <= 2.2 * sent[0]
