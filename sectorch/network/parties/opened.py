"""The asking party's end of a session: opening one, and asking in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from ...errors import FrameError, MaterialError, RangeExceededError
from ...nn.inputs import Inputs
from ...nn.served import Kind
from ...ring import check_encodable
from ...ring.scheme import check_limit
from ...session import Q, S
from ...tensor import Scheme, SharedTensor
from ..identity.identity import PinnedIdentities, Pins, context
from ..log import carried
from ..messages import ControlMessage, ModelQuery, OfferedModel, Open, Ready, ServerReply, SessionParts
from ..names import model_name
from ..receipts.receipts import Receipts
from ..store.shelf import Shelf
from ..store.store import Store, fingerprint, version
from ..wire.channel import Channel
from ..wire.link import Link
from .place import Place
from .remote import Part
from .said import reason, scheme_in
from .session import PartySession

R = TypeVar("R", bound=ServerReply)


@dataclass
class Opened:
    """One session that is open at this party, and its end of the channel to S."""

    name: bytes
    channel: Channel
    party: PartySession
    binding: dict
    version: str


class Asker(Protocol):
    """What a query needs of the connection that it goes over (`client.Connection`)."""

    name: str
    authority: str
    identity: Any
    pins: Pins
    receipts: Receipts | None
    place: Place

    @property
    def store(self) -> Store: ...

    def there(self) -> Link: ...

    def ask(self, request: ControlMessage, kind: type[R], patience: float = 30.0) -> R: ...


def open_session(
    connection: Asker, names: list[str], scheme: Scheme, shelf: Shelf | None = None, only: str | None = None
) -> Opened:
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
            ready = channel.request(Ready, channel.deadline.silence)
            shelf.keep(ready.calls)  # a piece that another party has lost is void here too
        parts = [
            Part(part.description, _other(connection, part, scheme, names, place)) for place, part in enumerate(replied)
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
    return Opened(session, channel, party, binding, versions)


def _other(connection: Asker, part: OfferedModel, scheme: Scheme, names: list[str], place: int) -> PinnedIdentities:
    """Who Q and the answering party of this place are to each other, for the model that S says it has."""
    agreed = context(part.description, part.edition, scheme, place, len(names))
    both = {"Q": connection.name, "A": names[place]}
    return PinnedIdentities(both, connection.identity, agreed, connection.pins)


def run(opened: Opened, kind: type[ModelQuery], inputs: Inputs, work: Callable[[], Any], **more: Any) -> Any:
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
                opened.channel.tell(replace(asked, **carried()))
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


def chosen(pieces: Sequence[Kind], at_hand: dict[int, Kind]) -> list[int]:
    """A prepared call for each piece, the first ones first, or none at all."""
    left, calls = dict(sorted(at_hand.items())), []
    for piece in pieces:
        call = next((call for call, kind in left.items() if kind == piece), None)
        if call is None:
            return []
        calls.append(call)
        del left[call]
    return calls
