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
from sectorch.network.commands.everywhere import keep_answering
from sectorch.network.parties.answer import Answering
from sectorch.network.parties.stage import free_port
from sectorch.network.wire.transport import refusal


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
    ("detail", "kind"),
    [
        ("last error: UNAVAILABLE: ipv4:1: Handshake read failed (recvmsg:Connection reset by peer)", "PeerLostError"),
        ("last error: UNAVAILABLE: ipv4:1: Handshake read failed (Socket closed)", "PeerLostError"),
        ("the connection to the server at 1 broke (Socket closed)", "PeerLostError"),
        ("last error: UNAVAILABLE: ipv4:1: Socket closed", "IdentityError"),
        ("handshake: CERTIFICATE_VERIFY_FAILED: unable to get issuer", "IdentityError"),
        ("handshake: Hostname Verification Check failed", "IdentityError"),
    ],
)
def test_what_no_connection_means(detail, kind):
    assert type(refusal("cloud:7100", detail)) is getattr(errors, kind)


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
