"""Many queries at once, whose turn it is, several answering parties summed up, and what each party received."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest
import torch
from helpers import findings
from network_world import Trio, known, until
from torch import nn

import sectorch
from sectorch import errors
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.run.party import PartyRuntime
from sectorch.network import Pins, Server, answer, connect
from sectorch.network.wire.channel import Channel
from sectorch.network.wire.fair_queue import FairQueue

X = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def models(small_model):
    torch.manual_seed(4)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4)).eval().requires_grad_(False)
    return {"hospital-b": small_model, "bob": other}


@pytest.fixture(scope="module")
def two_models(pki, models, tmp_path_factory):
    _, made = pki
    folder = tmp_path_factory.mktemp("two")
    server = Server("localhost:0", made["server"])
    address = f"localhost:{server.port}"
    parties = [answer(address, made[n], m, X, pins=known(folder / "pins", made)) for n, m in models.items()]
    yield server, address, made, folder
    for party in parties:
        party.close()
    server.stop()


def test_several_answering_parties_give_their_sum_and_nothing_else(two_models, models):
    server, address, made, folder = two_models
    expected = sum(model(X) for model in models.values())
    with connect(address, made["alice"], pins=Pins(folder / "pins")) as connection:
        group = connection.aggregate(["hospital-b", "bob"])
        for _ in range(2):
            with Transcript() as transcript:
                y = group(X)
            assert (y - expected).abs().max() < 1e-4
            received = [line for line, _ in transcript.received("Q")]
            assert [(line.path, line.label) for line in received] == [("guard", "key")] * 2 + [("aggregate", "sum")]
        assert (connection.model("bob")(X) - models["bob"](X)).abs().max() < 1e-4
        group.close()
    assert until(lambda: server.sessions == 0, 60)


def test_the_sum_is_that_of_the_local_run(two_models, models):
    """The same lines in the ledger, but for the parties that each answering party does not know of."""
    _, address, made, folder = two_models
    session = sectorch.Session(2)
    secured = [
        sectorch.secure(m, session=session, party=p) for m, p in zip(models.values(), session.answering, strict=True)
    ]

    def local(x):
        shared = [s.share(x) for s in secured]  # which are known to be below the activation limit
        return sectorch.aggregate([s(v) for s, v in zip(secured, shared, strict=True)])

    local(X)
    with sectorch.profile() as here:
        y = local(X)
    with connect(address, made["alice"], pins=Pins(folder / "pins")) as connection:
        group = connection.aggregate(["hospital-b", "bob"])
        group(X)
        with sectorch.profile() as there:
            z = group(X)
        group.close()
    assert torch.equal(y, z)
    assert (there.bytes, there.online_bytes, there.rounds) == (here.bytes, here.online_bytes, here.rounds)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["hospital-b"], errors.ArgumentError),
        (["bob", "bob"], errors.ArgumentError),
        (["bob", "nobody"], errors.UnknownModelError),
    ],
)
def test_groups_that_are_refused(two_models, names, error):
    server, address, made, folder = two_models
    with connect(address, made["alice"], pins=Pins(folder / "pins")) as connection, pytest.raises(error):
        connection.aggregate(names)
    assert until(lambda: server.sessions == 0, 60)


def test_nobody_asks_itself(two_models):
    _, address, made, folder = two_models
    with connect(address, made["bob"], pins=Pins(folder / "pins")) as connection:
        with pytest.raises(errors.NetworkError, match="its own model"):
            connection.model("bob")


def test_twenty_queries_at_once_of_two_models(two_models, models):
    server, address, made, folder = two_models
    results, failures = {}, []

    def ask(i: int, connection) -> None:
        name = ("hospital-b", "bob")[i % 2]
        try:
            remote = connection.model(name)
            results[i] = name, remote(X + i)
            remote.close()
        except errors.SectorchError as error:
            failures.append(error)

    connections = [connect(address, made["alice"], pins=Pins(folder / "pins")) for _ in range(4)]
    threads = [threading.Thread(target=ask, args=(i, connections[i % 4])) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for i in range(20):
        name, y = results[i]
        assert (y - models[name](X + i)).abs().max() < 1e-3
    for connection in connections:
        connection.close()
    assert until(lambda: server.sessions == 0, 60)


# Turns.


def take_turns(turns: FairQueue, clients: list[str]) -> list[str]:
    """The order in which waiting calls of these clients run, one at a time, once the first of all ends."""
    order, begun = [], threading.Event()
    holding = threading.Event()

    def first():
        with turns.turn("holder", lambda: None):
            begun.set()
            holding.wait()

    def one(client):
        with turns.turn(client, lambda: None):
            order.append(client)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    begun.wait()
    for client in clients:
        threads.append(threading.Thread(target=one, args=(client,)))
        waiting = len(turns._waiting)
        threads[-1].start()
        assert until(lambda: len(turns._waiting) == waiting + 1, 60)
    holding.set()
    for thread in threads:
        thread.join()
    return order


def test_a_client_with_many_calls_does_not_keep_out_others():
    order = take_turns(FairQueue(1), ["many"] * 6 + ["one", "other"])
    assert order[:3] == ["many", "one", "other"]
    assert order[3:] == ["many"] * 5


def test_too_many_waiting_calls_are_refused():
    turns = FairQueue(1, waiting=3, each=2)
    with turns.turn("a", lambda: None):
        threads = []
        for client in "bbc":

            def wait(client=client):
                with turns.turn(client, lambda: None):
                    pass

            threads.append(threading.Thread(target=wait))
            threads[-1].start()
        assert until(lambda: len(turns._waiting) == 3, 60)
        with pytest.raises(errors.BusyError, match="3 calls wait"), turns.turn("d", lambda: None):
            raise AssertionError("not reached")
    for thread in threads:
        thread.join()
    with turns.turn("d", lambda: None):
        pass


def test_a_busy_server_says_so(pki, small_model, tmp_path, monkeypatch):
    _, made = pki
    monkeypatch.setattr("sectorch.network.parties.server.SESSIONS_PER_CLIENT", 2)
    trio = Trio(made, small_model, X, tmp_path)
    held = [trio.connection.model("hospital-b") for _ in range(2)]
    with pytest.raises(errors.BusyError, match="2 sessions are open, 2 of them of 'alice'"):
        trio.connection.model("hospital-b")
    held[0].close()
    assert until(lambda: trio.server.sessions == 1, 60)
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4
    trio.close()


def test_a_receiver_that_is_slow_holds_the_sender_back(pki, small_model, tmp_path, monkeypatch):
    """With a window far below a query's bytes the query is the same, and no more than window and message are held."""
    for name, size in {"WINDOW": 20_000, "CREDIT": 4_000, "AHEAD": 1_000}.items():
        monkeypatch.setattr(f"sectorch.network.wire.channel.{name}", size)
    held, take = [], Channel.take

    def watched(self, frame, read):
        take(self, frame, read)
        held.append(self._received - self._read)

    monkeypatch.setattr(Channel, "take", watched)
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    x = X.repeat(20, 1, 1, 1)
    transcript = Transcript()
    with transcript:
        y = trio.connection.model("hospital-b")(x)
    assert (y - small_model(x)).abs().max() < 1e-4
    largest = max(line.bytes for line, _ in transcript.lines)
    assert 20_000 < max(held) < 20_000 + 2 * largest
    trio.close()


# What each process received.


class Watched(PartyRuntime):
    """The runtime of a party, which also keeps what it received, as the party's process would see it."""

    views: dict = {}

    def _receive(self, line):
        value = super()._receive(line)
        if not line.shows:
            self.views[self.me.role, f"{line.path}/{line.label} ({value.dtype})"].append(value.numpy().reshape(-1))
        return value


def test_what_each_process_receives_is_uniform_and_the_same_for_every_query(pki, small_model, tmp_path, monkeypatch):
    """The statistics of the leak tests, on what came over TLS at S and at each client, for two far-apart inputs."""
    monkeypatch.setattr("sectorch.network.parties.session.PartyRuntime", Watched)
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    views = []
    for x in (torch.zeros(96, 1, 8, 8), torch.where(torch.arange(96 * 64) % 2 == 0, 3.0, -3.0).view(96, 1, 8, 8)):
        Watched.views = defaultdict(list)
        for _ in range(4):
            remote = trio.connection.model("hospital-b")
            remote(x)
            remote.close()
            assert until(trio.idle, 60)
        views.append({key: np.concatenate(values) for key, values in Watched.views.items()})
    trio.close()
    for view in views:
        size = {role: sum(v.nbytes for (r, _), v in view.items() if r == role) for role in "QAS"}
        assert size["Q"] == 0, "Q receives nothing but results and keys"
        assert min(size["S"], size["A"]) > 5e5
    assert findings(*views) == []
