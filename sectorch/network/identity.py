"""Long-term Ed25519 identity keys of clients, and the file of those that a client knows.

A certificate says who may talk to the server; an identity key says to another client, past the server, who it talks to.
The file of pins has a line for each name, `NAME SHA256:FINGERPRINT`, and can be written by hand.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from ..errors import ArgumentError, IdentityError
from ..mpc.seed import Identities

log = logging.getLogger("sectorch.identity")


def new_identity() -> bytes:
    """A fresh identity key as PEM."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_identity(pem: bytes) -> Ed25519PrivateKey:
    """The key in a PEM file.

    Raises:
        IdentityError: it holds none.
    """
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError("the identity file does not hold a PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError("the identity file does not hold an Ed25519 key; `sectorch keys identity FILE` makes one")
    return key


def fingerprint(public: bytes) -> str:
    """How people compare keys: SHA256: and 43 characters."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(public).digest()).decode().rstrip("=")


def fingerprint_of(pem: bytes) -> str:
    """The fingerprint of the public half of an identity file."""
    return fingerprint(read_identity(pem).public_key().public_bytes_raw())


def config_folder() -> Path:
    """Where this user's settings are kept."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sectorch"


class Pins:
    """The fingerprints that this client knows, by name.

    Args:
        path: a text file, made when the first name is learned; `pins` in the user's settings unless named.
        required: refuse a name that is not in the file, instead of trusting it on first use.
    """

    def __init__(self, path: str | Path | None = None, required: bool = False):
        self.path = Path(path) if path is not None else config_folder() / "pins"
        self.required = required

    def known(self) -> dict[str, str]:
        """Fingerprints by name.

        Raises:
            IdentityError: the file cannot be read; nobody is trusted then.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise IdentityError(f"cannot read the pins in {self.path}: {type(error).__name__}") from None
        pins: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, print_ = line.rpartition(" ")
            if not name or not print_.startswith("SHA256:") or pins.setdefault(name.strip(), print_) != print_:
                raise IdentityError(f"{self.path}, line {number}: expected `NAME SHA256:...`, each name once")
        return pins

    def check(self, name: str, public: bytes) -> None:
        """Whether `public` is the key of `name`; a name that is new is written down, unless pins are required.

        Raises:
            IdentityError: it is another one (gives both fingerprints), or the name is not known and has to be.
        """
        came = fingerprint(public)
        with self._locked():
            pinned = self.known().get(name)
            if pinned == came:
                return
            if pinned is not None:
                raise IdentityError(
                    f"the identity key of '{name}' has changed: {self.path} knows {pinned}, this one is {came}. "
                    f"Somebody may stand in between. If '{name}' itself confirms the new one: "
                    f"sectorch keys pin '{name}' {came}",
                    told=f"the other party knows '{name}' by another key than {came}, and has to confirm this one",
                )
            if self.required:
                raise IdentityError(
                    f"'{name}' is not in {self.path} and pins are required; its key is {came}. "
                    f"If '{name}' itself confirms it: sectorch keys pin '{name}' {came}",
                    told=f"the other party answers to keys that it has pinned, and '{name}' is not among them; its key "
                    f"is {came}: tell it that fingerprint",
                )
            self._write({**self.known(), name: came})
        log.warning("'%s' is new: trusting its key %s from now on; ask it whether that is right", name, came)

    def pin(self, name: str, print_: str) -> None:
        """Know `name` by this fingerprint, whatever was known before.

        Raises:
            ArgumentError: not a fingerprint.
        """
        if not print_.startswith("SHA256:") or len(print_) != 50 or " " in print_:
            raise ArgumentError(f"a fingerprint is SHA256: and 43 characters, got {print_[:60]!r}")
        if not name.strip() or "\n" in name or name.startswith("#"):
            raise ArgumentError(f"a name is one line of text, got {name[:60]!r}")
        with self._locked():
            self._write({**self.known(), name.strip(): print_})

    def _write(self, pins: dict[str, str]) -> None:
        partial = self.path.with_name(self.path.name + ".new")
        partial.write_text("".join(f"{name} {print_}\n" for name, print_ in sorted(pins.items())), encoding="utf-8")
        partial.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_name(self.path.name + ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except IdentityError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot write the pins to {self.path}: {error.strerror}") from None


@dataclass
class PinnedIdentities(Identities):
    """The names and this client's key for one session; the other client's key is checked against the pins."""

    pins: Pins | None = None

    def trust(self, name: str, public: bytes) -> None:
        if self.pins is not None:
            self.pins.check(name, public)
