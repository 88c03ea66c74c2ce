"""Steps of random programs: what may follow, and how far its result may be from torch's.

Errors are counted in ulps of 2^-20. `ready(e)` is the error of an operand that may have to be truncated first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..backend import Series
from ..ops import series as fitted
from .optional import strategies as st

ULP = 2.0**-20


def series(which: Series) -> float:
    """Ulps of a series: its fit, dealt values rounded to 24 bits, public multipliers to 22 (two a term)."""
    return 2**20 * (which.error + which.weight * 2.0**-25 + len(which.cos) * 2.0**-22)


GELU, RECIPROCAL, TERM = series(fitted.GELU), series(fitted.RECIPROCAL), series(fitted.EXP) + 2
SIG = series(fitted.SIGMOID) + 0.125 + 0.9
"""A slope of 1/4 times 1/2, and e^-14 beyond the interval."""

LIMIT = 256.0
"""Programs keep their values below this: 2^8 and twice 26 fraction bits leave 2 of the 62 bits."""


@dataclass(frozen=True)
class Value:
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
class Step:
    """One assignment: source text, the variables it reads, the function, and the error of its result."""

    text: str
    reads: tuple[int, ...]
    run: Callable = field(repr=False)
    error: float = 0.0

    def __str__(self) -> str:
        return self.text.format(*(f"v{i}" for i in self.reads))


def ready(value: Value) -> float:
    return value.error + 1


def product(x: Value, y: Value, terms: int = 1) -> float:
    """Error of a sum of products."""
    e, d = ready(x), ready(y)
    return terms * (x.size * d + y.size * e + e * d * ULP)


def times(x: Value, factor: float) -> float:
    """Error of a public multiple, which may be truncated."""
    return abs(factor) * ready(x) + x.size / 2 + 1


def pick(draw: Any, values: list[Value], fits: Callable[[Value], bool] = lambda v: True) -> Any:
    """The number of a variable that fits, a recent one more often; None where none does."""
    found = [i for i, value in enumerate(values) if fits(value)]
    return draw(st.sampled_from(found + 2 * found[-2:])) if found else None


def dim_of(draw: Any, x: Value) -> int:
    return draw(st.integers(-len(x.shape), len(x.shape) - 1))


NUMBERS = st.sampled_from([0.5, 0.3, -1.0, 2, 3, -0.25, 1.7, 0, 0.125])


def add(draw, values):
    i, j = pick(draw, values), pick(draw, values)
    sign = draw(st.sampled_from(["+", "-"]))
    run = torch.add if sign == "+" else torch.sub
    return Step(f"{{}} {sign} {{}}", (i, j), run, values[i].error + values[j].error)


def shifted(draw, values):
    i, c = pick(draw, values), draw(NUMBERS)
    text, run = draw(st.sampled_from([("{} + {c}", lambda x: x + c), ("{c} - {}", lambda x: c - x)]))
    return Step(text.replace("{c}", str(c)), (i,), run, values[i].error + 0.5)


def multiplied(draw, values):
    i, c = pick(draw, values), draw(NUMBERS)
    return Step(f"{{}} * {c}", (i,), lambda x: x * c, times(values[i], c))


def divided(draw, values):
    i, c = pick(draw, values), draw(st.sampled_from([2, 4.0, 3, -0.5, 0.7]))
    return Step(f"{{}} / {c}", (i,), lambda x: x / c, times(values[i], 1 / c))


def mul(draw, values):
    i, j = pick(draw, values), pick(draw, values)
    return Step("{} * {}", (i, j), torch.mul, product(values[i], values[j]))


def square(draw, values):
    i = pick(draw, values)
    return Step("{}.square()", (i,), torch.square, product(values[i], values[i]))


def matmul(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) > 0)
    if i is None:
        return None
    inner = values[i].shape[-1]
    j = pick(draw, values, lambda v: len(v.shape) > 0 and (v.shape[-2] if len(v.shape) > 1 else v.shape[0]) == inner)
    return None if j is None else Step("{} @ {}", (i, j), torch.matmul, product(values[i], values[j], inner))


def elementwise(draw, values):
    i = pick(draw, values)
    x = values[i]
    text, run, error = draw(
        st.sampled_from(
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
    return Step(text, (i,), run, error)


def extreme(draw, values):
    i, j = pick(draw, values), pick(draw, values)
    name = draw(st.sampled_from(["maximum", "minimum"]))
    return Step(f"torch.{name}({{}}, {{}})", (i, j), getattr(torch, name), max(values[i].error, values[j].error) + 1)


def _apart(x: Value, y: torch.Tensor, error: float) -> bool:
    """Whether a comparison has one answer: the values differ by more than their errors, or have none."""
    if x.error + error == 0:
        return True
    try:
        return bool(((x.plain - y).abs() > (x.error + error) * ULP).all())
    except RuntimeError:  # shapes that do not fit
        return False


def compared(draw, values):
    i = pick(draw, values)
    j = pick(draw, values, lambda v: _apart(values[i], v.plain, v.error))
    if j is None:
        return None
    sign, run = draw(st.sampled_from([(">", torch.gt), ("<=", torch.le), ("==", torch.eq), ("!=", torch.ne)]))
    return Step(f"({{}} {sign} {{}}).double()", (i, j), lambda x, y: run(x, y).double(), 0.0)


def chosen(draw, values):
    i, c = pick(draw, values), draw(st.sampled_from([0.0, 0.5, -0.3]))
    if not _apart(values[i], torch.tensor(c, dtype=torch.float64), 0.5):
        return None
    j, k = pick(draw, values), pick(draw, values)
    return Step(
        f"torch.where({{}} > {c}, {{}}, {{}})",
        (i, j, k),
        lambda x, y, z: torch.where(x > c, y, z),
        max(ready(values[j]), ready(values[k])) + values[k].error,
    )


def reduced(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) > 0)
    if i is None:
        return None
    x, dim, keep = values[i], dim_of(draw, values[i]), draw(st.booleans())
    n = x.shape[dim]
    name, error = draw(
        st.sampled_from(
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
        return Step(f"{{}}.{name}({dim})", (i,), lambda v: getattr(v, name)(dim), error)
    return Step(f"{{}}.{name}({dim}, {keep})", (i,), lambda v: getattr(v, name)(dim, keepdim=keep), error)


def ordered(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) > 0)
    if i is None:
        return None
    dim, n = dim_of(draw, values[i]), values[i].shape[-1]
    levels = math.ceil(math.log2(max(2, max(values[i].shape) * n)))
    return Step(f"{{}}.sort({dim})[0]", (i,), lambda v: v.sort(dim)[0], values[i].error + levels * (levels + 1))


def moved(draw, values):
    i = pick(draw, values)
    x = values[i]
    forms = [
        ("{}.reshape(-1)", lambda v: v.reshape(-1)),
        ("{}.unsqueeze(0)", lambda v: v.unsqueeze(0)),
        ("{}.squeeze()", lambda v: v.squeeze()),
    ]
    if x.shape:
        dim = dim_of(draw, x)
        at = draw(st.integers(0, x.shape[dim] - 1))
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
    text, run = draw(st.sampled_from(forms))
    return Step(text.replace("{}", "{0}"), (i,), run, x.error + 0.5)


def joined(draw, values):
    i = pick(draw, values)
    j = pick(draw, values, lambda v: v.shape == values[i].shape)
    return Step(
        "torch.stack(({}, {}))", (i, j), lambda x, y: torch.stack((x, y)), max(values[i].error, values[j].error)
    )


def pooled(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) in (3, 4) and min(v.shape[-2:]) > 1)
    if i is None:
        return None
    x, pad = values[i], draw(st.sampled_from([0, 1]))
    text, run, error = draw(
        st.sampled_from(
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
    return Step(text, (i,), run, error)


def convolved(draw, values):
    i = pick(draw, values, lambda v: len(v.shape) == 4 and min(v.shape[-2:]) > 1)
    if i is None:
        return None
    x, channels = values[i], values[i].shape[1]
    j = pick(draw, values, lambda v: len(v.shape) == 4 and v.shape[1] == channels and max(v.shape[-2:]) <= 2)
    if j is None:
        return None
    terms = channels * math.prod(values[j].shape[-2:])
    return Step(
        "F.conv2d({}, {}, padding=1)", (i, j), lambda a, b: F.conv2d(a, b, padding=1), product(x, values[j], terms)
    )


KINDS = [
    *[elementwise] * 4,
    *[moved] * 4,
    *[reduced] * 3,
    add,
    shifted,
    multiplied,
    divided,
    mul,
    square,
    matmul,
    extreme,
    compared,
    chosen,
    ordered,
    joined,
    pooled,
    convolved,
]
