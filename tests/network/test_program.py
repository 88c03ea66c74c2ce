"""Model descriptions: what comes back computes the same, and what is not of the closed list is refused."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sectorch.errors import ProgramError, TrainingModeError
from sectorch.nn.describe import describe, describe_exported, optimised_export, to_json
from sectorch.nn.models import ZOO
from sectorch.nn.program import from_json, load_program, operation

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval().requires_grad_(False)
DESCRIPTION, WEIGHTS = describe(MODEL, torch.randn(2, 3))


@pytest.mark.parametrize("name", ["lenet", "vgg7", "resnet8", "cryptonets", "mlp"])
def test_a_description_computes_the_same(name):
    construct, shape = ZOO[name]
    model, x = construct().eval().requires_grad_(False), torch.randn(3, *shape)
    description, weights = describe(model, x[:2])
    module = load_program(from_json(to_json(description)), weights).module
    # Folding BatchNorm in float32 changes the last bits.
    assert (module(x) - model(x)).abs().max() < 1e-4


def test_no_weight_is_in_a_description():
    text = to_json(DESCRIPTION).decode()
    numbers = {f"{v:.6f}" for w in WEIGHTS.values() for v in w.flatten().tolist()}
    assert not any(number in text for number in numbers)
    assert load_program(DESCRIPTION).module(torch.empty(2, 3, device="meta")).shape == (2, 2)


def test_only_listed_operations():
    for name in ("load.default", "save.default", "eval.default", "__import__.default", "size.eval", "system.default"):
        with pytest.raises(ProgramError, match="not in the list"):
            operation(name)


@pytest.mark.parametrize("name", ["", "a b", "a=print(1), b", "lambda", "x\ny", "A", "a" * 99, "__class__", "é"])
def test_argument_names_cannot_carry_code(name):
    with pytest.raises(ProgramError, match="impossible name"):
        load_program(changed(["nodes", CALL, "kwargs"], {name: 0}))


def changed(path: list, value) -> dict:
    description = copy.deepcopy(DESCRIPTION)
    at = description
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return description


CALL = next(i for i, node in enumerate(DESCRIPTION["nodes"]) if node["op"] == "call")


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"version": 2},
        changed(["nodes"], []),
        changed(["nodes"], "x"),
        changed(["row"], [-1]),
        changed(["dtype"], "torch.float8"),
        changed(["nodes", 0, "op"], "exec"),
        changed(["nodes", CALL, "name"], "exec.default"),
        changed(["nodes", CALL, "args", 0], {"ref": 10_000}),
        changed(["nodes", CALL, "args", 0], {"ref": CALL}),
        changed(["nodes", CALL, "args", 0], {"ref": "x", "and": 1}),
        changed(["nodes", CALL, "args"], None),
        changed(["nodes", -1], {"op": "input"}),
    ],
)
def test_malformed_descriptions_are_refused(description):
    with pytest.raises(ProgramError):
        load_program(description)


@given(st.data())
def test_mutated_descriptions_are_refused_or_load(data):
    """Whatever replaces a leaf of a description: a ProgramError, or a graph of listed operations."""
    description = copy.deepcopy(DESCRIPTION)
    node = data.draw(st.sampled_from(description["nodes"]))
    key = data.draw(st.sampled_from(sorted(node)))
    leaf = st.none() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5) | st.lists(st.integers(0, 9))
    node[key] = data.draw(leaf | st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=2))
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
    exported = torch.export.export(model, (x,))
    with pytest.raises(TrainingModeError, match=r"call model\.eval\(\)"):
        describe_exported(exported.module().graph, exported.module(), x)


def test_an_export_keeps_no_example_input():
    x = torch.randn(5, 3)
    exported = optimised_export(MODEL, x[:2])
    (kept,) = exported.example_inputs[0]
    assert kept.shape == (2, 3) and not kept.any() and kept.untyped_storage().nbytes() == 2 * 3 * 4
