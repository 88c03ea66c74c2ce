"""Several server processes behind one port, and several servers behind one address: who is where, and what stays."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from network_world import described, known, until

import sectorch
from sectorch import errors
from sectorch.network import Server, Store, connect
from sectorch.network.commands import serve
from sectorch.network.commands.serve import MultiServer, addresses
from sectorch.network.messages import ServerProcess, message_form, parse_message
from sectorch.network.names import worker_of
from sectorch.network.parties.answer import Answering
from sectorch.network.parties.client import Connection
from sectorch.testing.local_network import Stage

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
NAMES = ("alice", "bob")


def test_the_clients_of_these_tests_have_different_workers():
    assert {worker_of(name, 2) for name in NAMES} == {0, 1}
    assert worker_of("alice", 1) == 0


def test_clients_are_spread():
    counts = Counter(worker_of(f"clinic-{i}", 4) for i in range(1000))
    assert sorted(counts) == [0, 1, 2, 3] and min(counts.values()) > 200


@pytest.mark.parametrize(
    "said",
    [
        {"worker": 2, "workers": 2}, {"worker": -1, "workers": 2}, {"worker": 0, "workers": 65},
        {"worker": True, "workers": 2}, {"worker": 0, "workers": "2"}, {"replica": "a b"}, {"replica": 3},
        {"replica": "x" * 65}, {"worker": None},
    ],
)  # fmt: skip
def test_a_server_that_says_it_is_at_no_place_is_refused(said):
    with pytest.raises(errors.FrameError, match="a reply of no form"):
        parse_message(ServerProcess, said, "reply")


def test_a_server_of_an_earlier_version_is_the_only_one():
    assert parse_message(ServerProcess, {}) == ServerProcess() and ServerProcess().label == ""
    assert parse_message(ServerProcess, message_form(ServerProcess(1, 3, "s1"))) == ServerProcess(1, 3, "s1")


@pytest.mark.parametrize("named", ["", ",", "a:1,a:1", ",".join(f"a:{i}" for i in range(65))])
def test_servers_that_cannot_be_named_so(named):
    with pytest.raises(errors.ArgumentError, match="different servers"):
        addresses(named)


def test_a_name_that_cannot_be(capsys):
    files = ["--cert", "c.pem", "--key", "k.pem", "--clients-ca", "ca.pem"]
    assert serve.server([*files, "--workers", "2", "--replica", "a b"]) == 1
    assert "error: --replica is 1 to 64 letters" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "65", "two"])
def test_a_number_of_workers_that_cannot_be(count, capsys):
    parser = argparse.ArgumentParser()
    serve.add_workers(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--workers", count])
    assert "--workers: " in capsys.readouterr().err


def test_each_worker_has_files_of_its_own(tmp_path):
    options = argparse.Namespace(
        workers=2,
        store=tmp_path / "s",
        store_key=None,
        store_used=None,
        store_budget=4.0,
        receipts=Path("r.jsonl"),
        manage="::1:9000",
    )
    key = serve._make_key(options)
    owns = [serve._worker_options(options, key, i) for i in range(2)]
    assert owns[1] == [
        "--worker", "1", "--store-budget", "2.0", "--store", str(tmp_path / "s" / "worker-1"),
        "--store-key", str(tmp_path / "s" / "store.key"), "--store-used", str(tmp_path / "s.used.1"),
        "--receipts", "r.1.jsonl", "--manage", "::1:9001",
    ]  # fmt: skip
    assert (tmp_path / "s" / "store.key").stat().st_mode & 0o777 == 0o600
    assert serve._without_listen(["--listen", "a:1", "--cert", "c", "--listen=b:2", "--workers", "2"]) == [
        "--cert", "c", "--workers", "2",
    ]  # fmt: skip


def test_a_port_that_is_in_use_is_refused_before_anything_is_started():
    with socket.create_server(("127.0.0.1", 0)) as other, ExitStack() as stack:
        with pytest.raises(errors.PeerLostError, match="name another port"):
            serve._reserve_port(stack, f"127.0.0.1:{other.getsockname()[1]}")
    with ExitStack() as stack, pytest.raises(errors.ArgumentError, match="host:port"):
        serve._reserve_port(stack, "7100")


class Balancer:
    """A TCP balancer: connections go to each of the ports in turn, but for those `down`."""

    def __init__(self, *ports: int):
        self.ports, self.down, self._next = ports, set(), 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._all: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.address = f"localhost:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                up = [port for port in self.ports if port not in self.down]
                there = socket.create_connection(("localhost", up[self._next % len(up)]))
                self._next += 1
                self._all += [here, there]
                for way in ((here, there), (there, here)):
                    self._threads.append(threading.Thread(target=self._copy, args=way, daemon=True))
                    self._threads[-1].start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for sock in (one, other):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._listening, *self._all):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for sock in (self._listening, *self._all):
            sock.close()


class Several:
    """Servers in this process, an answering party at all of them, in threads."""

    def __init__(self, made: dict, model, folder: Path, places: list[ServerProcess], shared: bool):
        self.made, self.model, self.pins = made, model, known(folder / "pins", made)
        self.servers: list[Server] = []
        for i, place in enumerate(places):
            port = self.servers[0].port if shared and self.servers else 0
            store = Store(folder / f"store-{i}")
            self.servers.append(Server(f"localhost:{port}", made["server"], store=store, place=place))
        self.stopped = threading.Event()
        named = [f"localhost:{server.port}" for server in (self.servers[:1] if shared else self.servers)]
        description, weights = described(model, X)
        self.party = Answering(named[0], made["hospital-b"], description, weights, self.pins, Store(folder / "store-a"))
        self.everywhere = MultiServer(self.party, "hospital-b", named, self.stopped)
        self.thread = threading.Thread(target=self.everywhere.run, daemon=True)
        self.thread.start()
        assert until(lambda: all(server.models() for server in self.servers), 30)

    def connect(self, name: str, address: str | None = None, **more) -> Connection:
        return connect(address or f"localhost:{self.servers[0].port}", self.made[name], pins=self.pins, **more)

    def close(self) -> None:
        self.stopped.set()
        self.everywhere.close()
        self.party.close()
        for server in self.servers:
            server.stop()


@pytest.fixture(scope="module")
def two(pki, small_model, tmp_path_factory):
    """Two workers behind one port."""
    folder = tmp_path_factory.mktemp("workers")
    world = Several(pki[1], small_model, folder, [ServerProcess(0, 2), ServerProcess(1, 2)], shared=True)
    yield world
    world.close()


def test_each_client_is_at_its_worker_and_has_its_result(two, small_model):
    expected = sectorch.reference(small_model)(X)
    with two.connect("alice") as alice, two.connect("bob") as bob:
        for name, connection in zip(NAMES, (alice, bob), strict=True):
            assert connection.place.worker == worker_of(name, 2)
            assert torch.equal(connection.model("hospital-b")(X), expected)
        sessions = [server.sessions for server in two.servers]
        assert sessions == [1, 1]


def test_another_worker_opens_no_session_for_a_client(two):
    """Its limits hold, although it could dial until another worker answers."""
    other = 1 - worker_of("alice", 2)
    with Connection(f"localhost:{two.servers[0].port}", two.made["alice"], pins=two.pins, worker=other) as connection:
        assert connection.place.worker == other
        with pytest.raises(errors.BusyError, match="not the worker of 'alice'"):
            connection.model("hospital-b")


def test_parties_meet_at_the_first_worker_only(two):
    with Connection(f"localhost:{two.servers[0].port}", two.made["bob"], pins=two.pins, worker=1) as connection:
        request = {"do": "meet", "label": "l", "digest": "d", "parties": ["alice", "bob"], "time": time.time()}
        with pytest.raises(errors.BusyError, match="first worker"):
            connection.ask(request)


@pytest.fixture
def replicas(pki, small_model, tmp_path):
    """Two servers of their own behind a balancer."""
    world = Several(
        pki[1], small_model, tmp_path, [ServerProcess(replica="s1"), ServerProcess(replica="s2")], shared=False
    )
    balancer = Balancer(*(server.port for server in world.servers))
    yield world, balancer
    balancer.close()
    world.close()


def test_what_was_prepared_at_one_replica_waits_while_another_one_answers(replicas, small_model, tmp_path):
    world, balancer = replicas
    expected = sectorch.reference(small_model)(X)
    store = lambda: Store(tmp_path / "store-q")
    first, second = (server.port for server in world.servers)
    balancer.down = {second}
    with world.connect("alice", balancer.address, store=store()) as connection:
        connection.model("hospital-b").prepare(2, 2)
    balancer.down = {first}
    with world.connect("alice", balancer.address, store=store()) as connection:
        assert connection.place.replica == "s2"
        model = connection.model("hospital-b")
        assert model.prepared() == {} and torch.equal(model(X), expected)
    balancer.down = {second}
    with world.connect("alice", balancer.address, store=store()) as connection:
        model = connection.model("hospital-b")
        assert model.prepared() == {(2, 1, 8, 8): 2}
        assert torch.equal(model(X), expected)
        assert model.prepared() == {(2, 1, 8, 8): 1}


def test_a_replica_that_is_gone_is_replaced_by_another_one(replicas, small_model):
    world, balancer = replicas
    expected = sectorch.reference(small_model)(X)
    with world.connect("alice", balancer.address) as connection:
        model = connection.model("hospital-b")
        assert torch.equal(model(X), expected)
        was = connection.place.replica
        gone = next(s for s in world.servers if s._place.replica == was)
        balancer.down = {gone.port}
        gone.stop()
        with suppress(errors.NetworkError):  # what was under way may be lost; the next question is not
            model(X)
        assert torch.equal(model(X), expected)
        assert connection.place.replica != was


@pytest.mark.sectorch_long
def test_a_worker_that_is_killed_takes_its_own_sessions_only_and_comes_back(small_model, tmp_path):
    """As processes: kill -9 of one of two workers; SIGTERM to the process that watches them ends all."""
    options = ("--workers", "2", "--log", str(tmp_path / "log"))
    with Stage({"hospital-b": (small_model, X)}, options=options) as stage, torch.no_grad():
        expected = sectorch.reference(small_model)(X)
        with ExitStack() as stack:
            connections = {name: stack.enter_context(stage.connect(name)) for name in NAMES}
            models = {}
            for name, connection in connections.items():
                assert until(lambda connection=connection: connection.models() == ["hospital-b"], 60)
                models[name] = connection.model("hospital-b")
                assert torch.equal(models[name](X), expected)
            children = _children(stage.processes["server"].pid)
            victim = next(p for p in children if f"--worker {worker_of('alice', 2)} " in _command(p))
            os.kill(victim, signal.SIGKILL)
            assert torch.equal(models["bob"](X), expected)
            end = time.monotonic() + 60
            with pytest.raises(errors.PeerLostError):
                while time.monotonic() < end:
                    models["alice"](X)

            def again() -> bool:
                with suppress(errors.NetworkError):
                    return torch.equal(models["alice"](X), expected)
                return False

            assert until(again, 60)
            assert torch.equal(models["bob"](X), expected)
        server = stage.processes["server"]
        children = _children(server.pid)
        assert len(children) == 2
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10)
    queries = [line for line in (tmp_path / "log").read_text().splitlines() if " query " in line]
    assert {name for name in NAMES if any(f"client={name} " in line for line in queries)} == set(NAMES)


@pytest.mark.sectorch_long
def test_workers_that_cannot_start_end_the_command(tmp_path, pki):
    """What each of them has is found wrong before one is started, and what is a worker's own by the worker."""
    folder, _ = pki

    def ended(certificate: str, *more: str) -> str:
        command = [
            *serve.PROGRAM, "server", "--listen", "localhost:0", "--cert", str(folder / certificate), "--workers",
            "2", "--key", str(folder / "server-key.pem"), "--clients-ca", str(folder / "ca.pem"), *more,
        ]  # fmt: skip
        found = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert found.returncode == 1
        return found.stderr

    assert "do not belong together" in (said := ended("alice.pem")) and said.count("\n") == 1
    assert "as soon as it was started" in ended("server.pem", "--limits", str(tmp_path / "none.toml"))


def _children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.sectorch_long
def test_a_limit_is_one_of_all_workers_also_where_it_is_raised_and_after_a_worker_was_killed(small_model, tmp_path):
    """As processes: clients of two workers ask at once, and get as many answers together as there is room for."""
    limits, said = tmp_path / "limits.toml", "[models.hospital-b]\nrows_in_all = {}\n"
    limits.write_text(said.format(6))
    options = ("--workers", "2", "--limits", str(limits))
    expected = sectorch.reference(small_model)(X)
    with Stage({"hospital-b": (small_model, X)}, options=options) as stage, ExitStack() as stack, torch.no_grad():
        connections = {name: stack.enter_context(stage.connect(name)) for name in NAMES}
        for connection in connections.values():
            assert until(lambda connection=connection: connection.models() == ["hospital-b"], 60)
        models = {name: connection.model("hospital-b") for name, connection in connections.items()}

        def answered(times: int) -> int:
            """Of so many questions of each, all at once."""
            right: list[bool] = []

            def ask(name: str) -> None:
                for _ in range(times):
                    with suppress(errors.QuotaError):
                        right.append(torch.equal(models[name](X), expected))

            threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(240)
            assert all(right)
            return len(right)

        assert answered(4) == 3
        limits.write_text(said.format(10))
        server = stage.processes["server"]
        server.send_signal(signal.SIGHUP)
        found = [0]
        assert until(lambda: (found.append(answered(1)), sum(found) == 2)[1], 60)
        assert answered(2) == 0
        victim = next(p for p in _children(server.pid) if f"--worker {worker_of('alice', 2)} " in _command(p))
        os.kill(victim, signal.SIGKILL)

        def refused() -> bool:
            try:
                models["alice"](X)
            except errors.QuotaError:
                return True
            except errors.NetworkError:
                return False
            raise AssertionError("answered beyond the limit")

        assert until(refused, 120)
