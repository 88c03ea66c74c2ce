"""All parties in this process, or none.

`LocalRuntime` holds every party: the default for development, and the oracle in tests. It protects nothing, since one
process sees all shares; what it shows is what the parties would compute, send and learn. A value that two parties hold
is one tensor here, and a computation that both would do (on a value that both hold) is done once.

`DryRuntime` holds no party: a program runs on shapes and its messages are counted.
"""

from __future__ import annotations

import os

import torch

from ...errors import KeyAgreementError, UnsupportedDeviceError
from ..ledger import observers
from ..net import Party, Phase
from ..steps import Sent
from ..streams import PairKey


class LocalRuntime:
    """Every party is here; a message is handed over as it is. Streams are drawn on the host and moved to `device`.

    Raises:
        UnsupportedDeviceError: neither the CPU nor a CUDA device that is here.
    """

    def __init__(self, parties: frozenset[Party], device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "meta") and not (self.device.type == "cuda" and torch.cuda.is_available()):
            raise UnsupportedDeviceError(
                f"sessions compute on the CPU, or on a CUDA device that torch has here, got {self.device}: leave the "
                f"device out, and keep model and input on the CPU"
            )
        self.session = os.urandom(16)
        self.here = parties
        self._keys: dict[frozenset[Party], PairKey] = {}

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        key = self._keys.get(pair)
        if key is None:
            raise KeyAgreementError(f"{sorted(p.name for p in pair)} hold no pair key yet: run the seed protocol first")
        return key.words(label, call, draw, count).to(self.device)

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        for observer in observers():
            observer.message(line, value)
        return value

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        key = PairKey(bytes(secret.tolist()), self.session)
        if not self._keys.setdefault(pair, key).same_secret(key):
            raise KeyAgreementError(f"{sorted(p.name for p in pair)} did not agree on one key")

    def forget(self, call: int) -> None:
        for key in tuple(self._keys.values()):
            key.forget(call)

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        for observer in observers():
            observer.computed(path, owners, phase, seconds)


class DryRuntime:
    """Nobody is here: shapes only. Messages reach the observers as meta tensors."""

    def __init__(self):
        self.session = os.urandom(16)
        self.here: frozenset[Party] = frozenset()

    def draw(self, pair, label, call, draw, count) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device="meta")

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        for observer in observers():
            observer.message(line, value)
        return value

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        pass

    def forget(self, call: int) -> None:
        pass

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        pass
