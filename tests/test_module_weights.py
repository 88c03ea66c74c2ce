"""What `secure(model)` makes of a module's weights: their dtypes, and results that are made of them alone."""

import collections
import dataclasses
import functools
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import by_turns
from torch import nn

import sectorch
from sectorch.errors import ArgumentError, DtypeError, NonFiniteError, SecretAccessError, UnsupportedOpError

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
    served = sectorch.serving.description.load_program(*_read(tmp_path / "m.safetensors"))
    assert {w.passes or served.dtype for w in served.weights} == {body, head}


def _read(path):
    from sectorch.serving.model_file import read_model

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


class Of(nn.Module):
    """A module whose forward is a function of itself and its input."""

    def __init__(self, f):
        super().__init__()
        self.w, self.layer, self.f = nn.Parameter(torch.linspace(-1, 1, 4)), nn.Linear(4, 4), f

    def forward(self, x):
        return self.f(self, x)


def _filled(s, x):
    out = torch.empty(4, *x.shape)
    out[0] = x
    for i in range(1, 4):
        out[i] = out[i - 1] + torch.tanh(s.layer(out[i - 1]))
    return out


def _grown(s, x):
    out = torch.zeros(1).resize_(3, 4)
    return x + out


def _of_nan(s, x):
    out = torch.full((3, 4), float("nan"))
    out[:2] = x[:2]
    out[2] = out[0] * s.w
    return s.layer(out)


def _cls(s, x):
    out = torch.zeros(4, 4)
    out[0] = s.w
    out[1:] = x
    return s.layer(out)


FILLS = {
    "empty": _filled, "copy_": lambda s, x: torch.empty(3, 4).copy_(x),
    "like": lambda s, x: _put(torch.empty_like(s.w.detach()), s, x),
    "new_empty": lambda s, x: torch.zeros(1).new_empty(3, 4).copy_(x),
    "strided": lambda s, x: x + 0 * torch.empty_strided((3, 4), (4, 1)),
    "permuted": lambda s, x: x + 0 * torch.empty_permuted((3, 4), (1, 0)), "resize_": _grown, "nan": _of_nan,
    "a weight first": _cls,
}  # fmt: skip


def _put(out, s, x):
    return x + out * 0


def _junk():
    """Memory that the next torch.empty may get."""
    for value in (float("nan"), 3e38, 1.0):
        for shape in ((4, 3, 4), (3, 4), (12,), (4,)):
            _ = [torch.full(shape, value) for _ in range(20)]


@pytest.mark.parametrize("kind", FILLS)
def test_memory_that_torch_leaves_as_it_was_is_zeros(kind, tmp_path):
    model = Of(FILLS[kind]).eval()
    for _ in range(2):
        _junk()
        secured = sectorch.secure(model)
        came = secured(X)
        assert "operation by operation" not in repr(secured)
    assert torch.equal(came, sectorch.reference(model)(X))
    with torch.no_grad(), sectorch.nn.graph_cache.Float64Mode():
        assert (came - model.double()(X.double())).abs().max() < 1e-4
    model.float()
    _junk()
    sectorch.network.save_model(model, X, tmp_path / "m.safetensors")


def test_what_was_never_written_of_a_tensor_of_nan_is_refused():
    def read(s, x):
        out = torch.full((3, 4), float("nan"))
        out[:2] = x[:2]
        return out * 2

    def given(s, x):
        out = torch.full((3, 4), float("nan"))
        out[:2] = x[:2]
        return out

    for f in (read, given):
        with pytest.raises(NonFiniteError, match=r"holds 4 NaN of a tensor that the forward makes of NaN.*torch.zeros"):
            sectorch.secure(Of(f).eval())(X)


def _layer_to(s, x):
    s.layer.to(x.device)
    return s.layer(x)


READS_A_DTYPE_OR_A_SHAPE = {
    "to": lambda s, x: x * s.w.to(x), "type_as": lambda s, x: x * s.w.type_as(x),
    "expand_as": lambda s, x: x * s.w.expand_as(x), "view_as": lambda s, x: x * s.w.repeat(3).view_as(x),
    "reshape_as": lambda s, x: x * s.w.repeat(3).reshape_as(x), "cpu": lambda s, x: x * s.w.cpu(),
    "to cpu": lambda s, x: x * s.w.to("cpu", None, False), "x to cpu": lambda s, x: x.to("cpu", None, False),
    "copy": lambda s, x: x * s.w.to(x, copy=True).mul_(2), "layer to": _layer_to,
    "layer float": lambda s, x: s.layer.float()(x),
    "add_": lambda s, x: x * torch.zeros_like(x).add_(s.w),
    "plain expand_as": lambda s, x: x * torch.ones(1, 4).expand_as(x),
    "plain to": lambda s, x: x * torch.ones(4, dtype=torch.float64).to(x),
    "of x": lambda s, x: x.expand_as(x).type_as(s.w),
}  # fmt: skip


@pytest.mark.parametrize("kind", READS_A_DTYPE_OR_A_SHAPE)
def test_only_the_dtype_and_the_shape_of_the_other_tensor_are_read(kind, tmp_path):
    model = Of(READS_A_DTYPE_OR_A_SHAPE[kind]).eval()
    right = model(X)
    came = sectorch.secure(model)(X)
    assert came.dtype == right.dtype
    assert (came - right).abs().max() < 1e-5
    assert torch.equal(came, sectorch.reference(model)(X))
    sectorch.network.save_model(model, X, tmp_path / "m.safetensors")


def test_a_forward_that_converts_its_layers_is_refused():
    with pytest.raises(UnsupportedOpError, match=r"converts the weights of a layer.*before secure"):
        sectorch.secure(Of(lambda s, x: s.layer.half()(x.half())).eval())(X)
    model = Of(lambda s, x: s.layer(x.half())).eval()
    model.layer.half()
    assert sectorch.secure(model)(X).dtype == HALF


class Post:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return x + self.w


@dataclasses.dataclass
class Data:
    w: Any


class Held(nn.Module):
    """Reads a registered parameter from elsewhere."""

    def __init__(self, kind):
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.linspace(-1, 1, 4)), nn.Linear(4, 4)
        self.stats = nn.Buffer(torch.linspace(0, 1, 4))
        w, weight, stats = self.w, self.layer.weight, self.stats
        held = {
            "dict": ({"w": w}, lambda x: x * self.kept["w"]), "list": ([w], lambda x: x * self.kept[0]),
            "tuple": ((w,), lambda x: x * self.kept[0]), "deque": (collections.deque([w]), lambda x: x * self.kept[0]),
            "closure": (None, lambda x: x @ weight), "buffer": ([stats], lambda x: x * self.kept[0] * stats),
            "partial": (functools.partial(nn.functional.linear, weight=weight), lambda x: self.kept(x)),
            "object": (Post(w), lambda x: self.kept(x)), "dataclass": (Data(w), lambda x: x * self.kept.w),
            "method": (Post(w).__call__, lambda x: self.kept(x)),
            "of weights alone": ([w], lambda x: x + self.kept[0].exp() * w.relu()),
        }  # fmt: skip
        self.kept, self.f = held[kind]

    def forward(self, x):
        return self.f(x)


HELD = (
    "dict",
    "list",
    "tuple",
    "deque",
    "closure",
    "buffer",
    "partial",
    "object",
    "dataclass",
    "method",
    "of weights alone",
)


@pytest.mark.parametrize("kind", HELD)
def test_a_registered_parameter_is_a_weight_wherever_the_forward_has_it_from(kind):
    model = Held(kind).eval()
    secured = sectorch.secure(model)
    program = secured.recording(X)
    assert program.secrets
    assert not any(torch.equal(v, t.double()) for n, v in program.values.items() if n not in program.secrets
                   for t in (model.w, model.stats, model.layer.weight) if v.shape == t.shape)  # fmt: skip
    came = secured(X)
    assert (came - model(X)).abs().max() < 1e-5
    assert torch.equal(came, sectorch.reference(model)(X))


def test_operation_by_operation_a_parameter_from_elsewhere_is_the_weight_too():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.calls = nn.Parameter(torch.linspace(-1, 1, 4)), 0
            self.kept, w = [self.w], self.w
            self.f = lambda x: x * w

        def forward(self, x):
            self.calls += 1
            return self.f(x) * self.kept[0] + self.calls

    model = Counting().eval()
    secured = sectorch.secure(model)
    with sectorch.profile() as seen:
        came = secured(X)
    assert "operation by operation" in repr(secured)
    assert (came - (X * model.w * model.w + 1)).abs().max() < 1e-5
    assert any(m.label == "omega_masked" for m in seen.ledger)


def test_a_parameter_that_is_not_registered_is_refused():
    stray = nn.Parameter(torch.ones(4))
    with pytest.raises(ArgumentError, match="make it a parameter or a buffer of the module"):
        sectorch.secure(Of(lambda s, x: x * stray).eval())(X)


@pytest.mark.parametrize("of", [sectorch.secure, sectorch.reference])
def test_inference_mode_around_calls_inputs_and_weights(of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    right = model(X)
    with torch.inference_mode():
        inside = of(model)(X)
        made, y = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval(), X.clone()
        of(made)(y)
    for came in (inside, of(model)(y)):
        assert (came - right).abs().max() < 1e-5
    with torch.no_grad():
        assert (of(made)(y) - made(X)).abs().max() < 1e-5
    secured = of(Of(lambda s, x: _put(torch.empty(3, 4), s, x) * s.w).eval())
    secured(X)
    with torch.inference_mode():
        sectorch.explain(model, X)
        secured(y)


def test_float_functional_is_torchs_functions():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.f = nn.Linear(4, 4), torch.ao.nn.quantized.FloatFunctional()

        def forward(self, x):
            return self.f.cat([self.f.add_relu(self.layer(x), x), self.f.mul_scalar(self.f.mul(x, x), 2.0)], 1)

    model = Added().eval()
    assert (sectorch.secure(model)(X) - model(X)).abs().max() < 1e-5
    with pytest.raises(UnsupportedOpError, match="quantised"):
        sectorch.secure(nn.Sequential(torch.ao.nn.quantized.QFunctional()).eval())


def test_an_export_and_its_module_have_a_reference():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval()
    exported = torch.export.export(model, (X,))
    for given in (exported, exported.module()):
        came = sectorch.secure(given)(X)
        assert torch.equal(sectorch.reference(given)(X), came)
        assert (came - model(X)).abs().max() < 1e-5


class Irreps(tuple):
    """As e3nn's: a tuple whose length is not to be asked for."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError


def test_containers_with_methods_of_their_own_are_attributes_like_others():
    model = Of(lambda s, x: s.layer(x)).eval()
    model.irreps = Irreps((1, 2))
    secured = sectorch.secure(model)
    assert (secured(X) - model(X)).abs().max() < 1e-5
    assert "operation by operation" not in repr(secured)


class Own(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated", "ignore:Sparse")
def test_what_cannot_be_copied_or_followed_is_named():
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))).eval()
    with pytest.raises(ArgumentError, match=r"layer '1': what torch.jit made has no forward to follow"):
        sectorch.secure(scripted)
    odd = nn.Sequential(nn.Linear(4, 4)).eval()
    odd[0].weight = nn.Parameter(odd[0].weight.data.as_subclass(Own))
    with pytest.raises(ArgumentError, match=r"'0.weight' is of the class Own.*as_subclass\(torch.Tensor\)"):
        sectorch.secure(odd)
    odd[0].weight = nn.Parameter(odd[0].weight.detach().as_subclass(torch.Tensor))  # the way out
    assert (sectorch.secure(odd)(X) - odd(X)).abs().max() < 1e-5
    graph = Of(lambda s, x: s.matrix @ s.layer(x)).eval()
    graph.matrix = torch.eye(3).to_sparse_csr()
    with pytest.raises(DtypeError, match=r"'matrix' has layout torch.sparse_csr.*to_dense"):
        sectorch.secure(graph)
    graph.matrix = graph.matrix.to_dense()  # the way out
    assert (sectorch.secure(graph)(X) - graph(X)).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    ],
)
def test_a_public_tensor_that_is_not_dense_is_refused_with_its_line(kind):
    matrix = kind(torch.eye(3))
    call = torch.matmul if matrix.is_quantized else torch.sparse.mm
    with pytest.raises(DtypeError, match=r"test_module_weights.py:\d+: .*(to_dense|dequantize)"):
        sectorch.secure(Of(lambda s, x: call(matrix, s.layer(x))).eval())(X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inputs_that_are_no_dense_numbers_are_refused():
    model = nn.Linear(4, 2).eval()
    ragged = torch.nested.nested_tensor([X[:1], X[1:]])
    with pytest.raises(DtypeError, match=r"torch.nested.*to_padded_tensor"):
        sectorch.secure(model)(ragged)
    for call in (sectorch.share, sectorch.public):
        with pytest.raises(DtypeError, match="to_padded_tensor"):
            call(ragged)
    for call in (sectorch.share, sectorch.secure(model)):
        with pytest.raises(DtypeError, match=r"float8_e4m3fn.*\.float\(\)"):
            call(X.to(torch.float8_e4m3fn))
    sectorch.secure(model)(ragged.to_padded_tensor(0.0))
    secured = sectorch.secure(model)
    with torch.device("meta"), pytest.raises(ArgumentError, match=r"inside torch.device"):
        secured(X)


class S4D(nn.Module):
    """A kernel of complex numbers made of weights alone, and a convolution with it by Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(*shape)) for shape in ((4,), (4,), (4, 2)))

    def kernel(self):
        poles = -self.a.exp() + 1j * self.b
        return torch.einsum("n,nl->l", torch.view_as_complex(self.c), torch.exp(poles[:, None] * torch.arange(8))).real

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, n=16) * torch.fft.rfft(self.kernel(), n=16), n=16)[..., :8]


def test_complex_functions_of_weights_are_computed_by_their_owner(tmp_path):
    torch.manual_seed(0)
    model, x = S4D().eval(), torch.randn(2, 8)
    came = sectorch.secure(model)(x)
    assert (came - model(x)).abs().max() < 1e-4
    assert torch.equal(came, sectorch.reference(model)(x))
    with pytest.raises(UnsupportedOpError, match=r"complex.* is not supported; compute with x.real"):
        sectorch.secure(Of(lambda s, x: torch.exp(x * torch.exp(1j * s.w)).real).eval())(X)
    sectorch.network.save_model(model, x, tmp_path / "m.safetensors")


def test_code_in_a_package_whose_name_begins_with_torch_has_lines():
    """torchvision, torchaudio and the like stand beside torch, and are models' own code."""
    file = f"{Path(torch.__file__).parent}vision/models/made_up.py"
    source = "def f(s, x):\n    return torch.special.bessel_j0(s.layer(x))\n"
    space = {"torch": torch}
    exec(compile(source, file, "exec"), space)
    with pytest.raises(UnsupportedOpError, match=rf"at {re.escape(file)}:2: "):
        sectorch.secure(Of(space["f"]).eval())(X)
    assert any(layer.source == f"{file}:2" for layer in sectorch.explain(Of(space["f"]).eval(), X).layers)


def encoder(norm=None, **how):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 1, norm, **how).eval()


AT_THE_END = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
WITHIN = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]).bool()
PADDED = {"at the end": AT_THE_END, "within": WITHIN, "nowhere": AT_THE_END & False}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@by_turns(of=("secret", "public", "norm", "plain path"), padded=PADDED)
def test_an_encoder_gives_at_padded_places_what_torchs_evaluation_gives(padded, of):
    pad = PADDED[padded]
    model = encoder(nn.LayerNorm(8) if of == "norm" else None, enable_nested_tensor=of != "plain path")
    if of == "norm":
        nn.init.normal_(model.norm.bias)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = model(x, src_key_padding_mask=pad)
    came = sectorch.reference(model)(x, src_key_padding_mask=sectorch.public(pad) if of == "public" else pad)
    assert (came - right).abs().max() < 1e-3
    if of == "secret":
        assert torch.equal(came, sectorch.secure(model)(x, src_key_padding_mask=pad))
