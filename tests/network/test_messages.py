"""Declared types of messages and of TOML tables: a wrong, missing or unknown entry is refused, with its name."""

from __future__ import annotations

import datetime
import json
import math
from typing import get_args

import msgspec
import pytest

from sectorch import errors
from sectorch.network import limits, messages
from sectorch.network.federation import config, policy
from sectorch.network.messages import ToClient, ToFollow, ToServer, message_form, parse_message, read_table

RUN = "0f" * 16
NOTE = messages.SignedNote("x", "0f" * 32, "0f" * 64)
FORMAT = messages.NumberFormat(frac_bits=16)
GOOD = [
    messages.Hello(number=1),
    messages.ListModels(number=1),
    messages.Register(name="a", description={"version": 1}, edition="e", keeper="k", made=3, number=1),
    messages.Open(session=RUN, models=["a"], scheme=FORMAT, lasting=True, version="v", resume=RUN, calls=[1], number=1),
    messages.Void(sessions=[RUN], number=1),
    messages.IsUp(time=1.0, tag="t", number=1),
    messages.WhoIsUp(parties=["a", "b"], number=1),
    messages.Note(to="a", note=NOTE, tag="t", number=1),
    messages.Meet(label="l", digest="d", parties=["a", "b"], time=1.0, alone=True, number=1),
    messages.Unmeet(label="l", parties=["a", "b"], number=1),
    messages.PartFinished(meeting=RUN, number=1),
    messages.Serve(
        session=RUN, client="c", place=1, of=2, model="m", edition="e", scheme=FORMAT, lasting=True, resume=RUN,
        calls=[2],
    ),
    messages.SessionBegin(meeting=RUN, label="l", parties=["a"]),
    messages.Refusal(label="l", parties=["a"], error="RefusedError", text="no"),
    messages.Delivery(note=NOTE, sender="a"),
    messages.Go(),
    messages.Predict(program=1, rows=2, trace="t", query=RUN, use=[1], then=[2], after=3, joint="j", calls=2),
    messages.Aggregate(program=1, rows=2, trace="t", query=RUN),
    messages.Prepare(program=1, rows=2, trace="t"),
    messages.Close(),
    messages.MaterialReady(calls=[1]),
    messages.StoredCall(bytes=1, room=2),
    messages.AllStored(more=1),
]  # fmt: skip
"""One of each type, with every entry that it can have."""
WRONG = [None, True, 0.5, -1, 1 << 70, math.nan, math.inf, "\ud800", "x\n", "", [], ["\n", 3], [[]], {"a": [1]}]


def ids(message: messages.ControlMessage) -> str:
    return type(message).__name__


def test_every_message_is_among_these():
    kinds = {*get_args(ToServer), *get_args(ToClient), *get_args(ToFollow)}
    assert kinds <= set(map(type, GOOD))
    abstract = {messages.ControlMessage, messages.ServerRequest, messages.ModelQuery}
    declared = {k for k in vars(messages).values() if isinstance(k, type) and issubclass(k, messages.ControlMessage)}
    assert declared - abstract == set(map(type, GOOD))


@pytest.mark.parametrize("message", GOOD, ids=ids)
def test_what_is_said_is_read(message):
    assert parse_message(type(message), json.loads(json.dumps(message_form(message)))) == message


@pytest.mark.parametrize("message", GOOD, ids=ids)
def test_an_entry_of_another_kind_is_refused_by_its_name_or_is_another_right_value(message):
    """What is read has in each entry a value of its declared type, whatever came."""
    kind, good = type(message), message_form(message)
    with pytest.raises(errors.FrameError, match="unknown field"):
        parse_message(kind, {**good, "one more": 1})
    for name in good.keys() - {"do"}:
        for wrong in WRONG:
            try:
                found = parse_message(kind, {**good, name: wrong})
            except errors.FrameError as refused:
                assert name in str(refused) or "not Unicode" in str(refused)
                assert "same version" in str(refused)
            else:
                held = message_form(found).get(name)
                assert held is None or (held == wrong and (type(held) is type(wrong) or type(held) is float)), (
                    name,
                    wrong,
                )
    for field in msgspec.structs.fields(kind):
        if field.required:
            with pytest.raises(errors.FrameError, match=f"missing required field `{field.encode_name}`"):
                parse_message(kind, {k: v for k, v in good.items() if k != field.encode_name})


@pytest.mark.parametrize("kind", [ToServer, ToClient, ToFollow])
@pytest.mark.parametrize("came", [None, [], 3, "x", {}, {"do": 3}, {"do": "\ud800"}, {"do": "x" * 1000}, {"\ud800": 1}])
def test_what_is_no_message_is_refused(kind, came):
    with pytest.raises(errors.FrameError, match="of no form that this version knows") as refused:
        parse_message(kind, came)
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()


@pytest.mark.parametrize("change", [{"key": "0f" * 31}, {"signature": "0F" * 64}, {"body": 3}, {"more": 1}, None])
@pytest.mark.parametrize("message", [{"do": "note", "to": "a"}, {"do": "delivered", "from": "a"}])
def test_a_note_is_a_text_with_a_key_and_a_signature(message, change):
    """So a server hands on nothing else, and a party reads nothing else."""
    note = "text" if change is None else {**message_form(NOTE), **change}
    with pytest.raises(errors.FrameError, match=r"note|body|key|signature"):
        parse_message(ToServer | ToClient, {**message, "note": note})


def test_a_refusal_does_not_show_what_stands_in_an_entry():
    for wrong in ({"secret-77": 1}, ["secret-77"]):
        with pytest.raises(errors.FrameError) as refused:
            parse_message(ToServer, {"do": "register", "name": wrong, "description": {}, "edition": "e"})
        assert "secret-77" not in str(refused.value)


# Tables of TOML: an entry of another kind, unknown or missing is refused with its name and what is expected.
DIGEST = "0f" * 32
GOOD_TABLES = [
    (config._Head, {"name": "x", "server": "h:1", "largest_message_mb": 3, "edges": [["a", "b"]]}),
    (config._Party, {"role": "A", "identity": "SHA256:" + "A" * 43, "address": "h:1", "server": "s"}),
    (config.PartyLimits, dict.fromkeys(config.PartyLimits.__struct_fields__, 1)),
    (config._Files, dict.fromkeys(config._Files.__struct_fields__, "x")),
    (config._Server, {"listen": "h:1"}),
    (
        policy._Model,
        {"model": "m", "clients": ["a"], "unchecked": True, "audited": 2, "verified": False, "imprecise": True},
    ),
    (
        policy._Program,
        {
            "program": "a.py:f", "source": DIGEST, "parties": ["a"], "from": ["a"], "traced": DIGEST,
            "reveals": ["reveal:a=1"], "inputs": {"H": "a.npy"}, "runs": 2,
        },
    ),
    (
        policy._Paper,
        {
            "paper": "p", "settings": DIGEST, "parties": ["a"], "from": ["a"], "most": {"rounds": 2, "rate": 0.5},
            "own": {"budgets": "mine"}, "runs": 1,
        },
    ),
    (limits._Client, dict.fromkeys(limits._Client.__struct_fields__, 1)),
    (limits._Model, dict.fromkeys(limits._Model.__struct_fields__, 1)),
    (limits._File, {"usage": "u", "default": {}, "clients": {"a": {}}, "models": {}}),
]  # fmt: skip
WRONG_TABLES = [
    True, 0.5, -1, 10**400, math.nan, math.inf, "", "\ud800", "x\n", [], [[]], [1], ["a", ["b"]], {"a": [1]},
    {"a": True},
    datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1), datetime.time(1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "good"), GOOD_TABLES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_table_holds_what_its_type_says(kind, good):
    assert msgspec.to_builtins(read_table(kind, good, "[t]")).keys() <= good.keys()
    with pytest.raises(errors.ArgumentError, match=r"\[t\] has no 'one more'; it has "):
        read_table(kind, {**good, "one more": 1}, "[t]")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    assert fields.keys() == good.keys()
    for name, field in fields.items():
        if field.required:
            with pytest.raises(errors.ArgumentError, match=rf"^{name} in \[t\] is .*, got nothing$"):
                read_table(kind, {k: v for k, v in good.items() if k != name}, "[t]")
        refused = 0
        for wrong in WRONG_TABLES:
            try:
                found = getattr(read_table(kind, {**good, name: wrong}, "[t]"), field.name)
            except errors.ArgumentError as error:
                refused += 1
                assert str(error).startswith(f"{name} in [t] is ") and ", got " in str(error) and len(str(error)) < 300
                assert "\n" not in str(error) and str(error).isprintable()
            else:
                assert found == wrong and (type(found) is type(wrong) or type(found) is float), (name, wrong)
        assert refused >= 12, name


@pytest.mark.parametrize("said", [None, 3, "x", [], True])
def test_what_is_no_table_is_refused(said):
    with pytest.raises(errors.ArgumentError, match=r"\[t\] is a table, got "):
        read_table(config.PartyLimits, said, "[t]")
