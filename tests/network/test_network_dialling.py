"""An answering party before its server is there, and after it went away: it dials again, unless nobody knows it."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
import torch
from network_world import described, until

from sectorch import errors
from sectorch.network import Server, connect
from sectorch.network.commands.serve import keep_answering
from sectorch.network.parties.answer import Answering
from sectorch.network.wire.endpoints import refusal
from sectorch.testing.local_network import free_port


@pytest.mark.parametrize("way", ["reset", "closed"])
def test_a_connection_that_ends_in_the_handshake_is_no_matter_of_identity(pki, way):
    listening = socket.create_server(("localhost", 0))

    def accept() -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            near.recv(1 << 16)
            if way == "reset":
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        with pytest.raises(errors.PeerLostError, match="closed while it was being made"):
            connect(f"localhost:{listening.getsockname()[1]}", pki[1]["alice"], patience=0.5)
    finally:
        listening.close()


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [("PeerLostError", "PeerLostError"), ("AbortedError", "PeerLostError"), ("FrameError", "PeerLostError"),
     ("IdentityError", "IdentityError"), ("BusyError", "BusyError")],
)  # fmt: skip
def test_what_no_connection_means(kind, becomes):
    error = refusal("cloud:7100", getattr(errors, kind)("closed"))
    assert type(error) is getattr(errors, becomes) and str(error) == "cannot connect to cloud:7100: closed"


@pytest.mark.parametrize("address", ["cloud", "cloud:", ":7100", "cloud:x", "cloud:70000", "http://cloud:7100", ""])
def test_what_is_no_address_is_refused_before_anything_is_sent(pki, address):
    with pytest.raises(errors.ArgumentError, match="is host:port"):
        connect(address, pki[1]["alice"], patience=0.1)


def test_one_who_speaks_no_tls_is_no_matter_of_identity(pki):
    with socket.create_server(("localhost", 0)) as listening:

        def answer() -> None:
            near, _ = listening.accept()
            with near:
                near.recv(1 << 16)
                near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(errors.PeerLostError, match="no TLS of this kind"):
            connect(f"localhost:{listening.getsockname()[1]}", pki[1]["alice"], patience=0.1)


class Scripted:
    """An answering party to which this happens, one after the other."""

    def __init__(self, *happens):
        self.happens, self.dialled = list(happens), 0

    def register(self, name):
        self.dialled += 1
        self.wait()

    def wait(self):
        if self.happens:
            error = self.happens.pop(0)
            if error is not None:
                raise error


def test_an_answering_party_waits_for_the_server_and_ends_where_it_is_not_known(capsys):
    lost, busy = errors.PeerLostError("nobody listens there"), errors.BusyError("'b' is answering already")
    party = Scripted(lost, lost, busy, None, errors.PeerLostError("went away"), None, errors.IdentityError("changed"))
    with pytest.raises(errors.IdentityError, match="changed"):
        keep_answering(party, "b", threading.Event(), "cloud:7100", retry=0)  # type: ignore[arg-type]
    assert party.dialled == 5
    said = capsys.readouterr().err.replace("\n", " ").split("; ")
    assert sum("nobody listens there" in part for part in said) == 1, "once, and not at each attempt"
    assert any("went away" in part for part in said)


def test_it_may_be_started_before_the_server(pki, small_model):
    made, port, stopped = pki[1], free_port(), threading.Event()
    description, weights = described(small_model, torch.zeros(2, 1, 8, 8))
    party = Answering(f"localhost:{port}", made["hospital-b"], description, weights)
    ended = []

    def work() -> None:
        try:
            keep_answering(party, "hospital-b", stopped, f"localhost:{port}", retry=0.05)
        except errors.SectorchError as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    server = Server(f"localhost:{port}", made["server"])
    try:
        assert until(lambda: server.models() == ["hospital-b"], 30), ended
    finally:
        stopped.set()
        party.close()
        server.stop()
        thread.join()
    assert ended == []
