"""SecSV, HESV and SecretSV against the clear, for every kind of classifier; Lemma 6.1."""

from __future__ import annotations

import math

import pytest
import torch
from hesv_variants import FastestTester, LetterTester

from sectorch.choreography.ledger import Transcript
from sectorch.errors import UnsupportedOpError
from sectorch.protocols.secsv import GRUClassifier, build, secsv
from sectorch.protocols.secsv.hesv import HESVTester
from sectorch.protocols.secsv.hesv import joint_keys as hesv_keys
from sectorch.protocols.secsv.program import Program
from sectorch.protocols.secsv.secsv import SecSVTester
from sectorch.protocols.secsv.testers import PlainTester, SecretSVTester, Spent, TestSet, averaged, quantised
from sectorch.protocols.secsv.values import coalitions, members
from sectorch.ring import encode

WEIGHTS = {0: 30, 1: 50, 2: 10, 3: 20}
CASES = {
    "logistic": (lambda seed: build("logistic", (6,), 3, seed=seed), (6,)),
    "convolution": (
        lambda seed: _seeded(
            seed,
            lambda: torch.nn.Sequential(
                torch.nn.Conv2d(1, 2, 3, stride=2, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
                torch.nn.Flatten(), torch.nn.Linear(8, 3),
            ),
        ),
        (1, 8, 8),
    ),
    "gru": (lambda seed: _seeded(seed, lambda: GRUClassifier(3, 4, 3, steps=3)), (9,)),
}  # fmt: skip


def _seeded(seed, make):
    torch.manual_seed(seed)
    return make()


def case(name: str, each: int = 5):
    make, shape = CASES[name]
    draw = torch.Generator().manual_seed(3)
    nets = [make(seed) for seed in range(4)]
    x = tuple(torch.rand(each, *shape, generator=draw) for _ in range(4))
    with torch.no_grad():  # labels that some models hit and some miss
        labels = tuple(nets[i](v).argmax(1) for i, v in enumerate(x))
    return Program(nets[0], shape), TestSet(x, labels), {i: net.state_dict() for i, net in enumerate(nets)}


def plain(program, tests, models):
    tester = PlainTester(program, tests)
    tester.begin(models, WEIGHTS)
    return tester


@pytest.mark.parametrize("name", CASES)
def test_the_program_computes_the_model(name):
    program, tests, models = case(name)
    net = CASES[name][0](0).double()
    net.load_state_dict(models[1])
    with torch.no_grad():
        wanted = net(tests.x[0].double())
    got, _ = program.run(program.matrices({k: v.double() for k, v in models[1].items()}), tests.x[0])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_what_a_client_cannot_do_alone_is_refused():
    with pytest.raises(UnsupportedOpError, match="BatchNorm1d"):
        Program(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), (3,))


@pytest.mark.parametrize("name", CASES)
def test_secsv_finds_the_right_samples(name, keys, form):
    program, tests, models = case(name)
    tester = SecSVTester(program, tests, keys, form, "single-layer")
    tester.begin(models, WEIGHTS)
    reference = plain(program, tests, models)
    for coalition in (0b0001, 0b0110, 0b1111):
        assert tester.correct(coalition, tests.all) == reference.correct(coalition, tests.all)
        some = 0b1010010001011
        assert tester.correct(coalition, some) == reference.correct(coalition, some)


@pytest.mark.parametrize("name", CASES)
def test_hesv_counts_the_right_samples(name):
    program, tests, models = case(name, each=3)
    tester = HESVTester(program, tests, hesv_keys(program), "single-layer")
    tester.begin(models, WEIGHTS)
    reference = plain(program, tests, models)
    for coalition in (0b0001, 0b1111):
        assert tester.hits(coalition) == reference.correct(coalition, tests.all).bit_count()


@pytest.mark.parametrize("name", CASES)
def test_secretsv_finds_the_right_samples(name):
    program, tests, models = case(name)
    tester = SecretSVTester(program, tests)
    tester.begin(models, WEIGHTS)
    reference = plain(program, tests, models)
    assert tester.correct(0b0110, 0b1010010001011) == reference.correct(0b0110, 0b1010010001011)
    assert tester.correct(0b1111, tests.all) == reference.correct(0b1111, tests.all)


def test_secretsv_sends_every_share():
    """A half to each server of each tensor that a client has: uniform bytes, eight an element, their sum the tensor."""
    program, tests, models = case("logistic")
    with Transcript() as sent:
        tester = SecretSVTester(program, tests)
        tester.begin(models, WEIGHTS)
    halves = {to: [value for line, value in sent.received(to) if line.protocol == "shapley_share"] for to in "PX"}
    matrices = [part * w for w, m in zip(WEIGHTS.values(), models.values(), strict=True)
                for part in (v for pair in program.matrices(m).values() for v in pair)]  # fmt: skip
    whole = [*(x.flatten(1).t() for x in tests.x), *tests.labels, *matrices]
    for at_P, at_X, x in zip(halves["P"], halves["X"], whole, strict=True):
        torch.testing.assert_close(at_P + at_X, encode(x, 20) if x.is_floating_point() else x, rtol=0, atol=0)
    for values in halves.values():
        sent_bytes = torch.cat([v.flatten() for v in values]).view(torch.uint8).double()
        assert len(sent_bytes) == 8 * sum(x.numel() for x in whole)
        # The mean of n uniform bytes deviates by 73.9 / sqrt(n); six times that is once in 10^9.
        assert abs(float(sent_bytes.mean()) - 127.5) < 6 * 73.9 / len(sent_bytes) ** 0.5


def test_lemma_6_1(keys, form):
    """Products and rotations of both protocols, counted, against the formulas.

    SecSV: each server d_in a ciphertext of the result, ceil(columns / 2W) ciphertexts a batch (two columns a slot), no
    rotation; in the first layer once for each client's model on each client's samples, whatever coalitions are tested.
    HESV (Lemma B.1): for each pair of blocks d' products, d' the smallest divisor of the side from d_out on;
    floor(log2 r) + (ones in r) - 1 rotations for each block of the result, r = side / d'.
    """
    program, tests, models = case("convolution")
    secsv = SecSVTester(program, tests, keys, form, "single-layer")
    with Spent() as spent_begin:
        secsv.begin(models, WEIGHTS)
        secsv.prepare()
    hesv = HESVTester(program, tests, hesv_keys(program), "single-layer")
    hesv.begin(models, WEIGHTS)
    every = coalitions(range(4))[:5]
    wanted, wanted_products, wanted_rotations = 0, 0, 0
    with Spent() as spent_secsv:
        for coalition in every:
            secsv.correct(coalition, tests.all)
    with Spent() as spent_hesv:
        for coalition in every[:2]:
            hesv.hits(coalition)
    first, *others = program.layers
    assert (spent_begin.products, spent_begin.rotations) == (2 * 4 * 4 * first.inner, 0), "80 columns: a ciphertext"
    for coalition in every:
        for route in secsv.routes(coalition):
            for layer in others:
                width = 2 * min(128, 2048 // 2 ** math.ceil(math.log2(layer.rows)))
                columns = layer.columns * 5 * len(route.owners)
                wanted += layer.inner * math.ceil(columns / width)
    for _ in every[:2]:
        for layer in program.layers:
            side = min(layer.inner, math.isqrt(2048))
            block = next(d for d in range(min(layer.rows, side), side + 1) if side % d == 0)
            copies = side // block
            results = math.ceil(layer.rows / block) * math.ceil(layer.columns * 5 / min(side, layer.columns * 5))
            wanted_products += 4 * results * math.ceil(layer.inner / side) * block
            wanted_rotations += 4 * results * (int(math.log2(copies)) + bin(copies).count("1") - 1)
        wanted_products += 4 * program.classes  # comparing with the labels in unary
    assert (spent_secsv.products, spent_secsv.rotations) == (2 * wanted, 0), "both servers"
    assert (spent_hesv.products, spent_hesv.rotations) == (wanted_products, wanted_rotations)


def test_aggregation_weights_are_exact_where_they_are_small_integers():
    assert quantised({0: 300.0, 2: 41.0}) == {0: 300, 2: 41}
    found = quantised({0: 30000.0, 1: 0.5, 2: 12345.0})
    assert sum(found.values()) <= 1024 and found[1] == 1
    assert abs(found[0] / sum(found.values()) - 30000 / 42345.5) < 4 * 2**-11


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [LetterTester, FastestTester])
def test_the_baselines_count_the_right_samples(name, kind):
    """HESV by the paper's letter, and the fastest; with unequal numbers of samples."""
    program, tests, models = case(name, each=3)
    tests = TestSet((*tests.x[:3], tests.x[3][:1]), (*tests.labels[:3], tests.labels[3][:1]))
    tester = kind(program, tests, hesv_keys(program), "single-layer")
    tester.begin(models, WEIGHTS)
    reference = plain(program, tests, models)
    with Transcript() as sent:
        for coalition in (0b0100, 0b1111):
            assert tester.hits(coalition) == reference.correct(coalition, tests.all).bit_count()
    labels = {line.label for line, _ in sent.lines}
    assert "differences" in labels and "matches" not in labels


@pytest.mark.parametrize("coalition", [0b0001, 0b1000, 0b0110, 0b1111])
def test_the_first_outputs_hold_at_the_ends_of_the_domain(coalition, keys, form):
    """Weights of 2^3 less a bit, outputs at half of the format, aggregation weights 1 to 1000, 1 to 300 samples.

    Against float64. The error of a sum of d_in terms, in units of the model's: 8 sigma of a fresh encryption at 2^26
    times |x|, half a unit of 2^-12 and the encoding's rounding times |A|; and of what is added to the outputs (zeros
    of X, one a member, and of P; a rescale of each half) less than 2^-20 over the members' weights.
    """
    signs = torch.Generator().manual_seed(2)
    sizes, shares = (1, 300, 2, 7), {0: 1, 1: 1000, 2: 3, 3: 20}
    models = {}
    for i in range(4):
        weight = torch.where(torch.rand(3, 6, generator=signs) < 0.5, -1.0, 1.0) * (8 - 2.0**-10)
        models[i] = {"0.weight": weight, "0.bias": torch.full((3,), 7.9 * (-1) ** i)}
    x = tuple(torch.rand(size, 6, generator=signs) / 2 for size in sizes)
    labels = tuple(torch.zeros(size, dtype=torch.int64) for size in sizes)
    program = Program(torch.nn.Sequential(torch.nn.Linear(6, 3)), (6,))
    tester = SecSVTester(program, TestSet(x, labels), keys, form, "single-layer")
    tester.begin(models, shares)
    some, owners = members(coalition), [1, 0, 3]
    net, weights = tester.nets[0], [tester._weights[i] for i in some]
    parts = [[tester._first(i, owner) for i in some] for owner in owners]
    got = net.read(secsv.open_first(net, tester.public, parts, weights), net.C)
    model = averaged([models[i] for i in some], [float(w) for w in weights])
    wanted = torch.cat([x[owner] for owner in owners]).double() @ model["0.weight"].double().t() + model["0.bias"]
    sealed_error = 8 * math.sqrt(4096 * (1 + 2 * 4096 / 3) / 12 + 16 * 4096) / 2.0**26
    width = tester.public.layout(program.layers[0]).width
    bound = 6**0.5 * (sealed_error * 0.5 + (2.0**-13 + 8 * 0.4 * width * 2.0**-19) * 8) + sealed_error + 2.0**-20
    assert float((got - wanted).abs().max()) < bound < 0.1
    assert float(wanted.abs().max()) > 16, "half of what the format holds, and more"
