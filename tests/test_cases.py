"""Which cases every run has: each value of a parameter, and of the others long runs have them all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from cases import LONG, by_turns, long, some
from hypothesis import given
from hypothesis import strategies as st


def split(cases: list) -> tuple[list, list]:
    """Those of every run, and those of long ones."""
    left = [case for case in cases if getattr(case, "marks", ())]
    return [case for case in cases if case not in left], left


def values(cases: list) -> list[tuple[Any, ...]]:
    return [tuple(case.values) for case in cases]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_each_value_takes_its_turn(counts: list[int]):
    parameters = {f"p{i}": list(range(count)) for i, count in enumerate(counts)}
    names, cases = by_turns(**parameters).args
    kept, left = split(cases)
    assert names == tuple(parameters)
    assert sorted(values(cases)) == sorted(itertools.product(*parameters.values())), "each combination, once"
    assert len(kept) == max(counts) and all(list(case.marks) == [LONG] for case in left)
    assert [sorted(set(column)) for column in zip(*values(kept), strict=True)] == list(parameters.values())


def test_two_parameters_of_one_length_do_not_go_in_step():
    _, cases = by_turns(a="xyzwuv", b=[0, 1], c=[0, 1]).args
    assert {case.values[1:] for case in split(cases)[0]} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_cases_that_are_kept_and_those_that_are_not():
    kept, left = split(some(["a", "b", ("c", 1)], ["b"]))
    assert kept == ["b"] and values(left) == [("a",), ("c", 1)]
    assert split(some(range(4), lambda n: n > 1))[0] == [2, 3]
    named = pytest.param(3, id="three", marks=pytest.mark.skip)
    assert [(case.id, len(case.marks)) for case in long(named)] == [("three", 2)]
    with pytest.raises(AssertionError, match="none of the cases"):
        some(["a"], ["b"])
