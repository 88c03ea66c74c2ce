"""Memory of freed tensors is kept: a protocol that runs by hand touches no fresh pages after its first calls."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from cases import long
from torch import nn

import sectorch
from sectorch.choreography import pages
from sectorch.choreography.program import projection
from sectorch.session import Session

PROGRAM = """
import resource
import torch
import sectorch
torch.set_num_threads(1)
x = sectorch.share(torch.randn(50_000))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.relu(x)
before = faults()
for _ in range(5):
    torch.relu(x)
print((faults() - before) // 5)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has rules of its own")
@pytest.mark.parametrize(("limit", "kept"), [(None, True), *long((str(1 << 17), False))])
def test_pages_of_freed_tensors(limit: str | None, kept: bool):
    """The control: where the environment holds glibc to its first limit, pages are fresh in each call."""
    unlimited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env = unlimited if limit is None else {**unlimited, "MALLOC_MMAP_THRESHOLD_": limit}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert (int(run.stdout) < 150) == kept, run.stdout


def test_gaps_are_given_back_while_large_weights_are_bound(monkeypatch: pytest.MonkeyPatch):
    """The results stay what they are, and a small model gives nothing back."""
    model, x = nn.Sequential(nn.Linear(37, 131), nn.ReLU(), nn.Linear(131, 3)).eval(), torch.rand(5, 37)
    given: list[int] = []
    monkeypatch.setattr(projection, "give_back", lambda: given.append(pages.give_back() or 1))
    expected = sectorch.reference(model)(x)
    assert torch.equal(sectorch.secure(model, session=Session())(x), expected) and not given
    monkeypatch.setattr(projection, "UNTRIMMED", 8 * 37 * 131)
    assert torch.equal(sectorch.secure(model, session=Session())(x), expected) and len(given) > 2
