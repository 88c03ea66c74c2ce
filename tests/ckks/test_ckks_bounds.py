"""A CKKS result is right within its stated error, or was refused: random programs over depths, sizes and bounds.

Each operation runs on ciphertexts, on plain float64, and on bounds that this file reckons by itself.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from cases import by_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch import ckks
from sectorch.ckks.linalg import rotate
from sectorch.ckks.scheme.ciphertext import capacity, encoding_error, fresh_error, rescaling_error, settle
from sectorch.errors import ArgumentError, SectorchError
from sectorch.tensor import Scheme

D = torch.float64


@functools.cache
def keys_of(depth: int, integer_bits: int = 8) -> ckks.Keys:
    return ckks.keygen(depth, integer_bits=integer_bits)


@dataclass
class Value:
    """A ciphertext tensor, what it should hold, and a bound on that, reckoned here."""

    secret: ckks.CKKSTensor
    plain: torch.Tensor
    bound: float


def encrypted(draw: random.Random, keys: ckks.Keys, width: int) -> Value:
    bound = 10.0 ** draw.uniform(-2, 2.5)
    plain = (torch.rand(5, width, dtype=D, generator=seeded(draw)) * 2 - 1) * bound
    plain[0, 0] = bound * draw.choice((1, -1))  # the worst case is in it
    return Value(ckks.encrypt(plain, keys.public, bound=bound), plain, bound)


def seeded(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randrange(1 << 40))


def numbers(draw: random.Random, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, dtype=D, generator=seeded(draw)) * 2 - 1) * 10.0 ** draw.uniform(-2, 1)


def step(draw: random.Random, values: list[Value]) -> tuple[str, Callable, Callable, float]:
    """An operation: its name, on ciphertexts, on plain, and the bound of its result."""
    a, b = draw.choice(values), draw.choice(values)
    name = draw.choice(("mul", "add", "sub", "square", "scale", "times", "times slots", "plus", "plus slots", "linear",
                        "sum", "mean", "cat", "neg", "mul", "square"))  # fmt: skip
    wide = a.plain.shape[1]
    if name in ("mul", "add", "sub") and b.plain.shape != a.plain.shape:
        b = a
    n = draw.choice((-3.0, 0.5, 0.1, 7.0, 1.0, 1e-3))
    w, row, slots = numbers(draw, 2, wide), numbers(draw, wide), numbers(draw, 5, wide)
    offset, most = numbers(draw, 2), lambda v: float(v.abs().max())
    both = lambda f: (lambda e: f(*e), lambda p: f(*p))
    found = {
        "mul": (lambda x, y: x * y, a.bound * b.bound), "add": (lambda x, y: x + y, a.bound + b.bound),
        "sub": (lambda x, y: x - y, a.bound + b.bound), "square": (lambda x, y: x.square(), a.bound**2),
        "scale": (lambda x, y: x * n, a.bound * abs(n)), "times": (lambda x, y: x * row, a.bound * most(row)),
        "times slots": (lambda x, y: x * slots, a.bound * most(slots)),
        "plus": (lambda x, y: x + row, a.bound + most(row)),
        "plus slots": (lambda x, y: slots - x, a.bound + most(slots)),
        "linear": (lambda x, y: F.linear(x, w, offset), a.bound * float(w.abs().sum(1).max()) + most(offset)),
        "sum": (lambda x, y: x.sum(1, keepdim=True), a.bound * wide),
        "mean": (lambda x, y: x.mean(1, keepdim=True), a.bound),
        "cat": (lambda x, y: torch.cat([x, y], 1), max(a.bound, b.bound)), "neg": (lambda x, y: -x, a.bound),
    }[name]  # fmt: skip
    on_secret, on_plain = both(found[0])
    return name, lambda: on_secret((a.secret, b.secret)), lambda: on_plain((a.plain, b.plain)), found[1]


def room_of(f: Callable, values: list[Value]) -> float:
    """What the place in the chain holds at which the result would lie: the operation on shapes, of tiny values."""
    kept = [v.secret.cipher for v in values]
    for v in values:
        data = torch.empty(v.secret.cipher.data.shape, device="meta")
        v.secret.cipher = replace(v.secret.cipher, data=data, largest=1e-300, error=0.0)
    try:
        c = f().cipher
    except ckks.ScaleError:  # of what is added, alone
        return 0.0
    else:
        return capacity(c.keys.parameters, c.levels_left) * abs(c.factor)
    finally:
        for v, cipher in zip(values, kept, strict=True):
            v.secret.cipher = cipher


def checked(value: Value, keys: ckks.Keys, said: str) -> None:
    result, stated = value.secret.decrypt(keys.secret), value.secret.error_bound
    error = float((result - value.plain).abs().max())
    # Beside it the plain computation's own rounding, in float64, of numbers up to the bound.
    assert error <= stated + 1e-12 * value.secret.bound, f"{said}: error {error:.3g}, stated {stated:.3g}"
    assert float(value.plain.abs().max()) <= value.secret.bound * (1 + 1e-12), f"{said}: beyond its bound"


def right_or_refused(seed: int, depth: int, integer_bits: int) -> str:
    draw, keys = random.Random(seed), keys_of(depth, integer_bits)
    width = draw.choice((1, 2, 3))
    values, said = [encrypted(draw, keys, width) for _ in range(2)], "encrypt"
    outcome = "right"
    for _ in range(draw.randrange(1, 9)):
        name, on_secret, on_plain, bound = step(draw, values)
        said += f", {name}"
        try:
            result = on_secret()
        except ckks.ScaleError:
            # As reckoned here, in the units that the room has: no refusal below a quarter of it.
            assert bound >= room_of(on_secret, values) / 4, f"{said}: refused for {bound:.3g}"
            outcome = "refused"
            break
        except ckks.LevelError:
            outcome = "too deep"
            break
        values.append(Value(result, on_plain(), bound))
    for value in values[2:]:
        checked(value, keys, said)
    return outcome


PROGRAMS = st.integers(0, 1 << 40), st.integers(1, 5), st.sampled_from((8, 10, 12))


@settings(max_examples=60)
@given(*PROGRAMS)
def test_a_program_is_right_within_its_stated_error_or_refused(seed: int, depth: int, integer_bits: int):
    right_or_refused(seed, depth, integer_bits)


@pytest.mark.sectorch_long
def test_two_thousand_programs_are_right_or_refused():
    draw = random.Random(20)
    kinds = [
        right_or_refused(draw.randrange(1 << 40), draw.randint(1, 5), draw.choice((8, 10, 12))) for _ in range(2000)
    ]
    assert min(kinds.count(kind) for kind in ("right", "refused", "too deep")) > 50, "the programs try one thing only"


@settings(max_examples=25)
@given(st.floats(0.5, 100), st.integers(1, 3), st.integers(2, 4), st.integers(0, 1 << 30))
def test_what_the_last_level_cannot_hold_is_refused_and_the_rest_is_right(
    bound: float, depth: int, power: int, seed: int
):
    """(a * a) * (a * a) and the like at the end of the chain."""
    keys = keys_of(depth)
    plain = (torch.rand(4, 1, dtype=D, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * bound
    plain[0] = bound
    a = ckks.encrypt(plain, keys.public, bound=bound)
    expected, room = plain, capacity(keys.parameters, 0)
    try:
        for _ in range(depth):
            a, expected = a * a, expected * expected
    except ckks.ScaleError as error:
        assert "would wrap" in str(error)
        assert bound ** (2**depth) >= room / 4
        return
    assert bound ** (2**depth) < room
    assert float((a.decrypt(keys.secret) - expected).abs().max()) <= a.error_bound + 1e-12 * a.bound


@settings(max_examples=20)
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=7), st.floats(0.1, 4), st.integers(0, 1 << 30))
def test_polynomials_are_right_or_refused(coefficients: list[float], bound: float, seed: int):
    if not any(coefficients[1:]):
        return
    keys = keys_of(4)
    x = (torch.rand(6, 2, dtype=D, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * bound
    try:
        y = ckks.polynomial(ckks.encrypt(x, keys.public, bound=bound), coefficients)
    except (ckks.ScaleError, ckks.LevelError):
        return
    expected = sum(c * x**k for k, c in enumerate(coefficients))
    assert float((y.decrypt(keys.secret) - expected).abs().max()) <= y.error_bound + 1e-12 * y.bound
    assert float(expected.abs().max()) <= y.bound * (1 + 1e-12)


@settings(max_examples=12)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.floats(0.2, 20), st.booleans(), st.booleans(),
       st.integers(0, 1 << 30))  # fmt: skip
def test_matrix_products_are_right_or_refused(d_out, d_in, m, bound, plain, reducing, seed):
    slots = keys_of(1).parameters.slots
    kind = ckks.MatrixReducing if reducing else ckks.MatrixSquaring
    product = kind(d_out, d_in, m, slots)
    keys = rotating(tuple(product.rotations()))
    generator = torch.Generator().manual_seed(seed)
    a, b = ((torch.rand(*s, dtype=D, generator=generator) * 2 - 1) * bound for s in ((d_out, d_in), (d_in, m)))
    right = product.prepare_right(b, None) if plain else product.prepare_right(b, keys.public, bound)
    try:
        c = product.multiply(product.prepare_left(a, keys.public, bound), right)
    except ckks.ScaleError:
        # Squaring adds up parts, some of which are zeros, and copies of the operands.
        assert product.d_in * product.tile[0] * bound**2 >= capacity(keys.parameters, 0) / 8
        return
    error = max(cipher.error_bound for cipher in c.blocks.values())
    assert float((c.decrypt(keys.secret) - a @ b).abs().max()) <= error + 1e-9


@functools.cache
def rotating(steps: tuple[int, ...]) -> ckks.Keys:
    return ckks.keygen(1, rotations=steps)


@settings(max_examples=10)
@given(st.floats(0.1, 60), st.floats(0.1, 4), st.integers(0, 1 << 30))
def test_conversions_keep_to_the_bound(bound: float, factor: float, seed: int):
    """To shares with masks as wide as the bound asks for, and back."""
    keys = keys_of(4)
    x = (torch.rand(3, 2, dtype=D, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * bound
    e = ckks.encrypt(x, keys.public, bound=bound) * factor
    scheme = Scheme(18 + seed % 4)
    shared = ckks.to_shares(e, keys.secret, scheme=scheme)
    converted = 2.4 * bound * factor * keys.parameters.scales[4] * 2.0 ** -(2 * scheme.frac_bits + 8)
    assert float((shared.reveal() - x * factor).abs().max()) <= e.error_bound + converted + 2.0**-17
    bits = max(1, math.ceil(math.log2(bound)))
    back = ckks.from_shares(sectorch.share(x, scheme=scheme), keys.public, value_bits=bits)
    assert back.bound == 2.0**bits
    assert float((back.decrypt(keys.secret) - x).abs().max()) <= back.error_bound
    with pytest.raises(ckks.ScaleError, match="value_bits"):
        ckks.to_shares(ckks.encrypt(x, keys.public, bound=1000.0), keys.secret, scheme=scheme, value_bits=7)


def test_each_step_errs_by_less_than_it_says_and_not_by_far_less():
    """A bound a hundred times too large would be no statement; each single one is within that of what is measured."""
    keys = keys_of(3)
    p, x = keys.parameters, torch.rand(keys.parameters.slots, 1, dtype=D) - 0.5
    e = ckks.encrypt(x, keys.public, bound=0.5)
    off = lambda tensor, value: float((tensor.decrypt(keys.secret) - value).abs().max())
    for tensor, value in ((e, x), (e * e, x * x), ((e * e) * e, x**3), (e * torch.rand(1, dtype=D), None)):
        stated = tensor.error_bound
        if value is not None:
            assert stated / 100 < off(tensor, value) <= stated
    assert fresh_error(p.degree, p.scales[3]) == e.error_bound
    assert rescaling_error(p.degree, p.scales[2]) < e.error_bound
    assert encoding_error(p.degree, 2.0**28) < 1e-5
    square = settle((e * e).cipher)
    assert square.error > 2 * 0.5 * e.error_bound
    turned = rotating((1,))
    x = x[: turned.parameters.slots]
    f = ckks.encrypt(x, turned.public, bound=0.5)
    moved = ckks.CKKSTensor(rotate(f.cipher, 1), f.batch, f.row_shape, D)
    assert f.error_bound < moved.error_bound < 30 * f.error_bound
    error = (moved.decrypt(turned.secret) - x.roll(-1, 0)).abs()
    assert moved.error_bound / 100 < float(error.max()) <= moved.error_bound


# What is declared, and who is told.


def test_a_bound_is_declared_and_checked_where_the_data_is(keys):
    x = torch.full((2, 1), 9.0)
    with pytest.raises(ckks.ScaleError, match="beyond 8"):
        ckks.encrypt(x, keys.public)
    assert ckks.encrypt(x, keys.public, bound=10).bound == 10
    assert ckks.encrypt(x / 9, keys.public).bound == 8.0, "the default tells nothing of the data"
    for bound in (0, -1.0, float("nan"), float("inf"), 1e300, "x"):
        with pytest.raises(ckks.ScaleError, match="a bound is positive"):
            ckks.encrypt(x, keys.public, bound=bound)
    e = ckks.encrypt(x, keys.public, bound=10)
    assert (e * 2).bounded(3.0).bound == pytest.approx(3.0)
    for bound in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="positive"):
            e.bounded(bound)


@settings(max_examples=10)
@given(st.floats(0.01, 5), st.integers(0, 1 << 30))
def test_an_answer_carries_nothing_of_the_weights(size: float, seed: int):
    """Its bound and error are the same for every model; so are those of a file of an evaluator's."""
    torch.manual_seed(seed)
    keys, x = keys_of(2), torch.rand(3, 4)
    seen = set()
    for _ in range(2):
        model = nn.Linear(4, 2).requires_grad_(False).eval()
        nn.init.uniform_(model.weight, -size, size)
        answer = ckks.rerandomise(model(ckks.encrypt(x, keys.public, bound=1.0)))
        c = answer.cipher
        seen.add((c.largest, c.error, c.factor, c.level, c.pending, c.declared))
        assert torch.allclose(answer.decrypt(keys.secret), model(x), atol=1e-3 * max(1.0, size))
    assert len(seen) == 1


def test_a_file_says_the_declared_bound_and_no_other(tmp_path, keys):
    e = ckks.encrypt(torch.ones(2, 3), keys.public, bound=2.5)
    e.save(tmp_path / "query")
    assert ckks.load(tmp_path / "query", keys.public).bound == 2.5
    y = F.linear(e, torch.full((1, 3), 0.77))
    y.save(tmp_path / "answer")
    loaded = ckks.load(tmp_path / "answer", keys.public)
    assert loaded.bound == pytest.approx(capacity(keys.parameters, 4) / 2)
    assert b"bound" not in (tmp_path / "answer").read_bytes()[:2000]
    with pytest.raises(ckks.ScaleError, match="would wrap"):
        loaded * loaded
    assert (loaded.bounded(6.0) * loaded.bounded(6.0)).bound == pytest.approx(36)


@settings(max_examples=10)
@given(st.floats(0.1, 300), st.integers(0, 1 << 30))
def test_a_module_is_right_or_refused_with_the_layer(size: float, seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval().requires_grad_(False)
    for layer in model:
        nn.init.uniform_(layer.weight, -size, size)
    x = torch.rand(4, 3) * 2 - 1
    try:
        y = sectorch.secure(model, backend="ckks", keys=keys_of(2))(x)
    except ckks.ScaleError as error:
        assert "layer '" in str(error)
        report = ckks.explain(model, x, keys_of(2))
        assert report.too_large and not report.supported
    else:
        stated = ckks.explain(model, x, keys_of(2)).steps[-1]
        assert stated.bound < stated.room
        assert float((y - model(x)).abs().max()) <= 2 * stated.error + 1e-6 * float(model(x).abs().max()) + 1e-3
    chosen = sectorch.secure(model, backend="ckks")  # keys made for the model hold it, where there are such
    report = chosen.explain(x)
    if report.supported:
        assert all(s.bound < s.room for s in report.steps)
        assert "bound" in str(report) and "room" in str(report)


# Operands of all types.

OPERANDS = {
    "int64": torch.arange(6).view(1, 6), "int64 row": torch.arange(6), "int32": torch.arange(6, dtype=torch.int32),
    "bool": torch.tensor([True, False] * 3), "float16": torch.arange(6).half(), "bfloat16": torch.arange(6).bfloat16(),
    "float32": torch.arange(6.0), "0-d": torch.tensor(3), "0-d float": torch.tensor(0.5), "int": 3, "float": 0.25,
    "True": True, "numpy": torch.arange(6.0).numpy(), "numpy int": torch.arange(6).numpy(),
    "numpy scalar": torch.ones(1).numpy()[0], "slots": torch.arange(12.0).view(2, 6),
    "int slots": torch.arange(12).view(2, 6), "complex": 1j, "complex tensor": torch.ones(6, dtype=torch.complex64),
    "wrong shape": torch.ones(5), "wrong batch": torch.ones(3, 6), "more dims": torch.ones(2, 2, 6), "None": None,
    "string": "x", "list": [1.0] * 6, "empty": torch.ones(0), "nan": float("nan"), "inf": torch.full((6,), torch.inf),
    "zero": 0, "zeros": torch.zeros(6),
}  # fmt: skip
OPERATIONS = {
    "add": lambda x, y: x + y, "radd": lambda x, y: y + x, "sub": lambda x, y: x - y, "rsub": lambda x, y: y - x,
    "mul": lambda x, y: x * y, "rmul": lambda x, y: y * x, "torch.add": torch.add, "torch.mul": torch.mul,
    "div": lambda x, y: x / y,
}  # fmt: skip


@by_turns(operation=OPERATIONS, operand=OPERANDS)
def test_every_kind_of_operand_is_right_or_refused_by_name(operation: str, operand: str, keys):
    plain, other, f = torch.linspace(-1, 1, 12).view(2, 6), OPERANDS[operand], OPERATIONS[operation]
    e = ckks.encrypt(plain, keys.public)
    try:
        named = other.float() if isinstance(other, torch.Tensor) and other.dtype == torch.bool else other
        expected = f(plain, float(other) if isinstance(other, bool) else named)
    except Exception:
        expected = None
    try:
        result = f(e, other)
    except (SectorchError, TypeError, ValueError) as error:
        assert isinstance(error, SectorchError) or expected is None or "numpy" in operand, f"raw {error!r}"
        assert "meta" not in str(error), "a message about devices"
        return
    assert expected is not None and expected.shape == result.shape, f"gave {result!r}, where torch gives {expected!r}"
    expected = torch.as_tensor(expected).double()
    assert float((result.decrypt(keys.secret).double() - expected).abs().max()) <= result.error_bound + 1e-5
