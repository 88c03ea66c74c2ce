"""Operations on private tensors of one party: computed there, in plain floating point, once a session.

A result that is derived from a model's weights (a transpose, a product of two weights, a copy that was changed in
place) is kept with them, together with its masked form, which is sent once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from ..choreography.located import Located, compute, run_in
from ..errors import SecretAccessError, UnsupportedOpError
from .infinity import mask_beyond_range
from .private import PrivateTensor
from .secret import Scheme, SecretTensor
from .shared import SharedTensor
from .signatures import to_meta
from .table import IN_PLACE, ROW_OF, Context, as_sectorch_error, spell

_T = torch.Tensor
_COPIES = {torch.clone, _T.clone}


def meets_infinity(scheme: Scheme, func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a private tensor meets a public number beyond the range in a sum or a choice, as in an attention mask.

    Private tensors have no stand-ins for such numbers, and shared ones have (`tensor/infinity.py`): so the operand
    becomes a shared tensor.
    """
    row = ROW_OF.get(func)
    if row is None or row.name not in _SUMS:
        return False
    return any(mask_beyond_range(scheme, leaf) is not None for leaf in pytree.tree_leaves((args, kwargs)))


_SUMS = ("add", "sub", "rsub", "where", "masked_fill", "maximum", "minimum")


def share_private(context: Context, x: PrivateTensor) -> SharedTensor:
    """A private tensor as shares; those of S are zero. No message."""
    limit = context.scheme.activation_limit if context.scheme.range_check else None
    bits = x.weight_bits
    content = context.backend.embedded(context.backend.owner_summand(x.encoded(bits, limit)))
    return context.tensor(content, bits, context.scheme.activation_limit * 2.0**bits)


def call(context: Context, func: Callable, args: tuple, kwargs: dict, meta: Any) -> Any:
    """func(*args, **kwargs) at the owner of the private tensors among the arguments; `meta` is torch's own result.

    Raises:
        SecretAccessError: the result is no tensor.
        UnsupportedOpError: see `_change_in_place`.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PrivateTensor)]
    outputs, out_spec = pytree.tree_flatten(meta)
    run = _runner(func, leaves, at, spec)
    if in_place(func):
        return _change_in_place(context, func, leaves, at, spec, run)
    if not outputs or not all(isinstance(leaf, torch.Tensor) for leaf in outputs):
        raise SecretAccessError(f"{spell(func)} would take a value out of a PrivateTensor")
    parent = leaves[at[0]]
    row = ROW_OF.get(func)
    if row is not None and row.name == "to" and outputs[0].dtype == parent.dtype:  # as torch does
        return call(context, _T.clone, (parent,), {}, meta) if kwargs.get("copy") else parent
    key = _cache_key(func, leaves, at, spec)
    if func in _COPIES:  # values are never changed, so a copy has the same value, and all that was derived from it
        made, lasting = [(parent.value, parent.derived)], parent.lasting
    elif key is None:
        made, lasting = _at_owner(context, run, leaves, at), False
    else:
        with context.setup.lock:
            if key not in parent.derived:  # the operands' values are kept, so that their ids stay valid
                parent.derived[key] = _at_owner(context, run, leaves, at), [leaves[i].value for i in at]
            (made, _), lasting = parent.derived[key], True
    results = _wrap(context, func, leaves, at, run, outputs, made)
    for result in results:
        result.lasting, result.is_inverse = lasting, _is_inverse(func, leaves, at)
    return pytree.tree_unflatten(results, out_spec)


def _is_inverse(func: Callable, leaves: list, at: list[int]) -> bool:
    row = ROW_OF.get(func)
    return (row is not None and row.name in _INVERSES) or any(leaves[i].is_inverse for i in at)


_INVERSES = ("div", "exp", "pow", "reciprocal", "rsqrt")


def _at_owner(context: Context, run: Callable, leaves: list, at: list[int]) -> list[tuple[Located, dict]]:
    """The results' values, computed at the owner, each with an empty cache of what will be derived from it."""
    with run_in(context.setup):
        return [(value, {}) for value in compute(run, *(leaves[i].value for i in at))]


def _wrap(
    context: Context, func: Callable, leaves: list, at: list[int], run: Callable, outputs: list, made: list
) -> list[PrivateTensor]:
    """The results as private tensors. Each notes what it is a view of, and the family whose memory it shares."""
    parent = leaves[at[0]]
    row = ROW_OF.get(func)
    # The masked form of a view is a view of the masked form, but not between real and complex numbers.
    complex_too = any(x.dtype.is_complex for x in (parent, *outputs))
    viewed = row is not None and row.view and len(at) == 1 and not complex_too
    families = [None] if func in _COPIES else _families([leaves[i] for i in at], run, len(outputs), viewed)
    results = []
    for i, ((value, derived), out) in enumerate(zip(made, outputs, strict=True)):
        result = PrivateTensor(value, context.session, context.party, context.scheme, out.dtype, parent.label)
        result.derived = derived
        if func in _COPIES:
            result.copied, result.family = True, []
        elif (family := families[i]) is not None:
            result.family = family
            family.append(ref(result))
        if viewed:
            result.origin = (parent, lambda v, i=i: run(v)[i])
        results.append(result)
    return results


def _runner(func: Callable, leaves: list, at: list[int], spec: Any) -> Callable:
    """func as a function of the private arguments' values, which are the leaves at these places.

    Returns:
        A function that computes on meta tensors at parties without the values. It computes in float64, unless `double`
        is False: then the dtypes are those that the tensors have for torch.
    """
    leaves = [None if i in at else leaf for i, leaf in enumerate(leaves)]  # a traced step outlives its operands

    def run(*values, double=True):
        absent = any(value.is_meta for value in values)
        filled = [to_meta(leaf, True) if absent else leaf for leaf in leaves]
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        filled = [_in_double(leaf) for leaf in filled] if double else filled
        a, k = pytree.tree_unflatten(filled, spec)
        try:
            with torch.no_grad():
                return tuple(pytree.tree_leaves(func(*a, **k)))
        except Exception as error:
            # torch's text may contain an entry of a weight. The error has its kind and the shapes alone.
            given = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in filled if isinstance(leaf, torch.Tensor))
            kind = type(as_sectorch_error(func, error))
            raise kind(f"{spell(func)}: {type(error).__name__} at the owner of the operands, {given}") from None

    return run


def _families(given: list[PrivateTensor], run: Callable, count: int, viewed: bool) -> list[list[ref] | None]:
    """For each result the family of the argument whose memory it shares, as a view or as the argument itself."""
    if viewed or all(x.family is None for x in given):
        return [given[0].family] * count
    with torch.inference_mode(False):  # in inference mode torch does not record the base of a view
        stand_ins = [to_meta(x, True) for x in given]
        outs = run(*stand_ins, double=False)
    pairs = list(zip(given, stand_ins, strict=True))
    return [next((x.family for x, meta in pairs if out is meta or out._base is meta), None) for out in outs]


def _change_in_place(
    context: Context, func: Callable, leaves: list, at: list[int], spec: Any, run: Callable
) -> PrivateTensor:
    """An operation in place, on a copy that no other tensor shares memory with, or on the only view of one.

    Raises:
        UnsupportedOpError: it would change a model's own tensor, or memory that another tensor shares.
    """
    target = leaves[0]
    if at[0] != 0:
        raise UnsupportedOpError(f"{spell(func)} would write a weight into a plain tensor; write it out of place")
    base, views = _base_of(target)
    others = [x for x in base.family or () if x() is not None and x() is not target]
    if not base.copied or others or any(leaves[i] is base for i in at[1:]):
        raise UnsupportedOpError(f"{spell(func)} would change a weight in place; write it out of place")

    def viewed(value: torch.Tensor) -> torch.Tensor:
        return reduce(lambda v, view: view(v), views, value)

    # The value is replaced and never written: other tensors and caches may hold the old one.
    def written(value: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        value = _in_double(value.clone())
        run(viewed(value), *rest)
        return value

    base.is_inverse = _is_inverse(func, leaves, at)
    target.is_inverse = base.is_inverse
    rest = [leaves[i].value for i in at[1:]]
    key = None if views else _cache_key(func, leaves, at, spec)
    with context.setup.lock, run_in(context.setup):
        if key is None:
            base.become(compute(written, base.value, *rest))
        else:
            if key not in base.derived:
                base.derived[key] = compute(written, base.value, *rest), {}, [base.value, *rest]
            base.become(*base.derived[key][:2])
        if target is not base:
            target.become(compute(viewed, base.value))
    return target


def _base_of(x: PrivateTensor) -> tuple[PrivateTensor, list[Callable]]:
    """The tensor that x is a view of, and the views that lead from it to x; x itself and no views otherwise."""
    views = []
    while x.origin is not None:
        x, view = x.origin
        views.append(view)
    return x, views[::-1]


def in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return func in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _in_double(leaf: Any) -> Any:
    """A public floating-point operand in float64, as the values of private tensors are, whatever their dtype."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, SecretTensor) or not leaf.is_floating_point():
        return leaf
    return leaf.double()


def _cache_key(func: Callable, leaves: list, at: list[int], spec: Any) -> Any:
    """The cache key of a derived weight, which is so derived and sent once; None for a result that is not cached.

    Only results of lasting private tensors are cached: a model's, or those that the cache holds. The id of another's
    value could be reused later. Every other argument must be hashable.
    """
    lasting = {i for i in at if isinstance(leaves[i], PrivateTensor) and leaves[i].lasting}
    if any(isinstance(leaf, torch.Tensor) and i not in lasting for i, leaf in enumerate(leaves)):
        return None
    parts = ((id(v.value), v.dtype) if i in at else (type(v), v) for i, v in enumerate(leaves))
    key = (func, repr(spec), tuple(parts))
    try:
        hash(key)
    except TypeError:
        return None
    return key
