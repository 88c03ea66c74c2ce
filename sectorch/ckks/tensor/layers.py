"""Handlers of torch functions on CKKSTensors: layers with plain weights, arithmetic, and changes of shape."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...errors import ArgumentError, DtypeError, ScaleError, SectorchError, UnsupportedOpError
from ...ring.jit import run_in_threads
from ...tensor.table import spell
from ..scheme import loops
from ..scheme.ciphertext import (
    Cipher,
    add_numbers,
    align_all,
    check_capacity,
    empty_like,
    evaluate,
    integer_constants,
    largest_known,
    need_level,
    negate,
    settle,
    times_numbers,
    weight_scale,
    words,
)
from ..scheme.ciphertext import add as add_ciphers
from ..scheme.ciphertext import multiply as multiply_ciphers
from ..scheme.ntt import MAX_PRIME_BITS, row_sum
from .ckks_tensor import (
    CKKSTensor,
    add_location,
    broadcast,
    implements,
    index_of,
    plain,
    plus_plain,
    spread_to,
    take_ciphertexts,
    times_number,
    times_plain,
    wrap,
)

# Linear layers with plain weights over batch-packed ciphertexts, as exact matrix products over residues.
#
# A constant weight w at scale s is the integer round(w s), the same in every slot, so that the ciphertexts of a layer's
# outputs are integer combinations of those of its inputs: residue by residue, the matrix product of the integer weights
# with the residues mod q, reduced once (`loops.weighted_sum_loop`). TenSEAL takes one SEAL product for each pair of an
# input and an output (its `mm`, the reference in tests).

_STEP = 4  # outputs and terms that a compiled loop takes at a time
_CACHE = 1 << 17  # words of input that a loop holds: a MiB, about the second-level cache


def encode_weights(weights: torch.Tensor, c: Cipher) -> torch.Tensor:
    """round(weights * scale) as int64, at the scale that lands on the next level. Error: 1/2 of 1/scale a weight.

    Raises:
        ScaleError: a weight that does not fit 2^61.
    """
    scale = weight_scale(c) * c.multiplier
    largest = float(weights.abs().max()) if weights.numel() else 0.0
    if not math.isfinite(largest) or largest * abs(scale) >= 2.0**61:
        raise ScaleError(
            f"a weight of magnitude {largest:.3g} does not fit scale 2^{math.log2(abs(scale)):.0f}; scale the layer "
            f"down"
        )
    return (weights.double() * scale).round_().to(torch.int64)


def weighted_sums(
    c: Cipher,
    weights: torch.Tensor,
    gather: torch.Tensor | None = None,
    what: str = "a linear layer",
    bias: Sequence[float] | None = None,
) -> Cipher:
    """Output (o, p) = sum_k weights[o, k] * ciphertext gather[p, k] + bias[o]; one level, its rescale left pending.

    Args:
        weights: floating point [out, K].
        gather: int64 [P, K], -1 for a zero (padding); [[0 .. K-1]] unless given.

    Returns:
        out * P ciphertexts, o first.

    Error: sum_k |w_k| e_k, and |x_k| / (2 weight scale) for each rounded weight.

    Raises:
        LevelError, ScaleError, MemoryBudgetError: before anything is computed.
    """
    need_level(c, what)
    positions = 1 if gather is None else gather.shape[0]
    if c.pending and weights.shape[0] * positions > c.count:
        c = settle(c)  # the inputs are fewer than the outputs, so rescale them now
    rows, terms = 1.0, 1
    if not weights.is_meta:
        rows, terms = float(weights.abs().sum(1).max()) if weights.numel() else 0.0, weights.shape[1]
    error = rows * abs(c.multiplier) * c.error + terms * (c.largest + c.error) / (2 * weight_scale(c))
    offset = max(map(abs, bias), default=0.0) if bias is not None else 0.0
    result = replace(
        c, data=c.data[:0], pending=c.pending + 1, factor=1.0, pending_factor=None,
        largest=rows * abs(c.multiplier) * c.largest + offset, error=error, declared=False,
    )  # fmt: skip
    result = check_capacity(replace(result, error=error + 0.5 / result.scale), what)
    integers = None if c.data.is_meta else encode_weights(weights, c)
    out = empty_like(c.data, what, weights.shape[0] * positions)
    result = replace(result, data=out)
    if integers is not None:
        constants = None if bias is None else integer_constants(result, bias)
        _sum_into(out, c, torch.arange(c.count).view(1, -1) if gather is None else gather, integers, constants)
    return result


def gathered_sums(c: Cipher, gather: torch.Tensor) -> Cipher:
    """Output p = sum_k ciphertext gather[p, k], -1 for a zero. No level; the errors add up."""
    terms = int((gather >= 0).sum(1).max()) if gather.numel() else 0
    c = check_capacity(replace(c, largest=terms * c.largest, error=terms * c.error, declared=False), "a sum")
    out = empty_like(c.data, "a sum", gather.shape[0])
    if not c.data.is_meta:
        _sum_into(out, c, gather, torch.ones(1, gather.shape[1], dtype=torch.int64), None)
    return replace(c, data=out)


def _sum_into(
    out: torch.Tensor, c: Cipher, gather: torch.Tensor, integers: torch.Tensor, constants: list[int] | None
) -> None:
    n, size, _, degree = c.data.shape
    span = max(64, min(512, 1 << (_CACHE // (n + 1)).bit_length() - 1))
    source, target, rows = words(c.data), out.numpy(), integers.shape[0]
    # What the loops take four at a time is filled up with zeros, which lie at place n.
    index = np.pad(np.where(gather < 0, n, gather), ((0, 0), (0, -gather.shape[1] % _STEP)), constant_values=n)
    offsets = np.zeros((size, rows), np.int64)
    for j, q in enumerate(c.primes):
        digits, carry = _digits(integers, q)
        for k in range(size):
            if k == 0 and constants is not None:
                offsets[0] = [v % q for v in constants]
            arguments = (source, k, j, index, digits, float(carry), float(q), offsets[k], target, span)
            run_in_threads(degree // span, loops.weighted_sum_loop, *arguments)


def _digits(integers: torch.Tensor, q: int) -> tuple[np.ndarray, int]:
    """Integers [rows, K] as digits [D, rows, K], the highest first, and their base mod q.

    As few as keep every sum of digits times residues mod q, with what is carried into it and added to it, below 2^62:
    one for 28-bit primes and rows that sum to less than 2^34.
    """
    bits = int(integers.abs().max()).bit_length() + 1 if integers.numel() else 1
    for count in range(1, bits + 1):
        width, parts, rest = -(-bits // count), [], integers
        for _ in range(count - 1):
            low = ((rest + (1 << (width - 1))) & ((1 << width) - 1)) - (1 << (width - 1))  # nearest to zero
            parts.append(low)
            rest = (rest - low) >> width
        parts.append(rest)
        if max(row_sum(p) for p in parts) * q + 2.0 ** (MAX_PRIME_BITS + 1) <= 2.0**62:
            break
    else:
        raise ScaleError("a layer has too many terms for exact sums; cut it")
    digits = np.stack([p.numpy() for p in reversed(parts)])
    fill = [(0, 0), *((0, -length % _STEP) for length in digits.shape[1:])]
    return np.pad(digits, fill), pow(2, width, q)


_T = torch.Tensor


def _weights(weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(weight, CKKSTensor) or isinstance(bias, CKKSTensor):
        raise DtypeError(
            "a layer's weights are plain at the evaluator; encrypted ones take ckks.inner or ckks.EncryptedMatrix"
        )
    return plain(weight), None if bias is None else plain(bias)


def _bias_list(bias: torch.Tensor | None) -> list[float] | None:
    return None if bias is None or bias.is_meta else bias.tolist()


@implements("linear", F.linear)
def linear(x: Any, weight: Any, bias: Any = None) -> CKKSTensor:
    """x [B, ..., in], weight [out, in] -> [B, ..., out]; one level."""
    weight, bias = _weights(weight, bias)
    if len(x.full_shape) < 2:
        raise UnsupportedOpError("linear over the batch dimension would mix samples; the input needs a batch in front")
    lead, positions = x.row_shape[:-1], torch.Size(x.row_shape[:-1]).numel()
    gather = index_of(x).reshape(positions, -1) if lead else None
    c = weighted_sums(x.cipher, weight, gather, bias=_bias_list(bias))
    if positions > 1:
        c = take_ciphertexts(c, torch.arange(c.count).view(-1, positions).t())
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
            parts.append(weighted_sums(x.cipher, weight.flatten(1), columns, f"a conv{rank}d", _bias_list(bias)))
            continue
        used = torch.unique(columns[columns >= 0])
        inner = torch.where(columns < 0, -1, torch.searchsorted(used, columns.clamp(min=0)))
        own = slice(g * per_out, (g + 1) * per_out)
        mine = _bias_list(None if bias is None else bias[own])
        parts.append(
            weighted_sums(take_ciphertexts(x.cipher, used), weight[own].flatten(1), inner, f"a conv{rank}d", mine)
        )
    c = parts[0]
    if groups > 1:
        largest, error = largest_known(p.largest for p in parts), largest_known(p.error for p in parts)
        c = replace(c, data=torch.cat([p.data for p in parts]), largest=largest, error=error)
    return wrap(x, c, (weight.shape[0], *out_shape))


def _pooled(x: CKKSTensor, groups: torch.Tensor, divisors: list[float], shape: tuple) -> CKKSTensor:
    """Means of groups of ciphertexts: no level if all divisors are equal."""
    c = gathered_sums(x.cipher, groups)
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


# Sums, products, powers, reductions.


@implements("add", torch.add, _T.add, _T.__add__, _T.__radd__, operator.add)
def add(x: Any, y: Any, *, alpha: float = 1) -> CKKSTensor:
    """No level. Error: the sum of the operands' errors."""
    if not isinstance(x, CKKSTensor):
        return add(mul(y, alpha) if alpha != 1 else y, x)
    rows = broadcast(x, y)
    if not isinstance(y, CKKSTensor):
        return wrap(x, plus_plain(spread_to(x, rows), plain(y) * alpha, rows), rows)
    other = spread_to(y, rows)
    return wrap(x, add_ciphers(spread_to(x, rows), replace(other, factor=other.factor * alpha)), rows)


@implements("sub", torch.sub, _T.sub, _T.__sub__, torch.subtract, _T.subtract, operator.sub)
def sub(x: Any, y: Any, *, alpha: float = 1) -> CKKSTensor:
    if not isinstance(x, CKKSTensor):
        return add(neg(mul(y, alpha) if alpha != 1 else y), x)
    if not isinstance(y, CKKSTensor):
        return add(x, y, alpha=-alpha)
    rows = broadcast(x, y)
    other = spread_to(y, rows)
    if alpha == 1 and (other.factor, other.pending_factor) == (x.cipher.factor, x.cipher.pending_factor):
        return wrap(x, add_ciphers(spread_to(x, rows), other, -1), rows)
    return add(x, y, alpha=-alpha)


@implements("rsub", torch.rsub, _T.__rsub__)
def rsub(x: Any, y: Any, *, alpha: float = 1) -> CKKSTensor:
    return sub(y, x, alpha=alpha)


@implements("neg", torch.neg, _T.neg, _T.__neg__, torch.negative, _T.negative, operator.neg)
def neg(x: CKKSTensor) -> CKKSTensor:
    return wrap(x, negate(x.cipher), x.row_shape)


@implements("mul", torch.mul, _T.mul, _T.__mul__, _T.__rmul__, torch.multiply, _T.multiply, operator.mul)
def mul(x: Any, y: Any) -> CKKSTensor:
    """One level with a tensor of either kind; none with a number, which is public, and with a tensor of a single one
    only if no weights follow. Error of x y: |x| e_y + |y| e_x + e_x e_y.
    """
    if not isinstance(x, CKKSTensor):
        return mul(y, x)
    if not isinstance(y, torch.Tensor):
        return wrap(x, times_number(x.cipher, float(plain(y))), x.row_shape)
    rows = broadcast(x, y)
    if not isinstance(y, CKKSTensor):
        return wrap(x, times_plain(spread_to(x, rows), plain(y), rows), rows)
    left = spread_to(x, rows)
    return wrap(x, multiply_ciphers(left, left if y is x else spread_to(y, rows)), rows)


@implements("div", torch.div, _T.div, _T.__truediv__, torch.true_divide, _T.true_divide, operator.truediv)
def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> CKKSTensor:
    if isinstance(y, CKKSTensor) or rounding_mode is not None:
        raise UnsupportedOpError(
            "division by an encrypted tensor, or with rounding, is no polynomial; use shares for it"
        )
    inverse = 1.0 / plain(y)
    return mul(x, inverse if isinstance(y, torch.Tensor) else float(inverse))


@implements("square", torch.square, _T.square)
def square(x: CKKSTensor) -> CKKSTensor:
    """One level."""
    return wrap(x, multiply_ciphers(x.cipher, x.cipher, "a square"), x.row_shape)


@implements("pow", torch.pow, _T.pow, _T.__pow__, torch.float_power, operator.pow)
def power(x: CKKSTensor, exponent: Any) -> CKKSTensor:
    """ceil(log2 n) levels for the n-th power."""
    if (
        not isinstance(x, CKKSTensor)
        or not isinstance(exponent, (int, float))
        or exponent != int(exponent)
        or exponent < 1
    ):
        raise UnsupportedOpError("only powers of an encrypted tensor with a positive whole number are polynomials")
    return wrap(x, evaluate(x.cipher, [0.0] * int(exponent) + [1.0]), x.row_shape)


def polynomial(x: CKKSTensor, coefficients: list[float]) -> CKKSTensor:
    """sum_k coefficients[k] x^k by Paterson and Stockmeyer, in the smallest depth (`polynomial.depth`).

    The coefficients are public numbers: whoever decrypts is told the product of some of them.

    Raises:
        ArgumentError: coefficients that are tensors, as weights are.
    """
    if not isinstance(x, CKKSTensor):
        raise UnsupportedOpError(f"ckks.polynomial takes a CKKSTensor, got {type(x).__name__}")
    if any(isinstance(c, torch.Tensor) for c in coefficients):
        raise ArgumentError(
            "the coefficients of ckks.polynomial are public numbers, got tensors; weights stay with the evaluator in "
            "products: a * x.square() + b * x + c"
        )
    try:
        return wrap(x, evaluate(x.cipher, [float(c) for c in coefficients]), x.row_shape)
    except SectorchError as error:
        raise add_location(error) from None


def _groups(x: CKKSTensor, dim: Any, keepdim: bool) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Which ciphertexts are summed into each output, and the outputs' row shape."""
    rank = len(x.full_shape)
    given = range(rank) if dim is None else ([dim] if isinstance(dim, int) else list(dim)) or range(rank)
    dims = sorted({d % rank for d in given})
    if 0 in dims:
        raise UnsupportedOpError(
            "a sum over the batch (dimension 0) would need rotations; decrypt and sum, or name dims"
        )
    index = index_of(x)
    kept = [d for d in range(1, rank) if d not in dims]
    grouped = index.permute(*(d - 1 for d in kept), *(d - 1 for d in dims))
    shape = tuple(x.full_shape[d] for d in kept)
    groups = grouped.reshape(torch.Size(shape).numel(), -1)
    if keepdim:
        shape = tuple(1 if d in dims else x.full_shape[d] for d in range(1, rank))
    return groups, shape


@implements("sum", torch.sum, _T.sum)
def sum_(x: CKKSTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> CKKSTensor:
    """No level; the errors add up."""
    groups, shape = _groups(x, dim, keepdim)
    return wrap(x, gathered_sums(x.cipher, groups), shape)


@implements("mean", torch.mean, _T.mean)
def mean(x: CKKSTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> CKKSTensor:
    """No level: the divisor waits for the next weights or for decryption."""
    groups, shape = _groups(x, dim, keepdim)
    c = gathered_sums(x.cipher, groups)
    return wrap(x, replace(c, factor=c.factor / groups.shape[1]), shape)


@implements("dropout", F.dropout, torch.dropout, F.dropout2d, F.dropout1d)
def dropout(x: CKKSTensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> CKKSTensor:
    if training:
        raise UnsupportedOpError("dropout in training mode: call model.eval() first")
    return x


def inner(x: CKKSTensor, y: CKKSTensor, dim: int = -1) -> CKKSTensor:
    """The inner products of two encrypted tensors along a dimension: one level, one rescale for each output."""
    product = mul(x, y)
    return sum_(product, dim)


# Handlers that only move ciphertexts: shapes, selections, joins. None costs a level or changes an error.


def _error_of_moved_samples(func: Any) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{spell(func)} would move samples between slots or take some away; the batch (dimension 0) stays as it is. "
        f"Encrypt the batch that is meant, or decrypt first"
    )


def _move(func: Callable, x: CKKSTensor, *args: Any, **kwargs: Any) -> Any:
    """Apply `func` to the numbers of the ciphertexts; on a batch of two, to see that no samples mix or move."""
    index = index_of(x)
    pair = torch.stack([index, index + index.numel()])
    results = func(pair, *args, **kwargs)
    many = isinstance(results, (tuple, list))
    out = []
    for result in results if many else [results]:
        if result.dim() < 1 or result.shape[0] != 2 or not torch.equal(result[0] + index.numel(), result[1]):
            raise _error_of_moved_samples(func)
        if result[0].numel() and int(result[0].max()) >= index.numel():
            raise _error_of_moved_samples(func)
        out.append(wrap(x, take_ciphertexts(x.cipher, result[0]), result.shape[1:]))
    return (tuple(out) if isinstance(results, tuple) else out) if many else out[0]


def _register_move(name: str, *functions: Any) -> None:
    for function in functions:
        implements(name, function)(lambda x, *args, _f=function, **kwargs: _move(_f, x, *args, **kwargs))


_register_move("permute", torch.permute, _T.permute)
_register_move("transpose", torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes)
_register_move("movedim", torch.movedim, _T.movedim)
_register_move("unsqueeze", torch.unsqueeze, _T.unsqueeze)
_register_move("flip", torch.flip, _T.flip)
_register_move("narrow", torch.narrow, _T.narrow)
_register_move("select", torch.select, _T.select)
_register_move("index_select", torch.index_select, _T.index_select)
_register_move("unflatten", torch.unflatten, _T.unflatten)
_register_move("chunk", torch.chunk, _T.chunk)
_register_move("split", torch.split, _T.split)
_register_move("unbind", torch.unbind, _T.unbind)
_register_move("unfold", _T.unfold)
_register_move("getitem", _T.__getitem__)
_register_move("pixel_shuffle", torch.pixel_shuffle)
_register_move("channel_shuffle", torch.channel_shuffle)


@implements("roll", torch.roll, _T.roll)
def roll(x: CKKSTensor, shifts: Any, dims: Any = None) -> CKKSTensor:
    """Local. On the batch of two that `_move` tries, a shift of the batch by an even number would not show."""
    named = [dims] if isinstance(dims, int) else list(dims or ())
    if not named or any(d % len(x.full_shape) == 0 for d in named):
        raise _error_of_moved_samples(torch.roll)
    return _move(torch.roll, x, shifts, dims)


def _register_reshape(name: str, *functions: Any) -> None:
    def handler(x: CKKSTensor, *args: Any, _f: Any, **kwargs: Any) -> CKKSTensor:
        with torch._C.DisableTorchFunctionSubclass():
            meta = _f(torch.empty(x.full_shape, device="meta"), *args, **kwargs)
        if meta.dim() < 1 or meta.shape[0] != x.batch:
            raise _error_of_moved_samples(_f)
        return wrap(x, x.cipher, meta.shape[1:])

    for function in functions:
        implements(name, function)(lambda x, *args, _f=function, **kwargs: handler(x, *args, _f=_f, **kwargs))


_register_reshape("reshape", torch.reshape, _T.reshape, _T.view)
_register_reshape("flatten", torch.flatten, _T.flatten)
_register_reshape("squeeze", torch.squeeze, _T.squeeze)


@implements("expand", _T.expand)
@implements("broadcast_to", torch.broadcast_to, _T.broadcast_to)
def expand(x: CKKSTensor, *sizes: Any) -> CKKSTensor:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if len(sizes) != len(x.full_shape) or sizes[0] not in (-1, x.batch):
        raise _error_of_moved_samples(_T.expand)
    index = index_of(x).expand(*sizes[1:])
    return wrap(x, take_ciphertexts(x.cipher, index), index.shape)


@implements("contiguous", _T.contiguous)
@implements("detach", _T.detach, torch.detach)
@implements("clone", _T.clone, torch.clone)
@implements("to", _T.to, _T.float, _T.double, _T.cpu)
def contiguous(x: CKKSTensor, *args: Any, **kwargs: Any) -> CKKSTensor:
    with torch._C.DisableTorchFunctionSubclass():
        dtype = (
            torch.empty(0, dtype=x.float_dtype).to(*args).dtype
            if args and isinstance(args[0], torch.dtype)
            else x.float_dtype
        )
    return (
        wrap(x, x.cipher, x.row_shape) if dtype == x.float_dtype else CKKSTensor(x.cipher, x.batch, x.row_shape, dtype)
    )


def _join(tensors: Any, join: Callable, func: Any) -> CKKSTensor:
    if not all(isinstance(t, CKKSTensor) for t in tensors):
        raise UnsupportedOpError(f"{spell(func)} of encrypted and plain tensors; encrypt the plain ones first")
    first = tensors[0]
    indices, start = [], 0
    for t in tensors:
        if t.keys.identity != first.keys.identity or t.batch != first.batch:
            raise _error_of_moved_samples(func)
        indices.append(index_of(t) + start)
        start += indices[-1].numel()
    # The join runs on the indices of two samples at once: if it moved samples, the two would not come out alike.
    index = join([torch.stack([i, i + start]) for i in indices])
    if index.shape[0] != 2 or not torch.equal(index[0] + start, index[1]):
        raise _error_of_moved_samples(func)
    ciphers = [t.cipher for t in tensors]
    form = lambda c: (c.level, c.pending, c.factor, c.pending_factor, c.size)
    if any(form(c) != form(ciphers[0]) for c in ciphers):
        ciphers = align_all(ciphers)
    data = empty_like(ciphers[0].data, "a join", start)
    if not data.is_meta:
        torch.cat([c.data for c in ciphers], out=data)
    largest, error = largest_known(c.largest for c in ciphers), largest_known(c.error for c in ciphers)
    declared = all(c.declared for c in ciphers)
    whole = replace(ciphers[0], data=data, largest=largest, error=error, declared=declared)
    return wrap(first, take_ciphertexts(whole, index[0]), index.shape[1:])


@implements("cat", torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Any, dim: int = 0) -> CKKSTensor:
    return _join(tensors, lambda parts: torch.cat(parts, dim), torch.cat)


@implements("stack", torch.stack)
def stack(tensors: Any, dim: int = 0) -> CKKSTensor:
    return _join(tensors, lambda parts: torch.stack(parts, dim), torch.stack)
