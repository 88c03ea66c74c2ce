"""Short programs on shared tensors: torch's values, shapes and dtypes, and what they write to, or a typed refusal.

`tensor_programs.txt` has one program a line: it may change x, and what it names y and z is compared as well. Each runs
on every shape and dtype below.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import long
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import SectorchError
from sectorch.session import Session

PROGRAMS = (Path(__file__).parent / "tensor_programs.txt").read_text().splitlines()
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (0,), (3, 0)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
STRIDE = 17
"""Every run has each 17th case: 17 has no factor in common with the 42 shapes and dtypes."""
TOLERANCE = 1e-3
"""Of products of numbers below 10 with error 2^-20, of tenth powers, and of quotients by 1/4: twice the largest seen
is 2^-10; a wrong value of these numbers, which have two fraction bits, is off by more."""
FLOATS = [-2.5, 3, -0.5, 0, 1.5, -1, 2, 0.5, 3, -2.5, -1.5, 2.5, 1, -3, -2, 0.25, -0.75, 2, 3, 0, 1, -3.5, 0.5, -1.25]
WHOLE = [-3, 3, 0, -1, 2, -2, 5, 3, -3, 1, 7, 0, -7, 4, -4, 6, 2, -5, 1, 3, -1, 0, 2, 9]


def operand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers with ties, zeros and both signs."""
    count = torch.Size(shape).numel()
    x = torch.tensor((FLOATS if dtype.is_floating_point else WHOLE)[:count], dtype=torch.float64).reshape(shape)
    return (
        x.to(dtype)
        if dtype.is_signed and dtype != torch.bool
        else (x > 0 if dtype == torch.bool else x.abs().to(dtype))
    )


def results(program: str, x: Any) -> list[Any]:
    """What the program names, and x after it, revealed."""
    names = {"x": x}
    exec(program, {"torch": torch, "F": F, "T": torch.tensor}, names)
    leaves = pytree.tree_leaves(([v for name, v in names.items() if name in ("y", "z")], names["x"]))
    return [v.reveal() if isinstance(v, sectorch.SharedTensor) else v for v in leaves]


def difference(got: list[Any], want: list[Any]) -> str:
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}"
    for x, y in zip(got, want, strict=True):
        if isinstance(y, torch.Tensor):
            if not isinstance(x, torch.Tensor) or (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"{getattr(x, 'dtype', type(x))} {getattr(x, 'shape', '')} for {y.dtype} {y.shape}"
            if not torch.allclose(x.double(), y.double(), atol=TOLERANCE, rtol=TOLERANCE):
                return f"{x.flatten()[:6].tolist()} for {y.flatten()[:6].tolist()}"
        elif x != y:
            return f"{x} for {y}"
    return ""


def cases() -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    return itertools.product(PROGRAMS, SHAPES, DTYPES)


def run(some: Iterator[tuple[str, tuple[int, ...], torch.dtype]]) -> dict[str, int]:
    """How often each outcome came: "right", "refused", "taken" where torch refuses; a wrong result fails the test."""
    session, count, wrong = Session(reference=True), {"right": 0, "refused": 0, "taken": 0}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the programs
        for program, shape, dtype in some:
            x = operand(shape, dtype)
            try:
                want = results(program, x.clone())
            except Exception:
                want = None
            try:
                got = results(program, sectorch.share(x, session=session))
            except SectorchError:
                count["refused"] += 1
                continue
            except Exception as error:  # Python's own, as of an index that a list lacks, where torch's code raises too
                if want is not None:
                    wrong.append(f"{program} {shape} {dtype}: {type(error).__name__}: {error}")
                continue
            text = "" if want is None else difference(got, want)
            count["taken" if want is None else "right"] += 1
            if text:
                wrong.append(f"{program} {shape} {dtype}: {text}")
    assert not wrong, "\n".join(wrong)
    return count


def test_some_programs():
    count = run(itertools.islice(cases(), 0, None, STRIDE))
    assert count["right"] > len(PROGRAMS) * 42 / STRIDE / 2, count


@pytest.mark.sectorch_long
def test_all_programs():
    count = run(cases())
    assert count["right"] > len(PROGRAMS) * 42 / 2, count


PAIRS = {
    "sum": lambda x, y: x + y, "difference": lambda x, y: x - y, "product": lambda x, y: x * y,
    "power": lambda x, y: x**y,
    "quotient": lambda x, y: x / y, "floor": lambda x, y: x // y, "remainder": lambda x, y: x % y, "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "equal": lambda x, y: x == y,
    "below": lambda x, y: x < y, "at least": lambda x, y: x >= y, "maximum": torch.maximum, "minimum": torch.minimum,
    "choice": lambda x, y: torch.where(x > 0, x, y), "other choice": lambda x, y: torch.where(y > 0, y, 1),
    "clamp": lambda x, y: x.clamp(min=y), "clamp above": lambda x, y: x.clamp(max=y), "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y), "copy_": lambda x, y: x.copy_(y), "fill": lambda x, y: x.masked_fill(x > 0, y),
    "write": lambda x, y: x.__setitem__(..., y), "cat": lambda x, y: torch.cat((x.reshape(-1), y.reshape(-1))),
    "and": torch.logical_and, "bits": lambda x, y: x & y, "alpha": lambda x, y: torch.add(x, y, alpha=3),
    "hypot": torch.hypot, "member": torch.isin, "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "outer": lambda x, y: torch.outer(x.reshape(-1), y.reshape(-1)), "like": lambda x, y: x.type_as(y),
}  # fmt: skip


def pairs() -> Iterator[tuple[str, Any]]:
    """Both operands secret, or one: in every pair of dtypes, and with a number or a line on either side."""
    for name, *dtypes in itertools.product(PAIRS, DTYPES, DTYPES):
        for first, second in (((5,), (5,)), ((), (5,)), ((5,), ()), ((3, 1), (4,))):
            for secret in ("xy", "x", "y"):
                yield name, (dtypes, (first, second), secret)


def pair(name: str, dtypes: Any, shapes: Any, secret: str, share: Any) -> str:
    """ "right", "refused", "taken", or what is wrong."""
    x, y = (operand(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    y = y.flip(0) if y.dim() else y
    if name in ("quotient", "floor", "remainder", "fmod", "trunc"):
        y = torch.where(y == 0, torch.ones((), dtype=y.dtype), y)
    function = PAIRS[name]
    try:
        plain = x.clone()
        want = [function(plain, y), plain]
    except Exception:
        want = None
    given = share(x) if "x" in secret else x.clone()
    try:
        got = [
            v.reveal() if isinstance(v, sectorch.SharedTensor) else v
            for v in (function(given, share(y) if "y" in secret else y), given)
        ]
    except SectorchError:
        return "refused"
    except Exception as error:
        return "refused" if want is None else f"{type(error).__name__}: {error}"
    return "taken" if want is None else difference(got, want) or "right"


@pytest.mark.parametrize("stride", [37, *long(1)])
def test_pairs_of_dtypes(stride):
    session = Session(reference=True)
    share = lambda v: sectorch.share(v, session=session)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            (name, form, pair(name, form[0], form[1], form[2], share))
            for name, form in itertools.islice(pairs(), 0, None, stride)
        ]
    wrong = [case for case in found if case[2] not in ("right", "refused", "taken")]
    assert not wrong, "\n".join(map(str, wrong))
    assert sum(case[2] == "right" for case in found) > len(found) / 3


@pytest.mark.parametrize(("narrow", "number"), [(torch.uint8, -3), (torch.int8, 200)])
def test_a_secret_number_is_taken_in_the_dtype_of_the_tensor_beside_it(narrow, number):
    """torch takes -3 for 253 beside uint8, and 200 for -56 beside int8, whether it is a number or a tensor of one."""
    x, n = torch.tensor([1, 2, 3], dtype=narrow), torch.tensor(number)
    shared: Any = sectorch.share(x)
    secret: Any = sectorch.share(n)
    for call in (torch.minimum, torch.lt, torch.remainder, lambda a, b: a.clamp(min=b)):
        with pytest.raises(SectorchError, match="modulo 2"):
            call(shared, secret)
    least: Any = torch.minimum(shared.long(), secret)
    assert torch.equal(least.reveal(), torch.minimum(x.long(), n))
