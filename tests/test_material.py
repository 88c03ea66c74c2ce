"""Offline material: what is prepared without the query, and what it refuses to be used for."""

from __future__ import annotations

import pytest
import torch
from cases import some
from helpers import CASES, lines_of, ring_values, run_with_profile, stands, traced

from sectorch.choreography import Phase
from sectorch.choreography.ledger import Profile
from sectorch.errors import MaterialError
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.truncate import truncate
from sectorch.session import Session

SINGLE = [case for case in CASES if case.answering == 1]


def prepared(session: Session, program, inputs):
    """A program, what is brought into it, its material, and what was sent for it."""
    found, brought = traced(session, program, inputs)
    weights = {i.name: brought[i.name] for i in found.inputs if i.phase == Phase.SETUP}
    with Profile() as profile:
        material = session.prepare(found, weights)
    return found, brought, material, profile


DEAR = ("verified_relu_20", "ramp_of_largest_of_two")
"""Seconds each; verified proofs and ramps have tests of their prepared calls of their own."""


@pytest.mark.parametrize("case", some(SINGLE, lambda case: stands(case) and case.name not in DEAR), ids=str)
def test_prepared_material_gives_the_same_result(case):
    session, inputs = Session(), case.inputs(70)
    program, brought, material, ahead = prepared(session, case.program, inputs)
    with Profile() as online:
        outputs = session.run(program, brought, material)
    case.check(inputs, outputs)
    assert {m.phase for m in ahead.ledger} <= {Phase.SETUP, Phase.OFFLINE}
    assert {m.phase for m in online.ledger} == {Phase.ONLINE}
    _, whole = run_with_profile(session, case, inputs)
    assert sorted(map(str, lines_of(ahead) + lines_of(online))) == sorted(map(str, lines_of(whole)))
    assert material.bytes == 0, "what was used holds nothing"
    assert str(ring_values((1,)).item()) not in repr(material)
    with pytest.raises(MaterialError, match="used already"):
        session.run(program, brought, material)


def relu_program(shift: int):
    return lambda world, x: relu(world.net, x, shift)


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
def test_material_of_another_program(name: str, program, count: int):
    """It is refused, and stays good for its own."""
    session, case = Session(), next(c for c in CASES if c.name == "relu_20")
    own, brought, material, _ = prepared(session, case.program, case.inputs(70))
    other, others = traced(session, program, [ring_values((count,), 62)])
    with pytest.raises(MaterialError, match="another program"):
        session.run(other, others, material)
    case.check(case.inputs(70), session.run(own, brought, material))


def test_material_of_another_session():
    case = next(c for c in CASES if c.name == "relu_20")
    program, brought, material, _ = prepared(Session(), case.program, case.inputs(70))
    with pytest.raises(MaterialError, match="another session"):
        Session().run(program, brought, material)


def test_material_shows_no_content_and_knows_its_size():
    session, case = Session(), next(c for c in CASES if c.name == "relu_20")
    _, _, material, _ = prepared(session, case.program, case.inputs(70))
    assert repr(material).startswith("Material(call=")
    assert "tensor" not in repr(material)
    # More than the dealt words that A and S combine with what is opened; see the costs in test_ledger.py.
    assert material.bytes > 70 * 48


def test_the_setup_of_two_programs_with_one_weight_is_sent_once():
    """A model's programs for several shapes have their setup in common; another model's is its own."""
    import sectorch

    session, model = (
        Session(),
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval(),
    )
    secured, twin = (sectorch.secure(model, session=session) for _ in range(2))
    for module, masked in ((secured, 2), (secured, 0), (twin, 2)):
        for rows in (1, 2, 3):
            x = torch.randn(rows, 3)
            with Profile() as profile:
                assert torch.equal(module(x), sectorch.reference(model)(x))
            assert len([m for m in profile.ledger if m.phase == Phase.SETUP]) == (masked if rows == 1 else 0)


def test_material_of_another_model_of_the_same_layers():
    """Its products are of other weights: using it would give a wrong result."""
    import sectorch

    session = Session()
    one, other = (sectorch.secure(torch.nn.Linear(3, 4).eval(), session=session) for _ in range(2))
    x = torch.randn(2, 3)
    assert one.choreography(x) == other.choreography(x)
    one.preprocess(2, (3,))
    material = one.material_cache.take(sectorch.Inputs(x))
    with pytest.raises(MaterialError, match="another model"):
        session.run(other.choreography(x), other._program_inputs(sectorch.Inputs(x)), material)
