"""One thread per test process, and the examples of hypothesis properties.

The normal run draws the same 20 examples each time, so that a change is judged by what it changes. Long runs are those
of the plugin, `sectorch_pytest.py`: `pytest -m sectorch_long` runs the tests of that mark, and every property with 1000
other examples. What fails in one of five examples is found by 20 with probability 0.99, and in one of 217 by 1000.
Which cases of a test are for long runs: `cases.py`.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from pathlib import Path

import pytest
import torch
from distributed_parties import preload_fork_server
from hypothesis import HealthCheck, settings

pytest_plugins = ["seeded_tests"]

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gallery"))

# A deadline would make tests depend on wall time; the first example of a protocol warms caches and is slower.
settings.register_profile(
    "default", max_examples=20, derandomize=True, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("default")


def pytest_configure(config):
    # A shell starts what it runs in the background deaf to Ctrl-C, as are then the processes that tests stop by it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    preload_fork_server()
    # Test processes would otherwise fight over the cores; the results do not depend on it.
    torch.set_num_threads(1)
    # For absent devices torch.manual_seed writes down a stack trace each time, and op_db seeds before each sample.
    for device in (getattr(torch, name, None) for name in ("cuda", "xpu", "mtia")):
        if device is not None and not device.is_available():
            device.manual_seed_all = lambda seed: None


def pytest_collection_finish():
    # What torch and the collected tests hold stays to the end, so that no collection of garbage need walk over it, nor
    # over torch's compiler, which optimizers and many tests import. Nearly all that dies is counted, so that
    # cycles need not be looked for at every turn: a fifth of the tests' time went there.
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def logs_as_they_were():
    """A test that leaves the root logger's level or handlers changed fails, not a later one that looks at its log."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    after = root.level, list(root.handlers)
    assert before == after
