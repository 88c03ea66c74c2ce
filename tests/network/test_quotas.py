"""What clients have used: in order or at once, over crashes and clocks that jump, against a model of it."""

from __future__ import annotations

import os
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sectorch import errors
from sectorch.network.limits import (
    DAY,
    SLOT,
    Charge,
    ClockReading,
    Limit,
    Limits,
    Quotas,
    Usage,
    read_limits,
    read_usage,
)

LIMIT = Limit({"queries": 6, "rows": 40}, {"rows": 100})
NAME = "0" * 32


class Machine:
    """Clocks that a test sets."""

    def __init__(self):
        self.boot, self.since, self.wall = 0, 1000.0, 1.7e9

    def __call__(self) -> ClockReading:
        return ClockReading(f"boot {self.boot}", self.since, self.wall)

    def passes(self, seconds: float) -> None:
        self.since += seconds
        self.wall += seconds

    def starts_again(self, seconds: float) -> None:
        self.boot, self.since = self.boot + 1, 1.0
        self.wall += seconds


def limits(path, **kwargs) -> Limits:
    return Limits(path, **{"default": LIMIT, **kwargs})


def opened(path, machine=None, party="clinic") -> Usage:
    return Usage(path, party, "A", f"'{party}'", machine or Machine())


def charge(rows=1, client="alice", key="", model="m", query="") -> Charge:
    return Charge(client, key, (model,), {"queries": 1, "rows": rows}, query)


def allowed(usage: Usage, one: Charge, limits: Limits) -> bool:
    try:
        return usage.charge(one, limits)
    except errors.QuotaError:
        return False


steps = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(["alice", "bob"]), st.integers(1, 30), st.booleans()),
    st.tuples(st.just("passes"), st.integers(0, 2 * DAY)),
    st.tuples(st.just("clock"), st.integers(-(10**8), 10**8)),
    st.tuples(st.just("starts again"), st.integers(0, 2 * DAY), st.integers(-(10**8), 0)),
    st.tuples(st.just("killed")),
)


@given(st.lists(steps, max_size=40))
def test_no_day_has_more_than_its_limit(tmp_path_factory, todo):
    """However a process ends and clocks are set: in no 24 hours more was served than allowed, and never more in all.

    The other way round, whoever is refused has used it up within a day and a slot, unless the machine was started again
    with its clock set back: then the time until it has caught up may not count.
    """
    path, machine, true = tmp_path_factory.mktemp("usage") / "u", Machine(), 0.0
    usage, caught_up, served = opened(path, machine), True, []
    for step in todo:
        match step:
            case ("ask", client, rows, done):
                recent = lambda span, what, c=client: sum(
                    s[what] for s in served if s["client"] == c and s["at"] > true - span
                )
                fits = lambda span, extra=0: recent(span, "queries") + 1 <= 6 and recent(span, "rows") + rows <= 40
                in_all = recent(float("inf"), "rows") + rows <= 100
                if allowed(usage, one := charge(rows, client), limits(path)):
                    assert fits(DAY) and in_all
                    served.append({"client": client, "at": true, "queries": 1, "rows": rows})
                    if done:
                        usage.end(one, {}, again=False)
                else:
                    assert not (caught_up and in_all and fits(DAY + SLOT))
            case ("passes", seconds):
                true += seconds
                machine.passes(seconds)
            case ("clock", seconds):  # nobody is told, and a machine that runs counts by itself
                machine.wall += seconds
                usage.charge(Charge("nobody", "", (), {}), limits(path))
            case ("starts again", seconds, back):
                usage.close()
                true += seconds
                machine.starts_again(seconds + back)
                caught_up = caught_up and back == 0
                usage = opened(path, machine)
            case _:
                usage.close()
                usage = opened(path, machine)
    usage.close()
    counted = Counter()
    for row in read_usage(path):
        counted[row.account] += row.used if row.model and row.what == "rows" else 0
    for client in ("alice", "bob"):
        assert counted[client] == sum(s["rows"] for s in served if s["client"] == client)


@pytest.mark.parametrize("processes", [1, 2])
def test_who_asks_often_at_once_gets_no_more(tmp_path, processes):
    own = limits(tmp_path / "u", default=Limit({"queries": 10}))
    files = [opened(tmp_path / "u") for _ in range(processes)]
    got = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(allowed(files[i % processes], charge(), own))) for i in range(60)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), sum(got)) == (60, 10)
    for file in files:
        file.close()


def test_names_and_keys_count_each_for_itself(tmp_path):
    usage, own = opened(tmp_path / "u"), limits(tmp_path / "u", default=Limit({"queries": 2}))
    two = [charge(client=name, key=key) for name, key in (("alice", "SHA256:k"), ("bob", "SHA256:k"))]
    assert [allowed(usage, one, own) for one in two] == [True, True]
    assert not allowed(usage, charge(client="carol", key="SHA256:k"), own), "the third name of one key"
    assert allowed(usage, charge(client="alice", key="SHA256:new"), own), "another key has the name's account"
    assert not allowed(usage, charge(client="alice", key="SHA256:newer"), own)
    assert allowed(usage, charge(client="dora", key="SHA256:own"), own), "a refused charge counts for nobody"
    usage.close()


def test_a_total_of_a_model_is_of_all_and_tells_nothing_of_others(tmp_path):
    usage = opened(tmp_path / "u")
    own = limits(tmp_path / "u", default=Limit(), models={"m": {"rows": 5}})
    usage.charge(charge(4, "alice"), own)
    with pytest.raises(errors.QuotaError) as caught:
        usage.charge(charge(2, "bob"), own)
    assert str(caught.value) == "'clinic' has answered as much of 'm' as it will, to whoever asks; ask its owner"
    assert usage.charge(charge(2, "bob", model="other"), own)
    usage.close()


def test_the_error_says_which_limit_and_when_there_is_room(tmp_path):
    machine = Machine()
    usage, own = opened(tmp_path / "u", machine), limits(tmp_path / "u")
    usage.charge(charge(30), own)
    machine.passes(3600)
    usage.charge(charge(10), own)
    cases = {
        20: "'clinic' lets this client use 40 rows a day; 40 rows are used, and 20 rows more asked for; there is room "
        "again in 23 h 15 min",
        35: "'clinic' lets this client use 40 rows a day; 40 rows are used, and 35 rows more asked for; there is room "
        "again in 24 h 15 min",
        41: "'clinic' lets this client use 40 rows a day, and 41 rows were asked for at once; ask for fewer",
    }
    for rows, said in cases.items():
        with pytest.raises(errors.QuotaError) as caught:
            usage.charge(charge(rows), own)
        assert str(caught.value) == said
    machine.passes(23 * 3600 + 15 * 60 - 1)
    assert not allowed(usage, charge(20), own)
    machine.passes(1)
    assert allowed(usage, charge(20), own)
    usage.close()


def killed(usage: Usage) -> None:
    """What is left of a process that ended without a word: the system lets go of its lock."""
    os.close(usage._alive)
    usage._alive = None
    usage._db.close()


def test_what_is_asked_again_after_a_crash_is_charged_once(tmp_path):
    own = limits(tmp_path / "u", default=Limit({}, {"queries": 2}))
    usage, one = opened(tmp_path / "u"), charge(query=NAME)
    assert usage.charge(one, own)
    killed(usage)
    usage = opened(tmp_path / "u")
    assert not usage.charge(one, own), "a process ended"
    usage.end(one, {}, again=True)
    assert not usage.charge(one, own), "the server went away"
    usage.end(one, {}, again=False)
    assert usage.charge(one, own), "it was answered, or given up: it is another query"
    with pytest.raises(errors.QuotaError, match="they do not become free again"):
        usage.charge(one, own)
    usage.close()


@pytest.mark.parametrize(
    "other",
    [
        charge(2, query=NAME),
        charge(query=NAME, key="k"),
        charge(query=NAME, model="n"),
        charge(query=NAME, client="bob"),
    ],
)
def test_another_query_under_the_name_of_one_that_was_lost_is_charged(tmp_path, other):
    own, usage = limits(tmp_path / "u"), opened(tmp_path / "u")
    usage.charge(charge(query=NAME), own)
    usage.end(charge(query=NAME), {}, again=True)
    assert usage.charge(other, own)
    usage.close()


def test_two_at_once_under_one_name_are_two(tmp_path):
    own, usages = limits(tmp_path / "u"), [opened(tmp_path / "u") for _ in range(2)]
    one = charge(query=NAME)
    assert usages[0].charge(one, own)
    assert usages[1].charge(one, own), "the other process is alive and serves it"
    assert usages[1].charge(one, own)
    for usage in usages:
        usage.close()


def test_what_cannot_be_counted_is_not_served(tmp_path):
    path = tmp_path / "u"
    opened(path).close()
    with pytest.raises(errors.QuotaFileError, match=r"of 'clinic' as A .format 1., and this is 'lab' as A"):
        opened(path, party="lab")
    path.write_bytes(b"not a database at all, but long enough" * 100)
    with pytest.raises(errors.QuotaFileError, match="not a database"):
        opened(path)
    with pytest.raises(errors.QuotaFileError, match="No such file"):
        opened(tmp_path / "none" / "u")


def test_a_damaged_file_ends_service(tmp_path):
    usage, own = opened(tmp_path / "u"), limits(tmp_path / "u")
    usage.charge(charge(), own)
    usage._db.execute("DROP TABLE used")
    with pytest.raises(errors.QuotaFileError, match="what is not counted is not served"):
        usage.charge(charge(), own)
    usage.close()
    with pytest.raises(errors.QuotaFileError, match="closed database"):
        usage.charge(charge(), own)


WRONG = {
    "no TOML": ("[default", "is not TOML"),
    "a strange table": ("[clinets.a]\n", "the file has no 'clinets'; it has usage, default, clients, models"),
    "a strange entry": ("[default]\nrows = 3\n", "has no 'rows'; it has queries_a_day"),
    "a text": ('[default]\nrows_a_day = "3"\n', "rows_a_day in .* is a whole number of at least 0, got '3'"),
    "a truth": ("[default]\nrows_a_day = true\n", "whole number"),
    "a negative one": ("[clients.a]\nrows_a_day = -1\n", "whole number"),
    "a name that is none": ('[clients."a b"]\n', "a table in .clients. is 1 to 64 letters"),
    "a model that is none": ('[models."a/"]\n', "after the /, is 1 to 64 letters"),
    "a day of a model": ("[models.a]\nrows_a_day = 1\n", r"\[models.a\] has no 'rows_a_day'; it has queries_in_all"),
    "no table": ("default = 3\n", "default in the file is a table, got 3"),
    "itself": ('usage = "l.toml"\n', "usage names this file itself"),
}


@pytest.mark.parametrize("text, said", WRONG.values(), ids=WRONG)
def test_a_file_of_limits_that_is_wrong(tmp_path, text, said):
    path = tmp_path / "l.toml"
    path.write_text(text)
    with pytest.raises(errors.ArgumentError, match=said) as caught:
        read_limits(path)
    assert "\n" not in str(caught.value)


def test_limits_of_a_client_are_the_default_ones_but_for_its_own(tmp_path):
    path = tmp_path / "l.toml"
    path.write_text("[default]\nrows_a_day = 5\nmegabytes_a_day = 2\n[clients.a]\nrows_a_day = 9\nqueries_in_all = 1\n")
    found = read_limits(path)
    assert found.of("a") == Limit({"rows": 9, "bytes": 2_000_000}, {"queries": 1})
    assert found.of("b") == Limit({"rows": 5, "bytes": 2_000_000}, {})
    assert found.usage == tmp_path / "l.usage"
    quotas = Quotas(path, "clinic", "A")
    path.write_text("[default]\nrows_a_day = 7\n")
    quotas.reload()
    assert quotas.limits.of("a") == Limit({"rows": 7}, {})
    path.write_text("[default\n")
    quotas.reload()
    assert quotas.limits.of("a") == Limit({"rows": 7}, {})
    quotas.close()
