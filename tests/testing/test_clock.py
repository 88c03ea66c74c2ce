"""Long checks stop when their seconds are over, say so, and show what they are at."""

from __future__ import annotations

import inspect
import io
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from rich.console import Console

from sectorch.choreography import Net
from sectorch.errors import ArgumentError
from sectorch.mpc.star.multiply import square
from sectorch.mpc.star.shares import Shares
from sectorch.testing import CheckOptions, Given, ProtocolFault, check_protocol, clock, mutate_protocol
from sectorch.testing.protocol_runs import Case


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[int]]:
    """Each look at the clock is a second later than the one before, whatever the machine does."""

    def start() -> Iterator[int]:
        seconds = itertools.count()
        monkeypatch.setattr(clock.Clock, "elapsed", property(lambda self: float(next(seconds))))
        return seconds

    return start


def wrong(net: Net, x: Shares) -> Shares:
    return Shares(x.A + 1, x.S)


def test_a_check_that_is_not_done_does_not_pass(ticking: Callable[[], Iterator[int]]):
    for seconds in (1, 8):
        ticking()
        with pytest.raises(ArgumentError, match=rf"the check was not done after {seconds} s, at 'result and draws'"):
            check_protocol(square, [Given()], torch.square, elements=256, seconds=seconds)


def test_what_was_found_before_the_end_is_raised(ticking: Callable[[], Iterator[int]]):
    ticking()
    with pytest.raises(ProtocolFault, match="result: "):
        check_protocol(wrong, [Given()], lambda x: x, elements=256, seconds=8)


def test_faults_that_are_planted_in_time_are_reported(ticking: Callable[[], Iterator[int]]):
    how = dict(kinds=("no mask", "one", "low bit"), elements=256, seed=3)
    seconds = ticking()
    whole = mutate_protocol(square, [Given()], torch.square, **how)
    total = next(seconds)
    assert whole.left == 0 and "the seconds were over" not in whole.table()
    found = []
    for _ in range(2):
        ticking()
        found.append(mutate_protocol(square, [Given()], torch.square, **how, seconds=total - 3))
    report = found[0]
    assert 0 < len(report.planted) < len(whole.planted) and report.possible == whole.possible
    assert report.left == len(whole.planted) - len(report.planted) == report.as_dict()["left"]
    assert f"the seconds were over: {report.left} faults were not planted" in report.table()
    assert set(map(str, report.planted)) <= set(map(str, whole.planted))
    assert list(map(str, report.planted)) == list(map(str, found[1].planted)), "drawn by the seed"
    ticking()
    with pytest.raises(ArgumentError, match="no fault was planted in 9 s, which went into 'the protocol itself'"):
        mutate_protocol(square, [Given()], torch.square, **how, seconds=9)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), True, "60"])
def test_seconds_that_are_none(seconds: object):
    for check in (check_protocol, mutate_protocol):
        with pytest.raises(ArgumentError, match=r"seconds is how long .* may take, above 0; got"):
            check(square, [Given()], torch.square, seconds=seconds)  # pyright: ignore[reportArgumentType]


def test_progress_is_shown_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch):
    how = dict(kinds=("one",), elements=16, runs=2, pairs=1, most=1)
    cases = ((True, False, True), (None, True, True), (None, False, False), (False, True, False))
    for progress, terminal, shows in cases:
        written = io.StringIO()
        made = lambda stderr, w=written, t=terminal: Console(file=w, force_terminal=t, width=100)
        monkeypatch.setattr(clock, "Console", made)
        mutate_protocol(square, [Given()], torch.square, progress=progress, **how)
        assert ("mutate_protocol: " in written.getvalue()) == shows, (progress, terminal)


def test_options_are_in_the_signatures():
    for check in (check_protocol, mutate_protocol):
        parameters = inspect.signature(check).parameters
        assert set(CheckOptions.__annotations__) <= set(parameters)
        assert all(parameters[name].default == getattr(Case, name) for name in CheckOptions.__annotations__)
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
