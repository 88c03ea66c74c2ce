"""A party's own file, NAME.toml beside the federation file: what one party alone decides, and the others need not know.

    [files]
    folder = "."                # NAME.pem, NAME-key.pem, NAME-identity.pem and ca.pem, as `sectorch keys` leaves them
    store = "north-store"
    receipts = "north-receipts"

    [limits]
    runs = 2

    [[accept]]                  # see `policy.py`; `sectorch federation accept` writes these
    program = "secure_sum.py:program"

It is a file of its own for three reasons. All parties of a session sign the digest of the federation file, so that a
change of it is a change at all of them; whom a party lets ask, and where its files lie, changes often and concerns
nobody else. What a party accepts tells others what it has. And who may write the federation file must not be able to
have a party accept anything: whoever can write this one can, and so nobody else may.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...cli.command import writable
from ...errors import ArgumentError, IdentityError
from ..identity.certificates import Credentials
from ..identity.identity import fingerprint_of
from ..identity.ready import ready
from ..names import name_of
from ..store.store import BUDGET
from .file import Federated, address_of, in_file, only, short, table, toml

_WRITTEN = ("results", "receipts", "log", "store")
FILES = ("folder", "results", "receipts", "log", "store", "store_key", "data")


@dataclass(frozen=True)
class Limits:
    """What a party bounds.

    Args:
        runs: programs at once. run_seconds: of one of them.
        wait_seconds: for the others to come. patience_seconds: without a word that mean that a party hangs.
        drain_seconds: that SIGTERM leaves to what runs.
        store_gb: of prepared material.
        calls: of a server, at once. call_seconds: that a party may hold up a server's call.
    """

    runs: int = 2
    run_seconds: float = 86400.0
    wait_seconds: float = 60.0
    patience_seconds: float = 60.0
    drain_seconds: float = 30.0
    store_gb: float = BUDGET / 1e9
    calls: int = 2
    call_seconds: float = 600.0


@dataclass(frozen=True)
class Own:
    """What NAME.toml says, or nothing of it.

    Args:
        folder: where certificate, keys and CA are. listen: where a server listens; at its address's port if empty.
        accept: tables of what is accepted, which `policy.py` reads.
    """

    path: Path
    folder: Path
    files: Mapping[str, Path] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
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


def beside(federation: Path, name: str) -> Path:
    """Where a party's own file is."""
    return federation.parent / f"{name}.toml"


def read_own(federation: str | Path, name: str, folder: str | Path | None = None) -> Own:
    """A party's own file.

    Args:
        federation: the path of the federation file.
        folder: where the keys are, whatever the file says.

    Raises:
        ArgumentError: what it says is not right. IdentityError: others may write it.
    """
    path = beside(Path(federation), name_of(name, "the name of a party"))
    if path == Path(federation):
        raise ArgumentError(f"{path} cannot be '{name}'s own file as well: give the federation file another name")
    if not path.exists():
        return Own(path, path.parent if folder is None else Path(folder))
    if os.name == "posix" and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise IdentityError(f"others can write {path}, and so say what '{name}' accepts: chmod go-w {path}")
    try:
        own = _parse(path, toml(path, "the party's own file"))
    except ArgumentError as error:
        raise in_file(error, path) from None
    return own if folder is None else Own(path, Path(folder), own.files, own.limits, own.listen, own.accept)


def _parse(path: Path, said: Mapping[str, Any]) -> Own:
    only(said, ("files", "limits", "server", "accept"), "a party's own file")
    files = {}
    for key, value in _optional(said, "files", FILES).items():
        if not isinstance(value, str) or not value:
            raise ArgumentError(f"{key} in [files] is a path, got {short(value)}")
        files[key] = path.parent / value
    limits = {}
    for key, value in _optional(said, "limits", tuple(Limits.__dataclass_fields__)).items():
        kind = int if key in ("runs", "calls") else float
        if type(value) not in (int, kind) or not 0 < value < 1e9:
            words = "whole number" if kind is int else "number"
            raise ArgumentError(f"{key} in [limits] is a {words} above 0, got {short(value)}")
        limits[key] = kind(value)
    server = _optional(said, "server", ("listen",))
    accept = said.get("accept", [])
    if not isinstance(accept, list) or not all(isinstance(entry, Mapping) for entry in accept):
        raise ArgumentError("accept is a list of tables, each under [[accept]]")
    return Own(
        path, files.pop("folder", path.parent), files, Limits(**limits),
        address_of(server["listen"]) if server else "", tuple(accept),
    )  # fmt: skip


def _optional(said: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    found = table(said, name) if name in said else {}
    only(found, known, f"[{name}]")
    return found


def credentials(federated: Federated, name: str, folder: Path) -> Credentials:
    """A party's own files, checked against each other and the federation file before anything is sent.

    Raises:
        ArgumentError: no such party, or a file is missing.
        IdentityError: files of another party, keys that others can read, or that the federation file does not name; a
            certificate that is not good for calling, or not now.
    """
    member = federated.member(name)
    if not member.identity:
        raise ArgumentError(f"'{name}' is a server in no program: it has no identity in the federation file")
    own = ready(folder / f"{name}.pem", folder / f"{name}-key.pem", folder / "ca.pem", folder / f"{name}-identity.pem")
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
    return ready(
        folder / f"{stem}.pem", folder / f"{stem}-key.pem", folder / "ca.pem", identity if identity.exists() else None,
        serving=True,
    )  # fmt: skip
