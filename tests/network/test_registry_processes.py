"""`examples/registry.py` as five processes and a server over mutual TLS: the releases of one process, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from both_ways import run_both_ways
from commands import run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "registry.py"
PARTIES = {"north": "Q", "vendor": "A", "centre": "S", "south": "south", "registry": "registry"}


@pytest.mark.sectorch_long
def test_hospitals_registry_and_vendor_as_processes_learn_what_one_process_releases(tmp_path, capsys):
    run_command([sys.executable, str(EXAMPLE), str(tmp_path)], check=True)
    own = {name: ["--input", f"{role}={name}.npy"] for name, role in PARTIES.items() if name != "centre"}
    found = run_both_ways(f"{EXAMPLE}:program", PARTIES, own, tmp_path, capsys)
    for name in ("north", "south", "registry", "vendor"):
        learned = found.learned[name]
        expected = {key: v for key, v in found.wanted.items() if name != "vendor" or key.startswith("vendor")}
        assert learned.keys() == expected.keys(), name
        assert all(np.array_equal(learned[key], v, equal_nan=True) for key, v in expected.items()), name
    assert not found.learned["centre"]
    print(found.line("south"))
