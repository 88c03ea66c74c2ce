"""Compiled convolutions and their gradients: those of torch's own functions, mod 2^64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch.ring import productloops

small = st.integers(1, 3)


@settings(max_examples=25)
@given(n=small, c=small, o=small, kernel=st.tuples(small, small), more=st.tuples(small, small),
       padding=st.tuples(st.integers(0, 2), st.integers(0, 2)), dilation=st.tuples(small, small),
       seed=st.integers(0, 1 << 20))  # fmt: skip
def test_convolutions_and_gradients_are_torchs(n, c, o, kernel, more, padding, dilation, seed):
    """A gradient of a sum of outputs times g is torch's own, by a convolution of what it was made of."""
    torch.manual_seed(seed)
    draw = lambda *shape: torch.randint(-(2**63), 2**63 - 1, shape)
    size = [max(1, d * (k - 1) + m - 2 * p) for k, d, m, p in zip(kernel, dilation, more, padding, strict=True)]
    x, weight = draw(n, c, *size), draw(o, c, *kernel)
    y = F.conv2d(x, weight, None, 1, padding, dilation)
    assert torch.equal(productloops.convolve_images(x, weight, padding, dilation), y)
    g = draw(*y.shape)
    found = productloops.weight_gradient(g, x, kernel, padding, dilation)
    wanted = F.conv2d(F.pad(x, (padding[1], padding[1], padding[0], padding[0])).transpose(0, 1), g.transpose(0, 1),
                      dilation=1, stride=dilation)  # fmt: skip
    assert torch.equal(found, wanted.transpose(0, 1)[:, :, : kernel[0], : kernel[1]])
    found = productloops.input_gradient(g, weight, (size[0], size[1]), padding, dilation)
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    full = F.conv2d(F.pad(g, (reach[1], reach[1], reach[0], reach[0])), weight.transpose(0, 1).flip(2, 3),
                    dilation=dilation)  # fmt: skip
    inner = full[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
    assert torch.equal(found, inner)
