"""Operations among one party's own tensors: run there, in plain floating point, once a session.

What is derived from a model's weights (a transpose, a product of two weights, a copy that was changed in place) is kept
with them, and so is its masked form, which is sent once.
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
    """Whether a private tensor meets a public number beyond the range in a sum or a choice: an attention mask's, say.

    No number of a weight's stands for it, so the result is a shared one, where `tensor/infinity.py` has one.
    """
    row = ROW_OF.get(func)
    if row is None or row.name not in _SUMS:
        return False
    return any(mask_beyond_range(scheme, leaf) is not None for leaf in pytree.tree_leaves((args, kwargs)))


_SUMS = ("add", "sub", "rsub", "where", "masked_fill", "maximum", "minimum")


def share_private(context: Context, x: PrivateTensor) -> SharedTensor:
    """A private tensor as shares of which S's are zero: no message."""
    limit = context.scheme.activation_limit if context.scheme.range_check else None
    bits = x.weight_bits
    content = context.backend.embedded(context.backend.owner_summand(x.encoded(bits, limit)))
    return context.tensor(content, bits, context.scheme.activation_limit * 2.0**bits)


def call(context: Context, func: Callable, args: tuple, kwargs: dict, meta: Any) -> Any:
    """func(*args, **kwargs) at the owner of the private tensors among the arguments; `meta` is torch's own result.

    Raises:
        SecretAccessError: the result is no tensor. UnsupportedOpError: see `_changed`.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PrivateTensor)]
    outputs, out_spec = pytree.tree_flatten(meta)
    run = _runs(func, leaves, at, spec)
    if in_place(func):
        return _changed(context, func, leaves, at, spec, run)
    if not outputs or not all(isinstance(leaf, torch.Tensor) for leaf in outputs):
        raise SecretAccessError(f"{spell(func)} would take a value out of a PrivateTensor")
    parent = leaves[at[0]]
    row = ROW_OF.get(func)
    if row is not None and row.name == "to" and outputs[0].dtype == parent.dtype:  # as torch does
        return call(context, _T.clone, (parent,), {}, meta) if kwargs.get("copy") else parent
    key = _cache_key(func, leaves, at, spec)
    if func in _COPIES:  # a value is never changed: a copy has the same one, and all that was made of it
        made, lasting = [(parent.value, parent.derived)], parent.lasting
    elif key is None:
        made, lasting = _made(context, run, leaves, at), False
    else:
        with context.setup.lock:
            if key not in parent.derived:  # holding the operands' values keeps their ids theirs
                parent.derived[key] = _made(context, run, leaves, at), [leaves[i].value for i in at]
            (made, _), lasting = parent.derived[key], True
    results = _wrapped(context, func, leaves, at, run, outputs, made)
    for result in results:
        result.lasting, result.is_inverse = lasting, _inverse(func, leaves, at)
    return pytree.tree_unflatten(results, out_spec)


def _inverse(func: Callable, leaves: list, at: list[int]) -> bool:
    row = ROW_OF.get(func)
    return (row is not None and row.name in _INVERSES) or any(leaves[i].is_inverse for i in at)


_INVERSES = ("div", "exp", "pow", "reciprocal", "rsqrt")


def _made(context: Context, run: Callable, leaves: list, at: list[int]) -> list[tuple[Located, dict]]:
    """The results' values, computed at the owner, and for each what will be made of it: nothing yet."""
    with run_in(context.setup):
        return [(value, {}) for value in compute(run, *(leaves[i].value for i in at))]


def _wrapped(
    context: Context, func: Callable, leaves: list, at: list[int], run: Callable, outputs: list, made: list
) -> list[PrivateTensor]:
    """Each result knows what it is a view of, and whose memory torch lets it share."""
    parent = leaves[at[0]]
    row = ROW_OF.get(func)
    # Masked forms are views of a real tensor's: between real and complex numbers there is no view of them.
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


def _runs(func: Callable, leaves: list, at: list[int], spec: Any) -> Callable:
    """func on the contents of the private arguments, which stand at these places; on shapes where they are absent.

    In float64, unless `double` is False: for what depends on the dtypes that the tensors pass for.
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
            # torch's words may name an entry of a weight; its kind and the shapes say enough to whoever is not A.
            given = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in filled if isinstance(leaf, torch.Tensor))
            kind = type(as_sectorch_error(func, error))
            raise kind(f"{spell(func)}: {type(error).__name__} at the owner of the operands, {given}") from None

    return run


def _families(given: list[PrivateTensor], run: Callable, count: int, viewed: bool) -> list[list[ref] | None]:
    """For each result the family of the argument whose memory torch lets it share: a view, or the argument itself."""
    if viewed or all(x.family is None for x in given):
        return [given[0].family] * count
    with torch.inference_mode(False):  # in inference mode torch does not say what a view is a view of
        stand_ins = [to_meta(x, True) for x in given]
        outs = run(*stand_ins, double=False)
    pairs = list(zip(given, stand_ins, strict=True))
    return [next((x.family for x, meta in pairs if out is meta or out._base is meta), None) for out in outs]


def _changed(context: Context, func: Callable, leaves: list, at: list[int], spec: Any, run: Callable) -> PrivateTensor:
    """An operation in place on a copy whose memory nobody else has, or on the only view of one.

    Raises:
        UnsupportedOpError: it would change a model's own tensor, or memory that another tensor shares.
    """
    target = leaves[0]
    if at[0] != 0:
        raise UnsupportedOpError(f"{spell(func)} would write a weight into a plain tensor; write it out of place")
    whole, views = _whole(target)
    others = [x for x in whole.family or () if x() is not None and x() is not target]
    if not whole.copied or others or any(leaves[i] is whole for i in at[1:]):
        raise UnsupportedOpError(f"{spell(func)} would change a weight in place; write it out of place")

    def viewed(value: torch.Tensor) -> torch.Tensor:
        return reduce(lambda v, view: view(v), views, value)

    def written(value: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        value = _in_double(value.clone())
        run(viewed(value), *rest)
        return value

    whole.is_inverse = _inverse(func, leaves, at)
    target.is_inverse = whole.is_inverse
    rest = [leaves[i].value for i in at[1:]]
    key = None if views else _cache_key(func, leaves, at, spec)
    with context.setup.lock, run_in(context.setup):
        if key is None:
            whole.become(compute(written, whole.value, *rest))
        else:
            if key not in whole.derived:
                whole.derived[key] = compute(written, whole.value, *rest), {}, [whole.value, *rest]
            whole.become(*whole.derived[key][:2])
        if target is not whole:
            target.become(compute(viewed, whole.value))
    return target


def _whole(x: PrivateTensor) -> tuple[PrivateTensor, list[Callable]]:
    """What x is a view of, and the views on the way to it; x itself and none where it is no view."""
    views = []
    while x.origin is not None:
        x, view = x.origin
        views.append(view)
    return x, views[::-1]


def in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return func in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _in_double(leaf: Any) -> Any:
    """Private tensors are computed on in float64, whatever dtype they pass for; a public operand joins them."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, SecretTensor) or not leaf.is_floating_point():
        return leaf
    return leaf.double()


def _cache_key(func: Callable, leaves: list, at: list[int], spec: Any) -> Any:
    """Names a derived weight, so that it is derived and sent once.

    Only of lasting private tensors (a model's, or derived from those by the cache itself), by their values: an id of a
    passing one could be another's later. Every other argument must be hashable.
    """
    lasting = {i for i in at if isinstance(leaves[i], PrivateTensor) and leaves[i].lasting}
    if any(isinstance(leaf, torch.Tensor) and i not in lasting for i, leaf in enumerate(leaves)):
        return None
    said = ((id(v.value), v.dtype) if i in at else (type(v), v) for i, v in enumerate(leaves))
    key = (func, repr(spec), tuple(said))
    try:
        hash(key)
    except TypeError:
        return None
    return key
