"""The channels between clients and servers: every message is declared, counted and, if asked, recorded.

Parties are objects that hold their own material only; what one learns of another came through here. A recorded channel
is what leak tests read: `log` is every message in order, `view(name)` all that a party received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ckks import CKKSTensor
from ...errors import DtypeError, UndeclaredMessageError


@dataclass(frozen=True)
class Declared:
    """A kind of message: from which role to which, what hides it, and what the receiver learns from it."""

    sender: str
    receiver: str
    hidden: str
    shows: str = ""


CLIENT, PRINCIPAL, AUXILIARY = "client", "principal", "auxiliary"

MESSAGES: dict[str, Declared] = {
    "model": Declared(CLIENT, "server", "encryption"),
    "test share": Declared(CLIENT, "server", "additive sharing"),
    "test data": Declared(CLIENT, PRINCIPAL, "encryption"),
    "partial output": Declared(AUXILIARY, PRINCIPAL, "encryption, with a fresh encryption of zero"),
    "layer output": Declared(PRINCIPAL, CLIENT, "", "a layer's outputs"),
    "feature share": Declared(CLIENT, "server", "additive sharing"),
    "features": Declared(CLIENT, PRINCIPAL, "encryption"),
    "product material": Declared(CLIENT, "server", "additive sharing"),
    "masked state": Declared("server", "server", "a mask dealt by the decrypting client"),
    "masked sum": Declared(AUXILIARY, PRINCIPAL, "a mask of the auxiliary server, statistically"),
    "masked output": Declared(PRINCIPAL, CLIENT, "a mask of the server, statistically"),
    "correct share": Declared("server", "server", "", "which samples are classified correctly"),
    "prediction": Declared(CLIENT, PRINCIPAL, "encryption"),
    "matches": Declared(PRINCIPAL, CLIENT, "", "which places of a batch are classified correctly"),
    "count": Declared(CLIENT, PRINCIPAL, "", "how many samples are classified correctly"),
}
"""All messages of HESV and SecSV. "server" is either server."""


@dataclass(frozen=True)
class Address:
    """A party's name and role."""

    name: str
    role: str


@dataclass
class Channel:
    """Carries values between parties. `tamper(label, value)` stands for a faulty network, in tests."""

    record: bool = False
    tamper: Callable[[str, Any], Any] | None = None
    log: list[tuple[str, str, str, Any]] = field(default_factory=list)
    bytes: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)

    def send(self, sender: Address, receiver: Address, label: str, value: Any) -> Any:
        """The value as the receiver gets it.

        Raises:
            UndeclaredMessageError: no such message from this role to that.
        """
        declared = MESSAGES.get(label)
        if declared is None or not (_is(sender, declared.sender) and _is(receiver, declared.receiver)):
            raise UndeclaredMessageError(f"no message {label!r} is declared from {sender.role} to {receiver.role}")
        key = (sender.role, receiver.role, label)
        self.messages[key] += 1
        self.bytes[key] += size(value)
        if self.tamper:
            value = self.tamper(label, value)
        if self.record:
            self.log.append((sender.name, receiver.name, label, value))
        return value

    def view(self, name: str) -> list[tuple[str, str, Any]]:
        """(sender, label, value) of all that a party received, if recorded."""
        return [(sender, label, value) for sender, receiver, label, value in self.log if receiver == name]


def _is(party: Address, role: str) -> bool:
    return party.role == role or (role == "server" and party.role in (PRINCIPAL, AUXILIARY))


def size(value: Any) -> int:
    """Bytes of the tensors in a value as they are sent: of a ciphertext its residues, 8 bytes a word; 8 of a number.

    Raises:
        DtypeError: something that has no bytes known.
    """
    if isinstance(value, CKKSTensor):
        return value.ciphertext_bytes
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(size(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(size(v) for v in value)
    if isinstance(value, int | float):
        return 8
    held = [getattr(value, name) for name in ("data", "blocks", "cipher") if hasattr(value, name)]
    if not held:
        raise DtypeError(f"a message holds a {type(value).__name__}, whose bytes nobody counts")
    return size(held[0])
