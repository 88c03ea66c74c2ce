"""SecureModule: a module whose weights are an answering party's secret, and whose inputs are Q's."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.program.material import Material
from ..choreography.program.trace import Program
from ..errors import ArgumentError, DtypeError, SessionMismatchError, TrainingModeError
from ..ring import check_encodable
from ..ring.scheme import check_limit
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SharedTensor, unwrapped
from .accept import check_model
from .bind import Weights, bind
from .dry import Checked, dry_run, revealed, shared_input
from .eager import watched
from .exported import given_program
from .samplewise import same_program
from .shapes import FEW, Traces, remember
from .trace import Trace, run
from .where import placed

if TYPE_CHECKING:
    pass


ROWS = 64
"""Rows of the dry run from which a batch's pieces are reckoned: a word of packed bits holds that many."""

CHUNK_BYTES = 24 << 20
"""A batch is cut so that its largest message stays below this: memory is bounded by the piece, not by the batch."""


class SecureModule(nn.Module):
    """A module whose weights belong to an answering party and whose inputs belong to Q.

    Called with a plain tensor (Q's), it gives the plain result, revealed to Q alone. Called with a SharedTensor, it
    gives a SharedTensor. A batch is cut into pieces of bounded memory where the graph shows that rows do not meet.

    Args:
        limited: whether the model comes from another party: its dry run is held to the bounds of `nn/bounds.py`.

    Raises on a call:
        DtypeError, NonFiniteError, FixedPointRangeError, ShapeError: a bad input; nothing was shared.
        UnsupportedOpError: naming the operation, the layer and line, and the nearest supported one.
    """

    plain: nn.Module
    traces: Traces
    _given: Trace | None
    _bound: nn.Module
    _weights: Weights
    _dry_weights: Weights
    session: Session
    party: Party
    scheme: Scheme

    def __init__(
        self, model: nn.Module, session: Session, party: Party, scheme: Scheme, chunk: int | None, limited: bool = False
    ):
        super().__init__()
        party = session.answering_party(party)
        self._limited = limited
        check_model(model, session.device if session.present(party) else torch.device("meta"))
        self.session, self.party, self.scheme = session, party, scheme
        self._lock = threading.Lock()  # over what the module keeps of calls: several threads may call it
        floating = [p.dtype for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()]
        self.dtype = floating[0] if floating else torch.float32
        plain = copy.deepcopy(model).double().requires_grad_(False)
        # What holds weights stays out of nn.Module's registry: it is nobody's to train, to list or to save.
        self.__dict__["plain"] = plain
        if limited and not isinstance(plain, fx.GraphModule):
            raise ArgumentError(f"a model from another party is a graph, not a {type(plain).__name__}")
        self.__dict__["_given"] = given_program(plain) if isinstance(plain, fx.GraphModule) and limited else None
        self.__dict__["traces"] = Traces(plain, scheme, self.dtype, session.on_shapes(), party)
        self._chunk = chunk
        bound, self.__dict__["_weights"] = self.bind(session, party)
        self.__dict__["_bound"] = bound
        self.__dict__["_dry_weights"] = self.bind(self.traces.session, party)[1]
        self._checked: dict[Any, Checked] = {}
        self._rows: dict[Any, Trace] = {}
        """By shape of row, the program of a batch that was run on shapes and whose rows do not meet."""
        self.largest: dict[tuple[str, str], int] = {}
        """Bytes of the largest message of all shapes that were checked, by the roles of its ends."""
        self._material: dict[tuple[int, ...], list[Material]] = {}
        self._prepared_for: dict[tuple[int, ...], torch.dtype] = {}
        self._asked: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
        """Shape of row and dtype of the inputs so far, the latest last."""
        super().train(False)

    def extra_repr(self) -> str:
        alone = self.traces.alone
        how = "" if alone is None else f"operation by operation, since {alone}; "
        return f"{how}model at {self.party}, {self.scheme}"

    def bind(self, session: Session, party: Party) -> tuple[nn.Module, Weights]:
        """The module with its weights private to a party of a session, and what its programs' names stand for there."""
        bound, own = bind(self.plain, session, party, self.scheme, self.dtype)
        return bound, Weights(own, session, party, self.scheme, self.dtype)

    def program(self, x: torch.Tensor) -> Trace | None:
        """The program for an input of this shape and dtype; None where the module runs operation by operation."""
        return self._given if self._limited else self.traces.of(torch.empty_like(x, device="meta"))

    def recorded(self, x: torch.Tensor) -> Trace | None:
        """The same before the graph passes."""
        return self._given if self._limited else self.traces.recorded(torch.empty_like(x, device="meta"))

    def train(self, mode: bool = True) -> SecureModule:
        if mode:
            raise TrainingModeError("a secure module is for inference; train the plain model and call secure() again")
        return self

    def forward(self, x: Any) -> Any:
        if isinstance(x, SharedTensor):
            return self._forward_shared(x)
        x = self._check_input(x)
        pieces = self.pieces(x)
        # All pieces are run before anything is looked at: the other parties do not learn that one had no result.
        outputs = [unwrapped(opened) for opened in [self._predict(piece) for piece in pieces]]
        if len(outputs) == 1:
            return outputs[0]
        return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)

    def preprocess(
        self, batch_size: int, sample_shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> int:
        """Run everything that does not depend on the query, for one later call with a batch of this size.

        Args:
            batch_size: rows of the later input.
            sample_shape: the shape of one row; that of the last call unless named.
            dtype: of the later input (torch.int64 for token ids); that of the last call with rows of this shape unless
                named, and else the model's own.

        Returns:
            bytes of memory that the material takes until it is used.

        Raises:
            ArgumentError: no shape is known, the module runs operation by operation, or material for inputs of this
                shape and another dtype is at hand.
        """
        if batch_size < 1:
            raise ArgumentError(f"preprocess needs a batch of at least one row, got {batch_size}")
        with self._lock:
            asked = [key for key in reversed(self._asked) if sample_shape is None or key[0] == tuple(sample_shape)]
        if not asked and sample_shape is None:
            raise ArgumentError("name sample_shape (the shape of one row): the module has not been called yet")
        if sample_shape is None:
            sample_shape = asked[0][0]
        if dtype is None:
            dtype = asked[0][1] if asked else self.dtype
        x = torch.empty((batch_size, *sample_shape), dtype=dtype, device="meta")
        self._ensure(x)
        if self.traces.alone is not None:
            raise ArgumentError(
                f"nothing can be prepared: the module runs operation by operation, since {self.traces.alone}"
            )
        pieces = self.pieces(x)
        with self._lock:
            held_for = {self._prepared_for.get(p.shape, dtype) for p in pieces if self._material.get(p.shape)} - {dtype}
        if held_for:
            raise ArgumentError(f"material for {held_for.pop()} inputs of this shape is at hand: discard() it first")
        held = 0
        for piece in pieces:
            material = self.session.prepare(self.choreography(piece), self._brought(piece))
            held += material.bytes
            with self._lock:
                self._material.setdefault(tuple(piece.shape), []).append(material)
                self._prepared_for[tuple(piece.shape)] = dtype
        return held

    def prepared(self) -> dict[tuple[int, ...], int]:
        """Input shapes for which offline material is at hand, and how many calls it serves."""
        with self._lock:
            return {shape: len(made) for shape, made in self._material.items() if made}

    def discard(self) -> None:
        """Drop all prepared material unused."""
        with self._lock:
            self._material.clear()

    def choreography(self, x: torch.Tensor) -> Program:
        """What all parties do for an input of this shape and dtype: a value to read, compare and sign.

        Raises:
            ArgumentError: the module runs operation by operation, and may do something else in each call; or a
                handler's function is not the same in every call.
        """
        return self._check(torch.empty_like(x, device="meta")).choreography

    def check_weights(self, x: torch.Tensor) -> None:
        """The owner's checks of its weights for an input of this shape, before anything of a call is sent.

        Raises:
            FixedPointRangeError: at the owner, naming the weight.
        """
        with placed():
            self.session.check(self.choreography(x), self._brought(x))

    def _brought(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the parties bring into the program, by name, as far as they are here: the input and the weights."""
        program = self.program(torch.empty_like(x, device="meta"))
        weights = {} if program is None else self._weights.of(program)
        return {"x": x} | {w.label: w.value._value for w in weights.values() if isinstance(w, PrivateTensor)}

    def _predict(self, x: torch.Tensor) -> Any:
        try:
            program = None if self.session.reference else self.choreography(x)
        except ArgumentError:
            program = None
        if program is None:
            with self.session.call(self.party):
                return revealed(self._run(self.share(x)))
        with self._lock:
            made = self._material.get(tuple(x.shape))
            for_it = self._prepared_for.get(x.shape, x.dtype) == x.dtype
            material = made.pop() if made and for_it else None
        with placed():
            return self.session.run(program, self._brought(x), material)

    def share(self, x: torch.Tensor) -> SharedTensor:
        """The module's input in shares."""
        return shared_input(x, self.session, self.scheme, self.party)

    def _run(self, x: SharedTensor) -> Any:
        program = self.program(torch.empty(x.shares.shape, dtype=x.dtype, device="meta"))
        if program is None:
            return watched(self._bound, x)
        return run(program, self._weights.of(program), x)

    def _forward_shared(self, x: SharedTensor) -> Any:
        if x.session is not self.session or x.party != self.party:
            raise SessionMismatchError(
                "the tensor was shared in another session, or for another answering party, than the model's; "
                "use sectorch.share(x, session=secure_model.session, party=secure_model.party)"
            )
        if x.scheme != self.scheme:
            raise ArgumentError(f"the tensor has {x.scheme}, the model {self.scheme}; share it with the model's scheme")
        self._ensure(torch.empty(x.shares.shape, dtype=x.dtype, device="meta"))
        with self.session.call(self.party):
            return self._run(x)

    def _check_input(self, x: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"a secure module takes a torch tensor, got {type(x).__name__}")
        expected = self.session.device if self.session.present(self.session.Q) else torch.device("meta")
        if x.device != expected:
            raise ArgumentError(f"the input is on {x.device}, the secure module on {expected}: use x.to('{expected}')")
        check_encodable(x, self.scheme.frac_bits, "the input")
        check_limit(x, self.scheme)
        self._ensure(torch.empty_like(x, device="meta"))
        return x.detach().as_subclass(torch.Tensor)

    def _ensure(self, x: torch.Tensor) -> None:
        """`_check`, unless rows do not meet and another batch of the same program was checked already."""
        program, row = self.program(x), (tuple(x.shape[1:]), x.dtype)
        with self._lock:
            self._asked.pop(row, None)
            remember(self._asked, row, None)
        known = self._rows.get(row) if x.dim() and x.shape[0] and program is not None else None
        if known is not None and program is not None and (known is program or same_program(known, program)):
            return
        if self._check(x).samplewise and x.shape[0] and program is not None:
            with self._lock:
                remember(self._rows, row, program)

    def _check(self, x: torch.Tensor) -> Checked:
        """Run on shapes: every error that depends on shapes comes from here, before anything is shared."""
        key = (tuple(x.shape), x.dtype)
        with self._lock:
            if key in self._checked:
                self._checked[key] = checked = self._checked.pop(key)  # the latest is the last
                return checked
        checked = dry_run(self.program(x), x, self._dry_weights, self.traces, self.scheme, self._limited)
        with self._lock:
            remember(self._checked, key, checked)
            for line in checked.profile.ledger:
                edge = (line.src.role, line.dst.role)
                self.largest[edge] = max(self.largest.get(edge, 0), line.bytes)
        return checked

    def _largest(self, x: torch.Tensor) -> int:
        """Bytes of the largest message of `ROWS` rows."""
        sample = torch.empty((ROWS, *x.shape[1:]), dtype=x.dtype, device="meta")
        return max((m.bytes for m in self._check(sample).profile.ledger if m.label != "omega_masked"), default=0)

    def _cut(self, x: torch.Tensor, rows: int) -> bool:
        """Whether a batch in pieces of so many rows, and one of what is left, gives what the whole batch gives."""
        if self._limited:
            sample = torch.empty((ROWS, *x.shape[1:]), dtype=x.dtype, device="meta")
            return self._check(sample).samplewise
        sizes = {rows, x.shape[0] % rows} - {0}
        return self.traces.apart(torch.empty_like(x, device="meta"), sizes)

    def pieces(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pieces in which a batch is run: all rows at once unless rows do not meet and memory asks for less.

        Raises:
            ArgumentError: `chunk` was named and the rows of this batch meet, or it cannot be seen that they do not.
        """
        rows = x.shape[0] if x.dim() else 1
        if self._chunk is not None and rows > self._chunk:
            if not self._cut(x, self._chunk):
                raise ArgumentError(
                    f"chunk={self._chunk} would cut a batch of {rows} rows into pieces, but rows of this model meet, "
                    f"or it cannot be seen that they do not; leave chunk out, or ask with at most {self._chunk} rows"
                )
            return x.split(self._chunk)
        if self._chunk is not None or rows < 2 or not self._cut(x, min(rows, FEW)):
            return (x,)
        span = max(1, CHUNK_BYTES * ROWS // max(1, self._largest(x)))
        return x.split(span) if span < rows and self._cut(x, span) else (x,)
