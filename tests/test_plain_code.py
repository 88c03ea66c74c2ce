"""What code that knows nothing of secret tensors asks of them: their type, sizes, copies, constants, distributions."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import by_turns
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import DtypeError, RangeExceededError, SectorchError, UnsupportedOpError
from sectorch.tensor import SharedTensor
from sectorch.tensor.compile_mode import as_plain

X = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.0, 1.5, -0.5, 0.0], [-2.0, 0.75, 1.25, 3.0]])
TWO = np.int32(2)


class Of(nn.Module):
    """`alone`: it runs operation by operation."""

    def __init__(self, body: Callable, alone: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body, self.alone = nn.Linear(4, 4), body, alone
        self.stride = torch.tensor(8.0)

    def forward(self, *given):
        if self.alone:
            torch.rand(1)
        return self.body(self, *given)


def agrees(body: Callable, *given: Any, alone: bool = False) -> None:
    """Secure, reference and plain result are the same."""
    model = Of(body, alone).eval()
    with torch.no_grad():
        wanted = pytree.tree_leaves(model(*(x.value if isinstance(x, Public) else x for x in given)))
    given = tuple(sectorch.public(x.value) if isinstance(x, Public) else x for x in given)
    found = pytree.tree_leaves(sectorch.secure(model)(*given))
    for x, y in zip(found, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert torch.allclose(x.double(), y.double(), atol=1e-4), (x, y)
    if not alone:
        for x, y in zip(found, pytree.tree_leaves(sectorch.reference(model)(*given)), strict=True):
            assert torch.equal(x, y)


class Public:
    def __init__(self, value: torch.Tensor):
        self.value = value


def chosen(x: Any) -> Any:
    """A helper of another function than the forward."""
    return x * 2 if type(x) is torch.Tensor else x * 0


def made_of(kind: type) -> Any:
    class Made(kind):
        pass

    return Made


def kind_of(kind: type) -> bool:
    made = made_of(kind)
    return isinstance(made("Name", (), {}), made) and not issubclass(int, made)


TYPES: dict[str, Callable] = {
    "is": lambda m, x: m.layer(x) if type(x) is torch.Tensor else x * 0,
    "equal": lambda m, x: sum(m.layer(v) for v in ([x] if type(x) == torch.Tensor else x)),  # noqa: E721
    "in": lambda m, x: x * 2 if type(x) in (torch.Tensor, nn.Parameter) else x,
    "a table": lambda m, x: {torch.Tensor: x * 2}[type(x)],
    "by name": lambda m, x: x * 2 if type(x).__name__ == "Tensor" else x,
    "by class": lambda m, x: x * 2 if x.__class__ is torch.Tensor else x,
    "a helper": lambda m, x: chosen(x),
    "mapped": lambda m, x: x * 2 if list(map(type, [x])) == [torch.Tensor] else x,
    "a weight": lambda m, x: F.linear(x, m.layer.weight) if type(m.layer.weight) is nn.Parameter else x,
    "of a weight": lambda m, x: F.linear(x, m.layer.weight) if isinstance(m.layer.weight, nn.Parameter) else x,
    "made of a weight": lambda m, x: x * 2 if type(m.layer.weight.t()) is torch.Tensor else x,
    "not a list": lambda m, x: x * 2 if type(x) is not list and int is int and type(int) is type else x,
    "of a type": lambda m, x: x * 2 if type(type) is type and isinstance(type, type) else x,
    "a class of classes": lambda m, x: x * 2 if not isinstance(int, made_of(type)) and kind_of(type) else x,
    "how it lies": lambda m, x: x * 2 if not x.t().is_contiguous() and x.t().stride() == x.stride()[::-1] else x,
    "other uses": lambda m, x: x * len(type("Made", (), {}).__mro__) if isinstance(int, type) else x,
}


@by_turns(name=TYPES, alone=[False, True])
def test_the_type_of_a_secret_tensor_is_torchs_inside_a_model(name: str, alone: bool):
    agrees(TYPES[name], X, alone=alone)


def test_the_type_of_a_secret_tensor_elsewhere():
    before = dict(globals())
    x = sectorch.share(X)
    with as_plain():
        assert type(x) is torch.Tensor and x.__class__ is torch.Tensor and isinstance(x, SharedTensor)
    assert type(x) is SharedTensor and x.__class__ is SharedTensor
    assert dict(globals()).keys() == before.keys() and torch.distributions.Distribution._validate_args


def test_modules_that_are_imported_on_the_way_and_that_nobody_imports():
    code = "import torch\ndef asked(x):\n    return x * 2 if type(x) is torch.Tensor else x * 0\n"
    loose: dict[str, Any] = {"__name__": "loose", "torch": torch, "nn": nn}
    exec(
        "class Loose(nn.Module):\n    def forward(self, x):\n        return x * 2 if type(x) is torch.Tensor else x",
        loose,
    )
    model = loose["Loose"]().eval()
    assert torch.equal(sectorch.secure(model)(X), X * 2)

    def late(_module, x):
        import late_module_of_a_test  # pyright: ignore[reportMissingImports]

        return late_module_of_a_test.asked(x)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "late_module_of_a_test":
                from importlib.machinery import ModuleSpec

                return ModuleSpec(name, self)  # pyright: ignore[reportArgumentType]
            return None

        def create_module(self, spec):
            return types.ModuleType(spec.name)

        def exec_module(self, module):
            exec(code, module.__dict__)

    finder: Any = Finder()
    sys.meta_path.append(finder)
    try:
        agrees(late, X)
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("late_module_of_a_test", None)


def test_a_module_that_takes_the_place_of_another_is_looked_through(monkeypatch: pytest.MonkeyPatch):
    secret = sectorch.share(X)
    for _ in range(3):
        module = types.ModuleType("replaced_module_of_a_test")
        exec("def kind(x):\n    return type(x)", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for _ in range(2):
            with as_plain():
                assert module.kind(secret) is torch.Tensor
            assert "type" not in vars(module)
            assert module.kind(secret) is sectorch.SharedTensor
        del module


def test_threads_leave_nothing_behind():
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(5):
                with as_plain():
                    assert type(sectorch.share(X)) is torch.Tensor
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and "type" not in globals() and SharedTensor.passes_as is None


NUMPYS: dict[str, Callable] = {
    "conv1d": lambda m, x: F.conv1d(x[None], torch.ones(2, 3, 2), padding=TWO, dilation=TWO),
    "max_pool1d": lambda m, x: F.max_pool1d(x, TWO), "avg_pool1d": lambda m, x: F.avg_pool1d(x, TWO),
    "reshape": lambda m, x: x.reshape(np.int64(-1), TWO), "sum": lambda m, x: x[None].sum(TWO),
    "pad": lambda m, x: F.pad(x, (TWO, TWO)), "index": lambda m, x: x[..., TWO], "slice": lambda m, x: x[..., :TWO],
    "times": lambda m, x: x * np.float32(0.5), "argmax": lambda m, x: x.argmax(np.int64(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_numpys_numbers_are_sizes(name: str):
    agrees(NUMPYS[name], X)


MAKERS: dict[str, Callable] = {
    "new_tensor of an array": lambda m, x: x + x.new_tensor(np.array([0.0, 5.0, 9.0, 1.0])),
    "new_tensor of a list": lambda m, x: x + x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "new_tensor of secrets": lambda m, x: x.new_tensor(x[0]) + x.new_tensor([1, 2, 3, 4], dtype=torch.float32),
    "new_full of a tensor": lambda m, x: x * x.new_full((3, 1), m.stride),
    "full of a tensor": lambda m, x: x * torch.full((3, 1), m.stride),
    "full_like of a secret": lambda m, x: torch.full_like(x, x[0, 0]), "new": lambda m, x: x + x.new(3, 4).fill_(1),
    "new of a size": lambda m, x: x.new(x.size()).zero_() + x, "new of data": lambda m, x: x.new([1.0]) + x,
    "tensor": lambda m, x: torch.tensor(x) + torch.as_tensor(x),
    "tensor of a list": lambda m, x: torch.tensor([x[0, 0], 1]),
    "as_tensor of another type": lambda m, x: torch.as_tensor(x, dtype=torch.float64),
    "data": lambda m, x: x.data + F.linear(x, m.layer.weight.data), "typed": lambda m, x: x.type(torch.DoubleTensor),
    "typed by name": lambda m, x: x.type("torch.LongTensor"),
    "its type": lambda m, x: x * 2 if x.type().startswith("torch.") else x,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_constants_and_copies_made_by_way_of_a_secret(name: str):
    agrees(MAKERS[name], X)


def scattered(how: Callable) -> Callable:
    return lambda m, x, e: x.new_zeros(3, 4).scatter_add_(0, how(e.view(-1, 1), x), x)


PUBLIC: dict[str, Callable] = {
    "expand_as": scattered(lambda i, x: i.expand_as(x)), "view_as": scattered(lambda i, x: i.expand(3, 4).view_as(x)),
    "reshape_as": scattered(lambda i, x: i.expand(3, 4).reshape_as(x)),
    "broadcast_tensors": lambda m, x, e: x.gather(0, torch.broadcast_tensors(e[:, None], x)[0]),
    "softmax of a graph": lambda m, x, e: (
        x - x.new_zeros(3, 4).index_reduce_(0, e, x, "amax", include_self=False)[e]
    ),
    "mean of a graph": lambda m, x, e: torch.zeros(3, 4).scatter_reduce(0, e[:, None].expand_as(x), x, "mean",
                                                                        include_self=False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning", "ignore:scatter_reduce:UserWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_index_beside_a_secret_stays_public(name: str):
    agrees(PUBLIC[name], X, Public(torch.tensor([0, 2, 0])))


MIXED: dict[str, Callable] = {
    "broadcast_tensors": lambda m, x: torch.broadcast_tensors((x > 0).long()[:1], x, x > 1),
    "atleast_2d": lambda m, x: torch.atleast_2d(x[0] > 0, x), "atleast_3d": lambda m, x: torch.atleast_3d(x, x.long()),
    "2 ** i": lambda m, x: 2 ** (x > 0).long(), "cumprod": lambda m, x: x.long().cumprod(1, dtype=torch.float32),
    "prod": lambda m, x: x.long().prod(dtype=torch.float32), "x << 2": lambda m, x: x.long() << 2,
    "== None": lambda m, x: x * 2 if not x == None and x != None else x,  # noqa: E711, SIM201
    "== text": lambda m, x: x if x == "mean" else x * 2, "in a tuple": lambda m, x: x * 2 if x not in (None, "") else x,
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_types_that_meet(name: str):
    agrees(MIXED[name], X)


CODES: dict[str, Callable] = {
    "long": lambda c: c.long(), "floor": lambda c: c.floor().long(), "round": lambda c: c.round().int(),
    "to": lambda c: c.to(torch.int64), "short": lambda c: c.short().long(), "char": lambda c: c.char().long(),
    "byte": lambda c: (c > 1).byte().long(), "type_as": lambda c: c.type_as(torch.tensor(0)),
}  # fmt: skip


@by_turns(name=CODES, network=["lan", "wan"])
def test_secret_floats_are_indices(name: str, network: str):
    model = Of(lambda m, x: F.embedding(CODES[name](x[:, 0]), m.layer.weight)).eval()
    x = torch.tensor([[3.0, 0.5], [0.0, 2.0], [1.0, -1.0]])
    found = sectorch.secure(model, scheme=sectorch.Scheme(network=network))(x)
    assert torch.allclose(found, model(x), atol=1e-5)


def test_whole_numbers_that_a_type_does_not_hold():
    """torch would give another number."""
    x = torch.tensor([-1.0, 3.0, 127.9, 255.0])
    s = sectorch.share(x)
    assert s[1:3].char().reveal().tolist() == [3, 127] and s[1:].byte().reveal().tolist() == [3, 127, 255]
    for run in (lambda: s.byte(), lambda: s.char(), lambda: (s * 1000).short()):
        with pytest.raises(RangeExceededError):
            run().reveal()
    assert torch.equal(sectorch.share(x - 0.5).long().reveal(), (x - 0.5).long())


D = torch.distributions
LAWS: dict[str, Callable] = {
    "Normal": lambda m, x: D.Normal(m.layer(x), 1.0).log_prob(x),
    "Categorical": lambda m, x: D.Categorical(logits=x).probs,
    "Bernoulli": lambda m, x: D.Bernoulli(logits=x).log_prob((x > 0).float()),
    "secret scale": lambda m, x: D.Normal(x, 1 + x**2).log_prob(x), "kl": lambda m, x: D.kl_divergence(
        D.Normal(x, 1.0), D.Normal(0.0, torch.ones(3, 4))
    ),
}  # fmt: skip


@by_turns(name=LAWS, alone=[False, True])
def test_distributions_validate_nothing_inside_a_model(name: str, alone: bool):
    agrees(LAWS[name], X, alone=alone)


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.__dict__["base"] = nn.Linear(4, 2).to("meta")

    def forward(self, x):
        weights, buffers = stack_module_state(self.members)
        member = lambda w, b, x: functional_call(self.base, (w, b), (x,))
        return torch.vmap(member, in_dims=(0, 0, None))(weights, buffers, x).mean(0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_vmap_inside_a_model():
    model = Ensemble().eval()
    assert torch.allclose(sectorch.secure(model)(X), model(X), atol=1e-5)
    for body in (
        lambda m, x: torch.vmap(m.layer)(x), lambda m, x: torch.vmap(torch.vmap(torch.sigmoid))(x),
        lambda m, x: torch.vmap(lambda r: (r * 2, m.layer(r).sum()), out_dims=(1, 0))(x),
        lambda m, x: torch.vmap(lambda i: (x * i).sum())(torch.arange(3.0)),
    ):  # fmt: skip
        agrees(body, X)
    for body, way in (
        (lambda m, x: torch.vmap(m.layer)(x.repeat(30, 1)), "call the function on the whole batch"),
        (lambda m, x: torch.func.grad(lambda v: m.layer(v).sum())(x), "torch's functions on the tensor itself"),
        (lambda m, x: torch.func.jvp(m.layer, (x,), (x,))[0], "trains on shares"),
    ):
        with pytest.raises(UnsupportedOpError, match=way):
            sectorch.secure(Of(body).eval())(X)


MORE: dict[str, Callable] = {
    "fill_diagonal_": lambda m, x: (x @ x.mT).fill_diagonal_(0), "matrix_power": lambda m, x: torch.matrix_power(
        x[:2, :2] + 3 * torch.eye(2), -1),
    "bincount": lambda m, x: torch.bincount((x > 0).long().flatten(), minlength=2),
    "weights of bincount": lambda m, x: torch.bincount((x > 0).long().flatten(), x.flatten(), 3),
    "public bincount": lambda m, x: torch.bincount(torch.tensor([0, 3, 3, 1]), x[0]),
    "histc": lambda m, x: torch.histc(x, 4, -2, 2), "lp_pool1d": lambda m, x: F.lp_pool1d(x, 2.0, 2),
    "lp_pool2d": lambda m, x: F.lp_pool2d(x[None], 2.0, (3, 2), 1), "lp_pool3d": lambda m, x: F.lp_pool3d(
        x.abs()[None, None], 3.0, (1, 3, 2)),
    "one exponent in a tensor": lambda m, x: (x ** torch.full((2, 1, 1), 3), x.abs() ** torch.tensor(2.0)),
    "max_unpool2d": lambda m, x: F.max_unpool2d(*F.max_pool2d(x[None, None], 2, return_indices=True), 2,
                                                output_size=(3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_what_is_made_of_other_operations(name: str):
    agrees(MORE[name], X)


@pytest.mark.parametrize(
    ("body", "way"),
    [
        (lambda m, x: torch.ops.higher_order.cond(x.sum() > 0, torch.neg, torch.abs, (x,)), "torch.where"),
        (lambda m, x: (torch._assert((x > -9).all(), "m"), x)[1], "leave it out"),
        (lambda m, x: torch.histc(x), "name both"),
        (lambda m, x: torch.bincount(x.long().flatten()), "name minlength"),
        (lambda m, x: x.long() << x.long(), "table of powers"),
        (lambda m, x: x.type("torch.cuda.FloatTensor"), "use .to"),
    ],
)
def test_refusals_name_the_way_out(body: Callable, way: str):
    with pytest.raises(SectorchError, match=way) as raised:
        sectorch.secure(Of(body).eval())(X)
    said = str(raised.value)
    assert __file__ in said and not any(word in said for word in ("aten", "prims", "StandIn"))


def test_a_comparison_with_what_is_no_tensor_is_pythons():
    s = sectorch.share(X)
    assert (s == None) is False and (s != None) is True and (s == "x") is False  # noqa: E711
    with pytest.raises((TypeError, DtypeError)):
        s < None  # noqa: B015
