"""Q's models: a model at another party, asked over a connection."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from msgspec.structs import replace

from ...choreography.run.frames import raw
from ...config import check_limit
from ...errors import (
    ArgumentError,
    FrameError,
    MaterialError,
    RangeExceededError,
    RefusedError,
    SectorchError,
    SessionOverError,
    ShapeError,
    StoreFullError,
    UnknownModelError,
)
from ...nn.generation import Cache, TextContinuation
from ...nn.inputs import Inputs
from ...nn.module import describe_inputs
from ...nn.remote_program import Kind
from ...ring import check_encodable
from ...serving.calls import Like, like_inputs, match_call
from ...session import Q, S
from ...tensor import Scheme, SharedTensor
from ..identity.identity import PinnedIdentities, Pins, context
from ..log import trace_entry, write
from ..messages import (
    Aggregate,
    AllStored,
    Close,
    ControlMessage,
    MaterialReady,
    ModelQuery,
    OfferedModel,
    Open,
    Predict,
    Prepare,
    ServerProcess,
    ServerReply,
    SessionParts,
)
from ..names import model_name
from ..receipts.receipts import Receipts
from ..store import Shelf, Store, fingerprint, version
from ..wire.channel import Channel, Link
from .session import AnsweringParty, PartySession, reason, scheme_in

# The asking party's end of a session: opening one, and asking in it.


R = TypeVar("R", bound=ServerReply)


@dataclass
class ClientSession:
    """One session that is open at this party, and its end of the channel to S."""

    name: bytes
    channel: Channel
    party: PartySession
    binding: dict
    version: str


class QueryConnection(Protocol):
    """What a query needs of the connection that it goes over (`client.Connection`)."""

    name: str
    authority: str
    identity: Any
    pins: Pins
    receipts: Receipts | None
    place: ServerProcess

    @property
    def store(self) -> Store: ...

    def there(self) -> Link: ...

    def ask(self, request: ControlMessage, kind: type[R], patience: float = 30.0) -> R: ...


def open_session(
    connection: QueryConnection, names: list[str], scheme: Scheme, shelf: Shelf | None = None, only: str | None = None
) -> ClientSession:
    """Open a session with the models of these names, or take up the one that a shelf's material belongs to.

    Raises:
        ArgumentError: what is no name; nothing was sent.
        UnknownModelError, BusyError, IdentityError, KeyAgreementError: no session came about.
        MaterialError: the material is void.
    """
    for name in names:
        model_name(name, "a model's name")
    wire = os.urandom(16)
    session = wire if shelf is None else shelf.session
    request = Open(
        session=wire.hex(), models=names, scheme=scheme_in(scheme), lasting=connection.store.lasting, version=only,
        resume=None if shelf is None else session.hex(), calls=[] if shelf is None else list(shelf.calls()),
    )  # fmt: skip
    channel = connection.there().open(wire)
    try:
        replied = connection.ask(request, SessionParts).parts
        if len(replied) != len(names):
            raise FrameError("the server's reply lacks the models' descriptions")
        binding = {
            "client": connection.name, "model": names[0], "fingerprint": fingerprint(replied[0].description),
            "edition": replied[0].edition, "scheme": repr(scheme), "authority": connection.authority,
            **({"replica": connection.place.label} if connection.place.label else {}),
        }  # fmt: skip
        if shelf is not None:
            if shelf.binding != binding:
                raise MaterialError(f"'{names[0]}' has another model now, or was started again without its store")
            ready = channel.request(MaterialReady, channel.deadline.silence)
            shelf.keep(ready.calls)  # a piece that another party has lost is void here too
        parts = [
            AnsweringParty(part.description, _other(connection, part, scheme, names, place))
            for place, part in enumerate(replied)
        ]
        versions = ",".join(version(part.description, part.edition) for part in replied)
        facts = {"client": connection.name, "model": ",".join(names), "version": versions}
        party = PartySession(
            Q, session, {S: channel}, parts, scheme,
            lambda: connection.store.shelf(session, binding), of=len(names), fresh=shelf is None,
            facts=lambda: facts, receipts=connection.receipts,
        )  # fmt: skip
    except BaseException as error:
        channel.abort(reason(error, f"'{connection.name}'"))
        channel.close()
        raise
    return ClientSession(session, channel, party, binding, versions)


def _other(
    connection: QueryConnection, part: OfferedModel, scheme: Scheme, names: list[str], place: int
) -> PinnedIdentities:
    """Who Q and the answering party of this place are to each other, for the model that S says it has."""
    agreed = context(part.description, part.edition, scheme, place, len(names))
    both = {"Q": connection.name, "A": names[place]}
    return PinnedIdentities(both, connection.identity, agreed, connection.pins)


def run_call(
    opened: ClientSession, kind: type[ModelQuery], inputs: Inputs, work: Callable[[], Any], **more: Any
) -> Any:
    """Ask for something in a session and take part; where that fails, the session is given up at all parties.

    Args:
        kind: of what is asked for. inputs: of the call. more: entries of the request.

    Raises:
        RangeExceededError: the session goes on, and the others learn nothing of it.
    """
    try:
        number, rows = opened.party.served.find(inputs)
        result, beyond = None, None
        try:
            asked = kind(program=number, rows=rows, **more)
            with opened.party.noted(asked.do, inputs):
                opened.channel.begin()
                opened.channel.tell(replace(asked, **trace_entry()))
                opened.party.expect(inputs)
                result = work()
        except RangeExceededError as error:
            beyond = error  # the others have done their part, and do not hear of it
        opened.channel.rest()
    except BaseException as error:
        opened.channel.abort(reason(error, f"'{opened.binding['client']}'"))
        opened.channel.close()
        raise
    if beyond is not None:
        raise beyond
    return result


def check_values(inputs: Inputs, scheme: Scheme) -> None:
    """Raise what values that fixed point cannot hold ask for, before anything is sent."""
    for name, x in zip(inputs.names, inputs.tensors, strict=True):
        if isinstance(x, SharedTensor):
            continue
        what = "the input" if inputs.single else f"the input '{name}'"
        check_encodable(x, scheme.frac_bits, what)
        check_limit(x, scheme, what)


def choose_prepared(pieces: Sequence[Kind], at_hand: dict[int, Kind]) -> list[int]:
    """A prepared call for each piece, the first ones first, or none at all."""
    left, calls = dict(sorted(at_hand.items())), []
    for piece in pieces:
        call = next((call for call, kind in left.items() if kind == piece), None)
        if call is None:
            return []
        calls.append(call)
        del left[call]
    return calls


# Q's side of generation with a language model at another party.


class RemoteTexts(TextContinuation):
    """Continues texts with a model at another party.

    Raises:
        ArgumentError: the model's owner does not serve it for generation.
    """

    def __init__(self, model: RemoteModel):
        if model.served.texts is None:
            raise ArgumentError(
                "the model is not served for generation: its owner writes it by sectorch.network.save_generation"
            )
        self.texts, self._model = model.served.texts, model

    def _call(self, inputs: Inputs, later: int = 0) -> tuple[Any, Cache]:
        following = [self._form(inputs.tensors[0])] * later if later else []
        return self._model.in_shares(inputs, following)

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        return super()._first(ids, self._mask(ids, mask), generator)

    def prepare(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        steps: int | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """Do all that does not depend on the prompt, for one later text.

        Args:
            input_ids, attention_mask: of the later prompt; only the shapes are used.
            steps: how many of the later steps are prepared; all of them unless named.
            progress: called after each of them.

        Raises:
            ShapeError: prompts of this shape are not served. StoreFullError: as of `RemoteModel.prepare`.
        """
        self._model.prepare(self._first(input_ids, attention_mask, None).meta(), 1, progress)
        steps = self.texts.max_new_tokens - 1 if steps is None else steps
        if steps:
            self._model.prepare(self._form(input_ids), steps, progress)

    def _form(self, ids: torch.Tensor) -> Inputs:
        """A later step, as the description has it."""
        seen = (len(ids), self._window(ids) + 1)
        for call in self._model.served.calls:
            if any(call.inputs.held) and call.inputs.shapes[:2] == ((len(ids), 1), seen):
                return call.inputs
        raise ShapeError(f"prompts of shape {list(ids.shape)} are not served; {self._model.served.summary}")

    def _mask(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        if self.texts.masked:
            return torch.ones_like(ids) if mask is None else mask
        if mask is not None and not bool((mask == 1).all()):
            raise ArgumentError("the model's owner serves prompts without a mask: pass prompts that are not padded")
        return None


# Queries that got no answer: asked again, they go by the name that they had, so that nobody charges them twice.


AGAIN = 2
"""How often a call is asked again where its session is over: it was idle, or its model or its replica went."""
MOST = 64
"""How many of them are remembered."""


class PendingQueries:
    """Of one model, as this party asks it. The others see that a query is one that they had, and nothing else."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}

    @contextmanager
    def name(self, inputs: Inputs) -> Iterator[str]:
        """The name of a query that is asked in the block; if that fails, it is the next one's for the same inputs."""
        known = _digest(inputs) if self._names else b""
        name = self._names.get(known) or os.urandom(16).hex()
        try:
            yield name
        except RangeExceededError:  # which is an answer
            self._names.pop(known, None)
            raise
        except BaseException:
            self._names[known or _digest(inputs)] = name
            while len(self._names) > MOST:
                self._names.pop(next(iter(self._names)))
            raise
        self._names.pop(known, None)


def _digest(inputs: Inputs) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in zip(inputs.names, inputs.tensors, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(raw(tensor))
    return digest.digest()


log = logging.getLogger("sectorch.client")


class RemoteModel:
    """A model at another party, asked by this one: it is called as the plain model is, and gives plain results.

    What it takes is what its owner described: `served.summary` says it in words. Tensors are secret; arguments without
    a secret tensor in them (a public mask, a flag) are part of the model and may be left out. The result comes in
    tuples, lists and dictionaries; an object with named fields comes as a dictionary. Only this party learns it; A and
    S learn its shape. Raises on a call:
        ArgumentError, DtypeError, ShapeError: arguments that the model does not take; nothing was sent.
        NonFiniteError, FixedPointRangeError: a bad input; nothing was sent.
        BusyError: too many calls wait at the server. QuotaError: as much was asked as a party allows.
        MaterialError: a prepared call that is void; it is dropped.
        RangeExceededError: a value between input and result left its range: no result, and A and S do not know.
        RefusedError: a weight of A's does not fit the number format, or A has another version than `only`.
        NetworkError and its kinds: the query ended; nothing of it was revealed, and the next call opens a new session,
        and dials again first where the server was lost.
    """

    def __init__(self, connection: QueryConnection, name: str, scheme: Scheme, only: str | None = None):
        self.connection, self.name = connection, name
        self._scheme = scheme
        self._lock = threading.Lock()
        self._opened: dict[bytes, ClientSession] = {}
        self._live: ClientSession | None = None
        self._asking: ClientSession | None = None
        self._version = ""
        self._unanswered = PendingQueries()
        self.only = only
        """The version that is asked; any one where it is None."""
        first = next(filter(None, map(self._at_its_replica, self._shelves())), None) or self._fresh()
        self.served = first.party.served

    @property
    def version(self) -> str:
        """A name for what was answered with last: a digest of the architecture and of A's own name for its weights.

        Where A has a lasting store, the name changes only with the model; another one has a new key at each start.
        """
        return self._version

    def __repr__(self) -> str:
        return f"RemoteModel('{self.name}', {'; or '.join(call.summary for call in self.served.calls)})"

    def check(self, *args: Any, **kwargs: Any) -> Inputs:
        """Raise what such a call would raise for bad inputs; nothing is sent. Gives them as they are asked with."""
        inputs = match_call(self.served, args, kwargs)
        check_values(inputs, self.served.scheme(self._scheme))
        return inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call; with prepared material for such inputs, online phase only."""
        return self.ask(self.check(*args, **kwargs))

    def ask(self, inputs: Inputs) -> Any:
        """The same for inputs that `check` has given."""
        with self._lock, self._unanswered.name(inputs) as query:
            for _ in range(AGAIN):
                with suppress(SessionOverError):
                    return self._asked(inputs, query)
            return self._asked(inputs, query)

    def _asked(self, inputs: Inputs, query: str) -> Any:
        self._forget_lost()
        opened, calls, then = self._prepared_for(inputs)
        opened = opened or self._fresh()
        work = lambda: opened.party.predict(inputs, calls, then)
        return self._run(opened, Predict, inputs, work, use=calls, then=then, query=query)

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        streamer: Callable[[torch.Tensor], Any] | None = None,
    ) -> torch.Tensor:
        """Continue secret texts with a language model that its owner serves for that (`save_generation`).

        Args: as of `sectorch.generate`; how tokens are chosen, and how many there is room for, the owner has set.

        Raises:
            ArgumentError: it is not served for that, or there is no room for so many tokens.
            DtypeError, ShapeError: prompts or masks that are none, or of a shape that is not served; nothing was sent.
        """
        run = RemoteTexts(self)
        return run(input_ids, attention_mask, max_new_tokens=max_new_tokens, generator=generator, streamer=streamer)

    def in_shares(self, inputs: Inputs, later: Sequence[Inputs] = ()) -> Any:
        """The result of a call that is described as one whose results stay in shares: SharedTensors, of which A and S
        keep a share each, and what this party learns of them.

        A later call takes all tensors in shares of the call before it, in their order.

        Args:
            later: the calls that may follow on these results. They are of the same session, and one that is taken up
                for its prepared calls makes no others: its material is used if it has all of them.

        Raises:
            ArgumentError: tensors in shares that are not those of the last such call; nothing was sent.
        """
        given = [x for x in inputs.tensors if isinstance(x, SharedTensor)]
        check_values(inputs, self.served.scheme(self._scheme))
        with self._lock:
            if not given:
                self._forget_lost()
            following = [self.served.find(call) for call in later]
            opened, calls = self._going_on(inputs, given) if given else self._prepared_for(inputs, following)[:2]
            opened = opened or self._fresh()
            after = opened.party.stayed
            work = lambda: opened.party.predict(inputs, calls)
            return self._run(opened, Predict, inputs, work, use=calls, after=after)

    def _going_on(self, inputs: Inputs, given: list[SharedTensor]) -> tuple[ClientSession, list[int]]:
        """The session in which these tensors stayed, and a prepared call of it."""
        for opened in self._opened.values():
            there = opened.party.staying
            if len(there) == len(given) and all(x is y for x, y in zip(there, given, strict=True)):
                return opened, choose_prepared([self.served.find(inputs)], self._calls(opened))
        raise ArgumentError("tensors in shares are those of the last call, whole and in their order; begin again")

    def _calls(self, opened: ClientSession) -> dict[int, Kind]:
        """The prepared calls of a session."""
        return self.connection.store.shelf(opened.name, opened.binding).calls() | opened.party.coming()

    def prepare(
        self,
        inputs: Like,
        count: int = 1,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """Do all that does not depend on the input, for `count` later calls with such inputs.

        Args:
            inputs: see `nn.calls.like`; nothing but their shapes is used.
            progress: called after each of them.

        Raises:
            StoreFullError: they do not all fit the parties' disk budgets; says how many more do. What is there stays.
        """
        if count < 1:
            raise ArgumentError(f"prepare takes a count of at least one, got {count}")
        inputs = like_inputs(self.served, inputs)
        for left in range(count - 1, -1, -1):
            with self._lock:
                self._forget_lost()
                opened = self._fresh()
                reply = self._run(opened, Prepare, inputs, lambda: self._prepare(opened, inputs))
            if progress is not None:
                progress()
            if left and reply < left:
                raise StoreFullError(
                    f"{reply} more calls of {list(describe_inputs(inputs))} fit the parties' stores and {left} "
                    f"more were asked for; {count - left} were prepared"
                )

    def _prepare(self, opened: ClientSession, inputs: Inputs) -> int:
        """One prepared call; how many more have room. It counts once S has said that all have stored it."""
        kept = opened.party.prepare(inputs)
        shelf = self.connection.store.shelf(opened.name, opened.binding)
        try:
            reply = opened.channel.request(AllStored, opened.channel.deadline.silence)
        except BaseException:
            gone = {call for call, _, _ in kept}
            shelf.keep([call for call in shelf.calls() if call not in gone])
            raise
        size = sum(size for _, _, size in kept)
        return min(reply.more, (shelf.store.budget - shelf.store.used) // max(1, size))

    def prepared(self) -> dict[tuple, int]:
        """Inputs for which material is at hand, and how many calls it serves. A large batch is several calls.

        The inputs are the shape of a single tensor, and else (name, shape) of each.
        """
        return {describe_inputs(self.served.inputs(kind)): count for kind, count in self._at_hand().items()}

    def _at_hand(self) -> Counter[Kind]:
        counts: Counter[Kind] = Counter()
        for shelf in self._shelves():
            opened = self._opened.get(shelf.session)
            coming = {} if opened is None else opened.party.coming()
            counts.update({**shelf.calls(), **coming}.values())
        return counts

    def prepared_calls(self, inputs: Like) -> int:
        """How many calls with such inputs (see `nn.calls.like`) can be asked from material at hand."""
        inputs = like_inputs(self.served, inputs)
        with self._lock:
            opened = next(iter(self._opened.values()), None) or self._fresh()
            wanted = opened.party.pieces(inputs)
        at_hand = self._at_hand()
        return min(at_hand[piece] // wanted.count(piece) for piece in set(wanted))

    def close(self) -> None:
        """End the sessions. Unused material stays in a lasting store, and is dropped on all sides from another."""
        for opened in list(self._opened.values()):
            self._end(opened)

    def _end(self, opened: ClientSession) -> None:
        with suppress(SectorchError):
            opened.channel.tell(Close())
        self._forget(opened)
        opened.channel.close()

    def _shelves(self) -> list[Shelf]:
        """This client's material of the model, the oldest sessions' first."""
        wanted = {
            "client": self.connection.name, "model": self.name, "scheme": repr(self._scheme),
            "authority": self.connection.authority,
        }  # fmt: skip
        here = self.connection.place.label  # what was prepared at another of several servers waits there
        if here:
            wanted["replica"] = here
        reading = {name for name, opened in self._opened.items() if opened.party.coming()}
        return [s for s in self.connection.store.shelves(**wanted) if len(s) or s.session in reading]

    def _prepared_for(
        self, inputs: Inputs, later: Sequence[Kind] = ()
    ) -> tuple[ClientSession | None, list[int], list[int]]:
        """A session with prepared calls for each piece of the batch; the calls, and those of a next such batch."""
        for shelf in self._shelves():
            at_hand = dict(shelf.calls())
            opened = self._opened.get(shelf.session)
            if opened is not None:
                at_hand |= opened.party.coming()
            if sum(max(1, rows) for _, rows in at_hand.values()) < (inputs.rows or 1):
                continue
            if opened is None:
                opened = self._at_its_replica(shelf)
                if opened is None:
                    continue
                at_hand = dict(shelf.calls())
            pieces = opened.party.pieces(inputs)
            calls = choose_prepared(pieces, at_hand)
            left = {call: kind for call, kind in at_hand.items() if call not in calls}
            if calls and (opened.party.fresh or not later or choose_prepared(later, left)):
                return opened, calls, choose_prepared(pieces, left)
        return None, [], []

    def _at_its_replica(self, shelf: Shelf) -> ClientSession | None:
        """The session of that material; None while the replica that has the other half of it is away."""
        try:
            return self._take_up(shelf)
        except UnknownModelError:
            return None

    def _take_up(self, shelf: Shelf) -> ClientSession:
        try:
            opened = open_session(self.connection, [self.name], self._scheme, shelf, self.only)
        except MaterialError as error:
            count = len(shelf)
            shelf.drop()
            raise MaterialError(
                f"{count} prepared calls of '{self.name}' are void and were dropped, none was used: {error}; "
                f"asking again works without them"
            ) from None
        return self._met(opened)

    def _fresh(self) -> ClientSession:
        if self._live is None:
            self._live = self._met(open_session(self.connection, [self.name], self._scheme, only=self.only))
        return self._live

    def _met(self, opened: ClientSession) -> ClientSession:
        """A session that was opened, of the version that is asked.

        Raises:
            RefusedError: it is of another one, and nothing was asked.
        """
        if self.only not in (None, opened.version):
            self._end(opened)
            raise RefusedError(
                f"'{self.name}' answers with version {opened.version} now, and only {self.only} is asked for"
            )
        if self._version not in ("", opened.version):
            facts = {"model": self.name, "version": opened.version, "before": self._version}
            write(log, "another version answers", logging.WARNING, **facts)
            self.served = opened.party.served
        self._version = opened.version
        self._opened[opened.name] = opened
        return opened

    def _forget_lost(self) -> None:
        """Let go of sessions that have ended, as when the server was started anew: others are opened in their place."""
        for opened in [opened for opened in self._opened.values() if opened.channel.ended]:
            self._forget(opened)
            opened.channel.close()

    def _run(
        self, opened: ClientSession, kind: type[ModelQuery], inputs: Inputs, work: Callable[[], Any], **more: Any
    ) -> Any:
        self._asking = opened
        try:
            return run_call(opened, kind, inputs, work, **more)
        except RangeExceededError:
            raise
        except BaseException:
            self._forget(opened)
            raise
        finally:
            self._asking = None

    def give_up(self, error: SectorchError) -> None:
        """From another thread: what is being asked ends with this error, here and at the other parties."""
        asking = self._asking
        if asking is not None:
            asking.channel.fail(error)

    def _forget(self, opened: ClientSession) -> None:
        self._opened.pop(opened.name, None)
        opened.party.close()
        if self._live is opened:
            self._live = None
        if not self.connection.store.lasting:
            self.connection.store.forget(opened.name)


# Several answering parties asked at once: Q learns the sum of their results and no summand (PrivHFL, Figure 5).


class RemoteGroup:
    """The models of several answering parties as one: call it with a plain tensor, get the sum of their results.

    Q sends its input to each of them in shares of its own; every answering party returns its result under a mask that
    only Q knows, S adds them up, and Q takes the masks off the sum (Pi_Agg). An answering party learns that it is one
    of so many; S and Q know which. Rounds and bytes as for one model, times their number, and 2 rounds for the sum.
    Raises on a call what a `RemoteModel` does.
    """

    def __init__(self, connection: QueryConnection, names: list[str], scheme: Scheme):
        names = [model_name(name, "a model's name") for name in names]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ArgumentError(
                f"a sum is over two or more different models, got {names}; ask a single one by .model()"
            )
        self.connection, self.names = connection, names
        self._scheme = scheme
        self._lock = threading.Lock()
        self._unanswered = PendingQueries()
        self._opened: ClientSession | None = None
        self.served = self._open().party.served

    def __repr__(self) -> str:
        return f"RemoteGroup({', '.join(self.names)}; {'; or '.join(call.summary for call in self.served.calls)})"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum of the predictions for a call, which every one of the models takes."""
        inputs = match_call(self.served, args, kwargs)
        check_values(inputs, self._scheme)
        with self._lock:
            opened = self._open()
            sums, beyond = [], None
            at_once = opened.party.rows_at_once(inputs)
            for piece in inputs.split(at_once) if at_once else [inputs]:
                try:
                    with self._unanswered.name(piece) as query:
                        work = lambda piece=piece: opened.party.aggregate(piece)
                        sums.append(run_call(opened, Aggregate, piece, work, query=query))
                except RangeExceededError as error:
                    beyond = error  # all pieces are asked for, so that nobody learns of it
                except BaseException:
                    self._opened = None
                    raise
            if beyond is not None:
                raise beyond
        return torch.cat(sums)

    def close(self) -> None:
        """End the session."""
        if self._opened is not None:
            self._opened.channel.tell(Close())
            self._opened.channel.close()
            self._opened.party.close()
            self._opened = None

    def _open(self) -> ClientSession:
        if self._opened is not None and self._opened.channel.ended:
            self._opened.party.close()
            self._opened.channel.close()
            self._opened = None
        if self._opened is None:
            self._opened = open_session(self.connection, self.names, self._scheme)
        return self._opened
