"""Linear layers whose dealing is verified: the same bits, whatever is dealt falsely is found, and the bytes are stated.

What a dealer can falsify is what it sends to S: its half of the product, and of the rows that are dealt beside it. All
parties are in one process here, so that the messages are changed in their place, as S reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from distributed_parties import Pipe, in_threads
from helpers import ring_values, session
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch.choreography import Phase
from sectorch.choreography.ledger import Profile
from sectorch.choreography.run.local import LocalRuntime
from sectorch.choreography.run.party import PartyRuntime
from sectorch.config import Scheme
from sectorch.errors import FalseDealingError, PeerLostError, UnsupportedOpError
from sectorch.mpc.star import linear as sums
from sectorch.mpc.star.dealing_proofs import DealingProofs
from sectorch.mpc.star.linear import linear, mask_weight
from sectorch.mpc.star.shares import reveal, share
from sectorch.ring import bitplanes, products
from sectorch.ring.products import Conv2d, Linear, subset_sums
from sectorch.session import A, Q, S, Session

TOP = torch.iinfo(torch.int64).min
VERIFIED = Scheme(verified=True)


def run(product: Callable, x: torch.Tensor, w: torch.Tensor, verified: bool = True) -> torch.Tensor:
    """product(x, w) of Q's x and A's w, as Q learns it."""
    with session().call(session().answering[0]) as net:
        net.state(DealingProofs).required = verified
        weight = mask_weight(net.setup, net.own(net.A, w, Phase.SETUP, "w"))
        y = linear(net, net.setup, product, share(net, net.own(net.Q, x)), weight)
        return net.read(reveal(net, y), net.Q)


# The same bits.


@st.composite
def convolutions(draw) -> tuple[Conv2d, torch.Size, torch.Size]:
    """With the shapes of its input and its weight."""
    small = lambda low, high: draw(st.integers(low, high))
    groups, kernel = small(1, 3), (small(1, 3), small(1, 3))
    dilation, padding = (small(1, 2), small(1, 2)), (small(0, 2), small(0, 2))
    inside, outside = small(1, 3), small(1, 3)
    sizes = [d * (k - 1) + 1 + small(0, 5) for d, k in zip(dilation, kernel, strict=True)]
    product = Conv2d((small(1, 2), small(1, 2)), padding, dilation, groups)
    return product, torch.Size((small(1, 4), groups * inside, *sizes)), torch.Size((groups * outside, inside, *kernel))


@st.composite
def matrices(draw) -> tuple[Linear, torch.Size, torch.Size]:
    lead = draw(st.lists(st.integers(1, 4), max_size=2))
    depth, channels = draw(st.integers(1, 7)), draw(st.sampled_from((1, 3, 65, 130)))
    return Linear(), torch.Size((*lead, depth)), torch.Size((channels, depth))


@given(st.one_of(convolutions(), matrices()), st.integers(0, 99))
def test_a_verified_layer_gives_the_bits_of_the_product(layer, seed):
    product, *shapes = layer
    x, w = (ring_values(shape, seed=seed + i) for i, shape in enumerate(shapes))
    assert torch.equal(run(product, x, w), product(x, w))


@given(convolutions(), st.integers(0, 99))
def test_rows_of_inputs_times_those_of_a_weight_are_the_outputs(layer, seed):
    """And so in as many pieces as one likes."""
    product, *shapes = layer
    x, w = (ring_values(shape, seed=seed + i) for i, shape in enumerate(shapes))
    wanted = products.outputs(product, product(x, w))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ELEMENTS", 1)
        rows = torch.cat(list(products.inputs(product, x, w.shape)), 1)
    assert torch.equal(products.times_each(rows, products.matrix(product, w).transpose(1, 2)), wanted)


@given(st.integers(1, 5), st.integers(0, 150), st.integers(0, 200), st.integers(0, 9), st.booleans())
def test_sums_of_subsets_are_products_with_bits(subsets, rows, columns, start, compiled):
    words = ring_values((subsets, bitplanes.words_for(rows + start)), seed=rows)
    x = ring_values((rows, columns), seed=columns)
    bits = torch.tensor(
        [[(int(line[i >> 6]) >> (i & 63)) & 1 for i in range(start, start + rows)] for line in words]
    ).long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitplanes, "COMPILED", compiled)
        assert torch.equal(subset_sums(words, x, start), bits.view(subsets, rows) @ x)


# What it costs.


BY_PLACES = [
    (Linear(), (9, 3), (2, 3)),
    (Conv2d((1, 1), (1, 1)), (2, 1, 5, 5), (2, 1, 3, 3)),
    (Conv2d((1, 2), (1, 0), (1, 2), 2), (2, 4, 5, 6), (2, 2, 2, 1)),
    (Conv2d((1, 1), (1, 1), groups=3), (1, 3, 4, 4), (3, 1, 3, 3)),
]
BY_CHANNELS = [
    (Linear(), (1, 9), (2, 9)),
    (Linear(), (5,), (3, 5)),
    (Linear(), (2, 3), (130, 3)),
    (Conv2d((2, 2), (1, 1)), (1, 3, 5, 5), (9, 3, 3, 3)),
    (Conv2d((1, 1), (0, 1), groups=3), (1, 3, 3, 3), (9, 1, 3, 3)),
]
NAMED = {"places": BY_PLACES, "channels": BY_CHANNELS}
ALL = [(by, *layer) for by, layers in NAMED.items() for layer in layers]


def traffic(product: Callable, x: tuple, w: tuple, verified: bool) -> dict[Phase, tuple[int, int]]:
    """Bytes and rounds of each phase."""
    with Profile() as profile:
        run(product, ring_values(x), ring_values(w), verified)
    lines = {phase: [m for m in profile.ledger if m.phase == phase] for phase in Phase}
    return {p: (sum(m.bytes for m in sent), max((m.round for m in sent), default=0)) for p, sent in lines.items()}


@pytest.mark.parametrize(("by", "product", "x", "w"), ALL)
def test_the_check_costs_what_it_states_and_nothing_online(by, product, x, w):
    groups = getattr(product, "groups", 1)
    depth, channels = math.prod(w[1:]), w[0] // groups
    places = product(torch.zeros(x, dtype=torch.int64), torch.zeros(w, dtype=torch.int64)).numel() // w[0]
    run(product, ring_values(x), ring_values(w), False)  # the session's keys, where this test is its first
    before, after = (traffic(product, x, w, verified) for verified in (False, True))
    assert after[Phase.ONLINE] == before[Phase.ONLINE]
    once, ahead, rounds = after[Phase.SETUP], after[Phase.OFFLINE], before[Phase.OFFLINE][1]
    assert by == ("channels" if places < 2 * channels else "places")
    more = {"places": depth + channels, "channels": places}
    assert ahead[0] - before[Phase.OFFLINE][0] == 8 * 40 * groups * more[by] + 32
    assert once[0] - before[Phase.SETUP][0] == (8 * 40 * groups * depth if by == "channels" else 0)
    assert ahead[1] == {"places": rounds + 1, "channels": rounds}[by]


# A dealer that cheats.


@contextmanager
def falsified(change: Callable[[str, torch.Tensor], None]):
    """The dealer's messages are changed in their place before S reads them; `change` is told which it is."""
    dealt = LocalRuntime.transfer

    def transfer(self, line, value):
        if (line.src.role, line.phase) == ("Q", Phase.OFFLINE):
            change(line.label, value)
        return dealt(self, line, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRuntime, "transfer", transfer)
        yield


def at(where: int, by: int) -> Callable[[torch.Tensor], None]:
    def change(value: torch.Tensor) -> None:
        flat = value.view(-1)
        flat[where % len(flat)] += by

    return change


def cancelling(value: torch.Tensor) -> None:
    """Two errors that cancel in the sum of all."""
    at(0, 1 << 40)(value)
    at(-1, -(1 << 40))(value)


FALSE = {
    "a low bit": ("c_S", at(0, 1)),
    "the top bit": ("c_S", at(-1, TOP)),
    "the top bit in the middle": ("c_S", lambda v: at(v.numel() // 2, TOP)(v)),
    "two that cancel": ("c_S", cancelling),
    "all top bits": ("c_S", lambda v: v.add_(TOP)),
    "everything": ("c_S", lambda v: v.bitwise_not_()),
    "zeros": ("c_S", lambda v: v.zero_()),
    "a further row": ("more_S", at(0, 1)),
    "the top bit of a further row": ("more_S", at(-1, TOP)),
    "all further rows": ("more_S", lambda v: v.add_(TOP)),
}  # fmt: skip


@pytest.mark.parametrize("how", FALSE)
@pytest.mark.parametrize(("by", "product", "x", "w"), ALL)
def test_whatever_is_dealt_falsely_is_found(by, product, x, w, how):
    which, change = FALSE[how]
    seen = []

    def changed(label: str, value: torch.Tensor) -> None:
        if label == which:
            seen.append(value.clone())
            change(value)

    with falsified(changed), pytest.raises(FalseDealingError, match="dealer") as caught:
        run(product, ring_values(x), ring_values(w))
    assert len(seen) == 1 and not any(digit.isdigit() for digit in str(caught.value)), "no share is named"


@given(st.sampled_from(ALL), st.integers(0, 1 << 20), st.integers(0, 63), st.sampled_from(("c_S", "more_S")))
def test_any_bit_is_found(layer, where, bit, which):
    _, product, x, w = layer
    change = at(where, TOP if bit == 63 else 1 << bit)
    with falsified(lambda label, value: change(value) if label == which else None), pytest.raises(FalseDealingError):
        run(product, ring_values(x), ring_values(w))


def test_an_error_is_found_but_for_coins_that_the_dealer_does_not_have():
    """With one sum instead of 40, an error of one element passes half the time: the coins are not of its streams."""
    passed, count = 0, 200
    with pytest.MonkeyPatch.context() as patch, falsified(lambda label, v: at(0, 1)(v) if label == "c_S" else None):
        patch.setattr(sums, "TESTS", 1)
        for _ in range(count):
            try:
                run(Linear(), torch.ones(9, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
                passed += 1
            except FalseDealingError:
                pass
    # A binomial with p = 1/2: 8 standard deviations are off with probability below 10^-14.
    assert abs(passed - count / 2) < 8 * math.sqrt(count) / 2


@pytest.mark.parametrize("w", [torch.zeros(3, 5, dtype=torch.int64), ring_values((3, 5), 63, 1)])
def test_sums_of_a_weight_s_mask_are_under_words_that_s_has_not(w):
    """The mask itself would follow from sums of it, and then the weight from what S was sent."""
    with Session().call() as net:
        a = mask_weight(net.setup, net.own(net.A, w, Phase.SETUP, "w")).a
        found = sums.sum_channels(net.setup, Linear(), a)
        psi, mask, sent = net.read(found.psi, S), net.read(a, A), net.read(found.masked, S)
    plain = subset_sums(psi, mask, 0)
    more = (sent[0] - plain).flatten().tolist()
    assert len(set(more)) == 40 * 5, "another word for each sum and each input"


# In programs.


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Unflatten(1, (8, 1)), nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Flatten(), nn.Linear(48, 2),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("batches", [(1, 2, 9, 1, 2), (9, 1, 9)])
def test_what_is_sent_once_a_session_is_sent_once_for_all_programs_of_a_model(batches):
    model, one = small_model(), Session()
    secure, plain = sectorch.secure(model, VERIFIED, session=one), sectorch.reference(model, Scheme())
    sent = []
    for batch in batches:
        x = torch.randn(batch, 2, 6)
        with Profile() as profile:
            y = secure(x)
        assert torch.equal(y, plain(x))
        sent.append(sum(m.path.endswith("sum_channels") for m in profile.ledger if m.phase == Phase.SETUP))
    first = batches.index(1)  # the convolution over lines and the linear layer have no more places than channels then
    assert sent == [2 if i == first else 0 for i in range(len(batches))]


def test_prepared_material_is_looked_at_when_it_is_prepared():
    """And otherwise in the call, before anything is sent to Q; a session goes on where nothing is false."""
    model, x = small_model(), torch.randn(1, 2, 6)
    secure, wanted = sectorch.secure(model, VERIFIED, session=Session()), sectorch.reference(model, Scheme())(x)
    secure.preprocess(x)
    assert torch.equal(secure(x), wanted)
    for which in ("c_S", "more_S"):
        for ask in (secure.preprocess, secure):
            with falsified(lambda label, v, which=which: at(0, TOP)(v) if label == which else None):
                with Profile() as profile, pytest.raises(FalseDealingError):
                    ask(x)
            assert not [m for m in profile.ledger if m.dst.role == "Q"]
            assert ask is secure or not [m for m in profile.ledger if m.phase == Phase.ONLINE]
    assert torch.equal(secure(x), wanted)


def test_a_layer_alone_is_checked_although_nothing_else_is_dealt():
    """There is no proof of bits then, and the check is a step of the program all the same."""
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    secure = sectorch.secure(model, VERIFIED, session=Session())
    assert torch.equal(secure(x), sectorch.reference(model, Scheme())(x))
    with falsified(lambda label, v: at(0, 1)(v) if label == "c_S" else None), pytest.raises(FalseDealingError):
        secure(x)


class Cheating(PartyRuntime):
    """A party's runtime; Q's falsifies its half of a product before it leaves."""

    def transfer(self, line, value):
        if self.me == Q == line.src and line.label == "c_S":
            value = value + TOP
        return super().transfer(line, value)


@pytest.mark.parametrize(("rows", "notices", "honest"), [(4, "A", False), (1, "S", False), (4, "A", True)])
def test_parties_apart_end_before_q_learns_anything(rows, notices, honest):
    """A looks at sums of places and S at sums of channels; who does not look loses its peer, and so does Q."""
    model, x = nn.Linear(3, 2).eval(), torch.randn(rows, 3)
    with torch.device("meta"):
        blank = nn.Linear(3, 2).eval()

    def party(me, ends):
        runtime = (PartyRuntime if honest else Cheating)(me, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})
        secure = sectorch.secure(model if me == A else blank, VERIFIED, session=Session(runtime=runtime))
        return secure(x if me == Q else x.to("meta"))

    found = in_threads([(Q, S), (A, S)], party)
    if honest:
        assert torch.equal(found["Q"], sectorch.reference(model, Scheme())(x))
    else:
        assert isinstance(found.pop(notices), FalseDealingError)
        assert all(isinstance(value, PeerLostError) for value in found.values())


class Product(nn.Module):
    """A product that is none of the two kinds."""

    def __init__(self, f: Callable, *shape: int):
        super().__init__()
        self.f, self.w = f, nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.f(x, self.w)


UNPROVED = {
    "einsum": Product(lambda x, w: torch.einsum("ij,kj->ik", x, w), 3, 4),
    "matmul": Product(torch.matmul, 4, 3),
    "swapped": Product(lambda x, w: torch.matmul(w, x.T), 3, 4),
    "by elements": Product(torch.mul, 4),
    "a vector": Product(nn.functional.linear, 4),
    "two secrets": Product(lambda x, w: torch.matmul(x, x.T), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPROVED)
def test_what_has_no_check_is_refused(name):
    x = torch.randn(2, 4)
    model = UNPROVED[name].eval()
    sectorch.secure(model, session=Session())(x)
    with falsified(lambda *_: pytest.fail("something was dealt")), pytest.raises(UnsupportedOpError, match="audited"):
        sectorch.secure(model, VERIFIED, session=Session())(x)


def test_only_the_products_themselves_are_known_and_none_that_is_made_of_them():
    class Other(Linear):
        def __call__(self, x, weight, tiles=None):
            return super().__call__(x, weight, tiles) * 2

    assert (
        products.is_known_product(Linear())
        and products.is_known_product(Conv2d())
        and not products.is_known_product(Other())
    )
