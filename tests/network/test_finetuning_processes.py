"""`examples/finetuning.py` as three processes and a server over mutual TLS: the bits of one process, and with noise."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from both_ways import run_both_ways
from commands import run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetuning.py"
PARTIES = {"hospital": "Q", "vendor": "A", "third": "S"}


@pytest.mark.sectorch_long
@pytest.mark.parametrize(
    ("way", "killed"),
    [("adapted", ""), ("adapted_privately", ""), ("adapted_privately", "vendor")],
)
def test_a_hospital_fine_tunes_a_vendors_model_among_processes(tmp_path, capsys, way, killed):
    """The noise is drawn anew in each run, so that only runs without it are equal."""
    run_command([sys.executable, str(EXAMPLE), str(tmp_path)], check=True)
    own = {name: ["--input", f"{role}={role}.npy"] for name, role in PARTIES.items() if role != "S"} | {"third": []}
    found = run_both_ways(f"{EXAMPLE}:{way}", PARTIES, own, tmp_path, capsys, killed)
    assert "1.weight" in found.learned["hospital"]
    for name, learned in found.learned.items():
        if name == "hospital":
            assert learned.keys() == found.wanted.keys()
            same = [np.array_equal(learned[key], v) for key, v in found.wanted.items()]
            assert all(same) if way == "adapted" else not any(same)
        else:
            assert not learned
    print(f"{way}: {found.line('third')}")
