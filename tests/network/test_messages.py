"""Declared types of messages: each entry of another type, out of bounds, missing or unknown is refused by its name."""

from __future__ import annotations

import json
import math
from typing import get_args

import msgspec
import pytest

from sectorch import errors
from sectorch.network import messages
from sectorch.network.messages import ToClient, ToFollow, ToServer, message_form, parse_message

RUN = "0f" * 16
FORMAT = messages.NumberFormat(frac_bits=16)
GOOD = [
    messages.Hello(number=1),
    messages.ListModels(number=1),
    messages.Register(name="a", description={"version": 1}, edition="e", keeper="k", made=3, number=1),
    messages.Open(session=RUN, models=["a"], scheme=FORMAT, lasting=True, version="v", resume=RUN, calls=[1], number=1),
    messages.Void(sessions=[RUN], number=1),
    messages.IsUp(time=1.0, tag="t", number=1),
    messages.WhoIsUp(parties=["a", "b"], number=1),
    messages.Note(to="a", note={"body": "x"}, tag="t", number=1),
    messages.Meet(label="l", digest="d", parties=["a", "b"], time=1.0, alone=True, number=1),
    messages.Unmeet(label="l", parties=["a", "b"], number=1),
    messages.PartFinished(meeting=RUN, number=1),
    messages.Serve(
        session=RUN, client="c", place=1, of=2, model="m", edition="e", scheme=FORMAT, lasting=True, resume=RUN,
        calls=[2],
    ),
    messages.SessionBegin(meeting=RUN, label="l", parties=["a"]),
    messages.Refusal(label="l", parties=["a"], error="RefusedError", text="no"),
    messages.Delivery(note={"body": "x"}, sender="a"),
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


def test_a_refusal_does_not_show_what_stands_in_an_entry():
    for wrong in ({"secret-77": 1}, ["secret-77"]):
        with pytest.raises(errors.FrameError) as refused:
            parse_message(ToServer, {"do": "register", "name": wrong, "description": {}, "edition": "e"})
        assert "secret-77" not in str(refused.value)
