"""The paper's nets at the sizes of its tables: MLP-3/5/7, ResNet-20/32/56, and a small DenseNet."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from ...federated.errors import FederationError
from .settings import Data

MODELS = ("mlp3", "mlp5", "mlp7", "cnn", "resnet20", "resnet32", "resnet56", "densenet")


def build(name: str, data: Data, dtype: torch.dtype, seed: int) -> nn.Module:
    """A net for the data's shape, with weights from `seed`."""
    torch.manual_seed(seed)
    inputs = torch.Size(data.shape).numel()
    channels = data.shape[0]
    if name.startswith("mlp"):
        body = mlp(int(name[3:]), inputs, data.outputs)
        return (nn.Sequential(nn.Flatten(), *body) if len(data.shape) > 1 else body).to(dtype)
    if len(data.shape) != 3:
        raise FederationError(f"{name} takes images; {data.name} has inputs of shape {list(data.shape)}; use mlp3")
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(128, data.outputs),
        ).to(dtype)  # fmt: skip
    if name == "densenet":
        return DenseNet(data.outputs, channels).to(dtype)
    return ResNet(int(name[6:]), data.outputs, channels).to(dtype)


def mlp(layers: int, inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """An MLP of `layers` linear layers with ReLU between them."""
    widths = [inputs, *[width] * (layers - 1), outputs]
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _activation(x: torch.Tensor, slope: float) -> torch.Tensor:
    return F.leaky_relu(x, slope) if slope else F.relu(x)


class _Block(nn.Module):
    """Two 3x3 convolutions and the sum with a shortcut, which is 1x1 where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool, slope: float):
        super().__init__()
        self.slope = slope
        make = (lambda: nn.BatchNorm2d(outputs)) if norm else nn.Identity
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=not norm)
        self.norm1 = make()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=not norm)
        self.norm2 = make()
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=not norm), make())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(_activation(self.norm1(self.conv1(x)), self.slope)))
        return _activation(out + self.shortcut(x), self.slope)


class ResNet(nn.Module):
    """ResNet-20, 32, 56 of He et al. for small images: 6n + 2 layers, 16, 32 and 64 channels.

    Args:
        slope: of the activations below zero; 0 is ReLU.
    """

    def __init__(
        self, depth: int, classes: int, channels: int = 3, norm: bool = True, width: int = 16, slope: float = 0.0
    ):
        super().__init__()
        self.slope = slope
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=not norm)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            for index in range((depth - 2) // 6):
                outputs = width << stage
                blocks.append(_Block(inputs, outputs, 2 if stage and not index else 1, norm, slope))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(_activation(self.norm(self.stem(x)), self.slope))
        return self.head(torch.flatten(self.pool(x), 1))


class _Dense(nn.Module):
    def __init__(self, inputs: int, growth: int, norm: bool):
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs) if norm else nn.Identity()
        self.conv = nn.Conv2d(inputs, growth, 3, 1, 1, bias=not norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    """A small DenseNet: blocks of concatenated layers, with a 1x1 convolution and pooling between them."""

    def __init__(
        self, classes: int, channels: int = 3, growth: int = 8, blocks: tuple[int, ...] = (3, 3), norm: bool = True
    ):
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1)]
        for index, layers in enumerate(blocks):
            for _ in range(layers):
                parts.append(_Dense(width, growth, norm))
                width += growth
            if index < len(blocks) - 1:
                parts += [nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
        parts += [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))
