"""What the parties' processes say to each other beside the messages of protocols, as declared types.

A message goes as a JSON object whose entry `do` names its type. What came is read by `read`, which refuses other types,
unknown entries and values out of bounds, so that the code behind it works with values that are right by themselves. Of
what only the receiver can judge (who may say it, whether it belongs here) the receiver's code decides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import msgspec
from msgspec import Meta

from ..errors import ArgumentError, BusyError, FrameError
from .names import NAME, readable, worker_of

JOINED = 16
"""Calls that are taken together at most."""
PARTIES = 128
"""Parties of one session of a federation at most."""
Run = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""The name of a session, in hexadecimal digits."""
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Call = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""The number of a call of a session."""
Size = Annotated[int, Meta(ge=0, lt=1 << 28)]
"""Number of a program, or of rows."""
Time = Annotated[float, Meta(gt=-1e12, lt=1e12)]
"""Seconds since 1970."""
Calls = Annotated[list[Call], Meta(max_length=1 << 20)]
Parties = Annotated[list[str], Meta(max_length=256)]
Sessions = Annotated[list[str], Meta(max_length=1 << 20)]


class ControlMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, tag_field="do"
):
    """What one process says to another."""

    @property
    def do(self) -> str:
        """The name of its type, as it goes."""
        return str(self.__struct_config__.tag)


class NumberFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a `Scheme` that all parties of a session have in common."""

    frac_bits: Count = 20
    network: str = "lan"
    limit_bits: Count | None = None
    range_check: bool = True
    audited: Count = 1
    verified: bool = False


class SignedNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one party of a federation says to another through the server (`federation/proposals.py`).

    Attributes:
        body: JSON. key, signature: the author's Ed25519 identity key and its signature, in hexadecimal digits.
    """

    body: str
    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    signature: Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]


# What a client says to the server outside sessions; the server replies to each with the same number.


class ServerRequest(ControlMessage, frozen=True, kw_only=True):
    """What the server replies to."""

    number: Count | None = None


class Hello(ServerRequest, frozen=True, tag="hello"):
    """Which of the server's processes is this? Its reply is a `Place`."""


class ListModels(ServerRequest, frozen=True, tag="models"):
    """Which models can be asked?"""


class Register(ServerRequest, frozen=True, kw_only=True, tag="register"):
    """An answering party has a model.

    Attributes:
        edition: its name for the weights. keeper: of a replica, the name of its store.
        made: when the model was made, by the party's clock.
    """

    name: str
    description: dict[str, Any]
    edition: Annotated[str, Meta(max_length=64)]
    keeper: Annotated[str, Meta(max_length=64)] = ""
    made: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0


class Open(ServerRequest, frozen=True, kw_only=True, tag="open"):
    """A client opens a session.

    Attributes:
        version: only with this one of the model; with any where it is None.
        lasting: whether the client keeps prepared material beyond its connection.
        resume: the session whose material is taken up. calls: those of it that the client still has.
    """

    session: Run
    models: Annotated[list[str], Meta(min_length=1, max_length=64)]
    scheme: NumberFormat = NumberFormat()
    lasting: bool = False
    version: str | None = None
    resume: Run | None = None
    calls: Calls = []


class Void(ServerRequest, frozen=True, kw_only=True, tag="void"):
    """The sender has no material of these sessions any more; between an answering party and the server, both ways."""

    sessions: Sessions


class IsUp(ServerRequest, frozen=True, kw_only=True, tag="up"):
    """From now on this connection takes notes: for the party's process that is up, or for whoever waits under a tag."""

    time: Time
    tag: str = ""


class WhoIsUp(ServerRequest, frozen=True, kw_only=True, tag="who"):
    """Which of these parties are up?"""

    parties: Parties


class Note(ServerRequest, frozen=True, kw_only=True, tag="note"):
    """A note for another party."""

    to: str
    note: SignedNote
    tag: str = ""


class Meet(ServerRequest, frozen=True, kw_only=True, tag="meet"):
    """A party waits for the others of a session.

    Attributes:
        digest: of what it is about to do. alone: whether it does nothing else meanwhile.
    """

    label: Annotated[str, Meta(max_length=200)]
    digest: Annotated[str, Meta(max_length=64)]
    parties: Annotated[list[str], Meta(min_length=2, max_length=PARTIES)]
    time: Time
    alone: bool = False


class Unmeet(ServerRequest, frozen=True, kw_only=True, tag="unmeet"):
    """A party does not wait any more."""

    label: Annotated[str, Meta(max_length=200)]
    parties: Annotated[list[str], Meta(min_length=2, max_length=PARTIES)]


class PartFinished(ServerRequest, frozen=True, kw_only=True, tag="done"):
    """A party has done its part of a session."""

    meeting: Run


ToServer = Hello | ListModels | Register | Open | Void | IsUp | WhoIsUp | Note | Meet | Unmeet | PartFinished


# What the server replies, beside `do` and `number`.


class ServerReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A reply without content."""


class Failure(ServerReply, frozen=True):
    """What ended a request: the name of its type in `sectorch.errors`, and its text."""

    error: str
    text: str


class Models(ServerReply, frozen=True):
    """The names of the models that can be asked."""

    models: list[str]


class KeptSessions(ServerReply, frozen=True):
    """The sessions of which the server has material of a model that was registered."""

    sessions: Sessions


class OfferedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of a session that was opened."""

    description: dict[str, Any]
    edition: str


class SessionParts(ServerReply, frozen=True):
    """The models of a session that was opened."""

    parts: list[OfferedModel]


class PartiesMissing(ServerReply, frozen=True):
    """The parties for which a session waits still."""

    missing: Parties


class PartiesUp(ServerReply, frozen=True):
    """The parties that are up, each with a word that changes when it comes again."""

    up: dict[str, str]


# What the server says to a client outside sessions, unasked.


class Serve(ControlMessage, frozen=True, kw_only=True, tag="serve"):
    """An answering party takes part in a session.

    Attributes:
        client: who opened it. place, of: which of how many answering parties this is.
        lasting, resume, calls: as of `Open`.
    """

    session: Run
    client: str = msgspec.field(name="for")
    place: Count
    of: Count
    model: str
    edition: str
    scheme: NumberFormat
    lasting: bool = False
    resume: Run | None = None
    calls: Calls = []


class SessionBegin(ControlMessage, frozen=True, kw_only=True, tag="begins"):
    """All parties of a session that was waited for are there."""

    meeting: Run
    label: str
    parties: Parties


class Refusal(ControlMessage, frozen=True, kw_only=True, tag="refused"):
    """A session that was waited for does not come about: the kind of error, and why."""

    label: str
    parties: Parties
    error: str
    text: str


class Delivery(ControlMessage, frozen=True, kw_only=True, tag="delivered"):
    """A note of another party's."""

    note: SignedNote
    sender: str = msgspec.field(name="from")


ToClient = Serve | Void | SessionBegin | Refusal | Delivery


# What is said in a session.


class Go(ControlMessage, frozen=True, tag="go"):
    """There is room for what the peer sends in a call."""


class ModelQuery(ControlMessage, frozen=True, kw_only=True):
    """What Q asks for.

    Attributes:
        program, rows: the kind of the call (`nn.served.Kind`).
        trace: the W3C trace context that it belongs to, where there is one.
        query: Q's own name for it, by which it may ask again; empty where it may not.
    """

    program: Size
    rows: Size
    trace: Annotated[str, Meta(max_length=128)] | None = None
    query: Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")] = ""


class Predict(ModelQuery, frozen=True, kw_only=True, tag="predict"):
    """A result of the model.

    Attributes:
        use: prepared calls. then: those that the next batch will use.
        after: how many calls left something in shares, where this one takes what the last of them left.
        joint, calls: the name of a group of calls that are taken together, and how many they are; S says so to A.
    """

    use: Calls = []
    then: Calls = []
    after: Count | None = None
    joint: Annotated[str, Meta(max_length=64)] | None = None
    calls: Annotated[int, Meta(ge=1, le=JOINED)] = 1


class Aggregate(ModelQuery, frozen=True, kw_only=True, tag="aggregate"):
    """The sum of several models' results."""


class Prepare(ModelQuery, frozen=True, kw_only=True, tag="prepare"):
    """Offline material of a later call."""


class Close(ControlMessage, frozen=True, tag="close"):
    """The session is over."""


ToFollow = Predict | Aggregate | Prepare | Close


class MaterialReady(ControlMessage, frozen=True, kw_only=True, tag="ready"):
    """The calls of a session that was taken up for which the sender has material."""

    calls: Calls


class StoredCall(ControlMessage, frozen=True, kw_only=True, tag="stored"):
    """Material of one call was stored: its bytes, and bytes for which there is room."""

    bytes: Count
    room: Count


class AllStored(ControlMessage, frozen=True, kw_only=True, tag="all-stored"):
    """All have stored the material of a call, and have room for so many more."""

    more: Count


T = TypeVar("T")


@overload
def parse_message(kind: type[T], came: object, kinds: str = ...) -> T: ...
@overload
def parse_message(kind: Any, came: object, kinds: str = ...) -> Any: ...
def parse_message(kind: Any, came: object, kinds: str = "message") -> Any:
    """What came, as a value of its declared type.

    Args:
        kind: a declared type, or a union of several. kinds: what it is, in a word, for the error.

    Raises:
        FrameError: it is not of that type; the text names the entry, and not what stands in it.
    """
    try:
        return msgspec.convert(came, kind)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        what = came.get("do") if isinstance(came, Mapping) else None
        named = f" '{readable(what, 20)}'" if isinstance(what, str) else ""
        raise FrameError(
            f"a {kinds}{named} of no form that this version knows: {_said(error)}; both sides must run the same "
            f"version of sectorch"
        ) from None


def _said(error: Exception) -> str:
    """Which entry is wrong, and what was expected there; never the value that came."""
    if not isinstance(error, msgspec.ValidationError):
        return "it is not Unicode, or nested too deeply"
    text, _, at = str(error).partition(" - at ")
    if text.startswith("Invalid value"):
        return "its type is not known"
    entry = at.strip("`").removeprefix("$").removeprefix(".")
    return readable(f"{entry}: {text[:1].lower()}{text[1:]}" if entry else text[:1].lower() + text[1:], 160)


def message_form(message: Mapping[str, Any] | msgspec.Struct) -> dict[str, Any]:
    """A message as the JSON object that goes over the network."""
    return dict(message) if isinstance(message, Mapping) else msgspec.to_builtins(message)


# Which of several servers a client is connected to: workers behind one port, and replicas behind one address.


MOST = 64


class ServerProcess(ServerReply, frozen=True):
    """A process that serves, as it says to whoever dials.

    Attributes:
        worker, workers: which of how many behind its port.
        replica: the name of all of these together, if they have one.
    """

    worker: Annotated[int, Meta(ge=0, lt=MOST)] = 0
    workers: Annotated[int, Meta(ge=1, le=MOST)] = 1
    replica: Annotated[str, Meta(pattern=rf"\A({NAME.pattern})?\Z")] = ""

    def __post_init__(self) -> None:
        if self.worker >= self.workers:
            raise ValueError(f"worker {self.worker} of {self.workers}")

    @property
    def label(self) -> str:
        """By which material is known that was prepared here; empty where there is one server only."""
        return f"{self.replica}.{self.worker}of{self.workers}" if self.replica or self.workers > 1 else ""

    def check(self, client: str) -> None:
        """Raise BusyError where a client is another worker's."""
        if worker_of(client, self.workers) != self.worker:
            raise BusyError(f"this is not the worker of '{client}'; dial again, with this version of sectorch")

    def check_first(self) -> None:
        """Raise BusyError where parties do not meet here: those of one session have to be at one worker."""
        if self.worker:
            raise BusyError("parties meet at the first worker of a server; dial again, with this version of sectorch")


# Files of TOML that a party or a federation has: what a table may hold is a declared type, which `read_table` checks.
#
# An entry's `Meta(description=...)` says in words what is expected, for the error where something else came.


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # the same, before Python 3.11

Table = TypeVar("Table", bound=msgspec.Struct)
Entries = Annotated[dict[str, Any], Meta(description="a table")]
"""Of tables under names, each of which is read by itself, so that an error has its name."""
Flag = Annotated[bool, Meta(description="true or false")]
Names = Annotated[list[str], Meta(min_length=1, description="a list of names of parties")]


def read_toml(path: Path, what: str, of: str) -> dict[str, Any]:
    """What a file of TOML says.

    Args:
        what: the file, in words, and `of` what it is, for errors.

    Raises:
        ArgumentError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {what} {path}: {error.strerror}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is not TOML of {of}: it is nested too deeply") from None
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        twice = "; a party's name, and each key, stands there once" if "Cannot" in str(error) else ""
        raise ArgumentError(f"{path} is not TOML: {str(error).splitlines()[0][:200]}{twice}") from None


def read_table(kind: type[Table], said: object, where: str) -> Table:
    """A table as a value of its declared type.

    Args:
        where: the table, as the file's reader knows it.

    Raises:
        ArgumentError: it is no table, or an entry is unknown, missing or of another kind; names it, what came, and what
            is expected.
    """
    if not isinstance(said, Mapping):
        raise ArgumentError(f"{where} is a table, got {short_repr(said)}")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    strange = sorted(set(said) - set(fields))
    if strange:
        raise ArgumentError(f"{where} has no {short_repr(strange[0])}; it has {', '.join(fields)}")
    found = {}
    for name, field in fields.items():
        if name in said or field.required:
            try:
                found[field.name] = msgspec.convert(said[name], field.type)
            except (KeyError, msgspec.ValidationError, UnicodeError, RecursionError):
                came = short_repr(said.get(name))
                raise ArgumentError(f"{name} in {where} is {_expected(field.type)}, got {came}") from None
    return kind(**found)


def _expected(kind: Any) -> str:
    return next(meta.description for meta in kind.__metadata__ if meta.description)


def in_file(error: ArgumentError, path: Path) -> ArgumentError:
    """The error with the file's name, once."""
    return error if str(path) in str(error) else ArgumentError(f"{path}: {error}")


def short_repr(value: object) -> str:
    """What came, for a message."""
    return ascii(value)[:60] if value is not None else "nothing"
