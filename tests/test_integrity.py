"""docs/integrity.md: the checked layer is exact, and what S falsifies in it passes with a probability of 2^-sigma."""

from __future__ import annotations

import itertools
import math
import runpy
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st

import sectorch
from sectorch.choreography import PROTOCOLS, Phase
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.net import Draw, Header, Move, Sent
from sectorch.choreography.roles import STAR
from sectorch.errors import FalseServerError
from sectorch.mpc.star import linear
from sectorch.ring import products
from sectorch.testing import Given
from sectorch.testing.joint_knowledge import Views
from sectorch.testing.outcomes import Outcomes
from sectorch.testing.protocol_runs import Case, Draws, Protocol, place_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "integrity.py"
BIT_63 = torch.tensor(-(1 << 63))
LABELS = ("m", "c_S", "masked_S", "e_S", "tags", "result", "sealed")
SHAPES = {
    "rows": (products.Linear(), (6, 5), (4, 5)),
    "one row": (products.Linear(), (1, 3), (2, 3)),
    "pictures": (products.Conv2d(padding=(1, 1)), (2, 3, 5, 4), (4, 3, 3, 3)),
    "groups": (products.Conv2d(stride=(2, 1), groups=2), (1, 4, 6, 5), (6, 2, 3, 2)),
}


@pytest.fixture(scope="module")
def example():
    before = dict(PROTOCOLS)
    yield SimpleNamespace(**runpy.run_path(str(EXAMPLE), run_name="integrity"))
    PROTOCOLS.clear()
    PROTOCOLS.update(before)


def layer_of(name: str, seed: int = 0) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    product, x, omega = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randint(-(1 << 20), 1 << 20, shape, generator=generator)
    return product, draw(x), draw(omega)


Forge = Callable[[int, Header, torch.Tensor], torch.Tensor]


@contextmanager
def server_that_sends(forge: Forge):
    """S sends what `forge` makes of its messages' numbers, headers and contents, and goes on with what it has sent."""
    count = itertools.count()

    def sends(step, runtime, call, values):
        (value,) = values
        if step.header.src.role == "S" and step.header.protocol.startswith("checked"):
            value = forge(next(count), step.header, value)
        return runtime.transfer(Sent.of(step.header, call, runtime.session), value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Move, "run", sends)
        yield


def accepted(example, name: str, sigma: int, forge: Forge, seed: int = 0, session=None) -> Any:
    """The result at Q, or None where a party has found S out."""
    product, x, omega = layer_of(name, seed)
    with server_that_sends(forge):
        try:
            return example.run(example.checked_layer, product, x, omega, session, sigma)[0]
        except FalseServerError:
            return None


def plain(name: str, seed: int = 0) -> torch.Tensor:
    product, x, omega = layer_of(name, seed)
    return product(x, omega, None).clamp(min=0)


def flipped(value: torch.Tensor, word: int, bit: int) -> torch.Tensor:
    """One bit of a message; of numbers of 8 bytes and more the bit is one of the low 64."""
    changed = value.clone()
    if value.dtype == torch.uint8 and value.dim() > 1:  # packed numbers
        flat = changed.view(-1, value.shape[-1])
        flat[word % len(flat), bit // 8] ^= 1 << bit % 8
    else:
        flat = changed.view(-1)
        flat[word % len(flat)] ^= (1 << bit % 8) if value.dtype == torch.uint8 else (BIT_63 if bit == 63 else 1 << bit)
    return changed


def honest(number: int, header: Header, value: torch.Tensor) -> torch.Tensor:
    return value


@pytest.mark.parametrize("sigma", [1, 8, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_the_checked_layer_is_exact_and_accuses_no_honest_server(example, name, sigma):
    for seed in range(3):
        assert torch.equal(accepted(example, name, sigma, honest, seed), plain(name, seed))
        assert torch.equal(example.run(example.plain_layer, *layer_of(name, seed))[0], plain(name, seed))


@pytest.mark.parametrize("size", [0, (1 << 20) - 1])
def test_what_s_and_a_receive_is_uniform(example, size):
    """Each bit of each message is one half the time, for inputs and weights of zeros and for the largest."""
    x, omega = torch.full((1, 4, 8, 8), -size), torch.full((4, 4, 3, 3), size)
    with Transcript() as seen:
        example.run(example.checked_layer, products.Conv2d(padding=(1, 1)), x, omega, None, 40)
    received = [(line, v) for line, v in seen.lines if line.dst.role in "SA" and line.protocol != "seed"]
    assert {line.label for line, _ in received} > {"tag", "sums", "more", "m", "masked_S", "tags", "c", "seal"}
    for line, value in received:
        data = value.contiguous().view(torch.uint8).view(-1, 8) if value.dtype == torch.int64 else value.view(-1, 1)
        bits = data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
        share, count = bits.double().mean(0), len(data)
        assert ((share - 0.5).abs() <= 3 / math.sqrt(count)).all(), line.label  # six standard deviations


# What S sees: for each run with one secret exactly one with any other shows it the same.

MASKS = {"omega_masked": "a", "v_S": "v_A", "tag": "key", "c_A": "r_A", "sums": "z", "more": "z", "masked_A": "alpha_A",
         "e_A": "b_A", "c": "rho_A"}  # fmt: skip
"""The draw of Q and A that hides each message to S."""


class MovedDraws(Draws):
    """The draws of a run, of which some are moved."""

    def __init__(self, draws: Draws):
        self._draws, self.moves = draws, dict[str, list[Callable[[torch.Tensor], torch.Tensor]]]()

    def words(self, place: Any, count: int) -> torch.Tensor:
        found = self._draws.words(place, count)
        for move in self.moves.get(repr(place), ()):
            found = move(found)
        return found


def layer_under_test(example, name: str, sigma: int) -> Protocol:
    product, x, omega = layer_of(name)
    layer = lambda net, x, omega: example.checked_layer(
        net, net.setup, product, x, linear.mask_weight(net.setup, omega), sigma
    )
    given = [Given("Q", tuple(x.shape)), Given("A", tuple(omega.shape), phase=Phase.SETUP)]
    return Protocol(layer, given, STAR, 1)


def move_to(example, protocol: Protocol, at: int, found: torch.Tensor, wanted: torch.Tensor, draws: MovedDraws) -> None:
    """Move the mask of S's message number `at` so that the message is `wanted`."""
    headers = [h for h in protocol.program.messages if h.dst.role == "S"]
    header, name = headers[at], MASKS[headers[at].label]
    alike = [h for h in headers[:at] if h.path == header.path and MASKS.get(h.label) == name]
    steps = [(node.step, number < len(protocol.program.setup)) for number, node in enumerate(protocol.program.nodes)]
    places = [place_of(step, setup) for step, setup in steps
              if isinstance(step, Draw) and step.path == header.path and step.name.endswith(f"/{name}")
              and {p.role for p in step.owners} == {"Q", "A"}]  # fmt: skip
    start = sum(h.shape.numel() for h in alike) if name == "alpha_A" else 0
    place = places[0 if name == "alpha_A" else len(alike)]
    if header.dtype == torch.uint8:
        difference = example.minus(example.unpacked(wanted), example.unpacked(found))
        move = lambda w: example.plus(w.view(difference.shape), difference).reshape(-1)
    else:
        of_bits = header.protocol in ("deal_bits", "authenticate_bits", "checked_sign", "checked_select")
        difference = ((wanted ^ found) if of_bits else (wanted - found)).reshape(-1)
        own = slice(start, start + len(difference))

        def move(w):
            w = w.clone()
            dealt = not of_bits and header.label == "v_S"  # v - v_A
            w[own] = w[own] ^ difference if of_bits else w[own] - difference if dealt else w[own] + difference
            return w

    draws.moves.setdefault(repr(place), []).append(move)


@pytest.mark.parametrize(("name", "sigma"), [("one row", 40), *long(("one row", 8), ("pictures", 8), ("groups", 40))])
def test_what_s_sees_is_the_same_for_any_two_secrets(example, name, sigma):
    """Draws of Q and A are moved until S is sent the same, bit for bit: S's view has one distribution for both.

    Each message has a draw of its own, which hides it. The draws of a layer of ANDs change what is dealt for it, and
    that the next layer: so it takes a pass for each layer, and one for what comes after them.
    """
    protocol = layer_under_test(example, name, sigma)
    _, x, omega = layer_of(name)
    sent = lambda inputs, draws: [v for h, v in protocol.play(inputs, draws).messages if h.dst.role == "S"]
    for seed, other in enumerate(([x + 3, omega], [-x, omega + 1], [torch.zeros_like(x), -omega])):
        draws = Draws(seed)
        first, moved = sent([x, omega], draws), MovedDraws(draws)
        for _ in range(9):
            for at, wanted in enumerate(first):
                if not torch.equal(found := sent(other, moved)[at], wanted):
                    move_to(example, protocol, at, found, wanted, moved)
            if equal := all(map(torch.equal, sent(other, moved), first)):
                break
        assert equal, "every message, the seal included"
        assert moved.moves


@pytest.mark.sectorch_long
@pytest.mark.parametrize("party", ["S", "A"])
def test_check_protocol_accuses_no_sound_layer(example, party):
    """It did, by 148 rows of codes that are functions of 24 opened bits, and that it took for as many experiments.

    Every run has the test above, and of the kit `test_values_that_follow_from_one_opened_word_are_one_experiment`.
    """
    product = products.Linear()
    layer = lambda net, x, w: example.checked_layer(net, net.setup, product, x, linear.mask_weight(net.setup, w), 8)
    given = [Given("Q", (6, 5), -(1 << 20), 1 << 20), Given("A", (4, 5), -(1 << 18), 1 << 18, phase=Phase.SETUP)]
    case = Case.of(layer, given, lambda x, w: product(x, w, None).clamp(min=0), {"elementwise": False, "pairs": 1})
    outcomes = Outcomes(case.trace(), case)
    assert list(Views(outcomes.protocol, outcomes).check({party})) == []


# What S can send.


def once(label: str, change: Callable[[torch.Tensor], torch.Tensor], number: int = 0) -> Forge:
    """Change one message of this label: the first one, or a later one."""
    seen = itertools.count()
    return lambda _, header, value: change(value) if header.label == label and next(seen) == number else value


@pytest.mark.parametrize("name", ["rows", "pictures"])
def test_every_falsified_message_is_found(example, name):
    """One bit, bit 63, and several words of each message, at sigma = 40."""
    sent = []
    accepted(example, name, 40, lambda number, header, value: sent.append(header.label) or value)
    assert set(sent) == set(LABELS) and sent.count("masked_S") == 3 and sent.count("c_S") == 2
    for number, label in enumerate(sent):
        place = sent[:number].count(label)
        for bits in ([(0, 0)], [(-1, 63)], [(w, b) for w in range(5) for b in (0, 63)]):

            def change(value, bits=bits):
                for word, bit in bits:
                    value = flipped(value, word, bit)
                return value

            assert accepted(example, name, 40, once(label, change, place)) is None, (label, place, bits)


def test_consistent_errors_in_several_messages_are_found(example):
    """d is added to m, so that A's sums are too large by d omega, and taken off c_S; and bit 63 of all messages."""
    _, _, omega = layer_of("rows")

    def shifted(number, header, value):
        if header.label == "m":
            return example.packed(example.plus(example.unpacked(value), example.lifted(torch.ones(6, 5).long())), 40)
        if header.label == "c_S" and value.dtype == torch.int64:
            return value - omega.sum(1)
        return value

    product, x, _ = layer_of("rows")
    with server_that_sends(shifted):  # without the check nobody would see it
        patch = pytest.MonkeyPatch()
        unseen = lambda found, expected: torch.zeros(1, dtype=torch.uint8)
        patch.setitem(example.run.__globals__, "_compare", unseen)
        found = example.run(example.checked_layer, product, x, omega, None, 40)[0]
        patch.undo()
    assert torch.equal(found, plain("rows"))
    assert accepted(example, "rows", 40, shifted) is None
    for label in ({"m", "c_S"}, {"masked_S", "e_S"}, {"m", "c_S", "masked_S", "e_S"}):
        assert (
            accepted(example, "rows", 40, lambda n, h, v, on=label: flipped(v, n, 63) if h.label in on else v) is None
        )


@pytest.mark.parametrize("label", LABELS)
def test_messages_of_another_call_are_found(example, label):
    session, kept = sectorch.Session(), []
    accepted(example, "rows", 40, lambda n, h, v: kept.append(v) or v if h.label == label else v, session=session)
    assert kept and accepted(example, "rows", 40, lambda n, h, v: kept.pop(0) if h.label == label else v) is None
    assert not kept


def test_tags_of_zeros_are_found(example):
    for tags in (torch.zeros(32, dtype=torch.uint8), example._hash([torch.zeros(4).long()])):
        assert accepted(example, "rows", 40, once("tags", lambda value, tags=tags: tags)) is None


# How many pass.


def within_binomial(passed: int, runs: int, probability: float) -> bool:
    """Whether the number is within 4.5 standard deviations of its mean: wrong once in 150,000 times."""
    return abs(passed - runs * probability) <= 4.5 * math.sqrt(runs * probability * (1 - probability))


FALSIFIED = [("m", 0), ("c_S", 0), ("masked_S", 0), ("masked_S", 2), ("e_S", 0), ("c_S", 1)]


@pytest.mark.parametrize(("sigma", "runs"), [(2, 120), *long((4, 10_002), (8, 10_002), (40, 10_002))])
def test_falsified_runs_pass_with_the_predicted_probability(example, sigma, runs):
    passed, session = 0, sectorch.Session()
    for run in range(runs):
        label, place = FALSIFIED[run % len(FALSIFIED)]
        word, bit = run // 3, (63, 0, 17, 62)[run // len(FALSIFIED) % 4]
        forge = once(label, lambda v, word=word, bit=bit: flipped(v, word, bit), place)
        passed += accepted(example, "one row", sigma, forge, session=session) is not None
    assert within_binomial(passed, runs, 2.0**-sigma), f"{passed} of {runs}"
    assert sigma < 40 or not passed


def test_errors_in_several_places_pass_no_more_often(example):
    """d in one place of c_S and -d in another: the key has to treat both alike; errors in m need another guess."""
    sigma, runs, session = 2, 100, sectorch.Session()
    for labels, probability in ({"c_S"}, 2.0**-sigma), ({"m", "c_S"}, 2.0 ** (-2 * sigma)):

        def forge(number, header, value, labels=labels):
            if header.label == "c_S" and value.dtype == torch.int64:
                return value + torch.tensor([5, 0, 0, -5, 0, 0]).unsqueeze(1)
            return flipped(value, 3, 63) if header.label in labels - {"c_S"} else value

        passed = sum(accepted(example, "rows", sigma, forge, session=session) is not None for _ in range(runs))
        assert within_binomial(passed, runs, probability), f"{passed} of {runs}"


# The same probabilities, by counting all keys of a tiny ring against all that S can do.


def most_that_pass(keys: Sequence, strategies: list, passes: Callable) -> float:
    """The largest fraction of the keys that a strategy passes with."""
    return max(sum(passes(key, s) for key in keys) for s in strategies) / len(keys)


@pytest.mark.parametrize(("bits", "sigma"), [(1, 3), (2, 2), (3, 3), *long((4, 4))])
def test_no_strategy_passes_a_lifted_tag_more_often_than_by_a_guess(bits, sigma):
    """S adds e, which changes the word, and t to the tag: it passes if delta e = t mod 2^(bits + sigma)."""
    ring, keys = 1 << bits + sigma, range(1 << sigma)
    strategies = [(e, t) for e in range(ring) if e % (1 << bits) for t in range(ring)]
    passes = lambda delta, s: (delta * s[0] - s[1]) % ring == 0
    assert most_that_pass(keys, strategies, passes) == 2.0**-sigma
    # Without the lift, however large the key: half the keys pass where the highest bit is changed.
    half = most_that_pass(range(1 << bits), [(e, t) for e in range(1, 1 << bits) for t in range(1 << bits)],
                          lambda delta, s: (delta * s[0] - s[1]) % (1 << bits) == 0)  # fmt: skip
    assert half == 0.5


def test_high_parts_that_are_sent_as_one_sum_do_not_bind():
    """If S sent the high parts as one sum, weighted by chi, it could make up for bit 63 whenever chi is even."""
    bits, sigma = 3, 3
    ring, keys = 1 << bits + sigma, range(1 << sigma)
    passes = lambda delta, chi, high, t: (delta * ((chi << bits - 1) + (high << bits)) - t) % ring == 0
    answers = list(itertools.product(keys, range(ring)))
    surely = [chi for chi in keys if any(all(passes(delta, chi, *a) for delta in keys) for a in answers)]
    assert surely == [0, 2, 4, 6]


@pytest.mark.parametrize(("bits", "sigma", "places"), [(1, 2, 3), (2, 2, 2), (3, 2, 2), *long((2, 3, 3))])
def test_no_strategy_passes_sums_of_places_more_often_than_by_a_guess(bits, sigma, places):
    """S adds e to the places and t to its sums: it passes if chi e = t mod 2^bits in all of sigma rows."""
    ring = 1 << bits
    keys = list(itertools.product(itertools.product(range(2), repeat=places), repeat=sigma))
    errors = [e for e in itertools.product(range(ring), repeat=places) if any(e)]
    strategies = list(itertools.product(errors, itertools.product(range(ring), repeat=sigma)))
    passes = lambda chi, s: all(
        (sum(map(int.__mul__, row, s[0])) - t) % ring == 0 for row, t in zip(chi, s[1], strict=True)
    )
    assert most_that_pass(keys, strategies, passes) == 2.0**-sigma


@pytest.mark.parametrize("sigma", [1, 3])
def test_no_strategy_passes_tags_of_bits_more_often_than_by_a_guess(sigma):
    """S changes some of three bits, and adds t to each tag: it passes if e delta = t for all three."""
    strategies = [(e, t) for e in itertools.product(range(2), repeat=3) if any(e)
                  for t in itertools.product(range(1 << sigma), repeat=3)]  # fmt: skip
    passes = lambda delta, s: all(e * delta == t for e, t in zip(*s, strict=True))
    assert most_that_pass(range(1 << sigma), strategies, passes) == 2.0**-sigma


# The arithmetic of tags, against Python's whole numbers.

WORDS = st.lists(st.integers(0, (1 << 128) - 1), min_size=1, max_size=5)


def pairs(values: list[int]) -> torch.Tensor:
    words = [[v >> 64 * i & (1 << 64) - 1 for v in values] for i in range(2)]
    return torch.tensor([[w - (w >> 63 << 64) for w in row] for row in words])


@given(WORDS, st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 64) - 1), st.integers(1, 64))
def test_arithmetic_of_tags(example, values, other, c, sigma):
    x, y = pairs(values), pairs([other] * len(values))
    factor = pairs([c] * len(values))[0]
    assert torch.equal(example.plus(x, y), pairs([(v + other) % (1 << 128) for v in values]))
    assert torch.equal(example.minus(x, y), pairs([(v - other) % (1 << 128) for v in values]))
    assert torch.equal(example.times(x, factor), pairs([v * c % (1 << 128) for v in values]))
    if sigma < 63:
        data = example.packed(x, sigma)
        assert data.shape[-1] == 8 + -(-sigma // 8)
        assert torch.equal(example.unpacked(data), pairs([v % (1 << 64 + sigma) for v in values]))
