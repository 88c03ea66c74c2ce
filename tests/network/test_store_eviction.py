"""A full store: shared among clients, and what is evicted is void for everybody, once and for all."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from cases import by_turns
from hypothesis import given
from hypothesis import strategies as st
from network_world import Trio, pieces_in, until

from sectorch import errors
from sectorch.choreography.program.projection import Material
from sectorch.network import Store
from sectorch.network.store import UNUSED, MaterialBinding

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def put(store: Store, session: int, client: str, call: int = 0, n: int = 1000) -> int:
    name = bytes([session] * 16)
    shelf = store.shelf(name, MaterialBinding(client=client, model="m"))
    return shelf.put(Material(call, name, "a digest", 1, [torch.zeros(n, dtype=torch.int64)]), (0, 1))


def held(store: Store) -> Counter:
    return Counter({c: sum(s.bytes for s in store.shelves(client=c)) for c in "abc"})


def test_a_client_has_it_all_until_another_needs_its_share(tmp_path):
    store = Store(tmp_path, budget=100_000)
    went = []
    store.on_evict = went.append
    for session in range(1, 13):
        put(store, session, "a")
        os.utime(tmp_path / (bytes([session] * 16).hex()), (session, session + 4e9))
    with pytest.raises(errors.StoreFullError):
        put(store, 13, "a")
    assert held(store)["a"] > 0.95 * store.budget and not went
    for session in range(21, 27):
        put(store, session, "b")
    assert [shelf.session[0] for shelf in went] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(errors.StoreFullError):
        put(store, 27, "b")
    assert (
        held(store)["a"] == held(store)["b"]
        and store.free_bytes("c") > store.budget // 4
        and store.free_bytes("a") < 8100
    )
    assert pieces_in(tmp_path) == 12


def test_what_nobody_came_back_for_goes_first(tmp_path):
    store = Store(tmp_path, budget=30_000)
    for session, client in ((1, "a"), (2, "b"), (3, "b")):
        put(store, session, client)
    old = (tmp_path / (bytes([1] * 16).hex())).stat().st_mtime - UNUSED - 1
    os.utime(tmp_path / (bytes([1] * 16).hex()), (old, old))
    put(store, 4, "c")
    assert {s.session[0] for s in store.shelves()} == {2, 3, 4}
    with pytest.raises(errors.StoreFullError):
        put(store, 5, "b")


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc"), st.integers(0, 900)), max_size=40))
def test_the_budget_holds_and_nobody_within_its_share_loses_anything(tmp_path_factory, puts):
    store = Store(tmp_path_factory.mktemp("store"), budget=20_000)
    try:
        for call, (session, client, n) in enumerate(puts):
            before = held(store)
            clients = {c for c in "abc" if before[c]} | {client}
            try:
                put(store, session * 8 + ord(client) % 8, client, call, n)
            except errors.StoreFullError:
                assert held(store) == before or held(store)[client] == before[client]
            after = held(store)
            assert after.total() <= store.budget
            for other in clients - {client}:
                assert after[other] == before[other] or before[other] >= store.budget // len(clients)
    finally:
        store.close()


def test_a_crash_while_one_is_removed_leaves_nothing_of_it(tmp_path, monkeypatch):
    """Between any two steps of a removal: the folder is there whole, or not at all."""
    store = Store(tmp_path)
    for call in range(3):
        put(store, 1, "a", call)

    def killed(*_, **__):
        raise KeyboardInterrupt

    for step in ("os.replace", "shutil.rmtree"):
        with monkeypatch.context() as patch:
            patch.setattr(f"sectorch.network.store.{step}", killed)
            with pytest.raises(KeyboardInterrupt):
                store.shelf(bytes([1] * 16)).drop()
        store.close()
        store = Store(tmp_path)
        assert [len(s) for s in store.shelves()] == ([3] if step == "os.replace" else [])
    assert pieces_in(tmp_path) == 0
    store.close()


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    trio.server.stop()
    trio.party.close()
    trio.connection.close()
    trio.start_server(Store(tmp_path / "s"))
    trio.start_answering(Store(tmp_path / "a"))
    trio.start_querying(Store(tmp_path / "q"))
    yield trio
    trio.close()


@by_turns(who="SA", open_=[True, False])
def test_what_is_evicted_is_void_at_all_three(trio, small_model, tmp_path, who, open_):
    """One MaterialError, then asking works; the other halves are dropped, and bob has what he prepared."""
    remote = trio.connection.model("hospital-b")
    remote.prepare(X.shape, 3)
    if not open_:
        remote.close()
        remote = None
    store = {"S": trio.server, "A": trio.party}[who].store
    store.budget = int(1.1 * store.used)
    from sectorch.network import connect

    with connect(trio.address, trio.made["bob"], pins=trio.pins, store=Store(tmp_path / "b")) as bob:
        other = bob.model("hospital-b")
        other.prepare(X.shape, 1)
        clients = lambda store: {s.binding.client for s in store.shelves() if len(s)}
        assert until(lambda: clients(trio.server.store) == clients(trio.party.store) == {"bob"}, 30)
        with pytest.raises(errors.MaterialError):
            (remote or trio.connection.model("hospital-b"))(X)
        assert not any(map(len, trio.connection.store.shelves()))
        again = trio.connection.model("hospital-b")
        assert (again(X) - small_model(X)).abs().max() < 1e-4
        assert again.prepared() == {}
        assert (other(X) - small_model(X)).abs().max() < 1e-4
        assert other.prepared() == {}


def test_a_piece_that_one_party_lost_is_void_and_the_others_are_used(trio, small_model, tmp_path):
    remote = trio.connection.model("hospital-b")
    remote.prepare(X.shape, 3)
    remote.close()
    (shelf,) = trio.party.store.shelves()
    shelf.keep_only([list(shelf.calls())[1]])
    remote = trio.connection.model("hospital-b")
    assert sum(remote.prepared().values()) == 1
    assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert remote.prepared() == {}
    assert until(lambda: pieces_in(tmp_path / "s") == pieces_in(tmp_path / "a") == 0, 30)
