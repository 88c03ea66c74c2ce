"""A secure module is called as the plain one: several tensors, containers, names, public tensors."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx.traceback as fx_traceback
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch import Inputs, public
from sectorch.choreography import Phase
from sectorch.errors import ArgumentError, DtypeError, NonFiniteError, SessionMismatchError
from sectorch.session import Session
from sectorch.tensor.compile_mode import as_if_compiling

DRAW = torch.Generator().manual_seed(3)
Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    logits: torch.Tensor
    parts: dict[str, Any]


class Takes(nn.Module):
    """Sums every tensor that it is given, each through the same layer, and gives them back in a container."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, *args: Any, scale: float = 1.0, mode: str = "sum", **kwargs: Any) -> Any:
        found = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        first = found[0].float().sum()  # nobody may learn what is made of weights and public tensors alone
        made = [self.layer(v.float()) * scale + first for v in found]
        total = torch.stack([v.sum() for v in made]).sum() if mode == "sum" else made[0].mean()
        return Result(total, {"made": made, "count": len(made), "mode": mode})


def plain(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.value if isinstance(v, sectorch.nn.inputs.Public) else v, value)


TENSORS = st.integers(0, 2).map(
    lambda kind: (
        torch.randn(2, 3, generator=DRAW)
        if kind == 0
        else torch.randint(-5, 5, (2, 3), generator=DRAW)
        if kind == 1
        else torch.randn(3, generator=DRAW) > 0
    )
)
LEAVES = TENSORS | TENSORS.map(public) | st.none() | st.integers(0, 3) | st.just("a word")
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
        | st.tuples(inner, inner).map(lambda p: Pair(*p))
        | inner.map(lambda v: OrderedDict(z=v))
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(TREES, max_size=2), st.dictionaries(st.sampled_from(("left", "right")), TREES, max_size=2))
def test_any_call(args: list, kwargs: dict):
    """Whatever containers the tensors come in: the plain module's result in the plain module's container."""
    model, x = Takes().eval(), torch.randn(2, 3, generator=DRAW)
    secured = sectorch.reference(model)
    got = secured(x, *args, scale=0.5, **kwargs)
    with torch.no_grad():
        expected = model(x, *plain(args), scale=0.5, **plain(kwargs))
    assert type(got) is Result and got.parts["count"] == expected.parts["count"] and got.parts["mode"] == "sum"
    assert (got.logits - expected.logits).abs() < 1e-3
    for a, b in zip(got.parts["made"], expected.parts["made"], strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-4


def test_three_parties_compute_the_reference():
    model = Takes().eval()
    x, y, z = torch.randn(2, 3), torch.arange(6).view(2, 3), torch.randn(1, 3)
    call = dict(left=[y, {"z": z}], right=public(torch.ones(3)), scale=2.0)
    got, expected = sectorch.secure(model)(x, **call), sectorch.reference(model)(x, **call)
    assert torch.equal(got.logits, expected.logits)
    assert all(map(torch.equal, got.parts["made"], expected.parts["made"]))


def test_what_is_public_is_not_shared_and_what_is_secret_is():
    """Each secret tensor is one message of Q's to S, of eight bytes an element; a public one is none."""
    model, x, y = Takes().eval(), torch.randn(2, 3), torch.randn(4, 3)
    secured = sectorch.secure(model, session=Session())
    for call, elements in (((x, y), 18), ((x, public(y)), 6), ((y, public(x)), 12)):
        with sectorch.profile() as seen:
            secured(*call)
        sent = [m for m in seen.ledger if m.src.role == "Q" and m.phase == Phase.ONLINE and m.round == 1]
        assert sum(m.bytes for m in sent) == 8 * elements, [(m.label, m.bytes) for m in sent]


def test_another_public_content_is_another_program():
    """It is a part of the program, as a shape is; the secret content is not."""
    model, x, y = Takes().eval(), torch.randn(2, 3), torch.randn(2, 3)
    secured = sectorch.secure(model)
    of = lambda *args, **kwargs: sectorch.program(secured, Inputs(*args, **kwargs)).digest
    assert of(x, y) == of(y, x) != of(x, public(y))
    assert of(x, public(y)) == of(y, public(y.clone())) != of(y, public(y + 1))
    assert of(x, mode="sum") != of(x, mode="mean")
    for value in (y, y + 1):
        assert (secured(x, public(value)).logits - model(x, value).logits).abs() < 1e-4


def test_forms_tell_apart_what_python_calls_equal():
    x = torch.zeros(2)
    forms = [Inputs(x, v).form for v in (1, True, 1.0, "1", None, -0.0, 0.0)]
    assert all((a == b) == (i == j) for i, a in enumerate(forms) for j, b in enumerate(forms))
    assert Inputs(x, a=1).form != Inputs(x, b=1).form and Inputs([x]).form != Inputs((x,)).form
    marks = [public(v) for v in (torch.zeros(2), torch.zeros(2).double(), torch.zeros(1, 2), torch.tensor([False] * 2))]
    assert all((a == b) == (i == j) for i, a in enumerate(marks) for j, b in enumerate(marks))
    assert public(torch.tensor([float("nan")])) == public(torch.tensor([float("nan")]))


def test_batches_of_several_tensors_are_cut_together():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a, b):
            return {"relu": torch.relu(self.layer(a) + b)}

    model, a, b = Sum().eval(), torch.randn(7, 3), torch.randn(7, 2)
    cut = sectorch.secure(model, chunk=3)
    assert [piece.rows for piece in cut.pieces(Inputs(a, b=b))] == [3, 3, 1]
    whole = sectorch.reference(model)(a, b=b)["relu"]
    assert torch.equal(cut(a, b=b)["relu"], whole) and (whole - model(a, b)["relu"]).abs().max() < 1e-4
    with pytest.raises(ArgumentError, match="rows of this model meet"):  # a public tensor is not cut
        cut(a, b=public(b))


def test_prepared_calls_of_several_inputs():
    model, x, y = Takes().eval(), torch.randn(2, 3), torch.randn(4, 3)
    secured = sectorch.secure(model, session=Session())
    assert secured.preprocess(Inputs(x, left=y)) > 0
    assert secured.prepared() == {(("x", (2, 3)), ("left", (4, 3))): 1}
    with sectorch.profile() as other:
        secured(x, left=x)
    assert other.offline_bytes > 0 and len(secured.prepared()) == 1, "another shape"
    with sectorch.profile() as seen:
        got = secured(x, left=y)
    assert seen.offline_bytes == 0 and secured.prepared() == {}
    assert torch.equal(got.logits, sectorch.reference(model)(x, left=y).logits)


def test_the_tools_take_the_same_call():
    model, x, y = Takes().eval(), torch.randn(2, 3), torch.randn(4, 3)
    call = Inputs(x, left={"y": y}, scale=0.5)
    assert call.names == ["x", "left_y"] and "left_y: [4, 3]" in repr(call)
    explained = sectorch.explain(model, call)
    secured, fresh = sectorch.secure(model, calibrate=call), sectorch.secure(model, session=Session())
    with sectorch.profile() as seen:
        fresh(call)
    assert explained.supported and (explained.bytes, explained.rounds) == (seen.bytes, seen.rounds)
    assert sectorch.diff(model, call).first is None
    assert secured.scheme.limit_bits is not None
    code = sectorch.program(model, call).party("Q").code
    assert "left_y" in code


class Attends(nn.Module):
    def forward(self, input_ids, attention_mask, /, scores, *others, Bias=None):
        total = input_ids * attention_mask + scores["first"] + sum(others)
        return total if Bias is None else total + Bias


def test_tensors_by_place_have_the_names_of_the_parameters():
    model, x = Attends().eval(), torch.randn(2, 3)
    args = x, x + 1, {"first": x + 2}, x + 3, x + 4
    names = ["input_ids", "attention_mask", "scores_first", "x3", "x4", "bias"]
    call = Inputs(*args, Bias=x + 5)
    secured = sectorch.secure(model, session=Session())
    assert secured.inputs_of(call).names == names
    assert secured.inputs_of(secured.inputs_of(call)).form == secured.inputs_of(call).form
    code = sectorch.program(model, call).party("Q").code
    assert all(f'"{name}"' in code or f"'{name}'" in code for name in names)
    assert secured.preprocess(call) > 0
    assert [name for name, _ in next(iter(secured.prepared()))] == names
    with sectorch.profile() as seen:
        found = secured(*args, Bias=x + 5)
    assert seen.offline_bytes == 0 and torch.equal(found, sectorch.reference(model)(call))
    assert secured.inputs_of(x).names == ["x"], "a single tensor alone"
    assert secured.inputs_of(Inputs(x, x, {"first": x})).names == ["input_ids"], "one tensor has one name"
    with pytest.raises(sectorch.errors.SectorchError, match="the input 'attention_mask'"):
        secured(x, torch.full((2, 3), torch.nan), {"first": x})
    assert sectorch.diff(model, call).first is None and sectorch.explain(model, call).supported


def test_shared_tensors_among_the_arguments():
    """Inputs of several owners come as shares; then so does the result."""
    session = Session()
    model, x, y = Takes().eval(), torch.randn(2, 3), torch.randn(2, 3)
    secured = sectorch.secure(model, session=session)
    got = secured(sectorch.share(x, session=session), y)
    assert isinstance(got.logits, sectorch.SharedTensor)
    assert (got.logits.reveal() - model(x, y).logits).abs() < 1e-4
    with pytest.raises(SessionMismatchError):
        secured(x, sectorch.share(y, session=Session()))


@pytest.mark.parametrize("alone", [False, True])
def test_a_module_that_runs_operation_by_operation_takes_any_call(alone: bool):
    model, x, y = Takes().eval(), torch.randn(2, 3), torch.randn(4, 3)
    secured = sectorch.secure(model, session=Session())
    if alone:
        secured.graphs._run_eagerly("a test asks for it")
    got = secured(x, left=[y], right=public(y))
    assert (got.logits - model(x, left=[y], right=y).logits).abs() < 1e-4


def test_bad_calls_are_refused_before_anything_is_sent():
    x = torch.randn(2, 3)
    model = nn.Linear(3, 2).eval()
    secured = sectorch.secure(model, session=Session())
    held = type("Held", (), {})()
    bad = [
        ((), {}, DtypeError, "at least one torch tensor that is secret, got no argument"),
        (([[1, 2]],), {}, DtypeError, "at least one torch tensor that is secret, got list"),
        ((public(x),), {}, DtypeError, "at least one torch tensor that is secret, got Public"),
        ((x, held), {}, DtypeError, "numbers, strings, and dicts, lists, tuples and dataclasses of them; got Held"),
        ((x, x), {}, TypeError, "takes 2 positional arguments but 3 were given"),
        ((), {"inputs": x}, TypeError, "unexpected keyword argument 'inputs'"),
        ((x * float("nan"),), {}, NonFiniteError, "NaN"),
        ((x.to("meta"),), {}, ArgumentError, "the input is on meta"),
    ]
    with sectorch.profile() as seen:
        for args, kwargs, error, text in bad:
            with pytest.raises(error, match=text):
                secured(*args, **kwargs)
    assert seen.bytes == 0
    with pytest.raises(ArgumentError, match="secret already"):
        public(sectorch.share(x))
    with pytest.raises(DtypeError, match="marks a tensor, got list"):
        public([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a public argument is on meta"):
        sectorch.secure(Takes().eval())(x, public(x.to("meta")))


def test_a_model_that_holds_a_graph():
    """What a forward outside torch.no_grad() left in it cannot be copied: one line says the way out."""
    model = nn.Linear(3, 2).eval()
    model.left = model(torch.randn(1, 3))  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"torch.no_grad\(\)"):
        sectorch.secure(model)


def test_code_is_told_that_it_is_compiled_while_it_runs_on_secrets():
    """In every thread that records, and not after the last of them; an error sets it back too."""
    told, started, ended = [], threading.Barrier(3), threading.Event()

    class Asks(nn.Module):
        def __init__(self, fails: bool):
            super().__init__()
            self.fails = fails

        def forward(self, x):
            told.append(torch.compiler.is_compiling())
            if self.fails:
                raise ValueError("as a forward may")
            return x + 1

    def work(i: int) -> None:
        with as_if_compiling():
            started.wait()
            if i:
                ended.wait()
            told.append(torch.compiler.is_compiling() and torch.compiler.is_exporting())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    threads[0].join()
    assert torch.compiler.is_compiling(), "two are still inside"
    fx_traceback.current_meta["custom"] = {"_torchdynamo_disable": "left by two that overlapped", "mine": 1}
    ended.set()
    for thread in threads:
        thread.join()
    assert told == [True] * 3 and not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    assert fx_traceback.current_meta["custom"] == {"mine": 1}, (
        "or torch makes and deletes it at each call, in all threads"
    )
    fx_traceback.current_meta["custom"] = {}
    told.clear()
    sectorch.secure(Asks(False).eval())(torch.ones(2))
    assert told[0] is True and not torch.compiler.is_compiling()
    with pytest.raises(ValueError, match="as a forward may"):
        sectorch.secure(Asks(True).eval())(torch.ones(2))
    assert not torch.compiler.is_compiling()


def test_a_model_of_one_batch_size():
    """Memory is reckoned for many rows, which such a model does not take."""

    class Fixed(nn.Module):
        def forward(self, x):
            return torch.relu(x).view(2, 3)

    class Says(nn.Module):
        def forward(self, x):
            if x.shape[0] != 3:
                raise ValueError("three rows")
            return torch.relu(x)

    class Unused(nn.Module):
        def forward(self, x):
            (x + 1).view(3, 2).t().reshape(6)
            return torch.relu(x)

    for model, x in ((Fixed(), torch.randn(2, 3)), (Says(), torch.randn(3, 2)), (Unused(), torch.randn(3, 2))):
        assert (sectorch.secure(model.eval())(x) - torch.relu(x)).abs().max() < 1e-5


def test_arguments_stay_the_callers():
    """A forward may write into what it is given, in its recording as well; and a mark keeps what it was put on."""

    class Writes(nn.Module):
        def forward(self, x, p):
            p.add_(1)
            return x.mul_(2) + p

    x, p = torch.randn(2, 3), torch.ones(3)
    given, mark = x.clone(), public(p)
    secured = sectorch.secure(Writes().eval())
    for _ in range(2):
        assert (secured(given, mark) - (2 * x + 2)).abs().max() < 1e-5
        assert torch.equal(given, x) and torch.equal(mark.value, torch.ones(3))
        p.add_(5)
    assert (secured(given, public(p)) - (2 * x + 12)).abs().max() < 1e-5


def test_an_input_with_a_gradient(recwarn):
    model, x = nn.Linear(3, 2).eval(), torch.randn(2, 3, requires_grad=True)
    assert (sectorch.secure(model)(x) - model(x)).abs().max() < 1e-4 and not recwarn.list


def test_one_tensor_given_twice_is_one_to_the_forward():
    """As in attention, which looks whether its query is its key; it is shared once."""

    class Same(nn.Module):
        def forward(self, a, b):
            return torch.relu(a) if a is b else a + b

    x = torch.randn(2, 3)
    secured = sectorch.secure(Same().eval(), session=Session())
    for y, expected in ((x, torch.relu(x)), (x.clone(), 2 * x), (x, torch.relu(x))):
        assert (secured(x, y) - expected).abs().max() < 1e-5
    assert Inputs(x, x).names == ["x"] and Inputs(x, x).form != Inputs(x).form


def test_a_forward_finds_public_tensors_as_the_form_says():
    """What is no part of the form (strides, gradients, a subclass) cannot decide what a forward does."""

    class Looks(nn.Module):
        def forward(self, x, p):
            return x * (2.0 if p.requires_grad or not p.is_contiguous() or type(p) is not torch.Tensor else 3.0)

    x = torch.randn(3, 3)
    secured = sectorch.secure(Looks().eval())
    for p in (x, x.t(), x.clone().requires_grad_(), nn.Parameter(x)):
        assert (secured(x, public(p)) - 3 * x).abs().max() < 1e-5
    with pytest.raises(DtypeError, match="to_dense"):
        public(x.to_sparse())


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, a, b=None, *, scale=1.0, parts=()):
        return self.linear(a if b is None else a + 2 * b) * scale + sum(p.sum() for p in parts)


@pytest.mark.parametrize("first", range(4))
def test_material_serves_the_same_values_by_place_and_by_name(first):
    model = Weighed().eval()
    a, b = torch.rand(8, 4), torch.rand(8, 4)
    calls = [((a, b), {}), ((a,), {"b": b}), ((), {"a": a, "b": b}), ((), {"b": b, "a": a})]
    secured = sectorch.secure(model)
    args, kwargs = calls[first]
    secured(*args, **kwargs)
    for args, kwargs in calls:
        secured.preprocess(sectorch.Inputs(*args, **kwargs))
        assert list(secured.prepared().values()) == [1]
        other = calls[(calls.index((args, kwargs)) + 1) % 4]
        with sectorch.profile() as p:
            y = secured(*other[0], **other[1])
        assert p.offline_bytes == 0 and not secured.prepared()
        assert (y - model(a, b)).abs().max() < 1e-4


def test_other_values_are_another_call():
    model = Weighed().eval()
    a, b = torch.rand(8, 4), torch.rand(8, 4)
    secured = sectorch.secure(model)
    for args, kwargs in (
        ((a, b), {}), ((b, a), {}), ((a,), {"b": a}), ((a,), {}), ((), {"a": a}), ((a, b), {"scale": 2.0}),
        ((a,), {"b": sectorch.public(b)}), ((), {"b": a, "a": sectorch.public(b)}), ((a,), {"parts": (b,)}),
        ((a,), {"parts": [b, a]}), ((a, b), {"scale": 1}),
    ):  # fmt: skip
        plain = [v.value if isinstance(v, type(sectorch.public(a))) else v for v in args]
        named = {n: v.value if isinstance(v, type(sectorch.public(a))) else v for n, v in kwargs.items()}
        assert (secured(*args, **kwargs) - model(*plain, **named)).abs().max() < 1e-4
    with pytest.raises(TypeError):
        secured(a, b, a)
