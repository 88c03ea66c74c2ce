"""Any choreography among parties elsewhere: who meets, what the server can read and change, and how it ends."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation_world import World, begun, each
from network_world import until

from sectorch import errors
from sectorch.choreography.run.frames import Kind
from sectorch.network.federation import party as parties
from sectorch.network.wire import channel as links

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from secure_sum import HOSPITALS, ROLES, total

PARTIES = {"north": "H1", "south": "H2", "west": "H3", "collector": "C"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("federation"), PARTIES)
    yield world
    world.close()


def vectors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator) for name in HOSPITALS}


def summed(world: World, inputs: dict[str, torch.Tensor], **options):
    """What each party reads of the sum."""

    def work(name: str):
        own = {role: x for role, x in inputs.items() if role == PARTIES[name]}
        with world.party(name) as federation, federation.session(ROLES, **options) as session:
            found = session.run(session.trace(total), own)
            return None if found.is_meta else found

    return each(PARTIES, work)


def test_four_parties_sum_through_a_server(world):
    inputs = vectors()
    found = summed(world, inputs)
    assert torch.equal(found["collector"], sum(inputs.values()))
    assert [found[name] for name in PARTIES if name != "collector"] == [None] * 3
    assert until(lambda: len(world.server._broker) == 0, 30)


def raising(found: dict) -> dict[str, type]:
    return {name: type(value) for name, value in found.items() if isinstance(value, BaseException)}


# Who meets whom.


def test_parties_that_would_do_different_things_do_not_meet(world):
    quick = {name: world.party(name) for name in ("north", "west")}
    meet = lambda name: quick[name]._meet("x", ("north", "west"), b"1" * 32)
    first, _ = begun(["north"], meet)
    assert until(lambda: world.server._broker._waiting, 30)
    with pytest.raises(errors.BusyError, match="waits for 'x' already"), world.party("north") as again:
        again._meet("x", ("north", "west"), b"1" * 32)
    with pytest.raises(errors.RefusedError, match="north would run something else as 'x' than 'west'"):
        quick["west"]._meet("x", ("north", "west"), b"2" * 32)
    assert until(lambda: "north" in first, 30) and isinstance(first["north"], errors.RefusedError), "it is told too"
    assert not world.server._broker._waiting
    for federation in quick.values():
        federation.close()


def test_a_party_that_stops_waiting_can_come_again(world):
    with world.party("north") as federation:
        federation._wait = 0.1
        for _ in range(2):
            with pytest.raises(errors.PeerLostError, match="not all of"), federation.session(ROLES):
                pass
        assert until(lambda: not world.server._broker._waiting, 30)


def test_nobody_meets_in_anothers_name(world):
    with world.party("north") as federation, pytest.raises(errors.IdentityError, match="not among south, west"):
        federation.connection.ask({"do": "meet", "label": "x", "digest": "", "parties": ["south", "west"], "time": 0})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parties": ["north"]}, "parties: expected `array` of length >= 2"),
        ({"parties": ["north", "north"]}, "different names"),
        ({"parties": ["north", "a b"]}, "letters"),
        ({"parties": "north"}, "parties: expected `array`, got `str`"),
        ({"label": 3}, "label"),
        ({"label": "x" * 201}, "label"),
        ({"digest": None}, "digest"),
        ({"time": "now"}, "time: expected `float`"),
        ({"time": float("nan")}, "time: expected `float`"),
    ],
)
def test_requests_that_are_none(world, changed, message):
    request = {"do": "meet", "label": "x", "digest": "", "parties": ["north", "south"], "time": time.time()}
    with world.party("north") as federation, pytest.raises(errors.FrameError, match=message):
        federation.connection.ask({**request, **changed})


def test_a_clock_that_is_an_hour_off_is_named(world):
    request = {"do": "meet", "label": "x", "digest": "", "parties": ["north", "south"], "time": time.time() - 3600}
    with world.party("north") as federation, pytest.raises(errors.RefusedError, match="set the clock"):
        federation.connection.ask(request)


def test_a_party_with_another_key_is_refused_by_all_that_have_an_edge_to_it(world):
    """The certificate is right and the server lets it in; the federation file of the others names another key."""
    stranger = "SHA256:" + "A" * 43
    others = world.written("others.toml", north=stranger)

    def work(name: str):
        with world.party(name, world.path if name == "north" else others) as federation:
            federation.file = federation.file if name != "north" else type(federation.file)(
                federation.file.name, federation.file.server,
                tuple(m if m.name != "north" else type(m)("north", "H1", stranger) for m in federation.file.members),
            )  # fmt: skip
            with federation.session(ROLES) as session:
                return session

    found = raising(each(PARTIES, work))
    assert set(found) == set(PARTIES) and found["south"] in (errors.IdentityError, errors.AbortedError)
    assert errors.IdentityError in found.values()


# What the server can do.


class Between:
    """Changes frames that the server hands on."""

    def __init__(self, monkeypatch, change):
        hand_on = links._forward_frame
        self.seen: list = []

        def handing(frame, to, ready):
            for changed in change(frame):
                self.seen.append(changed)
                hand_on(changed, to, ready)

        monkeypatch.setattr(links, "_forward_frame", handing)


def test_the_server_sees_lengths_and_no_content(world, monkeypatch):
    between, inputs = Between(monkeypatch, lambda frame: [frame]), vectors(5)
    assert torch.equal(summed(world, inputs)["collector"], sum(inputs.values()))
    data = [frame for frame in between.seen if frame.kind == Kind.DATA and not frame.label]
    assert len(data) == 9, "six keys and three masked vectors"
    whole = b"".join(bytes(frame.payload) for frame in data)
    assert b"masked" not in whole and b"secure_sum" not in whole and all(frame.path == "" for frame in data)
    for x in inputs.values():
        assert x.numpy().tobytes() not in whole


@pytest.mark.parametrize("how", ["flip", "twice", "swap", "drop_and_go_on", "other_session", "proof", "key"])
def test_what_the_server_changes_is_noticed(world, monkeypatch, how):
    held: list = []
    count = [0]

    def flipped(frame):
        data = bytearray(frame.payload)
        data[len(data) // 2] ^= 1
        return replace(frame, payload=bytes(data))

    def change(frame):
        sealed = frame.kind == Kind.DATA and not frame.label
        if how in ("proof", "key"):
            wanted = frame.kind == Kind.DATA and frame.label == ("proof" if how == "proof" else "hello")
            return [flipped(frame)] if wanted else [frame]
        if not sealed:
            return [frame]
        count[0] += 1
        if how == "flip":
            return [flipped(frame)]
        if how == "twice":
            return [frame, frame]
        if how == "other_session":
            return [replace(frame, number=frame.number + 1)]
        if how == "swap":
            held.append(frame)
            return [] if len(held) % 2 else [held.pop(), held.pop()]
        return [] if count[0] == 1 else [frame]

    Between(monkeypatch, change)
    monkeypatch.setattr(parties, "SILENCE", 3.0)
    found = summed(world, vectors(6))
    wrong = raising(found)
    if how == "twice" and not wrong:  # the copy came after the last that its reader wanted
        assert torch.equal(found["collector"], sum(vectors(6).values()))
        return
    assert wrong, "somebody notices"
    assert all(issubclass(kind, errors.SectorchError) for kind in wrong.values())
    right = found.get("collector")
    assert isinstance(right, BaseException) or torch.equal(right, sum(vectors(6).values())), "never a wrong sum"


# How it ends.


@pytest.mark.parametrize("who", PARTIES)
def test_a_party_that_fails_ends_the_session_for_all(world, who):
    def work(name: str):
        with world.party(name) as federation, federation.session(ROLES) as session:
            if name == who:
                raise ValueError("a secret of its own")
            return session.run(session.trace(total), {PARTIES[name]: torch.ones(4, dtype=torch.int64)})

    found = each(PARTIES, work)
    assert isinstance(found[who], ValueError)
    for name in PARTIES:
        if isinstance(found[name], errors.SectorchError):
            assert "secret" not in str(found[name]) and who in str(found[name])
    assert until(lambda: len(world.server._broker) == 0, 30)
    inputs = vectors(8)
    assert torch.equal(summed(world, inputs)["collector"], sum(inputs.values())), "and the next one is right"


@pytest.mark.parametrize("at", range(0, 14, 3))
@pytest.mark.parametrize("who", ["north", "collector"])
def test_a_party_that_dies_at_a_message(world, who, at):
    """Its connection breaks without a word: an error at those that need it, and the next session is right."""

    def work(name: str):
        federation = world.party(name)
        try:
            if name == who:
                link, sent = federation.connection.link, [0]
                inner = link.send

                def send(data, urgent=False):
                    if not urgent:
                        sent[0] += 1
                        if sent[0] == at + 1:
                            federation.connection._stream.close()
                    inner(data, urgent)

                link.send = send
            federation._wait = 2.0
            with federation.session(ROLES) as session:
                own = {r: x for r, x in vectors(9).items() if r == PARTIES[name]}
                found = session.run(session.trace(total), own)
                return None if found.is_meta else found
        finally:
            federation.close()

    found = each(PARTIES, work)
    assert set(found) == set(PARTIES), "nobody hangs"
    assert all(issubclass(kind, errors.SectorchError) for kind in raising(found).values())
    right = found["collector"]
    assert isinstance(right, BaseException) or torch.equal(right, sum(vectors(9).values()))
    assert until(lambda: len(world.server._broker) == 0, 30)
    inputs = vectors(10)
    assert torch.equal(summed(world, inputs)["collector"], sum(inputs.values()))
