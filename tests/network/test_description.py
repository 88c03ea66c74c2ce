"""Model descriptions: what comes back computes the same, and what is not of the closed list is refused."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st
from network_world import in_one_process
from torch import nn

import sectorch
from sectorch import Inputs
from sectorch.errors import ProgramError, SecretAccessError, ShapeError, TrainingModeError, UnsupportedOpError
from sectorch.nn.models import ZOO
from sectorch.nn.module import module_of
from sectorch.serving.description import describe, from_json, load_program, operation, operations, to_json

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def small() -> tuple[dict, dict]:
    return describe(MODEL, torch.randn(2, 3))


@pytest.fixture(scope="module")
def description(small) -> dict:
    return small[0]


@pytest.mark.parametrize("name", ["lenet", "cryptonets", *long("vgg7", "resnet8", "mlp")])
def test_a_description_computes_the_same(name):
    """To the bit what `secure` computes, and for any number of rows."""
    construct, shape = ZOO[name]
    model, x = construct().eval().requires_grad_(False), torch.randn(3, *shape)
    described = describe(model, x[:2])
    expected = sectorch.secure(model, session=sectorch.Session())
    for rows in (3, 1):
        assert torch.equal(in_one_process(described, Inputs(x[:rows])), expected(x[:rows]))


class Answer(nn.Module):
    """Several inputs, of several kinds, and a result of several parts; one input is read twice."""

    def __init__(self, cell=nn.LSTM):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), cell(4, 3, batch_first=True)
        self.register_buffer("places", torch.arange(20))

    def forward(self, ids, mask=None, scale=2.0, more=(), flag=True):
        x = self.table(ids) + self.table(self.places[: ids.shape[1]] % 7)[None].expand(len(ids), -1, -1)
        x = x.masked_fill(~mask[..., None], 0.0) if mask is not None else x
        y, h = self.layer(x * scale)
        h = h[0] if isinstance(h, tuple) else h
        y = y.reshape(len(ids) * ids.shape[1], 3).view(len(ids), -1, 3)
        for value in more:
            y = y + value["add"]
        return {"last": y[:, -1], "state": (h.squeeze(0), [ids.shape[1], None])} if flag else y


def answer(rows=3, *, add=1) -> Inputs:
    ids = torch.randint(0, 7, (rows, 3))
    more = [{"add": torch.randn(rows, 1, 3)} for _ in range(add)]
    return Inputs(ids, mask=ids > 1, scale=0.5, more=more)


def test_a_call_of_several_inputs_in_containers():
    torch.manual_seed(0)
    model = Answer().eval()
    described = describe(model, answer(2))
    (program,) = described[0]["programs"]
    assert [x["name"] for x in program["inputs"]] == ["x", "mask", "more_0_add"] and program["rows"] == 1
    for rows in (1, 5):
        inputs = answer(rows)
        got, expected = in_one_process(described, inputs), sectorch.secure(model, session=sectorch.Session())(inputs)
        assert torch.equal(got["last"], expected["last"]) and torch.equal(got["state"][0], expected["state"][0])
        assert got["state"][1] == [3, None] and list(got) == ["last", "state"]


def test_one_description_serves_several_calls_over_one_set_of_weights():
    torch.manual_seed(0)
    model = Answer(nn.RNN).eval()
    given = [answer(2), answer(2, add=0), Inputs(torch.randint(0, 7, (2, 4))), answer(4)]
    described = describe(model, given)
    assert len(described[0]["programs"]) == 3, "the last is the first with other rows"
    assert len(described[1]) == len(list(model.parameters()))
    for inputs in given:
        expected = sectorch.secure(model, session=sectorch.Session())(inputs)
        assert torch.equal(in_one_process(described, inputs)["last"], expected["last"])


def test_a_program_holds_for_other_rows_only_where_the_model_does_the_same():
    class Counts(nn.Module):
        def forward(self, x):
            return x * len(x) if self.scales else torch.cat([x, x.new_ones(len(x), 1)], 1)

        def __init__(self, scales):
            super().__init__()
            self.scales = scales

    counting, even = (load_program(*describe(Counts(scales).eval(), torch.zeros(3, 2))) for scales in (True, False))
    assert counting.calls[0].least == 0 and even.calls[0].least == 1
    with pytest.raises(ShapeError, match="save_model"):
        counting.find(Inputs(torch.zeros(2, 2)))


def test_public_arguments_are_part_of_the_program():
    class Masked(nn.Module):
        def forward(self, x, mask, flag=False):
            return torch.where(mask, x, 0.0) if flag else x

    mask = torch.tensor([True, False])
    described = describe(Masked().eval(), Inputs(torch.zeros(2, 2), mask=sectorch.public(mask), flag=True))
    x = torch.randn(2, 2)
    got = in_one_process(described, Inputs(x, mask=sectorch.public(mask), flag=True))
    assert (got[:, 1] == 0).all() and (got[:, 0] - x[:, 0]).abs().max() < 1e-5
    with pytest.raises(ShapeError):
        in_one_process(described, Inputs(x, mask=sectorch.public(~mask), flag=True))


def test_what_cannot_be_served_is_refused_as_secure_refuses_it():
    class Sums(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(UnsupportedOpError, match="bessel"):
        describe(Sums().eval(), torch.zeros(2, 2))
    with pytest.raises(ProgramError, match="random"):
        describe(Noisy().eval(), torch.zeros(2, 2))
    with pytest.raises(SecretAccessError, match="weights alone"):
        describe(Telling().eval(), torch.zeros(2, 2))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn(2)


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight, self.weight * 2


def test_what_the_owner_computes_by_other_functions_is_a_weight():
    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2) * 3 + 0.25)

        def forward(self, x):
            return x @ torch.linalg.matrix_exp(self.weight)

    torch.manual_seed(0)
    model, x = Exponential().eval(), torch.randn(3, 2)
    described = describe(model, x)
    assert described[0]["weights"][0]["name"].startswith("derived")
    assert torch.equal(in_one_process(described, Inputs(x)), sectorch.secure(model, session=sectorch.Session())(x))


def test_no_weight_is_in_a_description(small):
    description, weights = small
    text = to_json(description).decode()
    numbers = {f"{v:.6f}" for w in weights.values() for v in w.flatten().tolist()}
    assert not any(number in text for number in numbers) and not description["constants"]
    served = load_program(description)
    assert all(value.is_meta for value in served.values.values()) and len(served.values) == len(weights)


def test_only_listed_operations():
    names = ("torch.load", "torch.save", "eval", "builtins.eval", "__import__", "out of place torch.relu",
             "Tensor.add_", "Tensor.item", "Tensor.numpy", "torch.ops.load", "", None, 3, ["torch.relu"])  # fmt: skip
    for name in names:
        with pytest.raises(ProgramError, match="not in the list"):
            operation(name, operations())


@pytest.mark.parametrize("name", ["", "a b", "a=print(1), b", "lambda", "x\ny", "A", "a" * 99, "__class__", "é"])
def test_argument_names_cannot_carry_code(description, name):
    with pytest.raises(ProgramError, match="impossible name"):
        load_program(changed(description, ["programs", 0, "nodes", 0, "kwargs"], {name: 0}))


def changed(description: dict, path: list, value) -> dict:
    """With another value at a place, or what a function makes of the one that is there."""
    at = description = copy.deepcopy(description)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value(at[path[-1]]) if callable(value) else value
    return description


ARGS = ["programs", 0, "nodes", 0, "args"]
MALFORMED = {
    "version true": (["version"], True),
    "no program": (["programs"], []),
    "a program twice": (["programs"], lambda programs: programs * 2),
    "programs of no kind": (["programs"], "x"),
    "nodes of no kind": (["programs", 0, "nodes"], "x"),
    "a negative size": (["programs", 0, "inputs", 0, "shape"], [2, -1]),
    "an unknown dtype": (["programs", 0, "inputs", 0, "dtype"], "torch.float8"),
    "another name": (["programs", 0, "inputs", 0, "name"], "y"),
    "an input more": (["programs", 0, "inputs"], lambda inputs: inputs * 2),
    "no input": (["programs", 0, "inputs"], []),
    "rows below none": (["programs", 0, "rows"], -1),
    "rows of no kind": (["programs", 0, "rows"], True),
    "a call without inputs": (["programs", 0, "call"], {"tuple": [{"tuple": []}, {"dict": []}]}),
    "a call of no kind": (["programs", 0, "call"], 3),
    "an unknown operation": (["programs", 0, "nodes", 0, "name"], "builtins.exec"),
    "a later node": ([*ARGS, 0], {"node": 0}),
    "a node that is not there": ([*ARGS, 0], {"node": 10_000}),
    "an input that is not there": ([*ARGS, 0], {"input": 1}),
    "a weight that is not there": ([*ARGS, 0], {"weight": 10}),
    "a constant that is not there": ([*ARGS, 0], {"constant": 0}),
    "a negative reference": ([*ARGS, 0], {"weight": -1}),
    "a reference of no kind": ([*ARGS, 0], {"node": "x"}),
    "two references": ([*ARGS, 0], {"node": 0, "input": 0}),
    "rows that count nothing": ([*ARGS, 0], {"rows": 0}),
    "an attribute": ([*ARGS, 0], {"attribute": 1}),
    "arguments of no kind": (ARGS, None),
    "public values alone": (ARGS, []),
    "a slice of two": ([*ARGS, 0], {"slice": [1, 2]}),
    "a dictionary with a key twice": ([*ARGS, 0], {"dict": [["a", 1], ["a", 2]]}),
    "a device": ([*ARGS, 0], {"device": "cuda"}),
    "a result of no kind": (["programs", 0, "result"], {"rows": 2}),
    "a weight of no dtype": (["weights", 0, "dtype"], "torch.int64"),
    "a weight twice": (["weights"], lambda weights: [weights[0]] * 2),
    "a weight named like a constant": (["weights", 0, "name"], "constant constant 0"),
    "a statistic of no kind": (["weights", 0, "statistic"], 1),
    "constants of no kind": (["constants"], {}),
    "a constant cut": (["constants"], [{"shape": [2], "dtype": "torch.int64", "data": "AAAA"}]),
    "a constant of no text": (["constants"], [{"shape": [0], "dtype": "torch.int64", "data": "é"}]),
    "a constant of no truth": (["constants"], [{"shape": [1], "dtype": "torch.bool", "data": "Ag=="}]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_descriptions_are_refused(description, name):
    with pytest.raises(ProgramError):
        load_program(changed(description, *MALFORMED[name]))


@pytest.mark.parametrize("text", [{}, {"version": 3}], ids=["nothing", "version 3"])
def test_what_says_nothing_is_refused(text):
    with pytest.raises(ProgramError):
        load_program(text)


def test_version_1_is_refused_with_the_way_out():
    with pytest.raises(ProgramError, match="save the model again"):
        load_program({"version": 1, "row": [3], "dtype": "torch.float32", "nodes": []})


LEAF = st.none() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5) | st.lists(st.integers(0, 9))


@pytest.fixture(scope="module")
def answering() -> dict:
    return describe(Answer().eval(), answer(2))[0]


@given(st.data())
def test_mutated_descriptions_are_refused_or_load(answering, data):
    """Whatever replaces a part of a description, however deep: a ProgramError, or a graph of listed operations."""
    at = description = copy.deepcopy(answering)
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not (isinstance(at[key], (dict, list)) and at[key] and data.draw(st.integers(0, 4))):
            break
        at = at[key]
    kinds = st.sampled_from(["node", "input", "weight", "constant", "each", "count", "rows", "tuple", "dict", "slice"])
    at[key] = data.draw(LEAF | st.dictionaries(kinds, LEAF, max_size=2))
    with contextlib.suppress(ProgramError):
        load_program(description)


@given(st.binary(max_size=60))
def test_bytes_that_are_not_a_description(data):
    try:
        load_program(from_json(data))
    except ProgramError:
        return
    json.loads(data)
    pytest.fail("a random byte string loaded as a program")


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(3)], ids=str)
def test_a_model_in_training_mode_is_refused_where_it_is(layer):
    model, x = nn.Sequential(nn.Linear(3, 3), layer).train(), torch.randn(4, 3)
    with pytest.raises(TrainingModeError, match=r"call model\.eval\(\)"):
        describe(model, x)
    with pytest.raises(TrainingModeError, match=r"call model\.eval\(\)"):
        module_of(torch.export.export(model, (x,)))


def test_a_description_keeps_no_example_input():
    text = to_json(describe(MODEL, torch.full((5, 3), 0.123456))[0])
    assert b"0.123456" not in text
