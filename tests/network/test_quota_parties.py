"""Limits at S and A over real TLS: what is charged, however a query ends and whoever asks."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import suppress

import pytest
import torch
from network_world import Trio, until

from sectorch import errors
from sectorch.network.limits import read_usage

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path, request):
    trio = Trio(pki[1], small_model, X, tmp_path, limits=getattr(request, "param", "[default]\nrows_in_all = 6\n"))
    yield trio
    trio.close()


def used(trio, who: str, what: str = "rows", account: str = "alice", model: str = "hospital-b") -> int:
    rows = read_usage(trio.folder / f"{who}.usage")
    return sum(r.used for r in rows if (r.account, r.model, r.what) == (account, model, what))


def test_both_count_and_both_refuse(trio, small_model):
    remote = trio.connection.model("hospital-b")
    for n in range(3):
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
        assert used(trio, "S") == used(trio, "A") == 2 * (n + 1)
    with pytest.raises(
        errors.QuotaError, match="the server lets this client ask 'hospital-b' for 6 rows in all; 6 are"
    ):
        remote(X)
    trio.server._quotas.limits = trio.server._quotas.limits.__class__(trio.folder / "S.usage")
    with pytest.raises(errors.QuotaError, match="'hospital-b' lets this client ask 'hospital-b' for 6 rows in all; 6"):
        remote(X)
    assert used(trio, "A") == 6 and trio.party.answered == 3
    (key,) = {r.account for r in read_usage(trio.folder / "A.usage") if r.account.startswith("SHA256:")}
    assert used(trio, "A", account=key) == 6, "the identity key that was proved has an account too"


def test_they_outlive_both_parties_and_a_clock_that_is_set_back(trio, monkeypatch):
    trio.connection.model("hospital-b")(X)
    trio.restart("S")
    monkeypatch.setattr("time.time", lambda: 0.0)
    trio.connection.model("hospital-b")(torch.cat([X, X]))
    with pytest.raises(errors.QuotaError):
        trio.connection.model("hospital-b")(X[:1])


def test_what_is_prepared_is_charged_when_it_is_asked(trio):
    remote = trio.connection.model("hospital-b")
    remote.prepare(X.shape, 4)
    assert used(trio, "A") == used(trio, "S") == 0 < used(trio, "S", "bytes", model="hospital-b")
    for _ in range(3):
        remote(X)
    with pytest.raises(errors.QuotaError):
        remote(X)
    assert used(trio, "A") == 6


def test_a_query_that_is_given_up_before_the_reveal_is_paid_for(trio, monkeypatch):
    """Just before Q has its result: it goes, and nobody else knows whether it has it."""
    monkeypatch.setattr("sectorch.network.parties.session.PartySession.predict", given_up(trio))
    remote = trio.connection.model("hospital-b")
    for n in range(3):
        with pytest.raises(KeyboardInterrupt):
            remote(X)
        assert until(lambda: trio.server.sessions == 0, 30)
        assert used(trio, "A") == used(trio, "S") == 2 * (n + 1)
    with pytest.raises(errors.QuotaError):
        remote(X)


def given_up(trio):
    from sectorch.network.parties.session import PartySession

    inner = PartySession.predict

    def predict(self, *args, **kwargs):
        if self._me.role != "Q":
            return inner(self, *args, **kwargs)
        channel, came = next(iter(self._channels.values())), [0]
        receive = channel.receive

        def received():
            frame = receive()
            came[0] += 1
            if came[0] == last[0]:
                raise KeyboardInterrupt
            return frame

        channel.receive = received
        try:
            return inner(self, *args, **kwargs)
        finally:
            last[0] = last[0] or came[0]

    last = [0]
    count = trio.connection.model("hospital-b")
    trio.server._quotas.usage, kept = NoUsage(), trio.server._quotas.usage
    trio.party._quotas.usage, kept_a = NoUsage(), trio.party._quotas.usage
    PartySession.predict, plain = predict, PartySession.predict
    count(X)
    PartySession.predict = plain
    count.close()
    trio.server._quotas.usage, trio.party._quotas.usage = kept, kept_a
    assert last[0] > 0
    return predict


class NoUsage:
    def charge(self, *_):
        return True

    def end(self, *_, **__):
        pass


def test_many_sessions_at_once_get_no_more(trio):
    """16 sessions, opened first, ask at the same time for the last three queries."""
    remotes = [trio.connection.model("hospital-b") for _ in range(16)]
    done, refused, go = [], [], threading.Barrier(16)

    def ask(remote):
        go.wait()
        try:
            remote(X)
            done.append(1)
        except errors.QuotaError:
            refused.append(1)

    threads = [threading.Thread(target=ask, args=(r,)) for r in remotes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), len(refused), used(trio, "A"), used(trio, "S")) == (3, 13, 6, 6)


def test_a_renamed_client_is_the_same_by_its_key(trio, pki):
    """Bob uses alice's identity key, and A's pins accept it for him."""
    from dataclasses import replace

    from sectorch.network import connect
    from sectorch.network.identity.identity import fingerprint_of

    trio.server._quotas.limits = trio.server._quotas.limits.__class__(trio.folder / "S.usage")
    trio.connection.model("hospital-b")(torch.cat([X, X]))
    alice, bob = pki[1]["alice"], pki[1]["bob"]
    trio.pins.pin("bob", fingerprint_of(alice.identity))
    with connect(trio.address, replace(bob, identity=alice.identity), pins=trio.pins) as second:
        remote = second.model("hospital-b")
        remote(X)
        with pytest.raises(errors.QuotaError, match="6 rows in all; 6 are used"):
            remote(X[:1])
    trio.pins.pin("bob", fingerprint_of(bob.identity))
    assert used(trio, "A", account="bob") == 2


def test_no_rows_are_one(trio):
    remote = trio.connection.model("hospital-b")
    try:
        remote(X[:0])
    except errors.SectorchError:
        pass
    else:
        assert used(trio, "A") == used(trio, "S") == 1


@pytest.mark.parametrize("message", [4, 12])
def test_a_query_is_charged_once_where_the_server_went_away(trio, message):
    """Killed at a message of about 21; Q asks again the same, and has the answer for one charge at A and at S."""
    remote = trio.connection.model("hospital-b")
    remote(X)
    trio.kill_at("S", message)
    with pytest.raises(errors.NetworkError):
        remote(X)
    trio.server.stop()
    trio.party.close()
    trio.start_server()
    trio.start_answering()
    remote(X)
    assert used(trio, "A") == used(trio, "S") == 4
    remote(X)
    assert used(trio, "A") == used(trio, "S") == 6


def kill_at_the_result(trio) -> None:
    """Kill S as it sends Q the result of its next call: A has done its part, and has recorded its end."""
    (link,) = (link for link in trio.server._links if link.peer == "alice")
    ended, send, end = threading.Event(), link.send, trio.party._quotas.usage.end

    def record(*arguments, **named):
        end(*arguments, **named)
        ended.set()

    def send_or_die(data: bytes, urgent: bool = False) -> None:
        if len(data) > 60 and until(ended.is_set, 0.5):  # a message, and no credit: the others come before A's end
            trio.kill("S")
        send(data, urgent)

    trio.party._quotas.usage.end, link.send = record, send_or_die


@pytest.mark.parametrize("late", [False, True])
def test_a_query_is_charged_once_where_the_server_goes_with_the_result(trio, small_model, monkeypatch, late):
    """And another query under its name is charged, as is what was answered long before the server went away."""
    remote = trio.connection.model("hospital-b")
    remote(X)
    if late:
        monkeypatch.setattr("sectorch.network.limits.UNCONFIRMED", 0.0)
    assert until(lambda: trio.party.answered == 1, 30), "the end of the first one is recorded"
    kill_at_the_result(trio)
    with pytest.raises(errors.NetworkError):
        remote(X)
    assert used(trio, "A") == 4
    trio.server.stop()
    trio.party.close()
    trio.start_server()
    trio.start_answering()
    assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert used(trio, "S") == 4
    assert used(trio, "A") == (6 if late else 4)
    if not late:
        remote(X[:1])
        assert used(trio, "A") == used(trio, "S") == 5


def test_sessions_have_a_limit(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path, limits="[default]\nsessions_a_day = 2\n")
    try:
        for _ in range(2):
            trio.connection.model("hospital-b").close()
        with pytest.raises(errors.QuotaError, match="2 sessions a day; 2 sessions are used, and 1 session more"):
            trio.connection.model("hospital-b")
    finally:
        trio.close()


def test_a_full_disk_at_a_ends_service_with_its_name(trio):
    remote = trio.connection.model("hospital-b")

    def dropped() -> bool:
        with suppress(sqlite3.OperationalError):  # another thread reads it at the moment
            trio.party._quotas.usage._db.execute("DROP TABLE used")
            return True
        return False

    assert until(dropped, 30)
    with pytest.raises(errors.QuotaFileError, match="at 'hospital-b': what is used cannot be counted"):
        remote(X)
    assert trio.party.answered == 0
