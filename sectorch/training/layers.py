"""Products, activations, convolutions, poolings and normalisations, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..backend import RaisedFlags
from ..errors import ArgumentError
from ..ops.common import CAPACITY, SLACK_BITS, as_factor, check_fits, limit_at, round_scale
from ..ops.linear import bilinear, sum_of_all
from ..ops.pooling import pooling_windows as cut
from ..ops.series import GELU, GELU_SLOPE, GELU_TANH, GELU_TANH_SLOPE, SIGMOID
from ..ops.smooth import clamp_with_excess, series, series_and_later, times_gate, with_excess
from ..ring import products
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import Context
from .autograd_values import Cell, Pool, ReusableResult
from .elementwise import content, kept_bits, scale_by_number, towards
from .fixed_point import (
    as_gradient,
    at_scale_bits,
    at_state_bits,
    factor,
    finer_sum,
    gradient_bits,
    no_larger,
    operand,
    state_bits,
    times,
)
from .operations import GRADIENTS, WRITES, F, aten, torch
from .tensor import FUNCTIONS

row = GRADIENTS.implements


def sum_of_products(
    context: Context, product: Any, x: Any, y: Any, terms: int, sums: Callable[[Tensor], Tensor] = sum_of_all
) -> SharedTensor:
    """product(x, y), where each output is a sum of `terms` products; `sums` of a y that one party owns."""
    left, right = operand(context, x, terms), operand(context, y, terms)
    return bilinear(context, product, left, right, terms, (sum_of_all, sums))


@row("mm", aten.mm.default, aten.bmm.default, note="1 round for two secrets")
def mm(context: Context, x: Any, y: Any) -> SharedTensor:
    terms = content(x).shape[-1]
    left, right = operand(context, x, terms), operand(context, y, terms)
    if isinstance(right, PrivateTensor) and isinstance(left, SharedTensor) and right.dim() == 2:
        return F.linear(left, torch.t(right))  # whose product may keep the weight in a form that is faster
    return torch.matmul(left, right)


@row("addmm", aten.addmm.default, note="1 round for two secrets")
def addmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = mm(context, x, y)
    return finer_sum(context, scale_by_number(context, product, alpha), scale_by_number(context, bias, beta))


@row("relu", aten.relu.default, note="exact; its sign is kept for the backward pass")
def relu(context: Context, x: Cell) -> ReusableResult:
    value = operand(context, x)
    positive = torch.gt(value, 0)
    result = torch.mul(value, positive)
    return ReusableResult(no_larger(result, value), positive=positive)


@row("threshold", aten.threshold_backward.default)
def threshold_backward(context: Context, g: Cell, x: Cell, threshold: float) -> SharedTensor:
    positive = x.reusable.get("positive") if threshold == 0 else None
    return _where(context, g, torch.gt(x.content, threshold) if positive is None else positive)


def _where(context: Context, g: Cell, chosen: Any) -> SharedTensor:
    """The gradient where `chosen` is true, and zero elsewhere."""
    value = as_gradient(context, g.content)
    return no_larger(torch.mul(value, chosen), value)


@row("hardshrink", aten.hardshrink_backward.default)
@row("softshrink", aten.softshrink_backward.default)
def shrink_backward(context: Context, g: Cell, x: Cell, lambd: float) -> SharedTensor:
    return _where(context, g, torch.gt(torch.abs(x.content), lambd))


@row("sigmoid", aten.sigmoid.default)
def sigmoid(context: Context, x: Cell) -> SharedTensor:
    return torch.sigmoid(x.content)


@row("sigmoid", aten.sigmoid_backward.default)
def sigmoid_backward(context: Context, g: Cell, y: Cell) -> SharedTensor:
    slope = torch.mul(y.content, 1 - y.content)
    return torch.mul(as_gradient(context, g.content), slope)


@row("tanh", aten.tanh.default)
def tanh(context: Context, x: Cell) -> SharedTensor:
    return torch.tanh(x.content)


@row("tanh", aten.tanh_backward.default)
def tanh_backward(context: Context, g: Cell, y: Cell) -> SharedTensor:
    return torch.mul(as_gradient(context, g.content), 1 - torch.mul(y.content, y.content))


def times_slope(context: Context, g: Cell, slope: SharedTensor) -> SharedTensor:
    """A gradient times a slope, which is a value of the forward kind."""
    return torch.mul(as_gradient(context, g.content), slope)


@row("softplus", aten.softplus_backward.default)
def softplus_backward(context: Context, g: Cell, x: Cell, beta: float, threshold: float) -> SharedTensor:
    """Above torch's threshold, where torch takes the slope 1, this slope is 1 within 2^-20."""
    return times_slope(context, g, torch.sigmoid(x.content if beta == 1 else x.content * beta))


@row("logsigmoid", aten.log_sigmoid_backward.default)
def log_sigmoid_backward(context: Context, g: Cell, x: Cell, buffer: Any) -> SharedTensor:
    return times_slope(context, g, torch.sigmoid(-x.content))


@row("silu", aten.silu.default)
def silu(context: Context, x: Cell) -> SharedTensor:
    x.reusable["silu"] = times_gate(context, x.content, SIGMOID)
    return x.reusable["silu"][0]


@row("silu", aten.silu_backward.default)
def silu_backward(context: Context, g: Cell, x: Cell) -> SharedTensor:
    value, gate = x.reusable.get("silu") or times_gate(context, x.content, SIGMOID)
    return times_slope(context, g, gate + torch.mul(value, 1 - gate))


@row("gelu", aten.gelu.default, note="error 4e-6, of the gradient's factor too")
def gelu(context: Context, x: Cell, approximate: str = "none") -> SharedTensor:
    which, slope, inside, beyond = _gelu_parts(context, x, approximate)
    y, x.reusable[f"slope {approximate}"] = series_and_later(context, inside, which, slope)
    return with_excess(context, y, beyond, 1.0)


@row("gelu", aten.gelu_backward.default)
def gelu_backward(context: Context, g: Cell, x: Cell, approximate: str = "none") -> SharedTensor:
    """The slope is a series on the same interval; outside it is 0 and 1 within 3e-6."""
    finish = x.reusable.pop(f"slope {approximate}", None)
    if finish is not None:  # the forward pass has opened x for both
        return times_slope(context, g, finish(context))
    _, slope, inside, _ = _gelu_parts(context, x, approximate)
    return times_slope(context, g, series(context, inside, slope))


def _gelu_parts(context: Context, x: Cell, approximate: str) -> tuple[Any, Any, SharedTensor, SharedTensor]:
    """The series of GELU and of its slope, the part of x on their interval, and what is beyond, computed once for both
    passes."""
    exactly = approximate == "none"
    which, slope = (GELU, GELU_SLOPE) if exactly else (GELU_TANH, GELU_TANH_SLOPE)
    if "inside" not in x.reusable:
        x.reusable["inside"], x.reusable["beyond"] = clamp_with_excess(context, x.content, which.low, which.high, True)
    return which, slope, x.reusable["inside"], x.reusable["beyond"]


@row("elu", aten.elu.default)
def elu(context: Context, x: Cell, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> SharedTensor:
    """ELU, CELU and SELU, which are one operator of torch's."""
    value = x.content
    made = F.elu(value, alpha) if input_scale == 1 else F.celu(value, 1 / input_scale)
    if input_scale != 1 and abs(alpha * input_scale - 1) > 1e-12:
        raise ArgumentError(f"an ELU with alpha {alpha} and input_scale {input_scale} is not computed on shares")
    return made if scale == 1 else made * scale


@row("elu", aten.elu_backward.default)
def elu_backward(
    context: Context, g: Cell, alpha: float, scale: float, input_scale: float, is_result: bool, x: Cell
) -> SharedTensor:
    """The exponential is taken of min(x, 0), so that it is at most one."""
    low = torch.clamp(x.content, None, 0)
    below = low + alpha * scale if is_result else torch.exp(low * input_scale) * (alpha * scale)
    slope = torch.where(torch.gt(x.content, 0), scale, below * input_scale)
    return times_slope(context, g, slope)


@row("logit", aten.logit_backward.default)
def logit_backward(context: Context, g: Cell, x: Cell, eps: float | None = None) -> SharedTensor:
    """Zero where the input was clamped. Without eps, an input of 0 or 1 is a range error."""
    value = x.content
    inside = None if eps is None else torch.logical_and(torch.ge(value, eps), torch.le(value, 1 - eps))
    value = value if eps is None else torch.clamp(value, eps, 1 - eps)
    slope = torch.reciprocal(torch.mul(value, 1 - value))
    return times_slope(context, g, slope if inside is None else torch.mul(slope, inside))


# Convolutions in one and two dimensions, also transposed and in groups.


@row("convolution", aten.convolution.default, note="in one or two dimensions; 1 round for two secrets")
def convolution(
    context: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> SharedTensor:  # fmt: skip
    kernel = content(weight).shape[2:]
    if len(kernel) > 2:
        raise ArgumentError("a convolution in more than two dimensions is computed by F.conv3d and F.conv_transpose3d")
    terms = math.prod(kernel) * (content(weight).shape[0 if transposed else 1])
    left, right = operand(context, x, terms), operand(context, weight, terms)
    if transposed:
        run = torch.conv_transpose2d if len(kernel) == 2 else torch.conv_transpose1d
        return run(left, right, content(bias), stride, padding, output_padding, groups, dilation)
    run = torch.conv2d if len(kernel) == 2 else torch.conv1d
    return run(left, right, content(bias), stride, padding, dilation, groups)


def _in_two(given: Any, flat: bool, outside: int) -> tuple:
    """Sizes in two dimensions; a convolution in one dimension (`flat`) gets a height of one."""
    if flat:
        return outside, given[0]
    return tuple(given) if len(given) > 1 else (given[0], given[0])


def _loops_for(stride: tuple, g: Tensor, other: Tensor) -> Any:
    """The compiled loops, where they are faster than unfolding and a matrix product."""
    if not g.device.type == other.device.type == "cpu" or tuple(stride) != (1, 1):
        return None
    from ..ring import productloops  # imports numba, which an import of the package must not

    return productloops if g.shape[1] <= productloops.MOST_CHANNELS else None


def _input_gradient(shape: Any, how: tuple, g: Tensor, w: Tensor) -> Tensor:
    """The input gradient of a convolution: each output's gradient times the kernel, added up where windows overlap."""
    kernel, stride, padding, dilation = how
    if loops := _loops_for(stride, g, w):
        return loops.input_gradient(g, w, (shape[2], shape[3]), padding, dilation)
    columns = products.matmul(w.flatten(1).t().contiguous(), g.flatten(2))
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(shape[2:], *how, strict=True)]
    full = [n + 2 * p for n, p in zip(shape[2:], padding, strict=True)]
    image = g.new_zeros((g.shape[0], w.shape[1], *full))
    columns = columns.view(g.shape[0], w.shape[1], *kernel, *out)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            image[
                :, :, top : top + (out[0] - 1) * stride[0] + 1 : stride[0],
                left : left + (out[1] - 1) * stride[1] + 1 : stride[1],
            ] += columns[:, :, i, j]  # fmt: skip
    return image[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]


def _weight_gradient(shape: Any, how: tuple, g: Tensor, x: Tensor) -> Tensor:
    """The weight gradient of a convolution: the sum of each output's gradient times its window."""
    kernel, stride, padding, dilation = how
    if loops := _loops_for(stride, g, x):
        return loops.weight_gradient(g, x, kernel, padding, dilation)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    out = g.shape[2:]
    parts = [
        x[
            :, :, i * dilation[0] : i * dilation[0] + (out[0] - 1) * stride[0] + 1 : stride[0],
            j * dilation[1] : j * dilation[1] + (out[1] - 1) * stride[1] + 1 : stride[1],
        ]
        for i in range(kernel[0]) for j in range(kernel[1])
    ]  # fmt: skip
    windows = torch.stack(parts, 2).flatten(3)  # [N, C, kh kw, positions]
    rows = windows.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # [C kh kw, N positions]
    gradients = g.flatten(2).transpose(0, 1).flatten(1)  # [out, N positions]
    return products.matmul(gradients, rows.t().contiguous()).view(g.shape[1], *shape[1:])


@dataclass(frozen=True)
class _SumsOfInputs:
    """`Sums` of a convolution's weight in the gradient of its input: for each input channel, over outputs and taps."""

    groups: int

    def __call__(self, w: Tensor) -> Tensor:
        return torch.stack([part.transpose(0, 1).flatten(1).sum(1) for part in w.chunk(self.groups)])


def _in_groups(product: Callable, groups: int, shape: Any, how: tuple, flat: bool, dims: tuple) -> Callable:
    """A function that computes product(shape, how, a, b) for the channels of each group.

    The channels of a are its dimension dims[0], those of b dims[1], and those of the result dims[2]. In one dimension
    (`flat`) the height is one.
    """
    lifted = (*shape[:2], 1, shape[2]) if flat else tuple(shape)

    def run(a: Tensor, b: Tensor, *_: Any) -> Tensor:
        a, b = (v.unsqueeze(2) if flat else v for v in (a, b))
        parts = zip(a.chunk(groups, dims[0]), b.chunk(groups, dims[1]), strict=True)
        made = [product(lifted, how, left, right) for left, right in parts]
        return torch.cat(made, dims[2]).reshape(shape)

    return run


@row("convolution", aten.convolution_backward.default)
def convolution_backward(
    context: Context, g: Cell, x: Cell, weight: Cell, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Any,
) -> tuple:  # fmt: skip
    """A transposed convolution is the input gradient of an ordinary one, with inputs and gradients exchanged."""
    shapes = content(x).shape, content(weight).shape
    flat = len(shapes[1]) == 3
    kernel = tuple(shapes[1][2:])
    how = tuple(_in_two(v, flat, outside) for v, outside in ((kernel, 1), (stride, 1), (padding, 0), (dilation, 1)))
    outs: list[Any] = [None, None, None]
    if mask[0] and transposed:
        terms = math.prod(kernel) * shapes[1][1]
        left, right = operand(context, g, terms), operand(context, weight, terms)
        run = torch.conv1d if flat else torch.conv2d
        outs[0] = run(left, right, None, stride, padding, dilation, groups)
    elif mask[0]:
        terms = math.prod(kernel) * shapes[1][0] // groups
        outs[0] = sum_of_products(
            context, _in_groups(_input_gradient, groups, shapes[0], how, flat, (1, 0, 1)), g, weight, terms,
            _SumsOfInputs(groups),
        )  # fmt: skip
    if mask[1]:
        above, below = (x, g) if transposed else (g, x)
        positions = math.prod(content(above).shape[2:]) * content(above).shape[0]
        outs[1] = sum_of_products(
            context, _in_groups(_weight_gradient, groups, shapes[1], how, flat, (1, 1, 0)), above, below, positions
        )
    if mask[2]:
        value = as_gradient(context, content(g))
        outs[2] = torch.sum(value, [d for d in range(value.dim()) if d != 1])
    return tuple(outs)


# Poolings and interpolation.


def _pair(v: Any) -> tuple[int, int]:
    return (v, v) if isinstance(v, int) else (v[0], v[-1])


def _windows_of(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> tuple:
    kernel = _pair(kernel)
    return kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation), ceil_mode


@row("max_pool2d", aten.max_pool2d_with_indices.default, note="which entry is the largest stays secret")
def max_pool2d(
    context: Context, x: Cell, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple:  # fmt: skip
    """The largest entry, and a secret one-hot code in place of its index; of equal entries the first, as in torch."""
    how, value = _windows_of(kernel, stride, padding, dilation, ceil_mode), operand(context, x)
    padded = any(how[2]) or ceil_mode
    lowest = 1 + math.ceil(limit_at(context, value.scale_bits) if value.bound is None else value.bound)
    shares = value.backend.affine(cut, value.shares, -lowest if padded else 0, *how)
    windows = value.like(shares, bound=None if value.bound is None else float(lowest))
    best, code = _first_largest(context, windows)
    best = best.bounded(value.bound)
    places = torch.arange(windows.shape[0]).view(-1, *(1,) * best.dim())
    index = torch.sum(code * places, 0)
    return best, ReusableResult(index, code=code)


def _placed(kernel: Any, stride: Any, padding: Any, dilation: Any, shape: Any, v: Tensor) -> Tensor:
    """The transpose of cutting windows out: adds the entries of windows to their places in an image."""
    out = v.shape[-2:]
    span = [(out[i] - 1) * stride[i] + 1 for i in (0, 1)]
    full = [max(shape[i - 2] + 2 * padding[i], span[i] + (kernel[i] - 1) * dilation[i]) for i in (0, 1)]
    image = v.new_zeros((*shape[:-2], *full))
    for k in range(v.shape[0]):
        top, left = (n * d for n, d in zip(divmod(k, kernel[1]), dilation, strict=True))
        image[..., top : top + span[0] : stride[0], left : left + span[1] : stride[1]] += v[k]
    return image[..., padding[0] : padding[0] + shape[-2], padding[1] : padding[1] + shape[-1]]


def _first_largest(context: Context, windows: SharedTensor) -> tuple[SharedTensor, SharedTensor]:
    """The maximum along the first dimension, and the one-hot code of the first place that holds it: a tournament."""
    values, code = windows, None
    count = windows.shape[0]
    while count > 1:
        pairs = count // 2
        first, second = values[: 2 * pairs : 2], values[1 : 2 * pairs : 2]
        wins = torch.ge(first, second)
        best = no_larger(second + torch.mul(first - second, wins), values)
        win = wins.long()
        if code is None:
            codes = torch.stack((win, 1 - win), 1)  # [pairs, 2, ...]
        else:
            # A code sums up to one, so its last bit follows from the others and needs no product.
            left, right = code[: 2 * pairs : 2], code[1 : 2 * pairs : 2]
            win, left, right = win.unsqueeze(1), left[:, :-1], right[:, :-1]
            one, other = torch.mul(left, win), right - torch.mul(right, win)
            last = win - one.sum(1, keepdim=True), 1 - win - other.sum(1, keepdim=True)
            codes = torch.cat((one, last[0], other, last[1]), 1).bounded(1.0)
        if count % 2:
            best = torch.cat((best, values[-1:]))
            width = codes.shape[1]
            last = codes[:1, :1] * 0 + 1 if code is None else code[-1:]
            if last.shape[1] < width:
                last = torch.cat((last, codes[:1, : width - last.shape[1]] * 0), 1)
            codes = torch.cat((codes, last))
        values, code, count = best, codes, values.shape[0] // 2 + count % 2
    code = torch.ge(windows[:1], windows[:1]).long().unsqueeze(0) if code is None else code
    return values[0], code[0, : windows.shape[0]]


@row("max_pool2d", aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    context: Context, g: Cell, x: Cell, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Cell,
) -> SharedTensor:  # fmt: skip
    how = _windows_of(kernel, stride, padding, dilation, ceil_mode)[:4]
    value = as_gradient(context, g.content)
    parts = no_larger(torch.mul(indices.reusable["code"], value.unsqueeze(0)), value)
    meets = math.prod(math.ceil(((k - 1) * d + 1) / s) for k, s, d in zip(how[0], how[1], how[3], strict=True))
    placed = parts.backend.each(partial(_placed, *how, tuple(x.content.shape)), parts.shares)
    return parts.like(placed, bound=None if parts.bound is None else parts.bound * meets)


@row("avg_pool2d", aten.avg_pool2d.default, note="local")
def avg_pool2d(
    context: Context, x: Cell, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> SharedTensor:  # fmt: skip
    kernel, stride, padding = _windows_of(kernel, stride, padding, 1, ceil_mode)[:3]
    return F.avg_pool2d(x.content, kernel, stride, padding, ceil_mode, count_include_pad, divisor)


def _along(context: Context, x: SharedTensor, dim: int, matrix: Tensor) -> SharedTensor:
    """x times a public matrix [n, m] along a dimension of n entries. Local."""
    bits = 0 if bool((matrix == matrix.round()).all()) else context.frac_bits
    whole = (matrix * 2.0**bits).round().to(torch.int64)
    most = max(1.0, float(whole.abs().sum(0).max()) if whole.numel() else 1.0)
    x = check_fits(context, x, CAPACITY / most)
    run = lambda v: products.matmul(v.movedim(dim, -1).contiguous(), whole.to(v.device)).movedim(-1, dim)
    shares = context.backend.each(run, x.shares)
    return x.like(shares, x.scale_bits + bits, None if x.bound is None else x.bound * most)


def _back(context: Context, g: Cell, shape: Any, matrices: list[Tensor]) -> SharedTensor:
    """The gradient, in an input of this shape, of a map that is a public matrix [n, m] along each last dimension."""
    value = as_gradient(context, g.content)
    if not value.numel():
        return value.like(context.backend.each(lambda v: v.new_zeros(tuple(shape)), value.shares), bound=0.0)
    for d, matrix in enumerate(matrices):
        value = as_gradient(context, _along(context, value, d - len(matrices), matrix.t()))
    return value


@row("avg_pool2d", aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, note="local")
def avg_pool_backward(
    context: Context, g: Cell, x: Cell, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> SharedTensor:  # fmt: skip
    """The sum or the mean of windows is a public matrix along each dimension."""
    shape, dims = x.content.shape, len(kernel)

    def matrix(d: int) -> Tensor:
        n = shape[d - dims]
        lines = torch.eye(n, dtype=torch.float64).view(1, n, n, 1)
        given = [list(v) * dims if len(v) == 1 else v for v in (kernel, stride or kernel, padding)]
        sizes = [(v[d], rest) for v, rest in zip(given, (1, 1, 0), strict=True)]
        return F.avg_pool2d(lines, *sizes, ceil_mode, count_include_pad, 1 if divisor else None)[0, :, :, 0]

    found = _back(context, g, shape, [matrix(d) for d in range(dims)])
    return found if divisor is None else times(context, found, 1 / divisor, kept_bits(context, found))


def _adaptive_backward(dims: int, context: Context, g: Cell, x: Cell) -> SharedTensor:
    sizes = zip(x.content.shape[-dims:], g.content.shape[-dims:], strict=True)
    lines = [F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64).unsqueeze(0), m)[0] for n, m in sizes]
    return _back(context, g, x.content.shape, lines)


for _dims in (2, 3):
    _overload = getattr(aten, f"_adaptive_avg_pool{_dims}d_backward").default
    row("adaptive_avg_pool", _overload, note="local")(partial(_adaptive_backward, _dims))


def _interpolation(mode: str, dims: int) -> None:
    """Registers the rows of an interpolation: a public matrix along each dimension, torch's results for unit
    vectors."""
    exact, smooth = mode.startswith("_upsample_nearest"), mode.endswith("_aa")
    name = mode if smooth else f"{mode}{dims}d" if exact else f"upsample_{mode}{dims}d"
    cornered = not exact and mode != "nearest"
    flat = mode != "bicubic" and not smooth
    one = f"{mode}1d" if exact else {"nearest": "upsample_nearest1d"}.get(mode, "upsample_linear1d")
    run = getattr(aten, one if flat else name).default

    def matrices(sizes: Any, out: Any, given: tuple) -> list[Tensor]:
        corners, scales = given[:cornered], (*given[cornered:], None, None, None)
        made = []
        for n, m, scale in zip(sizes, out, scales, strict=False):
            lines = torch.eye(n, dtype=torch.float64).unsqueeze(1)
            made.append(
                run(lines, [m], *corners, scale)[:, 0] if flat
                else run(lines.unsqueeze(2), [1, m], *corners, None, scale)[:, 0, 0]
            )  # fmt: skip
        return made

    def forward(context: Context, x: Cell, out: Any, *given: Any) -> SharedTensor:
        value = x.content
        for d, matrix in enumerate(matrices(value.shape[2:], out, given)):
            value = _along(context, as_factor(context, value, 0), d - dims, matrix)
        return value

    def backward(context: Context, g: Cell, out: Any, size: Any, *given: Any) -> SharedTensor:
        return _back(context, g, size, matrices(size[2:], out, given))

    row("interpolate", getattr(aten, name).default, note="local")(forward)
    row("interpolate", getattr(aten, f"{name}_backward").default, note="local")(backward)


for _mode, _dims in (
    ("nearest", 1), ("nearest", 2), ("nearest", 3), ("_upsample_nearest_exact", 1), ("_upsample_nearest_exact", 2),
    ("_upsample_nearest_exact", 3), ("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2),
    ("_upsample_bilinear2d_aa", 2), ("_upsample_bicubic2d_aa", 2),
):  # fmt: skip
    _interpolation(_mode, _dims)
if hasattr(aten, "_upsample_lanczos2d_aa"):  # from torch 2.14 on
    _interpolation("_upsample_lanczos2d_aa", 2)


# Normalisation by the statistics of the input, forward and backward; dropout, weight norm and circular padding.


WRITES[aten.native_batch_norm.default] = (3, 4)


def _all_but_channels(x: SharedTensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _of_channels(x: SharedTensor, like: SharedTensor) -> SharedTensor:
    return x.reshape([1, -1] + [1] * (like.dim() - 2))


@row("batch_norm", aten.native_batch_norm.default, note="on the batch's statistics, or on running ones")
def batch_norm(
    context: Context, x: Cell, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """The running statistics are changed in place, as torch's are.

    Raises:
        ArgumentError: in training, statistics that everybody or one party would know.
    """
    if not training:
        statistics = [content(v) for v in (mean, var, weight, bias)]
        y = F.batch_norm(x.content, *statistics, False, momentum, eps)
        return y, statistics[0], statistics[1]
    value = operand(context, x)
    n, dims = value.numel() // value.shape[1], _all_but_channels(value)
    if n < 2:
        raise ArgumentError("batch_norm in training needs more than one value a channel")
    if isinstance(mean, Tensor):
        raise ArgumentError(
            "running statistics in plain would be known to all; make the module shared: sectorch.shared(m)"
        )
    if isinstance(mean, Cell) and mean.own:
        raise ArgumentError(
            "the running statistics of a frozen batch norm are its owner's and do not change; call .eval() on the "
            "layer, or share the model while it is in training mode"
        )
    normal, centre, variance, inverse = _normalised(context, value, dims, eps)
    if isinstance(mean, Cell):
        _towards(context, mean, centre.flatten(), momentum)
        _towards(context, var, times(context, variance.flatten(), n / (n - 1), state_bits(context)), momentum)
    y = normal
    if weight is not None:
        y = torch.mul(normal, _of_channels(_secret(context, value, weight), value))
    if bias is not None:
        y = y + _of_channels(content(bias), value)
    return y, centre.flatten(), ReusableResult(inverse.flatten(), normal=normal)


def _normalised(context: Context, value: SharedTensor, dims: list[int], eps: float) -> tuple[SharedTensor, ...]:
    """The normalised input, the mean, the variance, and the inverse of its root."""
    if eps < 0:
        raise ArgumentError(f"eps is not negative on shares, got {eps}")
    n = math.prod(value.shape[d] for d in dims)
    centre = torch.mean(value, dims, keepdim=True)
    centre = round_scale(context, centre, max(context.frac_bits, value.scale_bits))
    deviation = as_factor(context, value - centre, 0)
    variance = torch.mean(torch.square(deviation), dims, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    inverse = inverse.bounded(None if inverse.bound is None else eps**-0.5 * 2.0**inverse.scale_bits + 2.0)
    return _normal(context, deviation, inverse, n), centre, variance, inverse


def _normal(context: Context, deviation: SharedTensor, inverse: SharedTensor, n: int) -> SharedTensor:
    """deviation * inverse. A deviation over the root mean square of n deviations is sqrt(n) at most, which is a smaller
    bound than the product of both bounds."""
    shares = context.backend.multiply(torch.mul, deviation.shares, inverse.shares)
    bits = deviation.scale_bits + inverse.scale_bits
    made = deviation.like(shares, bits, None if deviation.bound is None else 1.01 * math.sqrt(n) * 2.0**bits)
    return round_scale(context, made, context.frac_bits)


def _towards(context: Context, running: Cell, now: SharedTensor, momentum: float) -> None:
    """One step of an exponential mean, which then depends on the range checks of the batch."""
    start, end = at_state_bits(context, running.content), at_state_bits(context, now)
    made = start + times(context, end - start, momentum, state_bits(context))
    bound = towards(start.bound, end.bound, momentum)
    pool = Pool.of([Pool((*running.pool.flags, *context.net.state(RaisedFlags)))])
    running.write(made.bounded(bound), pool)


def _sums(dims: list[int], keepdim: bool, g: Tensor, x: Tensor) -> Tensor:
    """The sum of g x over these dimensions."""
    return (g * x).sum(dims, keepdim) if dims else g * x


@row("batch_norm", aten.native_batch_norm_backward.default)
def batch_norm_backward(
    context: Context, g: Cell, x: Cell, weight: Any, mean: Any, var: Any, save_mean: Any, save_inverse: Any,
    training: bool, eps: float, mask: Any,
) -> tuple:  # fmt: skip
    shape = x.content
    n, dims = shape.numel() // shape.shape[1], _all_but_channels(shape)
    value = operand(context, g, n)
    scale = None if weight is None else _secret(context, shape, weight)
    total = torch.sum(value, dims)
    inverse: Any
    normal, along = None, None
    if training:
        inverse, normal = save_inverse.content, save_inverse.reusable["normal"]
        along = _dot_normal(context, value, normal, dims)
    else:
        inverse = torch.rsqrt(_secret(context, shape, var) + eps)
        if mask[1]:
            centred = shape - _of_channels(_secret(context, shape, mean), shape)
            normal = as_factor(context, torch.mul(centred, _of_channels(inverse, shape)), 0)
            along = torch.mul(value, normal).sum(dims)
    step: Any = inverse if scale is None else torch.mul(inverse, scale)
    step = step if isinstance(step, PrivateTensor) else as_factor(context, step, 0)
    inner = as_gradient(context, g.content)
    if training and normal is not None and along is not None:
        inner = _inner(context, inner, normal, _of_channels(total, shape), _of_channels(along, shape), n)
    return torch.mul(inner, _of_channels(step, shape)), along if mask[1] else None, total if mask[2] else None


def _secret(context: Context, like: SharedTensor, value: Any) -> SharedTensor:
    """A cell as a factor of f fraction bits, or a public tensor as shares."""
    return factor(context, value) if isinstance(value, Cell) else like.reshape(-1)[:0].sum() + value


def _inner(
    context: Context, g: SharedTensor, normal: SharedTensor, total: SharedTensor, along: SharedTensor, n: int
) -> SharedTensor:
    """g less its mean, and less its part along the normalised input; both means are below the limit of gradients."""
    bits = context.frac_bits + SLACK_BITS
    first, second = (at_scale_bits(context, times(context, v, 1 / n, bits), bits) for v in (total, along))
    most = 2.0 ** (gradient_bits(context) + bits)
    first, second = (v.bounded(None if v.bound is None else min(v.bound, most + 2)) for v in (first, second))
    return as_gradient(context, g - first - torch.mul(normal, second))


def _dot_normal(
    context: Context, g: SharedTensor, normal: SharedTensor, dims: list[int], keepdim: bool = False
) -> SharedTensor:
    """The sum of g times the normalised input: below n times the limit of gradients (Cauchy and Schwarz)."""
    n = math.prod(g.shape[d] for d in dims)
    shares = context.backend.multiply(partial(_sums, dims, keepdim), g.shares, normal.shares)
    bits = g.scale_bits + normal.scale_bits
    made = g.like(shares, bits, None if g.bound is None else 1.01 * n * g.bound * 2.0**normal.scale_bits)
    return check_fits(context, made, CAPACITY)


def _normalise(
    context: Context, x: SharedTensor, dims: list[int], eps: float
) -> tuple[SharedTensor, SharedTensor, ReusableResult]:
    """x normalised along some dimensions, its mean, and its inverse deviation, which keeps the normalised x."""
    normal, centre, _, inverse = _normalised(context, x, dims, eps)
    return normal, centre, ReusableResult(inverse, normal=normal)


def _normalise_backward(context: Context, g: Any, inverse: Cell, dims: list[int]) -> SharedTensor:
    """The gradient of the input of `_normalise`, for the gradient g of its result."""
    normal = inverse.reusable["normal"]
    n = math.prod(normal.shape[d] for d in dims)
    value = as_gradient(context, g)
    part = operand(context, Cell(value, gradient=True), n)
    total, along = torch.sum(part, dims, keepdim=True), _dot_normal(context, part, normal, dims, keepdim=True)
    inner = _inner(context, value, normal, total, along, n)
    return torch.mul(inner, as_factor(context, inverse.content.reshape(along.shape), 0))


def _affine(context: Context, normal: SharedTensor, weight: Any, bias: Any) -> SharedTensor:
    y = normal if weight is None else torch.mul(normal, weight)
    return y if bias is None else y + bias


def _affine_backward(
    context: Context, g: Cell, normal: SharedTensor, weight: Any, dims: list[int], mask: Any
) -> tuple[SharedTensor, Any, Any]:
    """The gradients of the normalised input, of the weight and of the bias, which are summed over `dims`."""
    n = math.prod(normal.shape[d] for d in dims)
    value = operand(context, g, n)
    along = _dot_normal(context, value, normal, dims) if mask[1] else None
    total = torch.sum(value, dims) if mask[2] and dims else value
    return value if weight is None else torch.mul(value, weight), along, total if mask[2] else None


@row("layer_norm", aten.native_layer_norm.default)
def layer_norm(context: Context, x: Cell, shape: Any, weight: Any, bias: Any, eps: float) -> tuple:
    value = operand(context, x)
    normal, centre, inverse = _normalise(context, value, list(range(value.dim() - len(shape), value.dim())), eps)
    weight = None if weight is None else _secret(context, normal, weight)
    return _affine(context, normal, weight, content(bias)), centre, inverse


@row("layer_norm", aten.native_layer_norm_backward.default)
def layer_norm_backward(
    context: Context, g: Cell, x: Cell, shape: Any, mean: Any, inverse: Cell, weight: Any, bias: Any, mask: Any
) -> tuple:
    normal = inverse.reusable["normal"]
    first = normal.dim() - len(shape)
    weight = None if weight is None else _secret(context, normal, weight)
    inner, along, total = _affine_backward(context, g, normal, weight, list(range(first)), mask)
    own = _normalise_backward(context, inner, inverse, list(range(first, normal.dim()))) if mask[0] else None
    return own, along, total


@row("group_norm", aten.native_group_norm.default, note="instance_norm too")
def group_norm(
    context: Context, x: Cell, weight: Any, bias: Any, n: int, c: int, places: int, groups: int, eps: float
) -> tuple:
    value = operand(context, x)
    normal, centre, inverse = _normalise(context, value.reshape((n, groups, -1)), [2], eps)
    weight = None if weight is None else _of_channels(_secret(context, value, weight), value)
    bias = None if bias is None else _of_channels(content(bias), value)
    y = _affine(context, normal.reshape(value.shape), weight, bias)
    inverse.content = inverse.content.reshape((n, groups))
    return y, centre.reshape((n, groups)), inverse


@row("group_norm", aten.native_group_norm_backward.default)
def group_norm_backward(
    context: Context, g: Cell, x: Cell, mean: Any, inverse: Cell, weight: Any, n: int, c: int, places: int,
    groups: int, mask: Any,
) -> tuple:  # fmt: skip
    shape = x.content.shape
    normal = inverse.reusable["normal"].reshape(shape)
    weight = None if weight is None else _of_channels(_secret(context, normal, weight), normal)
    inner, along, total = _affine_backward(context, g, normal, weight, _all_but_channels(normal), mask)
    own = _normalise_backward(context, inner.reshape((n, groups, -1)), inverse, [2]).reshape(shape) if mask[0] else None
    return own, along, total


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout by torch's generator: everybody knows which entries are dropped, and nobody their values."""
    if not training or p == 0:
        return x
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout probability has to be between 0 and 1, but got {p}")
    if inplace:
        raise ArgumentError("dropout in place is not supported on shares; use inplace=False")
    return _drop(x, p, tuple(x.shape))


def _drop(x: Any, p: float, shape: tuple) -> Any:
    kept = (torch.rand(shape) >= p).to(torch.int64)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0)


def _channels_dropped(dims: int) -> Callable:
    def run(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Dropout of channels, each of which has `dims` dimensions."""
        if not training or p == 0 or not 0 <= p <= 1 or inplace:
            return dropout(x, p, training, inplace)
        return _drop(x, p, (*x.shape[: x.dim() - dims], *(1,) * dims))

    return run


FUNCTIONS[F.dropout] = dropout
FUNCTIONS[torch.dropout] = lambda input, p, train: dropout(input, p, train)
for _function, _dims in ((F.dropout1d, 1), (F.dropout2d, 2), (F.dropout3d, 3)):
    FUNCTIONS[_function] = _channels_dropped(_dims)


def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """v g / |v|, the norms over all dimensions but one."""
    dims = [d for d in range(v.dim()) if d != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / torch.linalg.vector_norm(v, 2, dims, keepdim=True))


FUNCTIONS[torch._weight_norm] = weight_norm
FUNCTIONS[torch.norm_except_dim] = lambda v, pow=2, dim=0: torch.linalg.vector_norm(
    v, pow, [d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True
)


def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Circular padding by concatenation; torch's own writes into slices."""
    if mode != "circular" or min(pad) < 0:
        with torch._C.DisableTorchFunctionSubclass():
            return F.pad(input, pad, mode, value)
    made = input
    for k in range(len(pad) // 2):
        dim, (before, after) = input.dim() - 1 - k, pad[2 * k : 2 * k + 2]
        size = input.shape[dim]
        if max(before, after) > size:
            raise ArgumentError(f"circular padding is at most the size {size}, got {before} and {after}")
        parts = made.narrow(dim, size - before, before), made, made.narrow(dim, 0, after)
        made = torch.cat([part for part in parts if part.shape[dim]], dim)
    return made


FUNCTIONS[F.pad] = pad
