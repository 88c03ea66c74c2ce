"""CaPC's steps 1c and 3: the argmax of shared numbers, to shares of a one-hot code and to the label.

Each step has two forms: by Yao's protocol between two parties (`argmax_onehot`, `argmax_noisy`, `argmax_confident`),
and on three-party shares (the same names with `_shares`).

Yao's protocol takes two additive shares mod 2^64 of signed numbers and compares `bits` bits of their sum, above `drop`
low bits that each party drops from its own share. For x = x_1 + x_2 this gives floor(x / 2^drop) or one less, whatever
the shares are. So with drop = 0 the argmax is exact, and the first of equal numbers. Otherwise it may be a number that
is smaller than the largest by less than 2^(drop + 1), or a later one of equal numbers. Numbers must lie in
[-2^(drop + bits - 1) + 2^drop, 2^(drop + bits - 1)); outside they wrap around, and the argmax is wrong.

Source: CaPC (Choquette-Choo et al., ICLR 2021), Figure 1 and Appendix A.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..choreography import Located, Message, Net, Party, leaf, protocol, with_shapes
from ..choreography.located import compute
from ..errors import ArgumentError, MisplacedValueError, ShapeError
from ..mpc.star.compare import drelu
from ..mpc.star.masking import open_masked
from ..mpc.star.multiply import multiply
from ..mpc.star.select import bit_to_ring, select
from ..mpc.star.shares import Shares, concatenate, each, reveal, share
from .circuit import (
    WORDS,
    Circuit,
    argmax_circuit,
    colours,
    confident_circuit,
    evaluate,
    garble,
    private_words,
    share_outputs,
    take_share,
)
from .transfer import Pair, correlated_transfer, deliver, pack, unpack

CHUNK = 1024
"""Batch elements that are garbled at a time: 28 MB of tables and 19 MB of labels for 10 classes of 32 bits."""


def check_inputs(first: Located, second: Located, drop: int, bits: int) -> None:
    """Check that two shares have one shape with classes to choose from, and that drop + bits bits exist.

    Raises:
        ShapeError: the shapes differ, or there is no class dimension.
        ArgumentError: fewer than two classes, bits outside 2..64, or drop + bits beyond 64.
    """
    if first.shape != second.shape or len(first.shape) < 1:
        raise ShapeError(
            f"both shares need one shape [..., classes], got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if first.shape[-1] < 2:
        raise ArgumentError(f"an argmax needs at least two classes, got {first.shape[-1]}")
    if not 2 <= bits <= 64 or not 0 <= drop <= 64 - bits:
        raise ArgumentError(f"an argmax drops d bits and compares b in 2..64 with d + b <= 64, got d={drop}, b={bits}")


def check_pair(pair: Pair, garbler: Party) -> None:
    """Raise `MisplacedValueError` unless the pair was made with this garbler."""
    if pair.garbler != garbler:
        raise MisplacedValueError(
            f"{garbler} cannot garble with the pair of {pair.garbler}: make one with correlate(setup, {garbler})"
        )


@leaf
def input_bits(share: torch.Tensor, drop: int, bits: int) -> torch.Tensor:
    """The bits of a share [n, classes] as int64 [classes * bits, n], class by class, least significant first."""
    positions = torch.arange(drop, drop + bits, device=share.device).view(1, bits, 1)
    return ((share.T.unsqueeze(1) >> positions) & 1).flatten(0, 1)


@protocol(
    "garbled_circuit",
    "Zahur, Rosulek, Evans 2015, Figure 2; CaPC, A.1",
    [Message("tables", "S", "Q", "the labels that Q does not hold")],
)
def garbled_circuit(
    net: Net, pair: Pair, circuit: Circuit, at_garbler: Located, at_Q: Located
) -> tuple[Located, Located, Located]:
    """Garble a circuit and let Q evaluate it, on the bits of both.

    Args:
        pair: of the garbler and Q.
        at_garbler, at_Q: int64 zeros and ones, [circuit.garbler, n] and [circuit.evaluator, n].

    Returns:
        The zero labels of the outputs at the garbler and labels at Q, both [outputs, n, 2], and the nonce, at both.

    Rounds 2 with S, 4 with A (through S, sealed). Bytes per batch element: 16 for each bit of Q, 32 for each AND. The
    labels of the garbler's inputs cost nothing: both draw the labels that Q sees from the pair key, and the garbler
    derives the zero labels from them. Neither learns a bit.
    """
    Q, garbler, delta = net.Q, pair.garbler, pair.delta
    nonce = net.common(Q, garbler, (2,), "nonce")
    active = net.common(Q, garbler, (*at_garbler.shape, WORDS), "labels")
    zero_Q, active_Q = correlated_transfer(net, pair, at_Q)

    own = active ^ (-at_garbler).unsqueeze(-1) & delta
    tables, zero = garble(circuit, delta, compute(torch.cat, (own, zero_Q)), nonce)
    tables = deliver(net, tables, garbler, Q, "tables")
    return zero, evaluate(circuit, compute(torch.cat, (active, active_Q)), tables, nonce), nonce


def in_chunks(run: Callable, *values: Located) -> list[tuple[Located, ...]]:
    """Call `run` on CHUNK batch elements of values [..., classes] at a time; once for an empty batch."""
    count = values[0].shape[:-1].numel()
    flat = [v.reshape(count, v.shape[-1]) for v in values]
    return [run(*(v[start : start + CHUNK] for v in flat)) for start in range(0, max(1, count), CHUNK)]


@protocol(
    "garbled_argmax_onehot", "CaPC, step 1c", [Message("words", "S", "Q", "hashes of the labels that Q does not hold")]
)
def argmax_onehot(
    net: Net, pair: Pair, at_garbler: Located, at_Q: Located, *, drop: int = 24, bits: int = 32
) -> tuple[Located, Located]:
    """Compute s at Q and s^ at the garbler with s + s^ = OneHot(argmax r) mod 2^64, for r = at_garbler + at_Q mod 2^64.

    A, or S, garbles and Q evaluates.

    Args:
        pair: of the garbler and Q, from `correlate(session.setup(A), A)` or `correlate(session.setup(A), S)`.
        at_garbler, at_Q: int64 [..., classes], shares of signed numbers; any batch dimensions.
        drop, bits: see above. The default is for logits of 40 fraction bits, as a linear layer returns them, with a
            magnitude up to 2^15 - 2^-16. 16 fraction bits remain, so that logits which differ by 2^-15 or more are
            distinguished; secure inference itself has an error of that order.

    Returns:
        (s at Q, s^ at the garbler), int64 [..., classes]; each alone is pseudorandom and fresh. The garbler draws its
        own.

    Rounds 4 (2 messages, each through S), or 2 with S. Bytes per batch element of C classes and L bits, on each edge:
    16 C L + 32 (C (L - 1) + (2 C - 3) L + C - 2) + 8 C; 32,784 for 10 classes and 32 bits. Nobody learns anything: S
    receives uniform bits, Q and A pseudorandom ones.

    Raises:
        ShapeError: shapes that differ.
        ArgumentError: fewer than two classes, or bits that do not exist.
        MisplacedValueError: a pair of another garbler.
    """
    check_inputs(at_garbler, at_Q, drop, bits)
    garbler = net.S if pair.garbler == net.S else net.A
    check_pair(pair, garbler)
    shape = at_Q.shape
    circuit = argmax_circuit(shape[-1], bits, False)

    def run(at_garbler: Located, at_Q: Located) -> tuple[Located, Located]:
        own, bits_Q = input_bits(at_garbler, drop, bits), input_bits(at_Q, drop, bits)
        zero, labels, nonce = garbled_circuit(net, pair, circuit, own, bits_Q)
        share, words = share_outputs(circuit, pair.delta, zero, nonce)
        words = deliver(net, words, garbler, net.Q, "words")
        return take_share(circuit, labels, words, nonce), share

    results = in_chunks(run, at_garbler.at(garbler), at_Q.at("Q"))
    s, s_hat = (compute(torch.cat, parts, 1).t().reshape(shape) for parts in zip(*results, strict=True))
    return s, s_hat


@protocol(
    "garbled_inputs",
    "CaPC, step 1b",
    [Message("masked_half", "A", "S", "r_hat of A"), Message("masked", "S", "Q", "r_hat of A")],
)
def to_clients(net: Net, x: Shares) -> tuple[Located, Located]:
    """Shares of A and S become r_hat at A and x - r_hat at Q.

    A draws r_hat alone and fresh. (S's half as it is would not do: Q deals the correlations of the secure inference and
    knows their masks, so that half would show Q the weights.)

    Returns:
        (at A, at Q), int64 of x's shape.

    Rounds 2, bytes 16 per element. S and Q receive uniform ring elements; neither knows r_hat.
    """
    r_hat = net.fresh(net.A, _uniform, x.shape)
    half = (x.A - r_hat).send(net.A, net.S, "masked_half")
    return r_hat, (half + x.S).send(net.S, net.Q, "masked")


@with_shapes(lambda shape: torch.empty(shape, dtype=torch.int64, device="meta"))
def _uniform(shape: torch.Size) -> torch.Tensor:
    """int64 values that only the caller has."""
    return private_words(shape.numel()).view(shape)


@protocol("garbled_result", "CaPC, step 2", [Message("s_hat", "A", "S", "s of Q")])
def to_server(net: Net, s_hat: Located) -> Located:
    """A's share of a value of A and Q goes to S.

    Rounds 1, bytes 8 per element. Uniform to S, which lacks Q's share.
    """
    return s_hat.send(net.A, net.S, "s_hat").at(net.S)


def onehot_of_shares(net: Net, pair: Pair, x: Shares, *, drop: int, bits: int) -> tuple[Located, Located]:
    """The one-hot argmax of shares of A and S, or of Q and S, as halves at Q and S.

    Args:
        net: a call with A, whose pair it is; of shares of Q and S with any answering party, and S's pair.

    Rounds and bytes those of `argmax_onehot`; of A's shares those of `to_clients` and `to_server` besides. Nobody
    learns anything.
    """
    if pair.garbler == net.S:
        return argmax_onehot(net, pair, x.S, x.A, drop=drop, bits=bits)
    s, s_hat = argmax_onehot(net, pair, *to_clients(net, x), drop=drop, bits=bits)
    return s, to_server(net, s_hat)


def label_of_shares(net: Net, pair: Pair | None, x: Shares, where: Shares | None, *, bits: int) -> Located:
    """The argmax of shares of Q and S, at Q; `UNANSWERED` where no entry of `where` is at least zero.

    Args:
        net: a call with any answering party.
        pair: of S and Q, for Yao's protocol; None for three-party shares.
    """
    if where is None:
        if pair is None:
            return argmax_noisy_shares(net, x.S, x.A, bits=bits)
        return argmax_noisy(net, pair, x.S, x.A, bits=bits)
    if pair is None:
        return argmax_confident_shares(net, where.S, x.S, x.A, where.A, bits=bits)
    return argmax_confident(net, pair, where.S, x.S, x.A, where.A, bits=bits)


@protocol(
    "garbled_argmax_noisy",
    "CaPC, step 3",
    [Message("decoding", "S", "Q", "nothing: it is what Q is to learn", "the label, which is Q's to learn")],
)
def argmax_noisy(net: Net, pair: Pair, at_S: Located, at_Q: Located, *, drop: int = 0, bits: int = 32) -> Located:
    """Compute the label argmax(v), at Q alone, for v = at_S + at_Q mod 2^64.

    S garbles and Q evaluates.

    Args:
        pair: of S and Q, from `correlate(session.setup(A), S)` with any answering party of the session.
        at_S: int64 [..., classes]: the sum of the answering parties' shares and the privacy guardian's noise.
        at_Q: int64 [..., classes]: the sum of Q's shares.
        drop, bits: see above. The default is exact for votes and noise below 2^31 units.

    Returns:
        The label, int64 [...], at Q.

    Rounds 2. Bytes per batch element as for `argmax_onehot`, on the edge Q-S alone, with ceil(log2 C) bits for the
    decoding in place of 8 C bytes. Q learns the label, S nothing.

    Raises:
        ShapeError: shapes that differ.
        ArgumentError: fewer than two classes, or bits that do not exist.
        MisplacedValueError: a pair of another garbler.
    """
    check_inputs(at_S, at_Q, drop, bits)
    check_pair(pair, net.S)
    shape = at_Q.shape
    circuit = argmax_circuit(shape[-1], bits, True)

    def run(at_S: Located, at_Q: Located) -> tuple[Located]:
        bits_S, bits_Q = input_bits(at_S, drop, bits), input_bits(at_Q, drop, bits)
        zero, labels, _ = garbled_circuit(net, pair, circuit, bits_S, bits_Q)
        decoding = deliver(net, pack(colours(zero)), net.S, net.Q, "decoding")
        return (decode_outputs(labels, decoding),)

    results = in_chunks(run, at_S.at("S"), at_Q.at("Q"))
    return compute(torch.cat, [label for (label,) in results]).view(shape[:-1])


@leaf
def decode_outputs(labels: torch.Tensor, decoding: torch.Tensor) -> torch.Tensor:
    """Decode output labels [bits, n, 2] to numbers [n], with the packed colours of the zero labels."""
    found = colours(labels)
    found = found ^ unpack(decoding, found.shape)
    return (found << torch.arange(found.shape[0], device=found.device).unsqueeze(1)).sum(0)


# The same two steps on the three-party secret sharing of `sectorch.mpc`, without garbled circuits.
#
# They are much cheaper, and weaker. A garbled circuit is secure for Q and A (or Q and S) whatever other parties do.
# These protocols are secure only while no two of Q, A and S collude, since Q deals and A and S compute. CaPC assumes
# that its privacy guardian, which is S, does not collude. In addition, S takes part in step 1c, and an answering party
# in step 3.


def _one_hot(net: Net, values: Shares, high: int) -> Shares:
    """The one-hot argmax along the first dimension, as shares of 0 and 1; the first of equal values.

    A tournament of neighbours as in `circuit.one_hot_argmax`, whose winner's path is followed back.
    """
    wins: list[Shares] = []
    while (count := values.shape[0]) > 1:
        pairs = count // 2
        second = values[1 : 2 * pairs : 2]
        ahead = values[0 : 2 * pairs : 2] - second
        masked = open_masked(net, ahead)
        first = drelu(net, masked, high)
        wins.append(bit_to_ring(net, first, ahead.shape))
        if count > 2:
            larger = second + select(net, first, masked)
            values = each(concatenate, larger, values[2 * pairs :])
        else:
            break
    reached = _interleave(wins[-1], -wins[-1] + 1)
    for first in reversed(wins[:-1]):
        pairs = first.shape[0]
        match = reached[:pairs]
        left = multiply(net, torch.mul, match, first)
        reached = each(concatenate, _interleave(left, match - left), reached[pairs:])
    return reached


def _interleave(left: Shares, right: Shares) -> Shares:
    """Two tensors [pairs, ...] to left[0], right[0], left[1], ...: [2 pairs, ...]."""
    return each(lambda a, b: torch.stack((a, b), 1).flatten(0, 1), left, right)


def one_hot_of_classes(net: Net, values: Shares, high: int) -> Shares:
    """The one-hot argmax along the last dimension, for numbers of `high` bits; the first of equal ones."""
    hot = _one_hot(net, each(torch.movedim, values, -1, 0), min(63, high))
    return each(torch.movedim, hot, 0, -1)


def position(hot: torch.Tensor) -> torch.Tensor:
    """The position of the one in a one-hot code, [..., classes] -> [...]; linear, so that it applies to shares."""
    return (hot * torch.arange(hot.shape[-1], device=hot.device)).sum(-1)


@protocol("argmax_onehot_shares", "CaPC, step 1c, on three-party shares", [Message("half", "S", "Q", "rho of k_SA")])
def argmax_onehot_shares(
    net: Net, at_A: Located, at_Q: Located, *, drop: int = 24, bits: int = 32
) -> tuple[Located, Located]:
    """Compute s at Q and s^ at A with s + s^ = OneHot(argmax r) mod 2^64, for r = at_A + at_Q mod 2^64.

    Q deals, A and S compute. S sends Q its half of the result under a mask that Q lacks, and Q adds a mask that S lacks
    to its own: so S learns nothing when A sends it s^ (step 2).

    Args:
        at_A, at_Q: int64 [..., classes], shares of numbers within [-2^(drop + bits - 1), 2^(drop + bits - 1)), and
            within 2^62 of zero.
        drop, bits: give the range alone; all planes are compared.

    Returns:
        (s at Q, s^ at A), int64 [..., classes]. Exact; the first of equal numbers.

    Rounds: those of `share`, of ceil(log2 C) comparisons and of as many products, and 1. Assumes that no two of Q, A
    and S collude. Nobody learns anything.

    Raises:
        ShapeError: shapes that differ.
        ArgumentError: fewer than two classes, or bits that do not exist.
    """
    check_inputs(at_A, at_Q, drop, bits)
    Q, A, S, shape = net.Q, net.A, net.S, at_Q.shape
    hot = one_hot_of_classes(net, share(net, at_Q) + at_A, drop + bits)
    against_Q, against_S = net.common(S, A, shape, "against_Q"), net.common(Q, A, shape, "against_S")
    half = (hot.S + against_Q).send(S, Q, "half")
    return half + against_S, hot.A - against_Q - against_S


@protocol("argmax_noisy_shares", "CaPC, step 3, on three-party shares")
def argmax_noisy_shares(net: Net, at_S: Located, at_Q: Located, *, drop: int = 0, bits: int = 32) -> Located:
    """Compute the label argmax(v), at Q alone, for v = at_S + at_Q mod 2^64, with the answering party of this net.

    Args:
        at_S, at_Q: int64 [..., classes].
        drop, bits: as for `argmax_onehot_shares`.

    Returns:
        The label, int64 [...], at Q.

    Assumes that no two of Q, A and S collude. Q learns the label, the others nothing.

    Raises:
        ShapeError: shapes that differ.
        ArgumentError: fewer than two classes, or bits that do not exist.
    """
    check_inputs(at_S, at_Q, drop, bits)
    halves = share(net, at_Q)
    hot = one_hot_of_classes(net, Shares(halves.A, halves.S + at_S), drop + bits)
    return reveal(net, each(position, hot))


# CaPC's step 3 with PATE's check before the answer (Confident-GNMax): the label if the vote is clear, else none.
#
# A query is answered if the largest count plus separate noise z reaches a threshold T. As z and T are the same for all
# counts, that holds if any v_j + z - T is at least zero, which needs no maximum. The guardian adds z - T to one copy of
# its share of the counts and the answer's noise to another; Q's share is the same for both.


UNANSWERED = -1
"""The label of a query that is not answered."""


@protocol(
    "garbled_argmax_confident",
    "CaPC, step 3, with the check of PATE 2018, algorithm 1",
    [
        Message(
            "decoding", "S", "Q", "nothing: it is what Q is to learn",
            "whether the query is answered, and the label if it is, which are Q's to learn",
        )
    ],
)  # fmt: skip
def argmax_confident(
    net: Net, pair: Pair, check_at_S: Located, at_S: Located, at_Q: Located, check_at_Q: Located | None = None, *,
    bits: int = 32,
) -> Located:  # fmt: skip
    """Compute argmax(at_S + at_Q) where any of check_at_S + check_at_Q is at least zero, else -1; at Q alone.

    S garbles and Q evaluates.

    Args:
        pair: of S and Q, from `correlate(session.setup(A), S)` with any answering party of the session.
        check_at_S: int64 [..., classes]: the guardian's share of the counts, with the check's noise less the threshold
            added, the same for all classes.
        at_S: int64 [..., classes]: the guardian's share of the counts, with the answer's noise added.
        at_Q: int64 [..., classes]: Q's share of the counts.
        check_at_Q: int64 [..., classes]: Q's share of the counts for the check, where it is another one; 16 C L bytes.
        bits: compared bits; all sums lie in [-2^(bits - 1), 2^(bits - 1)).

    Returns:
        int64 [...] at Q: the label, or `UNANSWERED`.

    Rounds 2. Bytes per batch element of C classes and L bits: 16 C L + 32 (2 C (L - 1) + (2 C - 3) L + 2 C - 3 +
    ceil(log2 C)), and 1 + ceil(log2 C) bits of decoding. Q learns whether a query is answered and the label if it is, S
    nothing.

    Raises:
        ShapeError: shapes that differ.
        ArgumentError: fewer than two classes, or bits that do not exist.
        MisplacedValueError: a pair of another garbler.
    """
    check_inputs(at_S, at_Q, 0, bits)
    check_inputs(check_at_S, at_Q if check_at_Q is None else check_at_Q, 0, bits)
    check_pair(pair, net.S)
    shape, halves = at_Q.shape, (at_Q,) if check_at_Q is None else (check_at_Q, at_Q)
    circuit = confident_circuit(shape[-1], bits, check_at_Q is None)

    def run(check_at_S: Located, at_S: Located, *at_Q: Located) -> tuple[Located]:
        own, bits_Q = (
            compute(torch.cat, [input_bits(v, 0, bits) for v in values]) for values in ((check_at_S, at_S), at_Q)
        )
        zero, labels, _ = garbled_circuit(net, pair, circuit, own, bits_Q)
        decoding = deliver(net, pack(colours(zero)), net.S, net.Q, "decoding")
        return (_label_or_unanswered(decode_outputs(labels, decoding)),)

    results = in_chunks(run, check_at_S.at("S"), at_S.at("S"), *(half.at("Q") for half in halves))
    return compute(torch.cat, [label for (label,) in results]).view(shape[:-1])


@leaf
def _label_or_unanswered(number: torch.Tensor) -> torch.Tensor:
    """The label from the circuit's outputs as a number, whose lowest bit is that of the check."""
    return torch.where(number & 1 == 1, number >> 1, UNANSWERED)


@protocol("argmax_confident_shares", "CaPC, step 3, with the check of PATE 2018, algorithm 1, on three-party shares")
def argmax_confident_shares(
    net: Net, check_at_S: Located, at_S: Located, at_Q: Located, check_at_Q: Located | None = None, *, bits: int = 32
) -> Located:
    """`argmax_confident` on three-party shares, with the answering party of this net. Arguments and result as there.

    Assumes that no two of Q, A and S collude. Q learns whether a query is answered and the label if it is, the others
    nothing.

    Raises:
        ShapeError: shapes that differ.
        ArgumentError: fewer than two classes, or bits that do not exist.
    """
    check_inputs(at_S, at_Q, 0, bits)
    check_inputs(check_at_S, at_Q if check_at_Q is None else check_at_Q, 0, bits)
    high = min(63, bits)
    halves = share(net, at_Q)
    label = each(position, one_hot_of_classes(net, Shares(halves.A, halves.S + at_S), bits))
    halves = halves if check_at_Q is None else share(net, check_at_Q)
    checked = each(torch.movedim, Shares(halves.A, halves.S + check_at_S), -1, 0)
    below = -bit_to_ring(net, drelu(net, open_masked(net, checked), high), checked.shape) + 1
    while (count := below.shape[0]) > 1:
        left = multiply(net, torch.mul, below[: count // 2], below[count // 2 : count // 2 * 2])
        below = each(concatenate, left, below[count // 2 * 2 :])
    reached = -below[0] + 1
    return reveal(net, multiply(net, torch.mul, reached, label + 1) + UNANSWERED)
