"""Keys and files, encrypted matrices, conversion to shares and back, networks, explain, noise flooding."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch import ckks
from sectorch.ckks.convert import mask_bits
from sectorch.ckks.scheme import ciphertext, encryption, ntt, seal
from sectorch.ckks.scheme.encryption import coefficient_error, flood_cost
from sectorch.ckks.tensor.ckks_tensor import observe_operations
from sectorch.errors import ArgumentError, RangeExceededError, TrainingModeError, UnsupportedOpError
from sectorch.nn.fhe import Polynomial, fhe_friendly, fine_tune
from sectorch.nn.models import Square, lenet

DOUBLE = torch.float64


@pytest.mark.parametrize("with_keys", [True, False])
def test_tensors_are_saved_with_and_without_keys(keys, tmp_path, with_keys):
    x = torch.randn(4, 2, dtype=DOUBLE)
    e = torch.nn.functional.linear(ckks.encrypt(x, keys), torch.eye(2, dtype=DOUBLE)) * 3
    e.save(tmp_path / "e", keys=with_keys)
    if not with_keys:
        with pytest.raises(ckks.KeyMismatchError, match="without keys"):
            ckks.load(tmp_path / "e")
    back = ckks.load(tmp_path / "e", None if with_keys else keys.public)
    assert torch.equal(back.cipher.data, e.cipher.data) and back.levels_left == e.levels_left
    assert torch.equal(back.decrypt(keys.secret), e.decrypt(keys.secret))
    with pytest.raises(ckks.KeyMismatchError):
        ckks.load(tmp_path / "e", ckks.keygen(1).public)


def test_keys_are_saved_apart(keys, tmp_path):
    keys.public.save(tmp_path / "public")
    keys.secret.save(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    public, secret = ckks.PublicKeys.load(tmp_path / "public"), ckks.SecretKey.load(tmp_path / "secret")
    x = torch.randn(3, 1, dtype=DOUBLE)
    square = ckks.encrypt(x, public) ** 2
    assert torch.allclose(square.decrypt(secret), x * x, atol=1e-2)
    with pytest.raises(ckks.SerialisationError, match="holds"):
        ckks.SecretKey.load(tmp_path / "public")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda head: head["meta"].update(shape=[2**61] * 40), "residues of another length"),
        (lambda head: head["meta"].update(shape=[]), "residues of another length"),
        (lambda head: head["meta"].update(scale_bits=2**40), "head cannot be read"),
        (lambda head: head["blobs"].append(["q0", 0]), "names a part twice"),
    ],
)
def test_a_head_that_does_not_fit_its_file_is_refused_before_memory_is_taken(keys, tmp_path, change, text):
    ckks.encrypt(torch.ones(2, 3), keys).save(tmp_path / "e")
    whole = (tmp_path / "e").read_bytes()
    start, size = whole[:16], int.from_bytes(whole[16:24], "little")
    head = json.loads(whole[24 : 24 + size])
    change(head)
    written = json.dumps(head).encode()
    (tmp_path / "e").write_bytes(start + len(written).to_bytes(8, "little") + written + whole[24 + size :])
    with pytest.raises(ckks.SerialisationError, match=text):
        ckks.load(tmp_path / "e", keys.public)


@given(data=st.data())
@settings(max_examples=40)
def test_damaged_files_are_refused(keys, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ckks") / "e"
    ckks.encrypt(torch.ones(2, 1), keys).save(path)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, 400))
        whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(whole))
    # A flipped bit of the head may leave a valid file; it then loads as what it says. Nothing else may happen.
    try:
        e = ckks.load(path, keys.public)
    except (ckks.SerialisationError, ckks.KeyMismatchError):
        return
    assert isinstance(e, ckks.CKKSTensor)


def test_seal_bytes_are_checked(keys):
    context = keys.public.context
    good = sectorch.ckks.scheme.seal.save_seal_object(
        context.write(ckks.encrypt(torch.ones(2, 1), keys).cipher.data[0], 2.0**28)
    )
    context.parse(good)
    swapped = [b"\0\0" + good[2:], good[:5] + b"\x01" + good[6:], good[:40] + b"x" * 20 + good[60:]]
    for bad in (b"", good[:10], good[:-1], *swapped):
        with pytest.raises(ckks.SerialisationError):
            context.parse(bad)


SHAPES = [(4, 8, 6), (8, 4, 5), (3, 7, 9), (1, 1, 1), (2, 60, 50), (6, 50, 3)]


@pytest.mark.parametrize("kind", [ckks.MatrixReducing, ckks.MatrixSquaring])
@pytest.mark.parametrize("shape", SHAPES)
def test_encrypted_matrix_products(kind, shape):
    torch.manual_seed(0)
    d_out, d_in, m = shape
    plan = kind(*shape, 2048)
    keys = ckks.keygen(1, rotations=plan.rotations())
    a, b = torch.randn(d_out, d_in, dtype=DOUBLE), torch.randn(d_in, m, dtype=DOUBLE)
    # Sums of d_in products of normal values: far below what their largest entries would add up to.
    left = plan.prepare_left(a, keys, None)
    # d_in products of values below 4.5, each with two errors of 8 sigma; rotations add a key switch each.
    n, scale = keys.parameters.degree, 2.0**keys.parameters.scale_bits
    each = 8 * math.sqrt(n * ((1 + 2 * n / 3) / 12 + 11)) / scale
    for right in (plan.prepare_right(b, keys, None), plan.prepare_right(b, None)):
        y = plan.multiply(left, right)
        assert float((y.decrypt(keys.secret) - a @ b).abs().max()) < 9 * d_in * each + 30 * each
        blocks = len(y.blocks) * -(-d_in // plan.inner)
        assert y.counts.products == blocks * plan.terms
        if kind is ckks.MatrixReducing:
            assert plan.terms == d_in and y.counts.rotations == 0
        else:
            # SecSV, Table 1: d' products with d_out <= d' < 2 d_out at best, rotations about log2(d_in / d').
            parts = plan.inner // plan.tile[0]
            assert plan.inner % plan.tile[0] == 0
            assert y.counts.rotations <= len(y.blocks) * 2 * math.ceil(math.log2(max(2, parts)))


def test_rotations_need_keys(keys):
    plan = ckks.MatrixSquaring(2, 8, 2, keys.parameters.slots)
    with pytest.raises(ckks.MissingKeyError, match="rotations"):
        plan.multiply(plan.prepare_left(torch.ones(2, 8), keys, 1.0), plan.prepare_right(torch.ones(8, 2), keys, 1.0))


def test_there_is_no_conversion_where_q_has_to_prove_what_it_deals(keys):
    """What is rounded would be dealt without a proof, and what Q shares would be held to nothing."""
    verified = sectorch.Scheme(verified=True)
    x = sectorch.share(torch.ones(2, 1), scheme=verified)
    with pytest.raises(UnsupportedOpError, match="verified"):
        ckks.from_shares(x, keys.public)
    with pytest.raises(UnsupportedOpError, match="verified"):
        ckks.to_shares(ckks.encrypt(torch.ones(2, 1, dtype=DOUBLE), keys), keys.secret, scheme=verified)


@given(seed=st.integers(0, 100), batch=st.integers(1, 9), factor=st.sampled_from([1.0, 0.3]))
@settings(max_examples=6)
def test_to_shares_and_back(keys, seed, batch, factor):
    x = 5 * torch.randn(batch, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    shared = ckks.to_shares(ckks.encrypt(x, keys, bound=25) * factor, keys.secret)
    n = keys.parameters.degree
    # The ciphertext's error and that of the encryption of zero, 8 sigma each; one unit of 2^-20 a truncation.
    each = 8 * math.sqrt(n * ((1 + 2 * n / 3) / 12 + 11)) / 2.0**28
    assert float((shared.reveal() - factor * x).abs().max()) < 2 * each + 2.0**-18
    rectified = torch.relu(shared)
    with pytest.raises(ckks.ScaleError, match=r"at most 8 elements a call, or round first with frac_bits=1[6-9]"):
        ckks.from_shares(rectified.repeat(1, 3), keys.public)
    # Values are below 2^5: 27 elements, which take 5 bits, have room at 20 fraction bits, and with 8 value bits at 18.
    expected = torch.relu(factor * x)
    again = ckks.from_shares(rectified, keys.public, value_bits=5)
    assert float((again.decrypt(keys.secret) - expected).abs().max()) < 3 * each + 2.0**-16
    rounded = ckks.from_shares(rectified, keys.public, frac_bits=18)
    assert float((rounded.decrypt(keys.secret) - expected).abs().max()) < 3 * each + 2.0**-16 + 2.0**-18
    assert again.levels_left == keys.parameters.depth - 1


def test_what_q_and_s_see_of_a_conversion_is_masked(keys):
    """S's halves of two conversions of zeros are spread over the whole ring; masks without room are refused."""
    e = ckks.encrypt(torch.zeros(64, 1, dtype=DOUBLE), keys)
    session = sectorch.Session()
    halves = []
    for _ in range(2):
        shared = ckks.to_shares(e, keys.secret, session=session)
        net = session.net(shared.party)
        halves.append(net.read(shared.shares.S, net.S))
    assert float((halves[0] - halves[1]).double().abs().min()) > 0
    # 64 uniform words: fewer than 8 below a quarter of the range has a chance below 10^-25.
    assert all(int((h.abs() > 1 << 60).sum()) > 32 for h in halves)
    with pytest.raises(ckks.ScaleError, match="more depth"):
        ckks.to_shares(e, keys.secret, security_bits=400)
    with pytest.raises(ckks.ScaleError, match="61"):
        ckks.from_shares(sectorch.share(torch.ones(2, 1)), keys.public, security_bits=60)


def test_what_nobody_shares_is_refused(keys):
    alone = sectorch.share(torch.ones(2, 1), session=sectorch.Session(reference=True))
    with pytest.raises(ArgumentError, match="reference"):
        ckks.from_shares(alone, keys.public)


def test_what_left_its_range_is_not_converted(keys):
    """3000^2 is beyond the ring; without a check the ciphertext would hold what wrapped around."""
    x = sectorch.share(torch.tensor([[3000.0], [1.0]]))
    small = ckks.from_shares(x * 1e-3, keys.public, frac_bits=16)
    assert torch.allclose(small.decrypt(keys.secret), torch.tensor([[3.0], [1e-3]]), atol=1e-3)
    with pytest.raises(RangeExceededError):
        ckks.from_shares(x * x * 1e-7, keys.public, frac_bits=16)


class Opening(sectorch.choreography.ledger.Observer):
    """What Q is sent of a conversion from shares."""

    def message(self, line, value):
        if (line.path, line.label) == ("shares_to_ckks", "masked"):
            self.opened = value


@pytest.mark.parametrize(
    "count, frac_bits, bits", [(1, 20, 58), (2, 20, 59), (8, 20, 61), (9, 19, 61), (1 << 10, 13, 61)]
)
def test_masks_are_as_wide_as_all_elements_of_a_call_want(keys, count, frac_bits, bits):
    """x = 0 opens as the mask and its offset: uniform on so many bits, of which some word has the top one."""
    assert mask_bits(8 + frac_bits, count, 30) == bits
    zeros = sectorch.share(torch.zeros(count if count < 64 else 64, count // 64 or 1, dtype=DOUBLE))
    with Opening() as seen:
        ckks.from_shares(zeros, keys.public, frac_bits=frac_bits)
    mask = seen.opened - (1 << (8 + frac_bits))
    assert mask.shape.numel() == count and int(mask.min()) >= 0 and int(mask.max()) < 1 << bits
    # One word below 2^(bits - 30) has a chance of 2^-30; of many, below the former width of 8 + frac_bits + 30 one of
    # 2^-30 as well where it falls short by ten bits.
    assert int(mask.max()) >= 1 << (bits - 30)
    if count == 1 << 10:
        assert int(mask.max()) >= 1 << (8 + frac_bits + 30)


@pytest.mark.parametrize("count, most", [(1, 33), (1 << 10, 23), ((1 << 10) + 1, 22), (1 << 20, 13)])
def test_a_call_of_more_elements_than_its_masks_hide_is_refused(small, monkeypatch, count, most):
    """Refused by shapes alone: nothing is drawn or sent, and what the error names is what just fits."""

    def drawn(words: int):
        raise InterruptedError

    monkeypatch.setattr("sectorch.ckks.convert.random_words", drawn)
    session = sectorch.Session(dry=True)
    shape = (min(count, 1024), -(-count // 1024)) if count != 1025 else (1025,)
    x = sectorch.share(torch.empty(shape, dtype=DOUBLE, device="meta"), session=session)
    assert math.prod(shape) == count
    fits = dict(value_bits=28 - 20, security_bits=30, frac_bits=23 - (count - 1).bit_length())
    assert fits["frac_bits"] + 10 == most
    if fits["frac_bits"] < 20:
        with sectorch.profile() as p:
            with pytest.raises(
                ckks.ScaleError, match=f"{count} elements .* or round first with frac_bits={most - 10}"
            ) as e:
                ckks.from_shares(x, small.public)
            with pytest.raises(ckks.ScaleError):
                ckks.from_shares(x, small.public, **{**fits, "frac_bits": fits["frac_bits"] + 1})
        assert "\n" not in str(e.value) and not p.ledger
    with pytest.raises(InterruptedError):
        ckks.from_shares(x, small.public, **fits)


@given(width=st.integers(1, 3), count=st.integers(1, 3), security_bits=st.integers(1, 3), data=st.data())
@settings(max_examples=60)
def test_the_masks_leave_what_their_width_promises(width, count, security_bits, data):
    """The exact distance of what is opened, over all masks, for all elements together."""
    m = mask_bits(width, count, security_bits)
    assert m == width + security_bits + math.ceil(math.log2(count))
    size, offset = 1 << m, 1 << width
    values = [data.draw(st.integers(1 - offset, offset - 1)) for _ in range(count)]
    first, second = torch.ones((), dtype=DOUBLE), torch.ones((), dtype=DOUBLE)
    for x in values:
        there, here = torch.zeros(2, size + 2 * offset, dtype=DOUBLE)
        there[offset : offset + size] = here[offset + x : offset + x + size] = 1 / size
        assert float((there - here).abs().sum()) / 2 == pytest.approx(abs(x) / size)
        first, second = first[..., None] * there, second[..., None] * here
    assert float((first - second).abs().sum()) / 2 <= 2.0**-security_bits


@pytest.mark.parametrize("bits", [0, -1, 30.0, None, True, "30"])
def test_masks_of_no_bits_are_refused(keys, bits):
    e = ckks.encrypt(torch.ones(2, 1, dtype=DOUBLE), keys)
    x = sectorch.share(torch.ones(2, 1))
    with pytest.raises(ArgumentError, match="security_bits"):
        ckks.to_shares(e, keys.secret, security_bits=bits)
    with pytest.raises(ArgumentError, match="security_bits"):
        ckks.from_shares(x, keys.public, security_bits=bits)
    if bits not in (0, None):
        with pytest.raises(ArgumentError, match="frac_bits"):
            ckks.from_shares(x, keys.public, frac_bits=bits)


def test_a_conversion_is_between_q_s_and_an_answering_party(keys):
    """Half a share each at S and S would be the whole value at S."""
    session = sectorch.Session()
    e = ckks.encrypt(torch.ones(4, 1, dtype=DOUBLE), keys)
    shared = sectorch.share(torch.ones(4, 1), session=session)
    for party in (session.S, session.Q, sectorch.Session(2, dry=True).answering[1], "A"):
        shared.party = party
        with sectorch.profile() as p:
            for use in (
                lambda: ckks.to_shares(e, keys.secret, session=session, party=party),
                lambda: ckks.from_shares(shared, keys.public),
                lambda: ckks.CKKSModule(nn.Linear(1, 1).eval(), keys, session=session, party=party),
            ):
                with pytest.raises(ArgumentError, match="answering party of the session"):
                    use()
        assert not p.ledger


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).eval()


def test_fhe_friendly_copies_and_folds():
    model = small_net()
    friendly = fhe_friendly(model)
    kinds = [type(m) for m in friendly.modules()]
    assert Polynomial in kinds and nn.AvgPool2d in kinds and nn.BatchNorm2d not in kinds and nn.ReLU not in kinds
    assert isinstance(model[2], nn.ReLU)
    x = torch.randn(2, 1, 4, 4)
    g = model[1](model[0](x))
    g = 0.0711 + 0.5 * g + 0.2576 * g**2 - 0.0128 * g**4
    assert torch.allclose(friendly(x), model[5](nn.functional.avg_pool2d(g, 2).flatten(1)), atol=1e-5)

    class Functional(nn.Module):
        def forward(self, x):
            return nn.functional.max_pool2d(torch.relu(x), 2)

    square = fhe_friendly(Functional().eval(), "square")
    assert torch.allclose(square(x), nn.functional.avg_pool2d(x * x, 2))
    tuned = fine_tune(fhe_friendly(model), torch.randn(8, 1, 4, 4), torch.arange(8) % 3, epochs=1)
    assert not tuned.training
    with pytest.raises(sectorch.errors.ArgumentError):
        fhe_friendly(model, "cube")


SMOOTH = {
    nn.Tanh(): 0.14, nn.Sigmoid(): 0.012, nn.SiLU(): 0.015, nn.Softplus(): 0.004, nn.ELU(inplace=True): 0.06,
    nn.Hardtanh(inplace=True): 0.28, nn.LeakyReLU(0.3): 0.14, nn.PReLU(3, 0.3): 0.14, nn.Mish(): 0.035, nn.SELU(): 0.12,
    nn.Hardswish(): 1e-6, nn.Softsign(): 0.11, nn.LogSigmoid(): 0.004, nn.Hardsigmoid(): 1e-6,
    nn.Threshold(0, 0.1): 0.25,
}  # fmt: skip


@pytest.mark.parametrize("act", SMOOTH, ids=lambda act: type(act).__name__)
def test_activations_become_polynomials_that_are_near_to_them(act):
    x = torch.linspace(-3, 3, 600).reshape(-1, 3)

    class Called(nn.Module):
        def forward(self, x):
            return act(x)

    with torch.no_grad():
        for friendly in (fhe_friendly(act), fhe_friendly(nn.Sequential(act).eval()), fhe_friendly(Called().eval())):
            assert (friendly(x.clone()) - act(x.clone())).abs().max() <= SMOOTH[act]
            odd = isinstance(act, (nn.Tanh, nn.Hardtanh, nn.Softsign))
            assert not odd or torch.allclose(friendly(x.clone()), -friendly(-x))


def test_a_network_with_tanh_is_evaluated_encrypted():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid()).eval(), torch.randn(8, 5)
    friendly = fhe_friendly(model)
    assert "Tanh on [-3, 3] within 0.14" in repr(friendly)
    with torch.no_grad():
        assert (sectorch.secure(friendly, backend="ckks")(x) - friendly(x)).abs().max() < 1e-3
        assert (friendly(x) - model(x)).abs().max() < 0.1


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), nn.GLU()], ids=lambda last: type(last).__name__)
def test_what_no_polynomial_stands_for_is_refused(last):
    class Called(nn.Module):
        def forward(self, x):
            return nn.functional.softmax(x, 1)

    for model in (last, nn.Sequential(nn.Linear(4, 4), last), Called()):
        with pytest.raises(sectorch.errors.ArgumentError, match="has no polynomial: take it out of the model"):
            fhe_friendly(model.eval())
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(3, 4)  # the way out
    result = last(sectorch.secure(fhe_friendly(model), backend="ckks")(x))
    assert (result - last(fhe_friendly(model)(x))).abs().max() < 1e-3


def test_a_model_is_queried_with_one_message_each_way():
    friendly = fhe_friendly(small_net())
    module = ckks.CKKSModule(friendly)
    x = torch.randn(6, 1, 4, 4)
    with torch.no_grad():
        assert float((module(x) - friendly(x)).abs().max()) < 1e-3
    assert module.keys.parameters.depth == module.explain(x).depth == 4
    assert module.queries[0].query_bytes > module.queries[0].answer_bytes > 0
    with ckks.memory_limit(1 << 20), pytest.raises(ckks.MemoryBudgetError, match="would take about"):
        module(x)
    with pytest.raises(TrainingModeError):
        module.train()


def test_explain_names_the_layer_before_anything_is_encrypted():
    model, x = fhe_friendly(small_net()), torch.empty(10, 1, 4, 4)
    report = ckks.explain(model, x)
    assert report.supported and report.depth == 4 and [s.levels_left for s in report.steps][-1] == 0
    assert "levels left" in str(report)
    short = ckks.explain(model, x, ckks.choose(3), bound=0.1)
    assert not short.supported and "layer '5' (Linear)" in short.problem and short.runs_out == "layer '5' (Linear)"
    assert "ReLU" in ckks.explain(small_net(), x).problem
    assert not ckks.explain(lenet().eval(), torch.empty(1, 1, 28, 28)).supported
    assert ckks.explain(nn.Sequential(Square(), Square()), torch.empty(2, 3)).depth == 2


def test_keys_that_encrypt_makes_stay_with_their_owner(tmp_path):
    x = torch.randn(4, 2, dtype=DOUBLE)
    e = sectorch.encrypt(x, depth=1)
    assert torch.allclose(e.decrypt(), x, atol=1e-2)
    assert torch.allclose((e * e).decrypt(), x * x, atol=1e-2)
    assert torch.allclose((e + sectorch.encrypt(x, e.keys)).decrypt(), 2 * x, atol=1e-2)
    assert torch.allclose(e.decrypt(e.keys.secret), x, atol=1e-2)
    secret = seal.save_seal_object(e.keys.secret._key)
    e.save(tmp_path / "e", keys=True)
    e.keys.save(tmp_path / "keys")
    for name in ("e", "keys"):
        assert secret not in (tmp_path / name).read_bytes()
    back = ckks.load(tmp_path / "e")
    with pytest.raises(ckks.MissingKeyError, match="secret key"):
        back.decrypt()
    assert torch.allclose(back.decrypt(e.keys.secret), x, atol=1e-2)
    with pytest.raises(sectorch.errors.SecretAccessError):
        pickle.dumps(e.keys)
    with pytest.raises(ckks.MissingKeyError):
        ckks.encrypt(x, ckks.keygen(1).public).decrypt()


def test_the_messages_of_a_query_are_in_the_ledger():
    friendly, x = fhe_friendly(small_net()), torch.randn(6, 1, 4, 4)
    module = sectorch.secure(friendly, backend="ckks")
    with sectorch.profile() as p:
        y = module(x)
    with torch.no_grad():
        assert float((y - friendly(x)).abs().max()) < 1e-3
    lines = [m for m in p.ledger if m.protocol == "ckks_query"]
    assert [(m.src.role, m.dst.role) for m in lines] == [("Q", "S"), ("S", "A"), ("A", "S"), ("S", "Q")]
    (query,) = module.queries
    assert [m.bytes for m in lines] == [query.query_bytes] * 2 + [query.answer_bytes] * 2
    assert "ckks_query" in p.table() and p.rounds == 4


PEAK = """
import resource, sys, torch
from torch import nn
from sectorch import ckks
from sectorch.nn.models import Square

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), Square(), nn.AvgPool2d(2), nn.Conv2d(6, 4, 3), Square()).eval()
keys = ckks.keygen(5)
warm = torch.zeros(1, 1, 8, 8)
with torch.no_grad():
    model(ckks.encrypt(warm, keys))  # what is compiled and kept is there before
x = torch.zeros(4, 1, 12, 12)
estimate = ckks.explain(model, x, keys).peak_bytes
with open("/proc/self/statm") as file:  # what is held now, not the peak of the warming up
    before = int(file.read().split()[1]) * resource.getpagesize()
with torch.no_grad():
    y = model(ckks.encrypt(x, keys)).decrypt(keys.secret)
print(estimate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.sectorch_long
def test_the_estimate_of_memory_is_what_a_run_takes():
    """Within a quarter, in a process of its own; the ciphertexts are a GB or two."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    estimate, measured = map(int, run.stdout.split())
    assert estimate > 500e6 and abs(measured - estimate) < 0.25 * estimate


def test_ciphertexts_are_counted_while_they_exist(keys):
    from sectorch.ckks.scheme.ciphertext import live

    before = live()
    e = ckks.encrypt(torch.zeros(1, 30), keys)
    assert live() - before == e.ciphertext_bytes
    view = e.smallest_form()
    del e
    assert live() > before
    del view
    assert live() == before
    with ckks.memory_limit(before + 1000), pytest.raises(ckks.MemoryBudgetError, match="allowed"):
        ckks.encrypt(torch.zeros(1, 30), keys)


def test_explain_counts_what_a_run_takes(keys):
    model, x = fhe_friendly(small_net()), torch.randn(3, 1, 4, 4)
    report = ckks.explain(model, x, keys)
    with torch.no_grad():
        y = model(ckks.encrypt(x, keys))
    last = report.steps[-1]
    assert (last.levels_left, last.bytes, last.ciphertexts) == (y.levels_left, y.ciphertext_bytes, y.cipher.count)


def test_flooding_costs_what_it_says_and_no_more(keys):
    x = torch.randn(8, 2, dtype=DOUBLE)
    e = ckks.encrypt(x, keys)
    p = keys.parameters
    for bits in (2, 6):
        error = float((e.decrypt(keys.secret, flood_bits=bits) - x).abs().max())
        cost = flood_cost(p.degree, 2.0**p.scale_bits, bits)
        assert cost / 200 < error < 1.1 * cost
    with pytest.raises(ckks.ScaleError, match="does not fit"):
        e.decrypt(keys.secret, flood_bits=60)


@given(size=st.floats(0.01, 8), angle=st.floats(0, 2 * math.pi))
@settings(max_examples=20)
def test_normal_distributions_apart_by_a_vector_differ_along_it_only(size, angle):
    """The step of the derivation that leaves one dimension: over the plane it is erf(|e| / (2 sqrt(2) sigma)) too."""
    step = 0.05
    x = torch.arange(-14, 14, step, dtype=DOUBLE)
    density = lambda x, y: torch.exp(-(x[:, None] ** 2 + y[None] ** 2) / 2) / (2 * math.pi)
    first = density(x + size / 2 * math.cos(angle), x + size / 2 * math.sin(angle))
    second = density(x - size / 2 * math.cos(angle), x - size / 2 * math.sin(angle))
    total = float((first - second).abs().sum()) * step * step / 2
    # The sum over a grid of a function whose second derivatives are below one, cut along the line where it is zero.
    assert total == pytest.approx(math.erf(size / (2 * math.sqrt(2))), abs=step**2)


@pytest.mark.parametrize("results", [1, 226, 10**6])
@pytest.mark.parametrize("degree", [1, 4096, 16384, 32768])
@pytest.mark.parametrize("bits", [1, 6.5, 10, 16, 30, 45])
def test_the_flood_distance_bounds_the_exact_one(degree, bits, results):
    """Each of results * degree coefficients is apart by one standard deviation of the error, 2^-bits of the noise's."""
    away = math.sqrt(results * degree) * 2.0**-bits
    exact, bound = math.erf(away / (2 * math.sqrt(2))), ckks.flood_distance(degree, bits, results)
    assert exact <= bound <= 1
    assert bound <= max(1.2534 * exact, away / 2) and (away > 0.01 or bound < 1.2534 * exact)
    if bound < 1:
        assert bound == pytest.approx(away / 2)
        if results * degree > 50:
            assert exact > 2.0**-bits, "a distance of 2^-bits is that of a few coefficients only"


@pytest.mark.parametrize("shift", [(1,), (1, -1), (1, 1, 1)])
@pytest.mark.parametrize("deviation", [2.0, 4.0, 16.0])
def test_the_distance_of_rounded_noise(shift, deviation):
    """All of the distribution of noise as it is sampled, rounded, against the same noise with an error of integers."""
    edges = torch.arange(-9 * int(deviation), 9 * int(deviation) + 1, dtype=DOUBLE)
    cumulative = lambda x: (1 + torch.erf(x / (deviation * math.sqrt(2)))) / 2
    weight = lambda e: cumulative(edges + 0.5 - e) - cumulative(edges - 0.5 - e)
    first, second = torch.ones((), dtype=DOUBLE), torch.ones((), dtype=DOUBLE)
    for e in shift:
        first, second = first[..., None] * weight(0), second[..., None] * weight(e)
    total = float((first - second).abs().sum()) / 2
    bound = ckks.flood_distance(len(shift), math.log2(deviation))
    assert 0.7 * bound < total < bound


def test_noise_as_it_is_sampled_has_the_width_that_the_distance_counts_on(keys):
    """Of what decrypts: the deviation of every coefficient, and none that is left out."""
    p = keys.parameters
    e = ckks.encrypt(torch.zeros(1, 1, dtype=DOUBLE), keys)
    c = ciphertext.settle(e.cipher)
    before = encryption.add_flood_noise(c, 12)
    q = c.primes[0]
    change = ntt.minus_(before.data[:, 0, 0].contiguous(), c.data[:, 0, 0], q)
    noise = ntt.transform(p.degree, q).inverse(change)
    noise = torch.where(noise > q // 2, noise - q, noise).double()
    wanted = 2.0**12 * coefficient_error(p.degree, 64)
    # The variance of N normal numbers is within 6 sqrt(2 / N) of theirs but for one time in 10^8.
    assert float((noise**2).mean()) == pytest.approx(wanted**2, rel=6 * math.sqrt(2 / p.degree))
    assert torch.equal(before.data[:, 1], c.data[:, 1])


@pytest.mark.parametrize("arguments", [(0, 4), (8192, math.nan), (8192, math.inf), (8192, 4, 0), (math.nan, 4)])
def test_a_distance_of_nothing_is_refused(arguments):
    with pytest.raises(ArgumentError, match="at least one coefficient"):
        ckks.flood_distance(*arguments)


def test_the_flood_distance_at_its_ends():
    assert ckks.flood_distance(1 << 15, -5000) == ckks.flood_distance(1 << 15, 1, 10**400) == 1
    assert ckks.flood_distance(1 << 15, 5000) == 0
    assert ckks.flood_distance(1 << 13, 28) == pytest.approx(2.0**-22.5)


def test_a_rerandomised_answer_shows_no_combination_of_the_query(keys):
    """The second polynomial of an untouched answer is the query's times the integer weight; of a rerandomised one,
    not.
    """
    e = ckks.encrypt(torch.ones(2, 1, dtype=DOUBLE), keys)
    answer = e + e
    assert torch.equal(answer.cipher.data[0, 1, 0], (2 * e.cipher.data[0, 1, 0]) % keys.parameters.primes[0])
    fresh = ckks.rerandomise(answer)
    assert not torch.equal(fresh.cipher.data[0, 1, 0], answer.cipher.data[0, 1, 0])
    assert torch.allclose(fresh.decrypt(keys.secret), torch.full((2, 1), 2.0, dtype=DOUBLE), atol=1e-2)


@pytest.mark.sectorch_long
def test_cryptonets_on_digits():
    """Labels as plain for a whole batch; about a minute."""
    from sectorch.nn.models import cryptonets

    torch.manual_seed(0)
    model, x = cryptonets().eval(), torch.rand(64, 1, 28, 28)
    with torch.no_grad():
        assert float((ckks.CKKSModule(model)(x) - model(x)).abs().max()) < 1e-2


def test_an_explanation_is_of_its_own_thread_s_operations():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.zeros(1, 4)
    expected = len(ckks.explain(model, x).steps)
    found: list[int] = []
    with observe_operations(lambda *_: found.append(-1)):
        thread = threading.Thread(target=lambda: found.append(len(ckks.explain(model, x).steps)))
        thread.start()
        thread.join()
    assert found == [expected]
