"""SecureModule: a module whose weights are an answering party's secret, and whose inputs are Q's.

A call checks its inputs, runs the program of their shapes on shapes once (`nn/dry_run.py`), and then runs it in the
session, in pieces of bounded memory and with prepared material if there is any.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.ledger import Profile, sole_observer
from ..choreography.program.projection import Material
from ..choreography.program.trace import Program, garbage_collection_paused
from ..config import NEEDS, WeightNeed, reason_of
from ..deprecation import renamed_attribute
from ..errors import ArgumentError, FixedPointRangeError, PrecisionError, PrecisionWarning, SectorchError
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SharedTensor, unwrap_openings
from ..tensor.compile_mode import InferenceModule
from .capture import adapt_model, run_eagerly, zeros_at_padded_places
from .dry_run import DryRun, dry_run, find_precision_loss, reveal_outputs, shared_inputs, way_out
from .graph import Trace, located_errors, range_advice, run, same_program
from .graph_cache import FEW, GraphCache, remember
from .inputs import Inputs, as_shared, reveal_tree
from .remote_program import RemoteGraphs, RemoteProgram
from .weights import ModelTensor, Weights, bind, check_input, check_model, copy_model, dtype_of, refuse_meta_device


def describe_inputs(inputs: Inputs) -> tuple:
    """The shape of a single tensor, and else name and shape of each, for people."""
    return inputs.shapes[0] if inputs.single else tuple(zip(inputs.names, inputs.shapes, strict=True))


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
        named, scheme = scheme, replace(scheme, audited=1)
        self.session, self.party, self.scheme = session, party, scheme
        # The scheme with its number of audits, which tensors do not know.
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
                self.choreography(piece), self._program_inputs(piece), self.full_scheme.audited
            )
            held += material.bytes
            self.material_cache.keep(piece, material)
        return held

    def _in_first_form(self, inputs: Inputs) -> Inputs:
        """The inputs in the form of the first call with the same values of the parameters, by place or by name.

        One program and one stock of material then serve both.
        """
        found = None if self._served is not None else inputs.arguments(self.plain.forward)
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
                program, self._program_inputs(inputs), self.material_cache.take(inputs), self.full_scheme.audited
            )

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
        inputs = self._in_first_form(inputs.with_tensors(checked))
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

    def _can_cut(self, inputs: Inputs, rows: int) -> bool:
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
            if not self._can_cut(inputs, self._chunk):
                raise ArgumentError(
                    f"chunk={self._chunk} would cut a batch of {rows} rows into pieces, but rows of this model meet, "
                    f"or it cannot be seen that they do not; leave chunk out, or ask with at most {self._chunk} rows"
                )
            return inputs.split(self._chunk)
        if self._chunk is not None or rows < 2 or not self._can_cut(inputs, min(rows, FEW)):
            return (inputs,)
        span = max(1, CHUNK_BYTES * ROWS // max(1, self._largest(inputs)))
        return inputs.split(span) if span < rows and self._can_cut(inputs, span) else (inputs,)
