"""The relay that emulates a network: every byte, in order, in both directions, and not before its time."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from sectorch.testing.relay import relay


def echo() -> socket.socket:
    """A server that sends back what it gets."""
    listening = socket.create_server(("localhost", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return listening


@pytest.mark.parametrize(("delay", "rate"), [(0.0, 1e12), (0.02, 40e6)])
def test_bytes_pass_in_order_and_not_before_their_time(delay, rate):
    data = os.urandom(200_000)
    with echo() as target, relay(target.getsockname()[1], delay, rate) as way:
        with socket.create_connection(way.getsockname()) as near:
            start = time.monotonic()
            threading.Thread(target=near.sendall, args=(data,), daemon=True).start()
            back = b""
            while len(back) < len(data):
                back += near.recv(1 << 16)
            # There and back, and the bytes of one direction at the rate; the two directions overlap.
            assert time.monotonic() - start >= 2 * delay + 8 * len(data) / rate
            assert back == data
            near.shutdown(socket.SHUT_WR)
            assert near.recv(1) == b"", "the end of a stream passes too"
