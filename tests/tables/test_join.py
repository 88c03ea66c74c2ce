"""Joins: pandas.merge's rows, an order that nobody knows, views that tell the number of rows alone, refusals."""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import long
from example_counts import fewer
from frequencies import fits
from hypothesis import given
from hypothesis import strategies as st

import sectorch
from sectorch import Scheme, Session
from sectorch.choreography.ledger import Transcript
from sectorch.errors import (
    ArgumentError,
    DtypeError,
    NonFiniteError,
    RangeExceededError,
    SectorchError,
    SessionMismatchError,
    UnsupportedOpError,
)
from sectorch.mpc import okvs
from sectorch.tables import Column, OwnedTable, Table
from sectorch.testing.outcomes import distinguishable, not_uniform

OWNERS = ("H1", "H2", "H3")


def opened(table: Table) -> pd.DataFrame:
    """The rows of a table that count, with NaN where a value is missing."""
    found = {name: table[name].reveal().double().numpy() for name in table.columns}
    for name, flags in table.missing.items():
        found[name] = np.where(flags.reveal().numpy(), np.nan, found[name])
    frame: Any = pd.DataFrame(found)
    return frame if table.present is None else frame[table.present.reveal().numpy()]


def same_rows(found: Any, wanted: Any) -> None:
    """The rows in any order; -1 stands for a missing value, which no test has."""
    by_row = lambda x: sorted(map(tuple, x[list(found.columns)].astype(float).fillna(-1).to_numpy().tolist()))
    assert by_row(found) == by_row(wanted)


def tables_of(frames: Any, session: Session, owners: Any = OWNERS, on: Any = ("id",)) -> list[OwnedTable]:
    return [
        sectorch.owned(frame, owner=owner, session=session, columns=[c for c in frame.columns if c not in on])
        for owner, frame in zip(owners, frames, strict=False)
    ]


LEFT = pd.DataFrame({"id": ["a", "b", "c", "d", None], "age": [1, 2, 3, 4, 5], "w": [1.5, 2.5, 3.5, -4.5, 5.5]})
RIGHT = pd.DataFrame({"id": ["b", "d", "x", None], "m": [20, 40, 99, 98], "f": [True, False, True, True]})
MERGED = LEFT.dropna().merge(RIGHT.dropna(), on="id").drop(columns="id")
BESIDE = LEFT.merge(RIGHT.dropna(), on="id", how="left").drop(columns="id")


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [("H1", "H2"), ("Q", "A"), ("A", "H1"), *long(("H1", "A"), ("H1", "Q"), ("A", "Q"), ("Q", "H2"))],
)
def test_owners_of_any_role_but_s_get_pandas_rows(first: str, second: str, reference: bool):
    session = Session(owners=("H1", "H2"), reference=reference)
    left, right = tables_of([LEFT, RIGHT], session, (first, second))
    inner = sectorch.join(left, right, on="id")
    assert len(inner) == 2 and inner.present is None and not inner.missing
    same_rows(opened(inner), MERGED)
    beside = sectorch.join(left, right, on="id", how="left")
    assert len(beside) == 5 and set(beside.missing) == {"m", "f"}
    same_rows(opened(beside), BESIDE)
    for bound, rows in ((2, 2), (3, 3), (5, 5), (100, 5)):
        padded = sectorch.join(left, right, on="id", bound=bound)
        assert len(padded) == rows
        same_rows(opened(padded), MERGED)
        assert int(padded["m"].reveal().sum()) == 60  # rows that do not count are zeros


def test_a_dealer_of_its_own_changes_nothing():
    session = Session(owners=("H1", "H2"), dealer="D")
    same_rows(opened(sectorch.join(*tables_of([LEFT, RIGHT], session), on="id")), MERGED)


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("number", [1, *long(0)])
def test_tables_of_any_network_and_answering_party(network: Any, number: int):
    session = Session(answering=2, owners=("H1", "H2"))
    where: Any = {"session": session, "party": session.answering[number], "scheme": network}
    left = sectorch.owned(LEFT, owner="H1", columns=["age", "w"], **where)
    right = sectorch.owned(RIGHT, owner="H2", columns=["m", "f"], **where)
    same_rows(opened(sectorch.join(left, right, on="id", bound=3)), MERGED)


def test_a_step_that_joins_asks_anew_each_time():
    """From its second run on a step is a recorded program: of other tables, and under another secret."""
    session, seen = Session(owners=("H1", "H2")), []
    step = sectorch.step(session)
    for first in (0, 0, 1, 2):
        frames = [
            pd.DataFrame({"id": range(first, first + 6), "a": 1}),
            pd.DataFrame({"id": range(3, 9), "b": range(3, 9)}),
        ]
        tables = tables_of(frames, session)
        with Transcript() as transcript, step:
            total = sectorch.join(*tables, on="id", how="left")["b"].sum()
        assert int(total.reveal()) == sum(range(3, first + 6))
        seen += [value for line, value in transcript.lines if line.label == "hashes"]
    assert len(seen) == 4 and len(np.unique(torch.stack(seen))) > 115


def distinct(key: Any) -> Any:
    return object() if key is None else key


ids = st.lists(st.one_of(st.none(), st.integers(-3, 8)), max_size=12)
other_ids = st.lists(st.one_of(st.none(), st.integers(-3, 8)), max_size=12, unique_by=distinct)


def keys_of(kind: str, own: list[int | None], which: int) -> dict[str, Any]:
    """Key columns of a kind. Owners have them in other types: whole numbers as floats, days in another unit."""
    known = [0 if i is None else i for i in own]
    absent = np.array([i is None for i in own], dtype=bool)
    if kind == "whole":
        return {"id": pd.array(own, dtype="Int64") if which else np.where(absent, np.nan, np.array(known, dtype=float))}
    text = pd.Series([None if i is None else f"\u00e9 {i}" for i in own], dtype=object)
    if kind == "text":
        return {"id": text if which else pd.Categorical(text)}
    if kind == "day":
        days = np.array(known, dtype="M8[D]").astype("M8[s]" if which else "M8[ns]")
        return {"id": np.where(absent, np.datetime64("NaT"), days)}
    return {"id": text, "part": pd.array([None if i is None else i % 2 for i in own], dtype="Int64")}


@fewer(24, 1000)
@given(
    ids, other_ids, other_ids, st.sampled_from(["inner", "left", "bound"]),
    st.sampled_from(["whole", "text", "day", "pair"]), st.integers(0, 2**16),
)  # fmt: skip
def test_random_tables_are_merged_as_pandas_merges_them(first, second, third, how, kind, seed):
    """Keys of several types and columns, duplicates on the left, missing keys, empty tables, and three tables."""
    rng, frames, plain = np.random.default_rng(seed), [], []
    for which, (own, name) in enumerate(((first, "x"), (second, "y"), (third, "z"))):
        numbers = rng.integers(-500, 500, (len(own), 2))
        values = {f"{name}1": numbers[:, 0], f"{name}2": numbers[:, 1] / 8}
        frames.append(pd.DataFrame(keys_of(kind, own, which) | values))
        plain.append(pd.DataFrame({"key": pd.array(own, dtype="Int64")} | values))
    count = seed % 2 + 2
    session = Session(owners=OWNERS, reference=seed % 4 != 0)
    options: dict[str, Any] = {"inner": {}, "left": {"how": "left"}, "bound": {"bound": 1 + seed % 14}}[how]
    wanted = plain[0] if how == "left" else plain[0].dropna(subset="key")
    for other in plain[1:count]:
        wanted = wanted.merge(other.dropna(), on="key", how="left" if how == "left" else "inner")
    on = [name for name in ("id", "part") if name in frames[0]]
    tables = tables_of(frames[:count], session, on=on)
    too_many = how == "bound" and len(wanted) > options["bound"] and options["bound"] < len(first)
    with pytest.raises(RangeExceededError, match="more rows match") if too_many else contextlib.nullcontext():
        table = sectorch.join(*tables, on=on, many=12, **options)
        assert len(table) == {
            "inner": len(wanted), "left": len(first), "bound": min(len(first), options.get("bound", 0)),
        }[how]  # fmt: skip
        same_rows(opened(table), wanted.drop(columns="key"))


def test_several_rows_of_a_key_take_the_one_row_of_another_table():
    visits = pd.DataFrame({"id": [7, 8, 7, 7, 9], "day": [1, 2, 3, 4, 5]})
    patients = pd.DataFrame({"id": [9, 7], "age": [90, 70]})
    session = Session(owners=("H1", "H2"))
    left, right = tables_of([visits, patients], session)
    same_rows(opened(sectorch.join(left, right, on="id", many=3)), visits.merge(patients, on="id").drop(columns="id"))
    with pytest.raises(ArgumentError, match="larger many"):
        sectorch.join(left, right, on="id", many=2)
    with pytest.raises(ArgumentError, match="put this table first"):
        sectorch.join(right, left, on="id", many=9)


# Keys.


def matches(first: Any, second: Any, normalise: Any = (), session: Session | None = None) -> list[tuple[int, int]]:
    """The rows of two lists of keys that match, by their numbers. Keys of several columns are tuples of lists."""
    session = session or Session(owners=("H1", "H2"), reference=True)
    parts = [own if isinstance(own, tuple) else (own,) for own in (first, second)]
    on = [f"k{i}" for i in range(len(parts[0]))]
    frames = [
        pd.DataFrame(dict(zip(on, own, strict=True)) | {name: range(len(own[0]))})
        for own, name in zip(parts, "ab", strict=True)
    ]
    found = opened(sectorch.join(*tables_of(frames, session, on=on), on=on, normalise=normalise))
    return sorted((int(a), int(b)) for a, b in found[["a", "b"]].to_numpy())


def test_keys():
    assert matches([1, 2, 3], np.array([3.0, 2.0, 9.0])) == [(1, 1), (2, 0)]
    assert matches(np.array([2**63], dtype=np.uint64), pd.Series([2**63, 1], dtype="UInt64")) == [(0, 0)]
    assert matches([-(2**63), 5], [5, -(2**63)]) == [(0, 1), (1, 0)]
    assert matches(["a", "A ", "b"], ["A", "b", "a "]) == [(2, 1)]
    assert matches([True, False], [False, True]) == [(0, 1), (1, 0)]
    assert matches(["", "x"], ["x", ""]) == [(0, 1), (1, 0)]
    assert matches(pd.Categorical(["b", "a"]), ["a", "z"]) == [(1, 0)]
    days = pd.to_datetime(["2026-01-01", None, "2026-01-03"])
    there = days.tz_localize("UTC").tz_convert("Asia/Tokyo")
    assert matches(there, days.tz_localize("UTC").astype("datetime64[s, UTC]")) == [(0, 0), (2, 2)]
    assert matches([0.0], [-0.0]) == [(0, 0)]
    months = np.array(["2026-02", "9999-01"], dtype="M8[M]")
    assert matches(months, np.array(["9999-01-01", "2026-02-01"], dtype="M8[D]")) == [(0, 1), (1, 0)]
    assert matches(np.array([5, 7], dtype="m8[s]"), np.array([7000, 9], dtype="m8[ms]")) == [(1, 0)]
    for other in (there, np.array([5], dtype="m8[ns]")):  # nobody knows which clock the days are of
        with pytest.raises(ArgumentError, match=r"times of a zone|lengths of time"):
            matches(days, other)
    for dtype, digits in ((np.float32, 24), (np.float16, 11)):
        assert matches(np.array([2**digits - 1], dtype=dtype), [2**digits - 1]) == [(0, 0)]
        with pytest.raises(DtypeError, match="several whole numbers make one"):
            matches(np.array([2**digits + 1], dtype=dtype), [2**digits + 1])
    assert matches(pd.Series([np.int64(3), np.str_("x"), np.True_], dtype=object), ["x", "y"]) == [(1, 0)]
    assert matches(["e\u0301"], ["\u00e9"]) == []


def test_keys_of_polars_and_arrow():
    """Text, categories, nullable whole numbers and days are the keys that pandas has."""
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    session = Session(owners=("H1", "H2"), reference=True)
    days = pd.to_datetime(["2026-01-01", None, "2026-01-03"])
    right = pd.DataFrame({"t": ["a", None, "c"], "n": pd.array([1, None, 3], dtype="Int64"), "d": days, "w": [1, 2, 3]})
    day = [datetime.date(2026, 1, 1), None, datetime.date(2026, 1, 3)]
    data = {"t": ["a", None, "c"], "n": [1, None, 3], "d": day, "v": [1, 2, 3]}
    others = {"t": arrow.array(data["t"]).dictionary_encode(), "d": arrow.array(days.to_numpy())}
    right_table = sectorch.owned(right, owner="H2", session=session, columns=["w"])
    for frame in (polars.DataFrame(data), arrow.table(data), arrow.table(data | others)):
        left = sectorch.owned(frame, owner="H1", session=session, columns=["v"])
        for on in ("t", "n", "d", ["t", "n", "d"]):
            found = opened(sectorch.join(left, right_table, on=on))
            assert sorted(map(tuple, found.astype(int).to_numpy().tolist())) == [(1, 1), (3, 3)]


def test_several_key_columns_are_not_one():
    assert matches((["ab", "a"], ["c", "bc"]), (["a", "ab"], ["bc", "c"])) == [(0, 1), (1, 0)]
    assert matches((["1", "1:"], ["2", "x"]), (["1", "1"], ["2", ":x"])) == [(0, 0)]
    assert matches(([1, 2, None], ["x", None, "y"]), ([1, 2, None], ["x", None, "y"])) == [(0, 0)]


def test_missing_keys_match_nothing():
    for none in (None, float("nan"), pd.NA, pd.NaT):
        assert matches(pd.Series([none, "x"], dtype=object), pd.Series(["x", none], dtype=object)) == [(1, 0)]
    assert matches([float("nan"), 0.0], pd.array([0, None], dtype="Int64")) == [(1, 0)]
    assert matches([None, None], [None]) == []


def test_normalisation():
    names = ["  Stra\u00dfe  1 ", "\u00c5NGSTR\u00d6M", "\uff21\uff22", "\ufb01n", "x"]
    others = ["STRASSE 1", "a\u030angstro\u0308m", "ab", "FIN", "y"]
    assert matches(names, others) == []
    assert matches(names, others, "text") == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert matches(["007", " 12", "x1", "0"], [12, 7, 1, 0], "digits") == [(0, 1), (1, 0), (3, 3)]
    assert matches(["007 ", "Ab"], ["7", "aB"], ("digits", "text")) == [(0, 0), (1, 1)]
    with pytest.raises(ArgumentError, match="text, digits"):
        matches(["a"], ["a"], "case")


def test_normalising_may_make_keys_repeat():
    with pytest.raises(ArgumentError, match="keys repeat in the table of H2"):
        matches(["a"], ["a", "A"], "text")


def test_keys_of_different_types_are_refused():
    with pytest.raises(ArgumentError, match="text at H1, whole numbers at H2"):
        matches(["1"], [1])
    with pytest.raises(ArgumentError, match="whole numbers at H1, booleans at H2"):
        matches([1], [True])
    assert matches(pd.Series([1, "1"], dtype=object), [1, 2]) == [(0, 0)]  # of several types: by their own


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([1.5, 2.0], DtypeError, "not whole"),
        ([float("inf"), 1.0], NonFiniteError, "infinite"),
        ([2.0**53], DtypeError, "2^53"),
        ([b"secret-id"], DtypeError, "holds a bytes"),
        ([1 + 2j], DtypeError, "complex"),
        (["secret-id", "secret-id"], ArgumentError, "keys repeat in the table of H1"),
    ],
)
def test_bad_keys_are_refused_by_their_owner_before_anything_is_sent(keys: Any, error: type, text: str):
    session = Session(owners=("H1", "H2"))
    left, right = tables_of([pd.DataFrame({"id": keys, "a": 1}), pd.DataFrame({"id": ["x"], "b": 1})], session)
    with sectorch.profile() as seen, pytest.raises(error, match=re.escape(text)) as found:
        sectorch.join(left, right, on="id")
    assert not seen.ledger
    assert "secret-id" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on": "nothing"}, "no key column 'nothing'"),
        ({"on": []}, "on is a key column"),
        ({"on": ["id", "id"]}, "on is a key column"),
        ({"on": {"H1": "id"}}, "the tables are of H1, H2"),
        ({"on": {"H1": "id", "H2": ["id", "m"]}}, "several numbers of key columns"),
        ({"how": "outer"}, "'inner' or 'left'"),
        ({"many": 0}, "from 1"),
        ({"many": True}, "from 1"),
        ({"many": (1 << 20) - 1, "on": {"H1": "id", "H2": "m"}}, "text at H1, whole numbers at H2"),
        ({"bound": 0}, "from 1"),
        ({"bound": 5, "how": "left"}, "leave out bound"),
        ({"suffixes": ("_1",)}, "suffixes are 2 texts"),
    ],
)
def test_arguments_that_fit_no_join(options: dict[str, Any], text: str):
    left, right = tables_of([LEFT, RIGHT], Session(owners=("H1", "H2")))
    with sectorch.profile() as seen, pytest.raises(ArgumentError, match=re.escape(text)):
        sectorch.join(left, right, **{"on": "id", **options})
    assert not seen.ledger


def test_tables_that_cannot_be_joined():
    session = Session(owners=("H1", "H2"))
    left, right = tables_of([LEFT, RIGHT], session)
    with pytest.raises(ArgumentError, match="let another party play S"):
        sectorch.join(left, *tables_of([RIGHT], session, ("S",)), on="id")
    with pytest.raises(ArgumentError, match="are of one owner"):
        sectorch.join(left, *tables_of([RIGHT], session, ("H1",)), on="id")
    with pytest.raises(SessionMismatchError):
        sectorch.join(left, *tables_of([RIGHT], Session(owners=("H1", "H2")), ("H2",)), on="id")
    with pytest.raises(ArgumentError, match=r"made by sectorch\.owned, got a Table"):
        sectorch.join(left, right.share(), on="id")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"two tables have a column 'age': name suffixes"):
        sectorch.join(left, *tables_of([RIGHT.rename(columns={"m": "age"})], session, ("H2",)), on="id")
    verified = [
        sectorch.owned(frame, owner=owner, session=session, columns=columns, scheme=Scheme(verified=True))
        for frame, owner, columns in ((LEFT, "H1", ["age"]), (RIGHT, "H2", ["m"]))
    ]
    with pytest.raises(UnsupportedOpError, match="without verified=True"):
        sectorch.join(*verified, on="id")


def test_columns_keep_their_facts_and_names():
    session = Session(owners=("H1", "H2"))
    first = pd.DataFrame({"id": [1, 2], "sex": ["f", "m"], "dose": [0.5, np.nan]})
    second = pd.DataFrame({"pid": [2, 1], "dose": [300.0, -2.0], "sex": ["x", "y"], "seen": [True, False]})
    left = sectorch.owned(
        first, owner="H1", session=session, columns={"id": None, "sex": ("f", "m"), "dose": None}, missing=["dose"]
    )
    facts = {"pid": None, "dose": Column("number", limit=512.0), "sex": ("x", "y"), "seen": None}
    right = sectorch.owned(second, owner="H2", session=session, columns=facts)
    table = sectorch.join(left, right, on={"H1": "id", "H2": "pid"}, suffixes=("", "_2"))
    assert table.columns == (
        "id",
        "sex",
        "dose",
        "dose_2",
        "sex_2",
        "seen",
    )  # the first table's key is shared, as asked
    assert table.schema["sex_2"].categories == ("x", "y") and table.schema["dose_2"].limit == 512
    assert set(table.missing) == {"dose"} and table.schema["dose"].missing
    content = [table.filled(name).reveal().tolist() for name in table.columns]
    by_id = {int(i): row for i, *row in zip(*content, strict=True)}
    assert by_id == {1: [0, 0.5, -2.0, 1, False], 2: [1, 0.0, 300.0, 0, True]}
    beside = sectorch.join(right, left, on={"H1": "id", "H2": "pid"}, how="left", suffixes=("_2", ""))
    assert set(beside.missing) == {"sex", "dose"}  # the key of a further table is left out
    assert sorted(beside.missing["dose"].reveal().tolist()) == [False, True]
    assert beside["dose"].dtype == torch.float32 and beside["seen"].dtype == torch.bool


def test_a_joined_table_computes_as_others_do():
    session = Session(owners=("H1", "H2"))
    table = sectorch.join(*tables_of([LEFT, RIGHT], session), on="id")
    assert float((table["age"] * table["m"]).sum().reveal()) == 2 * 20 + 4 * 40
    assert sorted((table["w"] > 0).reveal().tolist()) == [False, True]
    where: Any = table.where(table["f"]).present
    assert int(where.reveal().sum()) == 1


def test_rows_of_no_other_columns_and_no_rows():
    session = Session(owners=("H1", "H2"))
    none = LEFT.iloc[:0]
    for first, second in ((none, RIGHT), (LEFT, RIGHT.iloc[:0]), (none, RIGHT.iloc[:0])):
        kinds: list[Any] = [{}, {"how": "left"}, {"bound": 3}]
        for options in kinds:
            table = sectorch.join(*tables_of([first, second], session), on="id", **options)
            assert len(opened(table)) == (len(first) if options == {"how": "left"} else 0)
    with pytest.raises(SectorchError):  # an owned table has a column, so a join has one
        sectorch.owned(LEFT, owner="H1", session=session, columns=[])
    facts: Any = {"id": ("b", "d", "x")}
    only_keys = sectorch.owned(RIGHT.dropna()[["id"]], owner="H2", session=session, columns=facts)
    (left,) = tables_of([LEFT], session)
    same_rows(opened(sectorch.join(left, only_keys, on="id")), MERGED[["age", "w"]])


# Attacks, and views.


def views(frames: list[pd.DataFrame], runs: int, **options: Any) -> dict[tuple, np.ndarray]:
    """What each party receives by each message of a join, over some runs: [runs, words] by path, label and receiver."""
    seen: dict[tuple, list[np.ndarray]] = {}
    session = Session(owners=OWNERS)
    tables = tables_of(frames, session)
    for _ in range(runs):
        with Transcript() as transcript:
            sectorch.join(*tables, on="id", **options)
        places: dict[tuple, int] = {}
        for line, value in transcript.lines:
            key = line.path.split("/")[-1], line.label, line.src.name, line.dst.name
            number = places[key] = places.get(key, -1) + 1
            content = value.reshape(-1).contiguous().numpy()
            seen.setdefault((*key, number), []).append(content)
    return {key: np.array(values) for key, values in seen.items() if values[0].size}


DECLARED = ("join_rows", "reveal_to_S")
"""The opened marks, and their broadcast."""
WORDS = {"join_store", "join_hashes", "share", "shuffle", "multiply", "mask", "deal"}
"""Protocols whose messages are whole words. Others send packed bits, whose last word is padded with zeros."""


def frames_of(first: Any, second: Any, value: int) -> list[pd.DataFrame]:
    return [
        pd.DataFrame({"id": first, "a": range(value, value + len(first))}),
        pd.DataFrame({"id": second, "b": range(-value, -value + len(second))}),
    ]


@pytest.mark.parametrize(
    ("options", "matching"), [({}, 128), ({"how": "left"}, 0), ({"bound": 200}, 0), *long(({"bound": 256}, 0))]
)
def test_no_message_but_the_declared_ones_tells_two_pairs_of_tables_apart(options: dict[str, Any], matching: int):
    """Of the same lengths: other keys, other values, other rows that match and, unless it is told, another number."""
    rows, rng = np.arange(256), np.random.default_rng(0)
    one = views(frames_of(rows, rows + 128, 1), 5, **options)
    other = views(frames_of(rng.permutation(rows) + 1000, rng.permutation(rows + 1256 - matching), 2000), 5, **options)
    assert one.keys() == other.keys()
    uniform = set()
    for key in one:
        if key[0] in DECLARED:
            continue
        first, second = one[key].reshape(-1), other[key].reshape(-1)
        assert distinguishable(first, second) == "", key
        if key[0] in WORDS:
            assert not_uniform(first) == not_uniform(second) == "", key
            uniform.add(key[0])
    assert {"join_store", "join_hashes", "share", "shuffle"} <= uniform
    assert ("join_rows" in {key[0] for key in one}) == (options != {"how": "left"} and options != {"bound": 256})


def frequent(marks: np.ndarray) -> bool:
    """Whether marks of rows [runs, n] are as frequent at each sixteenth of the places."""
    places = np.nonzero(marks)[1] * 16 // marks.shape[1]
    return fits(np.bincount(places, minlength=16), np.full(16, 1 / 16))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_opened_marks_tell_nothing_but_their_number(mixed: bool):
    """An inner join opens which shuffled rows match: each is as frequent, whatever the order of the owners' rows."""
    keys = np.random.default_rng(1).permutation(128) if mixed else np.arange(128)
    seen = views(frames_of(keys, np.arange(64, 192), 1), 40)
    (marks,) = [value for key, value in seen.items() if key[:4] == ("join_rows", "rows", "S", "Q")]
    assert (marks.sum(1) == 64).all() and frequent(marks)


@pytest.mark.parametrize("matching", [0, 40, 96])
def test_with_a_bound_as_many_marks_are_opened_for_any_number_of_matches(matching: int):
    seen = views(frames_of(np.arange(128), np.arange(128 - matching, 256 - matching), 1), 40, bound=96)
    (marks,) = [value for key, value in seen.items() if key[:4] == ("join_rows", "rows", "S", "Q")]
    assert marks.shape[1] == 224 and (marks.sum(1) == 96).all() and frequent(marks)


@pytest.mark.parametrize("options", [{}, *long({"how": "left"}, {"bound": 1000})])
def test_a_row_is_at_each_place_as_often_wherever_its_owners_have_it(options: Any):
    """Eighths of each owner's table against eighths of the result: all 64 cells are as frequent."""
    session, rows = Session(owners=OWNERS), np.arange(128)
    keys = np.random.default_rng(2).permutation(128)
    tables = tables_of([pd.DataFrame({"id": rows, "a": rows}), pd.DataFrame({"id": keys, "b": rows})], session)
    cells = {"a": np.zeros((8, 8), dtype=int), "b": np.zeros((8, 8), dtype=int)}
    for _ in range(60):
        table = sectorch.join(*tables, on="id", **options)
        for name in cells:
            np.add.at(cells[name], (table[name].reveal().numpy() // 16, rows // 16), 1)
    for found in cells.values():
        assert fits(found.reshape(-1), np.full(64, 1 / 64))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("how", ["inner", "left"])
def test_each_order_of_three_rows_is_as_frequent_whatever_the_owners_order(how: Any):
    for first, second in (([1, 2, 3], [1, 2, 3]), ([3, 1, 2], [2, 1, 3])):
        session, found = Session(owners=OWNERS), []
        tables = tables_of([pd.DataFrame({"id": x, name: x}) for x, name in ((first, "a"), (second, "b"))], session)
        for _ in range(720):
            table = sectorch.join(*tables, on="id", how=how)
            rows = table["b"].reveal().tolist()
            assert rows == table["a"].reveal().tolist()
            found.append(rows[0] * 9 + rows[1] * 3 + rows[2])
        counts = np.bincount(found)
        assert fits(counts[counts > 0], np.full(6, 1 / 6))


def hashes_at_S(session: Session, frames: list[pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """What S receives of the owners: the hashes and the store of a join."""
    with Transcript() as transcript:
        sectorch.join(*tables_of(frames, session), on="id")
    found = {line.label: value.numpy() for line, value in transcript.received("S") if line.label in ("hashes", "store")}
    return found["hashes"], found["store"]


def test_s_cannot_link_the_rows_of_two_joins_or_try_out_keys():
    """The same tables in one session: no word of a hash or a store comes again. A dictionary of all keys finds nothing
    without the secret; with it, it finds all (the control)."""
    session, frames = Session(owners=OWNERS), frames_of(list(range(40)), list(range(20, 60)), 0)
    (hashes, store), (again, other_store) = (hashes_at_S(session, frames) for _ in range(2))
    assert not set(hashes.reshape(-1).tolist()) & set(again.reshape(-1).tolist())
    assert not set(store.reshape(-1).tolist()) & set(other_store.reshape(-1).tolist())

    secrets: list[bytes] = []
    of_store = okvs.hashes_and_pads

    def spied(secret: bytes, keys: Any, width: int) -> Any:
        secrets.append(secret)
        return of_store(secret, keys, width)

    def dictionary(secret: bytes) -> int:
        """How many of the keys 0 to 99 S recognises among the hashes and in the store."""
        table = sectorch.owned(
            pd.DataFrame({"id": range(100), "a": 0}), owner="H1", session=Session(owners=OWNERS), columns=["a"]
        )
        from sectorch.tables.join import key_digests

        digests = key_digests(table, ["id"], ())[0].numpy()
        mine, pads = of_store(secret, [row[:-1].tobytes() + bytes(8) for row in digests], 2)
        asked = {tuple(row) for row in hashes.tolist()}
        return sum(tuple(row) in asked for row in mine.tolist()) + int(
            (okvs.decode(mine, store, 40) == pads)[:, 0].sum()
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(okvs, "hashes_and_pads", spied)
        hashes, store = hashes_at_S(session, frames)
    assert dictionary(secrets[0]) == 80
    assert dictionary(bytes(32)) == 0


def test_owners_with_other_secrets_have_no_row_in_common():
    module = sys.modules["sectorch.tables.join"]
    frames, send = frames_of(range(50), range(50), 1), module.send_secret
    assert len(sectorch.join(*tables_of(frames, Session(owners=OWNERS)), on="id")) == 50
    for bit in (1, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                module, "send_secret", lambda net, secret, b=bit: send(net, secret) ^ (b * (net.Q.name == "H2"))
            )
            assert len(sectorch.join(*tables_of(frames, Session(owners=OWNERS)), on="id")) == 0


@pytest.mark.sectorch_long
def test_100_000_keys_of_each_of_which_none_is_the_others():
    rows = np.arange(100_000)
    frames = [pd.DataFrame({"id": rows, "a": 1}), pd.DataFrame({"id": rows + 100_000, "b": 1})]
    assert len(sectorch.join(*tables_of(frames, Session(owners=OWNERS)), on="id")) == 0


def test_repeated_keys_show_no_repetition():
    """Rows of one key, up to `many`, send S other hashes each, as rows of different keys do."""
    one, other = (
        views(frames_of(keys, np.arange(300), 1), 4, how="left", many=4)
        for keys in (np.arange(256), np.repeat(np.arange(64), 4))
    )
    for view in (one, other):
        (hashes,) = [value for key, value in view.items() if key[0] == "join_hashes"]
        rows = hashes.reshape(-1, okvs.HASH_WORDS)
        assert len({tuple(row) for row in rows.tolist()}) == 4 * 256
        assert not_uniform(rows.reshape(-1)) == ""
        assert len(np.unique(rows[:, 3:], axis=0)) == 4 * 256
    assert one.keys() == other.keys()
    for key in one:
        assert distinguishable(one[key].reshape(-1), other[key].reshape(-1)) == "", key


def test_the_cost_is_what_the_docstring_says():
    n, m, left, right = 500, 400, 3, 2
    frames = [
        pd.DataFrame({"id": range(n)} | {f"a{i}": range(n) for i in range(left)}),
        pd.DataFrame({"id": range(m)} | {f"b{i}": range(m) for i in range(right)}),
    ]
    with sectorch.profile() as seen:
        sectorch.join(*tables_of(frames, Session(owners=OWNERS)), on="id")
    of = lambda *names: sum(line.bytes for line in seen.ledger if line.protocol in names)
    assert of("join_store") == 8 * okvs.length(m) * (1 + right)
    assert of("share") == 8 * n * (left + right + 1) and of("join_hashes") == 20 * n
    assert of("shuffle") == 24 * n * (left + right + 1)
    assert of("reveal_to_S") == 8 * n and of("join_rows") == n * 5  # Q, A and three owners
    everything = of(*{line.protocol for line in seen.ledger} - {"seed"})
    rest = everything - of("join_store", "share", "join_hashes", "shuffle", "reveal_to_S", "join_rows", "join_secret")
    assert 50 * n < rest < 70 * n  # the equality


def test_an_owner_that_sends_garbage_gets_no_match_and_no_error_that_tells_anything():
    """A store of zeros, or of uniform words, holds no key: no row matches, as with other keys."""
    frames = frames_of([1, 2, 3], [1, 2, 3], 1)
    for garbage in (lambda shape: np.zeros(shape, dtype=np.int64), okvs.random_words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                okvs, "encode", lambda hashes, values, rows, g=garbage: g((okvs.length(rows), values.shape[1]))
            )
            assert len(sectorch.join(*tables_of(frames, Session(owners=OWNERS)), on="id")) == 0


def test_nobody_but_s_and_owners_holds_what_is_computed_under_the_secret():
    """A has the secret, so no hash and no store may reach it, also where A is an owner; S never has the secret."""
    for owners in (("H1", "H2"), ("A", "H1"), ("H1", "A"), ("Q", "A")):
        session = Session(owners=("H1", "H2"))
        with Transcript() as transcript:
            sectorch.join(*tables_of(frames_of([1, 2], [2, 3], 1), session, owners), on="id")
        for line, _ in transcript.lines:
            if line.label in ("hashes", "store"):
                assert line.dst == session.S
            if line.label == "secret":
                assert line.dst.name in owners and line.dst.name != "A"
        secrets = {line.dst.name for line, _ in transcript.lines if line.label == "secret"}
        assert secrets == set(owners) - {"A"}
