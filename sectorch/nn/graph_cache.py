"""A module's programs: one of each shape of input, recorded, passed over and checked when it is first asked for."""

from __future__ import annotations

import copy
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
from .capture import CaptureFailure, attributes_of, call_with_zeros, capture, put_back, state_of_layers, without_caches
from .graph import Trace, is_samplewise, run, same_program
from .inputs import Inputs
from .passes import PASSES, optimise, optimize_passes
from .weights import ModelTensor, bind, device_of, plain_weights

# The check that is made before a program is used: on plain numbers, it gives what the model itself gives.
#
# A runs both on random float64 inputs of the shape. They may differ by rounding only: a sum of n products in float64 is
# the exact sum for factors changed by at most n 2^-53 each (Higham, Accuracy and Stability, 3.1), and n is below 2^13.
# So the results lie as far apart as changes of 2^-40 of every weight and input move them, which is measured where they
# are not closer than that anyway; `SLACK` times as much is allowed, since the measurement is one random change.


ROUNDING = 2.0**-40
NARROW_ROUNDING = 2.0**-23
"""Of constants that the forward makes in float32, where the check computes them in float64. (bfloat16 and float16 are
made by no forward that is checked: a model of such weights is brought to float64 whole.)"""
SLACK = 64.0
_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
_T: Any = torch.Tensor
_CASTS = {_T.float: _T.double, _T.half: _T.double, _T.bfloat16: _T.double, _T.cfloat: _T.cdouble}


class Float64Mode(TorchFunctionMode):
    """Every number inside is float64, or complex128, whatever dtype the code names; whole numbers stay."""

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
    """The module itself, in float64; on a copy, whose weights are the module's, since a forward may leave something."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}
    module = copy.deepcopy(module, shared)
    with torch.no_grad(), Float64Mode():
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


def check_program(module: nn.Module, program: Trace, inputs: Inputs) -> Verdict:
    """Whether the program after its passes computes what the module does; else whether the recording itself does.

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


def results_agree(got: Any, expected: Any, of_largest: float = 1e-3) -> bool:
    """Whether two results agree but for rounding to float32 on the way, by a part of the largest value."""
    got, expected = _leaves(got), _leaves(expected)
    if len(got) != len(expected):
        return False
    return all(
        _apart(a, b) <= of_largest * float(b.double().abs().nan_to_num().max())
        if isinstance(b, torch.Tensor) and b.numel() else _apart(a, b) == 0.0
        for a, b in zip(got, expected, strict=True)
    )  # fmt: skip


KEPT_SHAPES = 16
"""Input shapes of which a module keeps what it worked out."""
FEW = 2
"""Rows of the program that is checked for all batch sizes of which the program is the same."""


def remember(kept: dict, key: Any, value: Any) -> None:
    """Keep a value of an input shape, and forget the oldest: who asks with ever new shapes fills no memory."""
    kept[key] = value
    while len(kept) > KEPT_SHAPES:
        del kept[next(iter(kept))]


class GraphCache:
    """What a module does, by the form and the shapes of its inputs.

    Args:
        session: in which nobody is present, for this module alone.
        party: whose module it is.
        original: what the module is a copy of.

    Attributes:
        alone: why the module runs operation by operation, or None where it does not.
        setup: what is done once a session, of all shapes together.
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
        self._remembers: str | None = None
        self._past = False  # whether anything was recorded
        self._settles = False  # whether the first call of a shape left something in the module
        self._recorded: dict[Any, Trace] = {}
        self._used: dict[Any, Trace] = {}
        self._verdicts: dict[Any, Verdict] = {}
        self._unlike: Any = None  # the call whose recording is not what the module does, where that is why
        self._lock = threading.RLock()  # a recording watches the module's attributes: one at a time
        self.alone: str | None = None

    def of(self, inputs: Inputs) -> Trace | None:
        """The program for inputs of this form, shape and dtype; None where the module runs operation by operation.

        Raises:
            SectorchError: the forward asks for what cannot be computed on secrets, with layer and line.
        """
        with self._lock:
            if self._remembers is not None:
                raise UnsupportedOpError(self._remembers)
            key = inputs.key
            if self.alone is None and key not in self._used:
                program = self._checked(inputs)
                if self.alone is None:
                    remember(self._used, key, program)
            return None if self.alone is not None else self._used[key]

    def recorded(self, inputs: Inputs) -> Trace | None:
        """The program as it was recorded, before the passes."""
        with self._lock:
            if self._remembers is not None:
                raise UnsupportedOpError(self._remembers)
            key = inputs.key
            if key not in self._recorded and self.alone is None:
                past = self._past
                try:
                    remember(self._recorded, key, self._record(inputs))
                except CaptureFailure as reason:
                    if self._settles and past:  # what it did before cannot be done again operation by operation
                        self._remembers = (
                            f"what {type(self._module).__name__} does with {inputs!r} depends "
                            f"on what it was asked before ({reason}); write its forward without a memory"
                        )
                        raise UnsupportedOpError(self._remembers) from None
                    self._give_up(str(reason))
            return None if self.alone is not None else self._recorded[key]

    def bound(self) -> nn.Module:
        """The module with weights that have a shape only, as it is before its first call."""
        return self._bind()[0]

    @property
    def session(self) -> Session:
        """In which nobody is present."""
        return self._session

    def apart(self, inputs: Inputs, sizes: set[int]) -> bool:
        """Whether a batch may be run in pieces of these numbers of rows, with the same results."""
        program, recorded = self.of(inputs), self.recorded(inputs)
        if inputs.rows is None or program is None or recorded is None or not is_samplewise(program):
            return False
        try:
            return all((other := self.recorded(inputs.meta(n))) and same_program(recorded, other) for n in sizes)
        except Exception:  # the forward, which takes this number of rows, need not take others
            return False

    def _record(self, inputs: Inputs) -> Trace:
        """One recording, and further ones wherever the next call might do something else.

        A module may change itself in its first call (a cache), if the second one does the same and changes nothing: so
        does every later one. After that, an input of another shape must do the same on a module without this past.

        Raises:
            CaptureFailure: the module changes from call to call.
        """
        seen = [(form, tuple(shape[1:] for shape in shapes), dtypes) for form, shapes, dtypes in self._recorded]
        first = inputs.row not in seen
        past, self._past = self._past, True
        originals = {name: layer for name, one in self._originals if (layer := one()) is not None}
        before, held = state_of_layers(originals), attributes_of(originals)
        try:
            bound = self._bound = self._bound or self._bind()
            program, changed = capture(*bound, self._values, inputs)
            self._settles = self._settles or changed
            if changed:  # what other shapes do may be something else now: they are recorded anew
                for kept in (self._recorded, self._used, self._verdicts):
                    kept.clear()
            if first or changed:
                self._same_again(program, bound, inputs)
            if self._settles and past:
                without = self._bind()
                self._same_again(program, without, inputs, settled=False)
                self._same_again(program, without, inputs)
        except BaseException as error:
            self._bound = None  # the forward may have left something in it
            written = state_of_layers(originals) != before
            put_back(held)
            if isinstance(error, CaptureFailure) and written:
                # The copy's memory is not what the model's own would be.
                self._remembers = (
                    f"{type(self._module).__name__} keeps a memory between calls, and its forward writes into layers "
                    "of the model that this is a copy of, found by a list of a class, a global name or a hook, which "
                    "does not reset the copy's: reset those of self.modules(), or write the forward without a memory"
                )
                raise UnsupportedOpError(self._remembers) from None
            raise
        return program

    def _bind(self) -> tuple[nn.Module, dict[str, PrivateTensor]]:
        return bind(self._module, self._session, self.party, self._scheme, self._dtype, self._given)

    def _same_again(
        self, program: Trace, bound: tuple[nn.Module, dict[str, PrivateTensor]], inputs: Inputs, settled: bool = True
    ) -> None:
        again, changed = capture(*bound, self._values, inputs)
        if changed and settled:
            raise CaptureFailure("the module changes its own attributes or buffers")
        if not same_program(program, again):
            raise CaptureFailure("two calls of the module do not do the same")

    def refused(self, inputs: Inputs) -> None:
        """A call with these inputs was refused: that its plain forward raises as well says nothing of other calls."""
        with self._lock:
            if self._unlike == inputs.key:
                self.alone = self._unlike = None

    def _give_up(self, reason: str) -> None:
        self.alone = reason
        self._recorded.clear()
        self._used.clear()

    def _checked(self, inputs: Inputs) -> Trace | None:
        program = self.recorded(inputs)
        if program is None:
            return None
        tried, asked = program, inputs.key
        if program.rows is not None and program.rows > FEW:
            few = self._few(inputs.meta(FEW))
            if self.alone is not None:
                return None
            if few is not None and same_program(program, few):
                inputs, tried = inputs.meta(FEW), few
        at = inputs.key
        verdict = self._verdicts.get(at)
        if verdict is None:
            verdict = check_program(self._module, tried, inputs)
            remember(self._verdicts, at, verdict)
        if verdict is Verdict.UNLIKE:
            self._unlike = asked
            self._give_up("it cannot be checked against a recording of it")
            return None
        return optimise(program) if verdict is Verdict.OPTIMISED else program

    def _few(self, inputs: Inputs) -> Trace | None:
        try:
            return self.recorded(inputs)
        except Exception:  # a forward that takes no such batch
            return None
