"""The networks of CaPC and PrivHFL as ordinary torch modules, with random weights.

`ZOO` maps a name to its constructor and to the shape of one input, without the batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .batchnorm import randomize_batchnorm as randomize_batchnorm
from .resnet import resnet8 as resnet8
from .resnet import resnet10 as resnet10
from .resnet import resnet14 as resnet14
from .resnet import resnet16 as resnet16
from .resnet import resnet18 as resnet18
from .small import Square as Square
from .small import cryptonets as cryptonets
from .small import cryptonets_relu as cryptonets_relu
from .small import lenet as lenet
from .small import mlp as mlp
from .vgg import vgg5 as vgg5
from .vgg import vgg7 as vgg7

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
