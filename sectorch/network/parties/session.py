"""One session of the parties' processes, from the side of whichever party this process is.

Q opens it and names what is to be run; S and the answering parties follow. All build the same programs from the models'
descriptions, run the seed protocol, and then one call after the other. A session can be taken up again later for the
material that was prepared in it: then nothing is seeded or masked again, and only prepared calls can be made.

With several answering parties each of them knows of its own model only. Calls with party j of n take the numbers j,
j + n, j + 2n, ..., so that each party can count its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...choreography import Party
from ...choreography.program.material import Material
from ...choreography.program.together import Taking
from ...choreography.program.trace import Program
from ...choreography.run.party import PartyRuntime
from ...errors import (
    FrameError,
    MaterialError,
    ShapeError,
)
from ...nn.inputs import Inputs
from ...nn.module import SecureModule
from ...nn.served import Kind
from ...tensor import Scheme, SharedTensor
from ...tensor.aggregation import aggregate
from ..log import learned, query, step
from ..messages import Aggregate, ModelQuery, Predict, Prepare, Stored
from ..receipts.receipts import Receipts
from ..store.shelf import Shelf
from ..wire.channel import Channel
from .joint import settled, taking
from .known import Known
from .remote import Part, RemoteSession

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
        parts: list[Part],
        scheme: Scheme,
        shelf: Callable[[], Shelf],
        *,
        place: int = 0,
        of: int = 1,
        fresh: bool = True,
        alive: Callable[[], None] | None = None,
        facts: Callable[[], dict] = dict,
        receipts: Receipts | None = None,
        known: Known | None = None,
    ):
        known = known or Known()
        served, keys = zip(*(known.served(part.description, part.weights) for part in parts), strict=True)
        self.served, self.fresh, self.grouped = served[0], fresh, of > 1
        calls = [[(call.inputs.key, call.least) for call in model.calls] for model in served]
        if any(others != calls[0] for others in calls):
            said = "; ".join(dict.fromkeys(model.said for model in served))
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
                module.ahead.keep(self.served.inputs(kind), self._piece(call, kind))
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
        found = module(inputs.having(_held_of(inputs, taken)))
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
            for piece, made in module.ahead.all():
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
        return program if settled(self.session, program) else None

    def _joined(self, inputs: Inputs, own: frozenset[Party], join: Callable[[Taking], None]) -> None:
        """A call that is taken with others."""
        (module,) = self._modules
        made = taking(self.session, module.choreography(inputs), module._brought(inputs), own)
        try:
            with step("online", prepared=False):
                join(made)
        finally:
            self._runtime.forget(made.call)

    def follow(
        self,
        request: ModelQuery,
        join: Callable[[Taking], None] | None = None,
        rooms: Mapping[Party, int] | None = None,
    ) -> Stored | None:
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
        known = learned(what, self._of, inputs.in_shares)
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

    def _take_part(self, request: ModelQuery, inputs: Inputs) -> Stored | None:
        if isinstance(request, Predict) and not self.grouped:
            self.predict(inputs, request.use, request.then)
        elif isinstance(request, Aggregate) and self.grouped:
            self.aggregate(inputs)
        elif isinstance(request, Prepare) and self.fresh and not self.grouped:
            kept = self.prepare(inputs)
            shelf = self._shelf()
            room = shelf.store.room(shelf.binding.get("client"))
            return Stored(bytes=sum(size for _, _, size in kept), room=room)
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
