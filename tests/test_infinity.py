"""What stands for infinity, and public numbers beyond the range: each operation gives torch's result or refuses."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import long, some
from op_rows.base import Data
from op_stage import called, plain_arguments, reference_stage
from op_table import ROWS
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import FixedPointRangeError, NonFiniteError, RangeExceededError, SectorchError
from sectorch.serving.description import describe, load_program
from sectorch.tensor import SharedTensor
from sectorch.tensor.shared import with_exact_infinities
from sectorch.tensor.table import TABLE
from sectorch.testing.calls import reveal_leaf

INF = math.inf
BEYOND = (-INF, INF, -1e9, 1e9, -1e7, 1e8, torch.finfo(torch.float32).min)
X = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 3.0, -2.0, 0.125], [0.375, -0.25, 0.75, 1.125]])
SOME = torch.tensor([[True, True, False, True], [False, False, False, False], [True, True, True, True]])
PUBLIC = torch.tensor([[True, False, False, True], [False, True, False, False], [True, True, True, True]])

EMPTY_ROWS = {"softmax", "softmin", "scaled_dot_product_attention", "multi_head_attention"}
"""What gives zeros of a row of nothing but negative infinities, of which torch makes NaN."""

TIES = {"argsort", "cummax", "cummin", "kthvalue", "median", "sort", "topk"}
"""Of equals, which stand-ins are, these may name another position than torch does."""


class Of(nn.Module):
    """A forward of a function."""

    def __init__(self, function: Callable, width: int = 0):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(width, width) if width else nn.Identity()

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.function(self.linear(x), *others)


def right(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-4, empty: bool = False) -> bool:
    """Equal, within the errors of functions; of what torch has NaN for, zero where that is documented."""
    found, wanted = found.detach().double(), wanted.detach().double()
    if empty:
        wanted = torch.where(wanted.isnan(), 0.0, wanted)
    near = (found - wanted).abs() <= tolerance + 1e-5 * wanted.abs()
    return found.shape == wanted.shape and bool((near | (found == wanted) | (found.isnan() & wanted.isnan())).all())


def swept(name: str, value: float, secret: bool) -> list[str]:
    """A row's samples whose first shared operand holds `value` here and there: what is neither torch's nor refused."""
    row, stage, wrong = ROWS[name], reference_stage(), []
    for key in dict.fromkeys(TABLE[name].keys):
        for number, sample in row.samples_of(key):
            operands = [d for d in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(d, Data)]
            first = next((d for d in operands if d.role == "shared" and d.kind in ("number", "distinct")), None)
            if first is None or 0 in first.shape:
                continue
            args, kwargs = plain_arguments(row, number, sample)
            leaves, spec = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
            plain = pytree.tree_leaves((args, kwargs))
            at = next(i for i, leaf in enumerate(leaves) if leaf is first)
            generator = torch.Generator().manual_seed(number)
            there = torch.rand(plain[at].shape, generator=generator) < 0.4
            masked = [v.masked_fill(there, value) if i == at else v for i, v in enumerate(plain)]
            a, k = pytree.tree_unflatten([copy.copy(v) for v in masked], spec)
            try:
                wanted = pytree.tree_leaves(called(key, a, k))
            except Exception:
                continue
            mask = stage.share(there) if secret else there
            what = f"{name} {number} of {value:g}, {'secret' if secret else 'public'}"
            try:
                shared = [
                    stage.place(d.role, v) if isinstance(d, Data) else v for d, v in zip(leaves, plain, strict=True)
                ]
                shared[at] = torch.masked_fill(shared[at], mask, value)
                a, k = pytree.tree_unflatten(shared, spec)
                found = [reveal_leaf(y) for y in pytree.tree_leaves(called(key, a, k)) if isinstance(y, torch.Tensor)]
            except SectorchError:
                continue
            except Exception as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            for y, like in zip(found, [w for w in wanted if isinstance(w, torch.Tensor)], strict=True):
                same = y.shape == like.shape and (y.is_complex() or right(y, like, 2e-3, name in EMPTY_ROWS))
                ties = not like.is_floating_point() and name in (
                    "sort",
                    "topk",
                    "argsort",
                    "cummax",
                    "cummin",
                    "median",
                )
                if not (same or ties):
                    wrong.append(f"{what}: {y.flatten()[:6].tolist()} instead of {like.flatten()[:6].tolist()}")
    return wrong


NAMES = [name for name in TABLE if name in ROWS]
SAMPLED = ["add", "cat", "clamp", "div", "exp", "gather", "gt", "log", "logsumexp", "matmul", "maximum", "mean", "mul"]


@pytest.mark.parametrize(
    "name", [*SAMPLED, *long("pow", "rsub", "index_put", "put", "softmax", "softmin", "sort", "sum")]
)
def test_a_row_gives_torchs_result_of_infinities_or_refuses(name: str):
    wrong = [*swept(name, -INF, True), *swept(name, 1e9, False)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.sectorch_long
@pytest.mark.parametrize("secret", [True, False])
@pytest.mark.parametrize("value", BEYOND)
def test_every_row_gives_torchs_result_of_infinities_or_refuses(value: float, secret: bool):
    wrong = [text for name in NAMES for text in swept(name, value, secret)]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def filled(value: float) -> Callable:
    return lambda x, some: x.masked_fill(~some, value)


hidden, large = filled(-INF), filled(-1e9)
RIGHT: dict[str, Callable] = {
    "result": hidden,
    "result, a number": large,
    "where": lambda x, some: torch.where(some, x, torch.tensor(1e9)),
    "where, numbers": lambda x, some: torch.where(some, 0.0, -INF),
    "public": lambda x, some: x.masked_fill(~PUBLIC, -INF),
    "public mask that is added": lambda x, some: x + torch.zeros(3, 4).masked_fill(~PUBLIC, -1e9),
    "two masks": lambda x, some: large(x, some).masked_fill(~PUBLIC, -1e9),
    "secret mask on a masked one": lambda x, some: x.masked_fill(~PUBLIC, -1e6).masked_fill(~some, -1e6),
    "mask times number": lambda x, some: (1 - some.float()) * -1e9,
    "bool times number": lambda x, some: ~some * -1e30,
    "mask that is added": lambda x, some: torch.where(some, 0.0, -INF) + x,
    "added four times": lambda x, some: hidden(x, some) + x + x + x + x,
    "scaled": lambda x, some: hidden(x, some) * -0.125,
    "public, over 1e9": lambda x, some: x.masked_fill(~PUBLIC, 1e9) / 1e9,
    "negative": lambda x, some: -hidden(x, some),
    "size": lambda x, some: hidden(x, some).abs(),
    "softmax of scaled": lambda x, some: ((hidden(x, some) + x) / 8).softmax(-1).nan_to_num(),
    "softmax of numbers": lambda x, some: large(x, some).softmax(-1),
    "softmax of a mask that is added": lambda x, some: (x + (1 - some.float()) * -1e9)[::2].softmax(-1),
    "log_softmax": lambda x, some: hidden(x, some)[::2].log_softmax(-1),
    "log_softmax of numbers": lambda x, some: large(x, some).log_softmax(-1),
    "logsumexp": lambda x, some: hidden(x, some).logsumexp(-1),
    "largest": lambda x, some: hidden(x, some).amax(1),
    "largest, then a layer": lambda x, some: hidden(x, some).amax(0)[None] @ torch.ones(4, 2),
    "an empty set by isinf": lambda x, some: (lambda h: torch.where(h.isinf(), 0.0, h))(hidden(x, some).amax(1)),
    "by isfinite, then a layer": lambda x, some: (lambda h: h.masked_fill(~h.isfinite(), 0.0) @ torch.ones(3, 2))(
        hidden(x, some).amax(1)
    ),
    "by nan_to_num": lambda x, some: hidden(x, some).amax(1).nan_to_num(neginf=0.0),
    "by ==": lambda x, some: (lambda h: h.masked_fill(h == -INF, 0.0))(hidden(x, some).amax(1)),
    "isinf of a sum": lambda x, some: (torch.where(some, 0.0, -INF) + x).isinf(),
    "isinf of a number": lambda x, some: large(x, some).isinf(),
    "sorted": lambda x, some: hidden(x, some).sort(1)[0],
    "top": lambda x, some: hidden(x, some).topk(2)[0],
    "compared": lambda x, some: torch.stack([large(x, some) > c for c in (-1e12, -1e9, -1e6, -1e5, 0.0, 1e9)]),
    "compared, with infinity": lambda x, some: torch.stack([hidden(x, some) >= c for c in (-INF, -1e9, INF)]),
    "compared with itself": lambda x, some: torch.stack([filled(v)(x, some) >= v for v in (-1e30, -1e15, -1e9)]),
    "equal to itself": lambda x, some: torch.stack([filled(v)(x, some) == v for v in (-1e30, -1e15, -1e9)]),
    "doubled beyond its type": lambda x, some: filled(torch.finfo(torch.float32).min)(x, some) * 2 == -INF,
    "of few digits": lambda x, some: torch.where(some, x.bfloat16(), -1e9) == -1e9,
    "a sum of few digits": lambda x, some: (x.bfloat16() + -1e9) == -1e9,
    "beyond a half": lambda x, some: torch.where(some, x.half(), -1e9) == -INF,
    "a sum of many digits": lambda x, some: (x.double() + -1e30) == -1e30,
    "cut off": lambda x, some: large(x, some).clamp(min=-5.0),
    "cut off on the other side": lambda x, some: large(x, some).clamp(max=0.25),
    "exp": lambda x, some: hidden(x, some).exp(),
    "sigmoid": lambda x, some: hidden(x, some).sigmoid(),
    "relu": lambda x, some: hidden(x, some).relu(),
    "joined": lambda x, some: torch.cat((hidden(x, some), x), 1),
    "padding": lambda x, some: F.pad(x, (1, 1), value=-INF),
    "written": lambda x, some: (lambda y: (y[:, 1:].masked_fill_(~some[:, 1:], -INF), y)[1])(x.clone()),
    "scattered": lambda x, some: torch.full((3, 4), -INF).scatter_reduce(
        1, torch.tensor([[0, 1, 1, 2]] * 3), x, "amax"
    ),
    "whole numbers": lambda x, some: torch.where(some, (x > 0).long(), torch.iinfo(torch.int64).max).amin(1),
    "cross entropy": lambda x, some: F.cross_entropy(x.masked_fill(~PUBLIC, -INF), torch.tensor([0, 1, 2])),
}
WITHHELD: dict[str, Callable] = {
    "sum": lambda x, some: hidden(x, some).sum(),
    "log": lambda x, some: torch.where(some, x.abs() + 1, 1e9).log(),
    "root": lambda x, some: torch.where(some, x.abs() + 1, 1e9).sqrt(),
    "over 1e9": lambda x, some: torch.where(some, x, 1e9) / 1e9,
    "layer": lambda x, some: hidden(x, some) @ torch.ones(4, 2),
    "no number": lambda x, some: hidden(x, some) - hidden(x, some),
    "cross entropy of what is masked": lambda x, some: F.cross_entropy(hidden(x, some), torch.tensor([2, 1, 2])),
}
REFUSED: dict[str, tuple[Callable, str]] = {
    "public sum": (lambda x, some: x.masked_fill(~PUBLIC, -INF).sum(), "of what holds -inf"),
    "two numbers": (lambda x, some: torch.cat((hidden(x, some), large(x, some))), "not all stand for the same"),
    "digits of a sum": (lambda x, some: filled(-1e7)(x, some) + x, "not all stand for the same"),
    "bound that always binds": (lambda x, some: x.clamp(min=1e9), "beyond the range of every number"),
}
FEW = ("result", "mask that is added", "by isfinite, then a layer", "softmax of scaled", "log_softmax", "compared")


@pytest.mark.parametrize("name", RIGHT)
def test_what_stands_for_infinity_is_as_in_torch(name: str):
    model = Of(RIGHT[name]).eval()
    found, wanted = sectorch.reference(model)(X, SOME), model(X, SOME)
    assert found.dtype == wanted.dtype
    assert right(found, wanted), f"{found}\ninstead of\n{wanted}"


@pytest.mark.parametrize("network", ["lan", *long("wan")])
@pytest.mark.parametrize("name", some(RIGHT, FEW))
def test_the_reference_gives_what_is_computed_on_shares(name: str, network: str):
    model, scheme = Of(RIGHT[name], 4).eval(), sectorch.Scheme(network=network)
    secure = sectorch.secure(model, scheme)
    first, again = secure(X, SOME), secure(X, SOME)
    wanted = sectorch.reference(model, scheme)(X, SOME)
    assert torch.equal(first, wanted)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("name", WITHHELD)
def test_a_secret_infinity_withholds_what_is_computed_with_it(name: str):
    model = Of(WITHHELD[name]).eval()
    with pytest.raises(RangeExceededError):
        sectorch.reference(model)(X, SOME)
    if name != "no number":
        assert right(sectorch.reference(model)(X, torch.ones_like(SOME)), model(X, torch.ones_like(SOME)), 1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_a_known_infinity_is_refused_where_it_is(name: str):
    function, text = REFUSED[name]
    with pytest.raises(FixedPointRangeError, match=text):
        sectorch.secure(Of(function).eval())(X, SOME)


def test_nobody_learns_what_a_mask_that_is_added_hides():
    x, some = sectorch.share(X), sectorch.share(SOME)
    y: Any = torch.where(some, 0.0, -INF) + x
    exact = with_exact_infinities(y)
    size = exact.infinite.size
    exact.infinite = None
    assert exact.reveal()[~SOME].eq(-size).all()
    assert y.reveal()[~SOME].eq(-INF).all()


@pytest.mark.parametrize("value", [1e6, 1e7, 1e8, 1e9, torch.finfo(torch.float32).max, INF])
def test_a_bound_that_never_binds_is_none(value: float):
    ways: list[Callable[..., Any]] = [
        lambda x: x.clamp(-value, value), lambda x: x.clamp(min=-value), lambda x: x.clamp(max=value),
        lambda x: x.clamp(torch.tensor(-value), torch.tensor(value)), lambda x: F.hardtanh(x, -value, value),
        lambda x: torch.maximum(x, torch.tensor(-value)), lambda x: torch.minimum(x, torch.full((3, 4), value)),
        lambda x: x < value, lambda x: x <= -value, lambda x: x == value, lambda x: -value != x,
        lambda x: torch.tensor([value, -value, 0.0, 0.5]) > x,
        lambda x: torch.bucketize(x, torch.tensor([-value, 0, value])),
    ]  # fmt: skip
    for way in ways:
        found, wanted = way(reference_stage().share(X)).reveal(), way(X)
        assert right(found, wanted, 0.0), f"{found} instead of {wanted}"


def test_the_entropy_of_a_distribution():
    logits = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    entropy: Any = lambda x: torch.distributions.Categorical(logits=x, validate_args=False).entropy()
    assert right(entropy(reference_stage().share(logits)).reveal(), entropy(logits))


NONE = torch.tensor([[True, True, False], [False, False, False]])
"""The second of two texts has no entry at all."""


def sdpa(x: torch.Tensor, kept: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=kept[:, None, :], **how)


ATTENTION: dict[str, Callable] = {
    "bits": sdpa,
    "no scale": lambda x, kept: sdpa(x, kept, scale=0.0),
    "groups": lambda x, kept: sdpa(x.expand(2, 3, 4), kept, enable_gqa=True),
    "numbers": lambda x, kept: sdpa(x, torch.where(kept, 0.0, -INF)),
    "more queries than keys": lambda x, kept: F.scaled_dot_product_attention(
        x, x[:, :2], x[:, :2], attn_mask=torch.ones(3, 2, dtype=torch.bool).tril(-1)
    ),
    "by hand": lambda x, kept: torch.nan_to_num((x @ x.mT).masked_fill(~kept[:, None], -INF).softmax(-1)) @ x,
    "by isnan": lambda x, kept: (
        (lambda a: torch.where(a.isnan(), 0.0, a))((x @ x.mT).masked_fill(~kept[:, None], -INF).softmax(-1)) @ x
    ),
}


@pytest.mark.filterwarnings("ignore:what was recorded of Of")  # plain torch has a NaN for isnan to find
@pytest.mark.parametrize("secret", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_a_row_that_attends_to_nothing_gives_zeros(name: str, secret: bool):
    x, model = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), Of(ATTENTION[name]).eval()
    found = sectorch.reference(model)(x, NONE if secret else sectorch.public(NONE))
    assert right(found, model(x, NONE), 1e-4), f"{found}\ninstead of\n{model(x, NONE)}"


class Heads(nn.Module):
    """Attention to what is kept."""

    def __init__(self, weights: bool):
        super().__init__()
        self.layer, self.weights = nn.MultiheadAttention(4, 2, bias=False, batch_first=True), weights

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, key_padding_mask=~kept, need_weights=self.weights)[0]


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_to_nothing_gives_zeros(weights: bool):
    """As torch without weights; with them torch gives NaN."""
    torch.manual_seed(0)
    model = Heads(weights).eval()
    x = torch.randn(2, 3, 4)
    for kept in (NONE, sectorch.public(NONE)):
        assert right(sectorch.reference(model)(x, kept), model(x, NONE).nan_to_num(), 1e-4)


@pytest.mark.parametrize("name", ["bits", "by hand", *long("numbers", "by isnan")])
def test_a_gradient_through_a_row_of_nothing(name: str):
    torch.manual_seed(0)
    plain, x, session = Of(ATTENTION[name], 4), torch.randn(2, 3, 4), sectorch.Session()
    shared = sectorch.shared(copy.deepcopy(plain), session=session)
    plain(x, NONE).pow(2).mean().backward()
    shared(sectorch.share(x, session=session), sectorch.share(NONE, session=session)).pow(2).mean().backward()
    pairs: Any = zip(shared.parameters(), plain.parameters(), strict=True)
    for found, wanted in pairs:
        if name != "by isnan":  # torch's gradient is NaN there
            assert right(found.grad.reveal(), wanted.grad, 1e-4)


LOSSES: dict[str, Callable] = {
    "cross entropy of masked scores": lambda x, kept: F.cross_entropy(
        (x @ x.mT).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -INF).reshape(6, 3),
        torch.tensor([0, 1, 2] * 2),
    ),
    "masked by a number": lambda x, kept: (x @ x.mT).masked_fill(~kept[:, None], -1e9)[:1].softmax(-1).square().sum(),
    "a bound that never binds": lambda x, kept: x.clamp(-1e9, 1e9).square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_training_with_what_stands_for_infinity(name: str):
    torch.manual_seed(0)
    plain, x, session = Of(LOSSES[name], 4), torch.randn(2, 3, 4), sectorch.Session()
    shared = sectorch.shared(copy.deepcopy(plain), session=session)
    plain(x, NONE).backward()
    given = sectorch.share(x, session=session), sectorch.share(NONE, session=session)
    with sectorch.step(session):
        shared(*given).backward()
    pairs: Any = zip(shared.parameters(), plain.parameters(), strict=True)
    for found, wanted in pairs:
        assert right(found.grad.reveal(), wanted.grad, 1e-4)


def raises(y: torch.Tensor) -> torch.Tensor:
    if torch.isnan(y).any() or not torch.isfinite(y).all():
        raise ValueError("not a number")
    return y


def fills(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[torch.isnan(y)] = 0
    y[y.isinf()] = 0
    return y


@pytest.mark.parametrize("guard", [raises, fills, lambda y: torch.where(y.isnan(), 0.0, y)])
def test_guards_against_nan_are_public(guard: Callable[..., Any]):
    model = Of(guard, 4).eval()
    assert right(sectorch.secure(model)(X), model(X))
    assert right(guard(sectorch.share(X)).reveal(), guard(X))


def test_a_guard_against_infinity_is_secret_where_one_may_be():
    model = Of(lambda x: raises(x.masked_fill(x > 0, -INF)), 4).eval()
    with pytest.raises(SectorchError):
        sectorch.secure(model)(X)


class Buffers(nn.Module):
    """A mask that it reads, and infinities that it does not read, or does."""

    def __init__(self, reads: bool):
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
        self.register_buffer("most", torch.tensor(INF))
        self.register_buffer("mixed", torch.tensor([1.0, 2.0, INF]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x) @ x.T + self.mask
        return (scores + self.mixed if self.reads else scores.clamp(max=self.most)).softmax(-1)


def test_a_mask_in_a_buffer_is_public_and_unread_infinities_do_not_matter():
    model = Buffers(False).eval()
    assert right(sectorch.secure(model)(X), model(X))
    description, weights = describe(model, X)
    assert sorted(weights) == ["linear.bias", "linear.weight"]
    served: Any = load_program(json.loads(json.dumps(description)), weights)
    assert right(sectorch.secure(served)(X), model(X))


def test_a_buffer_of_weights_and_infinities_is_refused_where_it_is_read():
    with pytest.raises(NonFiniteError, match="weight 'mixed' holds 0 NaN and 1 infinite entries of 3"):
        sectorch.secure(Buffers(True).eval())(X)


def test_what_takes_shares_as_numbers_takes_no_infinities():
    x: Any = sectorch.share(X).masked_fill(sectorch.share(~SOME), -INF)
    with pytest.raises(FixedPointRangeError, match=r"aggregate\(\) takes no tensor that may hold infinities"):
        sectorch.aggregate([x])
    assert right(sectorch.aggregate([x.clamp(-1000, 1000)]), hidden(X, SOME).clamp(-1000, 1000))


def test_what_may_hold_infinities_stays_in_shares():
    """From one program to the next, and from it to Q."""
    model = Of(hidden, 4).eval()
    secure = sectorch.secure(model)
    y: Any = secure(sectorch.share(X, session=secure.session), sectorch.share(SOME, session=secure.session))
    assert isinstance(y, SharedTensor)
    assert right(y.reveal(), model(X, SOME))
    weights: Any = torch.softmax(y, -1)
    assert right(weights.reveal()[::2], model(X, SOME).softmax(-1)[::2])
    assert right(y.isinf().reveal(), ~SOME)
