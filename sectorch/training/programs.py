"""`sectorch.step`: a training step is recorded, traced once, and run from its program afterwards.

The user's Python, torch's autograd and its optimisers run in every step, on shapes, so their counters and schedules
work as always. The operators that they ask for on shared tensors are recorded with the numbers of the step, and
computed at its end. Two steps with equal records run the same program.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from ..choreography import Party, Phase
from ..choreography.ledger import Observer, sole_observer
from ..choreography.located import compute, run_in
from ..choreography.program.trace import Program, ProgramTracer, garbage_collection_paused
from ..errors import ArgumentError
from ..mpc.star.shares import Shares
from ..nn.inputs import RetainedTensor, SharedInputSpec
from ..session import Session, default_session
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.secret import dtype_of
from ..tensor.table import Context, OpRow
from .autograd_values import VARYING, Cell, InputSource, Pool, PublicForm, PublicInput, Publics
from .operations import WRITES, Operation, compute_operation, in_shares

# The record of a step: operators on cells whose contents are computed when the step runs.


CURRENT: ContextVar[Recording | None] = ContextVar("the step that is recorded", default=None)


class Ref(NamedTuple):
    """A cell, by its number."""

    number: int


class Slot(NamedTuple):
    """A public argument that may vary from step to step, by its number."""

    number: int
    form: PublicForm


class Constant:
    """A public tensor that is part of the program."""

    def __init__(self, value: torch.Tensor):
        self.value = value.detach().clone()

    def __repr__(self) -> str:
        content = self.value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{self.value.dtype} {tuple(self.value.shape)} {hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class RecordedOperation:
    """An operation with numbers in place of cells, and the numbers of its results."""

    key: Any
    row: OpRow
    args: tuple
    kwargs: dict[str, Any]
    meta: Any
    target: int | None
    results: tuple[int | None, ...]
    parameter: bool
    backward: bool
    line: str

    def __repr__(self) -> str:
        return f"{self.key} {self.args} {self.kwargs} {self.target} {self.parameter} {self.backward} {self.results}"


class CellSnapshot(NamedTuple):
    """The state of a cell before the step."""

    content: Any
    pool: Pool
    gradient: bool
    version: int


class Recording:
    """The operations of one step so far. `run` computes them and sets the contents of the cells."""

    def __init__(self, run: Callable[[Recording], None]):
        self._context: Context | None = None
        self._run = run
        self._begin()

    @property
    def context(self) -> Context:
        """The session, party and scheme of the first operation."""
        if self._context is None:
            raise ArgumentError("nothing was recorded")
        return self._context

    def accepts(self, context: Context) -> bool:
        """Whether operations of this session, party and number format are recorded here."""
        self._context = self._context or context
        return self._context == context

    def _begin(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.publics: list[Any] = []
        self.forms: list[PublicForm] = []
        """The forms of `publics`."""
        self.existing: dict[int, tuple[Cell, CellSnapshot]] = {}
        """The cells that existed before the step, by number."""
        self._results: dict[int, weakref.ref[Cell]] = {}
        self._count = 0

    @property
    def live_cells(self) -> dict[int, Cell]:
        """The cells in use that the step is to compute, by number."""
        results = {n: cell for n, ref in self._results.items() if (cell := ref()) is not None}
        valid = {n: cell for n, cell in results.items() if cell.base is None or cell.base[0].version == cell.base[1]}
        return valid | {n: cell for n, (cell, _) in self.existing.items() if cell.pending is not None}

    def add(self, op: Operation) -> Any:
        """Record an operation and return its results as cells without content, or the target if it is in place."""
        if op.row.name == "detach":
            return op.args[0]
        # A write through a view changes its base, of which a recording knows nothing: it is taken at once.
        if op.target is not None and op.target.base is not None:
            self.flush()
            return compute_operation(self.context, op)
        varying = VARYING.get(op.key, {})
        args = tuple(self._operand(v, varying.get(i)) for i, v in enumerate(op.args))
        kwargs = {name: self._operand(v, varying.get(name)) for name, v in op.kwargs.items()}
        target = None if op.target is None else self._number(op.target)
        base = op.given[0] if op.row.view and not op.given[0].gradient else None
        base = base if base is None or base.base is None else base.base[0]
        made = op.target if op.target is not None else pytree.tree_map(lambda m: self._cell(op, m, base), op.meta)
        places = () if op.target is not None else tuple(
            c.place[1] if isinstance(c, Cell) and c.place else None for c in pytree.tree_leaves(made)
        )  # fmt: skip
        for cell in [op.target, *(op.args[i] for i in WRITES.get(op.key, ()))]:
            if isinstance(cell, Cell):
                self._mark_written(cell)
        self.operations.append(
            RecordedOperation(op.key, op.row, args, kwargs, op.meta, target, places, op.parameter, op.backward, op.line)
        )
        return made

    def _number(self, cell: Cell) -> int:
        if cell.place is None or cell.place[0] is not self or not self._has(cell):
            before = CellSnapshot(cell.content, cell.pool, cell.gradient, cell.version)
            cell.place = self, self._count
            self.existing[self._count] = cell, before
            self._count += 1
        return cell.place[1]

    def _has(self, cell: Cell) -> bool:
        number = cell.place[1] if cell.place else -1
        if number in self.existing:
            return self.existing[number][0] is cell
        return number in self._results and self._results[number]() is cell

    def _cell(self, op: Operation, meta: Any, base: Cell | None) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        gradient = op.given[0].gradient if op.row.view else op.backward
        cell = Cell(None, gradient, base, pool=Pool(), pending=meta)
        cell.place = self, self._count
        self._results[self._count] = weakref.ref(cell)
        self._count += 1
        return cell

    def _mark_written(self, cell: Cell) -> None:
        """Note that the step writes the cell's content. A frozen weight's row refuses to."""
        if cell.own:
            return
        self._number(cell)
        if cell.pending is None:
            cell.pending = cell.shape
        cell.version += 1

    def _operand(self, value: Any, form: Callable[[Any], PublicForm | None] | None) -> Any:
        """An argument in the form that a recorded operation holds."""
        if isinstance(value, Cell):
            return Ref(self._number(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._operand(v, None) for v in value)
        plain = type(value) is torch.Tensor and not value.is_meta
        if form is not None and (plain or type(value) in (int, float)):
            public = form(value)
            if public is not None:
                self.publics.append(value.detach().clone() if plain else value)
                self.forms.append(public)
                return Slot(len(self.publics) - 1, public)
        return Constant(value) if plain else value

    def flush(self) -> None:
        """Compute the recorded operations. A failure leaves all cells from before the step unchanged."""
        if not self.operations:
            return
        token = CURRENT.set(None)
        try:
            with torch._C._EnableTorchFunction():
                self._run(self)
        finally:
            self.drop()
            CURRENT.reset(token)

    def drop(self) -> None:
        """Forget the recording; cells from before the step that got no new content get their old one back."""
        for cell, before in self.existing.values():
            cell.place = None
            if cell.pending is not None:
                cell.set_content(before.content, before.pool)
        self._begin()


def current_recording(context: Context) -> Recording | None:
    """The step that is recorded, if it is one of this session, party and number format."""
    recording = CURRENT.get()
    return recording if recording is not None and recording.accepts(context) else None


def fill_cells(value: Any, cells: dict[int, Cell], publics: list[Any]) -> Any:
    """An argument of a recorded operation with the cells and public values that it refers to."""
    if isinstance(value, Ref):
        return cells[value.number]
    if isinstance(value, Slot):
        return publics[value.number]
    if isinstance(value, Constant):
        return value.value
    return type(value)(fill_cells(v, cells, publics) for v in value) if type(value) in (list, tuple) else value


def run_operations(
    context: Context, operations: list[RecordedOperation], cells: dict[int, Cell], publics: list[Any]
) -> None:
    """Compute the recorded operations in order; their results are added to `cells`."""
    for op in operations:
        args = fill_cells(op.args, cells, publics)
        kwargs = {name: fill_cells(v, cells, publics) for name, v in op.kwargs.items()}
        target = None if op.target is None else cells[op.target]
        operation = Operation(op.key, op.row, args, kwargs, op.meta, target, op.parameter, op.backward, op.line)
        results = compute_operation(context, operation)
        for number, cell in zip(op.results, pytree.tree_leaves(results) if target is None else (), strict=True):
            if number is not None:
                cells[number] = cell


# The programs of steps.


LASTING = ("code", "normal", "positive")
"""Reusable values of a cell that stay after the step: a later row needs them, or saves a comparison by them."""

MOST_PROGRAMS = 64
"""The most programs that a session keeps."""

MOST_NOT_RUN_AGAIN = 16
"""After this many programs in a row that were not run again, no new program is traced."""


class OwnWeights:
    """The frozen weights in the programs of one party's steps, each masked once a session for all of them.

    The programs are traced in one session without parties and have its setup in common, where each weight is an input
    of its owner's. Stand-ins are the weights of that session.
    """

    def __init__(self, session: Session, party: Party):
        self.session, self._party = session.on_shapes(), party
        setup = self.session.setup(party)
        self.setup = setup.tracing = ProgramTracer(setup.call)
        self._pairs: dict[str, tuple[PrivateTensor, PrivateTensor]] = {}
        """The weights and their stand-ins by name, in the order in which steps first took them."""
        self._names: dict[int, str] = {}
        self._brought: dict[str, PrivateTensor] = {}

    def name(self, x: PrivateTensor) -> str:
        """The name of a weight, or of what its owner made of weights."""
        if id(x.value) not in self._names:
            name, dtype = f"own {len(self._pairs)}", x.on_meta().dtype
            meta = torch.empty(x.value.shape, dtype=x.value.dtype, device="meta")
            value = self.session.setup(self._party).own(self._party, meta, Phase.SETUP, name)
            made = PrivateTensor(value, self.session, self._party, x.scheme, dtype, x.label)
            made.lasting, made.streamed, made.is_inverse = True, x.streamed, x.is_inverse
            self._brought[name] = x
            self._pair(name, x, made)
        return self._names[id(x.value)]

    def _pair(self, name: str, x: PrivateTensor, stand_in: PrivateTensor) -> None:
        self._pairs[name] = x, stand_in
        self._names |= {id(x.value): name, id(stand_in.value): name}

    def stand_in(self, x: PrivateTensor) -> PrivateTensor:
        """The weight in the session without parties."""
        return self._pairs[self.name(x)][1]

    def weight(self, stand_in: PrivateTensor) -> PrivateTensor | None:
        """The weight, or the view of one, of which this is the stand-in; None for what its owner computed otherwise."""
        if id(stand_in.value) not in self._names:
            parent, view = stand_in.origin or (None, None)
            x = None if parent is None else self.weight(parent)
            if x is None or view is None:
                return None
            with run_in(x.session.setup(x.party)):
                value = compute(view, x.value)
            made = PrivateTensor(value, x.session, x.party, x.scheme, stand_in.on_meta().dtype, x.label)
            made.origin, made.lasting = (x, view), True
            self._pair(f"own {len(self._pairs)}", made, stand_in)
        return self._pairs[self._names[id(stand_in.value)]][0]

    def inputs(self) -> dict[str, torch.Tensor]:
        """The contents by name, which are shapes where their owner is elsewhere."""
        return {name: x.value._value for name, x in self._brought.items()}


OWN: WeakKeyDictionary[Session, dict[Party, OwnWeights]] = WeakKeyDictionary()


def own_weights(context: Context) -> OwnWeights:
    """The frozen weights of a session's programs."""
    of_party = OWN.setdefault(context.session, {})
    if context.party not in of_party:
        of_party[context.party] = OwnWeights(context.session, context.party)
    return of_party[context.party]


@dataclass(frozen=True)
class TracedStep:
    """A step's program.

    Attributes:
        results: the numbers of the cells that it computes.
        publics: the sources of its public inputs, by name.
        weights: frozen weights and views of them among the results.
    """

    program: Program
    results: frozenset[int]
    publics: Mapping[str, InputSource]
    weights: Mapping[int, PrivateTensor]


class Programs:
    """The programs of one session's steps, by the recorded operations."""

    def __init__(self):
        self.traced_steps: OrderedDict[Any, TracedStep | None] = OrderedDict()
        self.traced = 0
        """The number of programs that were traced."""
        self._not_run_again = 0

    def of(self, session: Session, recording: Recording, groups: dict[int, int]) -> TracedStep | None:
        """The program of a step; None where the step is computed operator by operator."""
        key, wanted = _key(recording, groups), frozenset(recording.live_cells)
        found = self.traced_steps.get(key)
        if key in self.traced_steps and (found is None or wanted <= found.results):
            self.traced_steps.move_to_end(key)
            self._not_run_again = 0
            return found
        if self._not_run_again >= MOST_NOT_RUN_AGAIN:
            return None
        self._not_run_again += 1
        self.traced += 1
        try:
            found = trace_step(session, recording, groups, wanted | (found.results if found else frozenset()))
        except Exception:  # then the step runs operator by operator, where a wrong one raises with its line
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
    """For each cell from before the step that has flags, the number of its group; and one flag for each group.

    Cells with the same flags are one group.
    """
    context, flags = recording.context, []
    known: dict[tuple[int, ...], int] = {}
    groups: dict[int, int] = {}
    for number, (_, before) in recording.existing.items():
        own = before.pool.flags
        if not own:
            continue
        ids = tuple(map(id, own))
        if ids not in known:
            known[ids] = len(flags)
            with context.session.operation(context.party):
                single = len(own) == 1 and own[0].shape == (1,)
                flags.append(own[0] if single else context.backend.join_flags(own))
        groups[number] = known[ids]
    return groups, flags


def _first_with_shares(recording: Recording) -> dict[int, int]:
    """For each cell from before the step, the number of the first cell with the same shares."""
    first: dict[int, int] = {}
    contents = {n: before.content for n, (_, before) in recording.existing.items()}
    same = lambda x: id(x.value if isinstance(x, PrivateTensor) else x.shares)
    return {n: first.setdefault(same(x), n) for n, x in contents.items()}


def has_own_numbers(x: SharedTensor) -> bool:
    """Whether Q has the whole numbers that x consists of, such as ids and labels, and makes their codes itself."""
    return isinstance(x.shares, Shares) and x.shares.Q is not None


def _key(recording: Recording, groups: dict[int, int]) -> Any:
    context, first_with = recording.context, _first_with_shares(recording)
    forms = []
    for number, (_, before) in recording.existing.items():
        x = before.content
        if isinstance(x, PrivateTensor):
            forms.append((number, own_weights(context).name(x)))
            continue
        facts = x.shares.shape, dtype_of(x), SharedInputSpec.of(x)
        forms.append((number, *facts, has_own_numbers(x), before.gradient, groups.get(number), first_with[number]))
    return context.party, context.scheme, tuple(forms), repr(recording.operations)


def _run(recording: Recording) -> None:
    """Compute a step and set the contents of the cells in use."""
    session = recording.context.session
    groups, flags = _groups(recording)
    programs = PROGRAMS.setdefault(session, Programs())
    traced = None if session.reference else programs.of(session, recording, groups)
    _compare_steps(recording.context, traced)
    if traced is None:
        _run_operators(recording)
    else:
        _run_program(traced, recording, flags)


def _compare_steps(context: Context, traced: TracedStep | None) -> None:
    """Compare the recordings of parties in several processes, before anything of the step is sent.

    Raises:
        DisagreementError: they have recorded different steps.
    """
    session, party = context.session, context.party
    if session.is_distributed:
        session.agreement.note(party, "step", None if traced is None else traced.program.digest)
        session.agreement.compare(party)


def _run_operators(recording: Recording) -> None:
    context = recording.context
    cells = {
        n: Cell(before.content, before.gradient, pool=Pool(before.pool.flags, one_way=True))
        for n, (_, before) in recording.existing.items()
    }
    with context.session.operation(context.party):
        run_operations(context, recording.operations, cells, recording.publics)
    for number, cell in recording.live_cells.items():
        made = cells[number]
        cell.set_content(made.content, made.pool)
        cell.reusable = dict(made.reusable)


def trace_step(session: Session, recording: Recording, groups: dict[int, int], wanted: frozenset[int]) -> TracedStep:
    """Trace the program of a step on shapes, with the wanted cells as its results."""
    party, scheme, publics, first_with = (
        recording.context.party,
        recording.context.scheme,
        Publics(),
        _first_with_shares(recording),
    )
    base = None
    if any(isinstance(before.content, PrivateTensor) for _, before in recording.existing.values()):
        base = own_weights(recording.context)
    with garbage_collection_paused(), sole_observer(Observer()):
        # The setup is traced too, since the call's draws and messages depend on its values.
        shapes = session.on_shapes() if base is None else base.session
        setup = ProgramTracer(shapes.setup(party).call, alone=True) if base is None else base.setup
        shapes.setup(party).tracing = setup
        with shapes.call(party) as net:
            net.tracing = ProgramTracer(net.call, setup)
            backend = shapes.backend(net, scheme)
            flag = torch.empty(1, dtype=torch.int64, device="meta")
            flags = {g: backend.import_shares(f"flag {g}", (flag, flag)) for g in sorted(set(groups.values()))}
            cells: dict[int, Cell] = {}
            for number, (_, before) in recording.existing.items():
                if base is not None and isinstance(before.content, PrivateTensor):
                    cells[number] = Cell(base.stand_in(before.content))
                    continue
                first, x, meta = first_with[number], before.content, before.content.on_meta()
                half = torch.empty(meta.shape, dtype=torch.int64, device="meta")
                shares = (
                    backend.import_shares(f"cell {number}", (half,) * (3 if has_own_numbers(x) else 2))
                    if first == number
                    else cells[first].content.shares
                )
                content = SharedInputSpec.of(x).tensor(shares, shapes, party, scheme, meta.dtype)
                own = (flags[groups[number]],) if number in groups else ()
                cells[number] = Cell(content, before.gradient, pool=Pool(own, one_way=True))
            varying = [PublicInput(publics, slot, form) for slot, form in enumerate(recording.forms)]
            run_operations(Context(shapes, party, scheme), recording.operations, cells, varying)
            dry, weights = Context(shapes, party, scheme), dict[int, PrivateTensor]()
            for number in sorted(wanted):
                found = base.weight(cells[number].content) if base is not None and cells[number].own else None
                weights |= {} if found is None else {number: found}
                cells[number] = cells[number] if found is not None else in_shares(dry, cells[number])
            program = net.tracing.program(_results(dry, cells, wanted - set(weights)))
    return TracedStep(program, wanted, publics.inputs, weights)


def _results(context: Context, cells: dict[int, Cell], wanted: frozenset[int]) -> Any:
    """The results that the parties keep: contents with reusable values, each cell's group, and the groups' flags."""
    contents, group_of, groups = {}, {}, {}
    for number in sorted(wanted):
        cell = cells[number]
        shared = {k: v for k, v in cell.reusable.items() if k in LASTING and isinstance(v, SharedTensor)}
        lasting = {k: RetainedTensor.of(v) for k, v in shared.items()}
        contents[number] = RetainedTensor.of(cell.content), cell.gradient, lasting
        flags = cell.pool.flags
        if flags and flags not in groups:
            groups[flags] = len(groups)
        group_of[number] = groups.get(flags)
    return contents, group_of, [context.backend.export_shares(flag) for flag in _join_groups(context, list(groups))]


def _join_groups(context: Context, groups: list[tuple]) -> list[Any]:
    """One flag for each group; flags that the same groups have are joined once."""
    groups_of: dict[Any, list[int]] = {}
    for number, flags in enumerate(groups):
        for flag in flags:
            groups_of.setdefault(flag, []).append(number)
    by_groups: dict[tuple[int, ...], list[Any]] = {}
    for flag, numbers in groups_of.items():
        by_groups.setdefault(tuple(numbers), []).append(flag)
    parts = {numbers: context.backend.join_flags(flags) for numbers, flags in by_groups.items()}
    parts_of = [[part for numbers, part in parts.items() if number in numbers] for number in range(len(groups))]
    return [own[0] if len(own) == 1 else context.backend.join_flags(own) for own in parts_of]


def _run_program(traced: TracedStep, recording: Recording, flags: list[Any]) -> None:
    context = recording.context
    session, party, scheme = context.session, context.party, context.scheme
    backend = session.backend(session.setup(party), scheme)
    inputs = own_weights(context).inputs() if party in OWN.get(session, {}) else {}
    for number, (_, before) in recording.existing.items():
        if isinstance(before.content, PrivateTensor):
            continue
        inputs |= backend.named_shares(f"cell {number}", before.content.shares)
    for number, word in enumerate(flags):
        inputs |= backend.named_shares(f"flag {number}", word)
    for name, source in traced.publics.items():
        inputs |= {f"{name}.{role}": half for role, half in source.halves(recording.publics).items()}
    contents, group_of, halves_of_flags = session.run(traced.program, inputs)
    joined = [backend.import_shares("flag", halves) for halves in halves_of_flags]
    tensor = lambda y: y.spec.tensor(backend.import_shares("result", y.halves), session, party, scheme, y.dtype)
    for number, cell in recording.live_cells.items():
        if number in traced.weights:
            cell.set_content(traced.weights[number], Pool())
            continue
        content, gradient, lasting = contents[number]
        cell.set_content(tensor(content), Pool(() if group_of[number] is None else (joined[group_of[number]],)))
        cell.gradient, cell.reusable = gradient, {k: tensor(v) for k, v in lasting.items()}
