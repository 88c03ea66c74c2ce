"""What one certificate, and who shows none, can take of the server's connections."""

from __future__ import annotations

import logging
import resource
import socket
from contextlib import ExitStack

import pytest
from network_world import until

from sectorch import errors
from sectorch.network import Server, connect
from sectorch.network.commands import options
from sectorch.network.wire import endpoints
from sectorch.network.wire.tls_stream import Tls, context_of


@pytest.fixture
def server(pki, monkeypatch):
    monkeypatch.setattr(endpoints, "STREAMS_EACH", 2)
    monkeypatch.setattr(endpoints, "connection_limit", lambda: 8)
    server = Server("localhost:0", pki[1]["server"])
    yield server
    server.stop()


def test_one_certificate_has_so_many_connections_and_others_have_theirs(server, pki):
    made, address = pki[1], f"localhost:{server.port}"
    with ExitStack() as opened:
        first = [opened.enter_context(connect(address, made["alice"])) for _ in range(2)]
        with pytest.raises(errors.BusyError, match="as many connections of this certificate"):
            connect(address, made["alice"])
        assert opened.enter_context(connect(address, made["bob"])).models() == []
        first[0].close()

        def again() -> bool:
            try:
                opened.enter_context(connect(address, made["alice"]))
            except errors.BusyError:
                return False
            return True

        assert until(again, 30)


def test_connections_that_show_no_certificate_have_a_bound(server, pki):
    """Who is connected stays so, and of strangers beyond the bound those that came first make room."""
    made, address = pki[1], f"localhost:{server.port}"
    with connect(address, made["alice"]) as connection, ExitStack() as opened:
        strangers = [opened.enter_context(socket.create_connection(("localhost", server.port))) for _ in range(20)]
        for stranger in strangers:
            stranger.settimeout(30)

        def closed(stranger: socket.socket) -> bool:
            try:
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        left = [stranger for stranger in strangers[:-8] if not closed(stranger)]
        assert left == [] and connection.models() == []
        opened.close()
        with connect(address, made["bob"]) as another:
            assert another.models() == []


def test_a_stranger_has_seconds_for_its_handshake_and_for_its_first_words(server, pki, monkeypatch):
    assert endpoints.HANDSHAKE <= 10
    monkeypatch.setattr(endpoints, "HANDSHAKE", 0.2)
    context = context_of(pki[1]["alice"])
    reached = lambda: socket.create_connection(("localhost", server.port))
    with reached() as silent, reached() as mute:
        mute.settimeout(30)
        tls = Tls(context, "localhost")
        while not tls.shaken:
            mute.sendall(tls.shake())
            if not tls.shaken:
                tls.feed(mute.recv(1 << 16))
        for one in (silent, mute):
            one.settimeout(30)
            assert one.recv(1) == b""


def test_the_limit_of_file_descriptors_is_raised_and_leaves_some(monkeypatch):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 20_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: set_to.append(to))
    options.many_files()
    assert set_to == [(20_000, 20_000)]
    assert endpoints.connection_limit() == 1024 - endpoints.RESERVED
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20_000, 20_000))
    assert endpoints.connection_limit() == endpoints.CONNECTIONS


def test_who_is_refused_is_written_down(server, pki, caplog):
    caplog.set_level(logging.INFO, "sectorch.server")
    made, address = pki[1], f"localhost:{server.port}"
    with connect(address, made["alice"]), connect(address, made["alice"]), pytest.raises(errors.BusyError):
        connect(address, made["alice"])
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("connected client=alice by=") for line in said) == 2
    assert any(line.startswith("refused by=") and "client=alice" in line for line in said)
