"""One session of the parties' processes, as each of its parties runs it.

Q opens the session and names what to run; S and the answering parties follow. All build the same programs from the
models' descriptions, run the seed protocol, and then one call after the other. A session can be resumed later for the
material that was prepared in it: then nothing is seeded or masked again, and only prepared calls can be made.

With several answering parties, each knows its own model only. Calls with party j of n take the numbers j, j + n,
j + 2n, ..., so that each party can count its own.

`PartySession` is a party's part in a session, `RemoteSession` the `Session` under it, and `ProgramCache` what sessions
of one process share. `abort_reason` decides what the other parties learn of an error.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from ...choreography import Party
from ...choreography.program.lockstep import BatchedCall
from ...choreography.program.projection import UNTRIMMED, Material, Setup, part_of
from ...choreography.program.trace import Program
from ...choreography.roles import STAR
from ...choreography.run.party import PartyRuntime
from ...config import scheme_of_fields
from ...decoys import record_bytes
from ...errors import (
    DecoyError,
    FalseDealingError,
    FalseServerError,
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
from ...nn.graph_cache import FEW
from ...nn.inputs import Inputs
from ...nn.module import SecureModule
from ...nn.remote_program import Kind, RemoteProgram
from ...serving.description import load_program
from ...session import Members, Q, S, Session, answering_parties
from ...tensor import Scheme, SharedTensor
from ...tensor.holders import aggregate
from ..log import learned_description, query, step
from ..memory import NO_MEMORY, MemoryBound, busy_without_memory, is_out_of_memory
from ..messages import Aggregate, ModelQuery, NumberFormat, Predict, Prepare, StoredCall, message_form
from ..receipts import Receipts
from ..store import Shelf, fingerprint
from ..wire.channel import Channel
from .batching import setup_is_complete, take_in_batch

MOST = 32
"""Entries of a cache. They have to be limited, since clients choose the number formats."""
OWN = 4
"""Models with weights that a cache holds, though they may have been replaced."""


class ProgramCache:
    """Models read from descriptions, and the programs of their calls, shared by the sessions of a process.

    A session of the same model and number format uses the programs that another one has traced. So it opens quickly,
    and calls of several sessions can be run in one batch (`batching`), since they have the same program. The cache
    holds no secret except the weights of its own process.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._served: OrderedDict[tuple, tuple[RemoteProgram, Any]] = OrderedDict()
        self._first: OrderedDict[tuple, SecureModule] = OrderedDict()

    def served(self, description: dict, weights: dict[str, torch.Tensor] | None = None) -> tuple[RemoteProgram, tuple]:
        """The model of a description, and its key in this cache.

        Raises:
            ProgramError: see `load_program`.
        """
        key = fingerprint(description), id(weights)
        with self._lock:
            held = self._served.get(key)
            if held is None:
                held = self._served[key] = (
                    load_program(description, weights),
                    weights,
                )  # held, so that no other has its id
            _latest(self._served, key)
            self._drop_old()
        return held[0], key

    def _drop_old(self) -> None:
        for old in [key for key, (_, weights) in self._served.items() if weights is not None][:-OWN]:
            del self._served[old]
            for key in [key for key in self._first if key[: len(old)] == old]:
                del self._first[key]

    def module(self, served: RemoteProgram, key: tuple, session: Session, party: Party, scheme: Scheme) -> SecureModule:
        """The module of a model in a session, for one of its answering parties."""
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


@dataclass
class AnsweringParty:
    """One answering party of a session: its model, and the identities by which it and Q authenticate each other."""

    description: dict
    identities: Identities
    weights: dict[str, torch.Tensor] | None = None


class RemoteSession(Session):
    """A session whose other parties are other processes.

    Args:
        runtime: of this process's party.
        identities: of Q and each answering party that this process knows.
        place, of: the first of these is number `place` of `of` answering parties.
        fresh: whether the session begins now; otherwise it is resumed for its prepared material.
        dealer, owners: see `Session`.
        known: the identities of a client and an answering party, where the client is not Q.
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

    def _new_setup(self, party: Party | None) -> Setup:
        return super()._new_setup(party) if self._fresh else Setup(None)


MAX_ELEMENTS = 1 << 28
"""Elements of an input that a request may name."""

CHECKED = 8
"""Times the bytes of the encoded weights that the check of precision takes, as measured for VGG-7."""


class PartySession:
    """This party's part in one session.

    Args:
        me: this party.
        session: the session's name. A resumed session has another name in its frames, that of its channels.
        channels: to each party that this one has an edge to.
        parts: the answering parties that this process knows.
        shelf: gives the shelf of prepared material.
        place, of: at an answering party, its number and how many there are.
        fresh: whether the session begins now; otherwise it is resumed for its prepared material.
        alive: called often during a call, to give signs of life.
        facts: gives the client, model and version, for the log's line of each query.
        receipts: where each query is recorded before it is answered or asked.
        known: the cache that other sessions of this process share.
        memory: the process's bound on memory.
        commitment: the answering party's signature of the model's version, for the receipts; None of several models.

    Raises:
        ShapeError: the models of several answering parties take different kinds of inputs.
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
        memory: MemoryBound | None = None,
        commitment: str | None = None,
    ):
        self._commitment = commitment or None
        self._recorded = set[str]()
        self._memory, self._call_memory, self._session_memory = memory, 0, 0
        self._weight_bytes = [sum(8 * math.prod(w["shape"]) for w in part.description["weights"]) for part in parts]
        known = known or ProgramCache()
        served, keys = zip(*(known.served(part.description, part.weights) for part in parts), strict=True)
        self.served, self.fresh, self.grouped = served[0], fresh, of > 1
        calls = [[(call.inputs.key, call.least) for call in model.calls] for model in served]
        if any(other != calls[0] for other in calls):
            kinds = "; ".join(dict.fromkeys(model.summary for model in served))
            raise ShapeError(f"models of one question take one kind of input, and these differ: {kinds}")
        wire = next(iter(channels.values())).session
        self._runtime = PartyRuntime(me, session, channels, alive, wire)
        self.session = RemoteSession(self._runtime, [part.identities for part in parts], place, of, fresh)
        self._me, self._channels = me, channels
        self.scheme = scheme = scheme if self.grouped else self.served.scheme(scheme)
        self._shelf = shelf
        self._of, self._facts = of, facts
        self._receipts, self._wire, self._asked_for = receipts, wire.hex(), 0
        self.retained: list[SharedTensor] = []
        """The results in shares of the last such call; the next call may use them."""
        self.retained_calls = 0
        """Number of calls whose results stayed in shares."""
        self._reader: ThreadPoolExecutor | None = None
        self._read_ahead: dict[int, tuple[Kind, Future, Shelf]] = {}
        self._modules = [
            known.module(model, key, self.session, party, scheme)
            for model, key, party in zip(served, keys, self.session.answering, strict=True)
        ]

    def pieces(self, inputs: Inputs) -> list[Kind]:
        """The kinds of the pieces in which a batch is run."""
        return [self.served.find(piece) for piece in self._modules[0].pieces(inputs.meta())]

    def rows_within(self, inputs: Inputs, size: int) -> int:
        """Rows for whose call a party takes `size` bytes at most, by an estimate: a multiple of those of `inputs`."""
        (module,) = self._modules
        meta = inputs.meta()
        if inputs.rows is None or len(module.pieces(meta)) > 1:
            return inputs.rows or 0
        program = module.choreography(meta)
        memory = max(part_of(program, frozenset({party})).memory["call"] for party in (Q, S, module.party))
        return inputs.rows * max(1, size // memory)

    def can_cut(self, inputs: Inputs) -> bool:
        """Whether the results of pieces of a batch are those of the batch."""
        return all(module.can_cut(inputs.meta(), FEW) for module in self._modules)

    def rows_at_once(self, inputs: Inputs) -> int:
        """Rows of a batch that all models take in one piece; 0 where the inputs have no rows."""
        return min(module.pieces(inputs.meta())[0].rows or 0 for module in self._modules)

    def begin_call(
        self, inputs: Inputs, rooms: Mapping[Party, int] | None = None, request: ModelQuery | None = None
    ) -> None:
        """Begin a call on inputs of these shapes: find its messages by a dry run, and grant the others credit for them.

        Args:
            request: what is asked, by which the call's memory is estimated.
            rooms: bytes that a party sends in all, where the caller knows them.

        Raises:
            FixedPointRangeError: at the owner, a weight does not fit the number format. It is raised before anything
                of the call is sent, so that the other parties do not learn at which layer.
        """
        inputs = inputs.meta()
        with step("dry run"), self._memory_of_checks(inputs):
            for module in self._modules:
                for piece in [inputs] if self.grouped else map(self.served.inputs, set(self.pieces(inputs))):
                    budget = module._check(piece).budget
                    if budget is not None:
                        budget.check_call()
        self._reserve(inputs, request)
        for module in self._modules:
            module.check_weights(inputs)
        for party, channel in self._channels.items():
            edge = (party.role, self._me.role)
            largest = max(module.largest.get(edge, 0) for module in self._modules)
            channel.grant_credit(largest, (rooms or {}).get(party))

    @contextmanager
    def _memory_of_checks(self, inputs: Inputs) -> Iterator[None]:
        """Reserve what an owner's check of precision takes, in the block, where a model has not run on this shape.

        It runs the model on examples as floating-point numbers and as encoded ones.
        """
        own = [m for m in self._modules if self.session.present(m.party) and inputs.key not in m._checked]
        if self._memory is None or not own:
            yield
            return
        size = CHECKED * sum(self._weight_bytes[self._modules.index(module)] for module in own)
        self._memory.reserve(size)
        try:
            yield
        finally:
            self._memory.release(size)

    def _reserve(self, inputs: Inputs, request: ModelQuery | None) -> None:
        """Reserve memory for a call, and for the setup that it adds to the session. Raises BusyError."""
        if self._memory is None or not self._memory.bounded:
            return
        call = session = 0
        use, then = (request.use, request.then) if isinstance(request, Predict) else ((), ())
        for module in self._modules:
            pieces = [inputs] if self.grouped else list(map(self.served.inputs, self.pieces(inputs)))
            parts = [part_of(module.choreography(piece), frozenset((self._me,))) for piece in pieces]
            # Pieces run one after the other; their material is read and written together.
            what = "prepare" if isinstance(request, Prepare) else "resume" if use else "call"
            together = 1 if what == "call" else len(parts) * (2 if use and then else 1)
            call += max(part.memory[what] for part in parts) + (together - 1) * max(part.material for part in parts)
            known = self.session.setup_of(module.choreography(pieces[0]))
            missing = max(known.missing_bytes(part) for part in parts)
            session, call = session + missing, call + min(missing, UNTRIMMED)  # what is freed meanwhile stays a while
        if self.scheme.accountable and self._me.role == "A":
            for program in map(self._modules[0].choreography, map(self.served.inputs, self.pieces(inputs))):
                of_check, of_session = record_bytes(program, self.session.setup_of(program))
                call += of_check
                session += 0 if program.digest in self._recorded else of_session
                self._recorded.add(program.digest)
        if self.scheme.audited != 1:  # calls that are opened and taken again, of which one is kept at a time
            call *= 2
        self._memory.reserve(call, session)
        self._call_memory, self._session_memory = call, self._session_memory + session

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release(self._call_memory)
            self._call_memory = 0

    def predict(
        self, inputs: Inputs, use: list[int] | tuple[int, ...] = (), then: list[int] | tuple[int, ...] = ()
    ) -> Any:
        """Run the model. Q's inputs have content, those of the others only shapes.

        Args:
            use: the prepared calls to use, one for each piece of the batch; empty for none.
            then: those of the next batch of this shape, which are read from disk while this one runs.

        Raises:
            MaterialError: a call was not prepared, or is used already.
        """
        (module,) = self._modules
        if use:
            kinds = self.pieces(inputs)
            if len(kinds) != len(use):
                raise MaterialError(f"{len(use)} prepared calls for a batch that is run in {len(kinds)} pieces")
            for call, kind in zip(reversed(use), reversed(kinds), strict=True):
                module.material_cache.keep(self.served.inputs(kind), self._material(call, kind))
            if len(then) == len(kinds):
                self._start_reading(then, kinds)
        elif not self.fresh:
            raise MaterialError("this session was taken up for prepared calls, and this call was not prepared")
        try:
            with step("online", prepared=bool(use)):
                return self._predict_retaining(module, inputs) if inputs.in_shares else module(inputs)
        finally:
            module.discard()

    def _predict_retaining(self, module: SecureModule, inputs: Inputs) -> Any:
        """Run a call whose results stay in shares; this party keeps its shares for the next call."""
        previous, self.retained, self.retained_calls = self.retained, [], self.retained_calls + 1
        found = module(inputs.with_tensors(_fill_shares(inputs, previous)))
        self.retained = [y for y in pytree.tree_leaves(found) if isinstance(y, SharedTensor)]
        return found

    def _material(self, call: int, kind: Kind) -> Material:
        if call in self._read_ahead and self._read_ahead[call][0] == kind:
            _, reading, shelf = self._read_ahead.pop(call)
            wait((reading,))
            shelf.end_lease(call)
            return reading.result()
        return self._shelf().take(call, kind)

    def _start_reading(self, calls: list[int] | tuple[int, ...], kinds: list[Kind]) -> None:
        """Read these pieces from disk in a thread; `close` puts back those that were not used."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "reading ahead")
        shelf = self._shelf()
        for call, kind in zip(calls, kinds, strict=True):
            if call not in self._read_ahead:
                shelf.lease(call)
                self._read_ahead[call] = kind, self._reader.submit(shelf.take, call, kind), shelf

    def calls_read_ahead(self) -> dict[int, Kind]:
        """The prepared calls that were read ahead and are not used yet, and their kinds."""
        return {call: kind for call, (kind, _, _) in self._read_ahead.items()}

    def close(self) -> None:
        """Put back material that was read ahead and not used, and release weights, shares and keys."""
        if self._reader is not None:
            self._reader.shutdown()
        for call, (kind, reading, shelf) in self._read_ahead.items():
            if reading.exception() is None:
                with suppress(MaterialError):  # the store may be full by now
                    shelf.put_back(reading.result(), kind)
            else:
                shelf.end_lease(call)
        self._read_ahead.clear()
        # The session is in reference cycles, which only the garbage collector frees, and a full collection at the end
        # of each session would take too long. So the secrets are released one by one: weights, shares, pair keys.
        for module in self._modules:
            module.discard()
        self._modules.clear()
        self.retained.clear()
        self._runtime.close()
        if self._memory is not None:
            self._memory.release(self._call_memory, self._session_memory)
            self._call_memory = self._session_memory = 0

    def prepare(self, inputs: Inputs) -> list[tuple[int, Kind, int]]:
        """Prepare the offline material of one later call, and store it.

        Returns:
            Call, kind and bytes of each piece.

        Raises:
            StoreFullError: nothing of this call is stored.
        """
        (module,) = self._modules
        stored = []
        try:
            with step("prepare"):
                module.preprocess(inputs)
            for piece, material in module.material_cache.all():
                kind = self.served.find(piece)
                stored.append((material.call, kind, self._shelf().put(material, kind)))
        finally:
            module.discard()
        return sorted(stored)

    def aggregate(self, inputs: Inputs) -> torch.Tensor:
        """The sum of the models' results, one tensor each, opened to Q (PrivHFL, Figure 5)."""
        with step("online", prepared=False):
            shared = [module.share(inputs) for module in self._modules]
            return aggregate([module(own) for module, own in zip(self._modules, shared, strict=True)])

    @property
    def query_facts(self) -> dict[str, str]:
        """The client, model and version that the log and receipts of a query have."""
        return self._facts()

    def batchable_program(self, request: ModelQuery) -> Program | None:
        """The program of a call that may run in a batch with calls of other sessions; None for any other request.

        Such a call is a prediction in one piece, without prepared material, audits, proofs, signatures of S's or
        results in shares, and of shapes that this session has run before.
        """
        if not isinstance(request, Predict) or request.use or request.after is not None:
            return None
        if (
            not self.fresh
            or self.grouped
            or self.scheme.audited != 1
            or self.scheme.verified
            or self.scheme.accountable
        ):
            return None
        inputs, (module,) = self.requested_inputs(request).meta(), self._modules
        if inputs.in_shares or inputs.key not in module._checked or len(self.pieces(inputs)) > 1:
            return None
        program = module.choreography(inputs)
        return program if setup_is_complete(self.session, program) else None

    def _take_batched(self, inputs: Inputs, own: frozenset[Party], join: Callable[[BatchedCall], None]) -> None:
        """Run a call in a batch."""
        (module,) = self._modules
        call = take_in_batch(self.session, module.choreography(inputs), module._program_inputs(inputs), own)
        try:
            with step("online", prepared=False):
                join(call)
        finally:
            self._runtime.forget(call.call)

    def follow(
        self,
        request: ModelQuery,
        join: Callable[[BatchedCall], None] | None = None,
        rooms: Mapping[Party, int] | None = None,
    ) -> StoredCall | None:
        """Take part in a query, at A or S.

        Args:
            join: runs the call in a batch with others (`batching`); None runs it alone.
            rooms: see `begin_call`; the messages of these parties are received before the batch runs.

        Returns:
            Of `Prepare`, what was stored; None of other requests.

        Raises:
            FrameError: the session cannot serve such a request, or its inputs are too large.
        """
        inputs = self.requested_inputs(request)
        if isinstance(request, Predict) and request.after not in (None, self.retained_calls):
            raise FrameError("a request that goes on from another call than the last one")
        for channel in self._channels.values():
            channel.begin_call()
        try:
            with self.logged_query(request.do, inputs, request.trace):
                self.begin_call(inputs, rooms, request)
                with busy_without_memory():
                    if join is not None:
                        return self._take_batched(inputs, frozenset(rooms or ()), join)
                    return self._take_part(request, inputs)
        finally:
            self._release()
            for channel in self._channels.values():
                channel.end_call()

    @contextmanager
    def logged_query(self, what: str, inputs: Inputs, trace: object = None) -> Iterator[None]:
        """Log the query that runs in the block, and write its receipts. `trace`: see `log.Watcher.step`."""
        self._asked_for += 1
        facts = {**self._facts(), "asked": what, "rows": inputs.rows}
        known = learned_description(what, self._of, inputs.in_shares)
        commitment, signed = self._commitment, self.session.statements.take_signed
        here = query(self._me, self._receipts, self._wire, self._asked_for, trace, commitment, **facts, learned=known)
        with here as asked:
            try:
                yield
            finally:
                asked.signed = signed()

    def requested_inputs(self, request: ModelQuery) -> Inputs:
        """The shapes of the inputs that a request names.

        Raises:
            FrameError: the model has no program for them, or they are too large.
        """
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
            stored = self.prepare(inputs)
            shelf = self._shelf()
            room = shelf.store.free_bytes(shelf.binding.client)
            return StoredCall(bytes=sum(size for _, _, size in stored), room=room)
        else:
            raise FrameError(f"a session that has no answer to '{request.do}'")
        return None


def _fill_shares(inputs: Inputs, retained: list[SharedTensor]) -> list[torch.Tensor]:
    """A call's tensors, with the retained results of the last call in place of those that are in shares.

    Raises:
        ShapeError: the retained results do not have the form that the program takes.
    """
    kinds = zip(inputs.shapes, inputs.dtypes, inputs.held, strict=True)
    wanted = [(shape, dtype, held) for shape, dtype, held in kinds if held is not None]
    if not wanted:
        return list(inputs.tensors)
    found = Inputs(retained) if retained else None
    if found is None or wanted != list(zip(found.shapes, found.dtypes, found.held, strict=True)):
        raise ShapeError("the call goes on from tensors in shares of another form than those that stayed of the last")
    shares = iter(retained)
    return [x if held is None else next(shares) for x, held in zip(inputs.tensors, inputs.held, strict=True)]


UNFIT = (
    "the model does not fit the number format of the question (fraction bits, activation limit): name a smaller "
    "limit_bits, or fewer fraction bits; its owner's log says which weight"
)
"""The reason that the others get where weights are too large: not which, nor by how much."""
ENDING = 5.0
"""Seconds that `join_threads` waits."""
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


def scheme_to_message(scheme: Scheme) -> NumberFormat:
    """The number format of a scheme, as a part of a request."""
    return msgspec.convert({k: v for k, v in scheme.fields().items() if k != "relu"}, NumberFormat)


def scheme_from_message(number_format: NumberFormat) -> Scheme:
    """The scheme of a number format that Q sent.

    Raises:
        FrameError: there is no such scheme.
    """
    try:
        return scheme_of_fields({"relu": "exact", **message_form(number_format)})
    except SectorchError as error:
        raise FrameError(str(error)) from None


def join_threads(threads: list[threading.Thread]) -> None:
    """Wait up to `ENDING` seconds for the threads of closed sessions, which end after their running step."""
    end = time.monotonic() + ENDING
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def log_text(error: BaseException) -> str:
    """The text of an error for this party's own log. It may name values of this party, so no other party gets it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_PUBLIC = (
    NetworkError, MaterialError, KeyAgreementError, FalseDealingError, FalseServerError, DecoyError, ReceiptError,
    QuotaFileError,
)  # fmt: skip
"""Errors whose text holds no secret, and is sent to the other parties."""


def abort_reason(error: BaseException, who: str) -> str:
    """The reason that the other parties get for an error: its type, and its text where that holds no secret.

    Args:
        error: why the session ends.
        who: this party, in words. For other errors, the reason says only where it was raised.
    """
    if isinstance(error, KeyboardInterrupt):
        return "AbortedError: stopped by its user"
    if isinstance(error, FixedPointRangeError):
        return f"RefusedError: {UNFIT}"
    if is_out_of_memory(error):
        return f"BusyError: at {who}, {NO_MEMORY}"
    # A user's code may define error types and texts of its own, which could hold anything.
    known_type = type(error).__module__.partition(".")[0] in ("sectorch", "builtins")
    public = isinstance(error, _PUBLIC) and known_type and _raised_here(error)
    text = getattr(error, "told", None) or error
    if isinstance(error, (StoreFullError, ReceiptError, QuotaFileError)):
        text = f"at {who}: {error}"
    kind = type(error).__name__ if known_type else "an error"
    return f"{kind}: {text if public else f'at {who}, whose own log says more'}"


def _raised_here(error: BaseException) -> bool:
    """Whether code of this package raised the error, or it was not raised at all."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is None or traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE)


@functools.cache
def load_loops() -> None:
    """Load the compiled loops before there is a connection, once: signs of life cannot be sent while a library loads.

    A full garbage collection delays them too: it holds the interpreter's lock and visits every object, which takes a
    third of a second, and seconds on a machine under load. So the objects that exist now, mostly code and tables, are
    excluded from later collections.
    """
    importlib.import_module("sectorch.ring.bitloops")
    gc.collect()
    gc.freeze()
