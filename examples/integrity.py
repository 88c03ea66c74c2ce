"""A layer whose server is checked: a convolution and a ReLU, of which A verifies every word that S sends.

    python examples/integrity.py

docs/integrity.md has the algebra. All that S sends is a linear function of values that the dealer Q knows, with
coefficients that A knows. Q deals S a tag for each of these values and A draws the keys. S applies to the tags what it
applies to the values, and at the end sends A a hash of the tags of all that it has sent. A computes them from its keys.

- A ring element v has the tag K + Delta v mod 2^(64 + SIGMA), with Delta of SIGMA bits. What S sends of such values has
  SIGMA bits more.
- A bit has SIGMA tag bits: K xor v Delta.
- The product of S's mask b with the masked weight W has one tag for SIGMA random subsets of the places: Q deals S
  b' = z - chi b, and S computes b' W. Nothing is added to what is sent online, and nothing is lifted.

A sends its half of the result after the check. It is a prototype of one layer, as a study, and no part of the package.
"""

import hashlib
import hmac
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sectorch
from sectorch.choreography import Located, Message, Net, Phase, leaf, protocol
from sectorch.choreography.ledger import Observer, Profile
from sectorch.choreography.located import compute, with_shapes
from sectorch.choreography.net import Draw, Move
from sectorch.errors import FalseServerError
from sectorch.mpc.star.and_layers import mask_products, next_state, pick
from sectorch.mpc.star.compare import deal_codes, forest_worth, leaves
from sectorch.mpc.star.linear import MaskedWeight, linear, mask_weight
from sectorch.mpc.star.masking import ComputedCorrection, Masked, deal_bits, planes_of
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.select import bits_less, choose_by_bits, per_element, random_bits
from sectorch.mpc.star.shares import reveal, share
from sectorch.nn.models import ZOO
from sectorch.ring import logical_shift, products
from sectorch.ring.bitplanes import words_for

SIGMA = 40
"""A falsified word passes with probability 2^-SIGMA."""
SPAN = (0, 63)
"""The planes that a comparison looks at."""

# Numbers mod 2^128 in two words [2, ...], the low one first. A tag is such a number mod 2^(64 + SIGMA).

_LEAST, _HALF = -(1 << 63), (1 << 32) - 1


def lifted(low: torch.Tensor) -> torch.Tensor:
    """Ring elements as whole numbers 0 .. 2^64 - 1."""
    return torch.stack((low, torch.zeros_like(low)))


def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y."""
    low = x[0] + y[0]
    return torch.stack((low, x[1] + y[1] + ((low ^ _LEAST) < (x[0] ^ _LEAST))))


def minus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x - y."""
    return torch.stack((x[0] - y[0], x[1] - y[1] - ((x[0] ^ _LEAST) < (y[0] ^ _LEAST)).long()))


def times(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """x c for whole numbers c of 0 .. 2^64 - 1."""
    (a0, a1), (c0, c1) = ((v & _HALF, logical_shift(v, 32)) for v in (x[0], c))
    middle = a1 * c0 + logical_shift(a0 * c0, 32)
    other = a0 * c1 + (middle & _HALF)
    over = a1 * c1 + logical_shift(middle, 32) + logical_shift(other, 32)
    return torch.stack((x[0] * c, x[1] * c + over))


def tag_of(key: torch.Tensor, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """key + delta v."""
    return plus(key, times(v, delta))


def _packed_shape(x: torch.Tensor, sigma: int) -> torch.Tensor:
    return torch.empty(*x.shape[1:], 8 + -(-sigma // 8), dtype=torch.uint8, device="meta")


@leaf(shapes=_packed_shape)
def packed(x: torch.Tensor, sigma: int) -> torch.Tensor:
    """x mod 2^(64 + sigma) as bytes [..., 8 + sigma / 8]."""
    low, high = (v.contiguous().unsqueeze(-1).view(torch.uint8) for v in (x[0], x[1] & ((1 << sigma) - 1)))
    return torch.cat((low, high[..., : -(-sigma // 8)]), -1)


@leaf(shapes=lambda data: torch.empty(2, *data.shape[:-1], dtype=torch.int64, device="meta"))
def unpacked(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`."""
    data = F.pad(data, (0, 16 - data.shape[-1]))
    return data.contiguous().view(torch.int64).movedim(-1, 0).contiguous()


# Keys at A, tags at S


@dataclass
class Tagged:
    """A value of S's, with its tag at S and the tag's key at A."""

    value: Located
    tag: Located
    key: Located

    def through(self, f: Callable, *others: "Tagged", public: tuple = ()) -> "Tagged":
        """f of values, tags and keys: f is linear, with public coefficients."""
        parts = [(x.value, x.tag, x.key) for x in (self, *others)]
        return Tagged(*(compute(f, *row, *public) for row in zip(*parts, strict=True)))


@dataclass
class Checks:
    """The keys of a call, and what S's tags have to be.

    Attributes:
        delta: at D and A, `sigma` random bits. planes: at D and A, the bits of a second one as masks [sigma, 1].
        tags: at S, the tags of all that it has sent, as it has them. expected: at A, the same by the keys.
    """

    sigma: int
    delta: Located
    planes: Located
    tags: list[Located] = field(default_factory=list)
    expected: list[Located] = field(default_factory=list)

    def note(self, tag: Located, expected: Located) -> None:
        self.tags.append(tag)
        self.expected.append(expected)

    def note_sent(self, x: "Tagged", sent: Located) -> None:
        """Note the tags of whole numbers: S's own, and those that the numbers which A has received should have."""
        self.note(packed(x.tag, self.sigma), packed(compute(tag_of, x.key, self.delta, sent), self.sigma))

    def note_bits(self, x: "Tagged", sent: Located) -> None:
        """The same of packed bits."""
        self.note(x.tag, compute(_bit_tags, x.key, self.planes, sent))


def begin_checks(net: Net, sigma: int) -> Checks:
    """Draw the keys of a call. No message."""
    words = net.common(net.D, net.A, (2,), "delta")
    places = torch.arange(sigma)
    return Checks(sigma, words[0] & ((1 << sigma) - 1), compute(_plane_masks, words[1], places))


def _plane_masks(word: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return -((word >> places) & 1).unsqueeze(1)


@protocol("authenticate", "docs/integrity.md", [Message("tag", "D", "S", "key of k_DA")])
def authenticate(net: Net, checks: Checks, v: Located) -> Tagged:
    """Deal tags of whole numbers [2, ...] at D and S: ahead 8 + sigma / 8 bytes for each, uniform to S."""
    key = net.common(net.D, net.A, v.shape, "key")
    tag = packed(compute(tag_of, key, checks.delta, v), checks.sigma).send(net.D, net.S, "tag")
    return Tagged(v.at(net.S), unpacked(tag).at(net.S), key.at(net.A))


@protocol("deal_tagged", "docs/integrity.md", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_tagged(net: Net, checks: Checks, v: Located | ComputedCorrection) -> tuple[Located, Tagged]:
    """`deal`, of which S's half has tags: ahead 16 + sigma / 8 bytes for each element."""
    v_A = net.common(net.D, net.A, v.shape, "v_A")
    v_S = (v - v_A).send(net.D, net.S, "v_S")
    return v_A.at(net.A), authenticate(net, checks, compute(lifted, v_S))


@protocol("authenticate_bits", "docs/integrity.md", [Message("tag", "D", "S", "key of k_DA")])
def authenticate_bits(net: Net, checks: Checks, words: Located) -> Tagged:
    """Deal tags of packed bits [rows, W] at D and S, [rows, sigma W]: ahead sigma bits for each, uniform to S."""
    rows, width = words.shape
    key = net.common(net.D, net.A, (rows, checks.sigma * width), "key")
    tag = compute(_bit_tags, key, checks.planes, words).send(net.D, net.S, "tag")
    return Tagged(words.at(net.S), tag.at(net.S), key.at(net.A))


@leaf(shapes=lambda key, planes, words: torch.empty_like(key))
def _bit_tags(key: torch.Tensor, planes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return key ^ (words.unsqueeze(1) & planes).flatten(1)


def copies(words: torch.Tensor, number: int) -> torch.Tensor:
    """Packed bits [rows, W] once for each plane of their tags."""
    return words.repeat(1, number)


# A layer


@protocol("checked_linear", "docs/integrity.md", [
    Message("m", "S", "A", "b of k_DS"),
    Message("c_A", "A", "S", "r_A of k_DA"),
    Message("c_S", "S", "A", "r_S of k_DS"),
    Message("sums", "D", "S", "z of k_DA"),
    Message("more", "D", "S", "z of k_DA"),
])  # fmt: skip
def checked_linear(
    net: Net, setup: Net, checks: Checks, product: Callable, x_A: Located, x_S: Tagged, weight: MaskedWeight
) -> tuple[Located, Located, Located, Located]:
    """Open product(x, omega) + r to A and S: (c, r at D, r_A, r_S).

    Online sigma / 8 bytes for each element of x more than `linear` and `open_masked`. Ahead 8 + sigma / 8 bytes for the
    tag of each element of b, and 8 sigma (K + N) for sums over the places.
    """
    D, A, S = net.D, net.A, net.S
    by_omega, by_a, by_masked = weight.products(setup, product, x_A.shape)
    mask = net.common(S, D, (2, *x_A.shape), "b")
    b = mask[0]
    m = x_S.through(minus, authenticate(net, checks, mask))
    sent = packed(m.value, checks.sigma).send(S, A, "m")
    shown = unpacked(sent)
    checks.note_sent(m, shown)

    y_A, y_S, excess = by_omega(x_A + shown[0]), by_masked(b), by_a(b)
    r_A, r_S = net.common(D, A, y_S.shape, "r_A"), net.common(D, S, y_S.shape, "r_S")
    c_A, c_S = (y_A + r_A).send(A, S, "c_A"), (y_S + r_S).send(S, A, "c_S")

    # chi c_S = chi b W + chi r_S. S is sent what chi b and chi r_S lack to z and z', of which it knows nothing.
    groups, channels, depth = compute(products.matrix, product, weight.masked).shape
    places = y_S.shape.numel() // (groups * channels)
    chi = net.common(D, A, (checks.sigma, words_for(places)), "chi")
    z, more_z = (net.common(D, A, (groups, checks.sigma, n), "z") for n in (depth, channels))
    sums = (z - compute(_sum_inputs, product, weight.shape, b, chi)).send(D, S, "sums")
    more = (more_z - compute(_sum_outputs, product, r_S, chi)).send(D, S, "more")
    rows = compute(products.matrix, product, weight.masked)
    checks.note(
        compute(_sums_times, sums, rows) + more,
        compute(_sums_times, z, rows) + more_z - compute(_sum_outputs, product, c_S, chi),
    )
    return c_A + c_S, compute(_total, r_A, r_S, excess), r_A, r_S


def _total(*values: torch.Tensor) -> torch.Tensor:
    return sum(values[1:], values[0])


def _sum_rows(chi: torch.Tensor, parts: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Sums of those rows that the bits choose: [k, W] and [groups, R, n] -> [groups, k, n]."""
    groups, count, width = parts.shape
    sums = products.subset_sums(chi, parts.transpose(0, 1).reshape(count, groups * width), start)
    return sums.view(len(sums), groups, width).transpose(0, 1)


def _inputs_shape(product, kernel, b, chi):
    groups, _, depth = products.matrix(product, torch.empty(kernel, device="meta")).shape
    return torch.empty(groups, chi.shape[0], depth, dtype=torch.int64, device="meta")


@with_shapes(_inputs_shape)
def _sum_inputs(product: Callable, kernel: torch.Size, b: torch.Tensor, chi: torch.Tensor) -> torch.Tensor:
    """chi b, over the rows of inputs that outputs depend on: [groups, sigma, K]."""
    parts, at = [], 0
    for rows in products.inputs(product, b, kernel):
        parts.append(_sum_rows(chi, rows, at))
        at += rows.shape[1]
    return torch.stack(parts).sum(0)


def _sum_outputs(product: Callable, y: torch.Tensor, chi: torch.Tensor) -> torch.Tensor:
    """chi y, over the places of outputs: [groups, sigma, N]."""
    return _sum_rows(chi, products.outputs(product, y))


def _sums_times(sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return products.times_each(sums, rows.transpose(1, 2))


@protocol("checked_sign", "docs/integrity.md", [
    Message("masked_A", "A", "S", "alpha_A of k_DA"), Message("masked_S", "S", "A", "alpha_S of k_DS"),
])  # fmt: skip
def checked_sign(net: Net, checks: Checks, x: Masked) -> tuple[Located, Tagged]:
    """[x >= 0] as XOR shares [1, W], of which S's has tags: `drelu`, with sigma tag bits for each bit of S's."""
    D, A, S, sigma = net.D, net.A, net.S, checks.sigma
    codes = deal_codes(net, x, [SPAN], SPAN[1:])
    codes_S = authenticate_bits(net, checks, codes.S)
    bits = planes_of(x.c)
    wide = compute(copies, bits, sigma)
    state_A = leaves(bits, codes.A, (SPAN,), True).at(A)
    state = Tagged(*(leaves(b, v, (SPAN,), False) for b, v in
                     ((bits, codes_S.value), (wide, codes_S.tag), (wide, codes_S.key))))  # fmt: skip

    layers, _ = forest_worth(net, x.shape.numel(), (state_A.shape[0] // 2,), (False,))
    opened, count = sum(len(v.opened_rows) for v in layers), sum(len(v.products) for v in layers)
    alpha_A = net.common(D, A, (opened, bits.shape[1]), "alpha_A")
    alpha_S = net.common(D, S, (opened, bits.shape[1]), "alpha_S")
    dealt = deal_bits(net, ComputedCorrection(mask_products, (count, bits.shape[1]), (alpha_A, alpha_S, layers)))
    alpha, dealt_S = (authenticate_bits(net, checks, v) for v in (alpha_S, dealt.S))
    at = start = 0
    for number, layer in enumerate(layers):
        rows, following = len(layer.opened_rows), layers[number + 1] if number + 1 < len(layers) else None
        own = slice(at, at + rows)
        sent_A = (compute(pick, state_A, layer.opened_rows) ^ alpha_A.at(A)[own]).send(A, S, "masked_A")
        shown = Tagged(*(compute(pick, v, layer.opened_rows) ^ a[own] for v, a in
                         zip(vars(state).values(), vars(alpha).values(), strict=True)))  # fmt: skip
        sent_S = shown.value.send(S, A, "masked_S")
        checks.note_bits(shown, sent_S)
        place, public = (layer, following, at, start), (sent_A, sent_S)
        wide = tuple(compute(copies, v, sigma) for v in public)
        state_A = next_state(*public, state_A, alpha_A.at(A), dealt.A, *place, True)[0]
        own_rows = zip((public, wide, wide), *(vars(v).values() for v in (state, alpha, dealt_S)), strict=True)
        state = Tagged(*(next_state(*opened, *rows, *place, False)[0] for opened, *rows in own_rows))
        at, start = at + rows, start + len(layer.products)
    last = lambda v, c: v[:1] ^ c[-1:]
    return ~(compute(last, state_A, codes.A) ^ bits[SPAN[1] :]), state.through(last, codes_S)


@protocol("checked_select", "docs/integrity.md", [
    Message("e_A", "A", "S", "b_A of k_DA"), Message("e_S", "S", "A", "b_S of k_DS"),
])  # fmt: skip
def checked_select(net: Net, checks: Checks, s_A: Located, s_S: Tagged, x: Masked) -> tuple[Located, Tagged]:
    """s x, of which S's half has tags: `select`, with three tags for each element."""
    mask = random_bits(net, x.shape)
    bits = ComputedCorrection(bits_less, mask.shape, mask.words)
    (b, *at_A), halves = zip(
        *(deal_tagged(net, checks, v) for v in (bits, x.r, choose_by_bits(mask, x.r))), strict=True
    )
    masked = s_S.through(_xor, authenticate_bits(net, checks, mask.b_S.unsqueeze(0)))
    e_A = (s_A ^ mask.b_A.at(net.A).unsqueeze(0)).send(net.A, net.S, "e_A")
    e_S = masked.value.send(net.S, net.A, "e_S")
    checks.note_bits(masked, e_S)
    e = compute(_selected_bits, e_A, e_S, x.shape)
    own = compute(_half_A, e, x.c, b, *at_A)
    return own, halves[0].through(_half_S, *halves[1:], public=(x.c, e))


def _xor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x ^ y


@leaf(shapes=lambda first, second, shape: torch.empty(shape, dtype=torch.int64, device="meta"))
def _selected_bits(first: torch.Tensor, second: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return per_element(first.flatten(), second.flatten(), shape, None)


def _half_A(e: torch.Tensor, c: torch.Tensor, b: torch.Tensor, r: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A's half of s (c - r), where s is b or, with e, 1 - b."""
    return torch.where(e != 0, c - b * c - r + chosen, b * c - chosen)


def _half_S(b: torch.Tensor, r: torch.Tensor, chosen: torch.Tensor, c: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """S's half of the same, as whole numbers: linear in b, r and chosen."""
    half = minus(times(b, c), chosen)
    return torch.where(e != 0, minus(torch.zeros_like(half), plus(half, r)), half)


@protocol("checked_reveal", "docs/integrity.md", [
    Message("c_S", "S", "A", "rho_S of k_DS"),
    Message("tags", "S", "A", "what follows from A's keys and from what S has sent"),
    Message("c", "A", "S", "rho of k_DA and k_DS"),
    Message("seal", "A", "S", "a key of k_QA"),
    Message("result", "S", "Q", "rho of k_DA and k_DS", "the result, which is Q's to learn"),
    Message("sealed", "S", "Q", "a key of k_QA"),
])  # fmt: skip
def checked_reveal(net: Net, checks: Checks, y_A: Located, y_S: Tagged) -> Located:
    """Show Q y, after A has checked all that S has sent.

    Rounds 4, online 24 + sigma / 8 bytes for each element, and 96.

    Raises:
        FalseServerError: at A, S has sent something else than the program says; at Q, it has changed the result.
    """
    Q, D, A, S = net.Q, net.D, net.A, net.S
    rho_A = net.common(D, A, y_A.shape, "rho_A")
    rho_S = net.common(D, S, (2, *y_A.shape), "rho_S")
    masked = y_S.through(plus, authenticate(net, checks, rho_S))
    sent = unpacked(packed(masked.value, checks.sigma).send(S, A, "c_S"))
    checks.note_sent(masked, sent)
    found = compute(_hash, checks.tags).send(S, A, "tags")
    passed = net.check(A, _compare, found, compute(_hash, checks.expected))
    c = compute(_after, passed, y_A + rho_A.at(A) + sent[0]).send(A, S, "c")
    key = net.common(Q, A, (4,), "seal")
    seal = compute(_seal, key, c).send(A, S, "seal")
    result, sealed = c.at(S).send(S, Q, "result"), seal.at(S).send(S, Q, "sealed")
    passed = net.check(Q, _compare, compute(_seal, key.at(Q), result.at(Q)), sealed.at(Q))
    return compute(_after, passed, result.at(Q)) - rho_A.at(Q) - rho_S.at(Q)[0]


def _bytes_shape(*_: Any) -> torch.Tensor:
    return torch.empty(32, dtype=torch.uint8, device="meta")


@with_shapes(_bytes_shape)
def _hash(values: list[torch.Tensor]) -> torch.Tensor:
    """SHA-256 of tags."""
    state = hashlib.sha256()
    for v in values:
        state.update(v.contiguous().numpy().data)
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


@with_shapes(_bytes_shape)
def _seal(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """HMAC-SHA256 of a value under a key that is used once."""
    found = hmac.digest(key.numpy().tobytes(), value.contiguous().numpy().tobytes(), "sha256")
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


@with_shapes(lambda *_: torch.empty(1, dtype=torch.uint8, device="meta"))
def _compare(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if not torch.equal(found, expected):
        raise FalseServerError("S has sent something else in this layer than the program says")
    return torch.zeros(1, dtype=torch.uint8)


def _after(passed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value; it exists after the check."""
    return value + passed.to(value.dtype).sum()


def checked_layer(net: Net, setup: Net, product: Callable, x: Located, weight: MaskedWeight, sigma: int) -> Located:
    """max(product(x, omega), 0), at Q, of which S has falsified nothing, except with a probability of 2^-sigma.

    Args:
        product: `ring.products.Linear` or `Conv2d`. x: ring elements at Q. weight: A's.
    """
    checks = begin_checks(net, sigma)
    opened = Masked(*checked_linear(net, setup, checks, product, *deal_tagged(net, checks, x), weight))
    return checked_reveal(net, checks, *checked_select(net, checks, *checked_sign(net, checks, opened), opened))


def plain_layer(net: Net, setup: Net, product: Callable, x: Located, weight: MaskedWeight) -> Located:
    """The same layer as the package runs it."""
    return reveal(net, relu(net, linear(net, setup, product, share(net, x), weight)))


def run(layer: Callable, product: Callable, x: torch.Tensor, omega: torch.Tensor, session: Any = None, *more: Any,
    observer: Any = None,
):  # fmt: skip
    """The layer's result at Q, and its profile without what is done once a session."""
    session = session or sectorch.Session()
    A = session.answering[0]
    setup = session.setup(A)
    weight = mask_weight(setup, setup.own(A, omega, Phase.SETUP))
    with session.call(A) as net:
        with sectorch.profile() as profile, observer or nullcontext():
            found = net.read(layer(net, setup, product, net.own(net.Q, x), weight, *more), net.Q)
    return found, profile


# What a whole call would take

BITS = ("deal_bits/v_S", "alpha_S", "b_S")
"""Messages and draws that give S packed bits; the others give it numbers, of 8 bytes or of 4."""


def counts_of(model: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """What would have tags in a call of the default protocols, and what S would send in more bytes.

    Keys of function secret sharing, which few elements take, are left out.
    """
    program = sectorch.secure(model.eval(), session=sectorch.Session()).choreography(torch.zeros(1, *shape))
    steps, found = [node.step for node in program.call], Counter[str]()
    headers = [step.header for step in steps if isinstance(step, Move)]
    given = [(f"{h.protocol}/{h.label}", h.shape, h.dtype) for h in headers if (h.src.role, h.dst.role) == ("Q", "S")]
    given += [(step.name, step.size, step.dtype) for step in steps
              if isinstance(step, Draw) and {p.role for p in step.owners} == {"Q", "S"}]  # fmt: skip
    for name, size, dtype in given:
        if "deal_key" not in name:
            kind = "bits" if name.endswith(BITS) else "numbers" if dtype == torch.int64 else "half numbers"
            found[f"tagged {kind}"] += size.numel() * (64 if kind == "bits" else 1)
    for header in headers:
        if header.src.role == "S" and header.label in ("m", "c_S", "result"):
            # What is sent ahead is the opening of a product. Sums over places check it, and its mask has no tags.
            kind = "longer numbers" if header.phase == Phase.ONLINE else "tagged numbers"
            found[kind] += header.shape.numel() * (1 if header.phase == Phase.ONLINE else -1)
            found["results"] += header.shape.numel() * (header.label == "result")
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            found["sums"] += SIGMA * (m.weight[0].numel() + len(m.weight))
    return dict(found)


def bytes_of(counts: dict[str, int]) -> tuple[int, int]:
    """Bytes online and ahead that checks add to a call of these counts."""
    high = SIGMA // 8
    online = high * counts["longer numbers"] + 16 * counts["results"] + 96
    numbers = (8 + high) * counts["tagged numbers"] + (4 + high) * counts["tagged half numbers"]
    return online, numbers + SIGMA * counts["tagged bits"] // 8 + 8 * counts["sums"]


class StepSeconds(Observer):
    """The seconds of each step, the least of all runs, so that other load of the machine counts little."""

    def __init__(self):
        self._least: list[tuple[str, Phase, float]] = []

    def __enter__(self):
        self._run: list[tuple[str, Phase, float]] = []
        return super().__enter__()

    def computed(self, path, owners, phase, seconds) -> None:
        self._run.append((path, phase, seconds))

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        before = self._least or self._run
        self._least = [min(steps, key=lambda step: step[2]) for steps in zip(before, self._run, strict=True)]

    def total(self, phase: Phase, path: str = "") -> float:
        """Seconds of a phase, all parties together, in protocols of this path."""
        return sum(seconds for where, when, seconds in self._least if when == phase and where.startswith(path))


def main(side: int = 16, channels: int = 32, repeats: int = 20) -> dict[str, float]:
    """Run both layers on random numbers, and print what they take."""
    product, generator = products.Conv2d(padding=(1, 1)), torch.Generator().manual_seed(0)
    x = torch.randint(-(1 << 20), 1 << 20, (1, channels, side, side), generator=generator)
    omega = torch.randint(-(1 << 18), 1 << 18, (channels, channels, 3, 3), generator=generator)
    expected = product(x, omega, None).clamp(min=0)
    figures: dict[str, float] = {}
    steps, profile = StepSeconds(), Profile()
    for name, layer, more in (("plain", plain_layer, ()), ("checked", checked_layer, (SIGMA,))):
        steps = StepSeconds()
        for _ in range(repeats):
            found, profile = run(layer, product, x, omega, None, *more, observer=steps)
            assert torch.equal(found, expected), "the layer is exact"
        figures |= {
            f"{name} online bytes": profile.online_bytes, f"{name} bytes ahead": profile.offline_bytes,
            f"{name} rounds": profile.rounds,
            f"{name} online seconds": steps.total(Phase.ONLINE), f"{name} seconds ahead": steps.total(Phase.OFFLINE),
        }  # fmt: skip
    tags: Counter[str] = Counter()
    for line in profile.ledger:
        tags[line.protocol] += line.bytes
    bits, numbers = 8 * tags["authenticate_bits"] // SIGMA, tags["authenticate"] // (8 + SIGMA // 8)
    of_bits = steps.total(Phase.ONLINE, "checked_sign") + steps.total(Phase.ONLINE, "checked_reveal")
    of_numbers = figures["checked online seconds"] - figures["plain online seconds"] - of_bits
    figures |= {"seconds for tagged bits": of_bits / bits, "seconds for tagged numbers": of_numbers / numbers}
    print(f"{bits} tagged bits and {numbers} tagged numbers: online {of_bits:.2e} s and {of_numbers:.2e} s")
    for what in ("online bytes", "bytes ahead", "online seconds", "seconds ahead", "rounds"):
        before, after = (figures[f"{name} {what}"] for name in ("plain", "checked"))
        print(f"{what}: {before:.6g}, with checks {after:.6g}, times {after / before:.2f}")
    return figures


def print_call(name: str, figures: dict[str, float]) -> None:
    """Print what a call of a network would take, by the seconds that the layer of `main` takes for a tag."""
    make, shape = ZOO[name]
    model = make().eval()
    secure, x = sectorch.secure(model, session=sectorch.Session()), torch.rand(1, *shape)
    secure(x)  # masks the weights
    steps = StepSeconds()
    for _ in range(10):
        with steps:
            secure(x)
    with sectorch.profile() as profile:
        secure(x)
    today = steps.total(Phase.ONLINE)
    counts = counts_of(model, shape)
    online, ahead = bytes_of(counts)
    before, dealt = profile.online_bytes, profile.offline_bytes
    added = sum(figures[f"seconds for {what}"] * counts[what] for what in ("tagged bits", "tagged numbers"))
    print(f"{name}: {counts}")
    print(f"online bytes {before}, with checks {before + online}, times {1 + online / before:.2f}")
    print(f"bytes ahead {dealt}, with checks {dealt + ahead}, times {1 + ahead / dealt:.2f}")
    print(f"online seconds {today:.4f}, with checks {today + added:.4f}, times {1 + added / today:.2f}")


if __name__ == "__main__":
    found = main()
    for name in sys.argv[1:]:
        print_call(name, found)
