"""One thread per test process, and two hypothesis profiles: `default`, and `long` (`--hypothesis-profile=long`)."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# A deadline would make tests depend on wall time; the first example of a protocol warms caches and is slower.
_COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("default", max_examples=100, **_COMMON)
settings.register_profile("long", max_examples=1000, **_COMMON)
settings.load_profile("default")


def pytest_configure(config):
    # Two test processes on two cores would otherwise fight over them; the results do not depend on it.
    torch.set_num_threads(1)
