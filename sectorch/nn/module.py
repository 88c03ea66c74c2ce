"""`sectorch.secure(model)` and its kin: `reference` without parties, `program` as a value, and calibration."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.ledger import Profile, sole_observer
from ..choreography.program.projection import Material
from ..choreography.program.trace import Program, garbage_collection_paused
from ..config import LEAST_FRAC_BITS, NEEDS, WeightNeed, reason_of, scheme_fields, scheme_of
from ..deprecation import renamed_attribute
from ..errors import (
    ArgumentError,
    DtypeError,
    FixedPointRangeError,
    LeakyProtocolWarning,
    PrecisionError,
    PrecisionWarning,
    SectorchError,
    TrainingModeError,
)
from ..fitted_models import convert
from ..ring import HEADROOM_BITS
from ..session import Session, default_session
from ..tensor import PrivateTensor, Scheme, SharedTensor, unwrap_openings
from ..tensor.compile_mode import InferenceModule
from .capture import adapt_model, run_eagerly, zeros_at_padded_places
from .dry_run import DryRun, dry_run, find_precision_loss, reveal_outputs, shared_inputs, way_out
from .graph import Trace, function_of, located_errors, op_name, place_of, range_advice, run, same_program
from .graph_cache import FEW, GraphCache, plain, remember
from .inputs import Inputs, as_shared, reveal_tree
from .remote_program import RemoteGraphs, RemoteProgram
from .weights import (
    ModelTensor,
    Weights,
    bind,
    check_input,
    check_model,
    copy_model,
    device_of,
    dtype_of,
    refuse_meta_device,
    refuse_unused,
)

if TYPE_CHECKING:
    from ..ckks import CKKSModule, Keys


# SecureModule: a module whose weights are an answering party's secret, and whose inputs are Q's.
#
# A call checks its inputs, runs the program of their shapes on shapes once (`nn/dry_run.py`), and then runs it in the
# session, in pieces of bounded memory and with prepared material if there is any.


def describe_inputs(inputs: Inputs) -> tuple:
    """The shape of a single tensor, and else name and shape of each, for people."""
    return inputs.shapes[0] if inputs.single else tuple(zip(inputs.names, inputs.shapes, strict=True))


def shares_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two plain tensors lie in overlapping memory, as far as their first and last entries tell."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for x in tensors:
        if type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided and x.numel() and not x.is_meta:
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
            start = int(x.storage_offset()) * x.itemsize
            spans.setdefault(x.untyped_storage().data_ptr(), []).append((start, start + last * x.itemsize))
    return any(a[0] < b[1] and b[0] < a[1] for span in spans.values() for a, b in itertools.combinations(span, 2))


class MaterialCache:
    """Prepared material of later calls, by the inputs that it serves. Each piece is handed out once, to one thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[Any, tuple[Inputs, list[Material]]] = {}

    def keep(self, inputs: Inputs, material: Material) -> None:
        """Keep material for one call with inputs of this form, shape and dtype."""
        with self._lock:
            self._held.setdefault(inputs.key, (inputs.meta(), []))[1].append(material)

    def take(self, inputs: Inputs) -> Material | None:
        """Remove and return material for such inputs; None where there is none."""
        with self._lock:
            made = self._held.get(inputs.key, (inputs, []))[1]
            return made.pop() if made else None

    def all(self) -> list[tuple[Inputs, Material]]:
        """All material, with the inputs that it serves."""
        with self._lock:
            return [(inputs, one) for inputs, made in self._held.values() for one in made]

    def counts(self) -> dict[tuple, int]:
        """How many calls can be served, by the shape of a single tensor, and else by name and shape of each."""
        return dict(Counter(describe_inputs(inputs) for inputs, _ in self.all()))

    def clear(self) -> None:
        """Drop all material unused."""
        with self._lock:
            self._held.clear()


def check_preparable(inputs: Inputs, alone: str | None, verified: bool) -> None:
    """Raise ArgumentError where such a call cannot be prepared.

    Args:
        alone: why the module runs operation by operation, if it does.
        verified: whether dealing is proved. Results of tensors that were shared before are then revealed in a call of
            their own, under the flags of those tensors, which the program does not know.
    """
    if alone is not None:
        raise ArgumentError(f"nothing can be prepared: the module runs operation by operation, since {alone}")
    if verified and inputs.learned and any(held is not None for held in inputs.held):
        raise ArgumentError(
            "nothing can be prepared: with verified=True what is learned of tensors in shares is shown in a call of "
            "its own; ask without preparing it, or leave all results in shares"
        )


def material_inputs(
    asked: list[Inputs],
    size: int | torch.Tensor | Inputs,
    sample_shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    usual: torch.dtype,
) -> Inputs:
    """The inputs, without content, that `preprocess` prepares for.

    Args:
        asked: the inputs of earlier calls, the latest first.
        size, sample_shape, dtype: as `SecureModule.preprocess` takes them.
        usual: the dtype where none is named, and none is known.
    """
    if isinstance(size, (bool, float, str)) or (
        isinstance(size, (list, tuple)) and all(isinstance(n, int) for n in size)
    ):
        raise ArgumentError(
            f"preprocess takes a number of rows, or inputs like the later ones, got {size!r}: preprocess(x) for "
            f"a tensor x, or preprocess(rows, sample_shape=x.shape[1:])"
        )
    if not isinstance(size, int):
        return Inputs.of(size).meta()
    if size < 1:
        raise ArgumentError(f"preprocess needs a batch of at least one row, got {size}")
    asked = [x for x in asked if not x.in_shares]
    if sample_shape is not None:
        asked = [x for x in asked if x.single and x.shapes[0][1:] == tuple(sample_shape)]
        dtype = dtype or (asked[0].dtypes[0] if asked else usual)
        return Inputs(torch.empty((size, *sample_shape), dtype=dtype, device="meta"))
    if not asked:
        raise ArgumentError("name sample_shape (the shape of one row): the module has not been called yet")
    if asked[0].rows is None:
        raise ArgumentError(f"the last call, {asked[0]!r}, has no rows in common: pass Inputs(...) like the later ones")
    made = asked[0].meta(size)
    return made if dtype is None else made.with_tensors([x.to(dtype) for x in made.tensors])


ROWS = 64
"""Rows of the dry run from which the size of a batch's pieces follows: a word of packed bits holds that many."""

CHUNK_BYTES = 24 << 20
"""A batch is split so that its largest message stays below this: the piece bounds the memory, and not the batch."""


def _without_frames(error: FixedPointRangeError) -> FixedPointRangeError:
    """The error and its causes without the frames that they came through, which hold the weights that were encoded so
    far: the next attempt needs the room."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _with_way_out(error: FixedPointRangeError, way_out: str) -> FixedPointRangeError:
    """The same error with another way out."""
    named = FixedPointRangeError(f"{str(error).rpartition('; ')[0]}; {way_out}")
    named.place, named.layer = error.place, error.layer
    return named


class SecureModule(InferenceModule):
    """A module whose weights belong to an answering party and whose inputs belong to Q.

    It is called as the plain module is: with tensors, and dicts, lists, tuples and dataclasses of them, by place or by
    name. Every tensor is Q's secret, unless it is marked by `sectorch.public`; numbers, strings and None are public.
    The result comes in the model's own containers, every tensor in it revealed to Q alone. Called with a SharedTensor
    among the arguments, it gives SharedTensors. A batch is split into pieces of bounded memory where the graph shows
    that each row of the result depends on its own row of the inputs only.

    Args:
        model: a module, or another party's as its description gives it: then its dry run is held to the bounds of
            `nn/bounds.py`.
        dtype: of the user's model, where this one is a copy of it in float64 already; `given`: the user's
            tensors, by id of the copy's.
        strict: whether a model that loses digits is refused; typical: inputs with which the owner looks for it, too.
        chooses: whether it may take a format of fewer fraction bits; where the scheme names none, unless named.
        like: a module of another session, of the same description and scheme, whose dry runs this one shares.

    Raises on a call:
        DtypeError, NonFiniteError, FixedPointRangeError, ShapeError: a bad input; nothing was shared.
        What the forward itself raises for its arguments (TypeError, ValueError, ...): nothing was shared.
        UnsupportedOpError: naming the operation, the layer and line, and the nearest supported one.
    """

    plain: nn.Module
    graphs: GraphCache | RemoteGraphs
    _served: RemoteProgram | None
    _bound: nn.Module
    _weights: Weights
    _dry_weights: Weights
    session: Session
    party: Party
    scheme: Scheme

    def __init__(
        self, model: nn.Module | RemoteProgram, session: Session, party: Party, scheme: Scheme, chunk: int | None,
        dtype: torch.dtype | None = None, like: SecureModule | None = None,
        given: dict[int, ModelTensor] | None = None,
        chooses: bool | None = None,
        strict: bool = False,
        typical: Inputs | None = None,
    ):  # fmt: skip
        super().__init__()
        party = session.answering_party(party)
        named, scheme = scheme, replace(scheme, audited=1, accountable=False)
        self.session, self.party, self.scheme = session, party, scheme
        # The scheme with its number of audits and whether S signs, which tensors do not know.
        self.full_scheme = scheme if session.reference else named
        self._chooses = scheme.chooses if chooses is None else chooses
        self.format_reason = ""
        """Why the number format is not the default one, where the scheme names none."""
        self._lock = threading.Lock()  # over the dicts below: several threads may call the module
        self.__dict__["_served"] = model if isinstance(model, RemoteProgram) else None
        if isinstance(model, RemoteProgram):
            self.dtype, plain = model.dtype, nn.Module()
            graphs = like.graphs if like is not None else RemoteGraphs(model, session.on_shapes(), party)
        else:
            check_model(model, session.device if session.present(party) else torch.device("meta"))
            self.dtype = dtype or dtype_of(model)
            plain, self._given = (model, given or {}) if dtype else copy_model(model)
            adapt_model(plain)
            zeros_at_padded_places(plain)
            graphs = GraphCache(plain, scheme, self.dtype, session.on_shapes(), party, self._given, model)
        # Modules with weights stay out of nn.Module's registry, which would list, train and save them.
        self.__dict__["plain"] = plain
        self.__dict__["graphs"] = graphs
        self._chunk, self.strict = chunk, strict
        self._typical = typical.cycled(FEW) if typical is not None and typical.rows else typical
        bound, self.__dict__["_weights"] = self.bind(session, party)
        self.__dict__["_bound"] = bound
        self._checked: dict[Any, DryRun] = {}
        self._precision_lock = threading.RLock()
        self._precision_checked: set[Any] = set()
        """The shapes of row whose programs the owner has checked for precision."""
        self._samplewise: dict[Any, Trace] = {}
        """By shape of row, the program of a batch that passed its dry run and whose rows are independent."""
        self.largest: dict[tuple[str, str], int] = {}
        """Bytes of the largest message in all dry runs, by the roles of its sender and receiver."""
        if like is None:
            self.__dict__["_dry_weights"] = self.bind(self.graphs.session, party)[1]
        else:  # dry runs hold no secret of either module
            shared = (
                "_dry_weights", "_checked", "_precision_checked", "_precision_lock", "_samplewise", "largest", "_lock"
            )  # fmt: skip
            self.__dict__.update({name: like.__dict__[name] for name in shared})
        self.material_cache = MaterialCache()
        self._forms: dict[Any, tuple[Inputs, list[str]]] = {}
        """By the values of the forward's parameters, the form of the first such call."""
        self._past_inputs: dict[Any, Inputs] = {}
        """The inputs of earlier calls, without content, by shape of row; the latest last."""
        super().train(False)

    def with_module(self, module: nn.Module) -> SecureModule:
        """Another module made of this one's plain model, of the same session, answering party and scheme."""
        return SecureModule(
            module,
            self.session,
            self.party,
            self.full_scheme,
            self._chunk,
            dtype=self.dtype,
            given=self._given,
            strict=self.strict,
        )

    def extra_repr(self) -> str:
        alone = self.graphs.eager_reason
        how = "" if alone is None else f"operation by operation, since {alone}; "
        return f"{how}model at {self.party}, {self.full_scheme}"

    def bind(self, session: Session, party: Party) -> tuple[nn.Module, Weights]:
        """The module with its weights private to a party of a session, and the tensors that its programs name."""
        if self._served is not None:
            bound, own = self.plain, self._served.bind(session, party, self.scheme)
        else:
            bound, own = bind(self.plain, session, party, self.scheme, self.dtype, self._given)
        return bound, Weights(own, session, party, self.scheme, self.dtype)

    def inputs_of(self, x: Any) -> Inputs:
        """A call of this module: tensors that are given by place have the names of the forward's parameters.

        A served program has the names that its description brings.
        """
        inputs = Inputs.of(x)
        return inputs if self._served is not None else inputs.named_by(self.plain.forward)

    def program(self, x: torch.Tensor | Inputs) -> Trace | None:
        """The program for inputs of this form, shape and dtype; None where the module runs operation by operation."""
        return self.graphs.of(self.inputs_of(x).meta().as_plain_call())

    def recording(self, x: torch.Tensor | Inputs) -> Trace | None:
        """The program as it was recorded, before the graph passes."""
        return self.graphs.recording(self.inputs_of(x).meta().as_plain_call())

    over = renamed_attribute("over", "with_module")
    recorded = renamed_attribute("recorded", "recording")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.inputs_of(Inputs.called_with(args, kwargs))
        while True:
            try:
                return self._call_plain(inputs)
            except FixedPointRangeError as error:
                if not error.needs or self._served is not None:
                    raise
                self._choose(inputs, _without_frames(error))

    def choose_format(self, x: torch.Tensor | Inputs) -> None:
        """Choose a number format that holds the weights of the program for such inputs, where the scheme names none.

        A call chooses one as well. Nothing is shared; all parties have to be in this process.

        Raises:
            FixedPointRangeError: no format holds them.
        """
        inputs = self.inputs_of(x).meta()
        while self._chooses and self._all_parties_here and self.program(inputs) is not None:
            try:
                return self.check_weights(inputs)
            except FixedPointRangeError as error:
                if not error.needs or self._served is not None:
                    raise
                self._choose(inputs, _without_frames(error))

    @property
    def _all_parties_here(self) -> bool:
        """Whether all parties are in this process, so that the check of the weights at their owner reaches all."""
        return self._served is None and self.session.complete

    def _choose(self, inputs: Inputs, error: FixedPointRangeError) -> None:
        """After weights did not fit: choose a number format that holds them, or raise an error that names one.

        The module is made again with the format. All parties learn it, and with it a power of two that bounds the sums
        of the weights.
        """
        needs = [*error.needs, *self.needs(inputs)]
        made = self.full_scheme.chosen(needs)
        if made is not None and self._chooses and self._all_parties_here and not inputs.in_shares:
            # The module is made again in place, since the caller holds this object.
            args = self.plain, self.session, self.party, made, self._chunk
            named = {"given": self._given, "chooses": True, "strict": self.strict, "typical": self._typical}
            SecureModule.__init__(self, *args, dtype=self.dtype, **named)
            self.format_reason = reason_of(needs)
            return
        raise _with_way_out(error, self.full_scheme.way_out(needs)) from None

    def needs(self, inputs: Inputs) -> list[WeightNeed]:
        """The number formats that the weights of the program need; empty where there is no program."""
        token = NEEDS.set(found := [])
        try:
            with sole_observer(Profile()):  # nothing of it is a message of this module's session
                inputs = inputs.meta()
                self.session.repeat_check(self.choreography(inputs), self._program_inputs(inputs))
        except SectorchError:
            pass  # the call itself raises an error that says more
        finally:
            NEEDS.reset(token)
        return found

    def _call_plain(self, inputs: Inputs) -> Any:
        inputs = self._check_inputs(inputs)
        if inputs.in_shares:
            return self._call_retaining(inputs)
        # All pieces run before a result is looked at, so that other parties do not learn that one left its range.
        found = [self._predict(piece) for piece in self.pieces(inputs)]
        with range_advice(self.program(inputs)):
            outputs = [unwrap_openings(one) for one in found]
        if len(outputs) == 1:
            return outputs[0]
        return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)

    def preprocess(
        self,
        batch_size: int | torch.Tensor | Inputs,
        sample_shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Run everything that does not depend on the query, for one later call with a batch of this size.

        Args:
            batch_size: rows of the later input; or inputs like the later ones (`Inputs(input_ids=ids)`), of which only
                form, shapes and dtypes are used.
            sample_shape: the shape of one row; that of the last call unless named.
            dtype: of the later input (torch.int64 for token ids); that of the last call with rows of this shape unless
                named, and else the model's own.

        Returns:
            bytes of memory that the material takes until it is used.

        Raises:
            ArgumentError: no shape is known, the module runs operation by operation, or dealing is proved and the call
                shows something of tensors that were shared before.
        """
        with self._lock:
            asked = list(reversed(self._past_inputs.values()))
        inputs = self._in_first_form(
            self.inputs_of(material_inputs(asked, batch_size, sample_shape, dtype, self.dtype))
        )
        self.choose_format(inputs)
        self._check_once(inputs)
        check_preparable(inputs, self.graphs.eager_reason, self.full_scheme.verified)
        held = 0
        for piece in self.pieces(inputs):
            material = self.session.prepare(
                self.choreography(piece), self._program_inputs(piece), self.full_scheme.audited,
                self.full_scheme.accountable,
            )  # fmt: skip
            held += material.bytes
            self.material_cache.keep(piece, material)
        return held

    def _in_first_form(self, inputs: Inputs) -> Inputs:
        """The inputs in the form of the first call with the same values of the parameters, by place or by name.

        One program and one stock of material then serve both, but where a hook of the module sees which it is.
        """
        hooked = self.plain._forward_pre_hooks or self.plain._forward_hooks
        found = None if self._served is not None or hooked else inputs.arguments(self.plain.forward)
        if found is None:
            return inputs
        arguments, names = found
        with self._lock:
            known, others = self._forms.setdefault(arguments, (inputs.meta(), names))
            remember(self._forms, arguments, (known, others))
        return inputs.as_in(known, names, others)

    def prepared(self) -> dict[tuple, int]:
        """How many calls are served by material at hand: by a single tensor's shape, else by (name, shape) of each."""
        return self.material_cache.counts()

    def discard(self) -> None:
        """Drop all prepared material unused."""
        self.material_cache.clear()

    def choreography(self, x: torch.Tensor | Inputs) -> Program:
        """What all parties do for inputs of this form, shape and dtype: a value to read, compare and sign.

        Raises:
            ArgumentError: the module runs operation by operation, and may do something else in each call; or a
                handler's function is not the same in every call.
        """
        return self._check(self.inputs_of(x).meta()).choreography

    def check_weights(self, x: torch.Tensor | Inputs) -> None:
        """The owner's checks of its weights for inputs of this shape, before anything of a call is sent.

        Raises:
            FixedPointRangeError: at the owner, naming the weight.
        """
        inputs = self.inputs_of(x)
        with located_errors():
            self.session.check(self.choreography(inputs), self._program_inputs(inputs))

    def _program_inputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """The inputs and weights of the parties that are here, by their names in the program."""
        program = self.program(inputs)
        weights = {} if program is None else self._weights.of(program)
        own: dict[str, torch.Tensor] = {}
        for name, x in zip(inputs.names, inputs.tensors, strict=True):
            own |= x.backend.named_shares(name, x.shares) if isinstance(x, SharedTensor) else {name: x}
        return own | {w.label: w.value._value for w in weights.values() if isinstance(w, PrivateTensor)}

    def _choreography(self, inputs: Inputs) -> Program | None:
        try:
            return None if self.session.reference else self.choreography(inputs)
        except ArgumentError:
            return None

    def _predict(self, inputs: Inputs) -> Any:
        program = self._choreography(inputs)
        if program is None:
            self.full_scheme.check_trusting()
            with self.session.call(self.party):
                return reveal_outputs(self._run(self._shared(inputs)))
        with located_errors():
            return self.session.run(
                program, self._program_inputs(inputs), self.material_cache.take(inputs), self.full_scheme.audited,
                self.full_scheme.accountable,
            )  # fmt: skip

    def share(self, x: torch.Tensor | Inputs) -> Inputs:
        """The module's inputs in shares."""
        self.full_scheme.check_trusting()
        return self._shared(self.inputs_of(x)).describing_shares()

    def _shared(self, inputs: Inputs) -> Inputs:
        return shared_inputs(inputs, self.session, self.scheme, self.party)

    def _run(self, shared: Inputs) -> Any:
        program = self.program(shared)
        if program is None:
            return run_eagerly(self._bound, shared)
        return run(program, self._weights.of(program), shared.tensors)

    def in_shares(self, *args: Any, **kwargs: Any) -> Any:
        """A call whose results stay SharedTensors: nobody learns them, and later calls take them as arguments.

        It is what a call with a SharedTensor among the arguments does. A result of many fraction bits is rounded to
        the scheme's, as `reveal` does, and held to the activation limit.
        """
        inputs = self.inputs_of(Inputs.called_with(args, kwargs))
        return self(inputs if inputs.in_shares else inputs.retaining_results())

    def _call_retaining(self, inputs: Inputs) -> Any:
        self.full_scheme.check_trusting()
        program, learned = self._choreography(inputs), inputs.learned or 0
        given = [x for x in inputs.tensors if isinstance(x, SharedTensor)]
        # With verified dealing Q's word that earlier flags are clear does not count: a call of its own reveals.
        if learned and self.full_scheme.verified and any(x.flags for x in given):
            return unwrap_openings(reveal_tree(self(inputs.retaining_results()), learned))
        for x in given if learned else ():  # a revealed result depends on the ranges of earlier calls, too
            x.check_range()
        if program is None:
            with self.session.call(self.party):
                return unwrap_openings(reveal_tree(self._run(self._shared(inputs)), learned))
        with located_errors():
            found = self.session.run(
                program, self._program_inputs(inputs), self.material_cache.take(inputs), self.full_scheme.audited
            )
        with range_advice(self.program(inputs)):
            return unwrap_openings(as_shared(found, given, self.session, self.party, self.scheme))

    def _check_inputs(self, inputs: Inputs) -> Inputs:
        """The inputs as plain tensors and SharedTensors, each checked by the party that holds it."""
        refuse_meta_device()
        names = ["the input" if inputs.single else f"the input '{name}'" for name in inputs.names]
        checked = [
            check_input(x, self.session, self.party, self.scheme, what)
            for x, what in zip(inputs.tensors, names, strict=True)
        ]
        here = self.session.device
        elsewhere = {str(x.device) for x in inputs.public if x.device != here}
        if elsewhere:
            raise ArgumentError(f"a public argument is on {elsewhere.pop()}, the secure module on {here}")
        shared = shares_memory(inputs.tensors)
        inputs = self._in_first_form(inputs.with_tensors(checked))
        program = self.program(inputs.meta()) if shared else None
        if program is not None and program.writes_inputs:
            raise ArgumentError(
                "two inputs share memory, and the forward writes into one of them, which would change the other in "
                "plain: give x.clone() for one"
            )
        self._check_once(inputs)
        return inputs

    def _check_once(self, inputs: Inputs) -> None:
        """`_check`, unless rows are independent and another batch of the same program passed it already."""
        inputs = inputs.meta()
        program, row = self.program(inputs), inputs.row
        with self._lock:
            self._past_inputs.pop(row, None)
            remember(self._past_inputs, row, inputs)
        known = self._samplewise.get(row) if inputs.rows and program is not None else None
        if known is not None and program is not None and (known is program or same_program(known, program)):
            return
        if self._check(inputs).samplewise and inputs.rows and program is not None:
            with self._lock:
                remember(self._samplewise, row, program)

    def _check(self, x: torch.Tensor | Inputs) -> DryRun:
        """Run on shapes. Every error that depends on shapes is raised here, before anything is shared."""
        inputs = self.inputs_of(x)
        key = inputs.key
        with self._lock:
            if key in self._checked:
                self._checked[key] = checked = self._checked.pop(key)  # the latest is the last
                return checked
        program = self.program(inputs)
        with garbage_collection_paused():
            limited = self._served is not None
            checked = dry_run(program, inputs.meta(), self._dry_weights, self.graphs, self.scheme, limited)
        looks = (program is not None or self.strict) and NEEDS.get() is None  # which has no weights encoded
        if looks and self.session.present(self.party) and not self.session.reference:
            with garbage_collection_paused():
                self._check_precision(inputs, checked.vanished)
        with self._lock:
            remember(self._checked, key, checked)
            for line in checked.profile.ledger:
                edge = (line.src.role, line.dst.role)
                self.largest[edge] = max(self.largest.get(edge, 0), line.bytes)
        return checked

    def _check_precision(self, inputs: Inputs, vanished: str = "") -> None:
        """The owner's check of what its weights lose in fixed point, once a program; see `nn/dry_run.py`.

        Args:
            vanished: the text on a public number that counts as 0.

        Raises:
            PrecisionError: with `strict`, for a loss, or where the check cannot be made.

        Warns:
            PrecisionWarning: without `strict`, for a loss.
        """
        with self._precision_lock:  # a thread that comes meanwhile waits for what is found
            if inputs.row in self._precision_checked:
                return
            said = self._precision_loss(inputs) or vanished
            if said and self.strict:
                raise PrecisionError(said)  # and the next call is refused as well
            self._precision_checked.add(inputs.row)
        if said:
            warnings.warn(f"{said}; secure(model, strict=True) refuses such a model", PrecisionWarning, stacklevel=2)

    def _precision_loss(self, inputs: Inputs) -> str:
        """What the check of `_check_precision` found, and a way out; empty for no loss."""
        try:
            few = self._few(inputs)
            program = self.program(few)
            if program is None and self.strict:
                raise ArgumentError("the module runs operation by operation")
            weights = lambda session: self.bind(session, session.answering[0])[1]
            lost = program and find_precision_loss(
                program, weights, self.scheme, few, self.strict, self._typical_of(few)
            )
        except Exception as error:  # the module takes no such batch, or an operation no such numbers
            if not self.strict:
                return ""
            why = str(error) if isinstance(error, SectorchError) else type(error).__name__
            raise PrecisionError(
                f"the precision of the module could not be looked at on numbers that were drawn ({why}); leave out "
                f"strict=True, and compare sectorch.reference(model)(x) with model(x)"
            ) from None
        return f"{lost}. {way_out(self.scheme)}" if lost else ""

    def _few(self, inputs: Inputs) -> Inputs:
        """The same call with `FEW` rows, where the module takes so few."""
        if inputs.rows is not None and inputs.rows > FEW:
            with suppress(Exception):
                few = inputs.meta(FEW)
                self.program(few)
                return few
        return inputs.meta()

    def _typical_of(self, few: Inputs) -> Inputs | None:
        """The calibration batch, with as many rows, where it is a call of this form."""
        if self._typical is None:
            return None
        typical = self._in_first_form(self._typical)
        typical = typical.cycled(few.rows) if typical.rows and few.rows else typical
        return typical if typical.form == few.form and typical.shapes == few.shapes else None

    def _largest(self, inputs: Inputs) -> int:
        """Bytes of the largest message of a call of `ROWS` rows; 0 for a model that does not take so many."""
        try:
            ledger = self._check(inputs.meta(ROWS)).profile.ledger
        except Exception:
            return 0
        return max((m.bytes for m in ledger if m.label != "omega_masked"), default=0)

    def can_cut(self, inputs: Inputs, rows: int) -> bool:
        """Whether pieces of so many rows, and one of the rest, give the results of the whole batch."""
        if inputs.rows is None:
            return False
        if self._served is not None:
            return self._served.general(inputs) and self._check(inputs.meta(ROWS)).samplewise
        return self.graphs.can_split_rows(inputs.meta(), {rows, inputs.rows % rows} - {0})

    def pieces(self, x: torch.Tensor | Inputs) -> tuple[Inputs, ...]:
        """The pieces in which a batch is run: one piece, unless rows are independent and memory is short.

        Raises:
            ArgumentError: `chunk` was named and the rows of this batch meet, or it cannot be seen that they do not.
        """
        inputs = self.inputs_of(x)
        if inputs.in_shares:
            return (inputs,)
        rows = inputs.rows or max((shape[0] for shape in inputs.shapes if shape), default=1)
        if self._chunk is not None and rows > self._chunk:
            if not self.can_cut(inputs, self._chunk):
                raise ArgumentError(
                    f"chunk={self._chunk} would cut a batch of {rows} rows into pieces, but rows of this model meet, "
                    f"or it cannot be seen that they do not; leave chunk out, or ask with at most {self._chunk} rows"
                )
            return inputs.split(self._chunk)
        if self._chunk is not None or rows < 2 or not self.can_cut(inputs, min(rows, FEW)):
            return (inputs,)
        span = max(1, CHUNK_BYTES * ROWS // max(1, self._largest(inputs)))
        return inputs.split(span) if span < rows and self.can_cut(inputs, span) else (inputs,)


# Calibration: a number format from the values that a model has on typical inputs.


MARGIN_BITS = 3
"""log2 of the factor by which values may exceed those of the calibration batch."""


@scheme_fields
def calibrated_scheme(
    model: nn.Module,
    batch: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any],
    scheme: Scheme | Literal["lan", "wan"] | None = None,
) -> Scheme:
    """The scheme with the most fraction bits, up to its own, that holds all values of a plain run with a margin, and
    the model's weights.

    The limit of activations is the largest one seen times 2^`MARGIN_BITS`. An input that exceeds it ends in
    `RangeExceededError`: calibrate on data like that of the queries. Without range checks comparisons rely on the
    limit, and an input that exceeds it gives a wrong result. A limit that the scheme names stays.

    Args:
        model: as in `secure`.
        batch: typical inputs, as the model is called with them: a tensor, `Inputs(...)` of several, or the dict or list
            that is its only argument.
        scheme: as in `secure`; its `frac_bits` are the most that are chosen.

    Raises:
        FixedPointRangeError: naming the layer whose values cannot fit, or with it the weight that leaves no room.
        ArgumentError: the module runs operation by operation, since it changes from call to call.
        SectorchError: the forward asks for what cannot be computed on secrets.
    """
    scheme = scheme_of("calibrate", scheme)
    if isinstance(batch, Iterator | torch.utils.data.DataLoader):
        raise ArgumentError(
            f"calibration takes one batch, as the model is called with it, got {type(batch).__name__}: "
            f"next(iter(batches)) gives its first, and where that has labels too, [0] of it the inputs"
        )
    several = isinstance(batch, list | tuple)
    batch = Inputs.of(batch)
    if not all(x.numel() for x in batch.tensors):
        raise ArgumentError(f"calibration looks at typical inputs, and these are empty: {batch!r}")
    try:
        program = record_program(model, batch)
    except TypeError as error:
        if not several:
            raise
        raise ArgumentError(
            "calibration takes one batch, as the model is called with it, and this model takes no list of tensors: "
            "torch.cat(batches) makes one batch of several"
        ) from error
    if program is None:
        raise ArgumentError(
            "calibration needs values that are the same in each call, and this module changes itself or draws random "
            "numbers; name frac_bits instead"
        )
    largest, at = ranges(program, batch)
    limit_bits = max(1, math.ceil(math.log2(max(largest, 2.0**-20)))) + MARGIN_BITS
    hidden = any(op_name(node) in _HIDE_VALUES for node in program.graph.nodes)
    # A layer's sum has 2 f fraction bits, six more where averages add them, and one for a difference of two values.
    fitting = (HEADROOM_BITS - 1 - limit_bits - 6) // 2
    if fitting < LEAST_FRAC_BITS:
        raise FixedPointRangeError(
            f"{at} reaches magnitude {largest:.4g}, which leaves {fitting} fraction bits; normalise the model there"
        )
    if scheme.limit_bits is not None:
        limit_bits = scheme.limit_bits
    elif hidden:
        limit_bits = None
    made = replace(scheme, frac_bits=min(scheme.frac_bits, fitting), limit_bits=limit_bits)
    needs = weights_needs(model, batch, made)
    held = made.holding(needs)
    if held is None:
        raise FixedPointRangeError(
            f"no number format of {LEAST_FRAC_BITS} fraction bits or more holds both: {at} reaches magnitude "
            f"{largest:.4g}, and there is no room, {reason_of(needs)}; normalise the model at one of the two"
        )
    return held


def weights_needs(model: nn.Module, batch: Inputs, scheme: Scheme) -> list[WeightNeed]:
    """The number formats that the weights need, including those that graph passes make."""
    try:
        with sole_observer(Profile()):
            session = Session(device=batch.tensors[0].device)
            return SecureModule(model, session, session.answering[0], scheme, None).needs(batch)
    except FixedPointRangeError as error:
        return list(error.needs)


_HIDE_VALUES = (
    "lstm", "lstm_cell", "gru", "gru_cell", "rnn_tanh", "rnn_tanh_cell", "rnn_relu", "rnn_relu_cell",
    "multi_head_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Functions with activations inside, which the run does not show: they leave the limit open."""


def record_program(model: nn.Module, batch: Inputs) -> Trace | None:
    """The program of a module for a batch of this shape; None where the module runs operation by operation."""
    module, given = copy_model(model)
    shapes = Session(dry=True, device=batch.tensors[0].device)
    programs = GraphCache(module, Scheme(), dtype_of(model), shapes, shapes.answering[0], given)
    return programs.of(batch.meta())


def ranges(program: Trace, batch: Inputs) -> tuple[float, str]:
    """The largest magnitude of any value of a plain run, and the layer that gives it."""
    largest, at = max(float(x.abs().max()) for x in batch.tensors), "the input"

    def watch(node, compute, args, kwargs):
        nonlocal largest, at
        y = compute(*args, **kwargs)
        if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
            seen = float(y.abs().max())
            if not math.isfinite(seen):
                raise FixedPointRangeError(f"{place_of(node)} gives a value that is not finite on the batch")
            if seen > largest:
                largest, at = seen, place_of(node)
        return y

    plain(program, batch.wide(), step=watch)
    return largest, at


# Exported programs as modules of torch functions, which `secure` and `sectorch convert` take.


_TRAINS = {"dropout.default": 2, "feature_dropout.default": 2, "alpha_dropout.default": 2, "batch_norm.default": 5}
"""The place of the argument that says whether an operation is in training mode."""


def _slice(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    end = None if end is None or end >= 1 << 62 else end
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _size(x: torch.Tensor, dim: int) -> int:
    return x.size(dim)


def _same(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def _to(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return x if dtype is None else x.to(dtype)


def _index(x: torch.Tensor, indices: list) -> Any:
    return x[tuple(slice(None) if i is None else i for i in indices)]


_SPECIAL: dict[str, Callable] = {
    "index": _index, "slice": _slice, "sym_size": _size, "_to_copy": _to, "alias": _same, "lift_fresh_copy": _same,
    "_assert_tensor_metadata": lambda *_, **__: None,
    "dropout_": torch.dropout,
    "hardswish_": F.hardswish, "hardsigmoid_": F.hardsigmoid, "silu_": F.silu, "mish_": F.mish, "relu6_": F.relu6,
    "upsample_nearest2d": lambda x, size=None, scale=None: F.interpolate(x, size, scale),
    "upsample_bilinear2d": lambda x, size=None, corners=False, scale=None: F.interpolate(
        x, size, scale, "bilinear", corners
    ),
    "max_pool2d": F.max_pool2d, "max_pool1d": F.max_pool1d, "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "embedding": torch.embedding,
}  # fmt: skip
"""ATen operations for which torch has no function of the same name and arguments."""


def module_or_exported(model: Any) -> nn.Module:
    """The module itself; for an exported program, or its `module()`, a module of torch functions; for a fitted
    estimator, `sectorch.fitted_models.module` of it.

    The module of an exported program is recognised by its `eval`, which torch replaces by a method that raises.

    Raises:
        TrainingModeError: the model was exported in training mode.
        SectorchError: what `sectorch.fitted_models.module` raises.
    """
    if convert.is_estimator(model):
        return convert.module(model)
    exported = isinstance(model, torch.export.ExportedProgram)
    return module_of(model) if exported or (isinstance(model, fx.GraphModule) and "eval" in vars(model)) else model


def module_of(exported: torch.export.ExportedProgram | nn.Module) -> fx.GraphModule:
    """An exported program, or its `module()`, as a module of torch functions with the same arguments.

    The guards of the export, which check what torch assumed of its inputs, are left out: a secure call checks shapes.

    Raises:
        TrainingModeError: the model was exported in training mode.
    """
    made: Any = exported.module() if isinstance(exported, torch.export.ExportedProgram) else exported
    graph = copy.deepcopy(made.graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_module" and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _refuse_trained(node)
            base = node.target._schema.name.rpartition("::")[2]
            node.target = _SPECIAL.get(base) or function_of(node.target)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "layout", "pin_memory")}
    return fx.GraphModule(made, graph).eval()


def _refuse_trained(node: fx.Node) -> None:
    target: Any = node.target
    name = f"{target._schema.name.rpartition('::')[2]}.{target._overloadname}"
    place = _TRAINS.get(name)
    if place is not None and place < len(node.args) and node.args[place] is True:
        raise TrainingModeError(
            f"the model was exported in training mode ({name}); call model.eval() and export it anew"
        )


@overload
def secure(
    model: Any,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    chunk: int | None = None,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    backend: Literal["shares"] = "shares",
    keys: None = None,
) -> SecureModule: ...


@overload
def secure(
    model: Any,
    scheme: None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    backend: Literal["ckks"],
    keys: Keys | None = None,
) -> CKKSModule: ...


@scheme_fields
def secure(
    model: Any,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    chunk: int | None = None,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    backend: str = "shares",
    keys: Keys | None = None,
) -> SecureModule | CKKSModule:
    """Wrap a module: its weights become A's secret, its inputs Q's, and only Q learns the result.

    The secure module is made of a copy: later changes of the model's weights, layers or hooks do not reach it.

    Args:
        model: any nn.Module made of supported operations (`sectorch.supported_ops()`), in evaluation mode, on the CPU
            or a CUDA device, where the session then computes as well; what torch.export.export made of one; or a fitted
            model of scikit-learn, xgboost or lightgbm, of which `sectorch.fitted_models.module` makes one.
        scheme: the number format, the range, and which protocols compute (`sectorch.Scheme`), or the network, "lan" or
            "wan", which stands for `Scheme(network=...)`; exact ReLU, fewest bytes
            and checked ranges unless named. Where it names no format, that is 20 fraction bits and activations below
            4096; or 16 to 19 bits, as many as the weights allow, from the first call on (`explain` says which, and
            why). All parties learn it.
        session: where it runs; the process's default session on the model's device unless named, with all parties in
            this process.
        party: the answering party of the session that owns the model; the first unless named.
        chunk: rows per piece of a batch; chosen by memory unless named.
        calibrate: a batch of typical inputs, as the model is called with it: a tensor, `Inputs(...)` of several, or the
            dict or list that is its only argument. The fraction bits (at most the scheme's) and, unless it is named,
            the range are chosen from the values it gives; see `sectorch.nn.module`. The owner's check of precision
            looks at its first rows as well.
        strict: whether a model that loses digits in fixed point is refused on the first call of a form, by the owner's
            own check (`PrecisionError`), in place of a warning; the check runs the whole reference then.
        backend: "shares", or "ckks": Q encrypts under `keys` (`sectorch.ckks.keygen`), A evaluates the model in plain
            on ciphertexts, one message each way; for FHE-friendly modules (`sectorch.nn.fhe_friendly`).

    Raises:
        TrainingModeError: the model is not in evaluation mode.
        NonFiniteError, FixedPointRangeError: weights that do not fit; on a call, whose sums could leave the ring.
        ArgumentError: a choice that does not exist, or choices that do not go together; a party that is none of the
            session's answering ones. The model is never changed.

    Warns:
        LeakyProtocolWarning: for Scheme(relu="privhfl").
        DeprecationWarning: for fields of the scheme as keywords.
        PrecisionWarning: on the first call of a form, for weights that lose digits in fixed point.
    """
    model = module_or_exported(model)
    if backend not in ("shares", "ckks"):
        raise ArgumentError(f"backend must be 'shares' or 'ckks', got {backend!r}")
    if backend == "ckks":
        refuse_unused({"scheme": scheme is not None, "chunk": chunk is not None, "calibrate": calibrate is not None})
        refuse_unused({"strict": strict})
        from ..ckks import CKKSModule  # SEAL, which shares do without

        return CKKSModule(model, keys, session=session, party=party)
    scheme = scheme_of("secure", scheme)
    session = session or default_session(device_of(model))
    party = session.answering_party(party)
    if keys is not None:
        raise ArgumentError("keys: of backend='ckks', and not used by shares")
    if calibrate is not None:
        check_model(model, device_of(model))
        scheme = calibrated_scheme(model, calibrate, scheme)
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"chunk must be at least one row, got {chunk}")
    typical = None if calibrate is None else Inputs.of(calibrate)
    secured = SecureModule(model, session, party, scheme, chunk, strict=strict, typical=typical)
    if scheme.relu == "privhfl":
        warnings.warn(
            "relu='privhfl' shows the querying party the sign and the size of every activation (and, asked the same "
            "thing often enough, its value); relu='exact' shows nothing and sends fewer bytes",
            LeakyProtocolWarning,
            stacklevel=3,
        )
    return secured


@scheme_fields
def reference(
    model: Any,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    chunk: int | None = None,
) -> SecureModule:
    """The public fixed-point function that `secure(model)` computes, as a module: no parties, shares or randomness.

    Its results equal those of a secure run bit for bit: in one process or three, with network "lan" or "wan", prepared
    or not, in any batch and any piece of it. So "Q learns the result and nothing else" means that Q learns
    `reference(model)(x)`. It costs little more than the products of whole numbers, and protects nothing.

    Args:
        model: as in `secure`.
        scheme, calibrate: as in `secure`; `secure(...).scheme` is a secure module's.
        chunk: rows a piece of a batch; chosen by memory unless named.

    Smooth functions (series of a masked opening: `mpc/series.py`) are equal but for about one value in
    2^28 (with 20 fraction bits), which that module derives. Values beyond the range may differ. With relu="privhfl" the
    results are the same, and the secure run leaks.

    Raises:
        ArgumentError: no Scheme. SectorchError: what `secure` raises.
    """
    model = module_or_exported(model)
    scheme = scheme_of("reference", scheme)
    if calibrate is not None:
        check_model(model, device_of(model))
        scheme = calibrated_scheme(model, calibrate, scheme)
    session = Session(reference=True, device=device_of(model))
    return SecureModule(model, session, session.answering[0], scheme, chunk)


def program(model: nn.Module, x: torch.Tensor | Inputs) -> Program:
    """The program that `secure` runs for inputs of x's shape and type; x's content is not read.

    The program is traced on shapes, so it names weights and queries and holds none of them.
    `program(model, x).party("S").code` is the Python that S runs, `messages` lists all messages, `draw()` gives a
    picture, and parties compare `digest` to be sure that they run the same program.

    Args:
        model: an ordinary module (with the default number format), or what `secure` made of it.
        x: a tensor, or a meta tensor, or `Inputs(...)` of them.

    Raises:
        DtypeError: x is no tensor.
        ArgumentError: the module runs operation by operation, and may do something else in each call.
        SectorchError: what `secure` refuses, with layer and line.
    """
    if not isinstance(x, (torch.Tensor, Inputs)):
        raise DtypeError(f"program() takes a torch tensor, got {type(x).__name__}")
    return (model if isinstance(model, SecureModule) else secure(model)).choreography(x)
