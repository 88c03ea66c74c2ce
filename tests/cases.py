"""Which cases of a test every run has, and which long runs only.

The normal profile has a representative of each kind of thing: each property, attack, command, example, and each value
that a parameter of a test takes. The long profile (`pytest -m sectorch_long`) has the further cases of the same thing:
the other combinations, larger nets and samples, and scenarios of processes that have a cheaper sibling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

LONG = pytest.mark.sectorch_long


def long(*cases: Any) -> list[Any]:
    """Cases of long runs: `parametrize("count", [30, *long(10_000)])`."""
    return [_marked(case) for case in cases]


def some(cases: Iterable[Any], kept: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """All the cases, of which every run has those that are kept: `parametrize("name", some(NETS, ["lenet"]))`."""
    if not callable(kept):
        names = list(kept)
        cases = list(cases)
        assert all(name in cases for name in names), "a case to be kept is none of the cases"
        kept = lambda case: case in names
    return [case if kept(case) else _marked(case) for case in cases]


def by_turns(*, ids: Callable[[Any], str] | None = None, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Every combination of the parameters, of which every run has as many as the longest has values.

    Each value of each parameter is among them. The others take turns, and those of one length do not go in step:
    after each round of its values a parameter skips one.
    """
    values = {name: list(given) for name, given in parameters.items()}
    longest = max(values, key=lambda name: len(values[name]))
    others = [name for name in values if name != longest]
    kept = {
        tuple(i if name == longest else _turn(i, others.index(name), len(values[name])) for name in values)
        for i in range(len(values[longest]))
    }
    cases = []
    for places in itertools.product(*(range(len(given)) for given in values.values())):
        chosen = [given[place] for given, place in zip(values.values(), places, strict=True)]
        cases.append(pytest.param(*chosen, marks=[] if places in kept else [LONG]))
    return pytest.mark.parametrize(tuple(values), cases, ids=ids)


def _turn(i: int, which: int, count: int) -> int:
    """The place of the value whose turn it is: of the first parameter the next each time, of the second in blocks."""
    return (i + which * (i // count)) % count


def _marked(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, LONG], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=LONG)
