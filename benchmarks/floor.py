"""What the messages of a prediction take without its arithmetic, by what carries them: the floor of three processes.

    python benchmarks/floor.py                     # LeNet, one image
    python benchmarks/floor.py --net vgg7 --batch 1 --repeats 100

Q, A and S are processes. They send each other what a prediction does, as many bytes in as many messages: each sends
what it can before it waits. `tls` is the standard library's TLS on a socket, read and written by the thread that needs
it; `channel` what sectorch uses, with its frames and their checks. Both authenticate both ends. Milliseconds are of the
clock at Q (quartiles) and of the processor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import torch

from sectorch.choreography.net import Party, Phase, Sent
from sectorch.choreography.run.party import PartyRuntime
from sectorch.network.identity.authority import make_authority
from sectorch.network.identity.identity import Credentials
from sectorch.network.wire.channel import PeerLink
from sectorch.network.wire.endpoints import Listener, dial
from sectorch.testing.local_network import enrol, free_port

NAMES = {"Q": "alice", "A": "clinic", "S": "server"}
SESSION = bytes(range(16))


def messages(net: str, batch: int) -> list[Sent]:
    """What a prediction sends, in its order."""
    import sectorch
    from sectorch.testing.local_network import example

    model, x = example(net, batch)
    secure = sectorch.secure(model, session=sectorch.Session())
    secure(x[:batch])
    with sectorch.profile() as profile:
        secure(x[:batch])
    return [line for line in profile.ledger if line.phase != Phase.SETUP]


def play(me: str, lines: list[Sent], send, receive) -> None:
    """This party's messages of one prediction; it waits for a message when one of a later round is to go."""
    waiting: deque[Sent] = deque()
    for line in lines:
        if line.src.role == me:
            while waiting and waiting[0].round < line.round:
                receive(waiting.popleft())
            send(line)
        elif line.dst.role == me:
            waiting.append(line)
    for line in waiting:
        receive(line)


class Tls:
    """A socket to each neighbour; a message has its length before it."""

    def __init__(self, me: str, folder: Path, port: int, parties: dict[str, Party]):
        server = me == "S"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / f"{NAMES[me]}.pem", folder / f"{NAMES[me]}-key.pem")
        context.load_verify_locations(folder / "ca.pem")
        self._to: dict[str, ssl.SSLSocket] = {}
        if server:
            with socket.create_server(("localhost", port)) as listening:
                for _ in range(2):
                    taken = context.wrap_socket(listening.accept()[0], server_side=True)
                    self._to[taken.recv(1).decode()] = taken
        else:
            self._to["S"] = context.wrap_socket(reach(port), server_hostname="localhost")
            self._to["S"].sendall(me.encode())
        for one in self._to.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, line: Sent) -> None:
        self._to[line.dst.role].sendall(line.bytes.to_bytes(4, "big") + bytes(line.bytes))

    def receive(self, line: Sent) -> None:
        got = memoryview(bytearray(4 + line.bytes))
        while got:
            got = got[self._to[line.src.role].recv_into(got) :]


def reach(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except ConnectionRefusedError:
            time.sleep(0.05)


class Ours:
    """Frames of sectorch over its channels, made and checked as in a prediction."""

    def __init__(self, me: str, folder: Path, port: int, parties: dict[str, Party]):
        authority = folder / "ca.pem"
        credentials = Credentials.read(folder / f"{NAMES[me]}.pem", folder / f"{NAMES[me]}-key.pem", authority)
        channels = {}
        if me == "S":
            there = threading.Semaphore(0)

            def welcome(name: str, certificate: str) -> PeerLink:
                link = PeerLink(name, lambda *_: None)
                channels[parties[next(role for role in NAMES if NAMES[role] == name)]] = link.open(SESSION)
                there.release()
                return link

            self._server = Listener(f"localhost:{port}", credentials, welcome)
            there.acquire()
            there.acquire()
        else:
            reach(port).close()
            link = PeerLink("server", lambda *_: None)
            channels[parties["S"]] = link.open(SESSION)
            self._stream = dial(f"localhost:{port}", credentials, link, 30)
        for channel in channels.values():
            channel.grant_credit(1 << 28)
        self._runtime = PartyRuntime(parties[me], SESSION, channels)

    def send(self, line: Sent) -> None:
        self._runtime.transfer(line, torch.zeros(line.shape, dtype=line.dtype))

    def receive(self, line: Sent) -> None:
        self._runtime.transfer(line, torch.empty(line.shape, dtype=line.dtype, device="meta"))


KINDS = {"tls": Tls, "channel": Ours}


def party(kind: str, me: str, folder: Path, port: int, lines: list[Sent], told) -> None:
    """A process: connects, and plays the messages whenever it is told to."""
    torch.set_num_threads(1)
    wire = KINDS[kind](me, folder, port, {line.src.role: line.src for line in lines})
    told.send("ready")
    while told.recv():
        start, used = time.perf_counter(), time.process_time()
        play(me, lines, wire.send, wire.receive)
        told.send((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - used)))
    told.send("over")
    told.recv()  # nobody ends before all are over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--net", default="lenet")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    lines = messages(options.net, options.batch)
    size, rounds = sum(line.bytes for line in lines), max(line.round for line in lines)
    print(f"{len(lines)} messages, {size} bytes, {rounds} rounds")
    spawn = multiprocessing.get_context("spawn")
    ends: dict[str, dict] = {}
    processes = []
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        make_authority(folder)
        for me, name in NAMES.items():
            enrol(folder, name, hosts=("localhost",) if me == "S" else ())
        for kind in KINDS:
            port, ends[kind] = free_port(), {}
            for me in NAMES:
                ends[kind][me], end = spawn.Pipe()
                processes.append(spawn.Process(target=party, args=(kind, me, folder, port, lines, end), daemon=True))
                processes[-1].start()
            for end in ends[kind].values():
                end.recv()
        taken: dict[str, list] = {kind: [] for kind in KINDS}
        for at in range(options.repeats + 3):
            for kind, there in ends.items():
                for end in reversed(there.values()):  # Q, with whom it begins, last
                    end.send(True)
                took = {me: end.recv() for me, end in there.items()}
                if at >= 3:
                    taken[kind].append((took["Q"][0], *(took[me][1] for me in NAMES)))
        for kind, rows in taken.items():
            clock, *used = zip(*rows, strict=True)
            low, middle, high = statistics.quantiles(clock, n=4)
            each = ", ".join(f"{me} {statistics.median(ms):.1f}" for me, ms in zip(NAMES, used, strict=True))
            print(f"{kind:8} {middle:6.1f} ms ({low:.1f} to {high:.1f}); of the processor {each}", flush=True)
        every = [end for there in ends.values() for end in there.values()]
        for end in every:
            end.send(False)
        for end in every:
            end.recv()
        for end in every:
            end.send("end")
        for process in processes:
            process.join(10)


if __name__ == "__main__":
    main()
