"""Views, concatenation, and entries by their places; secret places become one-hot codes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..tensor import SecretTensor, SharedTensor
from ..tensor.table import MASKED_SELECT, ON_META, READS_CONTENT, Context
from .autograd_values import Cell
from .elementwise import constant, content
from .fixed_point import as_gradient, at_scale_bits, factor, no_larger, operand
from .operations import GRADIENTS, F, aten, torch

row = GRADIENTS.implements

READS_CONTENT.add(aten.index.Tensor)
MASKED_SELECT.add(aten.masked_select.default)


@row("index", aten.index.Tensor, note="by public places; by secret ones as embedding")
def index(context: Context, x: Any, places: Any) -> Any:
    return content(x)[tuple(slice(None) if v is None else content(v) for v in places)]


def _places(shape: Any, index: Any) -> Tensor:
    """The numbers of the entries that a public index selects, in its order and shape."""
    numbers = torch.arange(math.prod(shape)).reshape(tuple(shape))
    return numbers[tuple(slice(None) if v is None else v for v in index)]


@row("index_put", aten.index_put.default, note="by public places")
def index_put(context: Context, x: Any, index: Any, values: Any, accumulate: bool = False) -> SharedTensor:
    start, written = content(x), values
    values = content(values)
    secret = [v for v in index if isinstance(v, Cell)]
    if secret:
        return _secret_put(context, x, index, written, accumulate)
    places = _places(start.shape, index)
    values = values.expand(places.shape).reshape(-1)
    write = torch.index_add if accumulate else torch.index_copy
    return write(start.reshape(-1), 0, places.reshape(-1), values).reshape(start.shape)


def _secret_put(context: Context, x: Any, index: Any, values: Any, accumulate: bool) -> SharedTensor:
    """Write to secret places: a number under a secret mask, or sums into a tensor of zeros (the gradient of a look-up).

    Raises:
        ArgumentError: any other writing to secret places.
    """
    start = content(x)
    where = next(v for v in index if v is not None)
    if not isinstance(where, Cell) or sum(v is not None for v in index) > 1:
        raise ArgumentError("writing to places of which some are secret is not supported on shares; use torch.where")
    number = None if isinstance(values, Cell) or values.numel() != 1 or accumulate else float(values)
    if number is not None and len(index) == 1 and where.shape.dtype == torch.bool and where.shape.shape == start.shape:
        start = at_scale_bits(context, start, max(start.scale_bits, context.frac_bits))
        whole, mask = round(number * 2.0**start.scale_bits), where.content.shares
        kept = context.backend.multiply(torch.mul, start.shares, -mask + 1)
        filled = context.backend.each(operator.mul, mask, whole)
        bound = None if start.bound is None else max(start.bound, float(abs(whole)))
        return start.like(context.backend.each(torch.add, kept, filled), bound=bound)
    dim = next(i for i, v in enumerate(index) if v is not None)
    if accumulate and len(index) == dim + 1 and where.shape.dtype != torch.bool and start.bound == 0:
        return _added(context, start, dim, where, values)
    raise ArgumentError(
        "writing to secret places is not supported on shares, but for a number under a mask of the tensor's shape; use "
        "torch.where with a comparison, or F.one_hot(places, n).float() and a product"
    )


def _added(context: Context, start: SharedTensor, dim: int, places: Cell, values: Cell) -> SharedTensor:
    """A tensor of zeros with entries added at secret places of one dimension: one-hot codes times the entries."""
    classes, around = start.shape[dim], places.shape.dim()
    count = places.shape.numel()
    g = operand(context, values, count)
    rows = g.movedim(list(range(dim, dim + around)), list(range(around))).reshape((count, -1))
    codes = F.one_hot(places.content, classes).reshape((count, classes))
    if start.numel() == 0 or count == 0:
        return start
    made = torch.matmul(codes.to(rows.dtype).mT, rows)
    rest = [n for d, n in enumerate(start.shape) if d != dim]
    return made.reshape([classes, *rest]).movedim(0, dim)


@row("index_add", aten.index_add.default, note="public places; secret ones into zeros")
def index_add(context: Context, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> SharedTensor:
    if not isinstance(index, Cell):
        return torch.index_add(content(x), dim, index, content(source), alpha=alpha)
    if content(x).bound != 0 or alpha != 1 or not isinstance(source, Cell):
        raise ArgumentError(
            "adding at secret places of what is not zero is not supported on shares; use F.one_hot(places, n).float() "
            "and a product"
        )
    return _added(context, content(x), dim % content(x).dim(), index, source)


@row("embedding", aten.embedding_dense_backward.default, note="the gradient of rows at public or secret places")
def embedding_backward(
    context: Context, g: Cell, index: Any, rows: int, padding: int, by_frequency: bool
) -> SharedTensor:
    """The sum of the gradients of each row; for secret places by one-hot codes, with n products an entry for n rows."""
    if by_frequency:
        raise ArgumentError("scale_grad_by_freq is not supported on shares; leave it out")
    value = g.content
    zeros = constant(context, value.reshape((-1, value.shape[-1]))[:1] if value.numel() else value, 0)
    zeros = zeros.expand((rows, value.shape[-1])) if value.numel() else value.reshape((0, value.shape[-1]))
    if isinstance(index, Cell):
        made = _added(context, zeros, 0, index, g)
    else:
        made = torch.index_add(zeros, 0, index.reshape(-1), value.reshape((-1, value.shape[-1])))
    if padding < 0:
        return made
    kept = torch.ones(rows, 1, dtype=torch.int64)
    kept[padding] = 0
    return made.like(context.backend.each(operator.mul, made.shares, kept), bound=made.bound)


def _replicated(context: Context, g: Cell, x: Cell, padding: Any) -> SharedTensor:
    """The gradient of padding that repeats the edge: each entry gets the sum of its copies' gradients."""
    shape, value = x.content.shape, g.content
    spatial = shape[len(shape) - len(padding) // 2 :]
    numbers = torch.arange(math.prod(spatial), dtype=torch.float64).reshape(1, 1, *spatial)
    places = F.pad(numbers, tuple(padding), mode="replicate").long().flatten()
    rows = value.reshape((-1, len(places)))
    zeros = constant(context, rows[:, :1], 0).expand((rows.shape[0], numbers.numel()))
    return torch.index_add(zeros, 1, places, rows).reshape(shape)


for _dims in (1, 2, 3):
    row("pad", getattr(aten, f"replication_pad{_dims}d_backward").default)(_replicated)


@row("xlogy", aten.xlogy.Tensor, aten.xlogy.Scalar_Self, note="x log y, and 0 where x is")
def xlogy(context: Context, x: Any, y: Any) -> SharedTensor:
    """Where x is zero, log is taken of 1 in place of y, so that y may be zero there."""
    left, value = content(x), content(y)
    zero = left == 0
    inside = torch.where(zero, 1.0, value) if isinstance(zero, Tensor) else value
    return torch.mul(left, torch.log(inside)) if isinstance(inside, SharedTensor) else left * torch.log(inside)


@row("masked_select", aten.masked_select.default, note="by a public mask")
def masked_select(context: Context, x: Cell, mask: Any) -> SharedTensor:
    return torch.masked_select(x.content, mask)


@row("masked_scatter", aten.masked_scatter_backward.default, note="by a public mask")
def masked_scatter_backward(context: Context, g: Cell, mask: Any, sizes: Any) -> SharedTensor:
    """The entries under the mask one after the other, and zeros for the entries that were not used."""
    entries = torch.masked_select(g.content, mask)
    return F.pad(entries, (0, math.prod(sizes) - entries.shape[0])).reshape(sizes)


def _codes(index: Cell, classes: int, dim: int) -> SharedTensor:
    """One-hot codes of secret places, the classes first: [classes, ...]. Computed once for each index."""
    key = f"codes {classes}"
    if key not in index.reusable:
        index.reusable[key] = F.one_hot(index.content, classes).movedim(-1, 0)
    return index.reusable[key]


@row("scatter", aten.scatter_add.default, note="public places; secret ones into zeros")
def scatter_add(context: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    if isinstance(index, Cell):
        return scatter(context, x, dim, index, source)
    return torch.scatter_add(content(x), dim, index, content(source))


@row("scatter", aten.scatter.src, aten.scatter.value, note="public places; secret ones into zeros")
def scatter(context: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    """Write entries to secret places of a tensor of zeros, as in the gradients of `max`, `sort` and `topk`.

    Entries with the same place are added up. A number is written into any tensor, at one place of a row.
    """
    if not isinstance(index, Cell):
        return torch.scatter(content(x), dim, index, content(source))
    if isinstance(source, (int, float)) and content(x).dim() and index.shape.shape[dim] == 1:
        value, dim = content(x), dim % content(x).dim()
        places = [slice(0, n) if d != dim else slice(None) for d, n in enumerate(index.shape.shape)]
        if list(value[tuple(places)].shape) == list(value.shape):
            codes = _codes(index, value.shape[dim], dim).movedim(0, dim).squeeze(dim + 1)
            value = value if isinstance(value, SharedTensor) else codes * 0.0 + value
            return torch.mul(codes, source - value) + value
    zeros = content(x).bound == 0 if isinstance(x, Cell) else not bool(x.any())
    if not zeros or not isinstance(source, Cell):
        raise ArgumentError("writing to secret places of what is not zero is not supported on shares")
    classes = content(x).shape[dim] if index.content.dim() else 1
    if not index.content.dim():
        return source.content
    value = as_gradient(context, source.content) if source.gradient else factor(context, source)
    codes = _codes(index, classes, dim)
    return no_larger(torch.mul(codes, value.unsqueeze(0)), value).sum(dim % value.dim() + 1).movedim(0, dim)


@row("gather", aten.gather.default, note="public places; secret ones by one-hot codes")
def gather(context: Context, x: Cell, dim: int, index: Any, *, sparse_grad: bool = False) -> SharedTensor:
    if not isinstance(index, Cell):
        return torch.gather(x.content, dim, index)
    value = factor(context, x)
    if not value.dim():
        return value
    dim %= value.dim()
    codes = _codes(index, value.shape[dim], dim)  # [classes, ...]
    places = [slice(0, n) if d != dim else slice(None) for d, n in enumerate(index.content.shape)]
    entries = value[tuple(places)].movedim(dim, 0).unsqueeze(dim + 1)
    return no_larger(torch.mul(codes, entries).sum(0), value)


def _places_sampled(shape: Any, f: Any) -> Tensor:
    """The matrix [entries, samples] of linear sampling at public places, for each of a batch."""
    n = math.prod(shape[2:])
    unit = torch.eye(n, dtype=torch.float64).reshape(n, 1, *shape[2:])
    return torch.stack([f(unit, b).reshape(n, -1) for b in range(shape[0])])


@row("grid_sample", aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, note="public grid")
def grid_sampler_backward(
    context: Context, g: Cell, x: Cell, grid: Any, mode: int, padding: int, corners: bool, mask: Any
) -> tuple:
    """A sample is a weighted mean of entries, so its gradient is a product with a public matrix."""
    shape = x.content.shape
    run = lambda unit, b: torch.grid_sampler(
        unit, grid[b : b + 1].double().expand(len(unit), *grid.shape[1:]), mode, padding, corners
    )
    matrix = _places_sampled(shape, run).transpose(1, 2)  # [N, samples, entries]
    value = as_gradient(context, g.content).flatten(2)
    return torch.matmul(value, matrix.to(value.dtype)).reshape(shape), None


@row("inv", aten.linalg_inv_ex.default, note="as torch.linalg.inv")
def inverse(context: Context, x: Cell, check_errors: bool = False) -> tuple:
    """The second result, torch's error codes, is zero: a matrix without an inverse is a range error."""
    made = torch.linalg.inv(x.content)
    return made, torch.zeros(made.shape[:-2], dtype=torch.int32)


@row("index_fill", aten.masked_fill.Tensor, note="a number, public or secret")
def masked_fill(context: Context, x: Any, mask: Any, value: Any) -> SharedTensor:
    number = content(value)
    if isinstance(number, SharedTensor):
        return torch.where(content(mask), number, content(x))
    return torch.masked_fill(content(x), content(mask), number)


ON_META[aten._to_copy.default] = lambda x, dtype=None, **_: x.to(dtype=dtype)


@row("copy", aten._to_copy.default, torch.ops.prims.convert_element_type.default, note="numbers stay what they are")
def to_copy(context: Context, x: Cell, dtype: Any = None, **_: Any) -> Any:
    return x.content.to(dtype) if dtype is not None else x.content


# Views and concatenation: rows with the same form forward and backward.


def _view(func: Callable) -> Callable:
    """A row of a view. It views the base's reusable values too, so that a weight and its transpose are rounded once."""

    def viewed(context: Context, x: Cell, *args: Any, **kwargs: Any) -> Any:
        original = x.reusable.get("transposed") if func is torch.t and x.base is not None else None
        if original is not None:
            return original
        run = lambda v: func(v, *args, **kwargs)
        base = x if x.base is None else x.base[0]
        result = run(x.content)
        if not isinstance(result, SecretTensor):
            return [_cell(v, x, base) for v in result]
        cell = _cell(result, x, base)
        for key, value in x.reusable.items():
            if isinstance(value, SharedTensor) and key != "positive":
                cell.reusable[key] = run(value)
        if func is torch.t:
            cell.reusable["transposed"] = x
        return cell

    return viewed


def _cell(value: Any, x: Cell, base: Cell) -> Cell:
    """The cell of a view of x. A gradient has its own, since torch may keep it as `grad` and change it in place."""
    return Cell(value, True, pool=x.pool) if x.gradient else Cell(value, base=base)


for _overload, _func in {
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.reshape.default: torch.reshape,
    aten._reshape_alias.default: lambda x, size, stride: torch.reshape(x, size),
    aten.expand.default: lambda x, size, implicit=False: x.expand(size),
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.default: torch.squeeze,
    aten.squeeze.dim: torch.squeeze,
    aten.squeeze.dims: torch.squeeze,
    aten.select.int: torch.select,
    aten.slice.Tensor: lambda x, dim=0, start=None, end=None, step=1: x[
        (slice(None),) * (dim % x.dim()) + (slice(start, end, step),)
    ],
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
    aten.diagonal.default: torch.diagonal,
    aten.unbind.int: torch.unbind,
}.items():
    row("view", _overload, view=True)(_view(_func))


@row("detach", aten.detach.default, aten.alias.default, view=True)
def detach(context: Context, x: Cell) -> Cell:
    return x


@row("cat", aten.cat.default)
def cat(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return torch.cat([content(v) for v in tensors], dim)


@row("stack", aten.stack.default)
def stack(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return torch.stack([content(v) for v in tensors], dim)


@row("select_backward", aten.select_backward.default)
def select_backward(context: Context, g: Cell, size: Any, dim: int, index: int) -> SharedTensor:
    zeros = constant(context, g.content.unsqueeze(dim), 0)
    dim %= len(size)
    index %= size[dim]
    before, after = (
        zeros.expand([n if d != dim else count for d, n in enumerate(size)]) for count in (index, size[dim] - 1 - index)
    )
    return torch.cat([before, g.content.unsqueeze(dim), after], dim)


@row("slice_backward", aten.slice_backward.default)
def slice_backward(context: Context, g: Cell, size: Any, dim: int, start: int, end: int, step: int) -> SharedTensor:
    def placed(v: Tensor) -> Tensor:
        return aten.slice_backward(v, size, dim, start, end, step)

    value = g.content
    return value.like(context.backend.each(placed, value.shares), bound=value.bound)
