"""One thread per test process, and two hypothesis profiles: `default`, and `long`.

`default` draws the same examples in each run, so that a change is judged by what it changes; `long` draws others.
`pytest -m long` runs the tests of that mark, and every property with the examples of the profile `long`. What fails in
one of nine examples of a property is found by 40 with probability 0.99, and what fails in one of 217 by 1000.
"""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

# A deadline would make tests depend on wall time; the first example of a protocol warms caches and is slower.
_COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("default", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=1000, **_COMMON)
settings.load_profile("default")


def pytest_configure(config):
    # Test processes would otherwise fight over the cores; the results do not depend on it.
    torch.set_num_threads(1)
    # For absent devices torch.manual_seed writes down a stack trace each time, and op_db seeds before each sample.
    for device in (getattr(torch, name, None) for name in ("cuda", "xpu", "mtia")):
        if device is not None and not device.is_available():
            device.manual_seed_all = lambda seed: None
    if config.option.markexpr == "long":
        settings.load_profile("long")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.option.markexpr == "long":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("long")


def pytest_collection_finish():
    # What torch and the collected tests hold stays to the end, so that no collection of garbage need walk over it.
    # Sessions over the network collect when they end, and a fifth of their tests' time went there.
    gc.collect()
    gc.freeze()
