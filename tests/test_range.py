"""Values up to the end of the fixed-point range (2^22) beside results that carry many fraction bits.

A result with s fraction bits leaves 62 - s bits for the whole part. Whatever joins a large value with it has to drop
fraction bits first, or refuse; a sum that wraps around is a wrong number without a word.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import by_turns
from op_rows.normalization import TERM
from op_stage import stage

from sectorch.errors import SectorchError

LARGE = torch.tensor([4.1e6, -4.1e6, 2.0**21, -3.0e5, 70000.0, -1.0], dtype=torch.float64)
SMALL = torch.tensor([0.5, -0.25, 1.0, 2.0, -1.5, 0.125], dtype=torch.float64)
CHOICE = torch.tensor([True, False, True, False, True, False])

MADE = {
    "plain": lambda y: y,
    "product": lambda y: y * y,
    "third": lambda y: y / 3,
    "small multiple": lambda y: y * 0.001,
    "quarter of a product": lambda y: y * y / 4,
    "2^-10": lambda y: y / 1024,
    "2^-30": lambda y: y / 2**30,
    "mean": lambda y: y.expand(5, 6).mean(0),
    "mean of 1024": lambda y: y.expand(1024, 6).mean(0),
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "softmax": lambda y: torch.softmax(y, 0),
    "batch norm": lambda y: F.batch_norm(y.view(2, 3), torch.zeros(3).double(), torch.ones(3).double()).view(6),
}
JOINED = {
    "x + y": lambda x, y: x + y,
    "y - x": lambda x, y: y - x,
    "addcmul": lambda x, y: torch.addcmul(x, y, torch.ones(6).double()),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "where public": lambda x, y: torch.where(CHOICE, x, y),
    "where secret": lambda x, y: torch.where(x > 0, x, y),
    "where else": lambda x, y: torch.where(x > 0, y, x),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "cat": lambda x, y: torch.cat((x, y)),
    "stack": lambda x, y: torch.stack((x, y)),
    "sum of both": lambda x, y: torch.stack((x, y)).sum(0),
    "max of both": lambda x, y: torch.stack((x, y)).amax(0),
    "sorted": lambda x, y: torch.stack((x, y)).sort(0)[0],
    "x > y": lambda x, y: x > y,
    "y <= x": lambda x, y: y <= x,
    "x == y": lambda x, y: x == y,
    "public + y": lambda x, y: LARGE + y,
    "public - y": lambda x, y: LARGE - y,
    "y > public": lambda x, y: y > LARGE,
    "maximum of public": lambda x, y: torch.maximum(y, LARGE),
    "where of public": lambda x, y: torch.where(x > 0, LARGE, y),
    "clamped": lambda x, y: y.clamp(-4.1e6, 4.1e6),
    "filled": lambda x, y: y.masked_fill(CHOICE, 4.1e6),
    "padded": lambda x, y: F.pad(y, (1, 1), value=-4.1e6),
    "relu of the sum": lambda x, y: torch.relu(x + y),
    "x * 1": lambda x, y: x * torch.ones(6).double() + y,
}


@by_turns(join=JOINED, made=MADE)
def test_large_values_join_results_with_many_fraction_bits(made: str, join: str):
    expected = JOINED[join](LARGE, MADE[made](SMALL))
    try:
        result = JOINED[join](stage().share(LARGE), MADE[made](stage().share(SMALL))).reveal()
    except SectorchError:
        return
    if not expected.is_floating_point():
        assert torch.equal(result, expected)
        return
    # The small operand errs by at most a softmax of 6 entries; multiples of the large one by 1/2 of its ulps.
    allowed = 2.0**-20 * (8 * TERM + 20) + expected.abs() * 2.0**-20
    assert bool(((result - expected).abs() <= allowed).all()), f"{result}\ninstead of\n{expected}"


@pytest.mark.parametrize("made", [name for name in MADE if name not in ("exp", "softmax", "sigmoid")])
def test_many_small_steps_keep_the_range(made: str):
    """Halving costs no message and adds a fraction bit; after a hundred steps the value must still be right."""
    x, y = SMALL.clone(), stage().share(SMALL)
    for step in range(40):
        x, y = x / 2 + 3, y / 2 + 3
        if step % 10 == 0:
            x, y = MADE[made](x), MADE[made](y)
    allowed = 2.0**-20 * 16 * 40
    assert bool(((y.reveal() - x).abs() <= allowed).all()), f"{y.reveal()}\ninstead of\n{x}"
