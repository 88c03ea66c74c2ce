"""Keys and small federations are made once; all work stays in one process and on one thread."""

from __future__ import annotations

import pytest
import torch

from sectorch import ckks
from sectorch.protocols.secsv import build
from sectorch.protocols.secsv.client import Format
from sectorch.protocols.secsv.program import Program
from sectorch.protocols.secsv.secsv import joint_keys
from sectorch.protocols.secsv.sharing import Field
from sectorch.protocols.secsv.testing import TestSet

TestSet.__test__ = False


@pytest.fixture(scope="session", autouse=True)
def _one_process():
    ckks.set_workers(1)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def keys() -> ckks.Keys:
    return joint_keys()


@pytest.fixture(scope="session")
def field(keys) -> Field:
    return Field(keys.parameters.primes, 12)


@pytest.fixture(scope="session")
def form(field) -> Format:
    return Format(field, 6)


@pytest.fixture(scope="session")
def small():
    """Four clients with logistic models 6 -> 3, and half a dozen test samples each."""
    draw = torch.Generator().manual_seed(0)
    net = build("logistic", (6,), 3)
    models = {f"c{i}": build("logistic", (6,), 3, seed=i + 1).state_dict() for i in range(4)}
    tests = {
        f"c{i}": (torch.rand(4 + i, 6, generator=draw), torch.randint(0, 3, (4 + i,), generator=draw)) for i in range(4)
    }
    return net, models, tests


@pytest.fixture(scope="session")
def program(small) -> Program:
    return Program(small[0], (6,))


@pytest.fixture(scope="session")
def samples(small) -> TestSet:
    tests = small[2].values()
    return TestSet(tuple(x for x, _ in tests), tuple(y for _, y in tests))
