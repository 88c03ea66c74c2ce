"""What `secure(model)` makes of a module's weights: their dtypes, and results that are made of them alone."""

import collections
import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

import sectorch
from sectorch.errors import SecretAccessError, UnsupportedOpError

X = torch.linspace(-1, 1, 12).reshape(3, 4)
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Mixed(nn.Module):
    def __init__(self, body, head, asks):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4).to(body), nn.BatchNorm1d(4).to(body), nn.Linear(4, 2).to(head)
        self.types = None if asks else (body, head)

    def forward(self, x):
        first, second = self.types or (self.body.weight.dtype, self.head.weight.dtype)
        return self.head(torch.tanh(self.norm(self.body(x.to(first)))).to(second))


class Scaled(nn.Module):
    """As scikit-learn's scalers are: statistics in float64 before a float32 net."""

    def __init__(self):
        super().__init__()
        self.mean, self.net = nn.Buffer(torch.arange(4, dtype=DOUBLE)), nn.Linear(4, 2)

    def forward(self, x):
        return self.net((x - self.mean).float())


@pytest.mark.parametrize(
    ("body", "head", "asks"),
    [(HALF, SINGLE, False), (SINGLE, BFLOAT, True), (DOUBLE, SINGLE, False), (SINGLE, DOUBLE, True)],
)
def test_each_weight_passes_for_its_own_dtype(body, head, asks, tmp_path):
    torch.manual_seed(0)
    model = Mixed(body, head, asks).eval()
    right = model(X)
    came = sectorch.secure(model)(X)
    assert came.dtype == right.dtype == head
    # Half precision rounds each of plain torch's steps; fixed point does not.
    assert (came.double() - right.double()).abs().max() < (
        1e-5 if BFLOAT not in (body, head) and body != HALF else 2e-2
    )
    assert torch.equal(sectorch.reference(model)(X), came)
    sectorch.network.save_model(model, X, tmp_path / "m.safetensors")
    served = sectorch.nn.program.load_program(*_read(tmp_path / "m.safetensors"))
    assert {w.passes or served.dtype for w in served.weights} == {body, head}


def _read(path):
    from sectorch.nn.model_file import read_model

    return read_model(path)


def test_a_float64_statistic_before_a_float32_net():
    torch.manual_seed(0)
    model = Scaled().eval()
    came = sectorch.secure(model)(X)
    assert came.dtype == SINGLE
    assert (came - model(X)).abs().max() < 1e-5


class Clip(nn.Module):
    """As OpenCLIP's forward: features, and a number made of a weight alone."""

    def __init__(self, give):
        super().__init__()
        self.head, self.scale, self.give = nn.Linear(4, 2), nn.Parameter(torch.tensor(1.5)), give

    def forward(self, x):
        return self.give(self.head(x), self.scale.exp())


@dataclasses.dataclass
class Result:
    features: Any
    scale: Any


GIVES = {
    "tuple": lambda x, s: (x, s), "list": lambda x, s: [x, s], "dict": lambda x, s: {"x": x, "s": s},
    "ordered": lambda x, s: collections.OrderedDict(x=x, s=s), "deque": lambda x, s: collections.deque([x, s]),
    "dataclass": Result, "nested": lambda x, s: {"x": [x, {"s": (s,)}]}, "alone": lambda x, s: s,
}  # fmt: skip


@pytest.mark.parametrize("kind", GIVES)
def test_a_result_made_of_weights_alone_is_refused_with_its_line(kind):
    model = Clip(GIVES[kind]).eval()
    for secured in (sectorch.secure(model), sectorch.reference(model)):
        with pytest.raises(SecretAccessError, match=r"layer exp at .*test_module_weights.py:\d+: the result.* is made"):
            secured(X)
    with pytest.raises(SecretAccessError, match="weights alone"):
        sectorch.secure(model)(sectorch.share(X))
    (problem,) = sectorch.explain(model, X).problems
    assert "weights alone" in problem


def test_the_way_out_of_a_result_made_of_weights_works(tmp_path):
    class Features(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)[0]

    clip = Clip(GIVES["tuple"]).eval()
    with pytest.raises(SecretAccessError, match=r"return self.model\(x\)\[0\]"):
        sectorch.network.save_model(clip, X, tmp_path / "m.safetensors")
    model = Features(clip).eval()
    assert (sectorch.secure(model)(X) - model(X)).abs().max() < 1e-5
    sectorch.network.save_model(model, X, tmp_path / "m.safetensors")
    scale = clip.scale.exp().item()
    known = Clip(lambda x, s: (x, scale)).eval()
    assert sectorch.secure(known)(X)[1] == scale


class Box:
    def __init__(self, x):
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class OwnList(list):
    pass


HIDES = {
    "object": lambda x, s: Box(x), "namespace": lambda x, s: types.SimpleNamespace(x=x), "set": lambda x, s: {x},
    "slots": lambda x, s: Slotted(x), "own list": lambda x, s: OwnList([x]), "generator": lambda x, s: (v for v in [x]),
    "function": lambda x, s: lambda: x, "values": lambda x, s: {"x": x}.values(),
    "of weights": lambda x, s: [x, Box(s)],
    "proxy": lambda x, s: types.MappingProxyType({"x": x}), "partial": lambda x, s: functools.partial(torch.add, x),
}  # fmt: skip


@pytest.mark.parametrize("kind", HIDES)
def test_a_result_inside_what_is_not_opened_is_refused(kind):
    with pytest.raises(UnsupportedOpError, match="in which results are not revealed: let it give tensors, and dicts"):
        sectorch.secure(Clip(HIDES[kind]).eval())(X)
