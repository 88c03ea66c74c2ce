"""Parties that wait for each other in a circle: found where it is certain, and nowhere else; refused to all of them."""

from __future__ import annotations

import json
import threading
import time

import pytest
from federation_world import World, each
from hypothesis import given
from hypothesis import strategies as st
from network_world import until

from sectorch import errors
from sectorch.choreography import Roles
from sectorch.choreography.run.frames import Kind, unpack
from sectorch.network.federation import party as parties
from sectorch.network.federation.broker import SessionBroker, deadlock_message, find_deadlock
from sectorch.network.messages import Meet, Unmeet
from sectorch.network.wire import tls_stream
from sectorch.network.wire.channel import PeerLink

NAMES = "abcdef"


@given(st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES), max_size=4)))
def test_a_circle_is_found_where_there_is_one(lacking):
    """`lacking`: for whom each party waits. Those that wait for nobody who waits are taken away until none is left."""
    waits = {name: (f"of {name}", tuple(sorted({name, *others}))) for name, others in lacking.items()}
    there = {key: {name} for name, key in waits.items()}
    found, left = find_deadlock(waits, there), dict(lacking)
    while free := [name for name, others in left.items() if not (others - {name}) & left.keys()]:
        for name in free:
            del left[name]
    assert bool(found) == bool(left)
    assert len(set(found)) == len(found) != 1
    for name, awaited in zip(found, [*found[1:], *found[:1]], strict=True):
        assert awaited in lacking[name]


def test_each_party_is_told_the_labels_of_its_own_sessions():
    waits = {"a": ("one", ("a", "b")), "b": ("two", ("b", "c")), "c": ("three", ("a", "c"))}
    text = deadlock_message(["a", "b", "c"], waits, "b")
    assert "'a' waits for 'b' in 'one', 'b' waits for 'c' in 'two', 'c' waits for 'a';" in text
    assert "three" not in text and "\n" not in text


def link(name: str) -> PeerLink:
    return PeerLink(name, lambda link, request: None)


class Rooms:
    """Meetings at a server, and the connections of its clients."""

    def __init__(self):
        self.links: list[PeerLink] = []
        self.meetings = SessionBroker(lambda name: [link for link in self.links if link.peer == name])

    def link(self, name: str) -> PeerLink:
        self.links.append(PeerLink(name, lambda link, request: None, on_close=self.meetings.break_deadlocks))
        return self.links[-1]

    def meet(self, link: PeerLink, label: str, *names: str, alone: bool = True) -> list[str]:
        asked = Meet(label=label, digest="1", parties=list(names), time=time.time(), alone=alone)
        return self.meetings.meet(link, asked).missing


def heard(link: PeerLink) -> list[str]:
    """What a party was refused."""
    came = [frame for frame in unpack(link.outbox.take() or b"") if frame.kind == Kind.CONTROL]
    said = [json.loads(bytes(frame.payload)) for frame in came]
    return [message["text"] for message in said if message["do"] == "refused"]


def test_all_that_wait_in_a_circle_are_refused_and_may_come_again():
    rooms = Rooms()
    a, b, c, d = map(rooms.link, "abcd")
    rooms.meet(d, "later", "b", "d")
    rooms.meet(b, "second", "a", "b", "c")
    rooms.meet(c, "second", "a", "b", "c")
    assert not heard(b)
    assert rooms.meet(a, "first", "a", "b") == ["b"]
    for one in (a, b, c):
        (text,) = heard(one)
        assert "'a' waits for 'b'" in text and "'b' waits for 'a' in 'second'" in text
        assert ("'first'" in text) == (one is not c)
    assert not heard(d), "it waits for one in the circle and is not in it"
    rooms.meet(a, "first", "a", "b")
    assert rooms.meet(b, "first", "a", "b") == [] and len(rooms.meetings) == 1


def test_one_whose_other_threads_may_come_is_in_no_circle():
    rooms = Rooms()
    a, b = map(rooms.link, "ab")
    rooms.meet(b, "second", "a", "b", alone=False)
    rooms.meet(a, "first", "a", "b")
    assert not heard(a) and not heard(b)
    assert rooms.meet(b, "first", "a", "b", alone=False) == []


def test_one_that_stopped_waiting_and_waits_again_is_as_it_says_last():
    rooms = Rooms()
    a, b = map(rooms.link, "ab")
    rooms.meet(a, "first", "a", "b")
    rooms.meetings.unmeet(a, Unmeet(label="first", parties=["a", "b"]))
    rooms.meet(a, "first", "a", "b", alone=False)
    rooms.meet(b, "second", "a", "b")
    assert not heard(a) and not heard(b)


def test_of_several_connections_each_may_come_until_they_are_gone():
    rooms = Rooms()
    a, b, other = map(rooms.link, "aba")
    rooms.meet(b, "second", "a", "b")
    rooms.meet(a, "first", "a", "b")
    assert not heard(a) and not heard(b)
    other.close(errors.PeerLostError("it left"))
    assert heard(a) and heard(b)


def test_a_thread_that_is_not_this_packages_own_may_come(monkeypatch):
    over, me = threading.Event(), threading.current_thread()
    own, foreign = tls_stream.start_carrier(over.wait, "ours"), threading.Thread(target=over.wait)
    for others, expected in (([own], True), ([], True), ([own, foreign], False)):
        monkeypatch.setattr(threading, "enumerate", lambda others=others: [me, *others])
        assert tls_stream.is_single_threaded() == expected
    over.set()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("circles"), {"north": "X", "south": "Y"})
    yield world
    world.close()


def test_two_that_wait_for_each_other_hear_of_it(world, monkeypatch):
    """As where one was started again and begins with the first session, while the other is at the second one."""
    monkeypatch.setattr(parties, "is_single_threaded", lambda: True)
    roles = Roles("X Y", "X-Y")

    def work(name: str):
        with world.party(name) as federation, federation.session(roles, label=f"of {name}"):
            return None

    found = each(["north", "south"], work)
    for error in found.values():
        assert type(error) is errors.DeadlockError
        assert "'north' waits for 'south' in 'of north'" in str(error)
        assert "'south' waits for 'north' in 'of south'" in str(error)


def test_one_that_waits_hears_at_once_that_a_session_it_is_in_has_failed(world, monkeypatch):
    """It is not in a circle with one that is lost and back: it does not wait any more."""
    monkeypatch.setattr(parties, "is_single_threaded", lambda: True)
    roles, held = Roles("X Y", "X-Y"), threading.Event()

    def south() -> None:
        with world.party("south") as federation, federation.session(roles, label="outer"):
            assert until(lambda: ("inner", ("north", "south")) in world.server._broker._waiting, 30)
            federation.connection._stream.close()  # as one that is killed

    def north() -> None:
        with world.party("north") as federation, federation.session(roles, label="outer"):
            monkeypatch.setattr(federation._calls._changed, "wait", _woken(federation._calls._changed.wait))
            held.set()
            with federation.session(roles, label="inner"):
                pass

    found = each(["north", "south"], lambda name: {"north": north, "south": south}[name]())
    assert isinstance(found["north"], errors.PeerLostError | errors.AbortedError)
    assert "'south'" in str(found["north"])


def _woken(wait):
    """A wait that is not over before somebody says so."""
    return lambda timeout=None: wait(60)
