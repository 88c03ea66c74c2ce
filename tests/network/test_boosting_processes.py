"""Boosted trees among four hospitals as processes over mutual TLS: the bits of one process, and of the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from boosting_programs import OWNERS
from both_ways import run_both_ways

PROGRAMS = Path(__file__).parent / "boosting_programs.py"
PARTIES = {"north": "Q", "east": "A", "south": "S", "mid": "H4"}
LEARNERS = ("east", "mid")


def inputs(way: str, folder: Path) -> dict[str, Path]:
    """What each hospital has, as files: columns, or rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).round(2)
    people = np.c_[x, x[:, 0] + x[:, 3] > 0.2 * random.normal(size=60)].astype(np.float64)
    have = (
        {"Q": people[:, :1], "A": people[:, 1:2], "S": people[:, 2:3], "H4": people[:, 3:]}
        if way == "vertical"
        else dict(zip(OWNERS, np.array_split(people, 4), strict=True))
    )
    files = {owner: folder / f"{owner}.npy" for owner in OWNERS}
    for owner, own in have.items():
        np.save(files[owner], own)
    return files


@pytest.mark.sectorch_long
@pytest.mark.parametrize("way", ["vertical", "horizontal"])
def test_four_hospitals_as_processes_train_the_trees_of_one_process(tmp_path, capsys, way):
    files = inputs(way, tmp_path)
    own = {name: ["--input", f"{role}={files[role]}"] for name, role in PARTIES.items()}
    found = run_both_ways(f"{PROGRAMS}:{way}", PARTIES, own, tmp_path, capsys)
    wanted = found.wanted
    assert set(wanted) == {"risk", "features_", "thresholds_", "leaves_", "base_"}
    assert np.unique(wanted["risk"]).size > 2
    for name, learned in found.learned.items():
        learned = {"risk" if key == "result" else key: value for key, value in learned.items()}  # a single one
        expected = set(wanted) - {"risk"} if name in LEARNERS else {"risk"} if name == "north" else set()
        assert set(learned) == expected, name
        assert all(np.array_equal(learned[key], wanted[key]) for key in learned), name
