"""Stores that are restored from a backup: no piece is used twice, and the log names those that were."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from itertools import combinations

import pytest
import torch
from network_world import Trio

from sectorch import errors
from sectorch.network import Store
from sectorch.network.messages import MaterialReady
from sectorch.network.parties.session import PartySession
from sectorch.network.store import UsedPlaces, as_ranges, calls_in, join_ranges

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
PARTIES = [set(who) for count in range(4) for who in combinations("SAQ", count)]


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    trio.close()
    start(trio)
    yield trio
    stop(trio)


def start(trio: Trio) -> None:
    trio.start_server(Store(trio.folder / "S" / "store"))
    trio.start_answering(Store(trio.folder / "A" / "store"))
    trio.start_querying(Store(trio.folder / "Q" / "store"))


def stop(trio: Trio) -> None:
    trio.close()
    for party in (trio.connection, trio.party, trio.server):
        party.store.close()


def restored(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("restored ")]


@pytest.mark.parametrize("what", ["the store", "the store and what was used of it"])
@pytest.mark.parametrize("who", PARTIES, ids=lambda who: "".join(sorted(who)) or "nobody")
def test_a_piece_of_a_backup_is_not_used_twice(trio, small_model, caplog, monkeypatch, who, what):
    """S, A and Q restored, in each combination. Nobody knows only where all three restore all that they have."""
    taken: Counter[tuple[str, int]] = Counter()
    material = PartySession._material

    def counted(self, call, kind):
        found = material(self, call, kind)
        taken[self._me.role, call] += 1
        return found

    monkeypatch.setattr(PartySession, "_material", counted)
    caplog.set_level(logging.INFO, "sectorch.store")
    trio.connection.model("hospital-b").prepare(X, 3)
    stop(trio)
    for party in "SAQ":
        shutil.copytree(trio.folder / party, trio.folder / f"backup-{party}")
    start(trio)
    remote = trio.connection.model("hospital-b")
    remote(X)
    used = set(taken)
    assert {party for party, _ in used} == set("SAQ") and len(used) == 3 and restored(caplog) == []
    names = f"numbers={next(iter(used))[1]} "
    stop(trio)
    for party in who:
        shutil.rmtree(trio.folder / party / "store")
        shutil.copytree(trio.folder / f"backup-{party}" / "store", trio.folder / party / "store")
        if what != "the store":
            shutil.copy(trio.folder / f"backup-{party}" / "store.used", trio.folder / party / "store.used")
    start(trio)
    remote = trio.connection.model("hospital-b")
    for number in range(3):
        assert (remote(X + number) - small_model(X + number)).abs().max() < 1e-4
    twice = {place for place, count in taken.items() if count > 1}
    unknown = what != "the store" and len(who) == 3
    assert twice == (used if unknown else set())
    lines = restored(caplog)
    if what == "the store":
        assert len(lines) == len(who) and all(names in line and 'used_by="this party"' in line for line in lines)
    elif who and not unknown:
        assert lines and all(names in line for line in lines), "the others know that it was used"
    assert unknown or remote.prepared() == {}, "the two others were used"


# The file of what was used.

SESSION = bytes(range(16))


def places(path, *sessions) -> UsedPlaces:
    return UsedPlaces(path, "name", sessions)


def test_uses_are_read_again_and_those_of_other_sessions_are_forgotten(tmp_path):
    path, other = tmp_path / "used", bytes(16)
    first = places(path)
    first.begin(SESSION), first.begin(other)
    for call in (3, 4, 9, 5):
        first.use(SESSION, call)
    first.put_back(SESSION, 4)
    first.put_back(SESSION, 7)
    first.use(other, 1)
    with path.open("ab") as file:
        file.write(b"used " + SESSION.hex().encode())  # the process was killed in the middle of a line
    again = places(path, SESSION)
    assert again.of(SESSION) == [3, 5, 9] and not again.known(other)
    assert not places(path, other).known(other), "it was forgotten"
    assert path.stat().st_mode & 0o777 == 0o600
    again.end(SESSION)
    assert not again.known(SESSION)
    with pytest.raises(KeyError):
        again.use(SESSION, 11)


def test_a_file_that_is_missing_or_of_another_store_makes_nothing_usable(tmp_path):
    first = places(tmp_path / "used")
    first.begin(SESSION)
    assert places(tmp_path / "used", SESSION).known(SESSION)
    assert not UsedPlaces(tmp_path / "used", "another", [SESSION]).known(SESSION)
    (tmp_path / "used").unlink()
    assert not places(tmp_path / "used", SESSION).known(SESSION)


@pytest.mark.parametrize(
    "content", [b"", b"weights", b"used 00 1\n", f"{UsedPlaces.TITLE}name\nused {SESSION.hex()} 1\n".encode(),
                f"{UsedPlaces.TITLE}name\nbegin {SESSION.hex()}\nused {SESSION.hex()} x\n".encode(),
                f"{UsedPlaces.TITLE}name\nnever {SESSION.hex()}\n".encode()],
)  # fmt: skip
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    (tmp_path / "used").write_bytes(content)
    with pytest.raises(errors.ArgumentError, match="does not say which prepared calls were used; name another file"):
        places(tmp_path / "used", SESSION)
    assert (tmp_path / "used").read_bytes() == content


def test_it_is_not_kept_in_the_folder_with_which_it_would_be_restored(tmp_path):
    for path in (tmp_path / "store" / "used", tmp_path / "store" / ".." / "store" / "x" / "used"):
        with pytest.raises(errors.ArgumentError, match="is in the store's folder, and would be restored with it"):
            Store(tmp_path / "store", used_file=path)


def test_the_file_is_written_anew_when_it_has_grown(tmp_path, monkeypatch):
    monkeypatch.setattr(UsedPlaces, "MOST", 10)
    kept = places(tmp_path / "used")
    kept.begin(SESSION)
    for _ in range(100):
        kept.use(SESSION, 1)
        kept.put_back(SESSION, 1)
    kept.use(SESSION, 2)
    assert len((tmp_path / "used").read_text().splitlines()) < 16
    assert places(tmp_path / "used", SESSION).of(SESSION) == [2]


def test_ranges_of_numbers():
    assert as_ranges([]) == [] and as_ranges([1, 2, 3, 7, 9, 10]) == [1, 3, 7, 7, 9, 10]
    assert calls_in([1, 3, 7, 7, 9, 10], range(12)) == [1, 2, 3, 7, 9, 10]
    assert join_ranges([1, 3, 9, 10], [4, 5, 7, 7, 10, 12]) == [1, 5, 7, 7, 9, 12]
    for bad in ([1], [3, 1], [1, 5, 4, 6]):
        with pytest.raises(errors.FrameError, match="not in order"):
            calls_in(bad, [1])
    assert MaterialReady(calls=[]).used == []
