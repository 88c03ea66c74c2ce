"""PyTorch's own samples for its own operators (`op_db`), run on secret tensors and compared with plain torch.

`python tests/test_opdb.py` prints which part of op_db is claimed (at least one sample gives the right result), refused
(with a typed error) or wrong; with `--all`, for all samples; with `--floats`, of float64, bfloat16 and float16.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import some
from op_stage import Stage, reference_stage, spelled, stage
from torch.utils import _pytree as pytree
from torch_samples import op_db

from sectorch.tensor.table import COMPOSED, row_of
from sectorch.testing.calls import FOREIGN, INVALID, OUT_OF_RANGE, REFUSED, RIGHT, WRONG, Call, CallOutcome, judge_call

TOLERANCE = 2e-3
"""Relative to max(1, |reference|). PyTorch draws from [-9, 9] and sums up to a few hundred products: 2^-20 9 500."""

FEW = 2
"""Samples of an operator in the default profile: the first ones, and then every so many-th."""
FORMS = 1
"""So many of them in every form of the operator: forms differ in how they are called, and not in what is computed."""

GROW = ("exp", "exp2", "expm1", "sinh", "cosh", "pow", "float_power", "__rpow__")
SATURATE = {
    **dict.fromkeys(GROW, (-math.inf, 2.0**16)),
}
"""Operators whose results leave the range, and the results between which they do not."""

UNINITIALISED = ("empty_like", "new_empty", "empty_permuted", "empty_strided", "new_empty_strided", "empty")


@dataclass
class Survey:
    """What happened to one operator's samples."""

    name: str
    counts: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    reasons: Counter = field(default_factory=Counter)

    @property
    def claimed(self) -> bool:
        return self.counts[RIGHT] > 0

    @property
    def ran(self) -> int:
        return sum(self.counts.values()) - self.counts[INVALID]


def full_name(info) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def functions(info) -> list[tuple[str, Callable]]:
    """The operator, its method, its in-place form and its aliases, without repetitions."""
    found = [("op", info.op), ("method", info.method_variant), ("in place", info.inplace_variant)]
    for alias in info.aliases:
        found += [(f"alias {alias.name}", alias.op), ("alias method", alias.method_variant)]
    kept: dict[Any, str] = {}
    for name, function in found:
        if function is not None:
            kept.setdefault(function, name)
    return [(name, function) for function, name in kept.items()]


def in_table(info) -> bool:
    """Whether the operator, or the torch function or method of its name (op_db wraps some in a lambda), has a row."""
    named = [functools.reduce(lambda at, part: getattr(at, part, None), info.name.split("."), torch)]
    named.append(getattr(torch.Tensor, info.name, None))
    return any(row_of(function) is not None for function in (*named, *(f for _, f in functions(info))))


@pytest.mark.parametrize("info", [info for info in op_db if info.aliases], ids=full_name)
def test_all_names_of_an_operator_are_known_or_none(info):
    """torch's aliases, as functions, methods and in place: `x.greater_equal(y)` and `torch.special.expm1` too."""
    names = [info.name, *(alias.name for alias in info.aliases)]
    functions = [functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), torch) for name in names]
    methods, in_place = ([getattr(torch.Tensor, f"{name}{end}", None) for name in names] for end in ("", "_"))
    for forms in ([*functions, *methods], in_place):
        forms = [f for f in forms if callable(f)]
        assert len({row_of(f) is None and f not in COMPOSED for f in forms}) <= 1, forms


NARROW = (torch.float16, torch.bfloat16)
OTHER_FLOATS = (torch.float64, *NARROW)
ORDERED = ("sort", "argsort", "topk")
"""Among equal entries, of which narrow dtypes have many, the order is anybody's."""


def floats_of(info) -> list[torch.dtype]:
    """The floating-point dtypes of an operator beside float32."""
    return [t for t in OTHER_FLOATS if t in info.dtypes and not (t in NARROW and info.name in ORDERED)]


def dtypes_of(info) -> list[torch.dtype]:
    """float32, or for operators on other things bool or int64; both for logic and for conversions to whole numbers."""
    either = info.name.startswith("logical") or info.name in ("bool", "int", "long")
    found = [t for t in (torch.float32, torch.bool, torch.int64) if t in info.dtypes]
    return found[:2] if either else found[:1]


def samples_of(info, dtype: torch.dtype, few: int | None) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), 2000))
    if few is None or len(every) <= few:
        return every
    head = few // 2
    step = max(1, (len(every) - head) // (few - head))
    return every[:head] + every[head::step][: few - head]


PATTERNS = {"all shared": lambda i: True, "first shared": lambda i: i == 0, "others shared": lambda i: i > 0}


@dataclass(frozen=True)
class Run:
    """One call of a sample."""

    what: str
    function: Callable
    args: tuple
    kwargs: dict
    dtype: torch.dtype
    which: Callable[[int], bool]
    at: Callable[[], Stage] = stage


def runs_of(info, few: int | None, dtypes: list[torch.dtype] | None = None) -> Iterator[Run]:
    """Every sample, in every form of the operator, with every choice of what is shared.

    Of a few samples the first ones go through every form, the others through the first; and only the first form has
    every choice, the others one by turns. The first form is run on shares
    with the choices in turn, and all other runs are in the reference:
    its protocols compute the same bits (`test_ops.py`, `test_reference.py`).
    """
    for dtype in dtypes_of(info) if dtypes is None else dtypes:
        for number, sample in enumerate(samples_of(info, dtype, few)):
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            leaves = pytree.tree_leaves((args, kwargs))
            count = sum(isinstance(leaf, torch.Tensor) and leaf.dtype == dtype for leaf in leaves)
            # What is public torch computes itself, and rounds to a narrow dtype on the way.
            patterns = list(PATTERNS.items())[: 0 if count == 0 else 1 if count == 1 or dtype in NARROW else 3]
            forms = functions(info) if few is None or number < FORMS else functions(info)[:1]
            for form, (name, function) in enumerate(forms):
                for turn, (pattern, which) in enumerate(patterns):
                    if few is not None and form and turn != form % len(patterns):
                        continue
                    on_shares = dtypes is None and (few is None or (form == 0 and turn == number % len(patterns)))
                    at = stage if on_shares else reference_stage
                    yield Run(f"sample {number}, {name}, {pattern}", function, args, kwargs, dtype, which, at)


def allowed(info, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """How far a result may be off: what torch rounds on the way in a narrow dtype comes on top, and a pole's slope."""
    unit = 4 * torch.finfo(dtype).eps if dtype in NARROW else 0.0
    steep = (lambda y: 1e-5 * y.square()) if info.name == "tan" else (lambda y: 0.0)
    return lambda exact: (TOLERANCE + unit) * exact.abs().clamp(min=1) + steep(exact)


def outcome(info, run: Run) -> CallOutcome:
    """How one call went, and what is to be said about it."""
    if info.name in UNINITIALISED:
        return CallOutcome(INVALID, "its content is anybody's guess")
    return judge_call(
        run.function, Call(*run.args, **run.kwargs), run.at().session, allowed(info, run.dtype), which=run.which,
        dtype=run.dtype, between=SATURATE.get(info.name), wide=run.dtype in NARROW,
    )  # fmt: skip


def survey(info, few: int | None = FEW, dtypes: list[torch.dtype] | None = None) -> Survey:
    """What happens to an operator's samples; of `dtypes` in the reference, whose protocols compute the same bits."""
    found = Survey(full_name(info))
    for run in runs_of(info, few, dtypes):
        went = outcome(info, run)
        found.counts[went.kind] += 1
        if went.kind in (WRONG, FOREIGN):
            found.failures.append(f"{found.name} ({run.what}, {spelled(run.function)}): {went.kind}: {went.text}")
        if went.kind == REFUSED:
            found.reasons[went.text.split("\n")[0][:160]] += 1
    return found


def main(few: int | None, floats: bool) -> None:
    surveys = [survey(info, few, floats_of(info) if floats else None) for info in op_db]
    claimed = [s for s in surveys if s.claimed]
    counts = sum((s.counts for s in surveys), Counter())
    width = max(len(s.name) for s in claimed)
    print(f"{'claimed operator':{width}}  {RIGHT:>7} {REFUSED:>8} {OUT_OF_RANGE:>13} {WRONG:>6} {FOREIGN:>14}")
    for s in claimed:
        row = [s.counts[kind] for kind in (RIGHT, REFUSED, OUT_OF_RANGE, WRONG, FOREIGN)]
        print(f"{s.name:{width}}  {row[0]:7} {row[1]:8} {row[2]:13} {row[3]:6} {row[4]:14}")
    tried = [s for s in surveys if s.ran]
    refused = sum((s.reasons for s in surveys if s.claimed), Counter())
    table = [s for s, info in zip(surveys, op_db, strict=True) if in_table(info)]
    print(f"\nin the table but not claimed: {', '.join(s.name for s in table if not s.claimed) or 'none'}")
    print(f"op_db: {len(surveys)} operators, {len(tried)} with a tensor that can be shared; claimed {len(claimed)}, ")
    print(f"  {len(claimed) / len(surveys):.1%} of all, {len(claimed) / len(tried):.1%} of those that can be")
    total = sum(counts.values()) - counts[INVALID]
    print(
        f"calls: {total}; " + ", ".join(f"{kind} {counts[kind]} ({counts[kind] / total:.1%})" for kind in list(counts))
    )
    print("\nrefused in claimed operators, most frequent first:")
    for reason, times in refused.most_common(25):
        print(f"  {times:5} {reason}")
    print()
    for failure in (f for s in surveys for f in s.failures):
        print(failure)


SUPPORTED = [info for info in op_db if in_table(info)]
OTHERS = [info for info in op_db if not in_table(info)]


def in_turn(info) -> bool:
    """Every second operator: the op table has samples of every operation (`test_ops.py`)."""
    return zlib.crc32(full_name(info).encode()) % 2 == 0


@pytest.mark.parametrize("info", some(SUPPORTED, in_turn), ids=full_name)
def test_no_sample_of_a_supported_operator_is_wrong(info):
    found = survey(info)
    assert not found.failures, f"{len(found.failures)} failures:\n" + "\n".join(found.failures[:5])


@pytest.mark.parametrize("info", OTHERS, ids=full_name)
def test_other_operators_are_right_or_refused(info):
    found = survey(info, 1)
    assert not found.failures, f"{len(found.failures)} failures:\n" + "\n".join(found.failures[:5])


@pytest.mark.sectorch_long
@pytest.mark.parametrize("info", op_db, ids=full_name)
def test_no_sample_at_all_is_wrong(info):
    found = survey(info, None)
    assert not found.failures, f"{len(found.failures)} failures:\n" + "\n".join(found.failures[:5])


@pytest.mark.sectorch_long
@pytest.mark.parametrize("info", op_db, ids=full_name)
def test_no_sample_of_another_float_dtype_is_wrong(info):
    found = survey(info, None, floats_of(info))
    assert not found.failures, f"{len(found.failures)} failures:\n" + "\n".join(found.failures[:5])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(None if "--all" in sys.argv else FEW, "--floats" in sys.argv)
