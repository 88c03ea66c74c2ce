"""What a fellow party, the server or a file may try: an error for those concerned, in time, and nothing for others."""

from __future__ import annotations

import threading
import time

import pytest
from federation_world import World, begun, each
from network_world import until

from sectorch import errors
from sectorch.choreography.run.frames import Frame, Kind, unpack
from sectorch.network import messages
from sectorch.network.federation.broker import SessionBroker
from sectorch.network.federation.config import read_federation
from sectorch.network.federation.sealed_channel import RelayedChannel
from sectorch.network.wire import channel
from sectorch.network.wire import channel as links
from sectorch.network.wire.channel import OUTBOX_BYTES, Deadline, PeerLink

RUN = bytes(range(16))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("attacks"), {"north": "H1", "south": "H2"})
    yield world
    world.close()


def link(name: str = "north") -> PeerLink:
    return PeerLink(name, lambda *_: None)


def ready() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.mark.parametrize("content", ["x = " + "[" * 5000, "x = " + "1" * 5000])
def test_a_file_that_python_cannot_take_is_a_line(tmp_path, content):
    path = tmp_path / "federation.toml"
    path.write_text(content)
    with pytest.raises(errors.ArgumentError, match="is not TOML") as caught:
        read_federation(path)
    assert "\n" not in str(caught.value)


def test_a_flood_of_credits_does_not_close_the_other_partys_connection():
    victim, frame = link("south"), Frame(Kind.CREDIT, RUN, payload=bytes(1 << 20))

    def flood(_: str) -> None:
        for _ in range(40):
            links._forward_frame(frame, victim, ready())

    begun(["north"], flood)[1][0].join(1)
    assert victim.closed is None and victim.outbox.size <= OUTBOX_BYTES + 2 * frame.size
    victim.close(errors.PeerLostError("over"))


def test_many_that_wait_for_room_share_it():
    victim, frame = link("collector"), bytes(1 << 20)
    for _ in range(OUTBOX_BYTES // len(frame) + 1):
        victim.send(frame)
    names = [f"p{number}" for number in range(24)]
    begun(names, lambda _: victim.send(frame))
    for _ in range(2):
        victim.outbox.take()
    assert until(lambda: victim.outbox.size > OUTBOX_BYTES, 30)
    time.sleep(0.1)
    assert victim.outbox.size <= OUTBOX_BYTES + len(frame)
    victim.close(errors.PeerLostError("over"))


def test_one_that_takes_nothing_is_lost_and_holds_up_a_sender_once(monkeypatch):
    monkeypatch.setattr(channel, "STUCK", 0.1)
    stuck = link("south")
    stuck.send(bytes(OUTBOX_BYTES + 1))
    links._forward_frame(Frame(Kind.DATA, RUN, payload=b"x"), stuck, ready())
    assert isinstance(stuck.closed, errors.PeerLostError)


@pytest.mark.parametrize("kind", [errors.PeerLostError, errors.FrameError, errors.AbortedError])
def test_what_comes_for_one_that_was_closed_for_any_reason_is_dropped(kind):
    """Its frames were no frames, say; whoever sends to it is in other sessions too."""
    closed = link("south")
    closed.close(kind("a frame's lengths do not add up"))
    links._forward_frame(Frame(Kind.DATA, RUN, payload=b"x"), closed, ready())


def test_a_frame_larger_than_a_part_is_not_handed_on():
    with pytest.raises(errors.FrameError, match="for another party"):
        links._forward_frame(Frame(Kind.ABORT, RUN, payload=bytes(2 << 20)), link(), ready())


def asked(**more) -> messages.Meet:
    return messages.parse_message(
        messages.Meet,
        {"do": "meet", "label": "x", "digest": "1", "parties": ["north", "south"], "time": time.time(), **more},
    )


def test_one_that_takes_nothing_holds_up_no_meeting():
    meetings, stuck = SessionBroker(), link()
    meetings.meet(stuck, asked())
    stuck.send(bytes(OUTBOX_BYTES + 1))
    found = each(["south"], lambda name: meetings.meet(link(name), asked(digest="2")), seconds=10)
    assert isinstance(found.get("south"), errors.RefusedError)


def test_one_that_leaves_as_the_session_begins_is_heard_of_by_all():
    """Those that come after it in the list are told of the session, and then that it is over."""
    meetings, south = SessionBroker(), link("south")
    north = link()
    open_ = north.open

    def leaving(*arguments):
        north.close(errors.PeerLostError("it left"))
        return open_(*arguments)

    north.open = leaving
    meetings.meet(north, asked())
    meetings.meet(south, asked())
    south.close(errors.PeerLostError("over"))
    kinds = [frame.kind for frame in unpack(south.outbox.take() or b"")]
    assert Kind.CONTROL in kinds and kinds[-1] == Kind.ABORT
    assert not len(meetings) and not south.sessions and not south._forwards


def test_who_is_lost_is_said_before_what_is_sent_still_is_refused(monkeypatch):
    """Or one that is sending hears first that its session is not open, and not why."""
    meetings, north, south = SessionBroker(), link("north"), link("south")
    meetings.meet(north, asked())
    meetings.meet(south, asked())
    heard, part, refuse = [], south.end_forwarding, south.refuse
    monkeypatch.setattr(south, "end_forwarding", lambda session: (heard.append("parted"), part(session)))
    monkeypatch.setattr(south, "refuse", lambda session, text: (heard.append(text), refuse(session, text)))
    north.close(errors.PeerLostError("it left"))
    assert heard[:1] == ["PeerLostError: 'north' gave up or is lost: it left"]
    assert "parted" in heard and not south._forwards and not south.sessions
    south.close(errors.PeerLostError("over"))


@pytest.mark.parametrize("said", [10**400, True, -1e13], ids=["huge", "bool", "ancient"])
def test_a_time_that_is_none(said):
    with pytest.raises(errors.FrameError, match="time: "):
        SessionBroker().meet(link(), asked(time=said))


def test_one_that_stopped_waiting_as_the_session_began_says_so(world):
    """The others do not wait for it until they count it as hanging."""
    heard = threading.Event()

    def work(name: str):
        with world.party(name) as federation:
            if name == "north":
                federation.connection.ask(asked(label="y", digest=federation.file.digest), messages.PartiesMissing)
                assert until(lambda: not world.server._broker._waiting, 30)
                try:
                    return until(lambda: len(world.server._broker) == 0, 10)
                finally:
                    heard.set()
            assert until(lambda: world.server._broker._waiting, 30)
            federation._meet("y", ("north", "south"), bytes.fromhex(federation.file.digest))
            return heard.wait(60)  # it stays, and does not end the session itself

    assert each(world.roles, work)["north"] is True


def test_frames_that_are_not_sealed_are_no_words_of_the_other_end():
    """The server cannot make a party that hangs look alive."""
    channel = RelayedChannel(link(), RUN, Deadline("'south'", 0.3))
    over = threading.Event()

    def credits() -> None:
        while not over.wait(0.05):
            channel.take(Frame(Kind.CREDIT, RUN), lambda _: {})

    thread = threading.Thread(target=credits, daemon=True)
    thread.start()
    found = each(["x"], lambda _: channel.receive(), seconds=10)
    over.set()
    thread.join()
    assert isinstance(found.get("x"), errors.PeerLostError)
