"""Operations against plain torch, within derived bounds; what is not supported fails closed and changes nothing."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sectorch import ckks
from sectorch.errors import DtypeError, NonFiniteError, SecretAccessError, SectorchError, ShapeError, UnsupportedOpError

DOUBLE = torch.float64


def fresh(p: ckks.Parameters) -> float:
    """8 sigma of a fresh encryption's error in a slot: SEAL's rounding, and an error of deviation 3.2 with the
    key's use.
    """
    n = p.degree
    return 8 * math.sqrt(n * ((1 + 2 * n / 3) / 12 + 3.2**2)) / 2.0**p.scale_bits


def rounding(p: ckks.Parameters) -> float:
    """8 sigma of what one rescale adds in a slot; twice it covers a relinearisation before it as well."""
    n = p.degree
    return 8 * math.sqrt(n * (1 + 2 * n / 3) / 12) / 2.0**p.scale_bits


def product(p: ckks.Parameters, a: float, ea: float, b: float, eb: float) -> float:
    """The bound of a product of values up to a and b with errors ea and eb, rescaled."""
    return a * eb + b * ea + ea * eb + 2 * rounding(p) + a * b * 2.0**-20


def close(e: ckks.CKKSTensor, expected: torch.Tensor, keys: ckks.Keys, bound: float) -> None:
    got = e.decrypt(keys.secret)
    assert got.shape == expected.shape
    error = float((got.to(DOUBLE) - expected.to(DOUBLE)).abs().max())
    assert error <= bound, f"error {error:.2e} above the bound {bound:.2e}"


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 2)),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    public=st.booleans(),
)
@settings(max_examples=20)
def test_round_trip(keys, shape, magnitude, public):
    x = magnitude * torch.randn(shape, dtype=DOUBLE).clamp(-4, 4)
    e = ckks.encrypt(x, keys.public if public else keys, bound=120.0)
    assert e.shape == x.shape and e.dtype == x.dtype
    close(e, x, keys, fresh(keys.parameters) + float(x.abs().max()) * 2.0**-40)


@given(magnitude=st.sampled_from([0.1, 1.0, 5.0]), number=st.floats(-3, 3), seed=st.integers(0, 1000))
@settings(max_examples=12)
def test_sums_and_products(keys, magnitude, number, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (magnitude * torch.randn(6, 2, generator=generator, dtype=DOUBLE) for _ in range(2))
    a, b = ckks.encrypt(x, keys, bound=30), ckks.encrypt(y, keys, bound=30)
    p, e = keys.parameters, fresh(keys.parameters)
    top = float(max(x.abs().max(), y.abs().max()))
    close(a + b, x + y, keys, 2 * e)
    close(a - b, x - y, keys, 2 * e)
    close(number - a, number - x, keys, 2 * e)
    close(a * number, x * number, keys, (1 + abs(number)) * e)
    close(a / 4 + 1, x / 4 + 1, keys, 2 * e)
    close(-a, -x, keys, e)
    once = product(p, top, e, top, e)
    close(a * b, x * y, keys, once)
    close(a.square(), x * x, keys, once)
    close(a * b + a, x * y + x, keys, once + 3 * e + 4 * rounding(p))
    close((a * b) * a, x * y * x, keys, product(p, top * top, once, top, e + 2 * rounding(p)))
    close(a + y, x + y, keys, 2 * e)
    close(a * y, x * y, keys, product(p, top, e, top, e))
    close(a * y[0], x * y[0], keys, product(p, top, e, top, e))
    close(ckks.inner(a, b), (x * y).sum(-1), keys, 2 * once)


@given(
    coefficients=st.lists(st.floats(-1, 1).map(lambda c: round(c, 3)), min_size=2, max_size=16),
    factor=st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=12)
def test_polynomials(keys, coefficients, factor):
    from sectorch.ckks.scheme.ciphertext import depth

    if all(c == 0 for c in coefficients[1:]):
        coefficients = [*coefficients, 0.25]
    x = torch.linspace(-1, 1, 9, dtype=DOUBLE).view(9, 1)
    y = ckks.polynomial(ckks.encrypt(x, keys, bound=1) * factor, coefficients)
    degree = max(k for k, c in enumerate(coefficients) if c)
    assert depth(coefficients) <= math.ceil(math.log2(degree + 1)) if degree > 1 else depth(coefficients) == 0
    assert keys.parameters.depth - y.levels_left <= depth(coefficients)
    z = factor * x
    expected = sum(c * z**k for k, c in enumerate(coefficients))
    # |z| <= 1: each of at most 2 log2 + degree products adds 2 e + 2 roundings, times sum |c| <= 16 at most.
    bound = (1 + sum(map(abs, coefficients))) * (degree + 2) * 4 * (fresh(keys.parameters) + rounding(keys.parameters))
    close(y, expected, keys, bound)


@pytest.mark.parametrize("degree, levels", [(2, 1), (3, 2), (4, 3), (7, 3), (8, 4), (15, 4)])
def test_polynomial_depth(degree, levels):
    from sectorch.ckks.scheme.ciphertext import depth

    assert depth([0.5] * degree + [1.0]) == levels
    assert depth([0.0] * degree + [1.0]) == math.ceil(math.log2(degree)) or degree not in (2, 4, 8)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear on rows": (lambda: nn.Linear(3, 4), (2, 3)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 4)),
    "conv2d same": (lambda: nn.Conv2d(1, 2, 3, padding="same"), (1, 3, 3)),
    "conv2d dilated": (lambda: nn.Conv2d(1, 2, 2, dilation=2, bias=False), (1, 4, 4)),
    "conv2d groups": (lambda: nn.Conv2d(4, 4, 2, groups=2), (4, 3, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 5)),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), (2, 4, 4)),
    "avg_pool2d padded": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 4, 4)),
    "avg_pool1d": (lambda: nn.AvgPool1d(2), (2, 4)),
    "adaptive": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 3)),
    "adaptive uneven": (lambda: nn.AdaptiveAvgPool2d((2, 2)), (1, 3, 3)),
    "batch_norm": (lambda: nn.BatchNorm2d(2), (2, 2, 2)),
    "flatten": (nn.Flatten, (2, 2, 2)),
    "dropout": (nn.Dropout, (3,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(keys, name):
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = build().double().eval()
    if isinstance(layer, nn.BatchNorm2d):
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    x = torch.randn(5, *shape, dtype=DOUBLE)
    with torch.no_grad():
        y = layer(ckks.encrypt(x, keys))
        # Row sums of weights and averaging factors are below 8 here, weights are rounded to 2^-28 of their scale.
        close(y, layer(x), keys, 8 * fresh(keys.parameters) + rounding(keys.parameters))
        close(y.smallest_form(), layer(x), keys, 8 * fresh(keys.parameters) + 2 * rounding(keys.parameters))


MOVES = {
    "reshape": lambda v: v.reshape(3, 12),
    "view": lambda v: v.view(3, -1, 2),
    "flatten": lambda v: torch.flatten(v, 1),
    "permute": lambda v: v.permute(0, 3, 1, 2),
    "transpose": lambda v: v.transpose(1, 2),
    "index": lambda v: v[:, 1, ::2],
    "ellipsis": lambda v: v[..., 0],
    "unsqueeze": lambda v: v.unsqueeze(1).squeeze(1),
    "stack": lambda v: torch.stack([v, v + 1], 1),
    "cat": lambda v: torch.cat([v, v * v], 2),
    "split": lambda v: v.split(1, 1)[1],
    "expand": lambda v: v[:, :1].expand(3, 4, 3, 2),
    "flip": lambda v: torch.flip(v, [1]),
    "index_select": lambda v: v.index_select(1, torch.tensor([1, 0, 1])),
    "sum": lambda v: v.sum((1, 2)),
    "mean": lambda v: v.mean(-1, keepdim=True),
    "broadcast": lambda v: v[:, :, :1] + v,
}


@pytest.mark.parametrize("name", MOVES)
def test_structure(keys, name):
    x = torch.randn(3, 2, 3, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    close(MOVES[name](ckks.encrypt(x, keys)), MOVES[name](x), keys, 40 * fresh(keys.parameters))


REFUSED = {
    "relu": lambda e: torch.relu(e),
    "max_pool": lambda e: F.max_pool2d(e, 2),
    "batch slice": lambda e: e[:2],
    "batch index": lambda e: e[0],
    "batch flip": lambda e: torch.flip(e, [0]),
    "batch roll": lambda e: e.roll(2, 0),
    "batch roll with rows": lambda e: torch.roll(e, (2, 1), (-3, 1)),
    "roll of all": lambda e: e.roll(8),
    "batch permute": lambda e: e.transpose(0, 1),
    "batch sum": lambda e: e.sum(),
    "reshape over the batch": lambda e: e.reshape(-1, 2),
    "division": lambda e: 1 / e,
    "fractional power": lambda e: e**0.5,
    "in place": lambda e: e.add_(1),
    "softmax": lambda e: torch.softmax(e, 1),
    "comparison": lambda e: e > 0,
}
SECRETS = {
    "numpy": lambda e: e.numpy(),
    "item": lambda e: e[:, :1].item(),
    "tolist": lambda e: e.tolist(),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "equal": lambda e: torch.equal(e, e),
    "float": float,
    "bool": bool,
    "format": lambda e: f"{e:.3f}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported(keys, name):
    e = ckks.encrypt(torch.ones(4, 2, 2), keys)
    before = e.cipher.data.clone()
    with pytest.raises((UnsupportedOpError, TypeError)):
        REFUSED[name](e)
    assert torch.equal(e.cipher.data, before)


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_stay(keys, name):
    with pytest.raises(SecretAccessError):
        SECRETS[name](ckks.encrypt(torch.ones(4, 2, 2), keys))


def test_repr_shows_nothing(keys):
    e = ckks.encrypt(torch.ones(2, 1), keys)
    assert repr(e) == "CKKSTensor(shape=(2, 1), dtype=torch.float32, levels_left=5)"
    assert repr(keys.secret).startswith("SecretKey(") and len(repr(keys.secret)) < 25
    with pytest.raises(SecretAccessError):
        pickle.dumps(keys.secret)


def test_the_layer_is_named_where_the_chain_runs_out(small):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).eval()
    with pytest.raises(ckks.LevelError, match=r"layer '2' \(Linear\).*larger depth"):
        model(ckks.encrypt(torch.ones(2, 2), small))


def test_bad_inputs(keys, small):
    with pytest.raises(ckks.SlotError, match="does not fit"):
        ckks.encrypt(torch.ones(5000, 1), keys)
    with pytest.raises(NonFiniteError):
        ckks.encrypt(torch.tensor([[math.inf]]), keys)
    with pytest.raises(DtypeError):
        ckks.encrypt(torch.ones(2, 2, dtype=torch.int64), keys)
    with pytest.raises(ckks.ScaleError):
        ckks.encrypt(torch.full((2, 1), 1e5), keys)
    with pytest.raises(ShapeError):
        ckks.encrypt(torch.tensor(1.0), keys)
    with pytest.raises(ckks.KeyMismatchError):
        ckks.encrypt(torch.ones(2, 1), keys) + ckks.encrypt(torch.ones(2, 1), small)
    with pytest.raises(ckks.KeyMismatchError):
        ckks.encrypt(torch.ones(2, 1), keys).decrypt(small.secret)
    with pytest.raises(ckks.SlotError):
        ckks.encrypt(torch.ones(2, 1), keys) + ckks.encrypt(torch.ones(1, 1), keys)
    with pytest.raises(ckks.ScaleError):
        F.linear(ckks.encrypt(torch.ones(2, 1), keys), torch.full((1, 1), 1e30))


def test_memory_is_asked_for_first(keys):
    with ckks.memory_limit(1 << 20), pytest.raises(ckks.MemoryBudgetError, match="GiB"):
        ckks.encrypt(torch.ones(2, 100), keys)


def test_every_error_is_of_the_family():
    assert all(issubclass(getattr(ckks, n), SectorchError) for n in dir(ckks) if n.endswith("Error"))


def test_one_name_for_one_operation():
    """A torch function has the same canonical name in the tables of shares and of ciphertexts."""
    from sectorch.ckks.tensor.ckks_tensor import CIPHERTEXTS
    from sectorch.tensor.table import SHARES

    names = {f: row.name for f, row in CIPHERTEXTS.row_of.items()}
    assert {n for f, n in names.items() if f in SHARES.row_of and SHARES.row_of[f].name != n} == set()


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.sum(-1, dtype=torch.int64), lambda e: e.to(torch.int32), lambda e: e.to(torch.bool),
        lambda e: e.mean(-1, dtype=torch.float16), lambda e: e.to(torch.complex64),
    ],
)  # fmt: skip
def test_a_result_of_another_dtype_is_refused(small, call):
    with pytest.raises(SectorchError, match="float32 or float64"):
        call(ckks.encrypt(torch.ones(2, 3), small.public))
