"""Residual networks of basic blocks: ResNet-8 and -10 for 32x32 images, ResNet-14, -16 and -18 for 64x64 images.

A network with b blocks has 1 + 2 b + 1 functional layers: the stem, two convolutions in each block and the fully
connected layer. The 1x1 convolutions on the shortcuts are not counted, as in He et al. (2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut around them (He et al., 2016).

    Input: [N, in_channels, H, W]; output: [N, out_channels, H / stride, W / stride]. Where the shape changes, the
    shortcut is a 1x1 convolution with BatchNorm, otherwise the identity.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem with stride 1, stages of basic blocks (64, 128, 256, 512 channels), pooling, a fully connected layer.

    Every stage but the first halves the feature map. `blocks` gives the number of blocks in each stage, `pool` reduces
    the last feature map and `features` is the number of values it leaves for the fully connected layer.
    """

    def __init__(
        self, blocks: Sequence[int], pool: nn.Module, features: int, num_classes: int, in_channels: int
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(_WIDTHS[0])
        self.relu = nn.ReLU()
        layers: list[nn.Module] = []
        channels = _WIDTHS[0]
        for stage, (count, width) in enumerate(zip(blocks, _WIDTHS, strict=False)):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(BasicBlock(channels, width, stride))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.pool = pool
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(features, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.pool(self.blocks(x))
        return self.fc(self.flatten(x))


def resnet8(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """ResNet-8: ResNet-10 without its last basic block and with more inputs to the fully connected layer.

    Input: [N, 3, 32, 32]. Parameters: 1,235,274 with the defaults.
    Source: CaPC, section 4.2: it "excludes the last basic block and increases the number of neurons in the last
    (fully-connected) layer". PrivHFL, appendix F, says the same.

    Neither paper fixes by how much. Here AvgPool2d(4) on the 256x8x8 feature map leaves 256 * 2 * 2 = 1024 inputs,
    against 512 in ResNet-10. PrivHFL also speaks of "2 residual blocks with 4 convolutional layers", which does not add
    up to eight layers; the three blocks of two convolutions that follow from CaPC do.
    """
    return ResNet((1, 1, 1), nn.AvgPool2d(4), 1024, num_classes, in_channels)


def resnet10(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """ResNet-10: a stem, four basic blocks and one fully connected layer.

    Input: [N, 3, 32, 32]. Parameters: 4,903,242 with the defaults.
    Source: CaPC, appendix F.2, listing "ResNet-10"; PrivHFL, appendix F, uses the same network.

    The listing goes from a 512x4x4 feature map straight to a linear layer with 5,130 = 512 * 10 + 10 parameters and
    leaves out what reduces 4x4 to 1x1. Here it is AdaptiveAvgPool2d(1).
    """
    return ResNet((1, 1, 1, 1), nn.AdaptiveAvgPool2d(1), 512, num_classes, in_channels)


def resnet14(num_classes: int = 200, in_channels: int = 3) -> ResNet:
    """ResNet-14 for Tiny ImageNet: [1, 1, 2, 2] basic blocks.

    Input: [N, 3, 64, 64]. Parameters: 10,902,024 with the defaults.
    Source: PrivHFL, appendix F, which names ResNet-14 and cites He et al. (2016).

    He et al. do not define a ResNet-14, and PrivHFL does not list its layers. The two blocks that ResNet-18 has more
    are left out of the first two stages. The stem is 3x3 with stride 1, see `resnet18`.
    """
    return ResNet((1, 1, 2, 2), nn.AdaptiveAvgPool2d(1), 512, num_classes, in_channels)


def resnet16(num_classes: int = 200, in_channels: int = 3) -> ResNet:
    """ResNet-16 for Tiny ImageNet: [1, 2, 2, 2] basic blocks.

    Input: [N, 3, 64, 64]. Parameters: 11,197,448 with the defaults.
    Source: PrivHFL, appendix F, which names ResNet-16 and cites He et al. (2016).

    He et al. do not define a ResNet-16, and PrivHFL does not list its layers. The one block that ResNet-18 has more is
    left out of the first stage. The stem is 3x3 with stride 1, see `resnet18`.
    """
    return ResNet((1, 2, 2, 2), nn.AdaptiveAvgPool2d(1), 512, num_classes, in_channels)


def resnet18(num_classes: int = 200, in_channels: int = 3) -> ResNet:
    """ResNet-18 for Tiny ImageNet: the standard [2, 2, 2, 2] basic blocks.

    Input: [N, 3, 64, 64]. Parameters: 11,271,432 with the defaults.
    Source: PrivHFL, appendix F, which names ResNet-18 and cites He et al. (2016).

    The stem is a 3x3 convolution with stride 1 and no max pooling, which suits 64x64 images: the 7x7 stem with stride 2
    and the max pooling of He et al. are made for 224x224 and would leave 16x16 before the first block. PrivHFL does not
    say which stem it uses.
    """
    return ResNet((2, 2, 2, 2), nn.AdaptiveAvgPool2d(1), 512, num_classes, in_channels)
