"""A TLS stream: what goes in comes out, silence and dribbling end it, a slow reader and a busy one do not."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest
import torch
from cases import by_turns
from network_world import Trio, until

from sectorch import errors
from sectorch.choreography.run.frames import PART_BYTES, Frame, Kind, pack
from sectorch.network import Server
from sectorch.network.messages import ListModels, Models
from sectorch.network.wire import channel as outboxes
from sectorch.network.wire import tls_stream as streams
from sectorch.network.wire.channel import PeerLink
from sectorch.network.wire.endpoints import Listener, dial
from sectorch.network.wire.tls_stream import Tls, context_of

SESSION = bytes(range(16))


class Ends:
    """A client's link and the server's, over TLS; what comes to each is kept, through a relay if one is given."""

    def __init__(self, made: dict, through=None):
        self.welcomed: list[PeerLink] = []
        self.listener = Listener("localhost:0", made["server"], self._welcome)
        self.client = PeerLink("the server", lambda *_: None)
        port = self.listener.port if through is None else through(self.listener.port)
        self.over = threading.Event()
        self.stream = dial(f"localhost:{port}", made["alice"], self.client, 30, self.over.set)
        self.client.tell({"do": "hello"})
        assert until(lambda: self.welcomed, 30)
        (self.server,) = self.welcomed

    def _welcome(self, name: str, certificate: str) -> PeerLink:
        self.welcomed.append(PeerLink(name, lambda *_: None))
        return self.welcomed[-1]

    def close(self) -> None:
        self.stream.close()
        self.listener.stop(0)


@pytest.fixture
def ends(pki):
    ends = Ends(pki[1])
    yield ends
    ends.close()


def frames(sizes: list[int]) -> list[bytes]:
    return [pack(Frame(Kind.DATA, SESSION, number=i, payload=os.urandom(size))) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("towards", ["server", "client"])
def test_frames_of_all_sizes_come_whole_and_in_order(ends, towards):
    from_, to = (ends.client, ends.server) if towards == "server" else (ends.server, ends.client)
    edges = [streams.SMALL, streams.SLICE, 2 * streams.SMALL, 1 << 14]
    sizes = [0, 1, 100, PART_BYTES, 7, *(edge + d for edge in edges for d in (-60, -45, -44, 0, 1)), 3 * PART_BYTES, 5]
    sent, channel = frames(sizes), to.open(SESSION)
    from_.open(SESSION)
    channel.grant_credit(1 << 28)
    for frame in sent:
        from_.send(frame)
    for i, frame in enumerate(sent):
        came = channel.receive()
        assert came.number == i and pack(came) == frame


def test_many_threads_send_at_once_and_each_ones_frames_stay_in_order(ends):
    sessions = [bytes([i]) * 16 for i in range(1, 9)]
    channels = [ends.server.open(session) for session in sessions]
    for session in sessions:
        ends.client.open(session)
    for channel in channels:
        channel.grant_credit(1 << 28)

    def send(session: bytes) -> None:
        for number in range(200):
            ends.client.send(pack(Frame(Kind.DATA, session, number=number, payload=bytes(number * 37))))

    sending = [threading.Thread(target=send, args=(session,)) for session in sessions]
    for thread in sending:
        thread.start()
    for channel in channels:
        assert [channel.receive().number for _ in range(200)] == list(range(200))
    for thread in sending:
        thread.join()


def test_a_piece_beyond_the_largest_ends_the_connection_and_the_peer_hears_why(ends):
    ends.client.send(bytes(streams.LARGEST + 1))
    assert until(lambda: ends.client.closed is not None, 30)
    assert isinstance(ends.server.closed, errors.FrameError) and "in one piece" in str(ends.client.closed)


def test_a_peer_that_takes_nothing_holds_up_whoever_sends_and_is_lost_then(pki, monkeypatch):
    """It says that it is there, and reads nothing."""
    monkeypatch.setattr(outboxes, "STUCK", 0.5)
    ends, held = Ends(pki[1]), threading.Event()
    ends.server._on_request = lambda *_: held.wait(60)
    ends.client.tell({"do": "hold"})
    try:
        with pytest.raises(errors.PeerLostError, match="has taken nothing for"):
            for frame in frames([PART_BYTES]) * 100:
                ends.client.send(frame)
        assert ends.client.outbox.size <= outboxes.OUTBOX_BYTES + (2 << 20)
        assert ends.client.closed is None, "its signs of life come"
    finally:
        held.set()
        ends.close()


def test_who_reads_that_the_peer_has_ended_does_not_wait_to_write(pki, monkeypatch):
    """Over a link that takes nothing any more: the peer drops what comes, and the error is there at once."""
    lingered, linger = [], streams.Stream._linger
    monkeypatch.setattr(streams.Stream, "_linger", lambda self: (lingered.append(self.link.peer), linger(self)))
    ends, held = Ends(pki[1]), threading.Event()
    ends.server._on_request = lambda *_: held.wait(60)
    ends.client.tell({"do": "hold"})
    try:
        while not ends.client.outbox.size:
            ends.client.send(frames([PART_BYTES])[0])
        ends.server.close(errors.PeerLostError("over"))
        assert ends.over.wait(30)
        assert "the server" not in lingered and not held.is_set()
    finally:
        held.set()
        ends.close()


class Way:
    """A relay that passes all on, nothing, or a byte now and then, in one direction or both."""

    def __init__(self, port: int):
        self.listening, self.target = socket.create_server(("localhost", 0)), port
        self.passes = {"up": True, "down": True}
        self.dribbles, self.pause, self.open = False, 0.05, [self.listening]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self.listening.getsockname()[1]

    def _accept(self) -> None:
        near, _ = self.listening.accept()
        far = socket.create_connection(("localhost", self.target))
        self.open += [near, far]
        for which, source, target in (("up", near, far), ("down", far, near)):
            threading.Thread(target=self._pass, args=(which, source, target), daemon=True).start()

    def _pass(self, which: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while not self.passes[which]:
                    if self.dribbles and data:
                        target.sendall(data[:1])
                        data = data[1:]
                    time.sleep(self.pause)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self.open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def quick(monkeypatch):
    """Silence is noticed sooner."""
    monkeypatch.setattr(streams, "PING", 0.2)
    timeval = struct.pack("ll", 0, 200_000)
    monkeypatch.setattr(streams, "WAIT", timeval)


@by_turns(stopped=["up", "down", "both"], dribbles=[False, True])
def test_a_link_that_lets_nothing_whole_through_is_lost_at_both_ends(pki, quick, monkeypatch, stopped, dribbles):
    ways: list[Way] = []
    lingered: list[str] = []
    linger = streams.Stream._linger
    monkeypatch.setattr(streams.Stream, "_linger", lambda self: (lingered.append(self.link.peer), linger(self)))

    def through(port: int) -> int:
        ways.append(Way(port))
        return ways[0].port

    ends = Ends(pki[1], through)
    try:
        ways[0].dribbles = dribbles
        for which in ways[0].passes:
            ways[0].passes[which] = stopped not in (which, "both")
        assert until(lambda: ends.client.closed and ends.server.closed, 30)
        reasons = [str(ends.client.closed), str(ends.server.closed)]
        assert any("no sign of life" in reason for reason in reasons), reasons
        for end in (ends.client, ends.server):  # nobody waits for one who says nothing to read a last word
            assert "no sign of life" not in str(end.closed) or end.peer not in lingered
    finally:
        ends.close()
        ways[0].passes = {"up": True, "down": True}
        ways[0].close()


def test_who_waits_for_a_reply_hears_at_once_that_the_link_failed(pki, small_model, tmp_path):
    """And not when the connection has ended, which may first see a last word to the peer."""
    trio = Trio(pki[1], small_model, torch.zeros(1, 1, 8, 8), tmp_path)
    connection, asked, found = trio.connection, threading.Event(), []
    link = connection.link
    link.tell = lambda *_, **__: asked.set()

    def ask() -> None:
        try:
            connection.ask(ListModels(), Models, 60.0)
        except errors.PeerLostError as error:
            found.append(str(error))

    asking = threading.Thread(target=ask)
    connection._note_end = lambda *_: None  # the connection is not over
    asking.start()
    assert asked.wait(30)
    link.close(errors.PeerLostError("the server is gone"))
    asking.join(30)
    assert found == ["the server is gone"]
    del connection._note_end
    trio.close()


def test_an_end_that_reads_nothing_for_long_does_not_take_that_for_silence(pki, quick):
    ends, busy = Ends(pki[1]), threading.Event()
    ends.server._on_request = lambda *_: busy.wait(3 * streams.SILENT * streams.PING)
    ends.client.tell({"do": "work"})
    channel = ends.server.open(SESSION)
    ends.client.open(SESSION)
    try:
        assert not busy.wait(3 * streams.SILENT * streams.PING)
        ends.client.send(frames([10])[0])
        assert channel.receive().number == 0 and ends.client.closed is None and ends.server.closed is None
    finally:
        ends.close()


def test_an_idle_connection_lives(pki, quick):
    ends = Ends(pki[1])
    try:
        assert not ends.over.wait(3 * streams.SILENT * streams.PING)
        assert ends.client.closed is None and ends.server.closed is None
    finally:
        ends.close()


@pytest.mark.parametrize(
    ("who", "said"),
    [(None, "shows no certificate"), ("server", "its certificate is not a client's"), ("http", "no TLS of this kind")],
)
def test_a_refused_handshake_has_a_line_with_its_address_and_the_reason(pki, caplog, who, said):
    caplog.set_level(logging.INFO, "sectorch.server")
    made = pki[1]
    server = Server("localhost:0", made["server"])
    try:
        with socket.create_connection(("localhost", server.port)) as sock:
            sock.settimeout(30)
            address = "{}:{}".format(*sock.getsockname()[:2])
            if who == "http":
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            else:
                context = context_of(made[who or "alice"])
                if who is None:
                    import ssl

                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    context.load_verify_locations(cadata=made["alice"].authority.decode())
                tls = Tls(context, "localhost")
                while not tls.shaken:
                    sock.sendall(tls.shake())
                    if not tls.shaken:
                        tls.feed(sock.recv(1 << 16))
            lines = lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused")]
            assert until(lines, 30)
        (line,) = lines()
        assert said in line and address.rsplit(":", 1)[1] in line
    finally:
        server.stop()
