"""Parties that listen: whoever has a session with one of them is connected to it, and to no other party's server."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from federation_world import World, each
from network_world import until

from sectorch import errors
from sectorch.choreography import Message, Roles, protocol
from sectorch.federated.parties import Simulation
from sectorch.network.federation.broker import SessionBroker
from sectorch.network.messages import SessionBegin

PARTIES = {"hub": "P", "helper": "X", "north": "H", "south": "K"}
PAIR = Roles("L R", edges="L-R")


@protocol("difference", "this test", [Message("masked", "L", "R", "the stream that both draw from")], roles=PAIR)
def difference(net, x, y):
    pad = net.common(net.L, net.R, x.shape, "pad")
    return (x + pad).send(net.L, net.R, "masked") - pad - y


def work(net):
    x, y = (net.own(role, torch.empty(3, dtype=torch.int64), name=name) for role, name in ((net.L, "x"), (net.R, "y")))
    return net.read(difference(net, x, y), net.R)


def program(parties, left: str, right: str) -> torch.Tensor | None:
    with parties.session(PAIR, {"L": left, "R": right}, label=f"{left} {right}") as session:
        found = session.run(session.trace(work), parties.inputs)
    return None if found.is_meta else found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("servers"), PARTIES, ("hub", "helper"))
    yield world
    world.close()


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [("P", "X", "helper"), ("H", "P", "hub"), ("H", "X", "helper"), ("X", "K", "helper"), ("H", "K", "helper")],
)
def test_a_session_is_at_the_server_that_takes_part_in_it(world, monkeypatch, left, right, at):
    """Equal to one process, and only that server names it; where none takes part, the first one does."""
    begun, begin = defaultdict(int), SessionBroker._begin
    named = {id(server._broker): name for name, server in world.servers.items()}

    def noted(self, *arguments):
        begun[named[id(self)]] += 1
        return begin(self, *arguments)

    monkeypatch.setattr(SessionBroker, "_begin", noted)
    inputs = {"x": torch.tensor([1, 2**62, -3]), "y": torch.tensor([5, -7, 2**62])}
    playing = {name: role for name, role in PARTIES.items() if role in (left, right)}

    def take_part(name: str):
        with world.party(name) as party:
            party.inputs = {"x": inputs["x"]} if playing[name] == left else {"y": inputs["y"]}
            return program(party, left, right)

    found = each(playing, take_part)
    learned = next(name for name, role in playing.items() if role == right)
    assert torch.equal(found[learned], program(Simulation(inputs), left, right)), found
    assert begun == {at: 1}
    assert until(lambda: not any(len(server._broker) for server in world.servers.values()), 30)


def test_a_server_that_begins_a_session_of_another_one_is_not_heard(world):
    """The others may have what this party says to that one alone."""
    with world.party("north") as north:
        for parties in (["hub", "north"], ["nobody", "north"], []):
            with pytest.raises(errors.FrameError, match="at another one, or of nobody"):
                north._serve("helper", SessionBegin(label="x", parties=parties, meeting="00" * 16))


def test_a_server_that_went_is_dialled_again_by_the_next_session(world):
    def twice(name: str):
        with world.party(name) as party:
            party.inputs = {"x": torch.ones(3, dtype=torch.int64)} if name == "hub" else {}
            party.inputs |= {"y": torch.ones(3, dtype=torch.int64)} if name == "north" else {}
            first = program(party, "P", "H")
            party._connections["hub"].link.close(errors.PeerLostError("broken"))
            return first, program(party, "P", "H")

    found = each(("hub", "north"), twice)
    assert all(torch.equal(result, torch.zeros(3, dtype=torch.int64)) for result in found["north"]), found
