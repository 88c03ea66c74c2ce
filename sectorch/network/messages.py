"""Messages between the parties' processes beside those of protocols, and tables of TOML files, as declared types.

A message is sent as a JSON object whose entry `do` names its type. `parse_message` refuses other types, unknown entries
and values out of bounds. The receiver's code decides what only it can judge: who may send a message, and when.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import msgspec
from msgspec import Meta

from ..errors import ArgumentError, BusyError, FrameError, VersionError
from .names import NAME, readable, worker_of

MAX_BATCH = 16
"""Largest number of calls in a batch."""
PARTIES = 128
"""Largest number of parties in a session of a federation."""
Run = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""The name of a session, in hexadecimal digits."""
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Call = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""The number of a call of a session."""
Size = Annotated[int, Meta(ge=0, lt=1 << 28)]
"""Number of a program, or of rows."""
Time = Annotated[float, Meta(gt=-1e12, lt=1e12)]
"""Seconds since 1970."""
Release = Annotated[str, Meta(max_length=32)]
"""A release of sectorch; empty where it names none."""
Calls = Annotated[list[Call], Meta(max_length=1 << 20)]
Parties = Annotated[list[str], Meta(max_length=256)]
Sessions = Annotated[list[str], Meta(max_length=1 << 20)]


class ControlMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, tag_field="do"
):
    """A message of one process to another."""

    @property
    def do(self) -> str:
        """The name of its type, as it is sent."""
        return str(self.__struct_config__.tag)


class LinkNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `Link` of numbers; `Link` knows their ranges."""

    rtt_ms: float
    mbit: float


Signed = Annotated[str, Meta(pattern=r"\A([0-9a-f]{192})?\Z")]
"""An Ed25519 public key and its signature in hexadecimal digits, or nothing."""


class NumberFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a `Scheme` that all parties of a session have in common."""

    frac_bits: Count = 20
    network: str | LinkNumbers = "lan"
    limit_bits: Count | None = None
    range_check: bool = True
    audited: Count = 1
    verified: bool = False
    accountable: bool = False


class SignedNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one party of a federation says to another through the server (`federation/policy.py`).

    Attributes:
        body: JSON. key, signature: the author's Ed25519 identity key and its signature, in hexadecimal digits.
    """

    body: str
    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    signature: Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]


# Requests of a client to the server, outside sessions. The server's reply has the request's number.


class ServerRequest(ControlMessage, frozen=True, kw_only=True):
    """A request, to which the server replies."""

    number: Count | None = None


PROTOCOLS = (4,)
"""The versions of the messages and programs that this release speaks, the preferred one first.

A client's first message names those that it speaks, and the server's reply the one of them that both use. That message
and its reply keep their form, and the frames' header keeps version 3 for them; so a later release can speak an older
version, or refuse it in words. A release speaks one version until CHANGELOG.md says otherwise: an older one is added
here only together with tests that run it.
"""


class Hello(ServerRequest, frozen=True, kw_only=True, tag="hello"):
    """Asks which of the server's processes this is; the reply is a `ServerProcess`.

    Attributes:
        protocols: those that the client speaks (`PROTOCOLS`); a release before 4 names none.
        release: of sectorch at the client.
    """

    protocols: Annotated[list[Count], Meta(max_length=64)] = []
    release: Release = ""


@functools.cache
def release() -> str:
    """The release of sectorch that runs; empty where it is not installed."""
    try:
        return metadata.version("sectorch")[:32]
    except metadata.PackageNotFoundError:
        return ""


def speaks(protocols: Sequence[int], named: str) -> str:
    """What a side speaks, for error texts: its protocols, and its release if it has named one."""
    numbers = " or ".join(map(str, protocols)) or "one before 4"
    return f"protocol {numbers}" + (f" (sectorch {readable(named, 32)})" if named else "")


def common_protocol(asked: Hello, client: str) -> int:
    """The version of the protocol that a server uses with a client.

    Raises:
        VersionError: there is none that both speak.
    """
    both = [version for version in PROTOCOLS if version in asked.protocols]
    if not both:
        raise VersionError(
            f"the server speaks {speaks(PROTOCOLS, release())}, and '{client}' speaks "
            f"{speaks(asked.protocols, asked.release)}: install the same release at both"
        )
    return both[0]


class ListModels(ServerRequest, frozen=True, tag="models"):
    """Asks which models are connected."""


class Register(ServerRequest, frozen=True, kw_only=True, tag="register"):
    """An answering party offers a model.

    Attributes:
        edition: its commitment to the weights. keeper: for a replica, the name of its store.
        made: when this version was added, by the party's clock.
        signed: its signature of the version (`identity/commitment.py`).
    """

    name: str
    description: dict[str, Any]
    edition: Annotated[str, Meta(max_length=64)]
    keeper: Annotated[str, Meta(max_length=64)] = ""
    made: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    signed: Signed = ""


class Open(ServerRequest, frozen=True, kw_only=True, tag="open"):
    """A client opens a session.

    Attributes:
        version: the version of the model that it accepts; None accepts any.
        lasting: whether the client's prepared material outlives its connection.
        resume: the session whose prepared material is used. calls: those of which the client has material.
        used: those that it has used, as ranges (`store.as_ranges`).
    """

    session: Run
    models: Annotated[list[str], Meta(min_length=1, max_length=64)]
    scheme: NumberFormat = NumberFormat()
    lasting: bool = False
    version: str | None = None
    resume: Run | None = None
    calls: Calls = []
    used: Calls = []


class Void(ServerRequest, frozen=True, kw_only=True, tag="void"):
    """The sender, an answering party or the server, has no material of these sessions any more."""

    sessions: Sessions


class IsUp(ServerRequest, frozen=True, kw_only=True, tag="up"):
    """This connection takes notes from now on: for the party that is up, or for a process that waits under a tag."""

    time: Time
    tag: str = ""


class WhoIsUp(ServerRequest, frozen=True, kw_only=True, tag="who"):
    """Asks which of these parties are up."""

    parties: Parties


class Note(ServerRequest, frozen=True, kw_only=True, tag="note"):
    """A note for another party."""

    to: str
    note: SignedNote
    tag: str = ""


class Meet(ServerRequest, frozen=True, kw_only=True, tag="meet"):
    """A party waits for the others of a session.

    Attributes:
        digest: of what it is about to run. alone: whether its process opens no other session meanwhile.
    """

    label: Annotated[str, Meta(max_length=200)]
    digest: Annotated[str, Meta(max_length=64)]
    parties: Annotated[list[str], Meta(min_length=2, max_length=PARTIES)]
    time: Time
    alone: bool = False


class Unmeet(ServerRequest, frozen=True, kw_only=True, tag="unmeet"):
    """A party has stopped waiting for a session."""

    label: Annotated[str, Meta(max_length=200)]
    parties: Annotated[list[str], Meta(min_length=2, max_length=PARTIES)]


class PartFinished(ServerRequest, frozen=True, kw_only=True, tag="done"):
    """A party has done its part of a session."""

    meeting: Run


ToServer = Hello | ListModels | Register | Open | Void | IsUp | WhoIsUp | Note | Meet | Unmeet | PartFinished


# Replies of the server; each has `do` ("reply") and `number` besides.


class ServerReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A reply without content."""


class Failure(ServerReply, frozen=True):
    """The error of a request: the name of its type in `sectorch.errors`, and its text."""

    error: str
    text: str


class Models(ServerReply, frozen=True):
    """The names of the models that are connected."""

    models: list[str]


class KeptSessions(ServerReply, frozen=True):
    """The sessions of which the server has material for a model that was registered."""

    sessions: Sessions


class OfferedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of a session that was opened."""

    description: dict[str, Any]
    edition: str
    signed: Signed = ""


class SessionParts(ServerReply, frozen=True):
    """The models of a session that was opened."""

    parts: list[OfferedModel]


class PartiesMissing(ServerReply, frozen=True):
    """The parties that have not come to a session yet."""

    missing: Parties


class PartiesUp(ServerReply, frozen=True):
    """The parties that are up, each with a token that changes when it is started again."""

    up: dict[str, str]


# Messages of the server to a client, outside sessions.


class Serve(ControlMessage, frozen=True, kw_only=True, tag="serve"):
    """An answering party is to take part in a session.

    Attributes:
        client: the client that opened it. place, of: the number of this answering party, and how many there are.
        lasting, resume, calls, used: as of `Open`; what S has used is among them.
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
    used: Calls = []


class SessionBegin(ControlMessage, frozen=True, kw_only=True, tag="begins"):
    """All parties of a session have come."""

    meeting: Run
    label: str
    parties: Parties


class Refusal(ControlMessage, frozen=True, kw_only=True, tag="refused"):
    """A session for which a party waits will not begin: the type of the error, and its text."""

    label: str
    parties: Parties
    error: str
    text: str


class Delivery(ControlMessage, frozen=True, kw_only=True, tag="delivered"):
    """A note of another party."""

    note: SignedNote
    sender: str = msgspec.field(name="from")


ToClient = Serve | Void | SessionBegin | Refusal | Delivery


# Messages within a session.


class Go(ControlMessage, frozen=True, tag="go"):
    """The peer may send the rest of a call."""


class ModelQuery(ControlMessage, frozen=True, kw_only=True):
    """A query of Q.

    Attributes:
        program, rows: the kind of the call (`nn.remote_program.Kind`).
        trace: its W3C trace context, if it is traced.
        query: Q's name for the query, under which it may be repeated; empty if it may not.
    """

    program: Size
    rows: Size
    trace: Annotated[str, Meta(max_length=128)] | None = None
    query: Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")] = ""


class Predict(ModelQuery, frozen=True, kw_only=True, tag="predict"):
    """Asks for a result of the model.

    Attributes:
        use: the prepared calls that it uses. then: those that the next call will use.
        after: if the call takes the shares that the last call left, the number of calls so far that left shares.
        joint, calls: the name of a batch of calls, and their number; S tells A.
    """

    use: Calls = []
    then: Calls = []
    after: Count | None = None
    joint: Annotated[str, Meta(max_length=64)] | None = None
    calls: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 1


class Aggregate(ModelQuery, frozen=True, kw_only=True, tag="aggregate"):
    """Asks for the sum of several models' results."""


class Prepare(ModelQuery, frozen=True, kw_only=True, tag="prepare"):
    """Asks for the offline material of a later call."""


class Close(ControlMessage, frozen=True, tag="close"):
    """The session is over."""


ToFollow = Predict | Aggregate | Prepare | Close


class MaterialReady(ControlMessage, frozen=True, kw_only=True, tag="ready"):
    """In a resumed session, the calls for which the sender has material, and the ranges of those that were used."""

    calls: Calls
    used: Calls = []


class StoredCall(ControlMessage, frozen=True, kw_only=True, tag="stored"):
    """The material of one call was stored: its bytes, and the bytes for which there is room."""

    bytes: Count
    room: Count


class AllStored(ControlMessage, frozen=True, kw_only=True, tag="all-stored"):
    """All parties have stored the material of a call, and have room for `more` such calls."""

    more: Count


T = TypeVar("T")


@overload
def parse_message(kind: type[T], came: object, kinds: str = ...) -> T: ...
@overload
def parse_message(kind: Any, came: object, kinds: str = ...) -> Any: ...
def parse_message(kind: Any, came: object, kinds: str = "message") -> Any:
    """A message that came, as a value of its declared type.

    Args:
        kind: a declared type, or a union of several. kinds: a word for it, for the error text.

    Raises:
        FrameError: it is not of that type; the text names the entry that is wrong, and not its value.
    """
    try:
        return msgspec.convert(came, kind)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        name = came.get("do") if isinstance(came, Mapping) else None
        named = f" '{readable(name, 20)}'" if isinstance(name, str) else ""
        raise FrameError(
            f"a {kinds}{named} of no form that this version knows: {_explain(error)}; both sides must run the same "
            f"version of sectorch"
        ) from None


def _explain(error: Exception) -> str:
    """Which entry is wrong, and what was expected there; never the value that came."""
    if not isinstance(error, msgspec.ValidationError):
        return "it is not Unicode, or nested too deeply"
    text, _, at = str(error).partition(" - at ")
    if text.startswith("Invalid value"):
        return "its type is not known"
    entry = at.strip("`").removeprefix("$").removeprefix(".")
    return readable(f"{entry}: {text[:1].lower()}{text[1:]}" if entry else text[:1].lower() + text[1:], 160)


def message_form(message: Mapping[str, Any] | msgspec.Struct) -> dict[str, Any]:
    """A message as the JSON object that is sent."""
    return dict(message) if isinstance(message, Mapping) else msgspec.to_builtins(message)


MAX_WORKERS = 64
"""Workers of a server, and servers of an answering party."""


class ServerProcess(ServerReply, frozen=True):
    """A server's process: one of several workers behind a port, which may be one of several replicas of an address.

    Attributes:
        worker, workers: the number of this worker, and how many there are.
        replica: the name of all workers behind this port, if they have one.
        protocol: the version of the protocol that both use; a release before 4 names none, which is 0.
        release: of sectorch at the server.
    """

    worker: Annotated[int, Meta(ge=0, lt=MAX_WORKERS)] = 0
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 1
    replica: Annotated[str, Meta(pattern=rf"\A({NAME.pattern})?\Z")] = ""
    protocol: Count = 0
    release: Release = ""

    def __post_init__(self) -> None:
        if self.worker >= self.workers:
            raise ValueError(f"worker {self.worker} of {self.workers}")

    @property
    def label(self) -> str:
        """The name by which material that was prepared here is known; empty if there is one process only."""
        return f"{self.replica}.{self.worker}of{self.workers}" if self.replica or self.workers > 1 else ""

    def check(self, client: str) -> None:
        """Raise BusyError for a client of another worker."""
        if worker_of(client, self.workers) != self.worker:
            raise BusyError(f"this is not the worker of '{client}'; dial again, with this version of sectorch")

    def check_first(self) -> None:
        """Raise BusyError if this is not the first worker, at which the parties of federations meet."""
        if self.worker:
            raise BusyError("parties meet at the first worker of a server; dial again, with this version of sectorch")


# TOML files. `read_table` reads a table as its declared type; an entry's `Meta(description=...)` says what is expected,
# for error texts.


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # before Python 3.11

Table = TypeVar("Table", bound=msgspec.Struct)
Entries = Annotated[dict[str, Any], Meta(description="a table")]
"""Tables by name, each of which is read by itself, so that an error has its name."""
Flag = Annotated[bool, Meta(description="true or false")]
Names = Annotated[list[str], Meta(min_length=1, description="a list of names of parties")]


def read_toml(path: Path, what: str, of: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        what, of: the file and its content, in words for error texts.

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


def read_table(kind: type[Table], content: object, where: str) -> Table:
    """A table as a value of its declared type.

    Args:
        where: the table's name for the user, for error texts.

    Raises:
        ArgumentError: it is no table, or an entry is unknown, missing or of another type; the text has its name, what
            came, and what is expected.
    """
    if not isinstance(content, Mapping):
        raise ArgumentError(f"{where} is a table, got {short_repr(content)}")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    unknown = sorted(set(content) - set(fields))
    if unknown:
        raise ArgumentError(f"{where} has no {short_repr(unknown[0])}; it has {', '.join(fields)}")
    found = {}
    for name, field in fields.items():
        if name in content or field.required:
            try:
                found[field.name] = msgspec.convert(content[name], field.type)
            except (KeyError, msgspec.ValidationError, UnicodeError, RecursionError):
                expected = next(meta.description for meta in field.type.__metadata__ if meta.description)
                came = short_repr(content.get(name))
                raise ArgumentError(f"{name} in {where} is {expected}, got {came}") from None
    return kind(**found)


def in_file(error: ArgumentError, path: Path) -> ArgumentError:
    """The error with the file's name before its text, unless it has that name already."""
    return error if str(path) in str(error) else ArgumentError(f"{path}: {error}")


def short_repr(value: object) -> str:
    """A value for an error text: printable, and at most 60 characters."""
    return ascii(value)[:60] if value is not None else "nothing"
