"""Linear layers and matrix products."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import DtypeError, ShapeError
from ..ring import products
from ..ring.contractions import einsum as contracted
from ..ring.contractions import kept_letters, letters_of, result_letters
from ..tensor import SharedTensor
from ..tensor.table import Context, implements, stepwise
from .bilinear import bilinear
from .common import local, refuse, total

T = torch.Tensor


def _same_dtype(x: Any, y: Any) -> None:
    if x.dtype != y.dtype:
        raise DtypeError(
            f"expected both operands to have the same dtype, but got {x.dtype} and {y.dtype}; use x.to({y.dtype})"
        )


@implements("matmul", torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm, torch.mv,
            T.mv, torch.dot, T.dot, torch.vdot, note="1 round for two secrets")  # fmt: skip
def matmul(context: Context, x: Any, y: Any) -> SharedTensor:
    _same_dtype(x, y)
    return bilinear(context, products.matmul, x, y, x.shape[-1], (rows_of, columns_of))


def rows_of(w: torch.Tensor) -> torch.Tensor:
    """Of a left operand of matmul."""
    return w.sum(-1)


def columns_of(w: torch.Tensor) -> torch.Tensor:
    """Of a right one."""
    return w.sum(-2) if w.dim() > 1 else w.sum(-1)


def _kernels(w: torch.Tensor) -> torch.Tensor:
    """Of a convolution's weight: at most, since the padding is zero."""
    return w.flatten(1).sum(1)


def _all(w: torch.Tensor) -> torch.Tensor:
    """Of any operand: no output has more than all of it."""
    return w.sum()


@implements("outer", torch.outer, T.outer, torch.ger, note="1 round for two secrets")
def outer(context: Context, x: Any, y: Any) -> SharedTensor:
    return bilinear(context, torch.outer, x, y)


@implements("addmm", torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.addmv, T.addmv,
            note="1 round for two secrets")  # fmt: skip
def addmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = torch.matmul(x, y)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


@implements("linear", F.linear, note="PrivHFL, Figure 3")
def linear(context: Context, x: Any, weight: Any, bias: Any = None) -> SharedTensor:
    _same_dtype(x, weight)
    if not isinstance(x, SharedTensor) and not isinstance(weight, SharedTensor):
        return total(context, F.linear(x, weight), bias)
    terms = x.shape[-1]
    if weight.dim() == 1:
        y = bilinear(context, lambda a, w, *_: products.matmul(a, w), x, weight, terms, (rows_of, columns_of))
    elif isinstance(x, SharedTensor) and not isinstance(weight, SharedTensor):
        y = bilinear(context, products.Linear(), x, weight, terms, (rows_of, rows_of))
    else:
        y = bilinear(
            context, lambda a, w, *_: products.matmul(a, w.transpose(-1, -2)), x, weight, terms, (rows_of, rows_of)
        )
    return _with_bias(context, x, y, bias)


def _with_bias(context: Context, x: Any, y: SharedTensor, bias: Any) -> SharedTensor:
    if bias is None:
        return y
    return total(context, y, bias)


def _terms(equation: str, operands: tuple) -> int:
    """How many products one output of an einsum sums up. A dimension of one may meet a longer one of its letter."""
    letters, sizes = letters_of(equation, operands), {}
    for letter, n in zip(letters, (n for o in operands for n in o.shape), strict=True):
        sizes[letter] = max(n, sizes.get(letter, 1))
    kept = kept_letters(equation, letters)
    return math.prod(n for letter, n in sizes.items() if letter not in kept)


@dataclass(frozen=True)
class _Contracted:
    """The magnitudes of an einsum's operand that one output sums up, each so many times, together."""

    dims: tuple[int, ...]
    times: int

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        return self.times * (w.sum(self.dims) if self.dims else w)


def _contracted(equation: str, operands: tuple, at: int) -> _Contracted:
    letters, before = letters_of(equation, operands), sum(o.dim() for o in operands[:at])
    kept, shape = kept_letters(equation, letters), operands[at].shape
    dims = tuple(d for d in range(len(shape)) if letters[before + d] not in kept)
    return _Contracted(dims, _terms(equation, operands) // max(1, math.prod(shape[d] for d in dims)))


MOST_ENTRIES = 1 << 22
"""Of a product of plain or private operands, which is made before a secret one takes it."""


def _two_at_a_time(equation: str, operands: tuple) -> Any:
    """An einsum of many operands: the pair first of which the fewest are secret, and whose result is the smallest."""
    letters = letters_of(equation, operands)
    names = {token: chr(ord("A") + i) for i, token in enumerate(dict.fromkeys(letters))}
    names = {token: name if name <= "Z" else chr(ord(name) + 6) for token, name in names.items()}
    rest, parts = iter(letters), []
    for operand in operands:
        parts.append(("".join(names[next(rest)] for _ in range(operand.dim())), operand))
    out = "".join(names[token] for token in result_letters(equation, letters))
    sizes: dict[str, int] = {}
    for spelled, operand in parts:
        for name, size in zip(spelled, operand.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))

    def kept(i: int, j: int) -> str:
        wanted = set(out).union(*(spelled for k, (spelled, _) in enumerate(parts) if k not in (i, j)))
        return "".join(name for name in dict.fromkeys(parts[i][0] + parts[j][0]) if name in wanted)

    def cost(pair: tuple[int, int]) -> tuple:
        i, j = pair
        entries = math.prod(sizes[name] for name in kept(i, j))
        shared = sum(isinstance(parts[k][1], SharedTensor) for k in pair)
        return entries > MOST_ENTRIES, not set(parts[i][0]) & set(parts[j][0]), shared, entries

    while len(parts) > 2:
        i, j = min(itertools.combinations(range(len(parts)), 2), key=cost)
        spelled = kept(i, j)
        made = torch.einsum(f"{parts[i][0]},{parts[j][0]}->{spelled}", parts[i][1], parts[j][1])
        parts = [*(part for k, part in enumerate(parts) if k not in (i, j)), (spelled, made)]
    return torch.einsum(f"{parts[0][0]},{parts[1][0]}->{out}", parts[0][1], parts[1][1])


@implements("einsum", torch.einsum, note="1 round for two secrets; of many operands two at a time")
@stepwise
def einsum(context: Context, equation: str, *operands: Any) -> SharedTensor:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if len(operands) == 1:
        return local(context, partial(torch.einsum, equation), operands[0], terms=_terms(equation, operands))
    if len(operands) != 2:
        return _two_at_a_time(equation, operands)
    x, y = operands
    sums = _contracted(equation, operands, 0), _contracted(equation, operands, 1)
    return bilinear(context, partial(contracted, equation), x, y, _terms(equation, operands), sums)


def _one_dimensional(*given: Any) -> None:
    """Torch's rules for shapes let other biases and statistics pass, and its kernels do not."""
    for of_channels in given:
        if of_channels is not None and of_channels.dim() != 1:
            raise ShapeError(f"expected one dimension, an entry for each channel, got {list(of_channels.shape)}")


def not_negative(*paddings: Any) -> None:
    """Nor do they refuse negative paddings."""
    if any(min(_pair(padding)) < 0 for padding in paddings if not isinstance(padding, str)):
        raise ShapeError(f"negative padding is not supported, got {', '.join(map(str, paddings))}")


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return int(value), int(value)
    if len(value) == 1:
        return value[0], value[0]
    return int(value[0]), int(value[1])


def _padded(x: Any, padding: Any, kernel: tuple[int, ...], stride: Any, dilation: tuple[int, ...]) -> tuple[Any, tuple]:
    """Resolve padding="same" and "valid"; an uneven "same" is padded explicitly."""
    if not isinstance(padding, str):
        return x, padding
    if padding == "valid":
        return x, (0,) * len(kernel)
    both = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if all(b % 2 == 0 for b in both):
        return x, tuple(b // 2 for b in both)
    widths = [side for b in reversed(both) for side in (b // 2, b - b // 2)]
    return F.pad(x, widths), (0,) * len(kernel)


@implements("conv2d", torch.conv2d, F.conv2d, note="PrivHFL, Figure 3")
def conv2d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> torch.Tensor:  # fmt: skip
    _same_dtype(x, weight)
    _one_dimensional(bias)
    not_negative(padding)
    stride, dilation = _pair(stride), _pair(dilation)
    x, padding = _padded(x, padding, tuple(weight.shape[2:]), stride, dilation)
    if x.dim() == 3:
        whole = torch.conv2d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return whole.squeeze(0)
    product = products.Conv2d(stride, _pair(padding), dilation, groups)
    y = bilinear(context, product, x, weight, math.prod(weight.shape[1:]), (_all, _kernels))
    return _with_bias(context, x, y, None if bias is None else bias.view(-1, 1, 1))


@implements("conv1d", torch.conv1d, F.conv1d, note="as conv2d with height one")
def conv1d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> torch.Tensor:  # fmt: skip
    _one_dimensional(bias)
    if any(isinstance(v, (tuple, list)) and len(v) != 1 for v in (stride, padding, dilation)):
        raise ShapeError(f"conv1d takes one number for stride, padding and dilation, got {(stride, padding, dilation)}")
    stride, dilation = _pair(stride)[0], _pair(dilation)[0]
    x, padding = _padded(x, padding, tuple(weight.shape[2:]), (stride,), (dilation,))
    padding = _pair(padding)[0]
    if x.dim() == 2:
        return torch.conv1d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    y = torch.conv2d(
        x.unsqueeze(2), weight.unsqueeze(2), bias, (1, stride), (0, padding), (1, dilation), groups
    )  # fmt: skip
    return y.squeeze(2)


@implements(
    "batch_norm",
    F.batch_norm,
    note="evaluation mode; an affine map at A's secret scale, of an input or [N, C] to 2^-40, else to 2^-20",
)
def batch_norm(
    context: Context, x: SharedTensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> SharedTensor:  # fmt: skip
    if training or running_mean is None or running_var is None:
        refuse("batch_norm on batch statistics", "use running statistics: call model.eval()")
    _one_dimensional(running_mean, running_var, weight, bias)
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    shape = (1, -1) + (1,) * (x.dim() - 2)
    # Of features and of an input as it was given; planes between layers are as large as the net's own values.
    fine = x.given or x.dim() == 2
    return bilinear(context, torch.mul, x, scale.view(shape), fine=fine) + shift.view(shape)


@implements("batch_norm", torch.batch_norm)
def native_batch_norm(
    context: Context, x: SharedTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool = True,
) -> SharedTensor:  # fmt: skip
    """torch.batch_norm has the weights before the statistics."""
    return batch_norm(context, x, running_mean, running_var, weight, bias, training, momentum, eps)


@implements("matmul", T.__rmatmul__)
def reflected_matmul(context: Context, x: Any, y: Any) -> SharedTensor:
    """y @ x."""
    return matmul(context, y, x)


@implements("addmm", torch.addbmm, T.addbmm)
def addbmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = torch.matmul(x, y).sum(0)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)
