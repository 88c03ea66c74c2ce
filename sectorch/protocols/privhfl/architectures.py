"""The clients' architectures: the paper's families, and the same families at a quarter of the width for small images.

| name | image | source |
| --- | --- | --- |
| vgg7, resnet8, resnet10 | 3 x 32 x 32 | PrivHFL, appendix F (SVHN, CIFAR10); `sectorch/nn/models/` |
| resnet14, resnet16, resnet18 | 3 x 64 x 64 | PrivHFL, appendix F (Tiny ImageNet) |
| vgg7-small, resnet8-small, resnet10-small | any from 8 x 8 | ours: the same layers, channels divided by four |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...nn.models.resnet import BasicBlock, resnet8, resnet10, resnet14, resnet16, resnet18
from ...nn.models.vgg import vgg7
from .errors import ArchitectureError

Constructor = Callable[[int, int], nn.Module]
"""Number of classes, input channels -> a network in training mode."""


def _conv(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()]


def vgg7_small(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """VGG-7 (`sectorch.nn.models.vgg7`) with a quarter of its channels. Input [N, C, H, W] with H, W of at least 8."""
    return nn.Sequential(
        *_conv(in_channels, 16), nn.MaxPool2d(2),
        *_conv(16, 32), nn.MaxPool2d(2),
        *_conv(32, 64), *_conv(64, 64), nn.MaxPool2d(2),
        *_conv(64, 128), *_conv(128, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes),
    )  # fmt: skip


def _resnet_small(widths: Sequence[int], num_classes: int, in_channels: int) -> nn.Sequential:
    blocks = [
        BasicBlock(before, width, 1 if i == 0 else 2)
        for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
    ]
    return nn.Sequential(
        *_conv(in_channels, widths[0]),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], num_classes),
    )


def resnet8_small(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-8 with a quarter of its channels (16, 32, 64). Input [N, C, H, W], any H and W from 4."""
    return _resnet_small((16, 32, 64), num_classes, in_channels)


def resnet10_small(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-10 with a quarter of its channels (16, 32, 64, 128). Input [N, C, H, W], any H and W from 8."""
    return _resnet_small((16, 32, 64, 128), num_classes, in_channels)


ARCHITECTURES: dict[str, Constructor] = {
    "vgg7": vgg7,
    "resnet8": resnet8,
    "resnet10": resnet10,
    "resnet14": resnet14,
    "resnet16": resnet16,
    "resnet18": resnet18,
    "vgg7-small": vgg7_small,
    "resnet8-small": resnet8_small,
    "resnet10-small": resnet10_small,
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "digits": ("vgg7-small", "resnet8-small", "resnet10-small"),
    "svhn": ("vgg7", "resnet8", "resnet10"),
    "cifar10": ("vgg7", "resnet8", "resnet10"),
    "tiny-imagenet": ("resnet14", "resnet16", "resnet18"),
}
"""The three architectures of a data set; each is used by n/3 of the clients (section 4.1)."""


def build(name: str, shape: Sequence[int], classes: int, seed: int) -> nn.Module:
    """A network with random weights, which depend on the seed only.

    Args:
        name: one of `ARCHITECTURES`.
        shape: of one image, [C, H, W].

    Raises:
        ArchitectureError: an unknown name, or a network that does not take such images.
    """
    if name not in ARCHITECTURES:
        raise ArchitectureError(f"there is no architecture {name!r}; there are {', '.join(ARCHITECTURES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[name](classes, shape[0])
    check_fits(model, name, shape, classes)
    return model


def check_fits(model: nn.Module, name: str, shape: Sequence[int], classes: int) -> None:
    """The network takes two such images and gives two rows of logits.

    Raises:
        ArchitectureError: naming what came out, or torch's own message.
    """
    training = model.training
    try:
        with torch.no_grad():
            out = model.eval()(torch.zeros((2, *shape)))
    except RuntimeError as error:
        raise ArchitectureError(
            f"{name} does not take images {tuple(shape)}: {str(error).splitlines()[0]}; choose an architecture for "
            f"that size, such as {', '.join(FAMILIES['digits'])}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(out, torch.Tensor) or out.shape != (2, classes):
        what = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ArchitectureError(f"{name} gives {what} for two images, but logits (2, {classes}) were expected")
