"""hypothesis strategies for tensors, calls, number formats, models, programs and sessions.

    from hypothesis import given
    from sectorch.testing import strategies as sts

    @given(sts.tensors(domain=(-4, 4)))
    def test_mine(x): ...

What they give depends on hypothesis's draws alone, so that a failure shrinks and is found again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..backend import Series
from ..errors import ArgumentError
from ..ops import series as fitted
from ..optional_deps import required_imports
from ..session import Session
from ..tensor import Scheme
from .calls import Call

with required_imports("sectorch.testing.strategies", "hypothesis", ArgumentError):
    import hypothesis.strategies as strategies

# Steps of random programs, with bounds on the error of their results.
#
# Errors are counted in ulps of 2^-20. `ready(e)` is the error of an operand that may have to be truncated first.


ULP = 2.0**-20


def series(which: Series) -> float:
    """Error of a series in ulps: its fit, dealt values rounded to 24 bits, public multipliers to 22 (two a term)."""
    return 2**20 * (which.error + which.weight * 2.0**-25 + len(which.cos) * 2.0**-22)


GELU, RECIPROCAL, TERM = series(fitted.GELU), series(fitted.RECIPROCAL), series(fitted.EXP) + 2
SIG = series(fitted.SIGMOID) + 0.125 + 0.9
"""A slope of 1/4 times 1/2, and e^-14 beyond the interval."""

LIMIT = 256.0
"""Programs keep their values below this: 2^8 and twice 26 fraction bits leave 2 of the 62 bits."""


@dataclass(frozen=True)
class ProgramValue:
    """A variable: its value in plain float64 and the error that its secret twin may have."""

    plain: torch.Tensor
    error: float

    @property
    def size(self) -> float:
        return float(self.plain.abs().max()) if self.plain.numel() else 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.plain.shape)


@dataclass(frozen=True)
class ProgramStep:
    """One assignment: source text, the variables it reads, the function, and the error of its result."""

    text: str
    reads: tuple[int, ...]
    run: Callable = field(repr=False)
    error: float = 0.0

    def __str__(self) -> str:
        return self.text.format(*(f"v{i}" for i in self.reads))


def ready(value: ProgramValue) -> float:
    return value.error + 1


def product(x: ProgramValue, y: ProgramValue, terms: int = 1) -> float:
    """Error of a sum of products."""
    e, d = ready(x), ready(y)
    return terms * (x.size * d + y.size * e + e * d * ULP)


def times(x: ProgramValue, factor: float) -> float:
    """Error of a public multiple, which may be truncated."""
    return abs(factor) * ready(x) + x.size / 2 + 1


def pick(draw: Any, values: list[ProgramValue], fits: Callable[[ProgramValue], bool] = lambda v: True) -> Any:
    """The number of a variable that fits, recent ones more often; None if none does."""
    found = [i for i, value in enumerate(values) if fits(value)]
    return draw(strategies.sampled_from(found + 2 * found[-2:])) if found else None


def dim_of(draw: Any, x: ProgramValue) -> int:
    return draw(strategies.integers(-len(x.shape), len(x.shape) - 1))


NUMBERS = strategies.sampled_from([0.5, 0.3, -1.0, 2, 3, -0.25, 1.7, 0, 0.125])


def add(draw, values):
    i, j = pick(draw, values), pick(draw, values)
    sign = draw(strategies.sampled_from(["+", "-"]))
    run = torch.add if sign == "+" else torch.sub
    return ProgramStep(f"{{}} {sign} {{}}", (i, j), run, values[i].error + values[j].error)


def shift_step(draw, values):
    i, c = pick(draw, values), draw(NUMBERS)
    text, run = draw(strategies.sampled_from([("{} + {c}", lambda x: x + c), ("{c} - {}", lambda x: c - x)]))
    return ProgramStep(text.replace("{c}", str(c)), (i,), run, values[i].error + 0.5)


def multiply_step(draw, values):
    i, c = pick(draw, values), draw(NUMBERS)
    return ProgramStep(f"{{}} * {c}", (i,), lambda x: x * c, times(values[i], c))


def divide_step(draw, values):
    i, c = pick(draw, values), draw(strategies.sampled_from([2, 4.0, 3, -0.5, 0.7]))
    return ProgramStep(f"{{}} / {c}", (i,), lambda x: x / c, times(values[i], 1 / c))


def mul(draw, values):
    i, j = pick(draw, values), pick(draw, values)
    return ProgramStep("{} * {}", (i, j), torch.mul, product(values[i], values[j]))


def square(draw, values):
    i = pick(draw, values)
    return ProgramStep("{}.square()", (i,), torch.square, product(values[i], values[i]))


def matmul(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) > 0)
    if i is None:
        return None
    inner = values[i].shape[-1]
    j = pick(draw, values, lambda v: len(v.shape) > 0 and (v.shape[-2] if len(v.shape) > 1 else v.shape[0]) == inner)
    return None if j is None else ProgramStep("{} @ {}", (i, j), torch.matmul, product(values[i], values[j], inner))


def elementwise(draw, values):
    i = pick(draw, values)
    x = values[i]
    text, run, error = draw(
        strategies.sampled_from(
            [
                ("-{}", torch.neg, x.error),
                ("torch.relu({})", torch.relu, x.error + 1),
                ("{}.abs()", torch.abs, x.error + 3),  # 2 relu(x) - x, each truncated
                ("F.leaky_relu({}, 0.25)", lambda v: F.leaky_relu(v, 0.25), x.error + 3 + 0.5 * x.size),
                ("{}.clamp(-0.5, 1.25)", lambda v: v.clamp(-0.5, 1.25), x.error + 2),
                ("{}.clamp(min=0.3)", lambda v: v.clamp(min=0.3), x.error + 1.5),
                ("{}.clamp(max=1)", lambda v: v.clamp(max=1), x.error + 2),
                ("torch.sigmoid({})", torch.sigmoid, ready(x) / 4 + SIG + 1),
                ("torch.tanh({})", torch.tanh, ready(x) + 2 * SIG + 1),
                ("F.gelu({})", F.gelu, 1.13 * (x.error + 2) + GELU + 1),
                ("{}.clone()", torch.clone, x.error),
                ("{}.contiguous()", torch.Tensor.contiguous, x.error),
            ]
        )
    )
    return ProgramStep(text, (i,), run, error)


def extreme(draw, values):
    i, j = pick(draw, values), pick(draw, values)
    name = draw(strategies.sampled_from(["maximum", "minimum"]))
    return ProgramStep(
        f"torch.{name}({{}}, {{}})", (i, j), getattr(torch, name), max(values[i].error, values[j].error) + 1
    )


def _is_definite(x: ProgramValue, y: torch.Tensor, error: float) -> bool:
    """Whether a comparison has a definite result: the values differ by more than their errors, or have no errors."""
    if x.error + error == 0:
        return True
    try:
        return bool(((x.plain - y).abs() > (x.error + error) * ULP).all())
    except RuntimeError:  # shapes that do not fit
        return False


def compare_step(draw, values):
    i = pick(draw, values)
    j = pick(draw, values, lambda v: _is_definite(values[i], v.plain, v.error))
    if j is None:
        return None
    sign, run = draw(strategies.sampled_from([(">", torch.gt), ("<=", torch.le), ("==", torch.eq), ("!=", torch.ne)]))
    return ProgramStep(f"({{}} {sign} {{}}).double()", (i, j), lambda x, y: run(x, y).double(), 0.0)


def choose_step(draw, values):
    i, c = pick(draw, values), draw(strategies.sampled_from([0.0, 0.5, -0.3]))
    if not _is_definite(values[i], torch.tensor(c, dtype=torch.float64), 0.5):
        return None
    j, k = pick(draw, values), pick(draw, values)
    return ProgramStep(
        f"torch.where({{}} > {c}, {{}}, {{}})",
        (i, j, k),
        lambda x, y, z: torch.where(x > c, y, z),
        max(ready(values[j]), ready(values[k])) + values[k].error,
    )


def reduce_step(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) > 0)
    if i is None:
        return None
    x, dim, keep = values[i], dim_of(draw, values[i]), draw(strategies.booleans())
    n = x.shape[dim]
    name, error = draw(
        strategies.sampled_from(
            [
                ("sum", n * x.error),
                ("mean", ready(x) + n * x.size / 2 + 1),
                ("amax", x.error + n),
                ("amin", x.error + n),
                ("cumsum", n * x.error),
                ("softmax", ready(x) * 2 + n * TERM + TERM + RECIPROCAL + 4),
            ]
        )
    )
    if name in ("cumsum", "softmax"):
        return ProgramStep(f"{{}}.{name}({dim})", (i,), lambda v: getattr(v, name)(dim), error)
    return ProgramStep(f"{{}}.{name}({dim}, {keep})", (i,), lambda v: getattr(v, name)(dim, keepdim=keep), error)


def order_step(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) > 0)
    if i is None:
        return None
    dim, n = dim_of(draw, values[i]), values[i].shape[-1]
    levels = math.ceil(math.log2(max(2, max(values[i].shape) * n)))
    return ProgramStep(f"{{}}.sort({dim})[0]", (i,), lambda v: v.sort(dim)[0], values[i].error + levels * (levels + 1))


def move_step(draw, values):
    i = pick(draw, values)
    x = values[i]
    forms = [
        ("{}.reshape(-1)", lambda v: v.reshape(-1)),
        ("{}.unsqueeze(0)", lambda v: v.unsqueeze(0)),
        ("{}.squeeze()", lambda v: v.squeeze()),
    ]
    if x.shape:
        dim = dim_of(draw, x)
        at = draw(strategies.integers(0, x.shape[dim] - 1))
        forms += [
            (f"{{}}.transpose(0, {dim})", lambda v: v.transpose(0, dim)),
            (f"{{}}.flip({dim})", lambda v: v.flip(dim)),
            (f"{{}}.roll(1, {dim})", lambda v: v.roll(1, dim)),
            (f"{{}}.select({dim}, {at})", lambda v: v.select(dim, at)),
            (f"{{}}.narrow({dim}, {at}, 1)", lambda v: v.narrow(dim, at, 1)),
            (f"{{}}[[{at % x.shape[0]}, 0]]", lambda v: v[[at % x.shape[0], 0]]),
            ("{}[..., ::2]", lambda v: v[..., ::2]),
            (f"{{}}.unbind({dim})[-1]", lambda v: v.unbind(dim)[-1]),
            (f"torch.cat(({{}}, {{0}}), {dim})", lambda v: torch.cat((v, v), dim)),
            ("F.pad({}, (1, 0), value=0.5)", lambda v: F.pad(v, (1, 0), value=0.5)),
            ("{}.tril()", lambda v: v.tril() if v.dim() > 1 else v.diag()),
        ]
    text, run = draw(strategies.sampled_from(forms))
    return ProgramStep(text.replace("{}", "{0}"), (i,), run, x.error + 0.5)


def join_step(draw, values):
    i = pick(draw, values)
    j = pick(draw, values, lambda v: v.shape == values[i].shape)
    return ProgramStep(
        "torch.stack(({}, {}))", (i, j), lambda x, y: torch.stack((x, y)), max(values[i].error, values[j].error)
    )


def pool_step(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) in (3, 4) and min(v.shape[-2:]) > 1)
    if i is None:
        return None
    x, pad = values[i], draw(strategies.sampled_from([0, 1]))
    text, run, error = draw(
        strategies.sampled_from(
            [
                (f"F.max_pool2d({{}}, 2, 1, {pad})", lambda v: F.max_pool2d(v, 2, 1, pad), x.error + 3),
                (
                    f"F.avg_pool2d({{}}, 2, 2, {pad})",
                    lambda v: F.avg_pool2d(v, 2, 2, pad),
                    ready(x) + 4 * x.size / 2 + 1,
                ),
                (
                    "F.adaptive_avg_pool2d({}, 1)",
                    lambda v: F.adaptive_avg_pool2d(v, 1),
                    ready(x) + math.prod(x.shape[-2:]) * x.size / 2 + 1,
                ),
            ]
        )
    )
    return ProgramStep(text, (i,), run, error)


def convolve_step(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) == 4 and min(v.shape[-2:]) > 1)
    if i is None:
        return None
    x, channels = values[i], values[i].shape[1]
    j = pick(draw, values, lambda v: len(v.shape) == 4 and v.shape[1] == channels and max(v.shape[-2:]) <= 2)
    if j is None:
        return None
    terms = channels * math.prod(values[j].shape[-2:])
    return ProgramStep(
        "F.conv2d({}, {}, padding=1)", (i, j), lambda a, b: F.conv2d(a, b, padding=1), product(x, values[j], terms)
    )


KINDS = [
    *[elementwise] * 4,
    *[move_step] * 4,
    *[reduce_step] * 3,
    add,
    shift_step,
    multiply_step,
    divide_step,
    mul,
    square,
    matmul,
    extreme,
    compare_step,
    choose_step,
    order_step,
    join_step,
    pool_step,
    convolve_step,
]


# Random programs.

SHAPES = [(), (1,), (3,), (2, 3), (3, 2), (2, 1), (3, 3), (1, 2, 3, 3), (2, 2, 2, 2)]
ROLES = ["shared", "shared", "whole", "private", "public"]
"""The owner of an input; `whole` is shared as integers without fraction bits, in place of float64."""


class RandomProgram:
    """Inputs v0, v1, ... with their owners, and steps on them. A failure prints its repr."""

    def __init__(self):
        self.inputs: list[tuple[torch.Tensor, str]] = []
        self.steps: list[ProgramStep] = []
        self.values: list[ProgramValue] = []

    def __repr__(self) -> str:
        text = [
            f"v{i} = {role}(torch.tensor({tensor.tolist()}).double())" for i, (tensor, role) in enumerate(self.inputs)
        ]
        text += [f"v{i + len(self.inputs)} = {step}" for i, step in enumerate(self.steps)]
        return "\n" + "\n".join(text) + "\n"

    def grow(self, step: ProgramStep) -> bool:
        """Append a step if torch takes it and its result stays in the range."""
        try:
            plain = step.run(*(self.values[i].plain for i in step.reads))
        except (RuntimeError, IndexError):
            return False
        value = ProgramValue(plain, step.error)
        if not plain.numel() or plain.numel() > 200 or value.size > LIMIT or value.error > 2**14:
            return False
        self.steps.append(step)
        self.values.append(value)
        return True

    def run(self, place: Callable[[str, torch.Tensor], Any]) -> Iterator[Any]:
        """Yield every step's result; `place(role, tensor)` gives an input in its owner's hands."""
        held = [place(role, tensor) for tensor, role in self.inputs]
        for step in self.steps:
            held.append(step.run(*(held[i] for i in step.reads)))
            yield held[-1]


@strategies.composite
def programs(draw: Any, longest: int = 8) -> RandomProgram:
    """Up to three inputs from the grid of 1/8 in [-2, 2], the first of them shared, and some steps."""
    program = RandomProgram()
    for number in range(draw(strategies.integers(1, 3))):
        shape = draw(strategies.sampled_from(SHAPES))
        count = torch.Size(shape).numel()
        eighths = draw(strategies.lists(strategies.integers(-16, 16), min_size=count, max_size=count))
        role = draw(strategies.sampled_from(ROLES[:3] if number == 0 else ROLES))
        tensor = torch.tensor(eighths, dtype=torch.float64).view(shape) / 8
        tensor = tensor.round() if role == "whole" else tensor
        program.inputs.append((tensor, role))
        program.values.append(ProgramValue(tensor, 0.0))
    wanted = draw(strategies.sampled_from([1, 2, *sorted(2 * [*range(3, longest + 1)])]))
    for _ in range(2 * wanted):
        step = draw(strategies.sampled_from(KINDS))(draw, program.values)
        if step is not None and program.grow(step) and len(program.steps) == wanted:
            break
    return program


# Random modules: layers, branches on public values, hooks, tied weights, in-place code, further arguments.
#
# A module is a list of steps. It is made by running it: each step is drawn to fit the results of those before.

C, SIDE = 4, 4
WIDTH = 6


class RandomModule(nn.Module):
    """A forward made of steps (state, h) -> h; `state` holds what the forward keeps in local variables."""

    def __init__(self):
        super().__init__()
        self.steps: list[Callable] = []
        self.layers: Any = nn.ModuleList()

    def forward(self, x, labels=None, *rest, scale=None):
        if not torch.is_tensor(x):
            x = x["image"]
        kept: dict[str, torch.Tensor] = {}
        for step in self.steps:
            x = step(self, kept, x)
        if labels is not None or rest:
            x = x * 100
        return x if scale is None else x * scale

    def alternative(self, x):
        """A second forward, for tests that replace the first."""
        return RandomModule.forward(self, x) * 2


def _norm(draw: random.Random, norm: Any) -> nn.Module:
    for name in ("running_mean", "weight", "bias"):
        if getattr(norm, name, None) is not None:
            value = [draw.uniform(0.5, 1.5) for _ in range(getattr(norm, name).numel())]
            getattr(norm, name).data = torch.tensor(value).reshape(getattr(norm, name).shape)
    if getattr(norm, "running_var", None) is not None:
        norm.running_var.data = torch.tensor([draw.uniform(0.5, 4) for _ in range(norm.running_var.numel())])
    return norm


def _layer(model: RandomModule, draw: random.Random, make: Callable) -> Callable:
    """A step that calls a layer: a new one or, in one of four cases, an earlier one of that kind."""
    made = make()
    same = [i for i, layer in enumerate(model.layers) if type(layer) is type(made) and str(layer) == str(made)]
    if same and draw.random() < 0.25:
        at = draw.choice(same)
    else:
        at = len(model.layers)
        if same and hasattr(made, "weight") and draw.random() < 0.3:
            made.weight = model.layers[same[0]].weight  # tied
        model.layers.append(made)
    return lambda m, kept, h: m.layers[at](h)


def _anywhere(model: RandomModule, draw: random.Random, h: torch.Tensor) -> Callable:
    """Steps that fit any shape."""
    number = draw.choice([0.3, -1.7, 2.0, 0.5, 3.0, -1.0, 1.25])
    inplace, rows = draw.random() < 0.4, len(h)
    name = draw.choice(["a", "b"])

    def keep(m, kept, h):
        kept[name] = h
        return h

    def keep_view(m, kept, h):
        kept[name] = h.flatten(1) if h.dim() > 1 else h
        return h

    def join(m, kept, h):
        other = kept.get(name)
        return h + other if other is not None and other.shape == h.shape else h

    def join_in_place(m, kept, h):
        other = kept.get(name)
        if other is not None and other.shape == h.shape:
            h += other
        return h

    def product(m, kept, h):
        other = kept.get(name)
        return h * other.clamp(-1, 1) if other is not None and other.shape == h.shape else h

    def times_in_place(m, kept, h):
        h *= number
        return h

    def branch(m, kept, h):
        return h * number if h.shape[0] > 1 else h + 0.25

    def counted(m, kept, h):
        return h + torch.arange(h.shape[-1]) * 0.01

    def by_row(m, kept, h):
        return h + torch.arange(h.shape[0]).reshape(-1, *[1] * (h.dim() - 1)) * 0.1

    def restore(m, kept, h):
        other = kept.get(name)
        return torch.cat([other, h], 1)[:, : h.shape[1]] if other is not None and other.dim() == h.dim() > 1 and (
            other.shape[0] == h.shape[0] and other.shape[2:] == h.shape[2:]
        ) else h  # fmt: skip

    def halves(m, kept, h):
        a, b = h.chunk(2, 1)
        return torch.cat([b.relu(), a], 1)

    def written(m, kept, h):
        mask = torch.zeros(h.shape[-1])
        mask[0] = 1
        mask += 0.5
        return h * mask

    plain = [
        keep, keep, keep_view, join, join, join_in_place, product, times_in_place, branch, counted, by_row, restore,
        written,
        lambda m, kept, h: F.relu(h, inplace=inplace),
        lambda m, kept, h: h.relu_() if inplace else h.relu(),
        lambda m, kept, h: h * number,
        lambda m, kept, h: number * h,
        lambda m, kept, h: h / number,
        lambda m, kept, h: F.dropout(h, 0.5, m.training),
        lambda m, kept, h: h.clone(),
        lambda m, kept, h: h.contiguous(),
        lambda m, kept, h: h + h.mean(0, keepdim=True) if rows > 1 else h,
        lambda m, kept, h: F.leaky_relu(h, 0.5),
        _layer(model, draw, lambda: nn.ReLU(inplace)),
        _layer(model, draw, lambda: nn.ReLU6(inplace)),
        _layer(model, draw, nn.Dropout),
        _layer(model, draw, nn.Identity),
    ]  # fmt: skip
    if h.dim() > 1 and h.shape[1] % 2 == 0:
        plain.append(halves)
    return draw.choice(plain)


def _image(model: RandomModule, draw: random.Random, h: torch.Tensor) -> Callable:
    """Steps on [rows, channels, side, side]."""
    channels = h.shape[1]
    bias = draw.random() < 0.5
    choices = [
        lambda: _layer(model, draw, lambda: nn.Conv2d(channels, C, 3, padding=1, bias=bias)),
        lambda: _layer(model, draw, lambda: nn.Conv2d(channels, C, 1)),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm2d(channels))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm2d(channels))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.GroupNorm(2, channels))),
        lambda: lambda m, kept, h: h.flatten(1),
        lambda: lambda m, kept, h: h.view(h.size(0), -1),
        lambda: lambda m, kept, h: h.flatten(2).transpose(1, 2),
    ]
    if h.shape[-1] >= 3:
        choices += [
            lambda: _layer(model, draw, lambda: nn.MaxPool2d(2)),
            lambda: lambda m, kept, h: F.max_pool2d(h, 3, 1, 1),
            lambda: _layer(model, draw, lambda: nn.AvgPool2d(3, 1)),
            lambda: lambda m, kept, h: F.avg_pool2d(h, 2),
        ]
    return draw.choice(choices)()


def _rows(model: RandomModule, draw: random.Random, h: torch.Tensor) -> Callable:
    """Steps on [..., features]."""
    width, bias = h.shape[-1], draw.random() < 0.5
    linears = [i for i, layer in enumerate(model.layers) if type(layer) is nn.Linear]
    choices = [
        lambda: _layer(model, draw, lambda: nn.Linear(width, WIDTH, bias)),
        lambda: _layer(model, draw, lambda: nn.Linear(width, WIDTH, bias)),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.LayerNorm(width))),
        lambda: _layer(model, draw, lambda: nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Sequential(
            nn.Linear(WIDTH, WIDTH), _norm(draw, nn.BatchNorm1d(WIDTH if h.dim() == 2 else h.shape[1]))))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm1d(h.shape[1]))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm1d(h.shape[1]))),
    ]  # fmt: skip
    for at in linears:
        weight = model.layers[at].weight
        if weight.shape[0] == width:
            choices.append(lambda at=at: lambda m, kept, h: F.linear(h, m.layers[at].weight.t()))
            choices.append(lambda at=at: lambda m, kept, h: h @ m.layers[at].weight[:, :WIDTH] * 0.5)
        if weight.shape[1] == width:
            choices.append(lambda at=at: lambda m, kept, h: F.linear(h, m.layers[at].weight * 0.5))
            choices.append(lambda at=at: lambda m, kept, h: F.linear(h, m.layers[at].weight[:3].repeat(2, 1)))
    if h.dim() == 3 and h.shape[1] == h.shape[2]:
        choices.append(lambda: lambda m, kept, h: h + h.transpose(1, 2))
    return draw.choice(choices)()


HOOKS = (
    lambda m, i, o: o * 3,
    lambda m, i, o: o.relu(),
    lambda m, i, o: None,
    lambda m, i, o: (o + i[0]) if isinstance(i[0], torch.Tensor) and i[0].shape == o.shape else o - 0.5,
)
PRE_HOOKS = (lambda m, i: (i[0] * 0.5,), lambda m, i: None, lambda m, i: (i[0] + 0.125,))


def random_module(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A module in evaluation mode without gradients, and an input that it takes."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = draw.choice([(C, SIDE, SIDE), (C, SIDE, SIDE), (WIDTH,), (3, WIDTH), (WIDTH, WIDTH)])
        x = torch.randn(draw.choice([1, 2, 3, 4]), *shape)
        model = RandomModule().eval()
        for _ in range(draw.randint(3, 12)):
            _grow(model, draw, x)
        for layer in list(model.layers):
            if draw.random() < 0.12:
                layer.register_forward_hook(draw.choice(HOOKS))
            if draw.random() < 0.06:
                layer.register_forward_pre_hook(draw.choice(PRE_HOOKS))
        if draw.random() < 0.1:
            model.register_forward_hook(draw.choice(HOOKS))
        if draw.random() < 0.1:
            vars(model)["forward"] = model.alternative
        model = model.eval().requires_grad_(False)
        if draw.random() < 0.2:
            model = nn.Sequential(model, nn.Identity())
        return model.eval(), x


def _grow(model: RandomModule, draw: random.Random, x: torch.Tensor) -> None:
    with torch.no_grad():
        try:
            h = RandomModule.forward(model.eval(), x.clone())
        except (RuntimeError, IndexError):
            model.steps.pop()  # the last step does not fit in place
            return
        kind = draw.random()
        if kind < 0.5:
            model.steps.append(_anywhere(model, draw, h))
        elif h.dim() == 4:
            model.steps.append(_image(model, draw, h))
        else:
            model.steps.append(_rows(model, draw, h))
        try:
            model.eval()
            y = RandomModule.forward(model, x.clone())
            if not y.numel() or float(y.abs().max()) > 100:
                model.steps.pop()
        except (RuntimeError, IndexError):
            model.steps.pop()


LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "flipped")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def shapes(
    dims: tuple[int, int] = (0, 4), sides: tuple[int, int] = (0, 4)
) -> strategies.SearchStrategy[tuple[int, ...]]:
    """Shapes with a range of dimensions and of sides; with sides from 0 on also empty ones."""
    return strategies.lists(strategies.integers(*sides), min_size=dims[0], max_size=dims[1]).map(tuple)


@strategies.composite
def broadcastable(draw: Any, count: int = 2, dims: tuple[int, int] = (0, 3), side: int = 3) -> tuple[tuple, ...]:
    """`count` shapes that broadcast together, with dimensions of one and without leading ones."""
    whole = draw(strategies.lists(strategies.integers(1, side), min_size=dims[0], max_size=dims[1]))
    found = []
    for _ in range(count):
        kept = draw(strategies.integers(0, len(whole)))
        ones = [draw(strategies.booleans()) for _ in range(kept)]
        found.append(tuple(1 if one else n for one, n in zip(ones, whole[len(whole) - kept :], strict=True)))
    return tuple(found)


@strategies.composite
def tensors(
    draw: Any,
    shape: Any = None,
    *,
    dtype: Any = torch.float32,
    domain: tuple[float, float] | None = None,
    scheme: Scheme | None = None,
    layouts: Sequence[str] = LAYOUTS,
    special: Sequence[float] = (),
) -> torch.Tensor:
    """Tensors that can be shared, of which a fixed-point number holds every entry exactly, as far as the dtype does.

    Entries are spread over the whole domain, crowded at its ends and near zero on a scale of powers, and may be special
    values. Floating-point entries are multiples of the format's last place.

    Args:
        shape: a shape, or a strategy of shapes; up to 4 dimensions of up to 4 entries unless named.
        dtype: a dtype, or a sequence of them to choose from.
        domain: from where to where; what the scheme takes as an input unless named.
        scheme: the number format, `Scheme()` unless named.
        layouts: of `LAYOUTS`: how entries lie in memory; the same values whatever it is.
        special: values that an entry may have beside, in the domain or not (`float("nan")` to see what refuses it).

    Raises:
        ArgumentError: an empty domain, an unknown layout.
    """
    scheme = scheme or Scheme()
    unit, limit = 2.0**-scheme.frac_bits, scheme.activation_limit
    low, high = domain or (-limit + unit, limit - unit)
    if not low <= high:
        raise ArgumentError(f"a domain goes from a number to a larger one, got {domain}")
    if unknown := set(layouts) - set(LAYOUTS):
        raise ArgumentError(f"layouts are {', '.join(LAYOUTS)}, got {', '.join(sorted(unknown))}")
    of = draw(strategies.sampled_from(dtype)) if isinstance(dtype, (list, tuple)) else dtype
    size = draw(
        shape
        if isinstance(shape, strategies.SearchStrategy)
        else shapes()
        if shape is None
        else strategies.just(tuple(shape))
    )
    layout = draw(strategies.sampled_from(list(layouts)))
    if layout == "expanded" and size:  # one row, seen as many
        size, rows = (1, *size[1:]), size[0]
    else:
        rows = None
    if of == torch.bool:
        entries: strategies.SearchStrategy[Any] = strategies.booleans()
    elif of.is_floating_point:
        entries = _multiples(low, high, unit)
        entries = strategies.one_of(entries, strategies.sampled_from(list(special))) if special else entries
    else:
        info = torch.iinfo(of)
        entries = strategies.integers(max(math.ceil(low), info.min), min(math.floor(high), info.max))
    count = math.prod(size)
    x = torch.tensor(draw(strategies.lists(entries, min_size=count, max_size=count)), dtype=of).reshape(size)
    return _with_layout(x if rows is None else x.expand(rows, *size[1:]), layout)


def _multiples(low: float, high: float, unit: float) -> strategies.SearchStrategy[float]:
    """Multiples of a unit: all over the range, at its ends, and near zero on a logarithmic scale."""
    first, last = math.ceil(low / unit), math.floor(high / unit)
    near = (
        strategies.integers(0, 40)
        .flatmap(lambda k: strategies.sampled_from([1 << k, -(1 << k)]))
        .filter(lambda n: first <= n <= last)
    )
    ends = [n for n in (first, last, 0, first + 1, last - 1) if first <= n <= last]
    return strategies.one_of(strategies.integers(first, last), strategies.sampled_from(ends), near).map(
        lambda n: n * unit
    )


def _with_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same entries in another memory layout, if the shape has one."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.dim():
        return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2]
    if layout == "flipped" and x.dim():
        return x.flip(0).contiguous().flip(0)
    return x


@strategies.composite
def calls(draw: Any, count: int = 2, **how: Any) -> Call:
    """Calls with `count` tensors that broadcast together; `how` are arguments of `tensors`."""
    return Call(*(draw(tensors(shape, **how)) for shape in draw(broadcastable(count))))


@strategies.composite
def schemes(draw: Any, frac_bits: tuple[int, int] = (1, 26), relu: Sequence[str] = ("exact",)) -> Scheme:
    """Number formats: fraction bits, the limit of activations that leaves room for products, network, range check."""
    bits = draw(strategies.integers(*frac_bits))
    limit = draw(strategies.one_of(strategies.none(), strategies.integers(1, max(1, 61 - 2 * bits))))
    network = draw(strategies.sampled_from(["lan", "wan"]))
    return Scheme(
        bits,
        relu=draw(strategies.sampled_from(list(relu))),
        network=network,
        range_check=draw(strategies.booleans()),
        limit_bits=limit,
    )


def modules() -> strategies.SearchStrategy[tuple[nn.Module, torch.Tensor]]:
    """Small modules, each with an input: layers, hooks, tied weights, in-place code, branches on shapes.

    They are in evaluation mode, and three parties run them in milliseconds.
    """
    return strategies.integers(0, 2**32 - 1).map(random_module)


@strategies.composite
def sessions(draw: Any, answering: tuple[int, int] = (1, 3), reference: bool = True) -> Session:
    """Sessions in this process, with several answering parties, with or without a dealer, or the reference."""
    if reference and draw(strategies.booleans()):
        return Session(reference=True)
    return Session(answering=draw(strategies.integers(*answering)), dealer=draw(strategies.sampled_from(["Q", "D"])))
