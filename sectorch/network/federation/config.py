"""The federation file, which all parties share, and the configuration file of one party.

The federation file has the parties, their identity keys, and the servers at which they meet:

    [federation]
    name = "sum-of-three"
    server = "cloud.example:7100"

    [parties.hospital-a]
    role = "H1"
    identity = "SHA256:..."

Where there are several servers, each is a party with an address. A session meets at the first server that takes part in
it. Sessions without one meet at the server that their parties name, or at the first:

    [parties.principal]
    address = "principal.example:7100"
    role = "S"
    identity = "SHA256:..."

    [parties.hospital-a]
    server = "principal"

It holds no secret, and nothing that one party alone decides. That is in the party's own file, NAME.toml beside it:

    [files]
    folder = "."                # NAME.pem, NAME-key.pem, NAME-identity.pem and ca.pem, as `sectorch keys` leaves them
    store = "north-store"
    receipts = "north-receipts"

    [limits]
    runs = 2

    [[accept]]                  # see `policy.py`; `sectorch federation accept` writes these
    program = "secure_sum.py:program"

They are two files for three reasons. The parties of a session sign the digest of the federation file, so a change of it
is a change at all of them, while a party's own decisions change often and concern nobody else. What a party accepts
tells others what it has. And whoever may write the federation file must not be able to make a party accept something:
so nobody but the party may write its own file.
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
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from ...cli.command import writable
from ...errors import ArgumentError, IdentityError
from ..commands.options import check_store_room
from ..identity.certificate_files import check_own_files
from ..identity.identity import PRINT, Credentials, Pins, fingerprint, fingerprint_of
from ..messages import Entries, in_file, read_table, read_toml, short_repr
from ..names import name_of
from ..store import BUDGET

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
SERVER = "server"
"""The name of the server whose address is `server` in [federation]."""
MESSAGE = 1 << 30
"""Bytes of the largest message, unless the file sets another limit."""


@dataclass(frozen=True)
class Member:
    """A party of the federation.

    Args:
        role: the role that it plays unless a program names parties itself.
        identity: fingerprint of its identity key.
        address: host:port at which it listens, if it is a server.
        server: the name of the server that it dials; the first one if empty.
    """

    name: str
    role: str
    identity: str
    address: str = ""
    server: str = ""


@dataclass(frozen=True)
class FederationFile:
    """The content of a federation file.

    Args:
        server: host:port of a server that is no party; empty if servers are parties.
        largest: bytes of the largest message that a party may send.
        edges: pairs of names that may exchange messages; None allows all pairs.
    """

    name: str
    server: str
    members: tuple[Member, ...]
    largest: int = MESSAGE
    edges: tuple[tuple[str, str], ...] | None = None

    @property
    def servers(self) -> dict[str, str]:
        """Addresses of the servers by name, in their order."""
        alone = {SERVER: self.server} if self.server else {}
        return alone | {member.name: member.address for member in self.members if member.address}

    def home(self, name: str) -> str:
        """The name of the server at which a party gets proposals, and meets parties that are no servers."""
        return self.member(name).server or next(iter(self.servers))

    def meets_at(self, names: Iterable[str]) -> str:
        """The name of the server at which these parties meet.

        It is the first server among them, so that no other party's machine relays their frames. If none of them is a
        server, it is the one that all of them name, or else the first.
        """
        parties = set(names)
        own = next((server for server in self.servers if server in parties), None)
        homes = {self.home(name) for name in parties}
        return own or (homes.pop() if len(homes) == 1 else next(iter(self.servers)))

    def check_edge(self, one: str, other: str) -> None:
        """Raises ArgumentError: the file names edges, and not this one."""
        if self.edges is not None and tuple(sorted((one, other))) not in self.edges:
            raise ArgumentError(
                f"the federation '{self.name}' has no edge between '{one}' and '{other}', and they would exchange "
                f'messages: add ["{one}", "{other}"] to edges in [federation], at all parties'
            )

    @property
    def digest(self) -> str:
        """SHA-256 of the content without comments and order; the parties of a session compare it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def member(self, name: str) -> Member:
        """The party of that name. Raises ArgumentError: there is none."""
        found = next((member for member in self.members if member.name == name), None)
        if found is None:
            known = ", ".join(member.name for member in self.members)
            raise ArgumentError(f"the federation '{self.name}' has no party '{name}'; its parties are {known}")
        return found

    def member_named(self, name: str) -> Member:
        """The party of that name, or the one that plays the role of that name.

        Raises:
            ArgumentError: there is none, or several parties play the role.
        """
        players = [member for member in self.members if name in (member.name, member.role)]
        found = [member for member in players if member.name == name] or players
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
    """Read a federation file.

    Raises:
        ArgumentError: it is missing or invalid; the text is one line that says what is wrong.
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
        Meta(pattern=rf"\A{PRINT.pattern}\Z", description="SHA256: and 43 characters, as `sectorch keys show` prints"),
    ] = ""
    address: Annotated[str | None, Meta(description="HOST:PORT")] = None
    server: Annotated[str, Meta(description="the name of a server")] = ""


def parse(content: object) -> FederationFile:
    """A federation file's content, from what TOML gives. Raises ArgumentError."""
    file = read_table(_File, content, "the file")
    head = read_table(_Head, file.federation, "[federation]")
    members = [_member(name, table) for name, table in file.parties.items()]
    if len(members) < 2:
        raise ArgumentError("a federation has at least two parties, each with a table [parties.NAME]")
    _check_distinct(members)
    name = name_of(head.name, "the name in [federation]")
    server = "" if not head.server and any(m.address for m in members) else check_address(head.server)
    largest = head.largest_message_mb << 20
    found = FederationFile(name, server, tuple(sorted(members, key=lambda member: member.name)), largest)
    for member in found.members:
        if member.server and member.server not in found.servers:
            known = ", ".join(found.servers)
            raise ArgumentError(f"'{member.name}' dials the server {short_repr(member.server)}; there are {known}")
    return found if head.edges is None else replace(found, edges=_edges(head.edges, found))


def _check_distinct(members: list[Member]) -> None:
    """Raise ArgumentError where one party could be taken for another."""
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


def check_address(text: str) -> str:
    """A text that is HOST:PORT. Raises ArgumentError."""
    if not _ADDRESS.fullmatch(text) or not 0 < int(text.rsplit(":", 1)[1]) < 65536:
        raise ArgumentError(
            f'server = "HOST:PORT" is missing in [federation], or address = "HOST:PORT" of a party that is a server, '
            f"got {short_repr(text or None)}"
        )
    return text


def _edges(pairs: list[list[str]], federated: FederationFile) -> tuple[tuple[str, str], ...]:
    found = set()
    for entry in pairs:
        pair = tuple(sorted(federated.member(name).name for name in entry))
        if pair[0] == pair[1]:
            raise ArgumentError(f"an edge goes from '{pair[0]}' to itself")
        found.add((pair[0], pair[1]))
    return tuple(sorted(found))


def federation_text(federated: FederationFile) -> str:
    """The file's content as TOML."""
    lines = ["[federation]", f'name = "{federated.name}"']
    if federated.server:
        lines.append(f'server = "{federated.server}"')
    if federated.largest != MESSAGE:
        lines.append(f"largest_message_mb = {federated.largest >> 20}")
    if federated.edges is not None:
        lines += ["edges = [", *(f'    ["{one}", "{other}"],' for one, other in federated.edges), "]"]
    for member in federated.members:
        name = member.name if _BARE.fullmatch(member.name) else f'"{member.name}"'
        own = {"role": member.role, "identity": member.identity, "address": member.address, "server": member.server}
        lines += ["", f"[parties.{name}]", *(f'{key} = "{value}"' for key, value in own.items() if value)]
    return "\n".join(lines) + "\n"


def _member(name: str, table: object) -> Member:
    where = f"[parties.{name_of(name, 'the name of a table in [parties]')}]"
    own = read_table(_Party, table, where)
    if own.role and not own.role.isidentifier():
        raise ArgumentError(f"role in {where} is a name as in Roles('A B'), got {short_repr(own.role)}")
    address = "" if own.address is None else check_address(own.address)
    if address and own.server:
        raise ArgumentError(f"server in {where} is the name of a server, and a party with an address has none")
    if not own.identity and (own.role or not address):  # without both it is a server that takes part in no program
        raise ArgumentError(
            f"identity in {where} is SHA256: and 43 characters, as `sectorch keys show` prints, and is missing"
        )
    return Member(name, own.role, own.identity, address, own.server)


class ListedPins(Pins):
    """Pins from a federation file: the fingerprints of the parties that may ask, or be asked.

    Args:
        where: the file that has them, for error texts.
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


# A party's own file.

_WRITTEN = ("results", "receipts", "log")
"""Entries of [files] that the party writes to, beside its store."""
_Whole = Annotated[int, Meta(gt=0, lt=10**9, description="a whole number above 0")]
_Above = Annotated[float, Meta(gt=0, lt=1e9, description="a number above 0")]
_Path = Annotated[str, Meta(min_length=1, description="a path")]


class PartyLimits(msgspec.Struct, frozen=True):
    """The limits of a party.

    Args:
        runs: programs that run at the same time. run_seconds: longest run.
        wait_seconds: time for the other parties to come. patience_seconds: silence after which a party counts as lost.
        drain_seconds: time for running calls after SIGTERM.
        store_gb: size of the store of prepared material.
        calls: calls of a server that run at the same time. call_seconds: time that a party may hold up one of them.
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
    """The content of a party's own file, or the defaults where there is no file.

    Args:
        folder: of certificate, keys and CA. listen: where a server listens; at its address's port if empty.
        accept: the tables [[accept]], which `policy.py` reads.
        policy, ledger: of [governed]: the file of the policy under which this party's programs may reveal, and the
            folder where their releases are counted; None without that table.
    """

    path: Path
    folder: Path
    files: Mapping[str, Path] = field(default_factory=dict)
    limits: PartyLimits = field(default_factory=PartyLimits)
    listen: str = ""
    accept: tuple[Mapping[str, Any], ...] = ()
    policy: Path | None = None
    ledger: Path | None = None

    def resolve(self, path: str) -> Path:
        """A path in the file, relative to the file's folder."""
        return self.path.parent / path

    def results(self, name: str) -> Path:
        """The folder for the results of runs."""
        return self.files.get("results", self.path.parent / f"{name}-results")

    def check_room(self, name: str) -> None:
        """Check that there is room where this party writes. Raises ArgumentError."""
        for key, folder in {"results": self.results(name), **self.files}.items():
            named = f"{key} in [files] of {self.path}"
            if key == "store":
                check_store_room(folder, named)
            elif key in _WRITTEN:
                writable(folder.parent if key == "log" else folder, named)

    def receipts(self, name: str, role: str) -> Path | None:
        """The file of a party's receipts in a role; makes its folder. None if no receipts are written.

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
    """The path of a party's own file."""
    return federation.parent / f"{name}.toml"


def read_party_config(federation: str | Path, name: str, folder: str | Path | None = None) -> PartyConfig:
    """Read a party's own file.

    Args:
        federation: the path of the federation file.
        folder: of certificate and keys, in place of the one that the file names.

    Raises:
        ArgumentError: it is invalid. IdentityError: others may write it.
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
    return own if folder is None else replace(own, folder=Path(folder))


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


class _Governed(msgspec.Struct, frozen=True):
    policy: _Path
    ledger: _Path


class _PartyFile(msgspec.Struct, frozen=True):
    files: Entries = {}
    governed: Entries = {}
    limits: Entries = {}
    server: Entries = {}
    accept: Annotated[list[dict[str, Any]], Meta(description="a list of tables, each under [[accept]]")] = []


def _parse(path: Path, content: object) -> PartyConfig:
    file = read_table(_PartyFile, content, "a party's own file")
    files = msgspec.to_builtins(read_table(_Files, file.files, "[files]"))
    paths = {key: path.parent / value for key, value in files.items()}
    listen = check_address(read_table(_Server, file.server, "[server]").listen) if file.server else ""
    limits = read_table(PartyLimits, file.limits, "[limits]")
    rule = read_table(_Governed, file.governed, "[governed]") if "governed" in cast(Mapping, content) else None
    return PartyConfig(
        path, paths.pop("folder", path.parent), paths, limits, listen, tuple(file.accept),
        None if rule is None else path.parent / rule.policy, None if rule is None else path.parent / rule.ledger,
    )  # fmt: skip


def credentials(federated: FederationFile, name: str, folder: Path) -> Credentials:
    """A party's certificate and keys, checked against each other and the federation file.

    Raises:
        ArgumentError: there is no such party, or a file is missing.
        IdentityError: files are another party's, others can read a key, the federation file names another key, or the
            certificate is not for clients or not valid now.
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
    """A server's certificate and keys: NAME-server.pem, or NAME.pem for a server that takes part in no program.

    Raises: as `credentials`.
    """
    stem = f"{name}-server" if (folder / f"{name}-server.pem").exists() else name
    identity = folder / f"{name}-identity.pem"
    return check_own_files(
        folder / f"{stem}.pem", folder / f"{stem}-key.pem", folder / "ca.pem", identity if identity.exists() else None,
        serving=True,
    )  # fmt: skip
