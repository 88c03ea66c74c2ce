"""The federation file: who the parties are, how they know each other, and where they meet. All have the same one.

    [federation]
    name = "sum-of-three"
    server = "cloud.example:7100"

    [parties.hospital-a]
    role = "H1"
    identity = "SHA256:..."

It holds no secret. What a party has of its own (certificate, keys, the CA's certificate) lies beside the file or in a
folder that the party names, as `sectorch keys` leaves it: NAME.pem, NAME-key.pem, NAME-identity.pem, ca.pem.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, IdentityError
from ..identity.certificates import Credentials
from ..identity.identity import fingerprint_of
from ..names import name_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # the same, before Python 3.11

_PRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
MESSAGE = 1 << 30
"""Bytes of the largest message, unless the file names another limit."""


@dataclass(frozen=True)
class Member:
    """A party of the federation.

    Args:
        role: that it plays where roles are not said otherwise.
        identity: fingerprint of its long-term key.
    """

    name: str
    role: str
    identity: str


@dataclass(frozen=True)
class Federated:
    """What a federation file says.

    Args:
        largest: bytes of the largest message that a party may send.
    """

    name: str
    server: str
    members: tuple[Member, ...]
    largest: int = MESSAGE

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
    path = Path(path)
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read the federation file {path}: {error.strerror}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is not TOML of a federation: it is nested too deeply") from None
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        raise ArgumentError(f"{path} is not TOML: {error}") from None
    try:
        return parse(said)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def parse(said: Mapping[str, Any]) -> Federated:
    """The same of what TOML says. Raises ArgumentError."""
    _only(said, ("federation", "parties"), "the file")
    head, parties = _table(said, "federation"), _table(said, "parties")
    _only(head, ("name", "server", "largest_message_mb"), "[federation]")
    server = head.get("server")
    if not isinstance(server, str) or not _ADDRESS.fullmatch(server) or not 0 < int(server.rsplit(":", 1)[1]) < 65536:
        raise ArgumentError(f'server = "HOST:PORT" is missing in [federation], got {_short(server)}')
    largest = head.get("largest_message_mb", MESSAGE >> 20)
    if type(largest) is not int or not 1 <= largest <= 4096:
        raise ArgumentError(f"largest_message_mb is a whole number from 1 to 4096, got {_short(largest)}")
    members = [_member(name, _table(parties, name, "parties.")) for name in parties]
    if len(members) < 2:
        raise ArgumentError("a federation has at least two parties, each with a table [parties.NAME]")
    seen: dict[str, str] = {}
    for member in members:
        if seen.setdefault(member.identity, member.name) != member.name:
            other = seen[member.identity]
            raise ArgumentError(f"'{other}' and '{member.name}' have the same identity key; each has its own")
    name = name_of(head.get("name"), "the name in [federation]")
    return Federated(name, server, tuple(sorted(members, key=lambda member: member.name)), largest << 20)


def text(federated: Federated) -> str:
    """As TOML, which `read` gives back."""
    lines = ["[federation]", f'name = "{federated.name}"', f'server = "{federated.server}"']
    if federated.largest != MESSAGE:
        lines.append(f"largest_message_mb = {federated.largest >> 20}")
    for member in federated.members:
        name = member.name if _BARE.fullmatch(member.name) else f'"{member.name}"'
        lines += ["", f"[parties.{name}]", f'role = "{member.role}"', f'identity = "{member.identity}"']
    return "\n".join(lines) + "\n"


def _member(name: str, said: Mapping[str, Any]) -> Member:
    where = f"[parties.{name_of(name, 'the name of a table in [parties]')}]"
    _only(said, ("role", "identity"), where)
    role, identity = said.get("role", ""), said.get("identity")
    if not isinstance(role, str) or (role and not role.isidentifier()):
        raise ArgumentError(f"role in {where} is a name as in Roles('A B'), got {_short(role)}")
    if not isinstance(identity, str) or not _PRINT.fullmatch(identity):
        raise ArgumentError(
            f"identity in {where} is SHA256: and 43 characters, as `sectorch keys show` prints, got {_short(identity)}"
        )
    return Member(name, role, identity)


def _table(said: Mapping[str, Any], name: str, before: str = "") -> Mapping[str, Any]:
    found = said.get(name)
    if not isinstance(found, Mapping):
        raise ArgumentError(f"a table [{before}{name}] is missing")
    return found


def _only(said: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    strange = sorted(set(said) - set(known))
    if strange:
        raise ArgumentError(f"{where} has no '{_short(strange[0])}'; it has {', '.join(known)}")


def _short(value: object) -> str:
    return ascii(value)[:60] if value is not None else "nothing"


def credentials(federated: Federated, name: str, folder: Path) -> Credentials:
    """A party's own files, checked against each other and the federation file before anything is sent.

    Raises:
        ArgumentError: no such party, or a file is missing.
        IdentityError: files of another party, keys that others can read, or that the federation file does not name.
    """
    member = federated.member(name)
    for kind in ("key", "identity"):
        _private(folder / f"{name}-{kind}.pem")
    own = Credentials.read(
        folder / f"{name}.pem", folder / f"{name}-key.pem", folder / "ca.pem", folder / f"{name}-identity.pem"
    )
    if own.name != name:
        raise IdentityError(f"the certificate {folder / name}.pem is for '{own.name}', and not for '{name}'")
    own.check_dates()
    found = fingerprint_of(own.identity or b"")
    if found != member.identity:
        raise IdentityError(
            f"{folder / name}-identity.pem has the fingerprint {found}, and the federation file names "
            f"{member.identity} for '{name}': the others would refuse you; mend the file at all parties"
        )
    return own


def _private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ArgumentError(
            f"cannot read {path}: {error.strerror}; `sectorch keys request` makes a party's keys"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and os.name == "posix":
        raise IdentityError(f"others can read {path}: chmod 600 {path}, and think of making new keys")
