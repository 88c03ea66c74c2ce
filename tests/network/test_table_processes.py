"""Statistics of a table among parties apart, over TLS: the bits of one process at those who learn, none elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from both_ways import run_both_ways
from table_programs import example, statistics

from sectorch.federated.parties import Simulation

PROGRAMS = Path(__file__).parent / "table_programs.py"
PARTIES = {"north": "Q", "registry": "A", "south": "S", "west": "H4"}
OWNERS, LEARNERS = ("Q", "A", "H4"), ("south", "west")


@pytest.mark.sectorch_long
def test_statistics_of_four_processes_are_those_of_one(tmp_path, capsys):
    for owner in OWNERS:
        np.save(tmp_path / f"{owner}.npy", example(owner).numpy())
    own = {name: ["--input", f"{role}={role}.npy"] if role in OWNERS else [] for name, role in PARTIES.items()}
    found = run_both_ways(f"{PROGRAMS}:statistics", PARTIES, own, tmp_path, capsys)
    wanted = found.wanted
    plain = statistics(Simulation({owner: example(owner) for owner in OWNERS}))
    assert wanted.keys() == plain.keys()
    assert all(np.array_equal(wanted[key], plain[key], equal_nan=True) for key in wanted)
    for name, learned in found.learned.items():
        assert set(learned) == (set(wanted) if name in LEARNERS else set()), name
        assert all(np.array_equal(learned[key], wanted[key], equal_nan=True) for key in learned), name
    print(found.line("south"))


def test_the_program_in_one_process_is_right():
    """What the program of the processes computes, against numpy."""
    own = {owner: example(owner) for owner in OWNERS}
    found = statistics(Simulation(own))
    rows, died = torch_rows(own), own["A"].numpy()[:, 0] == 1
    age, months, sex = rows.T
    for code in (0, 1):
        assert abs(found["mean"][code, 0] - np.nanmean(age[sex == code])) <= 2.0**-20
    with np.errstate(invalid="ignore"):
        old = age >= 60
    counts = [[(old & (sex == s) & (died == d)).sum() for d in (False, True)] for s in (0, 1)]
    assert found["old"].tolist() == counts
    assert found["median"] == np.median(age[old])
    assert abs(found["deviation"] - months[old].std(ddof=1)) <= 2.0**-19
    known = ~np.isnan(age)
    assert abs(found["correlation"][0, 1] - np.corrcoef(age[known], months[known])[0, 1]) <= 2.0**-19


def torch_rows(own: dict) -> np.ndarray:
    return np.concatenate([own["Q"].numpy(), own["H4"].numpy()])
