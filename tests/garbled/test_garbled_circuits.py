"""Every circuit against plain integers: all pairs of bytes at once, in the clear and garbled; wide ones at random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.errors import ArgumentError
from sectorch.garbled.circuit import (
    ONE,
    Builder,
    Circuit,
    add,
    argmax_circuit,
    choose,
    colours,
    evaluate,
    garble,
    less_than,
    one_hot_argmax,
    position,
    private_words,
    share_outputs,
    subtract,
    take_share,
)


def bits_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] -> [... * bits, n], least significant bit first."""
    shifted = values.unsqueeze(-2) >> torch.arange(bits).unsqueeze(-1)
    return (shifted & 1).reshape(-1, values.shape[-1])


def value_of(bits: torch.Tensor) -> torch.Tensor:
    """[bits, n] -> [n], unsigned."""
    return (bits << torch.arange(bits.shape[0]).unsqueeze(-1)).sum(0)


def signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values << (64 - bits)) >> (64 - bits)


def garbled(circuit: Circuit, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The circuit garbled and evaluated, by both decodings: colours, and additive shares."""
    bits = torch.cat((first, second))
    delta, nonce = private_words(2), private_words(2)
    delta[0] |= 1
    zero = private_words(*bits.shape, 2)
    labels = zero ^ ((-bits).unsqueeze(-1) & delta)
    tables, zero_out = garble(circuit, delta, zero, nonce)
    assert tables.shape == (circuit.ands, 2, bits.shape[1], 2)
    out = evaluate(circuit, labels, tables, nonce)
    found = colours(out) ^ colours(zero_out)
    assert torch.equal(out, zero_out ^ ((-found).unsqueeze(-1) & delta)), "a label that is neither of the wire's two"
    share, words = share_outputs(circuit, delta, zero_out, nonce)
    assert torch.equal(share + take_share(circuit, out, words, nonce), found)
    return found


def plain(circuit: Circuit, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return circuit.plain(first, second) & 1


def two_numbers(bits: int, make) -> Circuit:
    b = Builder(bits, bits)
    outputs = make(b, b.garbler, b.evaluator)
    return b.compile(outputs if isinstance(outputs, list) else [outputs])


EIGHT = {
    "add": (add, lambda x, y: (x + y) & 255, 7),
    "subtract": (subtract, lambda x, y: (x - y) & 255, 7),
    "less_than": (less_than, lambda x, y: x < y, 8),
    "less_than_signed": (lambda b, x, y: less_than(b, x, y, True), lambda x, y: signed(x, 8) < signed(y, 8), 8),
    "maximum": (lambda b, x, y: choose(b, less_than(b, x, y), x, y), torch.maximum, 16),
    "argmax": (lambda b, x, y: one_hot_argmax(b, [x, y]),
               lambda x, y: (signed(x, 8) >= signed(y, 8)) + 2 * (signed(x, 8) < signed(y, 8)), 8),
    "argmax_position": (lambda b, x, y: position(b, one_hot_argmax(b, [x, y])),
                        lambda x, y: signed(x, 8) < signed(y, 8), 8),
    "equal_bits": (lambda b, x, y: [b.invert(b.xor(u, v)) for u, v in zip(x, y, strict=True)],
                   lambda x, y: ~(x ^ y) & 255, 0),
}  # fmt: skip
X, Y = torch.arange(256).repeat_interleave(256), torch.arange(256).repeat(256)


@pytest.mark.parametrize("name", EIGHT)
def test_all_pairs_of_bytes(name: str):
    make, expected, ands = EIGHT[name]
    circuit = two_numbers(8, make)
    wanted = expected(X, Y).long()
    first, second = bits_of(X, 8), bits_of(Y, 8)
    assert torch.equal(value_of(plain(circuit, first, second)), wanted)
    assert torch.equal(value_of(garbled(circuit, first, second)), wanted)
    assert circuit.ands == ands


def test_argmax_of_all_triples_of_bytes():
    """16,777,216 triples, 64 to a word, in the clear."""
    b = Builder(16, 8)
    wires = [b.garbler[:8], b.garbler[8:], b.evaluator]
    circuit = b.compile(one_hot_argmax(b, wires))
    assert circuit.ands == 3 * 8 + 1
    positions = torch.arange(64)
    for words in torch.arange(1 << 18).split(1 << 14):
        # Triple number 64 w + p is bit p of word w. Its upper 18 bits are those of w, the same all over a word.
        low = [((positions >> j & 1) << positions).sum().expand(len(words)) for j in range(6)]
        bits = torch.stack(low + [-(words >> j & 1) for j in range(18)])
        hot = circuit.plain(torch.cat((bits[16:], bits[8:16])), bits[:8])
        index = words[:, None] * 64 + positions
        x, y, z = (signed(v, 8) for v in (index >> 16, index >> 8 & 255, index & 255))
        first, second = (x >= y) & (x >= z), (y > x) & (y >= z)
        expected = [first, second, ~(first | second)]
        for word, wanted in zip(hot, expected, strict=True):
            assert torch.equal(word, (wanted.long() << positions).sum(-1))


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_argmax_of_all_small_vectors_with_ties(classes: int, bits: int):
    """All vectors of numbers of few bits, where most have ties, each under a random sharing; garbled."""
    size = 1 << bits
    index = torch.arange(size**classes)
    values = torch.stack([index // size**i % size for i in range(classes)])
    mask = private_words(*values.shape)
    first, second = bits_of(mask, bits), bits_of(values - mask, bits)
    expected = signed(values, bits).argmax(0)
    hot = garbled(argmax_circuit(classes, bits, False), first, second)
    assert torch.equal(hot, torch.nn.functional.one_hot(expected, classes).T)
    assert torch.equal(value_of(garbled(argmax_circuit(classes, bits, True), first, second)), expected)


def test_argmax_of_sums_of_all_pairs_of_bytes():
    """The whole circuit with its adders, on all pairs of byte values under random shares."""
    values = torch.stack((X, Y))
    mask = private_words(*values.shape)
    circuit = argmax_circuit(2, 8, False)
    hot = garbled(circuit, bits_of(mask, 8), bits_of(values - mask, 8))
    assert torch.equal(hot, torch.nn.functional.one_hot(signed(values, 8).argmax(0), 2).T)


@given(classes=st.integers(2, 20), bits=st.integers(2, 64), seed=st.integers(0, 1 << 30))
def test_wide_argmax(classes: int, bits: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    full = torch.randint(-(1 << 63), (1 << 63) - 1, (classes, 33), generator=generator)
    # Half of the vectors are of small numbers, so that ties and close values occur.
    values = signed(torch.where(torch.arange(33) % 2 == 0, full, full % 3 - 1), bits)
    mask = torch.randint(-(1 << 63), (1 << 63) - 1, values.shape, generator=generator)
    first, second = bits_of(mask, bits), bits_of(values - mask, bits)
    expected = values.argmax(0)
    for as_position in (False, True):
        circuit = argmax_circuit(classes, bits, as_position)
        assert circuit.ands == classes * (bits - 1) + (2 * classes - 3) * bits + classes - 2
        out = plain(circuit, first, second)
        assert torch.equal(value_of(out) if as_position else out.argmax(0), expected)
        assert as_position or torch.equal(out.sum(0), torch.ones(33, dtype=torch.int64))


@given(bits=st.integers(1, 64), seed=st.integers(0, 1 << 30))
def test_wide_arithmetic(bits: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 40), generator=generator)
    y[:8] = x[:8]
    first, second = bits_of(x, bits), bits_of(y, bits)
    run = lambda make: plain(two_numbers(bits, make), first, second)
    assert torch.equal(run(add), bits_of(x + y, bits))
    assert torch.equal(run(subtract), bits_of(x - y, bits))
    assert torch.equal(run(lambda b, x, y: less_than(b, x, y, True))[0], (signed(x, bits) < signed(y, bits)).long())
    flipped = lambda v: signed(v, bits) ^ (-1 << (bits - 1))  # the order of unsigned numbers
    assert torch.equal(run(less_than)[0], (signed(flipped(x), bits) < signed(flipped(y), bits)).long())


# Circuits as data.


@st.composite
def random_circuits(draw):
    """A few inputs, any gates on what is there, any wires as outputs."""
    b = Builder(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    wires = [ONE, *b.garbler, *b.evaluator]
    known = {ONE: lambda bits: torch.ones_like(bits[0])}
    known |= {wire: lambda bits, i=i: bits[i] for i, wire in enumerate(wires[1:])}
    for _ in range(draw(st.integers(1, 30))):
        x, y = draw(st.sampled_from(wires)), draw(st.sampled_from(wires))
        kind = draw(st.sampled_from(["xor", "land", "invert"]))
        if (kind == "xor" and x == y) or (kind == "invert" and x == ONE):
            continue
        if kind == "invert":
            wire, f = b.invert(x), lambda bits, x=x: 1 ^ known[x](bits)
        elif kind == "xor":
            wire, f = b.xor(x, y), lambda bits, x=x, y=y: known[x](bits) ^ known[y](bits)
        else:
            wire, f = b.land(x, y), lambda bits, x=x, y=y: known[x](bits) & known[y](bits)
        known.setdefault(wire, f)
        wires.append(wire)
    outputs = draw(st.lists(st.sampled_from(wires), min_size=1, max_size=6))
    return b.compile(outputs), [known[wire] for wire in outputs]


@given(random_circuits())
def test_any_circuit_compiles_to_what_was_built(built):
    circuit, expected = built
    inputs = torch.arange(1 << circuit.inputs)
    bits = (inputs >> torch.arange(circuit.inputs).unsqueeze(-1)) & 1
    halves = bits[: circuit.garbler], bits[circuit.garbler :]
    wanted = torch.stack([f(bits) for f in expected])
    assert torch.equal(plain(circuit, *halves), wanted)
    assert torch.equal(garbled(circuit, *halves), wanted)


def test_gates_that_no_output_needs_cost_nothing():
    b = Builder(2, 1)
    x, y, z = *b.garbler, *b.evaluator
    b.land(x, z)
    assert b.compile([b.xor(x, y)]).ands == 0
    assert b.compile([b.land(x, y), b.land(y, x), b.land(x, ONE), b.land(x, x)]).ands == 1


def test_steps_do_not_overlap_what_they_read():
    """Slots are given anew only after their last reader; a step that wrote over its own operands would be wrong."""
    circuit = argmax_circuit(10, 32, False)
    assert circuit.slots < circuit.inputs + circuit.ands
    for step in circuit.steps:
        written = set(range(step.out.start, step.out.stop))
        for operand in (step.left, step.right):
            read = range(circuit.slots)[operand] if isinstance(operand, slice) else operand.tolist()
            assert written.isdisjoint(read)
    assert circuit.ands == sum(s.out.stop - s.out.start for s in circuit.steps if s.nonlinear) == 862


def test_the_number_of_nonlinear_steps_is_the_depth():
    circuit = argmax_circuit(10, 32, False)
    assert sum(step.nonlinear for step in circuit.steps) == circuit.depth


def test_refusals():
    b = Builder(1, 1)
    with pytest.raises(ArgumentError, match="constant zero"):
        b.xor(b.garbler[0], b.garbler[0])
    with pytest.raises(ArgumentError, match="at least two classes, got 1"):
        argmax_circuit(1, 8, False)
    with pytest.raises(ArgumentError, match="2 to 64 bits, got 65"):
        argmax_circuit(3, 65, False)
    with pytest.raises(ArgumentError, match="evaluator has 1 input bits in this circuit, got 2"):
        b.compile([b.garbler[0]]).plain(torch.zeros(1, 1).long(), torch.zeros(2, 1).long())
