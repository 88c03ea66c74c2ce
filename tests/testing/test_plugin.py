"""The pytest plugin: inert where nobody asks for it, long tests by an option, and a seed that a failure prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A run inside a test forgets what it imported, and cryptography cannot be imported a second time.
import sectorch  # noqa: F401

pytest_plugins = ["pytester"]
ASKED = ("-p", "no:sectorch", "-p", "sectorch_pytest", "-p", "no:randomly", "-p", "no:cacheprovider")
FILE = """
import pytest, torch
from hypothesis import given, settings, strategies as st

SEEN = []

def test_short(sectorch_session, sectorch_reference):
    import sectorch
    x = torch.tensor([1.5, -2.0])
    for session in (sectorch_session, sectorch_reference):
        assert torch.equal(sectorch.share(x, session=session).reveal(), x)

@pytest.mark.sectorch_long
def test_long():
    pass

@given(st.integers())
def test_property(n):
    SEEN.append(n)

def test_examples():
    assert (len(SEEN) > 500) == LONG
"""
DRAWS = """
import torch

def test_draws(sectorch_draws, sectorch_seed):
    print("drew", float(torch.rand((), generator=sectorch_draws)), sectorch_seed)
    assert False

def test_without():
    assert False
"""


def test_it_imports_nothing():
    heavy = ("torch", "sectorch", "numpy", "hypothesis")
    look = f"import sectorch_pytest, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("long", [False, True])
def test_long_tests_are_run_by_the_option(pytester: pytest.Pytester, long: bool):
    from hypothesis import settings

    pytester.makepyfile(f"LONG = {long}\n{FILE}")
    before = settings.get_current_profile_name()
    try:
        result = pytester.runpytest_inprocess(*ASKED, *(["--sectorch-long"] if long else []))
    finally:
        settings.load_profile(before)
    result.assert_outcomes(passed=4 if long else 3, deselected=0 if long else 1)
    assert ("1 long tests are run by --sectorch-long" in result.stdout.str()) != long


def test_the_mark_alone_runs_long_tests_and_properties(pytester: pytest.Pytester):
    from hypothesis import settings

    pytester.makepyfile(f"LONG = True\n{FILE}")
    before = settings.get_current_profile_name()
    try:
        result = pytester.runpytest_inprocess(*ASKED, "-m", "sectorch_long")
    finally:
        settings.load_profile(before)
    result.assert_outcomes(passed=2, deselected=2)


def test_a_failure_prints_the_seed_that_gives_it_again(pytester: pytest.Pytester):
    pytester.makepyfile(DRAWS)
    drawn = []
    for given in ([], ["--sectorch-seed", "1234"], ["--sectorch-seed", "1234"]):
        result = pytester.runpytest_inprocess(*ASKED, *given)
        result.assert_outcomes(failed=2)
        text = result.stdout.str()
        assert text.count("the same draws again: pytest --sectorch-seed") == 1, "of the test that draws"
        assert not given or "--sectorch-seed 1234" in text
        drawn.append(next(line for line in text.splitlines() if line.startswith("drew")))
    assert drawn[1] == drawn[2] != drawn[0]
