"""The networks of CaPC and PrivHFL as ordinary torch modules, with random weights.

`ZOO` maps a name to its constructor and to the shape of one input, without the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

# Batch normalisation with random statistics, for tests and benchmarks on untrained models.


@torch.no_grad()
def randomize_batchnorm(model: nn.Module, generator: torch.Generator) -> None:
    """Give every BatchNorm of the model random but plausible statistics and affine parameters, in place.

    A fresh BatchNorm in eval mode is close to the identity, so a test with it would not notice a wrong mean, variance,
    weight or bias. Means and biases are drawn from N(0, 0.1^2), variances and weights from U(0.5, 1.5). The generator
    must be on the model's device.
    """
    for module in model.modules():
        if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            continue
        if module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0.0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
        if module.affine:
            module.weight.uniform_(0.5, 1.5, generator=generator)
            module.bias.normal_(0.0, 0.1, generator=generator)


# Residual networks of basic blocks: ResNet-8 and -10 for 32x32 images, ResNet-14, -16 and -18 for 64x64 images.
#
# A network with b blocks has 1 + 2 b + 1 functional layers: the stem, two convolutions in each block and the fully
# connected layer. The 1x1 convolutions on the shortcuts are not counted, as in He et al. (2016).


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
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
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


# Small networks for MNIST: LeNet, CryptoNets with square and with ReLU activation, and a multilayer perceptron.


class Square(nn.Module):
    """The activation x^2 of CryptoNets. Any shape in, the same shape out; no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def lenet(num_classes: int = 10) -> nn.Sequential:
    """LeNet-style network for MNIST: two convolutions with max pooling and two fully connected layers.

    Input: [N, 1, 28, 28]. Parameters: 431,080 with the defaults.
    Source: CaPC, appendix F.2, listing "LeNet style architecture for MNIST".

    As in the listing, the only ReLU stands between the two fully connected layers, and none follows a convolution.
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, num_classes),
    )


def _cryptonets(first: nn.Module, second: nn.Module, num_classes: int) -> nn.Sequential:
    """The layers of CryptoNets for inference, around its two activations."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 5, stride=2, padding=1),
        first,
        nn.Flatten(),
        nn.Linear(845, 100),
        second,
        nn.Linear(100, num_classes),
    )


def cryptonets(num_classes: int = 10) -> nn.Sequential:
    """CryptoNets for MNIST, in its simplified form for inference: convolution, square, linear, square, linear.

    Input: [N, 1, 28, 28]. Parameters: 85,740 with the defaults.
    Source: Gilad-Bachrach et al. (2016); PrivHFL, appendix B.2, Table 4 (the row CNet1), which names the network but
    does not list its layers.

    The pooling and convolution layers between the first square and the second are linear and are folded into one
    fully connected layer from 5x13x13 = 845 to 100, as in the "squashed" model of HE-Transformer (Boemer et al.,
    intel/he-transformer, examples/MNIST/Cryptonets/model.py). Two details differ from that model. It pads the image by
    one at the bottom and right only; padding by one on every side, as here, also gives 13x13. It has no biases, and its
    ReLU variant has one bias per output position in the convolution; here every layer has the ordinary bias.
    """
    return _cryptonets(Square(), Square(), num_classes)


def cryptonets_relu(num_classes: int = 10) -> nn.Sequential:
    """CryptoNets for MNIST with ReLU in place of the square, otherwise as `cryptonets`.

    Input: [N, 1, 28, 28]. Parameters: 85,740 with the defaults.
    Source: HE-Transformer (Boemer et al., intel/he-transformer, examples/MNIST/Cryptonets-Relu/model.py); CaPC,
    Table 1; PrivHFL, appendix B.2, Table 4 (the row CNet2).
    """
    return _cryptonets(nn.ReLU(), nn.ReLU(), num_classes)


def mlp(num_classes: int = 10) -> nn.Sequential:
    """Multilayer perceptron for MNIST: 784 -> 128 -> 128 -> 10 with ReLU.

    Input: [N, 784]; images of shape [N, 1, 28, 28] are flattened. Parameters: 118,282 with the defaults.
    Source: PrivHFL, appendix B.2, Table 4, which names an MLP and cites nGraph-HE (Boemer et al., 2019b).

    The paper does not fix the layers, so the widths are a choice of this package. The example that HE-Transformer calls
    MLP (intel/he-transformer, examples/MNIST/MLP/model.py) is in fact a convolutional network with max pooling, so
    runtimes of this model are not directly comparable with the row MLP of Table 4.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_classes)
    )


# VGG-5 and VGG-7 for 32x32 images.


def _conv_bn_relu(in_channels: int, out_channels: int) -> list[nn.Module]:
    """A 3x3 convolution without bias, BatchNorm and ReLU; the size of the feature map stays."""
    return [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()]


def vgg7(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """VGG-7: six convolutions and one fully connected layer.

    Input: [N, 3, 32, 32]. Parameters: 4,507,722 with the defaults.
    Source: CaPC, appendix F.2, listing "VGG-7 for SVHN"; PrivHFL, appendix F, uses the same network.

    The listing goes from a 512x4x4 feature map straight to a linear layer with 5,130 = 512 * 10 + 10 parameters and
    leaves out what reduces 4x4 to 1x1. Here it is AdaptiveAvgPool2d(1).
    """
    return nn.Sequential(
        *_conv_bn_relu(in_channels, 64),
        nn.MaxPool2d(2),
        *_conv_bn_relu(64, 128),
        nn.MaxPool2d(2),
        *_conv_bn_relu(128, 256),
        *_conv_bn_relu(256, 256),
        nn.MaxPool2d(2),
        *_conv_bn_relu(256, 512),
        *_conv_bn_relu(512, 512),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )


def vgg5(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """VGG-5: four convolutions and one fully connected layer.

    Input: [N, 3, 32, 32]. Parameters: 1,557,066 with the defaults. Source: CaPC, 4.2 ("VGG-5 has 4 convolutional layers
    followed by a fully connected layer"), which gives no listing; the widths are those of `vgg7`, one convolution each.
    """
    return nn.Sequential(
        *_conv_bn_relu(in_channels, 64),
        nn.MaxPool2d(2),
        *_conv_bn_relu(64, 128),
        nn.MaxPool2d(2),
        *_conv_bn_relu(128, 256),
        nn.MaxPool2d(2),
        *_conv_bn_relu(256, 512),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )


__all__ = [
    "ZOO",
    "Square",
    "cryptonets",
    "cryptonets_relu",
    "lenet",
    "mlp",
    "randomize_batchnorm",
    "resnet8",
    "resnet10",
    "resnet14",
    "resnet16",
    "resnet18",
    "vgg5",
    "vgg7",
]

ZOO: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "vgg5": (vgg5, (3, 32, 32)),
    "vgg7": (vgg7, (3, 32, 32)),
    "resnet8": (resnet8, (3, 32, 32)),
    "resnet10": (resnet10, (3, 32, 32)),
    "resnet14": (resnet14, (3, 64, 64)),
    "resnet16": (resnet16, (3, 64, 64)),
    "resnet18": (resnet18, (3, 64, 64)),
    "lenet": (lenet, (1, 28, 28)),
    "cryptonets": (cryptonets, (1, 28, 28)),
    "cryptonets_relu": (cryptonets_relu, (1, 28, 28)),
    "mlp": (mlp, (784,)),
}
