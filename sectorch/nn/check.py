"""The check that is made before a program is used: on plain numbers, it gives what the model itself gives.

A runs both on random float64 inputs of the shape. They may differ by rounding only: a sum of n products in float64 is
the exact sum for factors changed by at most n 2^-53 each (Higham, Accuracy and Stability, 3.1), and n is below 2^13. So
the results lie as far apart as changes of 2^-40 of every weight and input move them, which is measured where they are
not closer than that anyway; `SLACK` times as much is allowed, since the measurement is one random change.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import CaptureWarning
from .accept import device_of
from .huggingface import without_caches
from .inputs import Inputs
from .passes import PASSES, optimised
from .trace import Trace, run
from .written import defined

ROUNDING = 2.0**-40
NARROW_ROUNDING = 2.0**-23
"""Of constants that the forward makes in float32, where the check computes them in float64. (bfloat16 and float16 are
made by no forward that is checked: a model of such weights is brought to float64 whole.)"""
SLACK = 64.0
_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
_T: Any = torch.Tensor
_CASTS = {_T.float: _T.double, _T.half: _T.double, _T.bfloat16: _T.double, _T.cfloat: _T.cdouble}


class Widened(TorchFunctionMode):
    """Every number inside is float64, or complex128, whatever dtype the code names; whole numbers stay."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or name == "__set__":
            return func(*args, **kwargs)
        target = args[0] if args and name.endswith("_") and isinstance(args[0], torch.Tensor) else None
        wide = lambda v: v if v is target else _wide(v)
        named = {name: pytree.tree_map(wide, value) for name, value in kwargs.items()}
        result = defined(_CASTS.get(func, func), pytree.tree_map(wide, tuple(args)), named)
        return pytree.tree_map(lambda v: v if v is target else _wide(v), result)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.promote_types(value, torch.float64) if value in _NARROW else value
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return _doubled(value)
    return value


def _doubled(value: torch.Tensor) -> torch.Tensor:
    """In float64, or in complex numbers of two such parts."""
    return value.to(torch.promote_types(value.dtype, torch.float64))


def plain(program: Trace, inputs: Inputs, change: Callable | None = None, step: Callable | None = None) -> Any:
    """The program on plain numbers, in float64.

    Args:
        change: applied to every floating-point or complex weight and constant; gives float64 or complex128.
        step: as in `run`.
    """
    change = change or _doubled
    moved = lambda v: v.is_floating_point() or v.is_complex()
    values = {name: change(value) if moved(value) else value for name, value in program.values.items()}
    with torch.no_grad(), Widened():
        return run(program, values, [x.clone() for x in inputs.tensors], step)


def original(module: nn.Module, inputs: Inputs) -> Any:
    """The module itself, in float64; on a copy, whose weights are the module's, since a forward may leave something."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}
    module = copy.deepcopy(module, shared)
    with torch.no_grad(), Widened():
        given = [x.clone() for x in inputs.tensors]  # a forward may write into its inputs
        return without_caches(inputs.called(module, given))


def sample(inputs: Inputs, device: torch.device) -> Inputs:
    """Random numbers of these shapes and kinds, always the same ones: normal in float64, or zeros and ones."""
    draw = torch.Generator().manual_seed(0x5EC)

    def like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(device)
        return torch.randint(0, 2, shape, generator=draw).to(device, dtype)

    return inputs.having([like(shape, dtype) for shape, dtype in inputs.described.values()])


class Verdict(Enum):
    """Which form of a program computes what its module does: after the passes, as it was recorded, or none."""

    OPTIMISED = 1
    RECORDED = 2
    UNLIKE = 3


def checked(module: nn.Module, program: Trace, inputs: Inputs) -> Verdict:
    """Whether the program after its passes computes what the module does; else whether the recording itself does.

    Args:
        module: plain, in float64; it was seen to change nothing in itself.
        program: recorded from it for such inputs.
        inputs: only their form, shapes and dtypes are used.

    Warns:
        CaptureWarning: naming the pass that changed the values, or saying that the recording does not stand for the
            module.
    """
    stages = [program, *optimised(program)]
    if any(0 in shape for shape in inputs.shapes) or any(v.is_meta for v in program.values.values()):
        return Verdict.OPTIMISED
    given = sample(inputs, device_of(module))
    try:
        expected = original(module, given)
    except Exception:
        # What cannot be run in float64 cannot be checked: it runs by its own forward.
        return Verdict.UNLIKE
    reached = _Reached(program, given)
    if _agrees(stages[-1], given, expected, reached):
        return Verdict.OPTIMISED
    if not _agrees(program, given, expected, reached):
        warnings.warn(
            f"what was recorded of {type(module).__name__} does not compute what the module does, so the module runs "
            f"operation by operation. Its forward may do something else for secret tensors, as where it catches their "
            f"errors or asks for their type: hold sectorch.diff(model, x) or a plain run against it",
            CaptureWarning,
            stacklevel=2,
        )
        return Verdict.UNLIKE
    wrong = next(n for n, p in zip(PASSES, stages[1:], strict=True) if not _agrees(p, given, expected, reached))
    warnings.warn(
        f"the graph pass {wrong} changes what {type(module).__name__} computes, so that no pass is applied; the "
        f"results are right and cost more; please report this",
        CaptureWarning,
        stacklevel=2,
    )
    return Verdict.RECORDED


class _Reached:
    """How far rounding can move a program's results, worked out when it is first asked for."""

    def __init__(self, program: Trace, inputs: Inputs):
        self.program, self.inputs = program, inputs
        self._found: list[float] | None = None

    def of(self, leaf: int) -> float:
        if self._found is None:
            draw = torch.Generator().manual_seed(1)

            def nudge(v: torch.Tensor) -> torch.Tensor:
                size = NARROW_ROUNDING if v.dtype in _NARROW else ROUNDING
                random = torch.rand(v.shape, generator=draw, dtype=torch.float64).to(v.device)
                return _doubled(v) * (1 + size * (2 * random - 1))

            moved = self.inputs.having([nudge(x) if x.is_floating_point() else x for x in self.inputs.tensors])
            pairs = zip(
                _leaves(plain(self.program, self.inputs)), _leaves(plain(self.program, moved, nudge)), strict=True
            )
            self._found = [_apart(a, b) for a, b in pairs]
        return SLACK * self._found[leaf]


def _leaves(result: Any) -> list[Any]:
    return pytree.tree_leaves(result)


def _apart(a: Any, b: Any) -> float:
    """The largest difference of two results; infinite where they are of different kinds."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return 0.0 if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) else float("inf")
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0


def _agrees(program: Trace, inputs: Inputs, expected: Any, reached: _Reached) -> bool:
    try:
        got = plain(program, inputs)
    except Exception:
        return False
    got, expected = _leaves(got), _leaves(expected)
    if len(got) != len(expected):
        return False
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = _apart(a, b)
        if error == 0.0:
            continue
        size = float(b.double().abs().nan_to_num().max())
        if error > ROUNDING * size and not error <= reached.of(i):
            return False
    return True


def alike(got: Any, expected: Any, of_largest: float = 1e-3) -> bool:
    """Whether two results agree but for rounding to float32 on the way, by a part of the largest value."""
    got, expected = _leaves(got), _leaves(expected)
    if len(got) != len(expected):
        return False
    return all(
        _apart(a, b) <= of_largest * float(b.double().abs().nan_to_num().max())
        if isinstance(b, torch.Tensor) and b.numel() else _apart(a, b) == 0.0
        for a, b in zip(got, expected, strict=True)
    )  # fmt: skip
