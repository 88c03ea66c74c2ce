"""Arguments that nobody meant: torch's own answer, or an error of sectorch's that says why; nothing else.

The calls are those of `argument_fuzz`. What follows them are the classes that they found, each with variants drawn.
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import random
import textwrap
import types
import warnings

import argument_fuzz
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import some
from example_counts import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from op_stage import reference_stage, stage
from torch import nn
from torch.utils import _pytree as pytree
from torch_samples import module_db

import sectorch
from sectorch.choreography import Phase
from sectorch.errors import (
    ArgumentError,
    DimensionError,
    DtypeError,
    SectorchError,
    ShapeError,
    UnsupportedOpError,
)
from sectorch.network.parties.session import abort_reason
from sectorch.tensor import PrivateTensor, SharedTensor
from sectorch.tensor.table import DROPPED, SHARES, OpTable
from sectorch.training.operations import GRADIENTS

T = torch.Tensor
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def right_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    row, key = draw.choice(argument_fuzz.KEYS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of arguments that are deprecated
        args, kwargs = argument_fuzz.call_of(draw, row, key)
        kind, text = argument_fuzz.outcome(row, key, args, kwargs)
    assert kind != argument_fuzz.FOUND, f"{argument_fuzz.described(key, args, kwargs)}: {text}"


@fewer(150)
@given(st.integers(0, 1 << 40))
def test_a_call_with_changed_arguments_is_right_or_refused(seed: int):
    right_or_refused(seed)


@pytest.mark.sectorch_long
@settings(max_examples=30_000)
@given(st.integers(0, 1 << 40))
def test_many_calls_with_changed_arguments_are_right_or_refused(seed: int):
    right_or_refused(seed)


def test_the_fuzz_would_notice():
    """Its verdicts: a right answer, a wrong value, a wrong dtype, a wrong shape, and an error of Python's own."""
    row = next(row for row, key in argument_fuzz.KEYS if key is torch.add)
    x = argument_fuzz.Tensor(torch.ones(2, 3), "shared")
    told = lambda f: argument_fuzz._compared([f(torch.ones(2, 3))], [torch.ones(2, 3)], True, True)[0]
    assert argument_fuzz.outcome(row, torch.add, (x, x), {})[0] == argument_fuzz.RIGHT
    assert told(lambda v: v) == argument_fuzz.RIGHT
    for wrong in (lambda v: v + 0.01, lambda v: v.double(), lambda v: v[0]):
        assert told(wrong) == argument_fuzz.FOUND


@pytest.mark.parametrize("plain", [torch.tensor([0, 1, 2, 3]), torch.tensor([1.7, -2.0]), torch.tensor([True, False])])
@pytest.mark.parametrize("like", [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1).bool()])
@pytest.mark.parametrize("convert", [T.type_as, T.to])
def test_public_numbers_take_a_secret_tensors_dtype(plain, like, convert):
    """What is public stays public, and is torch's own."""
    result, expected = convert(plain, argument_fuzz.stage().place("shared", like)), convert(plain, like)
    assert type(result) is T
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("convert", [T.view_as, T.reshape_as, T.expand_as])
def test_public_numbers_take_a_secret_tensors_shape(convert):
    plain, like = torch.arange(4).reshape(2, 2), torch.zeros(2, 2) if convert is not T.view_as else torch.zeros(4)
    result = convert(plain, argument_fuzz.stage().place("shared", like))
    assert type(result) is T
    torch.testing.assert_close(result, convert(plain, like), rtol=0, atol=0)


# Keywords: all that a function has, by its signatures; and those that a handler, or torch itself, would drop.

FOUND_ONCE = [("interpolate", "antialias"), ("cosine_similarity", "eps"), ("istft", "return_complex"),
              ("normalize", "dim"), ("logical_and", "other"), ("group_norm", "cudnn_enabled")]  # fmt: skip
"""Keywords that were wrong, or refused in words of the inside, when all were swept first."""


def keywords(few: bool) -> list:
    every = [(row, key, name) for row, key in argument_fuzz.KEYS for name in argument_fuzz.keywords_of(key)]
    known = [next(case for case in every if (case[0].name, case[2]) == found) for found in FOUND_ONCE]
    return [*known, *every[7::20]] if few else every


def right_or_refused_by_name(cases: list) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = [text for case in cases for text in argument_fuzz.swept(*case, reference_stage())]
    assert not wrong, "\n".join(wrong)


def test_a_keyword_is_right_or_refused_by_name():
    right_or_refused_by_name(keywords(few=True))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("part", range(16))
def test_every_keyword_is_right_or_refused_by_name(part: int):
    right_or_refused_by_name(keywords(few=False)[part::16])


def test_the_sweep_would_notice():
    """An eps that is not looked at, a boundary case of which torch's own samples say nothing."""
    row = next(row for row, key in argument_fuzz.KEYS if key is F.cosine_similarity)
    assert len(argument_fuzz.sweep_of(row, F.cosine_similarity, "eps")) >= 2
    handler = SHARES.handler[F.cosine_similarity]
    SHARES.handler[F.cosine_similarity] = lambda context, a, b, dim=1, eps=0.0: handler(context, a, b, dim)
    try:
        assert argument_fuzz.swept(row, F.cosine_similarity, "eps", reference_stage())
    finally:
        SHARES.handler[F.cosine_similarity] = handler


UNREAD = {
    "dtype": "of the result, which dispatch gives it", "out": "refused by dispatch",
    "cudnn_enabled": "how torch computes it, not what", "non_blocking": "as above", "compute_mode": "as above",
    "memory_format": "as above", "_stacklevel": "of a warning", "half_to_float": "the dtype of the result",
    "sparse": "of a gradient", "sparse_grad": "as above", "scale_grad_by_freq": "as above", "momentum": "in training",
    "out_int32": "the dtype of the result", "assume_unique": "only makes it faster", "sorted": "sorted is allowed too",
    "equal_nan": "shares hold no NaN", "nan": "as above", "posinf": "nor infinities", "neginf": "as above",
    "_": "of torch's kernels", "check_errors": "how an error is said", "stride": "memory has no order here",
    "norm_type": "of max_norm, which is refused",
    ("embedding", "padding_idx"): "of a gradient",
    **{(f"{kind}_with_indices", "return_indices"): "they are returned"
       for kind in ("max_pool1d", "max_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d")},
    ("dropout", "inplace"): "nothing changes", ("poisson_nll_loss", "eps"): "of log_input=False, which is refused",
    ("softplus", "threshold"): "the slope is 1 there", ("logsigmoid", "buffer"): "of torch's kernel",
    ("convolution", "bias_sizes"): "the shapes say it", ("convolution", "output_padding"): "as above",
    ("nll_loss", "total"): "of torch's kernel", ("grid_sample", "mask"): "autograd asks for what it wants",
    ("batch_norm", "save_mean"): "of torch's kernel", ("layer_norm", "x"): "kept by the forward pass",
    ("layer_norm", "mean"): "as above", ("layer_norm", "bias"): "has no part in a gradient",
    ("group_norm", "c"): "the shapes say it", ("group_norm", "places"): "as above", ("group_norm", "mean"): "as above",
}  # fmt: skip
"""Parameters of handlers that their bodies need not name, and why."""


def test_a_handler_reads_each_of_its_parameters():
    found = []
    for table in (SHARES, GRADIENTS):
        for key, handler in table.handler.items():
            function, row = inspect.unwrap(handler), table.row_of[key].name
            if not isinstance(function, types.FunctionType):
                continue
            code = function.__code__
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            body = ast.parse(textwrap.dedent(inspect.getsource(function)))
            named = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
            found += [f"{row}: {function.__qualname__}: {name}" for name in code.co_varnames[1:count]
                      if name not in named and name not in UNREAD and (row, name) not in UNREAD]  # fmt: skip
    assert not found, "\n".join(dict.fromkeys(found))


def test_what_torch_itself_drops_is_refused():
    """torch's functions hand their arguments on by name; one that is left out reaches no handler."""
    dropped = {}
    for key in SHARES.handler:
        if not isinstance(inspect.unwrap(key), types.FunctionType) or not key.__module__.startswith("torch."):
            continue
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(key))).body
        given = [call for call in ast.walk(function) if isinstance(call, ast.Call)
                 and getattr(call.func, "id", "") == "handle_torch_function"]  # fmt: skip
        for call in given:
            parts = [*call.args[2:], *(k.value for k in call.keywords)]
            handed = {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}
            lost = [
                name for name in inspect.signature(key).parameters if name not in handed and key is not torch.einsum
            ]
            dropped |= {key: tuple(lost)} if lost else {}
    assert dropped == {key: (name,) for key, (name, _) in DROPPED.items()}
    weight, plain = torch.rand(3, 4), torch.randn(3, 4)
    trained = sectorch.shared(nn.Linear(4, 3), session=stage().session).weight
    for x in (stage().share(plain), stage().private(plain), trained):
        with pytest.raises(UnsupportedOpError, match="l1_loss with weight= is not supported"):
            F.l1_loss(x, x * 2, weight=weight)
        F.l1_loss(x, x * 2)


MODULES = {info.name: info for info in module_db}
MOST = 12
"""Samples of a module that are looked at."""


@pytest.mark.parametrize("name", some(MODULES, ["nn.HuberLoss", "nn.Softplus"]))
def test_a_modules_arguments_are_heeded(name: str, monkeypatch: pytest.MonkeyPatch):
    """torch's own samples of its modules, each with other arguments of the constructor: right, or refused.

    torch's fast path of encoders has zeros in padded places, and its ordinary one values: the latter is compared with.
    """
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    info, wrong = MODULES[name], []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = [s for s in info.module_inputs_func(info, "cpu", torch.float32, False, False) if s.forward_input]
        for sample in samples[:: max(1, len(samples) // MOST)]:
            made, given = sample.constructor_input, sample.forward_input
            torch.manual_seed(1)
            try:
                model = info.module_cls(*made.args, **made.kwargs).eval()
                wanted = pytree.tree_leaves(model(*given.args, **given.kwargs))
            except Exception:  # torch's own: what is there for errors, or for other devices
                continue
            if not all(bool((v.abs() < 4000).all()) for v in wanted if isinstance(v, torch.Tensor)):
                continue
            try:
                secured = sectorch.secure(model, session=reference_stage().session)
                found = pytree.tree_leaves(secured(*given.args, **given.kwargs))
            except SectorchError:
                continue
            for a, b in zip(found, wanted, strict=True):
                if isinstance(b, torch.Tensor) and (a.shape != b.shape or not torch.allclose(a, b, 2e-3, 2e-3)):
                    wrong.append(f"{name}{made.args} {made.kwargs}: {a.flatten()[:4]} for {b.flatten()[:4]}")
    assert not wrong, "\n".join(wrong)


@fewer(15)
@given(st.sampled_from(("bilinear", "bicubic")), st.integers(1, 9), st.integers(1, 12), st.sampled_from((None, True)),
       st.booleans())  # fmt: skip
def test_an_antialiased_resize_is_torchs(mode: str, height: int, width: int, corners: bool | None, by_scale: bool):
    plain = torch.randn(1, 2, 7, 6)
    how: dict = dict(scale_factor=(height / 6, width / 6)) if by_scale else dict(size=(height, width))
    how |= dict(mode=mode, align_corners=corners, antialias=True)
    if by_scale and min(7 * height // 6, 6 * width // 6) < 1:
        return
    found = F.interpolate(reference_stage().share(plain), **how).reveal()
    plain = plain.contiguous(memory_format=torch.channels_last)  # else torch's is wrong for results of width 1
    # Weights sum up to 1, and their magnitudes to less than 2 in each dimension: an ulp and a half each time.
    assert float((found - F.interpolate(plain, **how)).abs().max()) < 12 * 2.0**-20


def test_an_antialiased_resize_is_trained_through():
    plain = nn.ParameterDict({"image": torch.randn(1, 1, 6, 5) / 4})
    trained = sectorch.shared(copy.deepcopy(plain), session=reference_stage().session)
    for mode in ("bilinear", "bicubic"):
        for model in (plain, trained):
            model["image"].grad = None
            (F.interpolate(model["image"], size=(3, 7), mode=mode, antialias=True) ** 2).sum().backward()
        assert float((trained["image"].grad.reveal() - plain["image"].grad).abs().max()) < 1e-4


# A float/double mix: private tensors pass for the model's dtype and are computed on in float64.


class Positions(nn.Module):
    """Public constants of the model's dtype meet its weights, as positions do in xcit, edgenext and XLNet."""

    def __init__(self, form: str, width: int):
        super().__init__()
        self.form = form
        self.projection = nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width) * 0.3)

    def forward(self, x):
        n = x.shape[-1]
        places = torch.arange(n * n, dtype=torch.float32).reshape(n, n) / (n * n)
        w = self.weight
        return (
            x
            + {
                "conv": lambda: self.projection(places.expand(1, n, n, n))[0, 0],
                "linear": lambda: F.linear(places, w, w[0]),
                "addmm": lambda: torch.addmm(w[0], places, w),
                "einsum": lambda: torch.einsum("ij,jk->ik", places, w),
                "einsum of a list": lambda: torch.einsum("ij,jk->ik", [places, w]),
                "cat": lambda: torch.cat([places[:1], w[1:]]),
                "stack": lambda: torch.stack((places, w)).sum(0),
                "where": lambda: torch.where(places > 0.5, w, 0.0),
                "where with a tensor": lambda: torch.where(places > 0.5, w, places),
                "index_put": lambda: w.index_put((torch.tensor([0]),), places[0]),
                "lerp": lambda: torch.lerp(places, w, 0.25),
                "layer_norm": lambda: F.layer_norm(places, (n,), w[0], w[1]),
                "baddbmm": lambda: torch.baddbmm(w.expand(1, n, n), places.expand(1, n, n), w.expand(1, n, n))[0],
            }[self.form]()
        )


FORMS = ("conv", "linear", "addmm", "einsum", "einsum of a list", "cat", "stack", "where", "where with a tensor",
         "index_put", "lerp", "layer_norm", "baddbmm")  # fmt: skip


@fewer(20)
@given(st.sampled_from(FORMS), st.integers(2, 6), st.integers(0, 1 << 30))
def test_public_constants_meet_weights(form: str, width: int, seed: int):
    torch.manual_seed(seed)
    model, x = Positions(form, width).eval(), torch.randn(width, width)
    with torch.no_grad():
        expected = model(x)
    result = sectorch.secure(model, session=stage().session)(x)
    assert result.dtype == expected.dtype
    # The weight's own rounding and that of the sum: two units of 2^-20; float32 arithmetic of torch's: |y| 2^-20.
    assert bool(((result - expected).abs() <= 4 * 2.0**-20 + expected.abs() * 2.0**-20).all())


@fewer(15)
@given(st.sampled_from((F.embedding, torch.index_select)), st.integers(1, 9), st.integers(1, 50), st.booleans())
def test_an_error_at_the_owner_of_a_weight_is_typed_and_shows_no_entry(f, rows: int, beyond: int, negative: bool):
    """The index is the owner's as well, here: torch's own text would name it."""
    at = 10_007 * (rows + beyond)
    index = stage().private(torch.tensor([-at if negative else at]))
    table = stage().private(torch.ones(rows, 2))
    with pytest.raises(DimensionError) as raised:
        f(index, table) if f is F.embedding else f(table, 0, index)
    assert str(at) not in str(raised.value)
    assert "embedding" in str(raised.value) or "index_select" in str(raised.value)


@fewer(15)
@given(st.sampled_from((StopIteration, AssertionError, KeyError, ZeroDivisionError, RuntimeError, OverflowError,
                        StopAsyncIteration, LookupError, MemoryError, Exception)))  # fmt: skip
def test_whatever_a_handler_raises_is_typed_and_has_a_text(kind: type[Exception]):
    key, fresh = torch.erfinv, stage().share(torch.ones(2))

    @SHARES.implements("erfinv of this test", key)
    def handler(context, x):
        raise kind

    try:
        with pytest.raises(SectorchError, match=r"erfinv.*\S"):
            key(fresh)
    finally:
        SHARES._release(key)
    assert "erfinv of this test" not in SHARES.rows


# Operators, where Python takes a TypeError for "not by me" and says something else, or False.


@fewer(15)
@given(st.sampled_from((operator.add, operator.sub, operator.mul, operator.truediv, operator.eq, operator.ne)),
       st.sampled_from((1j, 2 + 0j, np.complex64(1j), torch.ones(3, dtype=torch.complex64))),
       st.booleans())  # fmt: skip
def test_complex_numbers_give_complex_tensors_or_are_refused_by_name(f, other, left: bool):
    plain = torch.ones(3)
    x, flipped = stage().share(plain), left and isinstance(other, (torch.Tensor, complex))
    if f in (operator.eq, operator.ne) or isinstance(other, np.complex64):  # torch casts numpy's to real, and warns
        with pytest.raises(SectorchError, match=r"(?i)complex"):
            f(other, x) if flipped else f(x, other)
        return
    found, wanted = (f(other, v) if flipped else f(v, other) for v in (x, plain))
    assert float((found.reveal() - wanted).abs().max()) < 2**-18


@fewer(15)
@given(st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.booleans())
def test_a_product_of_two_dtypes_says_so(mine: torch.dtype, theirs: torch.dtype, private: bool):
    x = stage().share(torch.ones(2, 3).to(mine))
    w = torch.ones(3, 2).to(theirs)
    w = stage().private(w) if private else w
    if mine == theirs:
        assert bool(((x @ w).reveal() == 3).all())
        return
    with pytest.raises(SectorchError, match="same dtype"):
        x @ w


# In-place writes that torch refuses, or that would leave a tensor half written.


@fewer(15)
@given(st.sampled_from((F.silu, F.mish, F.leaky_relu, F.elu, F.hardtanh, F.hardsigmoid)), st.integers(1, 5))
def test_a_refused_inplace_argument_changes_nothing(f, size: int):
    plain = torch.arange(-size, size)
    x = stage().share(plain)
    shares = x.shares
    try:
        f(x, inplace=True)
    except SectorchError:
        assert x.shares is shares
        assert torch.equal(x.reveal(), plain)


@fewer(15)
@given(st.sampled_from((T.add_, T.mul_, T.sub_, operator.iadd, operator.imul)), st.floats(0.1, 9), st.booleans())
def test_a_fraction_is_not_written_into_whole_numbers(f, value: float, tensor: bool):
    x, plain = stage().share(torch.tensor([1, 2, 3])), torch.tensor([1, 2, 3])
    other = torch.full((3,), value) if tensor else value
    with pytest.raises(RuntimeError, match="can't be cast"):
        f(plain.clone(), other)
    with pytest.raises(SectorchError, match=r"can't be cast|Promotion of int"):
        f(x, other)
    assert torch.equal(x.reveal(), plain)


@fewer(20)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.floats(-40, 40), st.floats(-40, 40),
       st.sampled_from(("both", "min", "max")))  # fmt: skip
def test_whole_numbers_are_clamped_to_fractions(values: list[int], low: float, high: float, which: str):
    low, high = round(low, 3), round(high, 3)
    named = {"both": dict(min=low, max=high), "min": dict(min=low), "max": dict(max=high)}[which]
    plain = torch.tensor(values)
    expected, result = plain.clamp(**named), stage().share(plain).clamp(**named).reveal()
    assert result.dtype == expected.dtype
    assert bool(((result - expected).abs() <= 2.0**-20 + expected.abs() * 2.0**-23).all())  # the bound's rounding


@pytest.mark.parametrize(("f", "x"), [
    (lambda x: x.expand(1 << 41), torch.ones(1)), (lambda x: F.adaptive_avg_pool1d(x, 1 << 40), torch.ones(1, 2, 3)),
    (lambda x: x.repeat(1 << 40), torch.ones(3)), (lambda x: F.pad(x, (1 << 41, 0)), torch.ones(3)),
])  # fmt: skip
def test_a_size_that_no_machine_holds_is_refused(f, x: torch.Tensor):
    with pytest.raises(ShapeError, match="entries"):
        f(stage().share(x))


@fewer(15)
@given(st.sampled_from((torch.gather, torch.take_along_dim)), st.integers(0, 2))
def test_shares_are_not_moved_by_a_private_index(f, at: int):
    """Only one of the halves' holders knows it; `index_select` is a product with its own one-hot matrix."""
    x, index = stage().share(torch.arange(3.0)), stage().private(torch.tensor([at]))
    assert torch.equal(torch.index_select(x, 0, index).reveal(), torch.tensor([float(at)]))
    with pytest.raises(UnsupportedOpError, match=r"secret index|private"):
        f(x, index, 0) if f is torch.take_along_dim else f(x, 0, index)
    with pytest.raises(UnsupportedOpError, match=r"secret index|private"):
        x[index]
    with pytest.raises(UnsupportedOpError, match="secret mask"):
        x.masked_fill(stage().private(torch.tensor([True, False, True])), 0.0)


# Indices out of range: Q looks at its own before anything of the look-up is sent.


class LookUp(nn.Module):
    def __init__(self, rows: int, moved: str):
        super().__init__()
        self.table, self.moved = nn.Embedding(rows, 2), moved

    def forward(self, ids):
        ids = {
            "": lambda: ids, "reshaped": lambda: ids.reshape(-1), "sliced": lambda: ids[..., 1:],
            "turned": lambda: ids.t(), "chunked": lambda: ids.chunk(2, -1)[1], "repeated": lambda: ids.repeat(2, 1),
            "flipped": lambda: ids.flip(0), "long": lambda: ids.long().contiguous(),
        }[self.moved]()  # fmt: skip
        return self.table(ids)


MOVES = ("", "reshaped", "sliced", "turned", "chunked", "repeated", "flipped", "long")


@fewer(15)
@given(st.sampled_from(MOVES), st.integers(1, 9), st.data())
def test_ids_out_of_range_raise_at_q(moved: str, rows: int, data: st.DataObject):
    model = LookUp(rows, moved).eval().requires_grad_(False)
    ids = torch.tensor(data.draw(st.lists(st.integers(-2, rows + 1), min_size=8, max_size=8))).view(2, 4)
    secured = sectorch.secure(model, session=sectorch.Session())
    try:
        expected = model(ids)
    except IndexError:
        with sectorch.profile() as profile, pytest.raises(DimensionError, match="out of range") as raised:
            secured(ids)
        sent = {line.path for line in profile.ledger if line.phase != Phase.SETUP}  # the masked table is no query's
        assert sent <= {"share"}, "something of the look-up was sent"
        assert abort_reason(raised.value, "'alice'") == "DimensionError: at 'alice', whose own log says more"
        return
    assert bool(((secured(ids) - expected).abs() <= 2.0**-20 + expected.abs() * 2.0**-23).all())


@fewer(20)
@given(st.lists(st.integers(-3, 9), min_size=1, max_size=5), st.integers(1, 8), st.booleans())
def test_other_look_ups_out_of_range_raise(values: list[int], rows: int, public: bool):
    """one_hot of a secret index, and a shared table by a public one: torch counts no index from the end."""
    ids, plain = torch.tensor(values), torch.randn(rows, 2)
    table = stage().share(plain)
    fits = all(0 <= v < rows for v in values)
    look_ups = [lambda: F.embedding(ids, table), lambda: F.one_hot(stage().share(ids), rows),
                lambda: F.embedding(stage().share(ids), table)]  # fmt: skip
    for look_up in look_ups:
        if fits:
            look_up().reveal()
        else:
            with pytest.raises(DimensionError, match="out of range"):
                look_up()


def test_a_computed_index_has_no_plain_form():
    ids = stage().share(torch.tensor([0, 1]))
    assert ids.shares.Q is not None
    assert ids[1:].shares.Q is not None
    for computed in (ids + 1, ids * 3, ids * ids, stage().share(torch.ones(2))):
        assert computed.shares.Q is None


# The table.


@settings(max_examples=20)
@given(st.lists(st.sampled_from((torch.relu, torch.add, torch.mul, T.exp, F.gelu, T.add_)), min_size=1, unique=True))
def test_a_handler_is_replaced_only_by_name(keys: list):
    table = OpTable("tensors", "")
    old, new = (lambda: 1), (lambda: 2)
    table.implements("first", keys[0], torch.neg)(old)
    for key in keys[1:]:
        table.implements(f"row of {key}", key)(old)
    before = {key: table.handler[key] for key in (*keys, torch.neg)}
    with pytest.raises(ArgumentError, match="override=True"):
        table.implements("second", torch.sin, *keys)(new)
    assert {key: table.handler[key] for key in before} == before
    assert torch.sin not in table.handler
    table.implements("second", *keys, override=True)(new)
    assert all(table.handler[key] is new and table.row_of[key].name == "second" for key in keys)
    assert [row.keys for name, row in table.rows.items() if name != "second"] == [[torch.neg]]


def test_an_operation_of_the_package_is_not_replaced_by_accident():
    before = SHARES.handler[torch.relu]
    with pytest.raises(ArgumentError, match=r"torch\.relu.*override"):
        SHARES.implements("relu", torch.relu)(lambda context, x: x)
    assert SHARES.handler[torch.relu] is before
    assert isinstance(torch.relu(stage().share(torch.ones(1))), SharedTensor)
    assert isinstance(torch.relu(stage().private(torch.ones(1))), PrivateTensor)


@pytest.mark.parametrize("value", [2.5, -0.5])
def test_whole_numbers_are_not_filled_with_fractions(value: float):
    with pytest.raises(DtypeError, match="whole numbers"):
        stage().share(torch.arange(3)).masked_fill(torch.tensor([True, False, True]), torch.tensor(value))
