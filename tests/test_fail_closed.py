"""Nothing but `.reveal()` gives a value: every other way out of a secret tensor raises, and shows nothing.

An error that is not a SectorchError counts as a failure too: it says that a call got further than the table.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import logging
import operator
import pickle
import pprint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_stage import stage

import sectorch
from sectorch.errors import SecretAccessError, SectorchError, UnsupportedOpError
from sectorch.tensor import PrivateTensor, SecretTensor, SharedTensor

VALUES = torch.tensor([[1.5, -2.25, 3.0], [0.125, 7.5, -0.5]])
pytestmark = [  # torch and numpy warn of other things before they ask for the content
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def assign(x: torch.Tensor, name: str, value) -> None:
    setattr(x, name, value)


def branch(x: torch.Tensor) -> bool:
    return True if x else False  # noqa: SIM210


def loop(x: torch.Tensor) -> None:
    while x > 0:
        break


SCALAR = {
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "index": operator.index,
    "if": branch,
    "if comparison": lambda x: branch(x > 0),
    "while": loop,
    "not": lambda x: not x,
    "and": lambda x: x and 1,
    "range": lambda x: range(x),
    "list index": lambda x: [1, 2, 3][x],
    "min of two": lambda x: min(x, x + 1),
    "sorted": lambda x: sorted([x, x + 1]),
    "string times": lambda x: "a" * x,
    "format": lambda x: f"{x}",
    "format spec": lambda x: f"{x:.3f}",
    "percent format": lambda x: "%f" % x,  # noqa: UP031
    "is_nonzero": torch.is_nonzero,
    "shape from a secret": lambda x: torch.zeros(x),
    "fill value": lambda x: torch.full((2,), x),
    "slice bound": lambda x: torch.arange(4)[:x],
    "scalar_tensor": lambda x: torch.scalar_tensor(x),
}
TENSOR = {
    "numpy": lambda x: x.numpy(),
    "numpy force": lambda x: x.numpy(force=True),
    "tolist": lambda x: x.tolist(),
    "np.asarray": np.asarray,
    "np.array": np.array,
    "np.add": lambda x: np.add(x, 1),
    "np.sum": np.sum,
    "np.stack": lambda x: np.stack([x, x]),
    "numpy operand": lambda x: x + np.ones((2, 3)),
    "torch.tensor": torch.tensor,
    "torch.tensor of a list": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "torch.asarray": lambda x: torch.asarray(x, copy=True),
    "new_tensor": lambda x: x.new_tensor(x),
    "plain new_tensor": lambda x: torch.zeros(1).new_tensor(x),
    "Tensor constructor": lambda x: torch.Tensor(x),
    "FloatTensor": lambda x: torch.FloatTensor(x),
    "data": lambda x: x.data,
    "set data": lambda x: assign(x, "data", torch.zeros(2, 3)),
    "storage": lambda x: x.storage(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "data_ptr": lambda x: x.data_ptr(),
    "from_dlpack": torch.from_dlpack,
    "__dlpack__": lambda x: x.__dlpack__(),
    "bytes": lambda x: bytes(x),
    "contains": lambda x: 1.5 in x,
    "in a list": lambda x: x in [x + 1, x],
    "torch.equal": lambda x: torch.equal(x, x),
    "equal to plain": lambda x: torch.equal(VALUES, x),
    "allclose": lambda x: torch.allclose(x, VALUES),
    "nonzero": torch.nonzero,
    "argwhere": torch.argwhere,
    "count_nonzero": lambda x: bool(torch.count_nonzero(x)),
    "unique": torch.unique,
    "one-armed where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "mask index": lambda x: x[x > 0],
    "secret index": lambda x: torch.arange(10)[sectorch.share(torch.tensor([1, 2]), session=x.session)],
    "secret row index": lambda x: x[sectorch.share(torch.tensor([1]), session=x.session)],
    "write with a secret index": lambda x: operator.setitem(torch.zeros(2, 3), x > 0, 1.0),
    "write into a secret": lambda x: operator.setitem(x, 0, 1.0),
    "write a secret into plain": lambda x: operator.setitem(torch.zeros(2, 3), 0, x[0]),
    "plain add_": lambda x: torch.zeros(2, 3).add_(x),
    "plain mul_": lambda x: torch.ones(2, 3).mul_(x),
    "plain copy_": lambda x: torch.zeros(2, 3).copy_(x),
    "plain fill_": lambda x: torch.zeros(2, 3).fill_(x[0, 0]),
    "plain relu into out": lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
    "cat into out": lambda x: torch.cat([x, x], out=torch.zeros(4, 3)),
    "matmul into out": lambda x: torch.matmul(x, torch.ones(3, 2), out=torch.zeros(2, 2)),
    "set_": lambda x: torch.zeros(2, 3).set_(x),
    "plain masked_fill": lambda x: torch.zeros(2, 3).masked_fill(x > 0, 1.0),
    "plain masked_fill value": lambda x: torch.zeros(2, 3).masked_fill(torch.ones(2, 3) > 0, x[0, 0]),
    "plain index_select": lambda x: torch.index_select(VALUES, 0, sectorch.share(torch.tensor([0]), session=x.session)),
    "plain gather": lambda x: torch.gather(VALUES, 0, sectorch.share(torch.zeros(1, 3).long(), session=x.session)),
    "plain take": lambda x: torch.take(VALUES, sectorch.share(torch.tensor([0]), session=x.session)),
    "plain add_ into float64": lambda x: torch.zeros(2, 3, dtype=torch.float64).add_(x),
    "sum into float64 out": lambda x: torch.add(x.double(), 1, out=torch.zeros(2, 3, dtype=torch.float64)),
    "repeat_interleave by secret": lambda x: torch.repeat_interleave(
        VALUES, sectorch.share(torch.tensor([1, 2]), session=x.session), 0
    ),
    "bincount": lambda x: torch.bincount(sectorch.share(torch.tensor([1, 2]), session=x.session)),
    "bitcast": lambda x: x.view(torch.int32),
    "pickle": pickle.dumps,
    "old pickle": lambda x: pickle.dumps(x, protocol=2),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "torch.save in a dict": lambda x: torch.save({"x": x}, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy in a list": lambda x: copy.deepcopy([x]),
    "share_memory_": lambda x: x.share_memory_(),
    "to meta": lambda x: x.to("meta"),
    "to device": lambda x: x.to(torch.device("cuda", 0)),
    "cuda": lambda x: x.cuda(),
    "Parameter": torch.nn.Parameter,
    "requires_grad_": lambda x: x.requires_grad_(),
    "requires_grad =": lambda x: assign(x, "requires_grad", True),
    "backward": lambda x: x.sum().backward(),
    "autograd.grad": lambda x: torch.autograd.grad(x.sum(), x),
    "grad of plain": lambda x: (torch.ones(2, 3, requires_grad=True) * x).sum().backward(),
    "register_hook": lambda x: x.register_hook(print),
    "retain_grad": lambda x: x.retain_grad(),
    "unsupported function": torch.erfinv,
    "unsupported method": lambda x: x.lgamma(),
    "linalg": torch.linalg.svd,
    "fft": torch.fft.fft,
    "random": lambda x: torch.bernoulli(x),
    "dropout": F.dropout,
    "to_sparse": lambda x: x.to_sparse(),
    "complex view": lambda x: torch.view_as_real(x),
    "apply_": lambda x: x.apply_(abs),
    "map_": lambda x: x.map_(VALUES, max),
    "floor division": lambda x: x // 2,
    "remainder": lambda x: x % 2,
    "reflected remainder": lambda x: 2 % x,
    "shift": lambda x: x << 1,
    "secret ^": lambda x: x ^ x,
    "aten": lambda x: torch.ops.aten.lgamma.default(x),
    "aten relu": lambda x: torch.ops.aten._local_scalar_dense.default(x[0, 0]),
    "functorch": lambda x: torch.vmap(torch.lgamma)(x),
    "compiled away": lambda x: torch._C._nn.gelu_(x, approximate="nope"),
    "share again": lambda x: sectorch.share(x, session=x.session),
    "histc": lambda x: torch.histc(x),
    "quantize": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "numpy ufunc": lambda x: np.exp(x),
    "unpack": lambda x: dict(enumerate(x[0].tolist())),
}


def shared() -> SharedTensor:
    return stage().share(VALUES)


def private() -> PrivateTensor:
    return stage().private(VALUES)


def refuses(f, x: SecretTensor) -> None:
    with sectorch.profile() as profile, pytest.raises(SectorchError) as raised:
        f(x)
    for value in VALUES.flatten().tolist():
        assert str(value) not in str(raised.value), "the error shows a value"
    assert all(not line.shows for line in profile.ledger), "something was revealed"


FOREIGN = {
    "memoryview": memoryview,
    "np.frombuffer": np.frombuffer,
    "torch.from_numpy": torch.from_numpy,
    "json": json.dumps,
    "round": round,
    "assert_close": lambda x: torch.testing.assert_close(x, VALUES),
}
"""Ways that Python, numpy or torch close themselves, before they ask the tensor."""


@pytest.mark.parametrize("make", [shared, private])
@pytest.mark.parametrize("way", FOREIGN)
def test_ways_that_are_closed_anyway(way: str, make):
    with sectorch.profile() as profile, pytest.raises((TypeError, RuntimeError)) as raised:
        FOREIGN[way](make()[0, 0] if way == "round" else make())
    assert not profile.ledger
    if way != "assert_close":  # it prints the plain tensor that it was given
        assert not any(str(value) in str(raised.value) for value in VALUES.flatten().tolist())


@pytest.mark.parametrize("way", SCALAR)
def test_a_secret_number_is_no_python_number(way: str):
    refuses(SCALAR[way], shared()[0, 0])


@pytest.mark.parametrize("way", TENSOR)
def test_a_secret_tensor_does_not_leave(way: str):
    x = shared()
    refuses(TENSOR[way], x)
    assert torch.equal(x.reveal(), VALUES)


PRIVATE = ["numpy", "tolist", "np.asarray", "torch.tensor", "data", "storage", "data_ptr", "contains", "torch.equal",
           "nonzero", "unique", "one-armed where", "mask index", "pickle", "torch.save", "deepcopy", "copy", "plain add_",
           "plain copy_", "write into a secret", "write a secret into plain", "plain relu into out", "bytes",
           "requires_grad_", "share_memory_", "from_dlpack", "allclose", "Parameter"]  # fmt: skip


@pytest.mark.parametrize("way", PRIVATE)
def test_a_private_tensor_does_not_leave(way: str):
    refuses(TENSOR[way], private())


@pytest.mark.parametrize("way", SCALAR)
def test_a_private_number_is_no_python_number(way: str):
    refuses(SCALAR[way], private()[0, 0])


@pytest.mark.parametrize("make", [shared, private])
@pytest.mark.parametrize(
    "show", [repr, str, ascii, "{!r}".format, lambda x: f"{x!s}", lambda x: "%s" % x, pprint.pformat,  # noqa: UP031
             lambda x: repr([x]), lambda x: repr({"x": x}), lambda x: str((x, 1))],
)  # fmt: skip
def test_printing_shows_no_value(make, show):
    text = show(make())
    assert "shape=(2, 3)" in text
    shown = [value for value in VALUES.flatten().tolist() if str(value) in text]
    assert shown == []


def test_no_way_of_looking_shows_shares(caplog: pytest.LogCaptureFixture):
    """Nor does logging, a traceback's locals, or the repr of what a secret tensor holds."""
    x, w = shared(), private()
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%s and %r", x, w)
    text = caplog.text + repr(vars(x)) + repr(vars(w)) + repr(w.weight()) + repr(x.session)
    halves = [x.session.net(x.party).read(half, owner) for half, owner in
              ((x.shares.A, x.party), (x.shares.S, x.session.S))]  # fmt: skip
    for number in itertools.chain(*(h.flatten().tolist() for h in halves), VALUES.flatten().tolist()):
        assert str(number) not in text


def test_metadata_is_public():
    x, w = shared(), private()
    for secret in (x, w):
        assert secret.shape == (2, 3)
        assert (len(secret), secret.dim(), secret.ndim, secret.numel(), secret.size(0)) == (2, 2, 2, 6, 2)
        assert secret.dtype == torch.float32
        assert secret.device.type == "cpu"
        assert secret.is_floating_point()
        assert not secret.requires_grad
        assert secret.grad is None
        assert torch.is_tensor(secret)
        assert isinstance(hash(secret), int)


def test_iteration_gives_secret_rows():
    rows = list(shared())
    assert [type(row) for row in rows] == [SharedTensor, SharedTensor]
    assert torch.equal(torch.stack([row.reveal() for row in rows]), VALUES)
    first, second = shared()
    assert torch.equal((first + second).reveal(), VALUES.sum(0))
    assert len([type(row) for row in private()]) == 2


def test_a_length_or_a_dimension_that_is_not_there_raises_as_torch_does():
    with pytest.raises(TypeError, match="0-d"):
        len(shared()[0, 0])
    with pytest.raises(IndexError, match="Dimension out of range"):
        shared().size(5)


def test_refused_in_place_writes_leave_views_alone():
    x = shared()
    row = x[0]
    for write in (lambda: x.add_(1), lambda: row.mul_(2), lambda: F.relu(x, inplace=True), lambda: row.relu_()):
        with pytest.raises(UnsupportedOpError, match="view|out of place"):
            write()
    assert torch.equal(x.reveal(), VALUES)
    assert torch.equal(row.reveal(), VALUES[0])


ALIASES = {
    "+x": operator.pos,
    "positive": torch.positive,
    "to its own dtype": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "contiguous": lambda x: x.contiguous(),
    "cpu": lambda x: x.cpu(),
    "type_as": lambda x: x.type_as(x),
    "detach": lambda x: x.detach(),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "requires_grad_": lambda x: x.requires_grad_(False),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "expand": lambda x: x.expand(2, 3),
    "reshape": lambda x: x.reshape(3, 2),
    "flatten": lambda x: x.flatten(),
    "split": lambda x: x.split(1)[0],
    "T": lambda x: x.T,
}


WRITES = {"add_": lambda x: x.add_(1), "+=": lambda x: operator.iadd(x, 1), "relu": lambda x: F.relu(x, inplace=True)}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("written", ["the result", "the argument"])
def test_a_write_through_an_alias_is_seen_or_refused(alias: str, written: str, write: str):
    """Where torch gives the tensor itself, or a view, an in-place write must reach the other name, or be refused."""
    plain, secret = VALUES.clone(), shared()
    plain_alias, secret_alias = ALIASES[alias](plain), ALIASES[alias](secret)
    try:
        WRITES[write](secret_alias if written == "the result" else secret)
    except UnsupportedOpError:
        return
    WRITES[write](plain_alias if written == "the result" else plain)
    assert torch.equal(secret_alias.reveal(), plain_alias)
    assert torch.equal(secret.reveal(), plain)


def test_a_plain_tensor_is_not_written_by_an_operator():
    """`plain += secret` may make the name a secret tensor; the memory of the plain one stays."""
    for write in (operator.iadd, operator.imul, operator.isub, operator.itruediv):
        plain = torch.ones(2, 3)
        kept = plain
        with contextlib.suppress(SectorchError):
            assert isinstance(write(plain, shared()), SharedTensor)
        assert torch.equal(kept, torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_private_result_is_not_written_into_plain_memory(dtype: torch.dtype):
    w = stage().private(VALUES.to(dtype))
    for write in (torch.add, torch.mul, torch.maximum):
        out = torch.zeros(2, 3, dtype=dtype)
        with contextlib.suppress(SectorchError):
            write(w, torch.ones(2, 3, dtype=dtype), out=out)
        assert not out.any(), "A's weight was written into a public tensor"


def test_results_of_private_operations_are_not_mixed_up():
    """They are kept by function and arguments; arguments that differ in name, kind or identity alone must differ."""
    w, zero = private(), stage().share(torch.zeros(2, 3))

    def value(p):
        return (zero + p).reveal()

    assert torch.equal(value(w.clamp(max=0.5)), VALUES.clamp(max=0.5))
    assert torch.equal(value(w.clamp(min=0.5)), VALUES.clamp(min=0.5))
    assert torch.equal(value(torch.add(w, w, alpha=2)), 3 * VALUES)
    assert torch.equal(value(torch.sub(w, w, alpha=2)), -VALUES)
    for number in range(20):
        other = stage().private(torch.full((2, 3), float(number)))
        assert torch.equal(value(w + other), VALUES + number)
        del other


def test_nothing_secret_hides_in_a_plain_result():
    x = shared()
    for plain in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), x.new_zeros(2, 2)):
        assert type(plain) is torch.Tensor
        assert plain.unique().numel() == 1


def test_errors_name_the_way_out():
    with pytest.raises(SecretAccessError, match=r"\.reveal\(\)"):
        shared().numpy()
    with pytest.raises(UnsupportedOpError, match=r"torch\.lgamma\(SharedTensor\(2, 3\)\).*supported_ops\(\)"):
        torch.lgamma(shared())


def test_numpy_scalars_are_python_numbers():
    """np.float64 is a float and np.float32 is not: neither may be taken for a whole number."""
    for scalar in (np.float64(0.3), np.float32(0.3), np.float16(0.25), np.int64(3), np.int32(3), np.bool_(True)):
        x = shared()
        for result, expected in ((x * scalar, VALUES * scalar.item()), (x + scalar, VALUES + scalar.item())):
            assert torch.allclose(result.reveal(), expected, atol=1e-5)
        whole = sectorch.share(torch.tensor([1, 2]), session=x.session)
        assert torch.allclose((whole * scalar).reveal().float(), torch.tensor([1, 2]) * float(scalar), atol=1e-5)
        assert torch.allclose((whole + scalar).reveal().float(), torch.tensor([1, 2]) + float(scalar), atol=1e-5)
