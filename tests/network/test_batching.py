"""Calls of several clients that the server and an answering party take together: the same results, and nobody waits
for somebody else's client.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from network_world import Trio, until

import sectorch
from sectorch import errors
from sectorch.choreography.ledger import Profile
from sectorch.network import connect
from sectorch.network.parties import batching
from sectorch.network.parties.server import RUNNING
from sectorch.network.parties.session import OWN, ProgramCache
from sectorch.session import Session

CLIENTS = 5
X = torch.randn(CLIENTS, 1, 1, 8, 8, generator=torch.Generator().manual_seed(21))


@pytest.fixture(scope="module")
def world(pki, small_model, tmp_path_factory):
    _, made = pki
    trio = Trio(made, small_model, X[0], tmp_path_factory.mktemp("joint"))
    yield trio
    trio.close()


@pytest.fixture
def remotes(world):
    """A model for each client, over a connection of its own; each has asked once, which makes its setup."""
    with ExitStack() as stack:
        names = [("alice", "bob")[i % 2] for i in range(CLIENTS)]
        connections = [stack.enter_context(connect(world.address, world.made[name], pins=world.pins)) for name in names]
        models = [connection.model("hospital-b") for connection in connections]
        for remote, x in zip(models, X, strict=True):
            remote(x)
        yield models
    assert until(lambda: world.server.sessions == 0, 60)


@pytest.fixture(scope="module")
def expected(small_model):
    ideal = sectorch.reference(small_model)
    return [ideal(x) for x in X]


@pytest.fixture
def groups(monkeypatch):
    """How many calls were taken together, at S and at A, each time."""
    found: list[int] = []
    inner = batching.run_group
    monkeypatch.setattr(batching, "run_group", lambda group: (found.append(len(group)), inner(group)))
    return found


class Held:
    """All turns are taken, so that calls gather, until `go`."""

    def __init__(self, world):
        self._batcher, self._turns = world.server._serving._batcher, world.server._turns
        self._go, self._in = threading.Event(), threading.Barrier(RUNNING + 1)
        for i in range(RUNNING):
            threading.Thread(target=self._hold, args=(f"holder-{i}",), daemon=True).start()
        self._in.wait(30)

    def _hold(self, name: str) -> None:
        with self._turns.turn(name, lambda: None):
            self._in.wait(30)
            self._go.wait(60)

    def ready(self, count: int) -> bool:
        return until(lambda: sum(map(len, self._batcher._waiting.values())) == count, 30)

    def go(self) -> None:
        self._go.set()


def asked(remotes, wrong: dict) -> tuple[dict, list[threading.Thread]]:
    """All ask at once; results by number, errors in `wrong`."""
    found: dict[int, torch.Tensor] = {}

    def ask(i: int) -> None:
        try:
            found[i] = remotes[i](X[i])
        except BaseException as error:
            wrong[i] = error

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(len(remotes))]
    for thread in threads:
        thread.start()
    return found, threads


def at_rest(world) -> bool:
    """Whether S and A have done all that they do in calls."""
    running = sum(turns.figures()["calls_running"] for turns in (world.server._turns, world.party._turns))
    return not running and not world.server._serving._batcher._reserved


def finished(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_calls_that_wait_are_taken_together_and_give_what_each_would_give(world, remotes, expected, groups):
    held, wrong = Held(world), {}
    found, threads = asked(remotes, wrong)
    assert held.ready(CLIENTS)
    held.go()
    finished(threads)
    assert not wrong
    assert groups == [CLIENTS, CLIENTS], "once at S, once at A"
    assert all(torch.equal(found[i], expected[i]) for i in range(CLIENTS))
    assert until(lambda: world.server._serving._batcher._reserved == 0, 30)


def test_who_leaves_while_calls_wait_is_left_out(world, remotes, expected, groups):
    held, wrong = Held(world), {}
    found, threads = asked(remotes, wrong)
    assert held.ready(CLIENTS)
    remotes[2].connection._stream.close()
    assert until(lambda: 2 in wrong, 30)
    held.go()
    finished(threads)
    assert isinstance(wrong.pop(2), errors.PeerLostError) and not wrong
    assert all(torch.equal(found[i], expected[i]) for i in range(CLIENTS) if i != 2)
    assert until(lambda: world.server._serving._batcher._reserved == 0, 30)


def test_a_call_that_fails_at_a_in_the_middle_leaves_the_others(world, remotes, expected, groups, monkeypatch):
    inner, count = batching.run_in_lockstep, [0]

    def failing(calls):
        if len(calls) == CLIENTS:
            count[0] += 1
            if count[0] == 2:  # A's, or S's: whichever comes second
                runtime = calls[1].runtime
                post = runtime.post

                def once(line, value):
                    runtime.post = post
                    raise errors.FrameError("as if one call's message were broken")

                runtime.post = once
        inner(calls)

    monkeypatch.setattr(batching, "run_in_lockstep", failing)
    held, wrong = Held(world), {}
    found, threads = asked(remotes, wrong)
    assert held.ready(CLIENTS)
    held.go()
    finished(threads)
    assert len(wrong) == 1 and len(found) == CLIENTS - 1
    assert all(torch.equal(y, expected[i]) for i, y in found.items())


def stall(remote) -> threading.Event:
    """Have a client ask, send half of what it has to send, and wait for the event."""
    send, count, stop = remote.connection.link.send, [0], threading.Event()

    def stalling(data: bytes, urgent: bool = False) -> None:
        count[0] += 1
        if count[0] > 2 and not urgent:
            stop.wait(60)
        send(data, urgent)

    remote.connection.link.send = stalling
    return stop


def test_a_client_that_stalls_keeps_nobody_waiting(world, remotes, expected, groups):
    """It asks and sends half of what it has to send; the others' calls go on without it."""
    stop, wrong = stall(remotes[0]), {}
    found, threads = asked(remotes, wrong)
    finished(threads[1:])
    assert all(torch.equal(found[i], expected[i]) for i in range(1, CLIENTS)) and 0 not in found
    stop.set()
    finished(threads[:1])
    assert torch.equal(found[0], expected[0]) and not wrong


def test_a_call_that_comes_alone_runs_while_its_client_deals_and_keeps_nobody_waiting(world, remotes, expected, groups):
    """S and A begin it at once, in a turn of its own; where it stalls, the others have the other turn."""
    stop, wrong = stall(remotes[0]), {}
    assert until(lambda: at_rest(world), 30)
    alone: dict[int, torch.Tensor] = {}
    first = threading.Thread(target=lambda: alone.__setitem__(0, remotes[0](X[0])), daemon=True)
    first.start()
    running = lambda turns: turns.figures()["calls_running"]
    assert until(lambda: running(world.server._turns) == running(world.party._turns) == 1, 30)
    found, threads = asked(remotes[1:], wrong)
    finished(threads)
    assert set(found) == set(range(CLIENTS - 1)) and not wrong and not alone
    assert sum(groups) == 2 * (CLIENTS - 1)
    stop.set()
    finished([first])
    assert torch.equal(alone[0], expected[0])
    assert sum(groups) == 2 * (CLIENTS - 1)


def test_calls_of_other_shapes_are_not_mixed(world, remotes, expected, groups):
    batch = torch.cat(list(X[:3]))
    remotes[0](batch)
    remotes[1](batch)
    held, found = Held(world), {}
    inputs = [batch, batch, *X[2:]]
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, remotes[i](inputs[i]))) for i in range(CLIENTS)]
    groups.clear()
    for thread in threads:
        thread.start()
    assert held.ready(CLIENTS)
    held.go()
    finished(threads)
    assert sorted(groups) == [2, 2, 3, 3]
    assert torch.equal(found[0], torch.cat(expected[:3])) and torch.equal(found[1], found[0])
    assert all(torch.equal(found[i], expected[i]) for i in range(2, CLIENTS))


def test_the_log_counts_each_calls_own_bytes(world, remotes, caplog):
    said = lambda: [r for r in caplog.records if "outcome=done" in r.getMessage()]
    with caplog.at_level("INFO", logger="sectorch.query"):
        with Profile() as alone:
            remotes[0](X[0])
        assert until(lambda: at_rest(world), 30)  # S and A write their lines after Q has its result
        held, wrong = Held(world), {}
        caplog.clear()
        _, threads = asked(remotes, wrong)
        assert held.ready(CLIENTS)
        held.go()
        finished(threads)
        assert not wrong
        assert until(lambda: len(said()) == 3 * CLIENTS, 30)  # S, A and Q of each
    bytes_of = {who: {r.facts["bytes"] for r in said() if _party(r.facts) == who} for who in "SA"}
    moved = {who: sum(m.bytes for m in alone.ledger if who in (m.src.name, m.dst.name)) for who in "SA"}
    assert bytes_of["S"] == {moved["S"]} and bytes_of["A"] <= {moved["A"]}


def _party(facts: dict) -> str:
    return "S" if "certificate" in facts else "A" if "key" in facts else "Q"


def test_old_weights_are_not_kept_for_ever(world):
    """A party that changes its model again and again holds a few of them."""
    description, weights = world.described
    known, session = ProgramCache(), Session(dry=True)
    for _ in range(3 * OWN):
        served, key = known.served(description, dict(weights))
        known.module(served, key, session, session.answering[0], sectorch.Scheme())
    assert len(known._served) == len(known._first) == OWN
    assert known.served(description)[0] is known.served(dict(description))[0]


class Two(torch.nn.Module):
    """Two results: the client hears the first before it has dealt what the second takes."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.model(x)
        return y, y.relu()


def test_a_client_that_waits_within_a_call_is_not_waited_for(pki, small_model, tmp_path_factory, groups):
    _, made = pki
    trio = Trio(made, Two(small_model).eval(), X[0], tmp_path_factory.mktemp("two"))
    try:
        with connect(trio.address, made["alice"], pins=trio.pins) as connection:
            remote, ideal = connection.model("hospital-b"), sectorch.reference(Two(small_model).eval())
            for x in X[:3]:
                assert all(map(torch.equal, remote(x), ideal(x)))
        assert not groups
    finally:
        trio.close()
