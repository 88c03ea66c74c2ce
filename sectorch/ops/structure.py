"""Operations that move, join, convert and create tensors. By public positions they take no message and are exact."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedOpError
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import COMPOSED, Context, implements, spell
from .common import (
    SLACK_BITS,
    align_scales,
    as_factor,
    encoded_public,
    is_secret,
    local_map,
    refuse,
    small_public_number,
    summand,
)
from .indexing import (
    gather_by_secret_index,
    index_by_secret,
    select_by_own_index,
    select_by_secret_index,
    take_along_secret_index,
)
from .rounding import convert

T = torch.Tensor


BY_INDEX = {
    torch.gather: gather_by_secret_index, T.gather: gather_by_secret_index,
    torch.take_along_dim: take_along_secret_index, T.take_along_dim: take_along_secret_index,
    torch.index_select: select_by_secret_index, T.index_select: select_by_secret_index,
}  # fmt: skip
"""Functions that take a secret index, too."""

BY_OWN_INDEX = (torch.index_select, T.index_select)
"""Functions that take an index of the answering party's own, such as a weight's `.to(torch.int64)`."""


def _entry_mover(func):
    def handler(context: Context, x: SharedTensor, *args, **kwargs):
        if any(is_secret(a) for a in (*args, *kwargs.values())):
            own = any(isinstance(a, PrivateTensor) for a in (*args, *kwargs.values()))
            if own and func in BY_OWN_INDEX:
                return select_by_own_index(context, x, *args, **kwargs)
            if own or func not in BY_INDEX:
                refuse("moving elements by private or secret numbers", "only public positions can be taken")
            return BY_INDEX[func](context, x, *args, **kwargs)
        moves = func in (torch.gather, T.gather, torch.take_along_dim, T.take_along_dim)
        return local_map(
            context,
            *_with_public_arguments(partial(_with_index_on_device, func) if moves else func, x, *args, **kwargs),
        )

    return handler


def _with_public_arguments(func: Callable, x: Any, *args: Any, **kwargs: Any) -> tuple:
    """func, x and public arguments, as `local_map` takes them. Public tensors keep their content in a dry run."""
    if not kwargs and not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(args)):
        return func, x, *args
    return partial(_apply_with, func=func, args=args, kwargs=kwargs), x


def _apply_with(v: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    return func(v, *args, **kwargs)


def _with_index_on_device(func: Callable, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """func with its index tensors on the device of v."""
    placed = lambda a: a.to(v.device) if isinstance(a, torch.Tensor) else a
    return func(v.contiguous(), *map(placed, args), **{name: placed(a) for name, a in kwargs.items()})


def _parts(func: Callable, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(func(v, *args, **kwargs))


def _many_mover(func):
    def handler(context: Context, x: SharedTensor, *args, **kwargs):
        f, _, *public = _with_public_arguments(partial(_parts, func), x, *args, **kwargs)
        return [x.like(part, x.scale_bits) for part in context.backend.moved(f, x.shares, *public)]

    return handler


def property_getter(name: str) -> Callable:
    """The function of a tensor's property, as `__torch_function__` is called with; torch's stubs declare a value."""
    return inspect.getattr_static(T, name).__get__


VIEWS = {
    "permute": (torch.permute, T.permute, torch.permute_copy),
    "transpose": (torch.transpose, T.transpose, torch.swapaxes, T.swapaxes, torch.swapdims, T.swapdims,
                  torch.transpose_copy),
    "t": (torch.t, T.t, property_getter("T"), torch.t_copy),
    "mT": (property_getter("mT"), T.adjoint, torch.adjoint, property_getter("mH"), property_getter("H")),
    "movedim": (torch.movedim, T.movedim, torch.moveaxis, T.moveaxis),
    "squeeze": (torch.squeeze, T.squeeze, torch.squeeze_copy),
    "unsqueeze": (torch.unsqueeze, T.unsqueeze, torch.unsqueeze_copy),
    "expand": (T.expand, torch.expand_copy),
    "broadcast_to": (torch.broadcast_to, T.broadcast_to),
    "narrow": (torch.narrow, T.narrow, torch.narrow_copy, T.narrow_copy),
    "select": (torch.select, T.select),
    "diagonal": (torch.diagonal, T.diagonal, torch.diagonal_copy),
    "unfold": (T.unfold, torch.unfold_copy),
    "detach": (torch.detach, T.detach, torch.alias_copy),
}  # fmt: skip
COPIES = {
    "index_select": (torch.index_select, T.index_select),
    "repeat": (T.repeat,),
    "tile": (torch.tile, T.tile),
    "repeat_interleave": (torch.repeat_interleave, T.repeat_interleave),
    "flip": (torch.flip, T.flip, torch.fliplr, T.fliplr, torch.flipud, T.flipud),
    "roll": (torch.roll, T.roll),
    "rot90": (torch.rot90, T.rot90),
    "gather": (torch.gather, T.gather),
    "take_along_dim": (torch.take_along_dim, T.take_along_dim),
    "tril": (torch.tril, T.tril),
    "triu": (torch.triu, T.triu),
    "diag": (torch.diag, T.diag),
    "diag_embed": (torch.diag_embed, T.diag_embed),
    "pixel_shuffle": (torch.pixel_shuffle, F.pixel_shuffle),
    "pixel_unshuffle": (torch.pixel_unshuffle, F.pixel_unshuffle),
    "channel_shuffle": (torch.channel_shuffle, F.channel_shuffle),
    "clone": (torch.clone, T.clone),
}
MANY = {
    "split": (torch.split, T.split, T.split_with_sizes, torch.split_with_sizes, torch.split_with_sizes_copy,
              torch.unsafe_split, T.unsafe_split, torch.unsafe_split_with_sizes, T.unsafe_split_with_sizes),
    "tensor_split": (torch.tensor_split, T.tensor_split),
    "chunk": (torch.chunk, T.chunk, torch.unsafe_chunk, T.unsafe_chunk),
    "unbind": (torch.unbind, T.unbind, torch.unbind_copy),
}  # fmt: skip
for _table, _view in ((VIEWS, True), (COPIES, False)):
    for _name, _functions in _table.items():
        for _function in dict.fromkeys(_functions):
            implements(_name, _function, view=_view, note="local", excess=0.0)(_entry_mover(_function))
for _name, _functions in MANY.items():
    for _function in _functions:
        implements(_name, _function, view=True, note="local")(_many_mover(_function))
implements("unbind", T.__iter__, view=True)(_many_mover(torch.unbind))


@implements("reshape", torch.reshape, T.reshape, T.view, torch.view_copy, view=True, note="local")
def reshape(context: Context, x: SharedTensor, *shape: Any, **kwargs: Any) -> SharedTensor:
    if "size" in kwargs or "shape" in kwargs:
        shape = (kwargs.get("size", kwargs.get("shape")),)
    if kwargs.get("dtype") or (shape and isinstance(shape[0], torch.dtype)):
        refuse("view as another dtype", "it would reinterpret shares as numbers; use .to(dtype)")
    return local_map(context, T.reshape, x, *shape)


@implements("reshape", T.reshape_as, T.view_as, view=True)
def reshape_as(context: Context, x: SharedTensor, other: torch.Tensor) -> torch.Tensor:
    return local_map(context, T.reshape, x, tuple(other.shape))


@implements("flatten", torch.flatten, T.flatten, T.ravel, torch.ravel, view=True, note="local")
def flatten(context: Context, x: SharedTensor, start_dim: int = 0, end_dim: int = -1) -> SharedTensor:
    return local_map(context, torch.flatten, x, start_dim, end_dim)


@implements("unflatten", torch.unflatten, T.unflatten, view=True, note="local")
def unflatten(context: Context, x: SharedTensor, dim: int, sizes: Any) -> SharedTensor:
    return local_map(
        context, lambda v: v.reshape(torch.unflatten(torch.empty(v.shape, device="meta"), dim, sizes).shape), x
    )


@implements("expand_as", T.expand_as, view=True, note="local")
def expand_as(context: Context, x: SharedTensor, other: torch.Tensor) -> torch.Tensor:
    return local_map(context, T.expand, x, other.shape)


@implements("getitem", T.__getitem__, view=True, note="local by a public index; by a secret one as embedding")
def getitem(context: Context, x: Any, index: Any) -> torch.Tensor:
    if any(is_secret(part) for part in pytree.tree_leaves(index)):
        return index_by_secret(context, x, index)
    return local_map(context, *_with_public_arguments(operator.getitem, x, index))


@implements("conj", torch.conj, T.conj, torch.conj_physical, T.conj_physical, torch.resolve_conj, T.resolve_conj,
            torch.resolve_neg, T.resolve_neg, torch.real, property_getter("real"), view=True,
            note="the tensor itself: there are no secret complex numbers")  # fmt: skip
def conj(context: Context, x: SharedTensor) -> SharedTensor:
    return x


@implements("nan_to_num", torch.nan_to_num, T.nan_to_num, in_place=(T.nan_to_num_, torch.nan_to_num_),
            note="exact; a copy, where nothing stands for infinity")  # fmt: skip
def nan_to_num(
    context: Context, x: SharedTensor, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> SharedTensor:
    return local_map(context, torch.clone, x)


@implements("contiguous", T.contiguous, view=True, note="the tensor itself")
def contiguous(context: Context, x: SharedTensor, memory_format: Any = None) -> SharedTensor:
    return x


@implements("pad", F.pad, note="local")
def pad(
    context: Context, x: SharedTensor, pad: Any, mode: str = "constant", value: float | None = None
) -> SharedTensor:
    if mode == "circular" and min(pad) < 0:
        refuse(f"negative padding with mode={mode}", "cut the tensor by indexing")
    if mode != "constant":
        index = _pad_index(x.shape, pad, mode)
        return local_map(context, operator.getitem, x, index)
    value = float(value or 0)
    if not x.dtype.is_floating_point:  # as torch writes a float into whole numbers, and into truth values
        value = float(value != 0) if x.dtype == torch.bool else float(math.trunc(value))
    fill = int(encoded_public(context, value, x.scale_bits))
    shares = context.backend.affine(_pad_with, x.shares, fill, tuple(pad))
    return x.like(shares, x.scale_bits, None if x.bound is None else max(x.bound, abs(fill)))


def _pad_with(v: torch.Tensor, fill: int, widths: tuple[int, ...]) -> torch.Tensor:
    return F.pad(v, widths, value=fill)


def _pad_index(shape: torch.Size, pad: Any, mode: str) -> tuple:
    """Reflected, replicated and circular padding as public positions per dimension."""
    count = len(pad) // 2
    index: list[Any] = [slice(None)] * (len(shape) - count)
    for k in range(count):
        size = shape[len(shape) - count + k]
        before, after = pad[2 * (count - 1 - k)], pad[2 * (count - 1 - k) + 1]
        at = torch.arange(-before, size + after)
        if mode == "reflect":
            at = (size - 1) - ((at.abs() - (size - 1)).abs())
        elif mode == "replicate":
            at = at.clamp(0, size - 1)
        else:
            at = at % size
        index.append(at.view(-1, *([1] * (count - 1 - k))))
    return tuple(index)


@implements("masked_fill", torch.masked_fill, T.masked_fill, in_place=(T.masked_fill_,),
            note="local; 1 round for a secret mask")  # fmt: skip
def masked_fill(context: Context, x: Any, mask: torch.Tensor, value: float) -> torch.Tensor:
    if isinstance(mask, SharedTensor) or (not is_secret(mask) and small_public_number(context, value) is not None):
        return torch.where(mask, value, x)
    if is_secret(mask):
        refuse("masked_fill of shares with a secret mask that is private to a party", "share the mask")
    cleared = context.backend.each(torch.masked_fill, x.shares, mask.to(context.session.device), 0)
    if is_secret(value):
        refuse("masked_fill with a secret value", "use torch.where(mask, value, x)")
    if not x.dtype.is_floating_point and float(value) % 1:
        raise DtypeError(f"masked_fill: whole numbers cannot be filled with {float(value)}; use x.to(torch.float32)")
    fill = encoded_public(context, float(value), x.scale_bits)
    bound = None if x.bound is None else max(x.bound, abs(int(fill)))
    return x.like(cleared + torch.where(mask, fill, 0), x.scale_bits, bound)


@implements("to", T.to, T.type, T.float, T.double, T.half, T.bfloat16, T.cpu, T.type_as,
            note="local; to whole numbers as trunc, with a comparison where they may not fit", excess=0.0)  # fmt: skip
def to(context: Context, x: SharedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (torch.dtype, torch.Tensor)):
            x = convert(context, x, value if isinstance(value, torch.dtype) else value.dtype)
    return x


def _converter(dtype: torch.dtype) -> Callable:
    return lambda context, x: convert(context, x, dtype)


for _function, _dtype in (
    (T.bool, torch.bool), (T.long, torch.int64), (T.int, torch.int32), (T.short, torch.int16), (T.char, torch.int8),
    (T.byte, torch.uint8),
):  # fmt: skip
    implements("to", _function)(_converter(_dtype))


def _to_cuda(x: Any, *_args: Any, **_how: Any) -> Any:
    if x.device.type != "cuda":
        refuse("moving a secret tensor to a GPU", f"it stays where its session is, on {x.device}: leave .cuda() out")
    return x


_FOR_TRAINING = (
    "a secure model is for inference; sectorch.shared(model) trains on shares, and DifferentiableTensor(x, "
    "requires_grad=True) is an input to which a gradient comes"
)
COMPOSED[T.cuda] = _to_cuda


def _refuse_assert(condition: Any, message: Any = None) -> None:
    if isinstance(condition, SharedTensor):
        refuse("a check of a secret", "it would reveal whether it holds: leave it out where the model runs on secrets")


def _branch(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
    if is_secret(pred):
        refuse("a branch on a secret", "compute both, and choose by torch.where(condition, x, y)")
    return (true_fn if pred else false_fn)(*operands)


COMPOSED[torch._assert] = _refuse_assert
COMPOSED[vars(torch)["_make_dual"]] = lambda *_args, **_how: refuse(
    "a derivative along a direction (jvp)", _FOR_TRAINING
)
COMPOSED[torch.cond] = COMPOSED[torch.ops.higher_order.cond] = _branch


def _from_public_attributes(change: Callable) -> Callable:
    """A function that reads only the shape or the dtype of a second tensor. A plain x stays plain."""
    return lambda x, other: NotImplemented if isinstance(x, SharedTensor) else change(x, other)


COMPOSED[T.expand_as] = _from_public_attributes(lambda x, other: x.expand(other.shape))
COMPOSED[T.view_as] = COMPOSED[T.reshape_as] = _from_public_attributes(lambda x, other: x.reshape(other.shape))
COMPOSED[T.type_as] = _from_public_attributes(lambda x, other: x.to(other.dtype))


def _to(x: Any, *args: Any, **how: Any) -> Any:
    """x.to(other) for a plain or private x and a secret other."""
    if isinstance(x, SharedTensor) or not (is_secret(args[0] if args else how.get("other"))):
        return NotImplemented
    return x.to(args[0].dtype if args else how["other"].dtype)


COMPOSED[T.to] = _to


def _type(x: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    """x.type() is a name; x.type(torch.LongTensor) and x.type("torch.LongTensor") name a dtype."""
    if isinstance(dtype, torch.dtype):
        return NotImplemented
    if dtype is None:
        return torch.empty(0, dtype=x.dtype).type()
    if not isinstance(dtype, str):
        dtype = f"{dtype.__module__}.{dtype.__name__}"
    if not dtype.startswith("torch.") or dtype.count(".") != 1:
        refuse(f"a tensor of type {dtype}", f"it stays where its session is, on {x.device}: use .to(dtype)")
    return x.to(torch.empty(0).type(dtype).dtype)


COMPOSED[T.type] = _type
COMPOSED[T.data.__get__] = lambda x: x.detach()  # pyright: ignore[reportAttributeAccessIssue]  a descriptor


def _broadcast(*tensors: Any) -> list[torch.Tensor]:
    """Each tensor by itself: public ones stay public, and dtypes are not promoted."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return [x.expand(shape) for x in tensors]


def _each_expanded(func: Callable) -> Callable:
    def composed(*tensors: Any) -> Any:
        tensors = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
        return NotImplemented if len(tensors) == 1 else tuple(func(x) for x in tensors)

    return composed


COMPOSED[torch.broadcast_tensors] = _broadcast
for _function in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d):
    COMPOSED[_function] = _each_expanded(_function)
COMPOSED[T.backward] = lambda *_args, **_how: refuse("a gradient through a secret tensor", _FOR_TRAINING)


@implements("requires_grad_", T.requires_grad_, note="only False", excess=0.0)
def requires_grad(context: Context, x: SharedTensor, requires_grad: bool = True) -> SharedTensor:
    if requires_grad:
        refuse(
            "a gradient through a secret tensor",
            "a secure model is for inference; sectorch.shared(model) trains on shares",
        )
    return x


@implements("dropout", F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
            F.feature_alpha_dropout, note="local; evaluation mode only", excess=0.0)  # fmt: skip
def dropout(
    context: Context, x: SharedTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> SharedTensor:
    if training and p > 0:
        refuse("dropout in training mode", "call model.eval() first")
    return x


@implements("masked_select", torch.masked_select, T.masked_select, note="local; public mask", excess=0.0)
def masked_select(context: Context, x: SharedTensor, mask: torch.Tensor) -> SharedTensor:
    shape = torch.broadcast_shapes(x.shares.shape, mask.shape)
    chosen = mask.expand(shape).flatten().nonzero().squeeze(1)
    return local_map(context, lambda v: v.expand(shape).flatten().index_select(0, chosen.to(v.device)), x)


def constant(make):
    def handler(context: Context, x: SharedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        return make(plain, *args, **kwargs)

    return handler


def _finite_test(func):
    def handler(context: Context, x: SharedTensor) -> torch.Tensor:
        return func(torch.zeros(x.shape, dtype=x.dtype))

    return handler


for _function in (torch.isfinite, T.isfinite, torch.isinf, T.isinf, torch.isnan, T.isnan, torch.isposinf, T.isposinf,
                  torch.isneginf, T.isneginf, torch.isreal, T.isreal):  # fmt: skip
    implements("isfinite", _function, note="a plain tensor, where nothing stands for infinity")(_finite_test(_function))
for _function in (torch.zeros_like, torch.ones_like, torch.full_like, T.new_zeros, T.new_ones, T.new_full):
    implements("constant_like", _function, note="gives a plain tensor")(constant(_function))


def _nested_stack(data: Any) -> torch.Tensor:
    """A tensor of tensors and numbers in nested lists."""
    if isinstance(data, (list, tuple)):
        return torch.stack([_nested_stack(part) for part in data])
    return data.detach().clone() if isinstance(data, torch.Tensor) else torch.as_tensor(data)


def _tensor(data: Any, *, dtype: Any = None, **_how: Any) -> torch.Tensor:
    """torch.tensor of a secret tensor, or of nested lists that contain some."""
    made = _nested_stack(data)
    return made if dtype is None else made.to(dtype)


def _as_tensor(data: Any, dtype: Any = None, **_how: Any) -> torch.Tensor:
    made = data if isinstance(data, torch.Tensor) else _nested_stack(data)
    return made if dtype is None else made.to(dtype)


def _new_tensor(x: Any, data: Any, *, dtype: Any = None, **_how: Any) -> torch.Tensor:
    if any(map(is_secret, pytree.tree_leaves(data))):
        return _nested_stack(data).to(dtype or x.dtype)
    data = data.detach() if isinstance(data, torch.Tensor) else data
    return torch.empty(0, dtype=x.dtype).new_tensor(data, dtype=dtype)


def _new(x: Any, *given: Any, **_how: Any) -> torch.Tensor:
    """Zeros for sizes, in the place of uninitialised memory; a tensor of the data otherwise."""
    if len(given) == 1 and not isinstance(given[0], (int, torch.Size)):
        return _new_tensor(x, given[0])
    return torch.zeros(given or 0, dtype=x.dtype) if not given or isinstance(given[0], int) else x.new_zeros(given[0])


def _full(make: Callable, at: int) -> Callable:
    """torch.full and its kin, for a fill value in a public tensor, or a secret one, which is expanded."""

    def composed(*args: Any, **how: Any) -> Any:
        value = args[at] if len(args) > at else how["fill_value"]
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        args = (*args[:at], None, *args[at + 1 :]) if len(args) > at else (*args, None)
        how = {name: v for name, v in how.items() if name != "fill_value"}
        if not is_secret(value):
            return make(*args[:at], value.item(), *args[at + 1 :], **how)
        places = {torch.full: lambda: args[0], torch.full_like: lambda: args[0].shape, T.new_full: lambda: args[1]}
        shape: Any = how["size"] if "size" in how else places[make]()
        like = value.dtype if make is torch.full else args[0].dtype
        return value.reshape(()).to(how.get("dtype") or like).expand(shape).clone()

    return composed


COMPOSED[torch.tensor], COMPOSED[torch.as_tensor], COMPOSED[torch.asarray] = _tensor, _as_tensor, _as_tensor
COMPOSED[T.new_tensor], COMPOSED[T.new] = _new_tensor, _new
COMPOSED[torch.full], COMPOSED[torch.full_like] = _full(torch.full, 1), _full(torch.full_like, 1)
COMPOSED[T.new_full] = _full(T.new_full, 2)


# Tensors joined into one: cat, stack and their kin. No message, unless scales have to be aligned by a truncation.


@implements("cat", torch.cat, torch.concat, torch.concatenate, note="local")
def cat(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return _join(context, tensors, torch.cat, dim)


@implements("stack", torch.stack, note="local")
def stack(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return _join(context, tensors, torch.stack, dim)


implements("hstack", torch.hstack, note="local")(lambda context, tensors: _join(context, tensors, torch.hstack))
implements("vstack", torch.vstack, torch.row_stack, note="local")(
    lambda context, tensors: _join(context, tensors, torch.vstack)
)


def _join_all(join: Callable, public: tuple, *values: torch.Tensor) -> torch.Tensor:
    return join(values, *public)


def _as_factors_beside(context: Context, operands: list[SharedTensor], given: Any) -> list[SharedTensor]:
    """Round products that are joined with factors, as a new row with a cache: the cache is not to lose bits again."""
    ready = lambda x: 0 < x.scale_bits <= context.frac_bits + SLACK_BITS
    if any(isinstance(x, SharedTensor) and ready(x) for x in given):
        return [as_factor(context, x) for x in operands]
    return operands


def _join(context: Context, tensors: Any, join: Callable, *public: Any) -> SharedTensor:
    parts = align_scales(context, *_as_factors_beside(context, [summand(context, x) for x in tensors], tensors))
    bounds = [x.bound for x in parts if x.bound is not None]
    bound = max(bounds) if len(bounds) == len(parts) else None
    shares = context.backend.each(_join_all, join, public, *(x.shares for x in parts))
    return parts[0].like(shares, bound=bound)


# Random numbers in the shape of a secret tensor are refused: the function does not say who may know them.
#
# Noise that everybody knows hides nothing, noise that S knows does not protect from S, and a party that chooses noise
# has to be trusted with it. A forward takes noise as an input instead, which Q draws and shares as its data.


def _refuse_drawing(func: Callable) -> Callable:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            f"{spell(func)} of a secret tensor is not supported, since it does not say who may know the numbers; "
            f"give them to the forward as an input, or use torch.rand(x.shape), which is public"
        )

    return refused


for _random_function in (
    torch.randn_like, torch.rand_like, torch.bernoulli, T.bernoulli, T.bernoulli_, torch.normal, T.normal_,
    torch.multinomial, T.multinomial, torch.poisson, T.uniform_, T.exponential_, T.random_, T.cauchy_, T.geometric_,
    T.log_normal_, torch.randint_like,
):  # fmt: skip
    COMPOSED[_random_function] = _refuse_drawing(_random_function)


COMPOSED[torch.empty_like], COMPOSED[T.new_empty] = torch.zeros_like, T.new_zeros  # for uninitialised memory


def shuffle(x: Any, *others: Any) -> Any:
    """Shuffle the rows of x, and those of the others in the same order. The order is uniform, and no party learns it.

    Args:
        x, others: SharedTensors of one session with equal numbers of rows; of any shapes, dtypes and owners.

    Returns:
        x in its new order, or a tuple of all tensors. A revealed row shows its content, but not its former position.

    Rounds 2, online 16 bytes per element, dealt 8 (`mpc/star/shuffle.py`). Exact. In a reference session the order
    differs from call to call, too.

    Raises:
        ArgumentError: a tensor that is not shared, or tensors of two sessions.
        ShapeError: no rows, or different numbers of rows.
    """
    given = [v.as_shared() if hasattr(v, "as_shared") else v for v in (x, *others)]
    for value in given:
        if not isinstance(value, SharedTensor):
            raise ArgumentError(f"shuffle() takes tensors in shares, got a {type(value).__name__}; share it first")
        if value.session is not given[0].session or value.party != given[0].party:
            raise ArgumentError("shuffle() takes tensors of one session; share them in one")
        if not value.shares.shape or value.shares.shape[0] != given[0].shares.shape[0]:
            raise ShapeError(f"shuffle() needs equal numbers of rows, got {[tuple(v.shares.shape) for v in given]}")
    shapes = [value.shares.shape for value in given]
    context = Context(given[0].session, given[0].party, given[0].scheme)
    with context.session.operation(context.party):
        backend = context.backend
        rows = backend.each(_rows_side_by_side, *(value.shares for value in given))
        rows = backend.shuffled(rows) if rows.shape[0] > 1 else rows
        made, at = [], 0
        for value, shape in zip(given, shapes, strict=True):
            width = math.prod(shape[1:])
            moved = value.like(
                backend.each(partial(_columns, at=at, width=width, shape=shape), rows), bound=value.bound
            )
            moved.whole_bits, at = value.whole_bits, at + width
            made.append(moved)
    return made[0] if not others else tuple(made)


def _rows_side_by_side(*values: Tensor) -> Tensor:
    return torch.cat([v.reshape(len(v), math.prod(v.shape[1:])) for v in values], 1)


def _columns(rows: Tensor, at: int, width: int, shape: tuple) -> Tensor:
    return rows[:, at : at + width].reshape(shape)
