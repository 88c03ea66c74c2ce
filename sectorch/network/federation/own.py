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
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...cli.command import writable
from ...errors import ArgumentError, IdentityError
from ..identity.certificates import Credentials
from ..identity.identity import fingerprint_of
from ..identity.ready import ready
from ..names import name_of
from ..store.store import BUDGET
from ..tables import Entries, in_file, read_table, read_toml
from .file import Federated, address_of

_WRITTEN = ("results", "receipts", "log", "store")


_Whole = Annotated[int, Meta(gt=0, lt=10**9, description="a whole number above 0")]
_Above = Annotated[float, Meta(gt=0, lt=1e9, description="a number above 0")]
_Path = Annotated[str, Meta(min_length=1, description="a path")]


class Limits(msgspec.Struct, frozen=True):
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
        own = _parse(path, read_toml(path, "the party's own file", "a party"))
    except ArgumentError as error:
        raise in_file(error, path) from None
    return own if folder is None else Own(path, Path(folder), own.files, own.limits, own.listen, own.accept)


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


class _File(msgspec.Struct, frozen=True):
    files: Entries = {}
    limits: Entries = {}
    server: Entries = {}
    accept: Annotated[list[dict[str, Any]], Meta(description="a list of tables, each under [[accept]]")] = []


def _parse(path: Path, said: object) -> Own:
    file = read_table(_File, said, "a party's own file")
    files = msgspec.to_builtins(read_table(_Files, file.files, "[files]"))
    paths = {key: path.parent / value for key, value in files.items()}
    listen = address_of(read_table(_Server, file.server, "[server]").listen) if file.server else ""
    limits = read_table(Limits, file.limits, "[limits]")
    return Own(path, paths.pop("folder", path.parent), paths, limits, listen, tuple(file.accept))


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
