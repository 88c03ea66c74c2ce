"""Offline material: what is prepared without the query, and what it refuses to be used for."""

from __future__ import annotations

import pytest
from helpers import CASES, lines_of, located, play, ring_values, run_with_profile, world_of

from sectorch.choreography import Phase
from sectorch.errors import MaterialError, SessionMismatchError
from sectorch.mpc.relu import relu
from sectorch.mpc.truncate import truncate
from sectorch.runtime.ledger import Profile
from sectorch.session import Session

SINGLE = [case for case in CASES if case.answering == 1]


def prepared(session: Session, case, inputs, kept: dict):
    with Profile() as profile, session.prepare(session.answering[0]) as tape:
        world = world_of(session, session.net(session.answering[0]), kept)
        assert all(v.phase == Phase.ONLINE for v in located(world, case.program, [x.to("meta") for x in inputs]))
    return tape, profile


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_prepared_material_gives_the_same_result(case):
    session, inputs, kept = Session(), case.inputs(70), {}
    party = session.answering[0]
    tape, ahead = prepared(session, case, inputs, kept)
    with Profile() as online, session.replay(party, tape) as net:
        outputs = play(world_of(session, net, kept), case.program, inputs)
    case.check(inputs, outputs)
    assert {m.phase for m in ahead.ledger} <= {Phase.SETUP, Phase.OFFLINE}
    assert {m.phase for m in online.ledger} == {Phase.ONLINE}
    _, whole = run_with_profile(session, case, inputs)
    assert sorted(map(str, lines_of(ahead) + lines_of(online))) == sorted(map(str, lines_of(whole)))
    assert tape.bytes == 0, "a used tape holds nothing"
    assert str(ring_values((1,)).item()) not in repr(tape)
    with pytest.raises(MaterialError, match="used already"), session.replay(party, tape):
        raise AssertionError("not reached")


def relu_program(shift: int):
    return lambda world, x: relu(world.net, x, shift)


def attempt(session: Session, tape, program, x):
    with session.replay(session.answering[0], tape) as net:
        return play(world_of(session, net), program, [x])


@pytest.mark.parametrize(
    ("name", "program", "count"),
    [
        ("more steps", lambda w, x: relu(w.net, relu(w.net, x, 20), 20), 70),
        ("fewer steps", lambda w, x: x, 70),
        ("another protocol", lambda w, x: truncate(w.net, x, 20), 70),
        ("another shift, of as many planes", relu_program(19), 70),
        ("another shift", relu_program(2), 70),
        ("another shape", relu_program(20), 64),
    ],
)
def test_another_program_on_a_tape(name: str, program, count: int):
    session, case = Session(), next(c for c in CASES if c.name == "relu_20")
    tape, _ = prepared(session, case, case.inputs(70), {})
    with pytest.raises(MaterialError):
        attempt(session, tape, program, ring_values((count,), 62))


def test_a_tape_of_another_session():
    case = next(c for c in CASES if c.name == "relu_20")
    tape, _ = prepared(Session(), case, case.inputs(70), {})
    with pytest.raises((MaterialError, SessionMismatchError)):
        attempt(Session(), tape, case.program, case.inputs(70)[0])


def test_a_tape_shows_no_content_and_knows_its_size():
    session, case = Session(), next(c for c in CASES if c.name == "relu_20")
    tape, _ = prepared(session, case, case.inputs(70), {})
    assert repr(tape).startswith("Tape(call=")
    assert "tensor" not in repr(tape)
    # More than the dealt words that A and S combine with what is opened; see the costs in test_ledger.py.
    assert tape.bytes > 70 * 48
