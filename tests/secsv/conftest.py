"""Keys and small federations are made once; all work stays in one process and on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sectorch import ckks
from sectorch.ckks.convert import ResidueRing
from sectorch.protocols.secsv import build
from sectorch.protocols.secsv.secsv import Format, joint_keys
from sectorch.protocols.secsv.testers import TestSet, averaged
from sectorch.protocols.secsv.values import coalitions, members

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # `hesv_variants.py`

TestSet.__test__ = False


@pytest.fixture(scope="session", autouse=True)
def _one_process():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def keys() -> ckks.Keys:
    return joint_keys()


@pytest.fixture(scope="session")
def field(keys) -> ResidueRing:
    return ResidueRing(keys.parameters.primes, 12)


@pytest.fixture(scope="session")
def form(field) -> Format:
    return Format(field, 6)


@pytest.fixture(scope="session")
def small():
    """Four clients with logistic models 6 -> 3, and half a dozen test samples each, none near a decision's border.

    Under every coalition's model the best score leads by 0.03, above the error of either encryption: 8 sigma of
    a fresh one at scale 2^22, 2e-3, for each of six weights and six features.
    """
    draw = torch.Generator().manual_seed(0)
    net = build("logistic", (6,), 3)
    models = {f"c{i}": build("logistic", (6,), 3, seed=i + 1).state_dict() for i in range(4)}
    x, clear = torch.rand(400, 6, generator=draw), torch.ones(400, dtype=torch.bool)
    for mask in coalitions(range(4)):
        some = members(mask)
        net.load_state_dict(averaged([models[f"c{i}"] for i in some], [1.0] * len(some)))
        with torch.no_grad():
            best = net(x).topk(2).values
        clear &= best[:, 0] - best[:, 1] > 0.03
    parts = x[clear].split([4, 5, 6, 7, int(clear.sum()) - 22])
    tests = {f"c{i}": (parts[i], torch.randint(0, 3, (4 + i,), generator=draw)) for i in range(4)}
    return net, models, tests
