"""Material on disk: used once, bound to what it was made for, and void when a party has forgotten its half."""

from __future__ import annotations

import copy
import json
import threading

import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from network_world import Trio, pieces_in, until

import sectorch
from sectorch import errors
from sectorch.choreography.program.projection import Material
from sectorch.network import Store
from sectorch.network.store import MaterialBinding, read_piece, write_piece
from sectorch.sealed import seal
from sectorch.serving.description import describe

SESSION = bytes(range(16))
BINDING = MaterialBinding(client="alice", model="m", edition="e", fingerprint="f", scheme="s")
X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def material(call: int = 3, seed: int = 0, n: int = 1000) -> Material:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-(1 << 62), 1 << 62, (n,), generator=generator)
    values = [a, a[: n // 2].view(-1), a.to(torch.int32)[::2], None, 3, a[:0].bool()]
    return Material(call, SESSION, "a digest", 1, values)


def same(a: Material, b: Material) -> bool:
    def equal(v, w):
        return torch.equal(v, w) and v.dtype == w.dtype if isinstance(v, torch.Tensor) else v == w

    head = [(m.call, m.session, m.program, m.setup) for m in (a, b)]
    return head[0] == head[1] and all(map(equal, a.values, b.values)) and len(a.values) == len(b.values)


@given(st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_a_piece_comes_back_as_it_was(call, n):
    parts, size = write_piece(material(call, n=n))
    assert sum(len(p) for p in parts) == size
    assert same(read_piece(bytearray(b"".join(bytes(p) for p in parts))), material(call, n=n))


@pytest.mark.parametrize("n", [0, 1, 1000, 1 << 19, (1 << 19) - 40, 1 << 20])
def test_a_piece_is_sealed_opened_once_and_gone(tmp_path, n):
    shelf = Store(tmp_path).shelf(SESSION, BINDING)
    size = shelf.put(material(n=n), (2, 3))
    (path,) = tmp_path.rglob("*.piece")
    assert path.stat().st_size == size == shelf.bytes
    if n >= 1000:
        assert material(n=n).values[0].numpy().tobytes()[:64] not in path.read_bytes(), "sealed"
    assert same(shelf.take(3, (2, 3)), material(n=n))
    assert list(tmp_path.rglob("*.piece")) == []
    with pytest.raises(errors.MaterialError, match="used already"):
        shelf.take(3, (2, 3))


def reopened(store: Store) -> Store:
    store.close()
    return Store(store.folder)


def test_a_folder_is_of_one_process(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(errors.StoreInUseError, match="in use"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_a_piece_is_gone_from_disk_before_anybody_has_it(tmp_path, monkeypatch):
    """Where reading it is interrupted, the piece is lost, and a store that is opened again does not have it."""
    shelf = Store(tmp_path).shelf(SESSION, BINDING)
    shelf.put(material(), (2, 3))

    def stopped(*_):
        assert list(tmp_path.rglob("*.piece")) == []
        assert list(tmp_path.rglob("*.claimed")) == []
        raise KeyboardInterrupt

    monkeypatch.setattr("sectorch.network.store.read_piece", stopped)
    with pytest.raises(KeyboardInterrupt):
        shelf.take(3, (2, 3))
    assert reopened(shelf.store).shelf(SESSION).calls() == {}


def test_one_of_many_takers_gets_it(tmp_path):
    shelf = Store(tmp_path).shelf(SESSION, BINDING)
    shelf.put(material(), (2, 3))
    got, refused = [], []

    def take():
        try:
            got.append(shelf.take(3, (2, 3)))
        except errors.MaterialError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 15)


def test_a_store_that_is_opened_again_has_its_pieces_and_no_half_ones(tmp_path):
    shelf = Store(tmp_path).shelf(SESSION, BINDING)
    shelf.put(material(3), (2, 3))
    shelf.put(material(4), (2, 3))
    (shelf.folder / "0000000005-2x3.part").write_bytes(b"half")
    (shelf.folder / "0000000006-2x3.claimed").write_bytes(b"claimed")
    (tmp_path / ("00" * 16)).mkdir()
    again = reopened(shelf.store)
    assert again.shelf(SESSION).calls() == {3: (2, 3), 4: (2, 3)}
    assert again.shelf(SESSION).binding == BINDING
    assert {p.suffix for p in shelf.folder.iterdir()} == {".piece", ".sealed"}
    assert not (tmp_path / ("00" * 16)).exists()
    assert same(again.shelf(SESSION).take(4, (2, 3)), material(4))


@pytest.mark.parametrize("what", ["flip", "cut", "longer", "empty", "renamed", "other session", "other key"])
def test_what_is_not_whole_is_dropped_and_not_used(tmp_path, what):
    store = Store(tmp_path)
    shelf = store.shelf(SESSION, BINDING)
    shelf.put(material(), (2, 3))
    (path,) = tmp_path.rglob("*.piece")
    data, call, at = bytearray(path.read_bytes()), 3, shelf
    if what == "flip":
        data[len(data) // 2] ^= 1
    elif what == "cut":
        del data[-20:]
    elif what == "longer":
        data += bytes(100)
    elif what == "empty":
        data.clear()
    path.write_bytes(data)
    if what == "renamed":
        path.rename(path.with_name("0000000009-2x3.piece"))
        at, call = reopened(store).shelf(SESSION), 9
    elif what == "other session":
        other = store.shelf(bytes(16), BINDING)
        path.rename(other.folder / path.name)
        at = reopened(store).shelf(bytes(16))
    elif what == "other key":
        shelf.store.key = bytes(32)
    with pytest.raises(errors.MaterialError, match="not whole; it is dropped"):
        at.take(call, (2, 3))
    assert list(tmp_path.rglob("*.piece")) == []


def test_a_shelf_is_bound(tmp_path):
    store = Store(tmp_path)
    store.shelf(SESSION, BINDING)
    with pytest.raises(errors.MaterialError, match="another client"):
        store.shelf(SESSION, replace(BINDING, client="bob"))
    with pytest.raises(errors.MaterialError, match="not here any more"):
        store.shelf(bytes(16))


@pytest.mark.parametrize(("binding", "readable"), [
    ({"model": "m", "client": "alice", "edition": "e", "fingerprint": "f", "scheme": "s"}, True),
    ({"client": "alice", "strange": "entry"}, False), ({"model": "m"}, False), ({"client": 3}, False), ([], False),
])  # fmt: skip
def test_the_binding_of_a_session_is_of_its_declared_type(tmp_path, binding, readable):
    """As JSON that a program before this one wrote; the material of any other is of no use, and removed."""
    store = Store(tmp_path)
    shelf = store.shelf(SESSION, BINDING)
    shelf.put(material(), (2, 3))
    sealed = seal(store.key, [json.dumps(binding).encode()], b"binding" + SESSION)
    (shelf.folder / "binding.sealed").write_bytes(b"".join(sealed))
    again = reopened(store)
    assert again.holds(SESSION) == shelf.folder.exists() == readable
    if readable:
        assert same(again.shelf(SESSION, BINDING).take(3, (2, 3)), material())


def test_the_budget_is_kept_and_the_error_says_what_fits(tmp_path):
    store = Store(tmp_path, budget=30_000)
    shelf = store.shelf(SESSION, BINDING)
    for call in range(2):
        shelf.put(material(call), (2, 3))
    with pytest.raises(errors.StoreFullError, match=r"0 more fit"):
        shelf.put(material(2), (2, 3))
    assert store.used <= 30_000
    assert shelf.calls() == {0: (2, 3), 1: (2, 3)}


def test_a_temporary_store_leaves_nothing():
    store = Store()
    store.shelf(SESSION, BINDING).put(material(), (2, 3))
    assert store.folder.exists()
    store.close()
    assert not store.folder.exists()


# Three parties.


@pytest.fixture
def trio(pki, small_model, tmp_path):
    _, made = pki
    trio = Trio(made, small_model, X, tmp_path)
    reopen(trio, "SAQ")
    yield trio
    trio.close()


def reopen(trio: Trio, who: str, described=None, keep: str = "SAQ") -> None:
    """These parties end and start again, with their lasting stores or, those not in `keep`, with new ones."""
    store = lambda party: Store(trio.folder / f"store-{party}") if party in keep else Store()
    own = trio.connection.store
    trio.connection.close()
    own.close()
    if "A" in who or "S" in who:
        trio.party.close()
    if "S" in who:
        trio.server.stop()
        trio.start_server(store("S"))
    if "A" in who or "S" in who:
        trio.start_answering(store("A"), described)
    trio.start_querying(store("Q"))


def pieces(trio: Trio, who: str) -> int:
    return pieces_in(trio.folder / f"store-{who}")


@pytest.mark.parametrize("who", ["", "SAQ", *long("Q", "A", "S", "SA")])
def test_prepared_calls_survive_a_restart_and_cost_the_online_phase_only(trio, small_model, who):
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 3)
    assert remote.prepared() == {(2, 1, 8, 8): 3}
    assert [pieces(trio, party) for party in "SAQ"] == [3, 3, 3]
    if who:
        reopen(trio, who)
        remote = trio.connection.model("hospital-b")
    assert remote.prepared() == {(2, 1, 8, 8): 3}
    for left in (2, 1, 0):
        with sectorch.profile() as p:
            y = remote(X + left)
        assert (y - small_model(X + left)).abs().max() < 1e-4
        assert (p.offline_bytes, p.setup_bytes) == (0, 0)
        assert p.online_bytes > 0
        assert remote.prepared() == ({(2, 1, 8, 8): left} if left else {})
    assert [pieces(trio, party) for party in "SAQ"] == [0, 0, 0]
    with sectorch.profile() as p:
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert p.offline_bytes > 0


def test_rounds_of_prepared_and_other_calls_add_up(trio, small_model):
    """They are of two sessions, which number their calls alike."""
    remote = trio.connection.model("hospital-b")
    with sectorch.profile() as one:
        remote(X)
    reopened = trio.connection.model("hospital-b")
    reopened.prepare((2, 1, 8, 8), 1)
    with sectorch.profile() as both:
        reopened(X), remote(X)
    assert both.rounds == 2 * one.rounds
    assert both.offline_bytes == one.offline_bytes - one.setup_bytes


@pytest.mark.parametrize(
    ("who", "keep", "why"),
    [("S", "AQ", "started without its store"), ("A", "SQ", "started without its store")],
)
def test_a_party_that_forgot_its_half_makes_the_material_void(trio, small_model, who, keep, why):
    trio.connection.model("hospital-b").prepare((2, 1, 8, 8), 2)
    reopen(trio, who, keep=keep)
    with pytest.raises(errors.MaterialError, match=why) as void:
        trio.connection.model("hospital-b")
    assert "2 prepared calls of 'hospital-b' are void" in str(void.value)
    assert pieces(trio, "Q") == 0
    assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4
    assert pieces(trio, "S" if who == "A" else "A") == 0, "the other parties drop theirs too"


def test_material_of_other_weights_is_never_used(trio, small_model):
    trio.connection.model("hospital-b").prepare((2, 1, 8, 8), 2)
    changed = copy.deepcopy(small_model)
    with torch.no_grad():
        changed[-1].weight += 0.25
    reopen(trio, "A", describe(changed, X))
    with pytest.raises(errors.MaterialError, match="another model now"):
        trio.connection.model("hospital-b")
    assert [pieces(trio, party) for party in "SAQ"] == [0, 0, 0]
    y = trio.connection.model("hospital-b")(X)
    assert (y - changed(X)).abs().max() < 1e-4
    assert (y - small_model(X)).abs().max() > 1e-2


def test_what_a_session_has_read_ahead_is_waited_for(tmp_path):
    """The next one takes the material up while the one before is still putting it back."""
    shelf = Store(tmp_path).shelf(SESSION, BINDING)
    for call in (3, 4):
        shelf.put(material(call), (2, 3))
    shelf.lease(4)
    ahead = shelf.take(4, (2, 3))
    keeping = threading.Thread(target=shelf.keep_only, args=([4],))
    keeping.start()
    keeping.join(0.05)
    assert keeping.is_alive(), "it waits"
    shelf.put_back(ahead, (2, 3))
    keeping.join()
    assert list(shelf.calls()) == [4]
    assert same(shelf.take(4, (2, 3)), material(4))


def test_what_does_not_come_back_is_void(tmp_path, monkeypatch):
    """The others are told that it is not here, so that it must not be here later."""
    monkeypatch.setattr("sectorch.network.store.LEASE_WAIT", 0.01)
    shelf = Store(tmp_path).shelf(SESSION, BINDING)
    shelf.put(material(4), (2, 3))
    shelf.lease(4)
    ahead = shelf.take(4, (2, 3))
    shelf.keep_only([4])
    assert not shelf.calls()
    shelf.put_back(ahead, (2, 3))
    assert not shelf.calls() and not list(tmp_path.rglob("*.piece"))


@pytest.mark.parametrize("who", "SAQ")
def test_a_tampered_piece_is_an_error_and_never_used(trio, small_model, who):
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 2)
    first = min((trio.folder / f"store-{who}").rglob("*.piece"))
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    with pytest.raises(errors.MaterialError, match="not whole"):
        remote(X)
    assert (remote(X) - small_model(X)).abs().max() < 1e-4, "the other piece"
    assert until(lambda: [pieces(trio, party) for party in "SAQ"] == [0, 0, 0], 60)


def test_a_call_is_never_made_twice(trio, small_model):
    """Q puts back a piece that it has used: the others have removed theirs, and all leave it out."""
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 1)
    (piece,) = (trio.folder / "store-Q").rglob("*.piece")
    data = piece.read_bytes()
    remote(X)
    reopen(trio, "Q")
    assert trio.connection.model("hospital-b").prepared() == {}
    own = trio.connection.store
    trio.connection.close()
    own.close()
    piece.parent.mkdir(exist_ok=True)
    piece.write_bytes(data)
    trio.start_querying(Store(trio.folder / "store-Q"))
    remote = trio.connection.model("hospital-b")
    assert remote.prepared() == {}
    with sectorch.profile() as seen:
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert seen.offline_bytes, "nothing of it was used"


@pytest.mark.parametrize("who", "SAQ")
def test_prepare_is_refused_over_the_budget_of_any_party(trio, small_model, who):
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 1)
    store = {"S": trio.server.store, "A": trio.party.store, "Q": trio.connection.store}[who]
    store.budget = int(3.5 * store.used)
    with pytest.raises(errors.StoreFullError, match=r"1 more calls of \[2, 1, 8, 8\] fit"):
        remote.prepare((2, 1, 8, 8), 5)
    with pytest.raises(errors.StoreFullError):
        remote.prepare((2, 1, 8, 8), 5)
    prepared = remote.prepared()[2, 1, 8, 8]
    assert 2 <= prepared <= 3
    assert store.used <= store.budget
    for _ in range(prepared + 1):
        assert (remote(X) - small_model(X)).abs().max() < 1e-4


def test_another_client_cannot_use_the_material(trio, small_model):
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 1)
    (session,) = remote._sessions
    remote.close()
    assert until(trio.idle, 60)
    trio.start_querying(name="bob")
    with pytest.raises(errors.MaterialError, match="another client"):
        request = {"do": "open", "session": "00" * 16, "models": ["hospital-b"], "resume": session.hex(), "calls": [1]}
        trio.connection.ask(request)
    assert pieces(trio, "S") == 1


def test_material_of_a_client_without_a_lasting_store_goes_with_it(trio, small_model):
    reopen(trio, "Q", keep="SA")
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 3)
    assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert until(lambda: [pieces(trio, p) for p in "SA"] == [1, 1], 60), "one is used, and one is read ahead, in time"
    trio.kill("Q")
    assert until(lambda: [pieces(trio, party) for party in "SA"] == [0, 0], 60)
    assert until(lambda: trio.server.sessions == 0, 60)


@pytest.mark.parametrize("who", "AQ")
def test_what_was_read_ahead_is_put_back_at_the_end(trio, small_model, who):
    remote = trio.connection.model("hospital-b")
    remote.prepare((2, 1, 8, 8), 3)
    remote(X)
    assert remote.prepared() == {(2, 1, 8, 8): 2}
    if who == "Q":
        remote.close()
    reopen(trio, who)
    assert until(lambda: [pieces(trio, party) for party in "SAQ"] == [2, 2, 2], 60)
    remote = trio.connection.model("hospital-b")
    for _ in range(3):
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert [pieces(trio, party) for party in "SAQ"] == [0, 0, 0]
