"""Descriptions that ask for very much: refused in little memory, whatever they say, and before a party takes part."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path

import bomb_programs
import pytest
import torch
from bomb_programs import BOMBS, END, HARMLESS, described, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from network_world import Trio

from sectorch import errors
from sectorch.nn import bounds
from sectorch.nn.models import ZOO
from sectorch.serving.description import MAX_JSON, MAX_NODES, describe, from_json, load_program, to_json

MIB = 500
"""Of memory, beside what torch takes."""


class Reader:
    """A process with bounded memory that reads descriptions as a party does."""

    def __init__(self):
        script = [sys.executable, str(Path(bomb_programs.__file__))]
        self.process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, description) -> tuple[str, int]:
        text = description if isinstance(description, bytes) else json.dumps(description).encode()
        self.process.stdin.write(text + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        came, grown = json.loads(line)
        return came, grown


@pytest.fixture(scope="module")
def reader():
    reader = Reader()
    yield reader
    reader.process.stdin.close()
    reader.process.wait(60)
    reader.process.stdout.close()


WITHIN = ("padding that reflects", "upsample smoothly", "cumsum", "a power", "a negative power")
"""Large, and within the bounds."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_small(reader, name):
    came, grown = reader(BOMBS[name])
    assert came == "runs" if name in WITHIN else came in ("ProgramError", "ShapeError"), came
    assert grown < MIB


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_runs(reader, name):
    assert reader(HARMLESS[name])[0] == "runs"


NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 7, 64, 1000, 1 << 16, 1 << 20, 1 << 28, 1 << 30, (1 << 31) - 1, 1 << 31, -5,
                           1 << 40, END, -END - 1, 1 << 70])  # fmt: skip
VALUES = (
    NUMBERS
    | st.sampled_from(
        [
            0.5,
            1e9,
            1e308,
            -1.0,
            None,
            True,
            "mean",
            "reflect",
            {"input": 0},
            {"node": 0},
            {"constant": 0},
            {"rows": 3},
            {"float": "inf"},
        ]
    )
    | st.lists(NUMBERS, max_size=4)
)
NAMES = sorted({node["name"] for d in (BOMBS | HARMLESS).values() for node in d["programs"][0]["nodes"]})


@functools.cache
def small() -> list[dict]:
    """The programs whose text is short; the texts of all take seconds."""
    return [d for d in (*HARMLESS.values(), *BOMBS.values()) if len(json.dumps(d)) < 20_000]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_programs_are_refused_or_small(reader, data):
    """Other numbers, arguments and operations, and rows of other shapes, in programs of these."""
    description = copy.deepcopy(data.draw(st.sampled_from(small())))
    calls = description["programs"][0]["nodes"]
    for node in calls:
        node["args"] = list(node["args"])
    for _ in range(data.draw(st.integers(1, 3))):
        node, kind = data.draw(st.sampled_from(calls)), data.draw(st.integers(0, 4))
        if kind == 0:
            node["name"] = data.draw(st.sampled_from(NAMES))
        elif kind == 1 and node["args"]:
            node["args"][data.draw(st.integers(0, len(node["args"]) - 1))] = data.draw(VALUES)
        elif kind == 2:
            node["args"].append(data.draw(VALUES))
        elif kind == 3:
            description["programs"][0]["inputs"][0]["shape"] = data.draw(st.lists(NUMBERS, max_size=4))
        else:
            node["kwargs"] = {data.draw(st.sampled_from(["dim", "size", "padding", "k", "mode"])): data.draw(VALUES)}
    came, grown = reader(description)
    assert not came.startswith("untyped") and grown < MIB, (came, grown, description)


@pytest.mark.parametrize(
    "text",
    [b"[" * 1_000_000, b"{}" + b" " * MAX_JSON, b'{"version": 2, "programs": [' + b"[]," * 900_000 + b"1]}",
     b'{"version": ' + b"9" * 5000 + b"}", b'{"version": "' + b"9" * 5000 + b'"}'],
)  # fmt: skip
def test_text_that_grows_as_it_is_read(reader, text):
    came, grown = reader(text)
    assert came == "ProgramError" and grown < MIB


def test_steps_are_counted_and_have_an_end(monkeypatch):
    """So many times the activations take so many times as many; a limit on all of them is kept."""
    monkeypatch.setattr(bounds, "OPERATIONS_MOST", 3_000)
    few = described([4], *[("F.relu", ["x"], {})] * 2)
    many = described([4], *[("F.relu", ["x"], {})] * 60)  # 56 operations each
    assert outcome(json.dumps(few).encode()) == "runs"
    assert outcome(json.dumps(many).encode()) == "ProgramError"


@pytest.mark.parametrize("nodes", [MAX_NODES + 1])
def test_nodes_have_a_limit(nodes):
    many = described([4], *[("F.relu", ["x"], {})] * nodes)
    with pytest.raises(errors.ProgramError, match="nodes"):
        load_program(many)


def test_public_values_are_not_made_before_they_are_counted():
    many = torch.tensor([1 << 50])
    for make in (lambda: torch.zeros(1 << 40), lambda: torch.eye(1 << 20), lambda: torch.repeat_interleave(many)):
        with bounds.OperationBudget(1), pytest.raises(errors.ProgramError, match="public values"):
            make()
    with bounds.OperationBudget(1):
        mask = torch.tensor([True, False, True])
        assert torch.arange(3)[mask].tolist() == [0, 2] and mask.nonzero().shape == (2, 1)
        assert torch.masked_select(torch.arange(3), mask).tolist() == [0, 2]


@pytest.mark.parametrize("values", [([1], 2), ("a", 0), (torch.zeros(2), 0), ((1,), 1), ((1,), True), ((1,), -2)])
def test_an_item_is_of_several_results(values):
    with pytest.raises(errors.ProgramError):
        bounds.item(*values)


@pytest.mark.parametrize("name", ["lenet", "resnet8"])
def test_the_zoo_is_far_within_the_bounds(name):
    construct, shape = ZOO[name]
    description, _ = describe(construct().eval(), torch.zeros(2, *shape))
    assert outcome(to_json(description), 4) == "runs"


def test_the_protocols_of_few_rounds_have_more_steps():
    small = HARMLESS["a layer"]
    assert outcome(json.dumps(small).encode(), 4, "wan") == "runs"


def test_the_names_of_weights_and_dtypes_have_to_agree():
    description, weights = describe(torch.nn.Linear(3, 2).eval(), torch.zeros(2, 3))
    with pytest.raises(errors.ProgramError, match="float64"):
        load_program(description, {name: w.detach().double() for name, w in weights.items()})
    assert load_program(from_json(to_json(description)), weights)


def test_a_bomb_at_the_answering_party_ends_its_sessions_and_nothing_else(pki, small_model, tmp_path):
    """A registers it: S and Q refuse it with a typed error, S goes on, and a good model is answered."""
    x = torch.randn(2, 1, 8, 8)
    trio = Trio(pki[1], small_model, x, tmp_path)
    try:
        trio.party.close()
        bomb = described([1, 8, 8], ("Tensor.repeat", ["x", [1, 1, 1 << 15, 1 << 15]], {}))
        trio.start_answering(described=(bomb, {}))
        with pytest.raises((errors.ProgramError, errors.NetworkError), match=r"ProgramError|elements"):
            trio.connection.model("hospital-b")(x)
        trio.party.close()
        trio.start_answering()
        assert (trio.connection.model("hospital-b")(x) - small_model(x)).abs().max() < 1e-4
    finally:
        trio.close()
