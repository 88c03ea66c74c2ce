"""All parties in this process, or none.

`LocalRuntime` holds every party: the default for development, and the reference in tests. It protects nothing, since
one process sees all shares; it shows what the parties would compute, send and learn. A value that two parties hold is
one tensor here, and a computation that both would do on it is done once.

`DryRuntime` holds no party: a program runs on shapes and its messages are counted.
"""

from __future__ import annotations

import os

import torch

from ...errors import UnsupportedDeviceError
from ..ledger import observers
from ..net import Party, Phase, Sent
from ..pages import keep_pages
from ..streams import PairKey, PairKeys
from .cuda_graphs import Graphs


def device_named(device: torch.device | str) -> torch.device:
    """The device with its number: "cuda" is the current device, which tensors name as "cuda:0", say."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


class LocalRuntime:
    """Every party is here, and a message is the tensor itself. Streams are drawn on the host and moved to `device`.

    Raises:
        UnsupportedDeviceError: the device is neither the CPU nor a CUDA device that torch has.
    """

    def __init__(self, parties: frozenset[Party], device: torch.device | str = "cpu"):
        self.device = device_named(device)
        if self.device.type not in ("cpu", "meta") and not (self.device.type == "cuda" and torch.cuda.is_available()):
            raise UnsupportedDeviceError(
                f"sessions compute on the CPU, or on a CUDA device that torch has here, got {self.device}: leave the "
                f"device out, and keep model and input on the CPU"
            )
        self._on_cuda = self.device.type == "cuda"
        keep_pages()
        self.session = os.urandom(16)
        self.here = parties
        self.keys = PairKeys(self.session)
        self.graphs = Graphs(self.device) if self._on_cuda else None

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        if not self._on_cuda:
            return self.keys.words(pair, label, call, draw, count).to(self.device)
        # The processor draws the next words while the device copies these and computes.
        return self.keys.words(pair, label, call, draw, count, pinned=True).to(self.device, non_blocking=True)

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        for observer in observers():
            observer.message(line, value)
        return value

    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None:
        self.keys.install(pair, PairKey(bytes(secret.tolist()), self.session))

    def forget(self, call: int) -> None:
        self.keys.forget(call)

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        for observer in observers():
            observer.computed(path, owners, phase, seconds)


class DryRuntime:
    """No party is here: a program runs on shapes. Messages reach the observers as meta tensors."""

    graphs = None

    def __init__(self):
        self.session = os.urandom(16)
        self.here: frozenset[Party] = frozenset()
        self.keys = PairKeys(self.session)

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
