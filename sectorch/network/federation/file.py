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
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..identity.identity import PRINT
from ..names import name_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # the same, before Python 3.11

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
        return parse(toml(Path(path), "the federation file"))
    except ArgumentError as error:
        raise in_file(error, Path(path)) from None


def toml(path: Path, what: str) -> dict[str, Any]:
    """What a file of TOML says. Raises ArgumentError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {what} {path}: {error.strerror}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is not TOML of a federation: it is nested too deeply") from None
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        twice = "; a party's name, and each key, stands there once" if "Cannot" in str(error) else ""
        raise ArgumentError(f"{path} is not TOML: {error}{twice}") from None


def in_file(error: ArgumentError, path: Path) -> ArgumentError:
    """The error with the file's name, once."""
    return error if str(path) in str(error) else ArgumentError(f"{path}: {error}")


def parse(said: Mapping[str, Any]) -> Federated:
    """The same of what TOML says. Raises ArgumentError."""
    only(said, ("federation", "parties"), "the file")
    head, parties = table(said, "federation"), table(said, "parties")
    only(head, ("name", "server", "largest_message_mb", "edges"), "[federation]")
    largest = head.get("largest_message_mb", MESSAGE >> 20)
    if type(largest) is not int or not 1 <= largest <= 4096:
        raise ArgumentError(f"largest_message_mb is a whole number from 1 to 4096, got {short(largest)}")
    members = [_member(name, table(parties, name, "parties.")) for name in parties]
    if len(members) < 2:
        raise ArgumentError("a federation has at least two parties, each with a table [parties.NAME]")
    _different(members)
    name = name_of(head.get("name"), "the name in [federation]")
    server = "" if "server" not in head and any(m.address for m in members) else address_of(head.get("server"))
    found = Federated(name, server, tuple(sorted(members, key=lambda member: member.name)), largest << 20)
    for member in found.members:
        if member.server and member.server not in found.servers:
            known = ", ".join(found.servers)
            raise ArgumentError(f"'{member.name}' dials the server {short(member.server)}; there are {known}")
    return replace(found, edges=_edges(head["edges"], found)) if "edges" in head else found


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


def address_of(said: object) -> str:
    """HOST:PORT. Raises ArgumentError."""
    if not isinstance(said, str) or not _ADDRESS.fullmatch(said) or not 0 < int(said.rsplit(":", 1)[1]) < 65536:
        raise ArgumentError(
            f'server = "HOST:PORT" is missing in [federation], or address = "HOST:PORT" of a party that is a server, '
            f"got {short(said)}"
        )
    return said


def _edges(said: object, federated: Federated) -> tuple[tuple[str, str], ...]:
    found = set()
    for entry in said if isinstance(said, list) else [said]:
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(name, str) for name in entry):
            raise ArgumentError(f'edges is a list of pairs of names, as [["north", "south"]], got {short(entry)}')
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


def _member(name: str, said: Mapping[str, Any]) -> Member:
    where = f"[parties.{name_of(name, 'the name of a table in [parties]')}]"
    only(said, ("role", "identity", "address", "server"), where)
    role, identity = said.get("role", ""), said.get("identity")
    if not isinstance(role, str) or (role and not role.isidentifier()):
        raise ArgumentError(f"role in {where} is a name as in Roles('A B'), got {short(role)}")
    address = address_of(said["address"]) if "address" in said else ""
    server = said.get("server", "")
    if not isinstance(server, str) or (address and server):
        raise ArgumentError(f"server in {where} is the name of a server, and a party with an address has none")
    if identity is None and address and not role:
        identity = ""  # a server that is in no program
    elif not isinstance(identity, str) or not PRINT.fullmatch(identity):
        raise ArgumentError(
            f"identity in {where} is SHA256: and 43 characters, as `sectorch keys show` prints, got {short(identity)}"
        )
    return Member(name, role, identity, address, server)


def table(said: Mapping[str, Any], name: str, before: str = "") -> Mapping[str, Any]:
    """The table of that name. Raises ArgumentError."""
    found = said.get(name)
    if not isinstance(found, Mapping):
        raise ArgumentError(f"a table [{before}{name}] is missing")
    return found


def only(said: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raises ArgumentError: there is a key that is not known."""
    strange = sorted(set(said) - set(known))
    if strange:
        raise ArgumentError(f"{where} has no {short(strange[0])}; it has {', '.join(known)}")


def short(value: object) -> str:
    """What came, for a message."""
    return ascii(value)[:60] if value is not None else "nothing"
