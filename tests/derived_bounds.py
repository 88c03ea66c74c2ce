"""How far a fixed-point run of a module may be from the module in float64: an error bound carried along beside it.

Running error analysis (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 3.3): every element has a bound on
how far its fixed-point counterpart is, and each operation says what it makes of its operands' bounds and adds what it
rounds itself, as docs/ops.md states it. An operation without a rule raises. Bounds share storage as the values do, so
code in place and views are followed.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

HALF = 2.0**-21
"""Half a unit in the last place: what rounding to 20 fraction bits may change."""

T = torch.Tensor
STRUCTURE = {
    T.view, T.reshape, T.flatten, T.transpose, T.permute, T.contiguous, T.clone, T.__getitem__, T.chunk, torch.chunk,
    T.t, torch.flatten, T.squeeze, T.unsqueeze,
}  # fmt: skip
PLAIN = {T.size, T.dim, T.__len__, T.numel, T.is_contiguous}


class Bounded(torch.Tensor):
    """float64 values with `error` [same shape], and `fold`: what a folded weight's rounding may add in its place."""

    error: torch.Tensor
    fold: float

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in PLAIN:
            return func(*_plain(args), **kwargs)
        if func in STRUCTURE:
            x = args[0]
            return _map(func(*_plain(args), **kwargs), func(x.error, *args[1:], **kwargs), x.fold)
        if func is torch.cat:
            return _wrapped(func(_plain(args[0]), *args[1:], **kwargs), torch.cat([error_of(v) for v in args[0]],
                            *args[1:], **kwargs), max(fold_of(v) for v in args[0]))  # fmt: skip
        rule = RULES.get(func)
        if rule is None:
            raise NotImplementedError(f"no error bound for {func}")
        fold = max(fold_of(v) for v in args)
        before, named = [_Value(v) for v in args], {key: _Value(v) for key, v in kwargs.items()}
        result = func(*_plain(args), **_plain(kwargs))
        error, *more = rule(*before, result=result, fold=fold, **named)
        fold = max([fold, *more])
        if isinstance(args[0], Bounded) and result.data_ptr() == _plain(args[0]).data_ptr():  # in place
            args[0].error.copy_(error)
            args[0].fold = fold
            return args[0]
        return _wrapped(result, error.expand(result.shape).contiguous(), fold)


class _Value:
    """An argument before the operation: its value, kept from changes in place, and its bound."""

    def __init__(self, v):
        self.v = v.as_subclass(torch.Tensor).clone() if isinstance(v, torch.Tensor) else v
        self.e = error_of(v).clone() if isinstance(v, Bounded) else error_of(v)


def error_of(v) -> torch.Tensor:
    if isinstance(v, Bounded):
        return v.error
    if torch.is_tensor(v):
        return torch.full(v.shape, HALF, dtype=torch.float64)
    return torch.tensor(HALF, dtype=torch.float64)


def fold_of(v) -> float:
    return v.fold if isinstance(v, Bounded) else 0.0


def _plain(v):
    if isinstance(v, (tuple, list)):
        return type(v)(_plain(x) for x in v)
    if isinstance(v, dict):
        return {key: _plain(x) for key, x in v.items()}
    return v.as_subclass(torch.Tensor) if isinstance(v, Bounded) else v


def _wrapped(value: torch.Tensor, error: torch.Tensor, fold: float) -> Bounded:
    out = value.as_subclass(Bounded)
    out.error, out.fold = error, fold
    return out


def _map(value, error, fold):
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, e, fold) for v, e in zip(value, error, strict=True))
    return _wrapped(value, error, fold)


def same(x, *_, **__):
    return (x.e,)


def slope(x, *_, **__):
    return (x.e + HALF * (1 + x.v.abs()),)


def added(x, y, **_):
    return (x.e + y.e,)


def product(x, y, result, fold):
    y_v = y.v if torch.is_tensor(y.v) else torch.tensor(float(y.v))
    x_v = x.v if torch.is_tensor(x.v) else torch.tensor(float(x.v))
    return (x_v.abs() * y.e + y_v.abs() * x.e + x.e * y.e + HALF + fold,)


def quotient(x, y, result, fold):
    y.v, y.e = 1.0 / y.v, torch.tensor(HALF)
    return product(x, y, result, fold)


def linear(x, weight, bias=None, result=None, fold=0.0):
    rounded = (x.v.abs() + x.e).sum(-1, keepdim=True) * HALF
    return (F.linear(x.e, weight.v.abs().double()) + rounded + 2 * HALF + fold, float(rounded.max()))


def matmul(x, weight, result, fold):
    return linear(x, _Value(weight.v.mT), result=result, fold=fold)


def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, result=None, fold=0.0):
    places = [getattr(v, "v", v) for v in (stride, padding, dilation, groups)]
    ones = torch.ones_like(weight.v).double()
    rounded = F.conv2d(x.v.abs() + x.e, ones, None, *places) * HALF
    return F.conv2d(x.e, weight.v.abs().double(), None, *places) + rounded + 2 * HALF + fold, float(rounded.max())


def batch_norm(x, mean, var, weight, bias, training=None, momentum=None, eps=None, result=None, fold=0.0):
    shape = [1, -1] + [1] * (x.v.dim() - 2)
    gain = (weight.v.double() / (var.v.double() + eps.v).sqrt()).abs().reshape(shape)
    centre = mean.v.double().abs().reshape(shape)
    return (gain * x.e + HALF * (x.v.abs() + x.e + centre + 3 + gain) + fold,)


def _standardised(x: torch.Tensor, e: torch.Tensor, eps: float, gain: torch.Tensor):
    """Of (x - mean) / sqrt(var + eps) over the last dimension, for every x' within e of x, and the norm's own error."""
    centred, a = x - x.mean(-1, keepdim=True), e + e.mean(-1, keepdim=True)
    var = centred.square().mean(-1, keepdim=True)
    moved = (2 * centred.abs() * a + a * a).mean(-1, keepdim=True)
    s, most = (var + eps) ** -0.5, ((var - moved).clamp(min=0) + eps) ** -0.5
    y = (centred * s).abs()
    own = torch.maximum(torch.tensor(16 * HALF), 2e-6 * y)  # 8 units, or what the row states
    return gain * (a * most + centred.abs() * (most - s) + own) + (y + 3) * HALF


def layer_norm(x, shape, weight=None, bias=None, eps=None, result=None, fold=0.0):
    assert len(shape.v) == 1
    return (_standardised(x.v, x.e, eps.v, weight.v.double().abs()),)


def group_norm(x, groups, weight=None, bias=None, eps=None, result=None, fold=0.0):
    rows = [v.reshape(len(v), groups.v, -1) for v in (x.v, x.e)]
    gain = weight.v.double().abs().reshape(1, -1, *[1] * (x.v.dim() - 2)).expand_as(x.v).reshape(rows[0].shape)
    return (_standardised(*rows, eps.v, gain).reshape(x.v.shape),)


def _again(f, x, args, kwargs):
    return f(x.e, *[v.v for v in args], **{key: v.v for key, v in kwargs.items()})


def mean(x, *args, result, fold, **kwargs):
    return (_again(T.mean, x, args, kwargs) + HALF,)


def max_pool(x, *args, result, fold, **kwargs):
    return (_again(F.max_pool2d, x, args, kwargs),)


def avg_pool(x, *args, result, fold, **kwargs):
    return (_again(F.avg_pool2d, x, args, kwargs) + HALF * (1 + x.v.abs().max()) + fold,)


RULES = {
    F.relu: same, torch.relu: same, torch.relu_: same, T.relu: same, T.relu_: same, F.hardtanh: same, F.relu6: same,
    F.dropout: same, T.clamp: same, torch.clamp: same, F.leaky_relu: slope,
    T.add: added, T.__add__: added, T.__radd__: added, T.__iadd__: added, T.add_: added, T.__sub__: added, T.sub: added,
    T.mul: product, T.__mul__: product, T.__rmul__: product, T.__imul__: product, T.mul_: product,
    T.__truediv__: quotient, T.div: quotient,
    F.linear: linear, T.matmul: matmul, T.__matmul__: matmul, F.conv2d: conv2d, torch.conv2d: conv2d,
    F.batch_norm: batch_norm, F.layer_norm: layer_norm, F.group_norm: group_norm, T.mean: mean, torch.mean: mean,
    F.max_pool2d: max_pool, torch.max_pool2d: max_pool, F.avg_pool2d: avg_pool, torch._C._nn.avg_pool2d: avg_pool,
}  # fmt: skip


@torch.no_grad()
def bounded(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's result in float64, and how far a fixed-point result may be from it, element by element."""
    x = x.double()
    y = copy.deepcopy(model).double()(_wrapped(x.clone(), torch.full_like(x, HALF), 0.0))
    return y.as_subclass(torch.Tensor), y.error
