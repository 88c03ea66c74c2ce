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
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import ArgumentError
from ..identity.identity import PRINT
from ..names import name_of
from ..tables import Entries, in_file, read_table, read_toml, short

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
class Federated:
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

    def named(self, name: str) -> Member:
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


def read(path: str | Path) -> Federated:
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


def parse(said: object) -> Federated:
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
    found = Federated(name, server, tuple(sorted(members, key=lambda member: member.name)), largest)
    for member in found.members:
        if member.server and member.server not in found.servers:
            known = ", ".join(found.servers)
            raise ArgumentError(f"'{member.name}' dials the server {short(member.server)}; there are {known}")
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
            f"got {short(said or None)}"
        )
    return said


def _edges(said: list[list[str]], federated: Federated) -> tuple[tuple[str, str], ...]:
    found = set()
    for entry in said:
        pair = tuple(sorted(federated.member(name).name for name in entry))
        if pair[0] == pair[1]:
            raise ArgumentError(f"an edge goes from '{pair[0]}' to itself")
        found.add((pair[0], pair[1]))
    return tuple(sorted(found))


def text(federated: Federated) -> str:
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
        raise ArgumentError(f"role in {where} is a name as in Roles('A B'), got {short(own.role)}")
    address = "" if own.address is None else address_of(own.address)
    if address and own.server:
        raise ArgumentError(f"server in {where} is the name of a server, and a party with an address has none")
    if not own.identity and (own.role or not address):  # without both it is a server that is in no program
        raise ArgumentError(
            f"identity in {where} is SHA256: and 43 characters, as `sectorch keys show` prints, and is missing"
        )
    return Member(name, own.role, own.identity, address, own.server)
