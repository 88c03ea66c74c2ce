"""One session of the parties' processes, from the side of whichever party this process is.

Q opens it and names what is to be run; S and the answering parties follow. All build the same programs from the models'
descriptions, run the seed protocol, and then one call after the other. A session can be taken up again later for the
material that was prepared in it: then nothing is seeded or masked again, and only prepared calls can be made.

With several answering parties each of them knows of its own model only. Calls with party j of n take the numbers j,
j + n, j + 2n, ..., so that each party can count its own.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...choreography import Party
from ...choreography.program.lockstep import BatchedCall
from ...choreography.program.projection import Material, Setup
from ...choreography.program.trace import Program
from ...choreography.roles import STAR
from ...choreography.run.party import PartyRuntime
from ...errors import (
    FalseDealingError,
    FixedPointRangeError,
    FrameError,
    KeyAgreementError,
    MaterialError,
    NetworkError,
    QuotaFileError,
    ReceiptError,
    SectorchError,
    ShapeError,
    StoreFullError,
)
from ...mpc.star.key_agreement import Identities
from ...nn.inputs import Inputs
from ...nn.module import SecureModule
from ...nn.remote_program import Kind, RemoteProgram
from ...serving.description import load_program
from ...session import Members, Q, Session, answering_parties
from ...tensor import Scheme, SharedTensor
from ...tensor.aggregation import aggregate
from ..log import learned_description, query, step
from ..messages import Aggregate, ModelQuery, NumberFormat, Predict, Prepare, StoredCall, message_form
from ..receipts.receipts import Receipts
from ..store import Shelf, fingerprint
from ..wire.channel import Channel
from .batching import setup_is_complete, take_in_batch

# The models that a process serves, as far as their programs are the same in every session: worked out once.


MOST = 32
"""Descriptions and number formats that are remembered; a client chooses the formats."""


OWN = 4
"""Models of this process's own whose weights are kept, though nobody may serve them any more."""


class ProgramCache:
    """Descriptions read back, and the programs of their calls. It holds no secret but the weights of its own process.

    A session of the same model and number format takes the programs that another one has traced: to open it costs
    nothing then, and calls of several sessions can be taken together (`joint.py`), since they are of one program.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._served: OrderedDict[tuple, tuple[RemoteProgram, Any]] = OrderedDict()
        self._first: OrderedDict[tuple, SecureModule] = OrderedDict()

    def served(self, description: dict, weights: dict[str, torch.Tensor] | None = None) -> tuple[RemoteProgram, tuple]:
        """A description that was checked and read, and what it is known as.

        Raises:
            ProgramError: as of `load_program`.
        """
        key = fingerprint(description), id(weights)
        with self._lock:
            held = self._served.get(key)
            if held is None:
                held = self._served[key] = load_program(description, weights), weights  # so that the id stays its own
            _latest(self._served, key)
            self._drop_old()
        return held[0], key

    def _drop_old(self) -> None:
        for old in [key for key, (_, weights) in self._served.items() if weights is not None][:-OWN]:
            del self._served[old]
            for key in [key for key in self._first if key[: len(old)] == old]:
                del self._first[key]

    def module(self, served: RemoteProgram, key: tuple, session: Session, party: Party, scheme: Scheme) -> SecureModule:
        """A session's module of that description, for one of its answering parties."""
        count, place = len(session.answering), session.answering.index(party)
        key = (*key, repr(scheme), count, place)
        with self._lock:
            first = self._first.get(key)
            if first is None or first._served is not served:
                shapes = Session(count, dry=True)
                first = self._first[key] = SecureModule(served, shapes, shapes.answering[place], scheme, None)
            _latest(self._first, key)
        return SecureModule(served, session, party, scheme, None, like=first)


def _latest(kept: OrderedDict, key: Any) -> None:
    kept.move_to_end(key)
    while len(kept) > MOST:
        kept.popitem(last=False)


# A session whose other parties are elsewhere, and what a process knows of each of its answering parties.


@dataclass
class AnsweringParty:
    """One answering party of a session: its model's description, and how it and Q know each other."""

    description: dict
    identities: Identities
    weights: dict[str, torch.Tensor] | None = None


class RemoteSession(Session):
    """A session whose other parties are elsewhere.

    Args:
        runtime: of this process's party.
        identities: of Q and each answering party that this process knows of.
        place, of: which of how many answering parties the first of them is.
        fresh: whether it begins now; else it is taken up for its prepared material.
        dealer, owners: as of a `Session`.
        known: how one of those and an answering party know each other.
    """

    def __init__(
        self, runtime: PartyRuntime, identities: Sequence[Identities], place: int, of: int, fresh: bool, *,
        dealer: Party = Q, owners: Sequence[str] = (), known: Callable[[Party, Party], Identities] | None = None,
    ):  # fmt: skip
        self._begin(Members(STAR, answering_parties(len(identities)), dealer, owners))
        self.device = torch.device("cpu")
        self.runtime = runtime
        several = max(of, len(identities))
        self._numbers = {party: itertools.count(place + i, several) for i, party in enumerate(self.answering)}
        self._fresh = fresh
        self._open()
        if fresh:
            among = dict(zip(self.answering, identities, strict=True))
            self._seed(lambda client, party: among[party] if client == Q or known is None else known(client, party))

    def _number(self, party: Party | None) -> int:
        return next(self._numbers[self.answering_party(party)])

    def _new_setup(self, party: Party | None) -> Setup:
        return super()._new_setup(party) if self._fresh else Setup(None)


MAX_ELEMENTS = 1 << 28


class PartySession:
    """This party's part in one session.

    Args:
        session: its name; the channels may have another one on the way.
        channels: to each party that this one has an edge to.
        shelf: where prepared material is kept.
        place, of: at an answering party, which of how many it is.
        facts: who asks what, for the log's line of each query.
        receipts: where each query is written down before it is answered or asked.
        known: what other sessions of this process have worked out.
    """

    def __init__(
        self,
        me: Party,
        session: bytes,
        channels: dict[Party, Channel],
        parts: list[AnsweringParty],
        scheme: Scheme,
        shelf: Callable[[], Shelf],
        *,
        place: int = 0,
        of: int = 1,
        fresh: bool = True,
        alive: Callable[[], None] | None = None,
        facts: Callable[[], dict] = dict,
        receipts: Receipts | None = None,
        known: ProgramCache | None = None,
    ):
        known = known or ProgramCache()
        served, keys = zip(*(known.served(part.description, part.weights) for part in parts), strict=True)
        self.served, self.fresh, self.grouped = served[0], fresh, of > 1
        calls = [[(call.inputs.key, call.least) for call in model.calls] for model in served]
        if any(others != calls[0] for others in calls):
            said = "; ".join(dict.fromkeys(model.summary for model in served))
            raise ShapeError(f"models of one question take one kind of input, and these differ: {said}")
        wire = next(iter(channels.values())).session
        self._runtime = PartyRuntime(me, session, channels, alive, wire)
        self.session = RemoteSession(self._runtime, [part.identities for part in parts], place, of, fresh)
        self._me, self._channels = me, channels
        self.scheme = scheme = scheme if self.grouped else self.served.scheme(scheme)
        self._shelf = shelf
        self._of, self._facts = of, facts
        self._receipts, self._wire, self._asked_for = receipts, wire.hex(), 0
        self.staying: list[SharedTensor] = []
        """What stayed in shares of the last such call; the next one may take it."""
        self.stayed = 0
        """How many calls left something in shares."""
        self._reader: ThreadPoolExecutor | None = None
        self._coming: dict[int, tuple[Kind, Future, Shelf]] = {}
        self._modules = [
            known.module(model, key, self.session, party, scheme)
            for model, key, party in zip(served, keys, self.session.answering, strict=True)
        ]

    def pieces(self, inputs: Inputs) -> list[Kind]:
        """The kinds of the pieces in which a batch is run."""
        return [self.served.find(piece) for piece in self._modules[0].pieces(inputs.meta())]

    def rows_at_once(self, inputs: Inputs) -> int:
        """Rows of a batch that all models take in one piece; 0 where its rows are not counted."""
        return min(module.pieces(inputs.meta())[0].rows or 0 for module in self._modules)

    def expect(self, inputs: Inputs, rooms: Mapping[Party, int] | None = None) -> None:
        """A call on inputs of these shapes begins: work out its messages, and tell the others that there is room.

        Args:
            rooms: how much for what a party sends, where that is known.

        Raises:
            FixedPointRangeError: at the owner, a weight that does not fit. Nothing of the call was sent, so that nobody
                sees how far the model came.
        """
        inputs = inputs.meta()
        with step("dry run"):
            for module in self._modules:
                for piece in [inputs] if self.grouped else map(self.served.inputs, set(self.pieces(inputs))):
                    budget = module._check(piece).budget
                    if budget is not None:
                        budget.check_call()
                module.check_weights(inputs)
        for party, channel in self._channels.items():
            edge = (party.role, self._me.role)
            largest = max(module.largest.get(edge, 0) for module in self._modules)
            channel.expect(largest, (rooms or {}).get(party))

    def predict(
        self, inputs: Inputs, use: list[int] | tuple[int, ...] = (), then: list[int] | tuple[int, ...] = ()
    ) -> Any:
        """Run the model; Q's inputs have content, the others' only shapes.

        Args:
            use: the prepared calls to make, one for each piece of the batch, or none.
            then: those that the next batch of this shape will make: they are read while this one runs.

        Raises:
            MaterialError: a call that was not prepared, or was made already.
        """
        (module,) = self._modules
        if use:
            kinds = self.pieces(inputs)
            if len(kinds) != len(use):
                raise MaterialError(f"{len(use)} prepared calls for a batch that is run in {len(kinds)} pieces")
            for call, kind in zip(reversed(use), reversed(kinds), strict=True):
                module.material_cache.keep(self.served.inputs(kind), self._piece(call, kind))
            if len(then) == len(kinds):
                self._read_ahead(then, kinds)
        elif not self.fresh:
            raise MaterialError("this session was taken up for prepared calls, and this call was not prepared")
        try:
            with step("online", prepared=bool(use)):
                return self._keeping(module, inputs) if inputs.in_shares else module(inputs)
        finally:
            module.discard()

    def _keeping(self, module: SecureModule, inputs: Inputs) -> Any:
        """A call whose results stay in shares: this party keeps what it holds of them for the next one."""
        taken, self.staying, self.stayed = self.staying, [], self.stayed + 1
        found = module(inputs.with_tensors(_held_of(inputs, taken)))
        self.staying = [y for y in pytree.tree_leaves(found) if isinstance(y, SharedTensor)]
        return found

    def _piece(self, call: int, kind: Kind) -> Material:
        if call in self._coming and self._coming[call][0] == kind:
            _, coming, shelf = self._coming.pop(call)
            wait((coming,))
            shelf.used(call)
            return coming.result()
        return self._shelf().take(call, kind)

    def _read_ahead(self, calls: list[int] | tuple[int, ...], kinds: list[Kind]) -> None:
        """Take these pieces off the disk beside the running call; what is not used then is put back at the end."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "reading ahead")
        shelf = self._shelf()
        for call, kind in zip(calls, kinds, strict=True):
            if call not in self._coming:
                shelf.lend(call)
                self._coming[call] = kind, self._reader.submit(shelf.take, call, kind), shelf

    def coming(self) -> dict[int, Kind]:
        """The calls whose pieces were read ahead, and their kinds."""
        return {call: kind for call, (kind, _, _) in self._coming.items()}

    def close(self) -> None:
        """Put back what was read ahead and not used, and let go of the weights."""
        if self._reader is not None:
            self._reader.shutdown()
        for call, (kind, coming, shelf) in self._coming.items():
            if coming.exception() is None:
                with suppress(MaterialError):  # another session's material may have taken the room
                    shelf.put_back(coming.result(), kind)
            else:
                shelf.used(call)
        self._coming.clear()
        # What refers to itself lives on until it is collected, and to ask for that at each session's end takes long. So
        # the secrets are let go of one by one: the weights, what stayed in shares, the pair keys.
        for module in self._modules:
            module.discard()
        self._modules.clear()
        self.staying.clear()
        self._runtime.close()

    def prepare(self, inputs: Inputs) -> list[tuple[int, Kind, int]]:
        """Make the offline material of one later call; what is kept of it: call, kind and bytes of each piece.

        Raises:
            StoreFullError: nothing of this call is kept.
        """
        (module,) = self._modules
        kept = []
        try:
            with step("prepare"):
                module.preprocess(inputs)
            for piece, made in module.material_cache.all():
                kind = self.served.find(piece)
                kept.append((made.call, kind, self._shelf().put(made, kind)))
        finally:
            module.discard()
        return sorted(kept)

    def aggregate(self, inputs: Inputs) -> torch.Tensor:
        """The sum of the models' results, which are one tensor each, at Q (PrivHFL, Figure 5)."""
        with step("online", prepared=False):
            shared = [module.share(inputs) for module in self._modules]
            return aggregate([module(own) for module, own in zip(self._modules, shared, strict=True)])

    @property
    def who(self) -> dict[str, str]:
        """Who asks what: the facts of each query."""
        return self._facts()

    def joinable(self, request: ModelQuery) -> Program | None:
        """The program of a call that may be taken with those of other sessions; None of any other request.

        It is a prediction in one piece, of shapes that were asked for before, with nothing that was prepared; and Q is
        told nothing on the way.
        """
        if not isinstance(request, Predict) or request.use or request.after is not None:
            return None
        if not self.fresh or self.grouped or self.scheme.audited != 1 or self.scheme.verified:
            return None
        inputs, (module,) = self.asked(request).meta(), self._modules
        if inputs.in_shares or inputs.key not in module._checked or len(self.pieces(inputs)) > 1:
            return None
        program = module.choreography(inputs)
        return program if setup_is_complete(self.session, program) else None

    def _joined(self, inputs: Inputs, own: frozenset[Party], join: Callable[[BatchedCall], None]) -> None:
        """A call that is taken with others."""
        (module,) = self._modules
        made = take_in_batch(self.session, module.choreography(inputs), module._program_inputs(inputs), own)
        try:
            with step("online", prepared=False):
                join(made)
        finally:
            self._runtime.forget(made.call)

    def follow(
        self,
        request: ModelQuery,
        join: Callable[[BatchedCall], None] | None = None,
        rooms: Mapping[Party, int] | None = None,
    ) -> StoredCall | None:
        """Take part in what Q asked for, at A or S; what the party that asked is told then.

        Args:
            join: takes the call, with others: see `joint.py`.
            rooms: as of `expect`; those parties' messages are received before the call is taken.

        Raises:
            FrameError: a request that this session has no answer to, or of an impossible size.
        """
        inputs = self.asked(request)
        if isinstance(request, Predict) and request.after not in (None, self.stayed):
            raise FrameError("a request that goes on from another call than the last one")
        for channel in self._channels.values():
            channel.begin()
        try:
            with self.noted(request.do, inputs, request.trace):
                self.expect(inputs, rooms)
                if join is not None:
                    return self._joined(inputs, frozenset(rooms or ()), join)
                return self._take_part(request, inputs)
        finally:
            for channel in self._channels.values():
                channel.rest()

    def noted(self, what: str, inputs: Inputs, trace: object = None) -> AbstractContextManager[object]:
        """The log's line of a query that is asked in the block, and its receipts. `trace`: see `log.Watcher.step`."""
        self._asked_for += 1
        facts = {**self._facts(), "asked": what, "rows": inputs.rows}
        known = learned_description(what, self._of, inputs.in_shares)
        return query(self._me, self._receipts, self._wire, self._asked_for, trace, **facts, learned=known)

    def asked(self, request: ModelQuery) -> Inputs:
        """The inputs that a request is for, without content."""
        try:
            inputs = self.served.inputs((request.program, request.rows))
        except ShapeError as error:
            raise FrameError(f"a request that the model has no program for: {error}") from None
        if any(math.prod(shape) > MAX_ELEMENTS for shape in inputs.shapes):
            raise FrameError(f"a request for inputs of more than {MAX_ELEMENTS} elements")
        return inputs

    def _take_part(self, request: ModelQuery, inputs: Inputs) -> StoredCall | None:
        if isinstance(request, Predict) and not self.grouped:
            self.predict(inputs, request.use, request.then)
        elif isinstance(request, Aggregate) and self.grouped:
            self.aggregate(inputs)
        elif isinstance(request, Prepare) and self.fresh and not self.grouped:
            kept = self.prepare(inputs)
            shelf = self._shelf()
            room = shelf.store.room(shelf.binding.get("client"))
            return StoredCall(bytes=sum(size for _, _, size in kept), room=room)
        else:
            raise FrameError(f"a session that has no answer to '{request.do}'")
        return None


def _held_of(inputs: Inputs, staying: list[SharedTensor]) -> list[torch.Tensor]:
    """A call's tensors, with what stayed of the last call in the places of those that are in shares.

    Raises:
        ShapeError: that is something else than the program takes.
    """
    kinds = zip(inputs.shapes, inputs.dtypes, inputs.held, strict=True)
    wanted = [(shape, dtype, held) for shape, dtype, held in kinds if held is not None]
    if not wanted:
        return list(inputs.tensors)
    there = Inputs(staying) if staying else None
    if there is None or wanted != list(zip(there.shapes, there.dtypes, there.held, strict=True)):
        raise ShapeError("the call goes on from tensors in shares of another form than those that stayed of the last")
    left = iter(staying)
    return [x if held is None else next(left) for x, held in zip(inputs.tensors, inputs.held, strict=True)]


# What the parties of a session tell each other beside its messages: number format, names, reasons of an end.


UNFIT = (
    "the model does not fit the number format of the question (fraction bits, activation limit): name a smaller "
    "limit_bits, or fewer fraction bits; its owner's log says which weight"
)
"""What the others are told of weights that are too large: not which, nor by how much."""
ENDING = 5.0
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


def scheme_in(scheme: Scheme) -> NumberFormat:
    """A number representation as a part of a request; `scheme_of` reads it."""
    return NumberFormat(**{name: getattr(scheme, name) for name in NumberFormat.__struct_fields__})


def scheme_of(said: NumberFormat) -> Scheme:
    """The number representation that Q asks for.

    Raises:
        FrameError: not one that exists.
    """
    try:
        return Scheme(relu="exact", **message_form(said))
    except SectorchError as error:
        raise FrameError(str(error)) from None


def join_threads(threads: list[threading.Thread]) -> None:
    """Wait for sessions that are ending; they end at once, since their channels are closed, but for a running step."""
    end = time.monotonic() + ENDING
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def in_full(error: BaseException) -> str:
    """An error for the log of the party where it arose, which may name that party's own values."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_TOLD = (NetworkError, MaterialError, KeyAgreementError, FalseDealingError, ReceiptError, QuotaFileError)
"""Whose text the others are told."""


def reason(error: BaseException, who: str) -> str:
    """What the other parties are told of an error: its type, and the text of our own kinds, which hold no secret.

    Args:
        who: this party, in words: of an error of another kind, and of a full disk, the others learn where it arose.
    """
    if isinstance(error, KeyboardInterrupt):
        return "AbortedError: stopped by its user"
    if isinstance(error, FixedPointRangeError):
        return f"RefusedError: {UNFIT}"
    ours = type(error).__module__.partition(".")[0] in ("sectorch", "builtins")
    known = isinstance(error, _TOLD) and ours and _raised_here(error)
    said = getattr(error, "told", None) or error
    if isinstance(error, (StoreFullError, ReceiptError, QuotaFileError)):
        said = f"at {who}: {error}"
    kind = type(error).__name__ if ours else "an error"
    return f"{kind}: {said if known else f'at {who}, whose own log says more'}"


def _raised_here(error: BaseException) -> bool:
    """Whether this package has raised it, or nobody yet: the text of a program's own may hold what it likes."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is None or at.tb_frame.f_code.co_filename.startswith(_PACKAGE)


@functools.cache
def load_loops() -> None:
    """Load what a call needs before there is a connection, once, since signs of life wait while a library is loaded.

    They wait for a full garbage collection too, which holds the interpreter's lock and looks at every object there is:
    a third of a second of processor time, and seconds on a machine that has ten times as much to do as it can. What is
    there by now is code and tables for the most part, and collections pass over it from now on, in this process.
    """
    importlib.import_module("sectorch.ring.bitloops")
    gc.collect()
    gc.freeze()
