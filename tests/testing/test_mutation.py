"""Faults are planted where they are said to be, and found by the check that should find them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from own import OWN, cut

from sectorch.choreography import Net
from sectorch.choreography.roles import STAR
from sectorch.errors import ArgumentError
from sectorch.mpc.star.multiply import square
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.shares import Shares, share
from sectorch.mpc.star.truncate import truncate
from sectorch.testing import KINDS, Given, mutate_protocol
from sectorch.testing.mutation import mutants_of
from sectorch.testing.outcomes import constants_of
from sectorch.testing.protocol_runs import Draws, Protocol

ANY = Given(low=-(1 << 63), high=(1 << 63) - 1)
LEAKS = ("no mask", "mask twice", "short mask", "low bit unmasked", "mask told")


def test_every_fault_in_a_share_is_found_and_by_which_check():
    report = mutate_protocol(share, [Given("Q", low=-(1 << 63), high=(1 << 63) - 1)], lambda x: x)
    assert report.score == 1 and report.possible == len(report.planted) == len(report.counted) == 10
    by = {p.kind: p.by for p in report.planted}
    assert by == dict.fromkeys(("no mask", "short mask", "low bit unmasked"), "draws") | {"mask told": "view"} | (
        dict.fromkeys(("term", "sign", "modulus", "low bit", "one"), "result")
    )
    assert "100.0% of 10 found" in report.table() and report.as_dict()["survivors"] == []


def halves_of_a_square(net: Net, x: Shares) -> Shares:
    """A square whose halves are asked for, so that D deals what it owes."""
    y = square(net, x)
    return Shares(y.A, y.S)


def test_leaks_of_a_square_are_found():
    """Every mask of a square, the dealer's too: left out, used twice, too short, with a bit missing, told."""
    report = mutate_protocol(halves_of_a_square, [ANY], torch.square, kinds=LEAKS, elements=1024)
    assert [str(p) for p in report.survivors] == []
    assert {p.kind for p in report.planted} == set(LEAKS)
    assert {p.by for p in report.counted} == {"draws", "view"}


def test_faults_at_the_edges_of_a_rounding_are_found():
    """One more before a cut shows in one of 2^20 values: the check finds them by the protocol's own numbers."""
    rounded = lambda x: (x + (1 << 19)) >> 20
    options = dict(kinds=("one", "number", "low bit"), most=40, seed=1)
    report = mutate_protocol(partial(truncate, shift=20), [cut(20)], rounded, **options)
    assert report.survivors == [] and len(report.counted) > 30 and report.possible >= 78


def test_what_changes_nothing_is_told_from_what_was_not_found():
    def twice(net: Net, x: Shares) -> Shares:
        return Shares(x.A + x.A * 0, x.S)

    report = mutate_protocol(twice, [ANY], lambda x: x, kinds=("term", "low bit", "sign"))
    assert {p.kind for p in report.planted if p.same} == {"term", "low bit", "sign"}
    assert report.survivors == []


def test_a_check_that_is_too_kind_is_shown_by_its_score():
    strict = mutate_protocol(square, [ANY], torch.square, kinds=("one", "low bit"), elements=256)
    kind = mutate_protocol(
        square, [Given(low=0, high=0)], torch.square, kinds=("one", "low bit"), elements=256, error=1 << 62
    )
    assert strict.score == 1 and kind.score < 0.6
    assert "not found: one: " in kind.table()


def test_mutants_are_programs_of_the_same_messages_and_the_program_stays_what_it_was():
    traced = Protocol(relu, [ANY], STAR, 64)
    program, inputs = traced.program, [torch.arange(64) - 32]
    before = traced.play(inputs, Draws(0)).results[0][1]
    told, seen = [], set()
    for mutant in mutants_of(program):
        more = len(mutant.program.messages) - len(program.messages)
        assert more == (mutant.kind == "mask told")
        assert mutant.program.inputs == program.inputs
        told += [mutant] * more
        seen.add(mutant.kind)
    assert seen == set(KINDS) and told
    assert torch.equal(traced.play(inputs, Draws(0)).results[0][1], before)


def test_the_numbers_of_a_protocol():
    found = constants_of(Protocol(partial(truncate, shift=20), [Given()], STAR, 64).program)
    assert 1 << 19 in found and 1 << 20 in found and all(0 < c < 1 << 62 for c in found)


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="not of the kind 'typo'"):
        mutate_protocol(square, [ANY], torch.square, kinds=("typo",))
    with pytest.raises(ArgumentError, match="needs a reference"):
        mutate_protocol(square, [ANY], None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="the protocol itself is not right"):
        mutate_protocol(square, [ANY], lambda x: x, elements=128)


MORE = {"ramp_of_largest_of_four": 100}
"""Of the first 40 drawn there four are told masks of the kind that docs/testing.md names: more than one in ten."""


@pytest.mark.sectorch_long
@pytest.mark.parametrize("own", [o for o in OWN if not o.deep and o.options == {}], ids=lambda o: o.name)
def test_faults_in_our_own_protocols_are_found(own):
    """What is left is named in docs/testing.md."""
    most = MORE.get(own.name, 40)
    report = mutate_protocol(own.protocol, own.given, own.reference, most=most, **own.options)
    assert report.score >= 0.9, report.table()
