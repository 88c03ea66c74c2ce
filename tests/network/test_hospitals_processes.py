"""`examples/hospitals.py` as five processes and a server over mutual TLS: the bits of one process, and its costs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from both_ways import run_both_ways
from commands import run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals.py"
PARTIES = {"north": "Q", "east": "A", "south": "S", "mid": "H4", "west": "H5"}


@pytest.mark.sectorch_long
@pytest.mark.parametrize("way", ["horizontal", "vertical"])
def test_five_hospitals_as_processes_learn_the_model_of_one_process(tmp_path, capsys, way):
    run_command([sys.executable, str(EXAMPLE), str(tmp_path)], check=True)
    own = {name: ["--input", f"{role}={way}-{role}.npy"] for name, role in PARTIES.items()}
    found = run_both_ways(f"{EXAMPLE}:{way}", PARTIES, own, tmp_path, capsys)
    for name, learned in found.learned.items():
        assert learned.keys() == found.wanted.keys()
        assert all(np.array_equal(learned[key], v) for key, v in found.wanted.items()), name
    print(f"{way}: {found.line('south')}")
