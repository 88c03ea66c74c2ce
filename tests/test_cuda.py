"""On a GPU, where there is one: limb products, and whole models with all parties on it, against the CPU."""

from __future__ import annotations

import pytest
import torch
from helpers import ring_values

import sectorch
from sectorch import Scheme
from sectorch.nn.models import ZOO
from sectorch.ring import limbs, products
from sectorch.ring.products import Conv2d

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", limbs.KINDS)
def test_products(kind: str):
    x, y = ring_values((130, 4608), 63), ring_values((4608, 70), 63, 1)
    assert torch.equal(limbs.matmul(x.cuda(), y.cuda(), kind).cpu(), x @ y)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convolutions(groups: int):
    conv = Conv2d((1, 1), (1, 1), (1, 1), groups)
    x, weight = ring_values((2, 8, 9, 9), 63), ring_values((16, 8 // groups, 3, 3), 63, 1)
    assert torch.equal(conv(x.cuda(), weight.cuda()).cpu(), conv(x, weight))
    assert torch.equal(products.matmul(x.cuda(), x.cuda()).cpu(), products.matmul(x, x))


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("name", ["lenet", "vgg7"])
def test_models(name: str, network: str):
    torch.manual_seed(0)
    construct, shape = ZOO[name]
    model, x = construct().eval(), torch.randn(2, *shape)
    expected = model(x)
    secured = sectorch.secure(model.cuda(), Scheme(network=network))
    y = secured(x.cuda())
    assert y.device.type == "cuda"
    assert (y.cpu() - expected).abs().max() <= 1e-4
    with pytest.raises(sectorch.errors.ArgumentError, match="the input is on cpu, the secure module on cuda:0"):
        secured(x)
