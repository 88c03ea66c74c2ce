"""Division by a model's own tensors, and products with their inverses: large inputs beside small factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cases import by_turns
from torch import nn

import sectorch

SIZES = torch.tensor([500.0, 30.0, 4000.0, 1.0])
LAST = 2.0**-20


class By(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.register_buffer("w", SIZES.clone())
        self.f = f

    def forward(self, x):
        return self.f(x, self.w)


QUOTIENTS = {
    "x / w": lambda x, w: x / w,
    "x / w after a layer": lambda x, w: torch.relu(x) / w,
    "x / w**2": lambda x, w: x / w.sqrt() ** 2,
    "x * (1 / w)": lambda x, w: x * (1 / w),
    "(1 / w) * x after a layer": lambda x, w: (1 / w) * torch.relu(x),
    "rsqrt": lambda x, w: x * w.square().rsqrt(),
    "reciprocal": lambda x, w: x * w.reciprocal(),
    "reciprocal_": lambda x, w: x * w.clone().reciprocal_(),
    "a power": lambda x, w: x * w**-1,
    "div_": lambda x, w: x.clone().div_(w),
    "addcdiv": lambda x, w: torch.addcdiv(torch.zeros(4), x, w),
    "standardised": lambda x, w: (x - w / 2) / w,
    "a small weight": lambda x, w: x * (w * 0 + 1e-4),
    "batch_norm": lambda x, w: F.batch_norm(x, w / 2, w**2),
    "batch_norm after a layer": lambda x, w: F.batch_norm(torch.relu(x), w / 2, w**2),
    "batch_norm of images": lambda x, w: F.batch_norm(x.T.reshape(1, 4, 8, 8), w / 2, w**2),
    "instance_norm": lambda x, w: F.instance_norm(x.T.reshape(1, 4, 64), w / 2, w**2, use_input_stats=False),
    "a public divisor": lambda x, w: x / SIZES,
    "a public inverse": lambda x, w: x * (1 / SIZES),
    "a small public factor": lambda x, w: torch.relu(x) * torch.full((4,), 1e-4),
}


@by_turns(name=QUOTIENTS, network=("lan", "wan"))
def test_a_small_factor_keeps_its_digits(name, network):
    torch.manual_seed(0)
    model, x = By(QUOTIENTS[name]).eval(), torch.rand(64, 4) * SIZES * torch.tensor([1, -1, 1, -1])
    scheme = sectorch.Scheme(network=network)
    got, expected = sectorch.secure(model, scheme)(x), model.double()(x.double())
    # Two roundings to the last place, the input's own where it is divided by one, and torch's to float32.
    assert (got.double() - expected).abs().max() < 3 * LAST
    assert torch.equal(got, sectorch.reference(model, scheme)(x))


def test_the_program_does_not_depend_on_what_a_factor_holds():
    x, ledgers = torch.rand(8, 4), []
    for size in (1.0, 10.0, 1e3):
        model = By(lambda x, w: F.batch_norm(x / w, w, w)).eval()
        model.w = SIZES * size
        secured = sectorch.secure(model)
        with sectorch.profile() as p:
            secured(x)
        ledgers.append((p.bytes, p.rounds, p.offline_bytes))
    assert len(set(ledgers)) == 1
