"""What the CaPC tests share: small panels, mechanisms with a noise that the test knows, and a party that is lost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sectorch.choreography import Sent
from sectorch.choreography.ledger import Observer
from sectorch.dp import GNMax, Noise
from sectorch.errors import PeerLostError
from sectorch.protocols.capc import Voter

CLASSES = 10


def models(count: int, seed: int = 0, shape: tuple[int, ...] = (1, 4, 4), classes: int = CLASSES) -> list[nn.Module]:
    """Small networks that disagree."""
    size = shape[0] * shape[1] * shape[2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = [nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, classes)) for _ in range(count)]
    return [model.eval() for model in made]


def voters(found: list) -> list[Voter]:
    return [Voter(f"v{i}", model) for i, model in enumerate(found)]


@torch.no_grad()
def votes_of(found: list[nn.Module], images: torch.Tensor) -> torch.Tensor:
    """The histogram that nobody sees, [N, classes]."""
    return sum(F.one_hot(model(images).argmax(1), CLASSES) for model in found)


class KnownNoise:
    """Noise that is drawn as it should be and written down for the test."""

    def __init__(self, inner: Noise, kept: list):
        self.inner, self.kept = inner, kept

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def sample(self, *shape):
        self.kept.append(self.inner.sample(*shape))
        return self.kept[-1]


class Known(GNMax):
    """GNMax whose draws the test can read afterwards: `drawn`."""

    @property
    def noise(self):
        if "drawn" not in self.__dict__:
            self.__dict__["drawn"] = []
        return KnownNoise(GNMax(self.scale).noise, self.drawn)


class Lost(Observer):
    """The party's process dies when it is about to send its n-th message of a protocol."""

    def __init__(self, name: str, protocol: str, after: int = 0):
        self.name, self.protocol, self.left = name, protocol, after

    def message(self, line: Sent, value: torch.Tensor) -> None:
        if line.src.name == self.name and self.protocol in line.path.split("/"):
            if self.left == 0:
                raise PeerLostError(f"{self.name} is gone")
            self.left -= 1
