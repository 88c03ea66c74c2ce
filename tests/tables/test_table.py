"""Tables: what is read of frames, what is refused, and what a table computes, against pandas."""

from __future__ import annotations

import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sectorch
from sectorch.errors import (
    ArgumentError,
    DtypeError,
    FixedPointRangeError,
    NonFiniteError,
    SectorchError,
    SessionMismatchError,
    ShapeError,
)
from sectorch.tables import Column, Table, owned
from sectorch.tables.table import _content, _parsed, _read, _tensor


@pytest.fixture
def session():
    return sectorch.Session(reference=True, owners=("H1", "H2"))


def frame_of(n: int = 6) -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "age": np.arange(n, dtype=np.int64) + 40,
            "weight": np.linspace(50, 90.5, n),
            "smoker": np.arange(n) % 2 == 0,
            "sex": np.array(["f", "m", "f"] * n)[:n],
        }
    )


COLUMNS = {"age": None, "weight": None, "smoker": None, "sex": ("f", "m")}

FORMS = {
    "pandas": lambda frame: frame,
    "polars": lambda frame: polars.from_pandas(frame),
    "arrow": lambda frame: pyarrow.Table.from_pandas(frame),
    "batch": lambda frame: pyarrow.RecordBatch.from_pandas(frame),
    "chunks": lambda frame: pyarrow.concat_tables(
        [pyarrow.Table.from_pandas(frame[:2]), pyarrow.Table.from_pandas(frame[2:])]
    ),
    "dict": lambda frame: {name: frame[name].to_numpy() for name in frame},
    "tensors": lambda frame: {
        name: torch.tensor(frame[name].to_numpy()) if name != "sex" else list(frame[name]) for name in frame
    },
    "records": lambda frame: np.array(
        [tuple(row) for row in frame.itertuples(index=False)],
        dtype=[("age", "i8"), ("weight", "f8"), ("smoker", "?"), ("sex", "U1")],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("owner", ["Q", "A", "S", "H1"])
def test_every_form_gives_the_same_table(session, form, owner):
    frame = frame_of()
    table = owned(FORMS[form](frame), owner=owner, session=session, columns=COLUMNS).share()
    assert table.columns == ("age", "weight", "smoker", "sex") and len(table) == 6
    assert [column.kind for column in table.schema.values()] == ["integer", "number", "flag", "category"]
    assert table.schema["sex"].categories == ("f", "m") and table.present is None and not table.missing
    assert torch.equal(table["age"].reveal(), torch.tensor(frame["age"].to_numpy()))
    weight = table["weight"].like(table["weight"].shares, dtype=torch.float64).reveal()
    assert np.abs(weight.numpy() - frame["weight"].to_numpy()).max() <= 2.0**-21
    assert table["smoker"].reveal().tolist() == frame["smoker"].tolist()
    assert table["sex"].reveal().tolist() == [0, 1, 0, 0, 1, 0]


def test_a_table_is_the_same_over_the_protocols():
    session = sectorch.Session(owners=("H1",))
    table = owned(frame_of(), owner="H1", session=session, columns=COLUMNS).share()
    older = table.where(table["age"] > 42).where(table["smoker"])
    assert older.present is not None and older.present.reveal().tolist() == [False, False, False, False, True, False]
    assert older.tensor("age", "sex").reveal().tolist() == [[40 + i, s] for i, s in enumerate([0, 1, 0, 0, 1, 0])]


MISSING = {
    "pandas": lambda: pandas.DataFrame({"x": [1.5, np.nan, 3.0], "k": pandas.array([1, None, 3], dtype="Int64"),
                                        "b": pandas.array([True, None, False], dtype="boolean"),
                                        "c": pandas.Categorical(["a", None, "b"])}),
    "polars": lambda: polars.DataFrame({"x": [1.5, None, 3.0], "k": [1, None, 3], "b": [True, None, False],
                                        "c": polars.Series(["a", None, "b"], dtype=polars.Enum(["b", "a"]))}),
    "polars text": lambda: polars.DataFrame({"x": [1.5, None, 3.0], "k": [1, None, 3], "b": [True, None, False],
                                             "c": polars.Series(["a", None, "b"], dtype=polars.Categorical)}),
    "arrow": lambda: pyarrow.table({"x": pyarrow.array([1.5, None, 3.0]), "k": pyarrow.array([1, None, 3]),
                                    "b": pyarrow.array([True, None, False]),
                                    "c": pyarrow.array(["a", None, "b"]).dictionary_encode()}),
    "dict": lambda: {"x": np.array([1.5, np.nan, 3.0]), "k": np.ma.array([1, 9, 3], mask=[0, 1, 0]),
                     "b": np.ma.array([True, True, False], mask=[0, 1, 0]),
                     "c": np.array(["a", None, "b"], dtype=object)},
}  # fmt: skip


@pytest.mark.parametrize("form", MISSING)
def test_missing_values_are_flags_where_they_are_asked_for(session, form):
    columns = {"x": None, "k": None, "b": None, "c": ("a", "b")}
    with pytest.raises(NonFiniteError, match="missing=\\['"):
        owned(MISSING[form](), owner="A", session=session, columns=columns)
    table = owned(MISSING[form](), owner="A", session=session, columns=columns, missing=True).share()
    for name, values in {"x": [1.5, 0, 3], "k": [1, 0, 3], "b": [1, 0, 0], "c": [0, 0, 1]}.items():
        assert table.filled(name).reveal().tolist() == values, name
        assert [v if v == v else None for v in table[name].reveal().tolist()] == [values[0], None, values[2]]
        assert table.missing[name].reveal().tolist() == [False, True, False]
        assert table.schema[name].missing
        known = table.known(name)
        assert known is not None and known.reveal().tolist() == [True, False, True]


REFUSED = {
    "NaN": ({"x": [1.0, np.nan]}, None, NonFiniteError),
    "infinite": ({"x": [1.0, np.inf]}, None, NonFiniteError),
    "beyond the limit": ({"x": [1.0, 4096.0]}, None, FixedPointRangeError),
    "rounded up to the limit": ({"x": [1.0, 4096 - 2.0**-40]}, None, FixedPointRangeError),
    "an integer at its limit": ({"x": [-4096, 1]}, None, FixedPointRangeError),
    "the least integer": ({"x": np.array([-(2**63), 1])}, None, FixedPointRangeError),
    "a limit beyond the range": ({"x": [1.0]}, {"x": Column("number", limit=2.0**40)}, FixedPointRangeError),
    "text": ({"x": ["a", "b"]}, None, ArgumentError),
    "an unseen category": ({"x": ["a", "secret value"]}, {"x": ("a", "b")}, ArgumentError),
    "text declared a number": ({"x": ["1", "2"]}, {"x": "number"}, DtypeError),
    "fractions declared integers": ({"x": [1.5, 2.0]}, {"x": "integer"}, DtypeError),
    "numbers declared flags": ({"x": [0, 2]}, {"x": "flag"}, ArgumentError),
    "no kind": ({"x": [0, 2]}, {"x": "text"}, ArgumentError),
    "complex": ({"x": np.array([1j])}, None, DtypeError),
    "dates": ({"x": np.array(["2020-01-01"], dtype="M8[D]")}, None, DtypeError),
    "two lengths": ({"x": [1, 2], "y": [1]}, None, ShapeError),
    "two dimensions": ({"x": np.zeros((2, 2))}, None, ShapeError),
    "names twice": (pandas.DataFrame([[1, 2]], columns=["x", "x"]), None, ArgumentError),
    "names that are numbers": (pandas.DataFrame([[1, 2]]), None, ArgumentError),
    "an unknown name": ({"x": [1]}, ["y"], ArgumentError),
    "a name named twice": ({"x": [1]}, ["x", "x"], ArgumentError),
    "no column": ({}, None, ArgumentError),
    "no columns chosen": ({"x": [1]}, [], ArgumentError),
    "no frame": (7, None, ArgumentError),
    "nothing": (None, None, ArgumentError),
    "categories of its type": (pandas.DataFrame({"x": pandas.Categorical(["a"])}), None, ArgumentError),
    "no categories of its type": ({"x": ["a"]}, {"x": "category"}, ArgumentError),
    "a lazy frame": (polars.LazyFrame({"x": [1]}), None, ArgumentError),
    "dates in polars": (
        polars.DataFrame({"x": ["2020-01-01"]}).select(polars.col("x").str.to_date()),
        None,
        DtypeError,
    ),
    "dates in Arrow": (pyarrow.table({"x": pyarrow.array([1], type=pyarrow.date32())}), None, DtypeError),
    "dates in pandas": (pandas.DataFrame({"x": pandas.to_datetime(["2020-01-01"], utc=True)}), None, DtypeError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_anything_is_sent(case):
    frame, columns, error = REFUSED[case]
    session = sectorch.Session(owners=("H1",))
    with sectorch.profile() as seen, pytest.raises(error) as refused:
        owned(frame, owner="H1", session=session, columns=columns)
    assert not seen.ledger and isinstance(refused.value, SectorchError)
    assert "secret value" not in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Column("category"),
        lambda: Column("number", ("a",)),
        lambda: Column("category", ()),
        lambda: Column("category", ("a", "a")),
        lambda: Column("category", (1, True)),
        lambda: Column("category", (1.5,)),
        lambda: Column("number", limit=float("nan")),
        lambda: Column("number", limit=-1.0),
        lambda: Column("flag", limit=2.0),
        lambda: Column("number", missing=1),  # pyright: ignore[reportArgumentType]
        lambda: Column("text"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_facts_that_say_nothing_are_refused(make):
    with pytest.raises(ArgumentError):
        make()


def test_a_frame_is_read_without_a_copy():
    values = np.arange(1000.0)
    for frame in ({"x": values}, pandas.DataFrame({"x": values}, copy=False), pyarrow.table({"x": values})):
        own = _read("x", frame["x"])
        content, absent = _content("x", own, Column("number", limit=4096.0))
        assert absent is None and _tensor(content, torch.float64).data_ptr() == values.ctypes.data
    series = polars.Series("x", values)
    assert _read("x", series).values.ctypes.data == series.to_numpy().ctypes.data


def test_names_and_limits_of_a_table(session):
    table = owned({"x": [1.0, 2.0]}, owner="A", session=session, columns={"x": Column("number", limit=100.0)}).share()
    assert table["x"].bound == 100 * 2.0**20 and table.schema["x"].bound == 100
    more = table.with_columns(
        y=table["x"] * 2, z=table["x"] > 1.5, w=((table["x"] > 1.5) * 1, Column("category", ("n", "y")))
    )
    assert more.columns == ("x", "y", "z", "w") and more.schema["y"].limit == 200
    assert [column.kind for column in more.schema.values()] == ["number", "number", "flag", "category"]
    assert list(more[["z", "x"]]) == ["z", "x"] and "y" in more and "q" not in more
    for wrong in ("q", 3, slice(2), ["x", "q"], ["x", 1]):
        with pytest.raises(ArgumentError):
            more[wrong]
    with pytest.raises(DtypeError):
        more.where(table["x"])
    with pytest.raises(ShapeError):
        more.where(torch.tensor([True]))
    with pytest.raises(ArgumentError, match="share it"):
        more.with_columns(p=torch.zeros(2))
    with pytest.raises(ShapeError):
        more.with_columns(p=table["x"][:1])
    with pytest.raises(ArgumentError):
        Table({})
    other = sectorch.share(torch.zeros(2), session=sectorch.Session(reference=True))
    with pytest.raises(SessionMismatchError):
        more.with_columns(p=other)


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.booleans(), st.booleans()), min_size=0, max_size=9), st.integers(0, 9)
)
def test_rows_of_several_owners_in_one_table(rows, cut):
    session = sectorch.Session(reference=True, owners=("H1", "H2"))
    frame = pandas.DataFrame(rows, columns=["x", "b", "none"]).astype({"x": float, "b": bool})
    frame.loc[frame["none"].astype(bool), "x"] = np.nan
    parts = [frame.iloc[:cut], frame.iloc[cut:]]
    shared = [
        owned(part, owner=owner, session=session, columns=["x", "b"], missing=["x"] if part["x"].isna().any() else ())
        .share()
        for owner, part in zip(("H1", "H2"), parts, strict=True)
    ]  # fmt: skip
    shared[1] = shared[1].where(shared[1]["x"] > 0)
    table = Table.concat(shared)
    assert table.filled("x").reveal().tolist() == frame["x"].fillna(0).tolist()
    assert table["b"].reveal().tolist() == frame["b"].tolist()
    assert table.present is not None
    assert table.present.reveal().tolist() == [True] * len(parts[0]) + (parts[1]["x"] > 0).tolist()
    flags = table.missing["x"].reveal().tolist() if "x" in table.missing else [False] * len(frame)
    assert flags == frame["x"].isna().tolist()


def test_tables_of_other_columns_are_not_joined(session):
    one, two = (owned({name: [1]}, owner="A", session=session).share() for name in "xy")
    with pytest.raises(ArgumentError, match="other columns"):
        Table.concat([one, two])
    number = owned({"x": [1.0]}, owner="A", session=session).share()
    with pytest.raises(ArgumentError, match="another kind"):
        Table.concat([one, number])
    with pytest.raises(ArgumentError):
        Table.concat([])
    other = owned({"x": [1]}, owner="A", session=sectorch.Session(reference=True)).share()
    with pytest.raises(SessionMismatchError):
        Table.concat([one, other])


def test_a_public_filter(session):
    table = owned({"x": [1, 2, 3]}, owner="A", session=session).share()
    once = table.where(torch.tensor([True, True, False]))
    assert once.present is not None and once.present.reveal().tolist() == [True, True, False]
    twice = once.where(torch.tensor([False, True, True]))
    assert twice.present is not None and twice.present.reveal().tolist() == [False, True, False]


FALSE_FACTS = [
    b"", b"[]", b"[1, {}]", b"[-1, {}]", b'[1, {"x": {}}]', b"[" * 100000, b"\xff",
    b'[1.5, {"x": {"kind": "flag", "categories": null}}]',
    b'[1, {"x": {"kind": "flag", "categories": null, "owner": 3}}]',
    b'[1, {"x": {"kind": ["flag"], "categories": null}}]',
    b'[1, {"x": {"kind": "category", "categories": [[1]]}}]',
]  # fmt: skip


@pytest.mark.parametrize("text", FALSE_FACTS)
def test_facts_of_another_party_are_checked(text):
    with pytest.raises(ArgumentError, match="announced what is no table"):
        _parsed(text, sectorch.choreography.Party("H1", "O"))


def test_looks(session):
    own = owned(frame_of(), owner="H1", session=session, columns=COLUMNS)
    assert repr(own).startswith("OwnedTable(H1: 6 rows; age: integer below 4096, ")
    table = own.share()
    assert "sex: category (f, m)" in repr(table) and "filtered" in repr(table.where(table["smoker"]))
    assert own.values("sex").tolist() == ["f", "m", "f", "f", "m", "f"]  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ArgumentError):
        own.values("name")
