"""Calls of the op table's operations with arguments that nobody meant: other types, shapes, dtypes, sizes and owners.

`outcome` runs one such call on plain torch and on secret tensors. It is right (torch's dtype, shape and values), or
refused by a `SectorchError`; anything else is a finding.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from op_rows.base import Data, OpRow
from op_stage import Stage, spelled, stage
from op_table import ROWS
from torch.overrides import get_testing_overrides
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import SectorchError
from sectorch.tensor import SecretTensor
from sectorch.tensor.table import TABLE
from sectorch.testing.calls import as_tuple, reveal_leaf

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int8,
          torch.int16, torch.bool)  # fmt: skip
ROLES = ("shared", "private", "public")
PLAIN = (None, True, False, -1, 0, 1, 2, 3, 7, -8, 1 << 40, 1 << 63, -(1 << 63), 0.5, -1.5, 2.0, "x", "", "sum", (), [],
         (1, 2), [0], (-1,), (3, -1), (0, 0, 0, 0), torch.float16, torch.float64, torch.int64, {}, b"", object,
         np.float32(0.5), np.int64(1), slice(None), Ellipsis, 1j)  # fmt: skip
RIGHT, REFUSED, INVALID, FOUND = "right", "refused", "torch refuses, and so do we", "found"
LARGEST = 1 << 20
"""Elements of a result that is computed here."""


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: its plain values, and whose it is."""

    plain: torch.Tensor
    role: str
    distinct: bool = False

    def __repr__(self) -> str:
        return f"{self.role} {str(self.plain.dtype).removeprefix('torch.')}{list(self.plain.shape)}"


CRASHES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Rows for which torch itself ends the process on empty states."""
ENDLESS = dict.fromkeys((torch.matrix_power, torch.Tensor.matrix_power, torch.linalg.matrix_power), -(1 << 63)) | {
    torch.combinations: 1 << 40
}
"""Calls with this number, from which torch itself never returns, on shapes neither, or takes all memory first."""
KEYS: list[tuple[OpRow, Callable]] = [
    (ROWS[name], key)
    for name in TABLE
    if name in ROWS and name not in CRASHES
    for key in dict.fromkeys([*TABLE[name].keys, *TABLE[name].in_place])
]


def call_of(draw: random.Random, row: OpRow, key: Callable) -> tuple[tuple, dict]:
    """A sample's arguments, with one or two of them changed."""
    number, sample = draw.choice(row.samples_of(key))
    seeds = iter(range(1000))

    def made(leaf: Any) -> Any:
        return (
            Tensor(leaf.make(f"{row.name} {number} {next(seeds)}", True), leaf.role, leaf.kind == "distinct")
            if isinstance(leaf, Data)
            else leaf
        )

    args, kwargs = pytree.tree_map(made, (sample.args, dict(sample.kwargs)))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        args, kwargs = _changed(draw, args, kwargs)
    if key in ENDLESS and any(
        isinstance(leaf, int) and leaf == ENDLESS[key] for leaf in pytree.tree_leaves((args, kwargs))
    ):
        return call_of(draw, row, key)
    return args, kwargs


def _changed(draw: random.Random, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    way = draw.randrange(12)
    if way == 0 and len(args) > 1:
        return args[:-1], kwargs
    if way == 1:
        return (*args, draw.choice(PLAIN)), kwargs
    if way == 2:
        name = draw.choice(("dim", "keepdim", "dtype", "alpha", "inplace", "eps", "value", "bias", "nonsense"))
        return args, {**kwargs, name: draw.choice(PLAIN)}
    if way == 3 and args:
        at = draw.randrange(len(args))
        return (*args[:at], draw.choice(PLAIN), *args[at + 1 :]), kwargs
    if not leaves:
        return args, kwargs
    at = draw.randrange(len(leaves))
    leaf = leaves[at]
    leaves[at] = _changed_tensor(draw, leaf) if isinstance(leaf, Tensor) else _changed_plain(draw, leaf)
    return pytree.tree_unflatten(leaves, spec)


def _changed_plain(draw: random.Random, leaf: Any) -> Any:
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and abs(leaf) < 1 << 40 and draw.random() < 0.3:
        return Tensor(torch.tensor(leaf), draw.choice(ROLES))
    return draw.choice(PLAIN)


def _changed_tensor(draw: random.Random, leaf: Tensor) -> Any:
    plain, role = leaf.plain, leaf.role
    other = plain
    if leaf.distinct:  # among equals the order is anybody's
        plain = plain * 8  # whole numbers stay distinct
        other = plain + (2 * float(plain.abs().max()) + 1 if plain.numel() else 0)
    way = draw.randrange(11)
    if way <= 2:
        return Tensor(_to(plain, draw.choice(DTYPES)), role)
    if way == 3:
        return Tensor(_to(plain, draw.choice(DTYPES)), draw.choice(ROLES))
    if way == 4:
        return Tensor(plain, draw.choice(ROLES))
    if way == 5:
        return draw.choice((*PLAIN, plain.tolist() if plain.numel() < 100 else None, plain.float().numpy()))
    if way == 6:
        return Tensor(plain.to(torch.complex64), "public")
    shapes: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: plain[:0] if plain.dim() else plain,
        lambda: plain.flatten()[0] if plain.numel() else plain.sum(),
        lambda: plain.unsqueeze(draw.randrange(plain.dim() + 1)),
        lambda: plain[0] if plain.dim() and plain.shape[0] else plain,
        lambda: plain.transpose(0, -1) if plain.dim() else plain,
        lambda: torch.cat([plain, other]) if plain.dim() else plain,
        lambda: plain.flatten(),
        lambda: torch.stack([plain, other], -1),
    )
    return Tensor(draw.choice(shapes)().contiguous(), role)


def _to(plain: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    plain = plain.real if plain.dtype.is_complex else plain
    return plain.to(dtype)


def described(key: Callable, args: tuple, kwargs: dict) -> str:
    named = [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{spelled(key)}({', '.join([*map(repr, args), *named])})"


# Every keyword that a function has, at values besides its default.

POOL = (True, False, 0, 1, 2, 3, -1, -2, 0.5, 2.0, 8.0, 1e-3, None, (0,), (1,), (0, 1), (1, 1), (2, 2), [0], [1, 0],
        float("inf"), 10.0)  # fmt: skip
WORDS = ("none", "sum", "mean", "batchmean", "amax", "amin", "prod", "max", "min", "floor", "trunc", "tanh", "nearest",
         "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area", "lanczos", "left", "right", "ij", "xy",
         "constant", "reflect", "replicate", "circular", "zeros", "border", "reflection", "lower", "higher", "midpoint",
         "fro", "nuc", "forward", "backward", "ortho", "same", "valid", "reduced", "complete", "r", "cpu", "L", "U",
         "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")  # fmt: skip
TYPES = (torch.float64, torch.float16, torch.int64, torch.bool)
LIKE = ("first", "first as a mask", "last", "channels", "number", "whole")
"""Public tensors: of the first tensor's shape, of its last dimension, of its channels, and with no dimensions."""
NOT_SWEPT = {
    "out": "refused for every function, by its name", "generator": "draws are not torch's",
    "memory_format": "memory has no order here", "pin_memory": "nor a place", "layout": "nor a layout",
}  # fmt: skip


def keywords_of(key: Callable) -> list[str]:
    """The names of a function's arguments, after the first: of its signature, of torch's own list, of its schemas."""
    found: dict[str, None] = {}
    for function in (key, get_testing_overrides().get(key)):
        with contextlib.suppress(TypeError, ValueError):
            for parameter in inspect.signature(function).parameters.values():  # pyright: ignore[reportArgumentType]
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    found.setdefault(parameter.name)
    for schema in _schemas(key):
        found.update(dict.fromkeys(argument.name for argument in schema.arguments))
    return [name for name in found if name not in ("self", "input") and name not in NOT_SWEPT]


def _schemas(key: Callable) -> list[Any]:
    spelt = spelled(key).split(".", 1)[-1].replace(".", "_")
    packets = [getattr(torch.ops.aten, name, None) for name in dict.fromkeys((getattr(key, "__name__", ""), spelt))]
    every = [getattr(p, o)._schema for p in packets if hasattr(p, "overloads") for o in p.overloads()]
    tensor = lambda schema: schema.arguments and "Tensor" in str(schema.arguments[0].type)
    return [s for s in every if tensor(s) and not any(a.is_out for a in s.arguments)]


def _order(key: Callable) -> list[str]:
    for function in (key, get_testing_overrides().get(key)):
        with contextlib.suppress(TypeError, ValueError):
            return list(inspect.signature(function).parameters)  # pyright: ignore[reportArgumentType]
    return [argument.name for schema in _schemas(key)[:1] for argument in schema.arguments]


def _value(value: Any, first: torch.Tensor) -> Any:
    """A value of the pool; of LIKE, a public tensor."""
    if value not in LIKE if isinstance(value, str) else True:
        return value
    draw = torch.Generator().manual_seed(1)
    shapes = {"last": first.shape[-1:], "channels": first.shape[1:2], "number": (), "whole": ()}
    if value == "first" and first.dim() == 1:
        value = "last"
    made = torch.rand(shapes.get(value, first.shape), generator=draw) + 0.25
    made = made.sort().values if value == "last" else made  # as boundaries are
    return Tensor(made > 0.75 if "mask" in value else made.ceil().long() if value == "whole" else made, "public")


def with_keyword(key: Callable, args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
    """The call with this argument, in the place where it stands, or by its name."""
    order = _order(key)
    at = order.index(name) if name in order else len(args)
    if name not in kwargs and 0 < at < len(args):
        return (*args[:at], value, *args[at + 1 :]), kwargs
    return args, {**kwargs, name: value}


def sweep_of(row: OpRow, key: Callable, name: str, most: int = 3) -> list[tuple[Any, tuple, dict]]:
    """Calls with this keyword that torch takes, at values that change its result; else at such that do not."""
    telling: list[tuple[Any, tuple, dict]] = []
    others: list[tuple[Any, tuple, dict]] = []
    for number, sample in row.samples_of(key):
        seeds = iter(range(1000))
        args, kwargs = pytree.tree_map(
            lambda leaf, n=number, s=seeds: (
                Tensor(leaf.make(f"{row.name} {n} {next(s)}", True), leaf.role, leaf.kind == "distinct")
                if isinstance(leaf, Data)
                else leaf
            ),
            (sample.args, dict(sample.kwargs)),
        )
        first = next((v.plain for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)), torch.ones(2))
        seen = [_answer(key, args, kwargs)]
        for value in (*POOL, *WORDS, *TYPES, *LIKE):
            call = with_keyword(key, args, kwargs, name, _value(value, first))
            if _held(name, call, args, kwargs):
                continue
            answer = _answer(key, *call)
            if answer is None:
                continue
            fresh = not any(_alike(answer, other) for other in seen)
            seen.append(answer)
            (telling if fresh else others).append((value, *call))
            if len(telling) >= most:
                return telling
    return telling or others[:2]


def _held(name: str, call: tuple[tuple, dict], args: tuple, kwargs: dict) -> bool:
    """Whether the keyword would replace a secret of the sample."""
    secret = lambda tree: [v for v in pytree.tree_leaves(tree) if isinstance(v, Tensor) and v.role != "public"]
    return len(secret(call)) < len(secret((args, kwargs)))


def _answer(key: Callable, args: tuple, kwargs: dict) -> list[Any] | None:
    """torch's results, and what it wrote into its arguments; None where it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = pytree.tree_leaves(_plain(key, args, kwargs))
        except Exception:
            return None
    small = all(not isinstance(v, torch.Tensor) or v.numel() < LARGEST for v in found)
    return found if small else None


def _alike(one: list[Any], other: list[Any] | None) -> bool:
    if other is None or [_kind(v) for v in one] != [_kind(v) for v in other]:
        return False
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, torch.Tensor)]
    return all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)


UNDEFINED = {
    ("bucketize", "boundaries"): "of boundaries out of order", ("searchsorted", "sorted_sequence"): "as above",
    ("isin", "assume_unique"): "torch's answer is wrong where entries are not",
}  # fmt: skip
"""Keywords for which torch's own result is not defined at such values."""

NAMED_AS = {
    "training": "batch statistics", "dropout_p": "dropout",
    "dim": "matrix norm",
    "return_indices": "with_indices", "padding_mode": "Invalid padding mode", "requires_grad": "a gradient",
    "interpolation_mode": "Invalid interpolation mode", "include_last_offset": "empty bags",
}  # fmt: skip
"""Keywords whose refusal has other words for them."""
OPERANDS = ("other", "target", "tensor1", "tensor2", "exponent", "b", "source", "src", "weight", "index", "indices")
"""Operands, of which a refusal says what they are."""
OF_VALUES = ("NonFiniteError", "RangeExceededError", "FixedPointRangeError", "division by zero", "no data",
             "nothing is secret", "rounding a secret number", "into a plain tensor", "Python asks the other operand",
             "as zero dimensions")  # fmt: skip
"""What is said of values that have no result, whatever argument they come by."""


def names(text: str, row: OpRow, keyword: str, value: Any) -> bool:
    """Whether a refusal tells which argument it is."""
    said = text.lower()
    known = (keyword.lower(), NAMED_AS.get(keyword, keyword).lower(), str(value).lower())
    return keyword in OPERANDS or any(w in said for w in known) or any(w in text for w in OF_VALUES)


def swept(row: OpRow, key: Callable, keyword: str, at: Stage) -> list[str]:
    """What is wrong with a keyword: of each call the verdict, unless it is right, or refused by name."""
    found = []
    for value, args, kwargs in [] if (row.name, keyword) in UNDEFINED else sweep_of(row, key, keyword):
        kind, text = outcome(row, key, args, kwargs, at, True)
        if kind == FOUND or (kind == REFUSED and not names(text, row, keyword, value)):
            found.append(f"{described(key, args, kwargs)}: {kind}: {text}")
    return found


HOUSE = str(Path(sectorch.__file__).parent)
OTHER_VALUES = {
    "argsort": "among equals the order is anybody's", "sort": "as above", "topk": "as above", "argmax": "as above",
    "argmin": "as above", "max": "as above", "min": "as above", "median": "as above", "kthvalue": "as above",
    "celu": "of a negative alpha",
    "batch_norm": "of a variance of zero",
    "dropout": "of a weight, at its owner: it is random",
    "pow": "a negative base has no logarithm", "binary_cross_entropy": "nor have zero and one their losses",
}  # fmt: skip
"""Rows whose values are compared elsewhere: outside of a sample's own domain they are not those of torch."""


def outcome(
    row: OpRow, key: Callable, args: tuple, kwargs: dict, at: Stage | None = None, all_values: bool = False
) -> tuple[str, str]:
    """Which of the four it is, and what is to be said of it."""
    at = at or stage()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _plain(key, args, kwargs)
        except Exception as error:
            expected = error
        try:
            secret = pytree.tree_map(
                lambda v: at.place(v.role, v.plain.clone()) if isinstance(v, Tensor) else v, (args, kwargs)
            )
        except SectorchError as error:
            return REFUSED, f"{type(error).__name__}: {error}"
        if not any(isinstance(leaf, SecretTensor) for leaf in pytree.tree_leaves(secret)):
            return REFUSED, "nothing is secret"
        try:
            result = as_tuple(key(*secret[0], **secret[1]))
            outputs = [reveal_leaf(leaf) for leaf in pytree.tree_leaves(result)]
        except SectorchError as error:
            if not str(error).strip():
                return FOUND, f"{type(error).__name__} without a text"
            kind = INVALID if isinstance(expected, Exception) else REFUSED
            return kind, f"{type(error).__name__}: {error}"
        except Exception as error:
            if not any(HOUSE in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
                return INVALID, "torch's own reading of the arguments, before any tensor is asked"
            return FOUND, f"{type(error).__name__}: {error}"
        if result is NotImplemented:
            return REFUSED, "Python asks the other operand, and raises a TypeError"
        if isinstance(expected, Exception):
            if not any(text in str(expected) for text in OF_DTYPE):
                return (
                    FOUND,
                    f"gave {[_kind(o) for o in outputs]}, where torch raises {type(expected).__name__}: {expected}",
                )
            return _compared(outputs, _in_double(key, args, kwargs), False, row.name not in OTHER_VALUES)
    by_rule = [_kind(o) for o in outputs] == _on_meta(key, args, kwargs)
    values = all_values or row.name not in OTHER_VALUES
    return _compared(outputs, pytree.tree_leaves(expected), not by_rule, values, _unit(args, kwargs))


OF_DTYPE = ("not implemented for", "dtype", "scalar type", "can't be cast", "does not support", "bias type",
            "not supported for relu", "found Half", "weight type",
            "with a bool tensor", "Boolean alpha", "without overflow", "must either both be None")  # fmt: skip
"""What torch's kernels say where they lack a dtype that its rules for shapes take: a right answer is welcome then."""


def _on_meta(key: Callable, args: tuple, kwargs: dict) -> list[str] | None:
    """What torch's rules for shapes say the results are; its kernels have some dtypes otherwise, in a few losses."""
    on_meta = lambda v: Tensor(v.plain.to("meta"), v.role) if isinstance(v, Tensor) else v
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [_kind(leaf) for leaf in pytree.tree_leaves(_plain(key, *pytree.tree_map(on_meta, (args, kwargs))))]
    except Exception:
        return None


def _in_double(key: Callable, args: tuple, kwargs: dict) -> list[Any] | None:
    """torch's values with every number in float64, or None where there is no such form."""
    for too in (torch.int64, torch.bool, None):
        as_double = lambda v, too=too: (
            Tensor(v.plain if v.plain.dtype == too else v.plain.double(), v.role) if isinstance(v, Tensor) else v
        )
        try:
            return pytree.tree_leaves(_plain(key, *pytree.tree_map(as_double, (args, kwargs))))
        except Exception:
            continue
    return None


def _plain(key: Callable, args: tuple, kwargs: dict) -> Any:
    as_plain = lambda v: v.plain.clone() if isinstance(v, Tensor) else v
    torch.manual_seed(0)
    return as_tuple(key(*pytree.tree_map(as_plain, args), **pytree.tree_map(as_plain, kwargs)))


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _unit(args: tuple, kwargs: dict) -> float:
    """The coarsest unit roundoff of the arguments, to which torch may round what it computes on the way."""
    types = {v.plain.dtype for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
    return max((torch.finfo(t).eps for t in types if t.is_floating_point), default=0.0)


def _compared(
    outputs: list[Any], wanted: list[Any] | None, typed: bool, values: bool, unit: float = 0.0
) -> tuple[str, str]:
    if wanted is None:
        return RIGHT, "no form of it that torch computes"
    if not typed:
        wanted = [
            w.to(o.dtype) if isinstance(o, torch.Tensor) and isinstance(w, torch.Tensor) else w
            for w, o in zip(wanted, outputs, strict=True)
        ]
    if [_kind(o) for o in outputs] != [_kind(w) for w in wanted]:
        return FOUND, f"gave {[_kind(o) for o in outputs]}, torch {[_kind(w) for w in wanted]}"
    for output, value in zip(outputs, wanted, strict=True):
        if not values or not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if value.dtype.is_complex:
            output, value = (torch.view_as_real(v.resolve_conj()) for v in (output, value))
        fits = value.double().isfinite() & (value.double().abs() < 1e4)
        step = max(unit, torch.finfo(value.dtype).eps) if value.dtype.is_floating_point else 0.0
        error = (output.double() - value.double()).abs() / value.double().abs().clamp(min=1)
        if not bool((error <= 2e-3 + 64 * step)[fits].all()):
            return FOUND, f"wrong: {output.flatten()[:6].tolist()} for {value.flatten()[:6].tolist()}"
    return RIGHT, ""
