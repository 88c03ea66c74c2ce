"""A round of SecSV by parties of a federation: three clients and two servers, several parties of one role."""

from __future__ import annotations

import pytest
from federation_world import World, each
from network_world import until

from sectorch.choreography import Party
from sectorch.choreography.ledger import Profile
from sectorch.errors import ArgumentError
from sectorch.protocols.secsv import Settings, Training, build, fedavg, federation, testers
from sectorch.protocols.secsv.algorithm import Utilities
from sectorch.protocols.secsv.program import Program
from sectorch.protocols.secsv.secsv import SecSVTester, joint_keys
from sectorch.protocols.secsv.testers import TWO_SERVERS
from sectorch.protocols.secsv.values import coalitions

ROLES = {"north": "C1", "south": "C2", "west": "C3", "hub": "P", "helper": "X"}
PARTIES = {Party(role, role[0]): role for role in ROLES.values()}
WEIGHTS = {0: 1, 1: 2, 2: 1}


@pytest.fixture(scope="module", params=[(), ("hub", "helper")], ids=["one server", "two that serve"])
def world(request, tmp_path_factory):
    """All meet at a server that is no party, or the two servers of the protocol listen themselves."""
    world = World(tmp_path_factory.mktemp("secsv"), ROLES, request.param)
    yield world
    world.close()


@pytest.fixture(scope="module")
def made():
    """Logistic models of scikit-learn's digits, and ten test samples of each client."""
    found = federation("digits", 3, samples=150, tests=30)
    net = build("logistic", found.shape, found.classes)
    (models,), _ = fedavg(net, found.train, 1, Training(epochs=3))
    tests = testers.TestSet(tuple(x for x, _ in found.test.values()), tuple(y for _, y in found.test.values()))
    return Program(net, found.shape), tests, dict(enumerate(models.values()))


def valued(tester: SecSVTester) -> dict[int, dict]:
    """P's side of the valuation, with SampleSkip: what it finds of every coalition."""
    utilities = Utilities(range(3), len(tester.tests), lambda: tester, Settings(skip="saving"))
    utilities.ask(coalitions(range(3)))
    return {c: {k: r[k] for k in ("right", "samples", "tested", "skipped")} for c, r in utilities.records.items()}


def lines(profile: Profile) -> list[tuple]:
    return [(m.path, m.label, m.src.name, m.dst.name, m.round, tuple(m.shape), m.dtype, m.call) for m in profile.ledger]


def taken(
    runtime, program: Program, tests: testers.TestSet, models: dict, weights: dict, keys, first: dict, leads: bool
):
    with Profile() as profile:
        tester = SecSVTester(program, tests, keys, None, "single-layer", runtime)
        tester.agree([0 if x is None else 4 + i % 2 for i, x in enumerate(tests.x)], None)
        tester.begin(models, weights)
        found = tester.known(first), None
        if leads:
            found = found[0], valued(tester)
            tester.end()
        else:
            tester.follow()
    return found[1], lines(profile)


def test_a_round_is_valued_by_parties_apart_as_in_one_process(world, made):
    """P's counts are the same, and P alone learns any; so are all messages, with their rounds and calls. A client has
    its own samples, model and weight, and the joint keys; the servers have the public ones.
    """
    program, tests, models = made
    keys = joint_keys()
    expected, sent = taken(None, program, tests, models, WEIGHTS, keys, models[0], True)

    def work(name: str):
        role = ROLES[name]
        me = int(role[1:]) - 1 if role[0] == "C" else None
        mine = lambda values: tuple(v if i == me else None for i, v in enumerate(values))
        own = {} if me is None else {me: models[me]}
        weights = {} if me is None else {me: WEIGHTS[me]}
        with world.party(name) as party, party.runtime(TWO_SERVERS, PARTIES, label="round 1") as runtime:
            return taken(
                runtime, program, testers.TestSet(mine(tests.x), mine(tests.labels)), own, weights,
                keys.public if me is None else keys, models[0], role == "P",
            )  # fmt: skip

    found = each(ROLES, work)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    assert found["hub"][0] == expected and len(expected) == 7
    assert [found[name][0] for name in ROLES if name != "hub"] == [None] * 4
    assert all(ledger == sent for _, ledger in found.values())
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_one_party_in_two_parts_is_refused(world):
    with world.party("north") as party, pytest.raises(ArgumentError, match="another party"):
        with party.runtime(TWO_SERVERS, {**PARTIES, Party("C4", "C"): "C1"}):
            raise AssertionError("a session began")
