"""Batch normalisation with random statistics, for tests and benchmarks on untrained models."""

from __future__ import annotations

import torch
from torch import nn


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
