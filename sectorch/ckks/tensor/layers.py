"""Handlers of layers with plain weights: linear, convolutions, average pools, batch normalisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import DtypeError, UnsupportedOpError
from ..scheme.arithmetic import add_numbers, times_numbers
from ..scheme.bounds import most
from .encrypted import CKKSTensor
from .packing import index_of, plain, taken
from .table import implements, wrap
from .weighted import summed, weighted

_T = torch.Tensor


def _weights(weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(weight, CKKSTensor) or isinstance(bias, CKKSTensor):
        raise DtypeError(
            "a layer's weights are plain at the evaluator; encrypted ones take ckks.inner or ckks.EncryptedMatrix"
        )
    return plain(weight), None if bias is None else plain(bias)


def _listed(bias: torch.Tensor | None) -> list[float] | None:
    return None if bias is None or bias.is_meta else bias.tolist()


@implements("linear", F.linear)
def linear(x: Any, weight: Any, bias: Any = None) -> CKKSTensor:
    """x [B, ..., in], weight [out, in] -> [B, ..., out]; one level."""
    weight, bias = _weights(weight, bias)
    if len(x.full_shape) < 2:
        raise UnsupportedOpError("linear over the batch dimension would mix samples; the input needs a batch in front")
    lead, positions = x.row_shape[:-1], torch.Size(x.row_shape[:-1]).numel()
    gather = index_of(x).reshape(positions, -1) if lead else None
    c = weighted(x.cipher, weight, gather, bias=_listed(bias))
    if positions > 1:
        c = taken(c, torch.arange(c.count).view(-1, positions).t())
    return wrap(x, c, (*lead, weight.shape[0]))


@implements("matmul", torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm)
def matmul(x: Any, y: Any) -> CKKSTensor:
    """An encrypted [B, ..., in] times a plain [in, out]; one level."""
    if not isinstance(x, CKKSTensor) or isinstance(y, CKKSTensor) or y.dim() != 2:
        raise UnsupportedOpError(
            "matmul takes an encrypted [B, ..., in] and a plain [in, out]; see ckks.EncryptedMatrix"
        )
    return linear(x, y.t())


@implements("conv2d", F.conv2d)
def conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> CKKSTensor:
    """[B, C, H, W] -> [B, O, OH, OW]; one level."""
    return _conv(x, weight, bias, stride, padding, dilation, groups, 2)


@implements("conv1d", F.conv1d)
def conv1d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> CKKSTensor:
    """[B, C, L] -> [B, O, OL]; one level."""
    return _conv(x, weight, bias, stride, padding, dilation, groups, 1)


def _pair(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value) * (rank if len(value) == 1 else 1)


def _windows(
    index: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, dilation: tuple, extra: tuple = (0, 0)
) -> torch.Tensor:
    """index [C, *spatial] -> [positions.., C, *kernel], -1 where padded."""
    rank = len(kernel)
    pads = [p for d in reversed(range(rank)) for p in (padding[d][0], padding[d][1] + extra[d])]
    index = F.pad(index, pads, value=-1)
    for d in range(rank):
        reach = dilation[d] * (kernel[d] - 1) + 1
        index = index.unfold(d + 1, reach, stride[d])[..., :: dilation[d]]
    return index.movedim(0, rank)


def _conv(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, rank: int
) -> CKKSTensor:
    weight, bias = _weights(weight, bias)
    if len(x.full_shape) != rank + 2:
        raise UnsupportedOpError(f"conv{rank}d takes an encrypted tensor with a batch: {rank + 2} dimensions")
    stride, dilation = _pair(stride, rank), _pair(dilation, rank)
    kernel = tuple(weight.shape[2:])
    if padding == "valid":
        padding = 0
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = tuple((w // 2, w - w // 2) for w in whole)
    else:
        sides = tuple((p, p) for p in _pair(padding, rank))
    windows = _windows(index_of(x), kernel, stride, sides, dilation)
    out_shape = windows.shape[:rank]
    positions = out_shape.numel()
    parts, per_in, per_out = [], weight.shape[1], weight.shape[0] // groups
    for g in range(groups):
        columns = windows.narrow(rank, g * per_in, per_in).reshape(positions, -1)
        if groups == 1:
            parts.append(weighted(x.cipher, weight.flatten(1), columns, f"a conv{rank}d", _listed(bias)))
            continue
        used = torch.unique(columns[columns >= 0])
        inner = torch.where(columns < 0, -1, torch.searchsorted(used, columns.clamp(min=0)))
        own = slice(g * per_out, (g + 1) * per_out)
        mine = _listed(None if bias is None else bias[own])
        parts.append(weighted(taken(x.cipher, used), weight[own].flatten(1), inner, f"a conv{rank}d", mine))
    c = parts[0]
    if groups > 1:
        largest, error = most(p.largest for p in parts), most(p.error for p in parts)
        c = replace(c, data=torch.cat([p.data for p in parts]), largest=largest, error=error)
    return wrap(x, c, (weight.shape[0], *out_shape))


def _pooled(x: CKKSTensor, groups: torch.Tensor, divisors: list[float], shape: tuple) -> CKKSTensor:
    """Means of groups of ciphertexts: no level if all divisors are equal."""
    c = summed(x.cipher, groups)
    if len(set(divisors)) == 1:
        return wrap(x, replace(c, factor=c.factor / divisors[0]), shape)
    return wrap(x, times_numbers(c, [1.0 / d for d in divisors], "an average over windows of several sizes"), shape)


def _avg_pool(
    x: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include_pad: bool, divisor: Any, rank: int
) -> CKKSTensor:
    if ceil_mode:
        raise UnsupportedOpError("avg_pool with ceil_mode=True is not supported on CKKSTensors; pad the input instead")
    kernel = _pair(kernel, rank)
    stride = _pair(stride, rank) if stride not in (None, ()) and stride != [] else kernel
    sides = tuple((p, p) for p in _pair(padding, rank))
    windows = _windows(index_of(x), kernel, stride, sides, (1,) * rank).movedim(rank, 0)
    shape = windows.shape[: rank + 1]
    groups = windows.reshape(shape.numel(), -1)
    if divisor:
        divisors = [float(divisor)] * len(groups)
    elif include_pad:
        divisors = [float(groups.shape[1])] * len(groups)
    else:
        divisors = (groups >= 0).sum(dim=1).double().tolist()
    return _pooled(x, groups, divisors, shape)


@implements("avg_pool2d", F.avg_pool2d)
def avg_pool2d(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: Any = None) -> CKKSTensor:  # fmt: skip
    """No level: the divisor waits for the next weights."""
    return _avg_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, 2)


@implements("avg_pool1d", F.avg_pool1d)
def avg_pool1d(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
               count_include_pad: bool = True) -> CKKSTensor:  # fmt: skip
    return _avg_pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad, None, 1)


def _adaptive(x: CKKSTensor, sizes: Any, rank: int) -> CKKSTensor:
    spatial = x.row_shape[-rank:]
    sizes = tuple(s if o is None else o for s, o in zip(spatial, _pair(sizes, rank), strict=True))
    index = index_of(x)
    members = [index]
    for d, size in enumerate(sizes):
        length, axis = spatial[d], d - rank
        cuts = [(i * length // size, -(-(i + 1) * length // size)) for i in range(size)]
        members = [m.narrow(m.dim() + axis, a, b - a) for m in members for a, b in cuts]
    channels = index.shape[: index.dim() - rank].numel()
    rows = [m.reshape(channels, -1) for m in members]
    widest = max(r.shape[1] for r in rows)
    padded = torch.stack([F.pad(r, (0, widest - r.shape[1]), value=-1) for r in rows], dim=1)
    groups = padded.reshape(-1, widest)
    divisors = (groups >= 0).sum(dim=1).double().tolist()
    return _pooled(x, groups, divisors, (*x.row_shape[:-rank], *sizes))


@implements("adaptive_avg_pool2d", F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(x: CKKSTensor, output_size: Any) -> CKKSTensor:
    """No level where all windows have one size, else one."""
    return _adaptive(x, output_size, 2)


@implements("adaptive_avg_pool1d", F.adaptive_avg_pool1d)
def adaptive_avg_pool1d(x: CKKSTensor, output_size: Any) -> CKKSTensor:
    return _adaptive(x, output_size, 1)


@implements("batch_norm", F.batch_norm, torch.batch_norm)
def batch_norm(x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: Any = False,
               momentum: float = 0.1, eps: float = 1e-5, *_: Any) -> CKKSTensor:  # fmt: skip
    """Evaluation mode only; one level (none if folded into the layer before: `fhe_friendly`)."""
    if training or running_mean is None:
        raise UnsupportedOpError(
            "batch_norm in training mode needs the batch's own statistics: call model.eval() first"
        )
    factor = (plain(running_var) + eps).rsqrt() * (1.0 if weight is None else plain(weight))
    offset = -plain(running_mean) * factor + (0.0 if bias is None else plain(bias))
    each = torch.Size(x.row_shape[1:]).numel()
    c = x.cipher
    spread_factor = factor.repeat_interleave(each).tolist() if not factor.is_meta else [0.0] * c.count
    c = times_numbers(c, spread_factor, "a batch_norm")
    return wrap(x, c if offset.is_meta else add_numbers(c, offset.repeat_interleave(each).tolist()), x.row_shape)
