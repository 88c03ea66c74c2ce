"""`sectorch.step`: a training step is traced once and run from its program afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..choreography.ledger import Observer, sole_observer
from ..choreography.program.trace import Program, ProgramTracer, garbage_collection_paused
from ..nn.inputs import RetainedTensor, SharedInputSpec
from ..session import Session, default_session
from ..tensor import SharedTensor
from ..tensor.table import Context
from .autograd_values import Cell, InputSource, Pool, PublicInput, Publics
from .tensor import CURRENT, Recording, play

LASTING = ("code", "normal", "positive")
"""Values that rows keep beside a cell and a later row needs, or uses to save a comparison."""

MOST_PROGRAMS = 64
"""The most programs that a session keeps."""

MOST_UNUSED = 16
"""After so many programs in a row that were traced and not run again, no new program is traced."""


@dataclass(frozen=True)
class TracedStep:
    """A step's program.

    Attributes:
        results: the numbers of the cells that it computes.
        publics: the sources of its public inputs, by name.
    """

    program: Program
    results: frozenset[int]
    publics: Mapping[str, InputSource]


class Programs:
    """The programs of one session's steps, by the recorded operations."""

    def __init__(self):
        self.traced_steps: OrderedDict[Any, TracedStep | None] = OrderedDict()
        self.traced = 0
        """The number of programs that were traced."""
        self._unused = 0

    def of(self, session: Session, recording: Recording, groups: dict[int, int]) -> TracedStep | None:
        """The program of a step; None where the step is computed operator by operator."""
        key, wanted = _key(recording, groups), frozenset(recording.alive)
        found = self.traced_steps.get(key)
        if key in self.traced_steps and (found is None or wanted <= found.results):
            self.traced_steps.move_to_end(key)
            self._unused = 0
            return found
        if self._unused >= MOST_UNUSED:
            return None
        self._unused += 1
        self.traced += 1
        try:
            found = trace_step(session, recording, groups, wanted | (found.results if found else frozenset()))
        except Exception:  # computed operator by operator, it either goes or says what is wrong
            found = None
        self.traced_steps[key] = found
        while len(self.traced_steps) > MOST_PROGRAMS:
            self.traced_steps.popitem(last=False)
        return found


PROGRAMS: WeakKeyDictionary[Session, Programs] = WeakKeyDictionary()


@contextmanager
def _record_step() -> Iterator[None]:
    """Record the operations inside and compute them at the end; within another step, as a part of that step."""
    if CURRENT.get() is not None:
        yield
        return
    recording = Recording(_run)
    token = CURRENT.set(recording)
    # The results of a step are the cells in use at its end, which must be the same at all parties.
    with garbage_collection_paused():
        try:
            yield
        except BaseException:
            recording.drop()
            raise
        else:
            recording.flush()
        finally:
            CURRENT.reset(token)


class TrainingStep(ContextDecorator):
    """A step of training as one call, whose program is traced once; see `step`."""

    def __init__(self, session: Session | None = None):
        self._session = session
        self._entered: list[AbstractContextManager[None]] = []

    @property
    def session(self) -> Session:
        return self._session or default_session()

    @property
    def programs(self) -> int:
        """The number of programs that were traced for the session's steps."""
        return PROGRAMS.setdefault(self.session, Programs()).traced

    def __enter__(self) -> TrainingStep:
        self._entered.append(_record_step())
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


def step(session: Session | None = None) -> TrainingStep:
    """Make the code inside one step of training: one call, whose program is traced once and run afterwards.

        with sectorch.step(session):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()

    It is also a decorator. The Python code inside runs in each step, on shapes. The step is computed at its end, or
    when something is revealed, by the program of its operations on shared tensors. Learning rates, bias corrections of
    Adam, labels, targets, masks, and floats that are added or multiplied element by element are inputs of the program.
    Any other public value is a part of it, and another value is another program. Steps that differ in this way each
    time are computed operator by operator.

    The results equal those of the operators one by one, bit for bit. A failure inside leaves shared tensors unchanged.
    Rounds and bytes: those of the operators, where operators that do not wait for each other share rounds. Between
    processes there are at most 2 rounds more, and 64 bytes for each party but S: the parties first compare their
    recordings, and `DisagreementError` is raised where they differ, before anything of the step is sent.

    Args:
        session: whose tensors; the default session unless named.
    """
    return TrainingStep(session)


def _groups(recording: Recording) -> tuple[dict[int, int], list[Any]]:
    """For each cell from before the step with flags the number of its group; and a flag for each group."""
    context, flags = recording.context, []
    known: dict[tuple[int, ...], int] = {}
    groups: dict[int, int] = {}
    for number, (_, before) in recording.found.items():
        held = before.pool.flags
        if not held:
            continue
        ids = tuple(map(id, held))
        if ids not in known:
            known[ids] = len(flags)
            with context.session.operation(context.party):
                alone_already = len(held) == 1 and held[0].shape == (1,)
                flags.append(held[0] if alone_already else context.backend.join_flags(held))
        groups[number] = known[ids]
    return groups, flags


def _twins(recording: Recording) -> dict[int, int]:
    """For each cell from before the step, the first cell with the same shares."""
    first: dict[int, int] = {}
    return {n: first.setdefault(id(before.content.shares), n) for n, (_, before) in recording.found.items()}


def _key(recording: Recording, groups: dict[int, int]) -> Any:
    context, twins = recording.context, _twins(recording)
    forms = []
    for number, (_, before) in recording.found.items():
        x = before.content
        with torch._C.DisableTorchFunctionSubclass():
            form = tuple(x.shape), x.dtype
        forms.append((number, *form, SharedInputSpec.of(x), before.gradient, groups.get(number), twins[number]))
    return context.party, context.scheme, tuple(forms), repr(recording.lines)


def _run(recording: Recording) -> None:
    """Compute a step and set the contents of the cells in use."""
    session = recording.context.session
    groups, flags = _groups(recording)
    programs = PROGRAMS.setdefault(session, Programs())
    found = None if session.reference else programs.of(session, recording, groups)
    _compare_steps(recording.context, found)
    if found is None:
        _run_operators(recording)
    else:
        _run_program(found, recording, flags)


def _compare_steps(context: Context, found: TracedStep | None) -> None:
    """Compare the recordings of parties in several processes, before anything of the step is sent.

    Raises:
        DisagreementError: they have recorded different steps.
    """
    session, party = context.session, context.party
    if session.is_distributed:
        session.agreement.note(party, "step", None if found is None else found.program.digest)
        session.agreement.compare(party)


def _run_operators(recording: Recording) -> None:
    context = recording.context
    cells = {
        n: Cell(before.content, before.gradient, pool=Pool(before.pool.flags, settled=True))
        for n, (_, before) in recording.found.items()
    }
    with context.session.operation(context.party):
        play(context, recording.lines, cells, recording.publics)
    for number, cell in recording.alive.items():
        made = cells[number]
        cell.set_content(made.content, made.pool)
        cell.reusable = dict(made.reusable)


def trace_step(session: Session, recording: Recording, groups: dict[int, int], wanted: frozenset[int]) -> TracedStep:
    """Trace the program of a step on shapes, with the wanted cells as its results."""
    party, scheme, publics, twins = recording.context.party, recording.context.scheme, Publics(), _twins(recording)
    with garbage_collection_paused(), sole_observer(Observer()):
        shapes = session.on_shapes()
        setup = shapes.setup(party).tracing = ProgramTracer(shapes.setup(party).call, alone=True)
        with shapes.call(party) as net:
            net.tracing = ProgramTracer(net.call, setup)
            backend = shapes.backend(net, scheme)
            flag = torch.empty(1, dtype=torch.int64, device="meta")
            flags = {g: backend.import_shares(f"flag {g}", (flag, flag)) for g in sorted(set(groups.values()))}
            cells: dict[int, Cell] = {}
            for number, (_, before) in recording.found.items():
                first, x, meta = twins[number], before.content, _meta(before.content)
                content = (
                    SharedInputSpec.of(x).traced_input(f"cell {number}", meta, shapes, party, scheme)
                    if first == number
                    else SharedInputSpec.of(x).tensor(cells[first].content.shares, shapes, party, scheme, meta.dtype)
                )
                held = (flags[groups[number]],) if number in groups else ()
                cells[number] = Cell(content, before.gradient, pool=Pool(held, settled=True))
            varying = [PublicInput(publics, slot, form) for slot, form in enumerate(recording.forms)]
            play(Context(shapes, party, scheme), recording.lines, cells, varying)
            program = net.tracing.program(_results(Context(shapes, party, scheme), cells, wanted))
    return TracedStep(program, wanted, publics.inputs)


def _meta(x: SharedTensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _retain(y: SharedTensor) -> RetainedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        return RetainedTensor(y.backend.export_shares(y.shares), SharedInputSpec.of(y), y.dtype)


def _results(context: Context, cells: dict[int, Cell], wanted: frozenset[int]) -> Any:
    """The results that the parties keep: contents, values that rows keep beside them, and a flag for each group."""
    kept, flags, words = {}, {}, {}
    for number in sorted(wanted):
        cell = cells[number]
        lasting = {k: _retain(v) for k, v in cell.reusable.items() if k in LASTING and isinstance(v, SharedTensor)}
        kept[number] = _retain(cell.content), cell.gradient, lasting
        held = cell.pool.flags
        if held and held not in words:
            words[held] = len(words)
        flags[number] = words.get(held)
    return kept, flags, [context.backend.export_shares(word) for word in _join_groups(context, list(words))]


def _join_groups(context: Context, groups: list[tuple]) -> list[Any]:
    """One flag for each group; flags that several groups share are joined once."""
    having: dict[Any, list[int]] = {}
    for number, held in enumerate(groups):
        for flag in held:
            having.setdefault(flag, []).append(number)
    together: dict[tuple[int, ...], list[Any]] = {}
    for flag, numbers in having.items():
        together.setdefault(tuple(numbers), []).append(flag)
    parts = {numbers: context.backend.join_flags(flags) for numbers, flags in together.items()}
    found = [[part for numbers, part in parts.items() if number in numbers] for number in range(len(groups))]
    return [some[0] if len(some) == 1 else context.backend.join_flags(some) for some in found]


def _run_program(found: TracedStep, recording: Recording, flags: list[Any]) -> None:
    context = recording.context
    session, party, scheme = context.session, context.party, context.scheme
    backend = session.backend(session.setup(party), scheme)
    inputs: dict[str, torch.Tensor] = {}
    for number, (_, before) in recording.found.items():
        inputs |= backend.named_shares(f"cell {number}", before.content.shares)
    for number, word in enumerate(flags):
        inputs |= backend.named_shares(f"flag {number}", word)
    for name, brought in found.publics.items():
        inputs |= {f"{name}.{role}": half for role, half in brought.halves(recording.publics).items()}
    kept, of, joined = session.run(found.program, inputs)
    words = [backend.import_shares("flag", halves) for halves in joined]
    tensor = lambda y: y.spec.tensor(backend.import_shares("result", y.halves), session, party, scheme, y.dtype)
    for number, cell in recording.alive.items():
        content, gradient, lasting = kept[number]
        cell.set_content(tensor(content), Pool(() if of[number] is None else (words[of[number]],)))
        cell.gradient, cell.reusable = gradient, {k: tensor(v) for k, v in lasting.items()}
