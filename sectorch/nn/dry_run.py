"""Checks before anything is shared: the dry run of a module on shapes, and the owner's check of precision.

A dry run raises every error that depends on shapes and lists every message. The check of precision finds operations
that lose digits in fixed point.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.ledger import Profile, sole_observer
from ..choreography.program.trace import PLACE, Program, ProgramTracer
from ..config import VANISHED
from ..errors import ArgumentError, PrecisionError, PrecisionWarning, SecretAccessError, SectorchError
from ..mpc.star.dealing_proofs import check_proved
from ..ring import range_limit
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SharedTensor, share_tensor
from ..tensor.dispatch import GIVEN
from ..tensor.shared import mask_beyond_range
from ..tensor.table import row_of
from .bounds import OperationBudget
from .capture import OutsideState, run_eagerly
from .graph import Trace, function_of, is_samplewise, place_of, run
from .graph_cache import FEW, Float64Mode, GraphCache, plain, sample
from .inputs import Inputs, SharedInputSpec, flatten_tree, refuse_results, retain_results
from .remote_program import RemoteGraphs, RemoteProgram
from .weights import Weights


@dataclass
class DryRun:
    """The result of a dry run for one input shape."""

    profile: Profile = field(repr=False)
    tracing: ProgramTracer | None = field(repr=False)
    outputs: Any = field(repr=False)
    budget: OperationBudget | None = field(repr=False, default=None)
    samplewise: bool = False
    """Whether each row of the result depends on its own row of the inputs only."""
    dealer: Party | None = None
    """The party that has to prove its dealing, if there is one."""
    vanished: str = ""
    """The text on a public number that counts as 0; empty if there is none."""

    @cached_property
    def choreography(self) -> Program:
        """The program that was traced.

        Raises:
            ArgumentError: the module runs operation by operation.
        """
        if self.tracing is None:
            raise ArgumentError("there is no one program: the module runs operation by operation")
        program = self.tracing.program(self.outputs)
        if self.dealer is not None:
            check_proved(program, self.dealer)
        return program


def dry_run(
    program: Trace | None,
    inputs: Inputs,
    weights: Weights,
    graphs: GraphCache | RemoteGraphs,
    scheme: Scheme,
    limited: bool,
) -> DryRun:
    """Share, run and reveal on shapes.

    Args:
        program: None for a module that runs operation by operation.
        inputs: of meta tensors.
        weights: those in the session of `graphs`, in which nobody is present.
        limited: whether the program comes from another party and is checked against the bounds of `nn/bounds.py`.

    Raises:
        SectorchError: with layer and line.
    """
    session, zero = graphs.session, ""
    profile, shapes = Profile(), {}
    budget = OperationBudget(len(program.graph.nodes), scheme.few_rounds) if limited and program is not None else None

    def step(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        nonlocal zero
        place, token = PLACE.set(place_of(node)), VANISHED.set(vanished := [])
        try:
            y = compute(*args, **kwargs) if budget is None else budget.step(node, compute, args, kwargs)
        finally:
            PLACE.reset(place)
            VANISHED.reset(token)
        if vanished and not zero:
            zero = f"{place_of(node)}: {counts_as_zero(vanished[0], scheme)}"
        if isinstance(y, torch.Tensor):
            shapes[node] = tuple(y.shape)
        return y

    try:
        with sole_observer(profile), session.call(graphs.party) as net, budget or nullcontext():
            if program is None:
                bound, tracing = graphs.bound(), None
                outside = OutsideState(bound)
                try:
                    outputs = run_eagerly(bound, shared_inputs(inputs, session, scheme, graphs.party))
                finally:
                    outside.put_back()
            else:
                tracing = net.tracing = ProgramTracer(net.call, graphs.setup)
                shared = shared_inputs(inputs, session, scheme, graphs.party)
                outputs = run(program, weights.of(program), shared.tensors, step)
            refuse_results(outputs)
            refuse_weights(outputs, program)
            outputs = reveal_outputs(outputs) if inputs.learned is None else retain_results(outputs, inputs.learned)
    except BaseException:
        if isinstance(graphs, GraphCache):
            graphs.note_refusal(inputs)
        raise
    if budget is not None and program is not None:
        budget.check_weights(profile)
        given = [node for node in program.graph.nodes if node.op == "placeholder"]
        shapes.update(zip(given, inputs.shapes, strict=True))
    apart = program is not None and inputs.rows is not None and is_samplewise(program, shapes if limited else None)
    return DryRun(profile, tracing, outputs, budget, apart, session.dealer if scheme.verified else None, zero)


def counts_as_zero(number: float, scheme: Scheme) -> str:
    """The text on a public number that the number format rounds to zero."""
    return (
        f"{number:g} is below the last place {2.0**-scheme.frac_bits:.2g} of the number format and counts as 0; "
        f"torch.where, clamp, maximum and + keep such a number for a logarithm or quotient behind them"
    )


def refuse_weights(results: Any, program: Trace | None) -> None:
    """Refuse a result that does not depend on the input: a party that learns it learns about the weights.

    Args:
        program: the program that gave the results, where there is one.

    Raises:
        SecretAccessError: naming the result, and layer and line that gave it.
    """
    output = None if program is None else next(n for n in program.graph.nodes if n.op == "output").args[0]
    for at, (path, leaf) in enumerate(pytree.tree_flatten_with_path(results)[0]):
        if isinstance(leaf, PrivateTensor):
            node: Any = output[at] if isinstance(output, (list, tuple)) else output
            place = "" if node is None or "where" not in node.meta else f"{place_of(node)}: "
            error = SecretAccessError(
                f"{place}the result{pytree.keystr(path)} is made of weights alone, and whoever learns it learns of "
                f"them; let the model give only what depends on its input (a module around it: return "
                f"self.model(x)[0]), and keep a number that everybody may know as a Python number"
            )
            error.layer = place.removesuffix(": ")
            raise error


def shared_inputs(inputs: Inputs, session: Session, scheme: Scheme, party: Party | None = None) -> Inputs:
    """A module's inputs in shares; a tensor that is in shares already stays as it is.

    Q has checked that floating-point inputs are below the activation limit.
    """

    def shared(name: str, x: torch.Tensor, held: SharedInputSpec | None) -> torch.Tensor:
        if isinstance(x, SharedTensor):
            return x
        if held is not None:
            return held.traced_input(name, x, session, session.answering_party(party), scheme)
        limit = scheme.activation_limit if scheme.range_check and x.is_floating_point() else None
        return share_tensor(x.detach(), session=session, party=party, scheme=scheme, limit=limit, name=name)

    return inputs.with_tensors([shared(*one) for one in zip(inputs.names, inputs.tensors, inputs.held, strict=True)])


def reveal_outputs(outputs: Any) -> Any:
    """A result with every secret in it opened to Q, and not read yet."""
    leaves, spec = flatten_tree(outputs)
    return pytree.tree_unflatten([y.open() if isinstance(y, SharedTensor) else y for y in leaves], spec)


# The owner's check of precision: whether the model keeps its digits in fixed point, on numbers that the owner draws.
#
# The program runs in float64 on drawn inputs, and on a calibration batch if there is one. Call operands that are not
# secret (weights, values derived from weights, public constants) known operands.
#
# 1. Each operation of a secret and a known operand runs a second time, with the known operand, or its inverse, rounded
#    to fixed point. Operands that keep enough digits are left out.
# 2. Where that changes the result, the fixed-point reference runs the operation on the same numbers. The operation
#    loses precision if its result is off by more than `PART` of its size (both by root mean square), and by more than
#    `FLOOR_BITS` above the last place: then the last place is a large part of the weights, and the inputs multiply it.
# 3. If the error is smaller than that floor, as behind weights that are only added, the rest of the program runs with
#    the errors added, and its result is measured in the same way.
#
# On request the fixed-point reference of the whole program runs as well, which takes several times as long. There an
# operation loses precision by the same measure, unless rounding explains its error: `SLACK` times the change of the
# result when each operation's result is changed at random by a unit of the last place and an equal part of itself.
#
# Values that stand for infinity, as in the mask of an attention, are infinite here and not compared. Any other value
# out of the range ends the check, as it would end a call. A program is checked on one or two rows, and a large one on
# its first operations only: `WORK` elements of results and weights. The check reads the weights, so only the owner
# makes it, and its result stays there.


PART = 2.0**-8
"""Chosen so that a result keeps two decimal digits, and not derived. It reports none of some fifty models of
benchmarks/huggingface_models.py and six networks of torchvision that were tried."""
FLOOR_BITS = 6
"""An operation's own error is below 2^4 last places for results of size 1 (at most 12: docs/ops.md), and its operands
are rounded by half of one. Errors up to four times that are not blamed on weights."""
SLACK = 64.0
"""Chosen as in `nn/graph_cache.py`, and not derived: one random change may move a result less than the worst one."""
KEPT = 2.0**-13
"""The part of an operand, by root mean square, below which its rounding is ignored. For drawn inputs, a sum of products
with independent weights has about the relative error of its weights, and `PART` is 32 times as much."""
WORK, SMALL = 1 << 21, 1 << 17
"""The most elements that are computed, and the most in programs that are checked on large inputs, too."""
LARGEST = 1024.0


@dataclass
class PrecisionLoss:
    """An operation that loses precision, its error, and the size of its result."""

    node: fx.Node
    error: float
    size: float


@dataclass
class _Suspect:
    """An operation that may lose precision, with its operands and its result in float64."""

    node: fx.Node
    args: tuple
    kwargs: dict
    result: Any


class _Stop(Exception):
    """Ends a run of the program: the rest is not needed."""


def find_precision_loss(
    program: Trace,
    bind: Callable[[Session], Weights],
    scheme: Scheme,
    inputs: Inputs,
    whole_reference: bool,
    typical: Inputs | None = None,
) -> str | None:
    """Name an operation of a program that loses digits, and its error.

    Args:
        program: with its weights.
        bind: gives the tensors that the program names in a session.
        inputs: only their form, shapes and dtypes are used.
        whole_reference: whether the fixed-point reference of the whole program runs as well.
        typical: inputs of these shapes with content, which are checked first.

    Returns:
        the text; None where no operation loses digits, or where the check cannot be made.
    """
    if (
        any(0 in shape for shape in inputs.shapes)
        or any(v.is_meta for v in program.values.values())
        or inputs.in_shares
    ):
        return None
    check = _PrecisionCheck(program, bind, scheme, whole_reference)
    lost = typical and check.find(typical.with_tensors([x.cpu() for x in typical.tensors]), all_operands=True)
    if lost:
        return _text(lost, scheme, "on the calibration batch")
    drawn = sample(inputs, torch.device("cpu"))
    scaled = lambda scale: inputs.with_tensors([
        (x * scale).to(dtype) if x.is_floating_point() else x
        for x, dtype in zip(drawn.tensors, inputs.dtypes, strict=True)
    ])  # fmt: skip
    lost = check.find(scaled(1.0))
    if not lost and check.work <= SMALL and 0 < check.largest < scheme.activation_limit / 16:
        scale = min(LARGEST, 2.0 ** math.floor(math.log2(scheme.activation_limit / 2 / check.largest)))
        lost = check.find(scaled(scale))
    return _text(lost, scheme, "on numbers that were drawn") if lost else None


def _text(lost: PrecisionLoss, scheme: Scheme, where: str) -> str:
    return (
        f"{place_of(lost.node)}: with {scheme.frac_bits} fraction bits the result is off by {lost.error:.2g} of "
        f"{lost.size:.2g} {where}"
    )


def way_out(scheme: Scheme) -> str:
    """The way out that follows the text on a loss."""
    return (
        f"Weights or constants there are small beside the last place, 2^-{scheme.frac_bits}: divide the input of that "
        f"layer by a power of two and multiply its weights by it"
    )


def check_served(served: RemoteProgram, name: str, imprecise: bool) -> None:
    """The owner's check of a model before it answers with it, for queries that name no number format.

    Args:
        name: the model's name in errors.
        imprecise: whether a model that loses digits is served, with a warning.

    Raises:
        PrecisionError: the model loses digits. Nothing was offered.

    Warns:
        PrecisionWarning: with `imprecise`.
    """
    scheme = served.scheme(Scheme())
    for number, call in enumerate(served.calls):
        rows = max(call.least, FEW) if call.least else 0
        lost = None
        with suppress(Exception):  # numbers beyond an operation's domain: the check cannot be made
            weights = lambda session: Weights(
                served.bind(session, session.answering[0], scheme), session, session.answering[0], scheme, served.dtype
            )
            lost = find_precision_loss(served.trace(number, rows), weights, scheme, call.of(rows), False)
        if not lost:
            continue
        said = f"the model '{name}' loses digits: {lost}. {way_out(scheme)}"
        if not imprecise:
            raise PrecisionError(
                f"{said}; or answer with it as it is: sectorch answer --imprecise, answer(imprecise=True), or in an "
                f"[[accept]] of a federation imprecise = true"
            )
        warnings.warn(said, PrecisionWarning, stacklevel=2)
        return


class _PrecisionCheck:
    """The check of one program. Its reference session is made when it is first needed."""

    def __init__(self, program: Trace, bind: Callable[[Session], Weights], scheme: Scheme, whole_reference: bool):
        self.program, self.bind, self.scheme, self.whole_reference = program, bind, scheme, whole_reference
        self.unit = 2.0**-scheme.frac_bits
        self.least = self.unit * 2.0**FLOOR_BITS
        self.work, self.largest = 0, 0.0
        """On the last inputs, the number of elements that were computed, and the largest of them."""
        self._result: Any = None
        """The result of the whole program; None where the run ended before."""
        self._secret: set[Any] = set()
        self._session: Session | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._dtype = torch.float32

    def find(self, given: Inputs, all_operands: bool = False) -> PrecisionLoss | None:
        """The first operation that loses precision on these inputs.

        Args:
            all_operands: whether operands that keep many digits are checked, too: rows of real inputs may be alike.
        """
        exact, suspects = self._run_float64(given.wide(), all_operands)
        known = (*given.tensors, *exact.values())
        sizes = [self._values_in_range(x) for x in known if x.is_floating_point()]
        self.largest = max((float(x.abs().max()) for x in sizes if x.numel()), default=0.0)
        errors: dict[fx.Node, Any] = {}
        for suspect in suspects:
            with suppress(SectorchError):  # an operation without a result in fixed point is refused by a call
                ours, theirs = self._run_fixed_point(given, suspect)
                lost = self._loss_of(suspect.node, ours, theirs)
                if lost is None or self._loss_of(suspect.node, theirs, suspect.result) is not None:
                    continue  # or its secret operands have too few digits, as next to a pole: not a fault of weights
                if lost.error > self.least:
                    return lost
                if isinstance(theirs, torch.Tensor):
                    errors[suspect.node] = torch.where(theirs.abs() < self.scheme.activation_limit, ours - theirs, 0.0)
        if errors and self._result is not None:
            lost = self._spoils_result(given, errors)
            if lost is not None:
                return lost
        return self._first_loss(given, exact) if self.whole_reference else None

    def _run_float64(self, given: Inputs, all_operands: bool) -> tuple[dict[fx.Node, torch.Tensor], list[_Suspect]]:
        """The float64 results, until a value leaves the range, and the operations that may lose precision."""
        found: dict[fx.Node, torch.Tensor] = {}
        secret = self._secret = {node for node in self.program.graph.nodes if node.op == "placeholder"}
        infinite: set[Any] = set()
        suspects: list[_Suspect] = []
        self.work = 0
        # An operation may write into what it reads.
        copied = lambda given: pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given)

        def remember(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
            if not any(n in secret for n in node.all_input_nodes):
                return compute(*args, **kwargs)
            secret.add(node)
            public, before, moved = [], None, None
            with torch._C.DisableTorchFunction():
                if compute is node.target:  # its operands are those of the node
                    _map_operands(lambda n, x: public.extend([] if self._is_secret(n) else [x]), node, args, kwargs)
                within = any(n in infinite for n in node.all_input_nodes)
                if within or any(mask_beyond_range(self.scheme, x) is not None for x in public):
                    infinite.add(node)
                if any(self._may_lose(x, all_operands) for x in public):
                    before = copied((args, kwargs))
                    moved = _map_operands(
                        lambda n, x: copied(x) if self._is_secret(n) else self._rounded(x), node, *before
                    )
            y = compute(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                results = [v for v in pytree.tree_leaves(y) if isinstance(v, torch.Tensor)]
                self.work += sum(v.numel() for v in (*results, *public) if isinstance(v, torch.Tensor))
                if not all(self._in_range(v, node in infinite) for v in results if v.is_floating_point()):
                    raise _Stop
                if isinstance(y, torch.Tensor) and y.is_floating_point():
                    found[node] = y.double()
            if before and moved and self._loss_of(node, compute(*moved[0], **moved[1]), y) is not None:
                suspects.append(_Suspect(node, before[0], before[1], y))
            if self.work > WORK:
                raise _Stop
            return y

        self._result = None
        with suppress(_Stop):
            self._result = plain(self.program, given, step=remember)
        return found, suspects

    def _in_range(self, y: torch.Tensor, infinite: bool) -> bool:
        inside = y.abs() < self.scheme.activation_limit
        if infinite:
            inside |= y.isnan() | (y.abs() >= range_limit(self.scheme.frac_bits))
        return bool(inside.all())

    def _values_in_range(self, y: torch.Tensor) -> torch.Tensor:
        """The values in range, without those that stand for infinity."""
        return y[y.abs() < self.scheme.activation_limit]

    def _may_lose(self, x: Any, all_operands: bool) -> bool:
        """Whether a known operand may lose digits: it, or its inverse, is small beside the last place."""
        if isinstance(x, float):
            return math.isfinite(x) and abs(self._rounded(x) - x) > KEPT * abs(x)
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
            return False
        if all_operands:
            return True
        size, largest = _size(x), float(x.abs().max())
        return math.isfinite(largest) and self.unit * (size / 3.5 + largest * size * size / 2) > KEPT * size * size

    def _rounded(self, x: Any) -> Any:
        """A known operand, changed by the rounding of it and of its inverse."""
        if isinstance(x, float):
            return float(self._rounded(torch.tensor(x, dtype=torch.float64))) if math.isfinite(x) else x
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        moved = (x / self.unit).round() * self.unit + (x.square() * self.unit / 2).minimum(x.abs() / 2)
        return torch.where(x.isfinite(), moved, x)

    def _loss_of(self, node: fx.Node, y: Any, exact: Any) -> PrecisionLoss | None:
        """The loss of a result that is off by more than `PART`, by root mean square over the values in range."""
        ours, theirs = _floats(y), _floats(exact)
        if len(ours) != len(theirs):
            return None
        errors, sizes = [], []
        for a, b in zip(ours, theirs, strict=True):
            if a.shape == b.shape:
                inside = b.abs() < self.scheme.activation_limit
                errors.append((a - b)[inside].nan_to_num(nan=math.inf))
                sizes.append(b[inside])
        if not errors:
            return None
        error, size = _size(torch.cat(errors)), _size(torch.cat(sizes))
        return PrecisionLoss(node, error, size) if error > PART * size else None

    def _spoils_result(self, given: Inputs, errors: dict[fx.Node, torch.Tensor]) -> PrecisionLoss | None:
        """The first of these operations, if their errors together spoil the result of the program."""

        def step(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
            y = compute(*args, **kwargs)
            return y + errors[node] if node in errors else y

        lost = self._loss_of(next(iter(errors)), plain(self.program, given.wide(), step=step), self._result)
        return lost if lost is not None and lost.error > self.least else None

    def _run_fixed_point(self, given: Inputs, suspect: _Suspect) -> tuple[Any, Any]:
        """The operation's result by the fixed-point reference, and in float64 on rounded secret operands."""
        node, session = suspect.node, self._reference_session()
        party, made = session.answering[0], dict[fx.Node, Any]()
        read = suspect.args, suspect.kwargs
        known: dict[fx.Node, Any] = {}
        _map_operands(
            lambda n, x: known.update({n: x} if self._is_secret(n) and not self._is_given(n) else {}), node, *read
        )
        near = lambda x: (x / self.unit).round() * self.unit if x.is_floating_point() else x

        def shared(x: Any, n: fx.Node) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            value = share_tensor(near(x.detach()), session=session, party=party, scheme=self.scheme)
            passes = n.meta.get("dtype") or self._dtype  # what it is in the program, where numbers are float64 here
            return value.like(value.shares, bound=value.bound, dtype=passes if x.is_floating_point() else x.dtype)

        def compute(n: fx.Node) -> Any:
            target: Any = n.target
            return target(*map_arg(n.args, made.__getitem__), **map_arg(n.kwargs, made.__getitem__))

        with session.call(party), torch.no_grad():
            places = [n for n in self.program.graph.nodes if n.op == "placeholder"]
            made.update(zip(places, shared_inputs(given, session, self.scheme, party).tensors, strict=True))
            for n in self._operands_of(node, {*made, *known}):
                if n.op == "get_attr":
                    made[n] = self._weights[str(n.target)]
                elif n in known:
                    made[n] = pytree.tree_map(lambda x, n=n: shared(x, n), known[n])
                else:  # made of weights, or of the inputs
                    made[n] = compute(n)
            y = [_decoded(v) for v in pytree.tree_leaves(compute(node)) if isinstance(v, SharedTensor)]
        rounded = lambda v: near(v) if isinstance(v, torch.Tensor) else v
        args, kwargs = _map_operands(lambda n, x: pytree.tree_map(rounded, x) if self._is_secret(n) else x, node, *read)
        target: Any = node.target
        with Float64Mode(), torch.no_grad():
            return (y[0] if len(y) == 1 else y), target(*args, **kwargs)

    def _operands_of(self, node: fx.Node, known: set[fx.Node]) -> list[fx.Node]:
        """What a node reads, and what that reads, up to known nodes, in the order of the graph."""
        found, missing = set[fx.Node](), [*node.all_input_nodes]
        while missing:
            n = missing.pop()
            if n not in found:
                found.add(n)
                missing += [] if n in known else n.all_input_nodes
        return [n for n in self.program.graph.nodes if n in found and n.op != "placeholder"]

    def _is_secret(self, n: Any) -> bool:
        return isinstance(n, fx.Node) and n in self._secret

    def _is_given(self, n: fx.Node) -> bool:
        """Whether it is an input, or a view or sum of inputs, which products take with more bits."""
        row = None if n.op == "placeholder" else row_of(function_of(n.target))
        if row is not None and (row.view or row.name in GIVEN):
            return all(self._is_given(m) for m in n.all_input_nodes if m in self._secret)
        return n.op == "placeholder"

    def _reference_session(self) -> Session:
        if self._session is None:
            self._session = Session(reference=True)
            self._weights = self.bind(self._session).of(self.program)
            floats = [w.dtype for w in self._weights.values() if w.dtype.is_floating_point]
            self._dtype = floats[0] if floats else torch.float32
        return self._session

    def _first_loss(self, given: Inputs, exact: dict[fx.Node, torch.Tensor]) -> PrecisionLoss | None:
        """The first operation of the whole fixed-point reference whose error rounding alone does not explain."""
        last = next(reversed(exact), None)
        if last is None:
            return None
        session = self._reference_session()
        party = session.answering[0]
        found: list[PrecisionLoss] = []

        def compare(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
            y = compute(*args, **kwargs)
            if node in exact and isinstance(y, SharedTensor):
                lost = self._loss_of(node, _decoded(y), exact[node])
                found.extend([lost] if lost is not None and lost.error > self.least else [])
            if node is last or found:
                raise _Stop
            return y

        with suppress(_Stop), session.call(party), torch.no_grad():
            shared = shared_inputs(given, session, self.scheme, party)
            run(self.program, self._weights, shared.tensors, step=compare)
        if not found:
            return None
        node = found[0].node
        return None if found[0].error <= SLACK * self._rounding_effect(given.wide(), node, exact[node]) else found[0]

    def _rounding_effect(self, given: Inputs, last: fx.Node, exact: torch.Tensor) -> float:
        """How far rounding of all results moves the result of the last operation."""
        draw, found = torch.Generator().manual_seed(2), math.inf

        def move(y: torch.Tensor) -> torch.Tensor:
            random = torch.rand(y.shape, generator=draw, dtype=torch.float64)
            return y + self.unit * (1 + y.abs()) * (2 * random - 1)

        def step(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
            nonlocal found
            y = compute(*args, **kwargs)
            y = move(y.double()) if isinstance(y, torch.Tensor) and y.is_floating_point() else y
            if node is last:
                found = _size((y - exact)[exact.abs() < self.scheme.activation_limit])
                raise _Stop
            return y

        moved = given.with_tensors([move(x) if x.is_floating_point() else x for x in given.tensors])
        with suppress(_Stop):
            plain(self.program, moved, step=step)
        return found


def _map_operands(f: Callable[[Any, Any], Any], node: fx.Node, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a node, each replaced by f(the graph's argument, its value)."""
    return tuple(_map(f, n, x) for n, x in zip(node.args, args, strict=True)), _map(f, node.kwargs, kwargs)


# A module's function, since an inner one that calls itself is a cycle, which holds what f holds until it is collected.
def _map(f: Callable[[Any, Any], Any], n: Any, x: Any) -> Any:
    if isinstance(n, (list, tuple)):
        return (tuple if isinstance(n, tuple) else list)(_map(f, a, b) for a, b in zip(n, x, strict=True))
    if isinstance(n, dict):
        return {key: _map(f, a, x[key]) for key, a in n.items()}
    return f(n, x)


def _floats(x: Any) -> list[torch.Tensor]:
    return [v.double() for v in pytree.tree_leaves(x) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def _decoded(y: SharedTensor) -> torch.Tensor:
    shares: Any = y.shares
    return shares.to(torch.float64) * 2.0**-y.scale_bits


def _size(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
