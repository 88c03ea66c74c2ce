"""A module's programs, one for each shape of input.

When a program is first needed it is recorded (`nn/capture.py`), transformed (`nn/passes.py`), and checked: on plain
numbers it has to compute what the module computes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.program.trace import ProgramTracer
from ..errors import CaptureWarning, UnsupportedOpError
from ..session import Session
from ..tensor import PrivateTensor, Scheme
from .capture import (
    CaptureFailure,
    OutsideState,
    attributes_of,
    call_with_zeros,
    capture,
    put_back,
    state_of_layers,
    without_caches,
)
from .graph import Trace, is_samplewise, run, same_program
from .inputs import Inputs
from .passes import PASSES, optimise, optimize_passes
from .weights import ModelTensor, bind, copy_module, device_of, plain_weights

# The check before a program is used.
#
# The owner runs program and module on random float64 inputs of the shape. Their results may differ by rounding only. A
# sum of n products in float64 is the exact sum for factors changed by at most n 2^-53 each (Higham, Accuracy and
# Stability, 3.1), and n is below 2^13. So the results may differ by as much as changes of 2^-40 of every weight and
# input move them. Where they differ by more than 2^-40 of their size, this is measured with one random change, and
# `SLACK` times the measurement is allowed.


ROUNDING = 2.0**-40
NARROW_ROUNDING = 2.0**-23
"""The rounding of constants that the forward makes in float32, and the check in float64. No forward that is checked
makes constants in bfloat16 or float16, since a model of such weights is converted to float64."""
SLACK = 64.0
_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
_T: Any = torch.Tensor
_CASTS = {_T.float: _T.double, _T.half: _T.double, _T.bfloat16: _T.double, _T.cfloat: _T.cdouble}


class Float64Mode(TorchFunctionMode):
    """Computes in float64, or complex128, whatever dtype the code inside names; whole numbers stay as they are."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or name == "__set__":
            return func(*args, **kwargs)
        target = args[0] if args and name.endswith("_") and isinstance(args[0], torch.Tensor) else None
        wide = lambda v: v if v is target else _wide(v)
        named = {name: pytree.tree_map(wide, value) for name, value in kwargs.items()}
        result = call_with_zeros(_CASTS.get(func, func), pytree.tree_map(wide, tuple(args)), named)
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
    with torch.no_grad(), Float64Mode():
        return run(program, values, [x.clone() for x in inputs.tensors], step)


def original(module: nn.Module, inputs: Inputs) -> Any:
    """The result of the module itself in float64, run on a copy that shares its weights: a forward may change it."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}
    module = copy_module(module, shared)
    with torch.no_grad(), Float64Mode():
        given = [x.clone() for x in inputs.tensors]  # a forward may write into its inputs
        return without_caches(inputs.called(module, given))


def sample(inputs: Inputs, device: torch.device) -> Inputs:
    """Inputs with random numbers, the same in every call: normal ones in float64, or zeros and ones."""
    draw = torch.Generator().manual_seed(0x5EC)

    def like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(device)
        return torch.randint(0, 2, shape, generator=draw).to(device, dtype)

    return inputs.with_tensors([like(shape, dtype) for shape, dtype in inputs.described.values()])


class Verdict(Enum):
    """The form of a program that computes what its module does: after the passes, as recorded, or none."""

    OPTIMISED = 1
    RECORDED = 2
    UNLIKE = 3


def check_program(module: nn.Module, program: Trace, inputs: Inputs) -> Verdict:
    """Compare the program after its passes, and if that fails the recording, with the module.

    Args:
        module: plain, in float64; it was seen to change nothing in itself.
        program: recorded from it for such inputs.
        inputs: only their form, shapes and dtypes are used.

    Warns:
        CaptureWarning: naming the pass that changed the values, or saying that the recording does not stand for the
            module.
    """
    stages = [program, *optimize_passes(program)]
    if any(0 in shape for shape in inputs.shapes) or any(v.is_meta for v in program.values.values()):
        return Verdict.OPTIMISED
    given = sample(inputs, device_of(module))
    outside = OutsideState(module)
    try:
        expected = original(module, given)
    except Exception:
        outside.put_back()
        # A module that does not run in float64 cannot be checked: it runs operation by operation.
        return Verdict.UNLIKE
    reached = _RoundingEffect(program, given)
    if _agrees(stages[-1], given, expected, reached):
        return Verdict.OPTIMISED
    if not _agrees(program, given, expected, reached):
        outside.put_back()
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


class _RoundingEffect:
    """The most by which rounding can move a program's results, computed when it is first needed."""

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

            moved = self.inputs.with_tensors([nudge(x) if x.is_floating_point() else x for x in self.inputs.tensors])
            results = plain(self.program, self.inputs), plain(self.program, moved, nudge)
            pairs = zip(*map(pytree.tree_leaves, results), strict=True)
            self._found = [_difference(a, b) for a, b in pairs]
        return SLACK * self._found[leaf]


def _difference(a: Any, b: Any) -> float:
    """The largest difference of two results; infinite where they are of different kinds."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return 0.0 if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) else float("inf")
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0


def _agrees(program: Trace, inputs: Inputs, expected: Any, reached: _RoundingEffect) -> bool:
    try:
        got = plain(program, inputs)
    except Exception:
        return False
    got, expected = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    if len(got) != len(expected):
        return False
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = _difference(a, b)
        if error == 0.0:
            continue
        size = float(b.double().abs().nan_to_num().max())
        if error > ROUNDING * size and not error <= reached.of(i):
            return False
    return True


KEPT_SHAPES = 16
"""Input shapes for which a module keeps its programs and dry runs."""
FEW = 2
"""Rows of the program that is checked on behalf of all batch sizes with the same program."""


def remember(kept: dict, key: Any, value: Any) -> None:
    """Keep a value for an input shape and forget the oldest, so that ever new shapes do not fill the memory."""
    kept[key] = value
    while len(kept) > KEPT_SHAPES:
        del kept[next(iter(kept))]


class GraphCache:
    """The programs of a module, by the form and the shapes of its inputs.

    Args:
        session: a session in which nobody is present, for this module alone.
        party: the owner of the module.
        original: the user's module, of which `module` is a copy.

    Attributes:
        eager_reason: why the module runs operation by operation, or None where it does not.
        setup: the trace of what is done once a session, for all shapes together.
    """

    def __init__(
        self, module: nn.Module, scheme: Scheme, dtype: torch.dtype, session: Session, party: Party,
        given: dict[int, ModelTensor], original: nn.Module | None = None,
    ):  # fmt: skip
        self._module, self._scheme, self._dtype, self._given = module, scheme, dtype, given
        self._session, self.party = session, party
        setup = session.setup(party)
        self.setup = setup.tracing = ProgramTracer(setup.call)
        self._values = plain_weights(module)
        self._originals = [] if original is None else [(name, ref(layer)) for name, layer in original.named_modules()]
        self._bound: tuple[nn.Module, dict[str, PrivateTensor]] | None = None
        self._refusal: str | None = None
        self._has_recorded = False  # whether anything was recorded
        self._changes_once = False  # whether the first call of a shape left something in the module
        self._recorded: dict[Any, Trace] = {}
        self._used: dict[Any, Trace] = {}
        self._verdicts: dict[Any, Verdict] = {}
        self._unlike_call: Any = None  # the call whose recording is not what the module does, where that is why
        self._lock = threading.RLock()  # a recording watches the module's attributes: one at a time
        self.eager_reason: str | None = None

    def of(self, inputs: Inputs) -> Trace | None:
        """The program for inputs of this form, shape and dtype; None where the module runs operation by operation.

        Raises:
            SectorchError: the forward asks for what cannot be computed on secrets, with layer and line.
        """
        with self._lock:
            if self._refusal is not None:
                raise UnsupportedOpError(self._refusal)
            key = inputs.key
            if self.eager_reason is None and key not in self._used:
                program = self._checked(inputs)
                if self.eager_reason is None:
                    remember(self._used, key, program)
            return None if self.eager_reason is not None else self._used[key]

    def recording(self, inputs: Inputs) -> Trace | None:
        """The program as recorded, before the passes; None where the module runs operation by operation."""
        with self._lock:
            if self._refusal is not None:
                raise UnsupportedOpError(self._refusal)
            key = inputs.key
            if key not in self._recorded and self.eager_reason is None:
                past = self._has_recorded
                try:
                    remember(self._recorded, key, self._record(inputs))
                except CaptureFailure as reason:
                    if self._changes_once and past:  # operation by operation, the first call's change would be missing
                        self._refusal = (
                            f"what {type(self._module).__name__} does with {inputs!r} depends "
                            f"on what it was asked before ({reason}); write its forward without a memory"
                        )
                        raise UnsupportedOpError(self._refusal) from None
                    self._run_eagerly(str(reason))
            return None if self.eager_reason is not None else self._recorded[key]

    def bound(self) -> nn.Module:
        """The module before its first call, with weights that have a shape only."""
        return self._bind()[0]

    @property
    def session(self) -> Session:
        """The session, in which nobody is present."""
        return self._session

    def can_split_rows(self, inputs: Inputs, sizes: set[int]) -> bool:
        """Whether a batch may be run in pieces of these numbers of rows, with the same results."""
        program, recorded = self.of(inputs), self.recording(inputs)
        if inputs.rows is None or program is None or recorded is None or not is_samplewise(program):
            return False
        try:
            return all((other := self.recording(inputs.meta(n))) and same_program(recorded, other) for n in sizes)
        except Exception:  # the forward may refuse other numbers of rows
            return False

    def _record(self, inputs: Inputs) -> Trace:
        """Record a call, and record it again wherever the next call might do something else.

        A module may change itself in its first call (a cache) if the second call does the same and changes nothing:
        then every later call does the same. From then on a recording for another shape is repeated on a fresh copy of
        the module, which has to do the same without the earlier calls.

        Raises:
            CaptureFailure: the module changes from call to call.
        """
        seen = [(form, tuple(shape[1:] for shape in shapes), dtypes) for form, shapes, dtypes in self._recorded]
        first = inputs.row not in seen
        past, self._has_recorded = self._has_recorded, True
        originals = {name: layer for name, one in self._originals if (layer := one()) is not None}
        before, held = state_of_layers(originals), attributes_of(originals)
        outside = OutsideState(self._module)
        try:
            bound = self._bound = self._bound or self._bind()
            program, changed = capture(*bound, self._values, inputs)
            self._changes_once = self._changes_once or changed
            if changed:  # calls of other shapes may do something else now: they are recorded anew
                for kept in (self._recorded, self._used, self._verdicts):
                    kept.clear()
            if first or changed:
                self._check_repeatable(program, bound, inputs)
            if self._changes_once and past:
                without = self._bind()
                self._check_repeatable(program, without, inputs, settled=False)
                self._check_repeatable(program, without, inputs)
            if outside.drew():
                raise CaptureFailure("the module draws random numbers")
        except BaseException as error:
            self._bound = None  # the forward may have changed it
            outside.put_back()
            written = state_of_layers(originals) != before
            put_back(held)
            if isinstance(error, CaptureFailure) and written:
                # The copy's memory is not what the model's own would be.
                self._refusal = (
                    f"{type(self._module).__name__} keeps a memory between calls, and its forward writes into layers "
                    "of the model that this is a copy of, found by a list of a class, a global name or a hook, which "
                    "does not reset the copy's: reset those of self.modules(), or write the forward without a memory"
                )
                raise UnsupportedOpError(self._refusal) from None
            raise
        return program

    def _bind(self) -> tuple[nn.Module, dict[str, PrivateTensor]]:
        return bind(self._module, self._session, self.party, self._scheme, self._dtype, self._given)

    def _check_repeatable(
        self, program: Trace, bound: tuple[nn.Module, dict[str, PrivateTensor]], inputs: Inputs, settled: bool = True
    ) -> None:
        again, changed = capture(*bound, self._values, inputs)
        if changed and settled:
            raise CaptureFailure("the module changes its own attributes or buffers")
        if not same_program(program, again):
            raise CaptureFailure("two calls of the module do not do the same")

    def note_refusal(self, inputs: Inputs) -> None:
        """Forget a failed check of these inputs, which a dry run refused: it says nothing of other calls."""
        with self._lock:
            if self._unlike_call == inputs.key:
                self.eager_reason = self._unlike_call = None

    def _run_eagerly(self, reason: str) -> None:
        self.eager_reason = reason
        self._recorded.clear()
        self._used.clear()

    def _checked(self, inputs: Inputs) -> Trace | None:
        program = self.recording(inputs)
        if program is None:
            return None
        tried, asked = program, inputs.key
        if program.rows is not None and program.rows > FEW:
            few = self._few(inputs.meta(FEW))
            if self.eager_reason is not None:
                return None
            if few is not None and same_program(program, few):
                inputs, tried = inputs.meta(FEW), few
        at = inputs.key
        verdict = self._verdicts.get(at)
        if verdict is None:
            verdict = check_program(self._module, tried, inputs)
            remember(self._verdicts, at, verdict)
        if verdict is Verdict.UNLIKE:
            self._unlike_call = asked
            self._run_eagerly("it cannot be checked against a recording of it")
            return None
        return optimise(program) if verdict is Verdict.OPTIMISED else program

    def _few(self, inputs: Inputs) -> Trace | None:
        try:
            return self.recording(inputs)
        except Exception:  # the forward may refuse such a batch
            return None
