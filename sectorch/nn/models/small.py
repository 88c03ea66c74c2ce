"""Small networks for MNIST: LeNet, CryptoNets with square and with ReLU activation, and a multilayer perceptron."""

from __future__ import annotations

import torch
from torch import nn


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
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
