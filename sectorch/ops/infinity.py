"""The rules of operations for stand-ins, which are numbers that stand for infinity or for one beyond the range.

`tensor/shared.py` says what a stand-in is, and how a tensor is marked. The rules here run before the handlers, at a
user's call: a handler gets tensors without stand-ins, or with stand-ins that are numbers to it. A new operation needs
no rule. Without one, its operands are checked to hold no stand-in, securely and beside the computation, like the range
of an activation; if they do, the result is withheld.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ..backend import RaisedFlags
from ..errors import DtypeError, FixedPointRangeError, NonFiniteError, UnsupportedOpError
from ..ring import range_limit
from ..tensor import SharedTensor
from ..tensor.shared import (
    Infinite,
    common_value,
    exact_infinite,
    infinite_of,
    join_infinite,
    mask_beyond_range,
    of_public,
    round_to_dtype,
    set_rules,
    size_of,
)
from ..tensor.table import HANDLER, IN_PLACE, Context, spell
from .common import check_fits, limit_at

T = torch.Tensor
ABSORBS = 2.0**29
"""Public numbers from here on absorb a summand: the sum is the number, up to float32's rounding."""

ABSORBS_WIDE = 2.0**58
"""As `ABSORBS`, for float64."""

LEAST = 64.0
"""The least magnitude of a stand-in that was scaled: e^-64 is zero."""

MOVES = frozenset((
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "aminmax", "atleast_1d",
    "atleast_2d", "atleast_3d", "block_diag", "broadcast_tensors", "broadcast_to", "cartesian_prod", "cat",
    "channel_shuffle", "chunk", "clone", "column_stack", "combinations", "constant_pad_nd", "contiguous", "copy",
    "cummax", "cummin", "detach", "diag", "diag_embed", "diagflat", "diagonal", "diagonal_scatter", "dropout",
    "dsplit", "dstack", "expand", "expand_as", "fftshift", "fill", "fill_diagonal",
    "flatten", "flip", "gather", "getitem", "hsplit",
    "hstack", "ifftshift", "index_copy", "index_fill", "index_put", "index_select", "kthvalue", "linalg_diagonal", "mT",
    "masked_scatter", "masked_select", "max", "max_pool1d", "max_pool2d", "max_pool3d", "maximum", "median", "meshgrid",
    "min", "minimum", "movedim", "msort", "narrow", "pad", "permute", "pixel_shuffle", "pixel_unshuffle", "positive",
    "put", "repeat", "repeat_interleave", "requires_grad_", "reshape", "roll", "rot90", "scatter", "select",
    "select_scatter", "setitem", "slice_scatter", "sort", "split", "squeeze", "stack", "t", "take_along_dim",
    "tensor_split", "tile", "to", "topk", "transpose", "tril", "triu", "unbind", "unflatten", "unfold",
    "unsqueeze", "vsplit", "vstack",
))  # fmt: skip
"""Operations whose results consist of elements of their operands: they may hold what these hold."""

PLACES_PUBLIC = frozenset((
    "cat", "column_stack", "constant_pad_nd", "copy", "diagonal_scatter", "dstack", "fill", "fill_diagonal",
    "hstack", "index_copy",
    "index_fill", "index_put", "masked_scatter", "max", "maximum", "min", "minimum", "pad", "put", "scatter",
    "select_scatter", "setitem", "slice_scatter", "stack", "vstack",
))  # fmt: skip
"""Those of them that place public numbers beside shared ones."""

ORDERED = frozenset((
    "amax", "amin", "aminmax", "cummax", "cummin", "kthvalue", "max", "median", "min", "msort", "sort", "topk",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
))  # fmt: skip

BOUNDED = frozenset((
    "all", "any", "argmax", "argmin", "argsort", "count_nonzero", "erf", "erfc", "heaviside", "logical_and",
    "logical_not", "logical_or", "logical_xor", "sigmoid", "sign", "signbit", "tanh", "constant_like",
))  # fmt: skip
"""Operations that are right if stand-ins are taken for large numbers, and whose results hold none."""

BOUNDED_BELOW = frozenset(("elu", "exp", "expm1"))
"""As `BOUNDED`, for negative stand-ins alone."""

COMPARED = {"eq": "eq", "ne": "eq", "ge": "ge", "lt": "ge", "le": "le", "gt": "le"}
"""Each comparison, and the one that it is or that it negates."""

CARRIES = MOVES | {
    "abs", "add", "clamp", "clamp_max", "clamp_min", "div", "hardtanh", "index_reduce", "log_softmax", "logsumexp",
    "masked_fill", "mul", "nan_to_num", "neg", "relu", "relu6", "rsub", "scatter_reduce", "sub", "where",
}  # fmt: skip
"""Operations whose results may hold stand-ins, for recordings (`nn/capture.py`)."""


@dataclass(frozen=True)
class OperatorCall:
    """A user's call: its context, the torch function, and the name of its row."""

    context: Context
    func: Callable
    name: str

    @property
    def scheme(self) -> Any:
        return self.context.scheme

    def without(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, with stand-ins taken for numbers."""
        return _without(self.func, *args, **kwargs)

    def put(self, value: Any, dtype: torch.dtype) -> tuple[Infinite | None, Any]:
        """The mark of an operand, and the operand with stand-ins in the place of public numbers beyond the range."""
        if isinstance(value, SharedTensor):
            return value.infinite, value
        if not dtype.is_floating_point and dtype != torch.bool and isinstance(value, (float, torch.Tensor)):
            ends, numbers = torch.iinfo(dtype), _public_call(lambda v: v.detach().double(), torch.as_tensor(value))
            if not numbers.is_meta and not bool(((numbers >= ends.min) & (numbers <= ends.max)).all()):
                what = value if isinstance(value, float) else "all numbers of the tensor"
                raise DtypeError(f"{spell(self.func)}: {dtype} does not hold {what}; use x.float() first")
        return of_public(self.scheme, value, dtype)


@contextmanager
def _unmarked(tree: Any) -> Iterator[None]:
    known = [(x, x.infinite) for x in pytree.tree_leaves(tree) if infinite_of(x) is not None]
    for x, _ in known:
        x.infinite = None
    try:
        yield
    finally:
        for x, infinite in known:
            x.infinite = infinite


def _without(func: Callable, *args: Any, **kwargs: Any) -> Any:
    with _unmarked((args, kwargs)):
        return func(*args, **kwargs)


def _public_call(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of public tensors, outside of any recording."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return func(*args, **kwargs)


def _write_back(call: OperatorCall, target: Any, result: Any, inplace: bool = False) -> SharedTensor:
    """The result, which an in-place function writes to its first operand."""
    if call.func not in IN_PLACE and not inplace:
        return result
    infinite = result.infinite
    target.infinite = None
    _without(T.copy_, target, result)
    target.infinite = infinite
    return target


def _mark(result: Any, infinite: Infinite | None) -> Any:
    result.infinite = infinite
    return result


def hold_to_numbers(context: Context, x: Any, what: str) -> Any:
    """Check that x holds no stand-in: if it does, results that depend on it are withheld.

    Raises:
        FixedPointRangeError: there are no checks (`Scheme(range_check=False)`), or x is sure to fail.
    """
    infinite = infinite_of(x)
    if infinite is None:
        return x
    if not context.scheme.range_check:
        _refuse(what, infinite)
    if infinite.certain and infinite.at is not None and bool(infinite.at.any()):
        _refuse(what, infinite)
    y = _with_flags(context, x, infinite, infinite.threshold * 2.0**x.scale_bits)
    y.whole_bits = x.whole_bits
    return y


def _with_flags(context: Context, x: SharedTensor, infinite: Infinite, allowed: float | None) -> SharedTensor:
    """x without its mark, held to `allowed`, and the summands of its stand-ins held to the activation limit."""
    with context.session.operation(context.party) as net:
        before = len(net.state(RaisedFlags))
        for y in infinite.unchecked:
            check_fits(context, y, limit_at(context, y.scale_bits))
        made = x.like(x.shares, bound=x.bound)
        if allowed is not None:
            made = check_fits(context, made, 2.0 ** math.floor(math.log2(allowed)))
        others = (flag for y in infinite.unchecked for flag in y.flags)
        made.flags = tuple(dict.fromkeys((*x.flags, *others, *net.state(RaisedFlags)[before:])))
    made.whole_bits = x.whole_bits
    return made


def _refuse(what: str, infinite: Infinite) -> NoReturn:
    values = " or ".join(f"{v:g}" for v in (infinite.low, infinite.high) if v is not None and not math.isnan(v))
    raise FixedPointRangeError(
        f"{what} of what holds {values or 'a number beyond the range'}, which fixed point has no number for; choose "
        f"after it (torch.where of the result), or fill with a number in the range"
    )


def _standin_mask(x: SharedTensor, low: bool = True, high: bool = True) -> Any:
    """A mask of the stand-ins of x: shared, or public if their positions are known."""
    infinite: Any = x.infinite
    low, high = low and infinite.low is not None, high and infinite.high is not None
    if infinite.certain and infinite.at is not None and (low, high) == (
        infinite.low is not None, infinite.high is not None
    ):  # fmt: skip
        return infinite.at
    if infinite.exact:
        size = infinite.size if _fractional(x) else int(infinite.size)
        parts = [_without(torch.eq, x, v) for v, asked in ((-size, low), (size, high)) if asked]
    else:
        context = Context(x.session, x.party, x.scheme)
        y, most = _with_flags(context, x, infinite, None), infinite.threshold
        parts = [part for part, asked in ((lambda: y <= -most, low), (lambda: y >= most, high)) if asked]
        parts = [part() for part in parts]
    if not parts:
        return torch.zeros(x.shape, dtype=torch.bool)
    return parts[0] if len(parts) == 1 else torch.logical_or(*parts)


def _fractional(x: Any) -> bool:
    return x.dtype.is_floating_point


def _with_exact(x: SharedTensor) -> SharedTensor:
    """x with exact stand-ins: of the magnitude with which they are placed."""
    infinite: Any = x.infinite
    size, made = size_of(x.scheme, x.dtype), x
    for sign, value in ((-1, infinite.low), (1, infinite.high)):
        if value is not None:
            there = _standin_mask(x, sign < 0, sign > 0)
            made = _without(torch.masked_fill, made, there, sign * size)
    known = exact_infinite(x.scheme, x.dtype, infinite.low, infinite.high)
    return _mark(made, known and replace(known, at=infinite.at, certain=infinite.certain))


RULES: dict[str, Callable] = {}


def _rule(*names: str) -> Callable:
    def register(rule: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


_NAMES: dict[Any, str] = {"self": "input", "x": "input", "y": "other"}


def _apply_rule(context: Context, func: Callable, name: str, args: tuple, kwargs: dict, marks: list[Infinite]) -> Any:
    """The result by the operation's rule, or by its kind; NotImplemented leaves the call to its handler.

    Args:
        marks: of the operands that have one. There is none where a public operand is beyond the range.
    """
    call = OperatorCall(context, func, name)
    result: Any = NotImplemented
    if name in RULES:
        named: Any = {_NAMES.get(key, key): value for key, value in kwargs.items()}
        result = RULES[name](call, *args, **named)
        if result is NotImplemented:
            return result
    elif name in MOVES and not _to_integers(call, args, kwargs) and not _accumulates(call, args, kwargs):
        result = _move(call, args, kwargs)
    if result is not NotImplemented:
        _mark_views(args[0] if func in IN_PLACE and args else None)
        return result
    if not marks:
        return NotImplemented
    natural = name in BOUNDED or (name == "to" and _target_dtype(call, args, kwargs) == torch.bool)
    natural = natural or (name in BOUNDED_BELOW and all(mark.high is None for mark in marks))
    if natural:
        return call.without(*args, **kwargs)
    return func(*_as_numbers(call, args), **_as_numbers(call, kwargs))


def _to_integers(call: OperatorCall, args: tuple, kwargs: dict) -> bool:
    """Whether this is a conversion to whole numbers or bits."""
    if call.name != "to" or not _shared(args[0]) or not _fractional(args[0]):
        return False
    return not _target_dtype(call, args, kwargs).is_floating_point


def _accumulates(call: OperatorCall, args: tuple, kwargs: dict) -> bool:
    """Whether this is a write with accumulate=True."""
    return call.name in ("index_put", "put") and bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))


def _target_dtype(call: OperatorCall, args: tuple, kwargs: dict) -> torch.dtype:
    """The dtype of a conversion's result."""
    like = lambda x: torch.empty(0, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
    return _public_call(call.func, *pytree.tree_map(like, args), **pytree.tree_map(like, kwargs)).dtype


def _mark_views(target: Any) -> None:
    """After a write into one tensor, mark all that share its memory."""
    mark = infinite_of(target)
    if mark is None or target.layout_in_memory is None:
        return
    for other in (member() for member in target.layout_in_memory.members):
        if other is not None and other is not target:
            other.infinite = join_infinite(other.infinite, mark)


def _as_numbers(call: OperatorCall, tree: Any) -> Any:
    held = lambda x: hold_to_numbers(call.context, x, spell(call.func)) if infinite_of(x) is not None else x
    return pytree.tree_map(held, tree)


def _sign_model(call: OperatorCall, leaf: Any, dtype: torch.dtype) -> Any:
    """A public model of an operand: 0 for numbers, -1 or 1 where there may be a stand-in; other operands unchanged."""
    if isinstance(leaf, SharedTensor):
        infinite = leaf.infinite
        if infinite is None:
            return torch.zeros(leaf.shape, dtype=torch.float32)
        sign = -1.0 if infinite.high is None else 1.0
        at = torch.ones(leaf.shape, dtype=torch.bool) if infinite.at is None else infinite.at
        return _public_call(torch.where, at, sign, 0.0).expand(leaf.shape).clone()
    if call.name not in PLACES_PUBLIC or isinstance(leaf, (bool, str)) or leaf is None:
        return leaf
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_floating_point():
            return leaf
        found = mask_beyond_range(call.scheme, leaf)
        return torch.zeros(leaf.shape) if found is None else _public_call(torch.where, found, leaf.sign().float(), 0.0)
    if isinstance(leaf, float):
        return 0.0 if mask_beyond_range(call.scheme, leaf) is None else math.copysign(1.0, leaf)
    return leaf


def _move(call: OperatorCall, args: tuple, kwargs: dict) -> Any:
    """The result of a function that moves elements, with its mark."""
    dtypes = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, SharedTensor)]
    public = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    own = call.name in ("setitem", "fill", "copy", "masked_fill") or call.func in IN_PLACE
    dtype = dtypes[0] if own or not public else _widest(public if call.name in PLACES_PUBLIC else dtypes)
    top = [x for x in (*args, *kwargs.values()) if isinstance(x, (int, float))]  # further in there are sizes

    def placed(x: Any) -> bool:
        number = isinstance(x, torch.Tensor) or any(x is value for value in top)
        return _shared(x) or (number and call.name in PLACES_PUBLIC)

    put = lambda x: call.put(x, dtype)[1] if placed(x) else x
    known = [call.put(x, dtype)[0] for x in pytree.tree_leaves((args, kwargs)) if placed(x)]
    parts = [x for x in known if x is not None]
    if not parts:
        return NotImplemented
    at = certain = None
    if len({(p.low is not None, p.high is not None) for p in parts}) == 1 and not (parts[0].low and parts[0].high):
        at = _positions(call, args, kwargs, dtype)
        certain = at is not None and all(p.certain and p.at is not None for p in parts)
    result = call.without(*pytree.tree_map(put, args), **pytree.tree_map(put, kwargs))
    target = args[0] if result is None else result
    outs = [x for x in pytree.tree_leaves(target) if isinstance(x, SharedTensor) and x.dtype != torch.bool]
    if call.name in ORDERED and len(outs) == 2 and call.name != "aminmax":
        outs = outs[:1]  # values, and positions
    whole = join_infinite(*parts)
    for k, out in enumerate(outs):
        where = at[k] if at is not None and k < len(at) and at[k].shape == out.shape else None
        sure = bool(certain) and where is not None
        mark = whole if where is None or bool(where.any()) else None
        out.infinite = mark and replace(mark, at=where, certain=sure)
    if call.name in ("maximum", "minimum", "max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        _drop_bounded_sign(call, args, outs[0])
    return result


def _shared(x: Any) -> bool:
    return isinstance(x, SharedTensor)


def _result_dtype(*values: Any) -> torch.dtype:
    """The dtype of a result of two operands, by torch's promotion."""
    return torch.result_type(*(
        torch.empty([1] * min(1, v.dim()), dtype=v.dtype) if isinstance(v, torch.Tensor) else v for v in values
    ))  # fmt: skip


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    made = dtypes[0]
    for dtype in dtypes[1:]:
        made = torch.promote_types(made, dtype)
    return made


def _positions(call: OperatorCall, args: tuple, kwargs: dict, dtype: torch.dtype) -> list[torch.Tensor] | None:
    """The positions where results of a function that moves elements may hold stand-ins; None if they are secret."""
    flat = pytree.tree_leaves((args, kwargs))
    if any(_shared(x) and (not _fractional(x) or x.dtype == torch.bool) for x in flat):
        return None
    if any(_shared(x) and x.infinite is not None and x.infinite.at is None for x in flat):
        return None
    try:
        model = lambda x: _sign_model(call, x, dtype)
        a, k = pytree.tree_map(model, args), pytree.tree_map(model, kwargs)
        found = _public_call(call.func, *a, **k)
    except Exception:
        return None
    found = a[0] if found is None else found
    leaves = [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
    return [x != 0 for x in leaves if x.is_floating_point()] or None


def _drop_bounded_sign(call: OperatorCall, args: tuple, out: SharedTensor) -> None:
    """Drop a sign: a maximum has negative stand-ins only if both operands have some, a minimum positive ones."""
    public = next((x for x in args[:2] if isinstance(x, torch.Tensor) and not _shared(x)), None)
    shared = next(x for x in args[:2] if _shared(x))
    if public is None or out.infinite is None:
        return
    sign = "low" if call.name in ("maximum", "max") else "high"
    if mask_beyond_range(call.scheme, public) is None or getattr(infinite_of(shared), sign, None) is None:
        out.infinite = out.infinite.with_changes(**{sign: None, "at": None, "certain": False})


@_rule("where")
def _where(call: OperatorCall, condition: Any, input: Any = None, other: Any = None) -> Any:
    if call.func is T.where:  # x.where(condition, y)
        condition, input = input, condition
    dtype = _result_dtype(input, other)
    (one, x), (two, y) = call.put(input, dtype), call.put(other, dtype)
    made = _without(torch.where, condition, x, y)
    shape = made.shape
    first, second = (_positions_in(mark, v, shape) for mark, v in ((one, input), (two, other)))
    if isinstance(condition, SharedTensor):
        return _mark(made, join_infinite(one, two, at=_public_call(torch.logical_or, first, second)))
    at = _public_call(torch.where, condition.detach().cpu(), first, second)
    mark = join_infinite(one, two, at=at, certain=all(m is None or m.certain for m in (one, two)))
    return _mark(made, mark if bool(at.any()) else None)


def _positions_in(infinite: Infinite | None, value: Any, shape: torch.Size) -> torch.Tensor:
    """The positions where a tensor, broadcast to a shape, may hold stand-ins."""
    if infinite is None:
        return torch.zeros(shape, dtype=torch.bool)
    if infinite.at is None:
        return torch.ones(shape, dtype=torch.bool)
    return _public_call(torch.broadcast_to, infinite.at.cpu(), shape)


@_rule("masked_fill")
def _masked_fill(call: OperatorCall, input: Any, mask: Any, value: Any) -> Any:
    dtype = input.dtype
    if dtype == torch.bool and isinstance(value, float):
        value = bool(value)  # infinity is no number that a truth value stands in for: it is true
    known = infinite_of(input)
    fill, number = call.put(value, dtype)
    before = _positions_in(known, input, input.shape)
    made = call.without(input, mask, number)
    before = _public_call(torch.broadcast_to, before, made.shape)
    if isinstance(mask, SharedTensor):
        at = torch.ones(made.shape, dtype=torch.bool) if fill is not None else before
        return _mark(made, join_infinite(known, fill, at=at))
    there = _public_call(torch.broadcast_to, mask.detach().cpu(), made.shape)
    at = _public_call(torch.where, there, torch.tensor(fill is not None), before)
    mark = join_infinite(known, fill, at=at, certain=known is None or known.certain)
    return _mark(made, mark if bool(at.any()) else None)


def negated_infinite(infinite: Infinite) -> Infinite:
    """The mark of the negative of a tensor."""
    low, high = (None if v is None else -v for v in (infinite.high, infinite.low))
    return replace(infinite, low=low, high=high)


@_rule("neg")
def _neg(call: OperatorCall, input: SharedTensor) -> Any:
    mark = negated_infinite(input.infinite) if input.infinite else None
    return _mark(call.without(input), mark)


@_rule("abs")
def _abs(call: OperatorCall, input: SharedTensor) -> Any:
    mark: Any = input.infinite
    high = [abs(v) for v in (mark.low, mark.high) if v is not None]
    value = high[0] if len(set(high)) == 1 else math.nan
    made = _without(torch.clamp, input, 0.0, mark.size * 4) + _without(
        torch.clamp, -_without_mark(input), 0.0, mark.size * 4
    )
    return _write_back(call, input, _mark(made, replace(mark, low=None, high=value)))


def _without_mark(x: SharedTensor) -> SharedTensor:
    """x with stand-ins taken for numbers."""
    made = x.like(x.shares, bound=x.bound)
    made.whole_bits = x.whole_bits
    return made


@_rule("add", "sub", "rsub")
def _sum(call: OperatorCall, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    if alpha != 1:
        input, other = (
            (input * alpha, other) if call.name == "rsub" and call.func is not T.__rsub__ else (input, other * alpha)
        )
    signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[call.name]
    terms = [input, other]
    marks: list[Infinite | None] = []
    dtype = _result_dtype(input, other)
    least = ABSORBS_WIDE if dtype == torch.float64 else ABSORBS
    least = least if dtype.is_floating_point else math.inf  # whole numbers have no digits to lose
    for term in terms:
        mark = call.put(term, dtype if dtype.is_floating_point else torch.float32)[0]
        marks.append(mark if mark is None or signs[len(marks)] > 0 else negated_infinite(mark))
    low, high = ([m is not None and getattr(m, sign) is not None for m in marks] for sign in ("low", "high"))
    opposite = (low[0] and high[1]) or (high[0] and low[1])
    limit = 2 * call.scheme.activation_limit
    tight = any(m is not None and _shared(t) and m.size <= limit and _is_nonzero(call, terms[1 - k])
                for k, (m, t) in enumerate(zip(marks, terms, strict=True)))  # fmt: skip
    # Infinities of two signs have no sum, so it is checked that there are none. A stand-in that is little beyond the
    # numbers could come among them by a further summand: an exact one is put in its place first.
    if opposite or tight:
        if not any(_shared(t) and t.infinite is not None for t in terms):
            return NotImplemented
        if opposite:
            return call.func(*_as_numbers(call, tuple(terms)))
        exact = [_with_exact(t) if infinite_of(t) is not None else t for t in terms]
        return _write_back(call, input, {"add": torch.add, "sub": torch.sub, "rsub": torch.rsub}[call.name](*exact))
    finite = [_zero_beyond_range(call, t) for t in terms]
    in_place = call.func in IN_PLACE
    made = call.without(*finite)
    parts, exact_at = [], {-1: torch.zeros(made.shape, dtype=torch.bool), 1: torch.zeros(made.shape, dtype=torch.bool)}
    every = torch.zeros(made.shape, dtype=torch.bool)
    for k, (mark, term) in enumerate(zip(marks, terms, strict=True)):
        if mark is None:
            continue
        partner, moves = terms[1 - k], _is_nonzero(call, finite[1 - k])
        at = _positions_in(mark, term, made.shape)
        every = every | at
        moved = moves or marks[1 - k] is not None
        kept = lambda v, moved=moved, double=marks[1 - k] is not None: (
            v if v is None or math.isinf(v) or not moved or (abs(v) >= least and not double) else math.nan
        )
        values = [kept(v) for v in (mark.low, mark.high)]
        one_sign = mark.low is None or mark.high is None
        if not _shared(term):
            exact_at[-1] = exact_at[-1] | _broadcast(_beyond_range_of_sign(call, term, -signs[k]), made.shape)
            exact_at[1] = exact_at[1] | _broadcast(_beyond_range_of_sign(call, term, signs[k]), made.shape)
            parts.append(exact_infinite(call.scheme, made.dtype, *values))
        elif not moves:
            parts.append(replace(mark, low=values[0], high=values[1]))
        elif mark.certain and one_sign:
            sign = -1 if mark.high is None else 1
            exact_at[sign] = exact_at[sign] | at
            parts.append(exact_infinite(call.scheme, made.dtype, *values))
        else:
            most, unchecked = _summand_limit(call, partner)
            size = mark.size - most
            parts.append(replace(mark, low=values[0], high=values[1], size=size, threshold=size / 2, exact=False,
                                 unchecked=mark.unchecked + unchecked))  # fmt: skip
    size = size_of(call.scheme, made.dtype)
    for sign, at in exact_at.items():
        if bool(at.any()):
            made = _refill(call, made, at, sign * size, in_place)
    certain = all(m is None or m.certain for m in marks)
    return _mark(made, join_infinite(*parts, at=every, certain=certain))


def _broadcast(at: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return _public_call(torch.broadcast_to, at, shape)


def _beyond_range_of_sign(call: OperatorCall, value: Any, sign: int) -> torch.Tensor:
    found = mask_beyond_range(call.scheme, value)
    if found is None:
        return torch.tensor(False)
    return _public_call(lambda v: found.cpu() & (v.detach().cpu().sign() == sign), torch.as_tensor(value))


def _zero_beyond_range(call: OperatorCall, value: Any) -> Any:
    """A public operand with zeros in the place of numbers beyond the range."""
    found = None if _shared(value) else mask_beyond_range(call.scheme, value)
    if found is None:
        return value
    if not isinstance(value, torch.Tensor):
        return type(value)(0)
    return _public_call(torch.where, found, torch.zeros((), dtype=value.dtype, device=value.device), value)


def _is_nonzero(call: OperatorCall, value: Any) -> bool:
    """Whether a summand has entries other than zero, apart from those beyond the range."""
    if isinstance(value, torch.Tensor) and not _shared(value) and not value.is_meta and type(value) is torch.Tensor:
        return bool(_public_call(torch.any, _zero_beyond_range(call, value).detach() != 0))
    return _zero_beyond_range(call, value) != 0 if isinstance(value, (int, float)) else True


def _summand_limit(call: OperatorCall, value: Any) -> tuple[float, tuple[SharedTensor, ...]]:
    """The limit of a summand's magnitude, and the summand itself if it has not been checked against it."""
    limit = call.scheme.activation_limit
    if _shared(value):
        most = limit * 2.0 if value.bound is None else value.bound * 2.0**-value.scale_bits
        return (most, ()) if most <= limit else (limit, (_without_mark(value),) if value.infinite is None else ())
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.is_meta:
            return limit, ()
        return float(_public_call(torch.amax, _zero_beyond_range(call, value).detach().abs().double())), ()
    return abs(float(_zero_beyond_range(call, value))), ()


def _refill(
    call: OperatorCall, y: SharedTensor, at: torch.Tensor, number: float, in_place: bool = False
) -> SharedTensor:
    made = _without(torch.masked_fill, y, at, number if _fractional(y) else int(number))
    if in_place:
        _without(T.copy_, y, made)
    return y if in_place else made


@_rule("mul", "div")
def _multiply(call: OperatorCall, input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    if call.func in (T.__rdiv__, T.__rtruediv__):
        return call.func(*_as_numbers(call, (input, other))) if _has_marks(input, other) else NotImplemented
    x, factor = (input, other) if _shared(input) else (other, input)
    known = infinite_of(x)
    if call.name == "mul" and known is None and not isinstance(factor, SharedTensor):
        return _multiply_mask(call, x, factor)
    public = isinstance(factor, (int, float)) or type(factor) is torch.Tensor
    if known is None or not public or not _shared(input) or rounding_mode is not None or _shared(factor):
        if known is None and not any(infinite_of(v) is not None for v in (input, other)):
            return NotImplemented
        named = {} if rounding_mode is None else {"rounding_mode": rounding_mode}
        return call.func(*_as_numbers(call, (input, other)), **named)
    factors = _public_call(lambda v: v.detach().cpu().double().reshape(-1), torch.as_tensor(factor))
    factors = factors if call.name == "mul" else 1 / factors
    least, most = (float(f(factors.abs())) if factors.numel() else 1.0 for f in (torch.min, torch.max))
    one: Any = common_value(factors)
    dtype = _result_dtype(input, other)
    values = [None if v is None else round_to_dtype(v * one, dtype) if one == one or math.isinf(v)
              else math.nan for v in (known.low, known.high)]  # fmt: skip
    sizes = [abs(v) for v in values if v is not None and not math.isnan(v)]
    mixed = bool((factors > 0).any()) and bool((factors < 0).any())
    range_ = range_limit(call.scheme.frac_bits)
    if known.certain and len(values) - values.count(None) == 1 and len(sizes) == 1 and sizes[0] < range_:
        made = call.without(input, other)  # what they stand for is in the range now
        value = next(v for v in values if v is not None)
        return _mark(_refill(call, made, _positions_in(known, input, made.shape), value, call.func in IN_PLACE), None)
    # What a zero, two signs, or a factor that brings a stand-in among the numbers would give has no mark.
    if (
        least == 0 or mixed or not math.isfinite(most) or any(v < 16 * call.scheme.activation_limit for v in sizes)
        or known.size * least < LEAST or known.threshold * least < call.scheme.activation_limit * most / 2
    ):  # fmt: skip
        return call.func(*_as_numbers(call, (input,)), other)
    kept = [new if new is None or abs(new) >= range_ else math.nan for new in values]
    values = [math.copysign(math.inf, v * float(factors[0])) if v is not None and math.isinf(v) else new
              for v, new in zip((known.low, known.high), kept, strict=True)]  # fmt: skip
    values = values[::-1] if float(factors[0]) < 0 else values
    made = call.without(input, other)
    if known.certain and (values[0] is None or values[1] is None):
        mark = exact_infinite(call.scheme, made.dtype, *values)
        at, size = _positions_in(known, input, made.shape), size_of(call.scheme, made.dtype)
        made = _refill(call, made, at, -size if values[1] is None else size, call.func in IN_PLACE)
        return _mark(made, mark and replace(mark, at=at, certain=True))
    at = None if known.at is None else _positions_in(known, input, made.shape)
    exact = known.exact and least == most == 1
    return _mark(made, replace(known, low=values[0], high=values[1], size=known.size * least, at=at,
                                   threshold=known.threshold * least, exact=exact))  # fmt: skip


def _multiply_mask(call: OperatorCall, x: SharedTensor, factor: Any) -> Any:
    """The product of a mask of zeros and ones with a public number beyond the range."""
    found = mask_beyond_range(call.scheme, factor)
    if found is None or not (x.is_integral or x.dtype == torch.bool):
        return NotImplemented
    if not bool(_public_call(torch.isfinite, torch.as_tensor(factor)).all()):
        return NotImplemented  # zero times infinity is not a number
    dtype = torch.result_type(torch.empty((), dtype=x.dtype), factor)
    mark, number = call.put(factor, dtype if x.dim() or not isinstance(factor, torch.Tensor) else factor.dtype)
    if mark is None:
        return NotImplemented
    if x.dtype != torch.bool:
        x = _with_flags(call.context, x, replace(mark, unchecked=()), 2.0 ** (x.scale_bits + 1))
        both = [v for v in (mark.low, mark.high) if v is not None]
        value = abs(both[0]) if len({abs(v) for v in both}) == 1 else math.nan
        mark = replace(mark, low=-value, high=value)
    made = torch.mul(x, number)
    at = _public_call(torch.broadcast_to, found.cpu(), made.shape)
    return _mark(made, replace(mark, at=at, certain=False))


@_rule("eq", "ne", "ge", "lt", "le", "gt")
def _compare(call: OperatorCall, input: Any, other: Any) -> Any:
    known = [infinite_of(v) for v in (input, other)]
    if _shared(input) and _shared(other):
        same = all(m is None or m.exact for m in known) and len({m.known for m in known if m is not None}) <= 1
        one = sum(m is not None for m in known) == 1
        values = {v for m in known if m is not None for v in (m.low, m.high) if v is not None}
        if (same or (one and call.name not in ("eq", "ne"))) and not any(math.isnan(v) for v in values):
            return call.without(input, other)
        return call.func(*_as_numbers(call, (input, other)))
    x, c = (input, other) if _shared(input) else (other, input)
    if not isinstance(c, (int, float)) and type(c) is not torch.Tensor:
        return call.without(input, other) if known[0] is None or known[0].exact else call.func(
            *_as_numbers(call, (input, other)))  # fmt: skip
    name = call.name if _shared(input) else {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}.get(call.name, call.name)
    base, mark = COMPARED[name], x.infinite
    at = torch.as_tensor(c).detach().cpu()
    if not at.dim():  # torch takes a number in the type of the tensor beside it
        at = torch.tensor(c if isinstance(c, (int, float)) else at.item(), dtype=x.dtype if _fractional(x) else None)
    at = at.double()
    if bool(at.isnan().any()):
        return NotImplemented if mark is None else call.func(*_as_numbers(call, (input, other)))
    limit = range_limit(call.scheme.frac_bits)
    if mark is None:
        far = at.abs() >= limit
        natural = torch.where(far, 0.0, at)
        public = _constant_comparison(name, at)
        made = getattr(torch, name)(x, natural.to(c.dtype) if isinstance(c, torch.Tensor) else 0.0)
        return torch.where(_broadcast(far, made.shape), _broadcast(public, made.shape), made)
    # A number among the stand-ins is moved below or beyond them, so that they compare as what they stand for.
    t, size = mark.threshold, mark.size
    moved = at.clone()
    for sign, value in ((-1, mark.low), (1, mark.high)):
        here = sign * at >= t
        if value is None:
            moved = torch.where(here, sign * torch.minimum(at.abs(), torch.tensor(limit / 2)), moved)
            continue
        if math.isnan(value):
            if bool(here.any()):
                return call.func(*_as_numbers(call, (input, other)))
            value = sign * math.inf
        nearer, equal = here & (sign * at < sign * value), here & (at == value)
        ends = base if sign > 0 else {"ge": "le", "le": "ge"}.get(base, base)
        moved = torch.where(here, sign * 2.0 * max(size, mark.size) + sign, moved)
        if base == "eq":
            if bool(equal.any()) and not mark.exact:
                if not bool(equal.all()):
                    return call.func(*_as_numbers(call, (input, other)))
                there = _standin_mask(x, sign < 0, sign > 0)
                return there if name == "eq" else ~there
            moved = torch.where(equal, sign * size, moved)
        else:
            inside = nearer | equal if ends == "ge" else nearer
            moved = torch.where(inside, sign * t, moved)
    number = moved.to(c.dtype) if isinstance(c, torch.Tensor) else float(moved) if _fractional(x) else int(moved)
    x = x if mark.exact else _with_flags(call.context, x, mark, None)
    return _without(getattr(torch, name), x, number)


def _constant_comparison(name: str, c: torch.Tensor) -> torch.Tensor:
    """The result of a comparison of any number in the range with numbers beyond it."""
    return {"eq": c != c, "ne": c == c, "ge": c < 0, "gt": c < 0, "le": c > 0, "lt": c > 0}[name]


@_rule("clamp", "clamp_min", "clamp_max", "hardtanh", "relu", "relu6")
def _clamp(call: OperatorCall, input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
    if call.name in ("relu", "relu6", "hardtanh") and args and isinstance(args[-1], bool):
        inplace, args = args[-1], args[:-1]
    both: Any = {
        "clamp": lambda: _pair(args, kwargs, "min", "max"), "clamp_min": lambda: (*args, *kwargs.values(), None)[:2],
        "clamp_max": lambda: (None, *args, *kwargs.values())[:2], "relu": lambda: (0.0, None),
        "relu6": lambda: (0.0, 6.0), "hardtanh": lambda: _pair(args, kwargs, "min_val", "max_val", -1.0, 1.0),
    }[call.name]()  # fmt: skip
    if call.name.startswith("clamp") and call.func not in IN_PLACE:  # a float bound that cuts nothing makes floats too
        input = input.to(_widest([input.dtype, *(_result_dtype(input, b) for b in both if b is not None)]))
    low, high = (b.item() if type(b) is torch.Tensor and not b.dim() and not b.is_meta else b for b in both)
    if any(isinstance(b, torch.Tensor) for b in (low, high)):
        x: Any = input
        if isinstance(x, SharedTensor) and any(isinstance(b, SharedTensor) and b.infinite for b in (low, high)):
            return call.func(*_as_numbers(call, (input, low, high)))
        as_tensor = lambda b: b if isinstance(b, torch.Tensor) else torch.tensor(b, dtype=input.dtype)
        x = x if low is None else torch.maximum(x, as_tensor(low))
        return _write_back(call, input, x if high is None else torch.minimum(x, as_tensor(high)), inplace)
    mark = input.infinite
    far = [
        b is not None and not math.isnan(b) and mask_beyond_range(call.scheme, float(b)) is not None
        for b in (low, high)
    ]
    if (far[0] and low > 0) or (far[1] and high < 0):
        bound = float(low if far[0] else high)
        raise (NonFiniteError if math.isinf(bound) else FixedPointRangeError)(
            f"{spell(call.func)} with a bound of {bound:g}, {'infinite' if math.isinf(bound) else 'which is'} beyond "
            f"the range of every number: torch.full_like gives what it would"
        )
    bounds: Any = [None if f else b for f, b in zip(far, (low, high), strict=True)]
    if mark is None:
        made: Any = torch.clamp(input, *bounds) if any(b is not None for b in bounds) else torch.clone(input)
        return _write_back(call, input, made, inplace)
    values = [
        max(mark.low, low) if far[0] and mark.low is not None else mark.low if bounds[0] is None else None,
        min(mark.high, high) if far[1] and mark.high is not None else mark.high if bounds[1] is None else None,
    ]
    # A bound among the stand-ins would cut them off, whatever they stand for.
    if any(b is not None and abs(b) >= mark.threshold for b in bounds):
        return _write_back(call, input, torch.clamp(_as_numbers(call, input), *bounds), inplace)
    most = 4 * max(mark.size, call.scheme.activation_limit)
    if bounds == [None, None]:
        made = _without(torch.clone, input)
    else:  # with two bounds nothing has to be below the activation limit
        made = _without(torch.clamp, input, -most if bounds[0] is None else bounds[0],
                        most if bounds[1] is None else bounds[1])  # fmt: skip
        if mark.unchecked:
            made.flags = tuple(dict.fromkeys((*made.flags, *_with_flags(call.context, input, mark, None).flags)))
    return _write_back(
        call, input, _mark(made, mark.with_changes(low=values[0], high=values[1], certain=False)), inplace
    )


def _pair(args: tuple, kwargs: dict, one: str, two: str, *defaults: Any) -> tuple[Any, Any]:
    low, high = defaults or (None, None)
    given = (*args, None, None)[:2] if not defaults else (*args, *defaults[len(args) :])[:2]
    return kwargs.get(one, given[0] if args else low), kwargs.get(two, given[1] if len(args) > 1 else high)


@_rule("isfinite")
def _isfinite(call: OperatorCall, input: SharedTensor) -> Any:
    kind = spell(call.func).rsplit(".", 1)[-1]
    mark: Any = input.infinite
    plain = lambda: call.without(input)
    if kind in ("isnan", "isreal"):
        return plain()
    low, high = kind != "isposinf", kind != "isneginf"
    values = [v for v, asked in ((mark.low, low), (mark.high, high)) if asked and v is not None]
    if any(math.isnan(v) for v in values):
        return call.func(_as_numbers(call, input))
    low, high = low and mark.low == -math.inf, high and mark.high == math.inf
    if not (low or high):
        return plain()
    there = _standin_mask(input, low, high)
    return ~there if kind == "isfinite" else there


@_rule("nan_to_num")
def _nan_to_num(
    call: OperatorCall, input: SharedTensor, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Any:
    mark = input.infinite
    if mark is None:
        return NotImplemented
    if any(v is not None and math.isnan(v) for v in (mark.low, mark.high)):
        return call.func(_as_numbers(call, input), nan, posinf, neginf)
    info = torch.finfo(input.dtype) if _fractional(input) else None
    made, left = _without(torch.clone, input), mark
    for sign, name, value in ((-1, "low", neginf), (1, "high", posinf)):
        if info is None or getattr(mark, name) != sign * math.inf:
            continue
        value = float(value) if value is not None else info.min if sign < 0 else info.max
        if mask_beyond_range(call.scheme, value) is not None and value * sign > 0:
            left = left and left.with_changes(**{name: value})
        else:
            made = _without(torch.masked_fill, made, _standin_mask(input, sign < 0, sign > 0), value)
            left = left and left.with_changes(**{name: None, "certain": False})
    return _write_back(call, input, _mark(made, left))


@_rule("softmax", "log_softmax")
def _softmax(call: OperatorCall, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A row of negative infinities alone gives zeros, where torch gives NaN. Other rows are as torch's."""
    mark = input.infinite
    if mark is None:
        return NotImplemented
    if mark.high == math.inf or not input.dim():
        return call.func(_as_numbers(call, input), dim, *args, **kwargs)
    if dim is None:
        dim = 0 if input.dim() in (0, 1, 3) else 1
    if call.name == "log_softmax":
        return _log_softmax(call, input, dim, args, kwargs)
    at = mark.at
    empty = mark.low == -math.inf
    rows = None if at is None else at.all(dim, keepdim=True)
    if not empty or (rows is not None and not bool(rows.any())):
        return call.without(input, dim, *args, **kwargs)
    if mark.certain and rows is not None:
        return call.without(input, dim, *args, **kwargs).masked_fill(rows, 0.0)
    return _without(_beside_a_least_entry, call.func, _without_mark(input), dim, mark.threshold, args, kwargs)


@_rule("softmin")
def _softmin(call: OperatorCall, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if input.infinite is None else F.softmax(-input, dim, *args, **kwargs)


def _beside_a_least_entry(
    func: Callable, x: Any, dim: int, threshold: float, args: tuple = (), kwargs: Any = None
) -> Any:
    """The softmax of x beside one more entry, which is below every number and above every negative stand-in.

    In a row of stand-ins alone this entry takes all the weight.
    """
    size = [*x.shape]
    size[dim] = 1
    beside = torch.full(size, -float(threshold), dtype=x.dtype)
    return func(torch.cat((x, beside), dim), dim, *args, **(kwargs or {})).narrow(dim, 0, x.shape[dim])


def _log_softmax(call: OperatorCall, input: Any, dim: int, args: tuple, kwargs: dict) -> Any:
    exact = input if input.infinite.exact else _with_exact(input)
    mark: Any = exact.infinite
    if mark.high is not None or mark.low is None:
        return call.func(_as_numbers(call, input), dim, *args, **kwargs)
    there = _standin_mask(exact)
    rows = None if mark.at is None else mark.at.all(dim, keepdim=True)
    if mark.low != -math.inf and (rows is None or bool(rows.any())):  # rows of one finite number are uniform
        most = _without(torch.amax, exact, dim, keepdim=True)
        there = there & (most > -mark.threshold)
        mark = replace(mark, certain=False)
    made = _without(call.func, _without_mark(exact), dim, *args, **kwargs)
    size = size_of(call.scheme, made.dtype)
    made = _without(torch.masked_fill, made, there, -size)
    low = mark.low if mark.low <= -ABSORBS else math.nan
    stands: Any = exact_infinite(call.scheme, made.dtype, low, None)
    return _mark(made, stands.with_changes(at=mark.at, certain=mark.certain))


@_rule("logsumexp")
def _logsumexp(call: OperatorCall, input: SharedTensor, dim: Any, keepdim: bool = False) -> Any:
    mark: Any = input.infinite
    if mark.high is not None:
        return call.func(_as_numbers(call, input), dim, keepdim)
    made = call.without(input, dim, keepdim)
    at = None if mark.at is None else mark.at.all(dim, keepdim=keepdim)
    if at is not None and not bool(at.any()):
        return made
    size = mark.size - math.log(max(2, input.numel()))
    low = mark.low if mark.low <= -ABSORBS else math.nan
    left = replace(mark, low=low, size=size, threshold=size / 2, exact=False, at=at)
    return _mark(made, left)


@_rule("scatter_reduce", "index_reduce")
def _scatter_extreme(call: OperatorCall, *args: Any, **kwargs: Any) -> Any:
    """A maximum or minimum by index is one of the elements, and so may be a stand-in."""
    kind = kwargs.get("reduce", args[4] if len(args) > 4 else None)
    if kind not in ("amax", "amin"):
        return (
            call.func(*_as_numbers(call, args), **_as_numbers(call, kwargs))
            if _has_marks(args, kwargs)
            else NotImplemented
        )
    leaves: Any = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (float, torch.Tensor))]
    dtype = next(x.dtype for x in leaves if _shared(x))
    put = lambda x: call.put(x, dtype)[1] if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    mark = join_infinite(*(call.put(x, dtype)[0] for x in leaves if _shared(x) or x.is_floating_point()))
    if mark is None:
        return NotImplemented
    return _mark(call.without(*pytree.tree_map(put, args), **pytree.tree_map(put, kwargs)), mark)


def _has_marks(*trees: Any) -> bool:
    return any(infinite_of(x) is not None for x in pytree.tree_leaves(trees))


@_rule("bucketize", "searchsorted")
def _bucketize(call: OperatorCall, *args: Any, **kwargs: Any) -> Any:
    at = 1 if call.name == "bucketize" else 0
    if any(infinite_of(x) is not None for x in args) or len(args) < 2 or _shared(args[at]):
        return call.func(*_as_numbers(call, args), **kwargs)
    most = range_limit(call.scheme.frac_bits) * (1 - 2.0**-22) - 2.0**-call.scheme.frac_bits
    edges = _public_call(lambda v: v.detach().double().clamp(-most, most), torch.as_tensor(args[at]))
    return call.func(*args[:at], edges, *args[at + 1 :], **kwargs)


@_rule("scaled_dot_product_attention", "multi_head_attention")
def _attention(call: OperatorCall, *args: Any, **kwargs: Any) -> Any:
    """Masks may hold stand-ins; keys, queries and values may not."""
    names = ("query", "key", "value")
    numbers = [_as_numbers(call, x) for x in args[:3]]
    named = {key: _as_numbers(call, x) if key in names else x for key, x in kwargs.items()}
    if all(x is y for x, y in zip((*args[:3], *kwargs.values()), (*numbers, *named.values()), strict=True)):
        return NotImplemented
    return call.func(*numbers, *args[3:], **named)


@_rule("cross_entropy", "nll_loss")
def _class_loss(call: OperatorCall, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """With public labels only the entries that they select are checked."""
    if not _has_marks(input, target, kwargs):
        return NotImplemented
    if isinstance(target, SharedTensor) or target.is_floating_point() or kwargs.get("label_smoothing"):
        return call.func(_as_numbers(call, input), _as_numbers(call, target), *args, **kwargs)
    return HANDLER[call.func](call.context, input, target, *args, **kwargs)


@_rule("threshold")
def _refuse_beyond_range(call: OperatorCall, *args: Any, **kwargs: Any) -> Any:
    if _has_marks(args, kwargs):
        return call.func(*_as_numbers(call, args), **_as_numbers(call, kwargs))
    raise UnsupportedOpError(f"{spell(call.func)} takes no number beyond the range of fixed point; use torch.where")


set_rules(_apply_rule, _with_exact, PLACES_PUBLIC | RULES.keys())
