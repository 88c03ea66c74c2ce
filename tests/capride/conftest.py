"""A small federation on digits, and SEAL's work in the test process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sectorch.protocols.capride import Settings, federation

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # `capride_attacks.py`

QUICK = Settings(rounds=1, warmup=2, scale_bits=28, flood_bits=1.0, head_rank=4, temperature=2.0, leakage=None)
"""Two levels fewer bits than the default: a ring of 8192, in which a test's encrypted round takes seconds."""


@pytest.fixture(scope="session")
def made():
    return federation("digits", 2, samples=48, test_samples=60, network="mlp")


@pytest.fixture
def quick() -> Settings:
    return QUICK


@pytest.fixture
def gaussian():
    return torch.Generator().manual_seed(0)
