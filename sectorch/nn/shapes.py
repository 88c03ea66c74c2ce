"""A module's programs: one of each shape of input, recorded, passed over and checked when it is first asked for."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

import torch
from torch import nn

from ..choreography import Party
from ..choreography.program.trace import Tracing
from ..errors import UnsupportedOpError
from ..session import Session
from ..tensor import PrivateTensor, Scheme
from .accept import Given
from .bind import bind, plain_weights
from .capture import NotCaptured, capture
from .check import Verdict, checked
from .inputs import Inputs
from .passes import optimise
from .samplewise import is_samplewise, same_program
from .state import attributes_of, put_back, state_of_layers
from .trace import Trace

KEPT_SHAPES = 16
"""Input shapes of which a module keeps what it worked out."""
FEW = 2
"""Rows of the program that is checked for all batch sizes of which the program is the same."""


def remember(kept: dict, key: Any, value: Any) -> None:
    """Keep a value of an input shape, and forget the oldest: who asks with ever new shapes fills no memory."""
    kept[key] = value
    while len(kept) > KEPT_SHAPES:
        del kept[next(iter(kept))]


class Traces:
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
        given: dict[int, Given], original: nn.Module | None = None,
    ):  # fmt: skip
        self._module, self._scheme, self._dtype, self._given = module, scheme, dtype, given
        self._session, self.party = session, party
        setup = session.setup(party)
        self.setup = setup.tracing = Tracing(setup.call)
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
                except NotCaptured as reason:
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
            NotCaptured: the module changes from call to call.
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
            if isinstance(error, NotCaptured) and written:
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
            raise NotCaptured("the module changes its own attributes or buffers")
        if not same_program(program, again):
            raise NotCaptured("two calls of the module do not do the same")

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
            verdict = checked(self._module, tried, inputs)
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
