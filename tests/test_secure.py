"""secure(): the papers' nets and ordinary modules against plain torch, batches in pieces, material, and bad input."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import by_turns, long, some
from sklearn.datasets import load_digits
from torch import nn

import sectorch
from sectorch import errors
from sectorch.choreography import Party, Phase
from sectorch.choreography.program.projection import ProjectedStep
from sectorch.errors import FixedPointRangeError
from sectorch.nn import graph_cache, module
from sectorch.nn.models import ZOO, randomize_batchnorm
from sectorch.tensor import Scheme, private_tensor

# The zoo's logits are below one in magnitude. Every layer adds rounding of the order of 2^-20 times the norm of a
# weight row; 1e-4 is the project's promise for these nets, a hundred times that.
ZOO_TOLERANCE = 1e-4


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    construct, shape = ZOO[name]
    model = construct().eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, torch.randn(2, *shape)


@pytest.fixture(scope="module")
def digits():
    """A small CNN trained on half of the digits, and the other half."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(images[:900]), labels[:900]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False), images[900:]


SMALL = [n for n in ZOO if n not in ("resnet14", "resnet16", "resnet18")]


@pytest.mark.parametrize("name", some(SMALL, ["lenet", "mlp", "cryptonets", "resnet8"]))
def test_zoo(name):
    model, x = built(name)
    with torch.no_grad():
        expected = model(x)
    assert (sectorch.secure(model)(x) - expected).abs().max() < ZOO_TOLERANCE


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", ["resnet14", "resnet16", "resnet18"])
def test_zoo_at_64(name):
    model, x = built(name)
    with torch.no_grad():
        expected = model(x)
    assert (sectorch.secure(model)(x) - expected).abs().max() < ZOO_TOLERANCE


def test_all_digits_get_the_plain_label(digits):
    model, images = digits
    assert torch.equal(sectorch.secure(model)(images).argmax(1), model(images).argmax(1))


def test_a_batch_in_pieces_is_the_same(digits):
    model, images = digits
    whole, pieces = sectorch.secure(model), sectorch.secure(model, chunk=7)
    x = images[:30]
    assert (whole(x) - pieces(x)).abs().max() < 1e-4
    assert len(pieces.pieces(x)) == 5


def test_shared_in_shared_out(digits):
    model, images = digits
    secured = sectorch.secure(model)
    z = secured(sectorch.share(images[:4]))
    assert isinstance(z, sectorch.SharedTensor)
    assert (z.reveal() - model(images[:4])).abs().max() < 1e-4


def test_preprocessing_leaves_only_the_online_phase(digits):
    model, images = digits
    secured = sectorch.secure(model, session=sectorch.Session())
    secured(images[:3])
    with sectorch.profile() as together:
        secured(images[:3])
    with sectorch.profile() as ahead:
        assert secured.preprocess(3) > 0
    assert secured.prepared() == {(3, 1, 8, 8): 1}
    with sectorch.profile() as online:
        y = secured(images[:3])
    assert secured.prepared() == {}
    assert (y - model(images[:3])).abs().max() < 1e-4
    assert ahead.online_bytes == 0 and online.offline_bytes == 0
    assert (ahead.offline_bytes, online.online_bytes) == (together.offline_bytes, together.online_bytes)
    assert online.rounds == together.rounds


def test_paper_mode_warns_and_agrees(digits):
    model, images = digits
    with pytest.warns(errors.LeakyProtocolWarning):
        secured = sectorch.secure(model, Scheme(relu="privhfl"))
    with sectorch.profile() as p:
        y = secured(images[:3])
    assert (y - model(images[:3])).abs().max() < 1e-4
    assert any("sign" in line.shows for line in p.ledger)


@pytest.mark.filterwarnings("ignore::sectorch.errors.LeakyProtocolWarning")
@pytest.mark.parametrize("scheme", [Scheme(), Scheme(16), Scheme(20, limit_bits=20), Scheme(12, limit_bits=6)])
def test_paper_mode_is_right_up_to_the_limit_and_refuses_what_is_beyond(scheme):
    """Both signs, at the edge of the stated domain."""
    most = scheme.activation_limit
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.AvgPool1d(1), nn.ReLU()).eval()
    model[0].weight.data = torch.eye(4) * 0.999
    x = torch.tensor([1.0, -1.0, 0.5, -0.7]).expand(64, 4) * most * 0.999
    leaky = sectorch.secure(model, replace(scheme, relu="privhfl"))
    assert (leaky(x) - model(x)).abs().max() <= most * 2.0**-scheme.frac_bits
    model[0].weight.data.mul_(1.2)
    for edge in (x, -x):
        with pytest.raises(errors.RangeExceededError):
            sectorch.secure(model, replace(scheme, relu="privhfl"))(edge)


@pytest.mark.filterwarnings("ignore::sectorch.errors.LeakyProtocolWarning")
@by_turns(
    scheme=[Scheme(), Scheme(16), Scheme(20, range_check=False), Scheme(12, limit_bits=6)],
    pool=[(2,), (3, 2, 1), (3, 2, 0, 1, False, True), (3, 1, 1, 2)],
)
def test_paper_mode_pools_by_the_papers_comparisons(scheme, pool):
    """End to end (Figure 17), exact, at the edge of the stated domain, padding and ceil_mode included."""
    scheme = replace(scheme, relu="privhfl")
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(*pool), nn.Flatten(), nn.LazyLinear(3)).eval()
    x = torch.randn(2, 1, 9, 9)
    model(x)
    with sectorch.profile() as spent:
        y = sectorch.secure(model, scheme)(x)
    assert torch.equal(y, sectorch.reference(model, scheme)(x)) and (y - model(x)).abs().max() < 2.0 ** (
        7 - scheme.frac_bits
    )
    assert any("leaky_maxpool_privhfl" in line.path for line in spent.ledger)
    assert not any("max_tree" in line.path for line in spent.ledger)
    alone, edge = nn.MaxPool2d(*pool).eval(), scheme.activation_limit * 0.999
    x = edge * torch.empty(1, 1, 9, 9).uniform_(-1, 1).sign()
    assert torch.equal(sectorch.secure(alone, scheme)(x), sectorch.reference(alone, scheme)(x))
    assert (sectorch.secure(alone, scheme)(x) - alone(x)).abs().max() <= 2.0**-scheme.frac_bits
    if scheme.range_check:
        larger = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), alone).eval()
        larger[0].weight.data.fill_(1.2)
        with pytest.raises(errors.RangeExceededError):
            sectorch.secure(larger, scheme)(x)


def test_calibration_saves_bytes_and_agrees(digits):
    model, images = digits
    """A limit that is taken for granted saves planes; one that is checked needs them."""
    plain = sectorch.secure(model, Scheme(range_check=False))
    bounded = sectorch.secure(model, Scheme(range_check=False), calibrate=images[:50])
    for secured in (plain, bounded):
        secured(images[:5])
    with sectorch.profile() as p:
        plain(images[:5])
    with sectorch.profile() as q:
        y = bounded(images[:5])
    assert q.bytes < p.bytes
    assert (y - model(images[:5])).abs().max() < 1e-4


def test_calibration_names_the_layer_that_cannot_fit():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[1].weight.fill_(1e12)
    with pytest.raises(errors.FixedPointRangeError, match=r"layer '1' \(Linear\)"):
        sectorch.secure(model, calibrate=torch.ones(1, 2))


class Odd(nn.Module):
    """Glue code: shapes in Python, a parameter used twice, a dictionary and a list as output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        batch, length, _ = x.shape
        if batch > 1:  # fx cannot trace this: the module runs operation by operation
            x = x * 2
        y = self.linear(x).view(batch, -1)
        return {"a": y.relu() + self.scale.repeat(length), "b": [x[:, 0] * self.scale.sigmoid()]}


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.body = kind(6, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


ORDINARY = {
    "odd": (Odd, (2, 3, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 4, 6)),
    "gru two layers, both ways": (lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), (2, 3, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 4, 6)),
    "rnn": (lambda: Recurrent(nn.RNN), (2, 4, 6)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu"), 2),
        (2, 5, 16),
    ),
    "transformer, norm first": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, norm_first=True), 2, enable_nested_tensor=False
        ),
        (5, 2, 16),
    ),
    "linear and BatchNorm1d": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.SiLU()), (3, 6)),
    "shared layer": (lambda: nn.Sequential(*[nn.Linear(6, 6)] * 3, nn.Tanh()), (3, 6)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 2)),
        (3, 6),
    ),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3, 2, 1), nn.ELU()), (1, 2, 4, 4)),
}


EVERY_RUN = ("odd", "gru", "rnn", "transformer", "linear and BatchNorm1d", "shared layer", "weight norm")
"""Others are of the same layers; a transposed convolution's values are in the op table."""


@pytest.mark.parametrize("name", some(ORDINARY, EVERY_RUN))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_ordinary_modules(name):
    torch.manual_seed(0)
    construct, shape = ORDINARY[name]
    model = construct().eval().requires_grad_(False)
    x = torch.randn(*shape)
    got, expected = sectorch.secure(model)(x), model(x)
    for y, z in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True):
        # The project's promise for ordinary models: a thousandth of the largest output.
        assert (y - z).abs().max() < 1e-3 * z.abs().max()


@pytest.mark.parametrize("name", ["odd", "transformer", "token ids", *long("lstm", "transposed convolution")])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_later_calls_take_the_steps_of_the_first(name):
    """The same messages and rounds, on the new input: bit for bit the reference."""
    torch.manual_seed(0)
    if name == "token ids":
        model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2)).eval()
        draw = lambda: torch.randint(7, (2, 3))
    else:
        construct, shape = ORDINARY[name]
        model, draw = construct().eval().requires_grad_(False), lambda: torch.randn(*shape)
    secured, reference = sectorch.secure(model, session=sectorch.Session()), sectorch.reference(model)
    ledgers = []
    for _ in range(3):
        x = draw()
        with sectorch.profile() as profile:
            got = secured(x)
        sent = [m for m in profile.ledger if m.phase != Phase.SETUP]
        ledgers.append([(m.path, m.label, m.src, m.dst, m.phase, m.round, m.shape, m.dtype) for m in sent])
        leaves = torch.utils._pytree.tree_leaves
        assert all(torch.equal(y, z) for y, z in zip(leaves(got), leaves(reference(x)), strict=True))
        assert len(profile.by_protocol()) > 1 and profile.online_seconds > 0
    assert ledgers[0] == ledgers[1] == ledgers[2]
    if secured.graphs.eager_reason is None:
        sent = [m for m in secured.choreography(x).messages if m.phase != Phase.SETUP]
        assert [(m.path, m.label, m.src, m.dst, m.phase, m.round, m.shape, m.dtype) for m in sent] == ledgers[0]
    if name == "token ids":
        with pytest.raises(errors.DimensionError, match=r"layer '0' \(Embedding\): index out of range"):
            secured(torch.tensor([[1, 2, 3], [4, 5, 7]]))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(3, 4)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_modules_that_differ_from_call_to_call_are_no_program(kind):
    secured = sectorch.secure(kind(4, 4).eval(), session=sectorch.Session())
    x = torch.randn(3, 4)
    first, second, third = secured(x), secured(x), secured(x)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    with pytest.raises(errors.ArgumentError, match="no one program"):
        secured.choreography(x)


def test_recurrent_weights_are_private():
    """nn.GRU keeps its weights in a second list; none of them may pass for a public constant."""
    secured = sectorch.secure(Recurrent(nn.GRU).eval(), session=sectorch.Session())
    with sectorch.profile() as p:
        secured(torch.randn(1, 2, 6))
    weights = sum(p.numel() for p in Recurrent(nn.GRU).parameters() if p.dim() > 1)
    first_step = 3 * 8  # the gates of the zero state are A's own numbers, and multiply the reset gate
    assert p.setup_bytes == 8 * (weights + first_step)


class Unsupported(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.erfinv(self.linear(x))


def test_unsupported_operation_names_itself_its_line_and_the_nearest():
    secured = sectorch.secure(Unsupported().eval())
    with sectorch.profile() as p, pytest.raises(errors.UnsupportedOpError) as caught:
        secured(torch.randn(2, 4))
    text = str(caught.value)
    assert "erfinv" in text and "test_secure.py:" in text and "erf" in text.partition("nearest supported: ")[2]
    assert not p.ledger


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.tensor([[float("nan"), 1.0]]), errors.NonFiniteError, "1 NaN and 0 infinite"),
        (torch.tensor([[float("inf"), 1.0]]), errors.NonFiniteError, "0 NaN and 1 infinite"),
        (torch.tensor([[5e6, 1.0]]), errors.FixedPointRangeError, r"5e\+06.*4\.1943e\+06"),
        (torch.zeros(1, 3), errors.ShapeError, r"\[1, 3\] X \[2, 2\]"),
        (torch.zeros(1, 2, dtype=torch.float64), errors.DtypeError, "same dtype"),
        (torch.zeros(1, 2, dtype=torch.complex64), errors.DtypeError, "complex64"),
        ([[1.0, 2.0]], errors.DtypeError, "got list"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(x, error, text):
    secured = sectorch.secure(nn.Linear(2, 2).eval())
    with sectorch.profile() as p, pytest.raises(error, match=text):
        secured(x)
    assert not p.ledger
    assert secured(torch.zeros(1, 2)).shape == (1, 2)


def test_bad_models_are_refused():
    with pytest.raises(errors.TrainingModeError, match="training mode"):
        sectorch.secure(nn.Linear(2, 2))
    half = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    half[1].train()
    with pytest.raises(errors.TrainingModeError, match=r"\(1\)"):
        sectorch.secure(half)
    bad = nn.Linear(2, 2).eval()
    with torch.no_grad():
        bad.weight[0, 0] = float("nan")
    with pytest.raises(errors.NonFiniteError, match="weight 'weight'"):
        sectorch.secure(bad)
    with torch.no_grad():
        bad.weight.fill_(1e9)
    with pytest.raises(errors.FixedPointRangeError, match=r"weight 'weight' reaches magnitude 1e\+09"):
        sectorch.secure(bad)
    with pytest.raises(errors.ArgumentError, match="takes an nn"):
        sectorch.secure(lambda x: x)
    with pytest.raises(errors.ArgumentError, match="relu must be one of"):
        sectorch.secure(nn.Linear(2, 2).eval(), Scheme(relu="fast"))
    with pytest.raises(errors.ArgumentError, match="frac_bits"):
        sectorch.secure(nn.Linear(2, 2).eval(), Scheme(frac_bits=40))
    with pytest.raises(errors.ArgumentError, match="secure already"):
        sectorch.secure(sectorch.secure(nn.Linear(2, 2).eval()))


def test_the_model_is_not_changed(digits):
    model, images = digits
    before = copy.deepcopy(model.state_dict())
    sectorch.secure(model)(images[:2])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_secure_module_gives_no_weights_away():
    secured = sectorch.secure(nn.Linear(2, 2).eval())
    assert not list(secured.parameters()) and not list(secured.buffers())
    with pytest.raises(errors.ArgumentError, match="take that of the plain model"):
        secured.state_dict()
    assert "tensor" not in repr(secured)
    with pytest.raises(errors.TrainingModeError):
        secured.train()
    for take in (pickle.dumps, lambda m: torch.save(m, io.BytesIO()), copy.deepcopy):
        with pytest.raises(errors.SectorchError):
            take(secured)


def test_tensors_of_another_session_are_refused():
    secured = sectorch.secure(nn.Linear(2, 2).eval(), session=sectorch.Session())
    with pytest.raises(errors.SessionMismatchError):
        secured(sectorch.share(torch.zeros(1, 2)))


NOT_ANSWERING = {
    "S": lambda s: s.S,
    "Q": lambda s: s.Q,
    "of a session with others": lambda s: sectorch.Session(answering=3, dry=True).answering[2],
    "S by the name of A": lambda s: Party(s.answering[0].name, "S"),
    "a role of its own": lambda s: Party("A", "B"),
    "a name": lambda s: "A",
    "a number": lambda s: 0,
    "a list": lambda s: [s.answering[0]],
    "a tensor": lambda s: torch.zeros(2),
}
TAKES_A_PARTY = {
    "share": lambda s, p: sectorch.share(torch.zeros(2, 2), session=s, party=p),
    "secure": lambda s, p: sectorch.secure(nn.Linear(2, 2).eval(), session=s, party=p),
    "secure, encrypted": lambda s, p: sectorch.secure(nn.Linear(2, 2).eval(), session=s, party=p, backend="ckks"),
    "private_tensor": lambda s, p: private_tensor(torch.zeros(2), s, p, Scheme(), "w"),
    "setup": lambda s, p: s.setup(p),
    "net": lambda s, p: s.net(p),
    **{name: lambda s, p, name=name: getattr(s, name)(p).__enter__() for name in ("call", "operation")},
    "trace": lambda s, p: s.trace(lambda net: net.read(net.own(net.Q, torch.zeros(2)), net.Q), p),
}


FOR_HOLDERS = {"private_tensor", "setup", "net", "call", "operation", "trace"}
"""What the package does with a pair of holders, of which Q may be one (`sectorch.collect`)."""


@pytest.mark.parametrize("take", TAKES_A_PARTY)
def test_only_an_answering_party_of_the_session_answers(take: str):
    """S alone would decode what is shared between S and S; nothing is drawn, numbered or sent before it is refused."""
    for who, dry in itertools.product(NOT_ANSWERING, (False, True)):
        if who == "Q" and take in FOR_HOLDERS:
            continue
        session = sectorch.Session(2 if who == "S by the name of A" else 1, dry=dry)
        party = NOT_ANSWERING[who](session)
        with sectorch.profile() as p:
            with pytest.raises(
                errors.ArgumentError, match=r"party must be an answering party of the session \(A"
            ) as said:
                TAKES_A_PARTY[take](session, party)
        assert "\n" not in str(said.value) and "party=session.answering[i]" in str(said.value)
        assert not p.ledger
        assert [next(count) for count in session._numbers.values()] == [
            len(session.members.casts) + i for i in range(len(session.members.casts))
        ], "no call was numbered"


def test_what_passes_for_a_shared_tensor_is_asked_for_its_party():
    session = sectorch.Session(answering=2)
    x = [sectorch.share(torch.ones(2, 2), session=session, party=p) for p in session.answering]
    x[1].party = session.S
    with sectorch.profile() as p:
        for use in (lambda: sectorch.aggregate(x), lambda: x[1].reveal(), lambda: x[1] * x[1], lambda: x[1].relu()):
            with pytest.raises(errors.ArgumentError, match="answering party"):
                use()
    assert not p.ledger


def test_aggregate_over_three_models():
    session = sectorch.Session(answering=3)
    torch.manual_seed(0)
    models = [nn.Linear(4, 3).eval().requires_grad_(False) for _ in range(3)]
    x = torch.randn(5, 4)
    answers = [
        sectorch.secure(m, session=session, party=p)(sectorch.share(x, session=session, party=p))
        for m, p in zip(models, session.answering, strict=True)
    ]
    with sectorch.profile() as p:
        total = sectorch.aggregate(answers)
    # Three sums, each within a few units of 2^-20 of its own.
    assert (total - sum(m(x) for m in models)).abs().max() < 3 * 1e-5
    # The sum under a pad, with a tag, and the key of each party's pad.
    to_Q = {(line.protocol, line.shape) for line in p.ledger if line.dst.role == "Q"}
    assert to_Q == {("aggregate", torch.Size((5 * 3 + 1,))), ("guard", torch.Size((2,)))}
    # Noise at S: the same sum and what S drew, in the same messages; nobody else is asked for it.
    drawn = []
    noisy = sectorch.aggregate(
        answers, lambda shape, bits: drawn.append((tuple(shape), bits)) or torch.ones(shape).long()
    )
    assert drawn == [((5, 3), 20)] and torch.equal(noisy, total + 2.0**-20)
    with pytest.raises(errors.SessionMismatchError, match="aggregate"):
        answers[0] + answers[1]
    with pytest.raises(errors.ArgumentError):
        sectorch.aggregate([])
    with pytest.raises(errors.ArgumentError, match="one tensor of each"):
        sectorch.aggregate([answers[0], answers[0]])


def test_a_series_in_pieces_is_the_series(monkeypatch):
    """What bounds memory changes neither result nor rounds nor bytes."""
    x = torch.linspace(-20, 20, 1001).view(7, 143)
    model = nn.SiLU().eval()
    profiles = []
    for piece in (1 << 18, 100):
        monkeypatch.setattr("sectorch.ops.smooth.PIECE", piece)
        secured = sectorch.secure(model, session=sectorch.Session())
        with sectorch.profile() as profile:
            assert float((secured(x) - model(x)).abs().max()) < 1e-4
        profiles.append((profile.rounds, profile.bytes))
    assert profiles[0] == profiles[1]


@pytest.mark.parametrize(
    "option",
    [{"scheme": Scheme()}, {"frac_bits": 16}, {"network": "wan"}, {"chunk": 3}, {"calibrate": torch.ones(1, 2)}],
)
def test_ckks_refuses_what_it_does_not_use(option):
    with pytest.raises(errors.ArgumentError, match=rf"{next(iter(option))}: .*not used by backend='ckks'"):
        sectorch.secure(nn.Linear(2, 2).eval(), backend="ckks", **option)


def test_token_ids_are_prepared():
    model, ids = nn.Embedding(10, 3).eval().requires_grad_(False), torch.tensor([[1, 9, 4]])
    secured = sectorch.secure(model, session=sectorch.Session())
    assert secured.preprocess(1, (3,), torch.int64) > 0
    assert (secured(ids) - model(ids)).abs().max() < 1e-5 and secured.prepared() == {}
    assert secured.preprocess(1) > 0, "the dtype of the last call"
    twice = sectorch.secure(nn.ReLU().eval(), session=sectorch.Session())
    twice.preprocess(1, (3,), torch.float32)
    assert twice.preprocess(1, (3,), torch.float64) > 0, "each dtype has material of its own"
    assert twice.prepared() == {(1, 3): 2}
    twice(torch.ones(1, 3))
    assert twice.prepared() == {(1, 3): 1}


class OneHot(nn.Module):
    def forward(self, x):
        return torch.nn.functional.one_hot(x, 7).float() * 0.5


def test_whole_numbers_that_are_bounded_become_fractions():
    x = torch.randint(0, 7, (2, 3))
    assert torch.equal(sectorch.secure(OneHot().eval())(x), OneHot()(x))


def test_fields_of_the_scheme_work_as_keywords_with_a_warning():
    model, x, session = nn.Linear(2, 2).eval(), torch.ones(1, 2), sectorch.Session()
    with pytest.warns(DeprecationWarning, match=r"Scheme\(frac_bits=16, limit_bits=10\)"):
        secured = sectorch.secure(model, frac_bits=16, activation_limit=1024, session=session)
    assert secured.scheme == Scheme(16, limit_bits=10)
    with pytest.warns(DeprecationWarning):
        assert (
            sectorch.explain(model, x, network="wan").rounds == sectorch.explain(model, x, Scheme(network="wan")).rounds
        )
    with pytest.warns(DeprecationWarning):
        assert sectorch.diff(model, x, frac_bits=16).tolerance == 1e-3
    with pytest.warns(DeprecationWarning), pytest.warns(errors.LeakyProtocolWarning):
        assert sectorch.secure(model, "privhfl", session=session).scheme.relu == "privhfl"
    with pytest.raises(errors.ArgumentError, match="name them in the Scheme"):
        sectorch.secure(model, Scheme(), frac_bits=16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bits'"):
        sectorch.secure(model, bits=16)
    with pytest.raises(errors.ArgumentError, match="takes a Scheme, got a int"):
        sectorch.secure(model, 16)


@pytest.mark.parametrize("why", ["", "weights", "weights, of a format that is chosen", "input"])
def test_a_module_is_freed_with_its_last_name(why: str):
    """Its weights, in several forms, are most of a process's memory: no cycle keeps them until a collection."""
    linear = nn.Linear(8, 16).eval()
    if why.startswith("weights"):
        nn.init.constant_(linear.weight, 600)
    secured = sectorch.secure(linear, **({"scheme": Scheme(20, limit_bits=12)} if why == "weights" else {}))
    freed = weakref.ref(secured)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(FixedPointRangeError) if why in ("weights", "input") else nullcontext():
            secured(torch.ones(2, 8) * (1e6 if why == "input" else 1e-3))
        del secured
        assert freed() is None
    finally:
        gc.enable()


def test_the_numbers_that_weights_need_are_found_without_a_second_copy_of_them(monkeypatch: pytest.MonkeyPatch):
    """The advice of a refusal: neither a second recording, nor weights that are kept."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    for layer in layers:
        nn.init.constant_(layer.weight, 600)
    secured = sectorch.secure(nn.Sequential(*layers).eval(), Scheme(20, limit_bits=12))
    inputs = secured.inputs_of(torch.rand(1, 64))
    secured.program(inputs)
    monkeypatch.setattr(module, "SecureModule", None)
    monkeypatch.setattr(graph_cache, "capture", None)
    kept: list[int] = []
    take = ProjectedStep.take

    def measured(line: ProjectedStep, runtime: object, call: int, values: dict) -> None:
        take(line, runtime, call, values)
        kept.append(sum(v.nbytes for v in values.values() if isinstance(v, torch.Tensor)))

    monkeypatch.setattr(ProjectedStep, "take", measured)
    needs = secured.needs(inputs)
    assert {need.label for need in needs} >= {f"weight '{i}.weight'" for i in range(4)}
    floats = sum(layer.weight.numel() for layer in layers) * 8
    assert max(kept) < floats + 3 * floats // 4, "one layer's encoded weights, and its tiles, at a time"
