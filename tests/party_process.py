"""One party in a process of its own, which is given its code and its keys and nothing else of the program.

`python party_process.py PORT` reads code, keys by peer and a token as JSON from standard input; a relay passes messages
on.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Client

import torch

from sectorch.choreography.streams import PairKey


class Alone:
    """`io` over one connection to whoever passes messages on."""

    def __init__(self, connection, keys: dict[str, PairKey], call: int):
        self.connection, self.keys, self.call = connection, keys, call

    def draw(self, peer, name, number, shape, dtype):
        count = torch.Size(shape).numel()
        words = self.keys[peer].words(name, self.call, number, -(-count * dtype.itemsize // 8))
        return words.view(dtype)[:count].view(shape)

    def send(self, peer, label, value):
        self.connection.send_bytes(f"{peer} {label}".encode())
        self.connection.send_bytes(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def receive(self, peer, label, shape, dtype):
        self.connection.send_bytes(f"{peer}? {label}".encode())
        data = self.connection.recv_bytes()
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    keys = {peer: PairKey(bytes.fromhex(key), bytes(16)) for peer, key in given["keys"].items()}
    scope: dict = {}
    exec(given["code"], scope)
    with Client(("localhost", int(sys.argv[1])), authkey=bytes.fromhex(given["token"])) as connection:
        setup = scope["setup"](Alone(connection, keys, 0))
        call = Alone(connection, keys, 1)
        offline = scope["offline"](call, setup)
        scope["online"](call, setup, offline)
        connection.send_bytes(b"done")
