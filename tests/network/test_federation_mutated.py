"""Mutated frames at a federation's server and at a party: a typed error, bounded memory, the next session is right."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from cases import long
from federation_world import World, each
from network_world import resident, until
from test_network_faults import Posing, mutated, recorded, small

from sectorch import errors
from sectorch.choreography import Roles
from sectorch.choreography.run.frames import Kind, unpack
from sectorch.network.federation.party import Federation

ROLES = Roles("H1 H2", edges="H1-H2")
MIB = 100 << 20


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, {"north": "H1", "south": "H2"})
    yield world
    world.close()


def met(world: World, parties: dict[str, Federation]) -> None:
    """One session: each sends the other a number, and has the right one."""

    def work(name: str) -> int:
        with parties[name].session(ROLES, label="numbers") as session, session.call() as net:
            own = {r: net.own(getattr(net, r), torch.tensor([7 * int(r[1])])) for r in ("H1", "H2")}
            here = world.roles[name]
            return int(net.read(own[here], getattr(net, here)))

    assert each(parties, work, 60) == {"north": 7, "south": 14}


def joined(world: World) -> dict[str, Federation]:
    return {name: world.party(name) for name in world.roles}


def taped(world: World, name: str, at_server: bool) -> list[bytes]:
    """The frames of a session between the server and this party, in one direction."""
    parties = joined(world)
    link = parties[name].connection.link
    if at_server:
        (link,) = [known for known in world.server._links if known.peer == name and known.closed is None]
    frames = recorded(link)
    met(world, parties)
    for party in parties.values():
        party.close()
    return small(frames)


@pytest.mark.parametrize("count", [30, *long(10_000)])
def test_mutated_frames_of_a_party_at_the_server(world, count):
    """From a party in a session with another one, in which the frames are relayed: only these two are concerned."""
    frames, rng, baseline, dials = taped(world, "north", False), random.Random(3), 0, 0
    assert frames
    mallory = world.party("north")
    for i in range(count):
        baseline = baseline if i != count // 3 else resident()
        link = mallory.connection.link
        if link.closed is not None:
            mallory.close()
            mallory, dials = world.party("north"), dials + 1
            continue
        try:
            link.send(mutated(rng.choice(frames), rng))
        except errors.NetworkError:
            continue
        if rng.random() < 0.5:
            until(lambda: link.closed is not None, 0.01)
    mallory.close()
    gc.collect()
    assert dials > 0 and resident() - baseline < MIB
    print(f"{count} frames at the server, {dials} connections, grown by {(resident() - baseline) / 2**20:.1f} MiB")
    met(world, parties := joined(world))
    for party in parties.values():
        party.close()
    assert until(lambda: len(world.server._broker) == 0, 30)


@pytest.mark.parametrize("count", [30, *long(10_000)])
def test_mutated_frames_at_a_party(world, count):
    """What the server sent to it in a real session, changed, from a server that has the right certificate."""
    frames, rng, baseline, dials = taped(world, "south", True), random.Random(4), 0, 0
    posing = Posing(world.credentials["server"])
    path = world.folder / "posing.toml"
    path.write_text(world.path.read_text().replace(f":{world.server.port}", f":{posing.port}"))
    victim, errors_of = world.party("south", path), []

    def waits() -> None:  # so that what the server says of a session is not for nobody
        try:
            victim._meet("numbers", ("north", "south"), bytes(32))
        except errors.SectorchError as error:
            errors_of.append(type(error))  # not the error, whose frames hold the party

    for i in range(count):
        baseline = baseline if i != count // 3 else resident()
        if victim.connection.link.closed is not None or posing.links[-1].closed is not None or i == 0:
            victim.close()
            victim, dials = world.party("south", path), dials + 1
            threading.Thread(target=waits, daemon=True).start()
            posing.links[:] = posing.links[-1:]
        try:
            posing.links[-1].send(mutated(rng.choice(frames), rng))
        except errors.NetworkError:
            continue
        if rng.random() < 0.5:
            until(lambda: victim.connection.link.closed is not None, 0.01)
    victim.close()
    posing.stop()
    gc.collect()
    assert dials > 1 and resident() - baseline < MIB
    print(f"{count} frames at a party, {dials} connections, grown by {(resident() - baseline) / 2**20:.1f} MiB")
    met(world, parties := joined(world))
    for party in parties.values():
        party.close()


@pytest.mark.parametrize("count", [12, *long(300)])
def test_a_frame_that_the_server_changes_between_two_parties(world, count):
    """In a session of both: an error of a known type at each, or the right numbers, and the next session is right."""
    parties, rng, failed = joined(world), random.Random(5), 0
    for _ in range(count):
        (link,) = [known for known in world.server._links if known.peer == "south" and known.closed is None]
        inner, left = link.send, [rng.randrange(1, 3)]

        def send(data: bytes, urgent: bool = False, inner=inner, left=left) -> None:
            left[0] -= next(unpack(data)).kind == Kind.DATA
            # Under another session's name it would be held back, which a server may do, and which the others notice in
            # `SILENCE`.
            inner(data if left[0] else data[:20] + mutated(data[20:], rng), urgent)

        link.send = send

        def work(name: str) -> int:
            with parties[name].session(ROLES, label="numbers"):
                return 1

        found = each(parties, work, 60)  # a reply that was changed is waited for as long as any, 30 s
        assert set(found) == set(parties), "one hangs"
        assert all(v == 1 or isinstance(v, errors.SectorchError) for v in found.values()), found
        failed += any(v != 1 for v in found.values())
        link.send = inner
        for name, party in parties.items():
            if party.connection.link.closed is not None:
                party.close()
                parties[name] = world.party(name)
    assert failed
    met(world, parties)
    for party in parties.values():
        party.close()
