"""The querying party Q: models at other parties, called over a connection.

`RemoteModel` is one model, `RemoteGroup` the sum of several, `RemoteTexts` a language model that continues texts. Each
opens sessions (`open_session`) and runs calls in them (`run_call`).

A call that fails ends its session at all parties, and nothing of its result is revealed; the next call opens a new
session. `PendingQueries` gives a repeated query the name of the failed one, so that no quota is charged twice.
"""

from __future__ import annotations

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

from ...config import check_limit
from ...decoys import Decoys, KnownAnswers, Repeats, decoy_call
from ...errors import (
    ArgumentError,
    FrameError,
    IdentityError,
    MaterialError,
    RangeExceededError,
    RefusedError,
    SectorchError,
    SessionOverError,
    ShapeError,
    StoreFullError,
    UnknownModelError,
)
from ...mpc.star.key_agreement import Identities
from ...nn.generation import Cache, TextContinuation
from ...nn.inputs import Inputs
from ...nn.module import describe_inputs
from ...nn.remote_program import Kind
from ...ring import check_encodable
from ...serving.description import Like, like_inputs, match_call
from ...session import Q, S
from ...tensor import Scheme, SharedTensor
from ..identity.commitment import signer_of
from ..identity.identity import PinnedIdentities, Pins, ServerKey, context
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
from ..names import model_name, party_of
from ..receipts import Receipts
from ..store import MaterialBinding, Shelf, Store, fingerprint, tensor_digest, version
from ..wire.channel import Channel, PeerLink
from .session import AnsweringParty, PartySession, abort_reason, scheme_to_message

R = TypeVar("R", bound=ServerReply)


@dataclass
class ClientSession:
    """A session that is open at Q, with its channel to S."""

    name: bytes
    channel: Channel
    party: PartySession
    binding: MaterialBinding
    version: str


class QueryConnection(Protocol):
    """The part of `client.Connection` that a query uses; that module imports this one."""

    name: str
    authority: str
    identity: Any
    pins: Pins
    receipts: Receipts | None
    place: ServerProcess

    @property
    def store(self) -> Store: ...

    def live_link(self) -> PeerLink: ...

    def ask(self, request: ControlMessage, kind: type[R], patience: float = 30.0) -> R: ...


def open_session(
    connection: QueryConnection, names: list[str], scheme: Scheme, shelf: Shelf | None = None, only: str | None = None
) -> ClientSession:
    """Open a session with the models of these names, or resume the one that prepared the material of a shelf.

    Args:
        only: the version of the model to ask for; None takes the latest.

    Raises:
        ArgumentError: a name is invalid; nothing was sent.
        UnknownModelError, BusyError, IdentityError, KeyAgreementError: no session was opened.
        MaterialError: the material is void.
    """
    for name in names:
        model_name(name, "a model's name")
    wire = os.urandom(16)
    session = wire if shelf is None else shelf.session
    request = Open(
        session=wire.hex(), models=names, scheme=scheme_to_message(scheme), lasting=connection.store.lasting,
        version=only, resume=None if shelf is None else session.hex(),
        calls=[] if shelf is None else list(shelf.calls()), used=[] if shelf is None else shelf.used_ranges(),
    )  # fmt: skip
    channel = connection.live_link().open(wire)
    try:
        replied = connection.ask(request, SessionParts).parts
        if len(replied) != len(names):
            raise FrameError("the server's reply lacks the models' descriptions")
        binding = MaterialBinding(
            client=connection.name, model=names[0], fingerprint=fingerprint(replied[0].description),
            edition=replied[0].edition, scheme=repr(scheme), authority=connection.authority,
            replica=connection.place.label,
        )  # fmt: skip
        if shelf is not None:
            if shelf.binding != binding:
                raise MaterialError(f"'{names[0]}' has another model now, or was started again without its store")
            ready = channel.request(MaterialReady, channel.deadline.silence)
            shelf.refuse_used(ready.used, "another party")
            shelf.keep_only(ready.calls)  # a piece is of no use where another party has lost its part
        parts = [
            AnsweringParty(part.description, _identities(connection, part, scheme, names, place))
            for place, part in enumerate(replied)
        ]
        versions = ",".join(version(part.description, part.edition) for part in replied)
        facts = {"client": connection.name, "model": ",".join(names), "version": versions}
        party = PartySession(
            Q, session, {S: channel}, parts, scheme,
            lambda: connection.store.shelf(session, binding), of=len(names), fresh=shelf is None,
            facts=lambda: facts, receipts=connection.receipts,
            commitment=replied[0].signed if len(names) == 1 else None,
        )  # fmt: skip
        for name, part, of in zip(names, replied, parts, strict=True):
            _check_commitment(connection, name, part, of.identities, scheme)
    except BaseException as error:
        channel.abort(abort_reason(error, f"'{connection.name}'"))
        channel.close()
        raise
    return ClientSession(session, channel, party, binding, versions)


def _check_commitment(
    connection: QueryConnection, name: str, part: OfferedModel, identities: Identities, scheme: Scheme
) -> None:
    """Check that the answering party has signed the version of its model.

    Raises:
        IdentityError: another key has, or nobody, where S signs too.
    """
    if not part.signed:
        if scheme.accountable:
            raise IdentityError(f"'{name}' has not signed the version of its model: its release of sectorch is older")
        return
    known = getattr(identities, "proved", "") or connection.pins.fingerprints().get(party_of(name), "")
    if signer_of(part.signed, name, version(part.description, part.edition)) != known:
        raise IdentityError(f"another key than that of '{name}' has signed the version of its model")


def _identities(
    connection: QueryConnection, part: OfferedModel, scheme: Scheme, names: list[str], place: int
) -> PinnedIdentities:
    """The identities of Q and of the answering party at this place, bound to the model that S describes."""
    agreed = context(part.description, part.edition, scheme, place, len(names))
    both = {"Q": connection.name, "A": names[place]}
    return PinnedIdentities(both, connection.identity, agreed, connection.pins)


def run_call(
    opened: ClientSession, kind: type[ModelQuery], inputs: Inputs, work: Callable[[], Any], **more: Any
) -> Any:
    """Send a request in a session and run this party's part of it. A failure ends the session at all parties.

    Args:
        kind: type of the request.
        inputs: of the call.
        work: this party's part.
        more: further fields of the request.

    Returns:
        The result of `work`.

    Raises:
        RangeExceededError: a value left its range. The session goes on, and the other parties do not learn of it.
    """
    try:
        number, rows = opened.party.served.find(inputs)
        result, range_error = None, None
        try:
            asked = kind(program=number, rows=rows, **more)
            with opened.party.logged_query(asked.do, inputs):
                opened.channel.begin_call()
                opened.channel.tell(replace(asked, **trace_entry()))
                opened.party.begin_call(inputs)
                result = work()
        except RangeExceededError as error:
            range_error = error  # the others have done their part; an abort would tell them
        opened.channel.end_call()
    except BaseException as error:
        opened.channel.abort(abort_reason(error, f"'{opened.binding.client}'"))
        opened.channel.close()
        raise
    if range_error is not None:
        raise range_error
    return result


def check_values(inputs: Inputs, scheme: Scheme) -> None:
    """Raise for values that the fixed-point format cannot hold, before anything is sent."""
    for name, x in zip(inputs.names, inputs.tensors, strict=True):
        if isinstance(x, SharedTensor):
            continue
        what = "the input" if inputs.single else f"the input '{name}'"
        check_encodable(x, scheme.frac_bits, what)
        check_limit(x, scheme, what)


def choose_prepared(pieces: Sequence[Kind], prepared: dict[int, Kind]) -> list[int]:
    """A prepared call for each piece, in the order in which they were prepared; empty if one is missing."""
    left, calls = dict(sorted(prepared.items())), []
    for piece in pieces:
        call = next((call for call, kind in left.items() if kind == piece), None)
        if call is None:
            return []
        calls.append(call)
        del left[call]
    return calls


class RemoteTexts(TextContinuation):
    """Continues texts with a language model at another party.

    Raises:
        ArgumentError: the model is not served for generation.
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
        """Prepare the part of one later text that does not depend on the prompt.

        Args:
            input_ids, attention_mask: of the later prompt; only the shapes are used.
            steps: number of steps after the first to prepare; all by default.
            progress: called after each step.

        Raises:
            ShapeError: prompts of this shape are not served.
            StoreFullError: see `RemoteModel.prepare`.
        """
        self._model.prepare(self._first(input_ids, attention_mask, None).meta(), 1, progress)
        steps = self.texts.max_new_tokens - 1 if steps is None else steps
        if steps:
            self._model.prepare(self._form(input_ids), steps, progress)

    def _form(self, ids: torch.Tensor) -> Inputs:
        """The described call of a later step for prompts of this shape."""
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


RETRIES = 2
"""Repetitions of a call whose session has ended: it was idle, or its model was replaced, or its replica was lost."""
MAX_PENDING = 64
"""Names of failed queries that are remembered."""


class PendingQueries:
    """The names of one model's queries that failed, by a digest of their inputs.

    A query with the same inputs gets the same name, by which the other parties do not charge it again. They learn that
    it repeats an earlier query, and nothing else. A decoy is asked for the sake of a query, and is repeated as a decoy:
    else a repeated name would be that of a real call.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._decoys: set[str] = set()

    @contextmanager
    def decoy_or_name(self, inputs: Inputs, coin: Decoys) -> Iterator[tuple[bool, str]]:
        """As `name`, with whether the query is a decoy; the coin says so, once for a name."""
        with self.name(inputs) as name:
            if name not in self._names.values():
                self._decoys.discard(name)
                if coin.flip():
                    self._decoys.add(name)
            decoy = name in self._decoys
            yield decoy, name
        self._decoys.discard(name)

    @contextmanager
    def name(self, inputs: Inputs) -> Iterator[str]:
        """The name of the query that runs in the block. If it fails, the next query with these inputs gets it too."""
        digest = lambda: tensor_digest(zip(inputs.names, inputs.tensors, strict=True))
        known = digest() if self._names else b""
        name = self._names.get(known) or os.urandom(16).hex()
        try:
            yield name
        except RangeExceededError:  # the query was answered: it is charged
            self._names.pop(known, None)
            raise
        except BaseException:
            self._names[known or digest()] = name
            while len(self._names) > MAX_PENDING:
                self._decoys.discard(self._names.pop(next(iter(self._names))))
            raise
        self._names.pop(known, None)


log = logging.getLogger("sectorch.client")


class RemoteModel:
    """A model at another party: called like the plain model, with plain inputs and results.

    The model takes the inputs that its owner described; `served.summary` says in words which. Tensors are secret.
    Arguments without a secret tensor in them (a public mask, a flag) are part of the model and may be left out. Results
    come in tuples, lists and dictionaries; an object with named fields comes as a dictionary. Only this party learns
    the result; A and S learn its shape.

    Raises on a call:
        ArgumentError, DtypeError, ShapeError: the model does not take these arguments; nothing was sent.
        NonFiniteError, FixedPointRangeError: an input is out of range; nothing was sent.
        BusyError: too many calls wait at the server.
        QuotaError: a party's quota for this client is used up.
        MaterialError: the prepared material is void; it is dropped.
        RangeExceededError: a value between input and result left its range. There is no result, and A and S do not
            learn of it.
        RefusedError: a weight of A's does not fit the number format, or A has another version than `only`.
        NetworkError: the query ended without a result. The next call opens a new session, after connecting again where
            the server was lost.
    """

    def __init__(
        self, connection: QueryConnection, name: str, scheme: Scheme, only: str | None = None, decoys: float = 0.0,
        server_key: str = "", known: KnownAnswers | None = None,
    ):  # fmt: skip
        self.connection, self.name = connection, name
        self._scheme, self._coin = scheme, Decoys(decoys)
        self._coin.check(scheme.accountable)
        self._repeats, self._known = Repeats(), known
        if known is not None and not isinstance(known, KnownAnswers):
            raise ArgumentError(f"known is KnownAnswers, got a {type(known).__name__}")
        self._server_key = ServerKey(server_key, first_use=True)
        if server_key and not scheme.accountable:
            raise ArgumentError("a server's key is checked where it signs what it sends: add Scheme(accountable=True)")
        self.decoys_asked, self.decoys_checked = 0, 0
        """How many decoys were asked, and how many of them A has reported to have checked."""
        self._lock = threading.Lock()
        self._sessions: dict[bytes, ClientSession] = {}
        self._current: ClientSession | None = None
        self._active: ClientSession | None = None
        self._version = ""
        self._pending = PendingQueries()
        self.only = only
        """The version that is accepted; any version where None."""
        first = next(filter(None, map(self._resume_if_reachable, self._shelves())), None) or self._current_session()
        self.served = first.party.served

    @property
    def version(self) -> str:
        """The version that answered last: a digest of the architecture and of A's own name for its weights.

        It is stable across restarts of A, which derives that name from its identity key and the weights.
        """
        return self._version

    def __repr__(self) -> str:
        return f"RemoteModel('{self.name}', {'; or '.join(call.summary for call in self.served.calls)})"

    def check(self, *args: Any, **kwargs: Any) -> Inputs:
        """Check the arguments of a call, as the call itself does; nothing is sent. Returns them for `ask`."""
        inputs = match_call(self.served, args, kwargs)
        check_values(inputs, self.served.scheme(self._scheme))
        return inputs

    def rows_within(self, inputs: Inputs, size: int) -> int:
        """Rows for whose call a party takes `size` bytes at most, by an estimate: a multiple of those of `inputs`.

        Raises:
            NetworkError: no session could be opened.
        """
        with self._lock:
            return self._current_session().party.rows_within(inputs, size)

    def can_cut(self, inputs: Inputs) -> bool:
        """Whether the results of pieces of a batch are those of the batch: no row's result depends on another row.

        Raises:
            NetworkError: no session could be opened.
        """
        with self._lock:
            return self._current_session().party.can_cut(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call. Where material is prepared for such inputs, only the online phase runs."""
        return self.ask(self.check(*args, **kwargs))

    def ask(self, inputs: Inputs) -> Any:
        """The result for inputs that `check` returned. A call whose session has ended is repeated in a new one.

        Known rows and decoys come first, as many as the coins say.
        """
        with self._lock:
            while self._known is not None and self._known.flip():
                self._ask_known(inputs, self._known)
            return self._ask_after_decoys(inputs)

    def _ask_known(self, inputs: Inputs, known: KnownAnswers) -> None:
        """Ask known rows, as many as the inputs have."""
        if not inputs.single or not inputs.rows or inputs.in_shares:
            raise ArgumentError("known answers are of models of one plain input with rows")
        rows = known.choose(inputs.rows)
        asked = inputs.with_tensors([known.x[rows].to(inputs.dtypes[0])])
        if asked.key != inputs.key:
            raise ShapeError(f"known rows of {list(known.x.shape[1:])} for inputs of {list(inputs.shapes[0])}")
        check_values(asked, self.served.scheme(self._scheme))
        try:
            found = self._ask_after_decoys(asked)
        except RangeExceededError:
            found = None
        if found is not None and not isinstance(found, torch.Tensor):
            raise ArgumentError("known answers are of models whose result is one tensor")
        known.check(rows, found)

    def _ask_after_decoys(self, inputs: Inputs) -> Any:
        while True:
            with self._pending.decoy_or_name(inputs, self._coin) as (decoy, query):
                if not decoy:
                    return self._ask_again(inputs, query)
                with decoy_call(), suppress(RangeExceededError):
                    self._ask_again(inputs, query)

    def _ask_again(self, inputs: Inputs, query: str) -> Any:
        for _ in range(RETRIES):
            with suppress(SessionOverError):
                return self._ask_once(inputs, query)
        return self._ask_once(inputs, query)

    def _ask_once(self, inputs: Inputs, query: str) -> Any:
        self._drop_ended_sessions()
        opened, calls, then = self._prepared_for(inputs)
        opened = opened or self._current_session()
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
        """Continue secret texts with a language model that its owner serves for generation (`save_generation`).

        The arguments are those of `sectorch.generate`. The owner has set how tokens are chosen and the largest number
        of new tokens.

        Raises:
            ArgumentError: the model is not served for generation, or not for so many tokens.
            DtypeError, ShapeError: the prompts or masks are invalid, or of a shape that is not served; nothing was
                sent.
        """
        run = RemoteTexts(self)
        return run(input_ids, attention_mask, max_new_tokens=max_new_tokens, generator=generator, streamer=streamer)

    def in_shares(self, inputs: Inputs, later: Sequence[Inputs] = ()) -> Any:
        """The result of a call that is described as one whose results stay in shares.

        A and S keep a share each of the SharedTensors of the result; the other tensors are opened to this party. The
        next call takes all tensors in shares of the call before it, in their order.

        Args:
            later: the calls that may follow on these results. They run in the same session. A resumed session can make
                prepared calls only, so it is used only if it has material for all of them.

        Raises:
            ArgumentError: the tensors in shares are not those of the last such call; nothing was sent.
        """
        given = [x for x in inputs.tensors if isinstance(x, SharedTensor)]
        check_values(inputs, self.served.scheme(self._scheme))
        with self._lock:
            if not given:
                self._drop_ended_sessions()
            following = [self.served.find(call) for call in later]
            opened, calls = (
                self._continue_session(inputs, given) if given else self._prepared_for(inputs, following)[:2]
            )
            opened = opened or self._current_session()
            after = opened.party.retained_calls
            work = lambda: opened.party.predict(inputs, calls)
            return self._run(opened, Predict, inputs, work, use=calls, after=after)

    def _continue_session(self, inputs: Inputs, given: list[SharedTensor]) -> tuple[ClientSession, list[int]]:
        """The session that has these tensors in shares, and a prepared call of it."""
        for opened in self._sessions.values():
            retained = opened.party.retained
            if len(retained) == len(given) and all(x is y for x, y in zip(retained, given, strict=True)):
                return opened, choose_prepared([self.served.find(inputs)], self._prepared_calls(opened))
        raise ArgumentError("tensors in shares are those of the last call, whole and in their order; begin again")

    def _prepared_calls(self, opened: ClientSession) -> dict[int, Kind]:
        """The prepared calls of a session, on disk and read ahead."""
        return self.connection.store.shelf(opened.name, opened.binding).calls() | opened.party.calls_read_ahead()

    def prepare(self, inputs: Like, count: int = 1, progress: Callable[[], None] | None = None) -> None:
        """Run the offline phase of `count` later calls with such inputs, and store its material.

        Args:
            inputs: see `serving.description.like_inputs`; only their shapes are used.
            progress: called after each call.

        Raises:
            StoreFullError: not all calls fit the parties' disk budgets. Those that were prepared stay.
        """
        if count < 1:
            raise ArgumentError(f"prepare takes a count of at least one, got {count}")
        inputs = like_inputs(self.served, inputs)
        for left in range(count - 1, -1, -1):
            with self._lock:
                self._drop_ended_sessions()
                opened = self._current_session()
                reply = self._run(opened, Prepare, inputs, lambda: self._prepare(opened, inputs))
            if progress is not None:
                progress()
            if left and reply < left:
                raise StoreFullError(
                    f"{reply} more calls of {list(describe_inputs(inputs))} fit the parties' stores and {left} "
                    f"more were asked for; {count - left} were prepared"
                )

    def _prepare(self, opened: ClientSession, inputs: Inputs) -> int:
        """Prepare one call; returns how many more fit the stores. It counts once S confirms that all stored it."""
        pieces = opened.party.prepare(inputs)
        shelf = self.connection.store.shelf(opened.name, opened.binding)
        try:
            reply = opened.channel.request(AllStored, opened.channel.deadline.silence)
        except BaseException:
            gone = {call for call, _, _ in pieces}
            shelf.keep_only([call for call in shelf.calls() if call not in gone])
            raise
        size = sum(size for _, _, size in pieces)
        return min(reply.more, (shelf.store.budget - shelf.store.used) // max(1, size))

    def prepared(self) -> dict[tuple, int]:
        """The number of prepared calls, by their inputs. A large batch takes several.

        A key is the shape of a single input tensor, or (name, shape) of each of several.
        """
        return {describe_inputs(self.served.inputs(kind)): count for kind, count in self._prepared_counts().items()}

    def _prepared_counts(self) -> Counter[Kind]:
        counts: Counter[Kind] = Counter()
        for shelf in self._shelves():
            opened = self._sessions.get(shelf.session)
            coming = {} if opened is None else opened.party.calls_read_ahead()
            counts.update({**shelf.calls(), **coming}.values())
        return counts

    def prepared_calls(self, inputs: Like) -> int:
        """The number of prepared calls with such inputs; see `serving.description.like_inputs`."""
        inputs = like_inputs(self.served, inputs)
        with self._lock:
            opened = next(iter(self._sessions.values()), None) or self._current_session()
            wanted = opened.party.pieces(inputs)
        prepared = self._prepared_counts()
        return min(prepared[piece] // wanted.count(piece) for piece in set(wanted))

    def close(self) -> None:
        """End the sessions. Unused material stays in a lasting store; otherwise all parties drop it."""
        for opened in list(self._sessions.values()):
            self._end(opened)

    def _end(self, opened: ClientSession) -> None:
        with suppress(SectorchError):
            opened.channel.tell(Close())
        self._forget(opened)
        opened.channel.close()

    def _shelves(self) -> list[Shelf]:
        """This client's prepared material for the model, that of the oldest session first."""
        wanted = {
            "client": self.connection.name, "model": self.name, "scheme": repr(self._scheme),
            "authority": self.connection.authority,
        }  # fmt: skip
        label = self.connection.place.label  # material of another server process can be used there only
        if label:
            wanted["replica"] = label
        if self._scheme.accountable:  # S signs in the session that has prepared them
            return [s for s in self.connection.store.shelves(**wanted) if s.session in self._sessions]
        reading = {name for name, opened in self._sessions.items() if opened.party.calls_read_ahead()}
        return [s for s in self.connection.store.shelves(**wanted) if len(s) or s.session in reading]

    def _prepared_for(
        self, inputs: Inputs, later: Sequence[Kind] = ()
    ) -> tuple[ClientSession | None, list[int], list[int]]:
        """A session with a prepared call for each piece of the batch; these calls, and those of a next such batch."""
        for shelf in self._shelves():
            prepared = dict(shelf.calls())
            opened = self._sessions.get(shelf.session)
            if opened is not None:
                prepared |= opened.party.calls_read_ahead()
            if sum(max(1, rows) for _, rows in prepared.values()) < (inputs.rows or 1):
                continue
            if opened is None:
                opened = self._resume_if_reachable(shelf)
                if opened is None:
                    continue
                prepared = dict(shelf.calls())
            pieces = opened.party.pieces(inputs)
            calls = choose_prepared(pieces, prepared)
            left = {call: kind for call, kind in prepared.items() if call not in calls}
            if calls and (opened.party.fresh or not later or choose_prepared(later, left)):
                return opened, calls, choose_prepared(pieces, left)
        return None, [], []

    def _resume_if_reachable(self, shelf: Shelf) -> ClientSession | None:
        """The session of that material; None while the replica with the other half of it is not connected."""
        try:
            return self._resume(shelf)
        except UnknownModelError:
            return None

    def _resume(self, shelf: Shelf) -> ClientSession:
        try:
            opened = open_session(self.connection, [self.name], self._scheme, shelf, self.only)
        except MaterialError as error:
            count = len(shelf)
            shelf.drop()
            raise MaterialError(
                f"{count} prepared calls of '{self.name}' are void and were dropped, none was used: {error}; "
                f"asking again works without them"
            ) from None
        return self._add_session(opened)

    def _current_session(self) -> ClientSession:
        if self._current is None:
            self._current = self._add_session(open_session(self.connection, [self.name], self._scheme, only=self.only))
        return self._current

    def _add_session(self, opened: ClientSession) -> ClientSession:
        """Add a session that was just opened.

        Raises:
            RefusedError: it is of another version than `only`; it is ended, and nothing was asked.
        """
        if self.only not in (None, opened.version):
            self._end(opened)
            raise RefusedError(
                f"'{self.name}' answers with version {opened.version} now, and only {self.only} is asked for"
            )
        if self._version not in ("", opened.version):
            facts = {"model": self.name, "version": opened.version, "before": self._version}
            write(log, "another version answers", logging.WARNING, **facts)
            self.served, self._repeats = opened.party.served, Repeats()
        self._version = opened.version
        opened.party.session.statements.trust = self._server_key.trust
        opened.party.session.statements.repeats = self._repeats
        self._sessions[opened.name] = opened
        return opened

    def _drop_ended_sessions(self) -> None:
        """Drop sessions that have ended, for example because the server was restarted."""
        for opened in [opened for opened in self._sessions.values() if opened.channel.ended]:
            self._forget(opened)
            opened.channel.close()

    def _run(
        self, opened: ClientSession, kind: type[ModelQuery], inputs: Inputs, work: Callable[[], Any], **more: Any
    ) -> Any:
        self._active, statements = opened, opened.party.session.statements
        before = statements.asked, statements.checked
        try:
            return run_call(opened, kind, inputs, work, **more)
        except RangeExceededError:
            raise
        except BaseException as error:
            self._forget(opened)
            if isinstance(error, MaterialError):
                self._drop_void(opened)
            raise
        finally:
            self._active = None
            self.decoys_asked += statements.asked - before[0]
            self.decoys_checked += statements.checked - before[1]

    def _drop_void(self, failed: ClientSession) -> None:
        """Drop what another party has lost of a session whose material failed, so that the user meets one error."""
        with suppress(SectorchError):
            for shelf in self._shelves():
                if shelf.session == failed.name:
                    self._resume_if_reachable(shelf)

    def give_up(self, error: SectorchError) -> None:
        """End the running call with this error, here and at the other parties. Called from another thread."""
        asking = self._active
        if asking is not None:
            asking.channel.fail(error)

    def _forget(self, opened: ClientSession) -> None:
        self._sessions.pop(opened.name, None)
        opened.party.close()
        if self._current is opened:
            self._current = None
        if not self.connection.store.lasting:
            self.connection.store.forget(opened.name)


class RemoteGroup:
    """The models of several answering parties as one, whose result is the sum of theirs (PrivHFL, Figure 5, Pi_Agg).

    Q shares its input with each party separately. Every answering party returns its result under a mask that only Q
    knows, S adds the results, and Q removes the masks from the sum; so Q learns no summand. An answering party learns
    the number of parties; S and Q know which they are. Rounds and bytes are those of one model times the number of
    models, and 2 rounds for the sum. A call raises what a `RemoteModel` raises.
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
        self._pending = PendingQueries()
        self._session: ClientSession | None = None
        self.served = self._open().party.served

    def __repr__(self) -> str:
        return f"RemoteGroup({', '.join(self.names)}; {'; or '.join(call.summary for call in self.served.calls)})"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum of the predictions for a call, which every one of the models takes."""
        inputs = match_call(self.served, args, kwargs)
        check_values(inputs, self._scheme)
        with self._lock:
            opened = self._open()
            sums, range_error = [], None
            at_once = opened.party.rows_at_once(inputs)
            for piece in inputs.split(at_once) if at_once else [inputs]:
                try:
                    with self._pending.name(piece) as query:
                        work = lambda piece=piece: opened.party.aggregate(piece)
                        sums.append(run_call(opened, Aggregate, piece, work, query=query))
                except RangeExceededError as error:
                    range_error = error  # the other pieces still run: stopping here would tell the other parties
                except BaseException:
                    self._session = None
                    raise
            if range_error is not None:
                raise range_error
        return torch.cat(sums)

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.channel.tell(Close())
            self._session.channel.close()
            self._session.party.close()
            self._session = None

    def _open(self) -> ClientSession:
        if self._session is not None and self._session.channel.ended:
            self._session.party.close()
            self._session.channel.close()
            self._session = None
        if self._session is None:
            self._session = open_session(self.connection, self.names, self._scheme)
        return self._session
