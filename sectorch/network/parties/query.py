"""Q's models: a model at another party, asked over a connection."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...errors import (
    ArgumentError,
    MaterialError,
    RangeExceededError,
    RefusedError,
    SectorchError,
    SessionOverError,
    StoreFullError,
    UnknownModelError,
)
from ...nn.ahead import shown
from ...nn.calls import Like, called, like
from ...nn.inputs import Inputs
from ...nn.served import Kind
from ...tensor import Scheme, SharedTensor
from ..log import write
from ..messages import AllStored, Close, ModelQuery, Predict, Prepare
from ..store.shelf import Shelf
from .opened import Asker, Opened, check_values, chosen, open_session, run
from .texts import RemoteTexts
from .unanswered import AGAIN, Unanswered

log = logging.getLogger("sectorch.client")


class RemoteModel:
    """A model at another party, asked by this one: it is called as the plain model is, and gives plain results.

    What it takes is what its owner described: `served.said` says it in words. Tensors are secret; arguments without a
    secret tensor in them (a public mask, a flag) are part of the model and may be left out. The result comes in tuples,
    lists and dictionaries; an object with named fields comes as a dictionary. Only this party learns it; A and S learn
    its shape. Raises on a call:
        ArgumentError, DtypeError, ShapeError: arguments that the model does not take; nothing was sent.
        NonFiniteError, FixedPointRangeError: a bad input; nothing was sent.
        BusyError: too many calls wait at the server. QuotaError: as much was asked as a party allows.
        MaterialError: a prepared call that is void; it is dropped.
        RangeExceededError: a value between input and result left its range: no result, and A and S do not know.
        RefusedError: a weight of A's does not fit the number format, or A has another version than `only`.
        NetworkError and its kinds: the query ended; nothing of it was revealed, and the next call opens a new session,
        and dials again first where the server was lost.
    """

    def __init__(self, connection: Asker, name: str, scheme: Scheme, only: str | None = None):
        self.connection, self.name = connection, name
        self._scheme = scheme
        self._lock = threading.Lock()
        self._opened: dict[bytes, Opened] = {}
        self._live: Opened | None = None
        self._asking: Opened | None = None
        self._version = ""
        self._unanswered = Unanswered()
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
        return f"RemoteModel('{self.name}', {'; or '.join(call.said for call in self.served.calls)})"

    def check(self, *args: Any, **kwargs: Any) -> Inputs:
        """Raise what such a call would raise for bad inputs; nothing is sent. Gives them as they are asked with."""
        inputs = called(self.served, args, kwargs)
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

    def _going_on(self, inputs: Inputs, given: list[SharedTensor]) -> tuple[Opened, list[int]]:
        """The session in which these tensors stayed, and a prepared call of it."""
        for opened in self._opened.values():
            there = opened.party.staying
            if len(there) == len(given) and all(x is y for x, y in zip(there, given, strict=True)):
                return opened, chosen([self.served.find(inputs)], self._calls(opened))
        raise ArgumentError("tensors in shares are those of the last call, whole and in their order; begin again")

    def _calls(self, opened: Opened) -> dict[int, Kind]:
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
        inputs = like(self.served, inputs)
        for left in range(count - 1, -1, -1):
            with self._lock:
                self._forget_lost()
                opened = self._fresh()
                reply = self._run(opened, Prepare, inputs, lambda: self._prepare(opened, inputs))
            if progress is not None:
                progress()
            if left and reply < left:
                raise StoreFullError(
                    f"{reply} more calls of {list(shown(inputs))} fit the parties' stores and {left} more were "
                    f"asked for; {count - left} were prepared"
                )

    def _prepare(self, opened: Opened, inputs: Inputs) -> int:
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
        return {shown(self.served.inputs(kind)): count for kind, count in self._at_hand().items()}

    def _at_hand(self) -> Counter[Kind]:
        counts: Counter[Kind] = Counter()
        for shelf in self._shelves():
            opened = self._opened.get(shelf.session)
            coming = {} if opened is None else opened.party.coming()
            counts.update({**shelf.calls(), **coming}.values())
        return counts

    def prepared_calls(self, inputs: Like) -> int:
        """How many calls with such inputs (see `nn.calls.like`) can be asked from material at hand."""
        inputs = like(self.served, inputs)
        with self._lock:
            opened = next(iter(self._opened.values()), None) or self._fresh()
            wanted = opened.party.pieces(inputs)
        at_hand = self._at_hand()
        return min(at_hand[piece] // wanted.count(piece) for piece in set(wanted))

    def close(self) -> None:
        """End the sessions. Unused material stays in a lasting store, and is dropped on all sides from another."""
        for opened in list(self._opened.values()):
            self._end(opened)

    def _end(self, opened: Opened) -> None:
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

    def _prepared_for(self, inputs: Inputs, later: Sequence[Kind] = ()) -> tuple[Opened | None, list[int], list[int]]:
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
            calls = chosen(pieces, at_hand)
            left = {call: kind for call, kind in at_hand.items() if call not in calls}
            if calls and (opened.party.fresh or not later or chosen(later, left)):
                return opened, calls, chosen(pieces, left)
        return None, [], []

    def _at_its_replica(self, shelf: Shelf) -> Opened | None:
        """The session of that material; None while the replica that has the other half of it is away."""
        try:
            return self._take_up(shelf)
        except UnknownModelError:
            return None

    def _take_up(self, shelf: Shelf) -> Opened:
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

    def _fresh(self) -> Opened:
        if self._live is None:
            self._live = self._met(open_session(self.connection, [self.name], self._scheme, only=self.only))
        return self._live

    def _met(self, opened: Opened) -> Opened:
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

    def _run(self, opened: Opened, kind: type[ModelQuery], inputs: Inputs, work: Callable[[], Any], **more: Any) -> Any:
        self._asking = opened
        try:
            return run(opened, kind, inputs, work, **more)
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

    def _forget(self, opened: Opened) -> None:
        self._opened.pop(opened.name, None)
        opened.party.close()
        if self._live is opened:
            self._live = None
        if not self.connection.store.lasting:
            self.connection.store.forget(opened.name)
