"""The federation file: who the parties are, how they know each other, and where they meet. All have the same one.

    [federation]
    name = "sum-of-three"
    server = "cloud.example:7100"

    [parties.hospital-a]
    role = "H1"
    identity = "SHA256:..."

Where there are several servers each is a party with an address. A session is at the first of those that take part in
it; sessions of others are at the one that they name, or at the first:

    [parties.principal]
    address = "principal.example:7100"
    role = "S"
    identity = "SHA256:..."

    [parties.hospital-a]
    server = "principal"

It holds no secret, and nothing that one party alone decides: that is in the party's own file (`own.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...cli.command import writable
from ...errors import ArgumentError, IdentityError
from ..identity.certificate_files import check_own_files
from ..identity.identity import PRINT, Credentials, Pins, fingerprint, fingerprint_of
from ..messages import Entries, in_file, read_table, read_toml, short_repr
from ..names import name_of
from ..store import BUDGET

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
SERVER = "server"
"""The name of the server that `server = "HOST:PORT"` in [federation] is."""
MESSAGE = 1 << 30
"""Bytes of the largest message, unless the file names another limit."""


@dataclass(frozen=True)
class Member:
    """A party of the federation.

    Args:
        role: that it plays where roles are not said otherwise.
        identity: fingerprint of its long-term key.
        address: host:port where it listens, if it is a server; others dial out.
        server: the name of the server that it dials; the first one where it is empty.
    """

    name: str
    role: str
    identity: str
    address: str = ""
    server: str = ""


@dataclass(frozen=True)
class FederationFile:
    """What a federation file says.

    Args:
        server: host:port of a server that is no party; empty where servers are parties.
        largest: bytes of the largest message that a party may send.
        edges: pairs of names that may exchange messages; all may where it is None.
    """

    name: str
    server: str
    members: tuple[Member, ...]
    largest: int = MESSAGE
    edges: tuple[tuple[str, str], ...] | None = None

    @property
    def servers(self) -> dict[str, str]:
        """Addresses of the servers by name, in their order: a server of a meeting is the first of those concerned."""
        alone = {SERVER: self.server} if self.server else {}
        return alone | {member.name: member.address for member in self.members if member.address}

    def home(self, name: str) -> str:
        """The name of the server at which a party hears of what others propose, and meets those that are no servers."""
        return self.member(name).server or next(iter(self.servers))

    def meets_at(self, names: Iterable[str]) -> str:
        """The name of the server at which these parties meet: the first that is one of them, so that nobody else's
        machine stands between a server and the others; where none is, the one that all of them name, or the first."""
        among = set(names)
        own = next((server for server in self.servers if server in among), None)
        homes = {self.home(name) for name in among}
        return own or (homes.pop() if len(homes) == 1 else next(iter(self.servers)))

    def check_edge(self, one: str, other: str) -> None:
        """Raises ArgumentError: the file names edges, and this is none."""
        if self.edges is not None and tuple(sorted((one, other))) not in self.edges:
            raise ArgumentError(
                f"the federation '{self.name}' has no edge between '{one}' and '{other}', and they would exchange "
                f'messages: add ["{one}", "{other}"] to edges in [federation], at all parties'
            )

    @property
    def digest(self) -> str:
        """Of what it says, comments and order aside: the parties of a session have the same."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def member(self, name: str) -> Member:
        """Raises ArgumentError: nobody of that name."""
        found = next((member for member in self.members if member.name == name), None)
        if found is None:
            known = ", ".join(member.name for member in self.members)
            raise ArgumentError(f"the federation '{self.name}' has no party '{name}'; its parties are {known}")
        return found

    def member_named(self, name: str) -> Member:
        """The party of that name, or the one that plays the role of that name.

        Raises:
            ArgumentError: nobody, or several that play it.
        """
        played = [member for member in self.members if name in (member.name, member.role)]
        own = [member for member in played if member.name == name]
        found = own or played
        if len(found) == 1:
            return found[0]
        if found:
            raise ArgumentError(f"{', '.join(m.name for m in found)} all play {name} in '{self.name}'; one party does")
        known = ", ".join(f"{m.name} ({m.role})" if m.role else m.name for m in self.members)
        raise ArgumentError(
            f"nobody in the federation '{self.name}' is or plays {name}; there are {known}: give a party "
            f'role = "{name}"'
        )


def read_federation(path: str | Path) -> FederationFile:
    """A federation file.

    Raises:
        ArgumentError: it is not there, or not one; in one line, with what is wrong in it.
    """
    try:
        return parse(read_toml(Path(path), "the federation file", "a federation"))
    except ArgumentError as error:
        raise in_file(error, Path(path)) from None


class _File(msgspec.Struct, frozen=True):
    federation: Entries
    parties: Entries


class _Head(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(description="a text")] = ""
    server: Annotated[str, Meta(description="HOST:PORT")] = ""
    largest_message_mb: Annotated[int, Meta(ge=1, le=4096, description="a whole number from 1 to 4096")] = MESSAGE >> 20
    edges: Annotated[
        list[Annotated[list[str], Meta(min_length=2, max_length=2)]] | None,
        Meta(description='a list of pairs of names, as [["north", "south"]]'),
    ] = None


class _Party(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(description="a name as in Roles('A B')")] = ""
    identity: Annotated[
        str,
        Meta(
            pattern=rf"\A{PRINT.pattern}\Z",
            description="SHA256: and 43 characters, as `sectorch keys show` prints",
        ),
    ] = ""
    address: Annotated[str | None, Meta(description="HOST:PORT")] = None
    server: Annotated[str, Meta(description="the name of a server")] = ""


def parse(said: object) -> FederationFile:
    """The same of what TOML says. Raises ArgumentError."""
    file = read_table(_File, said, "the file")
    head = read_table(_Head, file.federation, "[federation]")
    members = [_member(name, table) for name, table in file.parties.items()]
    if len(members) < 2:
        raise ArgumentError("a federation has at least two parties, each with a table [parties.NAME]")
    _different(members)
    name = name_of(head.name, "the name in [federation]")
    server = "" if not head.server and any(m.address for m in members) else address_of(head.server)
    largest = head.largest_message_mb << 20
    found = FederationFile(name, server, tuple(sorted(members, key=lambda member: member.name)), largest)
    for member in found.members:
        if member.server and member.server not in found.servers:
            known = ", ".join(found.servers)
            raise ArgumentError(f"'{member.name}' dials the server {short_repr(member.server)}; there are {known}")
    return found if head.edges is None else replace(found, edges=_edges(head.edges, found))


def _different(members: list[Member]) -> None:
    """Whether nobody can be taken for another one."""
    seen: dict[str, str] = {}
    for member in members:
        if member.identity and seen.setdefault(member.identity, member.name) != member.name:
            other = seen[member.identity]
            raise ArgumentError(f"'{other}' and '{member.name}' have the same identity key; each has its own")
        twin = next((m.name for m in members if m is not member and m.name.lower() == member.name.lower()), None)
        if twin is not None:
            raise ArgumentError(
                f"'{twin}' and '{member.name}' are one name: the names of their files would be the same"
            )
        player = next((m.name for m in members if m is not member and m.role == member.name), None)
        if player is not None:
            raise ArgumentError(
                f"'{member.name}' is a party, and the role that '{player}' plays: name the party otherwise"
            )


def address_of(said: str) -> str:
    """HOST:PORT. Raises ArgumentError."""
    if not _ADDRESS.fullmatch(said) or not 0 < int(said.rsplit(":", 1)[1]) < 65536:
        raise ArgumentError(
            f'server = "HOST:PORT" is missing in [federation], or address = "HOST:PORT" of a party that is a server, '
            f"got {short_repr(said or None)}"
        )
    return said


def _edges(said: list[list[str]], federated: FederationFile) -> tuple[tuple[str, str], ...]:
    found = set()
    for entry in said:
        pair = tuple(sorted(federated.member(name).name for name in entry))
        if pair[0] == pair[1]:
            raise ArgumentError(f"an edge goes from '{pair[0]}' to itself")
        found.add((pair[0], pair[1]))
    return tuple(sorted(found))


def federation_text(federated: FederationFile) -> str:
    """As TOML, which `read` gives back."""
    lines = ["[federation]", f'name = "{federated.name}"']
    if federated.server:
        lines.append(f'server = "{federated.server}"')
    if federated.largest != MESSAGE:
        lines.append(f"largest_message_mb = {federated.largest >> 20}")
    if federated.edges is not None:
        lines += ["edges = [", *(f'    ["{one}", "{other}"],' for one, other in federated.edges), "]"]
    for member in federated.members:
        name = member.name if _BARE.fullmatch(member.name) else f'"{member.name}"'
        said = {"role": member.role, "identity": member.identity, "address": member.address, "server": member.server}
        lines += ["", f"[parties.{name}]", *(f'{key} = "{value}"' for key, value in said.items() if value)]
    return "\n".join(lines) + "\n"


def _member(name: str, said: object) -> Member:
    where = f"[parties.{name_of(name, 'the name of a table in [parties]')}]"
    own = read_table(_Party, said, where)
    if own.role and not own.role.isidentifier():
        raise ArgumentError(f"role in {where} is a name as in Roles('A B'), got {short_repr(own.role)}")
    address = "" if own.address is None else address_of(own.address)
    if address and own.server:
        raise ArgumentError(f"server in {where} is the name of a server, and a party with an address has none")
    if not own.identity and (own.role or not address):  # without both it is a server that is in no program
        raise ArgumentError(
            f"identity in {where} is SHA256: and 43 characters, as `sectorch keys show` prints, and is missing"
        )
    return Member(name, own.role, own.identity, address, own.server)


# Clients that a party knows from its federation's file, in place of a file of pins.


class ListedPins(Pins):
    """Fingerprints by name, of those alone that may ask, or be asked.

    Args:
        where: the file that says so, for messages.
    """

    def __init__(self, known: Mapping[str, str], where: str):
        super().__init__(where)
        self._known = dict(known)

    def fingerprints(self) -> dict[str, str]:
        return dict(self._known)

    def check(self, name: str, public: bytes) -> None:
        wanted, came = self._known.get(name), fingerprint(public)
        if wanted is None:
            raise IdentityError(
                f"{self.path} does not list '{ascii(name)[1:-1][:64]}'",
                told=f"the other party has not accepted that '{ascii(name)[1:-1][:64]}' asks",
            )
        if came != wanted:
            raise IdentityError(
                f"the federation file names the key {wanted} for '{name}', and this one is {came}: somebody may stand "
                f"in between",
                told=f"the other party's federation file names another key for '{name}' than {came}",
            )


# A party's own file, NAME.toml beside the federation file: what one party alone decides, and the others need not know.
#
#     [files]
#     folder = "."                # NAME.pem, NAME-key.pem, NAME-identity.pem and ca.pem, as `sectorch keys` leaves them
#     store = "north-store"
#     receipts = "north-receipts"
#
#     [limits]
#     runs = 2
#
#     [[accept]]                  # see `policy.py`; `sectorch federation accept` writes these
#     program = "secure_sum.py:program"
#
# It is a file of its own for three reasons. All parties of a session sign the digest of the federation file, so that a
# change of it is a change at all of them; whom a party lets ask, and where its files lie, changes often and concerns
# nobody else. What a party accepts tells others what it has. And who may write the federation file must not be able to
# have a party accept anything: whoever can write this one can, and so nobody else may.


_WRITTEN = ("results", "receipts", "log", "store")


_Whole = Annotated[int, Meta(gt=0, lt=10**9, description="a whole number above 0")]
_Above = Annotated[float, Meta(gt=0, lt=1e9, description="a number above 0")]
_Path = Annotated[str, Meta(min_length=1, description="a path")]


class PartyLimits(msgspec.Struct, frozen=True):
    """What a party bounds.

    Args:
        runs: programs at once. run_seconds: of one of them.
        wait_seconds: for the others to come. patience_seconds: without a word that mean that a party hangs.
        drain_seconds: that SIGTERM leaves to what runs.
        store_gb: of prepared material.
        calls: of a server, at once. call_seconds: that a party may hold up a server's call.
    """

    runs: _Whole = 2
    run_seconds: _Above = 86400.0
    wait_seconds: _Above = 60.0
    patience_seconds: _Above = 60.0
    drain_seconds: _Above = 30.0
    store_gb: _Above = BUDGET / 1e9
    calls: _Whole = 2
    call_seconds: _Above = 600.0


@dataclass(frozen=True)
class PartyConfig:
    """What NAME.toml says, or nothing of it.

    Args:
        folder: where certificate, keys and CA are. listen: where a server listens; at its address's port if empty.
        accept: tables of what is accepted, which `policy.py` reads.
    """

    path: Path
    folder: Path
    files: Mapping[str, Path] = field(default_factory=dict)
    limits: PartyLimits = field(default_factory=PartyLimits)
    listen: str = ""
    accept: tuple[Mapping[str, Any], ...] = ()

    def within(self, path: str) -> Path:
        """A path that the file names: from its own folder."""
        return self.path.parent / path

    def results(self, name: str) -> Path:
        """The folder of what a party learns."""
        return self.files.get("results", self.path.parent / f"{name}-results")

    def check_room(self, name: str) -> None:
        """Whether there is room where this party writes. Raises ArgumentError."""
        for key, folder in {"results": self.results(name), **self.files}.items():
            if key in _WRITTEN:
                writable(folder.parent if key == "log" else folder, f"{key} in [files] of {self.path}")

    def receipts(self, name: str, role: str) -> Path | None:
        """The file of a party's receipts in a role, in a folder that is made; None if none are kept.

        Raises:
            ArgumentError: the folder cannot be made.
        """
        folder = self.files.get("receipts")
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ArgumentError(f"cannot make the folder of receipts {folder}: {error.strerror}") from None
        return None if folder is None else folder / f"{name}-{role}.receipts"


def party_file(federation: Path, name: str) -> Path:
    """Where a party's own file is."""
    return federation.parent / f"{name}.toml"


def read_party_config(federation: str | Path, name: str, folder: str | Path | None = None) -> PartyConfig:
    """A party's own file.

    Args:
        federation: the path of the federation file.
        folder: where the keys are, whatever the file says.

    Raises:
        ArgumentError: what it says is not right. IdentityError: others may write it.
    """
    path = party_file(Path(federation), name_of(name, "the name of a party"))
    if path == Path(federation):
        raise ArgumentError(f"{path} cannot be '{name}'s own file as well: give the federation file another name")
    if not path.exists():
        return PartyConfig(path, path.parent if folder is None else Path(folder))
    if os.name == "posix" and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise IdentityError(f"others can write {path}, and so say what '{name}' accepts: chmod go-w {path}")
    try:
        own = _parse(path, read_toml(path, "the party's own file", "a party"))
    except ArgumentError as error:
        raise in_file(error, path) from None
    return own if folder is None else PartyConfig(path, Path(folder), own.files, own.limits, own.listen, own.accept)


class _Files(msgspec.Struct, frozen=True, omit_defaults=True):
    folder: _Path = ""
    results: _Path = ""
    receipts: _Path = ""
    log: _Path = ""
    store: _Path = ""
    store_key: _Path = ""
    data: _Path = ""


class _Server(msgspec.Struct, frozen=True):
    listen: Annotated[str, Meta(description="HOST:PORT")]


class _PartyFile(msgspec.Struct, frozen=True):
    files: Entries = {}
    limits: Entries = {}
    server: Entries = {}
    accept: Annotated[list[dict[str, Any]], Meta(description="a list of tables, each under [[accept]]")] = []


def _parse(path: Path, said: object) -> PartyConfig:
    file = read_table(_PartyFile, said, "a party's own file")
    files = msgspec.to_builtins(read_table(_Files, file.files, "[files]"))
    paths = {key: path.parent / value for key, value in files.items()}
    listen = address_of(read_table(_Server, file.server, "[server]").listen) if file.server else ""
    limits = read_table(PartyLimits, file.limits, "[limits]")
    return PartyConfig(path, paths.pop("folder", path.parent), paths, limits, listen, tuple(file.accept))


def credentials(federated: FederationFile, name: str, folder: Path) -> Credentials:
    """A party's own files, checked against each other and the federation file before anything is sent.

    Raises:
        ArgumentError: no such party, or a file is missing.
        IdentityError: files of another party, keys that others can read, or that the federation file does not name; a
            certificate that is not good for calling, or not now.
    """
    member = federated.member(name)
    if not member.identity:
        raise ArgumentError(f"'{name}' is a server in no program: it has no identity in the federation file")
    own = check_own_files(
        folder / f"{name}.pem", folder / f"{name}-key.pem", folder / "ca.pem", folder / f"{name}-identity.pem"
    )
    if own.name != name:
        raise IdentityError(f"the certificate {folder / name}.pem is for '{own.name}', and not for '{name}'")
    found = fingerprint_of(own.identity or b"")
    if found != member.identity:
        raise IdentityError(
            f"{folder / name}-identity.pem has the fingerprint {found}, and the federation file names "
            f"{member.identity} for '{name}': the others would refuse you; mend the file at all parties"
        )
    return own


def server_credentials(name: str, folder: Path) -> Credentials:
    """What a server shows to those that dial: NAME-server.pem, or NAME.pem where it is in no program.

    Raises: as `credentials`.
    """
    stem = f"{name}-server" if (folder / f"{name}-server.pem").exists() else name
    identity = folder / f"{name}-identity.pem"
    return check_own_files(
        folder / f"{stem}.pem", folder / f"{stem}-key.pem", folder / "ca.pem", identity if identity.exists() else None,
        serving=True,
    )  # fmt: skip
