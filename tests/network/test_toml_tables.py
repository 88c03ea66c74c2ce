"""Tables of TOML: an entry of another kind, unknown or missing is refused with its name and what is expected."""

from __future__ import annotations

import datetime
import math

import msgspec
import pytest

from sectorch import errors
from sectorch.network import limits
from sectorch.network.federation import config, policy
from sectorch.network.messages import read_table

DIGEST = "0f" * 32
GOOD = [
    (config._Head, {"name": "x", "server": "h:1", "largest_message_mb": 3, "edges": [["a", "b"]]}),
    (config._Party, {"role": "A", "identity": "SHA256:" + "A" * 43, "address": "h:1", "server": "s"}),
    (config.PartyLimits, dict.fromkeys(config.PartyLimits.__struct_fields__, 1)),
    (config._Files, dict.fromkeys(config._Files.__struct_fields__, "x")),
    (config._Server, {"listen": "h:1"}),
    (
        policy._Model,
        {"model": "m", "clients": ["a"], "unchecked": True, "audited": 2, "verified": False, "imprecise": False},
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
WRONG = [
    True, 0.5, -1, 10**400, math.nan, math.inf, "", "\ud800", "x\n", [], [[]], [1], ["a", ["b"]], {"a": [1]},
    {"a": True},
    datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1), datetime.time(1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "good"), GOOD, ids=lambda x: getattr(x, "__name__", ""))
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
        for wrong in WRONG:
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
